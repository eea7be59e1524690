//! Objects on clients' own disks: who is to write which one there, and what lies where. Copies in files that clients share are beside (`file.rs`).
//!
//! The owner of a disk asks for its work with its heartbeat, and says when it is done. A job belongs to the value it was made for: when that
//! is replaced or removed, what the owner reports afterwards does not count. What an owner finds on its disk after a restart is taken
//! only before its first heartbeat, and only for keys that nobody has.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::ids::{ClientId, ObjectKey, ReplicaId, SlotId};
use mooncake_core::replica::{Replica, ReplicaLocation, ReplicaStatus};
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;
use smallvec::SmallVec;

mod file;
mod tier;
mod wanted;
mod work;

pub(super) use self::file::FileGrant;
pub use self::file::FileOptions;
pub(super) use self::tier::Tier;
pub(super) use self::wanted::Passed;

use self::file::{Files, Kept};
use self::wanted::Wanted;
use self::work::Said;
use super::Master;
use super::clients::MAX_WORD;
use super::directory::{Object, Shard};
use super::promote::Promotions;
use super::put::absent;
use super::stats::DiskStats;
use mooncake_protocol::wire::{OffloadItem, StoredAt};

/// How long an object is kept in memory for the sake of a disk whose owner has not come for it: several heartbeats.
const PATIENCE: Duration = Duration::from_secs(60);
/// Most copies that do not count any more and whose owner has not heard of it; with more it is to empty its disk.
const MAX_DROPPED: usize = 1 << 20;

/// What a master does with clients' disks. The defaults are the existing system's.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskOptions {
    /// Objects are written when they are about to be evicted, not when they are put (false).
    pub on_evict: bool,
    /// With `on_evict`: what finds no place in the queue is evicted all the same (false).
    pub force_evict: bool,
    /// Objects that may wait for one client's disk (50000).
    pub queue_limit: usize,
    /// With `on_evict`: part of the queue that may be filled between two ticks (0.5).
    pub queue_part: f64,
    /// Objects that are read from a disk come back to memory.
    pub promotion: Option<PromotionOptions>,
}

/// When an object comes back to memory. The defaults are the existing system's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromotionOptions {
    /// Reads, counted roughly and forgotten slowly, after which it does (2).
    pub threshold: u8,
    /// Objects that may be on their way, per client (50000).
    pub queue_limit: usize,
    /// Objects told to a client per heartbeat (1).
    pub per_heartbeat: usize,
}

impl Default for DiskOptions {
    fn default() -> Self {
        Self { on_evict: false, force_evict: false, queue_limit: 50_000, queue_part: 0.5, promotion: None }
    }
}

impl Default for PromotionOptions {
    fn default() -> Self {
        Self { threshold: 2, queue_limit: 50_000, per_heartbeat: 1 }
    }
}

/// Every disk that was offered.
#[derive(Default)]
pub(super) struct Disks {
    owners: Mutex<HashMap<ClientId, Arc<Owner>>>,
    /// Their number, so that a cluster without disks locks nothing.
    count: AtomicUsize,
    /// Objects that eviction passed over because they are to be written first.
    wanted: Mutex<Wanted>,
    pub(super) promotions: Arc<Promotions>,
    files: Arc<Files>,
}

/// A client and its disk.
pub(super) struct Owner {
    pub(super) client: ClientId,
    alive: AtomicBool,
    /// Bytes of the objects that lie there.
    used: AtomicU64,
    /// How many there are.
    objects: AtomicU64,
    /// Bytes of the disk, 0 while not known.
    capacity: AtomicU64,
    promotions: Arc<Promotions>,
    state: Mutex<OwnerState>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        let left = state.promote.len() + state.promoting.len();
        self.promotions.cancelled.fetch_add(left as u64, Relaxed);
    }
}

