//! Objects on disks of clients, as the master records them, under a manual clock.

use std::time::Duration;

use crate::common::rig::{KIB, MIB, Rig, client, endpoint, segment};
use mooncake_core::ErrorCode::{self, *};
use mooncake_core::alloc::Extent;
use mooncake_core::evict::PolicyKind;
use mooncake_core::ids::{SegmentId, Uuid};
use mooncake_core::replica::{Replica, ReplicaLocation, ReplicateConfig};
use mooncake_store::master::{
    DiskOptions, DiskStats, MasterOptions, Placement, PromotionOptions, TenantQuota,
};
use mooncake_store::protocol::wire::{DiskWork, OffloadItem, StoredAt, StoredReplica};

trait Disks {
    fn with_disks(disks: DiskOptions) -> Rig {
        Rig::with(MasterOptions { disks: Some(disks), high_watermark: 1.0, ..MasterOptions::default() })
    }
    fn offer(&self, who: u64);
    /// Sends the heartbeat of a disk. Returns the keys to write there.
    fn work(&self, who: u64) -> Vec<String>;
    fn report(&self, who: u64, key: &str, len: i64);
    fn report_at(&self, who: u64, key: &str, len: i64, endpoint: &str);
    /// Sends a heartbeat, and reports every requested write as done.
    fn write_all(&self, who: u64) -> usize;
    /// Returns the number of replicas in memory, and the owners of disks that have one.
    fn replicas_of(&self, key: &str) -> (usize, Vec<String>);
}

impl Disks for Rig {
    fn offer(&self, who: u64) {
        self.master.mount_disk(client(who), true).unwrap();
    }

    fn work(&self, who: u64) -> Vec<String> {
        let items = self.master.to_offload(client(who), true).unwrap();
        items.into_iter().map(|item| String::from_utf8(item.key).unwrap()).collect()
    }

    fn report(&self, who: u64, key: &str, len: i64) {
        self.report_at(who, key, len, &format!("disk{who}:1"));
    }

    fn report_at(&self, who: u64, key: &str, len: i64, endpoint: &str) {
        let item = OffloadItem { tenant: "default".into(), key: key.into(), size: len };
        let place = StoredAt { bucket: 0, offset: 0, key_size: 0, data_size: len, endpoint: endpoint.into() };
        self.master.offloaded(client(who), &[item], &[place]).unwrap();
    }

    fn write_all(&self, who: u64) -> usize {
        let items = self.master.to_offload(client(who), true).unwrap();
        for item in &items {
            self.report(who, std::str::from_utf8(&item.key).unwrap(), item.size);
        }
        items.len()
    }

    fn replicas_of(&self, key: &str) -> (usize, Vec<String>) {
        let replicas = self.master.peek(key.as_bytes()).unwrap_or_default();
        let disk = |replica: &Replica| match &replica.location {
            ReplicaLocation::LocalDisk { client: owner, size, endpoint } => {
                assert!(*size > 0 && (1..9).any(|who| client(who) == *owner));
                Some(endpoint.clone())
            }
            _ => None,
        };
        let disks: Vec<_> = replicas.iter().filter_map(disk).collect();
        (replicas.len() - disks.len(), disks)
    }
}

/// Every object that a queue takes is written, or cancelled, or fails.
#[test]
fn each_offload_is_counted_by_one_outcome() {
    let rig = Rig::with_disks(DiskOptions { queue_limit: 2, ..DiskOptions::default() });
    rig.mount(1, MIB);
    rig.offer(1);
    let counts = || {
        let disks = rig.master.stats().disks;
        let ends = [disks.offloads_completed, disks.offloads_cancelled, disks.offloads_failed];
        (disks.offloads_enqueued, disks.offloads_rejected, ends)
    };
    for key in ["a", "b", "c"] {
        rig.put(9, key, KIB).unwrap();
    }
    assert_eq!(counts(), (2, 1, [0, 0, 0]), "the queue is full");
    rig.remove("b", true).unwrap();
    assert_eq!(rig.work(1), ["a"]);
    rig.report(1, "a", KIB as i64);
    rig.report(1, "a", KIB as i64);
    assert_eq!(counts(), (2, 1, [1, 1, 0]), "a second report counts no more");
    rig.put(9, "d", KIB).unwrap();
    assert_eq!(rig.work(1), ["d"]);
    rig.report(1, "d", -1);
    assert_eq!(counts(), (3, 1, [1, 1, 1]));
    // A value that is replaced while the owner writes it, and one that the owner never reports.
    rig.put(9, "e", KIB).unwrap();
    rig.put(9, "f", KIB).unwrap();
    assert_eq!(rig.work(1).len(), 2);
    rig.upsert(9, "e", 2 * KIB).unwrap();
    rig.end(9, "e").unwrap();
    assert_eq!(counts(), (6, 1, [1, 2, 1]));
    rig.report(1, "e", KIB as i64);
    assert_eq!(counts(), (6, 1, [1, 2, 1]), "the report is about the value before");
    assert_eq!(rig.work(1), ["e"]);
    rig.report(1, "e", 2 * KIB as i64);
    for _ in 0..601 {
        rig.alive_for(1.0);
        rig.work(1);
    }
    assert_eq!(counts(), (6, 1, [2, 2, 2]), "there was no report for f");
    rig.put(9, "g", KIB).unwrap();
    rig.master.unmount_disk(client(1)).unwrap();
    assert_eq!(counts(), (7, 1, [2, 3, 2]), "the disk is gone");
}

