//! Budget of the bytes that peers keep in this process: parts of requests that are not complete,
//! requests that wait for their turn, and responses that are not read.
//!
//! A connection accounts for its buffers when it waits, so a request that arrives whole and is
//! handled at once, and a response that leaves at once, cost nothing. Above the limit, the
//! connection whose request or response has been under way for longest is closed. One message that
//! is longer than half of the limit does not count as long as the others have the other half.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use mooncake_core::clock::{Moment, SharedClock, SystemClock};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::memory::memory_limits;
use parking_lot::Mutex;

use super::connection::{Connection, NO_TRANSFER};

/// Largest default of the limit in bytes.
const MAX_DEFAULT_LIMIT: u64 = 256 << 20;
/// Share of the memory of the process that is the limit by default: `1 / SHARE`.
const SHARE: u64 = 16;
/// Bytes of one connection that are not counted: buffers for short messages, which a connection
/// keeps while it is idle.
pub const SMALL_BUFFERS: usize = 32 << 10;
/// Least time between two log lines about closed connections.
const LOG_PAUSE: Duration = Duration::from_secs(1);

static OF_PROCESS: LazyLock<ByteBudget> = LazyLock::new(|| {
    ByteBudget::new(MAX_DEFAULT_LIMIT.min(memory_of_process() / SHARE), SystemClock::shared())
});

/// Returns the memory that this process may use, in bytes, as far as known.
fn memory_of_process() -> u64 {
    memory_limits(Path::new("/")).iter().map(|limit| limit.total).min().unwrap_or(u64::MAX)
}

/// Budget of bytes that the connections of one or more listeners share.
#[derive(Clone, Debug)]
pub struct ByteBudget(Arc<Ledger>);

#[derive(Debug)]
struct Ledger {
    clock: SharedClock,
    limit: AtomicU64,
    /// Bytes of all connections, including those that are being closed.
    held: AtomicU64,
    /// Bytes of connections that are being closed.
    leaving: AtomicU64,
    closed: AtomicU64,
    logged: AtomicU64,
    /// Connections that hold bytes, by number.
    holders: Mutex<HashMap<u64, Arc<Connection>>>,
}

/// Use of a [`ByteBudget`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteReport {
    /// Bytes of incomplete and waiting requests, and of unread responses.
    pub held: u64,
    /// Limit of these bytes.
    pub limit: u64,
    /// Number of connections that were closed to stay below the limit.
    pub closed: u64,
}

impl ByteBudget {
    /// Returns the budget that the listeners of this process share. Its limit is 256 MiB, or a 16th
    /// of the memory that the process may use if that is less, until
    /// [`set_limit`](Self::set_limit).
    pub fn of_process() -> Self {
        OF_PROCESS.clone()
    }

    /// Creates a budget of its own.
    pub fn new(limit: u64, clock: SharedClock) -> Self {
        Self(Arc::new(Ledger {
            clock,
            limit: AtomicU64::new(limit),
            held: AtomicU64::new(0),
            leaving: AtomicU64::new(0),
            closed: AtomicU64::new(0),
            logged: AtomicU64::new(0),
            holders: Mutex::default(),
        }))
    }

    /// Creates a budget for messages of up to `max_message` bytes: two of them, but at most a
    /// quarter of the memory that the process may use, and at least the limit of the process.
    pub fn for_messages(max_message: u64) -> Self {
        let limit = max_message.saturating_mul(2).min(memory_of_process() / 4);
        Self::new(limit.max(Self::of_process().report().limit), SystemClock::shared())
    }

    /// Sets the limit in bytes. Connections beyond it are closed when more bytes arrive.
    pub fn set_limit(&self, limit: u64) {
        self.0.limit.store(limit, Relaxed);
    }

    /// Returns the use of the budget.
    pub fn report(&self) -> ByteReport {
        ByteReport {
            held: self.0.held.load(Relaxed),
            limit: self.0.limit.load(Relaxed),
            closed: self.0.closed.load(Relaxed),
        }
    }

    pub(super) fn now(&self) -> Moment {
        self.0.clock.now()
    }

