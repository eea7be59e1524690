//! Batches of reads and writes to many targets, with a status per request.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use bytes::Bytes;
use mooncake_core::clock::Moment;
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};

use super::batch::{Repeats, group, routes};
use super::request::{Direction, Request};
use super::target::Target;
use super::{Engine, Inner};
use crate::handshake::Notification;
use crate::pool::PoolBuf;
use crate::region::{Local, Sink, Slice, SliceMut, Source};
use crate::ticket::{OpState, Results, Watch, was_cancelled, watched};
use crate::transport::{Opcode, Transport};

/// Local memory of a request in a [`Batch`], of any kind.
#[derive(Debug)]
#[non_exhaustive]
pub enum Buffer<T: Transport> {
    /// Shared range, to write from.
    Slice(Slice<T>),
    /// Exclusive range.
    SliceMut(SliceMut<T>),
    /// Ordinary bytes, to write from.
    Bytes(Bytes),
    /// Ordinary memory.
    Vec(Vec<u8>),
    /// Buffer of a pool.
    Pool(PoolBuf<T>),
}

macro_rules! buffer_from {
    ($($kind:ident: $of:ty),* $(,)?) => { $(
        impl<T: Transport> From<$of> for Buffer<T> {
            fn from(buffer: $of) -> Self {
                Buffer::$kind(buffer)
            }
        }

        impl<T: Transport> TryFrom<Buffer<T>> for $of {
            type Error = Buffer<T>;

            fn try_from(buffer: Buffer<T>) -> std::result::Result<Self, Buffer<T>> {
                match buffer {
                    Buffer::$kind(buffer) => Ok(buffer),
                    other => Err(other),
                }
            }
        }
    )* };
}

buffer_from!(Slice: Slice<T>, SliceMut: SliceMut<T>, Bytes: Bytes, Vec: Vec<u8>, Pool: PoolBuf<T>);

// SAFETY: each kind keeps the promise.
unsafe impl<T: Transport> Source<T> for Buffer<T> {
    fn local(&self) -> Local<'_, T::Registration> {
        match self {
            Buffer::Slice(buffer) => buffer.local(),
            Buffer::SliceMut(buffer) => buffer.local(),
            Buffer::Bytes(buffer) => Source::<T>::local(buffer),
            Buffer::Vec(buffer) => Source::<T>::local(buffer),
            Buffer::Pool(buffer) => buffer.local(),
        }
    }
}

/// Reads and writes to any number of targets, to be submitted together.
#[derive(Debug)]
pub struct Batch<T: Transport> {
    requests: Vec<Request<T, Buffer<T>>>,
    notify: Option<(Target<T>, Notification)>,
}

impl<T: Transport> Batch<T> {
    /// Creates an empty batch.
    pub fn new() -> Self {
        Self { requests: Vec::new(), notify: None }
    }

    /// Adds a read from an absolute remote address until `into` is full. Returns the number of the
    /// request, from zero.
    pub fn read<B: Sink<T> + Into<Buffer<T>>>(&mut self, target: &Target<T>, remote: u64, into: B) -> usize {
        self.push(Opcode::Read, target, remote, into.into())
    }

    /// Adds a write of all of `from` to an absolute remote address. Returns the number of the
    /// request.
    pub fn write<B: Source<T> + Into<Buffer<T>>>(
        &mut self,
        target: &Target<T>,
        remote: u64,
        from: B,
    ) -> usize {
        self.push(Opcode::Write, target, remote, from.into())
    }

    /// Sets the notification for `target` when all requests have succeeded. A batch without
    /// requests sends it at once.
    pub fn notify(&mut self, target: &Target<T>, notification: Notification) {
        self.notify = Some((target.clone(), notification));
    }

    /// Returns the number of requests.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Returns whether the batch is empty.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    fn push(&mut self, opcode: Opcode, target: &Target<T>, remote: u64, buffer: Buffer<T>) -> usize {
        let mut request = Request::new(target, remote, buffer);
        request.opcode = opcode;
        self.requests.push(request);
        self.requests.len() - 1
    }
}

impl<T: Transport> Default for Batch<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// Status of a request, with the numbers of Mooncake C++.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// Not sent yet.
    Waiting = 0,
    /// In progress.
    Pending = 1,
    /// Invalid request.
    Invalid = 2,
    /// Cancelled by the caller.
    Canceled = 3,
    /// Completed: all bytes were moved.
    Completed = 4,
    /// Not finished by the deadline.
    Timeout = 5,
    /// Failed.
    Failed = 6,
}

impl Status {
    /// Returns whether the status is final.
    pub fn is_finished(self) -> bool {
        !matches!(self, Status::Waiting | Status::Pending)
    }

    fn of(result: &Result<()>) -> Self {
        match result {
            Ok(()) => Status::Completed,
            Err(error) if was_cancelled(error) => Status::Canceled,
            Err(error) => match error.kind() {
                ErrorKind::Timeout => Status::Timeout,
                _ => Status::Failed,
            },
        }
    }

