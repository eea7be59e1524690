//! Owner side of the socket.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::Rng;
use mooncake_core::fork::ParentOnly;
use mooncake_core::{Error, ErrorKind, Result};
use mooncake_transport::admission::{ConnectionSlot, Connections, ListenerLimits};
use tokio::net::{UnixListener, UnixStream};
use tracing::debug;

use crate::owner::{Owner, Shared, Visitor};
use crate::record::Record;
use crate::socket::{RecordSocket, Trust};

/// Creates a listener and its name in the abstract namespace. The name is unique, begins with the
/// name of the transport, and disappears with the listener.
///
/// # Errors
/// Returns an error if the system has no such sockets.
pub fn listen(wire: &str) -> Result<(ParentOnly<UnixListener>, String)> {
    let mut rng = Rng::from_os();
    let name = format!("mooncake-{wire}-{:016x}{:016x}", rng.next_u64(), rng.next_u64());
    let listener = UnixListener::bind(format!("\0{name}"))
        .map_err(|e| Error::from(e).context("the socket for peers of this host"))?;
    Ok((ParentOnly::new(listener), name))
}

/// Serves peers until the future is dropped.
pub async fn serve<S: Shared>(
    owner: Arc<Owner<S>>,
    listener: ParentOnly<UnixListener>,
    answer_timeout: Duration,
) {
    let mut connections = Connections::new(ListenerLimits {
        name: "same_host",
        slots: owner.max_served(),
        descriptor_share: 16,
        request: None,
        idle: Some(answer_timeout),
    });
    loop {
        let (stream, _) = connections.accept(|cx| listener.poll_accept(cx)).await;
        let owner = owner.clone();
        connections.admit(|slot| async move {
            if let Err(error) = attend(&owner, stream, answer_timeout, &slot).await {
                debug!(%error, "a peer on this host is turned away");
            }
        });
    }
}

async fn attend<S: Shared>(
    owner: &Arc<Owner<S>>,
    stream: UnixStream,
    limit: Duration,
    slot: &ConnectionSlot,
) -> Result<()> {
    let wire = Arc::new(RecordSocket::new(stream, Trust::SameUser)?);
    // A new peer sends a request at once.
    if !in_time(limit, ask(&wire)).await? {
        return Ok(());
    }
    // A peer that has received memory keeps its connection until it ends, because it may be in the
    // middle of a copy.
    if !slot.work() {
        return Ok(());
    }
    let mut visitor = Listed { visitor: owner.admit(wire)?, owner, left: false };
    let result = attend_to(owner, &visitor.visitor, limit).await;
    // The peer may be in the middle of a copy, so it stays listed until it has closed its end.
    while !matches!(Record::receive(&visitor.visitor.wire).await, Err(error) if error.kind() != ErrorKind::Invalid)
    {
    }
    // The kernel closes the sockets of a killed peer before its devices have finished their work.
    if S::OUTLIVES_SOCKETS && visitor.visitor.is_inside() {
        visitor.visitor.wire.ended().await?;
    }
    visitor.left = true;
    result
}

async fn attend_to<S: Shared>(owner: &Owner<S>, visitor: &Visitor, limit: Duration) -> Result<()> {
    let wire = &visitor.wire;
    in_time(limit, async {
        Record::Board.send(wire, Some(owner.board().fd()?)).await?;
        Record::Page.send(wire, Some(visitor.page.fd()?)).await?;
        owner.answer(wire).await
    })
    .await?;
    while ask(wire).await? {
        in_time(limit, owner.answer(wire)).await?;
    }
    Ok(())
}

/// Waits for a request. Returns false when the other end is closed.
async fn ask(wire: &RecordSocket) -> Result<bool> {
    match Record::receive(wire).await {
        Ok((Record::Ask, None)) => Ok(true),
        Ok((other, _)) => Err(Error::invalid(format!("malformed request: expected Ask, received {other:?}"))),
        Err(error) if error.kind() == ErrorKind::Invalid => Err(error),
        Err(_) => Ok(false),
    }
}

async fn in_time<R>(limit: Duration, work: impl Future<Output = Result<R>>) -> Result<R> {
    tokio::time::timeout(limit, work).await.map_err(|_| Error::invalid("the peer neither asks nor reads"))?
}

/// Entry of a peer while its connection is served.
struct Listed<'a, S: Shared> {
    visitor: Arc<Visitor>,
    owner: &'a Arc<Owner<S>>,
    left: bool,
}

impl<S: Shared> Drop for Listed<'_, S> {
    fn drop(&mut self) {
        if self.left {
            self.owner.dismiss(&self.visitor);
        } else {
            // The server stops. The peer is notified, but may still be in the middle of a copy,
            // which the closing of a region must know.
            self.visitor.wire.shut_down();
        }
    }
}
