//! The transfer engine: registers and publishes memory, finds other engines, moves bytes, tries again where that is right.

#[allow(unsafe_code)]
mod batch;
mod builder;
mod inbox;
mod look_up;
mod metrics;
#[allow(unsafe_code)]
mod mixed;
#[allow(unsafe_code)]
mod regions;
mod request;
mod target;

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use futures::{FutureExt, Stream};
use mooncake_core::clock::{Moment, Rng, SharedClock};
use mooncake_core::memory::MemorySource;
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;
use tracing::warn;

use crate::directory::Directory;
use crate::handshake::{self, HandshakeConfig, HandshakeServer, Notification};
use crate::net::HostPort;
use crate::region::Region;
use crate::segment::SegmentDesc;
use crate::transport::{Access, Transport};

pub use batch::Outcome;
pub use builder::{EngineBuilder, HandshakePort};
pub use metrics::{Counts, PeerMetrics};
pub use mixed::{Batch, BatchView, Buffer, Finished, Progress, Running, Status};
pub use mooncake_core::EngineCode;
pub use request::{Request, Requests};
pub use target::{LookUps, Target};

use inbox::Inbox;
use metrics::Meters;
use regions::{Entry, Regions};

/// One node's end of all transfers. A handle: clones are the same engine; the last one withdraws its segment in the background, if the runtime
/// lives that long. [`close`](Self::close) waits until the directory has forgotten it.
pub struct Engine<T: Transport> {
    inner: Arc<Inner<T>>,
}

/// Which transfers are plain copies instead of going over the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalCopies {
    /// None.
    Never,
    /// Those to memory of an engine in this process.
    Process,
}

/// States of [`Inner::mount`].
const NO_MOUNT: u8 = 0;
const MOUNT_EXPECTED: u8 = 1;
const MOUNTED: u8 = 2;

struct Inner<T: Transport> {
    transport: Arc<T>,
    name: String,
    directory: Directory,
    /// Our handshake port, as others reach it.
    at: Option<HostPort>,
    limits: HandshakeConfig,
    clock: SharedClock,
    rng: Mutex<Rng>,
    local_copies: LocalCopies,
    /// Descriptors are looked up once, and again when a transfer fails.
    caches: bool,
    regions: Arc<Regions>,
    meters: Meters,
    targets: Mutex<HashMap<String, Target<T>>>,
    found: target::Found,
    /// Whether descriptors tell that memory is not mounted yet.
    mount: AtomicU8,
    inbox: Arc<Inbox>,
    server: Mutex<Option<HandshakeServer>>,
    /// How often what peers may reach has changed.
    changes: AtomicU64,
    /// Up to which change the directory knows.
    publishing: tokio::sync::Mutex<Option<u64>>,
    runtime: Option<tokio::runtime::Handle>,
    closed: AtomicBool,
}

impl<T: Transport> Engine<T> {
    /// The name others open to reach us. With `P2PHANDSHAKE` it is our handshake address.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Our handshake port, as others reach it; `None` without one.
    pub fn handshake_addr(&self) -> Option<&HostPort> {
        self.inner.at.as_ref()
    }

    /// The wire.
    pub fn transport(&self) -> &Arc<T> {
        &self.inner.transport
    }

    /// Where segments are found.
    pub fn directory(&self) -> &Directory {
        &self.inner.directory
    }

    /// The clock that deadlines are moments of.
    pub fn clock(&self) -> &SharedClock {
        &self.inner.clock
    }

    /// Opens memory to peers and publishes it. `Invalid` for a length of zero and for an overlap with other memory of this engine.
    /// Peers are refused again, and the descriptor published anew, when the last handle and slice of the region is dropped.
    pub async fn register(&self, memory: Arc<dyn MemorySource>) -> Result<Region<T>> {
        let region = self.inner.open_region(memory)?;
        self.inner.publish(false).await?;
        Ok(region)
    }

    /// Registers several pieces of memory, all or none, and publishes once.
    pub async fn register_many(&self, memory: Vec<Arc<dyn MemorySource>>) -> Result<Vec<Region<T>>> {
        let regions: Result<Vec<_>> =
            memory.into_iter().map(|memory| self.inner.open_region(memory)).collect();
        let regions = regions?;
        self.inner.publish(false).await?;
        Ok(regions)
    }

