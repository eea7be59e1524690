//! Completion of transfers: a transport finishes shares of a [`Completion`], and the caller waits
//! on the [`Ticket`].
//!
//! A batch costs one allocation and one wake-up. The buffer lives in that allocation until the last
//! share is finished. So the drop of a ticket neither cancels the transfer nor frees memory that
//! the transport still uses.

use std::future::Future;
use std::ops::{Deref, Range};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use futures::task::AtomicWaker;
use mooncake_core::clock::{Clock, Moment, SystemClock};
use mooncake_core::{Error, ErrorCode, ErrorKind, Reason, Result, SharedClock};
use parking_lot::Mutex;

/// Creates a ticket for `ops` operations on `buffer`, and the completion to submit with them.
///
/// `deadline` is a moment of the transport's clock; see [`Completion::deadline`].
pub fn ticket<B: Send + 'static>(buffer: B, ops: usize, deadline: Option<Moment>) -> (Completion, Ticket<B>) {
    new_ticket(buffer, ops, deadline, None)
}

/// Creates a ticket, its completion, and a watch on the single operations. The watch can cancel
/// operations. It costs two more allocations.
pub fn watched<B: Send + 'static>(
    buffer: B,
    ops: usize,
    deadline: Option<Moment>,
) -> (Completion, Ticket<B>, Watch) {
    let watch = Watch::new(ops);
    let (completion, ticket) = new_ticket(buffer, ops, deadline, Some(watch.clone()));
    (completion, ticket, watch)
}

fn new_ticket<B: Send + 'static>(
    buffer: B,
    ops: usize,
    deadline: Option<Moment>,
    watch: Option<Watch>,
) -> (Completion, Ticket<B>) {
    let shared =
        Arc::new(Shared { progress: Progress::new(ops, deadline, watch), buffer: Mutex::new(Some(buffer)) });
    let completion = Completion { core: Some(shared.clone() as Arc<dyn Core>), ops: 0..ops };
    (completion, Ticket { shared, tally: None })
}

/// Watch on the single operations of a [`watched`] ticket, during the transfer and afterwards.
/// Clones watch the same ticket.
#[derive(Clone)]
pub struct Watch {
    shared: Arc<WatchState>,
}

struct WatchState {
    /// Unfinished shares of each operation, and the bits below.
    each: Box<[AtomicU32]>,
    cancelled: AtomicBool,
    /// Callbacks for the cancellation.
    callbacks: Mutex<Vec<CancelCallback>>,
}

type CancelCallback = Box<dyn FnOnce() + Send>;

/// Message for an operation that the caller cancelled before it began.
const NOT_STARTED: &str = "cannot finish operation: cancelled by the caller before it began";
/// Message for an operation that the caller cancelled when a part of it was done.
const CANCELLED_MIDWAY: &str = "cannot finish operation: cancelled by the caller when a part was done";

/// Returns whether an operation failed because the caller cancelled it before it began.
pub(crate) fn was_cancelled(error: &Error) -> bool {
    error.reason() == Some(Reason::NotStarted)
}

const FAILED: u32 = 1 << 31;
const TIMED_OUT: u32 = 1 << 30;
const CANCELLED: u32 = 1 << 29;
/// Bit of an operation that has begun at least in part.
const BEGUN: u32 = 1 << 28;
const FLAGS: u32 = FAILED | TIMED_OUT | CANCELLED | BEGUN;

/// State of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpState {
    /// Not finished yet.
    Pending,
    /// Completed.
    Done,
    /// Failed.
    Failed,
    /// Failed with kind `Timeout`.
    TimedOut,
    /// [Cancelled](Watch::cancel) before any part of the operation began. No byte was touched on
    /// either side.
    Cancelled,
}

impl Watch {
    fn new(ops: usize) -> Self {
        let each = (0..ops).map(|_| AtomicU32::new(1)).collect();
        let callbacks = Mutex::default();
        Self { shared: Arc::new(WatchState { each, cancelled: AtomicBool::new(false), callbacks }) }
    }

    /// Returns the state of the operation with this number, or `None` if there is no such
    /// operation.
    pub fn state(&self, op: usize) -> Option<OpState> {
        let word = self.shared.each.get(op)?.load(Ordering::Acquire);
        Some(match word {
            _ if word & !FLAGS != 0 => OpState::Pending,
            _ if word & FAILED == 0 => OpState::Done,
            _ if word & (CANCELLED | BEGUN) == CANCELLED => OpState::Cancelled,
            _ if word & TIMED_OUT != 0 => OpState::TimedOut,
            _ => OpState::Failed,
        })
    }

