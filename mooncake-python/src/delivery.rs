//! Thread that attaches to the interpreter on behalf of the runtime's workers. A worker must not
//! wait for the interpreter: an interpreter that ends also ends the threads that wait to attach to
//! it, and Rust's stack must not be unwound that way.

use std::cell::Cell;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use mooncake_core::{Error, Result};
use parking_lot::Mutex;
use pyo3::prelude::*;

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
        run(&deliveries);
        // The last action of the thread, which `stop` waits for.
        drop(ending);
    };
    std::thread::Builder::new().name("mooncake-loop".to_owned()).spawn(run)?;
    Ok(State::Runs { queue, ended })
}

fn run(deliveries: &Receiver<Delivery>) {
    while let Ok(first) = deliveries.recv() {
        let mut first = Some(first);
        let attached = Python::try_attach(|py| {
            // Runs all queued closures while attached.
            first.take().into_iter().chain(deliveries.try_iter()).for_each(|next| next(py));
        });
        if attached.is_none() {
            first.into_iter().chain(deliveries.try_iter()).for_each(std::mem::forget);
            return;
        }
    }
}

/// Runs the queued closures and accepts no more. Called when the interpreter ends.
pub(crate) fn stop(py: Python<'_>) {
    let before = std::mem::replace(&mut *DELIVERIES.lock(), State::Over);
    let State::Runs { queue, ended } = before else { return };
    drop(queue);
    let waited = py.detach(move || ended.recv_timeout(LIMIT));
    if waited == Err(RecvTimeoutError::Timeout) {
        tracing::debug!("event loop did not take its results in {LIMIT:?}");
    }
}
