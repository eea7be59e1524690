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
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::{Slice, Transport};
use tokio::task::JoinSet;

use crate::checksum::Sum;
use crate::deadline::Deadline;
use crate::errors::display_key;
use crate::inventory::{Entry, Inventory, ReplicaPosition};
use crate::state::Inner;
use mooncake_protocol::key_form::KeyForm;
use mooncake_protocol::master_client::is_missing_call;
use mooncake_protocol::message::{
    AnnounceExpired, AnnounceReplicas, AnnounceTimed, ExchangeEpochs, ExchangeKeyForm, FetchExpired,
    FetchUnclaimed, MountKeptSegment, ReleaseKept,
};
use mooncake_protocol::wire::{InventoryPage, ItemLifetime, StoredReplica};

/// Divisor of the ping interval. At most this part of each interval is used for checksums of new
/// objects.
const CHECKSUM_TIME_DIVISOR: u32 = 10;
/// Maximum number of objects that are checked and announced together.
const BATCH: usize = 1024;
/// Number of bytes at which a batch of objects is full.
const BATCH_BYTES: u64 = 64 << 20;
/// Number of batches that are checked concurrently.
const MAX_CONCURRENT_BATCHES: usize = 4;
/// Maximum number of objects that are announced before the master is asked for changes. The master
/// holds twice as many changes for a client.
const MAX_UNREPORTED: usize = 1 << 18;
/// Maximum number of extents in one RPC.
const MAX_EXTENTS: usize = 16 << 10;
/// Pause before a failed announcement is repeated.
const RETRY_PAUSE: Duration = Duration::from_millis(200);
/// Granularity of the space of an object, in bytes.
const SPACE_GRANULARITY: u64 = 64;

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
        let call = self.master.inventory(self.id, 0);
        match deadline.bound("asking for the inventory", call).await {
            Ok(timed) => {
                let is_same_master = inventory.turn_over(timed.page.epoch);
                inventory.apply(timed, self.config.clock.now());
                self.exchange_history(&mut inventory, deadline).await?;
                self.fetch_unclaimed(&mut inventory, &self.own_segments(), deadline).await?;
                if is_same_master && !is_planted("expired-not-fetched") {
                    self.fetch_expired(&mut inventory, deadline).await?;
                }
            }
            Err(error) if is_missing_call(&error) => {
                log_refusal(&error);
                inventory.reset();
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Exchanges with the master what is known of earlier masters, and converts the keys of their
    /// objects to the form of this master.
    pub(crate) async fn exchange_history(
        &self,
        inventory: &mut Inventory,
        deadline: &Deadline,
    ) -> Result<()> {
        self.exchange_epochs(inventory, deadline).await?;
        let call = self.master.call(ExchangeKeyForm { client: self.id, held: inventory.held_objects() });
        match deadline.bound("exchanging the form of keys", call).await {
            Ok(keys) if Some(keys.epoch) == inventory.epoch => {
                inventory.adopt_key_form(KeyForm::of_master(keys.has_tenants));
            }
            // The response comes from another master, which the next ping detects.
            Ok(_) => {}
            Err(error) if is_missing_call(&error) => inventory.key_form = None,
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Exchanges with the master what is known of the order of earlier masters. A master that lacks
    /// the request does not need it.
    async fn exchange_epochs(&self, inventory: &mut Inventory, deadline: &Deadline) -> Result<()> {
        let epochs = Cow::Borrowed(&inventory.epochs[..]);
        let call = self.master.call(ExchangeEpochs { client: self.id, epochs });
        match deadline.bound("exchanging the order of masters", call).await {
            Ok(known) => inventory.learn_epochs(&known),
            Err(error) if is_missing_call(&error) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Returns the segments of this client's own memory.
    fn own_segments(&self) -> Vec<SegmentId> {
        let mut own: Vec<SegmentId> = {
            let segments = self.segments.lock();
            segments
                .iter()
                .filter(|mounted| mounted.own.is_some() && !mounted.leaving)
                .map(|m| m.id())
                .collect()
        };
        own.extend(self.moving.lock().iter().map(|moving| moving.segment.id));
        own
    }

    /// Requests the replicas that the master listed when this client expired.
    async fn fetch_expired(&self, inventory: &mut Inventory, deadline: &Deadline) -> Result<()> {
        for segment in self.own_segments() {
            let mut after = 0;
            loop {
                let call = self.master.call(FetchExpired { client: self.id, segment, after });
                let bounded = deadline.bound("asking for expired replicas", call).await;
                let Some(page) = self.page_of_segment(bounded, inventory, segment)? else { return Ok(()) };
                let (next, now) = (page.next, self.config.clock.now());
                let is_last = page.whole || next <= after;
                let stored = page.changes.into_iter().filter_map(|change| change.stored);
                stored.for_each(|stored| inventory.list_expired(stored, now));
                if is_last {
                    break;
                }
                after = next;
            }
        }
        inventory.sums.clear();
        Ok(())
    }

    /// Requests the replicas of earlier masters that still count although the time to announce
    /// replicas of earlier masters is over. Until then, the list is empty.
    pub(crate) async fn fetch_unclaimed(
        &self,
        inventory: &mut Inventory,
        segments: &[SegmentId],
        deadline: &Deadline,
    ) -> Result<()> {
        for &segment in segments {
            let mut after = 0;
            while inventory.has_retained(segment) {
                let call = self.master.call(FetchUnclaimed { client: self.id, segment, after });
                let bounded = deadline.bound("asking for unclaimed replicas", call).await;
                let Some(page) = self.page_of_segment(bounded, inventory, segment)? else { return Ok(()) };
                page.changes
                    .iter()
                    .filter_map(|change| change.stored.as_ref())
                    .for_each(|stored| inventory.list_unclaimed(stored));
                if page.whole || page.next <= after {
                    break;
                }
                after = page.next;
            }
        }
        Ok(())
    }

    /// Returns a page of replicas in a segment. `None` if the master has no such list, or if the
    /// response comes from another master, which the next ping detects.
    fn page_of_segment(
        &self,
        page: Result<InventoryPage>,
        inventory: &Inventory,
        segment: SegmentId,
    ) -> Result<Option<InventoryPage>> {
        match page {
            Ok(mut page) if Some(page.epoch) == inventory.epoch => {
                page.changes
                    .retain(|change| change.stored.as_ref().is_some_and(|stored| stored.segment == segment));
                Ok(Some(page))
            }
            Ok(_) => Ok(None),
            Err(error) if is_missing_call(&error) => Ok(None),
            Err(error) => Err(error),
        }
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
        let newly_accepted = std::mem::take(&mut inventory.newly_accepted);
        inventory.unreported += newly_accepted;
        if newly_accepted > 0 && inventory.unreported < MAX_UNREPORTED && self.is_announcing() {
            return Ok(false);
        }
        inventory.unreported = 0;
        if let Some(other) = self.fetch_changes(&mut inventory, epoch, deadline).await? {
            let again = inventory.other_epoch.replace(other) == Some(other);
            return Ok(again && !is_planted("inventory-keeps-the-dead-epoch"));
        }
        self.compute_checksums(&mut inventory).await.map(|()| false)
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
            let call = self.master.inventory(self.id, inventory.last_change);
            let timed = deadline.bound("asking for the inventory", call).await?;
            if timed.page.epoch != epoch {
                return Ok(Some(timed.page.epoch));
            }
            let whole = timed.page.whole;
            inventory.apply(timed, self.config.clock.now());
            if whole {
                break;
            }
        }
        inventory.remove_unreported();
        inventory.seal();
        inventory.write_journal();
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
    async fn compute_checksums(&self, inventory: &mut Inventory) -> Result<()> {
        let limit = self.config.ping_interval / CHECKSUM_TIME_DIVISOR;
        let (clock, until) = (self.config.clock.clone(), self.config.clock.now().after(limit));
        while clock.now() < until {
            let mut batch = Vec::new();
            let mut bytes = 0;
            while bytes < BATCH_BYTES
                && batch.len() < BATCH
                && let Some(id) = inventory.unsummed.pop_front()
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
            left.into_iter().rev().for_each(|id| inventory.unsummed.push_front(id));
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
    pub(crate) async fn mount_with_reserved_space(
        &self,
        segment: &mooncake_core::replica::Segment,
        deadline: &Deadline,
    ) -> Result<()> {
        let mount = MountKeptSegment { segment: Cow::Borrowed(segment), client: self.id };
        match deadline.bound("mounting", self.master.call(mount)).await {
            Err(error) if is_missing_call(&error) => {
                log_refusal(&error);
                self.inventory.lock().await.retained.retain(|(id, _), _| *id != segment.id);
                return deadline.bound("mounting", self.master.mount(self.id, segment)).await;
            }
            outcome => outcome?,
        }
        let mut extents: Vec<_> = {
            let inventory = self.inventory.lock().await;
            inventory.retained_in(segment.id).filter_map(extent).collect()
        };
        // In this order, an allocator cuts all extents from the front of the remaining space.
        extents.sort_unstable_by_key(|extent| extent.offset);
        let mut parts = extents.chunks(MAX_EXTENTS).peekable();
        loop {
            let part = parts.next().unwrap_or_default();
            let last = parts.peek().is_none();
            let keep = self.master.reserve_extents(self.id, segment.id, part, last);
            match deadline.bound("keeping space", keep).await {
                Ok(()) if last => return Ok(()),
                Ok(()) => {}
                Err(error) if error.code() == ErrorCode::InvalidParams => {
                    // The extents are invalid: two of them may overlap, for example. None of the
                    // objects can be trusted then.
                    tracing::warn!(segment = %segment.id, "objects of before cannot be kept: {error}");
                    self.inventory.lock().await.retained.retain(|(id, _), _| *id != segment.id);
                    let release = self.master.call(ReleaseKept { client: self.id, segment: segment.id });
                    return deadline.bound("giving space back", release).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Checks the retained objects in the given segments in the background, and announces those
    /// that are unchanged.
    pub(crate) fn announce_retained(self: &Arc<Self>, segments: Vec<SegmentId>) {
        let generation = self.announcing_generation.load(Relaxed);
        let client = Arc::downgrade(self);
        let (after, stopped) = (self.promises.lock().announce_after, self.announcing_stopped.clone());
        let task = self.runtime.spawn(async move {
            // Clients of a restarted master announce one after another.
            let stop = stopped.notified();
            tokio::pin!(stop);
            stop.as_mut().enable();
            if client.upgrade().is_none_or(|client| client.announcing_generation.load(Relaxed) != generation)
            {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(after) => {}
                () = stop => return,
            }
            for segment in segments {
                loop {
                    let Some(client) = client.upgrade() else { return };
                    let Err(error) = client.announce_segment(segment, generation).await else { break };
                    if client.announcing_generation.load(Relaxed) != generation || client.usable().is_err() {
                        return;
                    }
                    // The master reserves the space of the objects until the announcement reaches
                    // it.
                    tracing::warn!(%segment, "objects of before are not announced yet: {error}");
                    drop(client);
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            }
        });
        *self.announcing.lock() = Some(task);
    }

    fn is_announcing(&self) -> bool {
        self.announcing.lock().as_ref().is_some_and(|task| !task.is_finished())
    }

    /// Stops the check of retained objects and waits for its end.
    pub(crate) async fn stop_announcing(&self) {
        self.announcing_generation.fetch_add(1, Relaxed);
        self.announcing_stopped.notify_waiters();
        let task = self.announcing.lock().take();
        if let Some(task) = task {
            let _ = task.await;
        }
    }

    async fn announce_segment(self: &Arc<Self>, segment: SegmentId, generation: u64) -> Result<()> {
        let mut positions: VecDeque<ReplicaPosition> = {
            let inventory = self.inventory.lock().await;
            let mut entries: Vec<_> =
                inventory.retained_in(segment).filter(|entry| !entry.announced).collect();
            // The oldest objects are announced first, because the last ones are evicted last.
            entries.sort_unstable_by_key(|entry| (entry.stored.epoch, entry.stored.number));
            entries.into_iter().map(|entry| (segment, entry.stored.offset)).collect()
        };
        let (all, started) = (positions.len(), self.config.clock.now());
        let mut checks = JoinSet::new();
        let mut accepted = 0;
        loop {
            let stopped = self.announcing_generation.load(Relaxed) != generation || self.usable().is_err();
            while !stopped && checks.len() < MAX_CONCURRENT_BATCHES && !positions.is_empty() {
                let batch = self.next_batch(&mut positions).await;
                checks.spawn_blocking(move || verify_checksums(batch));
            }
            let Some(checked) = checks.join_next().await else { break };
            let (unchanged, changed) = checked.map_err(join_error)?;
            if !changed.is_empty() {
                tracing::warn!(%segment, objects = changed.len(), "objects of before are not what they were: dropped");
            }
            let mut inventory = self.inventory.lock().await;
            changed.into_iter().for_each(|position| inventory.remove_retained(position));
            drop(inventory);
            if !stopped {
                accepted += self.announce_batch(unchanged).await?;
            }
        }
        if self.announcing_generation.load(Relaxed) != generation {
            return Ok(());
        }
        let took = self.config.clock.now().since(started);
        tracing::info!(%segment, objects = accepted, of = all, ?took, "objects of before are served again");
        self.deadline()
            .bound("giving space back", self.master.call(ReleaseKept { client: self.id, segment }))
            .await
    }

    async fn next_batch(&self, positions: &mut VecDeque<ReplicaPosition>) -> Vec<(Entry, Option<Slice<T>>)> {
        let inventory = self.inventory.lock().await;
        let mut batch = Vec::with_capacity(BATCH.min(positions.len()));
        let mut bytes = 0;
        while bytes < BATCH_BYTES
            && batch.len() < BATCH
            && let Some(position) = positions.pop_front()
        {
            let Some(entry) = inventory.retained.get(&position) else { continue };
            bytes += entry.stored.len;
            batch.push((entry.clone(), self.bytes_of(&entry.stored)));
        }
        batch
    }

    /// Announces objects. Returns the number of objects that the master accepted.
    async fn announce_batch(&self, batch: Vec<Entry>) -> Result<usize> {
        let (expired, others): (Vec<_>, Vec<_>) = batch.into_iter().partition(|entry| entry.expired);
        let (timed, untimed): (Vec<_>, Vec<_>) =
            others.into_iter().partition(|entry| entry.lifetime.is_some());
        let mut accepted = 0;
        let batches = [
            (expired, AnnouncementKind::Expired),
            (timed, AnnouncementKind::Timed),
            (untimed, AnnouncementKind::Untimed),
        ];
        for (batch, kind) in batches {
            if !batch.is_empty() {
                accepted += self.announce_as(batch, kind).await?;
            }
        }
        Ok(accepted)
    }

    async fn announce_as(&self, batch: Vec<Entry>, kind: AnnouncementKind) -> Result<usize> {
        let now = self.config.clock.now();
        let with_remaining_pin = |entry: Entry| {
            let remaining_ms = u64::try_from(entry.pinned.since(now).as_millis()).unwrap_or(u64::MAX);
            StoredReplica { soft_pin_ms: remaining_ms, ..entry.stored }
        };
        let lifetime = |(index, entry): (usize, &Entry)| {
            Some(ItemLifetime { index: index as u64, lifetime: entry.lifetime? })
        };
        let lifetimes: Vec<_> = batch.iter().enumerate().filter_map(lifetime).collect();
        let batch: Vec<_> = batch.into_iter().map(with_remaining_pin).collect();
        // The lock is held during the request, so that reports of the master about these objects
        // are applied afterwards.
        let mut inventory = self.inventory.lock().await;
        inventory.offer(&batch);
        let (client, stored) = (self.id, Cow::Borrowed(&batch[..]));
        let request = async {
            match kind {
                AnnouncementKind::Expired => {
                    self.master.call_each(AnnounceExpired { client, stored }, batch.len()).await
                }
                AnnouncementKind::Timed => {
                    let lifetimes = Cow::Borrowed(&lifetimes[..]);
                    let call = AnnounceTimed { client, stored, lifetimes };
                    match self.master.call_each(call, batch.len()).await {
                        // An older master would serve the objects for ever.
                        Err(error) if is_missing_call(&error) => Ok(vec![Err(error); batch.len()]),
                        outcome => outcome,
                    }
                }
                AnnouncementKind::Untimed => {
                    self.master.call_each(AnnounceReplicas { client, stored }, batch.len()).await
                }
            }
        };
        let announced = self.deadline().bound("announcing", request).await?;
        let mut accepted = 0;
        for (stored, outcome) in batch.iter().zip(announced) {
            let position = (stored.segment, stored.offset);
            match outcome {
                Ok(()) => {
                    accepted += 1;
                    if let Some(entry) = inventory.retained.get_mut(&position) {
                        entry.announced = true;
                    }
                }
                Err(error) => {
                    tracing::debug!(key = display_key(&stored.key), "not taken: {error}");
                    inventory.remove_retained(position);
                }
            }
        }
        inventory.newly_accepted += accepted;
        Ok(accepted)
    }
}

/// Kind of announced objects.
#[derive(Clone, Copy)]
enum AnnouncementKind {
    /// Objects that the master listed when this client expired.
    Expired,
    /// Objects of an earlier master that end by themselves.
    Timed,
    /// Other objects of an earlier master.
    Untimed,
}

/// Returns the space that an object takes.
fn extent(entry: &Entry) -> Option<Extent> {
    let len = entry.stored.len.checked_next_multiple_of(SPACE_GRANULARITY)?;
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
fn verify_checksums<T: Transport>(
    batch: Vec<(Entry, Option<Slice<T>>)>,
) -> (Vec<Entry>, Vec<ReplicaPosition>) {
    let (mut unchanged, mut changed) = (Vec::with_capacity(batch.len()), Vec::new());
    for (entry, slice) in batch {
        let is_unchanged = match (slice, entry.sum) {
            (Some(slice), Some(sum)) => sum_of(&slice) == Some(sum),
            (Some(_), None) => entry.expired,
            (None, _) => false,
        };
        if is_unchanged {
            unchanged.push(entry);
        } else {
            changed.push((entry.stored.segment, entry.stored.offset));
        }
    }
    (unchanged, changed)
}

async fn blocking<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> Result<R> {
    tokio::task::spawn_blocking(work).await.map_err(join_error)
}

fn join_error(error: tokio::task::JoinError) -> Error {
    Error::new(ErrorCode::InternalError, format!("summing up failed: {error}"))
}
