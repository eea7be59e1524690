//! Removals and replacements that a master has acknowledged, and owners that return later with the
//! earlier values.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::common::rig::{KIB, MIB, Rig, client};
use mooncake_core::alloc::Extent;
use mooncake_core::clock::ManualClock;
use mooncake_core::error::ErrorCode::{self, ObjectAlreadyExists, ObjectNotFound};
use mooncake_core::evict::PolicyKind;
use mooncake_core::hints::PutHints;
use mooncake_core::replica::{ReplicateConfig, Segment};
use mooncake_store::api::WriteMode;
use mooncake_store::master::{Master, MasterOptions, Snapshot, TenantQuota};
use mooncake_store::protocol::message::{ExchangeEpochs, Handle, Remove, RemoveAll, RemoveByRegex};
use mooncake_store::protocol::wire::{EpochPair, InventoryPage, StoredLifetime, StoredReplica};

pub(super) const KEYS: [&str; 4] = ["k0", "k1", "k2", "k3"];

pub(super) fn another(seed: u64) -> Rig {
    with_options(seed, MasterOptions { high_watermark: 1.0, ..MasterOptions::default() })
}

pub(super) fn with_options(seed: u64, options: MasterOptions) -> Rig {
    let clock = Arc::new(ManualClock::new());
    clock.advance(Duration::from_secs(seed));
    let policy = PolicyKind::Lru.into();
    let master = Master::with_parts(options, &Default::default(), &policy, clock.clone(), seed).unwrap();
    Rig { clock, master }
}

pub(super) fn snapshot(rig: &Rig) -> Snapshot {
    let mut bytes = Vec::new();
    let write = |more: &[u8]| {
        bytes.extend_from_slice(more);
        Ok(())
    };
    rig.master.snapshot(write).unwrap();
    Snapshot::read(&bytes).unwrap()
}

pub(super) fn next_with(snapshot: Snapshot, seed: u64) -> Rig {
    let next = another(seed);
    next.master.recall(snapshot);
    next
}

/// Owner of a segment, as its client records it.
pub(super) struct Owner {
    pub(super) who: u64,
    pub(super) segment: Segment,
    epoch: u64,
    epochs: Vec<EpochPair>,
    pub(super) stored: Vec<StoredReplica>,
    /// Lifetimes of the objects that end by themselves, by offset.
    lifetimes: HashMap<u64, StoredLifetime>,
}

impl Owner {
    pub(super) fn join(rig: &Rig, who: u64) -> Self {
        let (epoch, epochs) = (rig.master.inventory(client(who), 0).epoch, Vec::new());
        let (segment, stored, lifetimes) = (rig.mount(who, MIB), Vec::new(), HashMap::new());
        let mut owner = Self { who, segment, epoch, epochs, stored, lifetimes };
        owner.epochs = rig.master.exchange_epochs(&[]);
        owner
    }

    /// Receives the changes of the segment.
    pub(super) fn hear(&mut self, rig: &Rig) {
        let page = rig.master.timed_inventory(client(self.who), 0);
        for (index, change) in page.page.changes.into_iter().enumerate() {
            let lifetime = page.lifetimes.iter().find(|item| item.index == index as u64);
            if let (Some(stored), Some(item)) = (&change.stored, lifetime) {
                self.lifetimes.insert(stored.offset, item.lifetime);
            }
            self.stored.extend(change.stored);
        }
    }

    /// Mounts the segment at another master, at other addresses.
    pub(super) fn remount(&mut self, rig: &Rig) {
        let page = rig.master.inventory(client(self.who), 0);
        if page.epoch != self.epoch {
            self.epochs.insert(0, EpochPair { newer: page.epoch, older: self.epoch });
        }
        self.epoch = page.epoch;
        self.epochs = rig.master.exchange_epochs(&self.epochs);
        self.mount_with_objects(rig);
    }

    /// Lets the next process of the owner take over, whose segment has another identifier.
    pub(super) fn take_over(&mut self, rig: &Rig, next: u64) {
        self.segment.id = crate::common::rig::segment(next, MIB).id;
        self.stored.iter_mut().for_each(|stored| stored.segment = self.segment.id);
        self.mount_with_objects(rig);
    }

