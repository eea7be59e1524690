//! Engines over RDMA, with TCP beside it. Needs two Soft-RoCE devices on one cable: `cargo xtask rdma-test` runs it.
#![cfg(all(feature = "transport-rdma", feature = "transport-tcp"))]

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::memory::HostMemory;
use mooncake_core::meta::MemoryMetadata;
use mooncake_engine::{TransferEngine, TransportOptions};
use mooncake_rdma::RdmaConfig;
use mooncake_tcp::TcpConfig;
use mooncake_transport::engine::LocalCopies;
use mooncake_transport::{Directory, Protocol, SegmentDesc};

/// An address of the block for documentation: nobody answers there, so what succeeds has not gone over TCP.
const NOWHERE: &str = "192.0.2.1";

fn wires(device: &str, data_host: &str) -> TransportOptions {
    let rdma = RdmaConfig { devices: vec![device.into()], timeout: 15, attempts: 1, ..RdmaConfig::default() };
    let tcp = TcpConfig { data_host: data_host.into(), ..TcpConfig::default() };
    TransportOptions { rdma: Some(rdma), tcp: Some(tcp), ..TransportOptions::default() }
}

async fn engine(device: &str, data_host: &str) -> TransferEngine {
    let builder = TransferEngine::builder().name("127.0.0.1").wires(wires(device, data_host));
    builder.local_copies(LocalCopies::Never).start().await.unwrap()
}

fn memory(len: usize) -> Arc<HostMemory> {
    Arc::new(HostMemory::new(len).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn registered_memory_goes_over_rdma_and_other_memory_beside_it() {
    let (a, b) = (engine("rxe0", NOWHERE).await, engine("rxe1", NOWHERE).await);
    let region = b.register(memory(1 << 20)).await.unwrap();
    let target = a.open(b.name()).await.unwrap();
    assert_eq!(target.descriptor().protocols, [Protocol::RDMA], "older peers read one name");
    let soon = || Some(a.clock().now().after(Duration::from_secs(60)));
    let mut local = a.register_local(memory(1 << 20)).unwrap().exclusive().unwrap();
    local.copy_from(0, &vec![5; 1 << 20]).unwrap();
    let (result, local) = a.write(&target, region.addr(), local, soon()).await;
    result.unwrap();
    let (result, local) = a.read(&target, region.addr(), local, soon()).await;
    result.unwrap();
    let mut bytes = vec![0; 1 << 20];
    local.copy_to(0, &mut bytes).unwrap();
    assert!(bytes == vec![5; 1 << 20]);

    let c = engine("rxe1", "127.0.0.1").await;
    let region = c.register(memory(4096)).await.unwrap();
    let target = a.open(c.name()).await.unwrap();
    a.write(&target, region.addr(), vec![6; 100], soon()).await.0.unwrap();
    let (result, read) = a.read(&target, region.addr(), vec![0; 100], soon()).await;
    result.unwrap();
    assert_eq!(read, [6; 100], "a plain vector has only TCP");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_cable_there_is_tcp() {
    let (a, b) = (engine("rxe0", "127.0.0.1").await, engine("rxe1", "127.0.0.1").await);
    let region = b.register(memory(4096)).await.unwrap();
    let target = a.open(b.name()).await.unwrap();
    let soon = || Some(a.clock().now().after(Duration::from_secs(60)));
    let mut local = a.register_local(memory(4096)).unwrap().exclusive().unwrap();
    for (turn, byte) in [(1, 7), (0, 8), (0, 9), (1, 10)] {
        let state = if turn == 1 { "up" } else { "down" };
        let words = ["link", "set", "rdma1", state];
        assert!(std::process::Command::new("ip").args(words).status().unwrap().success());
        local.copy_from(0, &[byte; 4096]).unwrap();
        let (result, back) = a.write(&target, region.addr(), local, soon()).await;
        result.unwrap_or_else(|error| panic!("with the cable {state}: {error}"));
        local = back;
        let mut bytes = vec![0; 4096];
        region.slice(0..4096).unwrap().copy_to(0, &mut bytes).unwrap();
        assert!(bytes == [byte; 4096], "with the cable {state}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_of_a_directory_lead_to_handshake_ports() {
    let directory = Directory::new(Arc::<MemoryMetadata>::default());
    let start = |name: &str, device: &str| {
        let builder = TransferEngine::builder().name(name).directory(directory.clone());
        builder.wires(wires(device, NOWHERE)).local_copies(LocalCopies::Never).start()
    };
    let (a, b) = (start("node-a", "rxe0").await.unwrap(), start("node-b", "rxe1").await.unwrap());
    let region = b.register(memory(4096)).await.unwrap();
    let published: SegmentDesc = b.descriptor();
    assert_eq!((published.name.as_str(), published.rdma_server_name.as_str()), ("node-b", ""));
    let target = a.open("node-b").await.unwrap();
    let local = a.register_local(memory(4096)).unwrap().exclusive().unwrap();
    let soon = Some(a.clock().now().after(Duration::from_secs(60)));
    a.write(&target, region.addr(), local, soon).await.0.unwrap();
}
