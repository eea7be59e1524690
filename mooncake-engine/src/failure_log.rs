//! Warnings about failed transfers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mooncake_core::Result;
use mooncake_core::clock::{Moment, SharedClock};

/// Shortest interval between two warnings of an engine. Failures in between are logged at level
/// debug.
const INTERVAL: Duration = Duration::from_secs(1);

/// Log of the failed transfers of an engine.
#[derive(Debug)]
pub(crate) struct FailureLog {
    clock: SharedClock,
    /// Time of the last warning, or 0.
    last: AtomicU64,
}

impl FailureLog {
    pub(crate) fn new(clock: SharedClock) -> Self {
        Self { clock, last: AtomicU64::new(0) }
    }

    /// Logs how many requests of a transfer have failed, with the first error.
    pub(crate) fn record(&self, outcomes: &[Result<()>]) {
        let mut errors = outcomes.iter().filter_map(|outcome| outcome.as_ref().err());
        let Some(error) = errors.next() else { return };
        let (failed, requests) = (1 + errors.count(), outcomes.len());
        if self.is_due() {
            tracing::warn!(failed, requests, %error, "transfer failed");
        } else {
            tracing::debug!(failed, requests, %error, "transfer failed");
        }
    }

    /// Returns whether a warning is due, and counts it.
    fn is_due(&self) -> bool {
        let now = self.clock.now();
        let next = |last| (last == 0 || now.since(Moment(last)) >= INTERVAL).then_some(now.0.max(1));
        self.last.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mooncake_core::clock::{Clock, ManualClock};

    use super::*;

    #[test]
    fn warnings_are_a_second_apart() {
        let clock = Arc::new(ManualClock::new());
        let log = FailureLog::new(clock.clone());
        assert!(log.is_due() && !log.is_due());
        clock.advance(INTERVAL);
        assert!(clock.now() > Moment(0) && log.is_due() && !log.is_due());
    }
}
