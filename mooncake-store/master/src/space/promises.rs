//! Promises of earlier masters, and how long remounted memory stays unused for their sake.
//!
//! A master that restarts with shorter times than its predecessor still owes readers and writers
//! the longer ones. Snapshots and clients carry the longest time from one master to the next; the
//! metadata service carries it where there are several masters.

use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::fault_injection::is_planted;

use super::state::Space;
use crate::model::promise::{GRANT_USE, LONGEST_PROMISE, millis};

impl<A: SegmentAllocator, E: MergeableOrder> Space<A, E> {
    /// Records a promise of earlier masters that `source` reported.
    pub(crate) fn note_promise(&self, promise: Duration, source: &dyn std::fmt::Display) {
        if is_planted("promise-forgotten") {
            return;
        }
        let promise = promise.min(LONGEST_PROMISE);
        let before_ms = self.promises.raise(promise);
        let own = self.options.longest_promise();
        if promise <= own || millis(promise) <= before_ms {
            return;
        }
        let rest = self.rest_after_start();
        if rest < promise {
            tracing::warn!(
                %source, ?promise, ?rest,
                "an earlier master promised more than --remount_rest leaves: readers with old \
                 leases may meet new objects"
            );
        } else {
            tracing::warn!(
                %source, ?promise, lease_ttl = ?self.options.lease_ttl,
                put_discard = ?self.options.put_discard,
                "an earlier master had a longer --default_kv_lease_ttl or \
                 --put_start_discard_timeout_sec: remounted memory stays unused that long"
            );
        }
    }

    /// Returns the longest time, in milliseconds, for which leases and allocations of this master
    /// or of an earlier one may hold.
    pub(crate) fn promise_ms(&self, now: Moment) -> u64 {
        let earlier_ms = self.promises.longest_ms();
        let holds = self.started.after(Duration::from_millis(earlier_ms)) > now;
        millis(self.options.longest_promise()).max(if holds { earlier_ms } else { 0 })
    }

    /// Returns the time after the start of this master during which it places nothing in memory
    /// that is mounted again and that it has never seen.
    pub(crate) fn rest_after_start(&self) -> Duration {
        let earlier = Duration::from_millis(self.promises.longest_ms());
        let longest = self.options.longest_promise().max(GRANT_USE).max(earlier);
        self.options.remount_rest.unwrap_or(longest)
    }
}
