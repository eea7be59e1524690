//! A lane: the queue of one connection to a peer. It outlives its connections.
//!
//! Requests are sent in the order they were queued and answered in that order, so one queue with a cursor is all the
//! book-keeping: before the cursor they wait for their answer, behind it for being sent. When the connection dies the
//! cursor goes back, and whoever may be tried again is.
//!
//! Who submits also sends, as far as the socket takes it at once; the rest, and every answer, is the business of the
//! lane's task ([`Driver`](crate::driver::Driver)). Only that task takes pieces out of the queue, and never while somebody is inside a
//! send: so no piece is finished while its memory is in use.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Waker;

use mooncake_core::clock::{Clock, Moment};
use mooncake_transport::config::TcpConfig;
use parking_lot::{Mutex, MutexGuard};
use tokio::net::TcpStream;

use crate::piece::{Headers, Piece};
use crate::socket::{self, IoList};

/// Pieces gathered into one send.
const SEND_GATHER: usize = 16;
/// Most bytes handed to one send, so that neither a submitting thread nor the rest of the runtime waits long.
const SEND_BYTES: usize = 1 << 20;
/// What a request costs besides its bytes, when lanes are compared.
const REQUEST_COST: u64 = 4096;

/// The end of time.
pub(crate) const NEVER: Moment = Moment(u64::MAX);

#[derive(Debug)]
pub(crate) struct Lane {
    state: Mutex<State>,
    load: AtomicU64,
    open: AtomicBool,
    rest_until: AtomicU64,
}

/// What is the matter with a connection.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The network, or the peer has closed it.
    Io(io::Error),
    /// The peer does not speak the protocol.
    Garbage(String),
    /// The peer refused the first request in the queue, with this code.
    Refused(u32),
    /// A request that was on its way has passed its deadline.
    Expired,
    /// Nothing moved for too long.
    Stalled,
    /// Nothing moved for a while, and a new connection came about.
    Overtaken,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) pieces: VecDeque<Piece>,
    /// So many pieces are sent in full.
    pub(crate) next: usize,
    /// Bytes of the piece after them that are sent.
    pub(crate) sent: usize,
    /// Bytes of the first piece's answer that have come.
    pub(crate) received: usize,
    pub(crate) stream: Option<Arc<TcpStream>>,
    /// Somebody is inside a send, with the lock open.
    pub(crate) sending: bool,
    /// So many pieces from `next` on are in the hands of that send; some may be answered before it returns.
    offered: usize,
    /// The task wants to know when that send is over.
    pub(crate) awaited: bool,
    pub(crate) fault: Option<Fault>,
    /// One request at a time, until the peer has answered two over one connection.
    pub(crate) careful: bool,
    /// The lane's task exists.
    pub(crate) driven: bool,
    pub(crate) closed: bool,
    /// Something was given up that may be in the queue.
    pub(crate) sweep: bool,
    /// Earliest deadline in the queue, or earlier.
    pub(crate) earliest: Moment,
    /// When bytes last moved.
    pub(crate) moved: Moment,
    /// When the task wakes up by itself.
    pub(crate) armed: Moment,
    pub(crate) waker: Option<Waker>,
}

impl State {
    /// Pieces of which at least one byte is sent.
    pub(crate) fn begun(&self) -> usize {
        self.next + usize::from(self.sent > 0)
    }

    /// Pieces that may have an answer by now.
    pub(crate) fn expected(&self) -> usize {
        if self.sending { self.next + self.offered } else { self.begun() }
    }

    /// The first piece's answer is here, but the piece is still being sent.
    pub(crate) fn answered_early(&self) -> bool {
        self.received > 0 && self.pieces.front().is_some_and(|piece| self.received == piece.answer_len())
    }

    pub(crate) fn wake(&self) {
        if let Some(waker) = &self.waker {
            waker.wake_by_ref();
        }
    }

    fn advance(&mut self, n: usize, now: Moment) {
        self.moved = now;
        self.sent += n;
        while let Some(piece) = self.pieces.get(self.next) {
            let len = piece.request_len();
            if self.sent < len {
                break;
            }
            self.sent -= len;
            self.next += 1;
        }
    }

    /// What to send next. Stops before a piece whose time is over.
    fn offer<const N: usize>(
        &mut self,
        headers: &mut [Headers; SEND_GATHER],
        list: &mut IoList<N>,
        window: usize,
        now: Moment,
    ) {
        self.offered = 0;
        let mut skip = self.sent;
        let window = if self.careful { 1 } else { window };
        let room = window.saturating_sub(self.next);
        for (piece, headers) in self.pieces.iter().skip(self.next).take(room).zip(headers) {
            if skip == 0 && piece.deadline <= now {
                self.wake();
                break;
            }
            *headers = piece.headers();
            let before = list.bytes();
            let whole = piece.outgoing(headers, skip, SEND_BYTES.saturating_sub(before), list);
            self.offered += usize::from(list.bytes() > before);
            if !whole {
                break;
            }
            skip = 0;
        }
    }
}

/// How far a flush came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flushed {
    /// Nothing more to send now, or somebody else is at it.
    All,
    /// The socket is full.
    Blocked,
    /// Enough for one turn.
    More,
}

