//! Signal handling while a call waits: Ctrl-C ends the wait.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use futures::future::{Either, select};
use mooncake_core::clock::{Clock, SystemClock};
use parking_lot::Mutex;
use pyo3::ffi;
use pyo3::prelude::*;
use tokio::runtime::Runtime;
use tokio::sync::Notify;

use crate::delivery;

/// Maximum delay of a signal handler.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Exception of a signal handler, until the interpreter takes it.
static RAISED: Mutex<Option<PyErr>> = Mutex::new(None);

/// Waker of the thread that created it.
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

/// Returns whether Python runs signal handlers on this thread: the first of the process.
pub(crate) fn is_signal_thread() -> bool {
    IS_FIRST.with(|known| {
        known.get().unwrap_or_else(|| {
            // SAFETY: both calls only return numbers.
            #[allow(unsafe_code)]
            let first = unsafe { libc::gettid() == libc::getpid() };
            known.set(Some(first));
            first
        })
    })
}

/// Runs the work and the signal handlers in turn. If a handler raises, returns `None`, leaves the
/// work as it is, and the interpreter raises the exception when the call returns. Must be called on
/// the first thread, detached from the interpreter.
pub(crate) fn drive<F>(runtime: &Runtime, mut work: Pin<&mut F>) -> Option<F::Output>
where
    F: Future<Output: Send> + Send,
{
    if let Some(ended) = poll_inline(runtime, work.as_mut()) {
        return Some(ended);
    }
    match drive_on_thread(runtime, work.as_mut()) {
        Ok(ended) => ended,
        Err(error) => {
            tracing::debug!("signal handlers are delayed until the call returns: {error}");
            Some(runtime.block_on(work))
        }
    }
}

/// Polls on this thread for up to [`CHECK_INTERVAL`], so that no signal handler is delayed longer.
fn poll_inline<F: Future>(runtime: &Runtime, mut work: Pin<&mut F>) -> Option<F::Output> {
    let _inside = runtime.enter();
    let parked = PARKED.with(Arc::clone);
    let waker = Waker::from(parked.clone());
    let mut context = Context::from_waker(&waker);
    if let Poll::Ready(output) = work.as_mut().poll(&mut context) {
        return Some(output);
    }
    let clock = SystemClock::new();
    let since = clock.now();
    loop {
        let left = CHECK_INTERVAL.saturating_sub(clock.now().since(since));
        // An exception of a handler ends all calls up to the interpreter's next instruction.
        if left.is_zero() || RAISED.lock().is_some() {
            return None;
        }
        if !parked.woken.swap(false, Ordering::Acquire) {
            thread::park_timeout(left);
        } else if let Poll::Ready(output) = work.as_mut().poll(&mut context) {
            return Some(output);
        }
    }
}

/// Runs the work on another thread while signal handlers run on this one. A handler may wait for
/// resources that the work holds.
fn drive_on_thread<F>(runtime: &Runtime, work: Pin<&mut F>) -> io::Result<Option<F::Output>>
where
    F: Future<Output: Send> + Send,
{
    let (done, given_up) = (&AtomicBool::new(false), &Notify::new());
    thread::scope(|scope| {
        let caller = thread::current();
        let other =
            thread::Builder::new().name("mooncake-wait".to_owned()).spawn_scoped(scope, move || {
                delivery::mark_worker();
                let given_up = pin!(given_up.notified());
                let ended = runtime.block_on(select(work, given_up));
                done.store(true, Ordering::Release);
                caller.unpark();
                match ended {
                    Either::Left((output, _)) => Some(output),
                    Either::Right(_) => None,
                }
            })?;
        while !done.load(Ordering::Acquire) {
            let raised = RAISED.lock().is_some() || Python::try_attach(run_handlers) == Some(false);
            if raised {
                given_up.notify_one();
                break;
            }
            thread::park_timeout(CHECK_INTERVAL);
        }
        // Panics of the work are caught inside.
        Ok(other.join().ok().flatten())
    })
}

/// Runs the handlers of signals that have arrived. If one raises, returns false, and the
/// interpreter raises its exception at the next opportunity.
fn run_handlers(py: Python<'_>) -> bool {
    let Err(error) = py.check_signals() else { return true };
    *RAISED.lock() = Some(error);
    // SAFETY: `raise` needs nothing but the interpreter.
    #[allow(unsafe_code)]
    let full = unsafe { ffi::Py_AddPendingCall(Some(raise), std::ptr::null_mut()) } != 0;
    if full {
        // The interpreter cannot raise the exception, and leaving it here would end every call.
        RAISED.lock().take();
        tracing::warn!("exception of a signal handler dropped");
        return true;
    }
    false
}

/// Raises the exception of a handler. The interpreter calls this between two of its instructions.
#[allow(unsafe_code)]
extern "C" fn raise(_: *mut c_void) -> c_int {
    let Some(error) = RAISED.lock().take() else { return 0 };
    // SAFETY: the interpreter calls this function attached.
    let py = unsafe { Python::assume_attached() };
    error.restore(py);
    -1
}
