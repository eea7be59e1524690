//! Batches of reads and writes to many targets, whose requests can be watched one by one.

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
use super::request::{Request, Way};
use super::target::Target;
use super::{Engine, Inner};
use crate::handshake::Notification;
use crate::pool::PoolBuf;
use crate::region::{Local, Sink, Slice, SliceMut, Source};
use crate::ticket::{OpState, Results, Watch, is_given_back, watched};
use crate::transport::{Opcode, Transport};

/// Local memory of a request in a [`Batch`], whichever kind it is.
#[derive(Debug)]
#[non_exhaustive]
pub enum Buffer<T: Transport> {
    /// A shared range, to write from.
    Slice(Slice<T>),
    /// An exclusive range.
    SliceMut(SliceMut<T>),
    /// Ordinary bytes, to write from.
    Bytes(Bytes),
    /// Ordinary memory.
    Vec(Vec<u8>),
    /// A buffer of a pool.
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
    /// An empty one.
    pub fn new() -> Self {
        Self { requests: Vec::new(), notify: None }
    }

    /// Reads from an absolute remote address until `into` is full. The request's number, from zero.
    pub fn read<B: Sink<T> + Into<Buffer<T>>>(&mut self, target: &Target<T>, remote: u64, into: B) -> usize {
        self.push(Opcode::Read, target, remote, into.into())
    }

    /// Writes all of `from` to an absolute remote address. The request's number.
    pub fn write<B: Source<T> + Into<Buffer<T>>>(
        &mut self,
        target: &Target<T>,
        remote: u64,
        from: B,
    ) -> usize {
        self.push(Opcode::Write, target, remote, from.into())
    }

    /// What `target` is sent when all requests have succeeded, at once if there are none.
    pub fn notify(&mut self, target: &Target<T>, notification: Notification) {
        self.notify = Some((target.clone(), notification));
    }

    /// How many requests there are.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether there is none.
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

/// How a request stands, with the existing system's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// Not sent yet.
    Waiting = 0,
    /// Under way.
    Pending = 1,
    /// The request makes no sense.
    Invalid = 2,
    /// Given up by the caller.
    Canceled = 3,
    /// All its bytes were moved.
    Completed = 4,
    /// Not over by its deadline.
    Timeout = 5,
    /// Failed.
    Failed = 6,
}

impl Status {
    /// Whether it will not change any more.
    pub fn is_over(self) -> bool {
        !matches!(self, Status::Waiting | Status::Pending)
    }

    fn of(result: &Result<()>) -> Self {
        match result {
            Ok(()) => Status::Completed,
            Err(error) if is_given_back(error) => Status::Canceled,
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

/// How a request or a batch stands, and the bytes it has moved for sure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// How it stands.
    pub status: Status,
    /// Bytes of completed requests.
    pub transferred: u64,
}

impl Progress {
    /// Two things as one: completed when both are, failed as soon as one has not made it.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let under_way = |status| matches!(status, Status::Waiting | Status::Pending);
        let status = match (self.status, other.status) {
            (known, Status::Completed) => known,
            (Status::Completed, other) => other,
            (known, other) if under_way(known) && under_way(other) => Status::Pending,
            (known, other) if under_way(other) => known,
            (Status::Failed, _) => Status::Failed,
            (_, other) => other,
        };
        Self { status, transferred: self.transferred + other.transferred }
    }
}

/// Looks at a submitted batch, while it runs and afterwards. Clones look at the same one.
#[derive(Clone)]
pub struct BatchView {
    shared: Arc<View>,
}

struct View {
    requests: Box<[Seen]>,
    first: Watch,
    /// The requests that were posted again, by their numbers.
    again: OnceLock<(Watch, Vec<usize>)>,
    /// Somebody awaits the batch, so that failed requests may be repeated yet.
    driven: AtomicBool,
    given_up: AtomicBool,
}

impl View {
    /// How a request's last posting stands.
    fn state(&self, index: usize, seen: &Seen) -> Option<OpState> {
        let again = self.again.get().and_then(|(watch, numbers)| {
            let op = numbers.iter().position(|number| *number == index)?;
            watch.state(op)
        });
        again.or_else(|| self.first.state(seen.op))
    }

    fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
        self.first.give_up();
        // With the one in `posted`: at least one of the two sees what the other did.
        fence(Ordering::SeqCst);
        if let Some((again, _)) = self.again.get() {
            again.give_up();
        }
    }
}

impl Repeats for View {
    fn are_wanted(&self) -> bool {
        !self.given_up.load(Ordering::Acquire)
    }

    fn posted(&self, watch: Watch, numbers: Vec<usize>) {
        let (again, _) = self.again.get_or_init(|| (watch, numbers));
        fence(Ordering::SeqCst);
        if self.given_up.load(Ordering::Acquire) {
            again.give_up();
        }
    }
}

struct Seen {
    len: u64,
    /// Which operation of the first posting it was.
    op: usize,
    /// A `Status` once it is over for good.
    over: AtomicU8,
}

