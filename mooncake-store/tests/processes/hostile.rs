//! Two hundred connections of every hostile kind at a master: its memory stays within the stated
//! limit, and other clients are served meanwhile.
//!
//! The ignored test states the latency, which needs a machine without other load:
//! `cargo test --release -p mooncake-store --all-features --test processes -- --ignored hostile`.
#![allow(clippy::disallowed_methods, reason = "latencies of real time")]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::{ReplicaType, ReplicateConfig, Segment};
use mooncake_store::api::{Caller, EndItem, PutItem, WriteMode};
use mooncake_store::protocol::client::RpcOptions;
use mooncake_store::protocol::frame::{self, FIRST_SEQ};
use mooncake_store::protocol::master_client::MasterClient;
use mooncake_store::protocol::message::{
    BatchExistKey, BatchGetReplicaList, ExistKey, GetReplicaListByRegex, Request,
};
use mooncake_store::protocol::pack;

use crate::process::{Process, free_port, metric};

const TENANT: &str = "default";
/// Number of connections of each kind.
const PEERS: usize = 200;
/// Limit of the bytes of connections of the master, in MiB.
const LIMIT_MIB: u64 = 64;
/// Memory beyond the limit: responses that are being made, and pages that the allocator keeps.
const SLACK_MIB: u64 = 192;
/// Number of objects in the master.
const OBJECTS: usize = 40_000;

/// Behaviour of hostile connections.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Requests for long responses, of which nothing is read.
    Unread,
    /// Long requests that stop in the middle.
    Half,
    /// Long requests byte by byte, and responses read byte by byte.
    Slow,
    /// The longest requests, one after the other.
    Huge,
    /// Requests as fast as the master takes them, without a read of a response.
    Many,
    /// Requests for the list of keys over HTTP, of which nothing is read.
    UnreadPages,
    /// Long bodies over HTTP that stop in the middle.
    HalfPages,
}

const KINDS: [Kind; 7] =
    [Kind::Unread, Kind::Half, Kind::Slow, Kind::Huge, Kind::Many, Kind::UnreadPages, Kind::HalfPages];

struct Master {
    process: Process,
    rpc: u16,
    admin: u16,
    metadata: u16,
}

