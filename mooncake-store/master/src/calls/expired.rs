//! Replicas of expired clients, for a client that returns.

use mooncake_core::Result;
use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ClientId, ReplicaId, SegmentId};
use mooncake_protocol::wire::{InventoryChange, InventoryPage};

use super::master::Master;
use crate::model::snapshot::SnapshotPart;

/// Number of replicas that complete a page.
const PAGE: usize = 4096;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Returns a page of the replicas that a segment held when its client expired and that were not
    /// removed or replaced since. `after` is 0 for the first page, then `next` of the page before.
    ///
    /// The client mounts the memory with [`Master::mount_kept`] and announces the intact replicas
    /// with [`Master::announce_expired`].
    pub fn expired(&self, _client: ClientId, segment: SegmentId, after: u64) -> InventoryPage {
        // The sweep of a segment lists its replicas.
        self.space().sweep_beside();
        let now = self.space().clock.now();
        let mut changes = Vec::new();
        let shards = self.space().directory.len();
        let mut index = usize::try_from(after).unwrap_or(shards).min(shards);
        while index < shards && changes.len() < PAGE {
            let shard = self.space().directory.lock_at(index);
            let there = shard.expired.in_segment(segment, now);
            changes
                .extend(there.map(|stored| InventoryChange { replica: ReplicaId(0), stored: Some(stored) }));
            index += 1;
        }
        InventoryPage {
            epoch: self.space().epoch,
            next: index as u64,
            lost: false,
            whole: index == shards,
            changes,
        }
    }

    /// Writes the replicas of expired clients to a snapshot. Returns the number of their objects.
    pub(crate) fn expired_to_snapshot(
        &self,
        put: &mut impl FnMut(SnapshotPart) -> Result<()>,
    ) -> Result<u64> {
        let now = self.space().clock.now();
        let mut count = 0;
        for index in 0..self.space().directory.len() {
            let objects: Vec<_> = self.space().directory.lock_at(index).expired.to_snapshot(now).collect();
            count += objects.len() as u64;
            for part in objects.chunks(PAGE) {
                put(SnapshotPart { objects: part.to_vec(), ..SnapshotPart::default() })?;
            }
        }
        Ok(count)
    }
}