    fn mount_with_objects(&mut self, rig: &Rig) {
        self.segment.base += 1 << 36;
        rig.master.mount_with_objects(client(self.who), &self.segment).unwrap();
        let extents: Vec<_> = self
            .stored
            .iter()
            .map(|stored| Extent { offset: stored.offset, len: stored.len.next_multiple_of(64) })
            .collect();
        rig.master.reserve_extents(client(self.who), self.segment.id, &extents, true).unwrap();
    }

    pub(super) fn announce(&self, rig: &Rig) -> Vec<Result<(), ErrorCode>> {
        let announce = |stored: &StoredReplica| {
            let lifetime = self.lifetimes.get(&stored.offset).copied();
            rig.master.announce_timed(client(self.who), stored, lifetime).map_err(|error| error.code())
        };
        self.stored.iter().map(announce).collect()
    }

    /// Mounts the segment at another master and announces all objects.
    pub(super) fn returns(&mut self, rig: &Rig) -> Vec<Result<(), ErrorCode>> {
        self.remount(rig);
        self.announce(rig)
    }
}

fn refused(count: usize) -> Vec<Result<(), ErrorCode>> {
    vec![Err(ObjectAlreadyExists); count]
}

/// Returns a master with the keys in the segments of both owners, who have learnt of them.
fn twice() -> (Rig, Owner, Owner) {
    let rig = another(3);
    let (mut a, mut b) = (Owner::join(&rig, 1), Owner::join(&rig, 2));
    let both = ReplicateConfig { replicas: 2, ..ReplicateConfig::default() };
    for key in KEYS {
        rig.put_with(9, key, 4 * KIB, &both).unwrap();
    }
    a.hear(&rig);
    b.hear(&rig);
    assert_eq!((a.stored.len(), b.stored.len()), (4, 4));
    (rig, a, b)
}

/// Removes all keys.
pub(super) type Removal = fn(&Rig);

/// A way to remove only objects that are there.
pub(super) const CLEARED: &str = "cleared by their writer";

/// Ways to remove objects that are there, and objects that no owner has announced yet.
pub(super) const WAYS: &[(&str, Removal)] = &[
    ("one by one", |rig| {
        for key in KEYS {
            let expected = if rig.has(key) { Ok(()) } else { Err(ObjectNotFound) };
            assert_eq!(rig.remove(key, true), expected);
        }
    }),
    ("all", |rig| assert_ne!(rig.master.remove_all(true), u64::MAX)),
    ("all, without force", |rig| assert_ne!(rig.master.remove_all(false), u64::MAX)),
    ("by pattern", |rig| assert_ne!(rig.master.remove_matching("^k[0-9]$", true).unwrap(), u64::MAX)),
    ("two patterns", |rig| {
        rig.master.remove_matching("k[01]", false).unwrap();
        rig.master.remove_matching("k[23]", false).unwrap();
    }),
    ("of the tenant", |rig| assert_ne!(rig.master.remove_all_of("default", true), u64::MAX)),
    ("by pattern, of the tenant", |rig| {
        assert_ne!(rig.master.remove_matching_of("default", "k", true).unwrap(), u64::MAX)
    }),
    (CLEARED, |rig| {
        let cleared = rig.master.clear_replicas(&KEYS.map(str::as_bytes), client(9), "");
        assert!([0, KEYS.len()].contains(&cleared.len()));
    }),
    ("upserted and removed", |rig| {
        for key in KEYS {
            rig.upsert(9, key, 64).unwrap();
            rig.end(9, key).unwrap();
            rig.remove(key, true).unwrap();
        }
    }),
];

#[test]
fn a_removed_object_does_not_return_with_another_owner() {
    for (way, remove) in WAYS {
        for with_snapshot in [false, true] {
            let (rig, mut a, mut b) = twice();
            let next = if with_snapshot { next_with(snapshot(&rig), 4) } else { another(4) };
            assert_eq!(b.returns(&next), [Ok(()); 4], "{way}");
            remove(&next);
            assert!(KEYS.iter().all(|key| !next.has(key)), "{way}");
            assert_eq!(a.returns(&next), refused(4), "{way}, snapshot: {with_snapshot}");
            assert_eq!(b.announce(&next), [Err(ErrorCode::InvalidParams); 4], "its space was taken");
            assert!(KEYS.iter().all(|key| !next.has(key)), "{way}");
            // A later put counts as ever.
            next.put(9, "k0", 64).unwrap();
            assert!(next.has("k0"));
        }
    }
}

