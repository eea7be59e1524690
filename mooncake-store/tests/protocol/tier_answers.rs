//! Responses of Mooncake C++ to calls about tiers below memory and about hot replicas while these
//! are off. The same list is checked against both projects.

use std::borrow::Cow;

use mooncake_core::error::ErrorCode;
use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::ReplicaType;
use mooncake_store::protocol::client::RpcClient;
use mooncake_store::protocol::message::*;
use mooncake_store::protocol::wire::{NofSegment, OffloadItem, StoredAt};

/// Checks all calls. `client` has the object `key` in `segment`; no object has the key `none`.
pub(crate) async fn check_off(rpc: &RpcClient, client: ClientId, key: &[u8], segment: &str) {
    disks(rpc, client).await;
    promotion(rpc, client, key).await;
    nof(rpc, client).await;
    hot_copies(rpc, client, key, segment).await;
}

const TENANT: &str = "default";

async fn disks(rpc: &RpcClient, client: ClientId) {
    let stranger = ClientId(Uuid::new(901, 902));
    for client in [client, stranger] {
        for enabled in [false, true] {
            let mounted = rpc.call(&MountLocalDiskSegment { client, enabled }).await.unwrap();
            assert_eq!(mounted, Err(ErrorCode::UnableOffload));
            let work = rpc.call(&OffloadObjectHeartbeat { client, enabled }).await.unwrap();
            assert_eq!(work, Err(ErrorCode::SegmentNotFound));
        }
        let unmounted = rpc.call(&UnmountLocalDiskSegment { client }).await.unwrap();
        assert_eq!(unmounted, Err(ErrorCode::UnableOffload));
        let clear = rpc.call(&PollRemoveAll { client }).await.unwrap();
        assert_eq!(clear, Err(ErrorCode::SegmentNotFound));
        for (bytes, code) in [(1 << 30, ErrorCode::SegmentNotFound), (-5, ErrorCode::InvalidParams)] {
            let told = rpc.call(&ReportSsdCapacity { client, bytes }).await.unwrap();
            assert_eq!(told, Err(code));
        }
        let work = rpc.call(&PromotionObjectHeartbeat { client }).await.unwrap();
        assert_eq!(work, Err(ErrorCode::SegmentNotFound));
    }
    let items = [OffloadItem { tenant: TENANT.into(), key: b"offloaded".to_vec(), size: 9 }];
    let places: [StoredAt; 0] = [];
    let told = |offloaded| NotifyOffloadSuccess { client, offloaded, places: Cow::Borrowed(&places) };
    assert_eq!(rpc.call(&told(Cow::Borrowed(&items))).await.unwrap(), Err(ErrorCode::InvalidParams));
    assert_eq!(rpc.call(&told(Cow::Borrowed(&[]))).await.unwrap(), Ok(()));
}

async fn promotion(rpc: &RpcClient, client: ClientId, there: &[u8]) {
    let tenant = TENANT;
    for (key, start, success, failure) in [
        (
            b"none".as_slice(),
            ErrorCode::ObjectNotFound,
            ErrorCode::ObjectNotFound,
            Err(ErrorCode::ObjectNotFound),
        ),
        (there, ErrorCode::ReplicaIsNotReady, ErrorCode::ReplicaIsNotReady, Ok(())),
    ] {
        let preferred = Cow::Borrowed([].as_slice());
        let space =
            rpc.call(&PromotionAllocStart { client, key, tenant, size: 10, preferred }).await.unwrap();
        assert_eq!(space.map(drop), Err(start));
        assert_eq!(rpc.call(&NotifyPromotionSuccess { client, key, tenant }).await.unwrap(), Err(success));
        assert_eq!(rpc.call(&NotifyPromotionFailure { client, key, tenant }).await.unwrap(), failure);
    }
    use ReplicaType::*;
    for replicas in [Memory, Disk, LocalDisk, NofSsd, All, Dfs] {
        let absent = EvictDiskReplica { client, key: b"none", tenant, replicas };
        assert_eq!(rpc.call(&absent).await.unwrap(), Err(ErrorCode::ObjectNotFound));
        let on_disk = matches!(replicas, Disk | LocalDisk);
        let outcome = if on_disk { Ok(()) } else { Err(ErrorCode::InvalidParams) };
        let evict = EvictDiskReplica { client, key: there, tenant, replicas };
        assert_eq!(rpc.call(&evict).await.unwrap(), outcome, "{replicas:?}");
    }
    let keys = [there, b"none"];
    let evict = BatchEvictDiskReplica { client, keys: Cow::Borrowed(&keys), tenant, replicas: Disk };
    assert_eq!(rpc.call(&evict).await.unwrap(), [Ok(()), Err(ErrorCode::ObjectNotFound)]);
}