impl BatchView {
    /// How many requests it has.
    pub fn len(&self) -> usize {
        self.shared.requests.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How a request stands; `None` when there is no such number.
    pub fn request(&self, index: usize) -> Option<Progress> {
        let seen = self.shared.requests.get(index)?;
        let status = Status::from_number(seen.over.load(Ordering::Acquire)).filter(|s| s.is_over());
        let status = status.unwrap_or_else(|| match self.shared.state(index, seen) {
            Some(OpState::Done) => Status::Completed,
            // They may be repeated, so nobody knows yet.
            Some(OpState::Failed) if !self.is_driven() => Status::Failed,
            Some(OpState::Late) if !self.is_driven() => Status::Timeout,
            Some(OpState::GivenUp) if !self.is_driven() => Status::Canceled,
            _ => Status::Pending,
        });
        let transferred = if status == Status::Completed { seen.len } else { 0 };
        Some(Progress { status, transferred })
    }

    /// How the batch stands: completed when all are, failed as soon as one has not made it.
    pub fn overall(&self) -> Progress {
        let requests = (0..self.len()).filter_map(|index| self.request(index));
        requests.fold(Progress { status: Status::Completed, transferred: 0 }, Progress::and)
    }

    /// Whether every request is over.
    pub fn is_over(&self) -> bool {
        (0..self.len()).filter_map(|index| self.request(index)).all(|request| request.status.is_over())
    }

    /// Gives the batch up: what only waits to be sent is not sent, nothing is repeated, nobody is notified. What is on the wire runs to its
    /// end or its deadline, and the batch until then.
    pub fn give_up(&self) {
        self.shared.give_up();
    }

    fn is_driven(&self) -> bool {
        self.shared.driven.load(Ordering::Acquire)
    }
}

impl fmt::Debug for BatchView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchView").field("requests", &self.len()).field("overall", &self.overall()).finish()
    }
}

/// How a batch ended.
#[derive(Debug)]
pub struct Finished<T: Transport> {
    /// One result per request.
    pub results: Vec<Result<()>>,
    /// The requests' memory, in the same order.
    pub buffers: Vec<Buffer<T>>,
    /// How the notification fared; `None` when there was none to send.
    pub notified: Option<Result<()>>,
}

/// A batch under way: posted already, and a future that repeats what is to be repeated and gives the memory back.
///
/// Dropping it [gives up](BatchView::give_up) the batch. What is on the wire keeps its memory until it is over.
#[must_use = "the outcome of the batch is in it"]
pub struct Running<T: Transport> {
    view: BatchView,
    work: Pin<Box<dyn Future<Output = Finished<T>> + Send>>,
}

impl<T: Transport> Running<T> {
    /// A look at its requests.
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
        let mut seen: Vec<Seen> =
            requests.iter().map(|_| Seen { len: 0, op: 0, over: AtomicU8::new(0) }).collect();
        for (op, request) in requests.iter().enumerate() {
            let len = request.transfer.buffer.local().span.len as u64;
            seen[request.index] = Seen { len, op, over: AtomicU8::new(0) };
        }
        let (done, ticket, first) = watched(requests, seen.len(), deadline);
        let view = BatchView {
            shared: Arc::new(View {
                requests: seen.into(),
                first,
                again: OnceLock::new(),
                driven: AtomicBool::new(true),
                given_up: AtomicBool::new(false),
            }),
        };
        let began = self.inner.clock.now();
        self.inner.post_runs(Way::Own, &ticket.buffer(), done);
        let work = drive(
            self.inner.clone(),
            Undriven(view.clone()),
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
    undriven: Undriven,
    posted: Results<Posted<T>>,
    routes: Routes<T>,
    deadline: Option<Moment>,
    began: Moment,
    notify: Option<(Target<T>, Notification)>,
) -> Finished<T> {
    let (results, requests) = posted.await;
    let view = &*undriven.0.shared;
    let posting = (Way::Own, deadline, began);
    let (results, requests) = engine.settle(posting, results, requests, &routes, view).await;
    for (seen, result) in view.requests.iter().zip(&results) {
        seen.over.store(Status::of(result) as u8, Ordering::Release);
    }
    let notified = match notify {
        Some((target, notification)) if view.are_wanted() && results.iter().all(Result::is_ok) => {
            Some(engine.notify_by(&target, &notification, deadline).await)
        }
        Some(_) => Some(Err(Error::invalid("the batch failed or was given up, so nobody was notified"))),
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
        let late =
            || Error::new(ErrorCode::RpcTimeout, "the deadline passed before the notification was taken");
        tokio::time::timeout(at.since(self.clock.now()), sending).await.unwrap_or_else(|_| Err(late()))
    }
}

/// Says on drop that nobody awaits the batch any more.
struct Undriven(BatchView);

impl Drop for Undriven {
    fn drop(&mut self) {
        let view = &self.0.shared;
        view.driven.store(false, Ordering::Release);
        let mut requests = view.requests.iter().enumerate();
        if requests.any(|(index, seen)| view.state(index, seen) == Some(OpState::Pending)) {
            view.give_up();
        }
    }
}
