//! The task of a lane: connects, sends what submitters could not, receives answers, watches the clock, and decides what
//! becomes of the queue when a connection dies.

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
use tokio::time::Sleep;

use crate::frame::{ADDRESS_REFUSED, Direction, STATUS_LEN, Status};
use crate::hello;
use crate::lane::{Fault, Flushed, Lane, NEVER, State};
use crate::piece::Piece;
use crate::pool::Pool;
use crate::socket::{self, Buffers, IoList};

/// Answers gathered into one receive.
const GATHER: usize = 16;
/// How often a request may lose its connection before a byte of its answer has come.
const ATTEMPTS: u8 = 2;
/// How long a lane is left alone whose connection came to nothing, while others stand.
const REST: Duration = Duration::from_secs(1);

type Dial = Pin<Box<dyn Future<Output = io::Result<TcpStream>> + Send>>;

pub(crate) struct Driver {
    pool: Arc<Pool>,
    index: usize,
    /// A connection being made, since when.
    dial: Option<(Moment, Dial)>,
    /// A connection tried beside the present one, which stands still since that moment.
    probe: Option<(Moment, Dial)>,
    /// What came of it.
    spare: Option<TcpStream>,
    /// Connections in a row that were overtaken, without an answer between them,
    overtaken: u32,
    /// since then.
    still_since: Option<Moment>,
    /// No new attempt beside before.
    probe_not_before: Moment,
    timer: Option<Pin<Box<Sleep>>>,
    /// What is no payload in the answers asked for by the last receive, in the order of the pieces.
    asides: [[u8; STATUS_LEN]; GATHER + 1],
    /// So many pieces had a place in that receive,
    listed: usize,
    /// so many of them are taken out of the queue,
    settled: usize,
    /// and so many of its bytes are not looked at yet, for somebody was still sending.
    undigested: usize,
    /// One byte more is received than is expected. It belongs to a piece sent meanwhile, or to nobody.
    surplus: u8,
    /// Answers that came over the present connection.
    answers: u64,
    /// Taken out of the queue, to be finished once the lock is open.
    answered: Vec<Piece>,
    over: bool,
}

enum Turn {
    Again,
    /// There is more to do, after others have had their turn.
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
                    // Wakes us after the runtime has looked at its sockets, which plain waking would put off for long:
                    // a peer that takes all we have would keep its own answer from being seen, and others waiting.
                    let _ = std::pin::pin!(tokio::task::yield_now()).poll(cx);
                    return Poll::Pending;
                }
                Turn::Over => return Poll::Ready(()),
            }
        }
    }
}

