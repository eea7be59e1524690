//! Retry budget for calls that an overloaded server refused, or whose connections it closed.
//!
//! Retries add to the overload. They are therefore limited to a tenth of the answered calls. Each
//! comes after a random pause that grows with the number of tries, so that refused clients do not
//! return together. Calls beyond the budget wait in a queue. One call of the queue at a time tries
//! again.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mooncake_core::clock::Rng;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};

/// Number of answered calls that pay for one retry.
const PRICE: u64 = 10;
/// Maximum number of saved retries, and the number that a new client has.
const MAX_SAVED: u64 = 100;
/// Maximum pause before the first retry.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Maximum pause before any retry.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Retry budget of one client.
#[derive(Debug)]
pub(super) struct RetryBudget {
    /// Saved calls; each retry costs [`PRICE`] of them.
    saved: AtomicU64,
    rng: Mutex<Rng>,
    /// True if the server refused the last call.
    refuses: AtomicBool,
    /// Queue of the calls beyond the budget.
    queue: Semaphore,
}

impl Default for RetryBudget {
    fn default() -> Self {
        Self {
            saved: AtomicU64::new(MAX_SAVED * PRICE),
            rng: Mutex::new(Rng::from_os()),
            refuses: AtomicBool::new(false),
            queue: Semaphore::new(1),
        }
    }
}

impl RetryBudget {
    /// Records an answered call. Writes nothing while the budget is full.
    pub(super) fn earn(&self) {
        if self.refuses.load(Relaxed) {
            self.refuses.store(false, Relaxed);
        }
        let saved = self.saved.load(Relaxed);
        if saved < MAX_SAVED * PRICE {
            // Losing one to a race is harmless.
            self.saved.store(saved + 1, Relaxed);
        }
    }

    /// Returns the pause before the next retry of a call that was retried `tries` times, or `None`
    /// if the budget is spent.
    pub(super) fn spend(&self, tries: u32) -> Option<Duration> {
        let spent = self.saved.fetch_update(Relaxed, Relaxed, |saved| saved.checked_sub(PRICE));
        spent.ok()?;
        Some(self.pause(tries))
    }

    /// Waits until a call that was refused, and retried `tries` times, may be made again. Calls
    /// beyond the budget wait in the order of their arrival, `turn` being the front of the queue.
    /// While the server refuses calls, the call at the front pauses before each retry. The others
    /// follow without a pause once the server answers.
    pub(super) async fn await_retry<'b>(&'b self, tries: u32, turn: &mut Option<SemaphorePermit<'b>>) {
        self.refuses.store(true, Relaxed);
        if turn.is_none() {
            if let Some(pause) = self.spend(tries) {
                return tokio::time::sleep(pause).await;
            }
            // The queue is never closed.
            *turn = self.queue.acquire().await.ok();
        }
        if self.refuses.load(Relaxed) {
            tokio::time::sleep(self.pause(tries)).await;
        }
    }

    /// Returns a random pause before the next retry of a call that was retried `tries` times.
    fn pause(&self, tries: u32) -> Duration {
        let longest = FIRST_PAUSE.saturating_mul(1 << tries.min(10)).min(LONGEST_PAUSE);
        let micros = u64::try_from(longest.as_micros()).unwrap_or(u64::MAX);
        Duration::from_micros(self.rng.lock().range(micros / 4..micros))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_are_a_tenth_of_what_was_answered_after_those_saved_up() {
        let budget = RetryBudget::default();
        assert_eq!((0..1000).filter(|_| budget.spend(0).is_some()).count(), 100);
        for _ in 0..95 {
            budget.earn();
        }
        assert_eq!((0..1000).filter(|_| budget.spend(0).is_some()).count(), 9);
    }

    #[test]
    fn pauses_grow_to_a_second_and_differ() {
        let budget = RetryBudget::default();
        for tries in 0..12 {
            let longest = FIRST_PAUSE.saturating_mul(1 << tries.min(10)).min(LONGEST_PAUSE);
            let pauses: Vec<_> = (0..5).filter_map(|_| budget.spend(tries)).collect();
            assert!(pauses.iter().all(|pause| *pause >= longest / 4 && *pause < longest), "{pauses:?}");
            assert!(pauses.iter().any(|pause| *pause != pauses[0]), "{pauses:?}");
        }
    }
}