    /// Cancels the operations that the transport has not begun. The others continue, and keep their
    /// memory until they are finished. Returns at once.
    pub fn cancel(&self) {
        if !self.shared.cancelled.swap(true, Ordering::SeqCst) {
            self.run_callbacks();
        }
    }

    fn run_callbacks(&self) {
        let callbacks = std::mem::take(&mut *self.shared.callbacks.lock());
        callbacks.into_iter().for_each(|callback| callback());
    }

    fn is_cancelled(&self) -> bool {
        self.shared.cancelled.load(Ordering::SeqCst)
    }

    fn add_share(&self, ops: Range<usize>) {
        for word in &self.shared.each[ops] {
            word.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn finish_share(&self, ops: Range<usize>, result: &Result<()>, cancelled: bool) {
        let bits = match result {
            Ok(()) => BEGUN,
            Err(_) if cancelled => FAILED | CANCELLED,
            Err(error) if error.kind() == ErrorKind::Timeout => FAILED | TIMED_OUT | BEGUN,
            Err(_) => FAILED | BEGUN,
        };
        for word in &self.shared.each[ops] {
            // The only share of an operation reports its outcome itself.
            if bits != BEGUN || word.load(Ordering::Relaxed) != 1 {
                word.fetch_or(bits, Ordering::Relaxed);
            }
            word.fetch_sub(1, Ordering::Release);
        }
    }
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").field("each", &self.shared.each).finish_non_exhaustive()
    }
}

struct Shared<B> {
    progress: Progress,
    // Only the holder of the ticket takes this lock; completions never do.
    buffer: Mutex<Option<B>>,
}

struct Progress {
    unfinished: AtomicUsize,
    waker: AtomicWaker,
    failures: Mutex<Vec<(Range<usize>, Error)>>,
    ops: usize,
    deadline: Option<Moment>,
    watch: Option<Watch>,
}

trait Core: Send + Sync {
    fn progress(&self) -> &Progress;

    /// Runs when the last share is finished.
    fn done(&self);

    /// Passes the watch, if the caller may cancel, to `inspect`.
    fn with_watch(&self, inspect: &mut dyn FnMut(&Watch)) {
        if let Some(watch) = &self.progress().watch {
            inspect(watch);
        }
    }
}

impl<B: Send> Core for Shared<B> {
    fn progress(&self) -> &Progress {
        &self.progress
    }

    fn done(&self) {
        self.progress.waker.wake();
    }
}

/// State of an intercepted completion; see [`Completion::intercept`].
struct Intercepted<F> {
    progress: Progress,
    then: Mutex<Option<(F, Completion)>>,
}

impl<F: FnOnce(Vec<Option<Error>>, Completion) + Send> Core for Intercepted<F> {
    fn progress(&self) -> &Progress {
        &self.progress
    }

    fn done(&self) {
        let taken = self.then.lock().take();
        let Some((then, outer)) = taken else { return };
        let failures = std::mem::take(&mut *self.progress.failures.lock());
        if failures.is_empty() {
            return outer.finish(Ok(()));
        }
        let results = spread(&self.progress, failures);
        then(results.into_iter().map(Result::err).collect(), outer);
    }

    fn with_watch(&self, inspect: &mut dyn FnMut(&Watch)) {
        if let Some(core) = self.then.lock().as_ref().and_then(|(_, outer)| outer.core.as_ref()) {
            core.with_watch(inspect);
        }
    }
}

impl Progress {
    fn new(ops: usize, deadline: Option<Moment>, watch: Option<Watch>) -> Self {
        Self {
            unfinished: AtomicUsize::new(1),
            waker: AtomicWaker::new(),
            failures: Mutex::new(Vec::new()),
            ops,
            deadline,
            watch,
        }
    }

    fn is_done(&self) -> bool {
        self.unfinished.load(Ordering::Acquire) == 0
    }
}

/// Share of a submission's completion, for a range of its operations. The ticket is ready when all
/// shares are finished.
///
/// A share dropped without [`finish`](Completion::finish) counts as failed, so a transport that
/// forgets one causes an error and not a hang. The end of the last share wakes the waiter and may
/// drop the buffer with its registrations. So a transport must not hold a lock of its own at that
/// point.
#[must_use = "dropping a share fails its operations"]
pub struct Completion {
    core: Option<Arc<dyn Core>>,
    ops: Range<usize>,
}

impl Completion {
    /// Returns the number of operations of this share.
    pub fn ops(&self) -> usize {
        self.ops.len()
    }

