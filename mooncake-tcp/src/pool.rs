//! Pool of the connections to one peer, and the choice of the connection for a transfer.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mooncake_core::backoff::{Backoff, Pace};
use mooncake_core::clock::{Moment, Rng};
use mooncake_core::{Error, ErrorCode, SharedClock};
use mooncake_transport::config::TcpConfig;
use mooncake_transport::instance::{Instance, OtherInstance};
use mooncake_transport::{Completion, Op, Opcode};
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::connection_queue::{ConnectionQueue, NEVER};
use crate::frame::{Direction, Framing};
use crate::piece::Piece;
use crate::table::Registration;

/// Work of a queue before the next queue is considered. Small transfers stay together, so that they
/// share system calls. Measured with batches of sixteen 64 KiB blocks: 128 KiB, which spreads each
/// batch over all queues, is a tenth slower for one submitter and a quarter for four.
const SPILL: u64 = 512 << 10;
/// Alignment of stripes, so that copies stay aligned.
const STRIPE_ALIGN: usize = 64 << 10;
/// Pauses after connection attempts without a response. Each attempt holds requests up for all of
/// `connect_timeout`.
const TIMED_OUT_PACE: Pace = Pace { first: Duration::from_millis(500), max: Duration::from_secs(8) };
/// Pauses after refused connection attempts. Such an attempt returns at once, and a process may be
/// back soon.
const REFUSED_PACE: Pace = Pace { first: Duration::from_millis(20), max: Duration::from_secs(1) };

/// Starts the task of the queue with this index on a runtime.
pub(crate) type Start = fn(Arc<Pool>, usize, &Handle);

/// Connection queues to one peer. They connect when needed and stay connected.
pub(crate) struct Pool {
    host: String,
    port: u16,
    /// Process that every connection expects; `None` for a node without hellos.
    instance: Option<Instance>,
    queues: Box<[ConnectionQueue]>,
    /// State of failed connection attempts.
    failures: Mutex<Failures>,
    /// End of the pause after failed attempts.
    down_until: AtomicU64,
    pub(crate) config: Arc<TcpConfig>,
    pub(crate) clock: SharedClock,
    runtime: Handle,
    start: Start,
}

/// Failed connection attempts.
struct Failures {
    backoff: Backoff,
    /// Mismatch found by the last attempt, if another process answered.
    other_instance: Option<OtherInstance>,
}

/// Transfer as submitted, with its part of the completion.
pub(crate) struct Transfer<'a, 'b> {
    pub(crate) op: Op<'a, Registration>,
    pub(crate) framing: Framing,
    /// True if the transfer lies in one region of the peer as far as this node knows. Otherwise a
    /// stripe could succeed within a wrong range.
    pub(crate) may_stripe: bool,
    pub(crate) deadline: Moment,
    pub(crate) now: Moment,
    pub(crate) pending_mask: &'b mut u64,
}

