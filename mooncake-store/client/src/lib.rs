//! The client: puts objects into the cluster's memory and reads them out of it, and offers memory of its own.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod buffers;
mod builder;
mod cache;
mod checksum;
mod config;
mod deadline;
mod disk;
mod get;
mod heartbeat;
mod inventory;
#[cfg(feature = "local")]
pub mod local;
mod located;
mod metrics;
mod mount;
mod names;
mod objects;
mod overcommit;
#[cfg(feature = "http")]
mod pages;
mod peers;
mod promise;
mod put;
mod ranges;
mod remount;
mod room;
mod send;
mod sessions;
mod staging;
mod summary;
mod tasks;
mod version;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::time::Duration;

use mooncake_core::clock::Rng;
use mooncake_core::fork::ParentOnly;
use mooncake_core::ids::ClientId;
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_transport::engine::{Engine, LookUps, Target};
use mooncake_transport::{Directory, Transport};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::watch;

pub use self::builder::{BuiltIn, ClientBuilder, Given, MasterHandle, Setting, Wires};
pub use self::cache::{HotCacheConfig, HotCacheStats};
pub use self::config::{ClientConfig, MAX_TIMEOUT};
#[cfg(all(feature = "disk", feature = "testkit"))]
pub use self::disk::DiskFaults;
pub use self::disk::OffloadConfig;
#[cfg(feature = "disk")]
pub use self::disk::{DiskReport, FileReport};
pub use self::inventory::SegmentFile;
pub use self::located::Located;
pub use self::metrics::{Begun, Metrics, Operation};
pub use self::objects::ReadInto;
#[cfg(feature = "http")]
pub use self::pages::ClientPages;
pub use self::put::PutOutcome;
pub use self::ranges::{RangeOutcome, RangeRead};
pub use self::sessions::{RangeWrite, Reservation};
pub use self::version::MASTER_VERSIONS;

/// Parts of the client that the programs of the store share.
#[doc(hidden)]
pub mod programs {
    pub use super::builder::place as master_place;
    pub use super::config::{host_id, join_port, split_port};
    pub use super::version::check as check_version;
}

use self::cache::HotCache;
pub(crate) use self::deadline::Deadline;
use self::inventory::Inventory;
use self::mount::{Mounted, Moving};
use self::peers::Unreachable;
use self::staging::Staging;
use mooncake_engine::transport_set::TransportSet;
use mooncake_protocol::api::{Caller, MasterApi};

/// A member of the cluster. Clones are the same member; [`close`](Client::close) or dropping the last one ends it.
///
/// Every operation ends within [`ClientConfig::timeout`]. What the rest of the cluster suffers comes out as one of three
/// things: a *miss* (`None`), a put that was not stored (an error of kind `NoSpace`, `Unavailable` or `Timeout`), or an
/// answer that came too late to be trusted (`Expired`). None of them needs more than carrying on without the object.
///
/// A miss is also what a read comes to when every replica's owner is dead: the master may take some seconds to learn
/// of it. A put whose space was granted at a dead member is placed elsewhere, as long as there is time.
///
/// All futures may be dropped at any point. A put that is dropped half-way is taken back in the background.
///
/// A thread that blocks on one operation after the other is woken sooner when it does so [`here`](mooncake_transport::here()):
/// `runtime.block_on(here(client.get(key)))`.
pub struct Client<T: Transport = TransportSet> {
    inner: Arc<Inner<T>>,
}

