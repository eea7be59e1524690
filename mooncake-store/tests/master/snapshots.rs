//! Snapshots of a master, and their use by the next one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::rig::{KIB, MIB, Rig, client, segment};
use crate::drain_support::{Drains, name};
use mooncake_core::alloc::Extent;
use mooncake_core::clock::ManualClock;
use mooncake_core::error::ErrorCode;
use mooncake_core::evict::PolicyKind;
use mooncake_core::ids::Uuid;
use mooncake_core::replica::{ReplicateConfig, Segment, SegmentStatus, SoftPin};
use mooncake_core::{Error, Result};
use mooncake_store::api::WriteMode;
use mooncake_store::master::{DiskOptions, DrainStatus, Master, MasterOptions, Put, Snapshot};
use mooncake_store::protocol::metrics;
use mooncake_store::protocol::wire::{OffloadItem, StoredAt, StoredReplica, TaskReport, TaskStatus};
use proptest::prelude::*;

fn bytes_of(rig: &Rig) -> Vec<u8> {
    let mut bytes = Vec::new();
    let write = |more: &[u8]| {
        bytes.extend_from_slice(more);
        Ok(())
    };
    rig.master.snapshot(write).unwrap();
    bytes
}

fn options() -> MasterOptions {
    MasterOptions { disks: Some(DiskOptions::default()), high_watermark: 1.0, ..MasterOptions::default() }
}

/// Returns a master that draws other numbers than other rigs, under the same kind of clock.
fn another(seed: u64) -> Rig {
    let clock = Arc::new(ManualClock::new());
    clock.advance(Duration::from_secs(seed));
    let policy = PolicyKind::Lru.into();
    let master = Master::with_parts(options(), &Default::default(), &policy, clock.clone(), seed).unwrap();
    Rig { clock, master }
}

/// Returns the next master, which has read the snapshot of this one.
fn next(rig: &Rig, seed: u64) -> Rig {
    let next = another(seed);
    next.master.recall(Snapshot::read(&bytes_of(rig)).unwrap());
    next
}

/// Returns the inventory of the segment of a client.
fn inventory(rig: &Rig, who: u64) -> Vec<StoredReplica> {
    let page = rig.master.inventory(client(who), 0);
    assert!(page.whole);
    let mut there: Vec<(u64, StoredReplica)> = Vec::new();
    for change in page.changes {
        match change.stored {
            Some(stored) => there.push((change.replica.0, stored)),
            None => there.retain(|(id, _)| *id != change.replica.0),
        }
    }
    there.into_iter().map(|(_, stored)| stored).collect()
}

fn mount_with_objects(rig: &Rig, who: u64, segment: &Segment, kept: &[StoredReplica]) {
    let extent =
        |stored: &StoredReplica| Extent { offset: stored.offset, len: stored.len.next_multiple_of(64) };
    let extents: Vec<_> = kept.iter().map(extent).collect();
    rig.master.mount_with_objects(client(who), segment).unwrap();
    rig.master.reserve_extents(client(who), segment.id, &extents, true).unwrap();
}

fn announce(rig: &Rig, who: u64, stored: &StoredReplica) -> Result<(), ErrorCode> {
    rig.master.announce(client(who), stored).map_err(|error| error.code())
}

/// Returns a master with objects of all kinds, and tasks.
fn full() -> Rig {
    let rig = another(3);
    rig.master.inventory(client(1), 0);
    rig.mount(1, MIB);
    for key in ["a", "b"] {
        rig.put(1, key, 4 * KIB).unwrap();
    }
    let pinned = ReplicateConfig { hard_pin: true, soft_pin: SoftPin::Enable, ..Default::default() };
    let put = Put {
        writer: client(1).into(),
        mode: WriteMode::Put,
        key: b"pinned",
        len: KIB,
        config: &pinned,
        group: "g",
        session: None,
    };
    rig.master.put_start(&put).unwrap();
    rig.end(1, "pinned").unwrap();
    rig.start(1, "not ended", KIB).unwrap();
    rig.mount(2, MIB);
    rig.master.create_copy(b"a", &["node2:1"]).unwrap();
    rig
}

