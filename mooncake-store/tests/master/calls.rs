//! Synchronous calls of the master: the responses of Mooncake C++ that can occur here, and the
//! guarantees about space.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use crate::common::rig::*;
use mooncake_core::error::ErrorCode::*;
use mooncake_core::evict::PolicyKind;
use mooncake_core::ids::{MAX_KEY_LEN, SegmentId, Uuid};
use mooncake_core::replica::{ReplicaStatus, ReplicaType, ReplicateConfig, Segment, SegmentStatus, SoftPin};
use mooncake_store::api::{DEFAULT_TENANT, WriteMode};
use mooncake_store::master::{MasterOptions, Put};
use mooncake_store::protocol::message::{
    BatchPutStart, GetReplicaListForAdmin, Handle, PutStart, UpsertStart,
};

#[test]
fn put_end_get() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    assert_eq!(rig.locate("k").unwrap_err(), ObjectNotFound);
    assert!(!rig.exists("k"));
    let granted = rig.start(9, "k", 1000).unwrap();
    assert_eq!(granted.len(), 1);
    assert_eq!(granted[0].status, ReplicaStatus::Processing);
    assert_eq!(granted[0].location.size(), 1000);
    assert_eq!(rig.locate("k").unwrap_err(), ReplicaIsNotReady);
    assert!(!rig.exists("k"));
    assert_eq!(rig.remove("k", true), Err(ReplicaIsNotReady));
    rig.master.put_end(client(9).into(), b"k", Some(77), ReplicaType::Memory).unwrap();
    let list = rig.locate("k").unwrap();
    assert_eq!((list.checksum, list.lease), (Some(77), Duration::from_secs(10)));
    assert_eq!(list.replicas[0].status, ReplicaStatus::Complete);
    assert_eq!(address(&list.replicas[0]), address(&granted[0]));
    assert_eq!(endpoint(&list.replicas[0]), "10.0.0.1:1");
}

/// A list without a lease has the checksum of the value that it lists, beside replacements.
#[test]
fn a_list_without_a_lease_is_of_one_value() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    let store = |len: u64| {
        rig.upsert(9, "k", len).unwrap();
        rig.master.put_end(client(9).into(), b"k", Some(len), ReplicaType::All).unwrap();
    };
    store(64);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            (0..20_000).for_each(|turn| store(64 + turn % 2));
            is_over.store(true, Relaxed);
        });
        while !is_over.load(Relaxed) {
            let call = GetReplicaListForAdmin { key: b"k", tenant: DEFAULT_TENANT };
            if let Ok(list) = rig.master.handle(call) {
                assert_eq!(list.checksum, Some(list.replicas[0].location.size()));
            }
        }
    });
}

/// Puts of existing objects are counted, those of a batch by their items.
#[test]
fn puts_of_existing_objects_are_counted() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    let counts = || (rig.master.stats().existed, rig.master.stats().existed_in_batches);
    let config = || Cow::Owned(ReplicateConfig::default());
    let (client, tenant) = (client(9), DEFAULT_TENANT);
    let put = |key| rig.master.handle(PutStart { client, key, size: 10, config: config(), tenant }).is_ok();
    let batch = |keys: &[&'static [u8]]| {
        let (sizes, keys) = (vec![10; keys.len()].into(), keys.to_vec().into());
        let started = rig.master.handle(BatchPutStart { client, keys, sizes, config: config(), tenant });
        started.iter().filter(|start| start.is_ok()).count()
    };
    rig.put(9, "a", 10).unwrap();
    assert_eq!((put(b"a"), counts()), (false, (1, 0)));
    assert_eq!((batch(&[b"a", b"b"]), counts()), (1, (1, 1)));
    assert_eq!((batch(&[b"a", b"b"]), counts()), (0, (1, 3)), "a write in progress counts");
    assert_eq!((batch(&[b"a"]), counts()), (0, (1, 4)), "a batch of one");
    let upsert = UpsertStart { client, key: b"a", size: 10, config: config(), tenant };
    assert!(rig.master.handle(upsert).is_ok());
    assert_eq!((put(b"c"), counts()), (true, (1, 4)));
}

