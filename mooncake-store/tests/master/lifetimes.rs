//! Objects that end by themselves: after a time, or after their first read.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::alloc::Extent;
use mooncake_core::clock::{Clock, ManualClock, Rng};
use mooncake_core::error::ErrorCode::*;
use mooncake_core::evict::PolicyKind;
use mooncake_core::hints::PutHints;
use mooncake_core::ids::ReplicaId;
use mooncake_core::replica::{Replica, ReplicateConfig, Segment};
use mooncake_core::testkit::{effort, test_seed};
use mooncake_store::api::{DEFAULT_TENANT, WriteMode};
use mooncake_store::master::{DiskOptions, Master, MasterOptions, MissCause, Snapshot};
use mooncake_store::protocol::message::{Handle, LocateAgain, LocatePrefix};
use mooncake_store::protocol::wire::{StoredLifetime, StoredReplica, TaskKind};

use crate::common::rig::{KIB, MIB, Rig, address, client};

const LEASE: Duration = Duration::from_secs(10);

fn hinted(hints: PutHints) -> ReplicateConfig {
    ReplicateConfig { hints: Some(Box::new(hints)), ..ReplicateConfig::default() }
}

fn living(seconds: f64) -> ReplicateConfig {
    let ttl_ms = Some((seconds * 1000.0) as u64);
    hinted(PutHints { ttl_ms, ..PutHints::default() })
}

fn once() -> ReplicateConfig {
    hinted(PutHints { delete_after_read: true, ..PutHints::default() })
}

fn cause(rig: &Rig, key: &str) -> Option<MissCause> {
    rig.master.why_missing(key.as_bytes())
}

#[test]
fn an_object_misses_after_its_time_and_its_memory_returns_after_the_lease() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    rig.put_with(1, "a", KIB, &living(5.0)).unwrap();
    rig.put_with(1, "b", KIB, &living(5.0)).unwrap();
    rig.put(1, "c", KIB).unwrap();
    rig.alive_for(4.9);
    rig.locate("a").unwrap();
    rig.clock.advance(Duration::from_millis(100));
    // Nothing has ticked: the clock alone decides.
    assert_eq!((rig.locate("a"), rig.exists("b"), rig.has("a")), (Err(ObjectNotFound), false, false));
    assert_eq!((cause(&rig, "a"), cause(&rig, "b")), (Some(MissCause::Expired), Some(MissCause::Expired)));
    assert_eq!(rig.master.keys().len(), 1);
    assert_eq!(rig.used(), 3 * KIB);
    rig.master.tick();
    assert_eq!(rig.used(), 2 * KIB, "a reader holds a lease on the first object");
    rig.alive_for(9.8);
    assert_eq!(rig.used(), 2 * KIB);
    rig.alive_for(0.2);
    assert_eq!((rig.used(), rig.locate("c").is_ok()), (KIB, true));
    assert_eq!(cause(&rig, "a"), Some(MissCause::Expired));
    let misses = rig.master.stats().misses;
    assert_eq!((misses.of(MissCause::Expired), misses.total()), (2, 2));
}

#[test]
fn the_first_read_is_the_last() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    rig.mount(2, MIB);
    let two = ReplicateConfig { replicas: 2, ..once() };
    rig.put_with(1, "a", KIB, &two).unwrap();
    // Neither a look at the object nor an existence check is a read.
    assert!(rig.exists("a") && rig.has("a") && rig.exists("a"));
    let keys: &[&[u8]] = &[b"a"];
    let count = LocatePrefix { keys: keys.into(), with_replicas: false, tenant: DEFAULT_TENANT };
    assert_eq!(rig.master.handle(count).unwrap().count, 1);
    let read = rig.locate("a").unwrap();
    assert_eq!(read.replicas.len(), 2);
    assert_eq!((rig.locate("a"), rig.exists("a"), rig.has("a")), (Err(ObjectNotFound), false, false));
    assert_eq!(cause(&rig, "a"), Some(MissCause::DeletedAfterRead));
    // The reader has its lease. It may as well have died.
    rig.alive_for(9.9);
    assert_eq!(rig.used(), 2 * KIB);
    rig.alive_for(0.1);
    assert_eq!((rig.used(), rig.master.stats().keys), (0, 0));
    assert_eq!(cause(&rig, "a"), Some(MissCause::DeletedAfterRead));
    // A prefix with replicas, and a pattern, read what they return.
    for key in ["b", "c"] {
        rig.put_with(1, key, KIB, &once()).unwrap();
    }
    let keys: &[&[u8]] = &[b"b"];
    let read = LocatePrefix { keys: keys.into(), with_replicas: true, tenant: DEFAULT_TENANT };
    assert_eq!(rig.master.handle(read).unwrap().count, 1);
    assert_eq!(rig.master.locate_matching("^.$").unwrap().len(), 1);
    assert_eq!(
        (rig.has("b"), rig.has("c"), rig.master.locate_matching("^.$").unwrap().len()),
        (false, false, 0)
    );
}

