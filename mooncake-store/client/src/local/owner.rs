//! Daemon side: the socket and the control connections of shared clients.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::Rng;
use mooncake_core::fork::ParentOnly;
use mooncake_core::ids::Uuid;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_ipc::socket::{RecordSocket, Trust, listen_at};
use mooncake_transport::Transport;
use mooncake_transport::admission::{Connections, ListenerLimits, Place};
use parking_lot::Mutex;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::guest::Guest;
use super::host::{DESCRIPTOR_SHARE, Owner, set};
use super::record::{Cause, Record};
use super::serve;
use super::server_config::{LocalServerConfig, LocalStats};
use crate::state::Client;
use mooncake_engine::transport_set::TransportSet;

/// Timeout for the rest of a request after its first bytes.
const CALL: Duration = Duration::from_secs(30);
/// Timeout for the first record of a new connection.
const INTRODUCTION: Duration = Duration::from_secs(5);

/// Server that serves shared clients with a client of the cluster, until it is stopped or dropped.
pub struct LocalServer<T: Transport = TransportSet> {
    owner: Arc<Owner<T>>,
    accepting: JoinHandle<()>,
}

impl<T: Transport> LocalServer<T> {
    /// Listens at the path of the configuration, on the current tokio runtime.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` if another process serves that path, or if the socket cannot be
    /// created there.
    pub fn start(client: Client<T>, config: LocalServerConfig) -> Result<Self> {
        let listener = listen_at(&config.path, config.mode)?;
        let owner = Arc::new(Owner {
            client,
            config,
            guests: Mutex::default(),
            rng: Mutex::new(Rng::from_os()),
            stopped: watch::Sender::new(false),
        });
        let accepting = tokio::spawn(accept(owner.clone(), listener));
        Ok(Self { owner, accepting })
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        &self.owner.config.path
    }

    /// Returns the statistics of the shared clients.
    pub fn stats(&self) -> LocalStats {
        let mut stats = LocalStats::default();
        let guests: Vec<_> = self.owner.guests.lock().values().cloned().collect();
        for guest in guests {
            stats.clients += 1;
            guest.count(&mut stats);
        }
        stats
    }

    /// Accepts no more calls, waits for the calls in progress, and closes every connection.
    pub async fn stop(mut self) {
        self.owner.stopped.send_replace(true);
        let _ = (&mut self.accepting).await;
    }
}

impl<T: Transport> Drop for LocalServer<T> {
    fn drop(&mut self) {
        self.owner.stopped.send_replace(true);
        // Another daemon has a socket at this path only if this socket was removed by hand. That
        // daemon then has to restore its socket.
        let _ = std::fs::remove_file(&self.owner.config.path);
    }
}

impl<T: Transport> fmt::Debug for LocalServer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalServer").field("path", &self.path()).field("stats", &self.stats()).finish()
    }
}

async fn accept<T: Transport>(owner: Arc<Owner<T>>, listener: ParentOnly<UnixListener>) {
    let config = &owner.config;
    let mut connections = Connections::new(ListenerLimits {
        name: "local",
        places: config.places(),
        descriptor_share: DESCRIPTOR_SHARE,
        request: Some(CALL),
        idle: None,
    });
    let mut stopped = owner.stopped.subscribe();
    loop {
        let (stream, _) = tokio::select! {
            biased;
            () = set(&mut stopped) => break,
            accepted = connections.accept(|cx| listener.poll_accept(cx)) => accepted,
        };
        let owner = owner.clone();
        connections.admit(|place| async move {
            if let Err(error) = attend(&owner, stream, &place).await {
                tracing::info!(%error, "a local process is turned away");
            }
        });
    }
    drop(listener);
    // Connections finish their calls, because memory must not be released during a transfer.
    connections.finish(Duration::MAX).await;
}

async fn attend<T: Transport>(owner: &Arc<Owner<T>>, stream: UnixStream, place: &Place) -> Result<()> {
    let trust = if owner.config.is_private() { Trust::SameUser } else { Trust::Anybody };
    let socket = RecordSocket::new(stream, trust)?;
    let mut stopped = owner.stopped.subscribe();
    let introduced = tokio::select! {
        introduced = tokio::time::timeout(INTRODUCTION, socket.receive()) => introduced,
        () = set(&mut stopped) => return Ok(()),
    };
    let (bytes, _) = introduced.map_err(|_| Error::invalid("it connected and said nothing"))??;
    // Control connections are never replaced by others. Their number is limited, and a timeout
    // closes the silent ones.
    if !place.work() {
        return Ok(());
    }
    match Record::decode(&bytes) {
        Ok(Record::Hello) => welcome(owner, &socket, stopped).await,
        Ok(Record::Join { guest }) => {
            let found = owner.guests.lock().get(&guest).cloned();
            match found
                .map(|guest| guest.admit_connection(owner.config.max_calls))
                .unwrap_or_else(|| Err(Record::refused(ErrorCode::RpcFail, Cause::Unknown, 0)))
            {
                Ok(seat) => {
                    socket.send(&Record::DONE.encode(), None).await?;
                    serve::run(owner, seat, socket.into_stream(), place, stopped).await
                }
                Err(refusal) => socket.send(&refusal.encode(), None).await,
            }
        }
        Ok(other) => refuse(&socket, Error::invalid(format!("{other:?} to begin with"))).await,
        Err(error) => refuse(&socket, error).await,
    }
}

