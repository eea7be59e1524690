//! Replicas of expired clients, for a client that returns.

use mooncake_core::Result;
use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ClientId, ReplicaId, SegmentId};
use mooncake_protocol::wire::{InventoryChange, InventoryPage};

use super::master::Master;
use crate::directory::absent_disks::AbsentPosition;
use crate::directory::expired::{After, ListedFor};
use crate::model::snapshot::{SnapshotObject, SnapshotPart};

/// Number of replicas that complete a page.
const PAGE: usize = 4096;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Returns a page of the replicas that a segment held when its client expired and that were not
    /// removed or replaced since. `after` is 0 for the first page, then `next` of the page before.
    ///
    /// The client mounts the memory with [`Master::mount_with_objects`] and announces the intact
    /// replicas with [`Master::announce_expired`].
    pub fn expired(&self, _client: ClientId, segment: SegmentId, after: u64) -> InventoryPage {
        // The sweep of a segment lists its replicas.
        self.space().sweep_beside();
        self.listed(segment, ListedFor::Expiry, after)
    }

    /// Returns a page like [`Master::expired`], of the replicas that the snapshot of an earlier
    /// master has in a segment, that no client has announced in time, and that were not removed or
    /// replaced since. It is empty while clients may announce all replicas of earlier masters.
    pub fn unclaimed(&self, _client: ClientId, segment: SegmentId, after: u64) -> InventoryPage {
        self.listed(segment, ListedFor::LateReturn, after)
    }

    fn listed(&self, segment: SegmentId, reason: ListedFor, after: u64) -> InventoryPage {
        let now = self.space().clock.now();
        let mut changes = Vec::new();
        let shards = self.space().directory.len();
        let mut index = usize::try_from(after).unwrap_or(shards).min(shards);
        while index < shards && changes.len() < PAGE {
            let (mut after, mut is_last) = (After::default(), false);
            while !is_last {
                let there;
                (there, is_last) = self
                    .space()
                    .directory
                    .lock_at(index)
                    .expired
                    .in_segment(&mut after, segment, reason, now);
                let change = |stored| InventoryChange { replica: ReplicaId(0), stored: Some(stored) };
                changes.extend(there.into_iter().map(change));
            }
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
        let (now, wall_ms) = (self.space().clock.now(), self.space().clock.wall_ms());
        let mut count = 0;
        for index in 0..self.space().directory.len() {
            let (mut after, mut is_last) = (After::default(), false);
            while !is_last {
                let shard = self.space().directory.lock_at(index);
                let mut objects;
                (objects, is_last) = shard.expired.to_snapshot(&mut after, now, wall_ms);
                objects.iter_mut().for_each(|object| shard.absent.complete(object));
                drop(shard);
                count += objects.len() as u64;
                put_objects(objects, put)?;
            }
        }
        Ok(count)
    }

    /// Writes the objects on disks whose owners are gone to a snapshot. With `alone`, only those
    /// that are nowhere else. Returns their number.
    pub(crate) fn absent_to_snapshot(
        &self,
        alone: bool,
        put: &mut impl FnMut(SnapshotPart) -> Result<()>,
    ) -> Result<u64> {
        let mut count = 0;
        for index in 0..self.space().directory.len() {
            let (mut position, mut is_last) = (AbsentPosition::default(), false);
            while !is_last {
                let shard = self.space().directory.lock_at(index);
                let mut objects;
                (objects, is_last) = shard.absent.to_snapshot(&mut position);
                if alone {
                    let is_alone = |key: &[u8]| shard.find(self.space().directory.hash(key), key).is_none();
                    objects.retain(|object| is_alone(&object.key));
                }
                drop(shard);
                count += objects.len() as u64;
                put_objects(objects, put)?;
            }
        }
        Ok(count)
    }
}

fn put_objects(objects: Vec<SnapshotObject>, put: &mut impl FnMut(SnapshotPart) -> Result<()>) -> Result<()> {
    if objects.is_empty() {
        return Ok(());
    }
    put(SnapshotPart { objects, ..SnapshotPart::default() })
}
