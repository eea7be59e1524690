//! Many clients on few keys, all the time, while others come and go.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use mooncake_store::client::Client;
use tokio::task::{JoinHandle, spawn_blocking};

use crate::cluster::{connect, eventually, master_shown, order};
use crate::process::{Process, figure, free_port};
use crate::worker::{Counts, Work, Worker};

/// A grant ends in time for a test to see that its space comes back, and long after its writer has given up.
const FLAGS: &[&str] = &[
    "--client_ttl=2",
    "--default_kv_lease_ttl=200",
    "--put_start_discard_timeout_sec=28",
    "--put_start_release_timeout_sec=30",
];
/// Until all of that is over.
const SETTLED: Duration = Duration::from_secs(60);
/// An operation that takes longer hangs. Clients give up after two seconds; the rest is for a machine that is busy.
const HANGS: Duration = Duration::from_secs(30);

/// A master and a member with a segment that stays to the end.
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

    /// Works in this process until it is over. Every operation must end.
    fn work(&self, number: u64, keys: u64) -> JoinHandle<Result<Counts, String>> {
        let mut work = Work::new(self.steady.clone(), number, keys, true);
        let over = self.over.clone();
        tokio::spawn(async move {
            while !over.load(SeqCst) {
                let step = tokio::time::timeout(HANGS, work.step()).await;
                step.map_err(|_| format!("an operation hangs; before: {}", work.counts))??;
            }
            Ok(work.counts)
        })
    }

    /// Everybody else has left: nothing of them is left, either.
    async fn assert_clean(self) {
        let gone = async || {
            let _ = self.steady.remove_all(true).await;
            let figures = ["key_count", "puts_in_progress", "allocated_bytes", "active_clients"]
                .map(|name| figure(self.metrics, &format!("master_{name}")));
            figures == [Some(0), Some(0), Some(0), Some(1)]
        };
        eventually("nothing is left of keys, writes, space and clients", SETTLED, gone).await;
        assert_eq!(self.steady.local_buffer_used(), 0, "every buffer came back");
        assert_eq!(self.steady.engine().descriptor().buffers.len(), self.registered, "registered memory");
        self.steady.close().await.unwrap();
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
    stage.over.store(true, SeqCst);
    let mut counts = eighth.await.unwrap().unwrap();
    for worker in workers {
        counts.add(spawn_blocking(|| worker.leave()).await.unwrap());
    }
    println!("one key, eight clients: {counts:?}, no wrong byte");
    assert!(counts.stored > 20 && counts.removed > 20 && counts.hits > 20, "{counts:?}");
    stage.assert_clean().await;
}

/// How long the next one takes in seconds, unless `TEST_SECONDS` says otherwise.
const SECONDS: u64 = 6;
/// From here on writers are killed, too: it takes half a minute until the space they were given is free again.
const LONG: u64 = 30;

/// Clients with segments of their own join and leave, one way or another, while all read and write the same keys.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[allow(clippy::disallowed_methods, reason = "it runs for a given time")]
async fn clients_come_and_go_under_load() {
    let span = order("TEST_SECONDS").unwrap_or(SECONDS);
    let stage = Stage::set(16 << 20).await;
    let port = stage.port;
    let ours: Vec<_> = (1..=2).map(|number| stage.work(number, KEYS)).collect();
    let mut counts = Counts::default();
    let (mut left, mut killed, mut frozen) = (0, 0, 0);
    let mut workers = VecDeque::new();
    let begun = Instant::now();
    for number in 10.. {
        let kind = Exit::of(number);
        let writes = kind != Exit::Killed || span >= LONG;
        let worker =
            spawn_blocking(move || Worker::start(port, number, KEYS, 8 << 20, writes)).await.unwrap();
        workers.push_back((kind, worker));
        if begun.elapsed() > Duration::from_secs(span) {
            break;
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
            // For longer than its time to live, so that it comes back to a master that has buried it.
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
        counts.add(work.await.unwrap().unwrap());
    }
    println!(
        "{span} s: {left} left ({frozen} of them frozen before), {killed} were killed; {counts:?}, no wrong byte"
    );
    assert!(left > 2 && counts.stored > 100 && counts.hits > 100, "{left} {counts:?}");
    stage.assert_clean().await;
}

const KEYS: u64 = 48;
/// How many workers there are at a time.
const CROWD: usize = 4;

/// How a worker goes.
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
