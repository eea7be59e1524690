//! Exchange of promises with clients: the longest time for which leases and allocations may hold.

use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::ClientId;
use mooncake_protocol::wire::Welcome;

use super::master::Master;
use crate::model::promise::millis;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Records the longest time, in milliseconds, for which leases or allocations of earlier
    /// masters may hold. Returns the longest such time of this master (memory that this master is
    /// the first to know owes nothing else), and the time that the client waits before it announces
    /// objects.
    pub fn exchange_promise(&self, client: ClientId, promise_ms: u64) -> Welcome {
        self.note_promise(Duration::from_millis(promise_ms), &client);
        // A client that knows no promise is new, and has nothing to announce.
        let wait =
            if promise_ms > 0 { self.announcements.next(self.space().clock.now()) } else { Duration::ZERO };
        Welcome {
            promise_ms: millis(self.space().options.longest_promise()),
            announce_after_ms: millis(wait),
        }
    }

    /// Records a promise of earlier masters that `source` reported.
    pub fn note_promise(&self, promise: Duration, source: &dyn std::fmt::Display) {
        self.space().note_promise(promise, source);
    }
}
