//! Handle of a client, the state that its clones and tasks share, and connections to other clients.

use mooncake_core::clock::Rng;
use mooncake_core::fork::ParentOnly;
use mooncake_core::host_port;
use mooncake_core::ids::ClientId;
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_engine::transport_set::TransportSet;
use mooncake_protocol::api::Caller;
use mooncake_protocol::master_client::MasterClient;
use mooncake_transport::Transport;
use mooncake_transport::engine::{Engine, LookUps, Target};
use parking_lot::Mutex;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::address_state::AddressState;
use crate::cache::HotCache;
use crate::config::{ClientConfig, RPC_ONLY};
use crate::deadline::Deadline;
use crate::disk::{DiskOwners, Files, Prefetches, own};
use crate::grants::ReservedSpaces;
use crate::inventory::Inventory;
use crate::issuer::{Issuer, RequestStamp};
use crate::metrics::Metrics;
use crate::mounted::{Mounted, Moving, drop_region};
use crate::peers::Unreachable;
use crate::promise::Promises;
use crate::read_numbers::ReadNumbers;
use crate::staging::Staging;

/// Client of a cluster. Clones are handles of the same client. [`close`](Client::close), or
/// dropping the last clone, ends the client.
///
/// Every operation ends within [`ClientConfig::timeout`]. A failure in the rest of the cluster has
/// one of three results:
///
/// - a *miss* (`None`),
/// - a put that was not stored (an error of kind `NoSpace`, `Unavailable` or `Timeout`),
/// - a response that arrived too late to be trusted (an error of kind `Expired`).
///
/// In all three cases the caller can continue without the object.
///
/// A read is also a miss if the owners of all replicas have failed. The master may need some
/// seconds to detect the failures. A put whose space was granted at a failed client is placed
/// elsewhere, as long as there is time.
///
/// All futures may be dropped at any point. A put that is dropped before its end is revoked in the
/// background.
///
/// A thread that blocks on one operation after another wakes up sooner inside
/// [`wait_inline`](mooncake_transport::wait_inline):
/// `runtime.block_on(wait_inline(client.get(key)))`.
pub struct Client<T: Transport = TransportSet> {
    pub(crate) inner: Arc<Inner<T>>,
}

pub(crate) struct Inner<T: Transport> {
    pub(crate) config: ClientConfig,
    pub(crate) id: ClientId,
    /// Name of this client, as the master and other clients know it.
    pub(crate) name: String,
    /// Endpoint that other clients open to reach the memory of this client.
    pub(crate) endpoint: String,
    pub(crate) protocol: String,
    pub(crate) master: MasterClient,
    // Dropped before the engine: memory is deregistered while the transports still exist.
    pub(crate) segments: Mutex<Vec<Mounted<T>>>,
    /// Segments whose memory has moved to other addresses and is not registered there yet.
    pub(crate) moving: Mutex<Vec<Moving>>,
    pub(crate) inventory: tokio::sync::Mutex<Inventory>,
    pub(crate) promises: parking_lot::Mutex<Promises>,
    /// Task that announces the objects of earlier masters. The task stops when
    /// `announcing_generation` changes.
    pub(crate) announcing: Mutex<Option<tokio::task::JoinHandle<()>>>,
    pub(crate) announcing_generation: AtomicU64,
    /// Notified when the announcement is to stop.
    pub(crate) announcing_stopped: Arc<tokio::sync::Notify>,
    /// Lock held while segments are mounted and unmounted, so that the lists of the master and of
    /// this client change in the same order.
    pub(crate) mounting: Arc<tokio::sync::Mutex<()>>,
    pub(crate) disk: own::Slot<T>,
    /// Files that all clients share, if the master has a directory for them.
    pub(crate) files: Option<Arc<Files>>,
    pub(crate) staging: Option<Staging<T>>,
    pub(crate) cache: Option<HotCache<T>>,
    pub(crate) engine: Engine<T>,
    /// True if the caller supplied the engine. Such an engine is not closed with the client.
    pub(crate) keeps_engine: bool,
    pub(crate) unreachable: Unreachable,
    pub(crate) address_state: Mutex<AddressState>,
    pub(crate) disk_owners: DiskOwners,
    pub(crate) prefetches: Arc<Prefetches>,
    pub(crate) metrics: Option<Arc<Metrics>>,
    pub(crate) rng: Mutex<Rng>,
    pub(crate) read_numbers: ReadNumbers,
    /// Space of reservations that are neither committed nor given back.
    pub(crate) reserved: ReservedSpaces,
    /// True once an object was stored: the cluster has had a segment.
    pub(crate) has_stored: AtomicBool,
    /// True once the present master has said that it requests no memory to be zeroed.
    pub(crate) zeroes_nothing: AtomicBool,
    pub(crate) next_replica: AtomicUsize,
    pub(crate) runtime: Handle,
    pub(crate) closed: watch::Sender<bool>,
    /// Permits for tasks of the master that run at the same time.
    pub(crate) task_permits: tokio::sync::Semaphore,
    pub(crate) heartbeat_task: Mutex<Option<tokio::task::JoinHandle<()>>>,
    /// Listening socket that reserves the port in the name of this client.
    pub(crate) _reserved: Option<ParentOnly<socket2::Socket>>,
    /// Address at which the ports listen, unless they listen at every one.
    pub(crate) bound: Option<IpAddr>,
}

