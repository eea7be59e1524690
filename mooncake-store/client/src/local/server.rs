//! Daemon side: the socket and the control connections of shared clients.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use mooncake_core::clock::Rng;
use mooncake_core::{Error, Result};
use mooncake_ipc::socket::{RecordSocket, Trust, listen_at};
use mooncake_transport::Transport;
use mooncake_transport::admission::{ConnectionSlot, Connections, ListenerLimits};
use parking_lot::Mutex;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::daemon::{DESCRIPTOR_SHARE, Daemon};
use super::hello;
use super::server_config::{LocalServerConfig, LocalStats};
use super::session::{FIRST_CALL_TIMEOUT, Session};
use super::shared_client::wait_until_set;
use super::socket_file::{BoundListener, SocketFile};
use crate::state::Client;
use mooncake_engine::transport_set::TransportSet;

/// Timeout for the rest of a request after its first bytes.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Server that serves shared clients with a client of the cluster, until it is stopped or dropped.
pub struct LocalServer<T: Transport = TransportSet> {
    daemon: Arc<Daemon<T>>,
    file: Arc<SocketFile>,
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
        let file = SocketFile::of_bound(&config.path);
        let listener = BoundListener { listener, file: file.clone() };
        let daemon = Arc::new(Daemon {
            client,
            config,
            shared_clients: Mutex::default(),
            rng: Mutex::new(Rng::from_os()),
            stopped: watch::Sender::new(false),
        });
        let accepting = tokio::spawn(accept(daemon.clone(), listener));
        Ok(Self { daemon, file, accepting })
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        &self.daemon.config.path
    }

    /// Returns the statistics of the shared clients.
    pub fn stats(&self) -> LocalStats {
        let mut stats = LocalStats::default();
        let shared_clients: Vec<_> = self.daemon.shared_clients.lock().values().cloned().collect();
        for shared_client in shared_clients {
            stats.clients += 1;
            shared_client.count(&mut stats);
        }
        stats
    }

    /// Removes the socket, accepts no more calls, waits for the calls in progress, and closes every
    /// connection.
    pub async fn stop(mut self) {
        self.daemon.stopped.send_replace(true);
        let _ = (&mut self.accepting).await;
    }
}

impl<T: Transport> Drop for LocalServer<T> {
    fn drop(&mut self) {
        self.daemon.stopped.send_replace(true);
        // After a stop the file is removed already, and the path may belong to a successor.
        self.file.remove();
    }
}

impl<T: Transport> fmt::Debug for LocalServer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalServer").field("path", &self.path()).field("stats", &self.stats()).finish()
    }
}

async fn accept<T: Transport>(daemon: Arc<Daemon<T>>, bound: BoundListener) {
    let config = &daemon.config;
    let mut connections = Connections::new(ListenerLimits {
        request: Some(REQUEST_TIMEOUT),
        ..ListenerLimits::new("local", config.slots(), DESCRIPTOR_SHARE)
    });
    let mut stopped = daemon.stopped.subscribe();
    loop {
        let (stream, _) = tokio::select! {
            biased;
            () = wait_until_set(&mut stopped) => break,
            accepted = connections.accept(|cx| bound.listener.poll_accept(cx)) => accepted,
        };
        let daemon = daemon.clone();
        connections.admit(|slot| async move {
            if let Err(error) = serve_connection(&daemon, stream, &slot).await {
                tracing::info!(%error, "a local process is turned away");
            }
        });
    }
    // A successor may listen at the path from now on.
    drop(bound);
    // Connections finish their calls, because memory must not be released during a transfer.
    connections.finish(Duration::MAX).await;
}

async fn serve_connection<T: Transport>(
    daemon: &Arc<Daemon<T>>,
    stream: UnixStream,
    slot: &ConnectionSlot,
) -> Result<()> {
    let trust = if daemon.config.is_private() { Trust::SameUser } else { Trust::AnyUser };
    let socket = RecordSocket::new(stream, trust)?;
    let mut stopped = daemon.stopped.subscribe();
    let received = tokio::select! {
        received = tokio::time::timeout(FIRST_CALL_TIMEOUT, socket.receive()) => received,
        () = wait_until_set(&mut stopped) => return Ok(()),
    };
    let (hello_record, file) = received.map_err(|_| Error::invalid("it connected and said nothing"))??;
    if !slot.work() {
        return Ok(());
    }
    // Other versions can read this response, too.
    socket.send(&hello::encode(), None).await?;
    hello::check(&hello_record)?;
    let session = Session {
        daemon: daemon.clone(),
        process: socket.peer_pid(),
        user: socket.peer_user(),
        file: Mutex::new(file),
        role: OnceLock::new(),
    };
    session.serve(socket.into_stream(), slot).await
}
