//! Removals and replacements that a master has acknowledged, and owners of disks that return later
//! with the earlier values.

use super::removals::{CLEARED, KEYS, WAYS, end_announcements, snapshot, with_options};
use crate::common::rig::{KIB, MIB, Rig, client, segment};
use mooncake_core::alloc::Extent;
use mooncake_core::replica::{ReplicaType, ReplicateConfig};
use mooncake_store::api::WriteMode;
use mooncake_store::master::{DiskOptions, FileOptions, MasterOptions, Put, Snapshot, Writer};
use mooncake_store::protocol::wire::{OffloadItem, StoredAt, StoredReplica};

const LEN: u64 = 4 * KIB;

fn master(seed: u64) -> Rig {
    let disks = Some(DiskOptions::default());
    with_options(seed, MasterOptions { disks, high_watermark: 1.0, ..MasterOptions::default() })
}

fn next_with(snapshot: Option<Snapshot>, seed: u64) -> Rig {
    let next = master(seed);
    snapshot.into_iter().for_each(|snapshot| next.master.recall(snapshot));
    next
}

/// Disk with all keys. Value `n` of the disk has the number `n`.
#[derive(Clone, Copy)]
struct Disk {
    who: u64,
    /// False for a client of an earlier version.
    names_versions: bool,
}

impl Disk {
    fn place(self, number: usize) -> StoredAt {
        let [bucket, offset] = if self.names_versions { [77, number as i64 + 1] } else { [0, 0] };
        let endpoint = format!("disk{}:1", self.who);
        StoredAt { bucket, offset, key_size: 2, data_size: LEN.cast_signed(), endpoint }
    }

    /// Returns a disk of client 1 of a master, with all keys, which have left memory.
    fn filled(rig: &Rig, names_versions: bool) -> Self {
        let disk = Self { who: 1, names_versions };
        rig.mount(1, MIB);
        disk.announce(rig, &[]);
        KEYS.iter().for_each(|key| drop(rig.put(9, key, LEN).unwrap()));
        let work = rig.master.disk_work(client(1), false, 0).unwrap();
        let number = |item: &OffloadItem| KEYS.iter().position(|key| key.as_bytes() == item.key).unwrap();
        let places: Vec<_> = work.write.iter().map(|item| disk.place(number(item))).collect();
        rig.master.report_offloaded(client(1), work.number, &work.write, &places).unwrap();
        assert_eq!(rig.master.stats().disks.objects, 4);
        disk
    }

    /// The next process of this client, with another name.
    fn restarted(self) -> Self {
        Self { who: 2, ..self }
    }

    fn announce(self, rig: &Rig, keys: &[&str]) {
        rig.master.mount_disk(client(self.who), true).unwrap();
        rig.master.disk_work(client(self.who), true, 0).unwrap();
        let item = |key: &&str| OffloadItem {
            tenant: "default".into(),
            key: key.as_bytes().into(),
            size: LEN.cast_signed(),
        };
        let items: Vec<_> = keys.iter().map(item).collect();
        let places: Vec<_> = (0..keys.len()).map(|number| self.place(number)).collect();
        rig.master.report_offloaded(client(self.who), 0, &items, &places).unwrap();
    }

    /// Announces all keys. Returns those that count. The owner is to drop the others.
    fn returns(self, rig: &Rig) -> Vec<&'static str> {
        self.announce(rig, &KEYS);
        // The first response has the number from which the owner counts.
        let first = rig.master.disk_work(client(self.who), false, 0).unwrap();
        let mut work = rig.master.disk_work(client(self.who), false, first.number).unwrap();
        work.dropped.extend(first.dropped);
        let on_disk = |key: &&str| {
            rig.master
                .peek(key.as_bytes())
                .unwrap_or_default()
                .iter()
                .any(|replica| replica.location.memory().is_none())
        };
        let (there, gone): (Vec<_>, Vec<_>) = KEYS.into_iter().partition(on_disk);
        let mut dropped: Vec<_> = work.dropped.iter().map(|item| &*item.key).collect();
        dropped.sort_unstable();
        dropped.dedup();
        assert!(work.clear || dropped == gone.iter().map(|key| key.as_bytes()).collect::<Vec<_>>());
        there
    }
}

const NONE: [&str; 0] = [];