impl<T: Transport> Client<T> {
    /// Returns the identifier of this client in the cluster.
    pub fn id(&self) -> ClientId {
        self.inner.id
    }

    /// Returns the address at which the ports of this client listen. `None` stands for every
    /// address.
    pub fn bound_address(&self) -> Option<IpAddr> {
        self.inner.bound
    }

    /// Returns the name of this client, `host:port`.
    pub fn hostname(&self) -> &str {
        &self.inner.name
    }

    /// Returns the settings of this client.
    pub fn config(&self) -> &ClientConfig {
        &self.inner.config
    }

    /// Returns the engine of this client, for transfers beside the store.
    pub fn engine(&self) -> &Engine<T> {
        &self.inner.engine
    }
}

impl<T: Transport> Inner<T> {
    pub(crate) fn deadline(&self) -> Deadline {
        Deadline::after(&self.config.clock, self.config.timeout)
    }

    pub(crate) fn caller(&self, attempt: u64) -> Caller<'_> {
        Caller { client: self.id, tenant: &self.config.tenant, attempt }
    }

    /// Returns whether the transport needs registered memory.
    pub(crate) fn needs_registration(&self) -> bool {
        self.engine.transport().capabilities().needs_registration
    }

    /// Returns the present time and look-ups, to be recorded before a request for addresses.
    pub(crate) fn request_stamp(&self) -> RequestStamp {
        RequestStamp { at: self.config.clock.now(), look_ups: self.engine.look_ups() }
    }

    /// Returns an error after `close`.
    pub(crate) fn usable(&self) -> Result<()> {
        if *self.closed.borrow() {
            return Err(Error::invalid("the client is closed"));
        }
        Ok(())
    }

    /// Returns an error after `close`, and for a client that transfers nothing
    /// ([`RPC_ONLY`]).
    pub(crate) fn can_transfer(&self) -> Result<()> {
        self.usable()?;
        if self.config.is_rpc_only() {
            return Err(Error::invalid(format!(
                "cannot transfer values: this client calls the master only. protocol={RPC_ONLY}; connect with protocol tcp or rdma"
            )));
        }
        Ok(())
    }

    /// Connects to the client at an endpoint.
    pub(crate) async fn reach(&self, endpoint: &str, deadline: &Deadline) -> Result<Target<T>> {
        self.unreachable.check(endpoint)?;
        let reached = deadline.bound("connecting to a client", self.engine.open(endpoint)).await;
        if let Err(error) = &reached {
            self.record_failure(endpoint, error);
        }
        reached.map_err(|error| error.context(format!("peer {endpoint}")))
    }

    /// Connects to the owners of memory. Each connection has an outcome of its own.
    pub(crate) async fn reach_owners(&self, owners: &[MemoryOwner], deadline: &Deadline) -> Vec<Reached<T>> {
        match owners {
            [(one, issuer)] => vec![self.reach_owner(one, *issuer, deadline).await],
            many => {
                let reached = many.iter().map(|(one, issuer)| self.reach_owner(one, *issuer, deadline));
                futures::future::join_all(reached).await
            }
        }
    }

    /// Connects to the owners of memory that the master granted. Each connection has an outcome of
    /// its own. `look_ups` is the state of the look-ups of the engine before the request to the
    /// master.
    pub(crate) async fn reach_granted(
        &self,
        endpoints: &[String],
        look_ups: LookUps,
        deadline: &Deadline,
    ) -> Vec<Reached<T>> {
        match endpoints {
            [one] => vec![self.reach_owner(one, Issuer::Master(look_ups), deadline).await],
            many => {
                let reached =
                    many.iter().map(|one| self.reach_owner(one, Issuer::Master(look_ups), deadline));
                futures::future::join_all(reached).await
            }
        }
    }

    pub(crate) async fn reach_owner(
        &self,
        endpoint: &str,
        issuer: Issuer,
        deadline: &Deadline,
    ) -> Reached<T> {
        let mut target = self.reach(endpoint, deadline).await.map_err(Unreached::Failed)?;
        let newer = |error| {
            // The failed process is an earlier one.
            self.unreachable.record_response(endpoint);
            Unreached::Newer(error)
        };
        let look_ups = match issuer {
            Issuer::Master(look_ups) => look_ups,
            Issuer::Owner(look_ups) => return target.pinned_to_issuer(look_ups).map_err(newer),
        };
        // The mount of the client may be in progress, or the client may have ended again.
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
            let text = format!("cannot use memory of peer {endpoint}: it is not mounted");
            return Err(Unreached::Failed(Error::new(ErrorCode::TransferFail, text)));
        }
        target.pinned(look_ups).map_err(newer)
    }

    /// Records from the outcome of a transfer whether its target responds.
    pub(crate) fn record_outcome(&self, endpoint: &str, result: &Result<()>) {
        match result {
            Ok(()) => self.unreachable.record_response(endpoint),
            Err(error) => self.record_failure(endpoint, error),
        }
    }

    pub(crate) fn record_failure(&self, endpoint: &str, error: &Error) {
        // The client may return with other memory or at another port. The next use looks it up
        // again.
        self.engine.forget(endpoint);
        if matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout) {
            self.unreachable.record_error(endpoint, error);
        }
    }

    /// Returns whether the host name of an endpoint is the one of this client.
    pub(crate) fn is_near(&self, endpoint: &str) -> bool {
        host_port::split(endpoint).0 == host_port::split(&self.endpoint).0
    }
}