#[test]
fn puts_that_make_no_sense_are_refused() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    let plain = ReplicateConfig::default();
    let refused = |key: &str, len, config: &ReplicateConfig| {
        rig.start_with(9, key, len, WriteMode::Put, config).unwrap_err()
    };
    assert_eq!(refused("", 1, &plain), InvalidParams);
    assert_eq!(refused(&"k".repeat(MAX_KEY_LEN + 1), 1, &plain), InvalidParams);
    assert_eq!(refused("k", 0, &plain), InvalidParams);
    for config in [
        ReplicateConfig::replicas(0),
        ReplicateConfig { nof_replicas: 1, ..plain.clone() },
        ReplicateConfig { dfs_replicas: 2, ..plain.clone() },
        ReplicateConfig { dfs_replicas: 1, replicas: 0, ..plain.clone() },
        ReplicateConfig { soft_pin_ttl_ms: Some(1), ..plain.clone() },
        ReplicateConfig {
            soft_pin: SoftPin::Enable,
            soft_pin_ttl_ms: Some(7 * 24 * 3_600_000 + 1),
            ..plain.clone()
        },
    ] {
        assert_eq!(refused("k", 1, &config), InvalidParams, "{config:?}");
    }
    let in_files = ReplicateConfig { dfs_replicas: 1, ..plain.clone() };
    assert_eq!(refused("k", 1, &in_files), DfsServiceUnavailable);
    assert_eq!(
        refused("k", 2 * MIB, &ReplicateConfig::default()),
        NoAvailableHandle,
        "larger than all memory"
    );
    assert_eq!(refused("k", u64::MAX, &ReplicateConfig::default()), NoAvailableHandle);
    let empty = Rig::new();
    assert_eq!(empty.start(9, "k", 1), Err(NoAvailableHandle), "no segment");
    assert_eq!(rig.used(), 0);
    assert_eq!(rig.master.stats().keys, 0);
}

#[test]
fn a_batch_has_a_group_for_each_key() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    let groups = ReplicateConfig { group_ids: Some(vec!["g".into()]), ..ReplicateConfig::default() };
    let keys: [&[u8]; 2] = [b"a", b"b"];
    let start = |count| {
        let answers = rig.master.handle(BatchPutStart {
            client: client(1),
            keys: Cow::Borrowed(&keys[..count]),
            sizes: Cow::Borrowed(&[1, 1][..count]),
            config: Cow::Borrowed(&groups),
            tenant: DEFAULT_TENANT,
        });
        answers.into_iter().map(|answer| answer.map(|_| ()).map_err(|e| e.code())).collect::<Vec<_>>()
    };
    assert_eq!(start(2), [Err(InvalidParams), Err(InvalidParams)]);
    assert_eq!(start(1), [Ok(())]);
}

#[test]
fn keys_are_any_bytes() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    for key in ["a\0b", "line\nbreak", "ключ", &"k".repeat(MAX_KEY_LEN)] {
        rig.put(9, key, 10).unwrap();
        assert!(rig.exists(key));
    }
    assert_eq!(rig.master.keys().len(), 4);
}

#[test]
fn a_duplicate_put_is_refused_by_name() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    rig.start(1, "k", 10).unwrap();
    assert_eq!(rig.start(2, "k", 10), Err(ObjectAlreadyExists), "being written");
    assert_eq!(
        rig.start(1, "k", 10),
        Err(ObjectAlreadyExists),
        "by another thread of the same client, perhaps"
    );
    rig.end(1, "k").unwrap();
    assert_eq!(rig.start(2, "k", 10), Err(ObjectAlreadyExists), "complete");
}

#[test]
fn segments_beyond_all_addresses_are_refused() {
    let rig = Rig::new();
    let mount = |base, size| {
        let segment = Segment { base, size, ..segment(1, MIB) };
        rig.master.mount(client(1), &segment).map_err(|e| e.code())
    };
    for (base, size) in [(0, 1), (1, 0), (1, u64::MAX), (1 << 20, 1 << 63), (1 << 57, 1), ((1 << 57) - 1, 2)]
    {
        assert_eq!(mount(base, size), Err(InvalidParams), "{base:#x} {size:#x}");
    }
    assert_eq!(rig.master.stats().segments.len(), 0);
    assert_eq!(mount((1 << 57) - MIB, MIB), Ok(()));
}

#[test]
fn remove_waits_for_the_lease_and_force_does_not() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    rig.put(9, "k", 100).unwrap();
    assert!(rig.exists("k"), "which is a lease too");
    assert_eq!(rig.remove("k", false), Err(ObjectHasLease));
    rig.alive_for(10.0);
    assert_eq!(rig.remove("k", false), Ok(()));
    assert_eq!(rig.remove("k", false), Err(ObjectNotFound));
    assert_eq!(rig.used(), 0);

    rig.put(9, "k", 100).unwrap();
    let read = rig.locate("k").unwrap();
    assert_eq!(rig.remove("k", true), Ok(()));
    assert_eq!(rig.locate("k").unwrap_err(), ObjectNotFound);
    assert_ne!(rig.used(), 0, "the reader may still be at it");
    let other = rig.put(9, "other", 100).unwrap();
    assert_ne!(address(&other[0]), address(&read.replicas[0]));
    rig.alive_for(10.0);
    rig.remove("other", false).unwrap();
    assert_eq!(rig.used(), 0);
}

#[test]
fn an_unread_object_can_be_removed_at_once() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    rig.put(9, "k", 100).unwrap();
    assert_eq!(rig.remove("k", false), Ok(()));
    assert_eq!(rig.used(), 0);
}

