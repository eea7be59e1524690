//! Prefixes of lists of keys: the number of readable keys, their replicas, and reads of them.

use futures::FutureExt;
use mooncake_core::clock::Rng;
use mooncake_core::replica::{ReplicaType, ReplicateConfig};
use mooncake_core::testkit::test_seed;
use mooncake_store::api::WriteMode;
use mooncake_store::client::{Client, RangeRead};
use mooncake_store::master::{MasterOptions, Put};

use crate::cluster::{Cluster, Kind, value};

const LEN: usize = 3000;

/// Reads located objects completely.
async fn read(client: &Client, located: Vec<mooncake_store::client::Located>) -> Vec<Vec<u8>> {
    let reads = located.into_iter().map(|object| {
        let len = usize::try_from(object.size()).unwrap();
        RangeRead { object, offset: 0, into: client.memory().alloc(len).unwrap().exclusive().unwrap() }
    });
    let read = client.ranges().read(reads.collect()).await;
    let bytes = |outcome: mooncake_store::client::RangeOutcome<_>| {
        outcome.result.unwrap();
        let mut bytes = vec![0; outcome.into.len()];
        outcome.into.copy_to(0, &mut bytes).unwrap();
        bytes
    };
    read.into_iter().map(bytes).collect()
}

async fn check(kind: Kind) {
    let cluster = Cluster::start(kind, MasterOptions::default()).await;
    let (a, b) = cluster.pair().await;
    let seed = test_seed();
    let mut rng = Rng::seeded(seed);
    let keys: Vec<String> = (0..40).map(|number| format!("block/{number}")).collect();
    for (number, key) in keys.iter().enumerate().filter(|(number, _)| number % 13 != 12) {
        a.put(key, value(number as u64, LEN)).await.unwrap();
    }
    // An object that is being written ends a prefix as a missing object does.
    let (writer, mode, config) = (a.id().into(), WriteMode::Put, &ReplicateConfig::default());
    let put = Put { writer, mode, key: b"block/25", len: 10, config, group: "", session: None };
    cluster.master.put_start(&put).unwrap();
    // At the first contact with a client, the master is asked again.
    assert_eq!(b.get(&keys[0]).await.unwrap().unwrap(), value(0, LEN));
    for _ in 0..60 {
        let first = rng.below(41) as usize;
        let end = first + rng.below(41 - first as u64) as usize;
        let asked = &keys[first..end];
        let hits = (first..end).position(|number| number % 13 == 12).unwrap_or(asked.len());
        assert_eq!(b.replicas().prefix_hits(asked).await.unwrap(), hits, "seed {seed}, {first}..{end}");
        let lists = b.replicas().list_prefix(asked).await.unwrap();
        assert!(lists.iter().all(|list| list.replicas[0].location.size() == LEN as u64));
        let located = b.ranges().locate_prefix(asked).await.unwrap();
        assert_eq!((lists.len(), located.len()), (hits, hits), "seed {seed}, {first}..{end}");
        assert!(located.iter().zip(asked).all(|(object, key)| object.key() == key.as_bytes()));
        for (number, bytes) in read(&b, located).await.into_iter().enumerate() {
            assert!(bytes == value((first + number) as u64, LEN), "seed {seed}, {first}..{end}, {number}");
        }
    }
    // The end of the write continues the prefix.
    cluster.master.put_end(writer, b"block/25", None, ReplicaType::All).unwrap();
    assert_eq!(b.replicas().prefix_hits(&keys[13..]).await.unwrap(), 25);
    // A removal ends the prefix, and later reads return the located bytes or an error.
    let located = b.ranges().locate_prefix(&keys[..3]).await.unwrap();
    assert!(a.remove(&keys[1], true).await.unwrap());
    assert_eq!(b.replicas().prefix_hits(&keys[..3]).await.unwrap(), 1);
    assert_eq!(read(&b, located).await[1], value(1, LEN));
    // A call that was dropped leaves no trace.
    assert!(b.replicas().prefix_hits(&keys).now_or_never().is_none_or(|hits| hits.unwrap() == 1));
    assert!(b.ranges().locate_prefix(&keys).now_or_never().is_none_or(|found| found.unwrap().len() == 1));
    assert_eq!(b.replicas().prefix_hits(&keys[..1]).await.unwrap(), 1);
    b.close().await.unwrap();
    assert!(b.replicas().prefix_hits(&keys).await.is_err() && b.ranges().locate_prefix(&keys).await.is_err());
}

#[tokio::test]
async fn embedded() {
    check(Kind::Embedded).await;
}

#[cfg(feature = "transport-tcp")]
#[tokio::test]
async fn tcp() {
    check(Kind::Tcp).await;
}
