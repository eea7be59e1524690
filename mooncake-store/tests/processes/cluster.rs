//! Clusters of processes.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use mooncake_core::clock::Rng;
use mooncake_store::client::{Client, ClientBuilder, ClientConfig, PutOptions};

use crate::process::{Process, free_port};

/// Longest permitted duration of an operation of a client.
pub(crate) const LIMIT: Duration = Duration::from_secs(2);
/// Longest timeout that a client accepts.
pub(crate) const LONGEST: Duration = Duration::from_secs(24);
/// Additional time on a machine that is busy with other tests.
pub(crate) const SLACK: Duration = Duration::from_secs(2);
pub(crate) const SEGMENT: u64 = 16 << 20;

pub(crate) fn master(port: u16, flags: &[&str]) -> Process {
    master_shown(port, 0, flags)
}

/// Starts a master with its metrics at a port, 0 for any.
pub(crate) fn master_shown(port: u16, metrics: u16, flags: &[&str]) -> Process {
    let child = Command::new(env!("CARGO_BIN_EXE_mooncake_master"))
        .args(["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"])
        .args([format!("--rpc_port={port}"), format!("--metrics_port={metrics}")])
        .args(flags)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    Process(child)
}

/// Starts this test program again for one of its ignored tests. Its standard input stays open until
/// `leave`, or until the process ends.
pub(crate) fn start(test: &str, port: u16, arguments: &[(&str, String)]) -> Process {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env("TEST_MASTER", format!("127.0.0.1:{port}"))
        .envs(arguments.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    Process(child)
}

/// Returns the address of the master, if a test started this process.
#[allow(clippy::disallowed_methods, reason = "arguments come from the environment")]
pub(crate) fn master_address() -> Option<String> {
    std::env::var("TEST_MASTER").ok()
}

/// Returns an argument of this process.
#[allow(clippy::disallowed_methods, reason = "arguments come from the environment")]
pub(crate) fn argument<T: std::str::FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.parse().ok()
}

/// Waits until the parent process closes the standard input of this process.
pub(crate) fn until_end_of_input() -> tokio::task::JoinHandle<()> {
    let (sender, ended) = tokio::sync::oneshot::channel();
    // Not a blocking task of the runtime, for which a test that fails would wait: its parent would
    // wait for the end of this process, and never close the input.
    std::thread::spawn(move || {
        let _ = std::io::Read::read(&mut std::io::stdin(), &mut [0]);
        let _ = sender.send(());
    });
    tokio::spawn(async {
        let _ = ended.await;
    })
}

pub(crate) fn builder(master: &str, segment: u64) -> ClientBuilder {
    builder_with(ClientConfig::default(), master, segment)
}

pub(crate) fn builder_with(config: ClientConfig, master: &str, segment: u64) -> ClientBuilder {
    Client::builder()
        .config(config)
        .master(master)
        .local_hostname("127.0.0.1")
        .advertise(std::net::Ipv4Addr::LOCALHOST.into())
        .segment(segment)
        .timeout(LIMIT)
}

pub(crate) async fn connect(master: &str, segment: u64) -> Client {
    builder(master, segment).connect().await.unwrap()
}

/// Process of a client that offers memory and prints when it is ready.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "child process of other tests"]
async fn client() {
    let Some(master) = master_address() else { return };
    let client = connect(&master, SEGMENT).await;
    println!("\nready {}", client.hostname());
    let _ = until_end_of_input().await;
    client.close().await.unwrap();
}

/// Starts a client process. Returns it with the name of its segment.
pub(crate) fn start_client(port: u16) -> (Process, String) {
    let mut client = start("cluster::client", port, &[]);
    let name = client.lines_after("ready ").next();
    (client, name.expect("a client that starts"))
}

/// Starts a master, two clients in processes of their own, and a client in this process that offers
/// no memory.
pub(crate) async fn cluster(flags: &[&str]) -> (u16, Process, Vec<(Process, String)>, Client) {
    let port = free_port();
    let server = master(port, flags);
    let client = connect(&format!("127.0.0.1:{port}"), 0).await;
    (port, server, (0..2).map(|_| start_client(port)).collect(), client)
}

pub(crate) fn in_segment_of(name: &str) -> PutOptions {
    PutOptions::new().prefer_segment(name)
}

/// Runs an operation, which must end in time.
#[allow(clippy::disallowed_methods, reason = "the bound is one of real time")]
pub(crate) async fn timed<T>(what: &str, operation: impl Future<Output = T>) -> T {
    let begun = Instant::now();
    let outcome = operation.await;
    assert!(begun.elapsed() < LIMIT + SLACK, "{what} took {:?}", begun.elapsed());
    outcome
}

/// Longest time to wait for an event without a bound of its own, on a machine with a busy processor
/// or disk.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) async fn eventually(what: &str, limit: Duration, mut holds: impl AsyncFnMut() -> bool) {
    let waited = tokio::time::timeout(limit, async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    assert!(waited.await.is_ok(), "not within {limit:?}: {what}");
}

/// Returns a value whose bytes follow from its key and its version.
pub(crate) fn tagged(key: u64, version: u64, len: usize) -> Bytes {
    let mut bytes = Vec::with_capacity(16 + len);
    bytes.extend(key.to_le_bytes());
    bytes.extend(version.to_le_bytes());
    bytes.resize(16 + len, 0);
    Rng::seeded(key << 48 ^ version).fill(&mut bytes[16..]);
    bytes.into()
}

/// Returns the version of a complete value of a key, if the bytes are one.
pub(crate) fn version_of(key: u64, bytes: &[u8]) -> Option<u64> {
    let version = u64::from_le_bytes(bytes.get(8..16)?.try_into().ok()?);
    (tagged(key, version, bytes.len() - 16) == bytes).then_some(version)
}
