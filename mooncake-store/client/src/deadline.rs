//! Time limit of a whole operation.

use std::future::Future;
use std::time::Duration;

use mooncake_core::clock::{Moment, SharedClock};
use mooncake_core::{Error, ErrorCode, Result};

/// Time at which an operation ends at the latest.
#[derive(Clone, Debug)]
pub(crate) struct Deadline {
    clock: SharedClock,
    at: Moment,
}

impl Deadline {
    /// Returns the deadline `span` from now.
    pub(crate) fn after(clock: &SharedClock, span: Duration) -> Self {
        Self { clock: clock.clone(), at: clock.now().after(span) }
    }

    /// Returns the deadline at a given time.
    pub(crate) fn until(clock: &SharedClock, at: Moment) -> Self {
        Self { clock: clock.clone(), at }
    }

    /// Returns the remaining time, zero after the deadline.
    pub(crate) fn left(&self) -> Duration {
        self.at.since(self.clock.now())
    }

    /// Returns whether the deadline has passed.
    pub(crate) fn is_over(&self) -> bool {
        self.left().is_zero()
    }

    /// Returns the time at which `parts` of `of` parts of the remaining time have passed.
    pub(crate) fn portion(&self, parts: u32, of: u32) -> Moment {
        self.clock.now().after(self.left() * parts / of)
    }

    /// Runs `work` until the deadline at most. At the deadline, `work` is dropped.
    ///
    /// # Errors
    /// Returns `RPC_TIMEOUT` with the name `what` at the deadline, and the errors of `work`.
    pub(crate) async fn bound<T>(
        &self,
        what: &'static str,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let left = self.left();
        if left.is_zero() {
            // With a timer, `work` would be polled once.
            return Err(late(what));
        }
        match tokio::time::timeout(left, work).await {
            Ok(result) => result,
            Err(_) => Err(late(what)),
        }
    }
}

/// Returns the error of an operation that exceeded its deadline.
pub(crate) fn late(what: &'static str) -> Error {
    Error::new(ErrorCode::RpcTimeout, format!("no end of it within the operation's time: {what}"))
}