/// A report about a lost file counts for the replica that it names.
#[test]
fn a_lost_file_is_that_of_one_replica() {
    let rig = Rig::with_disks(DiskOptions::default());
    for who in [1, 2] {
        rig.mount(who, MIB);
        rig.offer(who);
    }
    let id = || rig.master.peek(b"a").map(|replicas| replicas[0].id).map_err(|error| error.code());
    let drop = |who: u64, key: &str, id| {
        let dropped = rig.master.dropped_from_disk_if_current(client(who), key.as_bytes(), id);
        dropped.map_err(|error| error.code())
    };
    rig.report(1, "a", 100);
    let first = id().unwrap();
    assert_eq!(drop(1, "none", first), Err(ObjectNotFound));
    assert_eq!(drop(2, "a", first), Ok(false), "another client");
    assert_eq!(drop(1, "a", first), Ok(true));
    assert_eq!((id(), drop(1, "a", first)), (Err(ObjectNotFound), Err(ObjectNotFound)));
    // The owner reports a later value, which the report about the earlier one does not concern.
    rig.report(1, "a", 200);
    let second = id().unwrap();
    assert_ne!(first, second);
    assert_eq!((drop(1, "a", first), id()), (Ok(false), Ok(second)));
    assert_eq!(drop(1, "a", second), Ok(true));
}

fn place(who: u64, len: i64) -> StoredAt {
    StoredAt { bucket: 0, offset: 0, key_size: 0, data_size: len, endpoint: format!("disk{who}:1") }
}

fn on(who: u64) -> Vec<String> {
    vec![format!("disk{who}:1")]
}

fn eager() -> Rig {
    let rig = Rig::with_disks(DiskOptions::default());
    rig.mount(1, MIB);
    rig.offer(1);
    rig
}

fn code<T: std::fmt::Debug>(result: mooncake_core::Result<T>) -> ErrorCode {
    result.unwrap_err().code()
}

#[test]
fn an_object_written_to_disk_outlives_its_eviction() {
    let rig = eager();
    rig.put(9, "k", 400 * KIB).unwrap();
    assert_eq!(rig.replicas_of("k"), (1, vec![]));
    assert_eq!(rig.work(1), ["k"]);
    assert_eq!(rig.work(1), [""; 0], "it is told once");
    rig.report(1, "k", 400 * 1024);
    assert_eq!(rig.replicas_of("k"), (1, on(1)));
    rig.put(9, "other", 700 * KIB).unwrap();
    assert_eq!(rig.replicas_of("k"), (0, on(1)), "evicted from memory");
    assert!(rig.exists("k"));
    assert_eq!(rig.locate("k").unwrap().replicas[0].location.size(), 400 * KIB);
    assert_eq!(rig.start(9, "k", 10), Err(ObjectAlreadyExists));
    rig.alive_for(20.0);
    assert_eq!(rig.remove("k", false), Ok(()));
    assert_eq!((rig.exists("k"), rig.locate("k").unwrap_err()), (false, ObjectNotFound));
    rig.remove("other", false).unwrap();
    assert_eq!(rig.master.stats().keys, 0, "nothing is left behind");
}

#[test]
fn what_waits_for_a_disk_stays_in_memory_for_a_while() {
    let rig = eager();
    rig.put(9, "k", 600 * KIB).unwrap();
    assert_eq!(rig.start(9, "second", 600 * KIB), Err(NoAvailableHandle), "it is to be written first");
    rig.alive_for(59.0);
    assert_eq!(rig.start(9, "second", 600 * KIB), Err(NoAvailableHandle));
    rig.alive_for(2.0);
    rig.put(9, "second", 600 * KIB).unwrap();
    assert!(!rig.exists("k"), "nobody came for it");
}

#[test]
fn what_a_disk_is_written_from_is_not_used_again_meanwhile() {
    let rig = eager();
    rig.put(9, "k", 600 * KIB).unwrap();
    assert_eq!(rig.work(1), ["k"]);
    rig.alive_for(61.0);
    assert_eq!(rig.start(9, "second", 600 * KIB), Err(NoAvailableHandle), "it is being written");
    rig.remove("k", true).unwrap();
    assert_eq!(rig.start(9, "second", 600 * KIB), Err(NoAvailableHandle), "still");
    rig.alive_for(540.0);
    rig.put(9, "second", 600 * KIB).unwrap();
    rig.report(1, "k", 600 * 1024);
    assert!(!rig.exists("k"), "too late: what was written may be anything by now");
}

/// An upsert without other free space overwrites the old value, but not while the owner of a disk
/// may read it.
#[test]
fn an_upsert_in_place_waits_for_the_disk_that_reads_the_value() {
    let rig = eager();
    rig.put(9, "k", 600 * KIB).unwrap();
    assert_eq!(rig.work(1), ["k"]);
    rig.alive_for(61.0);
    assert_eq!(rig.upsert(9, "k", 600 * KIB), Err(NoAvailableHandle), "it is being written to a disk");
    rig.report(1, "k", 600 * 1024);
    rig.upsert(9, "k", 600 * KIB).unwrap();
}

