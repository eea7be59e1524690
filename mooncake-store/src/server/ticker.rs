//! The thread that does what is due.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::{Clock, SystemClock};
use mooncake_core::meta::MetaKeys;
use mooncake_core::replica::Segment;
use mooncake_core::{Error, Result};
use parking_lot::{Condvar, Mutex};
use tokio::runtime::Handle;

use super::State;

/// How often the master is asked to do what is due.
const TICK: Duration = Duration::from_millis(10);

/// Who sleeps so long for a tick was stopped (SIGSTOP, a machine that was suspended or moved), and so was all that listens to clients.
const STOPPED: Duration = Duration::from_secs(1);

/// How often a line of figures is logged, and what rates are counted from.
const REPORT: Duration = Duration::from_secs(10);

/// A thread of its own: a sweep over millions of objects must not hold up the connections of a worker.
#[derive(Debug)]
pub(super) struct Ticker {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Ticker {
    pub(super) fn start(state: Arc<State>) -> Result<Self> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let stopped = stop.clone();
        let runtime = Handle::current();
        let thread = std::thread::Builder::new()
            .name("mooncake-tick".into())
            .spawn(move || run(&state, &stopped, &runtime))
            .map_err(|error| Error::internal("cannot start a thread").with_source(error))?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Ends the thread; a tick at work is finished.
    pub(super) fn stop(mut self) {
        self.signal();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }

    fn signal(&self) {
        *self.stop.0.lock() = true;
        self.stop.1.notify_all();
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.signal();
    }
}

fn run(state: &Arc<State>, (stopped, wake): &(Mutex<bool>, Condvar), runtime: &Handle) {
    let mut reported = state.master.clock().now();
    let mut stopped = stopped.lock();
    // The master's may be set by hand; this is about sleep, which is not.
    let clock = SystemClock::new();
    while !*stopped {
        let before = clock.now();
        wake.wait_for(&mut stopped, TICK);
        let slept = clock.now().since(before);
        if *stopped {
            return;
        }
        if !state.standing.leads() {
            // Thawed, perhaps: that clients seem silent says nothing, and another master has them.
            continue;
        }
        if slept >= STOPPED {
            tracing::warn!(?slept, "this process was stopped: clients get that much longer to be heard of");
            state.master.was_stopped(slept);
        }
        let report = parking_lot::MutexGuard::unlocked(&mut stopped, || state.master.tick());
        if !report.expired.is_empty() {
            state.departed.note(&report.expired);
            if let Some(config) = &state.config.clean_up {
                runtime.spawn(clean_up(state.clone(), MetaKeys::new(&config.cluster_id), report.expired));
            }
        }
        let now = state.master.clock().now();
        if now.since(reported) >= REPORT {
            reported = now;
            if state.config.metric_reporting {
                let stats = state.master.stats();
                tracing::info!(
                    target: "mooncake_store::figures",
                    used = stats.used(), capacity = stats.capacity(), keys = stats.keys, clients = stats.clients,
                    evicted = stats.evicted_keys, "metrics"
                );
                tracing::debug!(target: "mooncake_store::figures", "{}", super::summary::line(state));
            }
            state.rates.take(now, &state.requests);
        }
    }
}

/// Removes what dead clients published.
async fn clean_up(state: Arc<State>, keys: MetaKeys, expired: Vec<Segment>) {
    for segment in expired {
        // Its client has more than this one, or somebody else goes by its name by now.
        if state.master.segment_status_named(&segment.name).is_ok() {
            continue;
        }
        if !state.standing.leads() {
            return;
        }
        for key in [keys.segment(&segment.name), keys.rpc_meta(&segment.name)] {
            match state.published.delete(&key).await {
                Ok(true) => tracing::info!(key, "metadata of a dead client removed"),
                Ok(false) => {}
                Err(error) => tracing::warn!(key, %error, "metadata of a dead client stays"),
            }
        }
    }
}