    /// Returns the numbers of its operations in the submission.
    pub fn numbers(&self) -> Range<usize> {
        self.ops.clone()
    }

    /// Returns the deadline on the transport's clock. The transport finishes the share with an
    /// error of kind `Timeout` by then, and begins nothing afterwards.
    pub fn deadline(&self) -> Option<Moment> {
        self.core.as_ref().and_then(|core| core.progress().deadline)
    }

    /// Returns whether the caller has [cancelled](Watch::cancel) an operation of this share. The
    /// transport then begins nothing more for it.
    pub fn is_cancelled(&self) -> bool {
        let mut cancelled = false;
        if let Some(core) = &self.core {
            core.with_watch(&mut |watch| cancelled = watch.is_cancelled());
        }
        cancelled
    }

    /// Registers a callback for the cancellation by the caller, if the caller can cancel. A
    /// transport that queues operations searches its queue in the callback, and
    /// [returns](Self::finish_cancelled) the operations that it has not begun. The transport must
    /// hold no lock of its own here, because the callback may run at once.
    pub fn on_cancel<F: FnOnce() + Send + 'static>(&self, callback: impl FnOnce() -> F) {
        let Some(watch) = self.watch() else { return };
        watch.shared.callbacks.lock().push(Box::new(callback()));
        // The callback misses a cancellation that happened before it was registered. No lock of a
        // completion is held here, because the callback may inspect this one.
        if watch.is_cancelled() {
            watch.run_callbacks();
        }
    }

    /// Returns the watch through which the caller may cancel, if there is one.
    fn watch(&self) -> Option<Watch> {
        let mut found = None;
        if let Some(core) = &self.core {
            core.with_watch(&mut |watch| found = Some(watch.clone()));
        }
        found
    }

    /// Reports the outcome of all operations of this share. An error counts for each of them.
    pub fn finish(mut self, result: Result<()>) {
        self.end(result, false);
    }

    /// Reports that the operations were cancelled before they began.
    pub fn finish_cancelled(mut self) {
        let error = Error::new(ErrorCode::TransferFail, NOT_STARTED).with_reason(Reason::NotStarted);
        self.end(Err(error), true);
    }

    /// Splits the share in two: the first `n` operations and the rest.
    ///
    /// # Panics
    /// Panics if the share has fewer than `n` operations.
    pub fn split_at(mut self, n: usize) -> (Completion, Completion) {
        assert!(n <= self.ops.len(), "split at {n} of {} operations", self.ops.len());
        let mut first = self.clone_share();
        first.ops.end = self.ops.start + n;
        self.ops.start = first.ops.end;
        (first, self)
    }

    /// Creates another share of the same operations, for a transport that moves one operation in
    /// pieces. Both shares must be finished.
    pub fn share(&mut self) -> Completion {
        if let Some(watch) = self.core.as_ref().and_then(|core| core.progress().watch.as_ref()) {
            watch.add_share(self.ops.clone());
        }
        self.clone_share()
    }

    fn clone_share(&self) -> Completion {
        let core = self.core.clone();
        if let Some(core) = &core {
            // Relaxed: this share is unfinished, so the count cannot reach zero meanwhile.
            core.progress().unfinished.fetch_add(1, Ordering::Relaxed);
        }
        Completion { core, ops: self.ops.clone() }
    }

    /// Creates a completion of the same operations and deadline, to submit instead of this one.
    /// `then` runs when all its shares are finished and some have failed. It receives the failures
    /// by operation and this completion, to try another way. If no share failed, this completion is
    /// finished too.
    ///
    /// `then` runs on the thread that finishes the last share, so it must not wait.
    pub fn intercept(self, then: impl FnOnce(Vec<Option<Error>>, Completion) + Send + 'static) -> Completion {
        let (ops, deadline) = (self.ops(), self.deadline());
        // The watch records whether a cancelled operation had begun.
        let watch = self.watch().map(|_| Watch::new(ops));
        let core = Arc::new(Intercepted {
            progress: Progress::new(ops, deadline, watch),
            then: Mutex::new(Some((then, self))),
        });
        Completion { core: Some(core), ops: 0..ops }
    }

