//! Cache of the client: repeated reads need no transfer, and never return an obsolete value.
#![allow(clippy::print_stdout, reason = "counts are shown")]

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use mooncake_core::clock::Rng;
use mooncake_core::testkit::free_port;
use mooncake_core::{ErrorCode, Result};
use mooncake_store::client::{
    Client, ClientConfig, HotCacheConfig, HotCacheStats, PutOptions, RangeOutcome, RangeRead, ReadInto,
};
use mooncake_store::local::{
    LocalClient, LocalConfig, LocalRange, LocalRead, LocalServer, LocalServerConfig,
};
use mooncake_store::master::MasterOptions;
use mooncake_store::server::MasterServer;
use mooncake_store::transport_set::TransportSet;
use mooncake_transport::SliceMut;

use crate::cluster::{Cluster, Kind, eventually, master_config, start_again, value};

const LEN: usize = 100_000;

fn stats(client: &Client) -> HotCacheStats {
    client.status().hot_cache().unwrap()
}

/// Repeats a read whose lease expired: a busy machine may take longer than the shortest leases of
/// these tests.
async fn within_lease<T>(read: impl AsyncFn() -> Result<T>) -> T {
    for _ in 0..1000 {
        match read().await {
            Err(error) if error.code() == ErrorCode::LeaseExpired => {}
            outcome => return outcome.unwrap(),
        }
    }
    panic!("a thousand leases expired")
}

async fn get(client: &Client, key: &str) -> Option<Bytes> {
    within_lease(async || client.get(key).await).await
}

async fn get_into(client: &Client, key: &str) -> Option<Bytes> {
    within_lease(async || {
        let into = client.memory().alloc(3 << 20)?.exclusive().unwrap();
        let ReadInto { result: found, into, .. } = client.get_into(key, into).await;
        let Some(len) = found? else { return Ok(None) };
        let mut bytes = vec![0; len];
        into.copy_to(0, &mut bytes)?;
        Ok(Some(bytes.into()))
    })
    .await
}

