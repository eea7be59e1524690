//! Memory in use.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;

use super::state::Space;

impl<A: SegmentAllocator, E: MergeableOrder> Space<A, E> {
    /// Returns whether more memory is in use than the background eviction leaves.
    pub(crate) fn is_above_watermark(&self) -> bool {
        let (used, capacity) = self.occupancy();
        used as f64 > self.options.high_watermark * capacity as f64
    }

    /// Returns the bytes in use that eviction could free, and the capacity.
    pub(crate) fn occupancy(&self) -> (u64, u64) {
        let registry = self.segments.read();
        registry.list.iter().fold((0, 0), |(used, capacity), segment| {
            // Extents in quarantine become free without an eviction.
            (
                used.saturating_add(segment.used().saturating_sub(segment.quarantined())),
                capacity.saturating_add(segment.info.size),
            )
        })
    }
}
