//! Inventory of segments: the pages for their owners, and announcements to a master without data.

use crate::common::rig::{KIB, MIB, Rig, client, segment};
use mooncake_core::alloc::Extent;
use mooncake_core::error::ErrorCode;
use mooncake_core::ids::SegmentId;
use mooncake_core::replica::{ReplicaType, ReplicateConfig, Segment, SoftPin};
use mooncake_store::api::WriteMode;
use mooncake_store::master::{Put, Writer};
use mooncake_store::protocol::wire::{InventoryPage, StoredReplica};

/// Returns the whole inventory in order.
fn inventory(rig: &Rig, who: u64, after: u64) -> InventoryPage {
    let page = rig.master.inventory(client(who), after);
    assert!(page.whole);
    page
}

fn stored(page: &InventoryPage) -> Vec<StoredReplica> {
    let mut there: Vec<(u64, StoredReplica)> = Vec::new();
    for change in &page.changes {
        match &change.stored {
            Some(stored) => there.push((change.replica.0, stored.clone())),
            None => there.retain(|(id, _)| *id != change.replica.0),
        }
    }
    there.into_iter().map(|(_, stored)| stored).collect()
}

/// Returns a segment with `keys` of 4 KiB of another master, as its owner records it.
fn before(keys: &[&str]) -> (Segment, Vec<StoredReplica>) {
    let rig = Rig::new();
    inventory(&rig, 1, 0);
    let segment = rig.mount(1, MIB);
    for key in keys {
        rig.put(1, key, 4 * KIB).unwrap();
    }
    // Masters of these tests draw the same numbers; real masters do not.
    let other = |stored| StoredReplica { epoch: 1, ..stored };
    (segment, stored(&inventory(&rig, 1, 0)).into_iter().map(other).collect())
}

fn extent(stored: &StoredReplica) -> Extent {
    Extent { offset: stored.offset, len: stored.len.next_multiple_of(64) }
}

fn mount_with_objects(rig: &Rig, who: u64, segment: &Segment, kept: &[StoredReplica]) {
    let extents: Vec<_> = kept.iter().map(extent).collect();
    rig.master.mount_with_objects(client(who), segment).unwrap();
    rig.master.reserve_extents(client(who), segment.id, &extents, true).unwrap();
}

fn announce(rig: &Rig, who: u64, stored: &StoredReplica) -> Result<(), ErrorCode> {
    rig.master.announce(client(who), stored).map_err(|error| error.code())
}

#[test]
fn a_ledger_tells_what_came_and_went_once() {
    let rig = Rig::new();
    assert!(inventory(&rig, 1, 0).changes.is_empty());
    rig.mount(1, MIB);
    for key in ["a", "b", "c"] {
        rig.put(1, key, 4 * KIB).unwrap();
    }
    let first = inventory(&rig, 1, 0);
    assert_eq!(stored(&first).len(), 3);
    assert_eq!(inventory(&rig, 1, 0), first, "an answer that was lost is given again");
    rig.master.remove(b"b", true).unwrap();
    let second = inventory(&rig, 1, first.next);
    assert_eq!((second.changes.len(), second.changes[0].stored.is_none()), (1, true));
    assert!(inventory(&rig, 1, second.next).changes.is_empty());
    let lost = inventory(&rig, 1, first.next);
    assert!(lost.lost && lost.changes.is_empty(), "what was heard and forgotten cannot be told again");
    rig.put(1, "d", 4 * KIB).unwrap();
    rig.master.remove(b"d", true).unwrap();
    assert!(inventory(&rig, 1, lost.next).changes.is_empty(), "it came and went unheard");
}

#[test]
fn a_reported_object_that_left_before_the_acknowledgement_is_reported_gone() {
    let rig = Rig::new();
    inventory(&rig, 1, 0);
    rig.mount(1, MIB);
    rig.put(1, "a", 4 * KIB).unwrap();
    let told = inventory(&rig, 1, 0);
    rig.master.remove(b"a", true).unwrap();
    rig.put(1, "b", 4 * KIB).unwrap();
    let then = inventory(&rig, 1, told.next);
    assert!(!then.lost);
    assert_eq!(then.changes[0].replica, told.changes[0].replica);
    assert_eq!(then.changes[0].stored, None, "or its owner would sum up what lies there now");
    assert_eq!(stored(&then)[0].key, b"b");
}

