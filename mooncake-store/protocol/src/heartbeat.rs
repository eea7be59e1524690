//! A thread for heartbeats, and how long other requests wait.
//!
//! Requests are answered on the runtime of the server. When more of them come than it can answer, each waits for its turn, and heartbeats
//! would wait with them until their clients count as dead. So a thread of its own accepts connections, and serves each of them for as long
//! as it asks nothing but heartbeats.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mooncake_core::clock::{Clock, Moment, SystemClock};
use mooncake_core::fault_injection::is_planted;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// How a server treats a request when it has more than it can answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Answered before all others. It takes no longer than some microseconds.
    Heartbeat,
    /// Answered in its turn, however long that takes: it ends what was begun.
    Kept,
    /// Answered in its turn, or refused with [`Status::Overloaded`](super::frame::Status::Overloaded).
    Sheddable,
}

/// The thread that accepts connections and serves heartbeats. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct HeartbeatThread {
    pub(super) handle: Handle,
    /// Dropped, it ends the thread.
    _stop: oneshot::Sender<()>,
}

impl HeartbeatThread {
    /// Starts the thread. `None` if there can be none; the server then does without.
    pub(super) fn start() -> Option<Self> {
        if is_planted("heartbeats-in-line") {
            return None;
        }
        Self::try_start().inspect_err(|error| tracing::warn!(%error, "no thread for heartbeats")).ok()
    }

    fn try_start() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let until_stopped = move || {
            // An error: the other end is gone.
            let _ = runtime.block_on(stopped);
        };
        std::thread::Builder::new().name("mooncake-heart".into()).spawn(until_stopped)?;
        Ok(Self { handle, _stop: stop })
    }
}

/// A task that ends with this.
pub(super) struct AbortOnDrop<R>(pub(super) JoinHandle<R>);

impl<R> AbortOnDrop<R> {
    pub(super) async fn outcome(mut self) -> io::Result<R> {
        (&mut self.0).await.map_err(io::Error::other)
    }
}

impl<R> Drop for AbortOnDrop<R> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// How often the delay of the runtime is measured.
const PROBE: Duration = Duration::from_millis(50);
/// Requests are refused while every one of them waits longer than this.
const TARGET: Duration = Duration::from_millis(500);

/// A server that is this late looks whether callers are still there.
const LATE: Duration = Duration::from_millis(100);

/// Whether requests wait for too long.
#[derive(Debug)]
pub(super) struct Overload {
    clock: SystemClock,
    sheds: AtomicBool,
    /// When the runtime last ran the task that measures.
    ran: AtomicU64,
    /// How late that was, in nanoseconds.
    delay: AtomicU64,
}

impl Default for Overload {
    fn default() -> Self {
        let clock = SystemClock::new();
        let ran = AtomicU64::new(clock.now().0);
        Self { clock, sheds: AtomicBool::new(false), ran, delay: AtomicU64::new(0) }
    }
}

impl Overload {
    /// Whether requests that can be refused are to be refused now.
    pub(super) fn sheds(&self) -> bool {
        self.sheds.load(Relaxed)
    }

    /// Whether a request that is read now may have waited for so long that its caller has given up.
    pub(super) fn is_late(&self) -> bool {
        let since = self.clock.now().since(Moment(self.ran.load(Relaxed)));
        since > PROBE + LATE || Duration::from_nanos(self.delay.load(Relaxed)) > LATE
    }

    /// Measures without end how late the runtime runs a task that is due.
    pub(super) async fn measure(&self) {
        let mut late_before = false;
        loop {
            let begun = self.clock.now();
            tokio::time::sleep(PROBE).await;
            let now = self.clock.now();
            let delay = now.since(begun).saturating_sub(PROBE);
            self.delay.store(u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX), Relaxed);
            self.ran.store(now.0, Relaxed);
            // One late turn may be a process that was stopped.
            let late = delay > TARGET;
            let shedding = late && late_before;
            if self.sheds.swap(shedding, Relaxed) != shedding {
                tracing::warn!(shedding, ?delay, "more requests than can be answered");
            }
            late_before = late;
        }
    }
}
