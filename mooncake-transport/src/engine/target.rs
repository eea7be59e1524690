//! Other engines as we know them: their descriptor, a way to them, and when to look again.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::StreamExt;
use mooncake_core::backoff::{Backoff, Pace};
use mooncake_core::clock::{Moment, Rng};
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::RwLock;
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
/// How long a look-up that changed nothing keeps further ones away, so that a dead peer is not looked up per operation.
const IN_VAIN: Pace = Pace { first: Duration::from_millis(250), most: Duration::from_secs(8) };
/// How long a look-up takes at most, when the transfer has no deadline.
const PATIENCE: Duration = Duration::from_secs(5);
/// Targets that are looked up at a time.
const LOOKS: usize = 16;

/// An opened segment. A handle: clones share what is learned about it.
pub struct Target<T: Transport> {
    inner: Arc<Shared<T>>,
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
}

impl<T: Transport> Target<T> {
    pub(super) fn new(name: &str, route: Route<T>, rng: Rng) -> Self {
        let route = RwLock::new(Arc::new(route));
        let refreshing = tokio::sync::Mutex::new(Backoff::new(rng));
        Self { inner: Arc::new(Shared { name: name.into(), route, refreshing }) }
    }

    /// The segment's name.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Its descriptor, as of the last look-up.
    pub fn descriptor(&self) -> SegmentDesc {
        self.route().desc.clone()
    }

    pub(super) fn route(&self) -> Arc<Route<T>> {
        self.inner.route.read().clone()
    }

    /// Something to sort by, equal for handles of the same target.
    pub(super) fn id(&self) -> usize {
        Arc::as_ptr(&self.inner).addr()
    }
}

impl<T: Transport> Clone for Target<T> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<T: Transport> fmt::Debug for Target<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({:?})", self.inner.name)
    }
}

impl<T: Transport> Route<T> {
    fn instance(&self) -> Option<&str> {
        self.desc.extra.get(INSTANCE).and_then(|i| i.as_str())
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
        let instance = desc.extra.get(INSTANCE).and_then(|i| i.as_str());
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
        Ok(Route { desc, peer, local, meter })
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
