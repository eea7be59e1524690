//! What is done now and then, whoever calls.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::ids::SlotId;
use mooncake_core::replica::Segment;

use super::Master;

/// How often writes that nobody ended are looked for.
const ZOMBIES: Duration = Duration::from_secs(1);

/// What a [`Master::tick`] did that others may want to act on.
#[derive(Debug, Default)]
pub struct TickReport {
    /// Segments that went because their client was silent too long.
    pub expired: Vec<Segment>,
}

/// When there is something to do.
pub(super) struct Timers {
    /// Clients, graves, grace periods: the earliest moment one of them may be due.
    membership: AtomicU64,
    zombies: AtomicU64,
}

impl Default for Timers {
    fn default() -> Self {
        Self { membership: AtomicU64::new(u64::MAX), zombies: AtomicU64::new(0) }
    }
}

impl Timers {
    pub(super) fn at(&self, moment: Moment) {
        self.membership.fetch_min(moment.0, SeqCst);
    }
}

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// Does what is due: silent clients, ended grace periods, dead segments, abandoned writes, space that has rested, the
    /// watermark, drain jobs. Costs a few loads per segment when nothing is.
    pub fn tick(&self) -> TickReport {
        self.tick_at(self.clock.now())
    }

    /// As [`tick`](Self::tick), with what was due at `now`. A caller that finds out whether the process was stopped reads the clock before it does:
    /// a stop after that does not make a client seem silent.
    pub fn tick_at(&self, now: Moment) -> TickReport {
        let mut report = TickReport::default();
        if self.timers.membership.load(SeqCst) <= now.0 {
            self.timers.membership.store(u64::MAX, SeqCst);
            report.expired = self.expire(&mut self.membership.lock(), now);
            self.sweep_beside();
            let mut graves = self.membership.lock();
            if self.expire_disks(now) {
                self.sweep_disks();
            }
            self.forget_graves(&mut graves, now);
            if !graves.is_empty() {
                self.timers.at(now.after(ZOMBIES));
            }
        }
        if self.timers.zombies.load(SeqCst) <= now.0 {
            self.timers.zombies.store(now.after(ZOMBIES).0, SeqCst);
            self.reap(now);
            self.reap_copies(now);
            self.tasks.lock().expire(now, self.clock.wall_ms(), &self.options.tasks);
        }
        if self.reclaim_all(now) {
            self.eviction.something_changed();
        }
        self.evict_to_watermark(now);
        self.clear_wanted_windows(now);
        self.tend_hot(now);
        self.queue_wanted(now);
        self.forget_past(now);
        if self.drains.is_due(now) {
            self.drive_drains(now);
        }
        report
    }

    /// Takes back writes that nobody ended in time.
    fn reap(&self, now: Moment) {
        for mut shard in self.directory.each() {
            shard.expired.forget_until(now);
            let due = |slot: &SlotId| {
                shard[*slot].write().is_some_and(|write| write.started.after(self.options.put_release) <= now)
            };
            let overdue: Vec<_> = shard.writing().iter().copied().filter(due).collect();
            for slot in overdue {
                if let Some(write) = shard.take_write(slot) {
                    self.counters.released();
                    self.retire_write(write, now);
                }
                shard.settle(slot);
            }
        }
    }
}