/// An announced newer value does the same: the space of the older one stays reserved until the
/// owner of the disk cannot be reading it.
#[test]
fn space_of_a_value_that_an_announced_one_replaces_waits_for_its_disk() {
    let rig = Rig::with_disks(DiskOptions { on_evict: true, ..DiskOptions::default() });
    let stored = |number: u64, segment: u64| StoredReplica {
        segment: SegmentId(Uuid::new(2, segment)),
        offset: 0,
        key: b"k".to_vec(),
        group: String::new(),
        writer: client(9),
        len: 600 * KIB,
        checksum: None,
        hard_pin: false,
        soft_pin_ms: 0,
        epoch: 1,
        number,
    };
    for who in [1, 2] {
        let segment = crate::common::rig::segment(who, MIB);
        rig.master.mount_with_objects(client(who), &segment).unwrap();
        let extent = Extent { offset: 0, len: 600 * KIB };
        rig.master.reserve_extents(client(who), segment.id, &[extent], true).unwrap();
        rig.offer(who);
    }
    rig.master.announce(client(1), &stored(1, 1)).unwrap();
    assert_eq!(rig.start(9, "second", 600 * KIB), Err(NoAvailableHandle), "it is to be written first");
    rig.alive_for(0.1);
    assert_eq!(rig.work(1), ["k"]);
    rig.master.announce(client(2), &stored(2, 2)).unwrap();
    rig.alive_for(1.0);
    assert_eq!(rig.start(9, "second", 600 * KIB), Err(NoAvailableHandle), "the disk's owner may be reading");
}

#[test]
fn a_report_about_a_value_that_was_replaced_does_not_count() {
    let rig = eager();
    rig.put(9, "k", 100).unwrap();
    assert_eq!(rig.work(1), ["k"]);
    rig.upsert(9, "k", 100).unwrap();
    rig.end(9, "k").unwrap();
    rig.report(1, "k", 100);
    assert_eq!(rig.replicas_of("k"), (1, vec![]), "the old value was written");
    assert_eq!(rig.work(1), ["k"], "the new one is asked for");
    rig.remove("k", true).unwrap();
    rig.put(9, "k", 100).unwrap();
    rig.report(1, "k", 100);
    assert_eq!(rig.replicas_of("k"), (1, vec![]), "of yet another value");
    assert_eq!(rig.write_all(1), 1);
    assert_eq!(rig.replicas_of("k"), (1, on(1)));
    rig.upsert(9, "k", 200).unwrap();
    assert_eq!(rig.replicas_of("k"), (1, on(1)), "the old value is there until the new one is");
    rig.end(9, "k").unwrap();
    assert_eq!(rig.replicas_of("k"), (1, vec![]));
    rig.report(1, "k", 100);
    assert_eq!(rig.replicas_of("k"), (1, vec![]), "a report that comes twice is no new copy");
}

#[test]
fn what_cannot_be_written_is_evicted() {
    let rig = eager();
    rig.put(9, "k", 600 * KIB).unwrap();
    rig.work(1);
    rig.report(1, "k", -1);
    rig.put(9, "second", 600 * KIB).unwrap();
    assert!(!rig.exists("k"));
}

#[test]
fn on_evict_writes_what_is_about_to_go_and_nothing_else() {
    let rig = Rig::with_disks(DiskOptions { on_evict: true, ..DiskOptions::default() });
    rig.mount(1, MIB);
    rig.put(9, "before there is a disk", 600 * KIB).unwrap();
    rig.put(9, "a", 600 * KIB).unwrap();
    assert!(!rig.exists("before there is a disk"));
    rig.offer(1);
    assert_eq!(rig.work(1), [""; 0]);
    assert_eq!(rig.start(9, "b", 600 * KIB), Err(NoAvailableHandle));
    rig.alive_for(0.1);
    assert_eq!(rig.work(1), ["a"]);
    rig.report(1, "a", 600 * 1024);
    rig.put(9, "b", 600 * KIB).unwrap();
    assert_eq!((rig.replicas_of("a"), rig.replicas_of("b")), ((0, on(1)), (1, vec![])));
}

#[test]
fn on_evict_asks_for_what_is_needed_and_for_what_was_used_least() {
    let rig = Rig::with(MasterOptions {
        disks: Some(DiskOptions { on_evict: true, ..DiskOptions::default() }),
        high_watermark: 1.0,
        eviction_ratio: 0.1,
        ..MasterOptions::default()
    });
    rig.mount(1, MIB);
    rig.offer(1);
    let mut keys: Vec<String> = (0..100).map(|n| format!("k{n}")).collect();
    for key in &keys {
        rig.put(9, key, 10 * KIB).unwrap();
    }
    for _ in 0..20 {
        assert_eq!(rig.start(9, "more", 30 * KIB), Err(NoAvailableHandle), "it is to be written first");
        rig.alive_for(0.1);
    }
    let mut asked = rig.work(1);
    // At most a tenth of the memory is requested, however often the disk asks.
    assert!((10..=11).contains(&asked.len()), "{asked:?}");
    keys.truncate(asked.len());
    keys.sort();
    asked.sort();
    assert_eq!(asked, keys);
    for key in &asked {
        rig.report(1, key, 10 * 1024);
    }
    rig.put(9, "more", 30 * KIB).unwrap();
}