#[test]
fn a_new_value_has_its_own_lifetime() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    rig.put_with(1, "a", KIB, &living(1.0)).unwrap();
    rig.upsert(1, "a", KIB).unwrap();
    rig.end(1, "a").unwrap();
    rig.alive_for(60.0);
    assert!(rig.has("a"), "the upsert had no hint");
    rig.start_with(1, "a", KIB, WriteMode::Upsert, &once()).unwrap();
    // The hint holds from the end of the write on.
    assert!(rig.locate("a").is_ok() && rig.locate("a").is_ok());
    rig.end(1, "a").unwrap();
    assert!(rig.locate("a").is_ok() && rig.locate("a").is_err());
    // The value ends while its successor is being written.
    rig.put_with(1, "b", KIB, &living(1.0)).unwrap();
    rig.upsert(1, "b", KIB).unwrap();
    rig.alive_for(2.0);
    assert!(!rig.has("b"));
    rig.end(1, "b").unwrap();
    rig.alive_for(30.0);
    assert!(rig.has("b"));
    // A key whose object has ended may be put again at once.
    rig.put_with(1, "c", KIB, &living(1.0)).unwrap();
    rig.clock.advance(Duration::from_secs(1));
    assert_eq!(rig.put_with(1, "c", KIB, &living(1.0)).map(drop), Ok(()));
    assert!(rig.has("c"));
}

#[test]
fn hints_beyond_their_limits_are_refused() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    for ttl_ms in [0, u64::MAX] {
        let config = hinted(PutHints { ttl_ms: Some(ttl_ms), ..PutHints::default() });
        assert_eq!(rig.put_with(1, "a", KIB, &config).map(drop), Err(InvalidParams));
    }
    let config = hinted(PutHints { parent: Some(vec![b'k'; 1 << 20]), ..PutHints::default() });
    assert_eq!(rig.put_with(1, "a", KIB, &config).map(drop), Err(InvalidParams));
    assert_eq!(rig.master.stats().keys, 0);
}

#[test]
fn a_put_takes_the_space_of_ended_objects_before_it_evicts() {
    let rig = Rig::without_watermark();
    rig.mount(1, 8 * KIB);
    for key in ["a", "b", "c", "d"] {
        rig.put(1, key, KIB).unwrap();
    }
    for key in ["e", "f", "g", "h"] {
        rig.put_with(1, key, KIB, &living(1.0)).unwrap();
    }
    rig.clock.advance(Duration::from_secs(1));
    for key in ["i", "j", "k", "l"] {
        rig.put(1, key, KIB).unwrap();
    }
    assert!(["a", "b", "c", "d", "i", "j", "k", "l"].iter().all(|key| rig.has(key)));
    assert_eq!(rig.master.stats().evicted_keys, 0);
}

#[test]
fn the_end_of_an_object_ends_its_copies() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    rig.mount(2, MIB);
    let config = ReplicateConfig { preferred_segment: "node1:1".into(), ..living(5.0) };
    rig.put_with(1, "a", KIB, &config).unwrap();
    rig.master.copy_start(client(2), b"a", "node1:1", &["node2:1"]).unwrap();
    rig.alive_for(5.0);
    assert!(!rig.has("a"));
    assert!(rig.master.replication_end(client(2), TaskKind::Copy, b"a").is_err());
    assert_eq!(rig.used(), KIB, "the client may still write the copy");
    rig.alive_for(600.0);
    assert_eq!((rig.used(), rig.master.stats().keys), (0, 0));
}