#[derive(Default)]
struct OwnerState {
    enabled: bool,
    /// It has had no heartbeat yet, so what it reports unasked is what it found.
    announcing: bool,
    /// It is to empty its disk.
    clear: bool,
    joined: Moment,
    seen: Moment,
    /// Keys in the order they are to be written; those without a job are none any more.
    queue: VecDeque<ObjectKey>,
    jobs: HashMap<ObjectKey, Job>,
    /// Bytes of all jobs.
    under_way: u64,
    /// Jobs that the owner has not been told of.
    unsent: usize,
    promote: VecDeque<ObjectKey>,
    /// The same keys.
    to_promote: HashSet<ObjectKey>,
    promoting: HashMap<ObjectKey, Moment>,
    /// It asks what does not count any more.
    follows: bool,
    /// Keys whose copies on the disk do not count any more, if it does.
    dropped: HashSet<ObjectKey>,
    /// What it was told last, until it is done.
    said: Said,
}

/// One object to be written.
struct Job {
    len: u64,
    since: Moment,
    /// The owner has been told.
    sent: bool,
    /// The value is still the one the owner was told about.
    valid: bool,
    /// The length of the value that came after.
    again: Option<u64>,
}

/// What an owner's report is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Report {
    /// The value that is there.
    Current,
    /// One that was replaced or removed.
    Stale,
    /// Nothing it was asked for.
    Unasked,
}

/// Copies of a value on disks.
pub(super) struct OnDisk {
    pub(super) len: u64,
    pub(super) checksum: Option<u64>,
    copies: SmallVec<[DiskCopy; 1]>,
}

struct DiskCopy {
    id: ReplicaId,
    len: u64,
    place: Place,
}

enum Place {
    /// On a client's disk, which serves it there.
    Owned(Arc<Owner>, String),
    /// In a file that any client reads.
    File(Kept),
}

impl DiskCopy {
    fn new(id: ReplicaId, owner: &Arc<Owner>, len: u64, endpoint: &str) -> Self {
        owner.used.fetch_add(len, Relaxed);
        owner.objects.fetch_add(1, Relaxed);
        Self { id, len, place: Place::Owned(owner.clone(), endpoint.to_owned()) }
    }

    fn owner(&self) -> Option<&Arc<Owner>> {
        match &self.place {
            Place::Owned(owner, _) => Some(owner),
            Place::File(_) => None,
        }
    }

    fn is_live(&self) -> bool {
        self.owner().is_none_or(|owner| owner.is_alive())
    }

    fn is_of(&self, client: ClientId) -> bool {
        self.owner().is_some_and(|owner| owner.client == client)
    }

    /// What lies there does not count.
    fn refuse(&self, key: &ObjectKey) {
        if let Some(owner) = self.owner() {
            owner.state.lock().drop_copy(key);
        }
    }

    /// Whether it looks like that copy, found by the next process of the same owner: on the same host, and nothing was heard of the one before since.
    fn follows(&self, before: &DiskCopy) -> bool {
        let (Place::Owned(ours, here), Place::Owned(theirs, there)) = (&self.place, &before.place) else {
            return false;
        };
        let host = |endpoint: &str| endpoint.rsplit_once(':').map(|(host, _)| host.to_owned());
        let joined = ours.state.lock().joined;
        ours.client != theirs.client && host(here) == host(there) && theirs.state.lock().seen <= joined
    }
}

impl Drop for DiskCopy {
    fn drop(&mut self) {
        match &self.place {
            Place::Owned(owner, _) => {
                owner.used.fetch_sub(self.len, Relaxed);
                owner.objects.fetch_sub(1, Relaxed);
            }
            Place::File(kept) => kept.leave(self.len),
        }
    }
}

impl OnDisk {
    fn live(&self) -> impl Iterator<Item = &DiskCopy> {
        self.copies.iter().filter(|copy| copy.is_live())
    }

    fn live_owners(&self) -> impl Iterator<Item = &Arc<Owner>> {
        self.live().filter_map(DiskCopy::owner)
    }

    pub(super) fn is_live(&self) -> bool {
        self.live().next().is_some()
    }

    /// Drops copies of dead owners, and of what owners else are not wanted; whether any is left.
    pub(super) fn retain(&mut self, keep: impl Fn(ClientId) -> bool) -> bool {
        self.copies.retain(|copy| copy.owner().is_none_or(|owner| owner.is_alive() && keep(owner.client)));
        !self.copies.is_empty()
    }

