//! Tokio runtime of the process, and calls from Python into it.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::FutureExt;
use mooncake_core::{Error, Result};
use mooncake_transport::wait_inline;
use pyo3::prelude::*;
use tokio::runtime::{Builder, Runtime};

use crate::delivery;
use crate::error::forked;
use crate::interpreter::{detached, suspend_at_exit};
use crate::signals;

static RUNTIME: OnceLock<Runtime> = OnceLock::new();
/// Mark of the child of a fork. Threads and connections stayed with the parent.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Returns the runtime, which is started on first use.
pub(crate) fn runtime() -> Result<&'static Runtime> {
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    let made = Builder::new_multi_thread()
        .worker_threads(cores.clamp(2, 8))
        .thread_name("mooncake")
        .on_thread_start(delivery::mark_worker)
        .enable_all()
        .build()?;
    Ok(RUNTIME.get_or_init(|| made))
}

/// Waits for `work` without holding the interpreter. A panic inside becomes an error. If a signal
/// handler raises (Ctrl-C), the work is cancelled.
pub(crate) fn wait<R: Send>(py: Python<'_>, work: impl Future<Output = Result<R>> + Send) -> Result<R> {
    // The state of the work may take several kilobytes. From here on only its address moves.
    let mut work = pin!(Some(wait_inline(AssertUnwindSafe(work).catch_unwind())));
    detached(py, || {
        let runtime = runtime()?;
        let Some(pinned) = work.as_mut().as_pin_mut() else {
            return Err(Error::internal("future polled after completion"));
        };
        let ended = if signals::is_signal_thread() {
            let ended = signals::drive(runtime, pinned);
            let _inside = runtime.enter();
            // Cancelled work may hand cleanup to the runtime.
            work.set(None);
            ended
        } else {
            Some(runtime.block_on(pinned))
        };
        match ended {
            Some(Ok(outcome)) => outcome,
            Some(Err(panic)) => Err(panicked(&*panic)),
            None => Err(Error::internal("cancelled by a signal")),
        }
    })
}

/// Turns a panic into an error with its message.
pub(crate) fn panicked(panic: &(dyn Any + Send)) -> Error {
    let message = panic.downcast_ref::<&str>().copied().map(str::to_owned);
    let message = message.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
    Error::internal(format!("bug in mooncake, please report it: {message}"))
}

/// Returns an error in the child of a fork, where every lock and connection is a copy of the
/// parent's.
pub(crate) fn not_forked() -> PyResult<()> {
    // Every call begins here, and may run code of the program that releases the interpreter.
    suspend_at_exit();
    if FORKED.load(Ordering::Relaxed) {
        return Err(Python::attach(forked));
    }
    Ok(())
}

/// Marks the child of a fork. The interpreter calls this in the child.
#[pyfunction]
pub(crate) fn _after_fork() {
    if RUNTIME.get().is_some() {
        FORKED.store(true, Ordering::Relaxed);
    }
}
