//! Eviction when memory runs out: the [`EvictionPolicy`] interface and its implementations.

mod builtin;
mod fifo;
mod ghost;
mod lru;
mod rings;
mod s3fifo;
mod tenure;

pub use self::builtin::{BuiltinPolicy, BuiltinPolicyConfig, ParsePolicyError, PolicyKind};
pub use self::fifo::Fifo;
pub use self::lru::Lru;
pub use self::s3fifo::{S3Fifo, S3FifoConfig};
pub use self::tenure::{Tenure, TenureConfig};

use std::fmt::Debug;

use crate::ids::SlotId;

/// Order in which slots are evicted. It lives under a shard lock, and handles slots, never keys or
/// bytes.
///
/// Contract (the conformance suite has one case per sentence): `evict` returns only slots that were
/// inserted, not removed since, and for which `allowed` returned true; a slot that `evict` returns
/// is gone from the policy; a slot that `allowed` refused stays; `None` means that every slot was
/// refused or there is none; `insert` of a known slot is a `touch`; `touch` and `remove` of an
/// unknown slot do nothing; `len` counts the slots held; the same calls give the same victims.
pub trait EvictionPolicy: Sized + Send + 'static {
    /// Options of the implementation.
    type Config: Clone + Default + Debug + Send + Sync;

    /// Creates a policy that expects about `slots` slots (a hint, not a limit).
    fn new(slots: usize, config: &Self::Config) -> Self;

    /// Records that a slot now holds an object of `bytes` bytes.
    fn insert(&mut self, slot: SlotId, bytes: u64);

    /// Records a use of the object in `slot`.
    fn touch(&mut self, slot: SlotId);

    /// Removes the slot of an object that left by another way than `evict`.
    fn remove(&mut self, slot: SlotId);

    /// Removes and returns the best victim that `allowed` agrees to (leases and pins).
    fn evict(&mut self, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId>;

    /// Returns the number of slots held.
    fn len(&self) -> usize;

    /// Returns whether no slot is held.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Order of a policy whose victims compare with those of other policies. The shards of a cache each
/// have a policy; the cache evicts the oldest of their victims.
///
/// Every method has a default that suits an [`EvictionPolicy`] that knows nothing of other shards:
/// `impl MergeableOrder for MyPolicy {}` is enough.
pub trait MergeableOrder: EvictionPolicy {
    /// Inserts like [`insert`](EvictionPolicy::insert), with a hash of the key of the object. A
    /// policy with a memory recognises an object that it evicted before by the hash. The default
    /// ignores it.
    fn insert_hashed(&mut self, slot: SlotId, bytes: u64, key_hash: u64) {
        let _ = key_hash;
        self.insert(slot, bytes);
    }

    /// Sets the logical clock of the following calls, in uses of the whole cache. `now` never
    /// decreases. Callers that merge the victims of several policies call this before each `insert`
    /// and `touch`. The default ignores it.
    fn set_time(&mut self, now: u64) {
        let _ = now;
    }

    /// Returns the time by which the last victim of `evict` compares with victims of other
    /// policies, oldest first. `None` stands for the time of its last use, or of its insertion
    /// unless [`heeds_use`](Self::heeds_use).
    fn victim_since(&self) -> Option<u64> {
        None
    }

    /// Returns whether `touch` changes the order. Callers that merge the victims of several
    /// policies order them by last use if so, and by insertion if not.
    fn heeds_use(&self) -> bool {
        true
    }
}