/// The removals find no object, because no owner has announced one yet.
#[test]
fn an_object_that_is_removed_before_its_owner_returns_stays_away() {
    for (way, remove) in WAYS {
        for with_snapshot in [false, true] {
            let (rig, mut a, mut b) = twice();
            let next = if with_snapshot { next_with(snapshot(&rig), 4) } else { another(4) };
            next.mount(7, MIB);
            remove(&next);
            assert_eq!((a.returns(&next), b.returns(&next)), (refused(4), refused(4)), "{way}");
            assert!(KEYS.iter().all(|key| !next.has(key)), "{way}, snapshot: {with_snapshot}");
        }
    }
}

/// The next snapshot contains what was removed before any owner returned, and what returned and was
/// removed then.
#[test]
fn a_removal_right_after_the_restart_outlives_a_second_one() {
    for (way, remove) in WAYS {
        for b_returns in [false, true] {
            let (rig, mut a, mut b) = twice();
            let second = next_with(snapshot(&rig), 4);
            second.mount(7, MIB);
            if b_returns {
                assert_eq!(b.returns(&second), [Ok(()); 4]);
            }
            remove(&second);
            let third = next_with(snapshot(&second), 5);
            assert_eq!(snapshot(&third).objects(), 0, "{way}");
            b.stored.retain(|_| !b_returns);
            assert_eq!(a.returns(&third), refused(4), "{way}");
            assert_eq!(b.returns(&third), refused(b.stored.len()), "{way}");
        }
    }
}

#[test]
fn the_rest_of_a_removal_by_pattern_or_of_a_tenant_returns() {
    let (rig, mut a, _) = twice();
    let next = next_with(snapshot(&rig), 4);
    next.master.remove_matching("^k[01]$", true).unwrap();
    next.remove("k2", true).unwrap_err();
    let gone = Err(ObjectAlreadyExists);
    assert_eq!(a.returns(&next), [gone, gone, gone, Ok(())]);

    let quota = |name: &str| TenantQuota { name: name.into(), bytes: MIB };
    let options =
        || MasterOptions { tenants: Some(vec![quota("t"), quota("u")]), ..MasterOptions::default() };
    let rig = with_options(3, options());
    let mut owner = Owner::join(&rig, 1);
    for key in ["t\0k", "u\0k", "u\0l"] {
        rig.put(9, key, KIB).unwrap();
    }
    owner.hear(&rig);
    let next = with_options(4, options());
    next.master.remove_all_of("t", true);
    next.master.remove_matching_of("u", "^l", true).unwrap();
    assert_eq!(owner.returns(&next), [gone, Ok(()), gone]);
    // A tenant that was removed has no objects, even if it is registered again.
    let next = with_options(5, options());
    next.master.remove_tenant("u").unwrap();
    next.master.set_tenant(&quota("u")).unwrap();
    assert_eq!(owner.returns(&next), [Ok(()), gone, gone]);
}

/// Owner A is away while B stores new values; then B is gone, too.
#[test]
fn a_value_that_was_replaced_under_a_master_between_stays_away() {
    for with_first_snapshot in [false, true] {
        let (rig, mut a, mut b) = twice();
        let second = if with_first_snapshot { next_with(snapshot(&rig), 4) } else { another(4) };
        b.stored.clear();
        b.remount(&second);
        for key in ["k0", "k1"] {
            second.upsert(9, key, 64).unwrap();
            second.end(9, key).unwrap();
        }
        second.remove("k2", true).unwrap_err();
        let third = next_with(snapshot(&second), 5);
        let untouched = if with_first_snapshot { Ok(()) } else { Err(ObjectAlreadyExists) };
        let gone = Err(ObjectAlreadyExists);
        assert_eq!(a.returns(&third), [gone, gone, gone, untouched]);
        assert_eq!(third.has("k3"), with_first_snapshot, "the second master knew of it from the first");
    }
}

