//! Counters that transports and engines share.

use std::sync::atomic::{AtomicU64, Ordering};

/// Load of a network device.
#[derive(Clone, Debug, PartialEq)]
pub struct NicLoad {
    /// Name of the device.
    pub device_name: String,
    /// Bytes of the messages that are posted or wait.
    pub in_flight_bytes: u64,
    /// Exponentially weighted mean of the throughput, in bytes per second, with a time constant of
    /// one second.
    pub bytes_per_second: f64,
}

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