/// Reads a value in two parts, as into several buffers.
async fn get_in_parts(client: &Client, key: &str) -> Option<Bytes> {
    within_lease(async || {
        let Some(object) = client.ranges().locate(&[key]).await?.remove(0)? else { return Ok(None) };
        let size = object.size();
        let part = |offset: u64, len: u64| RangeRead {
            object: object.clone(),
            offset,
            into: client.memory().alloc(len as usize).unwrap().exclusive().unwrap(),
        };
        let reads = vec![part(0, size / 3), part(size / 3, size - size / 3)];
        let mut bytes = Vec::new();
        for RangeOutcome { result, into } in client.ranges().read(reads).await {
            result?;
            let mut part = vec![0; into.len()];
            into.copy_to(0, &mut part)?;
            bytes.extend(part);
        }
        Ok(Some(bytes.into()))
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hot_objects_are_read_without_a_transport() {
    for kind in [Kind::Embedded, Kind::Tcp, Kind::TcpHttp] {
        let cluster = Cluster::start(kind, MasterOptions::default()).await;
        let (a, b) = cluster.pair().await;
        let reader = cluster.builder().segment(0).hot_cache(8 << 20).connect().await.unwrap();
        let read = |key: String, how: usize| {
            let reader = &reader;
            async move {
                match how {
                    0 => get(reader, &key).await,
                    1 => get_into(reader, &key).await,
                    _ => get_in_parts(reader, &key).await,
                }
            }
        };
        for (how, len) in [LEN, (1 << 20) + 5, 2_500_000].into_iter().enumerate() {
            let (key, bytes) = (format!("key {how}"), value(how as u64, len));
            a.put(&key, &bytes[..]).await.unwrap();
            assert!(read(key.clone(), how).await.unwrap() == bytes);
            assert_eq!(stats(&reader).fills, how as u64, "once is not often");
            assert!(read(key.clone(), how).await.unwrap() == bytes);
            eventually("it is kept", async || stats(&reader).fills == how as u64 + 1).await;
            let before = stats(&reader);
            for how in 0..3 {
                assert!(read(key.clone(), how).await.unwrap() == bytes, "{kind:?}, {how}");
            }
            // Each part counts as a hit.
            assert_eq!(stats(&reader).hits, before.hits + 4);
            assert_eq!(before.bytes, stats(&reader).bytes);
        }
        assert_eq!(stats(&reader).objects, 3);

        // A part of an object comes from the cache, too, and the lease counts as for any other
        // read.
        let object = reader.ranges().locate(&["key 0"]).await.unwrap().remove(0).unwrap().unwrap();
        let into = reader.memory().alloc(10).unwrap().exclusive().unwrap();
        let RangeOutcome { result: outcome, into } =
            reader.ranges().read(vec![RangeRead { object, offset: 77, into }]).await.remove(0);
        outcome.unwrap();
        let mut bytes = [0; 10];
        into.copy_to(0, &mut bytes).unwrap();
        assert_eq!(bytes[..], value(0, LEN)[77..87]);

        // The next read sees the upsert, the remove and the put of another client.
        b.put_with("key 0", &value(10, LEN)[..], &PutOptions::new().upsert()).await.unwrap();
        assert!(get(&reader, "key 0").await.unwrap() == value(10, LEN));
        assert!(b.remove("key 1", true).await.unwrap());
        assert_eq!(get_into(&reader, "key 1").await, None);
        b.put("key 1", &value(11, (1 << 20) + 5)[..]).await.unwrap();
        assert!(get_in_parts(&reader, "key 1").await.unwrap() == value(11, (1 << 20) + 5));
        // Both new values are kept, each by a task of its own.
        eventually("the new values are kept", async || stats(&reader).fills == 5).await;
        // The cache also drops the values that its own client replaces.
        let object = stats(&reader).objects;
        reader.put_with("key 2", &value(12, 10)[..], &PutOptions::new().upsert()).await.unwrap();
        assert_eq!(stats(&reader).objects, object - 1);
        assert!(get(&reader, "key 2").await.unwrap() == value(12, 10));
        reader.remove_all(true).await.unwrap();
        assert_eq!((stats(&reader).objects, stats(&reader).bytes), (0, 0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_what_fits_is_kept_and_the_oldest_goes() {
    let cluster = Cluster::start(Kind::Tcp, MasterOptions::default()).await;
    let (a, _b) = cluster.pair().await;
    let hot_cache = HotCacheConfig { bytes: 1 << 20, longest: 300_000, admission: 1 };
    let config = ClientConfig { hot_cache, share_memory: false, segment: 4 << 20, ..ClientConfig::default() };
    let reader = Client::builder().config(config).master(cluster.handle()).connect().await.unwrap();
    let near = PutOptions::new().prefer_segment(reader.hostname());
    let afar = PutOptions::new().prefer_segment(a.hostname());
    a.put_with("long", &value(1, 300_001)[..], &afar).await.unwrap();
    a.put_with("near", &value(2, 1000)[..], &near).await.unwrap();
    for key in ["long", "near"] {
        assert!(get(&reader, key).await.is_some());
    }
    for round in 0..10 {
        let key = format!("key {round}");
        a.put_with(&key, &value(round, 200_000)[..], &afar).await.unwrap();
        assert!(get(&reader, &key).await.unwrap() == value(round, 200_000));
        eventually("it is kept", async || stats(&reader).fills == round + 1).await;
        assert!(stats(&reader).bytes <= 1 << 20, "{:?}", stats(&reader));
        // The first value is used, and stays; the long one and those of the owner itself were never
        // cached.
        let before = stats(&reader).hits;
        assert!(get(&reader, "key 0").await.unwrap() == value(0, 200_000));
        assert_eq!(stats(&reader).hits, before + 1, "round {round}");
    }
    assert_eq!(stats(&reader).objects, 5);
}

/// An upsert without free space reuses the space of the old value, at the same address and of the
/// same length.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_value_written_over_in_place_is_another_one() {
    let lease_ttl = Duration::from_millis(200);
    let cluster = Cluster::start(Kind::Tcp, MasterOptions { lease_ttl, ..MasterOptions::default() }).await;
    let owner = cluster.builder().segment(LEN as u64 + 1000).connect().await.unwrap();
    let reader = cluster.builder().segment(0).hot_cache(1 << 20).connect().await.unwrap();
    let pinned = PutOptions::new().hard_pin();
    owner.put_with("k", &value(0, LEN)[..], &pinned).await.unwrap();
    let at = |client: &Client| {
        let client = client.clone();
        async move { client.replicas().list("k").await.unwrap().unwrap().replicas[0].location.clone() }
    };
    let before = at(&owner).await;
    for seed in 1..4 {
        let hits = stats(&reader).hits;
        eventually("it is kept", async || {
            assert!(get(&reader, "k").await.unwrap() == value(seed - 1, LEN));
            stats(&reader).hits > hits
        })
        .await;
        // The upsert waits for free space until the lease expires.
        owner.put_with("k", &value(seed, LEN)[..], &PutOptions::new().upsert()).await.unwrap();
        let hits = stats(&reader).hits;
        assert!(get(&reader, "k").await.unwrap() == value(seed, LEN));
        assert_eq!(stats(&reader).hits, hits);
        assert_eq!(at(&owner).await, before);
    }
}

/// Writers replace the values of each other in all ways, space is scarce and reused at once,
/// masters are replaced, and a client with a cache must still read the latest value.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_value_is_read_that_is_not_there_any_more() {
    const KEYS: u64 = 5;
    const LENS: [usize; 2] = [20_000, 20_001];
    let mut hits = 0;
    for seed in 0..3 {
        let mut rng = Rng::seeded(seed);
        let options = || MasterOptions {
            lease_ttl: Duration::from_millis(20),
            high_watermark: 1.0,
            ..MasterOptions::default()
        };
        let mut server = MasterServer::start(master_config(free_port(), options())).await.unwrap();
        let address = server.addresses().rpc;
        let connect = |segment, hot_cache, checksum| {
            Client::builder()
                .master(address.to_string())
                .share_memory(false)
                .copy_in_process(false)
                .outlive_master(false)
                .segment(segment)
                .hot_cache(hot_cache)
                .checksum(checksum)
                .timeout(Duration::from_secs(2))
                .space_timeout(Duration::from_millis(100))
                .connect()
        };
        let writers =
            [connect(50_000, 0, false).await.unwrap(), connect(50_000, 60_000, true).await.unwrap()];
        let readers = [
            connect(0, 60_000, false).await.unwrap(),
            connect(0, 1 << 20, true).await.unwrap(),
            writers[1].clone(),
        ];
        let mut current: HashMap<u64, (u64, usize)> = HashMap::new();
        for step in 0..400 {
            let (key, writer) = (rng.below(KEYS), &writers[rng.below(2) as usize]);
            let name = format!("key {key}");
            match rng.below(40) {
                0..6 => {
                    let len = LENS[rng.below(2) as usize];
                    if writer
                        .put_with(&name, &value(step, len)[..], &PutOptions::new().upsert())
                        .await
                        .is_ok()
                    {
                        current.insert(key, (step, len));
                    }
                }
                6..8 => {
                    if matches!(writer.remove(&name, true).await, Ok(true)) {
                        current.remove(&key);
                    }
                }
                8 if step % 4 == 0 => {
                    server.stop().await;
                    current.clear();
                    let again = async || MasterServer::start(master_config(address.port(), options())).await;
                    server = start_again(again).await;
                    eventually("members are back", async || server.master().stats().segments.len() == 2)
                        .await;
                }
                _ => {
                    let reader = &readers[rng.below(3) as usize];
                    let read = match rng.below(3) {
                        0 => get(reader, &name).await,
                        1 => get_into(reader, &name).await,
                        _ => get_in_parts(reader, &name).await,
                    };
                    let expected = current.get(&key).map(|(seed, len)| value(*seed, *len));
                    // An evicted object is a miss; a hit has the latest value.
                    assert!(read.is_none() || read == expected, "seed {seed}, step {step}: {name}");
                }
            }
        }
        hits += readers.iter().map(|reader| stats(reader).hits).sum::<u64>();
        for client in writers.iter().chain(&readers[..2]) {
            client.close().await.unwrap();
        }
        server.stop().await;
    }
    assert!(hits > 100, "what was kept must have been read: {hits}");
    println!("{hits} reads of what was kept");
}

/// Shared clients read the cache of their `mooncake_client`, in every form, and never an obsolete
/// value.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shared_clients_read_objects_of_their_daemon() {
    let cluster = Cluster::start(Kind::Tcp, MasterOptions::default()).await;
    let (a, b) = cluster.pair().await;
    let owner = cluster.builder().segment(0).hot_cache(8 << 20).connect().await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("owner.sock");
    let config = LocalServerConfig { path: path.clone(), ..LocalServerConfig::default() };
    let server = LocalServer::start(owner.clone(), config).unwrap();
    let guests = [0, 1].map(|_| LocalConfig { buffer: 4 << 20, ..LocalConfig::at(path.to_str().unwrap()) });
    let [one, other] = guests.map(LocalClient::connect);
    let (one, other) = (one.await.unwrap(), other.await.unwrap());
    for turn in 0..4 {
        let bytes = value(turn, LEN);
        if turn % 2 == 0 {
            a.put_with("k", &bytes[..], &PutOptions::new().upsert()).await.unwrap();
        } else {
            assert!(b.remove("k", true).await.unwrap());
            assert_eq!(one.get("k").await.unwrap(), None, "it is gone, kept or not");
            b.put("k", &bytes[..]).await.unwrap();
        }
        assert!(one.get("k").await.unwrap().unwrap() == bytes, "turn {turn}");
        eventually("it is kept", async || {
            assert!(one.get("k").await.unwrap().unwrap() == bytes);
            stats(&owner).objects == 1
        })
        .await;
        let before = stats(&owner).hits;
        assert!(other.get("k").await.unwrap().unwrap() == bytes, "whoever read it before");
        let into: SliceMut<TransportSet> = other.alloc_registered(LEN).await.unwrap().exclusive().unwrap();
        assert_eq!(other.get_into("k", into).await.result.unwrap(), Some(LEN));
        let into: SliceMut<TransportSet> = one.alloc_registered(1000).await.unwrap().exclusive().unwrap();
        let object = one.locate(&["k"]).await.unwrap().remove(0).unwrap().unwrap();
        let range = LocalRange { object, offset: 5, into };
        let LocalRead { result: read, into } = one.read_ranges(vec![range]).await.remove(0);
        read.unwrap();
        let mut part = vec![0; 1000];
        into.unwrap().copy_to(0, &mut part).unwrap();
        assert!(part == bytes[5..1005]);
        assert_eq!(stats(&owner).hits, before + 3, "turn {turn}: each was kept");
    }
    drop((one, other));
    server.stop().await;
}