impl Master {
    fn start() -> Self {
        let (rpc, admin, metadata) = (free_port(), free_port(), free_port());
        let flags = [
            format!("--rpc_port={rpc}"),
            format!("--metrics_port={admin}"),
            format!("--http_metadata_server_port={metadata}"),
            "--enable_http_metadata_server=true".into(),
            "--rpc_address=127.0.0.1".into(),
            "--metrics_host=127.0.0.1".into(),
            "--http_metadata_server_host=127.0.0.1".into(),
            format!("--connection_bytes={LIMIT_MIB}MB"),
        ];
        let mut program = Command::new(env!("CARGO_BIN_EXE_mooncake_master"));
        let process = Process(program.args(flags).stderr(Stdio::null()).spawn().unwrap());
        let began = Instant::now();
        while connect(rpc).is_err() || connect(metadata).is_err() {
            assert!(began.elapsed() < Duration::from_secs(60), "the master does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        Self { process, rpc, admin, metadata }
    }

    /// Returns the resident memory in MiB.
    fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.0.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().strip_suffix("kB").unwrap().trim().parse::<u64>().unwrap() >> 10
    }
}

fn connect(port: u16) -> std::io::Result<TcpStream> {
    let at = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let stream = TcpStream::connect_timeout(&at, Duration::from_secs(10))?;
    stream.set_write_timeout(Some(Duration::from_secs(2)))?;
    Ok(stream)
}

fn call<R: Request>(request: &R) -> Vec<u8> {
    let mut out = Vec::new();
    frame::write_request(&mut out, FIRST_SEQ, R::FUNCTION, |out| pack::encode(request, out));
    out
}

fn key(number: usize) -> Vec<u8> {
    format!("a-key-of-some-length/{number:012}").into_bytes()
}

/// Stores objects without values, for a node that does not exist.
async fn fill(client: &MasterClient) {
    let caller = Caller { client: ClientId(Uuid::new(1, 2)), tenant: TENANT, attempt: 0 };
    let segment = Segment {
        id: SegmentId(Uuid::new(3, 4)),
        name: "host:1".into(),
        base: 1 << 40,
        size: 1 << 30,
        endpoint: "a-node-with-a-name-of-usual-length.example:12345".into(),
        protocol: "tcp".into(),
        host_id: "host".into(),
        locality: None,
    };
    client.mount(caller.client, &segment).await.unwrap();
    let keys: Vec<_> = (0..OBJECTS).map(key).collect();
    for keys in keys.chunks(2000) {
        let items: Vec<_> = keys.iter().map(|key| PutItem { key, len: 7 }).collect();
        let ends: Vec<_> = keys.iter().map(|key| EndItem { key, checksum: None }).collect();
        let config = ReplicateConfig::default();
        let started = client.put_start(caller, WriteMode::Put, &items, &config).await.unwrap();
        assert!(started.iter().all(Result::is_ok));
        client.put_end(caller, WriteMode::Put, &ends, ReplicaType::All).await.unwrap();
        client.ping(caller.client).await.unwrap();
    }
}

/// Requests of one kind, made once for all connections.
struct Requests {
    matching: Vec<u8>,
    huge: Vec<u8>,
    head: Vec<u8>,
    many: Vec<u8>,
}

impl Requests {
    fn new() -> Self {
        let keys: Vec<_> = (0..400_000).map(key).collect();
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let mut head = call(&ExistKey { key: b"k", tenant: TENANT });
        head.truncate(frame::REQUEST_HEAD);
        head[12..16].copy_from_slice(&(64_u32 << 20).to_le_bytes());
        let locate = BatchGetReplicaList { keys: keys[..1000].into(), tenant: TENANT };
        Self {
            matching: call(&GetReplicaListByRegex { pattern: ".", tenant: TENANT }),
            huge: call(&BatchExistKey { keys: keys[..].into(), tenant: TENANT }),
            head,
            many: call(&locate),
        }
    }
}

/// Opens one connection, and does the first step of its kind. A failure is the defence.
fn attack(master: &Master, requests: &Requests, kind: Kind) -> std::io::Result<TcpStream> {
    let mut stream = connect(match kind {
        Kind::UnreadPages => master.admin,
        Kind::HalfPages => master.metadata,
        _ => master.rpc,
    })?;
    match kind {
        Kind::Unread => stream.write_all(&requests.matching)?,
        Kind::Half => {
            stream.write_all(&requests.head)?;
            stream.write_all(&vec![7; 4 << 20])?;
        }
        Kind::Slow => stream.write_all(&requests.head)?,
        Kind::Huge => stream.write_all(&requests.huge)?,
        Kind::Many => (0..40).try_for_each(|_| stream.write_all(&requests.many))?,
        Kind::UnreadPages => stream.write_all(b"GET /get_all_keys HTTP/1.1\r\nHost: x\r\n\r\n")?,
        Kind::HalfPages => {
            stream
                .write_all(b"PUT /metadata?key=a HTTP/1.1\r\nHost: x\r\nContent-Length: 16777216\r\n\r\n")?;
            stream.write_all(&vec![7; 4 << 20])?;
        }
    }
    Ok(stream)
}

/// Goes on with an attack. A failure means that the connection was closed.
fn go_on(stream: &mut TcpStream, requests: &Requests, kind: Kind) -> std::io::Result<()> {
    match kind {
        Kind::Slow | Kind::Half => stream.write_all(&[7]),
        Kind::Huge => {
            stream.set_read_timeout(Some(Duration::from_millis(1)))?;
            let _ = stream.read(&mut [0; 1 << 16]);
            stream.write_all(&requests.huge)
        }
        _ => Ok(()),
    }
}

/// Result of one attack.
struct Outcome {
    worst: u64,
    p99: Duration,
    calls: usize,
}

/// Attacks with connections of one kind for `span`. Measures memory and the latency of another
/// client meanwhile.
fn withstand(master: &Master, requests: &Requests, kind: Kind, span: Duration) -> Outcome {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let caller = scope.spawn(|| latencies(master.rpc, &stop));
        let memory = scope.spawn(|| {
            let mut worst = 0;
            while !stop.load(Relaxed) {
                worst = worst.max(master.memory());
                std::thread::sleep(Duration::from_millis(5));
            }
            worst
        });
        let attackers: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let (began, mut held) = (Instant::now(), Vec::new());
                    while held.len() < PEERS / 4 && began.elapsed() < 4 * span {
                        held.extend(attack(master, requests, kind));
                    }
                    while began.elapsed() < span {
                        held.retain_mut(|stream| {
                            began.elapsed() >= span || go_on(stream, requests, kind).is_ok()
                        });
                        std::thread::sleep(Duration::from_millis(10));
                    }
                })
            })
            .collect();
        attackers.into_iter().for_each(|attacker| attacker.join().unwrap());
        stop.store(true, Relaxed);
        let (worst, mut took) = (memory.join().unwrap(), caller.join().unwrap());
        took.sort_unstable();
        Outcome { worst, p99: took[took.len() * 99 / 100], calls: took.len() }
    })
}

