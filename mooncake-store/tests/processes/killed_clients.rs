//! Clients and masters that are killed, stopped and started again.

use std::time::{Duration, Instant};

use bytes::Bytes;
use mooncake_core::clock::Rng;
use mooncake_core::{ErrorCode, ErrorKind};
use mooncake_store::client::{Client, ClientConfig, PutOptions, PutOutcome, RangeOutcome, RangeRead};
use mooncake_store::local::{
    LocalClient, LocalConfig, LocalRange, LocalRead, LocalServer, LocalServerConfig,
};
use mooncake_store::protocol::wire::TaskStatus;
use mooncake_store::transport_set::TransportSet;
use mooncake_transport::SliceMut;

use crate::cluster::{
    LONGEST, PATIENCE, SEGMENT, SLACK, builder, builder_with, cluster, connect, eventually, in_segment_of,
    master, timed,
};
use crate::process::free_port;

const LEN: usize = 64 << 10;

fn value(seed: u64) -> Bytes {
    let mut bytes = vec![0; LEN];
    Rng::seeded(seed).fill(&mut bytes);
    bytes.into()
}

/// Reads a key. Returns whether it was a hit, and checks its bytes.
async fn read(client: &Client, i: u64) -> bool {
    match timed("get", client.get(format!("key {i}"))).await {
        Ok(Some(bytes)) => {
            assert_eq!(bytes, value(i), "key {i}");
            true
        }
        Ok(None) => false,
        Err(error) => {
            assert!(matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unavailable), "{error}");
            false
        }
    }
}

async fn hits(client: &Client, keys: std::ops::Range<u64>) -> usize {
    let mut hits = 0;
    for i in keys {
        hits += usize::from(read(client, i).await);
    }
    hits
}

async fn put(client: &Client, i: u64, config: &PutOptions) -> bool {
    match timed("put", client.put_with(format!("key {i}"), &value(i)[..], config)).await {
        Ok(outcome) => outcome == PutOutcome::Stored,
        Err(error) => {
            let fine =
                matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unavailable | ErrorKind::NoSpace);
            assert!(fine, "{error}");
            false
        }
    }
}

async fn puts(client: &Client, keys: std::ops::Range<u64>, config: &PutOptions) -> usize {
    let mut stored = 0;
    for i in keys {
        stored += usize::from(put(client, i, config).await);
    }
    stored
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_client_is_only_misses() {
    let (_, _master, mut members, client) = cluster(&["--client_ttl=2"]).await;
    let (second, name) = members.pop().unwrap();
    assert_eq!(puts(&client, 0..20, &in_segment_of(&name)).await, 20);
    assert_eq!(puts(&client, 20..40, &PutOptions::new().replicas(2)).await, 20);
    second.kill();
    assert_eq!(hits(&client, 0..20).await, 0);
    assert_eq!(hits(&client, 20..40).await, 20, "the other replica is there");
    assert_eq!(puts(&client, 40..60, &PutOptions::default()).await, 20, "there is room elsewhere");
    assert_eq!(hits(&client, 40..60).await, 20);
    // The master learns of the failed owner, and the keys may be put again.
    eventually("the master knows", Duration::from_secs(6), async || {
        put(&client, 0, &PutOptions::default()).await
    })
    .await;
    assert_eq!(hits(&client, 0..1).await, 1);
}

/// After the owner of located objects dies, their ranges are read from the copies that were made
/// meanwhile, also those of a partly read object. A client and a shared client do so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranges_of_located_objects_of_a_killed_client() {
    let (port, _master, mut members, _) =
        cluster(&["--client_ttl=600", "--default_kv_lease_ttl=60000"]).await;
    // Only `timed` limits the reads.
    let client = builder(&format!("127.0.0.1:{port}"), 0).timeout(LONGEST);
    let client = client.connect().await.unwrap();
    let (first, name) = members.remove(0);
    assert_eq!(puts(&client, 0..4, &in_segment_of(&name)).await, 4);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("owner.sock");
    let config = LocalServerConfig { path: path.clone(), ..LocalServerConfig::default() };
    let server = LocalServer::start(client.clone(), config).unwrap();
    let light = LocalClient::connect(LocalConfig::at(path.to_str().unwrap())).await.unwrap();

    let keys: Vec<String> = (0..4).map(|i| format!("key {i}")).collect();
    let own: Vec<_> =
        client.ranges().locate(&keys).await.unwrap().into_iter().map(|one| one.unwrap().unwrap()).collect();
    let lent: Vec<_> =
        light.locate(&keys).await.unwrap().into_iter().map(|one| one.unwrap().unwrap()).collect();
    let read_own = async |i: usize, offset: u64, len: usize| {
        let into = client.memory().alloc(len).unwrap().exclusive().unwrap();
        let range = RangeRead { object: own[i].clone(), offset, into };
        let RangeOutcome { result: read, into } =
            timed("ranges", client.ranges().read(vec![range])).await.remove(0);
        read.map(|()| bytes_of(&into)).map_err(|error| error.code())
    };
    let read_lent = async |i: usize, offset: u64, len: usize| {
        let into = light.alloc_registered(len).await.unwrap().exclusive().unwrap();
        let range = LocalRange { object: lent[i].clone(), offset, into };
        let LocalRead { result: read, into } =
            timed("ranges", light.read_ranges(vec![range])).await.remove(0);
        read.map(|()| bytes_of(&into.unwrap())).map_err(|error| error.code())
    };
    let half = LEN / 2;
    for begun in [read_own(0, 0, half).await, read_lent(0, 0, half).await] {
        assert_eq!(begun.unwrap(), value(0)[..half]);
    }
    let mut tasks = Vec::new();
    for key in &keys {
        tasks.push(client.replicas().copy(key, &[&members[0].1]).await.unwrap());
    }
    for task in tasks {
        eventually("it is copied", Duration::from_secs(20), async || {
            client.replicas().task(task).await.unwrap().status == TaskStatus::Success
        })
        .await;
    }
    first.kill();
    for (i, from, to) in [(0, half, LEN), (1, 0, LEN), (2, 100, 200), (3, half, LEN)] {
        let expected = Ok(value(i as u64)[from..to].to_vec());
        assert_eq!(read_own(i, from as u64, to - from).await, expected, "key {i}");
        assert_eq!(read_lent(i, from as u64, to - from).await, expected, "key {i}, light client");
    }
    drop(light);
    server.stop().await;
}

