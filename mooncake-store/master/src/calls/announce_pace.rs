//! Pace at which clients of an earlier master announce their objects.

use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::fault_injection::is_planted;

use crate::sync::Mutex;

/// Time between the beginnings of two clients. Summing up and announcing takes time on both sides.
const SPACING: Duration = Duration::from_millis(10);
/// Longest time for which a client waits for its turn.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// Time at which the next client begins to announce objects.
#[derive(Debug, Default)]
pub(crate) struct AnnouncePace(Mutex<Moment>);

impl AnnouncePace {
    /// Assigns the next turn. Returns the time until then.
    pub(crate) fn next(&self, now: Moment) -> Duration {
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
