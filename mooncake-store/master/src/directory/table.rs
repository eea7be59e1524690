//! Table of all shards.

use std::ops::ControlFlow;
use std::sync::Arc;

use foldhash::quality::FixedState;
use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::{Batch, ChainEnd, Learned, MergeableOrder, Place, VictimNotes};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::SlotId;

use super::chains::ChainLinks;
use super::object::Value;
use super::removals::RemovalRecord;
use super::shard::Shard;
use crate::model::group::{Group, Groups};
use crate::model::tenants::Tenants;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};
use crate::sync::{Mutex, MutexGuard};

/// Directory of all objects.
pub(crate) struct Directory<A, E: MergeableOrder> {
    hasher: FixedState,
    shards: Box<[Locked<A, E>]>,
    groups: Arc<Groups>,
    /// Rank of the next victim of each shard: its last use, or its value if victims compare by
    /// value.
    notes: VictimNotes,
    ranks_by_value: bool,
    uses: Padded<AtomicU64>,
    stamps: Padded<AtomicU64>,
    /// Links between batches of keys; `None` if the policy has no use for them.
    pub(crate) links: Option<ChainLinks>,
    /// Knowledge of the policies, if they learn.
    pub(crate) learned: Option<Arc<dyn Learned>>,
}

type Locked<A, E> = Padded<Mutex<Shard<A, E>>>;

/// Number of objects that can be examined in a few milliseconds.
const LARGE: usize = 1 << 17;

/// Number of slots that are visited under one lock.
const AT_ONCE: usize = 256;

/// Number of objects from which it pays to fetch them before they are looked up.
const FETCHED: usize = 64;

/// Number of shards whose next victim is looked for again at each eviction.
const RENEWED: usize = 2;

/// Several shards, locked at the same time.
pub(crate) struct LockedShards<'a, A, E: MergeableOrder> {
    directory: &'a Directory<A, E>,
    /// Shards by index.
    shards: Vec<(usize, MutexGuard<'a, Shard<A, E>>)>,
}

impl<A: SegmentAllocator, E: MergeableOrder> LockedShards<'_, A, E> {
    /// Returns the shard of a hash, if it is one of those that are locked.
    pub(crate) fn shard_of(&mut self, hash: u64) -> Option<&mut Shard<A, E>> {
        let index = self.directory.index(hash);
        let at = self.shards.binary_search_by_key(&index, |(index, _)| *index).ok()?;
        Some(&mut *self.shards[at].1)
    }
}

/// Value on a cache line of its own: neighbouring locks must not share one.
#[repr(align(128))]
struct Padded<T>(T);

impl<A: SegmentAllocator, E: MergeableOrder> Directory<A, E> {
    pub(crate) fn new(shards: usize, seed: u64, config: &E::Config, tenants: &Arc<Tenants>) -> Self {
        let groups = Arc::new(Groups::new(seed));
        let config = E::for_one_cache(config);
        let shard = || Shard::new(&config, tenants.clone(), groups.clone());
        let ranks_by_value = Shard::<A, E>::new(&config, tenants.clone(), groups.clone()).ranks_by_value();
        Self {
            hasher: FixedState::with_seed(seed),
            shards: (0..shards).map(|_| Padded(Mutex::new(shard()))).collect(),
            notes: VictimNotes::new(shards),
            ranks_by_value,
            groups,
            uses: Padded(AtomicU64::new(1)),
            stamps: Padded(AtomicU64::new(1)),
            links: ranks_by_value.then(ChainLinks::default),
            learned: E::learned(&config),
        }
    }

    /// Lets each shard record removals. `epoch` is that of this master.
    pub(crate) fn record_removals(&self, epoch: u64) {
        self.shards().for_each(|mut shard| shard.removals = Some(Box::new(RemovalRecord::new(epoch))));
    }

    /// Returns whether victims compare by value and not by time.
    pub(crate) fn ranks_by_value(&self) -> bool {
        self.ranks_by_value
    }

    /// Returns the number of a use that happens now.
    pub(crate) fn next_use_number(&self) -> u64 {
        self.uses.0.fetch_add(1, Relaxed)
    }

    /// Returns the number of a value that becomes readable now, or of a snapshot that begins now.
    ///
    /// A caller that stores a value holds the lock of its shard. The values of a key are then
    /// numbered in their order, and a snapshot that locks the shard after it has drawn a larger
    /// number finds the value there, or a later one, or none because the value is gone.
    pub(crate) fn next_stamp_number(&self) -> u64 {
        // The bug needs the counter from which a batch draws its numbers before it takes a lock.
        let numbers = if is_planted("stamp-before-lock") { &self.uses } else { &self.stamps };
        numbers.0.fetch_add(1, Relaxed)
    }

