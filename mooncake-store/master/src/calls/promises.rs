//! Promises of earlier masters: for how long leases and grants may hold that this master did not give.
//!
//! A master that is restarted with shorter times than the one before it still owes readers and writers the longer ones. Snapshots
//! and clients carry the longest time from one master to the next; of several masters, the metadata service does too.

use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::ids::ClientId;
use mooncake_protocol::wire::Welcome;

use super::master::Master;
use crate::model::promise::millis;

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// Takes note of the longest time for which leases or grants of earlier masters may hold, in milliseconds. Returns the
    /// longest time for which what this master tells may hold (memory that this master is the first to know of owes nothing else), and
    /// how long the client waits before it announces objects.
    pub fn exchange_promise(&self, client: ClientId, promise_ms: u64) -> Welcome {
        self.note_promise(Duration::from_millis(promise_ms), &client);
        // A client that knows of no promise is new, and has nothing to announce.
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
