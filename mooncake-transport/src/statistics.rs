//! Counters that transports and engines share.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counter of operations that fall back to the slower of two transports.
#[derive(Debug, Default)]
pub struct FallbackCounter {
    requests: AtomicU64,
    bytes: AtomicU64,
}

impl FallbackCounter {
    /// Counts requests and the sum of their bytes.
    pub fn add(&self, requests: usize, bytes: usize) {
        self.requests.fetch_add(requests as u64, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Returns the number of requests and the sum of their bytes.
    pub fn totals(&self) -> (u64, u64) {
        (self.requests.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }
}
