//! Longest remaining time of leases and grants of all masters, as far as this client knows.
//!
//! A master without snapshots does not know the leases of earlier masters. Clients report how long
//! readers and writers may still rely on those leases.

use std::time::Duration;

use mooncake_core::clock::Moment;

/// Longest leases that masters have granted.
#[derive(Debug, Default)]
pub(crate) struct Promises {
    /// Longest lease of the present master.
    present: Duration,
    /// Longest lease of earlier masters, valid until `until`.
    earlier: Duration,
    until: Moment,
    /// Delay before objects are announced.
    pub(crate) announce_after: Duration,
    /// True if the present master knows promises. A master of Mooncake C++ does not.
    pub(crate) is_exchanged: bool,
}

impl Promises {
    /// Returns the longest lease that may still be valid.
    pub(crate) fn longest(&self, now: Moment) -> Duration {
        if now < self.until { self.present.max(self.earlier) } else { self.present }
    }

    /// Records the longest lease of the present master.
    pub(crate) fn learn(&mut self, present: Duration, now: Moment) {
        if now >= self.until {
            self.earlier = Duration::ZERO;
        }
        if self.present > present {
            self.until = self.until.max(now.after(self.present));
            self.earlier = self.earlier.max(self.present);
        }
        self.present = present;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment(0).after(Duration::from_secs(seconds))
    }

    #[test]
    fn a_longer_promise_of_an_earlier_master_counts_until_it_is_over() {
        let seconds = Duration::from_secs;
        let mut promises = Promises::default();
        promises.learn(seconds(300), at(0));
        assert_eq!(
            promises.longest(at(1_000_000)),
            seconds(300),
            "the present master gives leases all the time"
        );
        promises.learn(seconds(30), at(1000));
        promises.learn(seconds(40), at(1100));
        assert_eq!(promises.longest(at(1200)), seconds(300));
        assert_eq!(promises.longest(at(1400)), seconds(40), "counted from when it was last told of");
    }
}
