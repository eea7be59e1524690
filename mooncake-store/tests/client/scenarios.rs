//! Scenarios that hold for every transport.

use std::time::Duration;

use bytes::Bytes;

use mooncake_core::{ErrorCode, ErrorKind};
use mooncake_store::client::{PutOptions, PutOutcome, ReadInto};
use mooncake_store::master::MasterOptions;

use crate::cluster::{Cluster, Kind, eventually, slices, value};

macro_rules! over_every_wire {
    ($($scenario:ident,)*) => {
        mod embedded {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(super::Kind::Embedded).await;
            })*
        }
        mod tcp {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(super::Kind::Tcp).await;
            })*
        }
        mod shm {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(super::Kind::Shm).await;
            })*
        }
        #[cfg(feature = "transport-rdma")]
        mod rdma {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            #[ignore = "needs RDMA devices: cargo xtask rdma-test"]
            async fn $scenario() {
                super::$scenario(super::Kind::Rdma).await;
            })*
        }
        #[cfg(feature = "transport-rdma")]
        mod rdma_alone {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            #[ignore = "needs RDMA devices: cargo xtask rdma-test"]
            async fn $scenario() {
                super::$scenario(super::Kind::RdmaAlone).await;
            })*
        }
        mod tcp_http {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(super::Kind::TcpHttp).await;
            })*
        }
    };
}

over_every_wire! {
    what_one_puts_the_other_gets,
    a_key_is_put_once,
    an_upsert_replaces,
    batches_respond_item_by_item,
    of_one_key_in_a_batch_one_is_stored,
    registered_memory_is_used_as_it_is,
    odd_keys_and_values,
    a_value_larger_than_all_memory,
    no_segment_at_all,
    a_segment_goes_after_a_time,
    memory_after_unmount_is_used_at_once,
    the_local_buffer_may_be_full,
    removing_leaves_nothing,
    replicas_lie_apart_and_stand_in,
    closing_twice,
    dropping_without_closing,
    many_at_once,
}

fn options() -> MasterOptions {
    MasterOptions::default()
}

async fn what_one_puts_the_other_gets(kind: Kind) {
    let cluster = Cluster::start(kind, options()).await;
    let (a, b) = cluster.pair().await;
    for (i, len) in [1, 7, 4096, 65_537, (1 << 20) + 3, 5 << 20].into_iter().enumerate() {
        let (key, bytes) = (format!("key {i}"), value(i as u64, len));
        assert_eq!(a.get(&key).await.unwrap(), None);
        assert!(!b.exist(&key).await.unwrap());
        assert_eq!(a.put(&key, &bytes[..]).await.unwrap(), PutOutcome::Stored);
        assert!(b.exist(&key).await.unwrap());
        assert_eq!(b.size(&key).await.unwrap(), Some(len as u64));
        assert_eq!(b.get(&key).await.unwrap().unwrap(), bytes, "{len}");
        assert_eq!(a.get(&key).await.unwrap().unwrap(), bytes, "{len}");
    }
    assert_eq!((a.status().local_buffer_used(), b.status().local_buffer_used()), (0, 0));
    assert_eq!(a.size("none").await.unwrap(), None);
}

async fn a_key_is_put_once(kind: Kind) {
    let cluster = Cluster::start(kind, options()).await;
    let (a, b) = cluster.pair().await;
    let (first, second) = (value(1, 1000), value(2, 1000));
    assert_eq!(a.put("k", &first[..]).await.unwrap(), PutOutcome::Stored);
    let used = cluster.master.stats().used();
    assert_eq!(b.put("k", &second[..]).await.unwrap(), PutOutcome::Existed);
    assert_eq!(b.get("k").await.unwrap().unwrap(), first);
    assert_eq!((cluster.master.stats().used(), cluster.master.stats().writing), (used, 0));
}