fn bytes_of(slice: &SliceMut<TransportSet>) -> Vec<u8> {
    let mut bytes = vec![0; slice.len()];
    slice.copy_to(0, &mut bytes).unwrap();
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_client_delays_no_other_client() {
    let (_, _master, members, client) = cluster(&["--client_ttl=2"]).await;
    let (frozen, name) = &members[1];
    assert_eq!(puts(&client, 0..5, &in_segment_of(name)).await, 5);
    assert_eq!(puts(&client, 20..30, &PutOptions::new().replicas(2)).await, 10);
    frozen.freeze();
    // Through shared memory the read may even succeed.
    hits(&client, 0..5).await;
    assert_eq!(hits(&client, 20..30).await, 10);
    eventually("puts go elsewhere", Duration::from_secs(8), async || {
        put(&client, 40, &PutOptions::default()).await
    })
    .await;
    assert_eq!(puts(&client, 41..50, &PutOptions::default()).await, 9);
    frozen.thaw();
    // The client learns that it has expired, and returns empty; no read ever shows other bytes.
    eventually("the client is back", Duration::from_secs(8), async || {
        hits(&client, 0..5).await;
        let i = Rng::from_os().next_u64();
        let stored = put(&client, i, &in_segment_of(name)).await;
        stored && read(&client, i).await
    })
    .await;
    assert_eq!(hits(&client, 40..50).await, 10);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_master_is_missed_for_seconds() {
    let (port, server, _members, client) = cluster(&[]).await;
    assert_eq!(puts(&client, 0..20, &PutOptions::default()).await, 20);
    server.kill();
    assert_eq!(hits(&client, 0..2).await, 0);
    assert_eq!(puts(&client, 60..62, &PutOptions::default()).await, 0);
    let _server = master(port, &[]);
    eventually("it serves again", Duration::from_secs(3), async || {
        put(&client, Rng::from_os().next_u64(), &PutOptions::default()).await
    })
    .await;
    hits(&client, 0..20).await;
    assert_eq!(puts(&client, 100..120, &PutOptions::default()).await, 20);
    assert_eq!(hits(&client, 100..120).await, 20);
}

/// The length of the outage does not matter: clients do not poll less and less often.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_was_away_for_long_serves_again_as_soon() {
    let (port, server, _members, client) = cluster(&[]).await;
    assert_eq!(puts(&client, 0..2, &PutOptions::default()).await, 2);
    server.kill();
    tokio::time::sleep(Duration::from_secs(8)).await;
    let _server = master(port, &[]);
    eventually("it serves again", Duration::from_secs(3), async || {
        put(&client, Rng::from_os().next_u64(), &PutOptions::default()).await
    })
    .await;
}

/// The task fails in its time, and its object can be replaced as soon as no byte of the copy can
/// land any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_to_a_frozen_client_does_not_keep_its_object() {
    for (ttl, comes_back) in [("--client_ttl=60", true), ("--client_ttl=3", false)] {
        let (port, _master, members, client) = cluster(&[ttl]).await;
        // The copy goes over the network, because into shared memory no byte arrives late.
        let source = builder(&format!("127.0.0.1:{port}"), SEGMENT).share_memory(false);
        let source = source.connect().await.unwrap();
        let (frozen, name) = &members[1];
        assert_eq!(puts(&client, 0..1, &in_segment_of(source.hostname())).await, 1);
        // The source knows the target, so the copy fails after its bytes were sent.
        assert_eq!(puts(&source, 1..2, &in_segment_of(name)).await, 1);
        frozen.freeze();
        let task = client.replicas().copy("key 0", &[name]).await.unwrap();
        eventually("the task has failed", Duration::from_secs(15), async || {
            client.replicas().task(task).await.is_ok_and(|info| info.status == TaskStatus::Failed)
        })
        .await;
        if comes_back {
            let busy = client.remove("key 0", false).await.unwrap_err();
            assert_eq!(busy.code(), ErrorCode::ReplicaIsNotReady);
            frozen.thaw();
        }
        eventually("the object can be replaced", Duration::from_secs(15), async || {
            client.put_with("key 0", &value(1)[..], &PutOptions::new().upsert()).await.is_ok()
        })
        .await;
        assert_eq!(client.get("key 0").await.unwrap().unwrap(), value(1));
        frozen.thaw();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_master_fails_calls_in_time() {
    let (_, server, _members, client) = cluster(&[]).await;
    assert_eq!(puts(&client, 0..10, &PutOptions::default()).await, 10);
    server.freeze();
    assert_eq!(hits(&client, 0..1).await, 0);
    assert_eq!(puts(&client, 50..51, &PutOptions::default()).await, 0);
    server.thaw();
    eventually("it answers again", Duration::from_secs(3), async || read(&client, 0).await).await;
    assert_eq!(puts(&client, 20..30, &PutOptions::default()).await, 10);
    assert_eq!(hits(&client, 20..30).await, 10);
    // The requests meanwhile did not arrive too late: the key is free, or was never taken.
    eventually("the key may be put", Duration::from_secs(3), async || {
        put(&client, 50, &PutOptions::default()).await || read(&client, 50).await
    })
    .await;
}

/// A master that was stopped for longer than the heartbeat timeout has received no heartbeat, and
/// must not expire its clients. The client is set to announce nothing again, like those of Mooncake
/// C++.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_master_expires_no_client() {
    let port = free_port();
    let server = master(port, &["--client_ttl=2"]);
    let config = ClientConfig { outlive_master: false, ..ClientConfig::default() };
    let client = builder_with(config, &format!("127.0.0.1:{port}"), SEGMENT).connect().await.unwrap();
    assert_eq!(puts(&client, 0..20, &PutOptions::default()).await, 20);
    server.freeze();
    tokio::time::sleep(Duration::from_secs(5)).await;
    server.thaw();
    // The first call may use a connection that was given up meanwhile.
    eventually("it answers again", PATIENCE, async || client.exist("key 0").await.is_ok()).await;
    // By now the master has received a heartbeat, or has had many occasions to expire the client.
    tokio::time::sleep(SLACK).await;
    assert_eq!(hits(&client, 0..20).await, 20);
}

/// Number of objects of the test below, unless `TEST_OBJECTS` sets it. A million were measured
/// once.
const OBJECTS: u64 = 20_000;

/// A master is killed, and the next one serves all objects.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[allow(clippy::disallowed_methods, reason = "the number of objects may come from the environment")]
async fn a_killed_master_takes_nothing_along() {
    let objects = std::env::var("TEST_OBJECTS").ok().and_then(|text| text.parse().ok()).unwrap_or(OBJECTS);
    let port = free_port();
    let address = format!("127.0.0.1:{port}");
    let killed = master(port, &[]);
    let mut members = Vec::new();
    for _ in 0..4 {
        members.push(connect(&address, (objects * 64).max(SEGMENT)).await);
    }
    let key = |i: u64| format!("object {i}");
    let bytes = |i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes().repeat(1 + i as usize % 12);
    let all: Vec<u64> = (0..objects).collect();
    for batch in all.chunks(1000) {
        let items: Vec<_> = batch.iter().map(|&i| (key(i), bytes(i))).collect();
        for outcome in members[0].batch_put(&items, &PutOptions::default()).await.unwrap() {
            assert_eq!(outcome.unwrap(), PutOutcome::Stored);
        }
    }
    let patience = PATIENCE + Duration::from_secs(objects / 2000);
    eventually("every object would outlive the master", patience, async || {
        let mut lasting = 0;
        for member in &members {
            lasting += member.status().lasting_objects().await as u64;
        }
        lasting == objects
    })
    .await;
    killed.kill();
    let begun = Instant::now();
    let _master = master(port, &[]);
    let mut seen = 0;
    eventually("all are served again", patience, async || {
        while let Some(batch) = all.get(seen..all.len().min(seen + 1000)).filter(|batch| !batch.is_empty()) {
            let keys: Vec<_> = batch.iter().map(|&i| key(i)).collect();
            let there = members[1].batch_exist(&keys).await.unwrap_or_default();
            if !there.iter().all(|there| matches!(there, Ok(true))) || there.is_empty() {
                return false;
            }
            seen += batch.len();
        }
        true
    })
    .await;
    let took = begun.elapsed();
    for batch in all.chunks(1000) {
        let keys: Vec<_> = batch.iter().map(|&i| key(i)).collect();
        let read = members[2].batch_get(&keys).await.unwrap();
        for (&i, read) in batch.iter().zip(read) {
            assert_eq!(read.unwrap().as_deref(), Some(&bytes(i)[..]), "object {i}");
        }
    }
    println!("{objects} objects served again {took:?} after the kill, no wrong byte");
    assert!(took < Duration::from_secs(5) + SLACK || objects > OBJECTS, "{took:?}");
}
