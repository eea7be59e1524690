//! Counters of snapshots.

use std::sync::atomic::AtomicU64;

use mooncake_protocol::metrics::Histogram;

/// Upper bounds of the duration in milliseconds, the same as in the dashboards of Mooncake C++.
const BOUNDS: [u64; 11] = [0, 500, 1000, 5000, 10_000, 30_000, 60_000, 120_000, 180_000, 240_000, 300_000];

/// Number and duration of the snapshots.
#[derive(Debug)]
pub(super) struct SnapshotStats {
    pub(super) success: AtomicU64,
    pub(super) failed: AtomicU64,
    /// Durations in milliseconds.
    pub(super) took: Histogram<11>,
}

impl Default for SnapshotStats {
    fn default() -> Self {
        Self { success: AtomicU64::new(0), failed: AtomicU64::new(0), took: Histogram::new(&BOUNDS) }
    }
}
