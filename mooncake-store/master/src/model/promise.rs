//! Longest promise of earlier masters.

use std::time::Duration;

use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Longest time for which clients use an allocation, plus a margin. It depends on no option of a
/// master.
pub const GRANT_USE: Duration = Duration::from_secs(30);

/// Longest promise of earlier masters that is believed. A longer one is cut to this.
pub(crate) const LONGEST_PROMISE: Duration = Duration::from_secs(24 * 60 * 60);

/// Longest promise of earlier masters, in milliseconds.
#[derive(Debug, Default)]
pub(crate) struct EarlierPromises(AtomicU64);

impl EarlierPromises {
    /// Returns the longest promise, in milliseconds.
    pub(crate) fn longest_ms(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// Records a promise. Returns the longest one before, in milliseconds.
    pub(crate) fn raise(&self, promise: Duration) -> u64 {
        self.0.fetch_max(millis(promise), Relaxed)
    }
}

/// Converts a time to milliseconds.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
