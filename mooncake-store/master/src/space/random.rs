//! Random numbers without a lock.

use mooncake_core::clock::Rng;

use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Random number generator without a lock.
pub(crate) struct SharedRng(AtomicU64);

impl SharedRng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(AtomicU64::new(seed))
    }

    fn next(&self) -> Rng {
        // Each draw is the first number of the next seed. Seeding spreads the bits.
        Rng::seeded(self.0.fetch_add(1, Relaxed))
    }

    /// Returns a number in `0..bound`. `bound` must not be 0.
    pub(crate) fn below(&self, bound: usize) -> usize {
        if bound == 1 { 0 } else { self.next().below(bound as u64) as usize }
    }

    /// Returns a number in (0, 1).
    pub(crate) fn unit(&self) -> f64 {
        (self.next().below(1 << 52) as f64 + 0.5) / (1u64 << 52) as f64
    }
}
