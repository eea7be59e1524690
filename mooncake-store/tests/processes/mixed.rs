//! Clusters of this version and the last release: `cargo xtask mixed` builds the release and runs
//! these tests.
//!
//! `MOONCAKE_LAST_RELEASE` is the folder with the programs of the release. The tests need this
//! variable.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use mooncake_store::client::{Client, PutOutcome};
use tempfile::TempDir;

use crate::cluster::{PATIENCE, argument, connect, eventually, tagged, version_of};
use crate::process::{Process, free_port, metric};

const OBJECTS: u64 = 100;
const LEN: usize = 10_000;

/// Programs of one version.
#[derive(Clone, Debug)]
struct Programs(PathBuf);

impl Programs {
    fn current() -> Self {
        Self(Path::new(env!("CARGO_BIN_EXE_mooncake_master")).parent().unwrap().into())
    }

    fn last() -> Self {
        Self(argument("MOONCAKE_LAST_RELEASE").expect("cargo xtask mixed sets MOONCAKE_LAST_RELEASE"))
    }

    fn command(&self, name: &str) -> Command {
        Command::new(self.0.join(name))
    }

    fn master(&self, port: u16, pages: u16) -> Process {
        let mut command = self.command("mooncake_master");
        command
            .args(["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", "--client_ttl=10"])
            .args([format!("--rpc_port={port}"), format!("--metrics_port={pages}")]);
        Process(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }

    /// Starts a process that offers 16 MB of memory.
    fn client(&self, port: u16, folder: &Path, name: &str) -> Process {
        let mut command = self.command("mooncake_client");
        command
            .args(["--metadata_server=P2PHANDSHAKE", "--host=127.0.0.1", "--global_segment_size=16MB"])
            .arg(format!("--master_server_address=127.0.0.1:{port}"))
            .arg(format!("--ipc_socket_path={}", folder.join(name).display()));
        Process(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }

    /// Runs `mooncake`, and returns its standard output.
    fn tool(&self, port: u16, words: &[&str], input: &[u8]) -> Vec<u8> {
        let mut command = self.command("mooncake");
        command.arg(format!("--master=127.0.0.1:{port}")).args(["--hostname", "127.0.0.1"]).args(words);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(input).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "mooncake {words:?}: {}", output.status);
        output.stdout
    }
}

/// Client process of each version, a master, and a client of this version that offers no memory.
struct Cluster {
    port: u16,
    pages: u16,
    _folder: TempDir,
    _clients: [Process; 2],
    client: Client,
}

fn key(i: u64) -> String {
    format!("key {i}")
}

impl Cluster {
    async fn start(port: u16, pages: u16) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let clients = [
            Programs::current().client(port, folder.path(), "current"),
            Programs::last().client(port, folder.path(), "last"),
        ];
        let client = connect(&format!("127.0.0.1:{port}"), 0).await;
        let cluster = Self { port, pages, _folder: folder, _clients: clients, client };
        eventually("both clients are mounted", PATIENCE, async || cluster.segments() == 2).await;
        cluster
    }

    fn segments(&self) -> u64 {
        metric(self.pages, "master_active_clients").unwrap_or(0)
    }

    async fn put(&self, version: u64) {
        for i in 0..OBJECTS {
            let put = self.client.put(key(i), &tagged(i, version, LEN)[..]).await;
            assert_eq!(put.unwrap(), PutOutcome::Stored, "key {i}");
        }
    }

    /// Returns the number of objects found, each of which has the bytes of its version.
    async fn hits(&self, version: u64) -> u64 {
        let mut hits = 0;
        for i in 0..OBJECTS {
            if let Ok(Some(bytes)) = self.client.get(key(i)).await {
                assert_eq!(version_of(i, &bytes), Some(version), "key {i}");
                hits += 1;
            }
        }
        hits
    }

    /// Waits for some heartbeats, until every client has the inventory of the earlier puts.
    async fn taken_stock(&self) {
        let pings = || metric(self.pages, "master_ping_requests_total").unwrap_or(0);
        let before = pings();
        eventually("heartbeats of all clients", PATIENCE, async || pings() >= before + 12).await;
    }

    /// Checks that programs of either version read the objects of the other.
    async fn tools_agree(&self) {
        let (current, last) = (Programs::current(), Programs::last());
        let value = tagged(7, 7, LEN);
        last.tool(self.port, &["put", "of the last"], &value);
        assert_eq!(self.client.get("of the last").await.unwrap(), Some(value.clone()));
        let put = self.client.put("of this", b"this").await;
        assert_eq!(put.unwrap(), PutOutcome::Stored);
        assert_eq!(last.tool(self.port, &["get", "of this"], b""), b"this");
        assert_eq!(current.tool(self.port, &["get", "of the last"], b""), value);
        assert!(self.client.remove("of the last", true).await.unwrap());
        assert!(self.client.remove("of this", true).await.unwrap());
    }
}

/// Replaces the master by one of the other version: objects outlive it, and all calls work.
async fn restarted(first: Programs, next: Programs) {
    let (port, pages) = (free_port(), free_port());
    let master = first.master(port, pages);
    let cluster = Cluster::start(port, pages).await;
    cluster.put(1).await;
    assert_eq!(cluster.hits(1).await, OBJECTS);
    cluster.tools_agree().await;
    cluster.taken_stock().await;
    master.kill();
    let _master = next.master(port, pages);
    eventually("objects are served again", PATIENCE, async || cluster.hits(1).await == OBJECTS).await;
    cluster.tools_agree().await;
    assert_eq!(cluster.client.remove_all(true).await.unwrap(), OBJECTS);
    cluster.put(2).await;
    assert_eq!(cluster.hits(2).await, OBJECTS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs the last release: cargo xtask mixed"]
async fn a_master_of_the_last_release_is_upgraded() {
    restarted(Programs::last(), Programs::current()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs the last release: cargo xtask mixed"]
async fn an_upgraded_master_is_rolled_back() {
    restarted(Programs::current(), Programs::last()).await;
}
