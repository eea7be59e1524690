//! Master without clients: calls per second and their latency, of this project and of Mooncake C++
//! in turn in one run, under the same load generator, with the calls that both support. No object
//! bytes are transferred. Run by `cargo xtask bench --master`. `--beside OPTION` compares with a
//! second master of this project that is started with this option, `--build MASTER` with a master
//! of an earlier build. `--calls PART`, at the end, measures the calls whose names contain a text.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool prints to its terminal")]

use std::borrow::Cow;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mooncake_benches::peer::{Installation, Process, Result};
use mooncake_core::Clock;
use mooncake_core::clock::{Rng, SystemClock};
use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::{ReplicaType, ReplicateConfig, Segment};
use mooncake_store::api::EndItem;
use mooncake_store::protocol::client::{RpcClient, RpcOptions};
use mooncake_store::protocol::master_client::MasterClient;
use mooncake_store::protocol::message::*;
use tokio::runtime::Runtime;

const OURS: u16 = 51_151;
const THEIRS: u16 = 52_151;
/// Number of stored objects that calls refer to.
const OBJECTS: u64 = 20_000;
const BATCH: u64 = 500;
const SIZE: u64 = 4096;
/// Duration of one measurement of a cell.
const TURN: Duration = Duration::from_millis(700);
const ROUNDS: usize = 9;
const TENANT: &str = "default";

/// Kind of call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Exist,
    Locate,
    Put,
    BatchExist,
    Prefix,
    BatchLocate,
    LocatedPrefix,
    BatchPut,
}

impl Call {
    const ALL: [Call; 8] = [
        Call::Exist,
        Call::Locate,
        Call::Put,
        Call::BatchExist,
        Call::Prefix,
        Call::BatchLocate,
        Call::LocatedPrefix,
        Call::BatchPut,
    ];

