//! Engines over RDMA, with TCP beside it. Needs two Soft-RoCE devices on one cable: `cargo xtask
//! rdma-test` runs it.
#![cfg(all(feature = "transport-rdma", feature = "transport-tcp"))]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::memory::HostMemory;
use mooncake_core::meta::MemoryMetadata;
use mooncake_engine::{TransferEngine, TransportOptions};
use mooncake_rdma::RdmaConfig;
use mooncake_tcp::TcpConfig;
use mooncake_transport::engine::LocalCopies;
use mooncake_transport::{Directory, Protocol, SegmentDesc};

/// Address of the documentation block, where no host responds. A success has not gone over TCP.
const NOWHERE: &str = "192.0.2.1";
/// Two devices on one cable, and one that meets itself.
const PAIRS: [(&str, &str); 2] = [("rxe0", "rxe1"), ("rxe0", "rxe0")];
const MIB: usize = 1 << 20;

fn wires(device: &str, data_host: &str) -> TransportOptions {
    let rdma = RdmaConfig { devices: vec![device.into()], timeout: 15, attempts: 1, ..RdmaConfig::default() };
    let tcp = TcpConfig { data_host: data_host.into(), ..TcpConfig::default() };
    TransportOptions { rdma: Some(rdma), tcp: Some(tcp), ..TransportOptions::default() }
}

async fn engine(device: &str, data_host: &str) -> TransferEngine {
    let builder = TransferEngine::builder().name("127.0.0.1").transports(wires(device, data_host));
    builder.local_copies(LocalCopies::Never).start().await.unwrap()
}

fn memory(len: usize) -> Arc<HostMemory> {
    Arc::new(HostMemory::new(len).unwrap())
}

fn deadline(engine: &TransferEngine) -> Option<Moment> {
    Some(engine.clock().now().after(Duration::from_secs(60)))
}