#[test]
fn patterns_remove_what_they_find() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    for key in ["a1", "a2", "ba3", "c", "leased-a", "writing-a"] {
        if key == "writing-a" {
            rig.start(9, key, 10).unwrap();
        } else {
            rig.put(9, key, 10).unwrap();
        }
    }
    rig.exists("leased-a");
    assert_eq!(rig.master.remove_matching("a[0-9]$", false).unwrap(), 3, "anywhere in the key");
    assert_eq!(rig.master.remove_matching("a", false).unwrap(), 0, "one has a lease, one is being written");
    assert_eq!(rig.master.remove_matching("^c", false).unwrap(), 1);
    for bad in ["(", "a{1000}{1000}", "(?=a)", r"(a)\1", &"a".repeat(5000)] {
        assert_eq!(rig.master.remove_matching(bad, false).unwrap_err().code(), InvalidParams, "{bad:.20}");
        assert_eq!(rig.master.locate_matching(bad).unwrap_err().code(), InvalidParams);
    }
    assert_eq!(rig.master.remove_all(true), 1, "the leased one; the write stays");
    rig.end(9, "writing-a").unwrap();
    let found = rig.master.locate_matching("ing").unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(rig.remove("writing-a", false), Err(ObjectHasLease), "the search granted one");
}

#[test]
fn clearing_is_for_own_objects_without_lease() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    rig.mount(2, MIB);
    rig.put(1, "own", 10).unwrap();
    rig.put(2, "foreign", 10).unwrap();
    rig.put(1, "leased", 10).unwrap();
    rig.exists("leased");
    let both = rig.put_with(1, "both", 10, &ReplicateConfig::replicas(2)).unwrap();
    assert_eq!(both.len(), 2);
    let clear = |keys: &[&[u8]], segment| {
        let cleared = rig.master.clear_replicas(keys, client(1), segment);
        cleared.iter().map(|key| key.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(clear(&[b"own", b"foreign", b"leased", b"absent"], ""), ["own"]);
    assert_eq!(clear(&[b"both"], "nowhere"), [""; 0]);
    assert_eq!(clear(&[b"both"], "node1:1"), ["both"]);
    assert_eq!(endpoint(&rig.locate("both").unwrap().replicas[0]), "10.0.0.2:1");
}

#[test]
fn an_upsert_keeps_the_old_value_until_its_end() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    let old = rig.put(1, "k", 100).unwrap();
    for len in [100, 200] {
        let new = rig.upsert(2, "k", len).unwrap();
        assert_ne!(address(&new[0]), address(&old[0]), "nothing is written over what can be read");
        assert_eq!(rig.locate("k").unwrap().replicas[0].id, old[0].id);
        rig.revoke(2, "k").unwrap();
        assert_eq!(rig.locate("k").unwrap().replicas[0].id, old[0].id, "a failed upsert changes nothing");
    }
    let new = rig.upsert(2, "k", 200).unwrap();
    rig.end(2, "k").unwrap();
    let list = rig.locate("k").unwrap();
    assert_eq!((list.replicas[0].id, list.replicas[0].location.size()), (new[0].id, 200));
    let other = rig.put(1, "other", 100).unwrap();
    assert_ne!(address(&other[0]), address(&old[0]), "readers of the old value hold leases on it");
    rig.alive_for(11.0);
    rig.master.remove_all(false);
    assert_eq!(rig.used(), 0);
}

#[test]
fn an_upsert_of_nothing_is_a_put() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    rig.upsert(1, "k", 100).unwrap();
    assert_eq!(rig.locate("k").unwrap_err(), ReplicaIsNotReady);
    rig.end(1, "k").unwrap();
    assert!(rig.exists("k"));
}

#[test]
fn an_upsert_preempts_another_client_but_not_itself() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    let loser = rig.start(1, "k", 100).unwrap();
    assert_eq!(rig.upsert(1, "k", 100), Err(ObjectReplicaBusy), "its two ends could not be told apart");
    let winner = rig.upsert(2, "k", 100).unwrap();
    assert_ne!(address(&winner[0]), address(&loser[0]));
    assert_eq!(rig.end(1, "k"), Err(IllegalClient));
    rig.end(2, "k").unwrap();
    assert_eq!(rig.end(1, "k"), Err(IllegalClient));
    let other = rig.put(3, "other", 100).unwrap();
    assert_ne!(address(&other[0]), address(&loser[0]), "the loser may still write to it");
}

#[test]
fn an_upsert_without_space_uses_the_old_space_only_when_unread() {
    let rig = Rig::without_watermark();
    rig.mount(1, 64 * KIB);
    let pinned = ReplicateConfig { hard_pin: true, ..ReplicateConfig::default() };
    let old = rig.put_with(1, "k", 64 * KIB, &pinned).unwrap();
    assert_eq!(rig.upsert(2, "k", 32 * KIB), Err(NoAvailableHandle), "another length");
    assert!(rig.exists("k"), "and the old value is still there");
    assert_eq!(rig.upsert(2, "k", 64 * KIB), Err(NoAvailableHandle), "a reader has a lease");
    rig.alive_for(10.0);
    let new = rig.upsert(2, "k", 64 * KIB).unwrap();
    assert_eq!(address(&new[0]), address(&old[0]));
    assert!(new[0].id != old[0].id, "who keeps values by their numbers sees that it is another one");
    assert_eq!(rig.locate("k").unwrap_err(), ReplicaIsNotReady);
    rig.end(2, "k").unwrap();
    assert!(rig.exists("k"));
}

