//! RPC protocol against a master of Mooncake C++ without clients, at
//! `MOONCAKE_PEER_MASTER=host:port`. `cargo xtask interop` starts a new master for each test.
#![allow(clippy::disallowed_methods, reason = "the addresses come from the environment")]

use std::borrow::Cow;
use std::time::Duration;

use mooncake_core::error::ErrorCode;
use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::{ReplicaStatus, ReplicaType, ReplicateConfig, Segment, SegmentStatus};
use mooncake_store::api::{Caller, EndItem, PutItem, WriteMode};
use mooncake_store::client::{Client, PutOutcome};
use mooncake_store::protocol::client::RpcOptions;
use mooncake_store::protocol::master_client::MasterClient;
use mooncake_store::protocol::message::*;
use mooncake_store::protocol::wire::{TaskReport, TaskStatus};

/// Returns the id of the client, a new one for each run, so that a run finds nothing of the
/// previous one.
fn client() -> ClientId {
    ClientId(Uuid::new(0x5eed, u64::from(std::process::id())))
}

const TENANT: &str = "default";

fn peer() -> MasterClient {
    let address = std::env::var("MOONCAKE_PEER_MASTER").expect("MOONCAKE_PEER_MASTER=host:port of a master");
    MasterClient::remote(address, RpcOptions::default())
}

fn segment() -> Segment {
    Segment {
        id: SegmentId(client().0),
        name: "127.0.0.1:14000".into(),
        base: 0x7000_0000_0000,
        size: 64 << 20,
        endpoint: "127.0.0.1:14001".into(),
        protocol: "tcp".into(),
        host_id: String::new(),
        locality: None,
    }
}

fn caller() -> Caller<'static> {
    Caller { client: client(), tenant: TENANT, attempt: 0 }
}

fn code<T: std::fmt::Debug>(outcome: &mooncake_core::Result<T>) -> Result<(), ErrorCode> {
    outcome.as_ref().map(drop).map_err(|error| error.code())
}

#[tokio::test]
#[ignore = "needs a master of Mooncake C++; cargo xtask interop runs it"]
async fn a_mooncake_cpp_master_answers_every_call() {
    let master = peer();
    assert_eq!(master.version().await.unwrap(), MASTER_VERSION);
    session_calls(&master).await;
    write_calls(&master).await;
    batch_calls(&master).await;
    upsert_calls(&master).await;
    task_calls(&master).await;
    crate::tier_answers::check_off(master.rpc().unwrap(), client(), b"live/one", &segment().name).await;
    any_key(&master).await;
    remove_calls(&master).await;
    unmount_calls(&master).await;
}

async fn session_calls(master: &MasterClient) {
    let rpc = master.rpc().unwrap();
    let config = rpc.call(&GetStorageConfig {}).await.unwrap().unwrap();
    assert_eq!(rpc.call(&GetFsdir {}).await.unwrap(), Ok(config.fs_dir));
    master.mount(client(), &segment()).await.unwrap();
    master.mount(client(), &segment()).await.unwrap();
    let ping = master.ping(client()).await.unwrap();
    assert!(ping.need_remount, "a client that never remounted is asked to");
    master.remount(client(), &[segment()]).await.unwrap();
    assert!(!master.ping(client()).await.unwrap().need_remount);
    let status = rpc.call(&QuerySegmentStatusById { segment: segment().id }).await.unwrap();
    assert_eq!(status, Ok(SegmentStatus::Ok));
    let status = rpc.call(&QuerySegmentStatus { segment_name: "no such segment" }).await.unwrap();
    assert_eq!(status, Err(ErrorCode::SegmentNotFound));
    let clients = [client()];
    let addresses = rpc.call(&BatchQueryIp { clients: Cow::Borrowed(&clients) }).await.unwrap().unwrap();
    assert_eq!(addresses.0, [(client(), vec!["127.0.0.1".to_owned()])]);
}

