//! Thread that runs the due work of a master.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::{Moment, SharedClock, SystemClock, thread_time};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::meta::MetaKeys;
use mooncake_core::replica::Segment;
use mooncake_core::{Error, Result};
use parking_lot::{Condvar, Mutex};
use tokio::runtime::Handle;

use super::dial_back;
use super::state::State;
use mooncake_master::{Master, TickReport};

/// Interval between two runs of the due work.
const TICK: Duration = Duration::from_millis(10);

/// Lost time from which this process counts as stopped (SIGSTOP, a suspended or migrated machine).
/// While stopped it receives no heartbeats.
const STOPPED: Duration = Duration::from_secs(1);

/// Interval of the summary in the log, and of the rates in it.
const REPORT: Duration = Duration::from_secs(10);

/// A separate thread, so that a sweep over millions of objects does not block the connections of a
/// worker.
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
            .map_err(|error| Error::internal("cannot start the ticker thread").with_source(error))?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Stops the thread after the current run.
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
    // The master's clock may be controlled by a test; this clock measures real sleep.
    let mut stops = Stops::new(SystemClock::shared(), thread_time);
    while !*stopped {
        wake.wait_for(&mut stopped, TICK);
        if *stopped {
            return;
        }
        if !state.leadership.leads() {
            // After a long stop, missing heartbeats prove nothing, and another master may have the
            // clients.
            stops.lost();
            continue;
        }
        let report = parking_lot::MutexGuard::unlocked(&mut stopped, || turn(&state.master, &mut stops));
        if !report.expired.is_empty() {
            state.endpoints.note_expired(&report.expired);
            if let Some(config) = &state.config.clean_up {
                runtime.spawn(clean_up(state.clone(), MetaKeys::new(&config.cluster_id), report.expired));
            }
        }
        dial_back::start_checks(state, runtime);
        let now = state.master.clock().now();
        if now.since(reported) >= REPORT {
            reported = now;
            if state.config.metric_reporting {
                let stats = state.master.stats();
                tracing::info!(
                    target: "mooncake_store::metrics",
                    used = stats.used(), capacity = stats.capacity(), keys = stats.keys, clients = stats.clients,
                    evicted = stats.evicted_keys, "metrics"
                );
                tracing::debug!(target: "mooncake_store::metrics", "{}", super::summary::line(state));
            }
            state.rates.take(now, &state.requests);
        }
    }
}

/// Runs the due work. Before that, reports to the master how long this process was stopped since
/// the last run.
fn turn(master: &Master, stops: &mut Stops) -> TickReport {
    // Read the time first: a stop after this expires no client in this run, and a stop before it is
    // part of the lost time.
    let now = master.clock().now();
    let lost = stops.lost();
    if lost >= STOPPED {
        tracing::warn!(?lost, "process was stopped; client timeouts are extended");
        master.was_stopped(lost);
    }
    let report = master.tick_at(now);
    if is_planted("ticker-measures-sleep-only") {
        stops.lost();
    }
    report
}

/// Measurement of the time in which a thread neither ran nor slept as requested.
struct Stops {
    clock: SharedClock,
    /// Processor time of the thread.
    used: fn() -> Duration,
    measured: (Moment, Duration),
}

impl Stops {
    fn new(clock: SharedClock, used: fn() -> Duration) -> Self {
        let measured = (clock.now(), used());
        Self { clock, used, measured }
    }

    /// Returns the time since the last call in which the thread did not run, including its short
    /// sleeps. A long sweep uses processor time, so it does not count as a stop.
    fn lost(&mut self) -> Duration {
        let (at, used) = (self.clock.now(), (self.used)());
        let (before, used_before) = std::mem::replace(&mut self.measured, (at, used));
        at.since(before).saturating_sub(used.saturating_sub(used_before))
    }
}

/// Removes the metadata that expired clients published.
async fn clean_up(state: Arc<State>, keys: MetaKeys, expired: Vec<Segment>) {
    for segment in expired {
        // The client has further segments, or another client has taken its name.
        if state.master.segment_status_by_name(&segment.name).is_ok() {
            continue;
        }
        if !state.leadership.leads() {
            return;
        }
        for key in [keys.segment(&segment.name), keys.rpc_meta(&segment.name)] {
            match state.published.delete(&key).await {
                Ok(true) => tracing::info!(key, "metadata of an expired client removed"),
                Ok(false) => {}
                Err(error) => tracing::warn!(key, %error, "cannot remove metadata of an expired client"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

    use mooncake_core::clock::{Clock, ManualClock};
    use mooncake_core::ids::{ClientId, SegmentId, Uuid};

    use super::*;
    use mooncake_master::MasterOptions;

    /// Process that stops after a reading of this clock.
    #[derive(Debug, Default)]
    struct StopsAfter {
        time: ManualClock,
        readings: AtomicU64,
        /// Index of the reading after which the process stops.
        at: u64,
    }

    impl Clock for StopsAfter {
        fn now(&self) -> Moment {
            let now = self.time.now();
            if self.readings.fetch_add(1, SeqCst) == self.at {
                self.time.advance(Duration::from_secs(25));
            }
            now
        }

        fn wall_ms(&self) -> u64 {
            0
        }
    }

    #[test]
    fn a_stop_at_any_point_of_a_turn_expires_nobody() {
        let mut stops_seen = 0;
        for at in 0..60 {
            let clock = Arc::new(StopsAfter { at, ..StopsAfter::default() });
            let parts = Default::default();
            let master: Result<Master> =
                Master::with_parts(MasterOptions::default(), &parts, &Default::default(), clock.clone(), 7);
            let master = master.unwrap();
            let segment = Segment {
                id: SegmentId(Uuid::new(2, 1)),
                name: "node:1".into(),
                base: 1 << 40,
                size: 1 << 20,
                endpoint: "10.0.0.1:1".into(),
                protocol: "tcp".into(),
                host_id: "node".into(),
                locality: None,
            };
            let client = ClientId(Uuid::new(1, 1));
            master.mount(client, &segment).unwrap();
            // Time before the first run does not count.
            if clock.readings.load(SeqCst) > at {
                continue;
            }
            let mut stops = Stops::new(clock.clone(), || Duration::ZERO);
            for turn_number in 0..4 {
                clock.time.advance(TICK);
                let report = turn(&master, &mut stops);
                assert!(
                    report.expired.is_empty(),
                    "expired in turn {turn_number} by a stop after reading {at}"
                );
            }
            stops_seen += u64::from(clock.readings.load(SeqCst) > at);
        }
        assert!(stops_seen > 5, "the clock is read {stops_seen} times only");
    }

    #[test]
    fn a_tick_that_computes_is_no_stop() {
        static USED: AtomicU64 = AtomicU64::new(0);
        let clock = Arc::new(ManualClock::new());
        let mut stops = Stops::new(clock.clone(), || Duration::from_secs(USED.load(SeqCst)));
        clock.advance(Duration::from_secs(5));
        USED.store(5, SeqCst);
        assert_eq!(stops.lost(), Duration::ZERO);
        clock.advance(Duration::from_secs(5));
        assert_eq!(stops.lost(), Duration::from_secs(5));
    }
}
