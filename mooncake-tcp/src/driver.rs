//! Task of a lane. It connects, sends what submitters could not send, receives responses, checks
//! deadlines, and decides what to do with the queue when a connection breaks.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::{Error, ErrorCode};
use mooncake_transport::net;
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::time::Sleep;

use crate::frame::{ADDRESS_REFUSED, Direction, STATUS_LEN, Status};
use crate::hello;
use crate::lane::{Fault, Flushed, Lane, LaneState, NEVER};
use crate::piece::Piece;
use crate::pool::Pool;
use crate::socket::{self, Buffers, IoList};

/// Number of responses gathered into one receive.
const GATHER: usize = 16;
/// Number of connections that a request may lose before the first byte of its response arrives.
const ATTEMPTS: u8 = 2;
/// Pause of a lane whose connection attempt failed, while other lanes are connected.
const REST: Duration = Duration::from_secs(1);

type Dial = Pin<Box<dyn Future<Output = io::Result<TcpStream>> + Send>>;

pub(crate) struct Driver {
    pool: Arc<Pool>,
    index: usize,
    /// Connection attempt in progress, and when it began.
    dial: Option<(Moment, Dial)>,
    /// Connection attempt beside the current connection, and the moment since which that one makes
    /// no progress.
    probe: Option<(Moment, Dial)>,
    /// Connection established beside the current one, to replace it.
    spare: Option<TcpStream>,
    /// Consecutive connections that were replaced without a response.
    overtaken: u32,
    /// Start of the current streak of replacements.
    still_since: Option<Moment>,
    /// Earliest time of the next connection attempt beside the current one.
    probe_not_before: Moment,
    timer: Option<Pin<Box<Sleep>>>,
    /// Parts of the responses in the last receive that are not payload, in the order of the pieces.
    asides: [[u8; STATUS_LEN]; GATHER + 1],
    /// Number of pieces covered by the last receive.
    listed: usize,
    /// Number of those pieces that have been removed from the queue.
    completed: usize,
    /// Number of bytes of that receive that are not processed yet, because a sender was still
    /// active.
    unprocessed: usize,
    /// Byte beyond the expected ones. It belongs to a piece sent meanwhile, or is garbage.
    surplus: u8,
    /// Number of responses received over the current connection.
    answers: u64,
    /// Pieces removed from the queue, to be completed once the lock is released.
    answered: Vec<Piece>,
    over: bool,
}

enum Turn {
    Again,
    /// More work is left, after other tasks have had their turn.
    Yield,
    Wait,
    Over,
}

impl Future for Driver {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            match self.turn(cx) {
                Turn::Again => {}
                Turn::Wait => return Poll::Pending,
                Turn::Yield => {
                    // Wakes the task after the runtime has looked at its sockets. A plain wake
                    // could delay that for long: a peer that accepts everything would keep its own
                    // response from being seen, and other tasks waiting.
                    let _ = std::pin::pin!(tokio::task::yield_now()).poll(cx);
                    return Poll::Pending;
                }
                Turn::Over => return Poll::Ready(()),
            }
        }
    }
}

impl Driver {
    /// Spawns the task of a lane.
    pub(crate) fn spawn(pool: Arc<Pool>, index: usize, runtime: &Handle) {
        runtime.spawn(Self::new(pool, index));
    }

    fn new(pool: Arc<Pool>, index: usize) -> Self {
        Self {
            pool,
            index,
            dial: None,
            probe: None,
            spare: None,
            overtaken: 0,
            still_since: None,
            probe_not_before: Moment(0),
            timer: None,
            asides: [[0; STATUS_LEN]; GATHER + 1],
            listed: 0,
            completed: 0,
            unprocessed: 0,
            surplus: 0,
            answers: 0,
            answered: Vec::new(),
            over: false,
        }
    }