async fn write_calls(master: &MasterClient) {
    let (put, all) = (WriteMode::Put, ReplicaType::All);
    let items = [PutItem { key: b"live/one", len: 1000 }];
    let config = ReplicateConfig::default();
    let started = master.put_start(caller(), put, &items, &config).await.unwrap();
    let replicas = started[0].as_ref().unwrap();
    let at = replicas[0].location.memory().unwrap();
    assert_eq!((at.size, at.endpoint.as_str(), at.protocol.as_str()), (1000, "127.0.0.1:14001", "tcp"));
    assert_eq!(replicas[0].status, ReplicaStatus::Processing);
    assert_eq!(master.exist(TENANT, &[b"live/one"]).await.unwrap()[0].as_ref().unwrap(), &false);
    let located = master.locate(TENANT, &[b"live/one"]).await.unwrap();
    assert_eq!(code(&located[0]), Err(ErrorCode::ReplicaIsNotReady));

    let end = EndItem { key: b"live/one", checksum: Some(0x1234_5678_9abc) };
    for _ in 0..2 {
        master.put_end(caller(), put, &[end], all).await.unwrap()[0].as_ref().unwrap();
    }
    assert_eq!(master.exist(TENANT, &[b"live/one"]).await.unwrap()[0].as_ref().unwrap(), &true);
    let located = master.locate(TENANT, &[b"live/one"]).await.unwrap();
    let list = located[0].as_ref().unwrap();
    assert_eq!(list.checksum, Some(0x1234_5678_9abc));
    assert!(!list.lease.is_zero());
    assert_eq!((list.replicas[0].id, list.replicas[0].status), (replicas[0].id, ReplicaStatus::Complete));
    let again = master.put_start(caller(), put, &items, &config).await.unwrap();
    assert_eq!(code(&again[0]), Err(ErrorCode::ObjectAlreadyExists));

    let items = [PutItem { key: b"live/two", len: 10 }];
    master.put_start(caller(), put, &items, &config).await.unwrap()[0].as_ref().unwrap();
    master.put_revoke(caller(), put, &[b"live/two"], all).await.unwrap()[0].as_ref().unwrap();
    let revoked = master.put_revoke(caller(), put, &[b"live/two"], all).await.unwrap();
    assert_eq!(code(&revoked[0]), Err(ErrorCode::ObjectNotFound));
}

async fn batch_calls(master: &MasterClient) {
    let (put, all) = (WriteMode::Put, ReplicaType::All);
    let names: Vec<String> = (0..500).map(|i| format!("live/batch/{i}")).collect();
    let keys: Vec<&[u8]> = names.iter().map(|name| name.as_bytes()).collect();
    let items: Vec<PutItem<'_>> = keys.iter().map(|key| PutItem { key, len: 64 }).collect();
    let config = ReplicateConfig { replicas: 2, ..ReplicateConfig::default() };
    let started = master.put_start(caller(), put, &items, &config).await.unwrap();
    assert_eq!(started.len(), 500);
    assert!(started.iter().all(|replicas| replicas.as_ref().is_ok_and(|replicas| replicas.len() == 1)));
    let ends: Vec<EndItem<'_>> = keys[..400].iter().map(|key| EndItem { key, checksum: None }).collect();
    let ended = master.put_end(caller(), put, &ends, all).await.unwrap();
    assert!(ended.len() == 400 && ended.iter().all(Result::is_ok));
    let revoked = master.put_revoke(caller(), put, &keys[400..], all).await.unwrap();
    assert!(revoked.len() == 100 && revoked.iter().all(Result::is_ok));
    let exist = master.exist(TENANT, &keys).await.unwrap();
    let exist: Vec<bool> = exist.into_iter().map(Result::unwrap).collect();
    assert_eq!(exist, (0..500).map(|i| i < 400).collect::<Vec<_>>());
    let located = master.locate(TENANT, &keys).await.unwrap();
    assert!(located[..400].iter().all(Result::is_ok));
    assert!(located[400..].iter().all(|outcome| code(outcome) == Err(ErrorCode::ObjectNotFound)));
}