    /// Registers memory for the local side of transfers only; peers are refused.
    pub fn register_local(&self, memory: Arc<dyn MemorySource>) -> Result<Region<T>> {
        let place = self.inner.regions.claim(memory.span())?;
        let mut region = Region::register(&*self.inner.transport, memory, Access::Local)?;
        region.tie(None, Box::new(place));
        Ok(region)
    }

    /// Closes a region and waits until the directory says so too. `Busy` when others still hold it or slices of it: then it is closed
    /// when the last of them goes.
    pub async fn unregister(&self, region: Region<T>) -> Result<()> {
        self.unregister_many(vec![region]).await
    }

    /// Closes several regions and publishes once. `Busy`, naming the first, when some are still in use; the others are closed all the same.
    pub async fn unregister_many(&self, regions: Vec<Region<T>>) -> Result<()> {
        let mut busy = None;
        for region in regions {
            let addr = region.addr();
            if region.exclusive().map(drop).is_err() {
                busy.get_or_insert(addr);
            }
        }
        self.inner.publish(false).await?;
        match busy {
            None => Ok(()),
            Some(addr) => Err(Error::new(
                ErrorCode::ObjectReplicaBusy,
                format!("the region at {addr:#x} is in use; it is closed when its last slice is dropped"),
            )),
        }
    }

    /// Waits until the directory says what is registered now.
    pub async fn settle_publication(&self) -> Result<()> {
        self.inner.publish(false).await
    }

    /// Returns the processes found so far. Addresses that a third party is asked for afterwards may be used in these: see [`Target::pinned`].
    pub fn look_ups(&self) -> LookUps {
        self.inner.found.look_ups()
    }

