//! Queue of the requests on one connection to a peer. A queue outlives its connections.
//!
//! Requests are sent in the order in which they were queued, and answered in that order. So one
//! queue with a cursor is enough: requests before the cursor wait for their response, those behind
//! it wait to be sent. When the connection breaks, the cursor goes back, and requests that may be
//! repeated are sent again.
//!
//! The submitter also sends, as far as the socket accepts the bytes at once. The task of the queue
//! ([`Driver`](crate::driver::Driver)) sends the rest and receives the responses. Only that task
//! removes pieces from the queue, and never during a send: so no piece is completed while its
//! memory is in use.

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

/// Number of pieces gathered into one send.
const SEND_GATHER: usize = 16;
/// Maximum number of bytes of one send, so that neither a submitting thread nor the rest of the
/// runtime waits long.
const SEND_BYTES: usize = 1 << 20;
/// Cost of a request besides its bytes, when queues are compared.
const REQUEST_COST: u64 = 4096;

/// Moment that never comes.
pub(crate) const NEVER: Moment = Moment(u64::MAX);

#[derive(Debug)]
pub(crate) struct ConnectionQueue {
    state: Mutex<QueueState>,
    load: AtomicU64,
    open: AtomicBool,
    backoff_until: AtomicU64,
}

/// Fault of a connection.
#[derive(Debug)]
pub(crate) enum Fault {
    /// Network error, or a connection closed by the peer.
    Io(io::Error),
    /// Violation of the protocol by the peer.
    ProtocolViolation(String),
    /// Refusal of the first request in the queue, with this code.
    Refused(u32),
    /// Request in flight that has passed its deadline.
    Expired,
    /// No progress within the timeout.
    Stalled,
    /// No progress for a while, and an established second connection.
    Replaced,
}

#[derive(Debug)]
pub(crate) struct QueueState {
    pub(crate) pieces: VecDeque<Piece>,
    /// Number of pieces that are sent in full.
    pub(crate) next: usize,
    /// Number of sent bytes of the piece after them.
    pub(crate) sent: usize,
    /// Number of received bytes of the response to the first piece.
    pub(crate) received: usize,
    pub(crate) stream: Option<Arc<TcpStream>>,
    /// True if a send is in progress with the lock released.
    pub(crate) sending: bool,
    /// Number of pieces from `next` on that this send covers. Some may be answered before it
    /// returns.
    covered_by_send: usize,
    /// True if the task waits for the end of that send.
    pub(crate) task_awaits_send: bool,
    pub(crate) fault: Option<Fault>,
    /// True if one request is sent at a time, until the peer has answered two over one connection.
    pub(crate) one_at_a_time: bool,
    /// True if the task of the queue exists.
    pub(crate) has_task: bool,
    pub(crate) closed: bool,
    /// True if the queue may contain cancelled pieces.
    pub(crate) may_contain_cancelled: bool,
    /// Lower bound of the earliest deadline in the queue.
    pub(crate) earliest: Moment,
    /// Time of the last progress.
    pub(crate) last_progress: Moment,
    /// Time at which the timer of the task fires.
    pub(crate) timer_at: Moment,
    pub(crate) waker: Option<Waker>,
}

impl QueueState {
    /// Returns the number of pieces of which at least one byte is sent.
    pub(crate) fn begun(&self) -> usize {
        self.next + usize::from(self.sent > 0)
    }

    /// Returns the number of pieces that may have a response by now.
    pub(crate) fn expected(&self) -> usize {
        if self.sending { self.next + self.covered_by_send } else { self.begun() }
    }

    /// Returns whether the response to the first piece is complete while the piece is still being
    /// sent.
    pub(crate) fn has_early_response(&self) -> bool {
        self.received > 0 && self.pieces.front().is_some_and(|piece| self.received == piece.response_len())
    }

    pub(crate) fn wake(&self) {
        if let Some(waker) = &self.waker {
            waker.wake_by_ref();
        }
    }