    /// Returns the number of the next use.
    pub(crate) fn use_count(&self) -> u64 {
        self.uses.0.load(Relaxed)
    }

    /// Lets the numbers of uses continue above `number`.
    pub(crate) fn raise_use_number(&self, number: u64) {
        self.uses.0.fetch_max(number.saturating_add(1), Relaxed);
    }

    /// Returns the largest number of `count` uses that happen now.
    pub(crate) fn next_use_numbers(&self, count: usize) -> u64 {
        self.uses.0.fetch_add(count as u64, Relaxed) + (count as u64).saturating_sub(1)
    }

    /// Records that the shard of `hash` has an object whose last use was `used`.
    pub(crate) fn lower_age(&self, hash: u64, used: u64) {
        self.notes.lower(self.index(hash), if self.ranks_by_value { 0 } else { used });
    }

    /// Returns the shard whose next victim seems to go first, with the least rank of those of the
    /// other shards.
    pub(crate) fn first_victim(&self) -> (usize, u64) {
        let (index, rank, second) = self.notes.least();
        // A shard without a victim may have one by now.
        if rank == u64::MAX { (self.notes.next_shard(), u64::MAX) } else { (index, second) }
    }

    /// Returns the shards in turn whose next victims are to be looked for again, because values
    /// change with time.
    pub(crate) fn shards_to_renew(&self) -> impl Iterator<Item = usize> {
        let count = if self.ranks_by_value { RENEWED.min(self.shards.len()) } else { 0 };
        (0..count).map(|_| self.notes.next_shard())
    }

    /// Notes the rank of the next victim of a shard. In an order of time, a shard without one
    /// returns when all others have become younger.
    pub(crate) fn note_victim(&self, index: usize, rank: Option<u64>) {
        let none = || if self.ranks_by_value { u64::MAX } else { self.next_use_number() };
        self.notes.note(index, rank.unwrap_or_else(none));
    }

    /// Records a use of an object.
    pub(crate) fn touch(&self, shard: &mut Shard<A, E>, slot: SlotId, place: &Place) {
        shard.touch(slot, place);
        self.lower_note_of_use(shard, slot, place);
    }

    /// Sets the readable value of an object; see [`Shard::put_value`].
    pub(crate) fn put_value(
        &self,
        shard: &mut Shard<A, E>,
        slot: SlotId,
        value: Value<A>,
        place: &Place,
    ) -> Option<Value<A>> {
        let before = shard.put_value(slot, value, place);
        self.lower_note_of_use(shard, slot, place);
        before
    }

    fn lower_note_of_use(&self, shard: &Shard<A, E>, slot: SlotId, place: &Place) {
        if self.ranks_by_value
            && let Some(policy) = shard.policy(slot)
        {
            self.notes.lower_after_use(self.index(shard[slot].hash), policy, slot, place);
        }
    }

    fn lower_note(&self, shard: &Shard<A, E>, slot: SlotId) {
        if self.ranks_by_value
            && let Some(value) = shard.value_to_policy(slot)
        {
            self.notes.lower(self.index(shard[slot].hash), value);
        }
    }

    /// Records that the object with a hash, if it is here, has one child more, or one less. No
    /// shard may be locked by the caller.
    pub(crate) fn change_children(&self, parent: u64, more: bool) {
        if parent == 0 {
            return;
        }
        let mut shard = self.lock(parent);
        if let Some(slot) = shard.find_hash(parent) {
            shard.change_children(slot, more);
            self.lower_note(&shard, slot);
        }
    }

    /// Returns the value that an object on disk would have in memory by now, after its last use, if
    /// victims compare by value.
    pub(crate) fn value_in_memory(&self, shard: &mut Shard<A, E>, slot: SlotId) -> Option<u64> {
        let place = Place::numbered(shard[slot].used);
        shard.value_if_used(slot, &place, self.use_count())
    }

    /// Returns whether the next victim, as far as known, is of less value.
    pub(crate) fn has_less_than(&self, value: u64) -> bool {
        self.ranks_by_value && self.notes.least().1 < value
    }

