//! Earliest moments at which periodic work may be due.

use mooncake_core::clock::Moment;

use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// Earliest times of periodic work.
pub(crate) struct Timers {
    /// Earliest time at which a client, a retired segment or a grace period may be due.
    pub(crate) membership: AtomicU64,
    pub(crate) abandoned: AtomicU64,
    /// Time before which no lifetime of an object ends.
    pub(crate) lifetimes: AtomicU64,
}

impl Default for Timers {
    fn default() -> Self {
        Self {
            membership: AtomicU64::new(u64::MAX),
            abandoned: AtomicU64::new(0),
            lifetimes: AtomicU64::new(u64::MAX),
        }
    }
}

impl Timers {
    /// Makes the periodic work due at `moment`.
    pub(crate) fn schedule(&self, moment: Moment) {
        self.membership.fetch_min(moment.0, SeqCst);
    }
}