    fn turn(&mut self, cx: &mut Context<'_>) -> Turn {
        let pool = self.pool.clone();
        let lane = pool.lane(self.index);
        let mut state = lane.lock();
        if !state.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            state.waker = Some(cx.waker().clone());
        }
        if state.closed || state.fault.is_some() {
            if state.sending {
                state.awaited = true;
                return Turn::Wait;
            }
            if state.closed {
                drop(state);
                self.end("the transport is closed");
                return Turn::Over;
            }
            self.close_faulty(lane, state);
            return Turn::Again;
        }
        let stream = state.stream.clone();
        let now = pool.clock.now();
        let given_up = Self::sweep(lane, &mut state);
        let late = self.watch(lane, &mut state, now, cx);
        self.check_probe(&mut state, now, cx);
        let again = state.fault.is_some();
        drop(state);
        for piece in given_up {
            piece.done.give_back();
        }
        if let Some(late) = late {
            for piece in late {
                piece.finish(Err(pool.deadline_error()));
            }
            return Turn::Again;
        }
        if again {
            return Turn::Again;
        }
        match stream {
            None => self.dial(lane, cx),
            Some(stream) => self.exchange(lane, &stream, cx),
        }
    }

    fn dial(&mut self, lane: &Lane, cx: &mut Context<'_>) -> Turn {
        let (began, dial) = match &mut self.dial {
            Some(dial) => dial,
            none => {
                let mut state = lane.lock();
                if state.pieces.is_empty() {
                    state.driven = false;
                    // The timer belongs to this driver; the next one sets its own.
                    state.armed = NEVER;
                    self.over = true;
                    return Turn::Over;
                }
                none.insert((self.pool.clock.now(), Box::pin(connect(self.pool.clone()))))
            }
        };
        let Poll::Ready(result) = dial.as_mut().poll(cx) else { return Turn::Wait };
        let began = *began;
        self.dial = None;
        match result {
            Ok(stream) => {
                let mut state = lane.lock();
                state.stream = Some(Arc::new(stream));
                state.moved = self.pool.clock.now();
                lane.set_open(true);
                self.pool.record_connect();
                self.answers = 0;
            }
            Err(error) => {
                tracing::debug!(peer = %self.pool, %error, "cannot connect");
                let mut pieces = Vec::new();
                lane.take_if(&mut lane.lock(), 0, |_| true, &mut pieces);
                self.rest(lane);
                self.pool.record_connect_failure(self.index, began, &error);
                self.pool.reroute_or_fail(self.index, pieces, &error);
            }
        }
        Turn::Again
    }

    fn exchange(&mut self, lane: &Lane, stream: &TcpStream, cx: &mut Context<'_>) -> Turn {
        let flushed = lane.flush(&*self.pool.clock, &self.pool.config);
        let writable = match flushed {
            Flushed::All => false,
            Flushed::More => true,
            Flushed::Blocked => stream.poll_write_ready(cx).is_ready(),
        };
        let mut early = self.unprocessed > 0 || lane.lock().answered_early();
        if early {
            self.assign_received(lane);
            early = self.unprocessed > 0 || lane.lock().answered_early();
        }
        // Later bytes must follow earlier ones, even if the peer only closes the connection.
        let readable = !early && stream.poll_read_ready(cx).is_ready();
        if readable {
            match self.receive(lane, stream) {
                Ok(n) => {
                    self.unprocessed = n;
                    self.assign_received(lane);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    lane.lock().fault.get_or_insert(Fault::Io(error));
                }
            }
        }
        // A fault found by the flush above has already woken this task.
        match flushed {
            _ if readable => Turn::Again,
            Flushed::More => Turn::Yield,
            _ if writable => Turn::Again,
            _ => Turn::Wait,
        }
    }

    /// Performs one receive into the memory of the pieces whose responses are due.
    fn receive(&mut self, lane: &Lane, stream: &TcpStream) -> io::Result<usize> {
        let mut list = IoList::<{ 2 * GATHER + 1 }>::new();
        (self.listed, self.completed) = (0, 0);
        {
            let state = lane.lock();
            let mut skip = state.received;
            for (piece, aside) in state.pieces.iter().take(state.expected().min(GATHER)).zip(&mut self.asides)
            {
                piece.incoming(skip, aside, &mut list);
                skip = 0;
                self.listed += 1;
            }
        }
        // A receive that does not fill its list has emptied the socket, so the list is always
        // longer than what can arrive.
        list.push(&mut self.surplus, 1);
        // SAFETY: the parts belong to this task, or are memory of pieces that only this task
        // removes from the queue.
        let received = unsafe { socket::receive(stream, &mut list) };
        if received.is_ok() {
            lane.lock().moved = self.pool.clock.now();
        }
        received
    }

    /// Assigns the received bytes to the pieces, in order, and completes those whose response is
    /// complete.
    fn assign_received(&mut self, lane: &Lane) {
        let mut state = lane.lock();
        while state.expected() > 0 {
            let Some(piece) = state.pieces.front() else { break };
            let (status_len, answer_len) = (piece.status_len(), piece.answer_len());
            if self.completed == self.listed && self.unprocessed == 1 && state.received == 0 {
                piece.incoming_first(self.surplus, &mut self.asides[self.completed]);
            }
            let before = state.received;
            let part = self.unprocessed.min(answer_len - before);
            self.unprocessed -= part;
            state.received += part;
            if before < status_len && state.received >= status_len {
                state.fault = match Status::decode(self.asides[self.completed]) {
                    Ok(Status::Ok) => None,
                    Ok(Status::Refused(code)) => Some(Fault::Refused(code)),
                    Err(error) => Some(Fault::Garbage(error.to_string())),
                };
            }
            if state.fault.is_some() || state.received < answer_len {
                break;
            }
            if state.next == 0 {
                if state.sending {
                    // A send still uses the memory of the piece.
                    state.awaited = true;
                    break;
                }
                self.unprocessed_is_garbage(&mut state);
                break;
            }
            self.completed += 1;
            self.answered.extend(lane.pop(&mut state));
        }
        if !state.awaited {
            self.unprocessed_is_garbage(&mut state);
        }
        self.answers += self.answered.len() as u64;
        if !self.answered.is_empty() {
            (self.overtaken, self.still_since) = (0, None);
        }
        if self.answers > 1 {
            state.careful = false;
        }
        drop(state);
        if self.unprocessed == 0 {
            // A partly received status frame moves along with its piece.
            if self.completed <= GATHER {
                self.asides.swap(0, self.completed);
            }
            (self.listed, self.completed) = (0, 0);
        }
        for piece in self.answered.drain(..) {
            piece.finish(Ok(()));
        }
    }

    fn unprocessed_is_garbage(&mut self, state: &mut LaneState) {
        if self.unprocessed > 0 && state.fault.is_none() {
            state.fault = Some(Fault::Garbage("received more bytes than requested".into()));
        }
        self.unprocessed = 0;
    }

    /// Removes cancelled pieces of which no byte has been sent.
    fn sweep(lane: &Lane, state: &mut LaneState) -> Vec<Piece> {
        let mut given_up = Vec::new();
        if state.sweep && state.sending {
            // Pieces must not move now; this task runs again when the sender is done.
            state.awaited = true;
        } else if std::mem::take(&mut state.sweep) {
            let begun = state.begun();
            lane.take_if(state, begun, |piece| piece.done.is_given_up(), &mut given_up);
        }
        given_up
    }

    /// Sets the timer for the next deadline. When a deadline has passed, removes the unsent pieces
    /// that are late, and marks the connection as faulty if a sent piece is late.
    fn watch(
        &mut self,
        lane: &Lane,
        state: &mut LaneState,
        now: Moment,
        cx: &mut Context<'_>,
    ) -> Option<Vec<Piece>> {
        if !state.pieces.is_empty() {
            let mut due = state.earliest.min(self.stalled_at(state));
            if state.stream.is_some() && self.probe.is_none() {
                let soonest = if state.begun() > 0 { now } else { now.after(self.pool.config.probe_after) };
                due = due.min(self.probe_at(state).max(soonest));
            }
            if due < state.armed {
                // A timer may fire up to a millisecond early.
                let span = due.since(now) + Duration::from_millis(1);
                self.timer = Some(Box::pin(tokio::time::sleep(span)));
                state.armed = due;
            }
        }
        if self.timer.as_mut()?.as_mut().poll(cx).is_pending() {
            return None;
        }
        self.timer = None;
        state.armed = NEVER;
        if state.sending {
            // Pieces must not move now; this task runs again when the sender is done.
            state.awaited = true;
            return None;
        }
        let begun = state.begun();
        let mut late = Vec::new();
        lane.take_if(state, begun, |piece| piece.deadline <= now, &mut late);
        if state.pieces.iter().take(begun).any(|piece| piece.deadline <= now) {
            state.fault.get_or_insert(Fault::Expired);
        } else if begun > 0 && self.stalled_at(state) <= now {
            state.fault.get_or_insert(Fault::Stalled);
        } else if begun > 0 && self.probe.is_none() && self.probe_at(state) <= now {
            self.probe = Some((state.moved, Box::pin(connect(self.pool.clone()))));
        }
        Some(late)
    }

    /// Returns the time at which a peer that moves no byte is given up, over this connection or
    /// those before it.
    fn stalled_at(&self, state: &LaneState) -> Moment {
        let config = &self.pool.config;
        let alone = state.moved.after(config.answer_timeout);
        self.still_since.map_or(alone, |since| {
            alone.min(since.after(config.answer_timeout).max(state.moved.after(config.probe_after)))
        })
    }

    /// Returns the time of the next connection attempt beside one without progress. The time grows
    /// with each useless attempt.
    fn probe_at(&self, state: &LaneState) -> Moment {
        let patience = self.pool.config.probe_after.saturating_mul(1 << self.overtaken.min(5));
        state.moved.after(patience).max(self.probe_not_before)
    }

    /// Checks whether the connection beside the current one has been established while that one
    /// made no progress.
    fn check_probe(&mut self, state: &mut LaneState, now: Moment, cx: &mut Context<'_>) {
        let Some((since, dial)) = &mut self.probe else { return };
        let Some(stream) = state.stream.as_ref().filter(|_| state.moved == *since && state.begun() > 0)
        else {
            self.probe = None;
            return;
        };
        let Poll::Ready(result) = dial.as_mut().poll(cx) else { return };
        // A peer process that was stopped may already have the bytes in its kernel, and apply them
        // when it resumes: after the repeated request, and after later writes. So a write that has
        // begun is repeated only if the network has lost it.
        let writes = state.pieces.iter().take(state.begun()).any(|piece| piece.direction == Direction::Write);
        let may_move = !writes || socket::is_retransmitting(stream);
        self.probe = None;
        match result {
            Ok(spare) if may_move => {
                self.still_since.get_or_insert(state.moved);
                self.overtaken += 1;
                self.spare = Some(spare);
                state.fault.get_or_insert(Fault::Overtaken);
            }
            _ => {
                self.probe_not_before = now.after(self.pool.config.probe_after);
                // Wakes the task so that it sets the timer.
                cx.waker().wake_by_ref();
            }
        }
    }

    /// Closes a broken connection and sorts its queue into failed pieces and pieces to send again.
    fn close_faulty(&mut self, lane: &Lane, mut state: parking_lot::MutexGuard<'_, LaneState>) {
        let Some(fault) = state.fault.take() else { return };
        let (begun, answering) = (state.begun(), state.received > 0);
        (state.next, state.sent, state.received) = (0, 0, 0);
        (self.listed, self.completed, self.unprocessed) = (0, 0, 0);
        let fresh = self.answers == 0;
        let spare = self.spare.take().filter(|_| matches!(fault, Fault::Overtaken));
        (self.probe, self.answers) = (None, 0);
        lane.set_open(spare.is_some());
        let stream = std::mem::replace(&mut state.stream, spare.map(Arc::new));
        // Pieces to send again may have been cancelled.
        state.sweep = true;
        let mut failed = Vec::new();
        let now = self.pool.clock.now();
        let first_fails = match fault {
            Fault::Refused(_) | Fault::Garbage(_) => true,
            Fault::Io(_) => answering,
            Fault::Expired | Fault::Stalled | Fault::Overtaken => false,
        };
        // The connection broke under the first request. Later requests may be sent again without
        // limit, but one by one: a response can be lost with a connection that is closed over
        // unread requests.
        if matches!(fault, Fault::Io(_) | Fault::Garbage(_)) && begun > 0 {
            state.careful = true;
            if let Some(first) = state.pieces.front_mut() {
                first.attempts += 1;
            }
        }
        let mut first = true;
        lane.take_if(
            &mut state,
            0,
            |piece| {
                let head = std::mem::replace(&mut first, false);
                match fault {
                    Fault::Stalled => true,
                    Fault::Expired => piece.deadline <= now,
                    _ => (head && first_fails && begun > 0) || piece.attempts >= ATTEMPTS,
                }
            },
            &mut failed,
        );
        let mut moved = Vec::new();
        if fresh && begun > 0 && matches!(fault, Fault::Io(_)) && self.pool.another_is_open(self.index) {
            lane.take_if(&mut state, 0, |_| true, &mut moved);
        }
        drop(state);
        if let Some(stream) = stream {
            // Bytes in the buffer of the kernel must not be sent later, when their request has been
            // repeated or has failed.
            socket::abandon(&stream);
        }
        tracing::debug!(peer = %self.pool, ?fault, failed = failed.len(), "data connection closed");
        for piece in failed {
            let error = self.piece_error(&fault, &piece);
            piece.finish(Err(error));
        }
        if !moved.is_empty() {
            self.rest(lane);
            let lost = io::Error::from(io::ErrorKind::ConnectionReset);
            self.pool.reroute_or_fail(self.index, moved, &lost);
        }
    }

    fn rest(&self, lane: &Lane) {
        lane.rest(self.pool.clock.now().after(REST));
    }

    fn piece_error(&self, fault: &Fault, piece: &Piece) -> Error {
        let pool = &self.pool;
        match fault {
            Fault::Refused(ADDRESS_REFUSED) => Error::invalid(format!(
                "{pool} has no registered memory that holds {} bytes at {:#x}",
                piece.len, piece.remote
            )),
            Fault::Refused(code) => {
                Error::new(ErrorCode::TransferFail, format!("{pool} refused a transfer with code {code}"))
            }
            Fault::Garbage(text) => Error::new(ErrorCode::TransferFail, format!("{pool}: {text}")),
            Fault::Io(error) => {
                Error::new(ErrorCode::TransferFail, format!("lost the connection to {pool}: {error}"))
            }
            Fault::Expired | Fault::Overtaken => pool.deadline_error(),
            Fault::Stalled => Error::new(
                ErrorCode::RpcTimeout,
                format!("{pool} has moved no byte for {:?}", pool.config.answer_timeout),
            ),
        }
    }

    /// Fails all remaining pieces and resets the lane.
    fn end(&mut self, why: &'static str) {
        self.over = true;
        let pool = self.pool.clone();
        let lane = pool.lane(self.index);
        let mut state = lane.lock();
        while state.sending {
            // Waits for one nonblocking send on another thread.
            drop(state);
            std::thread::yield_now();
            state = lane.lock();
        }
        let mut left = Vec::new();
        (state.next, state.sent, state.received) = (0, 0, 0);
        lane.take_if(&mut state, 0, |_| true, &mut left);
        let stream = state.stream.take();
        state.fault = None;
        state.waker = None;
        state.armed = NEVER;
        state.driven = false;
        lane.set_open(false);
        drop(state);
        drop(stream);
        for piece in left {
            piece.finish(Err(Error::new(ErrorCode::TransferFail, why)));
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if !self.over {
            self.end("the runtime is shutting down");
        }
    }
}

/// Connects to the process of the pool. Requests may be sent as soon as the function returns.
async fn connect(pool: Arc<Pool>) -> io::Result<TcpStream> {
    let stream = open(&pool).await?;
    let Some(instance) = pool.instance() else { return Ok(stream) };
    let introduced = async {
        match hello::introduce(&stream, instance).await {
            Ok(()) => Ok(stream),
            // A node at its limit closes connections that have not sent a request yet.
            Err(error) if is_closed(&error) => {
                let stream = open(&pool).await?;
                hello::introduce(&stream, instance).await.map(|()| stream)
            }
            Err(error) => Err(error),
        }
    };
    // The kernel accepts connections of a process that is stopped or busy. The hello has the same
    // timeout as any other response.
    tokio::time::timeout(pool.config.answer_timeout, introduced).await?
}

fn is_closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | ConnectionReset | BrokenPipe)
}

async fn open(pool: &Pool) -> io::Result<TcpStream> {
    let config = &pool.config;
    let stream =
        tokio::time::timeout(config.connect_timeout, net::connect(pool.host(), pool.port())).await??;
    socket::tune(&stream, Buffers { send: config.send_buffer, receive: config.receive_buffer })?;
    Ok(stream)
}
