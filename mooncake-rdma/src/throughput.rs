//! Throughput of a device: a count on the data path, and a mean that is computed when it is read.

use std::time::Duration;

use mooncake_core::clock::Moment;

use crate::sync::{AtomicU64, Mutex, Ordering};

/// Time after which an earlier throughput has the weight 1/e in the mean.
const MEMORY: Duration = Duration::from_secs(1);

/// Bytes that a device has moved, and their mean per second.
pub(crate) struct Throughput {
    moved: AtomicU64,
    mean: Mutex<Mean>,
}

struct Mean {
    at: Moment,
    moved: u64,
    bytes_per_second: f64,
}

impl Throughput {
    pub(crate) fn new(now: Moment) -> Self {
        Self { moved: AtomicU64::new(0), mean: Mutex::new(Mean { at: now, moved: 0, bytes_per_second: 0.0 }) }
    }

    pub(crate) fn add(&self, bytes: u64) {
        self.moved.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the mean at this time, in bytes per second.
    pub(crate) fn mean_at(&self, now: Moment) -> f64 {
        let mut mean = self.mean.lock();
        let moved = self.moved.load(Ordering::Relaxed);
        let passed = now.since(mean.at).as_secs_f64();
        if passed > 0.0 {
            let observed = (moved - mean.moved) as f64 / passed;
            let weight = (-passed / MEMORY.as_secs_f64()).exp();
            let bytes_per_second = weight.mul_add(mean.bytes_per_second, (1.0 - weight) * observed);
            *mean = Mean { at: now, moved, bytes_per_second };
        }
        mean.bytes_per_second
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Moment {
        Moment(0).after(Duration::from_millis(ms))
    }

    #[test]
    fn the_mean_follows_the_throughput_and_forgets_it() {
        let throughput = Throughput::new(at(0));
        assert_eq!(throughput.mean_at(at(0)), 0.0, "no time has passed");
        for ms in (10..=5_000).step_by(10) {
            throughput.add(1_000);
            throughput.mean_at(at(ms));
        }
        let busy = throughput.mean_at(at(5_000));
        assert!((99_000.0..=100_000.0).contains(&busy), "{busy}");
        let later = throughput.mean_at(at(6_000));
        assert!((busy / 2.8..busy / 2.6).contains(&later), "{later}");
        assert!(throughput.mean_at(at(60_000)) < 1.0);
    }

    #[test]
    fn rare_readers_see_the_throughput_since_their_last_look() {
        let throughput = Throughput::new(at(0));
        throughput.add(1_000_000);
        let mean = throughput.mean_at(at(10_000));
        assert!((99_000.0..=100_000.0).contains(&mean), "{mean}");
        throughput.mean_at(at(9_000));
        assert_eq!(throughput.mean_at(at(10_000)), mean, "a clock that goes back changes nothing");
    }
}