/// Owner of a disk that counts the bytes of its files.
struct Counting<'a> {
    rig: &'a Rig,
    done: u64,
}

impl<'a> Counting<'a> {
    fn new(rig: &'a Rig) -> Self {
        let first = rig.master.disk_work(client(1), true, 0).unwrap();
        assert_eq!(first, DiskWork::default(), "nothing before it asks");
        Self { rig, done: 0 }
    }

    /// Returns the keys to drop and the keys to write, before the previous request is done.
    fn hears(&self) -> (Vec<String>, Vec<String>) {
        let DiskWork { dropped, write, .. } = self.rig.master.disk_work(client(1), false, self.done).unwrap();
        let keys = |items: Vec<OffloadItem>| {
            let keys = items.into_iter().map(|item| String::from_utf8(item.key).unwrap());
            keys.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
        };
        (keys(dropped), keys(write))
    }

    /// Does the same, and executes it.
    fn work(&mut self) -> (Vec<String>, Vec<String>) {
        let heard = self.hears();
        self.done = self.rig.master.disk_work(client(1), false, self.done).unwrap().number;
        heard
    }
}

fn of(keys: &[&str]) -> Vec<String> {
    keys.iter().map(ToString::to_string).collect()
}

#[test]
fn an_owner_hears_of_copies_that_do_not_count() {
    let rig = eager();
    let mut owner = Counting::new(&rig);
    for key in ["removed", "replaced", "kept"] {
        rig.put(9, key, 100).unwrap();
    }
    assert_eq!(owner.work(), (of(&[]), of(&["kept", "removed", "replaced"])));
    for key in ["removed", "replaced", "kept"] {
        rig.report(1, key, 100);
    }
    rig.remove("removed", true).unwrap();
    rig.upsert(9, "replaced", 100).unwrap();
    rig.end(9, "replaced").unwrap();
    assert_eq!(
        owner.work(),
        (of(&["removed"]), of(&["replaced"])),
        "what is written takes the other's place"
    );
    rig.report(1, "replaced", 100);
    assert_eq!(owner.work(), (of(&[]), of(&[])), "once");
    // A new value takes the place of the copy that does not count.
    rig.put(9, "removed", 200).unwrap();
    rig.upsert(9, "kept", 100).unwrap();
    rig.end(9, "kept").unwrap();
    assert_eq!(owner.work(), (of(&[]), of(&["kept", "removed"])));
    rig.report(1, "removed", 200);
    rig.report(1, "kept", 100);
    // The value is replaced while the disk writes it.
    rig.put(9, "late", 100).unwrap();
    assert_eq!(owner.work().1, ["late"]);
    rig.remove("late", true).unwrap();
    rig.report(1, "late", 100);
    rig.report(1, "unasked", 100);
    assert_eq!(owner.work(), (of(&["late", "unasked"]), of(&[])));
    // The report is repeated, because its response was lost.
    rig.report(1, "kept", 100);
    assert_eq!((rig.replicas_of("kept"), owner.work().0), ((1, on(1)), vec![]));
    // A value that the disk could not write has no replica there.
    rig.put(9, "failed", 100).unwrap();
    owner.work();
    rig.report(1, "failed", -1);
    rig.remove("failed", true).unwrap();
    assert_eq!(owner.work().0, ["failed"], "an older value might be");
    assert_eq!(code(rig.master.disk_work(client(2), false, 0)), SegmentNotFound);
}

#[test]
fn disk_work_without_a_result_is_sent_again() {
    let rig = eager();
    let mut owner = Counting::new(&rig);
    rig.report(1, "found", 100);
    assert_eq!(rig.replicas_of("found"), (0, on(1)), "it may announce what it found");
    for key in ["a", "b", "c", "d"] {
        rig.put(9, key, 100).unwrap();
    }
    let all = (of(&[]), of(&["a", "b", "c", "d"]));
    assert_eq!((owner.hears(), owner.hears()), (all.clone(), all));
    // The disk has written the first value, while two others were replaced.
    rig.report(1, "a", 100);
    rig.remove("b", true).unwrap();
    rig.remove("found", true).unwrap();
    rig.upsert(9, "c", 100).unwrap();
    rig.end(9, "c").unwrap();
    assert_eq!(owner.work(), (of(&[]), of(&["d"])), "what is still so, and nothing new");
    rig.report(1, "d", 100);
    let next = (of(&["b", "found"]), of(&["c"]));
    assert_eq!((owner.hears(), owner.work()), (next.clone(), next), "of \"b\" it may have an older value");
    rig.report(1, "c", 100);
    assert_eq!((owner.work(), owner.work()), Default::default());
    for key in ["a", "c", "d"] {
        assert_eq!(rig.replicas_of(key), (1, on(1)), "{key}");
    }
    // A response for an earlier request is not sent for this one.
    rig.master.remove_all_of("default", true);
    for _ in 0..2 {
        let work = rig.master.disk_work(client(1), false, owner.done).unwrap();
        assert!(work.clear && work.number == owner.done + 1, "{work:?}");
    }
    rig.put(9, "after", 100).unwrap();
    owner.done += 1;
    assert_eq!(owner.work(), (of(&[]), of(&["after"])));
    rig.report(1, "after", 100);
    assert_eq!((rig.replicas_of("after"), owner.work()), ((1, on(1)), Default::default()));
}

