//! Values whose bytes are compared with what was written.

use bytes::Bytes;
use mooncake_core::ErrorCode;
use mooncake_core::replica::ReplicateConfig;
use mooncake_store::client::{Client, RangeRead};
use mooncake_store::master::MasterOptions;

use crate::support::{Cluster, Kind, value};

const LEN: usize = 100_000;

/// Writes another byte into replica `index`, as nobody may.
async fn spoil(cluster: &Cluster, by: &Client, key: &str, index: usize) {
    let replicas = cluster.master.peek(key.as_bytes()).unwrap();
    let at = replicas[index].location.memory().unwrap();
    let target = by.engine().open(&at.endpoint).await.unwrap();
    let (result, _) = by.engine().write(&target, at.address + 77_777, Bytes::from_static(b"\0"), None).await;
    result.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_bytes_are_noticed() {
    for kind in [Kind::Embedded, Kind::Tcp] {
        let cluster = Cluster::start(kind, MasterOptions::default()).await;
        let (a, plain) = cluster.pair().await;
        let careful = cluster.member().segment(0).checksum(true).connect().await.unwrap();
        let bytes = value(3, LEN);

        // Every way in has the same checksum, and every way out compares.
        let registered = careful.alloc_registered(LEN).unwrap().exclusive().unwrap();
        careful.put("whole", &bytes).await.unwrap();
        let (_, registered) = careful.get_into("whole", registered).await;
        let slice = registered.into_shared();
        careful.put_from("slice", &slice, &ReplicateConfig::default()).await.unwrap();
        careful.put_bytes("bytes", &bytes, &ReplicateConfig::default()).await.unwrap();
        plain.put("unsummed", &bytes).await.unwrap();
        drop(slice);
        let mut sums = Vec::new();
        for key in ["whole", "slice", "bytes"] {
            let list = cluster.master.locate(key.as_bytes()).unwrap();
            sums.push(list.checksum.unwrap());
            assert_eq!(careful.get(key).await.unwrap().unwrap(), bytes, "{key}");
        }
        assert!(sums.iter().all(|sum| *sum == sums[0]));
        assert_eq!(cluster.master.locate(b"unsummed").unwrap().checksum, None);

        spoil(&cluster, &a, "whole", 0).await;
        spoil(&cluster, &a, "unsummed", 0).await;
        assert_eq!(careful.get("whole").await.unwrap_err().code(), ErrorCode::ChecksumMismatch);
        let into = careful.alloc_registered(LEN).unwrap().exclusive().unwrap();
        let (result, _) = careful.get_into("whole", into).await;
        assert_eq!(result.unwrap_err().code(), ErrorCode::ChecksumMismatch);
        let located = careful.locate(&["whole"]).await.unwrap().remove(0).unwrap().unwrap();
        for (len, code) in [(LEN, Some(ErrorCode::ChecksumMismatch)), (LEN - 1, None)] {
            let into = careful.alloc_registered(len).unwrap().exclusive().unwrap();
            let read = RangeRead { object: located.clone(), offset: 0, into };
            let (result, _) = careful.read_ranges(vec![read]).await.remove(0);
            assert_eq!(result.err().map(|error| error.code()), code, "a part cannot be compared");
        }
        let batch = careful.batch_get(&["slice", "whole"]).await.unwrap();
        assert_eq!(batch[0].as_ref().unwrap().as_ref().unwrap(), &bytes);
        assert_eq!(batch[1].as_ref().unwrap_err().code(), ErrorCode::ChecksumMismatch);
        // Nobody asked for a comparison, or there is nothing to compare with.
        assert_ne!(plain.get("whole").await.unwrap().unwrap(), bytes);
        assert_ne!(careful.get("unsummed").await.unwrap().unwrap(), bytes);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_replica_stands_in_for_a_spoilt_one() {
    let cluster = Cluster::start(Kind::Tcp, MasterOptions::default()).await;
    let (a, _b) = cluster.pair().await;
    let careful = cluster.member().segment(0).checksum(true).connect().await.unwrap();
    let bytes = value(4, LEN);
    careful.put_with("k", &bytes, &ReplicateConfig::replicas(2)).await.unwrap();
    spoil(&cluster, &a, "k", 0).await;
    for _ in 0..4 {
        assert_eq!(careful.get("k").await.unwrap().unwrap(), bytes);
    }
}
