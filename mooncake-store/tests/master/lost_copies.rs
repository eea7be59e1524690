//! Copies, promotions and tasks whose client is lost: each ends with its client, and blocks nothing
//! afterwards.

use std::collections::BTreeSet;
use std::time::Duration;

use mooncake_core::error::ErrorCode::{self, *};
use mooncake_core::ids::Uuid;
use mooncake_core::replica::ReplicateConfig;
use mooncake_store::master::{DiskOptions, DrainRequest, DrainStatus, MasterOptions, PromotionOptions};
use mooncake_store::protocol::wire::TaskKind::{Copy, Move};
use mooncake_store::protocol::wire::{OffloadItem, StoredAt, TaskStatus};

use crate::common::rig::{KIB, MIB, Rig, client, segment};

const LEN: u64 = 64 * KIB;

fn name(number: u64) -> String {
    segment(number, MIB).name
}

/// Returns a master with four segments, and the object `k` in segments 1 and 3.
fn rig() -> Rig {
    rig_with(MasterOptions { high_watermark: 1.0, ..MasterOptions::default() })
}

fn rig_with(options: MasterOptions) -> Rig {
    let rig = Rig::with(options);
    (1..=4).for_each(|number| drop(rig.mount(number, MIB)));
    put_twice(&rig, "k");
    rig
}

fn put_twice(rig: &Rig, key: &str) {
    let preferred_segments = vec![name(1), name(3)];
    let config = ReplicateConfig { preferred_segments, ..ReplicateConfig::replicas(2) };
    assert_eq!(rig.put_with(9, key, LEN, &config).unwrap().len(), 2);
}

/// Moves the clock while all clients but one send heartbeats.
fn without(rig: &Rig, silent: u64, seconds: u64) {
    for _ in 0..seconds {
        rig.clock.advance(Duration::from_secs(1));
        for number in (1..20).filter(|number| *number != silent) {
            let _ = rig.master.ping(client(number));
        }
        rig.master.tick();
    }
}

fn copy(rig: &Rig, who: u64, from: u64, to: u64) -> Result<(), ErrorCode> {
    let start = rig.master.copy_start(client(who), b"k", &name(from), &[&name(to)]);
    start.map(drop).map_err(|error| error.code())
}

fn used_in(rig: &Rig, number: u64) -> u64 {
    let stats = rig.master.stats();
    stats.segments.iter().find(|held| held.segment.name == name(number)).map_or(0, |held| held.used)
}

/// Checks that nothing holds the object, and that the space of the copy returns when bytes of its
/// client can no longer arrive.
fn is_free(rig: &Rig, target: u64) {
    assert_eq!(used_in(rig, target), LEN, "bytes of the copy may still arrive");
    rig.upsert(9, "k", 100).unwrap();
    rig.end(9, "k").unwrap();
    assert_eq!(rig.remove("k", true), Ok(()));
    rig.alive_for(601.0);
    assert_eq!(rig.used(), 0);
}

#[test]
fn a_copy_ends_with_its_client() {
    for kind in [Copy, Move] {
        let rig = rig();
        // The source and the target are in memory of others, which stay.
        match kind {
            Copy => copy(&rig, 4, 1, 2).unwrap(),
            Move => drop(rig.master.move_start(client(4), b"k", &name(1), &name(2)).unwrap()),
        }
        without(&rig, 4, 9);
        assert_eq!(rig.upsert(9, "k", 100), Err(ObjectHasReplicationTask), "the client may be alive");
        without(&rig, 4, 2);
        let late = rig.master.replication_end(client(4), kind, b"k").map_err(|error| error.code());
        assert_eq!(late, Err(ReplicaIsGone), "the client learns of the loss");
        is_free(&rig, 2);
    }
}

#[test]
fn an_object_whose_copy_is_lost_can_be_evicted_and_copied() {
    let rig = rig();
    copy(&rig, 1, 1, 2).unwrap();
    without(&rig, 1, 11);
    rig.master.copy_start(client(3), b"k", &name(3), &[&name(4)]).unwrap();
    rig.master.replication_revoke(client(3), Copy, b"k").unwrap();
    for number in 0..60 {
        rig.put(9, &format!("{number}"), LEN).unwrap();
    }
    assert!(!rig.has("k"), "nothing protects the object");
}

#[test]
fn a_copy_ends_when_its_client_leaves_or_is_replaced() {
    type Leave = fn(&Rig);
    let ways: [(&str, Leave); 3] = [
        ("unmount", |rig| rig.master.unmount(client(1), segment(1, MIB).id).unwrap()),
        ("grace", |rig| {
            rig.master.unmount_after(client(1), segment(1, MIB).id, Duration::from_secs(1)).unwrap();
            rig.alive_for(2.0);
        }),
        ("replaced", |rig| {
            let next = mooncake_core::replica::Segment {
                id: mooncake_core::ids::SegmentId(Uuid::new(2, 77)),
                ..segment(1, MIB)
            };
            rig.master.mount(client(7), &next).unwrap();
        }),
    ];
    for (way, leave) in ways {
        let rig = rig();
        // The client copies from memory of another one, which stays.
        copy(&rig, 1, 3, 2).unwrap();
        let task = rig.master.create_move(b"k", &name(1), &name(4)).unwrap();
        assert_eq!(rig.master.fetch_tasks(client(1), 9).len(), 1);
        leave(&rig);
        assert_eq!(rig.upsert(9, "k", 100).map(drop), Ok(()), "{way}");
        rig.revoke(9, "k").unwrap();
        let info = rig.master.task(task).unwrap();
        assert_eq!(info.status, TaskStatus::Failed, "{way}: {}", info.message);
        is_free(&rig, 2);
    }
}

