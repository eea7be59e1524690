//! Other engines as we know them: their descriptor, a way to them, and when to look again.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::StreamExt;
use mooncake_core::backoff::{Backoff, Pace};
use mooncake_core::clock::{Moment, Rng};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::{Mutex, RwLock};
use tracing::debug;

use super::Inner;
use super::batch::Request;
use super::builder::LocalCopies;
use super::metrics::Meter;
use super::regions::Regions;
use crate::exposed::ExposedMemory;
use crate::region::Source;
use crate::segment::SegmentDesc;
use crate::transport::{Protocol, Transport};

/// Key of our own in descriptors: tells one run of an engine from the next. Others ignore it.
pub(super) const INSTANCE: &str = "instance";
/// Key of our own in descriptors: the memory is not mounted in a store yet. Others ignore it.
pub(super) const UNMOUNTED: &str = "unmounted";
/// Processes whose numbers are remembered.
const REMEMBERED: usize = 1024;
/// How long a look-up that changed nothing keeps further ones away, so that a dead peer is not looked up per operation.
const IN_VAIN: Pace = Pace { first: Duration::from_millis(250), most: Duration::from_secs(8) };
/// How long a look-up takes at most, when the transfer has no deadline.
const PATIENCE: Duration = Duration::from_secs(5);
/// Targets that are looked up at a time.
const LOOKS: usize = 16;

/// An opened segment. A handle: clones share what is learned about it.
pub struct Target<T: Transport> {
    inner: Arc<Shared<T>>,
    /// The only route that transfers with this handle take.
    pinned: Option<Arc<Route<T>>>,
}

struct Shared<T: Transport> {
    name: String,
    route: RwLock<Arc<Route<T>>>,
    /// Look-ups that changed nothing. Held while one is made.
    refreshing: tokio::sync::Mutex<Backoff>,
}

/// What leads to a segment now.
pub(super) struct Route<T: Transport> {
    pub(super) desc: SegmentDesc,
    pub(super) peer: T::Peer,
    /// Its memory, when it is in this process.
    pub(super) local: Option<Arc<ExposedMemory>>,
    pub(super) meter: Arc<Meter>,
    number: Number,
}

/// Point in the sequence in which an engine finds processes: all that it has found so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LookUps(u64);

/// Place of a process in the sequence in which an engine finds processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Number(u64);

impl Number {
    /// This engine itself, and processes that name no instance: nothing tells them from earlier ones.
    const ANY: Self = Self(0);
    /// A process whose memory is not mounted yet.
    const UNMOUNTED: Self = Self(u64::MAX);

    fn is_in(self, before: LookUps) -> bool {
        self.0 <= before.0
    }
}

/// A process that an engine has found.
#[derive(Debug)]
struct FoundProcess {
    segment: Box<str>,
    instance: Box<str>,
    number: Number,
}

/// Numbers of the processes that an engine has found.
#[derive(Debug, Default)]
pub(super) struct Found {
    last: AtomicU64,
    /// The latest, so that a process that is found again keeps its number.
    latest: Mutex<VecDeque<FoundProcess>>,
}

impl Found {
    pub(super) fn look_ups(&self) -> LookUps {
        LookUps(self.last.load(Ordering::SeqCst))
    }

    /// Returns the number of the process that a descriptor of segment `name` tells of.
    fn number(&self, name: &str, desc: &SegmentDesc) -> Number {
        let Some(instance) = instance_of(desc) else { return Number::ANY };
        if desc.extra.contains_key(UNMOUNTED) && !is_planted("store-ignores-pending-mounts") {
            return Number::UNMOUNTED;
        }
        let mut latest = self.latest.lock();
        let is_same = |known: &&FoundProcess| *known.segment == *name && *known.instance == *instance;
        if let Some(known) = latest.iter().find(is_same) {
            return known.number;
        }
        let number = Number(self.last.fetch_add(1, Ordering::SeqCst) + 1);
        latest.truncate(REMEMBERED - 1);
        latest.push_front(FoundProcess { segment: name.into(), instance: instance.into(), number });
        number
    }
}

