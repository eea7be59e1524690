//! Owner side of the socket.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::Rng;
use mooncake_core::fork::ParentOnly;
use mooncake_core::{Error, ErrorKind, Result};
use mooncake_transport::admission::{ConnectionSlot, Connections, ListenerLimits};
use tokio::net::{UnixListener, UnixStream};
use tracing::debug;

use crate::owner::{Owner, PeerProcess, SharedObject};
use crate::record::Record;
use crate::socket::{RecordSocket, Trust};

/// Creates a listener and its name in the abstract namespace. The name is unique, begins with the
/// name of the transport, and disappears with the listener.
///
/// # Errors
/// Returns an error if the system has no such sockets.
pub fn listen(transport: &str) -> Result<(ParentOnly<UnixListener>, String)> {
    let mut rng = Rng::from_os();
    let name = format!("mooncake-{transport}-{:016x}{:016x}", rng.next_u64(), rng.next_u64());
    let listener = UnixListener::bind(format!("\0{name}"))
        .map_err(|e| Error::from(e).context("the socket for peers of this host"))?;
    Ok((ParentOnly::new(listener), name))
}

/// Serves peers until the future is dropped.
pub async fn serve<S: SharedObject>(
    owner: Arc<Owner<S>>,
    listener: ParentOnly<UnixListener>,
    response_timeout: Duration,
) {
    let mut connections = Connections::new(ListenerLimits {
        idle: Some(response_timeout),
        ..ListenerLimits::new("same_host", owner.max_served(), 16)
    });
    loop {
        let (stream, _) = connections.accept(|cx| listener.poll_accept(cx)).await;
        let owner = owner.clone();
        connections.admit(|slot| async move {
            if let Err(error) = serve_peer(&owner, stream, response_timeout, &slot).await {
                debug!(%error, "a peer on this host is turned away");
            }
        });
    }
}

async fn serve_peer<S: SharedObject>(
    owner: &Arc<Owner<S>>,
    stream: UnixStream,
    limit: Duration,
    slot: &ConnectionSlot,
) -> Result<()> {
    let socket = Arc::new(RecordSocket::new(stream, Trust::SameUser)?);
    // A new peer sends a request at once.
    if !with_timeout(limit, receive_request(&socket)).await? {
        return Ok(());
    }
    // A peer that has received memory keeps its connection until it ends, because it may be in the
    // middle of a copy.
    if !slot.work() {
        return Ok(());
    }
    let mut served = ServedPeer { peer: owner.add_peer(socket)?, owner, is_finished: false };
    let result = serve_requests(owner, &served.peer, limit).await;
    // The peer may be in the middle of a copy, so it stays listed until it has closed its end.
    while !matches!(Record::receive(&served.peer.socket).await, Err(error) if error.kind() != ErrorKind::Invalid)
    {
    }
    // The kernel closes the sockets of a killed peer before its devices have finished their work.
    if S::OUTLIVES_SOCKETS && served.peer.is_inside() {
        served.peer.socket.ended().await?;
    }
    served.is_finished = true;
    result
}

async fn serve_requests<S: SharedObject>(
    owner: &Owner<S>,
    peer: &PeerProcess,
    limit: Duration,
) -> Result<()> {
    let socket = &peer.socket;
    with_timeout(limit, async {
        Record::SlotTable.send(socket, Some(owner.slot_table().fd()?)).await?;
        Record::CopyCounters.send(socket, Some(peer.copy_counters.fd()?)).await?;
        owner.send_regions(socket).await
    })
    .await?;
    while receive_request(socket).await? {
        with_timeout(limit, owner.send_regions(socket)).await?;
    }
    Ok(())
}

/// Waits for a request. Returns false when the other end is closed.
async fn receive_request(socket: &RecordSocket) -> Result<bool> {
    match Record::receive(socket).await {
        Ok((Record::ListRegions, None)) => Ok(true),
        Ok((other, _)) => {
            Err(Error::invalid(format!("malformed request: expected ListRegions, received {other:?}")))
        }
        Err(error) if error.kind() == ErrorKind::Invalid => Err(error),
        Err(_) => Ok(false),
    }
}

async fn with_timeout<R>(limit: Duration, work: impl Future<Output = Result<R>>) -> Result<R> {
    tokio::time::timeout(limit, work).await.map_err(|_| Error::invalid("the peer neither asks nor reads"))?
}

/// Entry of a peer while its connection is served.
struct ServedPeer<'a, S: SharedObject> {
    peer: Arc<PeerProcess>,
    owner: &'a Arc<Owner<S>>,
    is_finished: bool,
}

impl<S: SharedObject> Drop for ServedPeer<'_, S> {
    fn drop(&mut self) {
        if self.is_finished {
            self.owner.remove_peer(&self.peer);
        } else {
            // The server stops. The peer is notified, but may still be in the middle of a copy,
            // which the closing of a region must know.
            self.peer.socket.shut_down();
        }
    }
}
