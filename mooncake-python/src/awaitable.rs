//! Calls that asyncio awaits: the work runs on the runtime, no thread waits for it, and its outcome is handed to the loop.

use std::panic::AssertUnwindSafe;
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

use futures::FutureExt;
use mooncake_core::{Error, Result};
use parking_lot::Mutex;
use pyo3::prelude::*;
use tokio::task::AbortHandle;

use crate::error::exception;
use crate::runtime::{panicked, runtime};

/// Something to do with the interpreter attached.
type Delivery = Box<dyn FnOnce(Python<'_>) + Send>;

/// The thread that hands outcomes over. A worker of the runtime must not wait for the interpreter.
fn deliver(delivery: Delivery) -> Result<()> {
    static DELIVERIES: OnceLock<Mutex<Sender<Delivery>>> = OnceLock::new();
    let start = || {
        let (sender, receiver) = channel::<Delivery>();
        let run = move || {
            while let Ok(first) = receiver.recv() {
                let attached = Python::try_attach(|py| {
                    first(py);
                    // As many as there are, while we are attached.
                    receiver.try_iter().for_each(|next| next(py));
                });
                if attached.is_none() {
                    return;
                }
            }
        };
        // Without the thread deliveries fail, and say so.
        let _ = std::thread::Builder::new().name("mooncake-loop".to_owned()).spawn(run);
        Mutex::new(sender)
    };
    let gone = |_| Error::internal("the interpreter is gone");
    DELIVERIES.get_or_init(start).lock().send(delivery).map_err(gone)
}

/// Stops work that nobody awaits any more.
#[pyclass(frozen, module = "mooncake._mooncake", name = "Canceller")]
pub(crate) struct Canceller {
    running: AbortHandle,
}

#[pymethods]
impl Canceller {
    /// Called when the future is done, one way or the other.
    fn __call__(&self, future: &Bound<'_, PyAny>) {
        let _ = future;
        self.running.abort();
    }
}

/// A future of the running loop that has `finish` of the outcome of `work`.
pub(crate) fn awaitable<'py, R: Send + 'static>(
    py: Python<'py>,
    work: impl Future<Output = Result<R>> + Send + 'static,
    finish: impl for<'p> FnOnce(Python<'p>, Result<R>) -> PyResult<Bound<'p, PyAny>> + Send + 'static,
) -> PyResult<Bound<'py, PyAny>> {
    let event_loop = py.import("asyncio")?.call_method0("get_running_loop")?;
    let future = event_loop.call_method0("create_future")?;
    let (of, at) = (future.clone().unbind(), event_loop.unbind());
    let runtime = runtime().map_err(|error| exception(py, &error))?;
    let running = runtime.spawn(async move {
        let outcome = match AssertUnwindSafe(work).catch_unwind().await {
            Ok(outcome) => outcome,
            Err(panic) => Err(panicked(&*panic)),
        };
        let hand_over = move |py: Python<'_>| {
            let settled = settle(py, &of, &at, finish(py, outcome));
            if let Err(error) = settled {
                // The loop is closed: nobody is left to be told.
                tracing::debug!("an outcome was not wanted any more: {error}");
            }
        };
        let _ = deliver(Box::new(hand_over));
    });
    future.call_method1("add_done_callback", (Canceller { running: running.abort_handle() },))?;
    Ok(future)
}

fn settle(
    py: Python<'_>,
    future: &Py<PyAny>,
    at: &Py<PyAny>,
    outcome: PyResult<Bound<'_, PyAny>>,
) -> PyResult<()> {
    let settle = py.import("mooncake.async_store")?.getattr("_settle")?;
    let arguments = match outcome {
        Ok(value) => (settle, future, Some(value), None),
        Err(error) => (settle, future, None, Some(error)),
    };
    at.call_method1(py, "call_soon_threadsafe", arguments).map(drop)
}

/// A future that is done.
pub(crate) fn ready<'py>(py: Python<'py>, value: impl IntoPyObject<'py>) -> PyResult<Bound<'py, PyAny>> {
    let event_loop = py.import("asyncio")?.call_method0("get_running_loop")?;
    let future = event_loop.call_method0("create_future")?;
    future.call_method1("set_result", (value,))?;
    Ok(future)
}
