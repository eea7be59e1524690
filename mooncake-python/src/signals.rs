//! Signals while a call waits: Ctrl-C ends the wait, not only what comes after it.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use mooncake_core::clock::{Clock, SystemClock};
use parking_lot::Mutex;
use pyo3::ffi;
use pyo3::prelude::*;

/// How long a signal's handler may have to wait.
pub(crate) const EVERY: Duration = Duration::from_millis(100);

/// What a handler raised, until the interpreter takes it.
static RAISED: Mutex<Option<PyErr>> = Mutex::new(None);

/// Wakes the thread that made it.
struct Unpark {
    thread: Thread,
    woken: AtomicBool,
}

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

thread_local! {
    static PARKED: Arc<Unpark> = Arc::new(Unpark { thread: thread::current(), woken: AtomicBool::new(false) });
    static IS_FIRST: Cell<Option<bool>> = const { Cell::new(None) };
}

/// Whether handlers run on this thread: the first of the process.
pub(crate) fn run_here() -> bool {
    IS_FIRST.with(|known| {
        known.get().unwrap_or_else(|| {
            // SAFETY: both only tell numbers.
            #[allow(unsafe_code)]
            let first = unsafe { libc::gettid() == libc::getpid() };
            known.set(Some(first));
            first
        })
    })
}

/// Polls on this thread until the work is done, or the handler of a signal raises: then `None`, the work is as it was, and the
/// interpreter raises that when the call returns. Only while detached from it.
pub(crate) fn drive<F: Future>(mut work: Pin<&mut F>) -> Option<F::Output> {
    let parked = PARKED.with(Arc::clone);
    let waker = Waker::from(parked.clone());
    let mut context = Context::from_waker(&waker);
    let clock = SystemClock::new();
    let mut looked = None;
    loop {
        if let Poll::Ready(output) = work.as_mut().poll(&mut context) {
            return Some(output);
        }
        let since = *looked.get_or_insert_with(|| clock.now());
        while !parked.woken.swap(false, Ordering::Acquire) {
            let left = EVERY.saturating_sub(clock.now().since(since));
            if left.is_zero() {
                break;
            }
            thread::park_timeout(left);
        }
        if clock.now().since(since) >= EVERY {
            looked = None;
            if Python::try_attach(handled).is_some_and(|handled| !handled) {
                return None;
            }
        }
    }
}

/// Runs the handlers of signals that have arrived. When one raises it is false, and the interpreter raises that at the next chance.
fn handled(py: Python<'_>) -> bool {
    let Err(error) = py.check_signals() else { return true };
    *RAISED.lock() = Some(error);
    // SAFETY: `raise` needs nothing but the interpreter.
    #[allow(unsafe_code)]
    let full = unsafe { ffi::Py_AddPendingCall(Some(raise), std::ptr::null_mut()) } != 0;
    if full {
        // Nobody is left who would raise it.
        tracing::warn!("what a signal's handler raised was lost");
        return true;
    }
    false
}

/// Called by the interpreter between two of its instructions.
#[allow(unsafe_code)]
extern "C" fn raise(_: *mut c_void) -> c_int {
    let Some(error) = RAISED.lock().take() else { return 0 };
    // SAFETY: the interpreter calls it attached.
    let py = unsafe { Python::assume_attached() };
    error.restore(py);
    -1
}
