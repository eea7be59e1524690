//! Objects in this client's segments that outlive the master. The client learns of them from the
//! master and announces them to the next one.
//!
//! The master reports which objects are new and which are gone. These reports alone are not enough.
//! The last changes of a master are never reported, and space may have been reused. The client
//! therefore computes a checksum of each object. The checksum is valid once the master has been
//! asked again and the object was still there. Before the client announces an object, it checks the
//! bytes again.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use mooncake_core::alloc::Extent;
use mooncake_core::clock::{Moment, SharedClock};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::{ReplicaId, SegmentId};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_transport::{Slice, Transport};
use tokio::task::JoinSet;

use crate::checksum::Sum;
use crate::deadline::Deadline;
use crate::errors::shown;
use crate::inventory::{Entry, Inventory, ReplicaPosition};
use crate::state::Inner;
use mooncake_protocol::message::{
    AnnounceExpired, AnnounceReplicas, AnnounceTimed, FetchExpired, MountKeptSegment, ReleaseKept,
};
use mooncake_protocol::wire::{ItemLifetime, StoredReplica};

/// Divisor of the ping interval. At most this part of each interval is used for checksums of new
/// objects.
const SUMMING: u32 = 10;
/// Maximum number of objects that are checked and announced together.
const BATCH: usize = 1024;
/// Number of bytes at which a batch of objects is full.
const BATCH_BYTES: u64 = 64 << 20;
/// Number of batches that are checked concurrently.
const AT_ONCE: usize = 4;
/// Maximum number of objects that are announced before the master is asked for changes. The master
/// holds twice as many changes for a client.
const MOST_UNHEARD: usize = 1 << 18;
/// Maximum number of extents in one RPC.
const EXTENTS: usize = 16 << 10;
/// Pause before a failed announcement is repeated.
const PAUSE: Duration = Duration::from_millis(200);
/// Granularity of the space of an object, in bytes.
const GRAIN: u64 = 64;

/// Returns whether an error means that the master lacks an RPC of the inventory or has another
/// version of it.
pub(crate) fn is_refusal(error: &Error) -> bool {
    error.code() == ErrorCode::NotSupported || error.kind() == ErrorKind::VersionMismatch
}

/// Logs why objects do not outlive this master.
pub(crate) fn log_refusal(error: &Error) {
    tracing::warn!("objects do not outlive a restart of this master: {error}");
}

