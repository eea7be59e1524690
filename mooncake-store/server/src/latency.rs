//! Latency of calls.

use std::time::Duration;

use mooncake_protocol::metrics::Histogram;

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

/// Latency histograms of all operations.
#[derive(Debug)]
pub(super) struct Latency(Histogram<16>);

impl Default for Latency {
    fn default() -> Self {
        Self(Histogram::new(&BOUNDS))
    }
}

impl Latency {
    pub(super) fn note(&self, took: Duration) {
        self.0.note(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Latency in nanoseconds.
    pub(super) fn histogram(&self) -> &Histogram<16> {
        &self.0
    }
}
