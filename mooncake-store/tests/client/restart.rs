//! Masters that are absent, old, or end and return.
#![allow(clippy::disallowed_methods, reason = "the bounds are of real time")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use mooncake_core::clock::ManualClock;
use mooncake_core::ids::ClientId;
use mooncake_core::memory::HostMemory;
use mooncake_core::replica::ReplicateConfig;
use mooncake_core::testkit::free_port;
use mooncake_core::{ErrorCode, ErrorKind};
use mooncake_store::api::WriteMode;
use mooncake_store::client::{Client, ClientConfig, PutOutcome};
use mooncake_store::master::{Master, MasterOptions, Put, SegmentStats};
use mooncake_store::protocol::frame::Status;
use mooncake_store::protocol::pack;
use mooncake_store::protocol::server::{Server, ServerOptions, Service};
use mooncake_store::protocol::service::MasterService;
use mooncake_store::protocol::wire::EpochPair;
use mooncake_store::server::MasterServer;

use crate::cluster::{OtherShapes, eventually, master_config, start_again, value};

fn options() -> MasterOptions {
    MasterOptions::default()
}

#[tokio::test]
async fn an_absent_master_is_a_clear_error_in_time() {
    let free = format!("127.0.0.1:{}", free_port());
    let begun = Instant::now();
    let connect =
        Client::builder().master(free.clone()).connect_timeout(Duration::from_millis(300)).connect();
    let error = connect.await.unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(2));
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains(&free), "{error}");
}

struct Old;

impl Service for Old {
    fn call(&self, _: u32, _: &[u8], out: &mut Vec<u8>) -> Result<(), (Status, String)> {
        pack::encode::<Result<String, ErrorCode>>(&Ok("1.9.3".to_owned()), out);
        Ok(())
    }
}

#[tokio::test]
async fn a_master_of_another_version_is_refused_with_both_named() {
    let server = Server::bind("127.0.0.1:0", ServerOptions::default()).await.unwrap();
    let address = server.local_addr().to_string();
    let running = server.start(Arc::new(Old));
    let error = Client::builder().master(address).connect().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::VersionMismatch);
    assert!(error.to_string().contains("1.9.3") && error.to_string().contains("2.0.0"), "{error}");
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_whose_extensions_have_another_shape_is_used_without_them() {
    let first = MasterServer::start(master_config(free_port(), options())).await.unwrap();
    let address = first.addresses().rpc;
    let client = Client::builder()
        .master(address.to_string())
        .copy_in_process(false)
        .segment(4 << 20)
        .timeout(Duration::from_secs(2))
        .connect()
        .await
        .unwrap();
    client.put("before", "v").await.unwrap();
    eventually("the object is known", async || client.status().lasting_objects().await == 1).await;
    first.stop().await;

    // The next master is of another version: the segment returns empty.
    let server = Server::bind(&address.to_string(), ServerOptions::default()).await.unwrap();
    let next = Arc::new(Master::new(options()).unwrap());
    let running = server.start(Arc::new(OtherShapes(MasterService(next.clone()))));
    eventually("the segment is mounted again", async || next.stats().segments.len() == 1).await;
    assert_eq!(client.get("before").await.unwrap(), None);
    eventually("objects are stored again", async || {
        matches!(client.put("after", &value(1, 1000)[..]).await, Ok(PutOutcome::Stored))
    })
    .await;
    assert_eq!(client.get("after").await.unwrap().unwrap(), value(1, 1000));
    client.close().await.unwrap();
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_comes_first_waits_for_the_master() {
    let free = free_port();
    let connect =
        tokio::spawn(Client::builder().master(format!("127.0.0.1:{free}")).segment(1 << 20).connect());
    tokio::time::sleep(Duration::from_millis(150)).await;
    let server = MasterServer::start(master_config(free, options())).await.unwrap();
    let client = connect.await.unwrap().unwrap();
    assert_eq!(client.put("k", "v").await.unwrap(), PutOutcome::Stored);
    client.close().await.unwrap();
    server.stop().await;
}

/// The cooldown would end after the test.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_returns_at_its_endpoint_is_reached_at_once() {
    let server = MasterServer::start(master_config(0, options())).await.unwrap();
    let endpoint = format!("127.0.0.1:{}", free_port());
    let builder = |segment| {
        let config = ClientConfig {
            copy_in_process: false,
            share_memory: false,
            peer_cooldown: Duration::from_secs(3600),
            timeout: Duration::from_secs(5),
            segment,
            ..ClientConfig::default()
        };
        Client::builder().config(config).master(server.addresses().rpc.to_string())
    };
    let reader = builder(0).connect().await.unwrap();
    for round in 0..3 {
        let owner = start_again(async || builder(8 << 20).local_hostname(&endpoint).connect().await).await;
        let (key, bytes) = (round.to_string(), value(round, 1000));
        assert_eq!(owner.put(&key, &bytes[..]).await.unwrap(), PutOutcome::Stored);
        if round > 0 {
            assert_eq!(reader.get(&key).await.unwrap(), Some(bytes), "round {round}");
        }
        drop(owner);
        // A connection that was open breaks, and the next one is refused.
        for _ in 0..3 {
            assert_eq!(reader.get(&key).await.unwrap(), None, "round {round}");
        }
    }
    server.stop().await;
}

