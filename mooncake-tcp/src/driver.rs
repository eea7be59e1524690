//! Task of a connection queue. It connects, sends what submitters could not send, receives
//! responses, checks deadlines, and decides what to do with the queue when a connection breaks.

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

use crate::connection_queue::{ConnectionQueue, Fault, Flushed, NEVER, QueueState};
use crate::frame::{ADDRESS_REFUSED, Direction, STATUS_LEN, Status};
use crate::hello;
use crate::piece::Piece;
use crate::pool::Pool;
use crate::socket::{self, Buffers, IoList};

/// Number of responses gathered into one receive.
const GATHER: usize = 16;
/// Number of connections that a request may lose before the first byte of its response arrives.
const ATTEMPTS: u8 = 2;
/// Pause of a queue whose connection attempt failed, while other queues are connected.
const CONNECT_BACKOFF: Duration = Duration::from_secs(1);

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
    replacement: Option<TcpStream>,
    /// Consecutive connections that were replaced without a response.
    replaced_in_a_row: u32,
    /// Start of the current streak of replacements.
    replacing_since: Option<Moment>,
    /// Earliest time of the next connection attempt beside the current one.
    probe_not_before: Moment,
    timer: Option<Pin<Box<Sleep>>>,
    /// Parts of the responses in the last receive that are not payload, in the order of the pieces.
    status_buffers: [[u8; STATUS_LEN]; GATHER + 1],
    /// Number of pieces covered by the last receive.
    covered: usize,
    /// Number of those pieces that have been removed from the queue.
    completed: usize,
    /// Number of bytes of that receive that are not processed yet, because a sender was still
    /// active.
    unprocessed: usize,
    /// Byte beyond the expected ones. It belongs to a piece sent meanwhile, or is garbage.
    surplus: u8,
    /// Number of responses received over the current connection.
    response_count: u64,
    /// Pieces removed from the queue, to be completed once the lock is released.
    completed_pieces: Vec<Piece>,
    has_ended: bool,
}

enum Step {
    Repeat,
    /// More work is left, after other tasks have had their turn.
    Yield,
    Wait,
    Ended,
}

impl Future for Driver {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            match self.step(cx) {
                Step::Repeat => {}
                Step::Wait => return Poll::Pending,
                Step::Yield => {
                    // Wakes the task after the runtime has looked at its sockets. A plain wake
                    // could delay that for long: a peer that accepts everything would keep its own
                    // response from being seen, and other tasks waiting.
                    let _ = std::pin::pin!(tokio::task::yield_now()).poll(cx);
                    return Poll::Pending;
                }
                Step::Ended => return Poll::Ready(()),
            }
        }
    }
}

impl Driver {
    /// Spawns the task of a queue.
    pub(crate) fn spawn(pool: Arc<Pool>, index: usize, runtime: &Handle) {
        runtime.spawn(Self::new(pool, index));
    }

    fn new(pool: Arc<Pool>, index: usize) -> Self {
        Self {
            pool,
            index,
            dial: None,
            probe: None,
            replacement: None,
            replaced_in_a_row: 0,
            replacing_since: None,
            probe_not_before: Moment(0),
            timer: None,
            status_buffers: [[0; STATUS_LEN]; GATHER + 1],
            covered: 0,
            completed: 0,
            unprocessed: 0,
            surplus: 0,
            response_count: 0,
            completed_pieces: Vec::new(),
            has_ended: false,
        }
    }

