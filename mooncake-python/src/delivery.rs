//! The thread that goes to the interpreter for the workers of the runtime, which must not wait for it, nor be caught waiting when it ends:
//! the interpreter ends a thread that asks for it then, and Rust's stack is not to be unwound so.

use std::cell::Cell;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use mooncake_core::{Error, Result};
use parking_lot::Mutex;
use pyo3::prelude::*;

/// Something to do with the interpreter attached.
pub(crate) type Delivery = Box<dyn FnOnce(Python<'_>) + Send>;

/// How long the end of the interpreter waits for what is under way: an event loop that takes what it is handed, and objects that go.
const LIMIT: Duration = Duration::from_secs(2);

static DELIVERIES: Mutex<State> = Mutex::new(State::Idle);

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

enum State {
    /// Nothing was to be delivered yet.
    Idle,
    Runs {
        queue: Sender<Delivery>,
        ended: Receiver<()>,
    },
    /// The interpreter is ending.
    Over,
}

/// Called on every thread of the runtime.
pub(crate) fn mark_worker() {
    IS_WORKER.set(true);
}

/// Whether the thread is one of the runtime's.
pub(crate) fn is_worker() -> bool {
    IS_WORKER.get()
}

/// Has it done by the thread, in order. An error when there is no interpreter to go to; it is forgotten then, as whatever it
/// holds of the interpreter cannot be given back.
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
    Err(Error::internal("the interpreter is gone"))
}

fn start() -> Result<State> {
    let (queue, deliveries) = channel();
    let (ending, ended) = channel();
    let run = move || {
        run(&deliveries);
        // Dropped at the very end, which is what is waited for.
        drop(ending);
    };
    std::thread::Builder::new().name("mooncake-loop".to_owned()).spawn(run)?;
    Ok(State::Runs { queue, ended })
}

fn run(deliveries: &Receiver<Delivery>) {
    while let Ok(first) = deliveries.recv() {
        let mut first = Some(first);
        let attached = Python::try_attach(|py| {
            // As many as there are, while we are attached.
            first.take().into_iter().chain(deliveries.try_iter()).for_each(|next| next(py));
        });
        if attached.is_none() {
            first.into_iter().chain(deliveries.try_iter()).for_each(std::mem::forget);
            return;
        }
    }
}

/// Delivers what is there and nothing more. For the end of the interpreter.
pub(crate) fn stop(py: Python<'_>) {
    let before = std::mem::replace(&mut *DELIVERIES.lock(), State::Over);
    let State::Runs { queue, ended } = before else { return };
    drop(queue);
    let waited = py.detach(move || ended.recv_timeout(LIMIT));
    if waited == Err(RecvTimeoutError::Timeout) {
        tracing::debug!("an event loop did not take what it was handed in {LIMIT:?}");
    }
}