impl<T: Transport> Inner<T> {
    /// Asks the master for changes for the first time. The master records the segments that are
    /// mounted after this request, and no others.
    pub(crate) async fn begin_inventory(&self, deadline: &Deadline) -> Result<()> {
        self.exchange_promise(deadline).await?;
        if !self.config.outlive_master {
            return Ok(());
        }
        let mut inventory = self.inventory.lock().await;
        let asked = self.master.inventory(self.id, 0);
        match deadline.bound("asking for the inventory", asked).await {
            Ok(timed) => {
                let same = inventory.turn_over(timed.page.epoch);
                inventory.apply(timed, self.config.clock.now());
                if same && !is_planted("expired-not-fetched") {
                    self.fetch_expired(&mut inventory, deadline).await?;
                }
            }
            Err(error) if is_refusal(&error) => {
                log_refusal(&error);
                inventory.reset();
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Requests the replicas that the master listed when this client expired.
    async fn fetch_expired(&self, inventory: &mut Inventory, deadline: &Deadline) -> Result<()> {
        let own: Vec<SegmentId> = {
            let segments = self.segments.lock();
            segments
                .iter()
                .filter(|mounted| mounted.own.is_some() && !mounted.leaving)
                .map(|m| m.id())
                .collect()
        };
        let moving: Vec<SegmentId> = self.moving.lock().iter().map(|moving| moving.segment.id).collect();
        for segment in own.into_iter().chain(moving) {
            let mut after = 0;
            loop {
                let asked = self.master.call(FetchExpired { client: self.id, segment, after });
                let page = match deadline.bound("asking for expired replicas", asked).await {
                    Ok(page) => page,
                    Err(error) if is_refusal(&error) => return Ok(()),
                    Err(error) => return Err(error),
                };
                if Some(page.epoch) != inventory.epoch {
                    // The response comes from another master. The next ping detects that.
                    return Ok(());
                }
                let now = self.config.clock.now();
                let stored = page.changes.into_iter().filter_map(|change| change.stored);
                stored
                    .filter(|stored| stored.segment == segment)
                    .for_each(|stored| inventory.list_expired(stored, now));
                if page.whole || page.next <= after {
                    break;
                }
                after = page.next;
            }
        }
        inventory.sums.clear();
        Ok(())
    }

    /// Requests the changes from the master, and computes checksums of new objects. Returns whether
    /// the segments must be mounted again.
    ///
    /// A master that does not know this client reports that in its response to the next ping, and
    /// all segments are mounted again. A new master that responds twice does know this client. It
    /// received the segments while they were being mounted at the previous master, and so without a
    /// list of their objects.
    pub(crate) async fn take_inventory(&self, deadline: &Deadline) -> Result<bool> {
        let mut inventory = self.inventory.lock().await;
        let Some(epoch) = inventory.epoch else { return Ok(false) };
        // The report on objects that were just announced can wait. It is requested when all objects
        // are served, or when the master holds many changes for this client.
        let fresh = std::mem::take(&mut inventory.fresh);
        inventory.unheard += fresh;
        if fresh > 0 && inventory.unheard < MOST_UNHEARD && self.is_announcing() {
            return Ok(false);
        }
        inventory.unheard = 0;
        if let Some(other) = self.fetch_changes(&mut inventory, epoch, deadline).await? {
            let again = inventory.met.replace(other) == Some(other);
            return Ok(again && !is_planted("inventory-keeps-the-dead-epoch"));
        }
        self.sum_up(&mut inventory).await.map(|()| false)
    }

    /// Requests the changes since the last request, and applies them. Returns the epoch of the
    /// master if it is not `epoch`.
    async fn fetch_changes(
        &self,
        inventory: &mut Inventory,
        epoch: u64,
        deadline: &Deadline,
    ) -> Result<Option<u64>> {
        loop {
            let asked = self.master.inventory(self.id, inventory.heard);
            let timed = deadline.bound("asking for the inventory", asked).await?;
            if timed.page.epoch != epoch {
                return Ok(Some(timed.page.epoch));
            }
            let whole = timed.page.whole;
            inventory.apply(timed, self.config.clock.now());
            if whole {
                break;
            }
        }
        inventory.heard_all();
        inventory.seal();
        inventory.note();
        Ok(None)
    }

    /// Returns the number of objects that would outlive the master, with the changes that the
    /// master has made until now. Without a response of the master, earlier changes count.
    pub(crate) async fn count_lasting(&self) -> usize {
        let mut inventory = self.inventory.lock().await;
        if let Some(epoch) = inventory.epoch
            && let Err(error) = self.fetch_changes(&mut inventory, epoch, &self.deadline()).await
        {
            tracing::debug!(client = %self.id, "no inventory: {error}");
        }
        inventory.count_lasting()
    }

    /// Computes missing checksums, for a limited time.
    async fn sum_up(&self, inventory: &mut Inventory) -> Result<()> {
        let limit = self.config.ping_interval / SUMMING;
        let (clock, until) = (self.config.clock.clone(), self.config.clock.now().after(limit));
        while clock.now() < until {
            let mut batch = Vec::new();
            let mut bytes = 0;
            while bytes < BATCH_BYTES
                && batch.len() < BATCH
                && let Some(id) = inventory.unseen.pop_front()
            {
                let Some(entry) = inventory.entries.get(&id) else { continue };
                bytes += entry.stored.len;
                batch.extend(self.bytes_of(&entry.stored).map(|slice| (id, slice)));
            }
            if batch.is_empty() {
                return Ok(());
            }
            let clock = clock.clone();
            let (sums, left) = blocking(move || sums_until(batch, &clock, until)).await?;
            for (id, sum) in sums {
                if let Some(entry) = inventory.entries.get_mut(&id) {
                    entry.sum = Some(sum);
                    inventory.summed.push(id);
                }
            }
            left.into_iter().rev().for_each(|id| inventory.unseen.push_front(id));
        }
        Ok(())
    }

    /// Returns the bytes of an object if its segment is still mounted.
    fn bytes_of(&self, stored: &StoredReplica) -> Option<Slice<T>> {
        let segments = self.segments.lock();
        let mounted = segments.iter().find(|mounted| mounted.id() == stored.segment)?;
        let start = usize::try_from(stored.offset).ok()?;
        let end = start.checked_add(usize::try_from(stored.len).ok()?)?;
        mounted.region.slice(start..end).ok()
    }

    /// Mounts a segment with the objects that are to be announced. Their space stays reserved.
    pub(crate) async fn offer_kept(
        &self,
        segment: &mooncake_core::replica::Segment,
        deadline: &Deadline,
    ) -> Result<()> {
        let kept = MountKeptSegment { segment: Cow::Borrowed(segment), client: self.id };
        match deadline.bound("mounting", self.master.call(kept)).await {
            Err(error) if is_refusal(&error) => {
                log_refusal(&error);
                self.inventory.lock().await.kept.retain(|(kept, _), _| *kept != segment.id);
                return deadline.bound("mounting", self.master.mount(self.id, segment)).await;
            }
            outcome => outcome?,
        }
        let mut extents: Vec<_> = {
            let inventory = self.inventory.lock().await;
            inventory.kept_in(segment.id).filter_map(extent).collect()
        };
        // In this order, an allocator cuts all extents from the front of the remaining space.
        extents.sort_unstable_by_key(|extent| extent.offset);
        let mut parts = extents.chunks(EXTENTS).peekable();
        loop {
            let part = parts.next().unwrap_or_default();
            let last = parts.peek().is_none();
            let keep = self.master.keep(self.id, segment.id, part, last);
            match deadline.bound("keeping space", keep).await {
                Ok(()) if last => return Ok(()),
                Ok(()) => {}
                Err(error) if error.code() == ErrorCode::InvalidParams => {
                    // The extents are invalid: two of them may overlap, for example. None of the
                    // objects can be trusted then.
                    tracing::warn!(segment = %segment.id, "objects of before cannot be kept: {error}");
                    self.inventory.lock().await.kept.retain(|(kept, _), _| *kept != segment.id);
                    let release = self.master.call(ReleaseKept { client: self.id, segment: segment.id });
                    return deadline.bound("giving space back", release).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Checks the kept objects in the given segments in the background, and announces those that
    /// are unchanged.
    pub(crate) fn announce_kept(self: &Arc<Self>, segments: Vec<SegmentId>) {
        let turn = self.announcing_turn.load(Relaxed);
        let client = Arc::downgrade(self);
        let (after, stopped) = (self.promises.lock().announce_after, self.announcing_stopped.clone());
        let task = self.runtime.spawn(async move {
            // Clients of a restarted master announce one after another.
            let stop = stopped.notified();
            tokio::pin!(stop);
            stop.as_mut().enable();
            if client.upgrade().is_none_or(|client| client.announcing_turn.load(Relaxed) != turn) {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(after) => {}
                () = stop => return,
            }
            for segment in segments {
                loop {
                    let Some(client) = client.upgrade() else { return };
                    let Err(error) = client.announce_segment(segment, turn).await else { break };
                    if client.announcing_turn.load(Relaxed) != turn || client.usable().is_err() {
                        return;
                    }
                    // The master reserves the space of the objects until the announcement reaches
                    // it.
                    tracing::warn!(%segment, "objects of before are not announced yet: {error}");
                    drop(client);
                    tokio::time::sleep(PAUSE).await;
                }
            }
        });
        *self.announcing.lock() = Some(task);
    }

    fn is_announcing(&self) -> bool {
        self.announcing.lock().as_ref().is_some_and(|task| !task.is_finished())
    }

    /// Stops the check of kept objects and waits for its end.
    pub(crate) async fn stop_announcing(&self) {
        self.announcing_turn.fetch_add(1, Relaxed);
        self.announcing_stopped.notify_waiters();
        let task = self.announcing.lock().take();
        if let Some(task) = task {
            let _ = task.await;
        }
    }

    async fn announce_segment(self: &Arc<Self>, segment: SegmentId, turn: u64) -> Result<()> {
        let mut kept: VecDeque<ReplicaPosition> = {
            let inventory = self.inventory.lock().await;
            let mut kept: Vec<_> = inventory.kept_in(segment).filter(|entry| !entry.announced).collect();
            // The oldest objects are announced first, because the last ones are evicted last.
            kept.sort_unstable_by_key(|entry| (entry.stored.epoch, entry.stored.number));
            kept.into_iter().map(|entry| (segment, entry.stored.offset)).collect()
        };
        let (all, begun) = (kept.len(), self.config.clock.now());
        let mut looking = JoinSet::new();
        let mut taken = 0;
        loop {
            let stopped = self.announcing_turn.load(Relaxed) != turn || self.usable().is_err();
            while !stopped && looking.len() < AT_ONCE && !kept.is_empty() {
                let batch = self.next_batch(&mut kept).await;
                looking.spawn_blocking(move || check(batch));
            }
            let Some(looked) = looking.join_next().await else { break };
            let (same, other) = looked.map_err(joined)?;
            if !other.is_empty() {
                tracing::warn!(%segment, objects = other.len(), "objects of before are not what they were: dropped");
            }
            let mut inventory = self.inventory.lock().await;
            other.into_iter().for_each(|position| inventory.went(position));
            drop(inventory);
            if !stopped {
                taken += self.announce_batch(same).await?;
            }
        }
        if self.announcing_turn.load(Relaxed) != turn {
            return Ok(());
        }
        let took = self.config.clock.now().since(begun);
        tracing::info!(%segment, objects = taken, of = all, ?took, "objects of before are served again");
        self.deadline()
            .bound("giving space back", self.master.call(ReleaseKept { client: self.id, segment }))
            .await
    }

    async fn next_batch(&self, kept: &mut VecDeque<ReplicaPosition>) -> Vec<(Entry, Option<Slice<T>>)> {
        let inventory = self.inventory.lock().await;
        let mut batch = Vec::with_capacity(BATCH.min(kept.len()));
        let mut bytes = 0;
        while bytes < BATCH_BYTES
            && batch.len() < BATCH
            && let Some(position) = kept.pop_front()
        {
            let Some(entry) = inventory.kept.get(&position) else { continue };
            bytes += entry.stored.len;
            batch.push((entry.clone(), self.bytes_of(&entry.stored)));
        }
        batch
    }

    /// Announces objects. Returns the number of objects that the master accepted.
    async fn announce_batch(&self, batch: Vec<Entry>) -> Result<usize> {
        let (expired, kept): (Vec<_>, Vec<_>) = batch.into_iter().partition(|entry| entry.expired);
        let (timed, kept): (Vec<_>, Vec<_>) = kept.into_iter().partition(|entry| entry.lifetime.is_some());
        let mut taken = 0;
        let batches = [(expired, Announced::Expired), (timed, Announced::Timed), (kept, Announced::Kept)];
        for (batch, kind) in batches {
            if !batch.is_empty() {
                taken += self.announce_as(batch, kind).await?;
            }
        }
        Ok(taken)
    }

    async fn announce_as(&self, batch: Vec<Entry>, kind: Announced) -> Result<usize> {
        let now = self.config.clock.now();
        let tell = |entry: Entry| {
            let left = u64::try_from(entry.pinned.since(now).as_millis()).unwrap_or(u64::MAX);
            StoredReplica { soft_pin_ms: left, ..entry.stored }
        };
        let lifetime = |(index, entry): (usize, &Entry)| {
            Some(ItemLifetime { index: index as u64, lifetime: entry.lifetime? })
        };
        let lifetimes: Vec<_> = batch.iter().enumerate().filter_map(lifetime).collect();
        let batch: Vec<_> = batch.into_iter().map(tell).collect();
        // The lock is held during the request, so that reports of the master about these objects
        // are applied afterwards.
        let mut inventory = self.inventory.lock().await;
        inventory.offer(&batch);
        let (client, stored) = (self.id, Cow::Borrowed(&batch[..]));
        let asked = async {
            match kind {
                Announced::Expired => {
                    self.master.call_each(AnnounceExpired { client, stored }, batch.len()).await
                }
                Announced::Timed => {
                    let lifetimes = Cow::Borrowed(&lifetimes[..]);
                    let call = AnnounceTimed { client, stored, lifetimes };
                    match self.master.call_each(call, batch.len()).await {
                        // An older master would serve the objects for ever.
                        Err(error) if is_refusal(&error) => Ok(vec![Err(error); batch.len()]),
                        outcome => outcome,
                    }
                }
                Announced::Kept => {
                    self.master.call_each(AnnounceReplicas { client, stored }, batch.len()).await
                }
            }
        };
        let announced = self.deadline().bound("announcing", asked).await?;
        let mut taken = 0;
        for (stored, outcome) in batch.iter().zip(announced) {
            let position = (stored.segment, stored.offset);
            match outcome {
                Ok(()) => {
                    taken += 1;
                    if let Some(kept) = inventory.kept.get_mut(&position) {
                        kept.announced = true;
                    }
                }
                Err(error) => {
                    tracing::debug!(key = shown(&stored.key), "not taken: {error}");
                    inventory.went(position);
                }
            }
        }
        inventory.fresh += taken;
        Ok(taken)
    }
}

/// Kind of announced objects.
#[derive(Clone, Copy)]
enum Announced {
    /// Objects that the master listed when this client expired.
    Expired,
    /// Objects of an earlier master that end by themselves.
    Timed,
    /// Other objects of an earlier master.
    Kept,
}

/// Returns the space that an object takes.
fn extent(entry: &Entry) -> Option<Extent> {
    let len = entry.stored.len.checked_next_multiple_of(GRAIN)?;
    Some(Extent { offset: entry.stored.offset, len })
}

fn sum_of<T: Transport>(slice: &Slice<T>) -> Option<u64> {
    let mut sum = Sum::new();
    sum.slice(slice).ok()?;
    Some(sum.value())
}

/// Computes checksums until the time is over. Returns the checksums, and the objects that are left.
fn sums_until<T: Transport>(
    batch: Vec<(ReplicaId, Slice<T>)>,
    clock: &SharedClock,
    until: Moment,
) -> (Vec<(ReplicaId, u64)>, Vec<ReplicaId>) {
    let mut sums = Vec::with_capacity(batch.len());
    let mut left = Vec::new();
    for (id, slice) in batch {
        // At least one checksum is computed, even if the time is already over.
        if sums.is_empty() || clock.now() < until {
            sums.extend(sum_of(&slice).map(|sum| (id, sum)));
        } else {
            left.push(id);
        }
    }
    (sums, left)
}

/// Compares checksums. Returns the objects that are unchanged, and the positions of the others. An
/// expired object without a checksum counts as unchanged.
fn check<T: Transport>(batch: Vec<(Entry, Option<Slice<T>>)>) -> (Vec<Entry>, Vec<ReplicaPosition>) {
    let (mut same, mut other) = (Vec::with_capacity(batch.len()), Vec::new());
    for (entry, slice) in batch {
        let is_same = match (slice, entry.sum) {
            (Some(slice), Some(sum)) => sum_of(&slice) == Some(sum),
            (Some(_), None) => entry.expired,
            (None, _) => false,
        };
        if is_same {
            same.push(entry);
        } else {
            other.push((entry.stored.segment, entry.stored.offset));
        }
    }
    (same, other)
}

async fn blocking<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> Result<R> {
    tokio::task::spawn_blocking(work).await.map_err(joined)
}

fn joined(error: tokio::task::JoinError) -> Error {
    Error::new(ErrorCode::InternalError, format!("summing up failed: {error}"))
}