fn instance_of(desc: &SegmentDesc) -> Option<&str> {
    desc.extra.get(INSTANCE).and_then(|instance| instance.as_str())
}

impl<T: Transport> Target<T> {
    pub(super) fn new(name: &str, route: Route<T>, rng: Rng) -> Self {
        let route = RwLock::new(Arc::new(route));
        let refreshing = tokio::sync::Mutex::new(Backoff::new(rng));
        Self { inner: Arc::new(Shared { name: name.into(), route, refreshing }), pinned: None }
    }

    /// The segment's name.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Its descriptor, as of the last look-up.
    pub fn descriptor(&self) -> SegmentDesc {
        self.route().desc.clone()
    }

    /// Returns a handle whose transfers reach the process of the present route and no later one. For addresses that a third party,
    /// such as the store's master, gave out after `before`.
    ///
    /// # Errors
    /// `TRANSFER_FAIL` if that process was found after `before`, or waits for its first [mount](super::Engine::expect_mount): the addresses
    /// may be those of an earlier process. Asking the third party again helps.
    pub fn pinned(&self, before: LookUps) -> Result<Self> {
        let route = self.route();
        if !route.number.is_in(before) && !is_planted("store-ignores-instances") {
            return Err(Error::new(
                ErrorCode::TransferFail,
                format!(
                    "cannot use addresses in segment {:?}: its process was found after they were given out; ask for them again",
                    self.inner.name
                ),
            ));
        }
        Ok(Self { inner: self.inner.clone(), pinned: Some(route) })
    }

    /// Whether the process has told that its memory is not mounted yet.
    pub fn awaits_mount(&self) -> bool {
        self.route().number == Number::UNMOUNTED && !is_planted("store-ignores-pending-mounts")
    }

    pub(super) fn route(&self) -> Arc<Route<T>> {
        self.pinned.clone().unwrap_or_else(|| self.inner.route.read().clone())
    }

    /// Something to sort by, equal for handles of the same target and route.
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
    fn instance(&self) -> Option<&str> {
        instance_of(&self.desc)
    }

    /// Whether a request that failed on `old` may run here: the range is (still, or by now) registered, and it is not memory of an
    /// earlier run, whose addresses mean something else today.
    pub(super) fn takes_over<B: Source<T>>(&self, old: &Route<T>, request: &Request<T, B>) -> bool {
        let (addr, len) = (request.transfer.remote, request.transfer.buffer.local().span.len as u64);
        let listed = self.desc.buffers.is_empty() || self.desc.holds(addr, len);
        let same_run = self.instance() == old.instance();
        listed && (same_run || !old.desc.holds(addr, len))
    }
}

impl<T: Transport> Inner<T> {
    /// Looks a segment up and finds a way to it.
    pub(super) async fn route(&self, name: &str) -> Result<Route<T>> {
        let desc = if name == self.name {
            SegmentDesc { handshake: self.at.clone(), ..self.descriptor() }
        } else {
            let own = self.descriptor().encode();
            self.directory.descriptor(name, &own, &self.limits).await?
        };
        self.connect(name, desc).await
    }