#[test]
fn a_full_queue_keeps_or_lets_go() {
    for force_evict in [false, true] {
        let disks =
            DiskOptions { on_evict: true, force_evict, queue_limit: 2, queue_part: 0.5, promotion: None };
        // One shard, so that the least recently used object is requested first.
        let options =
            MasterOptions { shards: 1, disks: Some(disks), high_watermark: 1.0, ..MasterOptions::default() };
        let rig = Rig::with(options);
        rig.mount(1, MIB);
        rig.offer(1);
        for key in ["a", "b", "c"] {
            rig.put(9, key, 300 * KIB).unwrap();
        }
        let third = rig.start(9, "d", 300 * KIB);
        assert_eq!(third.is_ok(), force_evict);
        assert!(rig.has("a"), "the first one is in the queue");
        assert_eq!(rig.has("b"), !force_evict);
    }
}

#[test]
fn an_owner_that_dies_takes_its_copies_along_and_brings_them_back() {
    let rig = eager();
    rig.put(9, "k", 100).unwrap();
    rig.put(9, "l", 100).unwrap();
    assert_eq!(rig.write_all(1), 2);
    rig.pass(11.0);
    assert!(!rig.exists("k"), "memory and disk are gone");
    assert_eq!(rig.master.stats().keys, 0);
    assert_eq!(code(rig.master.to_offload(client(1), true)), SegmentNotFound);
    rig.mount(1, MIB);
    rig.offer(1);
    rig.put(9, "l", 100).unwrap();
    for key in ["k", "l", "never heard of"] {
        rig.report(1, key, 100);
    }
    assert_eq!(rig.replicas_of("k"), (0, on(1)));
    assert_eq!(
        rig.replicas_of("l"),
        (1, vec![]),
        "somebody has put it since: what is on that disk may be older"
    );
    rig.work(1);
    rig.report(1, "unasked", 100);
    assert!(!rig.exists("unasked"), "after its first heartbeat, an owner has only what it was told to write");
    assert!(rig.exists("never heard of"));
}

/// The owner is killed and returns before its heartbeat timeout.
#[test]
fn an_owner_that_is_back_at_once_has_what_it_had() {
    let rig = eager();
    for key in ["both", "disk only", "removed", "shorter", "elsewhere"] {
        rig.put(9, key, 100).unwrap();
    }
    assert_eq!(rig.write_all(1), 5);
    rig.pass(1.0);
    rig.offer(2);
    for (key, len, at) in [
        ("both", 100, "disk1:2"),
        ("disk only", 100, "disk1:2"),
        ("removed", 100, "disk1:2"),
        ("shorter", 99, "disk1:2"),
        ("elsewhere", 100, "disk2:2"),
    ] {
        rig.report_at(2, key, len, at);
        assert_eq!(rig.replicas_of(key), (1, on(1)), "{key}: nobody has missed the one before");
    }
    rig.master.remove("removed".as_bytes(), true).unwrap();
    rig.pass(6.0);
    assert!(rig.work(2).is_empty());
    rig.pass(5.0);
    let next = || vec!["disk1:2".to_owned()];
    assert_eq!(rig.replicas_of("both"), (0, next()));
    assert_eq!(rig.replicas_of("disk only"), (0, next()));
    for key in ["removed", "shorter", "elsewhere"] {
        assert!(!rig.exists(key), "{key}");
    }
}

#[test]
fn a_find_of_another_client_of_the_host_is_ignored_while_the_owner_lives() {
    let rig = eager();
    rig.put(9, "k", 100).unwrap();
    assert_eq!(rig.write_all(1), 1);
    rig.pass(1.0);
    rig.offer(2);
    rig.report_at(2, "k", 100, "disk1:2");
    rig.pass(1.0);
    // The owner is alive, so nothing replaces it.
    assert!(rig.work(1).is_empty());
    rig.pass(6.0);
    assert!(rig.work(2).is_empty());
    rig.pass(5.0);
    assert_eq!(rig.master.stats().keys, 0);
    assert!(!rig.exists("k"), "what was found may be older");
    assert!(rig.work(2).is_empty());
}

#[test]
fn a_disk_is_emptied_and_taken_back() {
    let rig = eager();
    rig.put(9, "k", 100).unwrap();
    rig.write_all(1);
    assert!(!rig.master.must_clear_disk(client(1)).unwrap());
    rig.put(9, "leased", 100).unwrap();
    rig.write_all(1);
    rig.locate("leased").unwrap();
    assert_eq!(rig.master.remove_all(false), 1);
    assert_eq!(rig.replicas_of("leased"), (1, on(1)));
    assert!(rig.master.must_clear_disk(client(1)).unwrap());
    assert!(!rig.master.must_clear_disk(client(1)).unwrap(), "once");
    assert_eq!(rig.replicas_of("leased"), (1, vec![]), "it was wiped with the rest");
    rig.put(9, "m", 100).unwrap();
    assert_eq!(rig.write_all(1), 1);
    rig.master.dropped_from_disk(client(1), b"m").unwrap();
    assert_eq!(rig.replicas_of("m"), (1, vec![]));
    rig.put(9, "n", 100).unwrap();
    rig.write_all(1);
    rig.master.unmount_disk(client(1)).unwrap();
    assert_eq!(rig.replicas_of("n"), (1, vec![]));
    assert_eq!(code(rig.master.unmount_disk(client(1))), SegmentNotFound);
    assert_eq!(code(Rig::new().master.mount_disk(client(1), true)), UnableOffload);
}

