//! What lies in this client's segments, so that it outlives the master: learned from the master, announced to the next one.
//!
//! The master says what came and went. That alone would not do: what a master did in its last moments nobody heard of, and space may
//! have been used again. So each object's bytes are summed up, and the sum counts once the master has been asked again and the object was still
//! there. Whoever announces it later looks at the bytes again.

mod index;
mod lasting;

use std::collections::{HashMap, VecDeque};
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

use super::checksum::Sum;
use super::deadline::Deadline;
use super::{Client, Inner};
use mooncake_protocol::wire::{InventoryPage, StoredReplica};

use self::lasting::Journal;
pub(super) use self::lasting::Opened;
pub use self::lasting::SegmentFile;

/// Of each ping interval, this much at most goes into summing up what is new.
const SUMMING: u32 = 10;
/// Objects that are looked at and announced together: so many, or so many bytes.
const BATCH: usize = 1024;
const BATCH_BYTES: u64 = 64 << 20;
/// Batches that are looked at at the same time.
const AT_ONCE: usize = 4;
/// So many are announced before the master is asked what came and went meanwhile. It holds twice as much for a client.
const MOST_UNHEARD: usize = 1 << 18;
/// Extents in one call.
const EXTENTS: usize = 16 << 10;
/// Before what was not announced is tried again.
const PAUSE: Duration = Duration::from_millis(200);
/// Objects take space in steps of this many bytes.
const GRAIN: u64 = 64;

/// What is known of the objects in this client's segments.
#[derive(Debug, Default)]
pub(super) struct Inventory {
    /// The master that told it; `None` before the first has, and when it keeps none.
    epoch: Option<u64>,
    /// Another master that was asked since.
    met: Option<u64>,
    /// Number of the last change heard of.
    heard: u64,
    entries: HashMap<ReplicaId, Entry>,
    /// To be summed up.
    unseen: VecDeque<ReplicaId>,
    /// Summed up since the master was asked last.
    summed: Vec<ReplicaId>,
    /// Told by masters before: announced to the present one, or about to be.
    kept: HashMap<Place, Entry>,
    /// Sums of objects that the present master may list as expired: which value, and its CRC-64.
    sums: HashMap<Place, ((u64, u64), u64)>,
    /// Taken by the present master since the last ping.
    fresh: usize,
    /// And before that, since it was last asked what came and went.
    unheard: usize,
    /// Where it is written down, for the process that comes next.
    journal: Option<Journal>,
}

type Place = (SegmentId, u64);

#[derive(Clone, Debug)]
struct Entry {
    stored: StoredReplica,
    /// Until when it is soft-pinned.
    pinned: Moment,
    /// CRC-64 of its bytes.
    sum: Option<u64>,
    /// The sum is of this object's bytes, beyond doubt.
    sealed: bool,
    /// The present master took it; it will tell us so, too.
    announced: bool,
    /// The present master was told of it, and may have taken it.
    offered: bool,
    /// The present master listed it among the replicas that this client held when it expired.
    expired: bool,
}

impl Inventory {
    fn apply(&mut self, page: InventoryPage, now: Moment) {
        if page.lost {
            let lost: Vec<_> = self.entries.drain().map(|(_, entry)| entry).collect();
            self.remember_sums(lost.into_iter());
            self.unseen.clear();
            self.summed.clear();
            self.kept.retain(|_, entry| !entry.announced);
            self.journal.iter_mut().for_each(Journal::write_anew);
        }
        self.heard = page.next;
        for change in page.changes {
            let Some(stored) = change.stored else {
                let gone = self.entries.remove(&change.replica).filter(|entry| entry.sealed);
                if let (Some(entry), Some(journal)) = (gone, &mut self.journal) {
                    journal.went(entry.stored.segment, entry.stored.offset);
                }
                continue;
            };
            let place = (stored.segment, stored.offset);
            let same =
                |kept: &Entry| (kept.stored.epoch, kept.stored.number) == (stored.epoch, stored.number);
            let before = self.kept.get(&place).is_some_and(same).then(|| self.kept.remove(&place)).flatten();
            let sum = before.and_then(|kept| kept.sum).or(stored.checksum);
            if sum.is_none() {
                self.unseen.push_back(change.replica);
            }
            let pinned = now.after(Duration::from_millis(stored.soft_pin_ms));
            let sealed = sum.is_some();
            if let (true, Some(journal)) = (sealed, &mut self.journal) {
                journal.came(change.replica);
            }
            let entry =
                Entry { stored, pinned, sum, sealed, announced: false, offered: false, expired: false };
            self.entries.insert(change.replica, entry);
        }
    }