/// Writes and reads back a MiB of a byte.
async fn write_and_read(
    a: &TransferEngine,
    target: &mooncake_transport::engine::Target<mooncake_engine::TransportSet>,
    at: u64,
    byte: u8,
) {
    let mut local = a.register_local(memory(MIB)).unwrap().exclusive().unwrap();
    local.copy_from(0, &vec![byte; MIB]).unwrap();
    let (result, mut local) = a.write(target, at, local, deadline(a)).await;
    result.unwrap();
    local.copy_from(0, &vec![0; MIB]).unwrap();
    let (result, local) = a.read(target, at, local, deadline(a)).await;
    result.unwrap();
    let mut bytes = vec![0; MIB];
    local.copy_to(0, &mut bytes).unwrap();
    assert!(bytes == vec![byte; MIB]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn registered_memory_goes_over_rdma_and_other_memory_beside_it() {
    for (local_device, remote_device) in PAIRS {
        let (a, b) = (engine(local_device, NOWHERE).await, engine(remote_device, NOWHERE).await);
        let region = b.register(memory(MIB)).await.unwrap();
        let target = a.open(b.name()).await.unwrap();
        assert_eq!(target.descriptor().protocols, [Protocol::RDMA], "older peers read one name");
        write_and_read(&a, &target, region.addr(), 5).await;

        let c = engine(remote_device, "127.0.0.1").await;
        let region = c.register(memory(4096)).await.unwrap();
        let target = a.open(c.name()).await.unwrap();
        a.write(&target, region.addr(), vec![6; 100], deadline(&a)).await.0.unwrap();
        let (result, read) = a.read(&target, region.addr(), vec![0; 100], deadline(&a)).await;
        result.unwrap();
        assert_eq!(read, [6; 100], "a plain vector has only TCP");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_cable_there_is_tcp() {
    let (a, b) = (engine("rxe0", "127.0.0.1").await, engine("rxe1", "127.0.0.1").await);
    let region = b.register(memory(4096)).await.unwrap();
    let target = a.open(b.name()).await.unwrap();
    let mut local = a.register_local(memory(4096)).unwrap().exclusive().unwrap();
    for (turn, byte) in [(1, 7), (0, 8), (0, 9), (1, 10)] {
        let state = if turn == 1 { "up" } else { "down" };
        let arguments = ["link", "set", "rdma1", state];
        assert!(Command::new("ip").args(arguments).status().unwrap().success());
        local.copy_from(0, &[byte; 4096]).unwrap();
        let (result, back) = a.write(&target, region.addr(), local, deadline(&a)).await;
        result.unwrap_or_else(|error| panic!("with the cable {state}: {error}"));
        local = back;
        let mut bytes = vec![0; 4096];
        region.slice(0..4096).unwrap().copy_to(0, &mut bytes).unwrap();
        assert!(bytes == [byte; 4096], "with the cable {state}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_of_a_directory_lead_to_handshake_ports() {
    for (local_device, remote_device) in PAIRS {
        let directory = Directory::new(Arc::<MemoryMetadata>::default());
        let start = |name: &str, device: &str| {
            let builder = TransferEngine::builder().name(name).directory(directory.clone());
            builder.transports(wires(device, NOWHERE)).local_copies(LocalCopies::Never).start()
        };
        let (a, b) =
            (start("node-a", local_device).await.unwrap(), start("node-b", remote_device).await.unwrap());
        let region = b.register(memory(4096)).await.unwrap();
        let published: SegmentDesc = b.descriptor();
        assert_eq!((published.name.as_str(), published.rdma_server_name.as_str()), ("node-b", ""));
        let target = a.open("node-b").await.unwrap();
        let local = a.register_local(memory(4096)).unwrap().exclusive().unwrap();
        a.write(&target, region.addr(), local, deadline(&a)).await.0.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn between_processes() {
    for (local_device, remote_device) in PAIRS {
        let a = engine(local_device, NOWHERE).await;
        let mut owner = OwnerProcess::start(remote_device);
        let target = a.open(&owner.name).await.unwrap();
        let at = target.descriptor().buffers[0].addr;
        write_and_read(&a, &target, at, 7).await;
        write_and_read(&a, &target, at, 8).await;
        owner.kill();
        let local = a.register_local(memory(64)).unwrap().exclusive().unwrap();
        let error = a.read(&target, at, local, deadline(&a)).await.0.unwrap_err();
        let kind = error.kind();
        let unreachable_kinds = [mooncake_core::ErrorKind::Unavailable, mooncake_core::ErrorKind::Timeout];
        assert!(unreachable_kinds.contains(&kind), "{kind:?}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_protocol_finds_its_devices_and_an_unknown_name_is_refused() {
    let builder =
        |devices: &str| TransferEngine::builder().name("127.0.0.1").protocol("rdma").devices(devices);
    for devices in ["", "auto-discovery", "rxe1", "rxe0, rxe1"] {
        let engine = builder(devices).allow_tcp_fallback().start().await.unwrap();
        assert!(engine.fallback_reason().is_none(), "{devices}: {:?}", engine.fallback_reason());
        let devices_found: Vec<_> = engine.descriptor().extra["devices"].as_array().unwrap().clone();
        let devices_found: Vec<_> =
            devices_found.iter().map(|device| device["name"].as_str().unwrap()).collect();
        assert_eq!(
            devices_found,
            if devices == "rxe1" { vec!["rxe1"] } else { vec!["rxe0", "rxe1"] },
            "{devices}"
        );
    }
    let error = builder("rxe7").start().await.unwrap_err().to_string();
    assert!(error.contains("rxe7") && error.contains("rxe0, rxe1"), "{error}");
    let engine = builder("rxe7").allow_tcp_fallback().start().await.unwrap();
    assert!(engine.fallback_reason().is_some_and(|error| error.to_string().contains("rxe7")));
    assert_eq!(engine.descriptor().protocols, [Protocol::TCP]);
    let filtered = [("MC_TE_FILTERS", "rxe1")].into_iter().collect();
    let engine = builder("").environment_of(&filtered).start().await.unwrap();
    assert_eq!(engine.descriptor().extra["devices"].as_array().unwrap().len(), 1);
}

/// An engine in another process, which is this program started again.
struct OwnerProcess {
    child: Child,
    name: String,
}

impl OwnerProcess {
    fn start(device: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "owner", "--ignored", "--nocapture", "--test-threads=1"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        writeln!(child.stdin.as_mut().unwrap(), "{device}").unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let name =
            lines.map_while(Result::ok).find_map(|line| Some(line.split_once("engine ")?.1.to_owned()));
        Self { child, name: name.expect("the owner says its name") }
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for OwnerProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the other process of the tests in this file"]
async fn owner() {
    let mut device = String::new();
    if std::io::stdin().read_line(&mut device).unwrap() == 0 {
        return;
    }
    let engine = engine(device.trim(), NOWHERE).await;
    let _region = engine.register(memory(MIB)).await.unwrap();
    let mut out = std::io::stdout();
    writeln!(out, "engine {}", engine.name()).and_then(|()| out.flush()).unwrap();
    tokio::task::spawn_blocking(|| std::io::stdin().lines().for_each(drop)).await.unwrap();
}