pub(crate) struct Inner<T: Transport> {
    config: ClientConfig,
    id: ClientId,
    /// What the master and other members call us.
    name: String,
    /// What a peer opens to reach our memory.
    endpoint: String,
    protocol: String,
    master: Arc<dyn MasterApi>,
    // Before the engine: memory is deregistered while the wires still stand.
    segments: Mutex<Vec<Mounted<T>>>,
    /// Segments whose memory has gone elsewhere and is not registered there yet.
    moving: Mutex<Vec<Moving>>,
    inventory: tokio::sync::Mutex<Inventory>,
    promises: parking_lot::Mutex<promise::Promises>,
    /// Looks at objects of before, while the turn is its own.
    announcing: Mutex<Option<tokio::task::JoinHandle<()>>>,
    announcing_turn: AtomicU64,
    /// Told when announcing is to stop.
    announcing_stopped: Arc<tokio::sync::Notify>,
    /// Held while segments come and go, so that the master's list and ours change in the same order.
    mounting: tokio::sync::Mutex<()>,
    #[cfg(feature = "disk")]
    disk: Mutex<Option<disk::Running<T>>>,
    /// Files that all clients share, if the master has a folder for them.
    #[cfg(feature = "disk")]
    files: Option<Arc<disk::Files>>,
    staging: Option<Staging<T>>,
    cache: Option<HotCache<T>>,
    engine: Engine<T>,
    /// It was there before us, and stays.
    keeps_engine: bool,
    directory: Directory,
    unreachable: Unreachable,
    owners: disk::Owners,
    metrics: Option<Arc<Metrics>>,
    rng: Mutex<Rng>,
    turn: AtomicUsize,
    runtime: Handle,
    closed: watch::Sender<bool>,
    /// Tasks of the master's that may be under way at once.
    working: tokio::sync::Semaphore,
    heart: Mutex<Option<tokio::task::JoinHandle<()>>>,
    /// Keeps our port of the name ours.
    _reserved: Option<ParentOnly<socket2::Socket>>,
}

impl Client {
    /// Begins to describe a client. See [`ClientBuilder`].
    pub fn builder() -> ClientBuilder {
        ClientBuilder::new()
    }
}

impl<T: Transport> Client<T> {
    /// Its number in the cluster.
    pub fn id(&self) -> ClientId {
        self.inner.id
    }

    /// Its name, `host:port`.
    pub fn hostname(&self) -> &str {
        &self.inner.name
    }

    /// How it was set up.
    pub fn config(&self) -> &ClientConfig {
        &self.inner.config
    }

    /// The engine under it, for transfers beside the store.
    pub fn engine(&self) -> &Engine<T> {
        &self.inner.engine
    }

    /// Bytes of the local buffer in use now: transfers under way, and values that [`get`](Client::get) gave out and that
    /// are still held.
    pub fn local_buffer_used(&self) -> u64 {
        self.inner.staging.as_ref().map_or(0, Staging::used)
    }

    /// What the hot cache holds and has done; `None` when there is none ([`ClientConfig::hot_cache`]).
    pub fn hot_cache(&self) -> Option<HotCacheStats> {
        self.inner.cache.as_ref().map(HotCache::stats)
    }

    /// What the disk holds and has done; `None` when there is none ([`ClientConfig::offload`]).
    #[cfg(feature = "disk")]
    pub fn disk(&self) -> Option<DiskReport> {
        self.inner.disk.lock().as_ref().map(disk::Running::report)
    }

    /// Takes the disk back, if there is one: what lies there can be read no more, and stays there for the next client.
    #[cfg(feature = "disk")]
    pub async fn close_disk(&self) {
        self.inner.close_disk(&self.inner.deadline()).await;
    }

    /// Whether the master answers.
    pub async fn is_healthy(&self) -> bool {
        let inner = &self.inner;
        inner.usable().is_ok() && inner.deadline().bound("ping", inner.master.ping(inner.id)).await.is_ok()
    }