#[test]
fn objects_that_end_by_themselves_are_not_written_to_disks() {
    for on_evict in [false, true] {
        let disks = Some(DiskOptions { on_evict, ..DiskOptions::default() });
        let rig = Rig::with(MasterOptions { disks, high_watermark: 1.0, ..MasterOptions::default() });
        rig.mount(1, 4 * KIB);
        rig.master.mount_disk(client(1), true).unwrap();
        rig.put_with(1, "a", 2 * KIB, &living(60.0)).unwrap();
        rig.put_with(1, "b", 2 * KIB, &once()).unwrap();
        assert_eq!(rig.master.to_offload(client(1), true).unwrap().len(), 0);
        // Eviction does not wait for a disk either.
        rig.put(1, "c", 2 * KIB).unwrap();
        assert!(!rig.has("a") && rig.has("b"));
        assert_eq!(cause(&rig, "a"), Some(MissCause::Evicted));
        let queued = rig.master.to_offload(client(1), true).unwrap().len();
        assert_eq!(queued, usize::from(!on_evict), "the third object is queued");
    }
}

/// Returns a master that draws other numbers than other rigs, at this time of its clock.
fn another(seed: u64, at: Duration) -> Rig {
    let clock = Arc::new(ManualClock::new());
    clock.advance(at);
    let (options, policy) = (MasterOptions::default(), PolicyKind::Lru.into());
    let master = Master::with_parts(options, &Default::default(), &policy, clock.clone(), seed).unwrap();
    Rig { clock, master }
}

/// Returns the objects in the segment of client 1 with their lifetimes, as its owner records them.
fn timed(rig: &Rig) -> Vec<(StoredReplica, Option<StoredLifetime>)> {
    let timed = rig.master.timed_inventory(client(1), 0);
    let lifetimes: HashMap<_, _> = timed.lifetimes.iter().map(|item| (item.index, item.lifetime)).collect();
    let mut there = Vec::new();
    for (index, change) in (0u64..).zip(timed.page.changes) {
        match change.stored {
            Some(stored) => there.push((change.replica, stored, lifetimes.get(&index).copied())),
            None => there.retain(|(id, ..)| *id != change.replica),
        }
    }
    there.into_iter().map(|(_, stored, lifetime)| (stored, lifetime)).collect()
}

fn mount_with_objects<'s>(rig: &Rig, segment: &Segment, kept: impl Iterator<Item = &'s StoredReplica>) {
    let extent =
        |stored: &StoredReplica| Extent { offset: stored.offset, len: stored.len.next_multiple_of(64) };
    rig.master.mount_with_objects(client(1), segment).unwrap();
    rig.master.reserve_extents(client(1), segment.id, &kept.map(extent).collect::<Vec<_>>(), true).unwrap();
}

/// Objects of the tests of a restart: each with its time to live, if any, and whether the first
/// read ends it.
const KINDS: [(&str, Option<u64>, bool); 5] = [
    ("plain", None, false),
    ("short", Some(2_000), false),
    ("long", Some(60_000), false),
    ("once", None, true),
    ("read", None, true),
];

/// Returns a master with one object of each kind, and its segment.
fn with_kinds() -> (Rig, Segment) {
    let rig = another(3, Duration::from_secs(100));
    rig.master.timed_inventory(client(1), 0);
    let segment = rig.mount(1, MIB);
    for (key, ttl_ms, delete_after_read) in KINDS {
        rig.put_with(1, key, KIB, &hinted(PutHints { ttl_ms, delete_after_read, ..PutHints::default() }))
            .unwrap();
    }
    rig.locate("read").unwrap();
    rig.master.tick();
    (rig, segment)
}

/// Checks what the next master serves, 10 s after the puts.
fn check_kinds(next: &Rig) {
    let there = |key| next.has(key);
    assert_eq!(["plain", "short", "long", "once", "read"].map(there), [true, false, true, true, false]);
    next.locate("once").unwrap();
    assert!(!next.has("once"));
    next.alive_for(49.9);
    assert!(next.has("long") && next.has("plain"));
    next.alive_for(0.1);
    assert!(!next.has("long") && next.has("plain"));
    assert_eq!(cause(next, "long"), Some(MissCause::Expired));
    next.alive_for(30.0);
    assert_eq!(next.used(), KIB);
}

#[test]
fn lifetimes_go_on_under_the_next_master() {
    let (rig, segment) = with_kinds();
    let kept = timed(&rig);
    assert_eq!(kept.len(), 4, "the object that was read is gone");
    let next = another(4, Duration::from_secs(110));
    mount_with_objects(&next, &segment, kept.iter().map(|(stored, _)| stored));
    for (stored, lifetime) in &kept {
        let announced =
            next.master.announce_timed(client(1), stored, *lifetime).map_err(|error| error.code());
        let expected = if stored.key == b"short" { Err(ObjectAlreadyExists) } else { Ok(()) };
        assert_eq!(announced, expected, "{}", stored.key.escape_ascii());
    }
    check_kinds(&next);
}