    /// What was summed up before the last round of questions is now known to have been there throughout.
    fn seal(&mut self) {
        for id in self.summed.drain(..) {
            if let Some(entry) = self.entries.get_mut(&id) {
                entry.sealed = true;
                self.journal.iter_mut().for_each(|journal| journal.came(id));
            }
        }
    }

    /// All there was to tell has been told: what the master took before, and did not tell of, has gone again.
    fn heard_all(&mut self) {
        let gone = self.kept.extract_if(|_, entry| entry.announced);
        let gone = gone.map(|(place, _)| place).collect::<Vec<_>>();
        gone.into_iter().for_each(|place| self.went(place));
    }

    /// It is not kept any more.
    fn went(&mut self, place: Place) {
        self.kept.remove(&place);
        self.journal.iter_mut().for_each(|journal| journal.went(place.0, place.1));
    }

    /// Nothing is known, and nobody tells.
    fn reset(&mut self) {
        self.end_journal();
        *self = Self::default();
    }

    /// A master asks for the segments. To another master than before, what is known for sure is announced. The same master took this
    /// client for dead: what is announced to it is [what it lists itself](Inner::fetch_expired), and only the sums count. Returns
    /// whether it is the same.
    fn turn_over(&mut self, epoch: u64) -> bool {
        let same = self.epoch == Some(epoch);
        let entries = std::mem::take(&mut self.entries);
        if same {
            self.remember_sums(entries.into_values());
            let told = self.kept.extract_if(|_, entry| entry.announced || entry.offered || entry.expired);
            let told: Vec<_> = told.map(|(_, entry)| entry).collect();
            self.remember_sums(told.into_iter());
        } else {
            self.sums.clear();
            let sealed = entries.into_values().filter(|entry| entry.sealed);
            self.kept.extend(sealed.map(|entry| ((entry.stored.segment, entry.stored.offset), entry)));
            for entry in self.kept.values_mut() {
                (entry.announced, entry.offered, entry.expired) = (false, false, false);
            }
        }
        self.journal.iter_mut().for_each(Journal::write_anew);
        self.unseen.clear();
        self.summed.clear();
        (self.fresh, self.unheard) = (0, 0);
        (self.epoch, self.met) = (Some(epoch), None);
        same
    }

    /// Keeps the sums of objects that the master may list once more.
    fn remember_sums(&mut self, entries: impl Iterator<Item = Entry>) {
        for entry in entries.filter(|entry| entry.sealed) {
            let value = (entry.stored.epoch, entry.stored.number);
            if let Some(sum) = entry.sum {
                self.sums.insert((entry.stored.segment, entry.stored.offset), (value, sum));
            }
        }
    }

    /// The master lists a replica that this client held when it expired.
    fn list_expired(&mut self, stored: StoredReplica, now: Moment) {
        let place = (stored.segment, stored.offset);
        let value = (stored.epoch, stored.number);
        let known = self.sums.get(&place).filter(|(of, _)| *of == value).map(|(_, sum)| *sum);
        // An object that was not summed up in time is what it was, too: the master has handed out nothing of a dead segment.
        let sum = known.or(stored.checksum);
        let pinned = now.after(Duration::from_millis(stored.soft_pin_ms));
        let (announced, offered, expired) = (false, false, true);
        self.kept
            .insert(place, Entry { stored, pinned, sum, sealed: sum.is_some(), announced, offered, expired });
    }

    /// The master is about to be told of these. What becomes of them then is known when it says so.
    fn offer(&mut self, batch: &[StoredReplica]) {
        for stored in batch {
            if let Some(kept) = self.kept.get_mut(&(stored.segment, stored.offset)) {
                kept.offered = true;
            }
            self.journal.iter_mut().for_each(|journal| journal.offered(stored.segment, stored.offset));
        }
        self.note();
    }