    /// Splits the share into one share per operation, in order. Shares that the caller does not
    /// take from the iterator count as failed.
    pub fn each(self) -> Each {
        if self.ops.is_empty() {
            self.finish(Ok(()));
            return Each { rest: None };
        }
        Each { rest: Some(self) }
    }

    fn end(&mut self, result: Result<()>, cancelled: bool) {
        let Some(core) = self.core.take() else { return };
        let progress = core.progress();
        if let Some(watch) = &progress.watch {
            watch.finish_share(self.ops.clone(), &result, cancelled);
        }
        if let Err(error) = result {
            progress.failures.lock().push((self.ops.clone(), error));
        }
        if progress.unfinished.fetch_sub(1, Ordering::AcqRel) == 1 {
            core.done();
        }
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        if self.core.is_some() {
            let error = Error::new(ErrorCode::TransferFail, "the transport dropped the transfer");
            self.end(Err(error), false);
        }
    }
}

impl std::fmt::Debug for Completion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Completion").field("ops", &self.ops).field("deadline", &self.deadline()).finish()
    }
}

/// Shares of a completion, one per operation.
#[derive(Debug)]
pub struct Each {
    rest: Option<Completion>,
}

impl Iterator for Each {
    type Item = Completion;

    fn next(&mut self) -> Option<Completion> {
        let rest = self.rest.take()?;
        if rest.ops() == 1 {
            return Some(rest);
        }
        let (first, rest) = rest.split_at(1);
        self.rest = Some(rest);
        Some(first)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let n = self.rest.as_ref().map_or(0, Completion::ops);
        (n, Some(n))
    }
}

impl ExactSizeIterator for Each {}

/// Outcome of a submission: ready when every operation is finished. The ticket returns the buffer
/// whatever the outcome.
///
/// As a future it yields the first failure, a timeout before any other. [`Ticket::results`] yields
/// one result per operation, and [`Ticket::wait`] needs no runtime. The drop of a ticket cancels
/// nothing and frees nothing early: the transport's shares keep the buffer.
#[must_use = "the outcome of the transfer is in it"]
pub struct Ticket<B> {
    shared: Arc<Shared<B>>,
    tally: Option<Tally<B>>,
}

impl<B: Send + 'static> Ticket<B> {
    /// Creates a ticket that is ready at once.
    pub fn ready(buffer: B, result: Result<()>) -> Self {
        let (done, ticket) = ticket(buffer, 1, None);
        done.finish(result);
        ticket
    }

    /// Adds a tally, which counts the outcome when it is taken.
    pub(crate) fn tallied(mut self, tally: Tally<B>) -> Self {
        self.tally = Some(tally);
        self
    }

    /// Returns whether every operation is finished.
    pub fn is_done(&self) -> bool {
        self.shared.progress.is_done()
    }

    /// Returns the buffer, to find the address of its memory. The contents belong to the transport
    /// until the ticket is ready.
    pub(crate) fn buffer(&self) -> impl Deref<Target = B> {
        parking_lot::MutexGuard::map(self.shared.buffer.lock(), |b| {
            b.as_mut().expect("polled after it was ready")
        })
    }

    /// Parks the thread until the ticket is ready. Needs no runtime. Do not call it on a thread
    /// that must not block.
    pub fn wait(mut self) -> (Result<()>, B) {
        block_on(|cx| Pin::new(&mut self).poll(cx))
    }

    /// Parks the thread for at most `span`. Returns the ticket if it is not ready by then.
    pub fn wait_timeout(mut self, span: Duration) -> std::result::Result<(Result<()>, B), Self> {
        match block_on_for(Some(span), |cx| Pin::new(&mut self).poll(cx)) {
            Some(outcome) => Ok(outcome),
            None => Err(self),
        }
    }

    /// Converts the ticket into one that yields one result per operation.
    pub fn results(self) -> Results<B> {
        Results { shared: self.shared, tally: self.tally }
    }
}

impl<B: Send + 'static> Future for Ticket<B> {
    type Output = (Result<()>, B);

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.shared.poll(cx, self.tally.as_ref()).map(|(failures, buffer)| {
            // A timeout comes first, because its bytes may still arrive. The lowest operation comes
            // next, so that the same failures give the same error in any order.
            let first = failures
                .into_iter()
                .min_by_key(|(ops, error)| (error.kind() != ErrorKind::Timeout, ops.start));
            (first.map_or(Ok(()), |(_, error)| Err(error)), buffer)
        })
    }
}

impl<B> std::fmt::Debug for Ticket<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ticket").field("done", &self.shared.progress.is_done()).finish()
    }
}

