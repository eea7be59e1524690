//! Histograms with fixed bounds.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Upper bounds of the buckets for latencies in microseconds, the same as in the dashboards of
/// Mooncake C++.
pub const MICROS: [u64; 27] = [
    50, 75, 125, 150, 200, 250, 300, 400, 500, 750, 1_000, 1_500, 2_000, 3_000, 5_000, 7_000, 15_000, 20_000,
    50_000, 100_000, 200_000, 500_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000, 20_000_000,
];

/// A histogram of microseconds.
pub type Micros = Histogram<27>;

/// Counts by bucket. Recording a value takes two additions: no lock, no allocation.
#[derive(Debug)]
pub struct Histogram<const N: usize> {
    /// Upper bounds, ascending.
    bounds: &'static [u64; N],
    /// Count per bucket, not cumulative.
    buckets: [AtomicU64; N],
    /// Count of values above every bound.
    above: AtomicU64,
    sum: AtomicU64,
}

impl<const N: usize> Histogram<N> {
    pub fn new(bounds: &'static [u64; N]) -> Self {
        Self {
            bounds,
            buckets: std::array::from_fn(|_| AtomicU64::new(0)),
            above: AtomicU64::new(0),
            sum: AtomicU64::new(0),
        }
    }

    pub fn note(&self, value: u64) {
        let bucket = self.buckets.get(self.bounds.partition_point(|bound| *bound < value));
        bucket.unwrap_or(&self.above).fetch_add(1, Relaxed);
        self.sum.fetch_add(value, Relaxed);
    }

    /// Returns for each upper bound the number of values at or below it.
    pub fn below(&self) -> impl Iterator<Item = (u64, u64)> {
        let counts = self.buckets.iter().scan(0, |below, count| {
            *below += count.load(Relaxed);
            Some(*below)
        });
        self.bounds.iter().copied().zip(counts)
    }

    /// Returns the number of values.
    pub fn count(&self) -> u64 {
        self.buckets.iter().chain([&self.above]).map(|count| count.load(Relaxed)).sum()
    }

    /// Returns the sum of all values.
    pub fn sum(&self) -> u64 {
        self.sum.load(Relaxed)
    }

    /// Returns the lowest bound that `per_thousand` of a thousand values do not exceed. Returns
    /// `None` if there is no such bound or no value.
    pub fn bound_at(&self, per_thousand: u64) -> Option<u64> {
        let rank = (self.count() * per_thousand).div_ceil(1000);
        let mut below = self.below();
        below.find_map(|(bound, count)| (rank > 0 && count >= rank).then_some(bound))
    }
}

impl Default for Micros {
    fn default() -> Self {
        Self::new(&MICROS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_its_bucket() {
        let waited = Micros::default();
        assert_eq!(waited.bound_at(1000), None, "there is nothing");
        for micros in [0, 50, 51, 30_000_000] {
            waited.note(micros);
        }
        let below: Vec<_> = waited.below().collect();
        assert_eq!(below[..2], [(50, 2), (75, 3)]);
        assert_eq!((below.last().copied(), waited.count()), (Some((20_000_000, 3)), 4));
        assert_eq!(waited.sum(), 30_000_101);
        assert_eq!(
            (waited.bound_at(500), waited.bound_at(750), waited.bound_at(751)),
            (Some(50), Some(75), None)
        );
    }
}
