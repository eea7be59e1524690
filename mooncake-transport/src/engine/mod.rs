//! Transfer engine: registers and publishes memory, finds other engines, transfers bytes, and
//! repeats failed transfers where that is safe.

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
mod retired_spans;
mod target;
mod targets;
mod upkeep;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use futures::{FutureExt, Stream};
use mooncake_core::clock::{Moment, Rng, SharedClock};
use mooncake_core::memory::{MemorySource, MemorySpan};
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;
use tokio::task::AbortHandle;
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
use regions::{OpenRange, Regions};
use retired_spans::{RetiredSpans, addresses};
use targets::Targets;

/// Endpoint of one node for all transfers. Clones are handles of the same engine. The drop of the
/// last handle withdraws the segment in the background, if the runtime lives long enough.
/// [`close`](Self::close) waits for the withdrawal.
pub struct Engine<T: Transport> {
    inner: Arc<Inner<T>>,
}

/// Choice of the transfers that are plain copies and use no transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalCopies {
    /// No transfers.
    Never,
    /// Transfers to memory of an engine in this process.
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
    /// Address of the local handshake port, as other engines reach it.
    at: Option<HostPort>,
    limits: HandshakeConfig,
    clock: SharedClock,
    rng: Mutex<Rng>,
    local_copies: LocalCopies,
    /// True if descriptors are looked up once, and again after a failed transfer.
    caches: bool,
    regions: Arc<Regions>,
    retired_spans: RetiredSpans,
    meters: Meters,
    targets: Mutex<Targets<T>>,
    found: target::FoundProcesses,
    /// State of the mount: descriptors may report that the memory is not mounted yet.
    mount: AtomicU8,
    inbox: Arc<Inbox>,
    server: Mutex<Option<HandshakeServer>>,
    /// Number of changes to the memory that peers may reach.
    changes: AtomicU64,
    /// Last publication. The lock is held during a publication.
    publishing: tokio::sync::Mutex<Publication>,
    /// True if another engine has taken the name.
    is_replaced: AtomicBool,
    runtime: Option<tokio::runtime::Handle>,
    /// Tasks that end with the engine.
    tasks: Mutex<Vec<AbortHandle>>,
    closed: AtomicBool,
}

/// Last publication of the descriptor.
#[derive(Debug, Default)]
struct Publication {
    /// Number of the last change that the directory has, or `None` after a failed publication.
    change: Option<u64>,
    /// Fingerprint of the entry, or `None` if the directory changes the text.
    fingerprint: Option<u64>,
    /// True if the same descriptor was published again because the entry differed.
    is_republished: bool,
}

impl<T: Transport> Engine<T> {
    /// Records that peers may use the addresses of a span until `until`, although it is no longer
    /// offered to them.
    pub fn retire_span(&self, span: MemorySpan, until: Moment) {
        self.inner.retired_spans.add(addresses(span), until, self.inner.clock.now());
    }

    /// Returns whether peers may use an address of the span that was offered to them before.
    pub fn is_span_retired(&self, span: MemorySpan) -> bool {
        self.inner.retired_spans.overlap(&addresses(span), self.inner.clock.now())
    }

    /// Returns the name that other engines open. With `P2PHANDSHAKE` it is the local handshake
    /// address.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Returns the local handshake address as other engines reach it, or `None` without a handshake
    /// port.
    pub fn handshake_addr(&self) -> Option<&HostPort> {
        self.inner.at.as_ref()
    }

    /// Returns the identity of this run of this engine, which its handshake port tells.
    pub fn instance(&self) -> &str {
        self.inner.regions.instance()
    }

    /// Writes to memory of this engine that is open to peers, without the transport: nothing lands
    /// after the call. The caller makes sure that no peer uses the bytes.
    ///
    /// # Errors
    /// Returns `Invalid` for memory that is not open or is read-only, and the errors of the device.
    pub fn overwrite(&self, address: u64, bytes: &[u8]) -> Result<()> {
        self.inner.regions.overwrite(address, bytes)
    }

    /// Returns the transport.
    pub fn transport(&self) -> &Arc<T> {
        &self.inner.transport
    }

    /// Returns the directory of segments.
    pub fn directory(&self) -> &Directory {
        &self.inner.directory
    }

    /// Returns the clock of the deadlines.
    pub fn clock(&self) -> &SharedClock {
        &self.inner.clock
    }

    /// Opens memory to peers and publishes it. When the last handle and slice of the region is
    /// dropped, peers are refused and the descriptor is published again.
    ///
    /// # Errors
    /// Returns `Invalid` for a length of zero, and for an overlap with other memory of this engine
    /// that is open to peers.
    pub async fn register(&self, memory: Arc<dyn MemorySource>) -> Result<Region<T>> {
        let region = self.inner.open_region(memory)?;
        self.inner.publish(false).await?;
        Ok(region)
    }

