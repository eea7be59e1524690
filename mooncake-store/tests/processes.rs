//! Real processes that die, freeze and come back: contract point 4. The master is the program; members are this test binary, started
//! again for one test that serves memory until its input ends.
#![allow(clippy::print_stdout, reason = "how a member says that it is there, and the figures of a run")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use bytes::Bytes;
use mooncake_core::ErrorKind;
use mooncake_core::clock::Rng;
use mooncake_core::replica::ReplicateConfig;
use mooncake_store::client::{Client, PutOutcome};

/// Longest time an operation of a client here may take.
const LIMIT: Duration = Duration::from_secs(2);
/// What that is on a machine that is busy with other tests, too.
const SLACK: Duration = Duration::from_secs(2);
const SEGMENT: u64 = 16 << 20;
const LEN: usize = 64 << 10;

/// A process that is killed when the test is over.
struct Process(Child);

impl Process {
    fn signal(&self, signal: &str) {
        let pid = self.0.id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    /// Stops every thread of it, and waits until they have stopped.
    fn freeze(&self) {
        self.signal("-STOP");
        while !self.is_frozen() {
            std::thread::yield_now();
        }
    }

    fn is_frozen(&self) -> bool {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.0.id())).unwrap();
        threads.map_while(Result::ok).all(|thread| {
            // "number (name) state ..", of which the name may be anything.
            let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
        })
    }

    fn thaw(&self) {
        self.signal("-CONT");
    }

    /// Without a word to anybody, as `kill -9`.
    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn master(port: u16, flags: &[&str]) -> Process {
    let child = Command::new(env!("CARGO_BIN_EXE_mooncake_master"))
        .args(["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", "--metrics_port=0"])
        .arg(format!("--rpc_port={port}"))
        .args(flags)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    Process(child)
}

/// The process of a member: offers memory and says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the other processes of the tests in this file"]
#[allow(clippy::disallowed_methods, reason = "its orders come from the environment")]
async fn member() {
    let Ok(master) = std::env::var("TEST_MASTER") else { return };
    let client = connect(&master, SEGMENT).await;
    println!("\nready {}", client.hostname());
    std::io::stdout().flush().unwrap();
    let wait = || std::io::stdin().read(&mut [0]);
    let _ = tokio::task::spawn_blocking(wait).await;
    client.close().await.unwrap();
}

/// Starts a member; its name.
fn start_member(port: u16) -> (Process, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "member", "--ignored", "--nocapture"])
        .env("TEST_MASTER", format!("127.0.0.1:{port}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let name = lines.map_while(Result::ok).find_map(|line| Some(line.strip_prefix("ready ")?.to_owned()));
    (Process(child), name.expect("a member that comes up"))
}

async fn connect(master: &str, segment: u64) -> Client {
    Client::builder()
        .master(master)
        .local_hostname("127.0.0.1")
        .advertise(std::net::Ipv4Addr::LOCALHOST.into())
        .segment(segment)
        .timeout(LIMIT)
        .connect()
        .await
        .unwrap()
}

fn value(seed: u64) -> Bytes {
    let mut bytes = vec![0; LEN];
    Rng::seeded(seed).fill(&mut bytes);
    bytes.into()
}

/// Runs an operation, which must end in time.
#[allow(clippy::disallowed_methods, reason = "the bound is one of real time")]
async fn timed<T>(what: &str, operation: impl Future<Output = T>) -> T {
    let begun = Instant::now();
    let outcome = operation.await;
    assert!(begun.elapsed() < LIMIT + SLACK, "{what} took {:?}", begun.elapsed());
    outcome
}

/// What a read came to: a hit, whose bytes are right, or not.
async fn read(client: &Client, i: u64) -> bool {
    match timed("get", client.get(format!("key {i}"))).await {
        Ok(Some(bytes)) => {
            assert_eq!(bytes, value(i), "key {i}");
            true
        }
        Ok(None) => false,
        Err(error) => {
            assert!(matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unavailable), "{error}");
            false
        }
    }
}

async fn hits(client: &Client, keys: std::ops::Range<u64>) -> usize {
    let mut hits = 0;
    for i in keys {
        hits += usize::from(read(client, i).await);
    }
    hits
}

async fn put(client: &Client, i: u64, config: &ReplicateConfig) -> bool {
    match timed("put", client.put_with(format!("key {i}"), value(i), config)).await {
        Ok(outcome) => outcome == PutOutcome::Stored,
        Err(error) => {
            let fine =
                matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unavailable | ErrorKind::NoSpace);
            assert!(fine, "{error}");
            false
        }
    }
}

async fn puts(client: &Client, keys: std::ops::Range<u64>, config: &ReplicateConfig) -> usize {
    let mut stored = 0;
    for i in keys {
        stored += usize::from(put(client, i, config).await);
    }
    stored
}

