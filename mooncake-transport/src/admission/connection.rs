//! State of one connection: its wait, its message under way, and its bytes.

use std::net::SocketAddr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::task::AbortHandle;

/// State of a connection that works on a request.
pub(super) const WORKING: u64 = u64::MAX;
/// State of a connection that has been closed for a new one, or because it waited too long.
pub(super) const ENDED: u64 = u64::MAX - 1;
/// Lowest bit of the state of a waiting connection: set inside a request. The other bits are the
/// moment when the wait began.
pub(super) const IN_REQUEST: u64 = 1;
/// Begin of the transfer of a connection without one.
pub(super) const NO_TRANSFER: u64 = u64::MAX;
/// Number of the next connection of this process.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Connection of a listener.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) number: u64,
    pub(super) listener: &'static str,
    pub(super) peer: OnceLock<SocketAddr>,
    pub(super) state: AtomicU64,
    pub(super) task: OnceLock<AbortHandle>,
    /// Counted bytes of its buffers.
    pub(super) held: AtomicU64,
    /// Bytes that were counted when it was closed to stay below the limit of bytes.
    pub(super) leaving: AtomicU64,
    /// Moment when the message that is being transferred began, or the first one of a backlog, or
    /// [`NO_TRANSFER`]. Beyond the limit of bytes, the connection with the earliest one is closed.
    pub(super) began: AtomicU64,
    /// Moment when the present message of a backlog began. Its minimum rate counts from then.
    pub(super) paced: AtomicU64,
    /// Moment when that message has to be complete.
    pub(super) deadline: AtomicU64,
}

impl Connection {
    pub(super) fn new(listener: &'static str, state: u64) -> Self {
        Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            listener,
            peer: OnceLock::new(),
            state: AtomicU64::new(state),
            task: OnceLock::new(),
            held: AtomicU64::new(0),
            leaving: AtomicU64::new(0),
            began: AtomicU64::new(NO_TRANSFER),
            paced: AtomicU64::new(NO_TRANSFER),
            deadline: AtomicU64::new(u64::MAX),
        }
    }

    /// Returns the state of a connection that waits.
    pub(super) fn waiting_since(&self) -> Option<u64> {
        Some(self.state.load(Ordering::Relaxed)).filter(|state| *state < ENDED)
    }

    /// Closes the connection if its state is still `seen`.
    pub(super) fn end(&self, seen: u64) -> bool {
        let ended = self.state.compare_exchange(seen, ENDED, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if ended {
            self.abort();
        }
        ended
    }

    pub(super) fn abort(&self) {
        if let Some(task) = self.task.get() {
            task.abort();
        }
    }
}
