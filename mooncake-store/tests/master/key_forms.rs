//! Objects of a master that was started with another setting of tenants than the next one.

use std::sync::Arc;
use std::time::Duration;

use crate::common::rig::{KIB, MIB, Rig, client};
use mooncake_core::alloc::Extent;
use mooncake_core::clock::ManualClock;
use mooncake_core::evict::PolicyKind;
use mooncake_core::replica::Segment;
use mooncake_core::{ErrorCode, Result};
use mooncake_store::master::{Master, MasterOptions, Snapshot, TenantQuota};
use mooncake_store::protocol::key_form::KeyForm;
use mooncake_store::protocol::wire::{HeldObjects, StoredReplica};

/// Returns a master with these tenants; without tenants for none.
fn master(seed: u64, tenants: &[&str]) -> Rig {
    let clock = Arc::new(ManualClock::new());
    clock.advance(Duration::from_secs(seed));
    let quota = |name: &&str| TenantQuota { name: (*name).into(), bytes: MIB };
    let tenants = Some(tenants.iter().map(quota).collect()).filter(|tenants: &Vec<_>| !tenants.is_empty());
    let options = MasterOptions { tenants, ..MasterOptions::default() };
    let policy = PolicyKind::Lru.into();
    let master = Master::with_parts(options, &Default::default(), &policy, clock.clone(), seed).unwrap();
    Rig { clock, master }
}

/// Returns what an owner stored under these directory keys, its segment, and a snapshot.
fn stored(rig: &Rig, keys: &[&str]) -> (Segment, Vec<StoredReplica>, Snapshot) {
    rig.master.inventory(client(1), 0);
    let segment = rig.mount(1, MIB);
    for key in keys {
        rig.put(1, key, 4 * KIB).unwrap();
    }
    let page = rig.master.inventory(client(1), 0);
    let stored = page.changes.into_iter().filter_map(|change| change.stored).collect();
    let mut bytes = Vec::new();
    let write = |more: &[u8]| {
        bytes.extend_from_slice(more);
        Ok(())
    };
    rig.master.snapshot(write).unwrap();
    (segment, stored, Snapshot::read(&bytes).unwrap())
}

/// Announces objects to the next master, with the keys of its setting if the owner converts them.
fn announce(rig: &Rig, segment: &Segment, stored: &[StoredReplica]) -> Vec<Result<(), ErrorCode>> {
    let extent =
        |stored: &StoredReplica| Extent { offset: stored.offset, len: stored.len.next_multiple_of(64) };
    let extents: Vec<_> = stored.iter().map(extent).collect();
    rig.master.mount_with_objects(client(1), segment).unwrap();
    rig.master.reserve_extents(client(1), segment.id, &extents, true).unwrap();
    let announce = |stored| rig.master.announce(client(1), stored).map_err(|error| error.code());
    let outcomes = stored.iter().map(announce).collect();
    rig.master.release_reserved(client(1), segment.id).unwrap();
    outcomes
}

/// Owners of earlier versions do not convert keys. A key without a tenant is one of the tenant
/// `default`, and can be removed.
#[test]
fn plain_keys_of_an_earlier_owner_belong_to_the_default_tenant() {
    for with_snapshot in [false, true] {
        let (segment, stored, snapshot) = stored(&master(1, &[]), &["a", "b"]);
        let next = master(2, &["default", "blue"]);
        if with_snapshot {
            next.master.recall(snapshot);
        }
        assert_eq!(announce(&next, &segment, &stored), [Ok(()), Ok(())]);
        assert!(next.has("default\0a") && next.has("default\0b") && !next.has("a"));
        assert_eq!(next.master.tenant("default").unwrap().charged, 8 * KIB);
        assert_eq!(next.master.remove_all_of("blue", true), 0);
        assert_eq!(next.master.remove_all_of("default", true), 2);
        next.pass(1.0);
        assert_eq!(next.used(), next.master.stats().resting());
        assert_eq!(next.master.tenant("default").unwrap().charged, 0);
    }
}

#[test]
fn keys_without_a_registered_tenant_free_their_memory() {
    let (segment, stored, _) = stored(&master(1, &[]), &["a", "b"]);
    let next = master(2, &["blue"]);
    let refused = Err(ErrorCode::TenantNotRegistered);
    assert_eq!(announce(&next, &segment, &stored), [refused, refused]);
    assert_eq!((next.used(), next.master.stats().keys), (0, 0));
}

/// The snapshot has the keys of the earlier setting, and the owner announces those of the new one.
#[test]
fn a_snapshot_follows_the_setting() {
    let before = master(1, &["default", "blue"]);
    let (segment, mut stored, snapshot) = stored(&before, &["default\0a", "blue\0b"]);
    let next = master(2, &[]);
    next.master.recall(snapshot);
    stored.retain_mut(|replica| {
        let rest = replica.key.strip_prefix(b"default\0").map(<[u8]>::to_vec);
        rest.map(|key| replica.key = key).is_some()
    });
    assert_eq!(announce(&next, &segment, &stored), [Ok(())]);
    assert!(next.has("a"));
    assert_eq!(next.master.stats().keys, 1);
}

/// A key of a master without tenants may look like one of a tenant. Its owner says that it is none.
#[test]
fn a_plain_key_never_becomes_one_of_another_tenant() {
    let (segment, mut stored, _) = stored(&master(1, &[]), &["blue\0k"]);
    let next = master(2, &["default", "blue"]);
    let held = HeldObjects { has_tenants: false, of_default: 1, of_others: 0 };
    let keys = next.master.exchange_key_form(client(1), Some(held));
    assert!(keys.has_tenants && keys.epoch == next.master.epoch());
    let to = KeyForm::of_master(keys.has_tenants);
    for replica in &mut stored {
        assert!(KeyForm::Plain.convert(to, &mut replica.key, &mut replica.group));
    }
    assert_eq!(announce(&next, &segment, &stored), [Ok(())]);
    assert!(next.has("default\0blue\0k") && !next.has("blue\0k"));
}
