//! Many clients on few keys, all the time, while others join and leave.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use mooncake_store::client::Client;
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_blocking};

use crate::cluster::{argument, connect, eventually, master_shown};
use crate::process::{Process, deadline, free_port, metric};
use crate::worker::{Counts, Work, Worker};

/// An allocation expires soon enough for the test to see its space return, and long after its
/// writer has given up.
const FLAGS: &[&str] = &[
    "--client_ttl=2",
    "--default_kv_lease_ttl=200",
    "--put_start_discard_timeout_sec=28",
    "--put_start_release_timeout_sec=30",
];
/// Longest time until all allocations have expired.
const SETTLED: Duration = Duration::from_secs(60);
/// Longest duration of an operation that does not hang. Clients give up after two seconds; the rest
/// is for a busy machine.
const HANGS: Duration = Duration::from_secs(30);

/// Longest time until one of many clients has done some operations of each kind. On two idle cores
/// they take a quarter of a minute.
const LOADED: Duration = Duration::from_secs(400);

/// Master, and a client whose segment stays to the end.
struct Stage {
    port: u16,
    metrics: u16,
    _master: Process,
    steady: Client,
    registered: usize,
    over: Arc<AtomicBool>,
}

impl Stage {
    async fn set(segment: u64) -> Self {
        let (port, metrics) = (free_port(), free_port());
        let master = master_shown(port, metrics, FLAGS);
        let steady = connect(&format!("127.0.0.1:{port}"), segment).await;
        let registered = steady.engine().descriptor().buffers.len();
        Self { port, metrics, _master: master, steady, registered, over: Arc::default() }
    }

    /// Runs operations in this process until the load ends. Every operation must end.
    fn work(&self, number: u64, keys: u64) -> OwnWork {
        let mut work = Work::new(self.steady.clone(), number, keys, true);
        let over = self.over.clone();
        let (report, counts) = watch::channel(Counts::default());
        let task = tokio::spawn(async move {
            while !over.load(SeqCst) {
                let step = tokio::time::timeout(HANGS, work.step()).await;
                step.map_err(|_| format!("an operation hangs; before: {}", work.counts))??;
                report.send_replace(work.counts);
            }
            Ok(work.counts)
        });
        OwnWork { task, counts }
    }

    /// Checks after all other clients have left that no data of them is left.
    async fn assert_clean(self) {
        let gone = async || {
            let _ = self.steady.remove_all(true).await;
            let figures = ["key_count", "puts_in_progress", "allocated_bytes", "active_clients"]
                .map(|name| metric(self.metrics, &format!("master_{name}")));
            figures == [Some(0), Some(0), Some(0), Some(1)]
        };
        eventually("nothing is left of keys, writes, space and clients", SETTLED, gone).await;
        assert_eq!(self.steady.status().local_buffer_used(), 0, "every buffer came back");
        assert_eq!(self.steady.engine().descriptor().buffers.len(), self.registered, "registered memory");
        self.steady.close().await.unwrap();
    }
}

/// Operations in this process.
struct OwnWork {
    task: JoinHandle<Result<Counts, String>>,
    /// Numbers of operations until now.
    counts: watch::Receiver<Counts>,
}

impl OwnWork {
    /// Returns whether each outcome that matters has occurred more often than this.
    fn has_exceeded(&self, stored: u64, removed: u64, hits: u64) -> bool {
        let counts = self.counts.borrow();
        self.task.is_finished() || counts.stored > stored && counts.removed > removed && counts.hits > hits
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_clients_on_one_key() {
    let stage = Stage::set(8 << 20).await;
    let port = stage.port;
    let start = move |number| spawn_blocking(move || Worker::start(port, number, 1, 0, true));
    let starting: Vec<_> = (1..8).map(start).collect();
    let mut workers = Vec::new();
    for worker in starting {
        workers.push(worker.await.unwrap());
    }
    let eighth = stage.work(8, 1);
    tokio::time::sleep(Duration::from_secs(8)).await;
    eventually("the client of this process has done enough", LOADED, async || {
        eighth.has_exceeded(20, 20, 20)
    })
    .await;
    stage.over.store(true, SeqCst);
    let mut counts = eighth.task.await.unwrap().unwrap();
    for worker in workers {
        counts.add(spawn_blocking(|| worker.leave()).await.unwrap());
    }
    println!("one key, eight clients: {counts:?}, no wrong byte");
    assert!(counts.stored > 20 && counts.removed > 20 && counts.hits > 20, "{counts:?}");
    stage.assert_clean().await;
}

/// Duration of the next test in seconds, unless `TEST_SECONDS` sets it.
const SECONDS: u64 = 6;
/// Duration in seconds from which writers are killed, too: their allocations stay reserved for half
/// a minute.
const LONG: u64 = 30;

/// Clients with segments of their own join and leave, one way or another, while all read and write
/// the same keys.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[allow(clippy::disallowed_methods, reason = "it runs for a given time")]
async fn clients_come_and_go_under_load() {
    let span = argument("TEST_SECONDS").unwrap_or(SECONDS);
    let stage = Stage::set(16 << 20).await;
    let port = stage.port;
    let ours: Vec<_> = (1..=2).map(|number| stage.work(number, KEYS)).collect();
    let mut counts = Counts::default();
    let (mut left, mut killed, mut frozen) = (0, 0, 0);
    let mut workers = VecDeque::new();
    let (begun, late) = (Instant::now(), deadline());
    for number in 10.. {
        let kind = Exit::of(number);
        let writes = kind != Exit::Killed || span >= LONG;
        let worker =
            spawn_blocking(move || Worker::start(port, number, KEYS, 8 << 20, writes)).await.unwrap();
        workers.push_back((kind, worker));
        if begun.elapsed() > Duration::from_secs(span) {
            if ours.iter().all(|work| work.has_exceeded(50, 0, 50)) {
                break;
            }
            late("the clients of this process have done enough");
        }
        if workers.len() < CROWD {
            continue;
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        let Some((kind, worker)) = workers.pop_front() else { break };
        if kind == Exit::Killed {
            killed += 1;
            spawn_blocking(|| worker.kill()).await.unwrap();
            continue;
        }
        if kind == Exit::Frozen {
            // The stop exceeds the heartbeat timeout, so the client returns to a master that has
            // expired it.
            frozen += 1;
            worker.process.freeze();
            tokio::time::sleep(Duration::from_millis(2500)).await;
            worker.process.thaw();
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        left += 1;
        counts.add(spawn_blocking(|| worker.leave()).await.unwrap());
    }
    for (_, worker) in workers {
        left += 1;
        counts.add(spawn_blocking(|| worker.leave()).await.unwrap());
    }
    stage.over.store(true, SeqCst);
    for work in ours {
        counts.add(work.task.await.unwrap().unwrap());
    }
    println!(
        "{span} s: {left} left ({frozen} of them frozen before), {killed} were killed; {counts:?}, no wrong byte"
    );
    assert!(left > 2 && counts.stored > 100 && counts.hits > 100, "{left} {counts:?}");
    stage.assert_clean().await;
}

const KEYS: u64 = 48;
/// Number of workers at a time.
const CROWD: usize = 4;

/// Way in which a worker leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exit {
    Leaves,
    Killed,
    Frozen,
}

impl Exit {
    fn of(number: u64) -> Self {
        match number % 6 {
            0 | 2 | 4 => Self::Leaves,
            5 => Self::Frozen,
            _ => Self::Killed,
        }
    }
}
