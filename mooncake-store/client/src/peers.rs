//! Clients that could not be reached recently. Operations fail at once for them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use mooncake_core::clock::{Moment, SharedClock};
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;

/// Longest cooldown, in multiples of the first.
const MAX_GROWTH: u32 = 8;

/// Endpoints that failed, and the end of their cooldown. The cooldown doubles with every failed
/// attempt, because an attempt at a client that hangs takes its whole timeout. The master may need
/// some time to remove the client.
#[derive(Debug)]
pub(crate) struct Unreachable {
    clock: SharedClock,
    cooldown: Duration,
    /// Number of entries. Without entries, no lock is taken.
    count: AtomicUsize,
    resting: Mutex<HashMap<String, Rest>>,
    /// Endpoints that failed since the last report to the master.
    untold: Mutex<Vec<String>>,
}

#[derive(Debug)]
struct Rest {
    until: Moment,
    growth: u32,
}

impl Unreachable {
    pub(crate) fn new(clock: SharedClock, cooldown: Duration) -> Self {
        Self {
            clock,
            cooldown,
            count: AtomicUsize::new(0),
            resting: Mutex::default(),
            untold: Mutex::default(),
        }
    }

    /// Returns `TRANSFER_FAIL` for an endpoint in its cooldown.
    pub(crate) fn check(&self, endpoint: &str) -> Result<()> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let mut resting = self.resting.lock();
        let Some(rest) = resting.get_mut(endpoint) else { return Ok(()) };
        let now = self.clock.now();
        if now < rest.until {
            self.will_tell(endpoint);
            return Err(Error::new(
                ErrorCode::TransferFail,
                format!("peer {endpoint} could not be reached a moment ago"),
            ));
        }
        // This operation tries again. Other operations fail until it succeeds.
        rest.until = now.after(self.cooldown * rest.growth);
        rest.growth = (rest.growth * 2).min(MAX_GROWTH);
        Ok(())
    }

    /// Records that an endpoint could not be reached.
    pub(crate) fn failed(&self, endpoint: &str) {
        let now = self.clock.now();
        let mut resting = self.resting.lock();
        // Endpoints of removed clients are not used again and need no entry.
        let forget = self.cooldown * (4 * MAX_GROWTH);
        resting.retain(|_, rest| now.since(rest.until) < forget);
        let rest = resting.entry(endpoint.to_owned()).or_insert(Rest { until: now, growth: 1 });
        rest.until = rest.until.max(now.after(self.cooldown));
        self.count.store(resting.len(), Ordering::Release);
        drop(resting);
        self.will_tell(endpoint);
    }

    /// Takes the endpoints to report to the master, which then places nothing there.
    pub(crate) fn take_untold(&self) -> Vec<String> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        std::mem::take(&mut *self.untold.lock())
    }

    fn will_tell(&self, endpoint: &str) {
        let mut untold = self.untold.lock();
        if !untold.iter().any(|known| known == endpoint) {
            untold.push(endpoint.to_owned());
        }
    }

    /// Records that an endpoint responded.
    pub(crate) fn answered(&self, endpoint: &str) {
        if self.count.load(Ordering::Acquire) != 0 {
            let mut resting = self.resting.lock();
            resting.remove(endpoint);
            self.count.store(resting.len(), Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mooncake_core::clock::ManualClock;

    use super::*;

    #[test]
    fn a_failed_member_rests_and_then_gets_one_more_chance() {
        let clock = Arc::new(ManualClock::new());
        let peers = Unreachable::new(clock.clone(), Duration::from_secs(1));
        peers.check("a").unwrap();
        peers.failed("a");
        assert_eq!(peers.check("a").unwrap_err().code(), ErrorCode::TransferFail);
        peers.check("b").unwrap();
        clock.advance(Duration::from_secs(1));
        peers.check("a").unwrap();
        peers.check("a").unwrap_err();
        peers.answered("a");
        peers.check("a").unwrap();
    }

    #[test]
    fn the_rest_grows_while_tries_are_in_vain() {
        let clock = Arc::new(ManualClock::new());
        let peers = Unreachable::new(clock.clone(), Duration::from_secs(1));
        let mut tries = Vec::new();
        peers.failed("a");
        for second in 0..40 {
            if peers.check("a").is_ok() {
                tries.push(second);
                peers.failed("a");
            }
            clock.advance(Duration::from_secs(1));
        }
        assert_eq!(tries, [1, 2, 4, 8, 16, 24, 32]);
        peers.answered("a");
        peers.check("a").unwrap();
    }
}
