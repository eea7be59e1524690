//! Clock that does not count the time during which the coordinator's process was stopped.

use std::time::Duration;

use mooncake_core::clock::Moment;

/// Clock whose steps have a largest length.
#[derive(Debug)]
pub(super) struct RunningClock {
    last: Moment,
    skipped: Duration,
    step: Duration,
}

impl RunningClock {
    pub(super) fn new(now: Moment, step: Duration) -> Self {
        Self { last: now, skipped: Duration::ZERO, step }
    }

    /// Returns the running time at `now`. Each call is a step.
    pub(super) fn advance(&mut self, now: Moment) -> Moment {
        self.skipped += now.since(self.last).saturating_sub(self.step);
        self.last = self.last.max(now);
        Moment(self.last.0.saturating_sub(u64::try_from(self.skipped.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// Returns the time at which the running time reaches `moment`, if the clock does not stop.
    pub(super) fn real(&self, moment: Moment) -> Moment {
        moment.after(self.skipped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_step_counts_as_the_longest() {
        let at = |seconds: u64| Moment(seconds * 1_000_000_000);
        let mut clock = RunningClock::new(at(10), Duration::from_secs(2));
        assert_eq!(clock.advance(at(11)), at(11));
        assert_eq!(clock.advance(at(40)), at(13), "27 of 29 s are skipped");
        assert_eq!(clock.advance(at(41)), at(14));
        assert_eq!(clock.real(at(15)), at(42));
        assert_eq!(clock.advance(at(39)), at(14), "time does not run backwards");
    }
}
