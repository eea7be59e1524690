//! Copies that a device makes by itself, as futures for any executor, and the thread that looks when they are over.

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

/// How often copies under way are looked at: a megabyte takes longer.
const TICK: Duration = Duration::from_micros(20);
/// How often those are woken who only watch the clock.
const SLOW_TICK: Duration = Duration::from_millis(1);

/// A copy with a device's memory on one side at least. Dropping it waits until neither side is touched any more.
#[must_use = "the outcome of the copy is in it"]
pub struct DeviceCopy {
    copying: Arc<Copying>,
}

/// Stands for a copy where the future is somebody else's.
#[derive(Clone)]
pub struct CopyHandle {
    copying: Arc<Copying>,
}

struct Copying {
    state: Mutex<State>,
}

enum State {
    Running(Box<dyn PendingCopy>),
    Over(Result<()>),
}

impl DeviceCopy {
    /// Begins a copy of `from.len` bytes.
    ///
    /// # Errors
    /// `Invalid` for lengths that differ, `NOT_SUPPORTED` in a process without a driver, and whatever the device says.
    ///
    /// # Safety
    /// Until the future is ready or has been dropped, both sides stay allocated, `to` is touched by nobody else and `from` is written by nobody.
    pub unsafe fn begin(from: MemorySpan, to: MemorySpan) -> Result<Self> {
        // SAFETY: passed on.
        let pending = unsafe { driver_for(from, to)?.copy(from, to) }?;
        Ok(Self { copying: Arc::new(Copying { state: Mutex::new(State::Running(pending)) }) })
    }

    /// Another way to wait for it.
    pub fn handle(&self) -> CopyHandle {
        CopyHandle { copying: self.copying.clone() }
    }
}

impl CopyHandle {
    /// Blocks until neither side is touched any more. What came of it is the future's.
    pub fn settle(&self) {
        self.copying.settle();
    }

    /// Whether it is over, as far as somebody has looked.
    pub fn is_over(&self) -> bool {
        self.copying.state.try_lock().is_some_and(|state| matches!(*state, State::Over(_)))
    }
}

impl Copying {
    fn settle(&self) {
        let mut state = self.state.lock();
        let lost = || State::Over(Err(Error::internal("a copy that was not waited for")));
        if let State::Running(_) = &*state
            && let State::Running(pending) = std::mem::replace(&mut *state, lost())
        {
            *state = State::Over(pending.wait());
        }
    }
}

impl Future for DeviceCopy {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        // Somebody else waits for it on a thread of his own; this one does not.
        let Some(mut state) = self.copying.state.try_lock() else {
            TICKER.wake_soon(cx.waker());
            return Poll::Pending;
        };
        if let State::Running(pending) = &mut *state {
            match pending.poll() {
                None => {
                    TICKER.wake_soon(cx.waker());
                    return Poll::Pending;
                }
                Some(result) => *state = State::Over(result),
            }
        }
        Poll::Ready(match &*state {
            State::Over(Err(error)) => Err(of_a_device(error.clone())),
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

/// Wakes whoever waits for something that nobody else tells of.
struct Ticker {
    waiting: Mutex<Waiting>,
    came: Condvar,
}

#[derive(Default)]
struct Waiting {
    soon: Vec<Waker>,
    later: Vec<Waker>,
}

static TICKER: LazyLock<&'static Ticker> = LazyLock::new(|| {
    let ticker: &Ticker = Box::leak(Box::new(Ticker { waiting: Mutex::default(), came: Condvar::new() }));
    let thread = std::thread::Builder::new().name("device-ticks".into());
    if let Err(error) = thread.spawn(|| ticker.run()) {
        tracing::error!(%error, "copies of device memory will not be waited for: no thread");
    }
    ticker
});

impl Ticker {
    fn wake_soon(&self, waker: &Waker) {
        let mut waiting = self.waiting.lock();
        waiting.soon.push(waker.clone());
        // One that is there already has its tick coming.
        if waiting.soon.len() == 1 {
            self.came.notify_one();
        }
    }

    fn wake_later(&self, waker: &Waker) {
        let mut waiting = self.waiting.lock();
        waiting.later.push(waker.clone());
        if waiting.later.len() == 1 {
            self.came.notify_one();
        }
    }

    fn run(&self) {
        let mut since = Duration::ZERO;
        loop {
            let mut waiting = self.waiting.lock();
            if waiting.soon.is_empty() {
                if waiting.later.is_empty() {
                    since = Duration::ZERO;
                    self.came.wait(&mut waiting);
                    continue;
                }
                let late = self.came.wait_for(&mut waiting, SLOW_TICK).timed_out();
                since = if late { SLOW_TICK } else { since };
            } else {
                drop(waiting);
                std::thread::park_timeout(TICK);
                since += TICK;
                waiting = self.waiting.lock();
            }
            let mut woken = std::mem::take(&mut waiting.soon);
            if since >= SLOW_TICK {
                woken.append(&mut waiting.later);
                since = Duration::ZERO;
            }
            drop(waiting);
            woken.into_iter().for_each(Waker::wake);
        }
    }
}

/// Waits for a future, and asks about once a millisecond whether to go on.
pub(crate) async fn unless<F: Future>(work: F, mut stop: impl FnMut() -> Option<Error>) -> Result<F::Output> {
    let mut work = std::pin::pin!(work);
    std::future::poll_fn(|cx| {
        if let Poll::Ready(done) = work.as_mut().poll(cx) {
            return Poll::Ready(Ok(done));
        }
        if let Some(error) = stop() {
            return Poll::Ready(Err(error));
        }
        TICKER.wake_later(cx.waker());
        Poll::Pending
    })
    .await
}

/// Where operations with device memory are seen through: one thread for all of the process, which never waits.
static CARRIER: LazyLock<mpsc::UnboundedSender<BoxFuture<'static, ()>>> = LazyLock::new(|| {
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
        tracing::error!(%error, "nothing can be moved through host memory: no thread");
    }
    sender
});

/// Sees a future through, on a thread of this module's. What it holds is dropped at once when there is none.
pub(crate) fn spawn(work: impl Future<Output = ()> + Send + 'static) {
    // It fails without a thread, and then the shares of completions in it fail with it.
    let _ = CARRIER.unbounded_send(work.boxed());
}

/// What a device says of a copy, as an error of this process: whoever gets it must not take it for one of a peer, or of the way there.
pub(crate) fn of_a_device(error: Error) -> Error {
    Error::new(ErrorCode::InternalError, error.message().to_owned()).with_source(error)
}

/// Whether any region of this process has been on a device.
static IN_USE: AtomicBool = AtomicBool::new(false);

/// Takes note of where a region lies.
pub(crate) fn seen(span: MemorySpan) -> MemorySpan {
    if span.location.is_device() {
        IN_USE.store(true, Ordering::Release);
    }
    span
}

/// Whether any memory of this process that a wire was told of is a device's: until then nobody need look.
pub fn in_use() -> bool {
    IN_USE.load(Ordering::Acquire)
}

/// The error of an operation with a device's memory on a wire that only knows host memory.
pub fn not_host_memory(span: MemorySpan) -> Error {
    let text = format!(
        "{} bytes at {:#x} are memory of {}, which this wire does not reach",
        span.len,
        span.addr(),
        span.location
    );
    Error::new(ErrorCode::InvalidParams, text)
}