    /// Leaves the cluster: takes all memory back and stops. Objects in it are gone, but for those in a [file](ClientConfig::segment_file), which are the next
    /// process's: the master is not told, and gives them up when nobody comes in time. May be repeated; every other operation is refused afterwards.
    ///
    /// # Errors
    /// The master could not be told. The client is closed all the same; the master finds out by itself.
    pub async fn close(&self) -> Result<()> {
        self.inner.closed.send_replace(true);
        let heart = self.inner.heart.lock().take();
        if let Some(heart) = heart {
            // It stops by itself; waiting keeps it from mounting again what is taken back here.
            let _ = heart.await;
        }
        self.inner.stop_announcing().await;
        let deadline = self.inner.deadline();
        #[cfg(feature = "disk")]
        if let Some(files) = &self.inner.files {
            let idle = async {
                files.idle().await;
                Ok(())
            };
            if let Err(error) = deadline.bound("files that are being written", idle).await {
                tracing::warn!("{error}");
            }
        }
        #[cfg(feature = "disk")]
        self.inner.close_disk(&deadline).await;
        let mut outcome = Ok(());
        // A mount that was under way is over; the next one sees that the client is closed.
        let _changing = self.inner.mounting.lock().await;
        self.inner.moving.lock().clear();
        for id in self.segments() {
            if self.inner.segments.lock().iter().any(|mounted| mounted.id() == id && mounted.is_lasting()) {
                outcome = outcome.and(self.inner.take_inventory(&deadline).await.map(drop));
                mount::drop_region(self.inner.take(id)).await?;
                continue;
            }
            let unmounted = self.inner.unmount_listed(id, &deadline).await;
            if let Err(error) = unmounted {
                mount::drop_region(self.inner.take(id)).await?;
                outcome = outcome.and(Err(error));
            }
        }
        if self.inner.keeps_engine {
            return outcome;
        }
        let left = deadline.bound("leaving the directory", self.inner.engine.close()).await;
        outcome.and(left)
    }

    fn start_heartbeat(&self) {
        let mut heart = self.inner.heart.lock();
        if heart.is_none() && !*self.inner.closed.borrow() {
            let beat = heartbeat::run(Arc::downgrade(&self.inner), self.inner.closed.subscribe());
            *heart = Some(self.inner.runtime.spawn(beat));
        }
    }
}

impl<T: Transport> Inner<T> {
    fn deadline(&self) -> Deadline {
        Deadline::after(&self.config.clock, self.config.timeout)
    }

    fn caller(&self, attempt: u64) -> Caller<'_> {
        Caller { client: self.id, tenant: &self.config.tenant, attempt }
    }

    /// Whether the wire takes registered memory only.
    fn needs_registration(&self) -> bool {
        self.engine.transport().capabilities().needs_registration
    }

    /// Refuses what comes after `close`.
    fn usable(&self) -> Result<()> {
        if *self.closed.borrow() {
            return Err(Error::invalid("the client is closed"));
        }
        Ok(())
    }

    /// A way to the member at an endpoint.
    async fn reach(&self, endpoint: &str, deadline: &Deadline) -> Result<Target<T>> {
        self.unreachable.check(endpoint)?;
        let reached = deadline.bound("reaching a member", self.engine.open(endpoint)).await;
        if let Err(error) = &reached {
            self.failed(endpoint, error);
        }
        reached.map_err(|error| error.context(format!("member {endpoint}")))
    }

    /// Ways to the owners of memory, each for itself.
    async fn reach_owners(&self, owners: &[Owner], deadline: &Deadline) -> Vec<Reached<T>> {
        match owners {
            [(one, named)] => vec![self.reach_owner(one, *named, deadline).await],
            many => {
                let reached = many.iter().map(|(one, named)| self.reach_owner(one, *named, deadline));
                futures::future::join_all(reached).await
            }
        }
    }

    /// Ways to the owners of memory that the master granted, each for itself. `known` is from before the master was asked.
    async fn reach_granted(
        &self,
        endpoints: &[String],
        known: LookUps,
        deadline: &Deadline,
    ) -> Vec<Reached<T>> {
        match endpoints {
            [one] => vec![self.reach_owner(one, Some(known), deadline).await],
            many => {
                let reached = many.iter().map(|one| self.reach_owner(one, Some(known), deadline));
                futures::future::join_all(reached).await
            }
        }
    }

    async fn reach_owner(&self, endpoint: &str, named: Option<LookUps>, deadline: &Deadline) -> Reached<T> {
        let mut target = self.reach(endpoint, deadline).await.map_err(Unreached::Failed)?;
        let Some(before) = named else { return Ok(target) };
        // Its mount is under way, or it is gone again.
        for pause in MOUNT_PAUSES {
            if !target.awaits_mount() {
                break;
            }
            self.engine.forget(endpoint);
            tokio::time::sleep(pause.min(deadline.left())).await;
            target = self.reach(endpoint, deadline).await.map_err(Unreached::Failed)?;
        }
        if target.awaits_mount() {
            self.engine.forget(endpoint);
            let text = format!("cannot use memory of member {endpoint}: it is not mounted");
            return Err(Unreached::Failed(Error::new(ErrorCode::TransferFail, text)));
        }
        target.pinned(before).map_err(|error| {
            // What failed was an earlier process.
            self.unreachable.answered(endpoint);
            Unreached::Newer(error)
        })
    }

    /// Learns from a transfer whether its member answers.
    fn note(&self, endpoint: &str, result: &Result<()>) {
        match result {
            Ok(()) => self.unreachable.answered(endpoint),
            Err(error) => self.failed(endpoint, error),
        }
    }

    fn failed(&self, endpoint: &str, error: &Error) {
        // It may be back with other memory or at another port: looked up again, when it is time.
        self.engine.forget(endpoint);
        if matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout) {
            self.unreachable.failed(endpoint);
        }
    }

    /// Whether that endpoint is on our host, as far as its name tells.
    fn is_near(&self, endpoint: &str) -> bool {
        config::split_port(endpoint).0 == config::split_port(&self.endpoint).0
    }
}

