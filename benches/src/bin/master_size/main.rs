//! Master with many objects: memory per object, the duration of an eviction pass, and the latency
//! of requests meanwhile. Run by `cargo xtask bench --master-size`. With `--snapshots`, run by
//! `cargo xtask bench --snapshots`, it measures the costs of snapshots instead.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool prints to its terminal")]

mod snapshots;

use std::borrow::Cow;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mooncake_benches::peer::{Process, Result, wait_for_port};
use mooncake_core::Clock;
use mooncake_core::clock::{Moment, Rng, SystemClock};
use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::{ReplicaType, ReplicateConfig, Segment};
use mooncake_store::api::EndItem;
use mooncake_store::protocol::client::{RpcClient, RpcOptions};
use mooncake_store::protocol::message::*;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

const PORT: u16 = 51_171;
const SEGMENTS: u64 = 8;
const SIZE: u64 = 4096;
const BATCH: u64 = 500;
const TENANT: &str = "default";
/// Fill level before the eviction. It begins at .90 and ends a hundredth below.
const FILLED: f64 = 0.89;
/// Longest permitted duration of a request.
const LIMIT: Duration = Duration::from_millis(10);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["--master", master, "--objects", count, mode @ ..] => match (count.parse(), mode) {
            (Ok(count), []) => run(PathBuf::from(master), count),
            (Ok(count), ["--snapshots"]) => snapshots::run(PathBuf::from(master), count),
            _ => Err(format!("invalid number of objects or mode: {count} {mode:?}")),
        },
        other => Err(format!(
            "unknown arguments {other:?}; run `cargo xtask bench --master-size` or `--snapshots`"
        )),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("master_size: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(binary: PathBuf, objects: u64) -> Result<()> {
    let mut command = Command::new(binary);
    command.args([format!("--rpc_port={PORT}"), format!("--metrics_port={}", PORT + 1)]);
    // A short lease, so that it protects none of the filled objects.
    command.arg("--default_kv_lease_ttl=100");
    let master = Process::start(command, "mooncake_master")?;
    wait_for_port(PORT)?;
    let runtime = Runtime::new().map_err(|e| e.to_string())?;
    runtime.block_on(async {
        mount(objects).await?;
        let before = resident(master.id())?;
        let filled = Arc::new(AtomicU64::new(0));
        let watch = Watch::start(&filled);
        let clock = SystemClock::new();
        let begun = clock.now();
        fill(objects, &filled).await?;
        let took = clock.now().since(begun);
        println!("{objects} objects put in {took:.1?}, {BATCH} a call, 4 connections");
        println!("  meanwhile, {}", watch.stop().await?);
        let each = resident(master.id())?.saturating_sub(before) as f64 / objects as f64;
        println!("{each:.0} bytes of memory for each, keys of {} bytes", key(0).len());
        let next = control(objects, &filled).await?;
        pass(next, &filled).await
    })
}

fn rpc() -> RpcClient {
    let options = RpcOptions { max_connections: 1, ..RpcOptions::default() };
    RpcClient::new(format!("127.0.0.1:{PORT}"), options)
}

fn client() -> ClientId {
    ClientId(Uuid::new(0xb16, 1))
}

fn key(number: u64) -> Vec<u8> {
    format!("object/{number:012}").into_bytes()
}