/// The later value of two earlier masters counts, in whatever order they come.
#[test]
fn the_value_of_the_later_master_counts() {
    for a_first in [false, true] {
        let (rig, mut a, mut b) = twice();
        let first = snapshot(&rig);
        let second = next_with(first.clone(), 4);
        b.stored.clear();
        b.remount(&second);
        for key in KEYS {
            second.upsert(9, key, 64).unwrap();
            second.end(9, key).unwrap();
        }
        b.hear(&second);
        // The second master wrote no snapshot.
        let third = next_with(first, 5);
        let len = |key: &str| third.locate(key).unwrap().replicas[0].location.size();
        if a_first {
            assert_eq!(a.returns(&third), [Ok(()); 4]);
            assert_eq!(b.returns(&third), [Ok(()); 4]);
        } else {
            assert_eq!(b.returns(&third), [Ok(()); 4]);
            assert_eq!(a.returns(&third), refused(4));
        }
        assert!(KEYS.iter().all(|key| len(key) == 64));
        // An evicted value does not uncover the one before.
        let fourth = another(6);
        assert_eq!(b.returns(&fourth), [Ok(()); 4]);
        fourth.master.unmount(client(2), b.segment.id).unwrap();
        fourth.pass(1.1);
        assert!(KEYS.iter().all(|key| !fourth.has(key)));
        assert_eq!(a.returns(&fourth), refused(4), "the order is known from the other owner");
    }
}

/// The second master wrote no snapshot, and the only client that has met it does not report the
/// order of masters, as clients of earlier versions. The third master knows the order from the
/// folder of the snapshots.
#[test]
fn a_term_without_a_snapshot_is_in_the_order_of_masters() {
    for knows_order in [false, true] {
        let (rig, _, mut b) = twice();
        let first = snapshot(&rig);
        let second = next_with(first.clone(), 4);
        b.stored.clear();
        b.remount(&second);
        second.upsert(9, "k0", 64).unwrap();
        second.end(9, "k0").unwrap();
        b.hear(&second);
        let third = next_with(first, 5);
        if knows_order {
            third.master.follow(&[second.master.epoch(), rig.master.epoch()]);
        }
        let page = third.master.inventory(client(2), 0);
        (b.epoch, b.epochs) = (page.epoch, Vec::new());
        let expected = if knows_order { Ok(()) } else { Err(ObjectAlreadyExists) };
        assert_eq!(b.returns(&third), [expected]);
        assert_eq!(third.has("k0"), knows_order);
    }
}

#[test]
fn a_loss_of_one_owner_leaves_the_replicas_of_the_other() {
    let (_, mut a, mut b) = twice();
    let next = another(4);
    assert_eq!(b.returns(&next), [Ok(()); 4]);
    next.master.unmount(client(2), b.segment.id).unwrap();
    next.pass(1.1);
    assert!(!next.has("k0"));
    assert_eq!(a.returns(&next), [Ok(()); 4]);
    assert!(next.has("k0"));
}

/// A key is stored and evicted before the owner of its earlier value returns.
#[test]
fn an_evicted_value_does_not_uncover_the_one_before() {
    let (rig, mut a, _) = twice();
    let next = next_with(snapshot(&rig), 4);
    next.mount(7, 64 * KIB);
    next.put(9, "k0", 32 * KIB).unwrap();
    next.put(9, "other", 60 * KIB).unwrap();
    assert!(!next.has("k0"));
    assert_eq!(a.returns(&next)[..2], [Err(ObjectAlreadyExists), Ok(())]);
}

fn listed(page: &InventoryPage) -> Vec<&[u8]> {
    let mut keys: Vec<_> =
        page.changes.iter().filter_map(|change| change.stored.as_ref()).map(|stored| &*stored.key).collect();
    keys.sort_unstable();
    keys
}

