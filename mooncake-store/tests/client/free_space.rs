//! Puts without free space, which wait within limits.

use std::time::Duration;

use mooncake_core::ErrorCode;
use mooncake_core::clock::{Clock, SystemClock};
use mooncake_core::replica::ReplicateConfig;
use mooncake_store::client::{Client, Located, PutOptions, PutOutcome, RangeRead};
use mooncake_store::master::MasterOptions;

use crate::cluster::{Cluster, Kind, eventually, slices, value};

const LEASE: Duration = Duration::from_millis(700);
const BLOCK: usize = 64 << 10;
const BLOCKS: usize = 16;

/// Starts a cluster whose only memory holds this number of blocks, each with a new lease of a read.
/// Leases of look-ups yield to puts.
async fn full(kind: Kind, config: &PutOptions) -> (Cluster, Client) {
    let options = MasterOptions { lease_ttl: LEASE, high_watermark: 1.0, ..MasterOptions::default() };
    let cluster = Cluster::start(kind, options).await;
    let client = cluster.builder().segment((BLOCK * BLOCKS) as u64).connect().await.unwrap();
    for n in 0..BLOCKS {
        client.put_with(format!("old {n}"), &value(n as u64, BLOCK)[..], config).await.unwrap();
    }
    for n in 0..BLOCKS {
        assert!(client.get(format!("old {n}")).await.unwrap().is_some());
    }
    (cluster, client)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_comes_when_leases_end_and_no_more_goes_than_is_needed() {
    for kind in [Kind::Embedded, Kind::Tcp, Kind::Shm] {
        let clock = SystemClock::new();
        let begun = clock.now();
        let (cluster, client) = full(kind, &PutOptions::default()).await;
        assert_eq!(client.put("new", &value(99, BLOCK)[..]).await.unwrap(), PutOutcome::Stored);
        assert!(clock.now().since(begun) >= LEASE, "before a lease was over");
        assert!(client.get("new").await.unwrap().unwrap() == value(99, BLOCK), "other bytes");
        assert_eq!(cluster.master.stats().evicted_keys, 1);

        // Some objects of a batch find free space at once, the others later; each is stored once.
        for n in 1..BLOCKS {
            client.get(format!("old {n}")).await.unwrap();
        }
        client.remove("old 1", true).await.unwrap();
        let items: Vec<_> = (0..4).map(|n| (format!("batch {n}"), value(200 + n, BLOCK))).collect();
        let puts = client.batch_put(&slices(&items), &PutOptions::default()).await.unwrap();
        assert!(puts.iter().all(|put| matches!(put, Ok(PutOutcome::Stored))), "{puts:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reservation_waits_too() {
    let (cluster, client) = full(Kind::Tcp, &PutOptions::default()).await;
    let config = ReplicateConfig::default();
    let mut reserved = client.ranges().reserve(&[("new", BLOCK as u64)], &config).await.unwrap();
    let reserved = reserved.remove(0).unwrap();
    assert!(cluster.master.stats().out_of_space > 0, "there was room from the first");
    assert!(client.ranges().give_back(&[&reserved]).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn patience_ends() {
    let options =
        MasterOptions { lease_ttl: Duration::from_secs(60), high_watermark: 1.0, ..MasterOptions::default() };
    let cluster = Cluster::start(Kind::Tcp, options).await;
    let member = cluster.builder().segment(BLOCK as u64).connect().await.unwrap();
    member.put("old", &value(1, BLOCK)[..]).await.unwrap();
    assert!(member.exist("old").await.unwrap());
    let refusals = async |patience: Duration| {
        let before = cluster.master.stats().out_of_space;
        let other = cluster.builder().segment(0).space_timeout(patience).connect().await.unwrap();
        let error = other.put("new", &value(1, BLOCK)[..]).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::NoAvailableHandle, "{error}");
        cluster.master.stats().out_of_space - before
    };
    assert_eq!(refusals(Duration::ZERO).await, 1, "it asks once");
    // The intervals are 10, 20, 40 ms and so on to half a second, each up to half shorter.
    let asked = refusals(Duration::from_secs(2)).await;
    assert!((2..=20).contains(&asked), "{asked}");
    assert_eq!(cluster.master.stats().evicted_keys, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_put_names_the_reason() {
    for kind in [Kind::Embedded, Kind::Tcp] {
        let cluster = Cluster::start(kind, MasterOptions::default()).await;
        let client = cluster.builder().segment(0).space_timeout(Duration::ZERO).connect().await.unwrap();
        let items = [("k", &b"1"[..]), ("l", &b"2"[..])];
        let refused = async |options: PutOptions, config: ReplicateConfig| -> Vec<String> {
            let single = client.put_with("k", items[0].1, &options).await.map(|_| ());
            let batch = client.batch_put(&items, &options).await.unwrap();
            let batch = batch.into_iter().map(|outcome| outcome.map(|_| ()));
            let reserved = client.ranges().reserve(&[("k", 1)], &config).await.unwrap();
            let reserved = reserved.into_iter().map(|outcome| outcome.map(|_| ()));
            let all = std::iter::once(single).chain(batch).chain(reserved);
            all.map(|outcome| outcome.unwrap_err().to_string()).collect()
        };
        for error in refused(PutOptions::new().replicas(0), ReplicateConfig::replicas(0)).await {
            assert!(error.contains("replica_num must be at least 1"), "{error}");
        }
        for error in refused(PutOptions::new(), ReplicateConfig::default()).await {
            assert!(error.contains("no client has mounted a segment"), "{error}");
        }
        let _full = cluster.builder().segment(1 << 20).connect().await.unwrap();
        let pinned = PutOptions::new().hard_pin();
        client.put_with("full", &value(1, 1 << 20)[..], &pinned).await.unwrap();
        for error in refused(PutOptions::new(), ReplicateConfig::default()).await {
            assert!(error.contains("no segment has enough free space"), "{error}");
            assert!(error.contains("every object in memory is hard-pinned"), "{error}");
        }
    }
}

/// A put that can only be refused does not wait, however long the deadline is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[allow(clippy::disallowed_methods, reason = "the bound is one of real time")]
async fn a_put_that_can_only_be_refused_does_not_wait() {
    for kind in [Kind::Embedded, Kind::Tcp] {
        let cluster = Cluster::start(kind, MasterOptions::default()).await;
        let connect = |segment| {
            let builder = cluster.builder().segment(segment).timeout(Duration::from_secs(25));
            builder.space_timeout(Duration::from_secs(25)).connect()
        };
        let client = connect(0).await.unwrap();
        let refused = async |len: usize, says: &str| {
            let value = &value(1, len)[..];
            let put = tokio::time::timeout(Duration::from_secs(20), async {
                let mut all = Vec::new();
                for options in [PutOptions::new(), PutOptions::new().upsert()] {
                    all.push(client.put_with("new", value, &options).await.map(|_| ()));
                    let batch = client.batch_put(&[("a", value), ("b", value)], &options).await.unwrap();
                    all.extend(batch.into_iter().map(|outcome| outcome.map(|_| ())));
                }
                let sizes = [("c", len as u64)];
                let reserved = client.ranges().reserve(&sizes, &ReplicateConfig::default()).await.unwrap();
                all.extend(reserved.into_iter().map(|outcome| outcome.map(|_| ())));
                all
            });
            for outcome in put.await.expect("the put waits") {
                let error = outcome.unwrap_err();
                assert_eq!(error.code(), ErrorCode::NoAvailableHandle);
                assert!(error.to_string().contains(says), "{error}");
            }
        };
        refused(1, "no client has mounted a segment").await;
        let _member = connect(1 << 20).await.unwrap();
        refused(2 << 20, "no segment is large enough").await;
        let size = 1 << 20;
        client.put_with("full", &value(1, size)[..], &PutOptions::new().hard_pin()).await.unwrap();
        refused(1, "hard-pinned").await;
        // A value of another length is not written over the earlier one, which has no reader.
        let upsert = PutOptions::new().upsert();
        let upserted = async |key: &str, len: usize| {
            let bytes = value(2, len);
            let upsert = client.put_with(key, &bytes[..], &upsert);
            tokio::time::timeout(Duration::from_secs(20), upsert).await.expect("the upsert waits")
        };
        let error = upserted("full", size / 2).await.unwrap_err();
        assert!(error.to_string().contains("hard-pinned"), "{error}");
        assert_eq!(upserted("full", size).await.unwrap(), PutOutcome::Stored);
        assert!(client.get("full").await.unwrap().unwrap() == value(2, size), "other bytes");
        // Nor does an object help that leaves a segment which is too small.
        let _small = connect(256 << 10).await.unwrap();
        client.put("ordinary", &value(3, 100 << 10)[..]).await.unwrap();
        refused(512 << 10, "hard-pinned").await;
    }
}

/// An upsert waits for the readers of the value that it can be written over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upsert_waits_for_the_readers_of_a_pinned_value() {
    let options = MasterOptions { lease_ttl: LEASE, ..MasterOptions::default() };
    let cluster = Cluster::start(Kind::Tcp, options).await;
    let client = cluster.builder().segment(1 << 20).connect().await.unwrap();
    let pinned = PutOptions::new().hard_pin();
    client.put_with("full", &value(1, 1 << 20)[..], &pinned).await.unwrap();
    assert!(client.exist("full").await.unwrap());
    // The other upsert of the batch can only be refused.
    let items = [("full", value(2, 1 << 20)), ("new", value(3, 1))];
    let outcomes = client.batch_put(&slices(&items), &PutOptions::new().upsert()).await.unwrap();
    assert!(matches!(outcomes[0], Ok(PutOutcome::Stored)), "{outcomes:?}");
    assert_eq!(outcomes[1].as_ref().unwrap_err().code(), ErrorCode::NoAvailableHandle);
    assert!(client.get("full").await.unwrap().unwrap() == value(2, 1 << 20), "other bytes");
}

/// The space of an object that was read and removed is there for the next put, although the lease
/// lasts. The reader is the writer or another client.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn space_that_was_read_and_removed_is_free_at_once() {
    for kind in [Kind::Embedded, Kind::Tcp, Kind::Shm] {
        let lease_ttl = Duration::from_secs(3600);
        let options = MasterOptions { lease_ttl, high_watermark: 1.0, ..MasterOptions::default() };
        let cluster = Cluster::start(kind, options).await;
        // Space for one value.
        let writer = cluster.builder().segment(BLOCK as u64).connect().await.unwrap();
        let other = cluster.builder().segment(0).connect().await.unwrap();
        for n in 0..40 {
            let (key, value) = (format!("{n}"), value(n, BLOCK));
            let once = n % 4 == 3;
            let options = if once { PutOptions::new().delete_after_read() } else { PutOptions::new() };
            assert_eq!(writer.put_with(&key, &value[..], &options).await.unwrap(), PutOutcome::Stored, "{n}");
            let reader = if n % 2 == 0 { &writer } else { &other };
            let read = match n % 3 {
                0 => read_located(reader, locate(reader, &key).await).await,
                _ => reader.get(&key).await.unwrap().unwrap().into(),
            };
            assert!(read == value, "other bytes");
            if !once {
                assert!(writer.remove(&key, true).await.unwrap());
            }
        }
        assert_eq!(cluster.master.stats().evicted_keys, 0);
    }
}

/// Locates an object that exists.
async fn locate(client: &Client, key: &str) -> Located {
    client.ranges().locate(&[key]).await.unwrap().remove(0).unwrap().unwrap()
}

/// Reads a located object.
async fn read_located(client: &Client, object: Located) -> Vec<u8> {
    let into = client.memory().alloc(BLOCK).unwrap().exclusive().unwrap();
    let outcome = client.ranges().read(vec![RangeRead { object, offset: 0, into }]).await.remove(0);
    outcome.result.unwrap();
    let mut bytes = vec![0; BLOCK];
    outcome.into.copy_to(0, &mut bytes).unwrap();
    bytes
}

/// The space of an object stays as long as a caller has it located, within its lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn space_of_a_located_object_is_free_once_it_is_dropped() {
    let lease_ttl = Duration::from_secs(3600);
    let options = MasterOptions { lease_ttl, high_watermark: 1.0, ..MasterOptions::default() };
    let cluster = Cluster::start(Kind::Tcp, options).await;
    let patience = Duration::from_millis(300);
    let client = cluster.builder().segment(BLOCK as u64).space_timeout(patience).connect().await.unwrap();
    client.put("k", &value(1, BLOCK)[..]).await.unwrap();
    let located = locate(&client, "k").await;
    // A later read ends before.
    assert!(read_located(&client, locate(&client, "k").await).await == value(1, BLOCK));
    client.remove("k", true).await.unwrap();
    let error = client.put("l", &value(2, BLOCK)[..]).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::NoAvailableHandle, "{error}");
    assert!(read_located(&client, located).await == value(1, BLOCK), "other bytes");
    eventually("the space is free", async || client.put("l", &value(2, BLOCK)[..]).await.is_ok()).await;
}

/// A client of Mooncake C++ holds a lease while the key is removed and put again: its bytes stay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn space_of_a_slow_reader_without_reports_stays() {
    let options = MasterOptions { lease_ttl: LEASE, high_watermark: 1.0, ..MasterOptions::default() };
    let cluster = Cluster::start(Kind::Tcp, options).await;
    let client = cluster.builder().segment(BLOCK as u64).connect().await.unwrap();
    let reader = cluster.builder().segment(0).connect().await.unwrap();
    let clock = SystemClock::new();
    for n in 0..3 {
        assert_eq!(client.put("k", &value(n, BLOCK)[..]).await.unwrap(), PutOutcome::Stored);
        assert!(client.get("k").await.unwrap().unwrap() == value(n, BLOCK));
        let begun = clock.now();
        let located = cluster.master.locate(b"k").unwrap();
        assert!(client.remove("k", true).await.unwrap());
        let later = value(n + 10, BLOCK);
        let put = client.put("k", &later[..]);
        let at = located.replicas[0].location.memory().unwrap().clone();
        let read = async {
            let target = reader.engine().open(&at.endpoint).await.unwrap();
            let mut reads = 0;
            loop {
                let (result, bytes) = reader.engine().read(&target, at.address, vec![0; BLOCK], None).await;
                result.unwrap();
                if clock.now().since(begun) >= LEASE {
                    return reads;
                }
                assert!(bytes == value(n, BLOCK), "wrong bytes under a lease");
                reads += 1;
            }
        };
        let (put, reads) = futures::future::join(put, read).await;
        assert_eq!((put.unwrap(), reads > 0), (PutOutcome::Stored, true));
        assert!(clock.now().since(begun) >= LEASE);
        assert!(client.remove("k", true).await.unwrap());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_wait_for_an_impossible_response() {
    for kind in [Kind::Embedded, Kind::Tcp] {
        let cluster = Cluster::start(kind, MasterOptions::default()).await;
        let client = cluster.builder().segment(1 << 20).connect().await.unwrap();
        let error = client.put("large", &value(1, 2 << 20)[..]).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::NoAvailableHandle);
        assert!(error.to_string().contains("large enough"), "{error}");
        assert_eq!(cluster.master.stats().out_of_space, 1, "it was asked for again");
    }
}
