//! Owners that no longer offer memory: the master still grants or lists it, or still reports
//! objects in it.

use std::time::Duration;

use mooncake_core::ErrorKind;
use mooncake_core::ids::{SegmentId, Uuid};
use mooncake_core::replica::{ReplicaType, ReplicateConfig, Segment};
use mooncake_store::api::WriteMode;
use mooncake_store::client::{Client, RangeRead, RangeWrite};
use mooncake_store::master::{MasterOptions, Put};

use crate::cluster::{Cluster, Kind};

const LEN: usize = 4096;

/// Starts an owner and a writer. The master knows another segment in place of that of the owner, at
/// an address that is not registered.
async fn with_moved_memory() -> (Cluster, Client, Client) {
    let cluster = Cluster::start(Kind::Tcp, MasterOptions::default()).await;
    let owner = cluster.builder().connect().await.unwrap();
    let writer = cluster.builder().segment(0).connect().await.unwrap();
    writer.put("before", &[1; LEN]).await.unwrap();
    let list = writer.replicas().list("before").await.unwrap().unwrap();
    let at = list.replicas[0].location.memory().unwrap().clone();
    let moved = Segment {
        id: SegmentId(Uuid::new(1, 2)),
        name: owner.hostname().into(),
        base: 1 << 40,
        size: 1 << 20,
        endpoint: at.endpoint,
        protocol: at.protocol,
        host_id: String::new(),
        locality: None,
    };
    for id in owner.segments().ids() {
        cluster.master.unmount(owner.id(), id).unwrap();
    }
    cluster.master.mount(owner.id(), &moved).unwrap();
    (cluster, owner, writer)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_to_moved_memory_are_no_invalid_calls() {
    let (_cluster, _owner, writer) = with_moved_memory().await;
    let error = writer.put("k", &[1; LEN]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let config = ReplicateConfig::default();
    let object = writer.ranges().reserve(&[("l", LEN as u64)], &config).await.unwrap().remove(0).unwrap();
    let from = writer.memory().alloc(LEN).unwrap().exclusive().unwrap().into_shared();
    let write = RangeWrite { object: &object, offset: 0, from };
    let error = writer.ranges().write(vec![write]).await.remove(0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_of_moved_memory_are_no_invalid_calls() {
    let (cluster, owner, writer) = with_moved_memory().await;
    let (id, config) = (owner.id().into(), ReplicateConfig::default());
    let put = Put {
        writer: id,
        mode: WriteMode::Put,
        key: b"k",
        len: LEN as u64,
        config: &config,
        group: "",
        session: None,
    };
    cluster.master.put_start(&put).unwrap();
    cluster.master.put_end(id, b"k", None, ReplicaType::All).unwrap();
    assert_eq!(writer.get("k").await.unwrap(), None, "a miss");
    let memory = || writer.memory().alloc(LEN).unwrap().exclusive().unwrap();
    let error = writer.get_into("k", memory()).await.found().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let object = writer.ranges().locate(&["k"]).await.unwrap().remove(0).unwrap().unwrap();
    let read = RangeRead { object, offset: 0, into: memory() };
    let error = writer.ranges().read(vec![read]).await.remove(0).result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

/// The master reports objects in a segment after its unmount, but not that they are lost with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_of_an_unmounted_segment_do_not_outlive_the_master() {
    let cluster = Cluster::start(Kind::Tcp, MasterOptions::default()).await;
    let owner = cluster.builder().segment(0).connect().await.unwrap();
    let writer = cluster.builder().segment(0).checksum(true).connect().await.unwrap();
    for round in 0..20 {
        let id = owner.segments().mount(1 << 20).await.unwrap();
        for number in 0..4 {
            writer.put(format!("{round}/{number}"), &[1; LEN]).await.unwrap();
        }
        if round % 2 == 0 {
            owner.segments().unmount(id).await.unwrap();
        } else {
            owner.segments().unmount_after(id, Duration::from_millis(1)).await.unwrap();
        }
        assert_eq!(owner.status().lasting_objects().await, 0, "round {round}");
    }
}