#[test]
fn an_owner_of_an_older_version_does_not_learn_of_objects_that_end() {
    let (rig, _) = with_kinds();
    let page = rig.master.inventory(client(1), 0);
    let stored: Vec<_> = page.changes.iter().filter_map(|change| change.stored.as_ref()).collect();
    assert_eq!(stored.iter().map(|stored| &*stored.key).collect::<Vec<_>>(), [b"plain"]);
    assert_eq!(page.next, rig.master.timed_inventory(client(1), page.next).page.next, "nothing is left");
}

#[test]
fn a_snapshot_keeps_lifetimes() {
    let (rig, segment) = with_kinds();
    let kept = timed(&rig);
    let mut bytes = Vec::new();
    let write = |more: &[u8]| {
        bytes.extend_from_slice(more);
        Ok(())
    };
    assert_eq!(rig.master.snapshot(write).unwrap(), 4);
    let next = another(4, Duration::from_secs(110));
    next.master.recall(Snapshot::read(&bytes).unwrap());
    // Objects that no owner has announced yet are in the next snapshot, too.
    let again = Snapshot::read(&bytes).unwrap();
    assert_eq!(Snapshot::read(&again.write()).unwrap(), again);
    mount_with_objects(&next, &segment, kept.iter().map(|(stored, _)| stored));
    for (stored, _) in &kept {
        // The owner is of an older version.
        let announced = next.master.announce(client(1), stored).map_err(|error| error.code());
        let expected = if stored.key == b"short" { Err(ObjectAlreadyExists) } else { Ok(()) };
        assert_eq!(announced, expected, "{}", stored.key.escape_ascii());
    }
    check_kinds(&next);
}

#[test]
fn a_second_replica_does_not_bring_a_read_object_back() {
    let rig = another(3, Duration::from_secs(100));
    for number in [1, 2] {
        rig.master.timed_inventory(client(number), 0);
    }
    let segments = [rig.mount(1, MIB), rig.mount(2, MIB)];
    rig.put_with(1, "a", KIB, &ReplicateConfig { replicas: 2, ..once() }).unwrap();
    let next = another(4, Duration::from_secs(110));
    for (number, segment) in [1, 2].into_iter().zip(&segments) {
        let timed = rig.master.timed_inventory(client(number), 0);
        let stored = timed.page.changes[0].stored.clone().unwrap();
        let extent = Extent { offset: stored.offset, len: KIB };
        next.master.mount_with_objects(client(number), segment).unwrap();
        next.master.reserve_extents(client(number), segment.id, &[extent], true).unwrap();
        let announced =
            next.master.announce_timed(client(number), &stored, Some(timed.lifetimes[0].lifetime));
        assert_eq!(announced.map_err(|error| error.code()).is_ok(), number == 1);
        if number == 1 {
            next.locate("a").unwrap();
            next.alive_for(10.1);
        }
        assert!(!next.has("a"));
    }
}

/// Object of the model.
struct Modelled {
    /// End in milliseconds.
    until: u64,
    ends_at_read: bool,
    ended: Option<MissCause>,
    extents: Vec<(u64, u64)>,
    /// End of the latest lease in milliseconds.
    lease: u64,
}

impl Modelled {
    fn end(&self, now: u64) -> Option<MissCause> {
        self.ended.or((self.until <= now).then_some(MissCause::Expired))
    }

    fn bytes(&self) -> u64 {
        self.extents.iter().map(|(_, len)| len).sum()
    }
}

/// Model of a master with ample memory.
#[derive(Default)]
struct Model {
    objects: HashMap<String, Modelled>,
    /// Extents that readers with a lease may still read, by the end of the lease.
    promised: Vec<(u64, Vec<(u64, u64)>)>,
    causes: HashMap<String, MissCause>,
}

impl Model {
    /// Removes an object that was removed, replaced, or has ended.
    fn drop_object(&mut self, key: &str) {
        if let Some(object) = self.objects.remove(key) {
            self.promised.push((object.lease, object.extents));
        }
    }