async fn nof(rpc: &RpcClient, client: ClientId) {
    let segment = NofSegment {
        id: SegmentId(Uuid::new(21, 22)),
        name: "nof".into(),
        base: 1,
        size: 1 << 30,
        endpoint: "target".into(),
    };
    let off = Err(ErrorCode::UnavailableInCurrentMode);
    let one = [segment];
    let mount = MountNoFSegment { nof_segment: Cow::Borrowed(&one[0]), client };
    assert_eq!(rpc.call(&mount).await.unwrap(), off);
    for nof_segments in [Cow::Borrowed([].as_slice()), Cow::Borrowed(one.as_slice())] {
        assert_eq!(rpc.call(&ReMountNoFSegment { nof_segments, client }).await.unwrap(), off);
    }
    assert_eq!(rpc.call(&UnmountNoFSegment { segment: one[0].id, client }).await.unwrap(), off);
    assert_eq!(rpc.call(&GetAllNoFSegments {}).await.unwrap(), Ok(Vec::new()));
    let named = rpc.call(&GetNoFSegmentsByName { segment_name: "nof" }).await.unwrap();
    assert_eq!(named, Err(ErrorCode::SegmentNotFound));
}

async fn hot_copies(rpc: &RpcClient, client: ClientId, there: &[u8], segment: &str) {
    let (tenant, source, epoch) = (TENANT, segment, 0);
    let start = async |key, targets: &'static [&'static str], lease| {
        let targets = Cow::Borrowed(targets);
        rpc.call(&DynamicReplicaCopyStart { client, key, tenant, source, targets, lease, epoch }).await
    };
    let lease = Uuid::new(5, 6);
    let absent = start(b"none", &["elsewhere"], lease).await.unwrap();
    assert_eq!(absent.map(drop), Err(ErrorCode::ObjectNotFound));
    let unasked = start(there, &["elsewhere"], lease).await.unwrap();
    assert_eq!(unasked.map(drop), Err(ErrorCode::UnavailableInCurrentStatus));
    for (key, code) in
        [(b"none".as_slice(), ErrorCode::ObjectNotFound), (there, ErrorCode::ObjectNoReplicationTask)]
    {
        let end = rpc.call(&DynamicReplicaCopyEnd { client, key, tenant, lease, epoch }).await.unwrap();
        let revoke = rpc.call(&DynamicReplicaCopyRevoke { client, key, tenant, lease, epoch }).await.unwrap();
        assert_eq!((end, revoke), (Err(code), Err(code)));
    }
    // Without a token the copy is an ordinary one, and the end of another copy does not end it.
    let nil = Uuid::default();
    let unknown = start(there, &["elsewhere"], nil).await.unwrap();
    assert_eq!(unknown.map(drop), Err(ErrorCode::SegmentNotFound));
    let plain = CopyStart { client, key: there, tenant, source, targets: Cow::Owned(vec![segment]) };
    assert!(rpc.call(&plain).await.unwrap().is_ok());
    let end =
        async |lease| rpc.call(&DynamicReplicaCopyEnd { client, key: there, tenant, lease, epoch }).await;
    let end = [end(lease).await.unwrap(), end(nil).await.unwrap()];
    assert_eq!(end, [Err(ErrorCode::InvalidVersion), Ok(())]);
}
