//! Shared client: its settings, construction and state.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use mooncake_core::clock::{SharedClock, SystemClock};
use mooncake_core::memory::HostMemoryOptions;
use mooncake_core::{Error, Result};
use mooncake_ipc::socket::Trust;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};

use super::daemon_link::{self, DaemonLink};
use super::released::ReleasedObjects;
use super::shared::Command;
use super::shared::{Blocks, Memories, Pool};
use super::{DEFAULT_PORT, default_path};

/// Settings of a shared client.
#[derive(Clone, Debug)]
pub struct LocalConfig {
    /// Address of the daemon: the path of its socket, or `host:port` or `port` for the default
    /// path.
    pub address: String,
    /// Size in bytes of the buffer for values that do not lie in shared memory already. A value
    /// that does not fit into the buffer gets its own memory.
    pub buffer: u64,
    /// Options for the allocation of memory.
    pub memory: HostMemoryOptions,
    /// Admits memory that the host does not have now, as in
    /// [`ClientConfig::allow_overcommit`](crate::config::ClientConfig::allow_overcommit).
    pub allow_overcommit: bool,
    /// Longest duration of one operation.
    pub timeout: Duration,
    /// Clock of the deadlines.
    pub clock: SharedClock,
}

impl Default for LocalConfig {
    fn default() -> Self {
        Self {
            address: format!("127.0.0.1:{DEFAULT_PORT}"),
            buffer: 16 << 20,
            memory: HostMemoryOptions::default(),
            allow_overcommit: true,
            timeout: Duration::from_secs(10),
            clock: SystemClock::shared(),
        }
    }
}

impl LocalConfig {
    /// Returns the default settings with the address of a daemon.
    pub fn at(address: impl Into<String>) -> Self {
        Self { address: address.into(), ..Self::default() }
    }

    /// Returns the path of the socket and the users that may serve it. At an explicit path, every
    /// user is trusted. At a default path, which any user could create first, only the user of this
    /// process and root are trusted.
    fn socket(&self) -> Result<(PathBuf, Trust)> {
        if self.address.contains('/') {
            return Ok((PathBuf::from(&self.address), Trust::AnyUser));
        }
        let port = self.address.rsplit(':').next().and_then(|port| port.parse().ok());
        let port = port.ok_or_else(|| {
            Error::invalid(format!(
                "{:?} names no mooncake_client: give host:port of one on this host, or the path of its socket",
                self.address
            ))
        })?;
        Ok((default_path(port), Trust::SameUser))
    }
}

/// Shared client: makes the calls of a [`Client`](crate::Client) through a daemon on this host,
/// with memory that both map. Clones are handles of the same shared client; dropping the last one
/// ends it.
///
/// Values in memory of [`alloc`](Self::alloc), or in memory that was
/// [`register`](Self::register)ed, are not copied on the way. Other values are copied once.
///
/// Every operation ends within [`LocalConfig::timeout`]. While no daemon responds, all operations
/// fail at once with `RPC_FAIL`. They succeed again when a daemon serves the same path. All futures
/// may be dropped at any point: memory that a call names stays reserved until the daemon has
/// finished the call.
///
/// A shared client runs on the tokio runtime on which it was connected. That runtime must keep
/// running, because the daemon removes a shared client that sends no pings.
#[derive(Clone)]
pub struct LocalClient {
    pub(super) inner: Arc<LocalInner>,
}

pub(super) struct LocalInner {
    pub(super) config: LocalConfig,
    pub(super) path: PathBuf,
    pub(super) runtime: Handle,
    pub(super) link: watch::Receiver<DaemonLink>,
    pub(super) commands: mpsc::UnboundedSender<Command>,
    pub(super) memories: Arc<Memories>,
    pub(super) released: Arc<ReleasedObjects>,
    pub(super) pool: Option<Pool>,
    /// Memory for buffers that do not fit into the pool.
    pub(super) blocks: Blocks,
    /// Length in bytes of long values that were read recently, an estimate for the next read.
    pub(super) longest: AtomicU64,
}

impl LocalClient {
    /// Connects to the daemon.
    ///
    /// # Errors
    /// - `INVALID_PARAMS` for a malformed address,
    /// - kind `Unavailable` if no process serves the socket,
    /// - `INVALID_VERSION` if the daemon is of another release; the text names both versions,
    /// - `NO_AVAILABLE_HANDLE` if a limit of the daemon would be exceeded.
    pub async fn connect(config: LocalConfig) -> Result<Self> {
        let runtime = Handle::try_current()
            .map_err(|_| Error::invalid("cannot connect a shared client: no tokio runtime on this thread"))?;
        let (path, trust) = config.socket()?;
        let (commands, receiver) = mpsc::unbounded_channel();
        let memories = Arc::new(Memories::default());
        let released = Arc::<ReleasedObjects>::default();
        let state = daemon_link::start(&path, trust, memories.clone(), released.clone(), receiver);
        let (state, link) = state.await?;
        let mut client = LocalInner {
            config,
            path,
            runtime: runtime.clone(),
            link,
            commands,
            memories,
            released,
            pool: None,
            blocks: Blocks::default(),
            longest: AtomicU64::new(0),
        };
        runtime.spawn(state);
        client.pool = client.new_pool().await?;
        Ok(Self { inner: Arc::new(client) })
    }

    /// Returns the settings.
    pub fn config(&self) -> &LocalConfig {
        &self.inner.config
    }

    /// Returns true if the daemon is connected, as far as this process knows.
    pub fn is_connected(&self) -> bool {
        matches!(*self.inner.link.borrow(), DaemonLink::Connected(_))
    }

    /// Waits until a daemon is connected, possibly again after a failure.
    pub async fn connected(&self) {
        let mut link = self.inner.link.clone();
        // An error means that the task of the control connection is gone, and the runtime with it.
        let _ = link.wait_for(|link| matches!(link, DaemonLink::Connected(_))).await;
    }

    /// Returns the number of bytes of the buffer in use, by calls in progress and by values that
    /// the caller holds.
    pub fn buffer_used(&self) -> u64 {
        self.inner.pool.as_ref().map_or(0, Pool::used)
    }
}

impl fmt::Debug for LocalClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalClient")
            .field("path", &self.inner.path)
            .field("connected", &self.is_connected())
            .finish_non_exhaustive()
    }
}