#[test]
fn the_group_of_an_object_does_not_change() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    let config = ReplicateConfig::default();
    let upsert = |group| {
        let put = Put {
            writer: client(1).into(),
            mode: WriteMode::Upsert,
            key: b"k",
            len: 1,
            config: &config,
            group,
            session: None,
        };
        rig.master.put_start(&put).map(|_| ()).map_err(|e| e.code())
    };
    upsert("g").unwrap();
    rig.end(1, "k").unwrap();
    assert_eq!(upsert("h"), Err(InvalidParams));
    assert_eq!(upsert("g"), Ok(()));
}

#[test]
fn an_abandoned_write_is_taken_over_and_its_space_comes_back_later() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    let zombie = rig.start(1, "k", 100).unwrap();
    rig.start(1, "alone", 100).unwrap();
    rig.alive_for(29.0);
    assert_eq!(rig.start(2, "k", 100), Err(ObjectAlreadyExists));
    rig.alive_for(1.0);
    let heir = rig.start(2, "k", 100).unwrap();
    assert_ne!(address(&heir[0]), address(&zombie[0]));
    assert_eq!(rig.end(1, "k"), Err(IllegalClient));
    rig.end(2, "k").unwrap();
    rig.alive_for(569.0);
    assert_eq!(rig.end(1, "alone"), Ok(()), "late, but within its grant");
    rig.remove("alone", false).unwrap();
    assert_eq!(rig.used(), 256, "the heir's value and the zombie's space");
    rig.alive_for(2.0);
    assert_eq!(rig.used(), 128);
}

#[test]
fn a_grant_runs_out() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    rig.start(1, "k", 100).unwrap();
    rig.clock.advance(Duration::from_secs(600));
    assert_eq!(rig.end(1, "k"), Err(InvalidWrite), "even before anybody looked");
    assert_eq!(rig.end(1, "k"), Err(ObjectNotFound));
    assert_eq!(rig.used(), 0);
}

#[test]
fn pins() {
    let rig = Rig::without_watermark();
    rig.mount(1, 4 * 64 * KIB);
    let hard = ReplicateConfig { hard_pin: true, ..ReplicateConfig::default() };
    let soft = ReplicateConfig {
        soft_pin: SoftPin::Enable,
        soft_pin_ttl_ms: Some(60_000),
        ..ReplicateConfig::default()
    };
    let none = ReplicateConfig { soft_pin_ttl_ms: Some(0), ..soft.clone() };
    rig.put_with(1, "hard", 64 * KIB, &hard).unwrap();
    rig.put_with(1, "soft", 64 * KIB, &soft).unwrap();
    rig.put_with(1, "ttl 0", 64 * KIB, &none).unwrap();
    rig.put(1, "plain", 64 * KIB).unwrap();
    rig.put(1, "new 1", 64 * KIB).unwrap();
    assert!(!rig.has("ttl 0") && rig.has("soft") && rig.has("plain"));
    rig.put(1, "new 2", 64 * KIB).unwrap();
    assert!(!rig.has("plain") && rig.has("soft"));
    assert_eq!(rig.master.stats().soft_pinned, 1);
    rig.exists("new 1");
    rig.exists("new 2");
    rig.put(1, "new 3", 64 * KIB).unwrap();
    assert!(!rig.has("soft"), "the last resort");
    rig.exists("new 3");
    assert_eq!(rig.put(1, "new 4", 64 * KIB), Err(NoAvailableHandle), "leases and a hard pin are left");
    assert!(rig.has("hard"));
    rig.alive_for(10.0);
    rig.put(1, "new 4", 64 * KIB).unwrap();
    assert_eq!(rig.remove("hard", false), Ok(()), "explicitly it goes");
}

#[test]
fn soft_pins_are_kept_changed_and_run_out() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    let with = |action| ReplicateConfig { soft_pin: action, ..ReplicateConfig::default() };
    let upsert = |action| {
        rig.start_with(1, "k", 10, WriteMode::Upsert, &with(action)).unwrap();
        rig.end(1, "k").unwrap();
        rig.master.stats().soft_pinned
    };
    assert_eq!(upsert(SoftPin::Enable), 1);
    assert_eq!(upsert(SoftPin::Preserve), 1);
    assert_eq!(upsert(SoftPin::Disable), 0);
    assert_eq!(upsert(SoftPin::Enable), 1);
    rig.alive_for(1799.0);
    assert_eq!(rig.master.stats().soft_pinned, 1);
    rig.exists("k");
    rig.alive_for(1.0);
    assert_eq!(rig.master.stats().soft_pinned, 0, "reading does not prolong it");
}