/// Memory of the caller keeps its addresses. The earlier master gave leases of 300 s, and wrote no
/// snapshot.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_of_the_caller_rests_as_long_as_leases_of_the_earlier_master_hold() {
    memory_rests_after_a_restart(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_was_unmounted_before_the_restart_rests_too() {
    memory_rests_after_a_restart(true).await;
}

/// `unmounted` tells whether the memory is unmounted before the restart, and mounted after it.
async fn memory_rests_after_a_restart(unmounted: bool) {
    let clock = Arc::new(ManualClock::new());
    let start = async |port, lease| {
        let lease_ttl = Duration::from_secs(lease);
        // The clock moves in large steps.
        let options = MasterOptions { lease_ttl, client_ttl: Duration::from_secs(3600), ..options() };
        MasterServer::start_with_clock(master_config(port, options), clock.clone()).await
    };
    let server = start(free_port(), 300).await.unwrap();
    let address = server.addresses().rpc;
    let client = Client::builder().master(address.to_string()).segment(0).connect().await.unwrap();
    let memory = Arc::new(HostMemory::new(8 << 20).unwrap());
    let segment = client.segments().mount_memory(memory.clone()).await.unwrap();
    if unmounted {
        client.segments().unmount(segment).await.unwrap();
    }
    server.stop().await;
    let server = start_again(async || start(address.port(), 1).await).await;
    eventually("the segment is mounted again", async || {
        if unmounted && client.segments().ids().is_empty() {
            // The first call may find the connection closed.
            let _ = client.segments().mount_memory(memory.clone()).await;
        }
        server.master().stats().segments.len() == 1
    })
    .await;
    let config = ReplicateConfig::default();
    let put = |key: &'static [u8]| {
        let (writer, mode) = (ClientId::default().into(), WriteMode::Put);
        let put = Put { writer, mode, key, len: 1 << 20, config: &config, group: "", session: None };
        server.master().put_start(&put).map(drop).map_err(|error| error.code())
    };
    clock.advance(Duration::from_secs(31));
    assert_eq!(put(b"k"), Err(ErrorCode::NoAvailableHandle), "a reader may hold a lease of 300 s");
    clock.advance(Duration::from_secs(270));
    assert_eq!(put(b"k"), Ok(()));
    client.close().await.unwrap();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn promises_of_the_master_before_are_void() {
    let server = MasterServer::start(master_config(free_port(), options())).await.unwrap();
    let address = server.addresses().rpc;
    let connect = |segment| {
        Client::builder()
            .master(address.to_string())
            .copy_in_process(false)
            .segment(segment)
            .timeout(Duration::from_secs(1))
            .connect()
    };
    let (a, b) = (connect(4 << 20).await.unwrap(), connect(0).await.unwrap());
    let given = HostMemory::new(8 << 20).unwrap();
    let given = a.segments().mount_memory(Arc::new(given)).await.unwrap();
    let ids = a.segments().ids();
    let old = server.master().stats().segments;
    server.stop().await;
    let again = async || MasterServer::start(master_config(address.port(), options())).await;
    let server = start_again(again).await;
    eventually("both segments are mounted again", async || server.master().stats().segments.len() == 2).await;
    assert_eq!(a.segments().ids(), ids, "the caller knows them by these");
    let now = server.master().stats().segments;
    let base = |of: &[SegmentStats], given_one: bool| {
        of.iter().find(|s| (s.id() == given) == given_one).unwrap().segment.base
    };
    assert_eq!(base(&now, true), base(&old, true));
    assert_ne!(base(&now, false), base(&old, false));

    // A late writer of the previous master finds its allocation gone.
    let target = b.engine().open(&old[0].segment.endpoint).await.unwrap();
    let write = async |at| b.engine().write(&target, at, Bytes::from_static(b"late"), None).await.0;
    eventually("the old memory is gone", async || write(base(&old, false)).await.is_err()).await;
    write(base(&now, false)).await.unwrap();

    // Memory that cannot be replaced stays reserved, and new objects go to another segment.
    for i in 0..3 {
        assert_eq!(b.put(format!("k{i}"), &value(i, 1 << 20)[..]).await.unwrap(), PutOutcome::Stored);
        let replicas = server.master().peek(format!("k{i}").as_bytes()).unwrap();
        let at = replicas[0].location.memory().unwrap().address;
        assert!((base(&now, false)..base(&now, false) + (4 << 20)).contains(&at));
    }
    for i in 0..3 {
        assert_eq!(b.get(format!("k{i}")).await.unwrap().unwrap(), value(i, 1 << 20));
    }
    a.segments().unmount(given).await.unwrap();
    assert_eq!(server.master().stats().segments.len(), 1);
    a.close().await.unwrap();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[allow(clippy::disallowed_methods, reason = "the bound is one of real time")]
async fn a_master_that_comes_back_gets_the_segments_again() {
    let server = MasterServer::start(master_config(free_port(), options())).await.unwrap();
    let address = server.addresses().rpc;
    let connect = || {
        Client::builder()
            .master(address.to_string())
            .copy_in_process(false)
            .segment(4 << 20)
            .timeout(Duration::from_secs(1))
            .connect()
    };
    let (a, b) = (connect().await.unwrap(), connect().await.unwrap());
    a.put("before", "v").await.unwrap();
    server.stop().await;
    for client in [&a, &b] {
        let (put, get) = (client.put("during", "v").await, client.get("before").await);
        for error in [put.unwrap_err(), get.unwrap_err()] {
            assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout), "{error}");
        }
    }
    let again = async || MasterServer::start(master_config(address.port(), options())).await;
    let server = start_again(again).await;
    let begun = Instant::now();
    eventually("both segments are mounted again", async || server.master().stats().segments.len() == 2).await;
    // The object is too young to be recovered for sure; `recovery` has tests of the others.
    assert!(b.get("before").await.unwrap().is_none_or(|value| &value[..] == b"v"));
    assert_eq!(a.put("after", "w").await.unwrap(), PutOutcome::Stored);
    // Memory that is remounted at its old addresses would stay reserved for 30 s.
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert_eq!(&b.get("after").await.unwrap().unwrap()[..], b"w");
    a.close().await.unwrap();
    b.close().await.unwrap();
    assert_eq!(server.master().stats().segments.len(), 0);
    server.stop().await;
}

/// A client takes over the segment file of its previous process. It still reports the order of the
/// masters that this process knew to the next master.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_process_of_a_segment_file_knows_the_order_of_masters() {
    let server = MasterServer::start(master_config(free_port(), options())).await.unwrap();
    let address = server.addresses().rpc;
    let pair = EpochPair { newer: 2, older: 1 };
    server.master().exchange_epochs(&[pair]);
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let connect = || {
        Client::builder()
            .master(address.to_string())
            .copy_in_process(false)
            .segment(4 << 20)
            .segment_file(folder.path().join("segment"))
            .timeout(Duration::from_secs(1))
            .connect()
    };
    connect().await.unwrap().close().await.unwrap();
    let next = connect().await.unwrap();
    server.stop().await;
    let again = async || MasterServer::start(master_config(address.port(), options())).await;
    let server = start_again(again).await;
    eventually("the segment is mounted again", async || server.master().stats().segments.len() == 1).await;
    assert!(server.master().exchange_epochs(&[]).contains(&pair));
    next.close().await.unwrap();
    server.stop().await;
}
