//! Ownership of writes: numbers of writes, and ends and revokes that arrive late or twice.

use crate::common::rig::{KIB, MIB, Rig, client, endpoint, segment};
use mooncake_core::error::ErrorCode::*;
use mooncake_core::replica::{ReplicaType, ReplicateConfig};
use mooncake_store::api::WriteMode;
use mooncake_store::master::{Put, Writer};

#[test]
fn a_start_repeated_with_its_number_gets_the_same_grant() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    let config = ReplicateConfig::default();
    let start = |mode, attempt, len| {
        let writer = Writer { client: client(1), attempt };
        rig.master
            .put_start(&Put { writer, mode, key: b"k", len, config: &config, group: "", session: None })
            .map_err(|e| e.code())
    };
    let first = start(WriteMode::Put, 5, 10).unwrap();
    assert_eq!(start(WriteMode::Put, 5, 10).as_ref(), Ok(&first));
    assert_eq!(start(WriteMode::Put, 6, 10), Err(ObjectAlreadyExists));
    assert_eq!(start(WriteMode::Put, 5, 11), Err(ObjectAlreadyExists));
    let end = |attempt| {
        let writer = Writer { client: client(1), attempt };
        rig.master.put_end(writer, b"k", None, ReplicaType::All).map_err(|e| e.code())
    };
    assert_eq!(end(6), Err(IllegalClient));
    assert_eq!(end(5), Ok(()));
    assert_eq!(end(5), Ok(()), "repeated");
    let second = start(WriteMode::Upsert, 7, 10).unwrap();
    assert_eq!(start(WriteMode::Upsert, 7, 10), Ok(second));
    assert_eq!(end(5), Ok(()), "late repetition of the first end does not end the second write");
    assert_eq!(rig.locate("k").unwrap().replicas[0].id, first[0].id);
    assert_eq!(rig.remove("k", true), Err(ReplicaIsNotReady), "the upsert is still in progress");
}

#[test]
fn the_end_of_an_upsert_that_was_dropped_is_not_taken_for_the_one_before() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    rig.upsert(9, "k", 10).unwrap();
    rig.end(9, "k").unwrap();
    assert_eq!(rig.end(9, "k"), Ok(()), "repeated");
    let old = rig.locate("k").unwrap();

    // Revoked, as if by another thread of the client: the end has nothing to end.
    rig.upsert(9, "k", 10).unwrap();
    rig.revoke(9, "k").unwrap();
    assert_eq!(rig.end(9, "k"), Err(InvalidWrite));
    assert_eq!(rig.locate("k").unwrap().replicas, old.replicas);

    // The only segment is unmounted.
    rig.mount(2, MIB);
    let config = ReplicateConfig { preferred_segment: "node2:1".into(), ..ReplicateConfig::default() };
    let new = rig.start_with(9, "k", 10, WriteMode::Upsert, &config).unwrap();
    assert_eq!(endpoint(&new[0]), "10.0.0.2:1");
    rig.master.unmount(client(2), segment(2, MIB).id).unwrap();
    assert!(rig.end(9, "k").is_err());
    assert_eq!(rig.locate("k").unwrap().replicas, old.replicas);

    // The object may be ended as before after a write that did not fail.
    rig.upsert(9, "k", 10).unwrap();
    assert_eq!([rig.end(9, "k"), rig.end(9, "k")], [Ok(()), Ok(())]);
}

#[test]
fn ends_and_revokes_belong_to_the_right_writer() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    assert_eq!(rig.end(1, "k"), Err(ObjectNotFound));
    assert_eq!(rig.revoke(1, "k"), Err(ObjectNotFound));
    rig.start(1, "k", 10).unwrap();
    assert_eq!(rig.end(2, "k"), Err(IllegalClient));
    assert_eq!(rig.revoke(2, "k"), Err(IllegalClient));
    let disk = rig.master.put_end(client(1).into(), b"k", None, ReplicaType::Disk);
    assert!(disk.is_ok() && !rig.exists("k"), "there was none on disk to end");
    let disk = rig.master.put_revoke(client(1).into(), b"k", ReplicaType::Disk);
    assert!(disk.is_ok(), "nor to revoke");
    rig.end(1, "k").unwrap();
    assert_eq!(rig.end(1, "k"), Ok(()));
    assert_eq!(rig.end(2, "k"), Err(IllegalClient));
    assert_eq!(rig.revoke(1, "k"), Err(InvalidWrite));
    rig.start(1, "other", 10).unwrap();
    assert_eq!(rig.revoke(1, "other"), Ok(()));
    assert_eq!(rig.revoke(1, "other"), Err(ObjectNotFound));
    assert_eq!(rig.end(1, "other"), Err(ObjectNotFound));
}

#[test]
fn a_revoked_write_rests_before_its_space_is_used_again() {
    let rig = Rig::without_watermark();
    rig.mount(1, 64 * KIB);
    rig.start(9, "k", 64 * KIB).unwrap();
    rig.revoke(9, "k").unwrap();
    assert_eq!(rig.start(9, "k", 64 * KIB), Err(NoAvailableHandle), "bytes may still be on their way");
    rig.alive_for(10.0);
    assert_eq!(rig.used(), 0);
    rig.put(9, "k", 64 * KIB).unwrap();
}
