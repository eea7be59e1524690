//! Look-ups of segments: the first one, and further ones after failures and at intervals.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::StreamExt;
use mooncake_core::backoff::Pace;
use mooncake_core::clock::Moment;
use mooncake_core::{Error, ErrorCode, Result};
use tracing::debug;

use super::regions::Regions;
use super::target::{ProcessNumber, Route, Target, awaits_mount, instance_of};
use super::{Inner, LocalCopies};
use crate::protocol::Protocol;
use crate::segment::SegmentDesc;
use crate::transport::Transport;

/// Pause after a look-up that changed nothing, so that a dead peer is not looked up for each
/// operation.
const FRUITLESS_PAUSE: Pace = Pace { first: Duration::from_millis(250), max: Duration::from_secs(8) };
/// Timeout of a look-up for a transfer without a deadline.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of parallel look-ups.
const PARALLEL_LOOK_UPS: usize = 16;

/// Longest local descriptor that a look-up sends to a peer, in bytes. Peers read 1 MiB by default.
const MAX_REQUEST_BYTES: usize = 1 << 19;

impl<T: Transport> Inner<T> {
    /// Returns the local descriptor for a look-up by handshake. No peer needs the buffers in it, so
    /// many of them are left out.
    fn own_request(&self) -> Vec<u8> {
        if !self.directory.is_p2p() {
            return Vec::new();
        }
        let mut descriptor = self.descriptor();
        // An entry takes at least 64 bytes.
        if descriptor.buffers.len() <= MAX_REQUEST_BYTES / 64 {
            let encoded = descriptor.encode();
            if encoded.len() <= MAX_REQUEST_BYTES {
                return encoded;
            }
        }
        descriptor.buffers.clear();
        descriptor.encode()
    }

    /// Looks up a segment and connects to it.
    pub(super) async fn route(&self, name: &str) -> Result<Route<T>> {
        let desc = if name == self.name {
            SegmentDesc { handshake: self.at.clone(), ..self.descriptor() }
        } else {
            let own = self.own_request();
            self.directory.descriptor(name, &own, &self.limits).await?
        };
        self.connect(name, desc).await
    }

    async fn connect(&self, name: &str, desc: SegmentDesc) -> Result<Route<T>> {
        if !self.transport.reaches(&desc) {
            let (protocols, own_protocol): (Vec<_>, _) =
                (desc.protocols.iter().map(|p| p.as_str()).collect(), self.transport.protocol());
            let text = match protocols.contains(&own_protocol.as_str()) {
                true => {
                    format!("cannot reach segment {name:?}: its descriptor has no address for {own_protocol}")
                }
                false => {
                    format!("segment {name:?} is reached by {}, not by {own_protocol}", protocols.join(", "))
                }
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
        let meter = self.meters.meter(name, path);
        if let Some(statistics) = statistics {
            statistics.count_fallback(&mut peer, meter.fallback());
        }
        let (number, awaits_mount) = match name == self.name {
            true => (ProcessNumber::ANY, false),
            false => (self.found.number(name, &desc), awaits_mount(&desc)),
        };
        Ok(Route { desc, peer, local, meter, number, awaits_mount })
    }

    /// Looks up a target again after a transfer failed on `stale`. Returns the route to use now, or
    /// `None` if nothing has changed.
    pub(super) async fn refresh(
        &self,
        target: &Target<T>,
        stale: &Arc<Route<T>>,
        deadline: Option<Moment>,
    ) -> Option<Arc<Route<T>>> {
        let mut backoff = target.refreshing().lock().await;
        let current = target.route();
        if !Arc::ptr_eq(&current, stale) {
            return Some(current);
        }
        let now = self.clock.now();
        if backoff.is_paused(now) || deadline.is_some_and(|at| now >= at) {
            return None;
        }
        let timeout = deadline.map_or(LOOK_UP_TIMEOUT, |at| at.since(now).min(LOOK_UP_TIMEOUT));
        let look_up = self.look_up_again(target, stale);
        let result = match &self.runtime {
            // In-process directories respond at once, and there is no runtime for a timeout.
            None => look_up.await,
            Some(_) => tokio::time::timeout(timeout, look_up).await.unwrap_or(Ok(None)),
        };
        match result {
            Ok(Some(route)) => {
                backoff.worked();
                Some(route)
            }
            Ok(None) => {
                backoff.failed(now, self.clock.now(), &FRUITLESS_PAUSE);
                None
            }
            Err(error) => {
                debug!(segment = target.name(), %error, "look-up failed");
                backoff.failed(now, self.clock.now(), &FRUITLESS_PAUSE);
                None
            }
        }
    }

    /// Looks up a target regardless of earlier look-ups. Returns the new route, or `None` if the
    /// descriptor is unchanged.
    pub(super) async fn look_up_again(
        &self,
        target: &Target<T>,
        stale: &Arc<Route<T>>,
    ) -> Result<Option<Arc<Route<T>>>> {
        let own = self.own_request();
        let desc = self.directory.descriptor(target.name(), &own, &self.limits).await?;
        if desc.same_but_for_time(&stale.desc) {
            return Ok(None);
        }
        let route = Arc::new(self.connect(target.name(), desc).await?);
        debug!(segment = target.name(), "the descriptor has changed");
        target.set_route(route.clone());
        Ok(Some(route))
    }
}

/// Looks up all opened targets at an interval, until the engine is dropped.
pub(super) async fn refresh_regularly<T: Transport>(engine: Weak<Inner<T>>, interval: Duration) {
    loop {
        tokio::time::sleep(interval).await;
        let Some(engine) = engine.upgrade() else { return };
        let targets: Vec<Target<T>> = engine.targets.lock().all();
        let others = targets.iter().filter(|target| target.name() != engine.name);
        // The look-ups run in parallel, so that dead targets do not delay the others.
        let look_ups = futures::stream::iter(others).for_each_concurrent(PARALLEL_LOOK_UPS, |target| {
            let engine = &engine;
            async move {
                let stale = target.route();
                match tokio::time::timeout(LOOK_UP_TIMEOUT, engine.look_up_again(target, &stale)).await {
                    Ok(Err(error)) => debug!(segment = target.name(), %error, "look-up failed"),
                    Ok(Ok(_)) => {}
                    Err(_) => debug!(segment = target.name(), "look-up timed out"),
                }
            }
        });
        look_ups.await;
    }
}