impl Lane {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::new(State {
                pieces: VecDeque::new(),
                next: 0,
                sent: 0,
                received: 0,
                stream: None,
                sending: false,
                offered: 0,
                awaited: false,
                fault: None,
                careful: false,
                driven: false,
                closed: false,
                sweep: false,
                earliest: NEVER,
                moved: Moment(0),
                armed: NEVER,
                waker: None,
            }),
            load: AtomicU64::new(0),
            open: AtomicBool::new(false),
            rest_until: AtomicU64::new(0),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Outstanding work, in bytes or so.
    pub(crate) fn load(&self) -> u64 {
        self.load.load(Ordering::Relaxed)
    }

    /// A connection stands.
    pub(crate) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    pub(crate) fn set_open(&self, open: bool) {
        self.open.store(open, Ordering::Relaxed);
    }

    /// Its last connection came to nothing a moment ago.
    pub(crate) fn rests(&self, now: Moment) -> bool {
        self.rest_until.load(Ordering::Relaxed) > now.0
    }

    pub(crate) fn rest(&self, until: Moment) {
        self.rest_until.store(until.0, Ordering::Relaxed);
    }

    /// Queues a piece. `Ok(true)` asks the caller to spawn the lane's task; a piece that finds no room comes back.
    pub(crate) fn push(&self, piece: Piece, now: Moment, config: &TcpConfig) -> Result<bool, Piece> {
        let mut state = self.state.lock();
        if state.closed || state.pieces.len() >= config.max_queued {
            return Err(piece);
        }
        if state.pieces.is_empty() {
            state.moved = now;
        }
        state.earliest = state.earliest.min(piece.deadline);
        // In steady traffic the task's timer is set already, so nobody has to be woken.
        if piece.deadline.min(now.after(config.answer_timeout.min(config.probe_after))) < state.armed {
            state.wake();
        }
        self.load.fetch_add(cost(&piece), Ordering::Relaxed);
        state.pieces.push_back(piece);
        Ok(!std::mem::replace(&mut state.driven, true))
    }

    /// Takes the first piece out, as sent and answered.
    pub(crate) fn pop(&self, state: &mut State) -> Option<Piece> {
        let piece = state.pieces.pop_front()?;
        state.next -= 1;
        state.received = 0;
        if state.pieces.is_empty() {
            state.earliest = NEVER;
        }
        self.load.fetch_sub(cost(&piece), Ordering::Relaxed);
        Some(piece)
    }

    /// Takes out what `condition` holds for, among the pieces from `first` on. Nobody may be sending.
    pub(crate) fn take_if(
        &self,
        state: &mut State,
        first: usize,
        mut condition: impl FnMut(&Piece) -> bool,
        out: &mut Vec<Piece>,
    ) {
        debug_assert!(!state.sending);
        let mut rest = state.pieces.split_off(first.min(state.pieces.len()));
        for piece in rest.drain(..) {
            if condition(&piece) {
                self.load.fetch_sub(cost(&piece), Ordering::Relaxed);
                out.push(piece);
            } else {
                state.pieces.push_back(piece);
            }
        }
        state.earliest = state.pieces.iter().map(|piece| piece.deadline).min().unwrap_or(NEVER);
    }

    /// Sends what is queued and was submitted a moment ago, on the submitter's thread. What the socket does not take
    /// at once is left to the lane's task.
    pub(crate) fn flush_eagerly(&self, clock: &dyn Clock, config: &TcpConfig) {
        if self.flush(clock, config) != Flushed::All {
            self.state.lock().wake();
        }
    }

    /// Sends what is queued.
    pub(crate) fn flush(&self, clock: &dyn Clock, config: &TcpConfig) -> Flushed {
        let mut state = self.state.lock();
        let mut budget = SEND_BYTES;
        loop {
            if state.sending || state.fault.is_some() {
                return Flushed::All;
            }
            let Some(stream) = state.stream.clone() else { return Flushed::All };
            let now = clock.now();
            let mut headers = [Headers::NONE; SEND_GATHER];
            let mut list = IoList::<{ 3 * SEND_GATHER }>::new();
            state.offer(&mut headers, &mut list, config.window, now);
            let wanted = list.bytes();
            if wanted == 0 {
                return Flushed::All;
            }
            if budget == 0 {
                return Flushed::More;
            }
            state.sending = true;
            let result = MutexGuard::unlocked(&mut state, || {
                // SAFETY: headers live on this stack; memory is that of pieces, none of which is finished while
                // `sending` is set.
                unsafe { socket::send(&stream, &mut list) }
            });
            state.sending = false;
            let blocked = match result {
                Ok(n) => {
                    state.advance(n, now);
                    budget = budget.saturating_sub(n);
                    n < wanted
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => true,
                Err(error) => {
                    state.fault.get_or_insert(Fault::Io(error));
                    true
                }
            };
            if std::mem::take(&mut state.awaited) || state.fault.is_some() || state.answered_early() {
                state.wake();
            }
            if blocked {
                return Flushed::Blocked;
            }
        }
    }
}

fn cost(piece: &Piece) -> u64 {
    piece.len as u64 + REQUEST_COST
}
