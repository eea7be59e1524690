//! Eviction when memory runs out: the [`EvictionPolicy`] interface and its implementations.

mod builtin;
mod chain;
mod curve;
mod custom;
mod fifo;
mod ghost;
mod gittins;
mod learned;
mod lru;
mod notes;
mod rings;
mod s3fifo;
mod sample;
mod tenure;

pub use self::builtin::{BuiltinPolicy, BuiltinPolicyConfig, ParsePolicyError, PolicyKind};
pub use self::chain::{Batch, ChainEnd, ChainEnds, Place};
pub use self::curve::{CURVE_HALVES, CURVE_OBJECTS, CacheEvent, CacheEvents, KeyUse, MemoryCurve, UseFeed};
pub use self::custom::{CustomOrder, CustomPolicy};
pub use self::fifo::Fifo;
pub use self::gittins::{Gittins, GittinsConfig, Learner};
pub use self::learned::Learned;
pub use self::lru::Lru;
pub use self::notes::VictimNotes;
pub use self::s3fifo::{S3Fifo, S3FifoConfig};
pub use self::sample::KeySample;
pub use self::tenure::{Tenure, TenureConfig};

use std::fmt::Debug;
use std::sync::Arc;

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
/// have a policy; the cache evicts the first of their victims.
///
/// Every method has a default that suits an [`EvictionPolicy`] that knows nothing of keys, chains
/// and other shards: `impl MergeableOrder for MyPolicy {}` is enough.
pub trait MergeableOrder: EvictionPolicy {
    /// Returns the options for the policies of one cache, with everything that they share. The
    /// default shares nothing.
    fn for_one_cache(config: &Self::Config) -> Self::Config {
        config.clone()
    }

    /// Returns the options for the policy of a cache of the keys in `sample`, with the same share
    /// of the memory. The numbers of uses are those of the whole cache. The policy shares nothing
    /// with others. The default is that of a cache.
    fn for_sample(config: &Self::Config, sample: &Arc<KeySample>) -> Self::Config {
        let _ = sample;
        Self::for_one_cache(config)
    }

    /// Returns what the policies with these options have learned together. The default is nothing.
    fn learned(config: &Self::Config) -> Option<Arc<dyn Learned>> {
        let _ = config;
        None
    }

    /// Inserts like [`insert`](EvictionPolicy::insert), with a hash of the key of the object. A
    /// policy with a memory recognises an object that it evicted before by the hash. The default
    /// ignores it.
    fn insert_hashed(&mut self, slot: SlotId, bytes: u64, key_hash: u64) {
        let _ = key_hash;
        self.insert(slot, bytes);
    }

    /// Inserts like [`insert_hashed`](Self::insert_hashed), with the position of the use. The
    /// default ignores the position.
    fn insert_at(&mut self, slot: SlotId, bytes: u64, key_hash: u64, place: &Place) {
        let _ = place;
        self.insert_hashed(slot, bytes, key_hash);
    }

    /// Records a use like [`touch`](EvictionPolicy::touch), with its position. The default sets the
    /// clock by it, and ignores the rest.
    fn touch_at(&mut self, slot: SlotId, place: &Place) {
        self.set_time(place.number);
        self.touch(slot);
    }

    /// Returns whether the policy remembers the object with this hash, which it does not hold.
    fn remembers(&self, key_hash: u64) -> bool {
        let _ = key_hash;
        false
    }

    /// Takes back the last victim of [`evict`](EvictionPolicy::evict), as if it had not been
    /// evicted. The default inserts it.
    fn take_back(&mut self, slot: SlotId, bytes: u64, key_hash: u64) {
        self.insert_hashed(slot, bytes, key_hash);
    }

    /// Returns the hash of the parent that the object in a slot was inserted with; 0 for none. The
    /// slot is held, or is the last victim.
    fn parent(&self, slot: SlotId) -> u64 {
        let _ = slot;
        0
    }

    /// Records that the object in `slot` has one child more in the cache, or one less. Callers call
    /// this for the parent of each object that is inserted, evicted or removed.
    fn change_children(&mut self, slot: SlotId, more: bool) {
        let _ = (slot, more);
    }

    /// Sets the logical clock of the following calls, in uses of the whole cache. `now` never
    /// decreases. Callers that merge the victims of several policies call this before each
    /// `insert`, `touch` and `evict`. The default ignores it. [`touch_at`](Self::touch_at) needs no
    /// such call.
    fn set_time(&mut self, now: u64) {
        let _ = now;
    }

    /// Returns whether victims compare by value and not by time: the victim with the least
    /// [`victim_value`](Self::victim_value) goes first. Values change with time, so callers do not
    /// keep a victim for later, but [take it back](Self::take_back).
    fn ranks_by_value(&self) -> bool {
        false
    }

    /// Returns the value of the last victim of `evict`, if victims compare by value. (The bits of a
    /// positive `f32` order as the number does. Lower bits may tell equal values apart.)
    fn victim_value(&self) -> Option<u64> {
        None
    }

    /// Returns the value of a slot that is held, if victims compare by value.
    fn value(&self, slot: SlotId) -> Option<u64> {
        let _ = slot;
        None
    }

    /// Returns a value that no object has less than right after its use at `place`, if victims
    /// compare by value; 0 if unknown. The call is cheaper than [`value`](Self::value).
    fn least_value_of_use(&self, place: &Place) -> u64 {
        let _ = place;
        0
    }

    /// Returns the value of an object that the policy does not hold, and of which only the last use
    /// is known, if victims compare by value.
    fn value_since(&self, used: u64) -> Option<u64> {
        let _ = used;
        None
    }

    /// Returns the value that an object would have by now after a use at `place`, if victims
    /// compare by value. The policy does not hold the object, but may remember the hash of its key.
    fn value_if_used(&self, key_hash: u64, place: &Place) -> Option<u64> {
        let _ = (key_hash, place);
        None
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
