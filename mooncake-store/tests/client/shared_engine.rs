//! Client on an engine that the program has created: one name, one set of ports, and the same
//! memory for both users of the engine.

use std::sync::Arc;

use mooncake_core::memory::HostMemory;
use mooncake_engine::TransferEngine;
use mooncake_store::client::{Client, PutOutcome};
use mooncake_store::master::MasterOptions;
use mooncake_store::transport_set::TransportOptions;
use mooncake_transport::engine::{HandshakePort, LocalCopies};

use crate::cluster::{Cluster, Kind, value};

async fn engine() -> TransferEngine {
    let host = HandshakePort { host: Some("127.0.0.1".into()), ..HandshakePort::default() };
    let wires = TransportOptions::for_protocol("tcp").unwrap().without_shared_memory();
    TransferEngine::builder()
        .handshake(host)
        .transports(wires)
        .local_copies(LocalCopies::Never)
        .start()
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_and_its_engine_are_one_node() {
    let cluster = Cluster::start(Kind::Tcp, MasterOptions::default()).await;
    let engine = engine().await;
    let own = Arc::new(HostMemory::new(4096).unwrap());
    let region = engine.register(own).await.unwrap();
    let registered = || engine.descriptor().buffers.len();
    assert_eq!(registered(), 1);

    let store = Client::builder().master(cluster.handle()).engine(engine.engine().clone());
    let store = store.segment(8 << 20).local_buffer(2 << 20).connect().await.unwrap();
    assert_eq!(store.engine().name(), engine.name());
    assert_eq!(store.engine().descriptor().tcp_data_port, engine.descriptor().tcp_data_port);
    assert!(registered() > 1, "the store's segment is the engine's memory");

    // Other clients reach both by the name of the engine.
    let other = cluster.builder().segment(0).connect().await.unwrap();
    let bytes = value(1, 300_000);
    assert_eq!(other.put("key", &bytes[..]).await.unwrap(), PutOutcome::Stored);
    let place = &cluster.master.peek(b"key").unwrap()[0];
    assert_eq!(place.location.memory().unwrap().endpoint, engine.name());
    assert_eq!(store.get("key").await.unwrap().unwrap(), bytes);
    let target = other.engine().open(engine.name()).await.unwrap();
    other.engine().write(&target, region.addr(), vec![7; 10], None).await.0.unwrap();
    let mut seen = [0; 11];
    region.slice(0..11).unwrap().copy_to(0, &mut seen).unwrap();
    assert_eq!(seen, [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 0]);

    // The store closes what it created, and the engine stays.
    store.close().await.unwrap();
    assert_eq!(registered(), 1);
    assert_eq!(other.get("key").await.unwrap(), None);
    other.engine().write(&target, region.addr(), vec![8; 10], None).await.0.unwrap();
    let again = Client::builder().master(cluster.handle()).engine(engine.engine().clone());
    let again = again.segment(8 << 20).local_buffer(0).connect().await.unwrap();
    assert_eq!(other.put("key", &bytes[..]).await.unwrap(), PutOutcome::Stored);
    assert_eq!(other.get("key").await.unwrap().unwrap(), bytes);
    again.close().await.unwrap();
    engine.close().await.unwrap();
}