async fn an_upsert_replaces(kind: Kind) {
    let cluster = Cluster::start(kind, options()).await;
    let (a, b) = cluster.pair().await;
    for (seed, len) in [(1, 100), (2, 100), (3, 300_000), (4, 5)] {
        a.put_with("k", &value(seed, len)[..], &PutOptions::new().upsert()).await.unwrap();
        assert_eq!(b.get("k").await.unwrap().unwrap(), value(seed, len));
    }
    let items = [("k", value(5, 50)), ("l", value(6, 60))];
    for outcome in b.batch_put(&slices(&items), &PutOptions::new().upsert()).await.unwrap() {
        outcome.unwrap();
    }
    assert_eq!(a.get("k").await.unwrap().unwrap(), items[0].1);
    assert_eq!(a.get("l").await.unwrap().unwrap(), items[1].1);
}

async fn batches_respond_item_by_item(kind: Kind) {
    let cluster = Cluster::start(kind, options()).await;
    let (a, b) = cluster.pair().await;
    let len = |i: u64| [3, 40_000, 9000, 700][i as usize % 4];
    let items: Vec<_> = (0..120).map(|i| (format!("key {i}"), value(i, len(i)))).collect();
    a.put("key 7", &items[7].1[..]).await.unwrap();
    let mut puts = items.clone();
    puts.push((String::new(), value(0, 1)));
    puts.push(("empty".into(), value(0, 0)));
    let outcomes = a.batch_put(&slices(&puts), &PutOptions::default()).await.unwrap();
    for (i, outcome) in outcomes[..120].iter().enumerate() {
        let expected = if i == 7 { PutOutcome::Existed } else { PutOutcome::Stored };
        assert_eq!(*outcome.as_ref().unwrap(), expected, "{i}");
    }
    for outcome in &outcomes[120..] {
        assert_eq!(outcome.as_ref().unwrap_err().code(), ErrorCode::InvalidParams);
    }
    let mut keys: Vec<_> = items.iter().map(|(key, _)| key.as_str()).collect();
    keys.insert(60, "absent");
    let exist: Vec<_> = b.batch_exist(&keys).await.unwrap().into_iter().map(Result::unwrap).collect();
    assert!(exist.iter().enumerate().all(|(i, there)| *there == (i != 60)));
    let mut got = b.batch_get(&keys).await.unwrap();
    assert_eq!(got.remove(60).unwrap(), None);
    for ((_, expected), got) in items.iter().zip(got) {
        assert_eq!(got.unwrap().unwrap(), expected);
    }
    let removed = a.batch_remove(&keys, true).await.unwrap();
    assert!(removed.into_iter().enumerate().all(|(i, removed)| removed.unwrap() == (i != 60)));
    assert!(a.batch_get::<&str>(&[]).await.unwrap().is_empty());
    assert!(a.batch_put::<&str, &str>(&[], &PutOptions::default()).await.unwrap().is_empty());
    cluster.assert_empty();
}

async fn of_one_key_in_a_batch_one_is_stored(kind: Kind) {
    let cluster = Cluster::start(kind, options()).await;
    let (a, b) = cluster.pair().await;
    let config = PutOptions::default();
    for round in 0..20 {
        // Both values have one length, and so would fit into the same space.
        let (first, other) = (value(1, 100_000), value(2, 100_000));
        let (k, l) = (format!("k{round}"), format!("l{round}"));
        let items = [
            (&k, Bytes::new()),
            (&k, first.clone()),
            (&l, other.clone()),
            (&k, other.clone()),
            (&k, first.clone()),
        ];
        let outcomes: Vec<_> = a.batch_put(&slices(&items), &config).await.unwrap();
        assert_eq!(outcomes[0].as_ref().unwrap_err().code(), ErrorCode::InvalidParams);
        let put: Vec<_> = outcomes[1..].iter().map(|outcome| *outcome.as_ref().unwrap()).collect();
        assert_eq!(put, [PutOutcome::Stored, PutOutcome::Stored, PutOutcome::Existed, PutOutcome::Existed]);
        assert_eq!(b.get(&k).await.unwrap().unwrap(), first);
        for outcome in
            a.batch_put(&[(&k, &first), (&k, &first), (&k, &other)], &config.clone().upsert()).await.unwrap()
        {
            outcome.unwrap();
        }
        assert_eq!(b.get(&k).await.unwrap().unwrap(), other);
    }
    let huge = value(3, 1000);
    let refused = PutOptions::new().replicas(9).prefer_segment("nowhere");
    let outcomes = a.batch_put(&[("m", &huge), ("m", &huge)], &refused).await.unwrap();
    assert_eq!(outcomes.len(), 2);
    assert_eq!(outcomes[0].is_ok(), outcomes[1].is_ok(), "{outcomes:?}");
}

