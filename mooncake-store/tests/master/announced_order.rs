//! Two values of earlier masters: the later one counts, whatever happens to the earlier one when it
//! is announced.

use crate::common::rig::{KIB, MIB, Rig, client, segment};
use crate::removals::{Owner, another, next_with, on, snapshot, with_options};
use mooncake_core::error::ErrorCode::{InvalidParams, ObjectAlreadyExists};
use mooncake_store::api::WriteMode;
use mooncake_store::master::{DiskOptions, MasterOptions, PromotionOptions};
use mooncake_store::protocol::wire::{OffloadItem, StoredAt, TaskKind};

fn size(rig: &Rig) -> Option<u64> {
    rig.locate("k").ok().map(|list| list.replicas[0].location.size())
}

/// Begins a copy or move of "k" from the segment of client 1 to that of client 3.
fn begin(rig: &Rig, kind: TaskKind) {
    let (from, to) = (segment(1, MIB).name, segment(3, MIB).name);
    match kind {
        TaskKind::Copy => drop(rig.master.copy_start(client(3), b"k", &from, &[&to]).unwrap()),
        _ => drop(rig.master.move_start(client(3), b"k", &from, &to).unwrap()),
    }
}

#[test]
fn the_value_of_the_later_master_counts_while_the_earlier_one_is_copied() {
    for kind in [TaskKind::Copy, TaskKind::Move] {
        let rig = another(3);
        let (mut a, mut b) = (Owner::join(&rig, 1), Owner::join(&rig, 2));
        rig.put_with(9, "k", 4 * KIB, &on(1)).unwrap();
        a.hear(&rig);
        let first = snapshot(&rig);
        let second = next_with(first.clone(), 4);
        b.remount(&second);
        second.start_with(9, "k", 8 * KIB, WriteMode::Upsert, &on(2)).unwrap();
        second.end(9, "k").unwrap();
        b.hear(&second);
        let third = next_with(first, 5);
        third.mount(3, MIB);
        assert_eq!(a.returns(&third), [Ok(())]);
        begin(&third, kind);
        assert_eq!(b.returns(&third), [Ok(())]);
        assert_eq!(size(&third), Some(8 * KIB));
        assert!(third.master.replication_end(client(3), kind, b"k").is_err(), "it copied the earlier value");
        assert_eq!(size(&third), Some(8 * KIB));
        assert_eq!(third.locate("k").unwrap().replicas.len(), 1);
        // The space of the copy, and that of the earlier value, are free after a while.
        third.alive_for(700.0);
        third.put_with(9, "large", MIB, &on(3)).unwrap();
        third.put_with(9, "other", MIB, &on(1)).unwrap();
    }
}

#[test]
fn two_values_of_unknown_order_are_dropped_while_one_is_copied() {
    for kind in [TaskKind::Copy, TaskKind::Move] {
        let (one, two) = (another(3), another(4));
        let (mut a, mut b) = (Owner::join(&one, 1), Owner::join(&two, 2));
        one.put_with(9, "k", 4 * KIB, &on(1)).unwrap();
        two.put_with(9, "k", 8 * KIB, &on(2)).unwrap();
        a.hear(&one);
        b.hear(&two);
        let third = another(5);
        third.mount(3, MIB);
        assert_eq!(a.returns(&third), [Ok(())]);
        begin(&third, kind);
        assert_eq!(b.returns(&third), [Err(ObjectAlreadyExists)]);
        assert!(!third.has("k"), "both are to be dropped");
        assert!(third.master.replication_end(client(3), kind, b"k").is_err());
        assert_eq!(a.announce(&third), [Err(InvalidParams)], "its space was taken");
        third.put(9, "k", 64).unwrap();
    }
}

/// A promotion of a value that client 4 has on its disk.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Promotion {
    None,
    Begun,
    Made,
}

const ON_DISK: i64 = 100;