    pub(super) fn describe(&self) -> impl Iterator<Item = Replica> {
        self.live().map(|copy| Replica {
            id: copy.id,
            location: match &copy.place {
                Place::Owned(owner, endpoint) => ReplicaLocation::LocalDisk {
                    client: owner.client,
                    size: self.len,
                    endpoint: endpoint.clone(),
                },
                Place::File(kept) => ReplicaLocation::Disk { path: kept.path.clone(), size: self.len },
            },
            status: ReplicaStatus::Complete,
        })
    }

    pub(super) fn owners(&self) -> impl Iterator<Item = ClientId> {
        self.live_owners().map(|owner| owner.client)
    }

    fn is_with(&self, client: ClientId) -> bool {
        self.owners().any(|owner| owner == client)
    }

    fn first(&self) -> Option<&Arc<Owner>> {
        self.live_owners().next()
    }
}

impl OwnerState {
    fn add(&mut self, key: &ObjectKey, len: u64, now: Moment) {
        if self.queue.len() > 2 * self.unsent + 1024 {
            let (queue, jobs) = (&mut self.queue, &self.jobs);
            queue.retain(|key| jobs.get(key.as_bytes()).is_some_and(|job| !job.sent));
        }
        self.jobs.insert(key.clone(), Job { len, since: now, sent: false, valid: true, again: None });
        self.queue.push_back(key.clone());
        self.unsent += 1;
        self.under_way += len;
    }

    /// Takes what the owner has not been told of, to tell it now.
    fn send(&mut self, now: Moment, write_out: Duration) -> Vec<(ObjectKey, u64)> {
        let keys = std::mem::take(&mut self.queue);
        self.unsent = 0;
        // What it was told of and never spoke of again.
        self.jobs.retain(|_, job| !job.sent || now < job.since.after(write_out));
        self.under_way = self.jobs.values().map(|job| job.len).sum();
        let mut sent = Vec::new();
        for key in keys {
            let Some(job) = self.jobs.get_mut(key.as_bytes()).filter(|job| job.valid && !job.sent) else {
                continue;
            };
            (job.sent, job.since) = (true, now);
            // What it writes takes the place of that.
            self.dropped.remove(&key);
            sent.push((key, job.len));
        }
        sent
    }

    fn end(&mut self, key: &[u8]) -> Option<Job> {
        let job = self.jobs.remove(key)?;
        self.under_way -= job.len;
        Some(job)
    }

    /// What lies on the disk under that key does not count.
    fn drop_copy(&mut self, key: &ObjectKey) {
        if !self.follows || self.clear {
            return;
        }
        if self.dropped.len() >= MAX_DROPPED {
            (self.clear, self.dropped) = (true, HashSet::new());
            return;
        }
        self.dropped.insert(key.clone());
    }
}

impl Owner {
    fn new(client: ClientId, capacity: u64, promotions: Arc<Promotions>, state: OwnerState) -> Arc<Self> {
        Arc::new(Self {
            client,
            alive: AtomicBool::new(true),
            used: AtomicU64::new(0),
            objects: AtomicU64::new(0),
            capacity: AtomicU64::new(capacity),
            promotions,
            state: Mutex::new(state),
        })
    }

    pub(super) fn is_alive(&self) -> bool {
        self.alive.load(Relaxed)
    }

    /// Whether a job is young enough for its object to be kept: waiting for the owner, or being written within `write_out`.
    fn holds(&self, key: &[u8], now: Moment, write_out: Duration) -> bool {
        let state = self.state.lock();
        let patience = |job: &Job| if job.sent { write_out } else { PATIENCE };
        self.is_alive()
            && state.jobs.get(key).is_some_and(|job| job.valid && now < job.since.after(patience(job)))
    }

    /// Until when it may be reading an object that it was told to write, in `write_out` from then at most.
    fn reads_until(&self, key: &[u8], write_out: Duration) -> Moment {
        let state = self.state.lock();
        let sent = state.jobs.get(key).filter(|job| job.sent && self.is_alive());
        sent.map_or(Moment(0), |job| job.since.after(write_out))
    }