async fn mount(objects: u64) -> Result<()> {
    let rpc = rpc();
    let size = ((objects * SIZE) as f64 / FILLED / SEGMENTS as f64) as u64;
    for number in 1..=SEGMENTS {
        let segment = Segment {
            id: SegmentId(Uuid::new(0xb16, number)),
            name: format!("node{number}:1"),
            base: number << 44,
            size,
            endpoint: format!("10.0.0.{number}:1"),
            protocol: "tcp".into(),
            host_id: format!("node{number}"),
        };
        let mount = MountSegment { segment: Cow::Owned(segment), client: client() };
        rpc.call(&mount).await.map_err(|e| e.to_string())?.map_err(|code| format!("mount: {code:?}"))?;
    }
    // The client lives as long as the measurement.
    tokio::spawn(async move {
        while rpc.call(&Ping { client: client() }).await.is_ok() {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    });
    Ok(())
}

async fn fill(objects: u64, filled: &Arc<AtomicU64>) -> Result<()> {
    let workers: Vec<_> = (0..4)
        .map(|worker| {
            let filled = filled.clone();
            tokio::spawn(async move {
                let rpc = rpc();
                let mut first = worker * BATCH;
                while first < objects {
                    let keys: Vec<_> = (first..objects.min(first + BATCH)).map(key).collect();
                    put_all(&rpc, &keys).await?;
                    filled.fetch_max(first.saturating_sub(4 * BATCH), Relaxed);
                    first += 4 * BATCH;
                }
                Ok::<_, String>(())
            })
        })
        .collect();
    for worker in workers {
        worker.await.map_err(|e| e.to_string())??;
    }
    filled.store(objects, Relaxed);
    Ok(())
}

/// Puts objects. Returns the duration of its slower call.
async fn put_all(rpc: &RpcClient, keys: &[Vec<u8>]) -> Result<Duration> {
    let names: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let sizes = vec![SIZE; names.len()];
    let (keys, sizes) = (Cow::Borrowed(&names[..]), Cow::Borrowed(&sizes[..]));
    let config = Cow::Owned(ReplicateConfig::default());
    let start = BatchPutStart { client: client(), keys, sizes, config, tenant: TENANT };
    let clock = SystemClock::new();
    let begun = clock.now();
    let started = rpc.call(&start).await.map_err(|e| e.to_string())?;
    let between = clock.now();
    let items: Vec<_> = names.iter().map(|key| EndItem { key, checksum: None }).collect();
    let (items, replicas) = (Cow::Borrowed(&items[..]), ReplicaType::All);
    let end = BatchPutEnd { client: client(), items, replicas, tenant: TENANT };
    let ended = rpc.call(&end).await.map_err(|e| e.to_string())?;
    let fine = started.iter().all(std::result::Result::is_ok) && ended.iter().all(std::result::Result::is_ok);
    if fine { Ok(between.since(begun).max(clock.now().since(between))) } else { Err("a put failed".into()) }
}

/// Makes the same requests without an eviction, to measure their latency on this machine. Returns
/// the number of the next object.
async fn control(objects: u64, filled: &Arc<AtomicU64>) -> Result<u64> {
    let (clock, rpc, mut next) = (SystemClock::new(), rpc(), objects);
    let (watch, begun, mut puts) = (Watch::start(filled), clock.now(), Vec::new());
    let end = (objects as f64 * 0.8999 / FILLED) as u64;
    while next < end {
        puts.push(put_all(&rpc, &[key(next)]).await?);
        next += 1;
        if next.is_multiple_of(200) {
            evicted()?;
        }
    }
    let took = clock.now().since(begun);
    let gets = watch.stop().await?;
    println!("no eviction for {took:.1?}\n  meanwhile, {gets}\n  and {}", Spans(puts).summary("puts"));
    Ok(next)
}

/// Puts one object after the other until eviction begins and ends.
async fn pass(objects: u64, filled: &Arc<AtomicU64>) -> Result<()> {
    let (clock, rpc, mut next) = (SystemClock::new(), rpc(), objects);
    let watch = Watch::start(filled);
    let mut puts = Vec::new();
    // The last read before the eviction began is the latest possible start of the pass.
    let mut begun = clock.now();
    let (mut count, mut changed) = (0, begun);
    while count == 0 || clock.now().since(changed) < Duration::from_millis(500) {
        for _ in 0..200 {
            puts.push(put_all(&rpc, &[key(next)]).await?);
            next += 1;
        }
        let now = evicted()?;
        if now == 0 {
            begun = clock.now();
        } else if count == 0 || now - count > 400 {
            // More than these puts themselves evict.
            (count, changed) = (now, clock.now());
        }
        if next > objects + objects / 10 {
            return Err("the eviction does not begin or does not end".into());
        }
    }
    println!("a pass of eviction: {count} objects within {:.0?}", changed.since(begun));
    let gets = watch.stop().await?;
    let puts = Spans(puts).summary("puts");
    println!("  meanwhile, {gets}\n  and {puts}");
    let longest = gets.longest.max(puts.longest);
    if longest > LIMIT { Err(format!("a request took {longest:?}; the limit is {LIMIT:?}")) } else { Ok(()) }
}

/// Load that requests objects all the time, one at a time on each of four connections.
struct Watch {
    stop: Arc<AtomicBool>,
    readers: Vec<JoinHandle<Result<Vec<Call>>>>,
}

/// Start of a call, and its duration.
type Call = (Moment, Duration);

impl Watch {
    fn start(filled: &Arc<AtomicU64>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let reader = |seed| tokio::spawn(read(filled.clone(), seed, stop.clone()));
        Self { readers: (0..4).map(reader).collect(), stop }
    }

    async fn stop(self) -> Result<Summary> {
        let spans = self.calls().await?.into_iter().map(|(_, span)| span).collect();
        Ok(Spans(spans).summary("single requests"))
    }

    async fn calls(self) -> Result<Vec<Call>> {
        self.stop.store(true, Relaxed);
        let mut calls = Vec::new();
        for reader in self.readers {
            calls.extend(reader.await.map_err(|e| e.to_string())??);
        }
        Ok(calls)
    }
}

async fn read(filled: Arc<AtomicU64>, seed: u64, stop: Arc<AtomicBool>) -> Result<Vec<Call>> {
    let (rpc, clock, mut rng) = (rpc(), SystemClock::new(), Rng::seeded(seed));
    let mut spans = Vec::new();
    while !stop.load(Relaxed) {
        let key = key(rng.below(filled.load(Relaxed).max(1)));
        let begun = clock.now();
        if seed.is_multiple_of(2) {
            let _ = rpc.call(&ExistKey { key: &key, tenant: TENANT }).await.map_err(|e| e.to_string())?;
        } else {
            let _ =
                rpc.call(&GetReplicaList { key: &key, tenant: TENANT }).await.map_err(|e| e.to_string())?;
        }
        spans.push((begun, clock.now().since(begun)));
    }
    Ok(spans)
}

struct Spans(Vec<Duration>);

struct Summary {
    text: String,
    longest: Duration,
}

impl Spans {
    fn summary(mut self, what: &str) -> Summary {
        self.0.sort();
        let at = |part: f64| self.0[((self.0.len() - 1) as f64 * part) as usize];
        let over = self.0.len() - self.0.partition_point(|span| *span <= LIMIT);
        let text = format!(
            "{} {what}: p50 {:.0?}, p99 {:.0?}, p99.9 {:.0?}, longest {:.1?}; {over} over {LIMIT:?}",
            self.0.len(),
            at(0.5),
            at(0.99),
            at(0.999),
            at(1.0),
        );
        Summary { text, longest: at(1.0) }
    }
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

/// Returns the number of evicted objects in the metrics of the master.
fn evicted() -> Result<u64> {
    let mut page = String::new();
    let mut stream = TcpStream::connect(("127.0.0.1", PORT + 1)).map_err(|e| e.to_string())?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").map_err(|e| e.to_string())?;
    stream.read_to_string(&mut page).map_err(|e| e.to_string())?;
    let line = page.lines().find_map(|line| line.strip_prefix("master_evicted_key_count "));
    line.and_then(|number| number.trim().parse().ok())
        .ok_or("the metrics have no count of evicted objects".into())
}

/// Returns the resident memory of a process in bytes.
fn resident(process: u32) -> Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{process}/statm")).map_err(|e| e.to_string())?;
    let pages: Option<u64> = text.split(' ').nth(1).and_then(|word| word.parse().ok());
    pages.map(|pages| pages * 4096).ok_or("cannot read the memory of the master".into())
}
