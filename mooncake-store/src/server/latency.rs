//! How long calls take.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Upper bounds of the buckets, in nanoseconds: 1 µs to 1 s.
const BOUNDS: [u64; 16] = [
    1_000,
    2_000,
    5_000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    50_000_000,
    100_000_000,
    1_000_000_000,
];

/// Calls by how long they took.
#[derive(Debug, Default)]
pub(super) struct Latency {
    /// By bucket, not cumulative; the last one is for what took longer than every bound.
    buckets: [AtomicU64; BOUNDS.len() + 1],
    sum: AtomicU64,
}

impl Latency {
    pub(super) fn note(&self, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.buckets[BOUNDS.partition_point(|bound| *bound < nanos)].fetch_add(1, Relaxed);
        self.sum.fetch_add(nanos, Relaxed);
    }

    /// For each upper bound, in seconds, how many calls took no longer; then how many there were, and the seconds of all.
    #[cfg(any(test, feature = "http"))]
    pub(super) fn read(&self) -> (Vec<(f64, u64)>, u64, f64) {
        let mut below = 0;
        let mut buckets = Vec::with_capacity(BOUNDS.len());
        for (bound, count) in BOUNDS.iter().zip(&self.buckets) {
            below += count.load(Relaxed);
            buckets.push((*bound as f64 / 1e9, below));
        }
        let count = below + self.buckets[BOUNDS.len()].load(Relaxed);
        (buckets, count, self.sum.load(Relaxed) as f64 / 1e9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_its_bucket() {
        let latency = Latency::default();
        for nanos in [0, 1000, 1001, 2_000_000_000] {
            latency.note(Duration::from_nanos(nanos));
        }
        let (buckets, count, sum) = latency.read();
        assert_eq!(buckets[..2], [(1e-6, 2), (2e-6, 3)]);
        assert_eq!((buckets.last().copied(), count), (Some((1.0, 3)), 4));
        assert!((sum - 2.000002001).abs() < 1e-9);
    }
}
