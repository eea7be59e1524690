//! Clients that could not be reached recently. Operations fail at once for them.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use mooncake_core::clock::{Moment, SharedClock};
use mooncake_core::{Error, ErrorCode, Reason, Result};
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
    cooldowns: Mutex<HashMap<String, Cooldown>>,
    /// Endpoints that failed since the last report to the master.
    unreported: Mutex<Vec<String>>,
    /// True if there is an endpoint to report. Otherwise, no lock is taken.
    has_unreported: AtomicBool,
}

#[derive(Debug)]
struct Cooldown {
    until: Moment,
    growth: u32,
}

impl Unreachable {
    pub(crate) fn new(clock: SharedClock, cooldown: Duration) -> Self {
        Self {
            clock,
            cooldown,
            count: AtomicUsize::new(0),
            cooldowns: Mutex::default(),
            unreported: Mutex::default(),
            has_unreported: AtomicBool::new(false),
        }
    }

    /// Returns `TRANSFER_FAIL` for an endpoint in its cooldown.
    pub(crate) fn check(&self, endpoint: &str) -> Result<()> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let mut cooldowns = self.cooldowns.lock();
        let Some(cooldown) = cooldowns.get_mut(endpoint) else { return Ok(()) };
        let now = self.clock.now();
        if now < cooldown.until {
            self.report(endpoint);
            return Err(Error::new(
                ErrorCode::TransferFail,
                format!("peer {endpoint} could not be reached a moment ago"),
            ));
        }
        // This operation tries again. Other operations fail until it succeeds.
        cooldown.until = now.after(self.cooldown * cooldown.growth);
        cooldown.growth = (cooldown.growth * 2).min(MAX_GROWTH);
        Ok(())
    }

    /// Records the error of an endpoint that could not be reached.
    pub(crate) fn record_error(&self, endpoint: &str, error: &Error) {
        if is_closed(error) { self.record_closed(endpoint) } else { self.record_failure(endpoint) }
    }

    /// Records that an endpoint could not be reached.
    fn record_failure(&self, endpoint: &str) {
        let now = self.clock.now();
        let mut cooldowns = self.cooldowns.lock();
        // Endpoints of removed clients are not used again and need no entry.
        let retention = self.cooldown * (4 * MAX_GROWTH);
        cooldowns.retain(|_, cooldown| now.since(cooldown.until) < retention);
        let cooldown = cooldowns.entry(endpoint.to_owned()).or_insert(Cooldown { until: now, growth: 1 });
        cooldown.until = cooldown.until.max(now.after(self.cooldown));
        self.count.store(cooldowns.len(), Ordering::Release);
        drop(cooldowns);
        self.report(endpoint);
    }

    /// Records that an endpoint closed or refused a connection. That takes no longer than a
    /// response, and the next process may listen there at any time, so there is no cooldown.
    fn record_closed(&self, endpoint: &str) {
        self.record_response(endpoint);
        self.report(endpoint);
    }

    /// Takes the endpoints to report to the master, which then places nothing there.
    pub(crate) fn take_unreported(&self) -> Vec<String> {
        if !self.has_unreported.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut unreported = self.unreported.lock();
        self.has_unreported.store(false, Ordering::Release);
        std::mem::take(&mut *unreported)
    }

    /// Adds an endpoint to the next report to the master.
    pub(crate) fn report(&self, endpoint: &str) {
        let mut unreported = self.unreported.lock();
        if !unreported.iter().any(|other| other == endpoint) {
            unreported.push(endpoint.to_owned());
        }
        self.has_unreported.store(true, Ordering::Release);
    }

    /// Records that an endpoint responded.
    pub(crate) fn record_response(&self, endpoint: &str) {
        if self.count.load(Ordering::Acquire) != 0 {
            let mut cooldowns = self.cooldowns.lock();
            cooldowns.remove(endpoint);
            self.count.store(cooldowns.len(), Ordering::Release);
            self.unreported.lock().retain(|other| other != endpoint);
        }
    }
}

/// Returns whether the peer closed or refused the connection.
fn is_closed(error: &Error) -> bool {
    // Errors of calls to owners of disks have this reason, and no source.
    if error.reason() == Some(Reason::ConnectionBroken) {
        return true;
    }
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = source {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return matches!(
                error.kind(),
                io::ErrorKind::ConnectionRefused
                    | io::ErrorKind::ConnectionReset
                    | io::ErrorKind::ConnectionAborted
                    | io::ErrorKind::BrokenPipe
                    | io::ErrorKind::UnexpectedEof
            );
        }
        source = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mooncake_core::clock::ManualClock;

    use super::*;

    #[test]
    fn failed_endpoint_is_retried_after_cooldown() {
        let clock = Arc::new(ManualClock::new());
        let peers = Unreachable::new(clock.clone(), Duration::from_secs(1));
        peers.check("a").unwrap();
        peers.record_failure("a");
        assert_eq!(peers.check("a").unwrap_err().code(), ErrorCode::TransferFail);
        peers.check("b").unwrap();
        clock.advance(Duration::from_secs(1));
        peers.check("a").unwrap();
        peers.check("a").unwrap_err();
        peers.record_response("a");
        peers.check("a").unwrap();
    }

    #[test]
    fn closed_connection_is_reported_without_cooldown() {
        let peers = Unreachable::new(Arc::new(ManualClock::new()), Duration::from_secs(1));
        peers.record_failure("a");
        peers.record_closed("a");
        peers.check("a").unwrap();
        assert_eq!(peers.take_unreported(), ["a"]);
        let io = |kind| Error::from(io::Error::from(kind)).context("peer a");
        assert!(is_closed(&io(io::ErrorKind::ConnectionRefused)));
        assert!(is_closed(&io(io::ErrorKind::ConnectionReset)));
        assert!(is_closed(&Error::internal("a call").with_reason(Reason::ConnectionBroken).context("a")));
        assert!(!is_closed(&io(io::ErrorKind::TimedOut)));
        assert!(!is_closed(&Error::internal("no source")));
    }

    #[test]
    fn cooldown_grows_with_failed_attempts() {
        let clock = Arc::new(ManualClock::new());
        let peers = Unreachable::new(clock.clone(), Duration::from_secs(1));
        let mut attempts = Vec::new();
        peers.record_failure("a");
        for second in 0..40 {
            if peers.check("a").is_ok() {
                attempts.push(second);
                peers.record_failure("a");
            }
            clock.advance(Duration::from_secs(1));
        }
        assert_eq!(attempts, [1, 2, 4, 8, 16, 24, 32]);
        peers.record_response("a");
        peers.check("a").unwrap();
    }
}
