//! Promotion: objects on disk return to memory because they are read.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;

use super::state::Jobs;
use crate::directory::Object;
use crate::model::disk::count;

impl<A: SegmentAllocator, E: MergeableOrder> Jobs<A, E> {
    /// Counts a read of an object that is only on disk, and queues its promotion.
    pub(crate) fn read_from_disk(&self, object: &Object<A>, hash: u64) {
        let Some(options) = self.space.options.disks.as_ref().and_then(|disks| disks.promotion) else {
            return;
        };
        let promotions = &self.space.disks.promotions;
        if self.disk_reads.0.lock().add(hash) < options.threshold {
            return count(&promotions.too_rare);
        }
        if self.space.is_above_watermark() {
            return count(&promotions.too_full);
        }
        if let Some(owner) = self.space.disk_owner(object) {
            owner.queue_promotion(&object.key, options.queue_limit);
        }
    }
}