    async fn connect(&self, name: &str, desc: SegmentDesc) -> Result<Route<T>> {
        if !self.transport.reaches(&desc) {
            let (wires, ours): (Vec<_>, _) =
                (desc.protocols.iter().map(|p| p.as_str()).collect(), self.transport.protocol());
            let text = match wires.contains(&ours.as_str()) {
                true => format!("segment {name:?} does not say where it is reached by {ours}"),
                false => format!("segment {name:?} is reached by {}, not by {ours}", wires.join(", ")),
            };
            return Err(Error::new(ErrorCode::NotSupported, text));
        }
        let mut peer =
            self.transport.connect(&desc).await.map_err(|e| e.context(format!("segment {name:?}")))?;
        let instance = instance_of(&desc);
        let local = match self.local_copies {
            LocalCopies::Never => None,
            LocalCopies::Process => instance.and_then(Regions::in_process),
        };
        let statistics = self.transport.path_statistics();
        let path = match (&local, statistics) {
            (Some(_), _) => Protocol::new("memory"),
            (None, Some(statistics)) => statistics.path_name(&peer),
            (None, None) => self.transport.protocol(),
        };
        let meter = self.meters.of(name, path);
        if let Some(statistics) = statistics {
            statistics.count_fallback(&mut peer, meter.fallback());
        }
        let number = if name == self.name { Number::ANY } else { self.found.number(name, &desc) };
        Ok(Route { desc, peer, local, meter, number })
    }

    /// Looks a target up again after a transfer failed on `stale`. The route to use now, or `None` when nothing has changed.
    pub(super) async fn refresh(
        &self,
        target: &Target<T>,
        stale: &Arc<Route<T>>,
        deadline: Option<Moment>,
    ) -> Option<Arc<Route<T>>> {
        let mut in_vain = target.inner.refreshing.lock().await;
        let current = target.route();
        if !Arc::ptr_eq(&current, stale) {
            return Some(current);
        }
        let now = self.clock.now();
        if in_vain.rests(now) || deadline.is_some_and(|at| now >= at) {
            return None;
        }
        let left = deadline.map_or(PATIENCE, |at| at.since(now).min(PATIENCE));
        let look = self.look_again(target, stale);
        let found = match &self.runtime {
            // In-process directories answer at once, with no runtime to time them.
            None => look.await,
            Some(_) => tokio::time::timeout(left, look).await.unwrap_or(Ok(None)),
        };
        match found {
            Ok(Some(route)) => {
                in_vain.worked();
                Some(route)
            }
            Ok(None) => {
                in_vain.failed(now, self.clock.now(), &IN_VAIN);
                None
            }
            Err(error) => {
                debug!(segment = target.name(), %error, "looked up in vain");
                in_vain.failed(now, self.clock.now(), &IN_VAIN);
                None
            }
        }
    }

    /// Looks a target up, whatever was found before. The new route, or `None` when the descriptor is as it was.
    pub(super) async fn look_again(
        &self,
        target: &Target<T>,
        stale: &Arc<Route<T>>,
    ) -> Result<Option<Arc<Route<T>>>> {
        let own = self.descriptor().encode();
        let desc = self.directory.descriptor(&target.inner.name, &own, &self.limits).await?;
        if desc.same_but_for_time(&stale.desc) {
            return Ok(None);
        }
        let route = Arc::new(self.connect(&target.inner.name, desc).await?);
        debug!(segment = target.name(), "the descriptor has changed");
        *target.inner.route.write() = route.clone();
        Ok(Some(route))
    }
}

/// Looks all opened targets up from time to time, until the engine is gone.
pub(super) async fn keep_fresh<T: Transport>(engine: Weak<Inner<T>>, interval: Duration) {
    loop {
        tokio::time::sleep(interval).await;
        let Some(engine) = engine.upgrade() else { return };
        let targets: Vec<Target<T>> = engine.targets.lock().values().cloned().collect();
        let others = targets.iter().filter(|target| target.name() != engine.name);
        // Several at a time: those that are gone keep nobody else waiting.
        let looks = futures::stream::iter(others).for_each_concurrent(LOOKS, |target| {
            let engine = &engine;
            async move {
                let stale = target.route();
                match tokio::time::timeout(PATIENCE, engine.look_again(target, &stale)).await {
                    Ok(Err(error)) => debug!(segment = target.name(), %error, "looked up in vain"),
                    Ok(Ok(_)) => {}
                    Err(_) => debug!(segment = target.name(), "looked up in vain: no answer"),
                }
            }
        });
        looks.await;
    }
}