#[test]
fn a_copy_ends_with_its_source() {
    let rig = rig();
    // The client stays, and its source does not: what it reads may be other bytes by now.
    copy(&rig, 4, 1, 2).unwrap();
    rig.master.unmount(client(1), segment(1, MIB).id).unwrap();
    let late = rig.master.replication_end(client(4), Copy, b"k").map_err(|error| error.code());
    assert_eq!(late, Err(ReplicaIsGone));
    is_free(&rig, 2);
}

#[test]
fn a_copy_of_an_unknown_client_ends_by_itself() {
    let rig = rig();
    copy(&rig, 50, 1, 2).unwrap();
    rig.alive_for(9.0);
    assert_eq!(rig.upsert(9, "k", 100), Err(ObjectHasReplicationTask));
    rig.alive_for(3.0);
    is_free(&rig, 2);
}

#[test]
fn tasks_end_with_their_client() {
    let rig = rig();
    let fetched = rig.master.create_move(b"k", &name(1), &name(2)).unwrap();
    assert_eq!(rig.master.fetch_tasks(client(1), 9).len(), 1);
    let waiting = rig.master.create_move(b"k", &name(1), &name(4)).unwrap();
    let of_another = rig.master.create_move(b"k", &name(3), &name(4)).unwrap();
    without(&rig, 1, 11);
    for task in [fetched, waiting] {
        let info = rig.master.task(task).unwrap();
        assert_eq!((info.status, &*info.message), (TaskStatus::Failed, "its client is lost"));
    }
    assert_eq!(rig.master.task(of_another).unwrap().status, TaskStatus::Pending);
}

#[test]
fn a_drain_ends_when_its_client_is_lost() {
    let rig = rig();
    let (from, to) = (vec![name(1)], vec![name(2)]);
    let request = DrainRequest { segments: &from, targets: &to, max_concurrency: 4 };
    let job = rig.master.drain_start(&request).unwrap();
    rig.alive_for(1.0);
    assert_eq!(rig.master.fetch_tasks(client(1), 9).len(), 1);
    without(&rig, 1, 12);
    assert_eq!(rig.master.drain(job).unwrap().status, DrainStatus::Failed);
}

#[test]
fn a_promotion_ends_with_its_client() {
    let promotion = Some(PromotionOptions { threshold: 1, queue_limit: 9, per_heartbeat: 9 });
    let disks = Some(DiskOptions { promotion, ..DiskOptions::default() });
    for unmounts in [false, true] {
        let rig = rig_with(MasterOptions { disks: disks.clone(), ..MasterOptions::default() });
        rig.master.mount_disk(client(4), true).unwrap();
        let item = OffloadItem { tenant: "default".into(), key: "cold".into(), size: 100 };
        let endpoint = "disk4:1".to_owned();
        let place = StoredAt { bucket: 0, offset: 0, key_size: 0, data_size: 100, endpoint };
        rig.master.offloaded(client(4), &[item], &[place]).unwrap();
        rig.locate("cold").unwrap();
        assert_eq!(rig.master.to_promote(client(4)).unwrap().len(), 1);
        rig.master.promotion_start(client(4), b"cold", 100, &[&name(2)]).unwrap();
        assert_eq!(rig.remove("cold", true), Err(ReplicaIsNotReady));
        match unmounts {
            true => rig.master.unmount_disk(client(4)).unwrap(),
            false => without(&rig, 4, 11),
        }
        assert_eq!(rig.put(9, "cold", 200).map(|replicas| replicas.len()), Ok(1));
        let late = rig.master.promoted(client(4), b"cold").map_err(|error| error.code());
        assert_eq!(late, Err(ReplicaIsNotReady));
        assert!(used_in(&rig, 2) > 0);
        rig.master.remove_all(true);
        rig.alive_for(601.0);
        assert_eq!(rig.used(), 0);
    }
}

#[test]
fn many_copies_end_together() {
    let rig = rig();
    let keys: BTreeSet<String> = (0..6).map(|number| format!("k{number}")).collect();
    for key in &keys {
        put_twice(&rig, key);
        rig.master.copy_start(client(1), key.as_bytes(), &name(1), &[&name(2)]).unwrap();
        rig.master.replication_end(client(1), Copy, key.as_bytes()).unwrap();
        rig.master.copy_start(client(1), key.as_bytes(), &name(1), &[&name(4)]).unwrap();
    }
    without(&rig, 1, 11);
    rig.master.remove_all(true);
    assert_eq!(rig.master.stats().keys, 0);
    rig.alive_for(601.0);
    assert_eq!(rig.used(), 0);
}