    fn name(self) -> &'static str {
        match self {
            Call::Exist => "exist",
            Call::Locate => "get replica list",
            Call::Put => "put start + end",
            Call::BatchExist => "exist x500",
            Call::Prefix => "prefix x500",
            Call::BatchLocate => "get replica list x500",
            Call::LocatedPrefix => "located prefix x500",
            Call::BatchPut => "put start + end x500",
        }
    }

    /// Returns the wanted ratio of throughputs.
    fn wanted(self) -> f64 {
        match self {
            Call::Exist | Call::Locate | Call::Put => 1.3,
            Call::BatchExist | Call::Prefix | Call::BatchLocate | Call::LocatedPrefix | Call::BatchPut => 2.0,
        }
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (words, calls) = match words.as_slice() {
        [first @ .., "--calls", part] => (first, *part),
        all => (all, ""),
    };
    let outcome = match words {
        ["--master", master] => run(Path::new(master), None, calls),
        ["--master", master, "--peer", python] => {
            run(Path::new(master), Some(Other::Peer(Installation::new(*python))), calls)
        }
        ["--master", master, "--beside", option] => {
            run(Path::new(master), Some(Other::Option((*option).to_owned())), calls)
        }
        ["--master", master, "--build", other] => {
            run(Path::new(master), Some(Other::Build(other.into())), calls)
        }
        other => Err(format!("unknown arguments {other:?}; run `cargo xtask bench --master`")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("master_bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Second master of a comparison.
enum Other {
    /// Master of Mooncake C++.
    Peer(Installation),
    /// Master of this project, started with one more option.
    Option(String),
    /// Program of a master of this project.
    Build(PathBuf),
}

impl Other {
    fn start(&self, binary: &Path) -> Result<Process> {
        match self {
            Self::Peer(peer) => peer.master(THEIRS, None),
            Self::Option(option) => start(binary, THEIRS, Some(option)),
            Self::Build(other) => start(other, THEIRS, None),
        }
    }
}

/// Starts a master of this project.
fn start(binary: &Path, port: u16, option: Option<&str>) -> Result<Process> {
    let mut command = Command::new(binary);
    command.args([format!("--rpc_port={port}"), format!("--metrics_port={}", port + 1)]).args(option);
    Process::start(command, "mooncake_master")
}

fn run(binary: &Path, other: Option<Other>, calls: &str) -> Result<()> {
    let _ours = start(binary, OURS, None)?;
    let _other = other.as_ref().map(|other| other.start(binary)).transpose()?;
    wait_for(OURS)?;
    let runtime = Runtime::new().map_err(|e| e.to_string())?;
    let mut masters = vec![Side::new(&runtime, OURS, true)?];
    if let Some(other) = &other {
        wait_for(THEIRS)?;
        masters.push(Side::new(&runtime, THEIRS, !matches!(other, Other::Peer(_)))?);
    }
    let judged = matches!(other, Some(Other::Peer(_)));
    println!(
        "{:<22} {:>5}  {:>10} {:>9}  {:>10} {:>9}  {:>6} {:>6}  wanted",
        "call",
        "conns",
        "ours /s",
        "p99 us",
        if judged { "peer /s" } else { "other /s" },
        "p99 us",
        "ratio",
        "of p99"
    );
    let mut short = Vec::new();
    for call in Call::ALL.into_iter().filter(|call| call.name().contains(calls)) {
        for connections in [1, 64] {
            let mut results = vec![Vec::new(); masters.len()];
            // The first round only warms up.
            for round in 0..=ROUNDS {
                for (side, results) in masters.iter().zip(&mut results) {
                    let turn = runtime.block_on(side.measure(call, connections))?;
                    if round > 0 {
                        results.push(turn);
                    }
                }
            }
            let compared = results.get(1).map(|theirs| compare(&results[0], theirs));
            let sides: Vec<_> = results.iter().map(|turns| middle(turns)).collect();
            print_row(call, connections, &sides, compared, judged);
            short.extend(
                compared.iter().filter(|_| judged).flat_map(|ratio| shortfalls(call, connections, *ratio)),
            );
        }
    }
    if short.is_empty() { Ok(()) } else { Err(format!("goals missed:\n  {}", short.join("\n  "))) }
}

/// Returns the goals that the master of this project misses in a row.
fn shortfalls(call: Call, connections: usize, ratio: Turn) -> Vec<String> {
    let mut short = Vec::new();
    let row = format!("{}, {connections} connections", call.name());
    // A NaN misses its goal.
    if ratio.rate.is_nan() || ratio.rate < call.wanted() {
        short.push(format!(
            "{row}: {:.2} times the calls, but {:.1} are required",
            ratio.rate,
            call.wanted()
        ));
    }
    if ratio.p99.is_nan() || ratio.p99 > 1.0 {
        short.push(format!("{row}: p99 is {:.2} times that of Mooncake C++", ratio.p99));
    }
    short
}

fn wait_for(port: u16) -> Result<()> {
    for _ in 0..200 {
        if TcpStream::connect(("127.0.0.1", port)).is_ok() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(25));
    }
    Err(format!("nothing listens on port {port}"))
}

/// Calls per second, and the 99th percentile of their durations in microseconds.
#[derive(Clone, Copy, Debug)]
struct Turn {
    rate: f64,
    p99: f64,
}

/// Compares each turn of this project with the following turn of Mooncake C++: the load of the
/// machine changes from round to round.
fn compare(ours: &[Turn], theirs: &[Turn]) -> Turn {
    let ratio =
        |(ours, theirs): (&Turn, &Turn)| Turn { rate: ours.rate / theirs.rate, p99: ours.p99 / theirs.p99 };
    middle(&ours.iter().zip(theirs).map(ratio).collect::<Vec<_>>())
}

fn middle(turns: &[Turn]) -> Turn {
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    Turn {
        rate: median(turns.iter().map(|turn| turn.rate).collect()),
        p99: median(turns.iter().map(|turn| turn.p99).collect()),
    }
}

fn print_row(call: Call, connections: usize, sides: &[Turn], compared: Option<Turn>, judged: bool) {
    let ours = sides[0];
    print!("{:<22} {connections:>5}  {:>10.0} {:>9.1}", call.name(), ours.rate, ours.p99);
    if let (Some(theirs), Some(ratio)) = (sides.get(1), compared) {
        print!("  {:>10.0} {:>9.1}  {:>6.3} {:>6.2}", theirs.rate, theirs.p99, ratio.rate, ratio.p99);
        if judged {
            let verdict = if shortfalls(call, connections, ratio).is_empty() { "yes" } else { "NO" };
            print!("  >= {:.1}, <= 1: {verdict}", call.wanted());
        }
    }
    println!();
}

/// Master under load, with a segment that no client writes to.
struct Side {
    address: String,
    client: ClientId,
    keys: Arc<Vec<Vec<u8>>>,
    /// Number of the next key to put.
    next: Arc<AtomicU64>,
    /// True if the master has the calls of this project. A prefix is otherwise the batch call that
    /// clients make instead.
    is_ours: bool,
}

impl Side {
    fn new(runtime: &Runtime, port: u16, is_ours: bool) -> Result<Self> {
        let address = format!("127.0.0.1:{port}");
        let client = ClientId(Uuid::new(0xbe9c, u64::from(port)));
        let keys = Arc::new((0..OBJECTS).map(|i| format!("object/{i:012}").into_bytes()).collect());
        let side = Self { address, client, keys, next: Arc::default(), is_ours };
        runtime.block_on(side.fill())?;
        let (address, client) = (side.address.clone(), side.client);
        runtime.spawn(async move {
            let master = MasterClient::remote(address, RpcOptions::default());
            loop {
                let _ = master.ping(client).await;
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        });
        Ok(side)
    }

    fn rpc(&self) -> RpcClient {
        RpcClient::new(self.address.clone(), RpcOptions { max_connections: 1, ..RpcOptions::default() })
    }

    async fn fill(&self) -> Result<()> {
        let segment = Segment {
            id: SegmentId(self.client.0),
            name: "127.0.0.1:14000".into(),
            base: 0x1000_0000_0000,
            size: 64 << 30,
            endpoint: "127.0.0.1:14001".into(),
            protocol: "tcp".into(),
            host_id: String::new(),
            locality: None,
        };
        let master = MasterClient::remote(self.address.clone(), RpcOptions::default());
        master.mount(self.client, &segment).await.map_err(|e| e.to_string())?;
        master.remount(self.client, &[segment]).await.map_err(|e| e.to_string())?;
        let rpc = self.rpc();
        for keys in self.keys.chunks(BATCH as usize) {
            put_all(&rpc, self.client, keys).await?;
        }
        Ok(())
    }

    /// Makes as many calls as possible, over so many connections with one call at a time on each.
    async fn measure(&self, call: Call, connections: usize) -> Result<Turn> {
        let call = match call {
            Call::Prefix if !self.is_ours => Call::BatchExist,
            Call::LocatedPrefix if !self.is_ours => Call::BatchLocate,
            call => call,
        };
        let clock = SystemClock::new();
        let begun = clock.now();
        let workers: Vec<_> = (0..connections)
            .map(|number| {
                let mut worker = Worker {
                    rpc: self.rpc(),
                    client: self.client,
                    keys: self.keys.clone(),
                    next: self.next.clone(),
                    rng: Rng::seeded(number as u64),
                };
                tokio::spawn(async move {
                    let clock = SystemClock::new();
                    let mut spans = Vec::new();
                    while clock.now().since(begun) < TURN {
                        let before = clock.now();
                        worker.call(call).await?;
                        spans.push(clock.now().since(before).as_nanos() as f64 / 1e3);
                    }
                    Ok::<_, String>(spans)
                })
            })
            .collect();
        let mut spans = Vec::new();
        for worker in workers {
            spans.extend(worker.await.map_err(|e| e.to_string())??);
        }
        let rate = spans.len() as f64 / clock.now().since(begun).as_secs_f64();
        spans.sort_by(f64::total_cmp);
        Ok(Turn { rate, p99: spans[(spans.len() - 1) * 99 / 100] })
    }
}

struct Worker {
    rpc: RpcClient,
    client: ClientId,
    keys: Arc<Vec<Vec<u8>>>,
    next: Arc<AtomicU64>,
    rng: Rng,
}

impl Worker {
    async fn call(&mut self, call: Call) -> Result<()> {
        let at = self.rng.below(OBJECTS - BATCH) as usize;
        let some: Vec<&[u8]> = match call {
            Call::BatchExist | Call::Prefix | Call::BatchLocate | Call::LocatedPrefix => {
                self.keys[at..at + BATCH as usize].iter().map(Vec::as_slice).collect()
            }
            _ => Vec::new(),
        };
        let key = self.keys[at].as_slice();
        let there = match call {
            Call::Exist => ask(&self.rpc, ExistKey { key, tenant: TENANT }).await? == Ok(true),
            Call::Locate => ask(&self.rpc, GetReplicaList { key, tenant: TENANT }).await?.is_ok(),
            Call::BatchExist => {
                let answers =
                    ask(&self.rpc, BatchExistKey { keys: (&some[..]).into(), tenant: TENANT }).await?;
                answers.iter().all(|answer| *answer == Ok(true))
            }
            Call::Prefix | Call::LocatedPrefix => {
                let with_replicas = call == Call::LocatedPrefix;
                let request = LocatePrefix { keys: (&some[..]).into(), with_replicas, tenant: TENANT };
                let found = ask(&self.rpc, request).await?.map_err(|code| format!("prefix: {code:?}"))?;
                found.count == BATCH
            }
            Call::BatchLocate => {
                let request = BatchGetReplicaList { keys: (&some[..]).into(), tenant: TENANT };
                ask(&self.rpc, request).await?.iter().all(std::result::Result::is_ok)
            }
            Call::Put => {
                self.put().await?;
                true
            }
            Call::BatchPut => {
                let first = self.next.fetch_add(BATCH, Relaxed);
                let keys: Vec<_> =
                    (first..first + BATCH).map(|i| format!("new/{i:012}").into_bytes()).collect();
                put_all(&self.rpc, self.client, &keys).await?;
                true
            }
        };
        if there { Ok(()) } else { Err(format!("{call:?} of existing objects failed")) }
    }

    async fn put(&self) -> Result<()> {
        let key = format!("new/{:012}", self.next.fetch_add(1, Relaxed)).into_bytes();
        let (client, key, tenant) = (self.client, key.as_slice(), TENANT);
        let config = Cow::Owned(ReplicateConfig::default());
        let start = PutStart { client, key, size: SIZE, config, tenant };
        ask(&self.rpc, start).await?.map_err(|code| format!("put start: {code:?}"))?;
        let end =
            PutEnd { client, item: EndItem { key, checksum: None }, replicas: ReplicaType::All, tenant };
        ask(&self.rpc, end).await?.map_err(|code| format!("put end: {code:?}"))
    }
}

async fn ask<R: Request + Sync>(rpc: &RpcClient, request: R) -> Result<R::Reply> {
    rpc.call(&request).await.map_err(|e| e.to_string())
}

async fn put_all(rpc: &RpcClient, client: ClientId, keys: &[Vec<u8>]) -> Result<()> {
    let names: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let sizes = vec![SIZE; names.len()];
    let start = BatchPutStart {
        client,
        keys: (&names[..]).into(),
        sizes: (&sizes[..]).into(),
        config: Cow::Owned(ReplicateConfig::default()),
        tenant: TENANT,
    };
    let started = ask(rpc, start).await?;
    let items: Vec<_> = names.iter().map(|key| EndItem { key, checksum: None }).collect();
    let end = BatchPutEnd { client, items: (&items[..]).into(), replicas: ReplicaType::All, tenant: TENANT };
    let ended = ask(rpc, end).await?;
    if started.iter().any(std::result::Result::is_err) || ended.iter().any(std::result::Result::is_err) {
        return Err("a put of a batch failed".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_falls_short_by_rate_or_by_p99() {
        let short = |call, rate, p99| shortfalls(call, 64, Turn { rate, p99 }).len();
        assert_eq!(short(Call::Exist, 1.3, 1.0), 0);
        assert_eq!(short(Call::Exist, 1.29, 1.0), 1);
        assert_eq!(short(Call::BatchExist, 1.9, 1.1), 2);
        assert_eq!(short(Call::BatchExist, 2.0, 1.1), 1);
        assert_eq!(short(Call::Put, f64::NAN, f64::NAN), 2);
    }

    #[test]
    fn a_turn_is_compared_with_the_one_that_followed_it() {
        let turns = |rates: [f64; 3]| rates.map(|rate| Turn { rate, p99: 1.0 / rate });
        // A slow round of both sides does not count.
        let ratio = compare(&turns([200.0, 20.0, 210.0]), &turns([100.0, 10.0, 150.0]));
        assert_eq!((ratio.rate, ratio.p99), (2.0, 0.5));
    }
}
