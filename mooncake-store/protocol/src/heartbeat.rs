//! Thread for heartbeats, and classes of requests under overload.
//!
//! The runtime of the server handles requests. Under overload each request waits for its turn, and
//! heartbeats would wait with them until their clients expire. A separate thread therefore accepts
//! connections and serves each of them as long as it sends only heartbeats.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mooncake_core::clock::{Clock, Moment, SystemClock};
use mooncake_core::fault_injection::is_planted;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Treatment of a request by a server under overload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Handled before all others. It takes only some microseconds.
    Heartbeat,
    /// Handled in its turn, however long that takes, because it completes earlier work.
    Critical,
    /// Handled in its turn, or refused with
    /// [`Status::Overloaded`](super::frame::Status::Overloaded).
    Sheddable,
}

/// Thread that accepts connections and serves heartbeats. It ends when this handle is dropped.
#[derive(Debug)]
pub(super) struct HeartbeatThread {
    pub(super) handle: Handle,
    /// Sender whose drop ends the thread.
    _stop: oneshot::Sender<()>,
}

impl HeartbeatThread {
    /// Starts the thread. Returns `None` if that fails; the server then runs without it.
    pub(super) fn start() -> Option<Self> {
        if is_planted("heartbeats-in-line") {
            return None;
        }
        Self::try_start()
            .inspect_err(|error| tracing::warn!(%error, "cannot start the heartbeat thread"))
            .ok()
    }

    fn try_start() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let until_stopped = move || {
            // An error means that the receiver is gone.
            let _ = runtime.block_on(stopped);
        };
        std::thread::Builder::new().name("mooncake-heart".into()).spawn(until_stopped)?;
        Ok(Self { handle, _stop: stop })
    }
}

/// Task that is aborted on drop.
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

/// Interval between two measurements of the runtime's delay.
const PROBE: Duration = Duration::from_millis(50);
/// Delay above which requests are refused, if every one of them waits that long.
const TARGET: Duration = Duration::from_millis(500);

/// Delay above which a server checks whether callers are still connected.
const LATE: Duration = Duration::from_millis(100);

/// Overload detector of a server.
#[derive(Debug)]
pub(super) struct Overload {
    clock: SystemClock,
    sheds: AtomicBool,
    /// Time at which the runtime last ran the measuring task.
    ran: AtomicU64,
    /// Delay of that run in nanoseconds.
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
    /// Returns whether sheddable requests shall be refused now.
    pub(super) fn sheds(&self) -> bool {
        self.sheds.load(Relaxed)
    }

    /// Returns whether a request that is read now may have waited so long that its caller has given
    /// up.
    pub(super) fn is_late(&self) -> bool {
        let since = self.clock.now().since(Moment(self.ran.load(Relaxed)));
        since > PROBE + LATE || Duration::from_nanos(self.delay.load(Relaxed)) > LATE
    }

    /// Measures the delay of due tasks on the runtime; never returns.
    pub(super) async fn measure(&self) {
        let mut late_before = false;
        loop {
            let begun = self.clock.now();
            tokio::time::sleep(PROBE).await;
            let now = self.clock.now();
            let delay = now.since(begun).saturating_sub(PROBE);
            self.delay.store(u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX), Relaxed);
            self.ran.store(now.0, Relaxed);
            // A single late run may come from a process that was stopped.
            let late = delay > TARGET;
            let shedding = late && late_before;
            if self.sheds.swap(shedding, Relaxed) != shedding {
                tracing::warn!(shedding, ?delay, "overload changed");
            }
            late_before = late;
        }
    }
}
