//! Clients on one host: transfers with shared memory are copies, and all others use TCP as between
//! hosts.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::memory::HostMemory;
use mooncake_shm::ShmConfig;
use mooncake_store::client::{Client, ClientBuilder, PutOptions, PutOutcome};
use mooncake_store::master::MasterOptions;
use mooncake_store::transport_set::TransportOptions;
use mooncake_tcp::TcpConfig;

use crate::cluster::{Cluster, Kind, eventually, slices, value};

/// Returns a client whose data port is unreachable.
fn unreachable_by_tcp(cluster: &Cluster) -> ClientBuilder {
    // The address is from the block for documentation, where no host listens.
    let tcp = TcpConfig { data_host: "192.0.2.1".into(), ..TcpConfig::default() };
    let wires =
        TransportOptions { tcp: Some(tcp), shm: Some(ShmConfig::default()), ..TransportOptions::default() };
    cluster.builder().transports(wires)
}

async fn cluster() -> Cluster {
    Cluster::start(Kind::Shm, MasterOptions::default()).await
}

async fn roundtrip(a: &Client, b: &Client, key: &str, len: usize) {
    let bytes = value(len as u64, len);
    assert_eq!(a.put(key, &bytes[..]).await.unwrap(), PutOutcome::Stored);
    assert_eq!(b.get(key).await.unwrap().unwrap(), bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shared_memory_is_what_leads_there() {
    let cluster = cluster().await;
    let owner = unreachable_by_tcp(&cluster).connect().await.unwrap();
    let user = cluster.builder().segment(0).connect().await.unwrap();
    for (key, len) in [("a", 1), ("b", 5000), ("c", 1 << 20), ("d", 2_000_000)] {
        roundtrip(&user, &user, key, len).await;
    }
    // The segment is newer than the connection of the clients: until it is mapped, reads use TCP,
    // which fails here.
    let impatient = cluster.builder().segment(0).timeout(Duration::from_millis(300)).connect().await.unwrap();
    assert!(impatient.get("a").await.unwrap().is_some());
    let first = owner.segments().ids()[0];
    owner.segments().mount(8 << 20).await.unwrap();
    owner.segments().unmount(first).await.unwrap();
    eventually("the new segment is mapped", async || impatient.put("late", b"late").await.is_ok()).await;
    roundtrip(&impatient, &impatient, "more", 1 << 20).await;
    let without = cluster.builder().segment(0).share_memory(false).timeout(Duration::from_millis(500));
    let without = without.connect().await.unwrap();
    assert!(!matches!(without.get("more").await, Ok(Some(_))), "over the wire it is out of reach");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_is_not_shared_goes_over_the_network() {
    let cluster = cluster().await;
    let owner = cluster.builder().segment(0).connect().await.unwrap();
    owner.segments().mount_memory(Arc::new(HostMemory::new(8 << 20).unwrap())).await.unwrap();
    let user = cluster.builder().segment(0).connect().await.unwrap();
    roundtrip(&user, &user, "private", 3_000_000).await;
    let keys: Vec<String> = (0..50).map(|i| format!("k{i}")).collect();
    let items: Vec<_> = keys.iter().map(|key| (key.as_str(), value(1, 3000))).collect();
    for outcome in user.batch_put(&slices(&items), &PutOptions::default()).await.unwrap() {
        outcome.unwrap();
    }
    for outcome in user.batch_get(&keys).await.unwrap() {
        assert_eq!(outcome.unwrap().unwrap(), value(1, 3000));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_with_and_one_without_shared_memory_transfer() {
    let cluster = cluster().await;
    let shares = cluster.builder().connect().await.unwrap();
    let does_not = cluster.builder().share_memory(false).connect().await.unwrap();
    roundtrip(&shares, &does_not, "there", 1 << 20).await;
    roundtrip(&does_not, &shares, "back", 1 << 20).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_segment_that_goes_under_readers_is_a_miss_and_never_wrong_bytes() {
    let cluster = cluster().await;
    let owner = cluster.builder().segment(0).connect().await.unwrap();
    let user = cluster.builder().segment(0).connect().await.unwrap();
    for round in 0..5u64 {
        let id = owner.segments().mount(8 << 20).await.unwrap();
        let (key, bytes) = (format!("k{round}"), value(round, 4 << 20));
        eventually("there is room", async || user.put(&key, &bytes[..]).await.is_ok()).await;
        let reader = {
            let (user, key, bytes) = (user.clone(), key.clone(), bytes.clone());
            tokio::spawn(async move {
                let mut reads = 0;
                // A read may fail while the segment is unmounted, but must not return other bytes.
                while let Ok(Some(read)) = user.get(&key).await {
                    assert!(read == bytes, "wrong bytes");
                    reads += 1;
                }
                reads
            })
        };
        eventually("it is read", async || user.get(&key).await.is_ok_and(|read| read.is_some())).await;
        owner.segments().unmount(id).await.unwrap();
        reader.await.unwrap();
        let after = user.get(&key).await;
        assert!(matches!(&after, Ok(None)) || after.is_err(), "{after:?}");
    }
}