    /// The value a job was for is gone.
    pub(super) fn forget(&self, key: &[u8]) {
        let mut state = self.state.lock();
        if let Some(job) = state.jobs.get_mut(key) {
            (job.valid, job.again) = (false, None);
            if !job.sent {
                state.end(key);
                state.unsent -= 1;
            }
        }
        if state.promoting.remove(key).is_some() {
            self.promotions.cancelled.fetch_add(1, Relaxed);
        }
    }

    /// Puts an object in line, unless the line is full or it is in it.
    fn queue(&self, key: &ObjectKey, len: u64, now: Moment, limit: usize) -> bool {
        let mut state = self.state.lock();
        if !state.enabled || !self.is_alive() {
            return false;
        }
        if let Some(job) = state.jobs.get_mut(key.as_bytes()) {
            // The owner is writing the value before: this one comes when that is over.
            if !job.valid {
                job.again = Some(len);
            }
            return true;
        }
        if state.unsent >= limit {
            return false;
        }
        state.add(key, len, now);
        true
    }

    /// Ends a job.
    fn report(&self, key: &ObjectKey, now: Moment) -> Report {
        let mut state = self.state.lock();
        if state.jobs.get(key.as_bytes()).is_some_and(|job| !job.sent) {
            // Of the value before: nobody has been told of this one.
            return Report::Stale;
        }
        match state.end(key.as_bytes()) {
            None => Report::Unasked,
            Some(job) if job.valid => Report::Current,
            Some(job) => {
                if let Some(len) = job.again {
                    state.add(key, len, now);
                }
                Report::Stale
            }
        }
    }

    pub(super) fn promote(&self, key: &ObjectKey, limit: usize) {
        let mut state = self.state.lock();
        let known = state.to_promote.contains(key) || state.promoting.contains_key(key.as_bytes());
        if known || !state.enabled {
            return;
        }
        if state.promote.len() + state.promoting.len() >= limit {
            self.promotions.over_limit.fetch_add(1, Relaxed);
            return;
        }
        state.promote.push_back(key.clone());
        state.to_promote.insert(key.clone());
        self.promotions.admitted.fetch_add(1, Relaxed);
    }

    /// Takes the next objects to come back.
    pub(super) fn next_promotions(&self, most: usize, now: Moment) -> Vec<ObjectKey> {
        let mut state = self.state.lock();
        let before = state.promoting.len();
        state.promoting.retain(|_, since| now < since.after(PATIENCE));
        self.promotions.expired.fetch_add((before - state.promoting.len()) as u64, Relaxed);
        let most = most.min(state.promote.len());
        let keys: Vec<_> = state.promote.drain(..most).collect();
        for key in &keys {
            state.to_promote.remove(key);
        }
        state.promoting.extend(keys.iter().map(|key| (key.clone(), now)));
        keys
    }

    pub(super) fn is_promoting(&self, key: &[u8]) -> bool {
        self.state.lock().promoting.contains_key(key)
    }

    /// Whether it was under way; the caller counts what became of it.
    pub(super) fn end_promotion(&self, key: &[u8]) -> bool {
        self.state.lock().promoting.remove(key).is_some()
    }
}

impl Disks {
    pub(super) fn get(&self, client: ClientId) -> Option<Arc<Owner>> {
        if self.count.load(Relaxed) == 0 {
            return None;
        }
        self.owners.lock().get(&client).cloned()
    }

    fn insert(&self, owner: Arc<Owner>) {
        let mut owners = self.owners.lock();
        if let Some(before) = owners.insert(owner.client, owner) {
            before.alive.store(false, Relaxed);
        }
        self.count.store(owners.len(), Relaxed);
    }

    fn remove(&self, gone: impl Fn(&Owner) -> bool) -> usize {
        if self.count.load(Relaxed) == 0 {
            return 0;
        }
        let mut owners = self.owners.lock();
        let before = owners.len();
        owners.retain(|_, owner| {
            let stays = !gone(owner);
            if !stays {
                owner.alive.store(false, Relaxed);
            }
            stays
        });
        self.count.store(owners.len(), Relaxed);
        before - owners.len()
    }

