//! Puts without free space, which wait within limits.

use std::time::Duration;

use mooncake_core::ErrorCode;
use mooncake_core::clock::{Clock, SystemClock};
use mooncake_core::replica::ReplicateConfig;
use mooncake_store::client::{Client, PutOptions, PutOutcome};
use mooncake_store::master::MasterOptions;

use crate::cluster::{Cluster, Kind, slices, value};

const LEASE: Duration = Duration::from_millis(700);
const BLOCK: usize = 64 << 10;
const BLOCKS: usize = 16;

/// Starts a cluster whose only memory holds this number of blocks, each with a new lease.
async fn full(kind: Kind, config: &PutOptions) -> (Cluster, Client) {
    let options = MasterOptions { lease_ttl: LEASE, high_watermark: 1.0, ..MasterOptions::default() };
    let cluster = Cluster::start(kind, options).await;
    let client = cluster.builder().segment((BLOCK * BLOCKS) as u64).connect().await.unwrap();
    for n in 0..BLOCKS {
        client.put_with(format!("old {n}"), &value(n as u64, BLOCK)[..], config).await.unwrap();
    }
    for n in 0..BLOCKS {
        assert!(client.exist(format!("old {n}")).await.unwrap());
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
            client.exist(format!("old {n}")).await.unwrap();
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
    assert!(cluster.master.stats().no_room > 0, "there was room from the first");
    assert!(client.ranges().give_back(&[&reserved]).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn patience_ends() {
    let pinned = PutOptions::new().hard_pin();
    let (cluster, _member) = full(Kind::Tcp, &pinned).await;
    let refusals = async |patience: Duration| {
        let before = cluster.master.stats().no_room;
        let other = cluster.builder().segment(0).room_patience(patience).connect().await.unwrap();
        let error = other.put("new", &value(1, BLOCK)[..]).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::NoAvailableHandle, "{error}");
        cluster.master.stats().no_room - before
    };
    assert_eq!(refusals(Duration::ZERO).await, 1, "it asks once");
    // The intervals are 10, 20, 40 ms and so on to half a second, each up to half shorter.
    let asked = refusals(Duration::from_secs(2)).await;
    assert!((2..=20).contains(&asked), "{asked}");
    assert_eq!(cluster.master.stats().evicted_keys, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_wait_for_an_impossible_response() {
    for kind in [Kind::Embedded, Kind::Tcp] {
        let cluster = Cluster::start(kind, MasterOptions::default()).await;
        let client = cluster.builder().segment(1 << 20).connect().await.unwrap();
        let error = client.put("large", &value(1, 2 << 20)[..]).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::NoAvailableHandle);
        assert!(error.to_string().contains("large enough"), "{error}");
        assert_eq!(cluster.master.stats().no_room, 1, "it was asked for again");
    }
}