#[test]
fn a_key_that_is_removed_after_the_restart_does_not_return_with_a_disk() {
    for (way, remove) in WAYS.iter().filter(|(way, _)| *way != CLEARED) {
        for (case, names_versions) in [false, true, false, true, false, true, false, true].iter().enumerate()
        {
            let (with_snapshot, is_late) = (case & 2 != 0, case & 4 != 0);
            let rig = master(3);
            let disk = Disk::filled(&rig, *names_versions);
            let next = next_with(with_snapshot.then(|| snapshot(&rig)), 4);
            next.mount(7, MIB);
            remove(&next);
            if is_late {
                end_announcements(&next);
            }
            assert_eq!(disk.returns(&next), NONE, "{way}, case {case}");
            assert_eq!(disk.restarted().returns(&next), NONE, "{way}, case {case}");
            // The next snapshot does not bring them back, either.
            let third = next_with(Some(snapshot(&next)), 5);
            assert_eq!(disk.returns(&third), NONE, "{way}, case {case}");
        }
    }
}

#[test]
fn a_key_that_is_removed_while_a_disk_is_away_does_not_return() {
    for (way, remove) in WAYS.iter().filter(|(way, _)| *way != CLEARED) {
        for case in 0..8 {
            let (names_versions, is_late, unmounts) = (case & 1 != 0, case & 2 != 0, case & 4 != 0);
            let rig = master(3);
            let disk = Disk::filled(&rig, names_versions);
            if is_late {
                end_announcements(&rig);
            }
            if unmounts {
                rig.master.unmount_disk(client(1)).unwrap();
            }
            rig.pass(11.0);
            rig.mount(7, MIB);
            remove(&rig);
            assert_eq!(disk.returns(&rig), NONE, "{way}, case {case}");
            assert_eq!(disk.restarted().returns(&rig), NONE, "{way}, case {case}");
        }
    }
}

/// The owner leaves before it has fetched the list of what it is to drop.
#[test]
fn a_key_that_is_removed_before_a_disk_leaves_does_not_return() {
    for (way, remove) in WAYS {
        for is_late in [false, true] {
            let rig = master(3);
            let disk = Disk::filled(&rig, true);
            remove(&rig);
            assert!(KEYS.iter().all(|key| !rig.has(key)), "{way}");
            rig.pass(11.0);
            rig.mount(7, MIB);
            if is_late {
                end_announcements(&rig);
            }
            assert_eq!(disk.returns(&rig), NONE, "{way}");
        }
    }
}

#[test]
fn what_is_replaced_while_a_disk_is_away_does_not_return() {
    for case in 0..8 {
        let (restarts, is_late, names_versions) = (case & 1 != 0, case & 2 != 0, case & 4 != 0);
        let mut rig = master(3);
        let disk = Disk::filled(&rig, names_versions);
        if restarts {
            rig = next_with(Some(snapshot(&rig)), 4);
        } else {
            rig.pass(11.0);
        }
        rig.mount(7, 64 * KIB);
        // A replacement that is there, one that is evicted, and one that was given up.
        rig.put(9, "k0", LEN).unwrap();
        rig.put(9, "k1", LEN).unwrap();
        rig.start(9, "k2", LEN).unwrap();
        rig.revoke(9, "k2").unwrap();
        rig.locate("k0").unwrap();
        rig.alive_for(20.0);
        rig.put(9, "other", 60 * KIB).unwrap();
        assert!(!rig.has("k1"), "case {case}");
        if is_late {
            end_announcements(&rig);
        }
        let there = disk.returns(&rig);
        assert!(!there.contains(&"k0") && !there.contains(&"k1"), "case {case}: {there:?}");
        assert_eq!(there, ["k2", "k3"], "case {case}: nothing has replaced them");
    }
}

#[test]
fn a_disk_brings_back_what_was_not_removed() {
    for case in 0..16 {
        let (names_versions, is_late) = (case & 1 != 0, case & 2 != 0);
        let (restarts, with_snapshot) = (case & 4 != 0, case & 8 != 0);
        let rig = master(3);
        let disk = Disk::filled(&rig, names_versions);
        rig.pass(11.0);
        assert!(!rig.has("k0"));
        let next = match restarts {
            true => next_with(with_snapshot.then(|| snapshot(&rig)), 4),
            false => rig,
        };
        next.mount(7, MIB);
        if is_late {
            end_announcements(&next);
        }
        // Removals by the earlier master are unknown, so a late owner brings nothing back.
        let is_known = !restarts || with_snapshot || !is_late;
        let expected: &[&str] = if is_known { &KEYS } else { &[] };
        assert_eq!(disk.returns(&next), expected, "case {case}");
        // The next process of the owner has another name.
        next.pass(11.0);
        let is_known = names_versions || restarts && !with_snapshot && !is_late;
        let expected = if is_known { expected } else { &[] };
        assert_eq!(disk.restarted().returns(&next), expected, "case {case}");
    }
}