async fn upsert_calls(master: &MasterClient) {
    let (upsert, all) = (WriteMode::Upsert, ReplicaType::All);
    let config = ReplicateConfig::default();
    let keys: [&[u8]; 2] = [b"live/up/a", b"live/up/b"];
    for len in [10, 20] {
        let items = keys.map(|key| PutItem { key, len });
        let ends = keys.map(|key| EndItem { key, checksum: None });
        let started = master.put_start(caller(), upsert, &items, &config).await.unwrap();
        assert!(started.iter().all(Result::is_ok), "{started:?}");
        let ended = master.put_end(caller(), upsert, &ends, all).await.unwrap();
        assert!(ended.iter().all(Result::is_ok), "{ended:?}");
        let one = master.put_start(caller(), upsert, &items[..1], &config).await.unwrap();
        assert!(one[0].is_ok());
        let one = master.put_end(caller(), upsert, &ends[..1], all).await.unwrap();
        assert!(one[0].is_ok());
    }
    let items = keys.map(|key| PutItem { key, len: 30 });
    assert!(master.put_start(caller(), upsert, &items, &config).await.unwrap().iter().all(Result::is_ok));
    let revoked = master.put_revoke(caller(), upsert, &keys[..1], all).await.unwrap();
    assert!(revoked[0].is_ok());
    let revoked = master.put_revoke(caller(), upsert, &keys, all).await.unwrap();
    assert_eq!(code(&revoked[0]), Err(ErrorCode::ObjectNotFound));
    assert!(revoked[1].is_ok());
}

async fn task_calls(master: &MasterClient) {
    let rpc = master.rpc().unwrap();
    let (client, tenant, key) = (client(), TENANT, b"live/one".as_slice());
    let name = segment().name;
    assert_eq!(rpc.call(&FetchTasks { client, limit: 16 }).await.unwrap(), Ok(Vec::new()));
    let targets = [name.as_str()];
    let create = CreateCopyTask { key, tenant, targets: Cow::Borrowed(&targets) };
    let task = rpc.call(&create).await.unwrap().unwrap();
    let tasks = rpc.call(&FetchTasks { client, limit: 16 }).await.unwrap().unwrap();
    assert_eq!((tasks.len(), tasks[0].id), (1, task));
    assert!(tasks[0].payload.contains("live/one"));
    let copy = CopyStart { client, key, tenant, source: &name, targets: Cow::Borrowed(&targets) };
    let plan = rpc.call(&copy).await.unwrap().unwrap();
    assert_eq!((plan.source.location.size(), plan.targets.len()), (1000, 0));
    assert_eq!(rpc.call(&CopyEnd { client, key, tenant }).await.unwrap(), Ok(()));
    let revoked = rpc.call(&CopyRevoke { client, key, tenant }).await.unwrap();
    assert_eq!(revoked, Err(ErrorCode::ObjectNoReplicationTask));
    let report = TaskReport { id: task, status: TaskStatus::Success, message: "done".into() };
    assert_eq!(rpc.call(&MarkTaskToComplete { client, report }).await.unwrap(), Ok(()));
    let info = rpc.call(&QueryTask { task }).await.unwrap().unwrap();
    assert_eq!((info.status, info.client, info.message.as_str()), (TaskStatus::Success, client, "done"));
    let create = CreateMoveTask { key, tenant, source: &name, target: &name };
    assert_eq!(rpc.call(&create).await.unwrap(), Err(ErrorCode::InvalidParams));
    let start = MoveStart { client, key, tenant, source: &name, target: &name };
    assert_eq!(rpc.call(&start).await.unwrap(), Err(ErrorCode::InvalidParams));
    for outcome in [
        rpc.call(&MoveEnd { client, key, tenant }).await.unwrap(),
        rpc.call(&MoveRevoke { client, key, tenant }).await.unwrap(),
    ] {
        assert_eq!(outcome, Err(ErrorCode::ObjectNoReplicationTask));
    }
}