    /// Lets eviction choose the object with a hash again, if it waits for others of its group.
    /// Returns whether it waited.
    pub(crate) fn wake(&self, hash: u64) -> bool {
        let mut shard = self.lock(hash);
        let Some(slot) = shard.find_hash(hash) else { return false };
        let has_waited = shard.end_wait(slot);
        if has_waited {
            self.lower_note(&shard, slot);
        }
        has_waited
    }

    /// Returns the batch of the uses of keys with these hashes, which goes on after `before`. With
    /// `is_put`, the keys are about to be stored, otherwise to be read.
    pub(crate) fn batch(&self, tenant: u32, hashes: Vec<u64>, before: ChainEnd, is_put: bool) -> Batch {
        // The number of new keys matters to those that are stored, and the length of what is known
        // only up to the second key.
        let matters = if is_put { hashes.len() } else { 2 };
        let number = if is_put { 0 } else { self.next_use_numbers(hashes.len()) };
        let mut looked_at = 0;
        Batch::new(hashes, number, before, |hash| {
            looked_at += 1;
            looked_at > matters || self.lock(hash).knows(tenant, hash)
        })
    }

    /// Returns the group of a name, if it has objects.
    pub(crate) fn group(&self, name: &str) -> Option<Arc<Group>> {
        self.groups.find(name)
    }

    /// Returns the hash of a key, which selects the shard.
    pub(crate) fn hash(&self, key: &[u8]) -> u64 {
        use std::hash::{BuildHasher, Hasher};
        let mut hasher = self.hasher.build_hasher();
        hasher.write(key);
        hasher.finish()
    }

    /// Locks the shard of a hash.
    pub(crate) fn lock(&self, hash: u64) -> MutexGuard<'_, Shard<A, E>> {
        self.shards[self.index(hash)].0.lock()
    }

    fn index(&self, hash: u64) -> usize {
        // Bits that the tag does not contain.
        (hash >> 40) as usize & (self.shards.len() - 1)
    }

    /// Passes the index of each hash to `see` with its shard. Each shard is locked once.
    pub(crate) fn visit_hashes(&self, hashes: &[u64], mut see: impl FnMut(&mut Shard<A, E>, usize)) {
        let mut ends = vec![0; self.shards.len()];
        hashes.iter().for_each(|hash| ends[self.index(*hash)] += 1);
        let mut sum = 0;
        for end in &mut ends {
            sum += std::mem::replace(end, sum);
        }
        let mut order = vec![0; hashes.len()];
        for (at, hash) in hashes.iter().enumerate() {
            let end = &mut ends[self.index(*hash)];
            order[*end] = at;
            *end += 1;
        }
        for at_once in order.chunk_by(|one, other| self.index(hashes[*one]) == self.index(hashes[*other])) {
            let mut shard = self.lock(hashes[at_once[0]]);
            at_once.iter().for_each(|at| see(&mut shard, *at));
        }
    }

    /// Fetches the objects with these hashes into the caches of the processor. Look-ups under one
    /// lock wait for memory at the same time, those under different locks one after the other.
    pub(crate) fn fetch(&self, hashes: &[u64]) {
        if hashes.len() >= FETCHED {
            self.visit_hashes(hashes, |shard, at| {
                std::hint::black_box(shard.fetch(hashes[at]));
            });
        }
    }

    /// Returns the number of shards.
    pub(crate) fn len(&self) -> usize {
        self.shards.len()
    }

    /// Returns whether a visit of all objects takes longer than a caller should wait.
    pub(crate) fn is_large(&self) -> bool {
        // Keys are spread evenly, so one shard stands for all.
        self.shards[0].0.lock().values() * self.shards.len() > LARGE
    }

    /// Locks a shard by index to look for its next victim.
    pub(crate) fn lock_to_evict(&self, index: usize) -> MutexGuard<'_, Shard<A, E>> {
        let mut shard = self.lock_at(index);
        if self.ranks_by_value {
            shard.set_time(self.use_count());
        }
        shard
    }

    /// Locks a shard by index.
    pub(crate) fn lock_at(&self, index: usize) -> MutexGuard<'_, Shard<A, E>> {
        self.shards[index].0.lock()
    }

    /// Locks the shards of these hashes. The caller holds no lock of a shard.
    pub(crate) fn lock_all(&self, hashes: &[u64]) -> LockedShards<'_, A, E> {
        let mut indices: Vec<_> = hashes.iter().map(|hash| self.index(*hash)).collect();
        // One order for all callers: none waits for another one that waits for it.
        indices.sort_unstable();
        indices.dedup();
        let shards = indices.into_iter().map(|index| (index, self.lock_at(index))).collect();
        LockedShards { directory: self, shards }
    }

    /// Visits every object that exists throughout, and perhaps others. A shard is locked for a few
    /// objects at a time, so that no caller waits for long.
    pub(crate) fn visit(&self, see: impl FnMut(&mut Shard<A, E>, SlotId)) {
        self.visit_while(see, || ControlFlow::Continue(()));
    }

    /// Visits like [`Directory::visit`] until `between` breaks. No lock is held while `between`
    /// runs.
    pub(crate) fn visit_while(
        &self,
        mut see: impl FnMut(&mut Shard<A, E>, SlotId),
        mut between: impl FnMut() -> ControlFlow<()>,
    ) {
        self.visit_from(Position::FIRST, &mut see, || between().is_continue());
    }

    /// Visits objects like [`Directory::visit`] from a position on, as long as `goes_on` returns
    /// true after a few objects. Returns the position of the others, if there may be some.
    pub(crate) fn visit_from(
        &self,
        position: Position,
        mut see: impl FnMut(&mut Shard<A, E>, SlotId),
        mut goes_on: impl FnMut() -> bool,
    ) -> Option<Position> {
        let mut from = position.slot as usize;
        for (index, shard) in self.shards.iter().enumerate().skip(position.shard as usize) {
            loop {
                let mut shard = shard.0.lock();
                if from >= shard.objects.end() {
                    break;
                }
                for slot in (from..from + AT_ONCE).map(|index| SlotId(index as u32)) {
                    if shard.objects.get(slot).is_some() {
                        see(&mut shard, slot);
                    }
                }
                from += AT_ONCE;
                MutexGuard::unlock_fair(shard);
                if !goes_on() {
                    // Neither number is above 2^32: slots have 32 bits.
                    return Some(Position { shard: index as u32, slot: from as u32 });
                }
            }
            from = 0;
        }
        None
    }

    /// Returns each shard in turn, locked.
    pub(crate) fn shards(&self) -> impl Iterator<Item = MutexGuard<'_, Shard<A, E>>> {
        self.shards.iter().map(|shard| shard.0.lock())
    }
}

