//! Table of all shards.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use foldhash::quality::FixedState;
use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::SlotId;
use parking_lot::{Mutex, MutexGuard};

use super::shard::Shard;
use crate::model::group::Groups;
use crate::model::tenants::Tenants;

/// Directory of all objects.
pub(crate) struct Directory<A, E: MergeableOrder> {
    hasher: FixedState,
    shards: Box<[Locked<A, E>]>,
    /// Last use of the next victim of each shard, as far as known.
    ages: Box<[AtomicU64]>,
    uses: Padded<AtomicU64>,
}

type Locked<A, E> = Padded<Mutex<Shard<A, E>>>;

/// Number of objects that can be examined in a few milliseconds.
const LARGE: usize = 1 << 17;

/// Number of slots that are visited under one lock.
const AT_ONCE: usize = 256;

/// Value on a cache line of its own: neighbouring locks must not share one.
#[repr(align(128))]
struct Padded<T>(T);

impl<A: SegmentAllocator, E: MergeableOrder> Directory<A, E> {
    pub(crate) fn new(shards: usize, seed: u64, config: &E::Config, tenants: &Arc<Tenants>) -> Self {
        let groups = Arc::new(Groups::new(seed));
        let shard = || Shard::new(config, tenants.clone(), groups.clone());
        Self {
            hasher: FixedState::with_seed(seed),
            shards: (0..shards).map(|_| Padded(Mutex::new(shard()))).collect(),
            ages: (0..shards).map(|_| AtomicU64::new(0)).collect(),
            uses: Padded(AtomicU64::new(1)),
        }
    }

    /// Returns the number of a use that happens now.
    pub(crate) fn next_use_number(&self) -> u64 {
        self.uses.0.fetch_add(1, Relaxed)
    }

    /// Lets the numbers of uses continue above `number`.
    pub(crate) fn raise_use_number(&self, number: u64) {
        self.uses.0.fetch_max(number.saturating_add(1), Relaxed);
    }

    /// Records that the shard of `hash` has an object whose last use was `used`.
    pub(crate) fn lower_age(&self, hash: u64, used: u64) {
        self.ages[self.index(hash)].fetch_min(used, Relaxed);
    }

    /// Returns the shard whose next victim seems to be the least recently used, with its last use.
    pub(crate) fn oldest(&self) -> (usize, u64) {
        let ages = self.ages.iter().map(|age| age.load(Relaxed));
        ages.enumerate().min_by_key(|(_, age)| *age).unwrap_or((0, 0))
    }

    /// Records the last use of the next victim of a shard. A shard without one returns when all
    /// others have become younger.
    pub(crate) fn note_age(&self, index: usize, age: Option<u64>) {
        self.ages[index].store(age.unwrap_or_else(|| self.next_use_number()), Relaxed);
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

    /// Returns the number of shards.
    pub(crate) fn len(&self) -> usize {
        self.shards.len()
    }

    /// Returns whether a visit of all objects takes longer than a caller should wait.
    pub(crate) fn is_large(&self) -> bool {
        // Keys are spread evenly, so one shard stands for all.
        self.shards[0].0.lock().values() * self.shards.len() > LARGE
    }

    /// Locks a shard by index.
    pub(crate) fn lock_at(&self, index: usize) -> MutexGuard<'_, Shard<A, E>> {
        self.shards[index].0.lock()
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
        for shard in &self.shards {
            let mut from = 0;
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
                if between().is_break() {
                    return;
                }
            }
        }
    }

    /// Returns each shard in turn, locked.
    pub(crate) fn shards(&self) -> impl Iterator<Item = MutexGuard<'_, Shard<A, E>>> {
        self.shards.iter().map(|shard| shard.0.lock())
    }
}