    /// Lets descriptors tell, from the next publication on, that the memory is not mounted in a store yet. Until
    /// [`mounted`](Self::mounted) is called, the store may hand out the same addresses for an earlier process of this name. Without effect
    /// after the first mount.
    pub fn expect_mount(&self) {
        let mount = &self.inner.mount;
        if mount.compare_exchange(NO_MOUNT, MOUNT_EXPECTED, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            self.inner.changes.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Publishes that a store has mounted memory of this engine, and so has given up what earlier processes had at its addresses.
    ///
    /// # Errors
    /// Whatever keeps the directory from taking the descriptor.
    pub async fn mounted(&self) -> Result<()> {
        if self.inner.mount.swap(MOUNTED, Ordering::SeqCst) == MOUNT_EXPECTED {
            self.inner.changes.fetch_add(1, Ordering::SeqCst);
        }
        self.inner.publish(false).await
    }

    /// Returns the counters by peer and transport. A transfer is counted when its outcome is taken.
    /// A transfer whose future or ticket was dropped is not counted.
    pub fn metrics(&self) -> Vec<PeerMetrics> {
        self.inner.meters.by_peer()
    }

    /// Our descriptor as it is now.
    pub fn descriptor(&self) -> SegmentDesc {
        self.inner.descriptor()
    }

    /// A way to another engine's memory (or our own), from the cache when it was opened before. `NotFound` when nobody published it,
    /// `Unavailable` or `Timeout` when its owner does not answer.
    pub async fn open(&self, name: &str) -> Result<Target<T>> {
        let name = &*self.inner.full_name(name);
        let known = self.inner.targets.lock().get(name).cloned();
        if let Some(target) = known {
            if !self.inner.caches && name != self.inner.name {
                self.inner.look_again(&target, &target.route()).await?;
            }
            return Ok(target);
        }
        let route = self.inner.route(name).await?;
        let mut targets = self.inner.targets.lock();
        let new = || Target::new(name, route, self.inner.rng.lock().split());
        Ok(targets.entry(name.to_owned()).or_insert_with(new).clone())
    }

    /// The same, by a deadline; `Timeout` when it passes. Needs the tokio runtime the engine was started on, or a directory that
    /// answers at once.
    pub async fn open_by(&self, name: &str, deadline: Moment) -> Result<Target<T>> {
        let left = deadline.since(self.inner.clock.now());
        let late = || Error::new(ErrorCode::RpcTimeout, format!("segment {name:?} was not opened in time"));
        match &self.inner.runtime {
            _ if left.is_zero() => Err(late()),
            None => self.open(name).await,
            Some(_) => tokio::time::timeout(left, self.open(name)).await.unwrap_or_else(|_| Err(late())),
        }
    }

    /// Forgets an opened segment, so that the next [`open`](Self::open) looks it up again.
    pub fn forget(&self, name: &str) {
        self.inner.targets.lock().remove(&*self.inner.full_name(name));
    }

    /// Sends a notification to another engine's handshake port.
    pub async fn notify(&self, segment: &str, notification: &Notification) -> Result<()> {
        self.inner.notify(segment, notification).await
    }

    /// Notifications that arrived since the last call, in order.
    pub fn take_notifications(&self) -> Vec<Notification> {
        self.inner.inbox.take()
    }

    /// Notifications as they arrive, until the engine is closed. Each goes to one taker only, whoever asks first.
    pub fn notifications(&self) -> impl Stream<Item = Notification> + Send + use<T> {
        let inbox = self.inner.inbox.clone();
        futures::stream::unfold(inbox, |inbox| async move {
            let next = inbox.next().await?;
            Some((next, inbox))
        })
    }

    /// Whether another engine's handshake port answers within `patience`. `NotFound` when the name has none.
    pub async fn probe(&self, segment: &str, patience: Duration) -> Result<bool> {
        let at = self.inner.handshake_of(segment).await?;
        Ok(handshake::probe(&at, patience, &self.inner.limits).await)
    }

    /// Withdraws the segment and stops answering at the handshake port. Memory stays registered, and open to peers that have found it, until its
    /// regions are dropped.
    pub async fn close(&self) -> Result<()> {
        if self.inner.closed.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        // After whoever is publishing now; whoever comes later sees that it is closed.
        let turn = self.inner.publishing.lock().await;
        let result = self.inner.directory.withdraw(&self.inner.name, self.inner.at.as_ref()).await;
        drop(turn);
        self.inner.inbox.close();
        let server = self.inner.server.lock().take();
        if let Some(server) = server {
            server.stop().await;
        }
        result
    }
}

impl<T: Transport> Clone for Engine<T> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<T: Transport> fmt::Debug for Engine<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("name", &self.inner.name).field("at", &self.inner.at).finish()
    }
}

impl<T: Transport> Inner<T> {
    /// Opens memory to peers, and leaves it to the caller to publish that.
    fn open_region(self: &Arc<Self>, memory: Arc<dyn MemorySource>) -> Result<Region<T>> {
        let place = self.regions.claim(memory.span())?;
        let mut region = Region::register(&*self.transport, memory, Access::Remote)?;
        let key = region.registration().map(|r| self.transport.export(r)).unwrap_or_default();
        let entry = self.regions.open(&place, region.span(), key)?;
        let published = Published { entry: Some(entry), engine: Arc::downgrade(self) };
        region.tie(Some(Box::new(published)), Box::new(place));
        self.changes.fetch_add(1, Ordering::SeqCst);
        Ok(region)
    }

