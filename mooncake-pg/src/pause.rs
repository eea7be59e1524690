//! Pauses: times in which this process, or its machine, was stopped.
//!
//! Other ranks may leave a process out that does not respond. A process finds such a time by a
//! thread that looks at the clock: if it has not looked for a while, it was stopped. The clock
//! counts the time of a suspended machine, but not of a virtual one whose clock stops with it.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::{Clock, Moment, SystemClock};
use mooncake_core::{Error, Result};
use parking_lot::Mutex;

/// Time between two looks above which the process was stopped. Other ranks leave no process out
/// after so short a time: a probe takes longer.
pub(crate) const MAX_GAP: Duration = Duration::from_secs(1);

/// Time between two looks of the thread.
const INTERVAL: Duration = Duration::from_millis(250);

/// Count of the pauses of this process.
pub(crate) struct PauseCounter {
    clock: SystemClock,
    state: Mutex<State>,
}

struct State {
    /// Time of the last look.
    last_check: Moment,
    count: u64,
    /// True while a test stops the process in appearance.
    is_stopped: bool,
}

impl PauseCounter {
    /// Starts the thread, which ends soon after the drop of the result.
    ///
    /// # Errors
    /// The error of the thread.
    pub(crate) fn start() -> Result<Arc<Self>> {
        let clock = SystemClock::new();
        let state = State { last_check: clock.now(), count: 0, is_stopped: false };
        let pauses = Arc::new(Self { clock, state: Mutex::new(state) });
        let weak = Arc::downgrade(&pauses);
        let check_periodically = move || {
            while let Some(pauses) = weak.upgrade() {
                pauses.count();
                drop(pauses);
                std::thread::sleep(INTERVAL);
            }
        };
        std::thread::Builder::new()
            .name("mooncake-pauses".to_owned())
            .spawn(check_periodically)
            .map_err(Error::from)?;
        Ok(pauses)
    }

    /// Returns the number of pauses so far. A pause counts from its end on, for each caller.
    pub(crate) fn count(&self) -> u64 {
        let mut state = self.state.lock();
        if state.is_stopped {
            return state.count;
        }
        let now = self.clock.now();
        state.count += u64::from(now.since(state.last_check) > MAX_GAP);
        state.last_check = now;
        state.count
    }

    /// Makes the process appear stopped until the next call with `false`.
    #[cfg(any(test, feature = "testkit"))]
    pub(crate) fn set_stopped(&self, yes: bool) {
        self.count();
        self.state.lock().is_stopped = yes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::AgentLimits;

    #[test]
    fn a_pause_is_shorter_than_a_probe() {
        assert!(MAX_GAP + 2 * INTERVAL < AgentLimits::default().probe);
    }

    #[test]
    fn a_stop_counts_once_and_rest_does_not_count() {
        let pauses = PauseCounter::start().unwrap();
        // No caller looks for a while, and the thread does. A busy machine may delay the thread.
        let is_unaffected = (0..10).any(|_| {
            let before = pauses.count();
            std::thread::sleep(MAX_GAP + INTERVAL);
            pauses.count() == before
        });
        assert!(is_unaffected, "rest counts as a pause");
        let before = pauses.count();
        pauses.set_stopped(true);
        std::thread::sleep(MAX_GAP + INTERVAL);
        assert_eq!(pauses.count(), before, "a process that is stopped does not look");
        pauses.set_stopped(false);
        assert_eq!((pauses.count(), pauses.count()), (before + 1, before + 1));
    }
}
