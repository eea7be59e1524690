//! Periodic work.

use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::SlotId;
use mooncake_core::replica::Segment;

use super::master::Master;
use crate::directory::expired::After;
use crate::model::misses::MissCause;
use crate::sync::atomic::Ordering::SeqCst;

/// Time between two searches for abandoned writes.
const ABANDONED_EVERY: Duration = Duration::from_secs(1);

/// Events of a [`Master::tick`] that the caller may act on.
#[derive(Debug, Default)]
pub struct TickReport {
    /// Segments whose client expired.
    pub expired: Vec<Segment>,
}

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Does the work that is due: expired clients, ended grace periods, retired segments, abandoned
    /// writes, ended quarantines, the watermark, drain jobs. If nothing is due, the cost is a few
    /// loads per segment.
    pub fn tick(&self) -> TickReport {
        self.tick_at(self.space().clock.now())
    }

    /// Works like [`tick`](Self::tick) on everything that was due at `now`. A caller that detects
    /// stops of the process reads the clock before it checks for one, so that a stop afterwards
    /// does not make a client expire.
    pub fn tick_at(&self, now: Moment) -> TickReport {
        let mut report = TickReport::default();
        if self.space().timers.membership.load(SeqCst) <= now.0 {
            self.space().timers.membership.store(u64::MAX, SeqCst);
            let (began, expired_before) = (self.space().clock.now(), self.clients.lock().counts.expired);
            let (expired, lost) = self.expire(&mut self.space().retired.lock(), now);
            report.expired = expired;
            self.jobs.end_work_of(&lost, now);
            self.space().sweep_beside();
            self.expire_disks(now);
            let expired = self.clients.lock().counts.expired - expired_before;
            let took = u64::try_from(self.space().clock.now().since(began).as_millis()).unwrap_or(u64::MAX);
            (0..expired).for_each(|_| self.space().counters.removal_ms.note(took));
            let mut retired = self.space().retired.lock();
            let rested = self.space().started.after(self.space().rest_after_start());
            retired.forget_unused(now, rested);
            if !retired.is_empty() {
                self.space().timers.schedule(now.after(ABANDONED_EVERY));
            }
        }
        if self.space().timers.abandoned.load(SeqCst) <= now.0 {
            self.space().timers.abandoned.store(now.after(ABANDONED_EVERY).0, SeqCst);
            self.forget_ended_lists(now);
            self.space().readers.prune(now);
            self.take_back_space(now);
            self.jobs.lose_copies_of_unknown(|client| self.clients.lock().seen.contains_key(&client), now);
            self.jobs.tasks.lock().expire(now, self.space().clock.wall_ms());
            self.tend_weights(now);
        }
        let has_removed = self.space().remove_all_ended(now);
        if self.space().reclaim_all(now) || has_removed {
            self.space().eviction.end_backoff();
        }
        self.space().continue_groups(now);
        self.space().evict_to_watermark(now);
        self.space().evict_requested_gaps(now);
        self.space().renew_notes_for_promotions(now);
        self.space().follow_curve(now);
        self.jobs.update_hot_replicas(now);
        self.jobs.queue_requested_offloads(now);
        self.forget_recovered(now);
        if self.jobs.drains.is_due(now) {
            self.jobs.drive_drains(now);
        }
        report
    }

    /// Forgets the replicas of expired clients whose time is over.
    fn forget_ended_lists(&self, now: Moment) {
        for index in 0..self.space().directory.len() {
            let mut after = After::default();
            if !self.space().directory.lock_at(index).expired.may_have_ended(now) {
                continue;
            }
            while !self.space().directory.lock_at(index).expired.forget_ended(&mut after, now) {}
        }
    }

    /// Takes back the space of writes and copies that no client ended in time.
    fn take_back_space(&self, now: Moment) {
        let is_over = |started: Moment| started.after(self.space().options.put_release) <= now;
        for mut shard in self.space().directory.shards() {
            let of_copy = |slot: SlotId| shard[slot].copying().or(shard[slot].lost_copy());
            let due = |slot: &SlotId| of_copy(*slot).is_some_and(|copying| is_over(copying.started));
            let overdue: Vec<_> = shard.copying().iter().copied().filter(due).collect();
            for slot in overdue {
                if let Some(copying) = shard.take_copy(slot) {
                    copying.quarantine(self.space().quarantine_end(now), now);
                }
            }
            let due = |slot: &SlotId| shard[*slot].write().is_some_and(|write| is_over(write.started));
            let overdue: Vec<_> = shard.writing().iter().copied().filter(due).collect();
            for slot in overdue {
                if let Some(write) = shard.take_write(slot) {
                    self.space().counters.released();
                    self.space().quarantine_write(write, now);
                }
                shard.remove_if_empty(slot, MissCause::PutFailed);
            }
        }
    }
}
