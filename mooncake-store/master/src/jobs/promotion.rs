//! Promotion: objects on disk return to memory because they are read.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::SlotId;

use super::state::Jobs;
use crate::directory::Shard;
use crate::model::disk::count;

impl<A: SegmentAllocator, E: MergeableOrder> Jobs<A, E> {
    /// Counts a read of an object that is only on disk, and queues its promotion.
    ///
    /// In full memory, an object takes the place of others of less value. If the policy does not
    /// rank by value, nothing is promoted then.
    pub(crate) fn read_from_disk(&self, shard: &mut Shard<A, E>, slot: SlotId, now: Moment) {
        let Some(options) = self.space.options.disks.as_ref().and_then(|disks| disks.promotion) else {
            return;
        };
        let promotions = &self.space.disks.promotions;
        if self.disk_reads.0.lock().add(shard[slot].hash) < options.threshold {
            return count(&promotions.too_rare);
        }
        let len = shard[slot].disk().map_or(0, |disk| disk.len);
        let (space, directory) = (&self.space, &self.space.directory);
        let is_full = match directory.value_in_memory(shard, slot) {
            Some(value) => !space.has_spare_space(len, now) && !directory.has_less_than(value),
            None => space.is_above_watermark(),
        };
        if is_full {
            return count(&promotions.too_full);
        }
        if let Some(owner) = space.disk_owner(&shard[slot]) {
            owner.queue_promotion(&shard[slot].key, options.queue_limit);
        }
    }
}
