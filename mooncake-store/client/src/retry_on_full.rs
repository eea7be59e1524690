//! Puts that find no room ask again, for a while: leases end, others remove, members join.

use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::Transport;

use crate::deadline::Deadline;
use crate::state::Inner;

/// The first pause is about what an existing master takes to evict; each is twice the one before, up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// How long one operation goes on asking.
pub(crate) struct RetryOnFull {
    until: Moment,
    pause: Duration,
}

impl RetryOnFull {
    /// What is left after it is for the bytes themselves.
    pub(crate) fn new<T: Transport>(client: &Inner<T>, deadline: &Deadline) -> Self {
        let patience = client.config.clock.now().after(client.config.room_patience);
        Self { until: deadline.portion(7, 8).min(patience), pause: FIRST_PAUSE }
    }

    /// Whether to ask again; the wait is over then. Half of each pause is drawn, so that those who wait do not come together.
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

/// Whether room may come.
pub(crate) fn may_come<T>(outcome: &Result<T>) -> bool {
    outcome.as_ref().is_err_and(|error| error.code() == ErrorCode::NoAvailableHandle)
}

/// A master of ours says when no segment could ever hold an object; callers know one code for "no room".
pub(crate) fn too_large(error: Error) -> Error {
    match error.code() {
        ErrorCode::BufferOverflow => {
            Error::new(ErrorCode::NoAvailableHandle, "no segment is large enough for it").with_source(error)
        }
        _ => error,
    }
}
