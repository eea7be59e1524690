//! Pauses between retries: twice as long after each consecutive failure, up to a limit.

use std::time::Duration;

use crate::clock::{Moment, Rng};

/// Growth of the pauses of a kind of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// First pause.
    pub first: Duration,
    /// Longest pause.
    pub max: Duration,
}

impl Pace {
    /// Returns the pause after so many consecutive failures, before it is shortened at random.
    fn nominal(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(31);
        self.first.saturating_mul(1 << doublings).min(self.max)
    }
}

/// Retry state of one target. Each pause is shortened by up to a quarter at random, so that many
/// clients that lost the same server do not all come back at once.
#[derive(Clone, Debug)]
pub struct Backoff {
    failures: u32,
    until: Moment,
    rng: Rng,
}

impl Backoff {
    /// Creates the state without failures. The same seed gives the same pauses.
    pub fn new(rng: Rng) -> Self {
        Self { failures: 0, until: Moment::default(), rng }
    }

    /// Returns the earliest time of the next attempt.
    pub fn until(&self) -> Moment {
        self.until
    }

    /// Returns whether the pause still lasts.
    pub fn is_paused(&self, now: Moment) -> bool {
        now < self.until
    }

    /// Records the failure of an attempt that began at `began`, and returns the end of the pause.
    /// An attempt that began before the pause does not lengthen it. A failure long after the last
    /// pause counts as the first one again.
    pub fn failed(&mut self, began: Moment, now: Moment, pace: &Pace) -> Moment {
        if self.failures > 0 && began < self.until {
            return self.until;
        }
        if now.since(self.until) > pace.max.saturating_mul(4) {
            self.failures = 0;
        }
        self.failures = self.failures.saturating_add(1);
        let nominal = pace.nominal(self.failures);
        let quarter = u64::try_from(nominal.as_nanos() / 4).unwrap_or(u64::MAX);
        self.until = now.after(nominal - Duration::from_nanos(self.rng.below(quarter)));
        self.until
    }

    /// Records a success. The next failure counts as the first one again.
    pub fn worked(&mut self) {
        (self.failures, self.until) = (0, Moment::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{Clock, ManualClock};

    const PACE: Pace = Pace { first: Duration::from_millis(100), max: Duration::from_secs(2) };

    fn fail(backoff: &mut Backoff, clock: &ManualClock) -> Duration {
        let now = clock.now();
        backoff.failed(now, now, &PACE).since(now)
    }

    #[test]
    fn pauses_double_up_to_a_limit_and_success_forgets_them() {
        let (clock, mut backoff) = (ManualClock::new(), Backoff::new(Rng::seeded(1)));
        assert!(!backoff.is_paused(clock.now()), "nothing has failed");
        for millis in [100, 200, 400, 800, 1600, 2000, 2000, 2000] {
            let (pause, nominal) = (fail(&mut backoff, &clock), Duration::from_millis(millis));
            assert!(pause <= nominal && pause > nominal * 3 / 4, "{pause:?} for {nominal:?}");
            assert!(backoff.is_paused(clock.now()));
            clock.advance(pause - Duration::from_nanos(1));
            assert!(backoff.is_paused(clock.now()));
            clock.advance(Duration::from_nanos(1));
            assert!(!backoff.is_paused(clock.now()), "the next attempt may begin when the pause is over");
        }
        backoff.worked();
        assert!(fail(&mut backoff, &clock) <= PACE.first);
    }

    #[test]
    fn tries_made_together_count_once() {
        let (clock, mut backoff) = (ManualClock::new(), Backoff::new(Rng::seeded(2)));
        let began = clock.now();
        clock.advance(Duration::from_millis(10));
        let until = backoff.failed(began, clock.now(), &PACE);
        clock.advance(Duration::from_millis(1));
        assert_eq!(backoff.failed(began, clock.now(), &PACE), until, "the same try");
        clock.advance(PACE.first);
        let pause = fail(&mut backoff, &clock);
        assert!(pause > PACE.first && pause <= PACE.first * 2, "the second in a row: {pause:?}");
    }

    #[test]
    fn a_failure_long_after_the_last_is_the_first_again() {
        let (clock, mut backoff) = (ManualClock::new(), Backoff::new(Rng::seeded(3)));
        for _ in 0..10 {
            clock.advance(fail(&mut backoff, &clock));
        }
        clock.advance(PACE.max * 5);
        assert!(fail(&mut backoff, &clock) <= PACE.first);
    }

    #[test]
    fn a_seed_gives_the_same_pauses_and_another_gives_others() {
        let pauses = |seed| {
            let (clock, mut backoff) = (ManualClock::new(), Backoff::new(Rng::seeded(seed)));
            let mut pauses = Vec::new();
            for _ in 0..8 {
                let pause = fail(&mut backoff, &clock);
                clock.advance(pause);
                pauses.push(pause);
            }
            pauses
        };
        assert_eq!(pauses(4), pauses(4));
        assert_ne!(pauses(4), pauses(5));
    }
}