#[test]
fn what_is_written_is_read() {
    let rig = full();
    let snapshot = Snapshot::read(&bytes_of(&rig)).unwrap();
    assert_eq!((snapshot.objects(), snapshot.tasks()), (3, 1), "what is not ended is no object yet");
    assert_eq!(Snapshot::read(&snapshot.write()).unwrap(), snapshot);
    assert_eq!(Snapshot::read(&bytes_of(&another(4))).unwrap().objects(), 0);
}

#[test]
fn a_snapshot_counts_as_a_whole_or_not_at_all() {
    for whole in [bytes_of(&full()), bytes_of(&draining().0), OF_THE_FIRST_VERSION.to_vec()] {
        Snapshot::read(&whole).unwrap();
        for cut in 0..whole.len() {
            assert!(Snapshot::read(&whole[..cut]).is_err(), "cut at {cut}");
        }
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut bytes = whole.clone();
                bytes[at] ^= 1 << bit;
                assert!(Snapshot::read(&bytes).is_err(), "bit {bit} of {at} flipped");
            }
        }
        let doubled = [&whole[..], &whole[..]].concat();
        assert!(Snapshot::read(&doubled).is_err() && Snapshot::read(&[&whole[..], &[0]].concat()).is_err());
    }
}

/// Snapshot from before snapshots contained drain jobs.
const OF_THE_FIRST_VERSION: &[u8] = include_bytes!("../../../fuzz/corpus/snapshot/first");

#[test]
fn snapshots_of_the_first_version_are_read() {
    let snapshot = Snapshot::read(OF_THE_FIRST_VERSION).unwrap();
    assert_eq!((snapshot.objects(), snapshot.tasks(), snapshot.drain_jobs()), (3, 1, 0));
    assert_eq!(Snapshot::read(&snapshot.write()).unwrap(), snapshot);
    let next = another(8);
    next.master.recall(snapshot);
    assert_eq!(Snapshot::read(&bytes_of(&next)).unwrap().objects(), 3);
}

/// Returns the next master with the policy `gittins`, which has read a snapshot, and the number of
/// uses that it has learned from.
fn next_learner(snapshot: &[u8]) -> (Rig, f64) {
    let rig = Rig::with_policy(options(), PolicyKind::Gittins);
    rig.master.recall(Snapshot::read(snapshot).unwrap());
    let uses = learned_uses(&rig);
    (rig, uses)
}

fn learned_uses(rig: &Rig) -> f64 {
    let text = metrics::text(&metrics::collector("learned", "", |families| rig.master.add_metrics(families)));
    let text = text.unwrap();
    let line = text.lines().find(|line| line.starts_with("master_eviction_learned_uses "));
    line.unwrap().rsplit_once(' ').unwrap().1.parse().unwrap()
}

#[test]
fn learned_values_go_on_in_the_next_master() {
    let rig = Rig::with_policy(options(), PolicyKind::Gittins);
    rig.mount(1, MIB);
    for number in 0..100 {
        rig.put(1, &format!("key {number}"), KIB).unwrap();
    }
    assert_eq!(learned_uses(&rig), 100.0);
    let bytes = bytes_of(&rig);
    let (next, uses) = next_learner(&bytes);
    assert_eq!(uses, 100.0);
    assert_eq!(next_learner(&bytes_of(&next)).1, 100.0, "a master without uses passes them on");
    // A snapshot from before snapshots contained learned values, and one of another version.
    assert_eq!(next_learner(OF_THE_FIRST_VERSION).1, 0.0);
    let at = bytes.windows(8).position(|bytes| bytes == b"gittins1").unwrap();
    let mut other = bytes.clone();
    other[at + 7] = b'0';
    seal_head(&mut other);
    let (next, uses) = next_learner(&other);
    assert_eq!(uses, 0.0);
    next.mount(1, MIB);
    next.put(1, "key", KIB).unwrap();
    assert_eq!(learned_uses(&next), 1.0, "the policy learns anew");
    // A policy that learns nothing ignores them.
    another(9).master.recall(Snapshot::read(&bytes).unwrap());
}

/// Corrects the checksum of the head of a snapshot.
fn seal_head(bytes: &mut [u8]) {
    let len = u32::from_le_bytes(*bytes[8..].first_chunk().unwrap()) as usize;
    let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Ecma182, &bytes[20..20 + len]);
    bytes[12..20].copy_from_slice(&sum.to_le_bytes());
}