async fn registered_memory_is_used_as_it_is(kind: Kind) {
    let cluster = Cluster::start(kind, options()).await;
    // Without a local buffer, no value can pass through it.
    let builder = || cluster.builder().local_buffer(0);
    let (a, b) = (builder().connect().await.unwrap(), builder().connect().await.unwrap());
    assert_eq!(a.put("k", "v").await.unwrap_err().code(), ErrorCode::InvalidParams);
    let shared = [("shared 0", value(8, 70_000)), ("shared 1", value(9, 10))];
    let put = a.batch_put(&shared, &PutOptions::new().replicas(2)).await.unwrap();
    if cluster.takes_plain_memory() {
        for outcome in put {
            assert_eq!(outcome.unwrap(), PutOutcome::Stored);
        }
        assert_eq!(a.put("shared 0", &shared[1].1).await.unwrap(), PutOutcome::Existed);
        for (key, expected) in &shared {
            assert_eq!(b.get(key).await.unwrap().unwrap(), expected);
        }
    } else {
        assert!(put.into_iter().all(|outcome| outcome.unwrap_err().code() == ErrorCode::InvalidParams));
    }
    let bytes = value(1, 3 << 20);
    let mut source = a.memory().alloc(3 << 20).unwrap().exclusive().unwrap();
    source.copy_from(0, &bytes).unwrap();
    let source = source.into_shared();
    let config = PutOptions::default();
    assert_eq!(a.put_with("whole", &source, &config).await.unwrap(), PutOutcome::Stored);
    let parts: Vec<_> =
        (0..3).map(|i| (format!("part {i}"), source.slice(i << 20..(i + 1) << 20).unwrap())).collect();
    for outcome in a.batch_put(&parts, &config).await.unwrap() {
        assert_eq!(outcome.unwrap(), PutOutcome::Stored);
    }
    a.put_with("part 0", &parts[1].1, &config.clone().upsert()).await.unwrap();

    let into = b.memory().alloc(4 << 20).unwrap().exclusive().unwrap();
    let ReadInto { result: size, into, .. } = b.get_into("whole", into).await;
    assert_eq!(size.unwrap(), Some(3 << 20));
    let mut copy = vec![0; 3 << 20];
    into.copy_to(0, &mut copy).unwrap();
    assert_eq!(copy, bytes);
    let (left, right) = into.split_at(1 << 20).unwrap();
    let mut batch = b.batch_get_into(vec![("part 0", left), ("whole", right)]).await;
    batch.located.unwrap();
    let right = batch.reads.pop().unwrap();
    assert_eq!((right.result.unwrap(), right.into.len()), (Some(3 << 20), 3 << 20));
    let ReadInto { result: size, into: left, .. } = batch.reads.pop().unwrap();
    assert_eq!(size.unwrap(), Some(1 << 20));
    left.copy_to(0, &mut copy[..1 << 20]).unwrap();
    assert_eq!(copy[..1 << 20], bytes[1 << 20..2 << 20]);
    let ReadInto { result: size, into: left, .. } = b.get_into("whole", left).await;
    let error = size.unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidParams);
    assert!(error.to_string().contains("3145728") && error.to_string().contains("1048576"), "{error}");
    let ReadInto { result: size, into: left, .. } = b.get_into("absent", left).await;
    assert_eq!((size.unwrap(), left.len()), (None, 1 << 20));
    // Without a local buffer a value gets memory of its own.
    assert_eq!(b.get("whole").await.unwrap().unwrap(), bytes);
}

