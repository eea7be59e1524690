//! Handle of an operation in progress.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use mooncake_core::{Error, Result};
use parking_lot::{Condvar, Mutex};

use crate::driver::{Driver, DriverGuard};
use crate::view::{MAX_RANKS, Slot};

/// Outcome of an operation.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Slots whose failure this rank saw during the operation, as bits.
    pub failed: u64,
    /// Error that kept this rank from the result. The memory of the result is then unspecified.
    ///
    /// A collective operation that went on without failed ranks has no error.
    pub error: Option<Error>,
    /// Slot whose message was received, of a point-to-point receive.
    pub source: Option<Slot>,
    /// Slots whose data has arrived, as bits, of an exchange.
    pub arrived: u64,
    /// Lengths of the messages of an exchange whose data is here, by slot. If a message is longer
    /// than its buffer, only its first bytes are here, and its slot has not arrived.
    pub lengths: Vec<(Slot, u64)>,
}

impl Outcome {
    pub(crate) fn of_error(error: Error) -> Self {
        Self { error: Some(error), ..Self::default() }
    }

    /// Returns 1 for each slot that failed, and 0 for the others.
    pub fn hint(&self) -> [i32; MAX_RANKS] {
        std::array::from_fn(|slot| i32::from(self.failed >> slot & 1 != 0))
    }

    /// Returns whether the operation has its result and saw no failure.
    pub fn is_success(&self) -> bool {
        self.failed == 0 && self.error.is_none()
    }
}

type Callback = Box<dyn FnOnce(&Outcome) + Send>;

#[derive(Default)]
struct State {
    outcome: Option<Outcome>,
    callbacks: Vec<Callback>,
    wakers: Vec<Waker>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    done: Condvar,
}

/// Operation in progress. Clones are handles of the same operation. The drop of a handle neither
/// ends the operation nor frees its memory.
#[derive(Clone)]
pub struct Operation {
    shared: Arc<Shared>,
    driver: Option<Arc<Driver>>,
}

impl Operation {
    /// Creates an operation and the duty to finish it.
    pub(crate) fn new(driver: Option<&Arc<Driver>>) -> (Self, Pending) {
        let (shared, driver) = (Arc::<Shared>::default(), driver.cloned());
        (Self { shared: shared.clone(), driver }, Pending { shared: Some(shared) })
    }

    /// Returns whether the operation is over.
    pub fn is_done(&self) -> bool {
        self.shared.state.lock().outcome.is_some()
    }

    /// Returns the outcome, or `None` while the operation is in progress.
    pub fn outcome(&self) -> Option<Outcome> {
        self.shared.state.lock().outcome.clone()
    }

    /// Blocks the thread until the operation is over, or for at most `timeout`. Returns whether it
    /// is over.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        let mut state = self.shared.state.lock();
        match timeout {
            None => self.shared.done.wait_while(&mut state, |state| state.outcome.is_none()),
            Some(timeout) => {
                self.shared.done.wait_while_for(&mut state, |state| state.outcome.is_none(), timeout);
            }
        }
        state.outcome.is_some()
    }

    /// Carries the operation out on this thread until it is over, for at most `limit`. Returns
    /// whether it is over. Returns at once if another thread does so for this process, or if a rank
    /// of another host takes part: [`wait`](Self::wait) then waits.
    pub fn drive(&self, limit: Duration) -> bool {
        match self.driver.as_ref().and_then(Driver::enter) {
            Some(driver_guard) => self.drive_by(&driver_guard, limit),
            None => self.is_done(),
        }
    }

    /// As [`drive`](Self::drive), by the thread that drives already.
    pub fn drive_by(&self, driver_guard: &DriverGuard, limit: Duration) -> bool {
        {
            let mut state = self.shared.state.lock();
            if state.outcome.is_some() {
                return true;
            }
            // Another thread may finish the operation.
            state.wakers.push(driver_guard.waker());
        }
        driver_guard.drive_until(limit, || self.is_done())
    }

    /// Calls `callback` when the operation is over: now, or on the thread that finishes it. The
    /// callback must not block.
    pub fn on_done(&self, callback: impl FnOnce(&Outcome) + Send + 'static) {
        let mut state = self.shared.state.lock();
        let Some(outcome) = state.outcome.clone() else {
            return state.callbacks.push(Box::new(callback));
        };
        drop(state);
        callback(&outcome);
    }

    /// Waits for the end of the operation without blocking the thread.
    pub async fn done(&self) -> Outcome {
        poll_fn(|cx| {
            let mut state = self.shared.state.lock();
            match &state.outcome {
                Some(outcome) => Poll::Ready(outcome.clone()),
                None => {
                    if !state.wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
                        state.wakers.push(cx.waker().clone());
                    }
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// Returns the outcome as a result: an error if the operation has none, or the operation's own.
    ///
    /// # Errors
    /// The error of the operation.
    pub async fn result(&self) -> Result<Outcome> {
        let outcome = self.done().await;
        match &outcome.error {
            Some(error) => Err(error.clone()),
            None => Ok(outcome),
        }
    }
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation").field("outcome", &self.outcome()).finish()
    }
}

/// Duty to finish an operation. Its drop finishes the operation with an error, so that no caller
/// waits for an abandoned operation.
pub(crate) struct Pending {
    shared: Option<Arc<Shared>>,
}

impl Pending {
    /// Finishes the operation. Its memory has no user any more.
    pub(crate) fn finish(mut self, outcome: Outcome) {
        self.end(outcome);
    }

    fn end(&mut self, outcome: Outcome) {
        let Some(shared) = self.shared.take() else { return };
        let (callbacks, wakers) = {
            let mut state = shared.state.lock();
            state.outcome = Some(outcome.clone());
            (std::mem::take(&mut state.callbacks), std::mem::take(&mut state.wakers))
        };
        shared.done.notify_all();
        wakers.into_iter().for_each(Waker::wake);
        for callback in callbacks {
            callback(&outcome);
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if self.shared.is_some() {
            self.end(Outcome::of_error(closed()));
        }
    }
}

/// Error of operations on a communicator that is closed.
pub(crate) fn closed() -> Error {
    Error::new(
        mooncake_core::ErrorCode::UnavailableInCurrentStatus,
        "cannot finish operation: the communicator is closed",
    )
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn threads_tasks_and_callbacks_see_the_end() {
        let (operation, pending) = Operation::new(None);
        assert!(!operation.is_done() && !operation.wait(Some(Duration::from_millis(1))));
        let (sender, receiver) = channel();
        let early = sender.clone();
        operation.on_done(move |outcome| early.send(outcome.failed).unwrap());
        let waiter = std::thread::spawn({
            let operation = operation.clone();
            move || operation.wait(None)
        });
        let task = std::thread::spawn({
            let operation = operation.clone();
            move || futures::executor::block_on(operation.done()).failed
        });
        pending.finish(Outcome { failed: 6, ..Outcome::default() });
        assert!(waiter.join().unwrap());
        assert_eq!((task.join().unwrap(), receiver.recv().unwrap()), (6, 6));
        operation.on_done(move |outcome| sender.send(outcome.failed).unwrap());
        assert_eq!(receiver.recv().unwrap(), 6);
        let outcome = operation.outcome().unwrap();
        assert_eq!(outcome.hint()[..4], [0, 1, 1, 0]);
        assert!(!outcome.is_success());
    }

    #[test]
    fn an_abandoned_operation_ends_with_an_error() {
        let (operation, pending) = Operation::new(None);
        drop(pending);
        assert!(operation.wait(None) && operation.outcome().unwrap().error.is_some());
    }
}
