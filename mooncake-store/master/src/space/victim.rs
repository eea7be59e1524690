//! Eviction of single objects and of groups.

use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::SlotId;
use smallvec::SmallVec;

use super::offload_first::SkippedObject;
use super::state::Space;
use crate::directory::{Object, Pass, Shard};
use crate::model::misses::MissCause;
use crate::model::segment::MountedSegment;

/// Maximum number of objects of groups that an eviction passes over. Then the next one goes with
/// its group.
pub(crate) const MAX_PASSED_OVER: usize = 32;

/// Space that an eviction freed.
pub(crate) struct Victim<A> {
    /// Number of objects that left memory.
    pub(crate) objects: u64,
    /// Number of bytes that no client reads any more.
    pub(crate) bytes: u64,
    pub(crate) segments: SmallVec<[Arc<MountedSegment<A>>; 1]>,
    /// Hashes of the parents of evicted objects.
    parents: Vec<u64>,
}

impl<A> Victim<A> {
    pub(crate) fn empty() -> Self {
        Self { objects: 0, bytes: 0, segments: SmallVec::new(), parents: Vec::new() }
    }
}

impl<A: SegmentAllocator, E: MergeableOrder> Space<A, E> {
    /// Evicts the value in a slot, if there is one, and adds it to `victim`. `why` is remembered.
    pub(crate) fn evict_slot(
        &self,
        shard: &mut Shard<A, E>,
        slot: SlotId,
        why: MissCause,
        now: Moment,
        victim: &mut Victim<A>,
    ) {
        let is_after_pin = why == MissCause::Evicted && shard.is_after_pin(slot);
        let why = if is_after_pin { MissCause::PinEnded } else { why };
        let why = shard.end_of_lifetime(slot, now).unwrap_or(why);
        let lease = self.in_use_until(&shard[slot]);
        let yields = self.is_read(&shard[slot], now) && self.lease_yields(&shard[slot], now);
        let Some(value) = shard.take_value(slot, now) else { return };
        let bytes = value.replicas.iter().fold(0u64, |sum, held| sum.saturating_add(held.extent.len));
        victim.objects += 1;
        // Bytes that a client reads are not free yet.
        if lease <= now {
            victim.bytes = victim.bytes.saturating_add(bytes);
        }
        for held in &value.replicas {
            if !victim.segments.iter().any(|known| Arc::ptr_eq(known, &held.segment)) {
                victim.segments.push(held.segment.clone());
            }
        }
        value.quarantine(self.quarantine_end(lease), now);
        victim.parents.append(&mut shard.take_left_parents());
        shard.remove_if_empty(slot, why);
        self.counters.evicted(1, bytes);
        if yields {
            self.counters.look_up_yielded();
        }
    }

    /// Records that the parents of what was evicted have lost a child. No shard may be locked by
    /// the caller.
    pub(crate) fn release_parents(&self, victim: &mut Victim<A>) {
        std::mem::take(&mut victim.parents)
            .into_iter()
            .for_each(|parent| self.directory.change_children(parent, false));
    }

    /// Returns whether an object may be evicted now.
    pub(crate) fn is_evictable(&self, object: &Object<A>, pass: Pass, now: Moment) -> bool {
        self.is_unprotected(object, pass, now) && self.may_leave_memory(object, now)
    }

    /// Answers like [`is_evictable`](Self::is_evictable), and lists in `skipped` some of the
    /// skipped objects that must be written to disk first.
    pub(crate) fn is_evictable_noting(
        &self,
        object: &Object<A>,
        pass: Pass,
        now: Moment,
        skipped: &mut Vec<SkippedObject>,
    ) -> bool {
        self.is_unprotected(object, pass, now) && self.may_leave_memory_noting(object, now, skipped)
    }

    /// Returns whether an object has a value, and no pin, write or copy protects it.
    pub(crate) fn is_unpinned(&self, object: &Object<A>, pass: Pass, now: Moment) -> bool {
        object.value().is_some()
            && object.write().is_none()
            && object.copying().is_none()
            && !object.hard_pin
            && (pass.takes_soft_pinned() || object.soft_pin() <= now)
    }

    /// Returns whether no pin, lease, write or copy protects an object.
    fn is_unprotected(&self, object: &Object<A>, pass: Pass, now: Moment) -> bool {
        self.is_unpinned(object, pass, now)
            // A lease on one object of a group protects all of them.
            && (!self.is_read(object, now) || pass.takes_looked_up() && self.lease_yields(object, now))
    }

    /// Returns the passes of an eviction in the background, in order.
    pub(crate) fn passes(&self) -> impl Iterator<Item = Pass> + use<A, E> {
        let soft = self.options.evict_soft_pinned.then_some(Pass::SoftPinned);
        [Some(Pass::Ordinary), soft].into_iter().flatten()
    }

    /// Returns the passes of an eviction for a put that finds no free space, in order.
    pub(crate) fn passes_for_put(&self) -> impl Iterator<Item = Pass> + use<A, E> {
        let evicts_soft_pinned = self.options.evict_soft_pinned;
        let soft = [Pass::SoftPinned, Pass::Any].into_iter().filter(move |_| evicts_soft_pinned);
        [Pass::Ordinary, Pass::LookedUp].into_iter().chain(soft)
    }
}