/// Announcements end ten minutes after the start. A client that is late finds in a list
/// what still counts. An owner that announces at that time goes on, and the same objects count.
#[test]
fn a_late_owner_announces_what_the_master_lists() {
    for (with_snapshot, knows_list) in [(false, false), (false, true), (true, false), (true, true)] {
        let (rig, mut a, mut b) = twice();
        rig.remove("k3", true).unwrap();
        let next = if with_snapshot { next_with(snapshot(&rig), 4) } else { another(4) };
        next.mount(7, MIB);
        next.remove("k0", true).unwrap_err();
        next.put(9, "k1", 64).unwrap();
        assert!(next.master.unclaimed(client(1), a.segment.id, 0).changes.is_empty());
        next.alive_for(600.0);
        (0..300).for_each(|_| next.pass(0.01));
        let page = next.master.unclaimed(client(1), a.segment.id, 0);
        assert!(page.whole);
        let expected: &[&[u8]] = if with_snapshot { &[b"k2"] } else { &[] };
        assert_eq!(listed(&page), expected);
        // k3 was removed before, k0 and k1 since.
        a.remount(&next);
        for stored in &a.stored {
            let outcome = match knows_list {
                true => next.master.announce_expired(client(1), stored),
                false => next.master.announce(client(1), stored),
            };
            let counts = with_snapshot && stored.key == b"k2";
            let expected = if counts { Ok(()) } else { Err(ObjectAlreadyExists) };
            assert_eq!(outcome.map_err(|error| error.code()), expected);
        }
        assert_eq!((next.has("k2"), next.has("k3"), next.has("k0")), (with_snapshot, false, false));
        // An object that is removed later leaves the list, too.
        next.remove("k2", true).ok();
        b.remount(&next);
        assert!(b.stored.iter().all(|stored| next.master.announce_expired(client(2), stored).is_err()));
        next.alive_for(601.0);
        assert!(next.master.unclaimed(client(2), b.segment.id, 0).changes.is_empty());
    }
}

/// The list does not say when objects end, but their owners know it.
#[test]
fn a_late_owner_announces_objects_that_end_by_themselves() {
    let rig = another(3);
    let mut owner = Owner::join(&rig, 1);
    let hints = PutHints { ttl_ms: Some(3_600_000), ..PutHints::default() };
    let config = ReplicateConfig { hints: Some(Box::new(hints)), ..ReplicateConfig::default() };
    for key in KEYS {
        rig.put_with(9, key, 4 * KIB, &config).unwrap();
    }
    let timed = rig.master.timed_inventory(client(1), 0);
    owner.stored.extend(timed.page.changes.into_iter().filter_map(|change| change.stored));
    let next = next_with(snapshot(&rig), 4);
    next.remove("k0", true).unwrap_err();
    end_announcements(&next);
    assert!(next.master.unclaimed(client(1), owner.segment.id, 0).changes.is_empty());
    owner.remount(&next);
    let announce = |stored| {
        let lifetime = Some(timed.lifetimes[0].lifetime);
        next.master.announce_timed(client(1), stored, lifetime).map_err(|error| error.code())
    };
    let outcomes: Vec<_> = owner.stored.iter().map(announce).collect();
    assert_eq!(outcomes, [Err(ObjectAlreadyExists), Ok(()), Ok(()), Ok(())]);
    next.alive_for(3000.0);
    assert!(!next.has("k1"), "it ended by itself");
}

/// Lets the time for announcements of earlier values end.
pub(super) fn end_announcements(rig: &Rig) {
    rig.alive_for(600.0);
    (0..300).for_each(|_| rig.pass(0.01));
}

/// The response to a clear lists what was cleared. A key that is not there is not in it, and its
/// object returns, unless the same client has written it.
#[test]
fn a_clear_of_an_absent_key_ends_no_object_of_another_client() {
    for (clearer, returns) in [(9, false), (8, true)] {
        for segment_name in ["", "node1:1"] {
            let (rig, mut a, mut b) = twice();
            let second = next_with(snapshot(&rig), 4);
            let cleared =
                second.master.clear_replicas(&KEYS.map(str::as_bytes), client(clearer), segment_name);
            assert!(cleared.is_empty());
            let returns = returns || !segment_name.is_empty();
            let expected = if returns { vec![Ok(()); 4] } else { refused(4) };
            assert_eq!(a.returns(&second), expected, "cleared by {clearer} in {segment_name:?}");
            // The next snapshot has what may return.
            let third = next_with(snapshot(&second), 5);
            assert_eq!(b.returns(&third), expected, "cleared by {clearer} in {segment_name:?}");
        }
    }
}

/// A clear counts for what its client wrote, however late the owner comes.
#[test]
fn a_cleared_object_does_not_return_late() {
    for clears_late in [false, true] {
        let (rig, mut a, mut b) = twice();
        let next = next_with(snapshot(&rig), 4);
        next.mount(7, MIB);
        let clear = || next.master.clear_replicas(&[b"k0"], client(9), "");
        if !clears_late {
            clear();
        }
        end_announcements(&next);
        if clears_late {
            clear();
        }
        let gone = Err(ObjectAlreadyExists);
        assert_eq!(a.returns(&next), [gone, Ok(()), Ok(()), Ok(())], "cleared late: {clears_late}");
        assert_eq!(b.returns(&next)[0], gone);
        assert!(!next.has("k0") && next.has("k1"));
    }
}

