//! Other engines: their descriptor, and the route to them.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mooncake_core::backoff::Backoff;
use mooncake_core::clock::Rng;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::{Mutex, RwLock};

use super::metrics::Meter;
use crate::exposed::ExposedMemory;
use crate::segment::SegmentDesc;
use crate::transport::Transport;

/// Descriptor key that distinguishes one run of an engine from the next. Mooncake C++ ignores it.
pub(super) const INSTANCE: &str = "instance";
/// Descriptor key for memory that is not mounted in a store yet. Mooncake C++ ignores it.
pub(super) const UNMOUNTED: &str = "unmounted";
/// Maximum number of processes whose numbers are kept.
const REMEMBERED: usize = 1024;

/// Opened segment. Clones are handles that share the route and its updates.
pub struct Target<T: Transport> {
    inner: Arc<Shared<T>>,
    /// The only route that transfers with this handle take.
    pinned: Option<Arc<Route<T>>>,
}

struct Shared<T: Transport> {
    name: String,
    route: RwLock<Arc<Route<T>>>,
    /// Backoff after look-ups that changed nothing. The lock is held during a look-up.
    refreshing: tokio::sync::Mutex<Backoff>,
}

/// Present route to a segment.
pub(super) struct Route<T: Transport> {
    pub(super) desc: SegmentDesc,
    pub(super) peer: T::Peer,
    /// Memory of the segment, if it is in this process.
    pub(super) local: Option<Arc<ExposedMemory>>,
    pub(super) meter: Arc<Meter>,
    pub(super) number: ProcessNumber,
    /// True if the process has published that its memory is not mounted yet.
    pub(super) awaits_mount: bool,
}

/// Point in the sequence in which an engine finds processes: all that it has found so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LookUps(u64);

/// Place of a process in the sequence in which an engine finds processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProcessNumber(u64);

impl ProcessNumber {
    /// This engine itself, and processes without an instance, which cannot be distinguished from
    /// earlier ones.
    pub(super) const ANY: Self = Self(0);

    fn is_in(self, before: LookUps) -> bool {
        self.0 <= before.0
    }
}

/// Process that an engine has found. A process is found once more when its memory is mounted:
/// addresses that were issued before the mount may be those of an earlier process.
#[derive(Debug)]
struct FoundProcess {
    segment: Box<str>,
    instance: Box<str>,
    awaits_mount: bool,
    number: ProcessNumber,
}

/// Numbers of the processes that an engine has found.
#[derive(Debug, Default)]
pub(super) struct FoundProcesses {
    last: AtomicU64,
    /// Latest processes, so that a process that is found again keeps its number.
    latest: Mutex<VecDeque<FoundProcess>>,
}

impl FoundProcesses {
    pub(super) fn look_ups(&self) -> LookUps {
        LookUps(self.last.load(Ordering::SeqCst))
    }

    /// Returns the number of the process in a descriptor of segment `name`.
    pub(super) fn number(&self, name: &str, desc: &SegmentDesc) -> ProcessNumber {
        let Some(instance) = instance_of(desc) else { return ProcessNumber::ANY };
        let awaits_mount = awaits_mount(desc);
        let mut latest = self.latest.lock();
        let is_same = |process: &&FoundProcess| {
            *process.segment == *name
                && *process.instance == *instance
                && process.awaits_mount == awaits_mount
        };
        if let Some(process) = latest.iter().find(is_same) {
            return process.number;
        }
        let number = ProcessNumber(self.last.fetch_add(1, Ordering::SeqCst) + 1);
        latest.truncate(REMEMBERED - 1);
        let (segment, instance) = (name.into(), instance.into());
        latest.push_front(FoundProcess { segment, instance, awaits_mount, number });
        number
    }
}

/// Returns whether a descriptor is that of a process whose memory is not mounted yet.
pub(super) fn awaits_mount(desc: &SegmentDesc) -> bool {
    instance_of(desc).is_some()
        && desc.extra.contains_key(UNMOUNTED)
        && !is_planted("store-ignores-pending-mounts")
}

