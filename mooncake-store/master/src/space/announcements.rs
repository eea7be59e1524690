//! Admission of values of earlier masters.

use std::cmp::Ordering;
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::ClientId;

use super::state::Space;
use crate::directory::Shard;
use crate::directory::removed_keys::ListPosition;
use crate::model::value::Stamp;

/// Time after the start of a master during which values of earlier masters are announced.
pub(crate) const ANNOUNCED_FOR: Duration = Duration::from_secs(600);

impl<A: SegmentAllocator, E: MergeableOrder> Space<A, E> {
    /// Returns whether a value of an earlier master may count: it was neither removed nor followed
    /// by another one since the start. `written` has its stamp and its writer, as far as they are
    /// known: a value that is only on disks has none, and no client can clear it. Another one of
    /// unknown writer counts as written by any client. `shard` is that of the key.
    pub(crate) fn admits_earlier(
        &self,
        shard: &Shard<A, E>,
        hash: u64,
        key: &[u8],
        written: (Option<Stamp>, Option<ClientId>),
    ) -> bool {
        let Some(removals) = &shard.removals else { return is_planted("horizon-ends") };
        if is_planted("forget-removals-at-restart") {
            return true;
        }
        let (stamp, writer) = written;
        let follows = |lost: &Stamp| {
            let order = self.announcements.order.read();
            stamp.is_some_and(|stamp| order.compare(*lost, stamp).is_some_and(Ordering::is_le))
        };
        let is_of =
            |clients: &[ClientId]| stamp.is_some() && writer.is_none_or(|writer| clients.contains(&writer));
        removals.admits(hash, is_of, follows) && !self.announcements.was_removed(key)
    }

    /// Forgets what owners may bring back of the keys that were removed, a few hundred objects
    /// under one lock.
    pub(crate) fn forget_absent(&self, wanted: impl Fn(&[u8]) -> bool) {
        for index in 0..self.directory.len() {
            let mut position = ListPosition::default();
            while !self.directory.lock_at(index).forget_absent(&mut position, &wanted) {}
        }
    }

    /// Returns whether the time for announcements of values of earlier masters is over.
    pub(crate) fn announcements_are_due_to_end(&self, now: Moment) -> bool {
        self.started.after(ANNOUNCED_FOR + self.announcements.extension()) <= now
    }

    /// Ends announcements of values of earlier masters, and frees the record of removals.
    pub(crate) fn end_announcements(&self) {
        let free = || self.directory.shards().for_each(|mut shard| shard.removals = None);
        if self.announcements.close(free) {
            tracing::info!("announcements of objects of earlier masters have ended");
        }
    }
}
