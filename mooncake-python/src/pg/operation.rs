//! Operation of a process group in progress.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::ErrorCode;
use mooncake_core::clock::{Clock, SystemClock};
use mooncake_pg::operation::{Operation, Outcome};
use parking_lot::Mutex;
use pyo3::prelude::*;

use super::mirror::Mirror;
use crate::args::Keep;
use crate::delivery::deliver;
use crate::error::exception;
use crate::interpreter::detached;
use crate::runtime::wait;
use crate::signals::CHECK_INTERVAL;

/// Python objects that an operation uses. The operation and its handle share them, so that the
/// handle, if it lives longer, frees them on a thread of the program.
pub(super) type SharedKeep = Arc<Mutex<Keep>>;

/// Operation in progress.
#[pyclass(frozen, weakref, module = "mooncake._mooncake", name = "GroupOperation")]
pub(crate) struct GroupOperation {
    operation: Operation,
    mirror: Arc<Mirror>,
    // Dropped after the operation, or with this handle.
    _keep: SharedKeep,
}

impl GroupOperation {
    pub(super) fn new(operation: Operation, mirror: Arc<Mirror>, keep: SharedKeep) -> Self {
        Self { operation, mirror, _keep: keep }
    }

    fn outcome(&self) -> Option<Outcome> {
        self.operation.outcome()
    }
}

#[pymethods]
impl GroupOperation {
    /// Waits until the operation is over, or for at most `seconds`. Returns whether it is over.
    #[pyo3(signature = (seconds=None))]
    fn wait(&self, py: Python<'_>, seconds: Option<f64>) -> PyResult<bool> {
        let limit = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).ok());
        // Most operations are over before signals have to be handled.
        let first = limit.map_or(CHECK_INTERVAL, |limit| limit.min(CHECK_INTERVAL));
        let clock = SystemClock::new();
        let began = clock.now();
        let is_over = self.operation.is_done() || detached(py, || self.operation.drive(first));
        let work = async {
            match limit.map(|limit| limit.saturating_sub(clock.now().since(began))) {
                None => {
                    self.operation.done().await;
                    Ok(true)
                }
                Some(left) => Ok(tokio::time::timeout(left, self.operation.done()).await.is_ok()),
            }
        };
        let is_over = if is_over { Ok(true) } else { wait(py, work) };
        if is_over.is_ok() {
            self.mirror.refresh();
        }
        is_over.map_err(|error| exception(py, &error))
    }

    /// Returns whether the operation is over.
    fn is_done(&self) -> bool {
        let is_done = self.operation.is_done();
        if is_done {
            self.mirror.refresh();
        }
        is_done
    }

    /// Returns the slots whose failure this rank saw, as bits. Returns 0 while the operation is in
    /// progress.
    fn failed(&self) -> u64 {
        self.outcome().map_or(0, |outcome| outcome.failed)
    }

    /// Returns the exception of the operation, or `None`.
    fn error(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let error = self.outcome()?.error?;
        Some(exception(py, &error).into_value(py).into_any())
    }

    /// Returns the exception of the operation if no failed or missing rank explains it.
    fn fault(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let outcome = self.outcome()?;
        let is_membership =
            |code| matches!(code, ErrorCode::TransferFail | ErrorCode::UnavailableInCurrentStatus);
        let error = outcome.error.filter(|error| outcome.failed == 0 && !is_membership(error.code()))?;
        Some(exception(py, &error).into_value(py).into_any())
    }

    /// Returns the slot whose message was received.
    fn source(&self) -> Option<u8> {
        self.outcome()?.source.map(|slot| slot.0)
    }

    /// Returns the slots and lengths of the messages of an exchange that are here.
    fn received(&self) -> Vec<(u8, u64)> {
        let lengths = self.outcome().map(|outcome| outcome.lengths).unwrap_or_default();
        lengths.into_iter().map(|(slot, len)| (slot.0, len)).collect()
    }

    /// Calls `callback` when the operation is over, on another thread.
    fn on_done(&self, callback: Py<PyAny>) {
        let mirror = self.mirror.clone();
        self.operation.on_done(move |_| {
            mirror.refresh();
            let call = move |py: Python<'_>| {
                if let Err(error) = callback.call0(py) {
                    error.write_unraisable(py, None);
                }
            };
            // After the end of the interpreter no thread waits for the call.
            let _ = deliver(Box::new(call));
        });
    }
}
