//! The light client: how it is set up, and what it consists of.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use mooncake_core::clock::{SharedClock, SystemClock};
use mooncake_core::memory::HostMemoryOptions;
use mooncake_core::{Error, Result};
use mooncake_transport::same_host::socket::Trust;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};

use super::link::{self, Link};
use super::shared::Command;
use super::shared::{Memories, Pool};
use super::{DEFAULT_PORT, default_path};

/// How a light client joins its owner.
#[derive(Clone, Debug)]
pub struct LocalConfig {
    /// The owner: the path of its socket, or `host:port` or `port` for the path that owners take by
    /// themselves.
    pub address: String,
    /// Bytes of memory through which values travel that are not in shared memory already. A value
    /// for which it has no room gets memory of its own.
    pub buffer: u64,
    /// How memory is allocated.
    pub memory: HostMemoryOptions,
    /// Longest time any one operation takes.
    pub timeout: Duration,
    /// The clock of deadlines.
    pub clock: SharedClock,
}

impl Default for LocalConfig {
    fn default() -> Self {
        Self {
            address: format!("127.0.0.1:{DEFAULT_PORT}"),
            buffer: 16 << 20,
            memory: HostMemoryOptions::default(),
            timeout: Duration::from_secs(10),
            clock: SystemClock::shared(),
        }
    }
}

impl LocalConfig {
    /// An owner at a path or port, and otherwise the defaults.
    pub fn at(address: impl Into<String>) -> Self {
        Self { address: address.into(), ..Self::default() }
    }

    /// Where the socket is, and who may serve it: at a path that was named, whoever does; at one
    /// that anybody could take, only our own user or root.
    fn socket(&self) -> Result<(PathBuf, Trust)> {
        if self.address.contains('/') {
            return Ok((PathBuf::from(&self.address), Trust::Anybody));
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

/// A member's deputy: makes the calls of a [`Client`](crate::Client) through an owner on this host,
/// with memory that both see. Clones are the same light client; the last one dropped ends it.
///
/// Values in memory of [`alloc`](Self::alloc), or in memory that was
/// [`register`](Self::register)ed, are not copied on their way; others are copied once.
///
/// Every operation ends within [`LocalConfig::timeout`]. While no owner answers, all fail at once
/// with `RPC_FAIL`; when one is back at the same path they work again. All futures may be dropped
/// at any point: memory that a call names stays set aside until the owner has ended it.
///
/// It lives on the tokio runtime it was connected on, which must keep running: the owner takes
/// silence for death.
#[derive(Clone)]
pub struct LocalClient {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub(super) config: LocalConfig,
    pub(super) path: PathBuf,
    pub(super) runtime: Handle,
    pub(super) link: watch::Receiver<Link>,
    pub(super) commands: mpsc::UnboundedSender<Command>,
    pub(super) memories: Arc<Memories>,
    pub(super) pool: Option<Pool>,
    /// Longest value read of late, for the guess at the next one.
    pub(super) longest: AtomicU64,
}

impl LocalClient {
    /// Joins the owner.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for an address that is none, kind `Unavailable` when nobody serves it,
    /// `INVALID_VERSION` (both versions are named) when it is of another release,
    /// `NO_AVAILABLE_HANDLE` when the owner has a limit that would be passed.
    pub async fn connect(config: LocalConfig) -> Result<Self> {
        let runtime = Handle::try_current().map_err(|_| {
            Error::invalid("a light client is connected on a tokio runtime, and there is none here")
        })?;
        let (path, trust) = config.socket()?;
        let (commands, orders) = mpsc::unbounded_channel();
        let memories = Arc::new(Memories::default());
        let (state, link) = link::start(&path, trust, memories.clone(), orders).await?;
        let mut client = Inner {
            config,
            path,
            runtime: runtime.clone(),
            link,
            commands,
            memories,
            pool: None,
            longest: AtomicU64::new(0),
        };
        runtime.spawn(state);
        client.pool = client.new_pool().await?;
        Ok(Self { inner: Arc::new(client) })
    }

    /// How it was set up.
    pub fn config(&self) -> &LocalConfig {
        &self.inner.config
    }

    /// Whether the owner is there, as far as is known.
    pub fn is_connected(&self) -> bool {
        matches!(*self.inner.link.borrow(), Link::Up(_))
    }

    /// Waits until the owner is there (again).
    pub async fn connected(&self) {
        let mut link = self.inner.link.clone();
        // An error means that the task is gone, and with it the runtime.
        let _ = link.wait_for(|link| matches!(link, Link::Up(_))).await;
    }

    /// Bytes of its buffer in use: calls under way, and values that are held.
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