#[test]
fn soft_pins_can_be_as_hard_as_hard_ones() {
    let rig = Rig::with(MasterOptions {
        evict_soft_pinned: false,
        high_watermark: 1.0,
        ..MasterOptions::default()
    });
    rig.mount(1, 64 * KIB);
    let soft = ReplicateConfig { soft_pin: SoftPin::Enable, ..ReplicateConfig::default() };
    rig.put_with(1, "soft", 64 * KIB, &soft).unwrap();
    assert_eq!(rig.put(1, "k", 64 * KIB), Err(NoAvailableHandle));
}

#[test]
fn segments_mount_and_unmount() {
    let rig = Rig::new();
    let one = rig.mount(1, MIB);
    assert!(rig.master.mount(client(1), &one).is_ok(), "repeated");
    let code = |who, segment: &_| rig.master.mount(client(who), segment).unwrap_err().code();
    let mut changed = one.clone();
    changed.size += 1;
    assert_eq!(code(1, &changed), SegmentAlreadyExists);
    assert_eq!(code(2, &one), IllegalClient);
    let mut overlapping = one.clone();
    overlapping.id = SegmentId(Uuid::new(2, 77));
    assert_eq!(code(1, &overlapping), SegmentAlreadyExists);
    for (base, size) in [(0, 1), (1, 0), (u64::MAX, 2)] {
        let mut bad = segment(5, MIB);
        (bad.base, bad.size) = (base, size);
        assert_eq!(code(1, &bad), InvalidParams);
    }
    assert_eq!(rig.master.segment_status(one.id).unwrap(), SegmentStatus::Ok);
    assert_eq!(rig.master.segment_status_by_name("node1:1").unwrap(), SegmentStatus::Ok);
    assert_eq!(rig.master.segment_status_by_name("x").unwrap_err().code(), SegmentNotFound);
    assert_eq!(rig.master.addresses(&[client(1), client(2)]), [(client(1), vec!["10.0.0.1".to_owned()])]);
    rig.put(1, "k", 10).unwrap();
    assert_eq!(rig.master.unmount(client(2), one.id).unwrap_err().code(), IllegalClient);
    rig.master.unmount(client(1), one.id).unwrap();
    assert!(!rig.exists("k"), "gone at once");
    assert_eq!(rig.locate("k").unwrap_err(), ObjectNotFound);
    assert_eq!(rig.start(1, "new", 10), Err(NoAvailableHandle));
    rig.master.unmount(client(1), one.id).unwrap();
    assert_eq!(rig.master.segment_status(one.id).unwrap_err().code(), SegmentNotFound);
    rig.master.tick();
    assert_eq!(rig.master.stats().keys, 0);
}

/// Memory that does not overlap a removed segment is mounted at once. A mount over a removed
/// segment finds nothing in it.
#[test]
fn only_a_mount_of_what_is_gone_looks_for_what_was_in_it() {
    let rig = Rig::new();
    let one = rig.mount(1, MIB);
    for n in 0..100 {
        rig.put(1, &format!("k{n}"), 10).unwrap();
    }
    let kept = |rig: &Rig| rig.master.stats().keys;
    rig.master.unmount(client(1), one.id).unwrap();
    rig.mount(2, MIB);
    assert_eq!(kept(&rig), 100, "nobody has looked at all objects");
    let mut part = segment(1, MIB);
    (part.id, part.base, part.size) = (SegmentId(Uuid::new(2, 88)), one.base + 4096, 4096);
    rig.master.mount(client(3), &part).unwrap();
    assert_eq!(kept(&rig), 0);
    for n in 0..100 {
        assert_eq!(rig.locate(&format!("k{n}")), Err(ObjectNotFound));
    }
    // Without a mount, the space becomes free in time.
    rig.put(2, "k", 10).unwrap();
    rig.master.unmount(client(2), segment(2, MIB).id).unwrap();
    rig.master.unmount(client(3), part.id).unwrap();
    rig.master.tick();
    assert_eq!(kept(&rig), 0);
    rig.mount(2, MIB);
    assert!(!rig.exists("k"));
}

#[test]
fn a_graceful_unmount_lets_readers_finish() {
    let rig = Rig::new();
    let one = rig.mount(1, MIB);
    rig.put(1, "k", 10).unwrap();
    let leave = || rig.master.unmount_after(client(1), one.id, Duration::from_secs(5));
    assert_eq!(
        rig.master.unmount_after(client(2), one.id, Duration::ZERO).unwrap_err().code(),
        InvalidParams
    );
    leave().unwrap();
    leave().unwrap();
    assert_eq!(rig.master.segment_status(one.id).unwrap(), SegmentStatus::GracefullyUnmounting);
    assert_eq!(rig.master.mount(client(1), &one).unwrap_err().code(), UnavailableInCurrentStatus);
    assert!(rig.exists("k"));
    assert_eq!(rig.start(1, "new", 10), Err(NoAvailableHandle));
    rig.alive_for(5.0);
    assert!(!rig.exists("k"));
    assert_eq!(leave().unwrap_err().code(), InvalidParams);
}