    /// Registers several memory ranges, all or none, and publishes once.
    pub async fn register_many(&self, memory: Vec<Arc<dyn MemorySource>>) -> Result<Vec<Region<T>>> {
        let regions: Result<Vec<_>> =
            memory.into_iter().map(|memory| self.inner.open_region(memory)).collect();
        let regions = regions?;
        self.inner.publish(false).await?;
        Ok(regions)
    }

    /// Registers memory for the local side of transfers only. Peers are refused. The memory may
    /// overlap any other memory of this engine.
    ///
    /// # Errors
    /// Returns `Invalid` for a length of zero, and the errors of the transport.
    pub fn register_local(&self, memory: Arc<dyn MemorySource>) -> Result<Region<T>> {
        Region::register(&*self.inner.transport, memory, Access::Local)
    }

    /// Closes a region and waits until the directory reflects that. Returns `Busy` if the region
    /// has other handles or slices; the drop of the last one then closes it.
    pub async fn unregister(&self, region: Region<T>) -> Result<()> {
        self.unregister_many(vec![region]).await
    }

    /// Closes several regions and publishes once. Returns `Busy`, with the first address, if some
    /// are still in use. The others are closed all the same.
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
                format!(
                    "cannot close region now: it is in use. address={addr:#x}; it is closed when its last slice is dropped"
                ),
            )),
        }
    }

    /// Waits until the directory reflects the present registrations.
    pub async fn settle_publication(&self) -> Result<()> {
        self.inner.publish(false).await
    }

    /// Publishes the handshake address and the descriptor again, whatever the directory has.
    ///
    /// # Errors
    /// Returns `AlreadyExists` if another engine has taken the name, and the errors of the
    /// directory.
    pub async fn publish_again(&self) -> Result<()> {
        self.inner.publish_again().await
    }

    /// Returns the number of processes found so far. Addresses requested from a third party
    /// afterwards are valid in these processes: see [`Target::pinned`].
    pub fn look_ups(&self) -> LookUps {
        self.inner.found.look_ups()
    }

    /// Makes descriptors report, from the next publication on, that the memory is not mounted in a
    /// store yet. Until [`mounted`](Self::mounted) is called, the store may return the same
    /// addresses for an earlier process of this name. Has no effect after the first mount.
    pub fn expect_mount(&self) {
        let mount = &self.inner.mount;
        if mount.compare_exchange(NO_MOUNT, MOUNT_EXPECTED, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            self.inner.changes.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Publishes that a store has mounted memory of this engine. The store has then discarded the
    /// addresses of earlier processes.
    ///
    /// # Errors
    /// Returns the errors of the publication.
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

    /// Returns the present descriptor of this engine.
    pub fn descriptor(&self) -> SegmentDesc {
        self.inner.descriptor()
    }

    /// Opens the memory of another engine, or of this one. The result comes from the cache if the
    /// segment was opened before. Returns `NotFound` if no engine published the name, and
    /// `Unavailable` or `Timeout` if its owner does not respond.
    pub async fn open(&self, name: &str) -> Result<Target<T>> {
        // A full name, which most are, is found without being parsed.
        let mut known = self.inner.targets.lock().use_target(name);
        let full = if known.is_some() { name.into() } else { self.inner.full_name(name) };
        let name = &*full;
        if known.is_none() {
            known = self.inner.targets.lock().use_target(name);
        }
        if let Some(target) = known {
            if !self.inner.caches && name != self.inner.name {
                self.inner.look_up_again(&target, &target.route()).await?;
            }
            return Ok(target);
        }
        let route = self.inner.route(name).await?;
        let create = || Target::new(name, route, self.inner.rng.lock().split());
        Ok(self.inner.targets.lock().use_or_insert(name, create))
    }

    /// Opens a segment like [`open`](Self::open), before a deadline. Returns `Timeout` after the
    /// deadline. Needs the tokio runtime on which the engine was started, or an in-process
    /// directory.
    pub async fn open_by(&self, name: &str, deadline: Moment) -> Result<Target<T>> {
        let left = deadline.since(self.inner.clock.now());
        let late = || {
            Error::new(
                ErrorCode::RpcTimeout,
                format!("cannot open segment {name:?}: its deadline has passed"),
            )
        };
        match &self.inner.runtime {
            _ if left.is_zero() => Err(late()),
            None => self.open(name).await,
            Some(_) => tokio::time::timeout(left, self.open(name)).await.unwrap_or_else(|_| Err(late())),
        }
    }

    /// Removes an opened segment from the cache, so that the next [`open`](Self::open) looks it up
    /// again.
    pub fn forget(&self, name: &str) {
        let removed = self.inner.targets.lock().remove(&self.inner.full_name(name));
        // The drop may close a connection, so that it happens outside of the lock.
        drop(removed);
    }

    /// Looks up a segment again if it is open. Without a response, its descriptor stays.
    ///
    /// # Errors
    /// Those of the metadata service, and of the connection if the descriptor has changed.
    pub async fn refresh(&self, name: &str) -> Result<()> {
        let full = self.inner.full_name(name);
        let known = self.inner.targets.lock().use_target(&full);
        match known.filter(|target| target.name() != self.inner.name) {
            Some(target) => self.inner.look_up_again(&target, &target.route()).await.map(drop),
            None => Ok(()),
        }
    }

    /// Sends a notification to another engine's handshake port.
    pub async fn notify(&self, segment: &str, notification: &Notification) -> Result<()> {
        self.inner.notify(segment, notification).await
    }

    /// Returns the notifications that arrived since the last call, in order.
    pub fn take_notifications(&self) -> Vec<Notification> {
        self.inner.inbox.take()
    }

    /// Returns a stream of notifications, which ends when the engine is closed. Each notification
    /// goes to one consumer only.
    pub fn notifications(&self) -> impl Stream<Item = Notification> + Send + use<T> {
        let inbox = self.inner.inbox.clone();
        futures::stream::unfold(inbox, |inbox| async move {
            let next = inbox.next().await?;
            Some((next, inbox))
        })
    }

    /// Returns whether another engine's handshake port responds within `patience`. Returns
    /// `NotFound` if the name has no handshake port.
    pub async fn probe(&self, segment: &str, patience: Duration) -> Result<bool> {
        let at = self.inner.handshake_of(segment).await?;
        Ok(handshake::probe(&at, patience, &self.inner.limits).await)
    }

    /// Withdraws the segment and closes the handshake port. Memory stays registered, and open to
    /// peers that have found it, until its regions are dropped.
    pub async fn close(&self) -> Result<()> {
        if self.inner.closed.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        // The lock waits for a publication in progress. Later publications see that the engine is
        // closed.
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
    /// Opens memory to peers. The caller publishes the change.
    fn open_region(self: &Arc<Self>, memory: Arc<dyn MemorySource>) -> Result<Region<T>> {
        let claim = self.regions.claim(memory.span())?;
        let mut region = Region::register(&*self.transport, memory, Access::Remote)?;
        let key = region.registration().map(|r| self.transport.export(r)).unwrap_or_default();
        let entry = self.regions.open(&claim, region.span(), key)?;
        let published = Published { entry: Some(entry), engine: Arc::downgrade(self) };
        region.tie(Some(Box::new(published)), Box::new(claim));
        self.changes.fetch_add(1, Ordering::SeqCst);
        Ok(region)
    }

    /// Returns the name of a segment as it is looked up: without a leading `/`, and with a port if
    /// the name is an address.
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

    /// Publishes the registrations that exist when the lock is acquired, so that the last
    /// publication is the newest.
    async fn publish(&self, fresh: bool) -> Result<()> {
        let mut known = self.publishing.lock().await;
        let change = self.changes.load(Ordering::SeqCst);
        if self.closed.load(Ordering::SeqCst) || known.change == Some(change) {
            return Ok(());
        }
        self.publish_locked(&mut known, fresh).await
    }

    /// Publishes the present descriptor, whatever the directory has.
    async fn publish_locked(&self, known: &mut Publication, fresh: bool) -> Result<()> {
        let change = self.changes.load(Ordering::SeqCst);
        *known = Publication::default();
        let print = self.directory.publish(&self.descriptor(), fresh).await?;
        *known = Publication { change: Some(change), fingerprint: print, is_republished: false };
        Ok(())
    }

    /// Runs a future in the background. Without a runtime the future must finish at once, as those
    /// of in-process directories do.
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
        self.tasks.get_mut().iter().for_each(AbortHandle::abort);
        if !self.closed.swap(true, Ordering::SeqCst) {
            let (directory, name, at) = (self.directory.clone(), self.name.clone(), self.at.clone());
            self.detach(
                "cannot withdraw segment",
                async move { directory.withdraw(&name, at.as_ref()).await },
            );
        }
    }
}

/// Guard in a published region, dropped before the deregistration.
struct Published<T: Transport> {
    entry: Option<OpenRange>,
    engine: std::sync::Weak<Inner<T>>,
}

impl<T: Transport> Drop for Published<T> {
    fn drop(&mut self) {
        drop(self.entry.take());
        let Some(engine) = self.engine.upgrade() else { return };
        engine.changes.fetch_add(1, Ordering::SeqCst);
        if !engine.directory.is_p2p() && !engine.closed.load(Ordering::SeqCst) {
            let weak = self.engine.clone();
            engine.detach("cannot publish the descriptor after a region was dropped", async move {
                match weak.upgrade() {
                    Some(engine) => engine.publish(false).await,
                    None => Ok(()),
                }
            });
        }
    }
}

/// Formats a time as `YYYY-MM-DD HH:MM:SS.uuuuuu`, in UTC.
fn timestamp(wall_ms: u64) -> String {
    let (days, ms) = (wall_ms / 86_400_000, wall_ms % 86_400_000);
    // Converts days to a civil date, in eras of 400 years that begin on 1 March.
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