    /// Removes the objects that have ended, as a tick does.
    fn tick(&mut self, now: u64) {
        // An object that was read stays until the lease ends.
        let is_over = |object: &Modelled| match object.ended {
            Some(_) => object.lease <= now,
            None => object.until <= now,
        };
        let over = self.objects.iter().filter(|(_, object)| is_over(object));
        let ended = over.filter_map(|(key, object)| Some((key.clone(), object.end(now)?)));
        for (key, cause) in ended.collect::<Vec<_>>() {
            self.drop_object(&key);
            self.causes.insert(key, cause);
        }
        self.promised.retain(|(until, _)| *until > now);
    }

    /// Returns the bytes in use after a tick.
    fn used(&self) -> u64 {
        let live: u64 = self.objects.values().map(Modelled::bytes).sum();
        let promised = self.promised.iter().flat_map(|(_, extents)| extents).map(|(_, len)| len).sum::<u64>();
        live + promised
    }

    fn cause(&self, key: &str, now: u64) -> Option<MissCause> {
        match self.objects.get(key) {
            Some(object) => object.end(now),
            None => Some(self.causes.get(key).copied().unwrap_or(MissCause::Unknown)),
        }
    }
}

fn extents(replicas: &[Replica], len: u64) -> Vec<(u64, u64)> {
    replicas.iter().map(|replica| (address(replica), len.next_multiple_of(64))).collect()
}

/// A reader that has located an object asks again when it meets the owner for the first time.
#[test]
fn a_reader_under_its_lease_may_locate_again() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    rig.put_with(1, "a", KIB, &once()).unwrap();
    let again = |located: ReplicaId| {
        let (keys, located): (&[&[u8]], _) = (&[b"a"], [located]);
        let call = LocateAgain { keys: keys.into(), located: (&located[..]).into(), tenant: DEFAULT_TENANT };
        rig.master.handle(call).pop().unwrap().map(|list| list.replicas).map_err(|error| error.code())
    };
    let read = rig.locate("a").unwrap().replicas;
    rig.alive_for(9.0);
    assert_eq!(again(read[0].id), Ok(read.clone()));
    // The number of a replica tells readers apart: others do not know it.
    assert_eq!((again(ReplicaId(read[0].id.0 + 1)), rig.has("a")), (Err(ObjectNotFound), false));
    rig.alive_for(9.9);
    assert_eq!(rig.used(), KIB, "the second look-up extended the lease");
    rig.alive_for(0.1);
    assert_eq!((again(read[0].id), rig.used()), (Err(ObjectNotFound), 0));
    // The key may be used meanwhile, and the memory may not.
    rig.put_with(1, "a", KIB, &once()).unwrap();
    let read = rig.locate("a").unwrap().replicas;
    let next = rig.put(1, "a", KIB).unwrap();
    assert_ne!(address(&next[0]), address(&read[0]));
    assert!(again(read[0].id).is_ok_and(|found| found == rig.locate("a").unwrap().replicas));
    // Another object is left to its own reader.
    rig.remove("a", true).unwrap();
    rig.put_with(1, "a", KIB, &once()).unwrap();
    assert_eq!(again(read[0].id), Err(ObjectNotFound));
    assert!(rig.locate("a").is_ok() && rig.locate("a").is_err());
}

