//! Calls for asyncio: the work runs on the runtime, no thread waits for it, and its outcome is
//! passed to the event loop.

use std::panic::AssertUnwindSafe;

use futures::FutureExt;
use mooncake_core::Result;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use tokio::task::AbortHandle;

use crate::delivery::deliver;
use crate::error::exception;
use crate::runtime::{panicked, runtime};

/// Canceller of work that nothing awaits any more.
#[pyclass(frozen, module = "mooncake._mooncake", name = "Canceller")]
pub(crate) struct Canceller {
    running: AbortHandle,
}

#[pymethods]
impl Canceller {
    /// Aborts the work. asyncio calls this when the future is done or cancelled.
    fn __call__(&self, future: &Bound<'_, PyAny>) {
        let _ = future;
        self.running.abort();
    }
}

/// Resolves the future with `finish` of the outcome of `work`.
///
/// No code on the runtime's threads calls Python functions, which could hand the interpreter to
/// another thread. A thread that then finds the interpreter ending is ended in place, and Rust
/// cannot be unwound that way.
pub(crate) fn awaitable<R: Send + 'static>(
    future: &Bound<'_, PyAny>,
    work: impl Future<Output = Result<R>> + Send + 'static,
    finish: impl for<'p> FnOnce(Python<'p>, Result<R>) -> PyResult<Bound<'p, PyAny>> + Send + 'static,
) -> PyResult<()> {
    let (of, at) = (future.clone().unbind(), future.call_method0("get_loop")?.unbind());
    let runtime = runtime().map_err(|error| exception(future.py(), &error))?;
    let running = runtime.spawn(async move {
        let outcome = match AssertUnwindSafe(work).catch_unwind().await {
            Ok(outcome) => outcome,
            Err(panic) => Err(panicked(&*panic)),
        };
        let hand_over = move |py: Python<'_>| {
            let settled = settle(py, &of, &at, finish(py, outcome));
            if let Err(error) = settled {
                // The event loop is closed, so nothing can receive the outcome.
                tracing::debug!("outcome of an asyncio call dropped: {error}");
            }
        };
        let _ = deliver(Box::new(hand_over));
    });
    future.call_method1("add_done_callback", (Canceller { running: running.abort_handle() },))?;
    Ok(())
}

fn settle(
    py: Python<'_>,
    future: &Py<PyAny>,
    at: &Py<PyAny>,
    outcome: PyResult<Bound<'_, PyAny>>,
) -> PyResult<()> {
    static SETTLE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let settle = SETTLE.import(py, "mooncake.async_store", "_settle")?;
    let arguments = match outcome {
        Ok(value) => (settle, future, Some(value), None),
        Err(error) => (settle, future, None, Some(error)),
    };
    at.call_method1(py, "call_soon_threadsafe", arguments).map(drop)
}

/// Resolves the future at once.
pub(crate) fn ready<'py>(future: &Bound<'py, PyAny>, value: impl IntoPyObject<'py>) -> PyResult<()> {
    future.call_method1("set_result", (value,)).map(drop)
}