    fn step(&mut self, cx: &mut Context<'_>) -> Step {
        let pool = self.pool.clone();
        let queue = pool.queue(self.index);
        let mut state = queue.lock();
        if !state.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            state.waker = Some(cx.waker().clone());
        }
        if state.closed || state.fault.is_some() {
            if state.sending {
                state.task_awaits_send = true;
                return Step::Wait;
            }
            if state.closed {
                drop(state);
                self.end("the transport is closed");
                return Step::Ended;
            }
            self.close_faulty(queue, state);
            return Step::Repeat;
        }
        let stream = state.stream.clone();
        let now = pool.clock.now();
        let cancelled = Self::remove_cancelled(queue, &mut state);
        let expired = self.check_deadlines(queue, &mut state, now, cx);
        self.check_probe(&mut state, now, cx);
        let has_fault = state.fault.is_some();
        drop(state);
        for piece in cancelled {
            piece.done.finish_cancelled();
        }
        if let Some(expired) = expired {
            for piece in expired {
                piece.finish(Err(pool.deadline_error()));
            }
            return Step::Repeat;
        }
        if has_fault {
            return Step::Repeat;
        }
        match stream {
            None => self.dial(queue, cx),
            Some(stream) => self.exchange(queue, &stream, cx),
        }
    }

    fn dial(&mut self, queue: &ConnectionQueue, cx: &mut Context<'_>) -> Step {
        let (began, dial) = match &mut self.dial {
            Some(dial) => dial,
            none => {
                let mut state = queue.lock();
                if state.pieces.is_empty() {
                    state.has_task = false;
                    // The timer belongs to this driver; the next one sets its own.
                    state.timer_at = NEVER;
                    self.has_ended = true;
                    return Step::Ended;
                }
                none.insert((self.pool.clock.now(), Box::pin(connect(self.pool.clone()))))
            }
        };
        let Poll::Ready(result) = dial.as_mut().poll(cx) else { return Step::Wait };
        let began = *began;
        self.dial = None;
        match result {
            Ok(stream) => {
                let mut state = queue.lock();
                state.stream = Some(Arc::new(stream));
                state.last_progress = self.pool.clock.now();
                queue.set_open(true);
                self.pool.record_connect();
                self.response_count = 0;
            }
            Err(error) => {
                tracing::debug!(peer = %self.pool, %error, "cannot connect");
                let mut pieces = Vec::new();
                queue.take_if(&mut queue.lock(), 0, |_| true, &mut pieces);
                self.back_off(queue);
                self.pool.record_connect_failure(self.index, began, &error);
                self.pool.reroute_or_fail(self.index, pieces, &error);
            }
        }
        Step::Repeat
    }

    fn exchange(&mut self, queue: &ConnectionQueue, stream: &TcpStream, cx: &mut Context<'_>) -> Step {
        let flushed = queue.flush(&*self.pool.clock, &self.pool.config);
        let writable = match flushed {
            Flushed::All => false,
            Flushed::More => true,
            Flushed::Blocked => stream.poll_write_ready(cx).is_ready(),
        };
        let mut has_pending_response = self.unprocessed > 0 || queue.lock().has_early_response();
        if has_pending_response {
            self.assign_received(queue);
            has_pending_response = self.unprocessed > 0 || queue.lock().has_early_response();
        }
        // Later bytes must follow earlier ones, even if the peer only closes the connection.
        let readable = !has_pending_response && stream.poll_read_ready(cx).is_ready();
        if readable {
            match self.receive(queue, stream) {
                Ok(n) => {
                    self.unprocessed = n;
                    self.assign_received(queue);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    queue.lock().fault.get_or_insert(Fault::Io(error));
                }
            }
        }
        // A fault found by the flush above has already woken this task.
        match flushed {
            _ if readable => Step::Repeat,
            Flushed::More => Step::Yield,
            _ if writable => Step::Repeat,
            _ => Step::Wait,
        }
    }

    /// Performs one receive into the memory of the pieces whose responses are due.
    fn receive(&mut self, queue: &ConnectionQueue, stream: &TcpStream) -> io::Result<usize> {
        let mut list = IoList::<{ 2 * GATHER + 1 }>::new();
        (self.covered, self.completed) = (0, 0);
        {
            let state = queue.lock();
            let mut skip = state.received;
            for (piece, status_buffer) in
                state.pieces.iter().take(state.expected().min(GATHER)).zip(&mut self.status_buffers)
            {
                piece.push_response(skip, status_buffer, &mut list);
                skip = 0;
                self.covered += 1;
            }
        }
        // A receive that does not fill its list has emptied the socket, so the list is always
        // longer than what can arrive.
        list.push(&mut self.surplus, 1);
        // SAFETY: the parts belong to this task, or are memory of pieces that only this task
        // removes from the queue.
        let received = unsafe { socket::receive(stream, &mut list) };
        if received.is_ok() {
            queue.lock().last_progress = self.pool.clock.now();
        }
        received
    }

    /// Assigns the received bytes to the pieces, in order, and completes those whose response is
    /// complete.
    fn assign_received(&mut self, queue: &ConnectionQueue) {
        let mut state = queue.lock();
        while state.expected() > 0 {
            let Some(piece) = state.pieces.front() else { break };
            let (status_len, response_len) = (piece.status_len(), piece.response_len());
            if self.completed == self.covered && self.unprocessed == 1 && state.received == 0 {
                piece.store_first_byte(self.surplus, &mut self.status_buffers[self.completed]);
            }
            let before = state.received;
            let part = self.unprocessed.min(response_len - before);
            self.unprocessed -= part;
            state.received += part;
            if before < status_len && state.received >= status_len {
                state.fault = match Status::decode(self.status_buffers[self.completed]) {
                    Ok(Status::Ok) => None,
                    Ok(Status::Refused(code)) => Some(Fault::Refused(code)),
                    Err(error) => Some(Fault::ProtocolViolation(error.to_string())),
                };
            }
            if state.fault.is_some() || state.received < response_len {
                break;
            }
            if state.next == 0 {
                if state.sending {
                    // A send still uses the memory of the piece.
                    state.task_awaits_send = true;
                    break;
                }
                self.fail_unprocessed(&mut state);
                break;
            }
            self.completed += 1;
            self.completed_pieces.extend(queue.pop(&mut state));
        }
        if !state.task_awaits_send {
            self.fail_unprocessed(&mut state);
        }
        self.response_count += self.completed_pieces.len() as u64;
        if !self.completed_pieces.is_empty() {
            (self.replaced_in_a_row, self.replacing_since) = (0, None);
        }
        if self.response_count > 1 {
            state.one_at_a_time = false;
        }
        drop(state);
        if self.unprocessed == 0 {
            // A partly received status frame moves along with its piece.
            if self.completed <= GATHER {
                self.status_buffers.swap(0, self.completed);
            }
            (self.covered, self.completed) = (0, 0);
        }
        for piece in self.completed_pieces.drain(..) {
            piece.finish(Ok(()));
        }
    }

    fn fail_unprocessed(&mut self, state: &mut QueueState) {
        if self.unprocessed > 0 && state.fault.is_none() {
            state.fault = Some(Fault::ProtocolViolation("received more bytes than requested".into()));
        }
        self.unprocessed = 0;
    }

    /// Removes cancelled pieces of which no byte has been sent.
    fn remove_cancelled(queue: &ConnectionQueue, state: &mut QueueState) -> Vec<Piece> {
        let mut cancelled = Vec::new();
        if state.may_contain_cancelled && state.sending {
            // Pieces must not move now; this task runs again when the sender is done.
            state.task_awaits_send = true;
        } else if std::mem::take(&mut state.may_contain_cancelled) {
            let begun = state.begun();
            queue.take_if(state, begun, |piece| piece.done.is_cancelled(), &mut cancelled);
        }
        cancelled
    }

    /// Sets the timer for the next deadline. When a deadline has passed, removes the unsent pieces
    /// that are late, and marks the connection as faulty if a sent piece is late.
    fn check_deadlines(
        &mut self,
        queue: &ConnectionQueue,
        state: &mut QueueState,
        now: Moment,
        cx: &mut Context<'_>,
    ) -> Option<Vec<Piece>> {
        if !state.pieces.is_empty() {
            let mut due = state.earliest.min(self.stalled_at(state));
            if state.stream.is_some() && self.probe.is_none() {
                let earliest_probe =
                    if state.begun() > 0 { now } else { now.after(self.pool.config.probe_after) };
                due = due.min(self.probe_at(state).max(earliest_probe));
            }
            if due < state.timer_at {
                // A timer may fire up to a millisecond early.
                let span = due.since(now) + Duration::from_millis(1);
                self.timer = Some(Box::pin(tokio::time::sleep(span)));
                state.timer_at = due;
            }
        }
        if self.timer.as_mut()?.as_mut().poll(cx).is_pending() {
            return None;
        }
        self.timer = None;
        state.timer_at = NEVER;
        if state.sending {
            // Pieces must not move now; this task runs again when the sender is done.
            state.task_awaits_send = true;
            return None;
        }
        let begun = state.begun();
        let mut expired = Vec::new();
        queue.take_if(state, begun, |piece| piece.deadline <= now, &mut expired);
        if state.pieces.iter().take(begun).any(|piece| piece.deadline <= now) {
            state.fault.get_or_insert(Fault::Expired);
        } else if begun > 0 && self.stalled_at(state) <= now {
            state.fault.get_or_insert(Fault::Stalled);
        } else if begun > 0 && self.probe.is_none() && self.probe_at(state) <= now {
            self.probe = Some((state.last_progress, Box::pin(connect(self.pool.clone()))));
        }
        Some(expired)
    }

    /// Returns the time at which a peer that moves no byte is given up, over this connection or
    /// those before it.
    fn stalled_at(&self, state: &QueueState) -> Moment {
        let config = &self.pool.config;
        let own_limit = state.last_progress.after(config.response_timeout);
        self.replacing_since.map_or(own_limit, |since| {
            own_limit
                .min(since.after(config.response_timeout).max(state.last_progress.after(config.probe_after)))
        })
    }

    /// Returns the time of the next connection attempt beside one without progress. The time grows
    /// with each useless attempt.
    fn probe_at(&self, state: &QueueState) -> Moment {
        let delay = self.pool.config.probe_after.saturating_mul(1 << self.replaced_in_a_row.min(5));
        state.last_progress.after(delay).max(self.probe_not_before)
    }

    /// Checks whether the connection beside the current one has been established while that one
    /// made no progress.
    fn check_probe(&mut self, state: &mut QueueState, now: Moment, cx: &mut Context<'_>) {
        let Some((since, dial)) = &mut self.probe else { return };
        let Some(stream) =
            state.stream.as_ref().filter(|_| state.last_progress == *since && state.begun() > 0)
        else {
            self.probe = None;
            return;
        };
        let Poll::Ready(result) = dial.as_mut().poll(cx) else { return };
        // A peer process that was stopped may already have the bytes in its kernel, and apply them
        // when it resumes: after the repeated request, and after later writes. So a write that has
        // begun is repeated only if the network has lost it.
        let writes = state.pieces.iter().take(state.begun()).any(|piece| piece.direction == Direction::Write);
        let may_resend = !writes || socket::is_retransmitting(stream);
        self.probe = None;
        match result {
            Ok(replacement) if may_resend => {
                self.replacing_since.get_or_insert(state.last_progress);
                self.replaced_in_a_row += 1;
                self.replacement = Some(replacement);
                state.fault.get_or_insert(Fault::Replaced);
            }
            _ => {
                self.probe_not_before = now.after(self.pool.config.probe_after);
                // Wakes the task so that it sets the timer.
                cx.waker().wake_by_ref();
            }
        }
    }

    /// Closes a broken connection and sorts its queue into failed pieces and pieces to send again.
    fn close_faulty(&mut self, queue: &ConnectionQueue, mut state: parking_lot::MutexGuard<'_, QueueState>) {
        let Some(fault) = state.fault.take() else { return };
        let (begun, response_begun) = (state.begun(), state.received > 0);
        (state.next, state.sent, state.received) = (0, 0, 0);
        (self.covered, self.completed, self.unprocessed) = (0, 0, 0);
        let no_response_yet = self.response_count == 0;
        let replacement = self.replacement.take().filter(|_| matches!(fault, Fault::Replaced));
        (self.probe, self.response_count) = (None, 0);
        queue.set_open(replacement.is_some());
        let stream = std::mem::replace(&mut state.stream, replacement.map(Arc::new));
        // Pieces to send again may have been cancelled.
        state.may_contain_cancelled = true;
        let mut failed = Vec::new();
        let now = self.pool.clock.now();
        let first_fails = match fault {
            Fault::Refused(_) | Fault::ProtocolViolation(_) => true,
            Fault::Io(_) => response_begun,
            Fault::Expired | Fault::Stalled | Fault::Replaced => false,
        };
        // The connection broke under the first request. Later requests may be sent again without
        // limit, but one by one: a response can be lost with a connection that is closed over
        // unread requests.
        if matches!(fault, Fault::Io(_) | Fault::ProtocolViolation(_)) && begun > 0 {
            state.one_at_a_time = true;
            if let Some(first) = state.pieces.front_mut() {
                first.attempts += 1;
            }
        }
        let mut first = true;
        queue.take_if(
            &mut state,
            0,
            |piece| {
                let is_first = std::mem::replace(&mut first, false);
                match fault {
                    Fault::Stalled => true,
                    Fault::Expired => piece.deadline <= now,
                    _ => (is_first && first_fails && begun > 0) || piece.attempts >= ATTEMPTS,
                }
            },
            &mut failed,
        );
        let mut rerouted = Vec::new();
        if no_response_yet
            && begun > 0
            && matches!(fault, Fault::Io(_))
            && self.pool.another_is_open(self.index)
        {
            queue.take_if(&mut state, 0, |_| true, &mut rerouted);
        }
        drop(state);
        if let Some(stream) = stream {
            // Bytes in the buffer of the kernel must not be sent later, when their request has been
            // repeated or has failed.
            socket::reset_on_close(&stream);
        }
        tracing::debug!(peer = %self.pool, ?fault, failed = failed.len(), "data connection closed");
        for piece in failed {
            let error = self.piece_error(&fault, &piece);
            piece.finish(Err(error));
        }
        if !rerouted.is_empty() {
            self.back_off(queue);
            let connection_lost = io::Error::from(io::ErrorKind::ConnectionReset);
            self.pool.reroute_or_fail(self.index, rerouted, &connection_lost);
        }
    }

    fn back_off(&self, queue: &ConnectionQueue) {
        queue.back_off(self.pool.clock.now().after(CONNECT_BACKOFF));
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
            Fault::ProtocolViolation(text) => Error::new(ErrorCode::TransferFail, format!("{pool}: {text}")),
            Fault::Io(error) => {
                Error::new(ErrorCode::TransferFail, format!("lost the connection to {pool}: {error}"))
            }
            Fault::Expired | Fault::Replaced => pool.deadline_error(),
            Fault::Stalled => Error::new(
                ErrorCode::RpcTimeout,
                format!("{pool} has moved no byte for {:?}", pool.config.response_timeout),
            ),
        }
    }

    /// Fails all remaining pieces and resets the queue.
    fn end(&mut self, reason: &'static str) {
        self.has_ended = true;
        let pool = self.pool.clone();
        let queue = pool.queue(self.index);
        let mut state = queue.lock();
        while state.sending {
            // Waits for one nonblocking send on another thread.
            drop(state);
            std::thread::yield_now();
            state = queue.lock();
        }
        let mut unfinished = Vec::new();
        (state.next, state.sent, state.received) = (0, 0, 0);
        queue.take_if(&mut state, 0, |_| true, &mut unfinished);
        let stream = state.stream.take();
        state.fault = None;
        state.waker = None;
        state.timer_at = NEVER;
        state.has_task = false;
        queue.set_open(false);
        drop(state);
        drop(stream);
        for piece in unfinished {
            piece.finish(Err(Error::new(ErrorCode::TransferFail, reason)));
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if !self.has_ended {
            self.end("the runtime is shutting down");
        }
    }
}

/// Connects to the process of the pool. Requests may be sent as soon as the function returns.
async fn connect(pool: Arc<Pool>) -> io::Result<TcpStream> {
    let stream = open(&pool).await?;
    let Some(instance) = pool.instance() else { return Ok(stream) };
    let exchange = async {
        match hello::exchange_hello(&stream, instance).await {
            Ok(()) => Ok(stream),
            // A node at its limit closes connections that have not sent a request yet.
            Err(error) if is_closed(&error) => {
                let stream = open(&pool).await?;
                hello::exchange_hello(&stream, instance).await.map(|()| stream)
            }
            Err(error) => Err(error),
        }
    };
    // The kernel accepts connections of a process that is stopped or busy. The hello has the same
    // timeout as any other response.
    tokio::time::timeout(pool.config.response_timeout, exchange).await?
}

fn is_closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | ConnectionReset | BrokenPipe)
}

async fn open(pool: &Pool) -> io::Result<TcpStream> {
    let config = &pool.config;
    let stream =
        tokio::time::timeout(config.connect_timeout, net::connect(pool.host(), pool.port())).await??;
    socket::set_options(&stream, Buffers { send: config.send_buffer, receive: config.receive_buffer })?;
    Ok(stream)
}