async fn odd_keys_and_values(kind: Kind) {
    let cluster = Cluster::start(kind, options()).await;
    let (a, b) = cluster.pair().await;
    for key in [&b"\0"[..], b"line\nline", b"\xff\xfe\xfd", &[b'k'; 64 * 1024], "ключ".as_bytes()] {
        assert_eq!(a.put(key, key).await.unwrap(), PutOutcome::Stored);
        assert_eq!(b.get(key).await.unwrap().unwrap(), key);
        assert!(b.remove(key, true).await.unwrap());
    }
    for key in [&b""[..], &[b'k'; 128 * 1024 + 1]] {
        let error = a.put(key, "v").await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidParams);
        assert!(error.to_string().contains("key"), "{error}");
        assert!(!matches!(a.get(key).await, Ok(Some(_))));
        assert!(!matches!(a.exist(key).await, Ok(true)));
        assert!(!matches!(a.remove(key, false).await, Ok(true)));
    }
    let error = a.put("k", "").await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidParams);
    assert!(error.to_string().contains("empty"), "{error}");
    assert_eq!(a.remove_matching("(", false).await.unwrap_err().code(), ErrorCode::InvalidParams);
    cluster.assert_empty();
}

async fn a_value_larger_than_all_memory(kind: Kind) {
    let cluster = Cluster::start(kind, options()).await;
    let (a, b) = cluster.pair().await;
    a.put("small", "v").await.unwrap();
    let error = a.put("large", &value(1, 20 << 20)[..]).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::NoAvailableHandle);
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert_eq!(b.get("large").await.unwrap(), None);
    assert_eq!((a.status().local_buffer_used(), cluster.master.stats().writing), (0, 0));
    a.remove_all(true).await.unwrap();
    cluster.assert_empty();
}

async fn no_segment_at_all(kind: Kind) {
    let cluster = Cluster::start(kind, options()).await;
    let a = cluster.builder().segment(0).space_timeout(Duration::ZERO).connect().await.unwrap();
    let error = a.put("k", "v").await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::NoAvailableHandle);
    assert_eq!(a.get("k").await.unwrap(), None);
    assert!(a.segments().ids().is_empty());
    cluster.assert_empty();
    // A requester can mount a segment later, and unmount it.
    let id = a.segments().mount(1 << 20).await.unwrap();
    assert_eq!(a.put("k", "v").await.unwrap(), PutOutcome::Stored);
    a.segments().unmount(id).await.unwrap();
    a.segments().unmount(id).await.unwrap();
    assert_eq!(a.get("k").await.unwrap(), None);
    assert_eq!(a.segments().mount(1).await.unwrap_err().code(), ErrorCode::InvalidParams);
}

async fn a_segment_goes_after_a_time(kind: Kind) {
    let cluster = Cluster::start(kind, options()).await;
    let (a, b) = (
        cluster.builder().segment(0).connect().await.unwrap(),
        cluster.builder().segment(0).connect().await.unwrap(),
    );
    let id = a.segments().mount(1 << 20).await.unwrap();
    b.put("k", "v").await.unwrap();
    let grace = Duration::from_secs(2);
    a.segments().unmount_after(id, grace).await.unwrap();
    assert!(a.segments().ids().is_empty());
    assert_eq!(a.segments().unmount_after(id, grace).await.unwrap_err().code(), ErrorCode::SegmentNotFound);
    // Existing objects stay readable, and new ones go only to segments that are mounted later.
    assert_eq!(b.get("k").await.unwrap().as_deref(), Some(&b"v"[..]));
    assert_eq!(b.put("new", "v").await.unwrap_err().code(), ErrorCode::NoAvailableHandle);
    let other = a.segments().mount(1 << 20).await.unwrap();
    assert_eq!(b.put("new", "v").await.unwrap(), PutOutcome::Stored);
    eventually("the time is up", async || !b.exist("k").await.unwrap()).await;
    assert_eq!(b.get("new").await.unwrap().as_deref(), Some(&b"v"[..]));
    a.segments().unmount(other).await.unwrap();
}