/// Sends and receives keys of every length class and with any bytes; lengths take every width.
async fn any_key(master: &MasterClient) {
    let config = ReplicateConfig::default();
    for len in [1, 254, 255, 256, 257, 65535, 65536, 100_000] {
        let key: Vec<u8> = (0..len).map(|i| (i % 251) as u8 ^ 0x80).collect();
        let items = [PutItem { key: &key, len: 1 }];
        let started = master.put_start(caller(), WriteMode::Put, &items, &config).await.unwrap();
        assert!(started[0].is_ok(), "key of {len} bytes: {started:?}");
        let ends = [EndItem { key: &key, checksum: None }];
        assert!(master.put_end(caller(), WriteMode::Put, &ends, ReplicaType::All).await.unwrap()[0].is_ok());
        assert!(master.exist(TENANT, &[&key, b"live/none"]).await.unwrap()[0].as_ref().unwrap());
    }
    let found = GetReplicaListByRegex { pattern: "^live/batch/1", tenant: TENANT };
    let found = master.rpc().unwrap().call(&found).await.unwrap().unwrap();
    assert_eq!(found.0.len(), 111);
    assert!(found.0.iter().all(|(key, replicas)| key.starts_with(b"live/batch/1") && replicas.len() == 1));
}

async fn remove_calls(master: &MasterClient) {
    let leased = master.remove(TENANT, &[b"live/one"], false).await.unwrap();
    assert_eq!(code(&leased[0]), Err(ErrorCode::ObjectHasLease));
    let keys: [&[u8]; 2] = [b"live/one", b"live/none"];
    assert_eq!(master.clear_replicas(caller(), &keys, "").await.unwrap(), Vec::new());
    assert!(master.remove(TENANT, &keys[..1], true).await.unwrap()[0].is_ok());
    let removed = master.remove(TENANT, &keys, true).await.unwrap();
    assert!(removed.iter().all(|outcome| code(outcome) == Err(ErrorCode::ObjectNotFound)));
    let bad = master.remove_matching(TENANT, "(", true).await;
    assert_eq!(code(&bad), Err(ErrorCode::InvalidParams));
    assert_eq!(master.remove_matching(TENANT, "^live/batch/", true).await.unwrap(), 400);
    assert!(master.remove_all(TENANT, true).await.unwrap() >= 8);
}

async fn unmount_calls(master: &MasterClient) {
    let segment = segment().id;
    let later = GracefulUnmountSegment { segment, client: client(), grace_ms: 60_000 };
    assert_eq!(master.rpc().unwrap().call(&later).await.unwrap(), Ok(()));
    let status = master.rpc().unwrap().call(&QuerySegmentStatusById { segment }).await.unwrap();
    assert_eq!(status, Ok(SegmentStatus::GracefullyUnmounting));
    for _ in 0..2 {
        master.unmount(client(), segment).await.unwrap();
    }
}

/// Every object on the master is under a lease, so a put gets free space when the leases expire. No
/// other test uses the master.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a master of Mooncake C++ without clients; cargo xtask interop runs it"]
async fn a_client_waits_for_free_space_on_a_mooncake_cpp_master() {
    let address = std::env::var("MOONCAKE_PEER_MASTER").expect("MOONCAKE_PEER_MASTER=host:port of a master");
    let member = |segment, patience| {
        let builder =
            Client::builder().master(address.as_str()).local_hostname("10.213.0.1").segment(segment);
        builder.timeout(Duration::from_secs(25)).space_timeout(patience).connect()
    };
    let asks_once = member(4 << 20, Duration::ZERO).await.unwrap();
    let value = vec![7; 256 << 10];
    let mut stored = 0;
    while asks_once.put(format!("room/{stored}"), &value[..]).await.is_ok() {
        assert!(asks_once.exist(format!("room/{stored}")).await.unwrap());
        stored += 1;
    }
    assert!(stored >= 12, "{stored}");
    let waits = member(0, Duration::from_secs(25)).await.unwrap();
    assert_eq!(waits.put("room/new", &value[..]).await.unwrap(), PutOutcome::Stored);
    waits.close().await.unwrap();
    asks_once.close().await.unwrap();
}