/// The object that the clear finds belongs to another client.
#[test]
fn a_clear_counts_beside_a_write_and_a_value_of_another_client() {
    for ends in [false, true] {
        let (rig, mut a, _) = twice();
        let next = next_with(snapshot(&rig), 4);
        next.mount(7, MIB);
        next.start(8, "k0", KIB).unwrap();
        assert!(next.master.clear_replicas(&[b"k0"], client(9), "").is_empty());
        if ends {
            next.end(8, "k0").unwrap();
            next.remove("k0", true).unwrap();
        } else {
            next.revoke(8, "k0").unwrap();
        }
        let gone = Err(ObjectAlreadyExists);
        assert_eq!(a.returns(&next), [gone, Ok(()), Ok(()), Ok(())], "the write ends: {ends}");
    }
    // A later value of the clearing client has not returned yet, an earlier one of another has.
    let rig = another(3);
    let (mut a, mut b) = (Owner::join(&rig, 1), Owner::join(&rig, 2));
    rig.put_with(8, "k", 4 * KIB, &on(1)).unwrap();
    a.hear(&rig);
    rig.start_with(9, "k", 8 * KIB, WriteMode::Upsert, &on(2)).unwrap();
    rig.end(9, "k").unwrap();
    b.hear(&rig);
    let next = another(4);
    assert_eq!(a.returns(&next), [Ok(())]);
    assert!(next.master.clear_replicas(&[b"k"], client(9), "").is_empty());
    assert_eq!(b.returns(&next), refused(1));
}

/// Returns a configuration that prefers the segment of an owner.
pub(super) fn on(who: u64) -> ReplicateConfig {
    let preferred_segments = vec![crate::common::rig::segment(who, MIB).name];
    ReplicateConfig { preferred_segments, ..ReplicateConfig::default() }
}

/// A tenant may be registered only after its objects were removed.
#[test]
fn a_removal_counts_for_a_tenant_that_is_registered_later() {
    let quota = || TenantQuota { name: "t".into(), bytes: MIB };
    let ways: [fn(&Rig); 5] = [
        |rig| assert_eq!(rig.master.handle(RemoveAll { force: true, tenant: "t" }).unwrap(), 0),
        |rig| {
            let removed = rig.master.handle(RemoveByRegex { pattern: "k", force: true, tenant: "t" });
            assert_eq!(removed.unwrap(), 0);
        },
        |rig| {
            let removed = rig.master.handle(Remove { key: b"k", force: true, tenant: "t" });
            assert_eq!(removed.unwrap_err().code(), ObjectNotFound);
        },
        |rig| assert!(rig.master.clear_replicas_of("t", &[b"k"], client(9), "").is_empty()),
        |rig| {
            rig.master.set_tenant(&TenantQuota { name: "t".into(), bytes: MIB }).unwrap();
            rig.master.remove_tenant("t").unwrap();
        },
    ];
    for (way, remove) in ways.iter().enumerate() {
        let with = |seed, tenants: Vec<TenantQuota>| {
            with_options(seed, MasterOptions { tenants: Some(tenants), ..MasterOptions::default() })
        };
        let rig = with(3, vec![quota()]);
        let mut owner = Owner::join(&rig, 1);
        rig.put(9, "t\0k", KIB).unwrap();
        owner.hear(&rig);
        let next = with(4, Vec::new());
        remove(&next);
        next.master.set_tenant(&quota()).unwrap();
        assert_eq!(owner.returns(&next), refused(1), "way {way}");
        assert!(!next.has("t\0k"));
    }
}

/// The process is stopped right after its start, so no owner can have returned.
#[test]
fn a_stop_of_the_process_is_no_time_for_announcements() {
    for is_stopped in [true, false] {
        let (_, mut a, mut b) = twice();
        let next = another(4);
        next.master.tick();
        let span = Duration::from_secs(601);
        next.clock.advance(span);
        if is_stopped {
            next.master.was_stopped(span);
        }
        next.master.tick();
        let expected = if is_stopped { vec![Ok(()); 4] } else { refused(4) };
        assert_eq!(a.returns(&next), expected, "stopped: {is_stopped}");
        // The rest of the time runs as ever.
        next.alive_for(600.0);
        current_client(&next, 1);
        next.master.unmount(client(1), a.segment.id).unwrap();
        next.pass(1.1);
        assert_eq!(b.returns(&next), refused(4));
    }
}

