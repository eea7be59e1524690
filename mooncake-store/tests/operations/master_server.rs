//! Master on real ports: calls over RPC, admin endpoints, metadata, and invalid bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use crate::common::http::{config, http, raw};
use crate::common::rig::{MIB, client, segment};
use mooncake_core::clock::ManualClock;
use mooncake_core::meta::Expect;
use mooncake_core::replica::{ReplicaType, ReplicateConfig, Segment};
use mooncake_core::testkit::effort;
use mooncake_core::{ErrorCode, ErrorKind};
use mooncake_store::api::{Caller, DEFAULT_TENANT, EndItem, PutItem, WriteMode};
use mooncake_store::config::MasterConfig;
use mooncake_store::master::Put;
use mooncake_store::protocol::client::RpcOptions;
use mooncake_store::protocol::master_client::MasterClient;
use mooncake_store::server::MasterServer;
use proptest::prelude::*;
use tokio::net::TcpStream;

/// Line of a log of Mooncake C++.
const SUMMARY: &str = "\
    role=leader, state=serving, service_ready=true, master={Mem Storage: 5.91 KB / 100.00 MB (0.0%) | NVMe-oF SSD: 0 B / \
    0 B | SSD Storage: 0 B / 0 B | Keys: 3 (soft-pinned: 0) | Clients: 1 | Requests (Success/Total per sec): \
    PutStart=12.30/12.30, PutEnd=12.30/12.30, PutRevoke=0.00/0.00, Get=4.10/8.20, Exist=4.10/4.10, Del=0.00/0.00, \
    DelAll=0.00/0.00, Ping=4.10/4.10, CopyStart=0.00/0.00, CopyEnd=0.00/0.00, CopyRevoke=0.00/0.00, MoveStart=0.00/0.00, \
    MoveEnd=0.00/0.00, MoveRevoke=0.00/0.00, EvictDiskReplica=0.00/0.00 | Batch Requests (per sec, \
    Req=Success/PartialSuccess/Total, Item=Success/Total): PutStart:(Req=0.00/0.00/0.00, Item=0.00/0.00), \
    PutEnd:(Req=0.00/0.00/0.00, Item=0.00/0.00), PutRevoke:(Req=0.00/0.00/0.00, Item=0.00/0.00), Get:(Req=0.00/0.00/0.00, \
    Item=0.00/0.00), ExistKey:(Req=0.00/0.00/0.00, Item=0.00/0.00), QueryIp:(Req=0.00/0.00/0.00, Item=0.00/0.00), \
    Clear:(Req=0.00/0.00/0.00, Item=0.00/0.00), CreateMoveTask:(Req=0.00/0.00), CreateCopyTask:(Req=0.00/0.00), \
    QueryTask:(Req=0.00/0.00), FetchTasks:(Req=4.10/4.10), MarkTaskToComplete:(Req=0.00/0.00) | Eviction: \
    Success/Attempts=0/0, AllocFail=0, PartialAlloc=0, keys=0, size=0 B | Mem Eviction: Success/Attempts=0/0, keys=0, \
    size=0 B | NoF Eviction: Success/Attempts=0/0, keys=0, size=0 B | Discard: Released/Total=0/0, StagingSize=0 B | \
    Promotion: in_flight=0, admitted=0, completed=0, failed=0, cancelled=0, expired=0, bytes=0 B, \
    rejected(freq/wm/cap)=0/0/0 | Snapshots: Success=0, Fail=0}, ha={HA Metrics Summary: last_seq=0, applied_seq=0, \
    lag=0, pending=0, mutation_queue=0, batch_commits=0, sync_commits=0, skipped=0, checksum_fail=0, etcd_fail=0, \
    watch_disconn=0, state=0}";

async fn put(master: &MasterClient, key: &[u8], len: u64) {
    let caller = Caller { client: client(1), tenant: DEFAULT_TENANT, attempt: 0 };
    let items = [PutItem { key, len }];
    let config = ReplicateConfig::default();
    master.put_start(caller, WriteMode::Put, &items, &config).await.unwrap().remove(0).unwrap();
    let items = [EndItem { key, checksum: None }];
    master.put_end(caller, WriteMode::Put, &items, ReplicaType::All).await.unwrap().remove(0).unwrap();
}

