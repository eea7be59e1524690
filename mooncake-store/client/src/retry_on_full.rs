//! Retry of a request for space while the cluster is full. Leases expire, other clients remove
//! objects, and new clients offer memory.

use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::Transport;

use crate::deadline::Deadline;
use crate::state::Inner;

/// First pause: about the time that a master of Mooncake C++ takes to evict. Each pause is twice as
/// long as the one before, up to `LONGEST_PAUSE`.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Pauses of one operation, and the time of its last request for space.
pub(crate) struct RetryOnFull {
    until: Moment,
    pause: Duration,
}

impl RetryOnFull {
    /// Starts the waiting time of an operation. The last eighth of `deadline` is left for the
    /// transfer.
    pub(crate) fn new<T: Transport>(client: &Inner<T>, deadline: &Deadline) -> Self {
        let patience = client.config.clock.now().after(client.config.room_patience);
        Self { until: deadline.portion(7, 8).min(patience), pause: FIRST_PAUSE }
    }

    /// Waits for one pause. Returns whether the caller asks again. Half of each pause is random, so
    /// that waiting clients do not ask at the same time.
    pub(crate) async fn wait<T: Transport>(&mut self, client: &Inner<T>) -> bool {
        let left = self.until.since(client.config.clock.now());
        if left.is_zero() || client.usable().is_err() {
            return false;
        }
        let half = self.pause / 2;
        let drawn = client.rng.lock().below(u64::try_from(half.as_nanos()).unwrap_or(u64::MAX));
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        tokio::time::sleep((half + Duration::from_nanos(drawn)).min(left)).await;
        true
    }
}

/// Returns whether the request failed for lack of space.
pub(crate) fn is_full<T>(outcome: &Result<T>) -> bool {
    outcome.as_ref().is_err_and(|error| error.code() == ErrorCode::NoAvailableHandle)
}

/// Converts the error for an object that is larger than every segment into `NoAvailableHandle`, the
/// only code for lack of space that callers know.
pub(crate) fn too_large(error: Error) -> Error {
    match error.code() {
        ErrorCode::BufferOverflow => {
            Error::new(ErrorCode::NoAvailableHandle, "no segment is large enough for it").with_source(error)
        }
        _ => error,
    }
}
