//! Copies by a device, as futures for any executor, and the thread that polls them for completion.

use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures::channel::mpsc;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use mooncake_core::memory::{MemorySpan, PendingCopy, driver_for};
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::{Condvar, Mutex};

/// Interval of polls of copies in progress. A copy of one megabyte takes longer.
const TICK: Duration = Duration::from_micros(20);
/// Interval of wake-ups of futures that only watch the clock.
const SLOW_TICK: Duration = Duration::from_millis(1);

/// Copy with device memory on at least one side. Its drop waits until the device touches neither
/// side any more.
#[must_use = "the outcome of the copy is in it"]
pub struct DeviceCopy {
    copying: Arc<Copying>,
}

/// Handle of a copy whose future has another owner.
#[derive(Clone)]
pub struct CopyHandle {
    copying: Arc<Copying>,
}

struct Copying {
    state: Mutex<State>,
}

enum State {
    Running(Box<dyn PendingCopy>),
    Done(Result<()>),
}

impl DeviceCopy {
    /// Begins a copy of `from.len` bytes.
    ///
    /// # Errors
    /// Returns `Invalid` for different lengths, `NOT_SUPPORTED` in a process without a driver, and
    /// the errors of the device.
    ///
    /// # Safety
    /// Until the future is ready or dropped, both sides stay allocated, no other code touches `to`,
    /// and no code writes `from`.
    pub unsafe fn begin(from: MemorySpan, to: MemorySpan) -> Result<Self> {
        // SAFETY: passed on to the caller.
        let pending = unsafe { driver_for(from, to)?.copy(from, to) }?;
        Ok(Self { copying: Arc::new(Copying { state: Mutex::new(State::Running(pending)) }) })
    }

    /// Returns a handle that can wait for the copy.
    pub fn handle(&self) -> CopyHandle {
        CopyHandle { copying: self.copying.clone() }
    }
}

impl CopyHandle {
    /// Blocks until the device touches neither side any more. The future still yields the outcome.
    pub fn settle(&self) {
        self.copying.settle();
    }

    /// Returns whether the copy is known to be over.
    pub fn is_finished(&self) -> bool {
        self.copying.state.try_lock().is_some_and(|state| matches!(*state, State::Done(_)))
    }
}

impl Copying {
    fn settle(&self) {
        let mut state = self.state.lock();
        let dropped = || State::Done(Err(Error::internal("copy was dropped before its end")));
        if let State::Running(_) = &*state
            && let State::Running(pending) = std::mem::replace(&mut *state, dropped())
        {
            *state = State::Done(pending.wait());
        }
    }
}

impl Future for DeviceCopy {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        // Another thread already waits for the copy, so this one returns.
        let Some(mut state) = self.copying.state.try_lock() else {
            TICKER.wake_fast(cx.waker());
            return Poll::Pending;
        };
        if let State::Running(pending) = &mut *state {
            match pending.poll() {
                None => {
                    TICKER.wake_fast(cx.waker());
                    return Poll::Pending;
                }
                Some(result) => *state = State::Done(result),
            }
        }
        Poll::Ready(match &*state {
            State::Done(Err(error)) => Err(device_error(error.clone())),
            _ => Ok(()),
        })
    }
}

impl Drop for DeviceCopy {
    fn drop(&mut self) {
        self.copying.settle();
    }
}

impl fmt::Debug for DeviceCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DeviceCopy")
    }
}

impl fmt::Debug for CopyHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CopyHandle")
    }
}

/// Source of wake-ups for futures that have no event to wait for.
struct Ticker {
    waiting: Mutex<Waiting>,
    added: Condvar,
}

#[derive(Default)]
struct Waiting {
    fast: Vec<Waker>,
    slow: Vec<Waker>,
}

static TICKER: LazyLock<&'static Ticker> = LazyLock::new(|| {
    let ticker: &Ticker = Box::leak(Box::new(Ticker { waiting: Mutex::default(), added: Condvar::new() }));
    let thread = std::thread::Builder::new().name("device-ticks".into());
    if let Err(error) = thread.spawn(|| ticker.run()) {
        tracing::error!(%error, "cannot start the thread that polls copies of device memory");
    }
    ticker
});

