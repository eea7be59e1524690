//! What to drop when memory runs out: the [`EvictionPolicy`] interface and its implementations.

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

/// Orders slots by how soon they should go. Lives under a shard lock and sees slots, never keys or bytes.
///
/// Contract (the conformance suite has one case per sentence): `evict` returns only slots that were inserted,
/// not removed since, and for which `allowed` said yes; a slot it returns is gone from the policy; a slot that
/// `allowed` refused stays; `None` means that every slot was refused or there is none; `insert` of a known slot is a `touch`;
/// `touch` and `remove` of an unknown slot do nothing; `len` counts the slots held; the same calls give the same victims.
pub trait EvictionPolicy: Sized + Send + 'static {
    /// What the implementation can be told.
    type Config: Clone + Default + Debug + Send + Sync;

    /// A policy that expects about `slots` slots (a hint, not a limit).
    fn new(slots: usize, config: &Self::Config) -> Self;

    /// A slot came to hold an object of `bytes` bytes.
    fn insert(&mut self, slot: SlotId, bytes: u64);

    /// As [`insert`](Self::insert), with a hash of the object's key, by which a policy with a memory can know an object again that it
    /// evicted before. Ignored unless a policy makes use of it.
    fn insert_hashed(&mut self, slot: SlotId, bytes: u64, key_hash: u64) {
        let _ = key_hash;
        self.insert(slot, bytes);
    }

    /// The object in `slot` was used.
    fn touch(&mut self, slot: SlotId);

    /// The object in `slot` left by another way than `evict`.
    fn remove(&mut self, slot: SlotId);

    /// Takes out the best victim that `allowed` agrees to (leases and pins are its business).
    fn evict(&mut self, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId>;

    /// What happens from now on happens at `now`, in uses of the whole cache; never less than before. Whoever merges the victims of several
    /// policies into one order says so before each insert and touch. Ignored unless a policy makes use of it.
    fn set_time(&mut self, now: u64) {
        let _ = now;
    }

    /// By which time the slot that `evict` returned last is to be compared with those of other policies, oldest first. `None`: by that
    /// of its last use, or of its insertion unless [`heeds_use`](Self::heeds_use).
    fn victim_since(&self) -> Option<u64> {
        None
    }

    /// Whether `touch` changes what goes first. Whoever merges the victims of several policies into one order goes by last use if
    /// so, and by insertion if not.
    fn heeds_use(&self) -> bool {
        true
    }

    /// Slots held.
    fn len(&self) -> usize;

    /// Whether no slot is held.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