fn with_disks(seed: u64) -> Rig {
    let promotion = Some(PromotionOptions { threshold: 1, queue_limit: 9, per_heartbeat: 9 });
    let disks = Some(DiskOptions { promotion, ..DiskOptions::default() });
    with_options(seed, MasterOptions { disks, high_watermark: 1.0, ..MasterOptions::default() })
}

fn find_on_disk(rig: &Rig) {
    rig.mount(4, MIB);
    rig.master.mount_disk(client(4), true).unwrap();
    let item = OffloadItem { tenant: "default".into(), key: "k".into(), size: ON_DISK };
    let endpoint = "disk4:1".into();
    let place = StoredAt { bucket: 7, offset: 1, key_size: 1, data_size: ON_DISK, endpoint };
    rig.master.offloaded(client(4), &[item], &[place]).unwrap();
}

fn promote(rig: &Rig, promotion: Promotion) {
    if promotion == Promotion::None {
        return;
    }
    rig.locate("k").unwrap();
    assert_eq!(rig.master.to_promote(client(4)).unwrap().len(), 1);
    rig.master.promotion_start(client(4), b"k", ON_DISK as u64, &[&segment(4, MIB).name]).unwrap();
    if promotion == Promotion::Made {
        rig.master.promoted(client(4), b"k").unwrap();
    }
}

/// A disk may hold an earlier value than the one that an owner of memory announces.
#[test]
fn an_announced_value_counts_although_one_on_a_disk_is_promoted() {
    for promotion in [Promotion::None, Promotion::Begun, Promotion::Made] {
        let rig = with_disks(3);
        let mut b = Owner::join(&rig, 2);
        rig.put_with(9, "k", 4 * KIB, &on(2)).unwrap();
        b.hear(&rig);
        let next = with_disks(4);
        find_on_disk(&next);
        promote(&next, promotion);
        assert_eq!(b.returns(&next), [Ok(())], "{promotion:?}");
        assert_eq!(size(&next), Some(4 * KIB), "{promotion:?}");
        if promotion == Promotion::Begun {
            assert!(next.master.promoted(client(4), b"k").is_err());
            assert_eq!(size(&next), Some(4 * KIB));
        }
        // The next master has it from the snapshot.
        let third = with_disks(5);
        third.master.recall(snapshot(&next));
        assert_eq!(b.returns(&third), [Ok(())], "{promotion:?}");
        assert_eq!(size(&third), Some(4 * KIB), "{promotion:?}");
    }
}

/// The value on the disk is one that this master wrote.
#[test]
fn an_announced_value_is_older_than_a_promoted_one_of_this_master() {
    for promotion in [Promotion::None, Promotion::Begun, Promotion::Made] {
        let rig = with_disks(3);
        let mut b = Owner::join(&rig, 2);
        rig.put_with(9, "k", 4 * KIB, &on(2)).unwrap();
        b.hear(&rig);
        let next = with_disks(4);
        next.mount(4, MIB);
        next.master.mount_disk(client(4), true).unwrap();
        next.master.disk_work(client(4), true, 0).unwrap();
        next.master.report_offloaded(client(4), 0, &[], &[]).unwrap();
        next.put(9, "k", ON_DISK as u64).unwrap();
        let work = next.master.disk_work(client(4), false, 0).unwrap();
        assert_eq!(work.write.len(), 1);
        let endpoint = "disk4:1".into();
        let place = StoredAt { bucket: 7, offset: 1, key_size: 1, data_size: ON_DISK, endpoint };
        next.master.report_offloaded(client(4), work.number, &work.write, &[place]).unwrap();
        // The value leaves memory.
        next.put(9, "large", MIB).unwrap();
        next.remove("large", true).unwrap();
        next.alive_for(30.0);
        promote(&next, promotion);
        assert_eq!(b.returns(&next), [Err(ObjectAlreadyExists)], "{promotion:?}");
        if promotion == Promotion::Begun {
            next.master.promoted(client(4), b"k").unwrap();
        }
        assert_eq!(size(&next), Some(ON_DISK as u64));
    }
}
