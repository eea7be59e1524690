//! Replicas of a value in memory.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use smallvec::SmallVec;

use crate::model::segment::Allocation;

/// Replicas of one value. Most objects have one, which needs no allocation of its own.
pub(crate) type Replicas<A> = SmallVec<[Allocation<A>; 1]>;

/// Drops the replicas in retired segments, where their space stays in quarantine.
pub(super) fn drop_retired<A: SegmentAllocator>(replicas: &mut Replicas<A>, until: Moment, now: Moment) {
    let mut at = 0;
    while at < replicas.len() {
        if replicas[at].segment.is_alive() {
            at += 1;
        } else {
            replicas.remove(at).quarantine(until, now);
        }
    }
}