/// Makes calls on one connection until it is stopped. Returns the time of each.
fn latencies(port: u16, stop: &AtomicBool) -> Vec<Duration> {
    let mut stream = connect(port).unwrap();
    stream.set_nodelay(true).unwrap();
    let (request, mut took) = (call(&ExistKey { key: &key(1), tenant: TENANT }), Vec::new());
    let mut head = [0; frame::REPLY_HEAD];
    while !stop.load(Relaxed) || took.is_empty() {
        let began = Instant::now();
        stream.write_all(&request).unwrap();
        stream.read_exact(&mut head).unwrap();
        let len = u32::from_le_bytes([head[8], head[9], head[10], head[11]]) as usize;
        stream.read_exact(&mut vec![0; len]).unwrap();
        took.push(began.elapsed());
        std::thread::sleep(Duration::from_millis(1));
    }
    took
}

fn withstand_all(span: Duration) -> Vec<(Kind, Outcome)> {
    mooncake_transport::admission::raise_descriptor_limit();
    let master = Master::start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let options = RpcOptions { call_timeout: Duration::from_secs(60), ..RpcOptions::default() };
    let client = MasterClient::remote(format!("127.0.0.1:{}", master.rpc), options);
    runtime.block_on(fill(&client));
    drop((client, runtime));
    let (requests, before) = (Requests::new(), master.memory());
    let mut outcomes = Vec::new();
    for kind in KINDS {
        let outcome = withstand(&master, &requests, kind, span);
        println!(
            "{PEERS} x {kind:?}: memory {before} MiB before, {} MiB worst; {} other calls, p99 {:?}",
            outcome.worst, outcome.calls, outcome.p99
        );
        assert!(
            outcome.worst < before + LIMIT_MIB + SLACK_MIB,
            "{kind:?}: {before} MiB before, {} MiB worst",
            outcome.worst
        );
        outcomes.push((kind, outcome));
    }
    assert_eq!(metric(master.admin, "master_connection_bytes_limit"), Some(LIMIT_MIB << 20));
    assert!(
        metric(master.admin, "master_connections_closed_for_bytes_total").is_some_and(|closed| closed > 0)
    );
    let began = Instant::now();
    while metric(master.admin, "master_connection_bytes") != Some(0) {
        assert!(began.elapsed() < Duration::from_secs(60), "bytes of closed connections still count");
        std::thread::sleep(Duration::from_millis(10));
    }
    outcomes
}

#[test]
#[ignore = "thousands of connections: cargo xtask hostile"]
fn hostile_connections_take_bounded_memory() {
    withstand_all(Duration::from_secs(1));
}

#[test]
#[ignore = "a minute and a half, on a machine without other load"]
fn hostile_connections_delay_no_other_client() {
    for (kind, outcome) in withstand_all(Duration::from_secs(10)) {
        assert!(outcome.p99 < Duration::from_millis(10), "{kind:?}: p99 {:?}", outcome.p99);
    }
}