#[test]
fn remove_all_of_one_tenant_leaves_the_disks_of_others() {
    let quota = |name: &str| TenantQuota { name: name.into(), bytes: MIB };
    let rig = Rig::with(MasterOptions {
        disks: Some(DiskOptions::default()),
        tenants: Some(vec![quota("one"), quota("two")]),
        ..MasterOptions::default()
    });
    rig.mount(1, MIB);
    rig.offer(1);
    for tenant in ["one", "two"] {
        let key = rig.master.scoped(tenant, b"k").unwrap().into_owned();
        rig.put(9, std::str::from_utf8(&key).unwrap(), 100).unwrap();
    }
    let items = rig.master.to_offload(client(1), true).unwrap();
    let places: Vec<_> = items.iter().map(|item| place(1, item.size)).collect();
    assert_eq!(
        items.iter().map(|i| (&*i.tenant, &*i.key)).collect::<Vec<_>>(),
        [("one", &b"k"[..]), ("two", b"k")]
    );
    rig.master.offloaded(client(1), &items, &places).unwrap();
    assert_eq!(rig.master.remove_all_of("one", true), 1);
    assert!(!rig.master.must_clear_disk(client(1)).unwrap());
    assert_eq!((rig.replicas_of("one\0k").1.len(), rig.replicas_of("two\0k").1.len()), (0, 1));
}

/// The owner of a disk reads what it writes there without a lease, also from memory that returns.
#[test]
fn memory_under_offload_is_not_granted_again() {
    let rig = eager();
    let (len, own) = (64 * KIB, segment(1, 64 * KIB));
    rig.mount(2, len);
    rig.master.unmount(client(1), segment(1, MIB).id).unwrap();
    rig.master.mount(client(1), &own).unwrap();
    rig.master.disk_work(client(1), true, 0).unwrap();
    rig.put_with(9, "k", len, &ReplicateConfig::replicas(2)).unwrap();
    let work = rig.master.disk_work(client(1), false, 0).unwrap();
    assert_eq!(work.write.len(), 1);
    rig.master.unmount(client(1), own.id).unwrap();
    rig.master.mount(client(1), &own).unwrap();
    let config = ReplicateConfig { preferred_segment: own.name.clone(), ..ReplicateConfig::default() };
    assert!(rig.put_with(9, "other", len, &config).is_err(), "the owner may be copying");
    rig.master.report_offloaded(client(1), work.number, &work.write, &[place(1, len.cast_signed())]).unwrap();
    assert_eq!(rig.replicas_of("k"), (1, on(1)));
}

#[test]
fn objects_of_unregistered_tenants_leave_disks() {
    let rig = Rig::with(MasterOptions {
        disks: Some(DiskOptions::default()),
        tenants: Some(vec![TenantQuota { name: "one".into(), bytes: MIB }]),
        ..MasterOptions::default()
    });
    rig.offer(1);
    rig.master.disk_work(client(1), true, 0).unwrap();
    let item = |tenant: &str| OffloadItem { tenant: tenant.into(), key: b"k".into(), size: 100 };
    let items = ["one", "gone"].map(item);
    rig.master.report_offloaded(client(1), 0, &items, &[place(1, 100), place(1, 100)]).unwrap();
    let first = rig.master.disk_work(client(1), false, 0).unwrap();
    let next = rig.master.disk_work(client(1), false, first.number).unwrap();
    let dropped = first.dropped.iter().chain(&next.dropped);
    assert_eq!(dropped.map(|item| (&*item.tenant, &*item.key)).collect::<Vec<_>>(), [("gone", &b"k"[..])]);
    assert_eq!(rig.replicas_of("one\0k").1, on(1));
}

#[test]
fn what_is_read_often_comes_back() {
    let promotion = Some(PromotionOptions { per_heartbeat: 8, ..PromotionOptions::default() });
    let rig = Rig::with_disks(DiskOptions { promotion, ..DiskOptions::default() });
    rig.mount(1, MIB);
    rig.offer(1);
    rig.put(9, "k", 600 * KIB).unwrap();
    rig.write_all(1);
    rig.put(9, "big", 600 * KIB).unwrap();
    rig.write_all(1);
    rig.remove("big", true).unwrap();
    rig.alive_for(11.0);
    let asked = || rig.master.to_promote(client(1)).unwrap();
    rig.locate("k").unwrap();
    assert_eq!(asked(), [], "once is not often");
    rig.locate("k").unwrap();
    let items = asked();
    assert_eq!((items.len(), &*items[0].key, items[0].size), (1, &b"k"[..], 600 * 1024));
    assert_eq!(asked(), []);
    let start = |who, len| rig.master.promotion_start(client(who), b"k", len, &[]);
    assert_eq!(code(start(2, 600 * KIB)), ReplicaIsNotReady, "not that client's");
    assert_eq!(code(start(1, 600)), InvalidParams);
    start(1, 600 * KIB).unwrap();
    assert_eq!(code(rig.master.promoted(client(2), b"k")), ReplicaIsNotReady);
    assert_eq!(rig.end(1, "k"), Err(IllegalClient), "a put's end does not end it");
    assert_eq!(rig.replicas_of("k"), (0, on(1)), "not readable before its end");
    rig.master.promoted(client(1), b"k").unwrap();
    assert_eq!(rig.replicas_of("k"), (1, on(1)));
    assert_eq!(code(rig.master.promoted(client(1), b"k")), ReplicaIsNotReady);
    assert_eq!(code(rig.master.promotion_failed(client(1), b"none")), ObjectNotFound);
    rig.locate("k").unwrap();
    let stats = rig.master.stats();
    let expected = DiskStats {
        objects: 1,
        used: 600 * KIB,
        offloads_enqueued: 2,
        offloads_completed: 2,
        promotions_admitted: 1,
        promotions_completed: 1,
        promoted_bytes: 600 * KIB,
        promotions_too_rare: 1,
        ..DiskStats::default()
    };
    assert_eq!(stats.disks, expected);
    assert_eq!((stats.hits, stats.hit_bytes), (3, 3 * 600 * KIB));
    assert_eq!((stats.disk_hits, stats.disk_hit_bytes), (2, 2 * 600 * KIB), "the last was in memory");
}