/// Pauses between look-ups of a member whose mount is under way.
const MOUNT_PAUSES: [Duration; 3] =
    [Duration::from_millis(5), Duration::from_millis(20), Duration::from_millis(80)];

/// Endpoint of the owner of memory. If the master named the memory: what the engine knew before the master was asked.
type Owner = (String, Option<LookUps>);

/// A way to the owner of memory that an answer of the master names, good for that memory only.
type Reached<T> = Result<Target<T>, Unreached>;

/// Reason why memory that an answer of the master names cannot be used.
#[derive(Debug)]
enum Unreached {
    /// The member does not answer.
    Failed(Error),
    /// The member was found after the master was asked, so the answer may be about an earlier process. The master has to be asked again.
    Newer(Error),
}

impl Unreached {
    fn error(&self) -> &Error {
        match self {
            Unreached::Failed(error) | Unreached::Newer(error) => error,
        }
    }

    fn is_newer(&self) -> bool {
        matches!(self, Unreached::Newer(_))
    }
}

fn is_newer<T: Transport>(reached: &Reached<T>) -> bool {
    reached.as_ref().is_err_and(Unreached::is_newer)
}

impl<T: Transport> Clone for Client<T> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<T: Transport> fmt::Debug for Client<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("id", &self.inner.id)
            .field("name", &self.inner.name)
            .field("segments", &self.inner.segments.lock().len())
            .finish_non_exhaustive()
    }
}

impl<T: Transport> Drop for Inner<T> {
    fn drop(&mut self) {
        let mounted = std::mem::take(self.segments.get_mut());
        if mounted.is_empty() || *self.closed.borrow() {
            return;
        }
        // Best effort: it spares the others waiting for the master to find out.
        let (master, id) = (self.master.clone(), self.id);
        self.runtime.spawn(async move {
            for gone in mounted {
                if gone.is_lasting() {
                    let _ = mount::drop_region(Some(gone)).await;
                    continue;
                }
                let unmount = master.unmount(id, gone.id());
                let told = tokio::time::timeout(std::time::Duration::from_secs(1), unmount).await;
                if !matches!(told, Ok(Ok(()))) {
                    tracing::debug!(client = %id, "the master was not told that a client went away");
                }
                let _ = mount::drop_region(Some(gone)).await;
            }
        });
    }
}

/// Whether that means that nobody could give the bytes of an object: the cache has lost them, or as good as.
pub(crate) fn is_lost(error: &Error) -> bool {
    !matches!(error.kind(), ErrorKind::Expired | ErrorKind::Corrupt)
}

/// A key as messages show it: escaped, and cut where it is long.
fn shown(key: &[u8]) -> String {
    match key.get(..64) {
        Some(start) if key.len() > 64 => format!("\"{}\"..", start.escape_ascii()),
        _ => format!("\"{}\"", key.escape_ascii()),
    }
}