pub(super) fn instance_of(desc: &SegmentDesc) -> Option<&str> {
    desc.extra.get(INSTANCE).and_then(|instance| instance.as_str())
}

impl<T: Transport> Target<T> {
    pub(super) fn new(name: &str, route: Route<T>, rng: Rng) -> Self {
        let route = RwLock::new(Arc::new(route));
        let refreshing = tokio::sync::Mutex::new(Backoff::new(rng));
        Self { inner: Arc::new(Shared { name: name.into(), route, refreshing }), pinned: None }
    }

    /// Returns the name of the segment.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Returns the descriptor of the last look-up.
    pub fn descriptor(&self) -> SegmentDesc {
        self.route().desc.clone()
    }

    /// Returns a handle whose transfers reach the process of the present route and no later one.
    /// For addresses that a third party, such as the store's master, returned after `before`.
    ///
    /// # Errors
    /// Returns `TRANSFER_FAIL` if that process was found after `before`, or waits for its first
    /// [mount](super::Engine::expect_mount): the addresses may be those of an earlier process. The
    /// caller then requests the addresses again.
    pub fn pinned(&self, before: LookUps) -> Result<Self> {
        let route = self.route();
        if route.awaits_mount { Err(self.found_too_late_error()) } else { self.pinned_to(route, before) }
    }

    /// Returns a handle as [`pinned`](Self::pinned) does, for addresses that the process itself
    /// returned after `before`. Its memory need not be mounted.
    ///
    /// # Errors
    /// Returns `TRANSFER_FAIL` if the process of the present route was found after `before`.
    pub fn pinned_to_issuer(&self, before: LookUps) -> Result<Self> {
        self.pinned_to(self.route(), before)
    }

    fn pinned_to(&self, route: Arc<Route<T>>, before: LookUps) -> Result<Self> {
        if !route.number.is_in(before) && !is_planted("store-ignores-instances") {
            return Err(self.found_too_late_error());
        }
        Ok(Self { inner: self.inner.clone(), pinned: Some(route) })
    }

    fn found_too_late_error(&self) -> Error {
        Error::new(
            ErrorCode::TransferFail,
            format!(
                "cannot use addresses in segment {:?}: its process was found after they were issued; request them again",
                self.inner.name
            ),
        )
    }

    /// Returns whether other handles of the target exist.
    pub(super) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }

    /// Returns whether the process has published that its memory is not mounted yet.
    pub fn awaits_mount(&self) -> bool {
        self.route().awaits_mount
    }

    /// Returns the backoff after look-ups that changed nothing. The lock is held during a look-up.
    pub(super) fn refreshing(&self) -> &tokio::sync::Mutex<Backoff> {
        &self.inner.refreshing
    }

    /// Replaces the route of all handles that are not pinned.
    pub(super) fn set_route(&self, route: Arc<Route<T>>) {
        *self.inner.route.write() = route;
    }

    pub(super) fn route(&self) -> Arc<Route<T>> {
        self.pinned.clone().unwrap_or_else(|| self.inner.route.read().clone())
    }

    /// Returns a sort key, equal for handles of the same target and route.
    pub(super) fn id(&self) -> usize {
        self.pinned
            .as_ref()
            .map_or_else(|| Arc::as_ptr(&self.inner).addr(), |route| Arc::as_ptr(route).addr())
    }
}

impl<T: Transport> Clone for Target<T> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), pinned: self.pinned.clone() }
    }
}

impl<T: Transport> fmt::Debug for Target<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({:?})", self.inner.name)
    }
}

impl<T: Transport> Route<T> {
    /// Returns the instance of the process, if its descriptor names one.
    pub(super) fn instance(&self) -> Option<&str> {
        instance_of(&self.desc)
    }
}
