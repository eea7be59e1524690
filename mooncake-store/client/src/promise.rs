//! The longest time for which leases and grants of masters may hold, as far as this client knows.
//!
//! A master without snapshots knows nothing of the one before it. Clients tell it for how long
//! readers and writers may still rely on what earlier masters told them.

use std::time::Duration;

use mooncake_core::clock::Moment;

/// Longest times that masters promised.
#[derive(Debug, Default)]
pub(crate) struct Promises {
    /// Longest promise of the present master.
    present: Duration,
    /// Longest promise of earlier masters, which counts until `until`.
    earlier: Duration,
    until: Moment,
    /// How long to wait before objects are announced.
    pub(crate) announce_after: Duration,
}

impl Promises {
    /// The longest promise that may still hold.
    pub(crate) fn longest(&self, now: Moment) -> Duration {
        if now < self.until { self.present.max(self.earlier) } else { self.present }
    }

    /// Takes note of the longest promise of the present master.
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
