//! Values that a put accepts, and the operations that metrics count for them.

use mooncake_core::ErrorCode;
use mooncake_store::client::{Payload, PutOptions, PutOutcome};
use mooncake_store::master::MasterOptions;

use crate::cluster::{Cluster, Kind, value};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_payload_is_stored_and_counted_by_its_kind() {
    for kind in [Kind::Embedded, Kind::Tcp] {
        let cluster = Cluster::start(kind, MasterOptions::default()).await;
        let (client, reader) = cluster.pair().await;
        let bytes = value(1, 3000);
        let registered = || {
            let mut memory = client.memory().alloc(3000).unwrap().exclusive().unwrap();
            memory.copy_from(0, &bytes).unwrap();
            memory
        };
        let slice = registered().into_shared();
        let (front, back) = registered().split_at(1000).unwrap();
        let pieces = [front.into_shared(), back.into_shared()];
        let mut puts = Vec::new();
        for options in [PutOptions::new(), PutOptions::new().upsert()] {
            puts.push(client.put_with("copied", &bytes[..], &options).await);
            puts.push(client.put_with("shared", &bytes, &options).await);
            puts.push(client.put_with("slice", &slice, &options).await);
            puts.push(client.put_with("pieces", &pieces, &options).await);
            puts.push(client.put_with("payload", Payload::Pieces(&pieces), &options).await);
            puts.extend(client.batch_put(&[("batch copied", &bytes[..])], &options).await.unwrap());
            puts.extend(client.batch_put(&[("batch shared", &bytes)], &options).await.unwrap());
            puts.extend(client.batch_put(&[("batch slice", &slice)], &options).await.unwrap());
            puts.extend(client.batch_put(&[("batch pieces", &pieces)], &options).await.unwrap());
        }
        assert!(puts.iter().all(|put| matches!(put, Ok(PutOutcome::Stored))), "{puts:?}");
        for key in ["copied", "shared", "slice", "pieces", "payload"] {
            assert_eq!(reader.get(key).await.unwrap().unwrap(), bytes, "{key}");
        }
        for key in ["batch copied", "batch shared", "batch slice", "batch pieces"] {
            assert_eq!(reader.get(key).await.unwrap().unwrap(), bytes, "{key}");
        }
        let summary = client.status().metrics().unwrap().summary();
        for (operation, count) in [
            ("put", 2),
            ("put_from", 1),
            ("put_parts", 2),
            ("put_batch", 2),
            ("batch_put_from", 1),
            ("batch_put_from_multi_buffers", 1),
            ("upsert", 2),
            ("upsert_from", 1),
            ("upsert_parts", 2),
            ("upsert_batch", 2),
            ("batch_upsert_from", 2),
        ] {
            let line = format!("{operation}: count={count}, ");
            assert!(summary.lines().any(|found| found.starts_with(&line)), "{line}: {summary}");
        }
    }
}

#[tokio::test]
async fn a_miss_is_an_error_where_a_value_is_required() {
    let cluster = Cluster::start(Kind::Embedded, MasterOptions::default()).await;
    let (client, _) = cluster.pair().await;
    client.put("k", b"value").await.unwrap();
    let memory = || client.memory().alloc(10).unwrap().exclusive().unwrap();
    assert_eq!(client.get_into("k", memory()).await.found().unwrap(), 5);
    let missing = client.get_into("absent", memory()).await;
    assert_eq!(missing.result.as_ref().unwrap(), &None);
    assert_eq!(missing.found().unwrap_err().code(), ErrorCode::ObjectNotFound);
    let into = memory();
    client.close().await.unwrap();
    // The outcome of every key is unknown, and each read says so.
    let batch = client.batch_get_into(vec![("k", into)]).await;
    assert!(batch.located.is_err() && batch.reads[0].result.is_err(), "{batch:?}");
    assert_eq!(batch.reads[0].into.len(), 10);
}