    /// Nothing of a segment counts any more.
    pub(super) fn forget(&mut self, segment: SegmentId) {
        self.entries.retain(|_, entry| entry.stored.segment != segment);
        self.kept.retain(|(kept, _), _| *kept != segment);
        self.journal.iter_mut().for_each(Journal::write_anew);
        self.note();
    }

    /// Whether a segment has objects to be announced.
    pub(super) fn keeps(&self, segment: SegmentId) -> bool {
        self.kept.keys().any(|(kept, _)| *kept == segment)
    }

    fn kept_in(&self, segment: SegmentId) -> impl Iterator<Item = &Entry> {
        self.kept.values().filter(move |entry| entry.stored.segment == segment)
    }
}

/// Whether a master lacks a call of the inventory, or has the call of another version.
fn is_refusal(error: &Error) -> bool {
    error.code() == ErrorCode::NotSupported || error.kind() == ErrorKind::VersionMismatch
}

/// Logs why objects do not outlive this master.
fn log_refusal(error: &Error) {
    tracing::warn!("objects do not outlive a restart of this master: {error}");
}

impl<T: Transport> Client<T> {
    /// How many objects in this client's memory would outlive the master now. See [`ClientConfig::outlive_master`](super::ClientConfig::outlive_master).
    pub async fn lasting_objects(&self) -> usize {
        let inventory = self.inner.inventory.lock().await;
        let told = inventory.entries.values().filter(|entry| entry.sealed).count();
        told + inventory.kept.values().filter(|entry| !entry.announced).count()
    }
}

