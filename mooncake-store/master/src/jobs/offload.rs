//! Offload: objects in memory are queued for the disk of a client.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ObjectKey, SlotId};
use mooncake_protocol::wire::OffloadItem;

use super::state::Jobs;
use crate::directory::Shard;

impl<A: SegmentAllocator, E: MergeableOrder> Jobs<A, E> {
    /// Queues the value in a slot for the disk of a client that has it in memory.
    pub(crate) fn offload(&self, shard: &mut Shard<A, E>, slot: SlotId, now: Moment) {
        let Some(options) = &self.space.options.disks else { return };
        let object = &mut shard[slot];
        let Some(value) = object.value() else { return };
        let len = value.len;
        let owner = value.live().find_map(|held| self.space.disks.get(held.segment.client));
        if let Some(owner) = owner
            && owner.queue_offload(&object.key, len, now, options.queue_limit)
        {
            object.begin_offload(owner);
        }
    }

    /// Describes an object for the owner of a disk.
    pub(crate) fn offload_item(&self, key: &ObjectKey, len: u64) -> OffloadItem {
        let (tenant, key) = self.space.tenants.split(key.as_bytes());
        OffloadItem { tenant: tenant.into(), key: key.into(), size: len.cast_signed() }
    }

    /// Queues the objects that eviction skipped and requested.
    pub(crate) fn queue_requested_offloads(&self, now: Moment) {
        let requests = std::mem::take(&mut *self.space.disks.offload_requests.lock());
        for key in requests.keys {
            let hash = self.space.directory.hash(key.as_bytes());
            let mut shard = self.space.directory.lock(hash);
            let Some(slot) = shard.find(hash, key.as_bytes()) else { continue };
            if shard[slot].offload().is_none() && shard[slot].disk().is_none() {
                self.offload(&mut shard, slot, now);
                let options = self.space.options.disks.as_ref();
                if shard[slot].offload().is_none() && options.is_some_and(|options| options.force_evict) {
                    shard[slot].fail_offload();
                }
            }
        }
    }
}