/// Removals of many callers over all objects do not delay a mount.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_flood_of_removals_does_not_delay_mounts() {
    const FLOOD: usize = 64;
    let server = MasterServer::start(config()).await.unwrap();
    let at = server.addresses().rpc.to_string();
    server.master().mount(client(1), &segment(1, 100 * MIB)).unwrap();
    let config = ReplicateConfig::default();
    for number in 0..20_000 {
        let (key, writer, mode) = (format!("key {number}"), client(1).into(), WriteMode::Put);
        let put =
            Put { writer, mode, key: key.as_bytes(), len: 1, config: &config, group: "", session: None };
        server.master().put_start(&put).unwrap();
        server.master().put_end(writer, key.as_bytes(), None, ReplicaType::All).unwrap();
        server.master().ping(client(1));
    }
    let done = Arc::new(AtomicUsize::new(0));
    let flood: Vec<_> = (0..FLOOD)
        .map(|_| {
            let options = RpcOptions { call_timeout: Duration::from_secs(60), ..RpcOptions::default() };
            let (master, done) = (MasterClient::remote(at.clone(), options), done.clone());
            tokio::spawn(async move {
                master.remove_matching(DEFAULT_TENANT, "key .*x", false).await.unwrap();
                done.fetch_add(1, Relaxed)
            })
        })
        .collect();
    while done.load(Relaxed) < 2 {
        tokio::task::yield_now().await;
    }
    let master = MasterClient::remote(at.clone(), Default::default());
    master.mount(client(2), &segment(2, MIB)).await.unwrap();
    let before = done.load(Relaxed);
    for removal in flood {
        removal.await.unwrap();
    }
    assert!(before < FLOOD / 2, "the mount was answered after {before} of {FLOOD} removals");
    server.stop().await;
}

/// The metadata service of a master demands the token of its configuration.
#[tokio::test]
async fn the_metadata_service_demands_its_token() {
    let mut config = config();
    config.metadata.as_mut().unwrap().token = "secret".into();
    let server = MasterServer::start(config).await.unwrap();
    let metadata = server.addresses().metadata.unwrap();
    assert_eq!(http(metadata, "GET", "/metadata?key=k", "").await, (401, "unauthorized".into()));
    assert_eq!(http(metadata, "PUT", "/metadata?key=k", "v").await.0, 401);
    assert_eq!(http(metadata, "GET", "/health", "").await.0, 200);
    let request = "GET /metadata?key=k HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer secret\r\n\r\n";
    let answer = raw(metadata, request.as_bytes()).await;
    assert!(answer.starts_with(b"HTTP/1.1 404"), "{}", answer.escape_ascii());
    server.stop().await;
}