impl Driver {
    pub(crate) fn new(pool: Arc<Pool>, index: usize) -> Self {
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
            settled: 0,
            undigested: 0,
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
            self.bury(lane, state);
            return Turn::Again;
        }
        let stream = state.stream.clone();
        let now = pool.clock.now();
        let given_up = Self::sweep(lane, &mut state);
        let late = self.watch(lane, &mut state, now, cx);
        self.look_beside(&mut state, now, cx);
        let again = state.fault.is_some();
        drop(state);
        for piece in given_up {
            piece.done.give_back();
        }
        if let Some(late) = late {
            for piece in late {
                piece.finish(Err(pool.late()));
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
                    // The timer goes with this driver; the next one sets its own.
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
                self.pool.reachable();
                self.answers = 0;
            }
            Err(error) => {
                tracing::debug!(peer = %self.pool, %error, "cannot connect");
                let mut pieces = Vec::new();
                lane.take_if(&mut lane.lock(), 0, |_| true, &mut pieces);
                self.rest(lane);
                self.pool.not_reached(self.index, began, &error);
                self.pool.unreachable(self.index, pieces, &error);
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
        let mut early = self.undigested > 0 || lane.lock().answered_early();
        if early {
            self.digest(lane);
            early = self.undigested > 0 || lane.lock().answered_early();
        }
        // What comes next must find its place behind what came before, were it only that the peer closes.
        let readable = !early && stream.poll_read_ready(cx).is_ready();
        if readable {
            match self.receive(lane, stream) {
                Ok(n) => {
                    self.undigested = n;
                    self.digest(lane);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    lane.lock().fault.get_or_insert(Fault::Io(error));
                }
            }
        }
        // A fault found by the flush above has woken us.
        match flushed {
            _ if readable => Turn::Again,
            Flushed::More => Turn::Yield,
            _ if writable => Turn::Again,
            _ => Turn::Wait,
        }
    }

    /// One receive into the memory of the pieces whose answers are due.
    fn receive(&mut self, lane: &Lane, stream: &TcpStream) -> io::Result<usize> {
        let mut list = IoList::<{ 2 * GATHER + 1 }>::new();
        (self.listed, self.settled) = (0, 0);
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
        // A list that is not filled has emptied the socket, so always ask for more than can come.
        list.push(&mut self.surplus, 1);
        // SAFETY: the places are this task's own, and memory of pieces that only this task takes out of the queue.
        let received = unsafe { socket::receive(stream, &mut list) };
        if received.is_ok() {
            lane.lock().moved = self.pool.clock.now();
        }
        received
    }

    /// Gives the bytes received to the pieces, in order, and finishes those whose answer is complete.
    fn digest(&mut self, lane: &Lane) {
        let mut state = lane.lock();
        while state.expected() > 0 {
            let Some(piece) = state.pieces.front() else { break };
            let (status_len, answer_len) = (piece.status_len(), piece.answer_len());
            if self.settled == self.listed && self.undigested == 1 && state.received == 0 {
                piece.incoming_first(self.surplus, &mut self.asides[self.settled]);
            }
            let before = state.received;
            let part = self.undigested.min(answer_len - before);
            self.undigested -= part;
            state.received += part;
            if before < status_len && state.received >= status_len {
                state.fault = match Status::decode(self.asides[self.settled]) {
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
                    // Its memory is still in use.
                    state.awaited = true;
                    break;
                }
                self.undigested_is_garbage(&mut state);
                break;
            }
            self.settled += 1;
            self.answered.extend(lane.pop(&mut state));
        }
        if !state.awaited {
            self.undigested_is_garbage(&mut state);
        }
        self.answers += self.answered.len() as u64;
        if !self.answered.is_empty() {
            (self.overtaken, self.still_since) = (0, None);
        }
        if self.answers > 1 {
            state.careful = false;
        }
        drop(state);
        if self.undigested == 0 {
            // A status frame of which a part is here moves up along with its piece.
            if self.settled <= GATHER {
                self.asides.swap(0, self.settled);
            }
            (self.listed, self.settled) = (0, 0);
        }
        for piece in self.answered.drain(..) {
            piece.finish(Ok(()));
        }
    }

    fn undigested_is_garbage(&mut self, state: &mut State) {
        if self.undigested > 0 && state.fault.is_none() {
            state.fault = Some(Fault::Garbage("more bytes came than were asked for".into()));
        }
        self.undigested = 0;
    }

    /// Takes out what was given up and is not begun.
    fn sweep(lane: &Lane, state: &mut State) -> Vec<Piece> {
        let mut given_up = Vec::new();
        if state.sweep && state.sending {
            // Pieces must not be moved about now; come back when the sender is out.
            state.awaited = true;
        } else if std::mem::take(&mut state.sweep) {
            let begun = state.begun();
            lane.take_if(state, begun, |piece| piece.done.is_given_up(), &mut given_up);
        }
        given_up
    }

    /// Sets the timer for the next deadline. When one has passed, takes out what was not begun by then and marks a
    /// connection that is to go with what was.
    fn watch(
        &mut self,
        lane: &Lane,
        state: &mut State,
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
                // A timer may be up to a millisecond early by its own clock.
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
            // Pieces must not be moved about now; come back when the sender is out.
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

    /// When the peer is given up that moves no byte, over this connection or those before it.
    fn stalled_at(&self, state: &State) -> Moment {
        let config = &self.pool.config;
        let alone = state.moved.after(config.answer_timeout);
        self.still_since.map_or(alone, |since| {
            alone.min(since.after(config.answer_timeout).max(state.moved.after(config.probe_after)))
        })
    }

    /// When a connection that stands still is doubted: later each time that a new one was no better.
    fn probe_at(&self, state: &State) -> Moment {
        let patience = self.pool.config.probe_after.saturating_mul(1 << self.overtaken.min(5));
        state.moved.after(patience).max(self.probe_not_before)
    }

    /// Sees whether a connection beside the present one has come about while that stood still.
    fn look_beside(&mut self, state: &mut State, now: Moment, cx: &mut Context<'_>) {
        let Some((since, dial)) = &mut self.probe else { return };
        let Some(stream) = state.stream.as_ref().filter(|_| state.moved == *since && state.begun() > 0)
        else {
            self.probe = None;
            return;
        };
        let Poll::Ready(result) = dial.as_mut().poll(cx) else { return };
        // A peer that was stopped may have our bytes already, and write them when it goes on: after the ones that are sent again, and
        // whatever was written since. So what was begun is written anew only where the network has lost it.
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
                // So that the timer is set for then.
                cx.waker().wake_by_ref();
            }
        }
    }

