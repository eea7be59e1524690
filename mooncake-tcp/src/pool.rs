//! All connections to one peer, and which of them a transfer takes.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mooncake_core::backoff::{Backoff, Pace};
use mooncake_core::clock::{Moment, Rng};
use mooncake_core::{Error, ErrorCode, SharedClock};
use mooncake_transport::config::TcpConfig;
use mooncake_transport::{Completion, Op, Opcode};
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::driver::Driver;
use crate::frame::{Direction, Framing};
use crate::hello::{Instance, OtherInstance};
use crate::lane::{Lane, NEVER};
use crate::piece::Piece;
use crate::table::Registration;

/// Work a lane gets before the next one is considered: small transfers keep together, so that they share system calls. Measured with batches of
/// sixteen 64 KiB blocks: 128 KiB, which spreads each over all lanes, is a tenth slower for one submitter and a quarter for four.
const SPILL: u64 = 512 << 10;
/// Stripes are cut at multiples of this, so that copies stay aligned.
const STRIPE_ALIGN: usize = 64 << 10;
/// How long a peer is not tried again that did not answer a connection attempt: each try holds requests up for all of `connect_timeout`.
const SILENT: Pace = Pace { first: Duration::from_millis(500), most: Duration::from_secs(8) };
/// The same for one that refused it: such a try costs nobody a wait, and a process may be back soon.
const REFUSED: Pace = Pace { first: Duration::from_millis(20), most: Duration::from_secs(1) };

/// The lanes to one peer. They open when needed and stay.
pub(crate) struct Pool {
    host: String,
    port: u16,
    /// The process that every connection is introduced to; none for a node that does not know hellos.
    instance: Option<Instance>,
    lanes: Box<[Lane]>,
    /// Attempts to connect that came to nothing.
    failures: Mutex<Failures>,
    /// Until when no attempt is made because of them.
    down_until: AtomicU64,
    pub(crate) config: Arc<TcpConfig>,
    pub(crate) clock: SharedClock,
    runtime: Handle,
}

/// Attempts to connect that came to nothing.
struct Failures {
    backoff: Backoff,
    /// The last one's finding, if another process answered.
    other: Option<OtherInstance>,
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
        (host, port, instance): (String, u16, Option<Instance>),
        config: Arc<TcpConfig>,
        clock: SharedClock,
        runtime: Handle,
        rng: Rng,
    ) -> Self {
        let lanes = (0..config.connections).map(|_| Lane::new()).collect();
        let failures = Mutex::new(Failures { backoff: Backoff::new(rng), other: None });
        Self { host, port, instance, lanes, failures, down_until: AtomicU64::new(0), config, clock, runtime }
    }

    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn instance(&self) -> Option<Instance> {
        self.instance
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

    /// A connection stands.
    pub(crate) fn reachable(&self) {
        // The usual case takes no lock.
        if self.down_until.swap(0, Ordering::Relaxed) != 0 {
            let mut failures = self.failures.lock();
            failures.backoff.worked();
            failures.other = None;
        }
    }

    /// An attempt to connect that began then came to nothing. Unless other connections stand, the peer is left alone for a while.
    pub(crate) fn not_reached(&self, index: usize, began: Moment, error: &io::Error) {
        if !self.another_is_open(index) {
            let pace = if error.kind() == io::ErrorKind::TimedOut { &SILENT } else { &REFUSED };
            let mut failures = self.failures.lock();
            failures.other = OtherInstance::of(error);
            let until = failures.backoff.failed(began, self.clock.now(), pace);
            drop(failures);
            self.down_until.store(until.0, Ordering::Relaxed);
        }
    }

    /// Pieces whose lane cannot connect: others take them over, or they fail.
    pub(crate) fn unreachable(self: &Arc<Self>, index: usize, pieces: Vec<Piece>, error: &io::Error) {
        let now = self.clock.now();
        let mut touched = 0;
        // Other connections lead to the process that has gone, or have not noticed yet.
        let elsewhere = self.another_is_open(index) && OtherInstance::of(error).is_none();
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

    /// What takes out of the queues that which was given up and not begun, to be called when something was.
    pub(crate) fn sweeper(self: &Arc<Self>) -> impl FnOnce() + Send + 'static {
        let pool = Arc::downgrade(self);
        move || {
            for lane in pool.upgrade().iter().flat_map(|pool| &pool.lanes) {
                let mut state = lane.lock();
                state.sweep = true;
                state.wake();
            }
        }
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
        if self.down_until.load(Ordering::Relaxed) > now.0 && !self.lanes.iter().any(Lane::is_open) {
            let text = match self.failures.lock().other {
                Some(other) => format!("cannot connect to {self}: {other}"),
                None => format!("{self} could not be reached a moment ago, and is left alone for a while"),
            };
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

#[cfg(test)]
mod tests {
    use mooncake_core::clock::{Clock, ManualClock};

    use super::*;

    fn pool(clock: &Arc<ManualClock>) -> Pool {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let config = Arc::new(TcpConfig::default());
        Pool::new(("h".into(), 1, None), config, clock.clone(), runtime.handle().clone(), Rng::seeded(1))
    }

    /// Until when the pool leaves its peer alone, from now on.
    fn pause(pool: &Pool, clock: &ManualClock) -> Duration {
        Moment(pool.down_until.load(Ordering::Relaxed)).since(clock.now())
    }

    #[test]
    fn a_peer_that_is_gone_is_tried_less_and_less_often_until_it_is_back() {
        let clock = Arc::new(ManualClock::new());
        let pool = pool(&clock);
        for (kind, pace) in [(io::ErrorKind::TimedOut, SILENT), (io::ErrorKind::ConnectionRefused, REFUSED)] {
            let mut last = Duration::ZERO;
            for _ in 0..12 {
                pool.not_reached(0, clock.now(), &kind.into());
                let now = pause(&pool, &clock);
                assert!(now > last / 2 && now <= pace.most, "{now:?} after {last:?}");
                last = now;
                clock.advance(now);
            }
            assert!(last > pace.most / 2, "{last:?}");
            pool.reachable();
            assert_eq!(pause(&pool, &clock), Duration::ZERO);
            pool.not_reached(0, clock.now(), &kind.into());
            assert!(pause(&pool, &clock) <= pace.first);
            pool.reachable();
        }
    }

    #[test]
    fn lanes_that_fail_together_count_once_and_an_open_one_counts_for_all() {
        let clock = Arc::new(ManualClock::new());
        let pool = pool(&clock);
        let began = clock.now();
        for lane in 0..4 {
            pool.not_reached(lane, began, &io::ErrorKind::TimedOut.into());
        }
        assert!(pause(&pool, &clock) <= SILENT.first);
        pool.reachable();
        pool.lane(2).set_open(true);
        pool.not_reached(0, clock.now(), &io::ErrorKind::TimedOut.into());
        assert_eq!(pause(&pool, &clock), Duration::ZERO);
    }
}