/// Position in the order of a visit. Objects keep their positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    shard: u32,
    slot: u32,
}

impl Position {
    /// Position of the first object.
    pub(crate) const FIRST: Self = Self { shard: 0, slot: 0 };

    /// Returns the position as a number. The first one has 0, and later ones have larger numbers.
    pub(crate) fn to_number(self) -> u64 {
        u64::from(self.shard) << 32 | u64::from(self.slot)
    }

    /// Returns the position of a number, whether [`to_number`](Self::to_number) has returned it or
    /// not.
    pub(crate) fn from_number(number: u64) -> Self {
        Self { shard: (number >> 32) as u32, slot: number as u32 }
    }
}

#[cfg(test)]
mod tests {
    use mooncake_core::alloc::BuiltinAllocator;
    use mooncake_core::evict::{BuiltinPolicy, PolicyKind};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        #[cfg_attr(miri, ignore = "numbers only, and slow")]
        fn hashes_are_visited_once_each_with_their_shards(
            hashes in proptest::collection::vec(any::<u64>(), 0..200),
        ) {
            let tenants = Arc::new(Tenants::new(None));
            let directory: Directory<BuiltinAllocator, BuiltinPolicy> =
                Directory::new(16, 1, &PolicyKind::Lru.into(), &tenants);
            let address = |shard: &Shard<_, _>| std::ptr::from_ref(shard) as usize;
            let shards: Vec<usize> = (0..16).map(|index| address(&directory.lock_at(index))).collect();
            let mut seen = Vec::new();
            directory.visit_hashes(&hashes, |shard, at| seen.push((address(shard), at)));
            for (shard, at) in &seen {
                prop_assert_eq!(*shard, shards[directory.index(hashes[*at])]);
            }
            let locked = seen.chunk_by(|one, other| one.0 == other.0).count();
            let mut places: Vec<usize> = seen.iter().map(|(_, at)| *at).collect();
            places.sort_unstable();
            prop_assert_eq!(places, (0..hashes.len()).collect::<Vec<_>>());
            let mut distinct: Vec<usize> = hashes.iter().map(|hash| directory.index(*hash)).collect();
            distinct.sort_unstable();
            distinct.dedup();
            prop_assert_eq!(locked, distinct.len(), "each shard is locked once");
        }
    }
}
