//! Exchange with clients about earlier masters: the longest time for which leases and allocations
//! may hold, and the order of the masters.

use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::ClientId;
use mooncake_protocol::wire::{EpochPair, Welcome};

use super::master::Master;
use crate::model::epochs::MAX_SENT;
use crate::model::promise::millis;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Records the longest time, in milliseconds, for which leases or allocations of earlier
    /// masters may hold. Returns the longest such time of this master (memory that this master is
    /// the first to know owes nothing else), and the time that the client waits before it announces
    /// objects.
    pub fn exchange_promise(&self, client: ClientId, promise_ms: u64) -> Welcome {
        self.note_promise(Duration::from_millis(promise_ms), &client);
        // This call may be the first one of a process of an earlier version.
        let ledger = self.space().ledgers.lock().of(client);
        ledger.iter().for_each(|ledger| ledger.set_hand_over(false));
        // A client that knows no promise is new, and has nothing to announce.
        let wait =
            if promise_ms > 0 { self.announcements.next(self.space().clock.now()) } else { Duration::ZERO };
        Welcome {
            promise_ms: millis(self.space().options.longest_promise()),
            announce_after_ms: millis(wait),
        }
    }

    /// Returns the number of this master, by which values and snapshots name it.
    pub fn epoch(&self) -> u64 {
        self.space().epoch
    }

    /// Records that this master follows others, the latest first.
    pub fn follow(&self, earlier: &[u64]) {
        let mut order = self.space().announcements.order.write();
        let mut newer = self.space().epoch;
        for &older in earlier.iter().take(MAX_SENT) {
            order.add(EpochPair { newer, older });
            newer = older;
        }
    }

    /// Records the order in which earlier masters led, as [`Master::exchange_epochs`] does. The
    /// client hands its memory over by a call of its own.
    pub(crate) fn exchange_epochs_of(&self, client: ClientId, epochs: &[EpochPair]) -> Vec<EpochPair> {
        let ledger = self.space().ledgers.lock().of(client);
        ledger.iter().for_each(|ledger| ledger.set_hand_over(true));
        self.exchange_epochs(epochs)
    }

    /// Records the order in which earlier masters led, as far as a client knows it. Returns what
    /// this master knows of it.
    pub fn exchange_epochs(&self, epochs: &[EpochPair]) -> Vec<EpochPair> {
        let own = self.space().epoch;
        let mut order = self.space().announcements.order.write();
        for pair in epochs.iter().take(MAX_SENT) {
            order.add(*pair);
            // Every master that a client has met is earlier than this one.
            order.add(EpochPair { newer: own, older: pair.newer });
        }
        order.nearest()
    }

    /// Records a promise of earlier masters that `source` reported.
    pub fn note_promise(&self, promise: Duration, source: &dyn std::fmt::Display) {
        self.space().note_promise(promise, source);
    }
}