    /// The free part of a client's disk; 1 where nothing is known of it.
    pub(super) fn free_ratio(&self, client: ClientId) -> f64 {
        let Some(owner) = self.get(client) else { return 1.0 };
        match owner.capacity.load(Relaxed) {
            0 => 1.0,
            capacity => (1.0 - owner.used.load(Relaxed) as f64 / capacity as f64).max(0.0),
        }
    }

    /// What lies on all disks, and in files, for which there is that much room.
    pub(super) fn stats(&self, file_capacity: u64) -> DiskStats {
        let owners = self.owners.lock();
        let sum = |figure: fn(&Owner) -> u64| {
            owners.values().map(|owner| figure(owner)).fold(0, u64::saturating_add)
        };
        let read = |counter: &AtomicU64| counter.load(Relaxed);
        let promotions = &self.promotions;
        DiskStats {
            objects: sum(|owner| owner.objects.load(Relaxed)) + read(&self.files.objects),
            used: sum(|owner| owner.used.load(Relaxed)) + read(&self.files.used),
            capacity: sum(|owner| owner.capacity.load(Relaxed)).saturating_add(file_capacity),
            promotions_in_flight: sum(|owner| {
                let state = owner.state.lock();
                (state.promote.len() + state.promoting.len()) as u64
            }),
            promotions_admitted: read(&promotions.admitted),
            promotions_completed: read(&promotions.completed),
            promoted_bytes: read(&promotions.bytes),
            promotions_failed: read(&promotions.failed),
            promotions_cancelled: read(&promotions.cancelled),
            promotions_expired: read(&promotions.expired),
            promotions_too_rare: read(&promotions.too_rare),
            promotions_too_full: read(&promotions.too_full),
            promotions_over_limit: read(&promotions.over_limit),
        }
    }

    /// The client lives.
    pub(super) fn hear(&self, client: ClientId, now: Moment) {
        self.get(client).into_iter().for_each(|owner| owner.state.lock().seen = now);
    }

