//! Hits by size of memory.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::SlotId;

use super::master::Master;
use crate::directory::Shard;
use crate::model::curve::CurveReport;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Estimates how often objects would be found with half, one, two and four times the memory,
    /// under the policy of this master and the traffic so far.
    ///
    /// The estimate is about memory only. Leases, pins, groups and quotas do not enter, and a read
    /// from a disk is a use of an object that memory may lack. With a policy that evicts the front
    /// of a prefix before its end (`fifo`, `s3fifo`), blocks behind the gap count as found.
    pub fn memory_curve(&self) -> CurveReport {
        self.space().report_curve(self.space().clock.now())
    }

    /// Returns the memory that an object takes if the curve watches its uses. A use is noted when
    /// its shard is free again.
    pub(super) fn sampled_bytes(&self, shard: &Shard<A, E>, slot: SlotId) -> Option<u64> {
        let object = &shard[slot];
        self.space().curve.feed.sample().contains(object.hash).then(|| object.memory_bytes())
    }
}
