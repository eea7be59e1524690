//! Hits by size of memory, as a caller sees them.

use std::time::Duration;

/// Estimate of the share of uses that find their object, at several sizes of memory.
///
/// A use is a read that finds its object, or a put that stores one. A put is taken for the end of a
/// read that found nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct CurveReport {
    /// Time that the hit rates are about: the last hour, or less after a start.
    pub span: Duration,
    /// Number of uses in that time.
    pub uses: u64,
    /// Number of uses since the start of the master.
    pub total_uses: u64,
    /// Number of keys of which one is watched.
    pub keys_for_each_sampled: u64,
    /// Hits at each size, the smallest first.
    pub points: Vec<CurvePoint>,
}

/// Hits at one size of memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CurvePoint {
    /// Size as a multiple of the actual memory.
    pub factor: f64,
    /// Size in bytes.
    pub bytes: u64,
    /// Share of the uses that find their object; `None` without uses.
    pub hit_rate: Option<f64>,
    /// Number of uses since the start of the master that do not find their object.
    pub total_misses: u64,
}
