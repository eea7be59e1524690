//! All connections to one peer, and which of them a transfer takes.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::{Error, ErrorCode, SharedClock};
use mooncake_transport::{Completion, Op, Opcode};
use tokio::runtime::Handle;

use crate::config::TcpConfig;
use crate::driver::Driver;
use crate::frame::{Direction, Framing};
use crate::lane::{Lane, NEVER};
use crate::piece::Piece;
use crate::table::Registration;

/// Work a lane gets before the next one is considered: small transfers keep together, so that they share system calls.
const SPILL: u64 = 128 << 10;
/// Stripes are cut at multiples of this, so that copies stay aligned.
const STRIPE_ALIGN: usize = 64 << 10;
/// How long a peer that did not answer a connection attempt is not tried again.
const COOLDOWN: Duration = Duration::from_secs(1);

/// The lanes to one peer. They open when needed and stay.
pub(crate) struct Pool {
    host: String,
    port: u16,
    lanes: Box<[Lane]>,
    down_until: AtomicU64,
    pub(crate) config: Arc<TcpConfig>,
    pub(crate) clock: SharedClock,
    runtime: Handle,
}

/// One transfer as submitted, with its part of the completion.
pub(crate) struct Transfer<'a, 'b> {
    pub(crate) op: Op<'a, Registration>,
    pub(crate) framing: Framing,
    /// It lies in one region of the peer's as far as we know, so that cutting it cannot make a wrong range right.
    pub(crate) may_cut: bool,
    pub(crate) deadline: Moment,
    pub(crate) now: Moment,
    pub(crate) touched: &'b mut u64,
}

impl Pool {
    pub(crate) fn new(
        host: String,
        port: u16,
        config: Arc<TcpConfig>,
        clock: SharedClock,
        runtime: Handle,
    ) -> Self {
        let lanes = (0..config.connections).map(|_| Lane::new()).collect();
        Self { host, port, lanes, down_until: AtomicU64::new(0), config, clock, runtime }
    }

    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn lane(&self, index: usize) -> &Lane {
        &self.lanes[index]
    }

    pub(crate) fn another_is_open(&self, index: usize) -> bool {
        self.lanes.iter().enumerate().any(|(i, lane)| i != index && lane.is_open())
    }

    /// Queues one transfer, in stripes when it is large; [`Pool::flush`] sends it.
    pub(crate) fn queue(self: &Arc<Self>, transfer: Transfer<'_, '_>, mut done: Completion) {
        let Transfer { op, framing, may_cut, deadline, now, touched } = transfer;
        if let Some(error) = self.refusal(&op, deadline, now) {
            return done.finish(Err(error));
        }
        let stripe = if may_cut { self.stripe_len(op.len()) } else { op.len() };
        let piece = |from: usize, len: usize, done: Completion| Piece {
            // SAFETY: `from < op.len()`, so it stays inside the operation's local bytes.
            local: unsafe { op.ptr().add(from) },
            len,
            remote: op.remote() + from as u64,
            direction: match op.opcode() {
                Opcode::Read => Direction::Read,
                Opcode::Write => Direction::Write,
            },
            framing,
            deadline,
            attempts: 0,
            done,
        };
        let mut from = 0;
        while op.len() - from > stripe {
            self.push(self.choose(now), piece(from, stripe, done.share()), now, touched);
            from += stripe;
        }
        self.push(self.choose(now), piece(from, op.len() - from, done), now, touched);
    }

    /// Sends what was queued on the lanes whose bits are set.
    pub(crate) fn flush(&self, mut touched: u64) {
        while touched != 0 {
            let index = touched.trailing_zeros() as usize;
            touched &= touched - 1;
            self.lanes[index].flush_eagerly(&*self.clock, &self.config);
        }
    }

    /// Pieces whose lane cannot connect: others take them over, or they fail.
    pub(crate) fn unreachable(self: &Arc<Self>, index: usize, pieces: Vec<Piece>, error: &io::Error) {
        let now = self.clock.now();
        let mut touched = 0;
        let elsewhere = self.another_is_open(index);
        if !elsewhere && error.kind() == io::ErrorKind::TimedOut {
            self.down_until.store(now.after(COOLDOWN).0, Ordering::Relaxed);
        }
        for piece in pieces {
            if elsewhere {
                self.push(self.choose(now), piece, now, &mut touched);
            } else {
                let text = format!("cannot connect to {self}: {error}");
                piece.finish(Err(Error::new(ErrorCode::TransferFail, text)));
            }
        }
        self.flush(touched);
    }

    /// Lets every transfer under way fail, and every later one.
    pub(crate) fn close(&self) {
        for lane in &self.lanes {
            let mut state = lane.lock();
            state.closed = true;
            state.wake();
        }
    }

    /// For a transfer that did not make it in time.
    pub(crate) fn late(&self) -> Error {
        Error::new(ErrorCode::RpcTimeout, format!("the transfer with {self} has passed its deadline"))
    }

    fn refusal(&self, op: &Op<'_, Registration>, deadline: Moment, now: Moment) -> Option<Error> {
        if op.is_empty() {
            return Some(Error::invalid("a transfer of no bytes"));
        }
        if op.remote().checked_add(op.len() as u64).is_none() {
            return Some(Error::invalid(format!("{} bytes from {:#x} overflow", op.len(), op.remote())));
        }
        if deadline <= now {
            return Some(self.late());
        }
        if self.down_until.load(Ordering::Relaxed) > now.0 {
            let text = format!("{self} did not answer a moment ago");
            return Some(Error::new(ErrorCode::TransferFail, text));
        }
        None
    }

    fn push(self: &Arc<Self>, index: usize, piece: Piece, now: Moment, touched: &mut u64) {
        match self.lanes[index].push(piece, now, &self.config) {
            Ok(spawn) => {
                *touched |= 1 << index;
                if spawn {
                    // Outside the lane's lock: a runtime that is shutting down drops the task here and now.
                    self.runtime.spawn(Driver::new(self.clone(), index));
                }
            }
            Err(piece) => {
                let text = format!("too many transfers with {self} are waiting");
                piece.finish(Err(Error::new(ErrorCode::TaskPendingLimitExceeded, text)));
            }
        }
    }

    fn choose(&self, now: Moment) -> usize {
        let rank = |lane: &Lane| (!lane.is_open() && lane.rests(now), lane.load() / SPILL, !lane.is_open());
        // The first of several equal ones wins, so that an idle pool always uses the same lane.
        self.lanes.iter().enumerate().min_by_key(|(_, lane)| rank(lane)).map_or(0, |(index, _)| index)
    }

    fn stripe_len(&self, len: usize) -> usize {
        let config = &self.config;
        let stripes = config.stripes.min(config.connections);
        if len < config.stripe_threshold || stripes == 1 {
            return len;
        }
        len.div_ceil(stripes).next_multiple_of(STRIPE_ALIGN)
    }
}

/// A moment on the clock from a completion's deadline.
pub(crate) fn deadline(done: &Completion) -> Moment {
    done.deadline().unwrap_or(NEVER)
}

impl fmt::Display for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({self})")
    }
}