/// Memory that is mapped after an unmount may lie partly at the addresses of the unmounted segment.
async fn memory_after_unmount_is_used_at_once(kind: Kind) {
    let cluster = Cluster::start(kind, options()).await;
    let client = cluster.builder().segment(0).connect().await.unwrap();
    for mebibytes in 1..6 {
        let id = client.segments().mount(mebibytes << 20).await.unwrap();
        let key = format!("{mebibytes} MiB");
        assert_eq!(client.put(&key, "v").await.unwrap(), PutOutcome::Stored, "{key}");
        client.segments().unmount(id).await.unwrap();
    }
}

async fn the_local_buffer_may_be_full(kind: Kind) {
    let cluster = Cluster::start(kind, options()).await;
    let (a, b) = cluster.pair().await;
    let keys: Vec<_> = (0..12).map(|i| format!("key {i}")).collect();
    for (i, key) in keys.iter().enumerate() {
        a.put(key, &value(i as u64, 400_000)[..]).await.unwrap();
    }
    // The values exceed the local buffer, and the caller keeps them.
    let held = b.batch_get(&keys).await.unwrap();
    assert!(b.status().local_buffer_used() > 0);
    for (i, got) in held.iter().enumerate() {
        assert_eq!(got.as_ref().unwrap().as_ref().unwrap(), &value(i as u64, 400_000));
    }
    // The buffer still has space for puts, one after the other and all at once.
    let items: Vec<_> = (0..8).map(|i| (format!("item {i}"), value(100 + i, 300_000))).collect();
    for outcome in b.batch_put(&slices(&items), &PutOptions::default()).await.unwrap() {
        assert_eq!(outcome.unwrap(), PutOutcome::Stored);
    }
    for (key, expected) in &items {
        assert_eq!(a.get(key).await.unwrap().unwrap(), expected);
    }
    drop(held);
    assert_eq!(b.status().local_buffer_used(), 0);
}

async fn removing_leaves_nothing(kind: Kind) {
    let options = MasterOptions { lease_ttl: Duration::from_millis(300), ..options() };
    let cluster = Cluster::start(kind, options).await;
    let (a, b) = cluster.pair().await;
    for i in 0..20 {
        a.put(format!("key {i}"), &value(i, 10_000)[..]).await.unwrap();
    }
    assert!(b.remove("key 0", false).await.unwrap());
    assert!(!b.remove("key 0", false).await.unwrap());
    assert!(b.exist("key 1").await.unwrap());
    assert_eq!(b.remove("key 1", false).await.unwrap_err().code(), ErrorCode::ObjectHasLease);
    assert!(b.remove("key 1", true).await.unwrap());
    assert_eq!(b.get("key 1").await.unwrap(), None);
    assert_eq!(b.remove_matching("^key 1[0-9]$", false).await.unwrap(), 10);
    assert_eq!(a.remove_all(true).await.unwrap(), 8);
    cluster.assert_empty();
    a.close().await.unwrap();
    b.close().await.unwrap();
    assert_eq!(cluster.master.stats().capacity(), 0);
}

