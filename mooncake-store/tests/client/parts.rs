//! Values in pieces, ranges of values, and values written in parts.

use mooncake_core::ErrorCode;
use mooncake_core::replica::ReplicateConfig;
use mooncake_store::client::{Client, PutOptions, PutOutcome, RangeOutcome, RangeRead, RangeWrite};
use mooncake_store::master::MasterOptions;
use mooncake_store::transport_set::TransportSet;
use mooncake_transport::Slice;

use crate::cluster::{Cluster, Kind, value};

fn filled(client: &Client, bytes: &[u8]) -> Slice<TransportSet> {
    let mut slice = client.memory().alloc(bytes.len()).unwrap().exclusive().unwrap();
    slice.copy_from(0, bytes).unwrap();
    slice.into_shared()
}

async fn pieces_and_ranges(kind: Kind) {
    let cluster = Cluster::start(kind, MasterOptions::default()).await;
    let (a, b) = cluster.pair().await;
    let whole = value(1, 300_000);
    let pieces = |cuts: &[usize]| {
        let mut at = 0;
        cuts.iter()
            .map(|len| {
                at += len;
                filled(&a, &whole[at - len..at])
            })
            .collect::<Vec<_>>()
    };
    let config = PutOptions::default();
    let items = [("one", pieces(&[300_000])), ("many", pieces(&[1, 99_999, 200_000])), ("none", vec![])];
    let put = a.batch_put(&items, &config).await.unwrap();
    assert_eq!(put[0].as_ref().unwrap(), &PutOutcome::Stored);
    assert_eq!(put[2].as_ref().unwrap_err().code(), ErrorCode::InvalidParams);
    assert_eq!(b.get("many").await.unwrap().unwrap(), whole);
    let shorter = [("many", vec![pieces(&[10, 90]).remove(1)])];
    a.batch_put(&shorter, &config.clone().upsert()).await.unwrap().remove(0).unwrap();
    assert_eq!(b.get("many").await.unwrap().unwrap(), whole[10..100]);

    let mut located = b.ranges().locate(&["one", "missing"]).await.unwrap();
    assert!(located.remove(1).unwrap().is_none());
    let object = located.remove(0).unwrap().unwrap();
    assert_eq!(object.size(), 300_000);
    let read = |offset, len| RangeRead {
        object: object.clone(),
        offset,
        into: b.memory().alloc(len).unwrap().exclusive().unwrap(),
    };
    let ranges = [(0, 1), (299_999, 1), (1000, 70_000), (299_999, 2), (u64::MAX, 1)];
    let read = b.ranges().read(ranges.map(|(offset, len)| read(offset, len)).into()).await;
    for ((offset, len), RangeOutcome { result: outcome, into: slice }) in ranges.into_iter().zip(read) {
        if offset > 300_000 || offset + len as u64 > 300_000 {
            assert_eq!(outcome.unwrap_err().code(), ErrorCode::InvalidParams);
            continue;
        }
        outcome.unwrap();
        let mut bytes = vec![0; len];
        slice.copy_to(0, &mut bytes).unwrap();
        let offset = usize::try_from(offset).unwrap();
        assert_eq!(bytes, whole[offset..offset + len]);
    }
}

async fn a_reserved_object_is_there_when_committed(kind: Kind) {
    let cluster = Cluster::start(kind, MasterOptions::default()).await;
    let (a, b) = cluster.pair().await;
    let whole = value(2, 100_000);
    let config = ReplicateConfig::replicas(2);
    let mut reserved = a.ranges().reserve(&[("k", 100_000), ("lost", 64)], &config).await.unwrap();
    let (lost, object) = (reserved.remove(1).unwrap(), reserved.remove(0).unwrap());
    let again = a.ranges().reserve(&[("k", 1)], &config).await.unwrap().remove(0);
    assert!(again.is_err() && b.get("k").await.unwrap().is_none());
    let items = [("one", 10), ("", 10), ("none", 0), ("one", 10), ("k", 10), ("two", 10)];
    let each = a.ranges().reserve(&items, &config).await.unwrap();
    let codes: Vec<_> = each.iter().map(|one| one.as_ref().map(drop).map_err(|error| error.code())).collect();
    let (invalid, exists) = (Err(ErrorCode::InvalidParams), Err(ErrorCode::ObjectAlreadyExists));
    assert_eq!(codes, [Ok(()), invalid, invalid, exists, exists, Ok(())], "each key for itself");
    assert!(a.ranges().give_back(&each.iter().flatten().collect::<Vec<_>>()).await);
    let write = |from: usize, to: usize| RangeWrite {
        object: &object,
        offset: from as u64,
        from: filled(&a, &whole[from..to]),
    };
    let outcomes = a.ranges().write(vec![write(60_000, 100_000), write(0, 60_000)]).await;
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    let beyond = RangeWrite { object: &object, offset: 99_999, from: filled(&a, &[1, 2]) };
    assert_eq!(
        a.ranges().write(vec![beyond]).await[0].as_ref().unwrap_err().code(),
        ErrorCode::InvalidParams
    );
    a.ranges().commit(&[&object]).await.unwrap().remove(0).unwrap();
    assert_eq!(b.get("k").await.unwrap().unwrap(), whole);
    assert!(a.ranges().give_back(&[&lost]).await);
    assert!(a.put("lost", b"other").await.unwrap() == PutOutcome::Stored);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn embedded() {
    pieces_and_ranges(Kind::Embedded).await;
    a_reserved_object_is_there_when_committed(Kind::Embedded).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp() {
    pieces_and_ranges(Kind::Tcp).await;
    pieces_and_ranges(Kind::Shm).await;
    a_reserved_object_is_there_when_committed(Kind::Tcp).await;
}
