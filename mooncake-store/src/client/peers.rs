//! Members that could not be reached lately, so that each operation does not find out for itself.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use mooncake_core::clock::{Moment, SharedClock};
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;

/// Who failed and until when it is left alone.
#[derive(Debug)]
pub(crate) struct Unreachable {
    clock: SharedClock,
    cooldown: Duration,
    /// Number of entries, so that the usual case (none) takes no lock.
    count: AtomicUsize,
    until: Mutex<HashMap<String, Moment>>,
}

impl Unreachable {
    pub(crate) fn new(clock: SharedClock, cooldown: Duration) -> Self {
        Self { clock, cooldown, count: AtomicUsize::new(0), until: Mutex::default() }
    }

    /// Refuses a member that failed a moment ago (`TRANSFER_FAIL`).
    pub(crate) fn check(&self, endpoint: &str) -> Result<()> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let mut until = self.until.lock();
        let Some(at) = until.get_mut(endpoint) else { return Ok(()) };
        let now = self.clock.now();
        if now < *at {
            return Err(Error::new(
                ErrorCode::TransferFail,
                format!("{endpoint} could not be reached a moment ago"),
            ));
        }
        // This operation tries again; the others wait for what it finds.
        *at = now.after(self.cooldown);
        Ok(())
    }

    /// It could not be reached.
    pub(crate) fn failed(&self, endpoint: &str) {
        let now = self.clock.now();
        let mut until = self.until.lock();
        until.retain(|_, at| *at > now);
        until.insert(endpoint.to_owned(), now.after(self.cooldown));
        self.count.store(until.len(), Ordering::Release);
    }

    /// It answered.
    pub(crate) fn answered(&self, endpoint: &str) {
        if self.count.load(Ordering::Acquire) != 0 {
            let mut until = self.until.lock();
            until.remove(endpoint);
            self.count.store(until.len(), Ordering::Release);
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
}
