//! Clusters of processes.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use mooncake_core::clock::Rng;
use mooncake_core::replica::ReplicateConfig;
use mooncake_store::client::{Client, ClientBuilder, ClientConfig};

use crate::process::{Process, free_port};

/// Longest time an operation of a client here may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(2);
/// What that is on a machine that is busy with other tests, too.
pub(crate) const SLACK: Duration = Duration::from_secs(2);
pub(crate) const SEGMENT: u64 = 16 << 20;

pub(crate) fn master(port: u16, flags: &[&str]) -> Process {
    master_shown(port, 0, flags)
}

/// With its metrics at a port, 0 for any.
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

/// Starts this binary again, for one of its ignored tests. Its standard input stays open until `leave`, or its end.
pub(crate) fn start(test: &str, port: u16, orders: &[(&str, String)]) -> Process {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env("TEST_MASTER", format!("127.0.0.1:{port}"))
        .envs(orders.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    Process(child)
}

/// Where the master of this process is, if it is one that a test started.
#[allow(clippy::disallowed_methods, reason = "its orders come from the environment")]
pub(crate) fn told_master() -> Option<String> {
    std::env::var("TEST_MASTER").ok()
}

/// An order to this process.
#[allow(clippy::disallowed_methods, reason = "its orders come from the environment")]
pub(crate) fn order<T: std::str::FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.parse().ok()
}

/// Until whoever started this process lets go of it.
pub(crate) fn until_end_of_input() -> tokio::task::JoinHandle<()> {
    tokio::task::spawn_blocking(|| {
        let _ = std::io::Read::read(&mut std::io::stdin(), &mut [0]);
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

/// The process of a member: offers memory and says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the other processes of the tests in this binary"]
async fn member() {
    let Some(master) = told_master() else { return };
    let client = connect(&master, SEGMENT).await;
    println!("\nready {}", client.hostname());
    let _ = until_end_of_input().await;
    client.close().await.unwrap();
}

/// Starts a member; its name.
pub(crate) fn start_member(port: u16) -> (Process, String) {
    let mut member = start("cluster::member", port, &[]);
    let name = member.said("ready ").next();
    (member, name.expect("a member that comes up"))
}

/// A master, two members with processes of their own, and a client here that offers nothing.
pub(crate) async fn cluster(flags: &[&str]) -> (u16, Process, Vec<(Process, String)>, Client) {
    let port = free_port();
    let server = master(port, flags);
    let client = connect(&format!("127.0.0.1:{port}"), 0).await;
    (port, server, (0..2).map(|_| start_member(port)).collect(), client)
}

pub(crate) fn in_member(name: &str) -> ReplicateConfig {
    ReplicateConfig { preferred_segment: name.into(), ..ReplicateConfig::default() }
}

/// Runs an operation, which must end in time.
#[allow(clippy::disallowed_methods, reason = "the bound is one of real time")]
pub(crate) async fn timed<T>(what: &str, operation: impl Future<Output = T>) -> T {
    let begun = Instant::now();
    let outcome = operation.await;
    assert!(begun.elapsed() < LIMIT + SLACK, "{what} took {:?}", begun.elapsed());
    outcome
}

/// How long to wait for what has no bound of its own: a machine that is busy, or whose disk is, takes long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) async fn eventually(what: &str, limit: Duration, mut holds: impl AsyncFnMut() -> bool) {
    let waited = tokio::time::timeout(limit, async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    assert!(waited.await.is_ok(), "not within {limit:?}: {what}");
}

/// A value that says whose and which it is, and by that what every byte of it must be.
pub(crate) fn tagged(key: u64, version: u64, len: usize) -> Bytes {
    let mut bytes = Vec::with_capacity(16 + len);
    bytes.extend(key.to_le_bytes());
    bytes.extend(version.to_le_bytes());
    bytes.resize(16 + len, 0);
    Rng::seeded(key << 48 ^ version).fill(&mut bytes[16..]);
    bytes.into()
}

/// Which version of a key's value these bytes are, if they are one, whole.
pub(crate) fn version_of(key: u64, bytes: &[u8]) -> Option<u64> {
    let version = u64::from_le_bytes(bytes.get(8..16)?.try_into().ok()?);
    (tagged(key, version, bytes.len() - 16) == bytes).then_some(version)
}
