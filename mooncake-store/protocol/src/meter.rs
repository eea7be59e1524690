//! Counters of the calls of a client, by call.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use mooncake_core::clock::{Moment, SharedClock};

use super::message::{ADDED, TABLE};
use crate::metrics::Micros;

/// Counters of the calls that clients make. Counting takes no lock and allocates nothing.
#[derive(Debug)]
pub struct CallMeter {
    clock: SharedClock,
    /// Counters by index of the call.
    calls: Box<[CallCounts]>,
}

/// Counters of one call.
#[derive(Debug)]
pub struct CallCounts {
    function: u32,
    /// Name of the call.
    pub name: &'static str,
    /// Time from the request to the response or the failure.
    pub latency: Micros,
    unanswered: AtomicU64,
}

impl CallCounts {
    /// Number of calls without a response.
    pub fn unanswered(&self) -> u64 {
        self.unanswered.load(Relaxed)
    }
}

impl CallMeter {
    /// Creates counters that measure time on this clock.
    pub fn new(clock: SharedClock) -> Self {
        let call = |function, name| CallCounts {
            function,
            name,
            latency: Micros::default(),
            unanswered: AtomicU64::new(0),
        };
        let mut calls: Vec<_> =
            TABLE.iter().chain(ADDED).map(|shape| call(shape.function, shape.name)).collect();
        calls.sort_by_key(|call| call.function);
        Self { clock, calls: calls.into() }
    }

    pub(super) fn begin(&self) -> Moment {
        self.clock.now()
    }

    /// Counts a finished call.
    pub(super) fn end(&self, function: u32, began: Moment, answered: bool) {
        let Ok(at) = self.calls.binary_search_by_key(&function, |call| call.function) else { return };
        let micros = self.clock.now().since(began).as_micros();
        self.calls[at].latency.note(u64::try_from(micros).unwrap_or(u64::MAX));
        if !answered {
            self.calls[at].unanswered.fetch_add(1, Relaxed);
        }
    }

    /// Returns the counters of calls that were made at least once.
    pub fn made(&self) -> impl Iterator<Item = &CallCounts> {
        self.calls.iter().filter(|call| call.latency.count() > 0)
    }
}
