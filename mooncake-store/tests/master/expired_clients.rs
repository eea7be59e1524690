//! Clients that return to the same master after their heartbeat timeout: unchanged objects are
//! served again.

use std::collections::BTreeSet;

use crate::common::rig::{KIB, MIB, Rig, client};
use mooncake_core::alloc::Extent;
use mooncake_core::error::ErrorCode;
use mooncake_core::replica::{ReplicateConfig, Segment};
use mooncake_store::protocol::wire::StoredReplica;

/// Returns the replicas that the master lists for a segment.
fn listed(rig: &Rig, who: u64, segment: &Segment) -> Vec<StoredReplica> {
    let (mut after, mut stored) = (0, Vec::new());
    loop {
        let page = rig.master.expired(client(who), segment.id, after);
        stored.extend(page.changes.into_iter().filter_map(|change| change.stored));
        if page.whole {
            return stored;
        }
        assert!(page.next > after);
        after = page.next;
    }
}

/// Remounts a segment at other addresses, as memory that a client allocated itself.
fn returns(rig: &Rig, who: u64, segment: &Segment, stored: &[StoredReplica]) -> Vec<Result<(), ErrorCode>> {
    let moved = Segment { base: segment.base + (1 << 36), ..segment.clone() };
    rig.master.mount_with_objects(client(who), &moved).unwrap();
    let extents: Vec<_> = stored
        .iter()
        .map(|stored| Extent { offset: stored.offset, len: stored.len.next_multiple_of(64) })
        .collect();
    rig.master.reserve_extents(client(who), segment.id, &extents, true).unwrap();
    let announce = |stored| rig.master.announce_expired(client(who), stored).map_err(|error| error.code());
    let outcomes = stored.iter().map(announce).collect();
    rig.master.release_reserved(client(who), segment.id).unwrap();
    outcomes
}

fn keys(stored: &[StoredReplica]) -> BTreeSet<&str> {
    stored.iter().map(|stored| std::str::from_utf8(&stored.key).unwrap()).collect()
}

#[test]
fn untouched_objects_are_served_again() {
    let rig = Rig::new();
    let segment = rig.mount(1, MIB);
    for key in ["kept", "removed", "replaced", "rewritten", "cleared"] {
        rig.put(1, key, 4 * KIB).unwrap();
    }
    rig.master.tick();
    rig.clock.advance(rig.master.options().client_ttl);
    rig.mount(2, MIB);
    rig.master.tick();
    assert!(!rig.has("kept"), "the client is taken for dead");
    assert_eq!(rig.remove("removed", true), Err(ErrorCode::ObjectNotFound), "a loss is a miss");
    rig.put(2, "replaced", 100).unwrap();
    rig.put(2, "rewritten", 100).unwrap();
    rig.remove("rewritten", true).unwrap();
    rig.master.clear_replicas(&[b"cleared"], client(1), "");

    let stored = listed(&rig, 1, &segment);
    assert_eq!(keys(&stored), ["kept"].into());
    assert_eq!(returns(&rig, 1, &segment, &stored), [Ok(())]);
    assert!(rig.has("kept"));
    assert_eq!(
        rig.locate("kept").unwrap().replicas[0].location.memory().unwrap().address >> 36,
        (2 << 4) + 1
    );
    assert!(!rig.has("removed") && !rig.has("rewritten") && !rig.has("cleared"));
    assert_eq!(rig.locate("replaced").unwrap().replicas[0].location.memory().unwrap().size, 100);
    assert!(listed(&rig, 1, &segment).is_empty());
}

/// An object that is removed after it was listed does not return: the list of the master counts,
/// not that of the client.
#[test]
fn what_is_removed_after_it_was_listed_stays_away() {
    let rig = Rig::new();
    let segment = rig.mount(1, MIB);
    for number in 0..8 {
        rig.put(1, &format!("k{number}"), 4 * KIB).unwrap();
    }
    rig.pass(10.0);
    let stored = listed(&rig, 1, &segment);
    assert_eq!(stored.len(), 8);
    rig.master.remove_matching("^k[0-3]$", true).unwrap();
    rig.mount(2, MIB);
    rig.put(2, "k4", 64).unwrap();
    rig.remove("k5", false).unwrap_err();
    let outcomes = returns(&rig, 1, &segment, &stored);
    for (stored, outcome) in stored.iter().zip(outcomes) {
        let untouched = stored.key == b"k6" || stored.key == b"k7";
        let expected = if untouched { Ok(()) } else { Err(ErrorCode::ObjectAlreadyExists) };
        assert_eq!(outcome, expected, "{}", stored.key.escape_ascii());
        assert_eq!(rig.has(std::str::from_utf8(&stored.key).unwrap()), untouched || stored.key == b"k4");
    }
    rig.master.remove_all(true);
    assert_eq!(rig.used(), rig.master.stats().resting(), "the space of what was refused is free");
}

#[test]
fn all_replicas_come_back_one_by_one() {
    let rig = Rig::new();
    let (first, second) = (rig.mount(1, MIB), rig.mount(2, MIB));
    let twice = ReplicateConfig { replicas: 2, ..ReplicateConfig::default() };
    rig.put_with(1, "twice", 4 * KIB, &twice).unwrap();
    rig.pass(10.0);
    for (who, segment, replicas) in [(1, &first, 1), (2, &second, 2)] {
        let stored = listed(&rig, who, segment);
        assert_eq!(returns(&rig, who, segment, &stored), [Ok(())]);
        assert_eq!(rig.locate("twice").unwrap().replicas.len(), replicas);
    }
}

#[test]
fn the_list_ends_after_ten_minutes_and_a_segment_that_was_taken_back_has_none() {
    let rig = Rig::new();
    let segment = rig.mount(1, MIB);
    rig.put(1, "k", 4 * KIB).unwrap();
    rig.pass(10.0);
    assert_eq!(listed(&rig, 1, &segment).len(), 1);
    let stored = listed(&rig, 1, &segment);
    rig.pass(601.0);
    rig.pass(1.1);
    assert!(listed(&rig, 1, &segment).is_empty());
    assert_eq!(returns(&rig, 1, &segment, &stored), [Err(ErrorCode::ObjectAlreadyExists)]);
    rig.put(1, "l", 4 * KIB).unwrap();
    rig.master.unmount(client(1), segment.id).unwrap();
    rig.pass(1.1);
    assert!(listed(&rig, 1, &segment).is_empty());
}