#[tokio::test]
async fn calls_endpoints_and_metrics() {
    let server = MasterServer::start(config()).await.unwrap();
    let at = server.addresses();
    let admin = at.admin.unwrap();
    let master = MasterClient::remote(at.rpc.to_string(), Default::default());
    master.mount(client(1), &segment(1, MIB)).await.unwrap();
    put(&master, b"a b", 1000).await;
    let keys: [&[u8]; 2] = [b"a b", b"none"];
    let found = master.locate(DEFAULT_TENANT, &keys).await.unwrap();
    assert!(found[0].is_ok());
    assert_eq!(found[1].as_ref().unwrap_err().code(), ErrorCode::ObjectNotFound);

    let (status, health) = http(admin, "GET", "/health", "").await;
    assert_eq!(status, 200);
    assert!(health.contains("\"status\":\"ok\""), "{health}");
    assert_eq!(http(admin, "GET", "/role", "").await.1, "leader");
    assert_eq!(http(admin, "GET", "/get_all_keys", "").await.1, "a b\n");
    assert_eq!(http(admin, "GET", "/get_all_segments", "").await.1, "node1:1\n");
    let (_, used) = http(admin, "GET", "/query_segment?segment=node1%3A1", "").await;
    assert_eq!(used, format!("node1:1\nUsed(bytes): 1024\nCapacity(bytes) : {MIB}\n"));
    assert_eq!(http(admin, "GET", "/query_segment?segment=x", "").await.0, 500);
    let (status, key) = http(admin, "GET", "/query_key?key=a%20b", "").await;
    assert_eq!(status, 200);
    assert!(
        key.contains("\"size_\":1000") && key.contains("\"transport_endpoint_\":\"10.0.0.1:1\""),
        "{key}"
    );
    let (status, absent) = http(admin, "GET", "/query_key?key=none", "").await;
    assert_eq!(status, 404);
    assert!(absent.contains("\"error_code\":-704") && absent.contains("OBJECT_NOT_FOUND"), "{absent}");
    let (_, detail) = http(admin, "GET", "/get_segments_detail", "").await;
    assert!(detail.contains("\"segment_id\":\"2-1\"") && detail.contains("\"status\":\"OK\""), "{detail}");

    let (status, metrics) = http(admin, "GET", "/metrics", "").await;
    assert_eq!(status, 200);
    for line in [
        "master_key_count 1",
        "master_allocated_bytes 1024",
        "segment_allocated_bytes{segment=\"node1:1\"} 1024",
        "master_put_start_requests_total 1",
        "master_put_start_failures_total 0",
        "master_batch_get_replica_list_items_total 2",
        "master_batch_get_replica_list_failed_items_total 1",
        "master_batch_get_replica_list_partial_successes_total 1",
        "mem_cache_hit_nums_ 1",
        "total_get_nums_ 2",
        "master_value_size_bytes_bucket{le=\"4096\"} 1",
        "master_value_size_bytes_count 1",
        "master_successful_evictions_total 0",
        "master_successful_evictions_mem 0",
    ] {
        assert!(metrics.lines().any(|have| have == line), "no {line:?} in\n{metrics}");
    }
    let (_, summary) = http(admin, "GET", "/metrics/summary", "").await;
    let number = regex::Regex::new(r"\d+").unwrap();
    let numbers = |text: &str| number.replace_all(text, "0").into_owned();
    assert_eq!(numbers(&summary), numbers(SUMMARY), "{summary}");
    assert!(
        summary.contains("Mem Storage: 1.00 KB / 1.00 MB (0.1%)") && summary.contains(" | Keys: 1 ("),
        "{summary}"
    );
    server.stop().await;
    assert!(TcpStream::connect(at.rpc).await.is_err());
}

#[tokio::test]
async fn metadata_keys_are_the_same_escaped_and_raw() {
    let server = MasterServer::start(config()).await.unwrap();
    let at = server.addresses().metadata.unwrap();
    let both = ["/metadata?key=mooncake%2Frpc_meta%2Fn%3A1", "/metadata?key=mooncake/rpc_meta/n:1"];
    assert_eq!(http(at, "GET", both[0], "").await, (404, "metadata not found".into()));
    assert_eq!(http(at, "PUT", both[0], "{1}").await, (200, "metadata updated".into()));
    for path in both {
        assert_eq!(http(at, "GET", path, "").await, (200, "{1}".into()));
        assert_eq!(http(at, "PUT", path, "{1}").await, (200, "metadata unchanged".into()));
        assert_eq!(http(at, "PUT", path, "{2}").await, (400, "Duplicate rpc_meta key not allowed".into()));
    }
    assert_eq!(http(at, "DELETE", both[1], "").await, (200, "metadata deleted".into()));
    assert_eq!(http(at, "DELETE", both[0], "").await, (404, "metadata not found".into()));
    let ram = "/metadata?key=mooncake/ram/n";
    for value in ["{1}", "{2}"] {
        assert_eq!(http(at, "PUT", ram, value).await, (200, "metadata updated".into()));
    }
    assert_eq!(http(at, "GET", "/metadata", "").await, (400, "Missing key parameter".into()));
    assert_eq!(http(at, "GET", "/metadata?key=", "").await.0, 400);
    assert_eq!(http(at, "GET", "/metadata?key=%ff", "").await.0, 400);
    for (method, path) in [("POST", ram), ("GET", "/elsewhere")] {
        assert_eq!(http(at, method, path, "").await, (404, "404 Not Found".into()));
    }
    assert_eq!(http(at, "GET", "/health", "").await, (200, "OK".into()));
    server.stop().await;
}