impl Ticker {
    fn wake_fast(&self, waker: &Waker) {
        let mut waiting = self.waiting.lock();
        waiting.fast.push(waker.clone());
        // With more than one waiter, a tick is already scheduled.
        if waiting.fast.len() == 1 {
            self.added.notify_one();
        }
    }

    fn wake_slowly(&self, waker: &Waker) {
        let mut waiting = self.waiting.lock();
        waiting.slow.push(waker.clone());
        if waiting.slow.len() == 1 {
            self.added.notify_one();
        }
    }

    fn run(&self) {
        let mut since = Duration::ZERO;
        loop {
            let mut waiting = self.waiting.lock();
            if waiting.fast.is_empty() {
                if waiting.slow.is_empty() {
                    since = Duration::ZERO;
                    self.added.wait(&mut waiting);
                    continue;
                }
                let timed_out = self.added.wait_for(&mut waiting, SLOW_TICK).timed_out();
                since = if timed_out { SLOW_TICK } else { since };
            } else {
                drop(waiting);
                std::thread::park_timeout(TICK);
                since += TICK;
                waiting = self.waiting.lock();
            }
            let mut woken = std::mem::take(&mut waiting.fast);
            if since >= SLOW_TICK {
                woken.append(&mut waiting.slow);
                since = Duration::ZERO;
            }
            drop(waiting);
            woken.into_iter().for_each(Waker::wake);
        }
    }
}

/// Waits for a future. Calls `stop` about once a millisecond, and ends when it returns true.
pub(crate) async fn unless<F: Future>(work: F, mut stop: impl FnMut() -> Option<Error>) -> Result<F::Output> {
    let mut work = std::pin::pin!(work);
    std::future::poll_fn(|cx| {
        if let Poll::Ready(done) = work.as_mut().poll(cx) {
            return Poll::Ready(Ok(done));
        }
        if let Some(error) = stop() {
            return Poll::Ready(Err(error));
        }
        TICKER.wake_slowly(cx.waker());
        Poll::Pending
    })
    .await
}

/// Executor of operations with device memory: one thread for the whole process, which never blocks.
static EXECUTOR: LazyLock<mpsc::UnboundedSender<BoxFuture<'static, ()>>> = LazyLock::new(|| {
    let (sender, work) = mpsc::unbounded::<BoxFuture<'static, ()>>();
    let run = move || {
        let each = |work: BoxFuture<'static, ()>| async move {
            if AssertUnwindSafe(work).catch_unwind().await.is_err() {
                tracing::error!("an operation with device memory panicked");
            }
        };
        futures::executor::block_on(work.for_each_concurrent(None, each));
    };
    if let Err(error) = std::thread::Builder::new().name("device-carrier".into()).spawn(run) {
        tracing::error!(%error, "cannot start the thread for transfers of device memory; they will fail");
    }
    sender
});

/// Runs a future to its end on the executor of this module. Drops the future at once if the thread
/// is missing.
pub(crate) fn spawn(work: impl Future<Output = ()> + Send + 'static) {
    // The send fails if the thread is missing. The shares of completions in the future then fail
    // with it.
    let _ = EXECUTOR.unbounded_send(work.boxed());
}

/// Converts the error of a device into an error of this process, so that no caller mistakes it for
/// an error of a peer or of the connection.
pub(crate) fn device_error(error: Error) -> Error {
    Error::new(ErrorCode::InternalError, error.message().to_owned()).with_source(error)
}

/// True if a region of this process has been on a device.
static IN_USE: AtomicBool = AtomicBool::new(false);

/// Records the location of a region.
pub(crate) fn record_location(span: MemorySpan) -> MemorySpan {
    if span.location.is_device() {
        IN_USE.store(true, Ordering::Release);
    }
    span
}

/// Returns whether any registered memory of this process is device memory. Until then, no code
/// needs to check locations.
pub fn in_use() -> bool {
    IN_USE.load(Ordering::Acquire)
}

/// Returns the error of an operation with device memory on a transport that only supports host
/// memory.
pub fn not_host_memory(span: MemorySpan) -> Error {
    let text = format!(
        "cannot access device memory: this transport supports host memory only. len={} address={:#x} location={}",
        span.len,
        span.addr(),
        span.location
    );
    Error::new(ErrorCode::InvalidParams, text)
}