/// Pauses between look-ups of a client whose mount is in progress.
const MOUNT_PAUSES: [Duration; 3] =
    [Duration::from_millis(5), Duration::from_millis(20), Duration::from_millis(80)];

/// Endpoint of the owner of memory, and the issuer of the address.
pub(crate) type MemoryOwner = (String, Issuer);

/// Connection to the owner of memory, valid for the memory in one response only.
pub(crate) type Reached<T> = Result<Target<T>, Unreached>;

/// Reason why memory in a response cannot be used.
#[derive(Debug)]
pub(crate) enum Unreached {
    /// The client does not respond.
    Failed(Error),
    /// The client was looked up after the request. The response may therefore describe an earlier
    /// process, and must be requested again.
    Newer(Error),
}

impl Unreached {
    pub(crate) fn error(&self) -> &Error {
        match self {
            Unreached::Failed(error) | Unreached::Newer(error) => error,
        }
    }

    pub(crate) fn into_error(self) -> Error {
        match self {
            Unreached::Failed(error) | Unreached::Newer(error) => error,
        }
    }

    pub(crate) fn is_newer(&self) -> bool {
        matches!(self, Unreached::Newer(_))
    }
}

pub(crate) fn is_newer<T: Transport>(reached: &Reached<T>) -> bool {
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
        // Another client of the engine may mount the memory.
        mounted.iter().for_each(|mounted| self.retire_addresses(mounted));
        // Best effort: with the unmount, other clients need not wait until the master detects the
        // end.
        let (master, id) = (self.master.clone(), self.id);
        self.runtime.spawn(async move {
            for mounted_segment in mounted {
                if mounted_segment.is_lasting() {
                    let _ = drop_region(Some(mounted_segment)).await;
                    continue;
                }
                let unmount = master.unmount(id, mounted_segment.id());
                let outcome = tokio::time::timeout(std::time::Duration::from_secs(1), unmount).await;
                if !matches!(outcome, Ok(Ok(()))) {
                    tracing::debug!(client = %id, "the master was not notified of a closed client");
                }
                let _ = drop_region(Some(mounted_segment)).await;
            }
        });
    }
}