impl Pool {
    pub(crate) fn new(
        (host, port, instance): (String, u16, Option<Instance>),
        config: Arc<TcpConfig>,
        clock: SharedClock,
        (runtime, start): (Handle, Start),
        rng: Rng,
    ) -> Self {
        let queues = (0..config.connections).map(|_| ConnectionQueue::new()).collect();
        let failures = Mutex::new(Failures { backoff: Backoff::new(rng), other_instance: None });
        let down_until = AtomicU64::new(0);
        Self { host, port, instance, queues, failures, down_until, config, clock, runtime, start }
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

    pub(crate) fn queue(&self, index: usize) -> &ConnectionQueue {
        &self.queues[index]
    }

    /// Returns whether a queue has a connection.
    pub(crate) fn is_connected(&self) -> bool {
        self.queues.iter().any(ConnectionQueue::is_open)
    }

    pub(crate) fn another_is_open(&self, index: usize) -> bool {
        self.queues.iter().enumerate().any(|(i, queue)| i != index && queue.is_open())
    }

    /// Queues one transfer, in stripes if it is large. [`Pool::flush`] sends it.
    pub(crate) fn submit(self: &Arc<Self>, transfer: Transfer<'_, '_>, mut done: Completion) {
        let Transfer { op, framing, may_stripe, deadline, now, pending_mask } = transfer;
        if let Some(error) = self.refusal(&op, deadline, now) {
            return done.finish(Err(error));
        }
        let stripe = if may_stripe { self.stripe_len(op.len()) } else { op.len() };
        let piece = |from: usize, len: usize, done: Completion| Piece {
            // SAFETY: `from < op.len()`, so the address stays inside the local bytes of the
            // operation.
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
            self.push(self.choose_queue(now), piece(from, stripe, done.share()), now, pending_mask);
            from += stripe;
        }
        self.push(self.choose_queue(now), piece(from, op.len() - from, done), now, pending_mask);
    }

    /// Sends the requests of the queues whose bits are set.
    pub(crate) fn flush(&self, mut pending_mask: u64) {
        while pending_mask != 0 {
            let index = pending_mask.trailing_zeros() as usize;
            pending_mask &= pending_mask - 1;
            self.queues[index].flush_eagerly(&*self.clock, &self.config);
        }
    }

    /// Records an established connection.
    pub(crate) fn record_connect(&self) {
        // The common case takes no lock.
        if self.down_until.swap(0, Ordering::Relaxed) != 0 {
            let mut failures = self.failures.lock();
            failures.backoff.worked();
            failures.other_instance = None;
        }
    }

    /// Records a failed connection attempt that began at `began`. Unless other connections are
    /// established, a pause follows.
    pub(crate) fn record_connect_failure(&self, index: usize, began: Moment, error: &io::Error) {
        if !self.another_is_open(index) {
            let pace = if error.kind() == io::ErrorKind::TimedOut { &TIMED_OUT_PACE } else { &REFUSED_PACE };
            let mut failures = self.failures.lock();
            failures.other_instance = OtherInstance::from_error(error);
            let until = failures.backoff.failed(began, self.clock.now(), pace);
            drop(failures);
            self.down_until.store(until.0, Ordering::Relaxed);
        }
    }

    /// Moves the pieces of a queue that cannot connect to other queues, or fails them.
    pub(crate) fn reroute_or_fail(self: &Arc<Self>, index: usize, pieces: Vec<Piece>, error: &io::Error) {
        let now = self.clock.now();
        let mut pending_mask = 0;
        // After a mismatch, the other connections lead to the former process, or have not noticed
        // it yet.
        let can_reroute = self.another_is_open(index) && OtherInstance::from_error(error).is_none();
        for piece in pieces {
            if can_reroute {
                self.push(self.choose_queue(now), piece, now, &mut pending_mask);
            } else {
                let text = format!("cannot connect to {self}: {error}");
                piece.finish(Err(Error::new(ErrorCode::TransferFail, text)));
            }
        }
        self.flush(pending_mask);
    }

    /// Returns a callback that removes cancelled, unsent pieces from the queues. Callers run it
    /// after a cancellation.
    pub(crate) fn cancellation_callback(self: &Arc<Self>) -> impl FnOnce() + Send + 'static {
        let pool = Arc::downgrade(self);
        move || {
            for queue in pool.upgrade().iter().flat_map(|pool| &pool.queues) {
                let mut state = queue.lock();
                state.may_contain_cancelled = true;
                state.wake();
            }
        }
    }

    /// Fails every transfer in progress and every later one.
    pub(crate) fn close(&self) {
        for queue in &self.queues {
            let mut state = queue.lock();
            state.closed = true;
            state.wake();
        }
    }

    /// Returns the error of a transfer that missed its deadline.
    pub(crate) fn deadline_error(&self) -> Error {
        Error::new(ErrorCode::RpcTimeout, format!("the transfer with {self} has passed its deadline"))
    }