/// A policy that ranks by value compares an object on disk with the next victim.
#[test]
fn full_memory_takes_back_what_is_of_more_value() {
    let promotion = Some(PromotionOptions { threshold: 1, ..PromotionOptions::default() });
    let options = MasterOptions {
        disks: Some(DiskOptions { promotion, ..DiskOptions::default() }),
        high_watermark: 1.0,
        shards: 1,
        lease_ttl: Duration::from_millis(1),
        ..MasterOptions::default()
    };
    let rig = Rig::with_policy(options, PolicyKind::Gittins);
    rig.mount(1, 8 * 64 * KIB);
    rig.offer(1);
    let put = |key: &str| {
        rig.put(9, key, 64 * KIB).unwrap();
        rig.write_all(1);
    };
    let read = |key: &str| {
        rig.locate(key).unwrap();
        rig.clock.advance(Duration::from_millis(2));
    };
    let in_memory = |key: &str| rig.replicas_of(key).0 == 1;
    let asked = || rig.master.to_promote(client(1)).unwrap().len();
    (0..9).for_each(|number| put(&number.to_string()));
    assert!(!in_memory("0") && in_memory("1"));
    // Within the first bucket of ages, all objects are of equal value.
    read("0");
    assert_eq!((asked(), rig.master.stats().disks.promotions_too_full), (0, 1));
    (0..500).for_each(|_| read("8"));
    put("new");
    assert!(!in_memory("1") && in_memory("2"));
    read("0");
    assert_eq!(asked(), 1);
    rig.master.promotion_start(client(1), b"0", 64 * KIB, &[]).unwrap();
    rig.master.promoted(client(1), b"0").unwrap();
    assert!(in_memory("0") && !in_memory("2") && in_memory("3"), "one object has gone for it");
    // The other objects are used, so that the next one on disk is of no more value any more.
    read("1");
    (3..9).for_each(|number| read(&number.to_string()));
    ["new", "0"].iter().for_each(|key| read(key));
    assert_eq!(asked(), 1);
    let start = rig.master.promotion_start(client(1), b"1", 64 * KIB, &[]);
    assert_eq!(code(start), NoAvailableHandle);
}

/// The notes about the next victims of the shards are too low after uses. A promotion does not
/// evict what is of more value for that.
#[test]
fn a_promotion_does_not_evict_what_was_used_since() {
    let promotion = Some(PromotionOptions { threshold: 1, ..PromotionOptions::default() });
    let options = MasterOptions {
        disks: Some(DiskOptions { promotion, ..DiskOptions::default() }),
        high_watermark: 1.0,
        shards: 4,
        lease_ttl: Duration::from_millis(1),
        ..MasterOptions::default()
    };
    let rig = Rig::with_policy(options, PolicyKind::Gittins);
    rig.mount(1, 8 * 64 * KIB);
    rig.offer(1);
    let read = |key: &str| {
        rig.locate(key).unwrap();
        rig.clock.advance(Duration::from_millis(2));
    };
    let put = |key: &str| {
        rig.put(9, key, 64 * KIB).unwrap();
        rig.write_all(1);
    };
    let keys: Vec<String> = (0..10).map(|number| number.to_string()).collect();
    let is_here = |key: &&String| rig.replicas_of(key).0 == 1;
    keys[..9].iter().for_each(|key| put(key));
    (0..500).for_each(|_| read("8"));
    put("9");
    let (here, gone): (Vec<_>, Vec<_>) = keys.iter().partition(is_here);
    read(gone[0]);
    assert_eq!(rig.master.to_promote(client(1)).unwrap().len(), 1);
    here.iter().for_each(|key| read(key));
    let start = rig.master.promotion_start(client(1), gone[0].as_bytes(), 64 * KIB, &[]);
    assert_eq!(code(start), NoAvailableHandle);
    assert!(here.iter().all(is_here));
}

