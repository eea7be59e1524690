//! Loss of clients: the copies, promotions and tasks of a client end with the client. It expired,
//! unmounted its last segment, or another process replaced it.
//!
//! A client that returns learns of the loss when it ends a copy. Bytes that it had sent may still
//! arrive, so the space of its copies stays in quarantine as long as a copy may last.

use std::collections::HashSet;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::{ClientId, SlotId};

use super::state::Jobs;
use crate::directory::{Copying, Shard};
use crate::model::misses::MissCause;

/// Message of a task that ends with its client.
const LOST: &str = "its client is lost";

impl<A: SegmentAllocator, E: MergeableOrder> Jobs<A, E> {
    /// Ends what lost clients were doing. No shard may be locked by the caller.
    pub(crate) fn end_work_of(&self, lost: &HashSet<ClientId>, now: Moment) {
        if lost.is_empty() || is_planted("copy-outlives-client") {
            return;
        }
        for mut shard in self.space.directory.shards() {
            self.lose_copies(&mut shard, now, |copying| lost.contains(&copying.copier.client));
        }
        self.end_promotions_of(lost, now);
        let wall = self.space.clock.wall_ms();
        let ended = self.tasks.lock().end_of(lost, LOST, wall);
        if let Some(hot) = &self.space.hot {
            hot.forget_copies_of(lost, now);
        }
        if ended > 0 {
            tracing::warn!(tasks = ended, "tasks ended: their clients are lost");
            self.drains.wake();
        }
        self.space.eviction.end_backoff();
    }

    /// Loses the copies of clients that are not known, and that would have expired since the start
    /// of the copy.
    pub(crate) fn lose_copies_of_unknown(&self, is_known: impl Fn(ClientId) -> bool, now: Moment) {
        let is_old =
            |copying: &Copying<A>| copying.started.after(self.space.options.client_lifetime()) <= now;
        let mut unknown = HashSet::new();
        for shard in self.space.directory.shards() {
            let copies = shard.copying().iter().filter_map(|slot| shard[*slot].copying());
            unknown.extend(copies.filter(|copying| is_old(copying)).map(|copying| copying.copier.client));
        }
        unknown.retain(|client| !is_known(*client));
        if unknown.is_empty() || is_planted("copy-outlives-client") {
            return;
        }
        for mut shard in self.space.directory.shards() {
            let is_lost = |copying: &Copying<A>| is_old(copying) && unknown.contains(&copying.copier.client);
            self.lose_copies(&mut shard, now, is_lost);
        }
    }

    /// Loses the copies in progress in a shard that `is_lost` accepts.
    pub(crate) fn lose_copies(
        &self,
        shard: &mut Shard<A, E>,
        now: Moment,
        is_lost: impl Fn(&Copying<A>) -> bool,
    ) {
        let is_lost = |slot: &SlotId| shard[*slot].copying().is_some_and(&is_lost);
        let slots: Vec<_> = shard.copying().iter().copied().filter(is_lost).collect();
        for slot in slots {
            shard.lose_copy(slot, self.space.options.put_release, now);
        }
    }

    /// Takes back the space of promotions whose clients or disks are lost.
    pub(crate) fn end_promotions_of(&self, lost: &HashSet<ClientId>, now: Moment) {
        if lost.is_empty() {
            return;
        }
        for mut shard in self.space.directory.shards() {
            let is_lost = |slot: &SlotId| {
                let write = shard[*slot].write();
                write.is_some_and(|write| write.promotes && lost.contains(&write.writer.client))
            };
            let slots: Vec<_> = shard.writing().iter().copied().filter(is_lost).collect();
            for slot in slots {
                if let Some(write) = shard.take_write(slot) {
                    self.space.quarantine_write(write, now);
                }
                shard.remove_if_empty(slot, MissCause::OwnerLost);
            }
        }
    }
}