    fn advance(&mut self, n: usize, now: Moment) {
        self.last_progress = now;
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

    /// Collects what to send next. Stops before a piece whose deadline has passed.
    fn gather<const N: usize>(
        &mut self,
        headers: &mut [Headers; SEND_GATHER],
        list: &mut IoList<N>,
        window: usize,
        now: Moment,
    ) {
        self.covered_by_send = 0;
        let mut skip = self.sent;
        let window = if self.one_at_a_time { 1 } else { window };
        let free_window = window.saturating_sub(self.next);
        for (piece, headers) in self.pieces.iter().skip(self.next).take(free_window).zip(headers) {
            if skip == 0 && piece.deadline <= now {
                self.wake();
                break;
            }
            *headers = piece.headers();
            let before = list.bytes();
            let is_complete = piece.push_request(headers, skip, SEND_BYTES.saturating_sub(before), list);
            self.covered_by_send += usize::from(list.bytes() > before);
            if !is_complete {
                break;
            }
            skip = 0;
        }
    }
}

/// Progress of a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flushed {
    /// End of the queue, or another thread is sending.
    All,
    /// The socket is full.
    Blocked,
    /// Enough was sent for one turn.
    More,
}

impl ConnectionQueue {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::new(QueueState {
                pieces: VecDeque::new(),
                next: 0,
                sent: 0,
                received: 0,
                stream: None,
                sending: false,
                covered_by_send: 0,
                task_awaits_send: false,
                fault: None,
                one_at_a_time: false,
                has_task: false,
                closed: false,
                may_contain_cancelled: false,
                earliest: NEVER,
                last_progress: Moment(0),
                timer_at: NEVER,
                waker: None,
            }),
            load: AtomicU64::new(0),
            open: AtomicBool::new(false),
            backoff_until: AtomicU64::new(0),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock()
    }

    /// Returns the outstanding work, approximately in bytes.
    pub(crate) fn load(&self) -> u64 {
        self.load.load(Ordering::Relaxed)
    }

    /// Returns whether a connection is established.
    pub(crate) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    pub(crate) fn set_open(&self, open: bool) {
        self.open.store(open, Ordering::Relaxed);
    }

    /// Returns whether the last connection attempt failed a moment ago.
    pub(crate) fn is_backing_off(&self, now: Moment) -> bool {
        self.backoff_until.load(Ordering::Relaxed) > now.0
    }

    pub(crate) fn back_off(&self, until: Moment) {
        self.backoff_until.store(until.0, Ordering::Relaxed);
    }

    /// Queues a piece. `Ok(true)` asks the caller to spawn the task of the queue. Returns the piece
    /// if the queue is full.
    pub(crate) fn push(&self, piece: Piece, now: Moment, config: &TcpConfig) -> Result<bool, Piece> {
        let mut state = self.state.lock();
        if state.closed || state.pieces.len() >= config.max_queued {
            return Err(piece);
        }
        if state.pieces.is_empty() {
            state.last_progress = now;
        }
        state.earliest = state.earliest.min(piece.deadline);
        // In steady traffic the timer of the task is already set, so no wake is needed.
        if piece.deadline.min(now.after(config.response_timeout.min(config.probe_after))) < state.timer_at {
            state.wake();
        }
        self.load.fetch_add(cost(&piece), Ordering::Relaxed);
        state.pieces.push_back(piece);
        Ok(!std::mem::replace(&mut state.has_task, true))
    }

    /// Removes the first piece, which is sent and answered.
    pub(crate) fn pop(&self, state: &mut QueueState) -> Option<Piece> {
        let piece = state.pieces.pop_front()?;
        state.next -= 1;
        state.received = 0;
        if state.pieces.is_empty() {
            state.earliest = NEVER;
        }
        self.load.fetch_sub(cost(&piece), Ordering::Relaxed);
        Some(piece)
    }

    /// Removes the pieces from `first` on that `condition` holds for. No send may be in progress.
    pub(crate) fn take_if(
        &self,
        state: &mut QueueState,
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

    /// Sends recently queued pieces on the thread of the submitter. The task of the queue sends
    /// what the socket does not accept at once.
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
            state.gather(&mut headers, &mut list, config.window, now);
            let to_send = list.bytes();
            if to_send == 0 {
                return Flushed::All;
            }
            if budget == 0 {
                return Flushed::More;
            }
            state.sending = true;
            let result = MutexGuard::unlocked(&mut state, || {
                // SAFETY: headers live on this stack. The memory belongs to pieces, none of which
                // is completed while `sending` is set.
                unsafe { socket::send(&stream, &mut list) }
            });
            state.sending = false;
            let blocked = match result {
                Ok(n) => {
                    state.advance(n, now);
                    budget = budget.saturating_sub(n);
                    n < to_send
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => true,
                Err(error) => {
                    state.fault.get_or_insert(Fault::Io(error));
                    true
                }
            };
            if std::mem::take(&mut state.task_awaits_send)
                || state.fault.is_some()
                || state.has_early_response()
            {
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
