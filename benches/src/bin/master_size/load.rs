//! Load of a master: clients that mount segments, put objects and request them.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mooncake_benches::peer::Result;
use mooncake_core::Clock;
use mooncake_core::clock::{Moment, Rng, SystemClock};
use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::{ReplicaType, ReplicateConfig, Segment};
use mooncake_store::api::EndItem;
use mooncake_store::protocol::client::{RpcClient, RpcOptions};
use mooncake_store::protocol::message::*;
use tokio::task::JoinHandle;

pub(crate) const PORT: u16 = 51_171;
const SEGMENTS: u64 = 8;
const SIZE: u64 = 4096;
pub(crate) const BATCH: u64 = 500;
const TENANT: &str = "default";
/// Fill level before the eviction. It begins at .90 and ends a hundredth below.
pub(crate) const FILLED: f64 = 0.89;
/// Longest permitted duration of a request.
pub(crate) const LIMIT: Duration = Duration::from_millis(10);

pub(crate) fn rpc() -> RpcClient {
    let options = RpcOptions { max_connections: 1, ..RpcOptions::default() };
    RpcClient::new(format!("127.0.0.1:{PORT}"), options)
}

fn client() -> ClientId {
    ClientId(Uuid::new(0xb16, 1))
}

pub(crate) fn key(number: u64) -> Vec<u8> {
    format!("object/{number:012}").into_bytes()
}

pub(crate) async fn mount(objects: u64) -> Result<()> {
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
            locality: None,
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

pub(crate) async fn fill(objects: u64, filled: &Arc<AtomicU64>) -> Result<()> {
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
pub(crate) async fn put_all(rpc: &RpcClient, keys: &[Vec<u8>]) -> Result<Duration> {
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

/// Load that requests objects all the time, one at a time on each of four connections.
pub(crate) struct Watch {
    stop: Arc<AtomicBool>,
    readers: Vec<JoinHandle<Result<Vec<Call>>>>,
}

/// Start of a call, and its duration.
pub(crate) type Call = (Moment, Duration);

impl Watch {
    pub(crate) fn start(filled: &Arc<AtomicU64>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let reader = |seed| tokio::spawn(read(filled.clone(), seed, stop.clone()));
        Self { readers: (0..4).map(reader).collect(), stop }
    }

    pub(crate) async fn stop(self) -> Result<Summary> {
        let spans = self.calls().await?.into_iter().map(|(_, span)| span).collect();
        Ok(Spans(spans).summary("single requests"))
    }

    pub(crate) async fn calls(self) -> Result<Vec<Call>> {
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

pub(crate) struct Spans(pub(crate) Vec<Duration>);

pub(crate) struct Summary {
    text: String,
    pub(crate) longest: Duration,
}

impl Spans {
    pub(crate) fn summary(mut self, what: &str) -> Summary {
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

/// Returns the resident memory of a process in bytes.
pub(crate) fn resident(process: u32) -> Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{process}/statm")).map_err(|e| e.to_string())?;
    let pages: Option<u64> = text.split(' ').nth(1).and_then(|word| word.parse().ok());
    pages.map(|pages| pages * 4096).ok_or("cannot read the memory of the master".into())
}
