//! Time limit of a whole operation.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use mooncake_core::clock::{Moment, SharedClock};
use mooncake_core::{Error, ErrorCode, Result};
use tokio::task::coop::unconstrained;

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

    /// Returns whether a time before the deadline has passed.
    pub(crate) fn has_passed(&self, moment: Moment) -> bool {
        self.clock.now() >= moment
    }

    /// Returns the time at which `parts` of `of` parts of the remaining time have passed.
    pub(crate) fn portion(&self, parts: u32, of: u32) -> Moment {
        let now = self.clock.now();
        now.after(self.at.since(now) * parts / of)
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
            return Err(deadline_exceeded(what));
        }
        within(left, work).await.unwrap_or_else(|| Err(deadline_exceeded(what)))
    }
}

/// Runs `work` for that long at most. Returns `None` after that time, and drops `work`.
///
/// Unlike `tokio::time::timeout`, work that ends when it is polled first makes no timer.
pub(crate) async fn within<T>(time: Duration, work: impl Future<Output = T>) -> Option<T> {
    let mut work = pin!(work);
    let mut timer = pin!(None);
    poll_fn(|context| {
        if let Poll::Ready(outcome) = work.as_mut().poll(context) {
            return Poll::Ready(Some(outcome));
        }
        if timer.is_none() {
            // Work that has used up the budget of its task must not stop the timer.
            timer.set(Some(unconstrained(tokio::time::sleep(time))));
        }
        match timer.as_mut().as_pin_mut() {
            Some(timer) => timer.poll(context).map(|()| None),
            None => Poll::Pending,
        }
    })
    .await
}

/// Returns the error of an operation that exceeded its deadline.
pub(crate) fn deadline_exceeded(what: &'static str) -> Error {
    Error::new(ErrorCode::RpcTimeout, format!("the time of the operation is over: {what}"))
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    /// A timer outside of a runtime panics.
    #[test]
    fn finished_work_makes_no_timer() {
        assert_eq!(futures::executor::block_on(within(Duration::ZERO, ready(7))), Some(7));
    }

    #[tokio::test]
    async fn late_work_is_dropped() {
        let (sender, receiver) = tokio::sync::oneshot::channel::<()>();
        let work = async move {
            let _sender = sender;
            pending::<()>().await;
        };
        assert_eq!(within(Duration::from_millis(1), work).await, None);
        assert!(receiver.await.is_err(), "the work was kept");
    }

    #[tokio::test]
    async fn slow_work_ends_in_time() {
        let work = tokio::time::sleep(Duration::from_millis(1));
        assert_eq!(within(Duration::from_secs(600), work).await, Some(()));
    }
}