/// The owner was there when the snapshot was written, and the cluster restarts as a whole.
#[test]
fn a_disk_returns_after_a_restart_of_everything() {
    for is_late in [false, true] {
        let rig = master(3);
        let disk = Disk::filled(&rig, true);
        rig.remove("k1", true).unwrap();
        let next = next_with(Some(snapshot(&rig)), 4);
        next.mount(7, MIB);
        next.remove("k2", true).unwrap_err();
        let third = next_with(Some(snapshot(&next)), 5);
        if is_late {
            end_announcements(&third);
        }
        assert_eq!(disk.restarted().returns(&third), ["k0", "k3"]);
    }
}

/// An object is in memory of one client and on the disk of another, and the two return to different
/// masters. Each snapshot has the half that is still to come.
#[test]
fn both_halves_of_an_object_return_in_any_order() {
    for memory_first in [false, true] {
        for removes in [false, true] {
            let rig = master(3);
            rig.master.inventory(client(1), 0);
            // The disk returns with the next process of its owner.
            let disk = Disk::filled(&rig, true).restarted();
            let mut memory = segment(1, MIB);
            let page = rig.master.inventory(client(1), 0);
            let stored: Vec<_> = page.changes.into_iter().filter_map(|change| change.stored).collect();
            assert_eq!(stored.len(), KEYS.len());
            let mut announce = |rig: &Rig| {
                memory.base += 1 << 36;
                rig.master.inventory(client(1), 0);
                rig.master.mount_with_objects(client(1), &memory).unwrap();
                let extent = |stored: &StoredReplica| Extent { offset: stored.offset, len: LEN };
                let extents: Vec<_> = stored.iter().map(extent).collect();
                rig.master.reserve_extents(client(1), memory.id, &extents, true).unwrap();
                let took = |stored: &&StoredReplica| rig.master.announce(client(1), stored).is_ok();
                stored.iter().filter(took).count()
            };
            let second = next_with(Some(snapshot(&rig)), 4);
            second.mount(7, MIB);
            if memory_first {
                assert_eq!(announce(&second), stored.len());
            } else {
                assert_eq!(disk.returns(&second), KEYS);
            }
            if removes {
                for key in KEYS {
                    let _ = second.remove(key, true);
                }
            }
            let third = next_with(Some(snapshot(&second)), 5);
            third.mount(7, MIB);
            let all = usize::from(!removes);
            if memory_first {
                assert_eq!(disk.returns(&third).len(), all * KEYS.len(), "removes: {removes}");
            } else {
                assert_eq!(announce(&third), all * stored.len(), "removes: {removes}");
            }
        }
    }
}

/// A value with the same key and length on a disk of the same host is not the one that is listed.
#[test]
fn another_value_on_another_disk_does_not_return() {
    let rig = master(3);
    let disk = Disk::filled(&rig, true);
    end_announcements(&rig);
    rig.pass(11.0);
    let place = StoredAt { bucket: 78, ..disk.place(0) };
    rig.master.mount_disk(client(2), true).unwrap();
    let item = OffloadItem { tenant: "default".into(), key: b"k0".into(), size: LEN.cast_signed() };
    rig.master.report_offloaded(client(2), 0, std::slice::from_ref(&item), &[place]).unwrap();
    assert!(!rig.has("k0"));
    rig.master.report_offloaded(client(2), 0, &[item], &[disk.place(0)]).unwrap();
    assert!(rig.has("k0"));
}

/// A file counts only if its writer reports it to the master that granted it.
#[test]
fn a_file_of_an_earlier_master_does_not_return() {
    let files = || FileOptions { dir: "/mnt/x".into(), ..FileOptions::default() };
    let options = || MasterOptions { files: Some(files()), high_watermark: 1.0, ..MasterOptions::default() };
    let rig = with_options(3, options());
    rig.mount(1, MIB);
    let writer = Writer { client: client(9), attempt: 5 };
    let config = ReplicateConfig::default();
    let mode = WriteMode::Put;
    let put = Put { writer, mode, key: b"k", len: LEN, config: &config, group: "", session: None };
    rig.master.put_start(&put).unwrap();
    rig.master.put_end(writer, b"k", None, ReplicaType::Memory).unwrap();
    let next = with_options(4, options());
    next.master.recall(snapshot(&rig));
    next.mount(7, MIB);
    next.master.put_end(writer, b"k", None, ReplicaType::Disk).unwrap_err();
    assert!(!next.has("k"));
    next.put(8, "k", 64).unwrap();
    next.master.put_end(writer, b"k", None, ReplicaType::Disk).unwrap_err();
    assert!(next.master.peek(b"k").unwrap().iter().all(|replica| replica.location.memory().is_some()));
}