async fn replicas_lie_apart_and_stand_in(kind: Kind) {
    let cluster = Cluster::start(kind, options()).await;
    let (a, b) = cluster.pair().await;
    let c = cluster.builder().segment(0).connect().await.unwrap();
    let items: Vec<_> = (0..10).map(|i| (format!("key {i}"), value(i, 100_000))).collect();
    for outcome in c.batch_put(&slices(&items), &PutOptions::new().replicas(2)).await.unwrap() {
        assert_eq!(outcome.unwrap(), PutOutcome::Stored);
    }
    let list = c.replicas().list("key 0").await.unwrap().unwrap();
    let ends: Vec<_> = list.replicas.iter().map(|r| r.location.memory().unwrap().endpoint.clone()).collect();
    assert!(ends.len() == 2 && ends[0] != ends[1], "{ends:?}");
    a.close().await.unwrap();
    for (key, expected) in &items {
        assert_eq!(c.get(key).await.unwrap().unwrap(), expected);
        assert_eq!(b.get(key).await.unwrap().unwrap(), expected);
    }
}

async fn closing_twice(kind: Kind) {
    let cluster = Cluster::start(kind, options()).await;
    let (a, b) = cluster.pair().await;
    a.put_with("k", "v", &PutOptions::new().prefer_segment(a.hostname())).await.unwrap();
    a.close().await.unwrap();
    a.clone().close().await.unwrap();
    assert_eq!(b.get("k").await.unwrap(), None);
    assert_eq!(a.get("k").await.unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(a.put("k", "v").await.unwrap_err().kind(), ErrorKind::Invalid);
    assert!(
        a.exist("k").await.is_err()
            && a.remove_all(false).await.is_err()
            && a.segments().mount(4096).await.is_err()
    );
    assert!(!a.status().is_healthy().await && b.status().is_healthy().await);
    assert_eq!(b.put("k", "w").await.unwrap(), PutOutcome::Stored);
}

async fn dropping_without_closing(kind: Kind) {
    let cluster = Cluster::start(kind, options()).await;
    let (a, b) = cluster.pair().await;
    let items: Vec<_> = (0..8).map(|i| (format!("key {i}"), value(i, 1000))).collect();
    b.batch_put(&slices(&items), &PutOptions::default()).await.unwrap();
    drop(a);
    // Objects in that segment are misses at once, and other segments have free space.
    for (key, expected) in &items {
        if let Some(got) = b.get(key).await.unwrap() {
            assert_eq!(got, expected);
        }
        assert_eq!(b.put(format!("new {key}"), expected).await.unwrap(), PutOutcome::Stored);
    }
    crate::cluster::eventually("the segment is taken back", async || {
        cluster.master.stats().segments.len() == 1
    })
    .await;
}

async fn many_at_once(kind: Kind) {
    let cluster = Cluster::start(kind, options()).await;
    let (a, b) = cluster.pair().await;
    let tasks: Vec<_> = (0..16u64)
        .map(|t| {
            let (put, get) = if t % 2 == 0 { (a.clone(), b.clone()) } else { (b.clone(), a.clone()) };
            tokio::spawn(async move {
                for i in 0..20 {
                    let (key, bytes) = (format!("{t} {i}"), value(t * 100 + i, 20_000));
                    assert_eq!(put.put(&key, &bytes[..]).await.unwrap(), PutOutcome::Stored);
                    assert_eq!(get.get(&key).await.unwrap().unwrap(), bytes);
                    assert!(get.remove(&key, true).await.unwrap());
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    cluster.assert_empty();
}

/// Checks at compile time that every operation may run in any task.
#[allow(dead_code, reason = "it only has to compile")]
fn futures_are_send(client: &mooncake_store::client::Client) {
    fn send(_: impl Send) {}
    let config = PutOptions::default();
    let keys = ["k"];
    send(client.put("k", "v"));
    send(client.put_with("k", "v", &PutOptions::new().upsert()));
    send(client.batch_put(&[("k", "v")], &config));
    send(client.get("k"));
    send(client.batch_get(&keys));
    send(client.batch_get_into(Vec::<(&str, _)>::new()));
    send(client.batch_exist(&keys));
    send(client.replicas().prefix_hits(&keys));
    send(client.replicas().list_prefix(&keys));
    send(client.ranges().locate_prefix(&keys));
    send(client.batch_remove(&keys, true));
    send(client.remove_all(true));
    send(client.segments().mount(4096));
    send(client.close());
}