    /// A segment's name as it is looked up: a leading `/` means nothing, and a name that is an address has a port.
    fn full_name<'a>(&self, name: &'a str) -> Cow<'a, str> {
        let name = name.trim_start_matches('/');
        if !self.directory.is_p2p() {
            return name.into();
        }
        let at = HostPort::parse(name, self.limits.default_port).to_string();
        if at == name { name.into() } else { at.into() }
    }

    async fn handshake_of(&self, segment: &str) -> Result<HostPort> {
        self.directory.locate(&self.full_name(segment)).await?.ok_or_else(|| {
            Error::new(ErrorCode::SegmentNotFound, format!("segment {segment:?} has no handshake port"))
        })
    }

    async fn notify(&self, segment: &str, notification: &Notification) -> Result<()> {
        let at = self.handshake_of(segment).await?;
        handshake::notify(&at, notification, &self.limits).await
    }

    fn descriptor(&self) -> SegmentDesc {
        let mut desc = SegmentDesc::new(&self.name);
        desc.timestamp = timestamp(self.clock.wall_ms());
        desc.buffers = self.regions.buffers(&self.name);
        desc.extra.insert(target::INSTANCE.into(), self.regions.instance().into());
        if self.mount.load(Ordering::SeqCst) == MOUNT_EXPECTED {
            desc.extra.insert(target::UNMOUNTED.into(), true.into());
        }
        desc.handshake.clone_from(&self.at);
        self.transport.describe(&mut desc);
        if desc.tcp_data_host.is_empty()
            && let Some(at) = &self.at
        {
            desc.tcp_data_host.clone_from(&at.host);
        }
        desc
    }

    /// Publishes what is registered by the time it is our turn, so that the last one to finish leaves the newest.
    async fn publish(&self, fresh: bool) -> Result<()> {
        let mut known = self.publishing.lock().await;
        let change = self.changes.load(Ordering::SeqCst);
        if self.closed.load(Ordering::SeqCst) || *known == Some(change) {
            return Ok(());
        }
        *known = None;
        self.directory.publish(&self.descriptor(), fresh).await?;
        *known = Some(change);
        Ok(())
    }

    /// Runs something that nobody waits for. Without a runtime it must finish at once, as in-process directories do.
    fn detach(&self, what: &'static str, work: impl Future<Output = Result<()>> + Send + 'static) {
        let work = async move {
            if let Err(error) = work.await {
                warn!(%error, "{what}");
            }
        };
        match &self.runtime {
            Some(runtime) => drop(runtime.spawn(work)),
            None if work.now_or_never().is_none() => warn!("{what}: it needs a tokio runtime"),
            None => {}
        }
    }
}

impl<T: Transport> Drop for Inner<T> {
    fn drop(&mut self) {
        self.inbox.close();
        if !self.closed.swap(true, Ordering::SeqCst) {
            let (directory, name, at) = (self.directory.clone(), self.name.clone(), self.at.clone());
            self.detach("the segment could not be withdrawn", async move {
                directory.withdraw(&name, at.as_ref()).await
            });
        }
    }
}

/// Lives in a published region and is dropped before it is deregistered.
struct Published<T: Transport> {
    entry: Option<Entry>,
    engine: std::sync::Weak<Inner<T>>,
}

impl<T: Transport> Drop for Published<T> {
    fn drop(&mut self) {
        drop(self.entry.take());
        let Some(engine) = self.engine.upgrade() else { return };
        engine.changes.fetch_add(1, Ordering::SeqCst);
        if !engine.directory.is_p2p() && !engine.closed.load(Ordering::SeqCst) {
            let weak = self.engine.clone();
            engine.detach("the descriptor could not be published without a region", async move {
                match weak.upgrade() {
                    Some(engine) => engine.publish(false).await,
                    None => Ok(()),
                }
            });
        }
    }
}

/// `YYYY-MM-DD HH:MM:SS.uuuuuu`, in UTC.
fn timestamp(wall_ms: u64) -> String {
    let (days, ms) = (wall_ms / 86_400_000, wall_ms % 86_400_000);
    // Days to a civil date, counting in eras of 400 years that begin on 1 March.
    let z = days + 719_468;
    let (era, day_of_era) = (z / 146_097, z % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second, micro) = (ms / 3_600_000, ms / 60_000 % 60, ms / 1000 % 60, ms % 1000 * 1000);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{micro:06}")
}

#[cfg(test)]
mod tests {
    use super::timestamp;

    #[test]
    fn timestamps_are_dates() {
        for (ms, text) in [
            (0, "1970-01-01 00:00:00.000000"),
            (951_782_400_000, "2000-02-29 00:00:00.000000"),
            (1_763_662_935_141, "2025-11-20 18:22:15.141000"),
            (4_107_542_399_999, "2100-02-28 23:59:59.999000"),
            (4_107_542_400_000, "2100-03-01 00:00:00.000000"),
        ] {
            assert_eq!(timestamp(ms), text);
        }
    }
}
