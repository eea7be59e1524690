//! Time limits of the operations of a process.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Time limits of a process, which may change at any time.
#[derive(Debug)]
pub struct Timeouts {
    collective_us: AtomicU64,
    p2p_us: AtomicU64,
}

impl Timeouts {
    /// Returns the time after which a collective operation examines the ranks that it waits for.
    pub fn collective(&self) -> Duration {
        Duration::from_micros(self.collective_us.load(Ordering::Relaxed))
    }

    /// Sets the time after which a collective operation examines the ranks that it waits for; 10 s
    /// by default.
    pub fn set_collective(&self, timeout: Duration) {
        self.collective_us.store(micros(timeout), Ordering::Relaxed);
    }

    /// Returns the time after which a point-to-point operation examines the other rank.
    pub fn p2p(&self) -> Duration {
        Duration::from_micros(self.p2p_us.load(Ordering::Relaxed))
    }

    /// Sets the time after which a point-to-point operation examines the other rank; 10 s by
    /// default.
    pub fn set_p2p(&self, timeout: Duration) {
        self.p2p_us.store(micros(timeout), Ordering::Relaxed);
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { collective_us: 10_000_000.into(), p2p_us: 10_000_000.into() }
    }
}

fn micros(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_micros()).unwrap_or(u64::MAX)
}