impl<T: Transport> Inner<T> {
    /// Asks the master for changes for the first time, so that what is mounted from now on is recorded. Without it, nothing is.
    pub(super) async fn begin_inventory(&self, deadline: &Deadline) -> Result<()> {
        self.exchange_promise(deadline).await?;
        if !self.config.outlive_master {
            return Ok(());
        }
        let mut inventory = self.inventory.lock().await;
        let page = deadline.bound("asking for the inventory", self.master.inventory(self.id, 0)).await;
        match page {
            Ok(page) => {
                let same = inventory.turn_over(page.epoch);
                inventory.apply(page, self.config.clock.now());
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

    /// Asks the master for the replicas that it listed when it took this client for dead.
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
                let asked = self.master.expired(self.id, segment, after);
                let page = match deadline.bound("asking for expired replicas", asked).await {
                    Ok(page) => page,
                    Err(error) if is_refusal(&error) => return Ok(()),
                    Err(error) => return Err(error),
                };
                if Some(page.epoch) != inventory.epoch {
                    // Another master: the next ping finds out.
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

    /// Hears what came and went, and sums up what is new. Returns whether the segments must be mounted anew.
    ///
    /// A master that does not know this client says so to the next ping, and everything is mounted again. One that was asked twice and
    /// knows this client all the same was told of the segments while they were being mounted at the master before it, and so without a
    /// list of their objects.
    pub(super) async fn take_inventory(&self, deadline: &Deadline) -> Result<bool> {
        let mut inventory = self.inventory.lock().await;
        let Some(epoch) = inventory.epoch else { return Ok(false) };
        // To hear of what it was just told can wait until all of it is served, or the master holds much for us.
        let fresh = std::mem::take(&mut inventory.fresh);
        inventory.unheard += fresh;
        if fresh > 0 && inventory.unheard < MOST_UNHEARD && self.is_announcing() {
            return Ok(false);
        }
        inventory.unheard = 0;
        loop {
            let asked = self.master.inventory(self.id, inventory.heard);
            let page = deadline.bound("asking for the inventory", asked).await?;
            if page.epoch != epoch {
                let again = inventory.met.replace(page.epoch) == Some(page.epoch);
                return Ok(again && !is_planted("inventory-keeps-the-dead-epoch"));
            }
            let whole = page.whole;
            inventory.apply(page, self.config.clock.now());
            if whole {
                break;
            }
        }
        inventory.heard_all();
        inventory.seal();
        inventory.note();
        self.sum_up(&mut inventory).await.map(|()| false)
    }

    /// Sums up what has not been, for a short time.
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

    /// The bytes of an object, if its segment is still there.
    fn bytes_of(&self, stored: &StoredReplica) -> Option<Slice<T>> {
        let segments = self.segments.lock();
        let mounted = segments.iter().find(|mounted| mounted.id() == stored.segment)?;
        let start = usize::try_from(stored.offset).ok()?;
        let end = start.checked_add(usize::try_from(stored.len).ok()?)?;
        mounted.region.slice(start..end).ok()
    }

    /// Mounts a segment with the objects that are to be announced, whose space stays theirs.
    pub(super) async fn offer_kept(
        &self,
        segment: &mooncake_core::replica::Segment,
        deadline: &Deadline,
    ) -> Result<()> {
        match deadline.bound("mounting", self.master.mount_kept(self.id, segment)).await {
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
        // In this order an allocator cuts all of them from the front of what is left.
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
                    // Two of them overlap, say. Nothing here can be trusted then.
                    tracing::warn!(segment = %segment.id, "objects of before cannot be kept: {error}");
                    self.inventory.lock().await.kept.retain(|(kept, _), _| *kept != segment.id);
                    let release = self.master.release_kept(self.id, segment.id);
                    return deadline.bound("giving space back", release).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Looks at the objects of before in the segments given and announces those that are what they were. In the background.
    pub(super) fn announce_kept(self: &Arc<Self>, segments: Vec<SegmentId>) {
        let turn = self.announcing_turn.load(Relaxed);
        let client = Arc::downgrade(self);
        let (after, stopped) = (self.promises.lock().announce_after, self.announcing_stopped.clone());
        let task = self.runtime.spawn(async move {
            // The clients of a master that was restarted announce one after another.
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
                    // Until it is heard, the master keeps their space for them.
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

    /// Waits until nobody looks at objects of before any more.
    pub(super) async fn stop_announcing(&self) {
        self.announcing_turn.fetch_add(1, Relaxed);
        self.announcing_stopped.notify_waiters();
        let task = self.announcing.lock().take();
        if let Some(task) = task {
            let _ = task.await;
        }
    }

    async fn announce_segment(self: &Arc<Self>, segment: SegmentId, turn: u64) -> Result<()> {
        let mut kept: VecDeque<Place> = {
            let inventory = self.inventory.lock().await;
            let mut kept: Vec<_> = inventory.kept_in(segment).filter(|entry| !entry.announced).collect();
            // The oldest first: what comes last will be evicted last.
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
            other.into_iter().for_each(|place| inventory.went(place));
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
        self.deadline().bound("giving space back", self.master.release_kept(self.id, segment)).await
    }

    async fn next_batch(&self, kept: &mut VecDeque<Place>) -> Vec<(Entry, Option<Slice<T>>)> {
        let inventory = self.inventory.lock().await;
        let mut batch = Vec::with_capacity(BATCH.min(kept.len()));
        let mut bytes = 0;
        while bytes < BATCH_BYTES
            && batch.len() < BATCH
            && let Some(place) = kept.pop_front()
        {
            let Some(entry) = inventory.kept.get(&place) else { continue };
            bytes += entry.stored.len;
            batch.push((entry.clone(), self.bytes_of(&entry.stored)));
        }
        batch
    }

    /// How many the master took.
    async fn announce_batch(&self, batch: Vec<Entry>) -> Result<usize> {
        let (expired, kept): (Vec<_>, Vec<_>) = batch.into_iter().partition(|entry| entry.expired);
        let mut taken = 0;
        for (batch, expired) in [(expired, true), (kept, false)] {
            if !batch.is_empty() {
                taken += self.announce_as(batch, expired).await?;
            }
        }
        Ok(taken)
    }

    async fn announce_as(&self, batch: Vec<Entry>, expired: bool) -> Result<usize> {
        let now = self.config.clock.now();
        let tell = |entry: Entry| {
            let left = u64::try_from(entry.pinned.since(now).as_millis()).unwrap_or(u64::MAX);
            StoredReplica { soft_pin_ms: left, ..entry.stored }
        };
        let batch: Vec<_> = batch.into_iter().map(tell).collect();
        // Held, so that what the master says of them is heard afterwards.
        let mut inventory = self.inventory.lock().await;
        inventory.offer(&batch);
        let asked = async {
            match expired {
                true => self.master.announce_expired(self.id, &batch).await,
                false => self.master.announce(self.id, &batch).await,
            }
        };
        let announced = self.deadline().bound("announcing", asked).await?;
        let mut taken = 0;
        for (stored, outcome) in batch.iter().zip(announced) {
            let place = (stored.segment, stored.offset);
            match outcome {
                Ok(()) => {
                    taken += 1;
                    if let Some(kept) = inventory.kept.get_mut(&place) {
                        kept.announced = true;
                    }
                }
                Err(error) => {
                    tracing::debug!(key = super::shown(&stored.key), "not taken: {error}");
                    inventory.went(place);
                }
            }
        }
        inventory.fresh += taken;
        Ok(taken)
    }
}

/// The space an object takes.
fn extent(entry: &Entry) -> Option<Extent> {
    let len = entry.stored.len.checked_next_multiple_of(GRAIN)?;
    Some(Extent { offset: entry.stored.offset, len })
}

fn sum_of<T: Transport>(slice: &Slice<T>) -> Option<u64> {
    let mut sum = Sum::new();
    sum.slice(slice).ok()?;
    Some(sum.value())
}

/// Sums, and what was left when the time was over.
fn sums_until<T: Transport>(
    batch: Vec<(ReplicaId, Slice<T>)>,
    clock: &SharedClock,
    until: Moment,
) -> (Vec<(ReplicaId, u64)>, Vec<ReplicaId>) {
    let mut sums = Vec::with_capacity(batch.len());
    let mut left = Vec::new();
    for (id, slice) in batch {
        // One at least, however short the time.
        if sums.is_empty() || clock.now() < until {
            sums.extend(sum_of(&slice).map(|sum| (id, sum)));
        } else {
            left.push(id);
        }
    }
    (sums, left)
}

/// Those whose bytes are what they were, and where the others lay.
fn check<T: Transport>(batch: Vec<(Entry, Option<Slice<T>>)>) -> (Vec<Entry>, Vec<Place>) {
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

#[cfg(test)]
mod tests {
    use mooncake_core::ids::{ClientId, Uuid};

    use super::*;
    use mooncake_protocol::wire::InventoryChange;

    fn stored(number: u64) -> StoredReplica {
        StoredReplica {
            segment: SegmentId(Uuid::new(1, 1)),
            offset: number * 64,
            len: 64,
            key: vec![b'k'],
            checksum: Some(number),
            writer: ClientId(Uuid::new(2, 2)),
            group: String::new(),
            hard_pin: false,
            soft_pin_ms: 0,
            epoch: 1,
            number,
        }
    }

    /// What a master tells: these came.
    fn told(epoch: u64, numbers: &[u64]) -> InventoryPage {
        let change =
            |n: &u64| InventoryChange { replica: ReplicaId(epoch * 10 + n), stored: Some(stored(*n)) };
        let changes = numbers.iter().map(change).collect();
        InventoryPage { epoch, next: numbers.len() as u64, lost: false, whole: true, changes }
    }

    #[test]
    fn what_a_master_took_and_does_not_tell_of_has_gone_again() {
        let mut inventory = Inventory { epoch: Some(1), ..Inventory::default() };
        inventory.apply(told(1, &[1, 2, 3]), Moment(0));
        inventory.turn_over(2);
        assert_eq!(inventory.kept.len(), 3);
        let batch: Vec<_> = inventory.kept.values().filter(|e| e.stored.number < 3).cloned().collect();
        inventory.offer(&batch.into_iter().map(|entry| entry.stored).collect::<Vec<_>>());
        for entry in inventory.kept.values_mut().filter(|entry| entry.offered) {
            entry.announced = true;
        }
        // The second was removed before anybody heard of it, the third is not announced yet.
        inventory.apply(told(2, &[1]), Moment(0));
        inventory.heard_all();
        inventory.turn_over(3);
        let mut left: Vec<_> = inventory.kept.values().map(|entry| entry.stored.number).collect();
        left.sort_unstable();
        assert_eq!(left, [1, 3]);
    }
}
