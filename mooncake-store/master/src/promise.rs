//! Promises of earlier masters: for how long leases and grants may hold that this master did not give.
//!
//! A master that is restarted with shorter times than the one before it still owes readers and writers the longer ones. Snapshots
//! and clients carry the longest time from one master to the next.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::ClientId;
use parking_lot::Mutex;

use super::Master;
use mooncake_protocol::wire::Welcome;

/// For how long clients use a grant at most, plus a margin. The time does not depend on any option of a master.
const GRANT_USE: Duration = Duration::from_secs(30);

/// Longest promise of earlier masters that is believed. A longer one is cut to this.
const MOST: Duration = Duration::from_secs(24 * 60 * 60);

/// Time between two clients that begin to announce objects: summing up and announcing takes time on both sides.
const SPACING: Duration = Duration::from_millis(10);
/// Longest time that a client waits for its turn.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// When the next client begins to announce objects.
#[derive(Debug, Default)]
pub(super) struct AnnouncePace(Mutex<Moment>);

impl AnnouncePace {
    /// Gives the next turn away. Returns the time until then.
    fn next(&self, now: Moment) -> Duration {
        if is_planted("announce-at-once") {
            return Duration::ZERO;
        }
        let mut next = self.0.lock();
        let turn = (*next).max(now);
        let wait = turn.since(now);
        if wait >= LONGEST_WAIT {
            return LONGEST_WAIT;
        }
        *next = turn.after(SPACING);
        wait
    }
}

/// Longest promise of earlier masters, in milliseconds.
#[derive(Debug, Default)]
pub(super) struct Promised(AtomicU64);

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// Takes note of the longest time for which leases or grants of earlier masters may hold, in milliseconds. Returns the
    /// longest time for which what this master tells may hold (memory that this master is the first to know of owes nothing else), and
    /// how long the client waits before it announces objects.
    pub fn exchange_promise(&self, client: ClientId, promise_ms: u64) -> Welcome {
        self.note_promise(promise_ms, &client);
        // A client that knows of no promise is new, and has nothing to announce.
        let wait = if promise_ms > 0 { self.announcing.next(self.clock.now()) } else { Duration::ZERO };
        Welcome { promise_ms: millis(self.options.longest_promise()), announce_after_ms: millis(wait) }
    }

    /// Takes note of a promise of earlier masters, which `source` knows of.
    pub(super) fn note_promise(&self, promise_ms: u64, source: &dyn std::fmt::Display) {
        if is_planted("promise-forgotten") {
            return;
        }
        let told = Duration::from_millis(promise_ms).min(MOST);
        let before = self.promised.0.fetch_max(millis(told), Relaxed);
        let own = self.options.longest_promise();
        if told <= own || millis(told) <= before {
            return;
        }
        let rest = self.rest_after_start();
        if rest < told {
            tracing::warn!(
                %source, ?told, ?rest,
                "an earlier master promised more than --remount_rest leaves: readers with old leases may meet new objects"
            );
        } else {
            tracing::warn!(
                %source, ?told, lease_ttl = ?self.options.lease_ttl, put_discard = ?self.options.put_discard,
                "an earlier master had a longer --default_kv_lease_ttl or --put_start_discard_timeout_sec: remounted memory rests as long"
            );
        }
    }

    /// Longest time for which leases and grants of this master, or of those before it, may hold; in milliseconds.
    pub(super) fn promise_ms(&self, now: Moment) -> u64 {
        let earlier = self.promised.0.load(Relaxed);
        let holds = self.started.after(Duration::from_millis(earlier)) > now;
        millis(self.options.longest_promise()).max(if holds { earlier } else { 0 })
    }

    /// How long after its start this master places nothing in memory that is mounted again and that it has never seen.
    pub(super) fn rest_after_start(&self) -> Duration {
        let promised = Duration::from_millis(self.promised.0.load(Relaxed));
        let longest = self.options.longest_promise().max(GRANT_USE).max(promised);
        self.options.remount_rest.unwrap_or(longest)
    }
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