/// Each admitted promotion counts once: as in flight, or by its outcome.
#[test]
fn promotions_are_accounted_for() {
    let promotion = Some(PromotionOptions { threshold: 1, queue_limit: 4, per_heartbeat: 3 });
    let rig = Rig::with(MasterOptions {
        disks: Some(DiskOptions { promotion, ..DiskOptions::default() }),
        ..MasterOptions::default()
    });
    rig.mount(1, MIB);
    rig.offer(1);
    rig.master.disk_capacity(client(1), 1 << 20).unwrap();
    for n in 0..6 {
        rig.report(1, &format!("cold {n}"), 1000);
    }
    let figures = || {
        let at = rig.master.stats().disks;
        let over =
            [at.promotions_completed, at.promotions_failed, at.promotions_cancelled, at.promotions_expired];
        assert_eq!(at.promotions_admitted, at.promotions_in_flight + over.iter().sum::<u64>(), "{at:?}");
        (at.promotions_in_flight, over)
    };
    for n in 0..6 {
        rig.locate(&format!("cold {n}")).unwrap();
    }
    let stats = rig.master.stats().disks;
    assert_eq!((stats.objects, stats.used, stats.capacity), (6, 6000, 1 << 20));
    assert_eq!((stats.promotions_admitted, stats.promotions_over_limit), (4, 2));
    assert_eq!(figures(), (4, [0; 4]));
    assert_eq!(rig.master.to_promote(client(1)).unwrap().len(), 3);
    assert_eq!(figures(), (4, [0; 4]));
    // One promotion completes, one fails, one object is removed; no report comes for the last.
    rig.master.promotion_start(client(1), b"cold 0", 1000, &[]).unwrap();
    rig.master.promoted(client(1), b"cold 0").unwrap();
    rig.master.promotion_failed(client(1), b"cold 1").unwrap();
    rig.remove("cold 2", true).unwrap();
    assert_eq!(figures(), (1, [1, 1, 1, 0]));
    assert_eq!(rig.master.to_promote(client(1)).unwrap().len(), 1);
    for _ in 0..7 {
        rig.alive_for(9.0);
        rig.master.to_offload(client(1), true).unwrap();
    }
    rig.master.to_promote(client(1)).unwrap();
    assert_eq!(figures(), (0, [1, 1, 1, 1]));
    // Requests to a disk end when the disk is unmounted.
    rig.locate("cold 4").unwrap();
    assert_eq!(figures().0, 1);
    rig.master.unmount_disk(client(1)).unwrap();
    assert_eq!(figures(), (0, [1, 1, 2, 1]));
    assert_eq!(rig.master.stats().disks.used, 0);
    // Memory above the limit gets no promotions.
    rig.offer(1);
    rig.report(1, "warm", 1000);
    rig.put(9, "much", 1000 * KIB).unwrap();
    rig.locate("warm").unwrap();
    assert_eq!(rig.master.stats().disks.promotions_too_full, 1);
}

#[test]
fn a_promotion_that_fails_gives_its_space_back() {
    let promotion = Some(PromotionOptions { threshold: 1, ..PromotionOptions::default() });
    let rig = Rig::with_disks(DiskOptions { promotion, ..DiskOptions::default() });
    rig.mount(1, MIB);
    rig.offer(1);
    rig.put(9, "k", 600 * KIB).unwrap();
    rig.write_all(1);
    rig.put(9, "big", 600 * KIB).unwrap();
    rig.remove("big", true).unwrap();
    rig.locate("k").unwrap();
    assert_eq!(rig.master.to_promote(client(1)).unwrap().len(), 1);
    rig.master.promotion_start(client(1), b"k", 600 * KIB, &[]).unwrap();
    rig.master.promotion_failed(client(1), b"k").unwrap();
    rig.alive_for(11.0);
    assert_eq!((rig.replicas_of("k"), rig.used()), ((0, on(1)), 0));
    // An upsert during the promotion wins.
    rig.locate("k").unwrap();
    rig.master.to_promote(client(1)).unwrap();
    rig.master.promotion_start(client(1), b"k", 600 * KIB, &[]).unwrap();
    rig.upsert(9, "k", 100).unwrap();
    assert_eq!(code(rig.master.promoted(client(1), b"k")), ReplicaIsNotReady);
    rig.end(9, "k").unwrap();
    assert_eq!(rig.locate("k").unwrap().replicas[0].location.size(), 100);
}

#[test]
fn placement_by_free_disk_space_spares_a_full_disk() {
    let rig = Rig::with(MasterOptions {
        disks: Some(DiskOptions::default()),
        placement: Placement::SsdFreeRatioFirst,
        ..MasterOptions::default()
    });
    let mut puts = 0;
    let mut to_first = |rig: &Rig| {
        let put = |_: &i32| {
            puts += 1;
            endpoint(&rig.put(9, &format!("put {puts}"), KIB).unwrap()[0]) == "10.0.0.1:1"
        };
        (0..200).filter(put).count()
    };
    for who in 1..=2 {
        rig.mount(who, 16 * MIB);
        rig.offer(who);
        rig.master.disk_capacity(client(who), 1 << 20).unwrap();
    }
    assert!((60..140).contains(&to_first(&rig)), "both are empty");
    rig.report(2, "cold", 1 << 20);
    assert_eq!(to_first(&rig), 200, "the other is full");
    rig.master.disk_capacity(client(2), 4 << 20).unwrap();
    assert!((80..160).contains(&to_first(&rig)), "three quarters of it are free");
    rig.master.disk_capacity(client(2), 1 << 20).unwrap();
    rig.master.dropped_from_disk(client(2), b"cold").unwrap();
    assert!((60..140).contains(&to_first(&rig)), "empty again");
}