/// The next process of a segment file announces objects, and the master accepts those that it has.
#[test]
fn memory_that_is_handed_over_returns_without_what_was_removed() {
    let rig = another(3);
    let mut owner = Owner::join(&rig, 1);
    for key in KEYS {
        rig.put(9, key, 4 * KIB).unwrap();
    }
    owner.hear(&rig);
    rig.remove("k0", true).unwrap();
    rig.master.hand_over(client(1), owner.segment.id).unwrap();
    rig.mount(7, MIB);
    assert_eq!(rig.remove("k1", true), Err(ObjectNotFound));
    rig.put(9, "k2", 64).unwrap();
    rig.pass(1.1);
    let moved = crate::common::rig::segment(8, MIB);
    owner.segment.id = moved.id;
    owner.stored.iter_mut().for_each(|stored| stored.segment = moved.id);
    let gone = Err(ObjectAlreadyExists);
    assert_eq!(owner.returns(&rig), [gone, gone, gone, Ok(())]);
    assert!(rig.has("k3"));
    // Without a list, values of this master are not announced.
    rig.master.unmount(client(8), moved.id).unwrap_err();
    current_client(&rig, 1);
    rig.master.unmount(client(1), moved.id).unwrap();
    rig.pass(1.1);
    assert_eq!(owner.returns(&rig), refused(4));
}

/// Lets a client report the order of masters, which those of earlier versions do not.
fn current_client(rig: &Rig, who: u64) {
    let epochs = Cow::Owned(Vec::new());
    Handle::handle(&rig.master, ExchangeEpochs { client: client(who), epochs }).unwrap();
}

/// The next process of a segment file of an earlier version unmounts the memory of its previous
/// process, and announces the objects in it.
#[test]
fn a_client_of_an_earlier_version_hands_memory_over_by_an_unmount() {
    for (previous_is_current, next_is_current) in [(false, false), (true, false), (true, true)] {
        let rig = another(3);
        let mut owner = Owner::join(&rig, 1);
        if previous_is_current {
            current_client(&rig, 1);
        }
        KEYS.iter().for_each(|key| drop(rig.put(9, key, 4 * KIB).unwrap()));
        owner.hear(&rig);
        rig.remove("k0", true).unwrap();
        // The next process.
        rig.master.exchange_promise(client(1), 0);
        if next_is_current {
            current_client(&rig, 1);
        }
        rig.master.unmount(client(1), owner.segment.id).unwrap();
        rig.mount(7, MIB);
        assert_eq!(rig.remove("k1", true), Err(ObjectNotFound));
        rig.put(9, "k2", 64).unwrap();
        rig.pass(1.1);
        let moved = crate::common::rig::segment(8, MIB);
        owner.segment.id = moved.id;
        owner.stored.iter_mut().for_each(|stored| stored.segment = moved.id);
        let gone = Err(ObjectAlreadyExists);
        let expected = if next_is_current { gone } else { Ok(()) };
        assert_eq!(owner.returns(&rig), [gone, gone, gone, expected]);
        assert_eq!(rig.has("k3"), !next_is_current);
    }
}

/// A removal of everything counts for what an expired client announces while it runs and later.
#[test]
fn a_removal_of_all_takes_what_expired_clients_hold() {
    for (way, remove) in WAYS {
        let rig = another(3);
        let mut owner = Owner::join(&rig, 1);
        KEYS.iter().for_each(|key| drop(rig.put(9, key, 4 * KIB).unwrap()));
        owner.hear(&rig);
        rig.pass(11.0);
        rig.mount(7, MIB);
        remove(&rig);
        owner.remount(&rig);
        for stored in &owner.stored {
            let outcome = rig.master.announce_expired(client(1), stored).map_err(|error| error.code());
            assert_eq!(outcome, Err(ObjectAlreadyExists), "{way}");
        }
        assert!(KEYS.iter().all(|key| !rig.has(key)), "{way}");
    }
}
