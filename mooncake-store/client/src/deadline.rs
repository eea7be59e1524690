//! One time limit for everything an operation does.

use std::future::Future;
use std::time::Duration;

use mooncake_core::clock::{Moment, SharedClock};
use mooncake_core::{Error, ErrorCode, Result};

/// When an operation must be over.
#[derive(Clone, Debug)]
pub(crate) struct Deadline {
    clock: SharedClock,
    at: Moment,
}

impl Deadline {
    /// `span` from now.
    pub(crate) fn after(clock: &SharedClock, span: Duration) -> Self {
        Self { clock: clock.clone(), at: clock.now().after(span) }
    }

    /// At that moment.
    pub(crate) fn until(clock: &SharedClock, at: Moment) -> Self {
        Self { clock: clock.clone(), at }
    }

    /// Time that is left, zero when it is over.
    pub(crate) fn left(&self) -> Duration {
        self.at.since(self.clock.now())
    }

    /// Whether no time is left.
    pub(crate) fn is_over(&self) -> bool {
        self.left().is_zero()
    }

    /// The moment when `parts` of `of` parts of what is left now have passed.
    pub(crate) fn portion(&self, parts: u32, of: u32) -> Moment {
        self.clock.now().after(self.left() * parts / of)
    }

    /// Runs `work`, at most to the deadline; late is `RPC_TIMEOUT` naming `what`. `work` is dropped
    /// when it is late.
    pub(crate) async fn bound<T>(
        &self,
        what: &'static str,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let left = self.left();
        if left.is_zero() {
            // A timer would let `work` begin.
            return Err(late(what));
        }
        match tokio::time::timeout(left, work).await {
            Ok(result) => result,
            Err(_) => Err(late(what)),
        }
    }
}

/// The error of an operation that took too long.
pub(crate) fn late(what: &'static str) -> Error {
    Error::new(ErrorCode::RpcTimeout, format!("no end of it within the operation's time: {what}"))
}
