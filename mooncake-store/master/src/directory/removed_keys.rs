//! Removals in a shard: what they leave for the announcements of clients that return.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ClientId, SlotId};

use super::absent_disks::AbsentPosition;
use super::expired::After;
use super::shard::Shard;

/// Position in the lists of a shard of what owners may bring back.
#[derive(Default)]
pub(crate) struct ListPosition {
    expired: After,
    absent: AbsentPosition,
    /// True once the replicas of expired clients are visited.
    is_past_expired: bool,
}

impl<A: SegmentAllocator, E: MergeableOrder> Shard<A, E> {
    /// Records the removal of a key, whether or not it has an object. From now on, no value that
    /// was written before is admitted.
    pub(crate) fn record_removal(&mut self, hash: u64, key: &[u8]) {
        self.expired.forget(key);
        self.absent.forget(key);
        if let Some(removals) = &mut self.removals {
            removals.record_removal(hash);
        }
    }

    /// Records the removal of an object; see [`record_removal`](Self::record_removal).
    pub(crate) fn record_removal_of(&mut self, slot: SlotId) {
        let object = &self.objects[slot];
        self.expired.forget(object.key.as_bytes());
        self.absent.forget(object.key.as_bytes());
        if let Some(removals) = &mut self.removals {
            removals.record_removal(object.hash);
        }
    }

    /// Drops the replicas on disks whose owners are gone, and lists them for the case that an owner
    /// returns.
    pub(crate) fn prune_disks(&mut self, slot: SlotId) {
        if self.objects[slot].tier.is_some() {
            self.absent.record(&self.objects[slot]);
            self.objects[slot].retain_disk_replicas(|_| true);
        }
    }

    /// Records that a client has cleared a key without an object of this client. From now on, no
    /// value that the client wrote before is admitted.
    pub(crate) fn record_clear(&mut self, hash: u64, key: &[u8], client: ClientId) {
        if self.expired.forget_of(key, client) {
            // The same value may be on disks, too.
            self.absent.forget(key);
        }
        if let Some(removals) = &mut self.removals {
            removals.record_clear(hash, client);
        }
    }

    /// Forgets some of the replicas of owners that may return, for objects that were removed.
    /// Returns whether it was the last step.
    pub(crate) fn forget_absent(
        &mut self,
        position: &mut ListPosition,
        wanted: impl Fn(&[u8]) -> bool,
    ) -> bool {
        if position.is_past_expired {
            return self.absent.forget_where(&mut position.absent, wanted);
        }
        position.is_past_expired = self.expired.forget_where(&mut position.expired, wanted);
        false
    }
}