    fn from_number(number: u8) -> Option<Self> {
        use Status::{Canceled, Completed, Failed, Invalid, Pending, Timeout, Waiting};
        [Waiting, Pending, Invalid, Canceled, Completed, Timeout, Failed]
            .into_iter()
            .find(|status| *status as u8 == number)
    }
}

/// Status of a request or a batch, and the bytes that are known to be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Present status.
    pub status: Status,
    /// Bytes of completed requests.
    pub transferred: u64,
}

impl Progress {
    /// Combines two: completed when both are, failed as soon as one has failed.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let is_unfinished = |status| matches!(status, Status::Waiting | Status::Pending);
        let status = match (self.status, other.status) {
            (status, Status::Completed) => status,
            (Status::Completed, other) => other,
            (status, other) if is_unfinished(status) && is_unfinished(other) => Status::Pending,
            (status, other) if is_unfinished(other) => status,
            (Status::Failed, _) => Status::Failed,
            (_, other) => other,
        };
        Self { status, transferred: self.transferred + other.transferred }
    }
}

/// View of a submitted batch, during the transfer and afterwards. Clones are views of the same
/// batch.
#[derive(Clone)]
pub struct BatchView {
    shared: Arc<View>,
}

struct View {
    requests: Box<[RequestState]>,
    first: Watch,
    /// Requests that were posted again: their numbers, sorted, each with that of its operation.
    repeated: OnceLock<(Watch, Vec<(usize, usize)>)>,
    /// True if the batch is awaited, so failed requests may still be repeated.
    awaited: AtomicBool,
    cancelled: AtomicBool,
}

impl View {
    /// Returns the state of a request's last posting.
    fn state(&self, index: usize, request_state: &RequestState) -> Option<OpState> {
        let repeated = self.repeated.get().and_then(|(watch, numbers)| {
            let at = numbers.binary_search_by_key(&index, |(number, _)| *number).ok()?;
            watch.state(numbers[at].1)
        });
        repeated.or_else(|| self.first.state(request_state.op))
    }

    fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        self.first.cancel();
        // Pairs with the fence in `posted`: at least one of the two sees the other's change.
        fence(Ordering::SeqCst);
        if let Some((repeated, _)) = self.repeated.get() {
            repeated.cancel();
        }
    }
}

impl Repeats for View {
    fn may_repeat(&self) -> bool {
        !self.cancelled.load(Ordering::Acquire)
    }

    fn posted(&self, watch: Watch, numbers: Vec<usize>) {
        let mut numbers: Vec<_> = numbers.into_iter().enumerate().map(|(op, number)| (number, op)).collect();
        numbers.sort_unstable();
        let (repeated, _) = self.repeated.get_or_init(|| (watch, numbers));
        fence(Ordering::SeqCst);
        if self.cancelled.load(Ordering::Acquire) {
            repeated.cancel();
        }
    }
}

struct RequestState {
    len: u64,
    /// Number of the operation in the first posting.
    op: usize,
    /// Final `Status`, once there is one.
    final_status: AtomicU8,
}

impl BatchView {
    /// Returns the number of requests.
    pub fn len(&self) -> usize {
        self.shared.requests.len()
    }

    /// Returns whether the batch is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the status of a request, or `None` if there is no such request.
    pub fn request(&self, index: usize) -> Option<Progress> {
        let request_state = self.shared.requests.get(index)?;
        let status = Status::from_number(request_state.final_status.load(Ordering::Acquire))
            .filter(|s| s.is_finished());
        let status = status.unwrap_or_else(|| match self.shared.state(index, request_state) {
            Some(OpState::Done) => Status::Completed,
            // A failed request may be repeated, so its status is not final while the batch is
            // awaited.
            Some(OpState::Failed) if !self.is_awaited() => Status::Failed,
            Some(OpState::TimedOut) if !self.is_awaited() => Status::Timeout,
            Some(OpState::Cancelled) if !self.is_awaited() => Status::Canceled,
            _ => Status::Pending,
        });
        let transferred = if status == Status::Completed { request_state.len } else { 0 };
        Some(Progress { status, transferred })
    }

    /// Returns the status of the batch: completed when all requests are, failed as soon as one has
    /// failed.
    pub fn overall(&self) -> Progress {
        let requests = (0..self.len()).filter_map(|index| self.request(index));
        requests.fold(Progress { status: Status::Completed, transferred: 0 }, Progress::and)
    }

    /// Returns whether every request is finished.
    pub fn is_finished(&self) -> bool {
        (0..self.len()).filter_map(|index| self.request(index)).all(|request| request.status.is_finished())
    }

    /// Cancels the batch. Requests that are not sent yet are never sent, failed ones are not
    /// repeated, and no notification is sent. Operations in progress continue to their end or their
    /// deadline.
    pub fn cancel(&self) {
        self.shared.cancel();
    }

    fn is_awaited(&self) -> bool {
        self.shared.awaited.load(Ordering::Acquire)
    }
}

impl fmt::Debug for BatchView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchView").field("requests", &self.len()).field("overall", &self.overall()).finish()
    }
}