#[test]
fn clients_without_heartbeats_expire() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    rig.mount(2, MIB);
    rig.put_with(1, "both", 10, &ReplicateConfig::replicas(2)).unwrap();
    let first = ReplicateConfig { preferred_segment: "node1:1".into(), ..ReplicateConfig::default() };
    rig.put_with(1, "first", 10, &first).unwrap();
    assert!(rig.master.ping(client(3)).need_remount, "not known");
    rig.master.remount(client(3), &[]).unwrap();
    assert!(!rig.master.ping(client(3)).need_remount);
    for _ in 0..10 {
        rig.clock.advance(Duration::from_secs(1));
        rig.master.ping(client(2));
        rig.master.tick();
    }
    assert!(rig.master.ping(client(1)).need_remount);
    assert!(!rig.master.ping(client(2)).need_remount);
    assert!(!rig.exists("first"));
    let left = rig.locate("both").unwrap().replicas;
    assert_eq!(left.len(), 1);
    assert_eq!(endpoint(&left[0]), "10.0.0.2:1");
    rig.master.remount(client(1), &[segment(1, MIB)]).unwrap();
    assert!(!rig.master.ping(client(1)).need_remount);
    assert!(!rig.exists("first"), "what was dropped stays dropped");
}

#[test]
fn time_without_a_running_master_does_not_count() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    rig.put_with(1, "kept", 10, &ReplicateConfig::default()).unwrap();
    let stopped = Duration::from_secs(25);
    rig.clock.advance(Duration::from_secs(4) + stopped);
    rig.master.was_stopped(stopped);
    rig.master.tick();
    assert!(rig.exists("kept"));
    // 4 s of the permitted time without a heartbeat have passed.
    rig.clock.advance(Duration::from_secs(5));
    rig.master.tick();
    assert!(rig.exists("kept"));
    rig.clock.advance(Duration::from_secs(1));
    rig.master.tick();
    assert!(rig.master.ping(client(1)).need_remount);
    assert!(!rig.exists("kept"));
}

/// Remounts a segment under its own id or another one, by its old client or another one.
#[test]
fn promises_survive_the_mount_they_were_made_in() {
    for (id, owner) in [(1, 1), (8, 1), (8, 2)] {
        let rig = Rig::without_watermark();
        let one = rig.mount(1, 3 * 64 * KIB);
        rig.put(1, "read", 64 * KIB).unwrap();
        rig.put(1, "unread", 64 * KIB).unwrap();
        let read = address(&rig.locate("read").unwrap().replicas[0]);
        let written = address(&rig.start(9, "writing", 64 * KIB).unwrap()[0]);
        rig.master.unmount(client(1), one.id).unwrap();
        let mut again = one.clone();
        again.id = SegmentId(Uuid::new(2, id));
        rig.master.mount(client(owner), &again).unwrap();
        let free = address(&rig.put(1, "a", 64 * KIB).unwrap()[0]);
        assert!(free != read && free != written);
        rig.exists("a");
        assert_eq!(rig.put(1, "b", 64 * KIB), Err(NoAvailableHandle));
        assert_eq!(rig.end(9, "writing"), Err(ObjectNotFound), "its space went with the mount");
        rig.alive_for(10.0);
        assert_eq!(address(&rig.put(1, "b", 64 * KIB).unwrap()[0]), read);
        rig.exists("b");
        rig.exists("a");
        assert_eq!(rig.put(1, "c", 64 * KIB), Err(NoAvailableHandle));
        rig.alive_for(590.0);
        rig.exists("a");
        rig.exists("b");
        assert_eq!(address(&rig.put(1, "c", 64 * KIB).unwrap()[0]), written);
    }
}

#[test]
fn a_process_restarted_on_the_same_memory_displaces_its_predecessor() {
    let rig = Rig::new();
    let old = rig.mount(1, MIB);
    rig.put(1, "k", 10).unwrap();
    let mut new = old.clone();
    new.id = SegmentId(Uuid::new(2, 50));
    rig.master.mount(client(50), &new).unwrap();
    assert!(!rig.exists("k"));
    assert_eq!(rig.master.segment_status(old.id).unwrap_err().code(), SegmentNotFound);
}

#[test]
fn a_new_master_waits_for_the_readers_and_writers_of_the_one_before() {
    let rig = Rig::new();
    rig.master.remount(client(1), &[segment(1, MIB)]).unwrap();
    assert_eq!(rig.start(1, "k", 10), Err(NoAvailableHandle));
    rig.mount(2, MIB);
    rig.put(2, "k", 10).unwrap();
    rig.master.unmount(client(2), segment(2, MIB).id).unwrap();
    // Leases last 10 s, but a writer of the previous master may write for 30 s.
    rig.alive_for(29.0);
    assert_eq!(rig.start(1, "l", 10), Err(NoAvailableHandle));
    rig.alive_for(1.0);
    rig.put(1, "l", 10).unwrap();
    rig.master.remount(client(3), &[segment(3, MIB)]).unwrap();
    rig.master.unmount(client(1), segment(1, MIB).id).unwrap();
    rig.put(1, "m", 10).unwrap();
}