/// [`Ticket`] that yields one result per operation, in order.
#[must_use = "the outcome of the transfer is in it"]
pub struct Results<B> {
    shared: Arc<Shared<B>>,
    tally: Option<Tally<B>>,
}

impl<B: Send + 'static> Results<B> {
    /// Parks the thread until the ticket is ready.
    pub fn wait(mut self) -> (Vec<Result<()>>, B) {
        block_on(|cx| Pin::new(&mut self).poll(cx))
    }
}

impl<B: Send + 'static> Future for Results<B> {
    type Output = (Vec<Result<()>>, B);

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let outcome = self.shared.poll(cx, self.tally.as_ref());
        outcome.map(|(failures, buffer)| (spread(&self.shared.progress, failures), buffer))
    }
}

/// Converts failures into one result per operation.
fn spread(progress: &Progress, failures: Failures) -> Vec<Result<()>> {
    let mut results: Vec<Result<()>> = (0..progress.ops).map(|_| Ok(())).collect();
    for (ops, error) in failures {
        // The first failure of an operation counts, but a timeout comes before any other, because
        // its bytes may still arrive.
        let is_timeout = error.kind() == ErrorKind::Timeout;
        let outranked = |r: &&mut Result<()>| match r {
            Ok(()) => true,
            Err(known) => is_timeout && known.kind() != ErrorKind::Timeout,
        };
        for result in results[ops].iter_mut().filter(outranked) {
            *result = Err(error.clone());
        }
    }
    if let Some(watch) = &progress.watch {
        for (op, result) in results.iter_mut().enumerate() {
            let has_begun = watch.state(op) != Some(OpState::Cancelled);
            if has_begun && result.as_ref().is_err_and(was_cancelled) {
                *result = Err(Error::new(ErrorCode::TransferFail, CANCELLED_MIDWAY));
            }
        }
    }
    results
}

impl<B> std::fmt::Debug for Results<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Results").field("done", &self.shared.progress.is_done()).finish()
    }
}

/// Failed operations with their errors.
pub(crate) type Failures = Vec<(Range<usize>, Error)>;

/// Counter of the outcomes of a ticket. It owns no memory, so a ticket without one costs nothing.
pub(crate) struct Tally<B> {
    pub(crate) clock: SharedClock,
    pub(crate) began: Moment,
    /// Function that receives the buffer, the failures, and the elapsed time.
    pub(crate) count: fn(&B, &Failures, Duration),
}

impl<B> Shared<B> {
    fn poll(&self, cx: &mut Context<'_>, tally: Option<&Tally<B>>) -> Poll<(Failures, B)> {
        if !self.progress.is_done() {
            self.progress.waker.register(cx.waker());
            // Checked again, because the last share may have been finished before the waker was
            // registered.
            if !self.progress.is_done() {
                return Poll::Pending;
            }
        }
        let buffer = self.buffer.lock().take().expect("a ticket is not polled after it was ready");
        let failures = std::mem::take(&mut *self.progress.failures.lock());
        if let Some(tally) = tally {
            (tally.count)(&buffer, &failures, tally.clock.now().since(tally.began));
        }
        Poll::Ready((failures, buffer))
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.unpark();
    }
}

thread_local! {
    // One waker per thread, so that waiting allocates nothing.
    static UNPARK: Waker = Arc::new(Unpark(std::thread::current())).into();
}

fn block_on<R>(mut poll: impl FnMut(&mut Context<'_>) -> Poll<R>) -> R {
    UNPARK.with(|waker| {
        let mut cx = Context::from_waker(waker);
        loop {
            if let Poll::Ready(value) = poll(&mut cx) {
                return value;
            }
            std::thread::park();
        }
    })
}

/// Polls on this thread until the future is ready, for at most `span`.
pub(crate) fn block_on_for<R>(
    span: Option<Duration>,
    mut poll: impl FnMut(&mut Context<'_>) -> Poll<R>,
) -> Option<R> {
    let Some(span) = span else { return Some(block_on(poll)) };
    let clock = SystemClock::new();
    let until = clock.now().after(span);
    UNPARK.with(|waker| {
        let mut cx = Context::from_waker(waker);
        loop {
            if let Poll::Ready(value) = poll(&mut cx) {
                return Some(value);
            }
            let left = until.since(clock.now());
            if left.is_zero() {
                return None;
            }
            std::thread::park_timeout(left);
        }
    })
}

#[cfg(test)]
mod tests;