/// Outcome of a batch.
#[derive(Debug)]
pub struct Finished<T: Transport> {
    /// Result of each request.
    pub results: Vec<Result<()>>,
    /// Memory of the requests, in the same order.
    pub buffers: Vec<Buffer<T>>,
    /// Outcome of the notification, or `None` if the batch had none.
    pub notified: Option<Result<()>>,
}

/// Posted batch: a future that repeats failed requests where that is safe, and returns the memory.
///
/// The drop [cancels](BatchView::cancel) the batch. Operations in progress keep their memory until
/// they are finished.
#[must_use = "the outcome of the batch is in it"]
pub struct Running<T: Transport> {
    view: BatchView,
    work: Pin<Box<dyn Future<Output = Finished<T>> + Send>>,
}

impl<T: Transport> Running<T> {
    /// Returns a view of its requests.
    pub fn view(&self) -> BatchView {
        self.view.clone()
    }
}

impl<T: Transport> Future for Running<T> {
    type Output = Finished<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Finished<T>> {
        self.work.as_mut().poll(cx)
    }
}

impl<T: Transport> fmt::Debug for Running<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("view", &self.view).finish_non_exhaustive()
    }
}

impl<T: Transport> Engine<T> {
    /// Posts a batch and returns without waiting. No request begins after the deadline.
    pub fn submit(&self, batch: Batch<T>, deadline: Option<Moment>) -> Running<T> {
        let Batch { mut requests, notify } = batch;
        group(&mut requests);
        let routes = routes(&requests);
        let mut request_states: Vec<RequestState> =
            requests.iter().map(|_| RequestState { len: 0, op: 0, final_status: AtomicU8::new(0) }).collect();
        for (op, request) in requests.iter().enumerate() {
            let len = request.transfer.buffer.local().span.len as u64;
            request_states[request.index] = RequestState { len, op, final_status: AtomicU8::new(0) };
        }
        let (done, ticket, first) = watched(requests, request_states.len(), deadline);
        let view = BatchView {
            shared: Arc::new(View {
                requests: request_states.into(),
                first,
                repeated: OnceLock::new(),
                awaited: AtomicBool::new(true),
                cancelled: AtomicBool::new(false),
            }),
        };
        let began = self.inner.clock.now();
        self.inner.post_runs(Direction::PerRequest, &ticket.buffer(), done);
        let work = drive(
            self.inner.clone(),
            StopAwaitingOnDrop(view.clone()),
            ticket.results(),
            routes,
            deadline,
            began,
            notify,
        );
        Running { work: Box::pin(work), view }
    }
}

type Posted<T> = Vec<Request<T, Buffer<T>>>;
type Routes<T> = Vec<(usize, Arc<super::target::Route<T>>)>;

async fn drive<T: Transport>(
    engine: Arc<Inner<T>>,
    stop_awaiting: StopAwaitingOnDrop,
    posted: Results<Posted<T>>,
    routes: Routes<T>,
    deadline: Option<Moment>,
    began: Moment,
    notify: Option<(Target<T>, Notification)>,
) -> Finished<T> {
    let (results, requests) = posted.await;
    let view = &*stop_awaiting.0.shared;
    let posting = (Direction::PerRequest, deadline, began);
    let (results, requests) = engine.finish_batch(posting, results, requests, &routes, view).await;
    for (request_state, result) in view.requests.iter().zip(&results) {
        request_state.final_status.store(Status::of(result) as u8, Ordering::Release);
    }
    let notified = match notify {
        Some((target, notification)) if view.may_repeat() && results.iter().all(Result::is_ok) => {
            Some(engine.notify_by(&target, &notification, deadline).await)
        }
        Some(_) => Some(Err(Error::invalid("cannot send notification: the batch failed or was cancelled"))),
        None => None,
    };
    let buffers = requests.into_iter().map(|request| request.transfer.buffer).collect();
    Finished { results, buffers, notified }
}

impl<T: Transport> Inner<T> {
    async fn notify_by(
        &self,
        target: &Target<T>,
        notification: &Notification,
        deadline: Option<Moment>,
    ) -> Result<()> {
        let sending = self.notify(target.name(), notification);
        let (Some(at), Some(_)) = (deadline, &self.runtime) else { return sending.await };
        let deadline_error =
            || Error::new(ErrorCode::RpcTimeout, "cannot send notification: its deadline has passed");
        tokio::time::timeout(at.since(self.clock.now()), sending)
            .await
            .unwrap_or_else(|_| Err(deadline_error()))
    }
}

/// Guard that records on drop that the batch is not awaited any more.
struct StopAwaitingOnDrop(BatchView);

impl Drop for StopAwaitingOnDrop {
    fn drop(&mut self) {
        let view = &self.0.shared;
        view.awaited.store(false, Ordering::Release);
        let mut requests = view.requests.iter().enumerate();
        if requests.any(|(index, request_state)| view.state(index, request_state) == Some(OpState::Pending)) {
            view.cancel();
        }
    }
}