#[tokio::test]
async fn expired_clients_leave_no_metadata() {
    let clock = Arc::new(ManualClock::new());
    let server = MasterServer::start_with_clock(config(), clock.clone()).await.unwrap();
    server.master().mount(client(1), &segment(1, MIB)).unwrap();
    let metadata = server.metadata().clone();
    for key in ["mooncake/ram/node1:1", "mooncake/rpc_meta/node1:1", "mooncake/ram/other"] {
        metadata.put(key, "x".into(), Expect::Any).await.unwrap();
    }
    clock.advance(Duration::from_secs(11));
    let gone = async {
        while metadata.list("mooncake/").await.unwrap().len() > 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), gone).await.expect("the ticker cleans up");
    assert!(metadata.get("mooncake/ram/other").await.unwrap().is_some());
    server.stop().await;
}

#[tokio::test]
async fn the_living_keep_their_metadata() {
    let clock = Arc::new(ManualClock::new());
    let server = MasterServer::start_with_clock(config(), clock.clone()).await.unwrap();
    // Two segments of one client share a name; one of them is unmounted gracefully.
    let (first, second) = (segment(1, MIB), segment(2, MIB));
    let second = Segment { name: first.name.clone(), endpoint: first.endpoint.clone(), ..second };
    for segment in [&first, &second] {
        server.master().mount(client(1), segment).unwrap();
    }
    let metadata = server.metadata().clone();
    let key = "mooncake/rpc_meta/node1:1";
    metadata.put(key, "x".into(), Expect::Any).await.unwrap();
    server.master().unmount_after(client(1), second.id, Duration::from_secs(1)).unwrap();
    clock.advance(Duration::from_secs(2));
    server.master().ping(client(1));
    until(|| server.master().stats().segments.len() == 1).await;
    // Another client has taken over the name of an expired client.
    let other = Segment { name: first.name.clone(), ..segment(3, MIB) };
    server.master().mount(client(3), &other).unwrap();
    clock.advance(Duration::from_secs(9));
    server.master().ping(client(3));
    clock.advance(Duration::from_secs(2));
    until(|| server.master().stats().segments.len() == 1).await;
    // Segments are cleaned up in order.
    server.master().mount(client(4), &segment(4, MIB)).unwrap();
    metadata.put("mooncake/rpc_meta/node4:1", "x".into(), Expect::Any).await.unwrap();
    for _ in 0..2 {
        clock.advance(Duration::from_secs(6));
        server.master().ping(client(3));
    }
    while metadata.get("mooncake/rpc_meta/node4:1").await.unwrap().is_some() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(metadata.get(key).await.unwrap().is_some());
    server.stop().await;
}

async fn until(done: impl Fn() -> bool) {
    let waited = async {
        while !done() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), waited).await.expect("it happens");
}

/// A name belongs to the first client that published it, as long as that client lives.
#[tokio::test]
async fn the_name_of_a_killed_process_can_be_taken() {
    let clock = Arc::new(ManualClock::new());
    let server = MasterServer::start_with_clock(config(), clock.clone()).await.unwrap();
    let at = server.addresses().metadata.unwrap();
    let value = |port: u16| format!("{{\"ip_or_host_name\":\"127.0.0.1\",\"rpc_port\":{port}}}");
    let path = "/metadata?key=mooncake%2Frpc_meta%2Fnode1:1";
    let duplicate = (400, "Duplicate rpc_meta key not allowed".to_owned());
    let updated = (200, "metadata updated".to_owned());

    let owner = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = owner.local_addr().unwrap().port();
    assert_eq!(http(at, "PUT", path, &value(port)).await, updated);
    assert_eq!(http(at, "PUT", path, &value(1)).await, duplicate, "its owner listens");
    drop(owner);
    assert_eq!(http(at, "PUT", path, "{}").await, duplicate, "that is not the same process again");
    let elsewhere = value(1).replace("127.0.0.1", "127.0.0.2");
    assert_eq!(http(at, "PUT", path, &elsewhere).await, duplicate, "nor is another host");
    assert_eq!(http(at, "PUT", path, &value(2)).await, updated, "nobody listens any more");
    assert_eq!(http(at, "GET", path, "").await, (200, value(2)));

    // A client is also dead after its heartbeat timeout, whatever its next address.
    let server_without_clean_up = {
        let config = MasterConfig { clean_up: None, ..config() };
        MasterServer::start_with_clock(config, clock.clone()).await.unwrap()
    };
    let (server_too, at) = (&server_without_clean_up, server_without_clean_up.addresses().metadata.unwrap());
    server_too.master().mount(client(1), &segment(1, MIB)).unwrap();
    assert_eq!(http(at, "PUT", path, &value(port)).await, updated);
    assert_eq!(http(at, "PUT", path, &elsewhere).await, duplicate, "a member");
    clock.advance(Duration::from_secs(11));
    until(|| server_too.master().stats().segments.is_empty()).await;
    let taken = async {
        while http(at, "PUT", path, &elsewhere).await != updated {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), taken).await.expect("the member is known to be dead");
    assert_eq!(http(at, "PUT", path, &value(3)).await, duplicate, "the new owner is not");
    server.stop().await;
    server_without_clean_up.stop().await;
}