    /// See [`Master::was_stopped`].
    pub(super) fn was_stopped(&self, span: Duration, now: Moment) {
        for mut state in self.owners.lock().values().map(|owner| owner.state.lock()) {
            state.seen = state.seen.after(span).min(now);
        }
    }
}

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// A client offers its disk, or says whether objects may go there. Its copies of an earlier offer stay.
    ///
    /// # Errors
    /// `UNABLE_OFFLOAD` when this master uses no disks.
    pub fn mount_disk(&self, client: ClientId, enabled: bool) -> Result<()> {
        if self.options.disks.is_none() {
            return Err(Error::new(
                ErrorCode::UnableOffload,
                "this master puts no objects on clients' disks",
            ));
        }
        let now = self.clock.now();
        self.timers.at(now.after(self.options.client_ttl));
        if let Some(owner) = self.disks.get(client) {
            let mut state = owner.state.lock();
            (state.enabled, state.announcing, state.seen) = (enabled, true, now);
            return Ok(());
        }
        let state = OwnerState { enabled, announcing: true, joined: now, seen: now, ..OwnerState::default() };
        self.disks.insert(Owner::new(client, 0, self.disks.promotions.clone(), state));
        tracing::info!(%client, "disk offered");
        Ok(())
    }

    /// It takes it back: what lies there is gone at once.
    ///
    /// # Errors
    /// `UNABLE_OFFLOAD` when this master uses no disks; `SEGMENT_NOT_FOUND` when there is no such disk.
    pub fn unmount_disk(&self, client: ClientId) -> Result<()> {
        if self.options.disks.is_none() {
            return Err(Error::new(
                ErrorCode::UnableOffload,
                "this master puts no objects on clients' disks",
            ));
        }
        if self.disks.remove(|owner| owner.client == client) == 0 {
            return Err(not_offered());
        }
        self.sweep_disks();
        Ok(())
    }

    /// The heartbeat of a disk: what its owner is to write there. It is told once.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` when the client has offered none, or was silent too long: it offers it again, and says what lies there.
    pub fn to_offload(&self, client: ClientId, enabled: bool) -> Result<Vec<OffloadItem>> {
        let owner = self.disks.get(client).ok_or_else(not_offered)?;
        let mut state = owner.state.lock();
        let now = self.clock.now();
        (state.enabled, state.announcing, state.seen) = (enabled, false, now);
        let jobs = state.send(now, self.options.put_release);
        Ok(jobs.iter().map(|(key, len)| self.offload_item(key, *len)).collect())
    }

    pub(super) fn offload_item(&self, key: &ObjectKey, len: u64) -> OffloadItem {
        let (tenant, key) = self.tenants.split(key.as_bytes());
        OffloadItem { tenant: tenant.into(), key: key.into(), size: len.cast_signed() }
    }

    /// An owner has written these objects, or could not (a length of -1). Of what it was not asked to write, it keeps what nobody else has, before
    /// its first heartbeat: that is what survived its restart.
    ///
    /// # Errors
    /// `INVALID_PARAMS` when the lists differ in length; `SEGMENT_NOT_FOUND` when the client has offered no disk.
    pub fn offloaded(&self, client: ClientId, items: &[OffloadItem], places: &[StoredAt]) -> Result<()> {
        if items.len() != places.len() {
            return Err(Error::invalid(format!("{} places for {} objects", places.len(), items.len())));
        }
        if places.iter().any(|place| place.endpoint.len() > MAX_WORD) {
            return Err(Error::invalid(format!("an endpoint of more than {MAX_WORD} bytes")));
        }
        if items.is_empty() || self.options.disks.is_none() {
            return Ok(());
        }
        let owner = self.disks.get(client).ok_or_else(not_offered)?;
        for (item, place) in items.iter().zip(places) {
            // A tenant that is gone has no objects.
            let Ok(key) = self.scoped(&item.tenant, &item.key) else { continue };
            let Ok(key) = ObjectKey::new(&key) else { continue };
            self.note_offload(&owner, &key, place);
        }
        self.eviction.something_changed();
        Ok(())
    }

    fn note_offload(&self, owner: &Arc<Owner>, key: &ObjectKey, place: &StoredAt) {
        let now = self.clock.now();
        let hash = self.directory.hash(key.as_bytes());
        let mut shard = self.directory.lock(hash);
        if !owner.is_alive() {
            // Whoever took the disk away looks at this shard before or after.
            return;
        }
        let report = owner.report(key, now);
        let len = u64::try_from(place.data_size).ok().filter(|len| *len > 0);
        let copy = DiskCopy::new(self.new_replica(), owner, len.unwrap_or(0), &place.endpoint);
        let found = shard.find(hash, key.as_bytes());
        let counts = match (report, found, len) {
            (Report::Current, Some(slot), _) => {
                let object = &mut shard[slot];
                object.end_offload();
                let known = object.value().map(|value| (value.len, value.checksum));
                let known = known.or_else(|| object.disk().map(|disk| (disk.len, disk.checksum)));
                match known {
                    Some((there, checksum)) if Some(there) == len => {
                        object.add_disk(there, checksum, copy);
                        true
                    }
                    _ => {
                        object.give_up_offload();
                        false
                    }
                }
            }
            (Report::Unasked, Some(slot), Some(len)) if shard[slot].is_known() => {
                // It may have said so before.
                shard[slot].disk().is_some_and(|disk| disk.len == len && disk.is_with(owner.client))
                    || owner.state.lock().announcing && shard[slot].stand_in_line(copy)
            }
            (Report::Unasked, found, Some(len)) if owner.state.lock().announcing => {
                let add = || shard.add(hash, key.clone(), self.tenants.number(key.as_bytes()));
                let slot = found.unwrap_or_else(add);
                shard[slot].add_disk(len, None, copy);
                let kept =
                    self.past.get().and_then(|past| past.on_disk(hash, key.as_bytes(), len, owner.client));
                if let Some(kept) = kept {
                    shard[slot].hard_pin |= kept.hard_pin;
                    if kept.soft_pin > now {
                        shard.set_soft_pin(slot, kept.soft_pin);
                    }
                    if !kept.group.is_empty() {
                        shard.join(slot, &kept.group);
                    }
                }
                true
            }
            _ => false,
        };
        if !counts {
            owner.state.lock().drop_copy(key);
        }
    }

    /// Whether an owner is to empty its disk. It is told once; from then on nothing of it counts.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` when the client has offered none.
    pub fn must_clear_disk(&self, client: ClientId) -> Result<bool> {
        let owner = self.disks.get(client).ok_or_else(not_offered)?;
        Ok(self.clear_disk(&owner, false))
    }

    /// From now on nothing on that disk counts, if it is to be emptied; whether it is. That it was said is remembered if it is numbered.
    fn clear_disk(&self, owner: &Arc<Owner>, numbered: bool) -> bool {
        let state = {
            let mut state = owner.state.lock();
            state.seen = self.clock.now();
            if !std::mem::take(&mut state.clear) {
                return false;
            }
            let (enabled, seen, follows) = (state.enabled, state.seen, state.follows);
            let said = state.said.emptying(numbered);
            OwnerState { enabled, seen, follows, said, ..OwnerState::default() }
        };
        let (client, capacity) = (owner.client, owner.capacity.load(Relaxed));
        self.disks.insert(Owner::new(client, capacity, self.disks.promotions.clone(), state));
        self.sweep_disks();
        true
    }

    /// Every owner is to empty its disk.
    pub(super) fn clear_disks(&self) {
        self.disks.owners.lock().values().for_each(|owner| owner.state.lock().clear = true);
    }

    /// How large a disk is.
    ///
    /// # Errors
    /// `INVALID_PARAMS` below 0; `SEGMENT_NOT_FOUND` when the client has offered none.
    pub fn disk_capacity(&self, client: ClientId, bytes: i64) -> Result<()> {
        let bytes = u64::try_from(bytes).map_err(|_| Error::invalid(format!("a disk of {bytes} bytes")))?;
        let owner = self.disks.get(client).ok_or_else(not_offered)?;
        owner.capacity.store(bytes, Relaxed);
        Ok(())
    }

    /// An owner has dropped an object from its disk.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND` when there is no such object.
    pub fn dropped_from_disk(&self, client: ClientId, key: &[u8]) -> Result<()> {
        let hash = self.directory.hash(key);
        let mut shard = self.directory.lock(hash);
        let slot = shard.find(hash, key).ok_or_else(absent)?;
        shard[slot].retain_disk(|owner| owner != client);
        shard.settle(slot);
        Ok(())
    }

    /// Drops the disks of clients that were silent too long; whether there were any.
    pub(super) fn expire_disks(&self, now: Moment) -> bool {
        let due = |owner: &Owner| owner.state.lock().seen.after(self.options.client_ttl);
        let gone = self.disks.remove(|owner| due(owner) <= now);
        if self.disks.count.load(Relaxed) != 0 {
            self.disks.owners.lock().values().for_each(|owner| self.timers.at(due(owner)));
        }
        gone != 0
    }

    /// Forgets what lies on disks that are gone.
    pub(super) fn sweep_disks(&self) {
        self.directory.visit(|shard, slot| {
            shard[slot].retain_disk(|_| true);
            shard.settle(slot);
        });
    }

    /// Puts the value in a slot in line for the disk of whoever has it in memory.
    pub(super) fn offload(&self, shard: &mut Shard<A, E>, slot: SlotId, now: Moment) {
        let Some(options) = &self.options.disks else { return };
        let object = &mut shard[slot];
        let Some(value) = object.value() else { return };
        let len = value.len;
        let owner = value.live().find_map(|held| self.disks.get(held.segment.client));
        if let Some(owner) = owner
            && owner.queue(&object.key, len, now, options.queue_limit)
        {
            object.begin_offload(owner);
        }
    }

    /// Until when somebody may be reading the present value from memory: a reader with a lease, or the owner of a disk who was told to
    /// write it there.
    pub(super) fn in_use_until(&self, object: &Object<A>) -> Moment {
        let owner = object.offload();
        let write_out = self.options.put_release;
        object.lease.max(owner.map_or(Moment(0), |owner| owner.reads_until(object.key.as_bytes(), write_out)))
    }

    /// Who has an object on disk, the first of them.
    pub(super) fn disk_owner(&self, object: &Object<A>) -> Option<Arc<Owner>> {
        object.disk().and_then(OnDisk::first).cloned()
    }
}

pub(super) fn not_offered() -> Error {
    Error::new(ErrorCode::SegmentNotFound, "this client has offered no disk")
}