/// Sends the reason in a record that every version can read, and returns the error.
async fn refuse(socket: &RecordSocket, error: Error) -> Result<()> {
    let cause = if error.code() == ErrorCode::InvalidVersion { Cause::Version } else { Cause::Nonsense };
    socket.send(&Record::refused(error.code(), cause, 0).encode(), None).await?;
    Err(error)
}

/// Serves the control connection of a shared client until it closes, or sends no record within the
/// timeout.
async fn welcome<T: Transport>(
    owner: &Arc<Owner<T>>,
    socket: &RecordSocket,
    mut stopped: watch::Receiver<bool>,
) -> Result<()> {
    let id = {
        let mut rng = owner.rng.lock();
        Uuid::new(rng.next_u64(), rng.next_u64())
    };
    let user = socket.peer_user();
    let guest = Arc::new(Guest::new(socket.peer_pid(), user, id.first >> 1));
    let exceeded = {
        let mut guests = owner.guests.lock();
        let of_user = guests.values().filter(|other| other.user() == user).count();
        let (most, most_of_a_user) = (owner.most_guests(), owner.most_guests_of_a_user());
        let exceeded = match () {
            () if guests.len() >= most => Some(most),
            () if of_user >= most_of_a_user => Some(most_of_a_user),
            () => None,
        };
        if exceeded.is_none() {
            guests.insert(id, guest.clone());
        }
        exceeded
    };
    if let Some(limit) = exceeded {
        tracing::warn!(process = guest.process(), user, limit, "local process refused: too many are served");
        let refused = Record::refused(ErrorCode::NoAvailableHandle, Cause::Guests, limit as u64);
        return socket.send(&refused.encode(), None).await;
    }
    let _listed = Listed { owner, id, guest: &guest };
    tracing::info!(process = guest.process(), "a local process joins");
    let silence_ms = u32::try_from(owner.config.silence.as_millis()).unwrap_or(u32::MAX);
    let welcome = Record::Welcome { guest: id, calls: owner.config.max_calls, silence_ms };
    socket.send(&welcome.encode(), None).await?;
    loop {
        let next = tokio::select! {
            next = tokio::time::timeout(owner.config.silence, socket.receive()) => next,
            () = set(&mut stopped) => return Ok(()),
        };
        let Ok(received) = next else {
            tracing::warn!(process = guest.process(), "a local process is silent, and forgotten");
            return Ok(());
        };
        let (bytes, file) = match received {
            Ok(received) => received,
            // The shared client has closed the connection.
            Err(error) if error.code() != ErrorCode::InvalidParams => return Ok(()),
            Err(error) => return refuse(socket, error).await,
        };
        let answer = match Record::decode(&bytes) {
            Ok(Record::Ping) => Record::DONE,
            Ok(Record::Share { memory, offset, len }) => {
                match guest.share(&owner.client, owner.config.max_memory, (memory, offset, len), file) {
                    Ok(()) => Record::DONE,
                    Err(refusal) => refusal,
                }
            }
            Ok(Record::Unshare { memory }) => {
                guest.unshare(memory);
                Record::DONE
            }
            Ok(other) => return refuse(socket, Error::invalid(format!("{other:?} in the middle"))).await,
            Err(error) => return refuse(socket, error).await,
        };
        let answered = tokio::time::timeout(owner.config.silence, socket.send(&answer.encode(), None)).await;
        answered.map_err(|_| Error::invalid("a local process does not read what it asked for"))??;
    }
}

/// Registration of a shared client while its control connection is served.
struct Listed<'a, T: Transport> {
    owner: &'a Arc<Owner<T>>,
    id: Uuid,
    guest: &'a Arc<Guest<T>>,
}

impl<T: Transport> Drop for Listed<'_, T> {
    fn drop(&mut self) {
        self.owner.guests.lock().remove(&self.id);
        self.guest.leave();
        tracing::info!(process = self.guest.process(), "a local process leaves");
    }
}
