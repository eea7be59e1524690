//! Request rates of the operations between two reports.

use std::collections::HashMap;

use mooncake_core::clock::Moment;
use parking_lot::Mutex;

use super::counting::Requests;

/// Requests, failures, partial successes, items and failed items of each operation.
type Counts = HashMap<&'static str, [u64; 5]>;

/// Earlier values of the counters: at the last report and at the one before. Rates are measured
/// since the earlier report, so that they never cover only a moment.
#[derive(Debug)]
pub(super) struct Rates(Mutex<[(Moment, Counts); 2]>);

impl Rates {
    /// Starts at this time.
    pub(super) fn from(now: Moment) -> Self {
        Self(Mutex::new([(now, Counts::new()), (now, Counts::new())]))
    }

    /// Records the counters.
    pub(super) fn take(&self, now: Moment, requests: &Requests) {
        let mut taken = self.0.lock();
        taken.swap(0, 1);
        taken[1] = (now, counts(requests));
    }

    /// Returns the counts per second of each operation.
    pub(super) fn since(&self, now: Moment, requests: &Requests) -> HashMap<&'static str, [f64; 5]> {
        let taken = self.0.lock();
        let (at, before) = &taken[0];
        let seconds = now.since(*at).as_secs_f64().max(1e-3);
        let rate = |name: &'static str, now: [u64; 5]| {
            let before = before.get(name).copied().unwrap_or_default();
            (name, std::array::from_fn(|i| now[i].saturating_sub(before[i]) as f64 / seconds))
        };
        counts(requests).into_iter().map(|(name, now)| rate(name, now)).collect()
    }
}

fn counts(requests: &Requests) -> Counts {
    let (single, batch) = requests.all();
    let single = single.iter().map(|(name, counters)| {
        let [requests, failures] = counters.read();
        (*name, [requests, failures, 0, 0, 0])
    });
    single.chain(batch.iter().map(|(name, counters)| (*name, counters.read()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_protocol::message::{Ping, Request};
    use mooncake_protocol::service::Tally;
    use std::time::Duration;

    #[test]
    fn rates_are_of_the_last_two_reports() {
        let requests = Requests::default();
        let ping = |times: usize| {
            for _ in 0..times {
                requests.count(Ping::FUNCTION, Tally::default(), Duration::ZERO);
            }
        };
        let second = |seconds: u64| Moment(seconds * 1_000_000_000);
        let rates = Rates::from(second(0));
        let of = |now| rates.since(second(now), &requests)["ping"][0];
        ping(10);
        assert_eq!(of(5), 2.0);
        rates.take(second(10), &requests);
        assert_eq!(of(10), 1.0, "still since the start");
        ping(20);
        rates.take(second(20), &requests);
        assert_eq!(of(20), 2.0, "since the first report");
        rates.take(second(30), &requests);
        assert_eq!(of(40), 0.0);
    }
}
