//! Snapshots that are written while owners return.

use std::cell::Cell;

use crate::common::rig::{KIB, MIB, Rig, client, segment};
use crate::removals::{Owner, another, next_with, on, snapshot};
use mooncake_core::error::ErrorCode::ObjectAlreadyExists;
use mooncake_core::replica::ReplicateConfig;
use mooncake_store::api::WriteMode;
use mooncake_store::master::Snapshot;

/// Writes a snapshot. Calls `beside` with the number of each part when it is written.
fn snapshot_beside(rig: &Rig, mut beside: impl FnMut(usize)) -> Snapshot {
    let (written, mut bytes) = (Cell::new(0), Vec::new());
    let write = |more: &[u8]| {
        bytes.extend_from_slice(more);
        written.set(written.get() + 1);
        beside(written.get());
        Ok(())
    };
    rig.master.snapshot(write).unwrap();
    assert!(written.get() > 3, "the snapshot was complete before");
    Snapshot::read(&bytes).unwrap()
}

/// Fills many slots of each shard, so that a visit of the directory has several parts.
fn fill(rig: &Rig, count: usize) {
    rig.mount(8, 64 * MIB);
    (0..count).for_each(|number| drop(rig.put_with(9, &format!("x{number}"), 64, &on_large()).unwrap()));
}

fn on_large() -> ReplicateConfig {
    let preferred_segments = vec![segment(8, 64 * MIB).name];
    ReplicateConfig { preferred_segments, ..ReplicateConfig::default() }
}

fn keys(rig: &Rig, count: usize) {
    (0..count).for_each(|number| drop(rig.put_with(9, &format!("k{number}"), 64, &on(1)).unwrap()));
}

/// An owner returns when some of the shards have been visited.
#[test]
fn objects_that_are_announced_during_a_snapshot_are_in_it() {
    let rig = another(3);
    let mut owner = Owner::join(&rig, 1);
    keys(&rig, 400);
    owner.hear(&rig);
    let second = another(4);
    fill(&second, 9000);
    owner.remount(&second);
    let written = snapshot_beside(&second, |part| {
        assert!(part != 2 || owner.announce(&second).iter().all(Result::is_ok));
    });
    let third = next_with(written, 5);
    let lost = owner.returns(&third).iter().filter(|outcome| outcome.is_err()).count();
    assert_eq!(lost, 0, "of 400 objects");
}

/// The later of two values returns, and the snapshot before has the earlier one.
#[test]
fn a_value_that_is_announced_during_a_snapshot_replaces_the_earlier_one() {
    for part in 1..=3 {
        let rig = another(3);
        let (mut a, mut b) = (Owner::join(&rig, 1), Owner::join(&rig, 2));
        rig.put_with(9, "k", 4 * KIB, &on(1)).unwrap();
        a.hear(&rig);
        let first = snapshot(&rig);
        rig.start_with(9, "k", 8 * KIB, WriteMode::Upsert, &on(2)).unwrap();
        rig.end(9, "k").unwrap();
        rig.put_with(9, "new", 4 * KIB, &on(2)).unwrap();
        b.hear(&rig);
        let second = next_with(first, 4);
        b.remount(&second);
        let written = snapshot_beside(&second, |now| {
            assert!(now != part || b.announce(&second) == [Ok(()); 2]);
        });
        let third = next_with(written, 5);
        assert_eq!(b.returns(&third), [Ok(()); 2], "part {part}");
        assert_eq!(a.returns(&third), [Err(ObjectAlreadyExists)], "part {part}");
        assert_eq!(third.locate("k").unwrap().replicas[0].location.size(), 8 * KIB);
    }
}

/// The process of a segment file ends before the visit of its objects, and the next one announces
/// them afterwards.
#[test]
fn objects_that_are_handed_over_during_a_snapshot_are_in_it() {
    let rig = another(3);
    let mut owner = Owner::join(&rig, 1);
    keys(&rig, 200);
    fill(&rig, 9000);
    owner.hear(&rig);
    let written = snapshot_beside(&rig, |part| match part {
        2 => {
            rig.master.hand_over(client(1), owner.segment.id).unwrap();
            rig.master.tick();
        }
        3 => {
            owner.take_over(&rig, 11);
            assert!(owner.announce(&rig).iter().all(Result::is_ok));
        }
        _ => {}
    });
    let next = next_with(written, 4);
    let lost = owner.returns(&next).iter().filter(|outcome| outcome.is_err()).count();
    assert_eq!(lost, 0, "of 200 objects");
}