proptest! {
    #[test]
    fn bytes_of_any_kind_are_read_or_refused(
        tail in proptest::collection::vec(any::<u8>(), 0..300), keep in 0usize..400,
    ) {
        let whole = bytes_of(&full());
        let _ = Snapshot::read(&tail);
        let kept = &whole[..keep.min(whole.len())];
        prop_assert!(tail.is_empty() || Snapshot::read(&[kept, &tail].concat()).is_err());
    }
}

#[test]
fn writing_ends_on_request() {
    let rig = full();
    let mut calls = 0;
    let outcome = rig.master.snapshot(|_| {
        calls += 1;
        if calls == 2 { Err(Error::internal("enough")) } else { Ok(()) }
    });
    assert_eq!((outcome.unwrap_err().message(), calls), ("enough", 2));
}

#[test]
fn nothing_is_readable_before_its_owner_came() {
    let rig = full();
    let stored = inventory(&rig, 1);
    assert!(!stored.is_empty());
    let next = next(&rig, 8);
    for key in ["a", "b", "pinned"] {
        assert!(!next.has(key) && next.locate(key).is_err());
    }
    mount_with_objects(&next, 1, &segment(1, MIB), &stored);
    assert!(!next.has("a") && !next.has("b"));
    for stored in &stored {
        announce(&next, 1, stored).unwrap();
        assert!(next.has(std::str::from_utf8(&stored.key).unwrap()));
    }
}

/// Owners receive removals with a delay, or never.
#[test]
fn what_was_removed_or_replaced_stays_so() {
    let rig = another(3);
    rig.master.inventory(client(1), 0);
    let segment = rig.mount(1, MIB);
    for key in ["kept", "removed", "replaced"] {
        rig.put(1, key, 4 * KIB).unwrap();
    }
    let stale = inventory(&rig, 1);
    rig.remove("removed", true).unwrap();
    rig.upsert(1, "replaced", 4 * KIB).unwrap();
    rig.end(1, "replaced").unwrap();
    let told = |next: &Rig| {
        mount_with_objects(next, 1, &segment, &stale);
        stale.iter().map(|stored| announce(next, 1, stored)).collect::<Vec<_>>()
    };
    let gone = Err(ErrorCode::ObjectAlreadyExists);
    assert_eq!(told(&another(8)), [Ok(()), Ok(()), Ok(())], "without a snapshot nobody knows");
    let second = next(&rig, 9);
    assert_eq!(told(&second), [Ok(()), gone, gone]);
    assert_eq!(second.used(), 4 * KIB, "the space of the others is free");
    // The next snapshot contains them as well, including segments that have not returned.
    let third = next(&next(&rig, 10), 11);
    assert_eq!(told(&third), [Ok(()), gone, gone]);
    assert_eq!(told(&next(&second, 12)), [Ok(()), gone, gone]);
    // Objects from after the snapshot are accepted.
    let late = another(13);
    late.master.recall(Snapshot::read(&bytes_of(&rig)).unwrap());
    rig.put(1, "later", KIB).unwrap();
    let stored = inventory(&rig, 1);
    mount_with_objects(&late, 1, &segment, &stored);
    assert!(stored.iter().all(|stored| announce(&late, 1, stored).is_ok()) && late.has("later"));
}

#[test]
fn a_value_that_is_not_the_one_of_its_number_is_refused() {
    let rig = full();
    let stored = inventory(&rig, 1).remove(0);
    let next = next(&rig, 8);
    let other = StoredReplica { len: stored.len + 1, ..stored.clone() };
    mount_with_objects(&next, 1, &segment(1, MIB), std::slice::from_ref(&other));
    assert_eq!(announce(&next, 1, &other), Err(ErrorCode::InvalidParams));
    assert_eq!(next.used(), 0);
}