    /// Closes a broken connection and sorts its queue: who has failed, and who may be asked again.
    fn bury(&mut self, lane: &Lane, mut state: parking_lot::MutexGuard<'_, State>) {
        let Some(fault) = state.fault.take() else { return };
        let (begun, answering) = (state.begun(), state.received > 0);
        (state.next, state.sent, state.received) = (0, 0, 0);
        (self.listed, self.settled, self.undigested) = (0, 0, 0);
        let fresh = self.answers == 0;
        let spare = self.spare.take().filter(|_| matches!(fault, Fault::Overtaken));
        (self.probe, self.answers) = (None, 0);
        lane.set_open(spare.is_some());
        let stream = std::mem::replace(&mut state.stream, spare.map(Arc::new));
        // What would be asked again may not be wanted any more.
        state.sweep = true;
        let mut failed = Vec::new();
        let now = self.pool.clock.now();
        let first_fails = match fault {
            Fault::Refused(_) | Fault::Garbage(_) => true,
            Fault::Io(_) => answering,
            Fault::Expired | Fault::Stalled | Fault::Overtaken => false,
        };
        // It died under the first request. Who was behind is asked again freely, but one by one: an answer can be lost
        // with a connection that is closed over requests which nobody has read.
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
            // What was begun must not come out of the kernel's buffer later, when it has been asked again or given up.
            socket::abandon(&stream);
        }
        tracing::debug!(peer = %self.pool, ?fault, failed = failed.len(), "data connection closed");
        for piece in failed {
            let error = self.verdict(&fault, &piece);
            piece.finish(Err(error));
        }
        if !moved.is_empty() {
            self.rest(lane);
            let lost = io::Error::from(io::ErrorKind::ConnectionReset);
            self.pool.unreachable(self.index, moved, &lost);
        }
    }

    fn rest(&self, lane: &Lane) {
        lane.rest(self.pool.clock.now().after(REST));
    }

    fn verdict(&self, fault: &Fault, piece: &Piece) -> Error {
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
            Fault::Expired | Fault::Overtaken => pool.late(),
            Fault::Stalled => Error::new(
                ErrorCode::RpcTimeout,
                format!("{pool} has not moved a byte for {:?}", pool.config.answer_timeout),
            ),
        }
    }

    /// Fails all that is left and leaves the lane as it was before the first request.
    fn end(&mut self, why: &'static str) {
        self.over = true;
        let pool = self.pool.clone();
        let lane = pool.lane(self.index);
        let mut state = lane.lock();
        while state.sending {
            // One send that does not block, on another thread.
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

/// Makes a connection to the process that the pool is for. Requests may be sent as soon as it returns.
async fn connect(pool: Arc<Pool>) -> io::Result<TcpStream> {
    let stream = open(&pool).await?;
    let Some(instance) = pool.instance() else { return Ok(stream) };
    let introduced = async {
        match hello::introduce(&stream, instance).await {
            Ok(()) => Ok(stream),
            // A node whose places are taken closes connections that have not asked yet.
            Err(error) if is_closed(&error) => {
                let stream = open(&pool).await?;
                hello::introduce(&stream, instance).await.map(|()| stream)
            }
            Err(error) => Err(error),
        }
    };
    // A process that is stopped or busy has accepted the connection in its kernel only. It has as long as for any other answer.
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