    /// Returns whether a connection that has `before` bytes may keep `bytes` while it is idle.
    pub(super) fn may_keep(&self, before: u64, bytes: u64) -> bool {
        let others = self.0.held.load(Relaxed).saturating_sub(before);
        others.saturating_add(bytes) <= self.0.limit.load(Relaxed) / 2
    }

    /// Sets the number of bytes that a connection holds.
    pub(super) fn hold(&self, connection: &Arc<Connection>, bytes: u64) {
        let before = connection.held.swap(bytes, SeqCst);
        let grows = bytes > before;
        match grows {
            true => self.0.held.fetch_add(bytes - before, SeqCst),
            false => self.0.held.fetch_sub(before - bytes, SeqCst),
        };
        if (before == 0) != (bytes == 0) {
            let mut holders = self.0.holders.lock();
            match connection.held.load(SeqCst) {
                0 => holders.remove(&connection.number),
                _ => holders.insert(connection.number, connection.clone()),
            };
        }
        if grows && self.counted() > self.0.limit.load(Relaxed) {
            self.close_longest_transfer();
        }
    }

    /// Releases the bytes of a connection that has ended.
    pub(super) fn release(&self, connection: &Connection) {
        self.0.held.fetch_sub(connection.held.swap(0, SeqCst), SeqCst);
        // Once this lock is free, no other thread closes the connection any more.
        self.0.holders.lock().remove(&connection.number);
        self.0.leaving.fetch_sub(connection.leaving.swap(0, SeqCst), SeqCst);
    }

    /// Returns whether no connection is counted.
    #[cfg(test)]
    pub(super) fn is_clear(&self) -> bool {
        self.0.holders.lock().is_empty() && self.0.held.load(SeqCst) == 0 && self.0.leaving.load(SeqCst) == 0
    }

    /// Returns the bytes of the connections that are not being closed.
    fn counted(&self) -> u64 {
        self.0.held.load(SeqCst).saturating_sub(self.0.leaving.load(SeqCst))
    }

    /// Closes connections with a message under way until the other ones are within the limit. One
    /// message may exceed it. Buffers of idle connections close none.
    fn close_longest_transfer(&self) {
        if is_planted("answer-unbounded") {
            return;
        }
        let holders = self.0.holders.lock();
        let limit = self.0.limit.load(Relaxed);
        let began = |it: &&Arc<Connection>| it.began.load(Relaxed);
        let is_counted = |it: &&Arc<Connection>| it.leaving.load(SeqCst) == 0 && began(it) != NO_TRANSFER;
        // A connection that has made progress in the meantime is not closed, but the next one.
        for _ in 0..=holders.len() {
            let in_transfer = holders.values().filter(is_counted);
            let bytes = in_transfer.clone().map(|it| it.held.load(SeqCst));
            let is_within = match bytes.clone().max() {
                Some(largest) if largest > limit / 2 => bytes.sum::<u64>() - largest <= limit / 2,
                _ => self.counted() <= limit,
            };
            if is_within || in_transfer.clone().count() < 2 {
                return;
            }
            let waiting = in_transfer.filter(|it| it.waiting_since().is_some());
            let Some(longest_waiting) = waiting.min_by_key(began) else { return };
            let bytes = longest_waiting.held.load(SeqCst);
            if longest_waiting.waiting_since().is_some_and(|seen| longest_waiting.end(seen)) {
                longest_waiting.leaving.store(bytes, SeqCst);
                self.0.leaving.fetch_add(bytes, SeqCst);
                self.0.closed.fetch_add(1, Relaxed);
                self.log(longest_waiting, bytes);
            }
        }
    }

    fn log(&self, connection: &Connection, bytes: u64) {
        let now = self.now();
        let logged = Moment(self.0.logged.load(Relaxed));
        if logged != Moment(0) && now.since(logged) < LOG_PAUSE {
            return;
        }
        self.0.logged.store(now.0, Relaxed);
        let age = now.since(Moment(connection.began.load(Relaxed)));
        tracing::warn!(
            listener = connection.listener,
            peer = connection.peer.get().map(tracing::field::display),
            bytes,
            ?age,
            limit = self.0.limit.load(Relaxed),
            "connection closed: waiting requests and unread responses exceed their limit"
        );
    }
}