#[test]
fn one_replica_per_segment_and_hosts_first() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    assert_eq!(rig.put_with(1, "alone", 10, &ReplicateConfig::replicas(2)).unwrap().len(), 1, "best effort");
    let mut same_host = segment(11, MIB);
    same_host.host_id = "node1".into();
    rig.master.mount(client(11), &same_host).unwrap();
    assert_eq!(rig.put_with(1, "same host", 10, &ReplicateConfig::replicas(2)).unwrap().len(), 2);
    rig.mount(2, MIB);
    for n in 0..20 {
        let replicas = rig.put_with(1, &format!("two {n}"), 10, &ReplicateConfig::replicas(2)).unwrap();
        assert!(replicas.iter().any(|replica| endpoint(replica) == "10.0.0.2:1"), "the other host has one");
        let all = rig.put_with(1, &format!("three {n}"), 10, &ReplicateConfig::replicas(9)).unwrap();
        assert_eq!(all.len(), 3);
    }
    assert_eq!(rig.master.stats().partial, 21);
}

#[test]
fn preferences_come_first_and_bend() {
    let rig = Rig::without_watermark();
    for number in 1..=4 {
        rig.mount(number, 64 * KIB);
    }
    let prefer = |names: &[&str]| ReplicateConfig {
        preferred_segments: names.iter().map(|name| (*name).to_owned()).collect(),
        ..ReplicateConfig::default()
    };
    let at = |key: &str, config: &ReplicateConfig| {
        endpoint(&rig.put_with(1, key, 64 * KIB, config).unwrap()[0]).to_owned()
    };
    assert_eq!(at("a", &prefer(&["unknown", "node3:1", "node1:1"])), "10.0.0.3:1");
    assert_eq!(at("b", &prefer(&["node3:1", "node1:1"])), "10.0.0.1:1");
    let own_host = ReplicateConfig { same_node: true, host_id: "node4".into(), ..ReplicateConfig::default() };
    assert_eq!(at("c", &own_host), "10.0.0.4:1");
    let single = ReplicateConfig { preferred_segment: "node2:1".into(), ..prefer(&["node4:1"]) };
    assert_eq!(at("d", &single), "10.0.0.2:1", "the older form wins");
}

#[test]
fn eviction_in_the_background_stops_below_the_watermark() {
    let rig = Rig::new();
    rig.mount(1, 100 * 64 * KIB);
    for n in 0..90 {
        rig.put(1, &n.to_string(), 64 * KIB).unwrap();
    }
    rig.master.tick();
    assert_eq!(rig.master.stats().evicted_keys, 0, "not above");
    rig.exists("0");
    rig.put(1, "90", 64 * KIB).unwrap();
    rig.master.tick();
    let stats = rig.master.stats();
    assert_eq!(stats.evicted_keys, 2, "to a hundredth below, no further");
    assert_eq!(stats.used(), 89 * 64 * KIB);
    assert!(rig.has("0"));
}

#[test]
fn no_segment_stays_behind_when_placement_weighs_space() {
    use mooncake_store::master::Placement::FreeRatioFirst;
    let rig = Rig::with(MasterOptions {
        placement: FreeRatioFirst,
        high_watermark: 1.0,
        ..MasterOptions::default()
    });
    rig.mount(1, 100 * 64 * KIB);
    for n in 0..50 {
        rig.put(1, &format!("old {n}"), 64 * KIB).unwrap();
    }
    rig.mount(2, 100 * 64 * KIB);
    let fresh = (0..40)
        .filter(|n| endpoint(&rig.put(1, &n.to_string(), 64 * KIB).unwrap()[0]) == "10.0.0.2:1")
        .count();
    assert!((21..40).contains(&fresh), "more than half, not all: {fresh}");
}

#[test]
fn accounting_returns_to_zero() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    rig.mount(2, MIB);
    for n in 0..100 {
        let len = 1 + n * 37;
        rig.put_with(1, &format!("k{n}"), len, &ReplicateConfig::replicas(1 + n % 2)).unwrap();
        match n % 4 {
            0 => drop(rig.locate(&format!("k{n}"))),
            1 => drop(rig.upsert(2, &format!("k{n}"), len + 5)),
            _ => {}
        }
    }
    rig.alive_for(700.0);
    rig.master.remove_all(true);
    rig.alive_for(10.0);
    let stats = rig.master.stats();
    assert_eq!((stats.used(), stats.resting(), stats.keys, stats.writing), (0, 0, 0, 0));
}