/// Compares the master with a model: nothing that a reader holds is given to a writer, nothing is
/// read past its end, and every byte is accounted for.
#[test]
fn a_model_agrees() {
    let seed = test_seed();
    let mut rng = Rng::seeded(seed);
    let mut seen: HashMap<&str, usize> = HashMap::new();
    for round in 0..effort(5, 20) {
        let rig = Rig::without_watermark();
        (1..=3).for_each(|number| drop(rig.mount(number, 4 * MIB)));
        let mut model = Model::default();
        for step in 0..600 {
            let at = format!("seed {seed}, round {round}, step {step}");
            let key = format!("key/{}", rng.below(12));
            let now = rig.clock.wall_ms();
            let live = model.cause(&key, now).is_none();
            match rng.below(10) {
                0..=3 => {
                    let ttl_ms = (rng.below(2) == 0).then(|| 1 + rng.below(20_000));
                    let delete_after_read = rng.below(3) == 0;
                    let hints = PutHints { ttl_ms, delete_after_read, ..PutHints::default() };
                    let replicas = 1 + rng.below(2);
                    let len = 1 + rng.below(60_000);
                    let config = ReplicateConfig { replicas, ..hinted(hints) };
                    let mode = [WriteMode::Put, WriteMode::Upsert][rng.below(2) as usize];
                    let started = rig.start_with(1, &key, len, mode, &config);
                    if mode == WriteMode::Put && live {
                        assert_eq!(started.map(drop), Err(ObjectAlreadyExists), "{at}");
                        continue;
                    }
                    let granted = extents(&started.unwrap(), len);
                    // The old value stays until the end of the write, if it has not ended.
                    if !live {
                        let cause = model.cause(&key, now).unwrap();
                        model.drop_object(&key);
                        model.causes.insert(key.clone(), cause);
                    }
                    let live_extents = model.objects.values().flat_map(|object| &object.extents);
                    let promised = model.promised.iter().filter(|(until, _)| *until > now);
                    let taken: Vec<_> =
                        live_extents.chain(promised.flat_map(|(_, extents)| extents)).copied().collect();
                    for (from, len) in &granted {
                        let overlaps =
                            |(other, size): &(u64, u64)| from < &(other + size) && other < &(from + len);
                        assert!(!taken.iter().any(overlaps), "{at}: space of readers was granted");
                    }
                    rig.end(1, &key).unwrap();
                    model.drop_object(&key);
                    model.causes.remove(&key);
                    let until = ttl_ms.map_or(u64::MAX, |ttl| now + ttl);
                    let object = Modelled {
                        until,
                        ends_at_read: delete_after_read,
                        ended: None,
                        extents: granted,
                        lease: 0,
                    };
                    model.objects.insert(key, object);
                    *seen.entry("put").or_default() += 1;
                }
                4..=6 => {
                    let found = match rng.below(3) {
                        0 => rig.locate(&key).ok().map(|list| list.replicas),
                        1 => {
                            let keys: &[&[u8]] = &[key.as_bytes()];
                            let tenant = DEFAULT_TENANT;
                            let call = LocatePrefix { keys: keys.into(), with_replicas: true, tenant };
                            rig.master.handle(call).unwrap().replicas.pop().map(|list| list.replicas)
                        }
                        _ => {
                            let mut found = rig.master.locate_matching(&format!("^{key}$")).unwrap();
                            found.pop().map(|(_, replicas)| replicas)
                        }
                    };
                    assert_eq!(found.is_some(), live, "{at}: {:?}", cause(&rig, &key));
                    if let Some(object) = model.objects.get_mut(&key).filter(|_| live) {
                        let mut found: Vec<_> = found.unwrap().iter().map(address).collect();
                        let mut expected: Vec<_> = object.extents.iter().map(|(from, _)| *from).collect();
                        found.sort_unstable();
                        expected.sort_unstable();
                        assert_eq!(found, expected, "{at}");
                        object.lease = now + LEASE.as_millis() as u64;
                        if object.ends_at_read {
                            object.ended = Some(MissCause::DeletedAfterRead);
                            *seen.entry("last read").or_default() += 1;
                        }
                    }
                    *seen.entry(if live { "hit" } else { "miss" }).or_default() += 1;
                }
                7 => {
                    // The caller has no address, so its lease holds no space.
                    assert_eq!(rig.exists(&key), live, "{at}");
                }
                8 => {
                    let cause = model.cause(&key, now).unwrap_or(MissCause::Removed);
                    assert_eq!(rig.remove(&key, true).is_ok(), live, "{at}");
                    if model.objects.contains_key(&key) {
                        model.drop_object(&key);
                        model.causes.insert(key, cause);
                    }
                }
                _ => {
                    rig.clock.advance(Duration::from_millis(rng.below(3000)));
                    for number in 1..=3 {
                        rig.master.ping(client(number));
                    }
                }
            }
            let now = rig.clock.wall_ms();
            if rng.below(3) == 0 {
                rig.master.tick();
                model.tick(now);
                assert_eq!(rig.used(), model.used(), "{at}");
            }
            for number in 0..12 {
                let key = format!("key/{number}");
                assert_eq!(cause(&rig, &key), model.cause(&key, now), "{at}, {key}");
                *seen.entry("expired").or_default() +=
                    usize::from(cause(&rig, &key) == Some(MissCause::Expired));
            }
        }
        rig.alive_for(3600.0);
        model.tick(rig.clock.wall_ms());
        assert_eq!(rig.used(), model.used(), "seed {seed}, round {round}");
    }
    let rare = ["put", "hit", "miss", "last read", "expired"].map(|what| seen.get(what).copied());
    assert!(rare.iter().all(|count| count.is_some_and(|count| count > 50)), "{seen:?}, seed {seed}");
}
