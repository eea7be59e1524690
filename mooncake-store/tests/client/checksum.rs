//! Checksums of values, which reads compare with those of the writes.

use bytes::Bytes;
use mooncake_core::ErrorCode;
use mooncake_store::client::{Client, PutOptions, RangeOutcome, RangeRead, ReadInto};
use mooncake_store::master::MasterOptions;

use crate::cluster::{Cluster, Kind, value};

const LEN: usize = 100_000;

/// Overwrites a byte of replica `index` behind the back of the master.
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
        let careful = cluster.builder().segment(0).checksum(true).connect().await.unwrap();
        let bytes = value(3, LEN);

        // Every form of a write makes the same checksum, and every form of a read compares it.
        let registered = careful.memory().alloc(LEN).unwrap().exclusive().unwrap();
        careful.put("whole", &bytes[..]).await.unwrap();
        let ReadInto { into: registered, .. } = careful.get_into("whole", registered).await;
        let slice = registered.into_shared();
        careful.put("slice", &slice).await.unwrap();
        careful.put("bytes", &bytes).await.unwrap();
        plain.put("unsummed", &bytes[..]).await.unwrap();
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
        let into = careful.memory().alloc(LEN).unwrap().exclusive().unwrap();
        let ReadInto { result, .. } = careful.get_into("whole", into).await;
        assert_eq!(result.unwrap_err().code(), ErrorCode::ChecksumMismatch);
        let located = careful.ranges().locate(&["whole"]).await.unwrap().remove(0).unwrap().unwrap();
        for (len, code) in [(LEN, Some(ErrorCode::ChecksumMismatch)), (LEN - 1, None)] {
            let into = careful.memory().alloc(len).unwrap().exclusive().unwrap();
            let read = RangeRead { object: located.clone(), offset: 0, into };
            let RangeOutcome { result, .. } = careful.ranges().read(vec![read]).await.remove(0);
            assert_eq!(result.err().map(|error| error.code()), code, "a part cannot be compared");
        }
        // Parts that cover the whole value together are compared, in any order.
        for (cuts, code) in [([0, 100, LEN], Some(ErrorCode::ChecksumMismatch)), ([1, 100, LEN], None)] {
            let part = |range: &[usize]| {
                let into = careful.memory().alloc(range[1] - range[0]).unwrap().exclusive().unwrap();
                RangeRead { object: located.clone(), offset: range[0] as u64, into }
            };
            let parts = cuts.windows(2).rev().map(part).collect();
            for range in careful.ranges().read(parts).await {
                assert_eq!(range.result.err().map(|error| error.code()), code, "{cuts:?}");
            }
        }
        let batch = careful.batch_get(&["slice", "whole"]).await.unwrap();
        assert_eq!(batch[0].as_ref().unwrap().as_ref().unwrap(), &bytes);
        assert_eq!(batch[1].as_ref().unwrap_err().code(), ErrorCode::ChecksumMismatch);
        // The client does not compare, or the object has no checksum.
        assert_ne!(plain.get("whole").await.unwrap().unwrap(), bytes);
        assert_ne!(careful.get("unsummed").await.unwrap().unwrap(), bytes);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_replica_stands_in_for_a_spoilt_one() {
    let cluster = Cluster::start(Kind::Tcp, MasterOptions::default()).await;
    let (a, _b) = cluster.pair().await;
    let careful = cluster.builder().segment(0).checksum(true).connect().await.unwrap();
    let bytes = value(4, LEN);
    careful.put_with("k", &bytes[..], &PutOptions::new().replicas(2)).await.unwrap();
    spoil(&cluster, &a, "k", 0).await;
    for _ in 0..4 {
        assert_eq!(careful.get("k").await.unwrap().unwrap(), bytes);
        let located = careful.ranges().locate(&["k"]).await.unwrap().remove(0).unwrap().unwrap();
        let part = |offset: usize| {
            let into = careful.memory().alloc(LEN / 2).unwrap().exclusive().unwrap();
            RangeRead { object: located.clone(), offset: offset as u64, into }
        };
        let read = careful.ranges().read(vec![part(0), part(LEN / 2)]).await;
        for (half, RangeOutcome { result, into }) in read.into_iter().enumerate() {
            result.unwrap();
            let mut got = vec![0; LEN / 2];
            into.copy_to(0, &mut got).unwrap();
            assert_eq!(got, bytes[half * LEN / 2..][..LEN / 2]);
        }
    }
}