async fn eventually(what: &str, limit: Duration, mut holds: impl AsyncFnMut() -> bool) {
    let waited = tokio::time::timeout(limit, async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    assert!(waited.await.is_ok(), "not within {limit:?}: {what}");
}

/// A master, two members with processes of their own, and a client here that offers nothing.
async fn cluster(flags: &[&str]) -> (u16, Process, Vec<(Process, String)>, Client) {
    let port = free_port();
    let server = master(port, flags);
    let client = connect(&format!("127.0.0.1:{port}"), 0).await;
    (port, server, (0..2).map(|_| start_member(port)).collect(), client)
}

fn in_member(name: &str) -> ReplicateConfig {
    ReplicateConfig { preferred_segment: name.into(), ..ReplicateConfig::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_member_is_only_misses() {
    let (_, _master, mut members, client) = cluster(&["--client_ttl=2"]).await;
    let (second, name) = members.pop().unwrap();
    assert_eq!(puts(&client, 0..20, &in_member(&name)).await, 20);
    assert_eq!(puts(&client, 20..40, &ReplicateConfig::replicas(2)).await, 20);
    second.kill();
    assert_eq!(hits(&client, 0..20).await, 0);
    assert_eq!(hits(&client, 20..40).await, 20, "the other replica is there");
    assert_eq!(puts(&client, 40..60, &ReplicateConfig::default()).await, 20, "there is room elsewhere");
    assert_eq!(hits(&client, 40..60).await, 20);
    // The master learns of it, and the keys may be put again.
    eventually("the master knows", Duration::from_secs(6), async || {
        put(&client, 0, &ReplicateConfig::default()).await
    })
    .await;
    assert_eq!(hits(&client, 0..1).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_member_keeps_nobody_waiting() {
    let (_, _master, members, client) = cluster(&["--client_ttl=2"]).await;
    let (frozen, name) = &members[1];
    assert_eq!(puts(&client, 0..5, &in_member(name)).await, 5);
    assert_eq!(puts(&client, 20..30, &ReplicateConfig::replicas(2)).await, 10);
    frozen.freeze();
    // With shared memory it may even be served.
    hits(&client, 0..5).await;
    assert_eq!(hits(&client, 20..30).await, 10);
    eventually("puts go elsewhere", Duration::from_secs(8), async || {
        put(&client, 40, &ReplicateConfig::default()).await
    })
    .await;
    assert_eq!(puts(&client, 41..50, &ReplicateConfig::default()).await, 9);
    frozen.thaw();
    // It finds out that it was taken for dead, and comes back empty; nobody ever sees other bytes.
    eventually("it is a member again", Duration::from_secs(8), async || {
        hits(&client, 0..5).await;
        let i = Rng::from_os().next_u64();
        let stored = put(&client, i, &in_member(name)).await;
        stored && read(&client, i).await
    })
    .await;
    assert_eq!(hits(&client, 40..50).await, 10);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_master_is_missed_for_seconds() {
    let (port, server, _members, client) = cluster(&[]).await;
    assert_eq!(puts(&client, 0..20, &ReplicateConfig::default()).await, 20);
    server.kill();
    assert_eq!(hits(&client, 0..2).await, 0);
    assert_eq!(puts(&client, 60..62, &ReplicateConfig::default()).await, 0);
    let _server = master(port, &[]);
    eventually("it serves again", Duration::from_secs(3), async || {
        put(&client, Rng::from_os().next_u64(), &ReplicateConfig::default()).await
    })
    .await;
    hits(&client, 0..20).await;
    assert_eq!(puts(&client, 100..120, &ReplicateConfig::default()).await, 20);
    assert_eq!(hits(&client, 100..120).await, 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_master_fails_calls_in_time() {
    let (_, server, _members, client) = cluster(&[]).await;
    assert_eq!(puts(&client, 0..10, &ReplicateConfig::default()).await, 10);
    server.freeze();
    assert_eq!(hits(&client, 0..1).await, 0);
    assert_eq!(puts(&client, 50..51, &ReplicateConfig::default()).await, 0);
    server.thaw();
    eventually("it answers again", Duration::from_secs(3), async || read(&client, 0).await).await;
    assert_eq!(puts(&client, 20..30, &ReplicateConfig::default()).await, 10);
    assert_eq!(hits(&client, 20..30).await, 10);
    // What was asked of it meanwhile did not come too late: the key is free, or was never taken.
    eventually("the key may be put", Duration::from_secs(3), async || {
        put(&client, 50, &ReplicateConfig::default()).await || read(&client, 50).await
    })
    .await;
}

/// Members come and go without a word while others read and write the same keys: never a wrong byte, never a hang.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn churn_under_load() {
    let (port, _master, mut members, client) =
        cluster(&["--client_ttl=2", "--default_kv_lease_ttl=200"]).await;
    let over = Arc::new(AtomicBool::new(false));
    let counts: Arc<[AtomicU64; 3]> = Arc::default();
    let mut workers = Vec::new();
    for worker in 0..8u64 {
        let (over, counts) = (over.clone(), counts.clone());
        let client =
            if worker % 2 == 0 { client.clone() } else { connect(&format!("127.0.0.1:{port}"), 0).await };
        workers.push(tokio::spawn(async move {
            let mut rng = Rng::seeded(worker);
            while !over.load(SeqCst) {
                let i = rng.below(64);
                match rng.below(8) {
                    0 => drop(timed("remove", client.remove(format!("key {i}"), true)).await),
                    1..=3 => {
                        let config = ReplicateConfig::replicas(1 + rng.below(2));
                        counts[0].fetch_add(u64::from(put(&client, i, &config).await), SeqCst);
                    }
                    _ if read(&client, i).await => drop(counts[1].fetch_add(1, SeqCst)),
                    _ => drop(counts[2].fetch_add(1, SeqCst)),
                }
            }
        }));
    }
    for round in 0..6 {
        tokio::time::sleep(Duration::from_millis(700)).await;
        let (gone, _) = members.remove(0);
        if round % 3 == 2 {
            // For longer than its time to live, so that it comes back to a master that has buried it.
            gone.freeze();
            members.push(tokio::task::spawn_blocking(move || start_member(port)).await.unwrap());
            tokio::time::sleep(Duration::from_millis(2500)).await;
            gone.thaw();
            tokio::time::sleep(Duration::from_millis(500)).await;
        } else {
            members.push(tokio::task::spawn_blocking(move || start_member(port)).await.unwrap());
        }
        gone.kill();
    }
    over.store(true, SeqCst);
    for worker in workers {
        worker.await.unwrap();
    }
    let [stored, hits, misses] = [0, 1, 2].map(|i| counts[i].load(SeqCst));
    println!("{stored} stored, {hits} hits, {misses} misses, no wrong byte");
    assert!(stored > 100 && hits > 100, "{stored} {hits} {misses}");
}

/// Objects of the test below, unless `TEST_OBJECTS` says otherwise. Contract point 7 was measured with a million.
const OBJECTS: u64 = 20_000;

/// A master is killed: the next one serves all there was.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[allow(clippy::disallowed_methods, reason = "the number of objects may come from the environment")]
async fn a_killed_master_takes_nothing_along() {
    let objects = std::env::var("TEST_OBJECTS").ok().and_then(|text| text.parse().ok()).unwrap_or(OBJECTS);
    let port = free_port();
    let address = format!("127.0.0.1:{port}");
    let killed = master(port, &[]);
    let mut members = Vec::new();
    for _ in 0..4 {
        members.push(connect(&address, (objects * 64).max(SEGMENT)).await);
    }
    let key = |i: u64| format!("object {i}");
    let bytes = |i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes().repeat(1 + i as usize % 12);
    let all: Vec<u64> = (0..objects).collect();
    for batch in all.chunks(1000) {
        let items: Vec<_> = batch.iter().map(|&i| (key(i), bytes(i))).collect();
        for outcome in members[0].batch_put(&items, &ReplicateConfig::default()).await.unwrap() {
            assert_eq!(outcome.unwrap(), PutOutcome::Stored);
        }
    }
    let patience = Duration::from_secs(60 + objects / 2000);
    eventually("every object would outlive the master", patience, async || {
        let mut lasting = 0;
        for member in &members {
            lasting += member.lasting_objects().await as u64;
        }
        lasting == objects
    })
    .await;
    killed.kill();
    let begun = Instant::now();
    let _master = master(port, &[]);
    let mut seen = 0;
    eventually("all are served again", patience, async || {
        while let Some(batch) = all.get(seen..all.len().min(seen + 1000)).filter(|batch| !batch.is_empty()) {
            let keys: Vec<_> = batch.iter().map(|&i| key(i)).collect();
            let there = members[1].batch_exist(&keys).await.unwrap_or_default();
            if !there.iter().all(|there| matches!(there, Ok(true))) || there.is_empty() {
                return false;
            }
            seen += batch.len();
        }
        true
    })
    .await;
    let took = begun.elapsed();
    for batch in all.chunks(1000) {
        let keys: Vec<_> = batch.iter().map(|&i| key(i)).collect();
        let read = members[2].batch_get(&keys).await.unwrap();
        for (&i, read) in batch.iter().zip(read) {
            assert_eq!(read.unwrap().as_deref(), Some(&bytes(i)[..]), "object {i}");
        }
    }
    println!("{objects} objects served again {took:?} after the kill, no wrong byte");
    assert!(took < Duration::from_secs(5) + SLACK || objects > OBJECTS, "{took:?}");
}