#[test]
fn announced_objects_are_served_and_keep_their_space() {
    let (segment, kept) = before(&["a", "b"]);
    let rig = Rig::new();
    rig.master.mount_with_objects(client(1), &segment).unwrap();
    assert_eq!(rig.start(2, "x", 4 * KIB), Err(ErrorCode::NoAvailableHandle), "it is not open yet");
    mount_with_objects(&rig, 1, &segment, &kept);
    let free = rig.put(2, "x", MIB - 8 * KIB);
    assert_eq!(free.map(drop), Ok(()), "all but what is kept is free");
    assert!(!rig.master.exists(b"a"));
    announce(&rig, 1, &kept[0]).unwrap();
    announce(&rig, 1, &kept[0]).unwrap();
    assert!(rig.master.exists(b"a") && !rig.master.exists(b"b"));
    let at = rig.master.locate(b"a").unwrap();
    assert_eq!(at.replicas.len(), 1);
    rig.master.release_reserved(client(1), segment.id).unwrap();
    assert_eq!(announce(&rig, 1, &kept[1]), Err(ErrorCode::InvalidParams), "its space is not kept any more");
    rig.put(2, "y", 4 * KIB).unwrap();
}

#[test]
fn what_is_written_meanwhile_counts_for_more() {
    let (segment, kept) = before(&["a", "b"]);
    let rig = Rig::new();
    mount_with_objects(&rig, 1, &segment, &kept);
    rig.put(2, "a", 100).unwrap();
    rig.start(2, "b", 100).unwrap();
    for kept in &kept {
        assert_eq!(announce(&rig, 1, kept), Err(ErrorCode::ObjectAlreadyExists));
    }
    assert_eq!(rig.master.stats().used(), 2 * 128, "the space of what was refused is free");
}

/// Announces the same key from two owners.
fn announced_twice(change: impl Fn(&mut StoredReplica)) -> (Rig, Vec<StoredReplica>) {
    let (segment_1, mut kept) = before(&["a"]);
    let segment_2 = segment(2, MIB);
    let mut other = StoredReplica { segment: segment_2.id, ..kept[0].clone() };
    change(&mut other);
    kept.push(other);
    let rig = Rig::new();
    mount_with_objects(&rig, 1, &segment_1, &kept[..1]);
    mount_with_objects(&rig, 2, &segment_2, &kept[1..]);
    (rig, kept)
}

#[test]
fn of_two_owners_the_later_value_counts() {
    let (rig, kept) = announced_twice(|_| {});
    announce(&rig, 1, &kept[0]).unwrap();
    announce(&rig, 2, &kept[1]).unwrap();
    assert_eq!(rig.master.locate(b"a").unwrap().replicas.len(), 2, "replicas of one write");

    let (rig, kept) = announced_twice(|other| other.number += 1);
    announce(&rig, 1, &kept[0]).unwrap();
    announce(&rig, 2, &kept[1]).unwrap();
    let there = rig.master.locate(b"a").unwrap().replicas;
    assert_eq!(there.len(), 1);
    assert_eq!(announce(&rig, 1, &kept[0]), Err(ErrorCode::InvalidParams));

    let (rig, kept) = announced_twice(|other| other.number -= 1);
    announce(&rig, 1, &kept[0]).unwrap();
    assert_eq!(announce(&rig, 2, &kept[1]), Err(ErrorCode::ObjectAlreadyExists));
    assert!(rig.master.exists(b"a"));

    let (rig, kept) = announced_twice(|other| other.epoch += 1);
    announce(&rig, 1, &kept[0]).unwrap();
    assert_eq!(announce(&rig, 2, &kept[1]), Err(ErrorCode::ObjectAlreadyExists));
    assert!(!rig.master.exists(b"a"), "there is no telling which is the later one");
}

