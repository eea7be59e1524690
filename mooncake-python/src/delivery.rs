//! Thread that runs Python code on behalf of the runtime's workers. A worker must not wait for the
//! interpreter: when the interpreter ends, threads that wait for it are suspended for ever.

use std::cell::Cell;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use mooncake_core::{Error, Result};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::interpreter::{detached, suspend_at_exit};

/// Closure to run while attached to the interpreter.
pub(crate) type Delivery = Box<dyn FnOnce(Python<'_>) + Send>;

/// Time that the end of the interpreter waits for running deliveries: event loops that take
/// results, and objects that are freed.
const LIMIT: Duration = Duration::from_secs(2);

static DELIVERIES: Mutex<State> = Mutex::new(State::Idle);

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

enum State {
    /// Initial state, before the first delivery.
    Idle,
    Runs {
        queue: Sender<Delivery>,
        ended: Receiver<()>,
    },
    /// The interpreter is ending.
    Over,
}

/// Marks this thread as a worker of the runtime. Every worker calls it once.
pub(crate) fn mark_worker() {
    IS_WORKER.set(true);
}

/// Returns whether this thread is a worker of the runtime.
pub(crate) fn is_worker() -> bool {
    IS_WORKER.get()
}

/// Queues a closure for the thread, which runs closures in order.
///
/// # Errors Returns an error if the interpreter has ended. The closure is leaked then, because its
/// Python objects can no longer be freed.
pub(crate) fn deliver(delivery: Delivery) -> Result<()> {
    let mut state = DELIVERIES.lock();
    if matches!(*state, State::Idle) {
        *state = start()?;
    }
    let undelivered = match &*state {
        State::Runs { queue, .. } => match queue.send(delivery) {
            Ok(()) => return Ok(()),
            Err(unsent) => unsent.0,
        },
        State::Idle | State::Over => delivery,
    };
    std::mem::forget(undelivered);
    Err(Error::internal("cannot run Python code: the interpreter has ended"))
}

fn start() -> Result<State> {
    let (queue, deliveries) = channel();
    let (ending, ended) = channel();
    let run = move || {
        run(&Mutex::new(deliveries));
        // The last action of the thread, which `stop` waits for.
        drop(ending);
    };
    std::thread::Builder::new().name("mooncake-loop".to_owned()).spawn(run)?;
    Ok(State::Runs { queue, ended })
}

/// Runs closures until the queue ends. Until then, the thread belongs to the interpreter, which
/// suspends the thread when the interpreter ends. A thread that attached for each closure could
/// find the interpreter freed.
fn run(deliveries: &Mutex<Receiver<Delivery>>) {
    suspend_at_exit();
    let attached = Python::try_attach(|py| {
        while let Ok(first) = detached(py, || deliveries.lock().recv()) {
            first(py);
            // Runs all queued closures before the next release.
            let queued = || deliveries.lock().try_recv().ok();
            while let Some(next) = queued() {
                next(py);
            }
        }
    });
    if attached.is_none() {
        deliveries.lock().iter().for_each(std::mem::forget);
    }
}

/// Runs the queued closures and accepts no more. Called when the interpreter ends.
pub(crate) fn stop(py: Python<'_>) {
    let before = std::mem::replace(&mut *DELIVERIES.lock(), State::Over);
    let State::Runs { queue, ended } = before else { return };
    drop(queue);
    let waited = detached(py, move || ended.recv_timeout(LIMIT));
    if waited == Err(RecvTimeoutError::Timeout) {
        tracing::debug!("event loop did not take its results in {LIMIT:?}");
    }
}