#[test]
fn objects_go_in_the_order_in_which_they_were_used() {
    let rig = another(3);
    rig.master.inventory(client(1), 0);
    let segment = rig.mount(1, 16 * KIB);
    for key in ["a", "b", "c", "d"] {
        rig.put(1, key, 4 * KIB).unwrap();
    }
    for key in ["b", "d", "a"] {
        rig.locate(key).unwrap();
    }
    let mut stored = inventory(&rig, 1);
    // The order does not depend on that of the snapshot.
    stored.sort_by(|a, b| b.key.cmp(&a.key));
    let next = next(&rig, 8);
    mount_with_objects(&next, 1, &segment, &stored);
    stored.iter().for_each(|stored| announce(&next, 1, stored).unwrap());
    let there = || ["a", "b", "c", "d"].into_iter().filter(|key| next.has(key)).collect::<Vec<_>>();
    let mut left = vec![there()];
    for new in ["e", "f", "g"] {
        next.put(1, new, 4 * KIB).unwrap();
        left.push(there());
    }
    assert_eq!(left, [vec!["a", "b", "c", "d"], vec!["a", "b", "d"], vec!["a", "d"], vec!["a"]]);
    assert!(next.has("e") && next.has("g"), "what is new is newer than all of that");
}

#[test]
fn objects_on_disks_keep_pins_and_groups() {
    let rig = another(3);
    let item = |key: &str| OffloadItem { tenant: "default".into(), key: key.into(), size: KIB.cast_signed() };
    let place = || StoredAt { data_size: KIB.cast_signed(), endpoint: "10.0.0.1:1".into(), ..stored_at() };
    rig.mount(1, MIB);
    rig.master.mount_disk(client(1), true).unwrap();
    let pinned = ReplicateConfig { soft_pin: SoftPin::Enable, ..Default::default() };
    let put = Put {
        writer: client(1).into(),
        mode: WriteMode::Put,
        key: b"k",
        len: KIB,
        config: &pinned,
        group: "g",
        session: None,
    };
    rig.master.put_start(&put).unwrap();
    rig.end(1, "k").unwrap();
    assert_eq!(rig.master.to_offload(client(1), true).unwrap().len(), 1);
    rig.master.offloaded(client(1), &[item("k")], &[place()]).unwrap();
    let next = next(&rig, 8);
    next.master.mount_disk(client(1), true).unwrap();
    next.master.offloaded(client(1), &[item("k"), item("unknown")], &[place(), place()]).unwrap();
    assert!(next.has("k") && !next.has("unknown"), "what the snapshot lacks may have been removed before");
    // A snapshot contains the state of the objects.
    let again = Snapshot::read(&bytes_of(&next)).unwrap();
    assert_eq!(again.objects(), 1, "nobody is waited for");
    let shown = format!("{again:?}");
    assert!(shown.contains(r#"group: "g", hard_pin: false, soft_pin_ms: 1800000"#), "{shown}");
}

fn stored_at() -> StoredAt {
    StoredAt { bucket: 0, offset: 0, key_size: 0, data_size: 0, endpoint: String::new() }
}

#[test]
fn tasks_go_on_where_they_were() {
    let rig = full();
    let begun = rig.master.fetch_tasks(client(1), 9).remove(0).id;
    let waits = rig.master.create_move(b"b", "node1:1", "node2:1").unwrap();
    let over = rig.master.create_copy(b"a", &["node2:1"]).unwrap();
    let owner = rig.master.task(over).unwrap().client;
    let report = TaskReport { id: over, status: TaskStatus::Failed, message: "no".into() };
    rig.master.complete_task(owner, &report).unwrap();
    rig.clock.advance(Duration::from_secs(100));
    let next = next(&rig, 8);
    for id in [begun, waits, over] {
        assert_eq!(next.master.task(id).unwrap(), rig.master.task(id).unwrap());
    }
    let owner = next.master.task(waits).unwrap().client;
    let before = rig.master.fetch_tasks(owner, 9);
    assert_eq!((next.master.fetch_tasks(owner, 9), before.len()), (before, 1));
    let done = TaskReport { id: begun, status: TaskStatus::Success, message: String::new() };
    next.master.complete_task(client(1), &done).unwrap();
    assert_eq!(next.master.task(begun).unwrap().status, TaskStatus::Success);
    assert!(next.master.task(Uuid::new(1, 1)).is_err());
    // A third master gives up in time the transfers whose end it never received.
    let third = another(9);
    third.master.recall(Snapshot::read(&bytes_of(&rig)).unwrap());
    third.alive_for(201.0);
    assert_eq!(third.master.task(begun).unwrap().message, "processing timeout", "of 300 s 200 were left");
    assert_eq!(third.master.task(waits).unwrap().status, TaskStatus::Processing);
}

#[test]
fn unclaimed_objects_expire_in_the_end() {
    let rig = full();
    let next = next(&rig, 8);
    assert_eq!(Snapshot::read(&bytes_of(&next)).unwrap().objects(), 3);
    next.clock.advance(Duration::from_secs(600));
    (0..4200).for_each(|_| next.pass(0.01));
    assert_eq!(Snapshot::read(&bytes_of(&next)).unwrap().objects(), 0);
}

/// Objects that exist throughout are in the snapshot, whatever is put and removed meanwhile.
#[test]
fn a_snapshot_is_taken_while_calls_go_on() {
    let rig = another(3);
    rig.mount(1, 64 * MIB);
    let name = |number: u32| format!("stays {number}");
    (0..5000).for_each(|number| drop(rig.put(1, &name(number), 64).unwrap()));
    let over = AtomicBool::new(false);
    let snapshots = std::thread::scope(|threads| {
        for who in 2..4u64 {
            let (rig, over) = (&rig, &over);
            threads.spawn(move || {
                for round in 0.. {
                    if over.load(Ordering::Relaxed) {
                        return;
                    }
                    let key = format!("{who} {}", round % 3000);
                    let _ = rig.remove(&key, true);
                    rig.put(who, &key, 64).unwrap();
                }
            });
        }
        let taken: Vec<_> = (0..10).map(|_| bytes_of(&rig)).collect();
        over.store(true, Ordering::Relaxed);
        taken
    });
    for bytes in snapshots {
        let shown = format!("{:?}", Snapshot::read(&bytes).unwrap());
        assert_eq!(shown.matches("key: [115, 116, 97, 121, 115, 32").count(), 5000);
    }
}

/// Returns a master with a segment in a drain job, two of six objects moved and two in progress; an
/// empty segment; and three finished jobs.
fn draining() -> (Rig, Uuid, [Uuid; 3]) {
    let rig = another(3);
    rig.master.inventory(client(1), 0);
    (1..=5).for_each(|number| drop(rig.mount(number, MIB)));
    let done = rig.drain(&[4], &[], 1).unwrap();
    rig.round();
    let canceled = rig.drain(&[5], &[], 1).unwrap();
    rig.master.drain_cancel(canceled).unwrap();
    let failed = rig.drain(&[5], &[], 1).unwrap();
    rig.master.unmount(client(5), segment(5, MIB).id).unwrap();
    rig.round();
    (0..6).for_each(|at| rig.put_in(1, &format!("k{at}"), KIB));
    let job = rig.drain(&[1], &[2, 3], 2).unwrap();
    rig.round();
    assert_eq!(rig.work(1).len(), 2);
    rig.round();
    (rig, job, [done, canceled, failed])
}

#[test]
fn a_drain_goes_on_once_its_segment_is_back() {
    let (rig, job, _) = draining();
    let stored = inventory(&rig, 1);
    let begun = rig.master.fetch_tasks(client(1), 1).remove(0).id;
    let before = rig.job(job);
    assert_eq!((before.succeeded, before.active, stored.len()), (2, 2, 4));
    let snapshot = Snapshot::read(&bytes_of(&rig)).unwrap();
    assert_eq!(Snapshot::read(&snapshot.write()).unwrap(), snapshot);
    // The next master would draw the same ids.
    let next = another(3);
    next.master.recall(snapshot);
    let known = |rig: &Rig| (rig.job(job).status, rig.job(job).succeeded, rig.job(job).active);
    assert_eq!(known(&next), (DrainStatus::Planning, 2, 2));
    assert_eq!((next.job(job).segments, next.job(job).created_ms), (before.segments, before.created_ms));
    (2..=3).for_each(|number| drop(next.mount(number, MIB)));
    next.alive_for(60.0);
    // The master concludes nothing from an inventory that is still incomplete.
    let source = segment(1, MIB);
    next.master.mount_with_objects(client(1), &source).unwrap();
    assert_eq!(next.state(1), SegmentStatus::Draining);
    next.alive_for(60.0);
    mount_with_objects(&next, 1, &source, &stored);
    for stored in &stored {
        next.alive_for(2.0);
        assert_eq!(known(&next), (DrainStatus::Planning, 2, 2));
        announce(&next, 1, stored).unwrap();
    }
    next.put_in(1, "late", KIB);
    assert_ne!(next.lies_in("late"), [1], "nothing new comes in");
    next.round();
    assert_eq!(known(&next), (DrainStatus::Running, 2, 2), "no more at once than were asked for");
    // A client that began a move under the previous master cannot end it.
    let lost = TaskReport { id: begun, status: TaskStatus::Failed, message: "no such copy".into() };
    next.master.complete_task(client(1), &lost).unwrap();
    for _ in 0..4 {
        next.work(1);
        next.round();
    }
    assert_eq!(known(&next), (DrainStatus::Succeeded, 6, 0));
    let (info, drained) = (next.job(job), SegmentStatus::Drained);
    assert_eq!((info.failed, info.blocked, info.migrated_bytes, next.state(1)), (0, 0, 6 * KIB, drained));
    for stored in &stored {
        assert_ne!(next.lies_in(std::str::from_utf8(&stored.key).unwrap()), [1]);
    }
}

#[test]
fn ids_of_drains_are_drawn_once() {
    let rig = another(3);
    rig.mount(1, MIB);
    let job = rig.drain(&[1], &[], 1).unwrap();
    rig.master.drain_cancel(job).unwrap();
    let next = next(&rig, 3);
    next.mount(1, MIB);
    let other = next.drain(&[1], &[], 1).unwrap();
    assert_ne!(other, job);
    assert_eq!((next.job(job).status, next.job(other).status), (DrainStatus::Canceled, DrainStatus::Created));
}

#[test]
fn drains_that_are_over_are_known_and_the_drained_stay_empty() {
    let (rig, _, over) = draining();
    let states = over.map(|id| rig.job(id).status);
    assert_eq!(states, [DrainStatus::Succeeded, DrainStatus::Canceled, DrainStatus::Failed]);
    let second = next(&rig, 8);
    // A master that has not seen the segment keeps the record in its snapshot.
    let third = next(&second, 9);
    for next in [&second, &third, &next(&third, 10)] {
        assert_eq!(over.map(|id| next.job(id)), over.map(|id| rig.job(id)));
        (4..=5).for_each(|number| drop(next.mount(number, MIB)));
        assert_eq!((next.state(4), next.state(5)), (SegmentStatus::Drained, SegmentStatus::Ok));
        next.put_in(4, "new", KIB);
        assert_eq!(next.lies_in("new"), [5]);
        next.alive_for(1.0);
        assert_eq!((next.state(4), over.map(|id| next.job(id).status)), (SegmentStatus::Drained, states));
        // Much later, an unmount and a mount make the segment usable again.
        next.alive_for(601.0);
        assert_eq!(next.state(4), SegmentStatus::Drained);
        next.master.unmount(client(4), segment(4, MIB).id).unwrap();
        next.mount(4, MIB);
        assert_eq!(next.state(4), SegmentStatus::Ok);
    }
}

#[test]
fn a_drain_whose_segments_do_not_come_back_ends() {
    let rig = another(3);
    (1..=3).for_each(|number| drop(rig.mount(number, MIB)));
    rig.put_in(1, "k", KIB);
    let job = rig.drain(&[1, 2], &[], 1).unwrap();
    rig.master.tick();
    let patient = next(&rig, 8);
    patient.mount(2, MIB);
    patient.alive_for(590.0);
    assert_eq!((patient.job(job).status, patient.state(2)), (DrainStatus::Planning, SegmentStatus::Draining));
    patient.alive_for(11.0);
    let info = patient.job(job);
    assert_eq!((info.status, info.active, patient.state(2)), (DrainStatus::Failed, 0, SegmentStatus::Ok));
    assert!(info.message.starts_with("1 of its segments did not come back"), "{}", info.message);
    patient.mount(1, MIB);
    assert_eq!(patient.state(1), SegmentStatus::Ok);
    // A cancelled job does the same.
    let told = next(&rig, 9);
    told.mount(2, MIB);
    told.master.drain_cancel(job).unwrap();
    told.mount(1, MIB);
    let states = (told.job(job).status, told.state(1), told.state(2));
    assert_eq!(states, (DrainStatus::Canceled, SegmentStatus::Ok, SegmentStatus::Ok));
    told.alive_for(60.0);
    assert_eq!((told.job(job).status, told.drain(&[1], &[], 1).is_ok()), (DrainStatus::Canceled, true));
    assert_eq!(told.master.segment_status_by_name(&name(1)).unwrap(), SegmentStatus::Draining);
}