#[test]
fn nonsense_is_refused_by_name() {
    let (segment, kept) = before(&["a"]);
    let rig = Rig::new();
    let one = &kept[0];
    assert_eq!(announce(&rig, 1, one), Err(ErrorCode::SegmentNotFound));
    mount_with_objects(&rig, 1, &segment, &kept);
    assert_eq!(announce(&rig, 2, one), Err(ErrorCode::IllegalClient));
    for wrong in [
        StoredReplica { offset: one.offset + 64, ..one.clone() },
        StoredReplica { len: one.len + 64, ..one.clone() },
        StoredReplica { len: 0, ..one.clone() },
        StoredReplica { len: u64::MAX, ..one.clone() },
        StoredReplica { key: Vec::new(), ..one.clone() },
        StoredReplica { key: vec![b'x'; 1 << 20], ..one.clone() },
    ] {
        assert_eq!(announce(&rig, 1, &wrong), Err(ErrorCode::InvalidParams), "{wrong:?}");
    }
    let keep = |id: SegmentId, offset, len| {
        let reserved = rig.master.reserve_extents(client(1), id, &[Extent { offset, len }], true);
        reserved.map_err(|error| error.code())
    };
    assert_eq!(keep(segment.id, one.offset, 4 * KIB), Ok(()), "twice is as good as once");
    for (offset, len) in [
        (one.offset + 64, 64),
        (MIB - 64, 128),
        (u64::MAX - 63, 64),
        (64 * KIB + 1, 64),
        (64 * KIB, 65),
        (64 * KIB, 0),
    ] {
        assert_eq!(keep(segment.id, offset, len), Err(ErrorCode::InvalidParams), "{len} at {offset}");
    }
    assert_eq!(keep(SegmentId::default(), 0, 64), Err(ErrorCode::SegmentNotFound));
    announce(&rig, 1, one).unwrap();
    rig.master.remove(b"a", true).unwrap();
    assert_eq!(rig.master.stats().used(), 0);
}

#[test]
fn an_unsent_number_means_that_all_is_lost() {
    let rig = Rig::new();
    for after in [0, 5, u64::MAX - 1, u64::MAX] {
        let page = rig.master.inventory(client(1), after);
        assert_eq!(page.lost, after > 0, "{after}");
    }
}

/// Attributes of an object besides its location reach the next master with it.
#[test]
fn pins_groups_and_checksums_come_along() {
    let rig = Rig::without_watermark();
    inventory(&rig, 1, 0);
    let segment = rig.mount(1, MIB);
    let pinned = ReplicateConfig { hard_pin: true, ..ReplicateConfig::default() };
    let softly = ReplicateConfig { soft_pin: SoftPin::Enable, ..ReplicateConfig::default() };
    let plain = ReplicateConfig::default();
    for (key, group, config) in
        [("pinned", "", &pinned), ("softly", "", &softly), ("g0", "g", &plain), ("g1", "g", &plain)]
    {
        let (writer, mode) = (client(1).into(), WriteMode::Put);
        let put = Put { writer, mode, key: key.as_bytes(), len: 64 * KIB, config, group, session: None };
        rig.master.put_start(&put).unwrap();
        rig.master.put_end(Writer::from(client(1)), key.as_bytes(), Some(7), ReplicaType::All).unwrap();
    }
    rig.put(1, "plain", 64 * KIB).unwrap();
    let kept: Vec<_> = stored(&inventory(&rig, 1, 0));
    assert_eq!(kept.len(), 5);

    let rig = Rig::without_watermark();
    mount_with_objects(&rig, 1, &segment, &kept);
    for kept in &kept {
        announce(&rig, 1, &StoredReplica { epoch: 1, ..kept.clone() }).unwrap();
    }
    let stats = rig.master.stats();
    assert_eq!((stats.keys, stats.soft_pinned), (5, 1));
    // A read of one object keeps its whole group.
    assert_eq!(rig.locate("g1").unwrap().checksum, Some(7));
    assert_eq!(rig.remove("g0", false), Err(ErrorCode::ObjectHasLease));
    // A pinned object is left when everything else had to be evicted.
    rig.alive_for(60.0 * 60.0);
    rig.put(2, "large", MIB - 64 * KIB).unwrap();
    let left: Vec<_> = ["pinned", "softly", "g0", "g1", "plain"].map(|key| rig.has(key)).into();
    assert_eq!(left, [true, false, false, false, false]);
}
