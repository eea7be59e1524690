//! Metadata services that lose entries: their owners publish them again, and readers find them.
#![cfg(all(feature = "metadata-etcd", feature = "metadata-redis"))]

use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::SystemClock;
use mooncake_core::memory::{HostMemory, MemorySource};
use mooncake_core::meta::{Expect, MetaKeys, MetadataBackend};
use mooncake_core::testkit::free_port;
use mooncake_engine::{AddressRequest, TransferEngine, TransportOptions};
use mooncake_metadata::{DirectoryOptions, connect};
use mooncake_transport::engine::LocalCopies;
use mooncake_transport::{Directory, Opcode, SegmentDesc};

const METADATA: &str = env!("CARGO_BIN_EXE_mooncake_http_metadata_server");
/// Time in which entries are back. Machines that are busy need more than the few seconds of others.
const LIMIT: Duration = Duration::from_secs(60);

/// Metadata service in a process.
struct Server {
    command: Command,
    child: Child,
    port: u16,
}

impl Server {
    /// Starts a service, or returns `None` where it is not installed.
    fn start(mut command: Command, port: u16) -> Option<Self> {
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                #[allow(clippy::disallowed_methods, reason = "CI says who it is in the environment")]
                let is_ci = std::env::var_os("MOONCAKE_CI").is_some();
                assert!(!is_ci, "{command:?}: {error}");
                return None;
            }
        };
        let server = Self { command, child, port };
        server.wait_until_ready();
        Some(server)
    }

    fn wait_until_ready(&self) {
        let clock = SystemClock::shared();
        let end = clock.now().after(LIMIT);
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            assert!(clock.now() < end, "{:?} does not listen", self.command);
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn restart(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.child = self.command.spawn().unwrap();
        self.wait_until_ready();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn eventually<F: Future<Output = bool>>(outcome: &str, mut is_true: impl FnMut() -> F) {
    let clock = SystemClock::shared();
    let end = clock.now().after(LIMIT);
    while !is_true().await {
        assert!(clock.now() < end, "{outcome}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn engine(url: &str, name: &str) -> (TransferEngine, Arc<HostMemory>) {
    let transports = TransportOptions::for_protocol("tcp").unwrap().without_shared_memory();
    let builder = TransferEngine::builder().name(name).metadata(url).transports(transports);
    let engine = builder.local_copies(LocalCopies::Never).start().await.unwrap();
    let memory = Arc::new(HostMemory::new(4096).unwrap());
    // SAFETY: the caller keeps the memory longer than the engine.
    unsafe { engine.register_raw(memory.span().addr(), 4096) }.await.unwrap();
    (engine, memory)
}

/// Returns whether a reader that has never seen the owner can write to its memory.
async fn is_found(reader: &TransferEngine, local: u64, name: &str, remote: u64) -> bool {
    reader.forget(name);
    let Ok(target) = reader.open(name).await else { return false };
    let request = AddressRequest { opcode: Opcode::Write, local, target, remote, len: 64 };
    reader.transfer(&[request], None, None).await.is_ok()
}

async fn has(backend: &dyn MetadataBackend, key: &str) -> bool {
    backend.get(key).await.is_ok_and(|entry| entry.is_some())
}

/// Checks the service at a URL. `restart` makes it forget everything, if it can.
async fn check(url: &str, mut restart: Option<impl FnMut()>) {
    let Directory::Metadata { backend, keys } = connect(url, &DirectoryOptions::default()).unwrap() else {
        panic!("{url} is no metadata service");
    };
    let backend = &*backend;
    eventually("the service is ready", || async { backend.get("ready").await.is_ok() }).await;
    let (owner, memory) = engine(url, "owner").await;
    let (reader, local) = engine(url, "reader").await;
    let (at, local_address) = (memory.span().addr(), local.span().addr());
    let found = || is_found(&reader, local_address, "owner", at);
    assert!(found().await);
    let entries = |keys: &MetaKeys| [keys.segment("owner"), keys.rpc_meta("owner")];
    let stale = backend.get(&keys.segment("owner")).await.unwrap().unwrap().value;
    for deleted in [&entries(&keys)[..1], &entries(&keys)[1..], &entries(&keys)] {
        for key in deleted {
            backend.delete(key).await.unwrap();
        }
        for key in deleted {
            eventually(&format!("{key} is published again"), || has(backend, key)).await;
        }
        eventually("the owner is found again", found).await;
    }
    // A service that was restored has an earlier descriptor.
    let new_memory = Arc::new(HostMemory::new(4096).unwrap());
    // SAFETY: the memory outlives the engine.
    unsafe { owner.register_raw(new_memory.span().addr(), 4096) }.await.unwrap();
    backend.put(&keys.segment("owner"), stale, Expect::Any).await.unwrap();
    let has_both = || async {
        let entry = backend.get(&keys.segment("owner")).await.unwrap().unwrap();
        SegmentDesc::decode(&entry.value).unwrap().buffers.len() == 2
    };
    eventually("the present descriptor is published again", has_both).await;
    if let Some(restart) = &mut restart {
        restart();
        for name in ["owner", "reader"] {
            for key in [keys.segment(name), keys.rpc_meta(name)] {
                eventually(&format!("{key} is published again"), || has(backend, &key)).await;
            }
        }
        eventually("the owner is found again", found).await;
    }
    owner.close().await.unwrap();
    reader.close().await.unwrap();
    drop((owner, reader));
    // Longer than the interval of the check.
    tokio::time::sleep(Duration::from_secs(5)).await;
    for key in entries(&keys) {
        assert!(!has(backend, &key).await, "{key} is published again after the end of its owner");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_lost_by_an_http_service_are_published_again() {
    let port = free_port();
    let mut command = Command::new(METADATA);
    command.args(["--host=127.0.0.1", "--port", &port.to_string()]);
    let mut server = Server::start(command, port).unwrap();
    check(&format!("http://127.0.0.1:{port}/metadata"), Some(|| server.restart())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_lost_by_redis_are_published_again() {
    let port = free_port();
    let mut command = Command::new("redis-server");
    command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]);
    let Some(mut server) = Server::start(command, port) else { return };
    check(&format!("redis://127.0.0.1:{port}"), Some(|| server.restart())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_lost_by_etcd_are_published_again() {
    let (port, folder) = (free_port(), tempfile::tempdir().unwrap());
    let (client, peer) = (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{}", free_port()));
    let mut command = Command::new("etcd");
    command.arg("--data-dir").arg(folder.path());
    command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
    command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    command.args(["--initial-cluster", &format!("default={peer}")]);
    let Some(_server) = Server::start(command, port) else { return };
    check(&format!("etcd://127.0.0.1:{port}"), None::<fn()>).await;
}