#[tokio::test]
async fn a_port_in_use_is_named_with_its_flag() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let with = |change: fn(&mut MasterConfig, u16)| {
        let mut config = config();
        change(&mut config, port);
        config
    };
    for (flag, config) in [
        ("--rpc_port", with(|config, port| config.rpc_port = port)),
        ("--metrics_port", with(|config, port| config.metrics_port = port)),
        (
            "--http_metadata_server_port",
            with(|config, port| config.metadata.iter_mut().for_each(|server| server.port = port)),
        ),
    ] {
        let error = MasterServer::start(config).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.message().contains(&port.to_string()), "{error}");
        assert!(error.message().contains(flag), "{error}");
    }
}

#[tokio::test]
async fn garbage_on_any_port_harms_no_client() {
    let server = MasterServer::start(config()).await.unwrap();
    let at = server.addresses();
    let mut huge = vec![21, 0, 0, 0, 1, 0, 0, 0];
    huge.extend([0x09, 0x5f, 0x38, 0x89, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
    for port in [at.rpc, at.admin.unwrap(), at.metadata.unwrap()] {
        for garbage in [
            &b"\0\0\0\0\0\0\0\0"[..],
            b"GET / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
            &huge,
            &[0xff; 4096],
        ] {
            raw(port, garbage).await;
        }
    }
    let master = MasterClient::remote(at.rpc.to_string(), Default::default());
    assert!(master.version().await.is_ok(), "it still answers");
    assert_eq!(http(at.admin.unwrap(), "GET", "/health", "").await.0, 200);
    assert_eq!(server.master().stats().keys, 0);
    server.stop().await;
}

/// Every key and value gets a response, and a get returns the put value.
#[test]
fn any_key_and_value_in_the_metadata() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = runtime.block_on(MasterServer::start(config())).unwrap();
    let at = server.addresses().metadata.unwrap();
    let key = "(%[0-9a-f]{2}|rpc_meta|[!$-;=?-Z_a-z~]){0,6}";
    let value = proptest::prop_oneof![
        "[ -~]{0,40}",
        "[0-9]{1,6}".prop_map(|port| format!("{{\"ip_or_host_name\":\"127.0.0.1\",\"rpc_port\":{port}}}")),
    ];
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(effort(60, 300)));
    runner
        .run(&(key, value), |(key, value)| {
            let path = format!("/metadata?key={key}");
            let ask = |method: &str, body: &str| runtime.block_on(http(at, method, &path, body));
            let (status, said) = ask("PUT", &value);
            prop_assert!(matches!(status, 200 | 400), "{} {}", status, said);
            let (status, found) = ask("GET", "");
            prop_assert!(matches!(status, 200 | 400), "{} {}", status, found);
            if status == 200 && !key.contains("rpc_meta") {
                prop_assert_eq!(found, value);
                prop_assert_eq!(ask("DELETE", ""), (200, "metadata deleted".to_owned()));
                prop_assert_eq!(ask("GET", "").0, 404);
            }
            Ok(())
        })
        .unwrap();
    runtime.block_on(server.stop());
}