/// Objects lie in many shards; with LRU, eviction still takes the least recently used of all.
#[test]
fn eviction_follows_one_order_over_all_shards() {
    let options =
        MasterOptions { high_watermark: 1.0, lease_ttl: Duration::ZERO, ..MasterOptions::default() };
    let rig = Rig::with_policy(options, PolicyKind::Lru);
    for number in 1..=3 {
        rig.mount(number, 100 * 64 * KIB);
    }
    let mut order: Vec<String> = (0..300).map(|n| format!("old {n}")).collect();
    for key in &order {
        rig.put(1, key, 64 * KIB).unwrap();
    }
    let mut rng = mooncake_core::clock::Rng::seeded(3);
    for _ in 0..1000 {
        let used = order.remove(rng.below(300) as usize);
        assert!(if rng.below(2) == 0 { rig.exists(&used) } else { rig.locate(&used).is_ok() });
        order.push(used);
    }
    for (n, victim) in order.iter().enumerate() {
        assert!(rig.has(victim), "{n}");
        rig.put(1, &format!("new {n}"), 64 * KIB).unwrap();
        assert!(!rig.has(victim), "{n}");
    }
    assert_eq!(rig.master.stats().evicted_keys, 300);
}

#[test]
fn threads_leave_nothing_behind() {
    let rig = Rig::with(MasterOptions { lease_ttl: Duration::ZERO, ..MasterOptions::default() });
    for number in 1..=3 {
        rig.mount(number, 64 * KIB);
    }
    std::thread::scope(|scope| {
        for thread in 1..=4u64 {
            let rig = &rig;
            scope.spawn(move || {
                let mut rng = mooncake_core::clock::Rng::seeded(thread);
                for _ in 0..3000 {
                    let key = format!("k{}", rng.below(50));
                    let len = 1 + rng.below(8 * KIB);
                    match rng.below(10) {
                        0..4 => drop(rig.put_with(thread, &key, len, &ReplicateConfig::replicas(2))),
                        4 => drop(rig.upsert(thread, &key, len).and_then(|_| rig.end(thread, &key))),
                        5 => drop(rig.start(thread, &key, len).and_then(|_| rig.revoke(thread, &key))),
                        6 => drop(rig.remove(&key, true)),
                        7 => drop(rig.locate(&key)),
                        8 => drop(rig.master.tick()),
                        _ => {
                            let one = segment(thread % 3 + 1, 64 * KIB);
                            drop(rig.master.unmount(client(thread % 3 + 1), one.id));
                            drop(rig.master.mount(client(thread % 3 + 1), &one));
                        }
                    }
                }
            });
        }
    });
    rig.alive_for(601.0);
    rig.master.remove_all(true);
    rig.alive_for(1.0);
    let stats = rig.master.stats();
    assert_eq!((stats.used(), stats.keys, stats.writing), (0, 0, 0));
}

#[test]
fn an_unreachable_client_gets_nothing_until_it_is_reported() {
    let rig = Rig::without_watermark();
    rig.mount(1, 4 * 64 * KIB);
    rig.mount(2, 4 * 64 * KIB);
    rig.master.report_unreachable(client(9), "10.0.0.2:1");
    let at = |key: &str| endpoint(&rig.put(9, key, 64 * KIB).unwrap()[0]).to_owned();
    for n in 0..6 {
        assert_eq!(at(&format!("k{n}")), "10.0.0.1:1", "it evicts rather than go there");
    }
    assert_eq!(rig.master.stats().evicted_keys, 2);
    rig.master.report_unreachable(client(9), "10.0.0.1:1");
    at("a member in doubt is better than none");
    rig.master.ping(client(2));
    assert_eq!(at("heard of again"), "10.0.0.2:1");
}

/// A mounting client chooses the size of its memory.
#[test]
fn more_memory_than_numbers_can_say_is_no_reason_to_fail() {
    let rig = Rig::new();
    for number in 1..=300 {
        let whole = Segment { base: 64, size: (1 << 57) - 64, ..segment(number, MIB) };
        rig.master.mount(client(number), &whole).unwrap();
    }
    let config = ReplicateConfig { replicas: 300, ..ReplicateConfig::default() };
    let granted = rig.start_with(1, "k", (1 << 57) - 64, WriteMode::Put, &config).unwrap();
    assert_eq!(granted.len(), 300);
    rig.end(1, "k").unwrap();
    let stats = rig.master.stats();
    assert_eq!((stats.capacity(), stats.used()), (u64::MAX, u64::MAX));
    rig.master.tick();
    assert_eq!(rig.used(), 0, "evicted");
    rig.put(1, "next", 1).unwrap();
    for (long, what) in [("x".repeat(256), "endpoint"), ("x".repeat(5000), "name")] {
        let mut odd = segment(301, MIB);
        *(if what == "name" { &mut odd.name } else { &mut odd.endpoint }) = long;
        let refused = rig.master.mount(client(301), &odd).unwrap_err();
        assert!(refused.code() == InvalidParams && refused.message().contains(what), "{refused}");
    }
}