    fn refusal(&self, op: &Op<'_, Registration>, deadline: Moment, now: Moment) -> Option<Error> {
        if op.is_empty() {
            return Some(Error::invalid("invalid transfer: no bytes"));
        }
        if op.remote().checked_add(op.len() as u64).is_none() {
            return Some(Error::invalid(format!(
                "invalid transfer: range overflows. address={:#x} len={}",
                op.remote(),
                op.len()
            )));
        }
        if deadline <= now {
            return Some(self.deadline_error());
        }
        if self.down_until.load(Ordering::Relaxed) > now.0
            && !self.queues.iter().any(ConnectionQueue::is_open)
        {
            let text = match self.failures.lock().other_instance {
                Some(other_instance) => format!("cannot connect to {self}: {other_instance}"),
                None => {
                    format!("cannot connect to {self}: the last attempt failed a moment ago; retry later")
                }
            };
            return Some(Error::new(ErrorCode::TransferFail, text));
        }
        None
    }

    fn push(self: &Arc<Self>, index: usize, piece: Piece, now: Moment, pending_mask: &mut u64) {
        match self.queues[index].push(piece, now, &self.config) {
            Ok(spawn) => {
                *pending_mask |= 1 << index;
                if spawn {
                    // Spawned outside the lock of the queue: a runtime that shuts down drops the
                    // task immediately.
                    (self.start)(self.clone(), index, &self.runtime);
                }
            }
            Err(piece) => {
                let text = format!("cannot queue transfer with {self}: queue is full");
                piece.finish(Err(Error::new(ErrorCode::TaskPendingLimitExceeded, text)));
            }
        }
    }

    fn choose_queue(&self, now: Moment) -> usize {
        let rank = |queue: &ConnectionQueue| {
            (!queue.is_open() && queue.is_backing_off(now), queue.load() / SPILL, !queue.is_open())
        };
        // The first of several equal queues wins, so that an idle pool always uses the same one.
        self.queues.iter().enumerate().min_by_key(|(_, queue)| rank(queue)).map_or(0, |(index, _)| index)
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

/// Returns the deadline of a completion, or `NEVER`.
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
        let tasks: (Handle, Start) = (runtime.handle().clone(), |_, _, _| {});
        Pool::new(("h".into(), 1, None), config, clock.clone(), tasks, Rng::seeded(1))
    }

    /// Returns the remaining pause of the pool.
    fn pause(pool: &Pool, clock: &ManualClock) -> Duration {
        Moment(pool.down_until.load(Ordering::Relaxed)).since(clock.now())
    }

    #[test]
    fn an_unreachable_peer_is_tried_less_and_less_often_until_it_is_back() {
        let clock = Arc::new(ManualClock::new());
        let pool = pool(&clock);
        for (kind, pace) in
            [(io::ErrorKind::TimedOut, TIMED_OUT_PACE), (io::ErrorKind::ConnectionRefused, REFUSED_PACE)]
        {
            let mut last = Duration::ZERO;
            for _ in 0..12 {
                pool.record_connect_failure(0, clock.now(), &kind.into());
                let now = pause(&pool, &clock);
                assert!(now > last / 2 && now <= pace.max, "{now:?} after {last:?}");
                last = now;
                clock.advance(now);
            }
            assert!(last > pace.max / 2, "{last:?}");
            pool.record_connect();
            assert_eq!(pause(&pool, &clock), Duration::ZERO);
            pool.record_connect_failure(0, clock.now(), &kind.into());
            assert!(pause(&pool, &clock) <= pace.first);
            pool.record_connect();
        }
    }

    #[test]
    fn connect_failures_together_count_once() {
        let clock = Arc::new(ManualClock::new());
        let pool = pool(&clock);
        let began = clock.now();
        for queue in 0..4 {
            pool.record_connect_failure(queue, began, &io::ErrorKind::TimedOut.into());
        }
        assert!(pause(&pool, &clock) <= TIMED_OUT_PACE.first);
        pool.record_connect();
        pool.queue(2).set_open(true);
        pool.record_connect_failure(0, clock.now(), &io::ErrorKind::TimedOut.into());
        assert_eq!(pause(&pool, &clock), Duration::ZERO);
    }
}
