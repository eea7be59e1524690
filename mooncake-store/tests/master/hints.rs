//! Hints of a put about its chain: the block before it, its position, and the part to keep.

use std::borrow::Cow;

use mooncake_core::error::ErrorCode;
use mooncake_core::evict::PolicyKind;
use mooncake_core::hints::{KeepPart, PutHints};
use mooncake_core::replica::{ReplicaType, ReplicateConfig};
use mooncake_store::api::DEFAULT_TENANT;
use mooncake_store::master::{MasterOptions, MissCause, TenantQuota};
use mooncake_store::protocol::message::{EndWrites, Handle, StartHintedWrites, StartWrites};
use mooncake_store::protocol::pack;
use mooncake_store::protocol::wire::EndItem;

use crate::common::rig::{KIB, Rig, client};

fn rig(policy: PolicyKind, blocks: u64) -> Rig {
    // Objects of equal value go in the order of their uses only within one shard.
    let options = MasterOptions { high_watermark: 1.0, shards: 1, ..MasterOptions::default() };
    let rig = Rig::with_policy(options, policy);
    rig.mount(1, blocks * KIB);
    rig
}

/// Puts blocks of 1 KiB in one call, with hints if there are any.
fn put_of(rig: &Rig, tenant: &str, who: u64, keys: &[&str], hints: &PutHints) -> Vec<Result<(), ErrorCode>> {
    let (client, attempt, replace) = (client(who), 1, false);
    let keys: Vec<&[u8]> = keys.iter().map(|key| key.as_bytes()).collect();
    let sizes = vec![KIB; keys.len()];
    let (keys, sizes) = (Cow::Borrowed(&keys[..]), Cow::Borrowed(&sizes[..]));
    let config = Cow::Owned(ReplicateConfig::default());
    let started = if hints.is_empty() {
        let keys = keys.clone();
        rig.master.handle(StartWrites { client, attempt, replace, keys, sizes, config, tenant })
    } else {
        let (keys, hints) = (keys.clone(), Cow::Borrowed(hints));
        rig.master.handle(StartHintedWrites { client, attempt, replace, keys, sizes, config, hints, tenant })
    };
    let outcomes: Vec<_> =
        started.into_iter().map(|outcome| outcome.map(drop).map_err(|e| e.code())).collect();
    let begun = keys.iter().zip(&outcomes).filter(|(_, outcome)| outcome.is_ok());
    let items: Vec<_> = begun.map(|(key, _)| EndItem { key, checksum: None }).collect();
    let replicas = ReplicaType::All;
    let ends = EndWrites { client, attempt, replace, items: Cow::Borrowed(&items), replicas, tenant };
    assert!(rig.master.handle(ends).iter().all(Result::is_ok));
    outcomes
}

fn put(rig: &Rig, who: u64, keys: &[&str], hints: &PutHints) {
    assert!(put_of(rig, DEFAULT_TENANT, who, keys, hints).iter().all(Result::is_ok), "{keys:?}");
}

fn after(parent: &str) -> PutHints {
    PutHints { parent: Some(parent.into()), ..PutHints::default() }
}

fn keeping(keep: KeepPart) -> PutHints {
    PutHints { keep, ..PutHints::default() }
}

/// Fills the memory with single blocks until a block is evicted, and returns those of `keys` that
/// have gone.
fn first_to_go<'k>(rig: &Rig, keys: &[&'k str]) -> Vec<&'k str> {
    for number in 0..100 {
        rig.alive_for(1.0);
        put(rig, 9, &[&format!("other/{number}")], &PutHints { position: Some(0), ..PutHints::default() });
        let gone: Vec<_> = keys.iter().copied().filter(|key| !rig.has(key)).collect();
        if !gone.is_empty() {
            return gone;
        }
    }
    Vec::new()
}

#[test]
fn a_named_parent_stays_longer_than_its_child() {
    for (hints, first) in [(PutHints::default(), "parent"), (after("parent"), "child")] {
        let rig = rig(PolicyKind::Gittins, 8);
        put(&rig, 1, &["parent"], &PutHints::default());
        // Another client goes on, much later, so that nothing else links the two.
        rig.alive_for(61.0);
        put(&rig, 2, &["child"], &hints);
        rig.alive_for(1.0);
        assert_eq!(first_to_go(&rig, &["parent", "child"]), [first], "{hints:?}");
    }
}

#[test]
fn a_batch_that_begins_a_chain_is_not_linked_to_the_batch_before() {
    let root = PutHints { position: Some(0), ..PutHints::default() };
    for (hints, first) in [(PutHints::default(), "d"), (root, "b")] {
        let rig = rig(PolicyKind::Gittins, 8);
        put(&rig, 1, &["a", "b"], &PutHints::default());
        put(&rig, 1, &["c", "d"], &hints);
        assert_eq!(first_to_go(&rig, &["a", "b", "c", "d"]), [first], "{hints:?}");
    }
}

#[test]
fn the_front_of_a_batch_stays_longer() {
    for policy in [PolicyKind::Lru, PolicyKind::Tenure, PolicyKind::Fifo, PolicyKind::Gittins] {
        let rig = rig(policy, 8);
        put(&rig, 1, &["a", "b", "c"], &keeping(KeepPart::Front));
        assert_eq!(first_to_go(&rig, &["a", "b", "c"]), ["c"], "{policy:?}");
    }
    let rig = rig(PolicyKind::Lru, 8);
    put(&rig, 1, &["a", "b", "c"], &PutHints::default());
    assert_eq!(first_to_go(&rig, &["a", "b", "c"]), ["a"], "without the hint");
    // Another batch has the hint, this one has not.
    let rig = self::rig(PolicyKind::Lru, 8);
    put(&rig, 1, &["x", "y"], &keeping(KeepPart::Front));
    put(&rig, 1, &["a", "b", "c"], &PutHints::default());
    assert_eq!(first_to_go(&rig, &["a", "b", "c"]), ["a"], "without the hint");
}

#[test]
fn a_whole_chain_goes_at_once() {
    for policy in [PolicyKind::Lru, PolicyKind::Gittins] {
        let rig = rig(policy, 10);
        let whole = keeping(KeepPart::Whole);
        put(&rig, 1, &["a", "b"], &whole);
        rig.alive_for(61.0);
        put(
            &rig,
            2,
            &["c", "d"],
            &PutHints { parent: Some(b"b".to_vec()), position: Some(2), ..whole.clone() },
        );
        rig.alive_for(1.0);
        put(&rig, 3, &["other", "chain"], &whole);
        assert_eq!(first_to_go(&rig, &["a", "b", "c", "d"]), ["a", "b", "c", "d"], "{policy:?}");
        assert!(rig.has("other") && rig.has("chain"), "{policy:?}");
        let causes = ["a", "b", "c", "d"].map(|key| rig.master.why_missing(key.as_bytes()).unwrap());
        let with_group = causes.iter().filter(|cause| **cause == MissCause::EvictedWithGroup).count();
        assert_eq!((with_group, causes.contains(&MissCause::Evicted)), (3, true), "{causes:?}");
    }
}

#[test]
fn a_lease_on_one_block_keeps_a_whole_chain() {
    let rig = rig(PolicyKind::Lru, 4);
    put(&rig, 1, &["a", "b"], &keeping(KeepPart::Whole));
    rig.locate("b").unwrap();
    for key in ["c", "d", "e"] {
        put(&rig, 1, &[key], &PutHints::default());
    }
    assert!(rig.has("a") && rig.has("b") && !rig.has("c"));
}

#[test]
fn a_hint_of_a_group_never_fails_a_put() {
    let rig = rig(PolicyKind::Lru, 32);
    let whole = keeping(KeepPart::Whole);
    let start = |keys: &[&str], groups: Option<Vec<String>>| {
        let keys: Vec<&[u8]> = keys.iter().map(|key| key.as_bytes()).collect();
        let sizes = vec![KIB; keys.len()];
        let started = rig.master.handle(StartHintedWrites {
            client: client(1),
            attempt: 5,
            replace: true,
            keys: Cow::Borrowed(&keys),
            sizes: Cow::Borrowed(&sizes),
            config: Cow::Owned(ReplicateConfig { group_ids: groups, ..ReplicateConfig::default() }),
            hints: Cow::Borrowed(&whole),
            tenant: DEFAULT_TENANT,
        });
        let started: Vec<_> =
            started.into_iter().map(|outcome| outcome.map(drop).map_err(|e| e.code())).collect();
        keys.iter().for_each(|key| drop(rig.master.put_end(client(1).into(), key, None, ReplicaType::All)));
        started
    };
    put(&rig, 1, &["alone"], &PutHints::default());
    put(&rig, 1, &["of a chain"], &whole);
    assert_eq!(start(&["of a group"], Some(vec!["g".into()])), [Ok(())]);
    // Objects that exist stay in their groups; the group that a caller names counts for more.
    assert_eq!(start(&["alone", "of a chain", "of a group", "new"], None), [Ok(()); 4]);
    assert_eq!(start(&["named"], Some(vec!["h".into()])), [Ok(())]);
    assert_eq!(start(&["named"], Some(vec!["i".into()])), [Err(ErrorCode::InvalidParams)]);
}

#[test]
fn chains_of_tenants_are_apart() {
    let quota = |name: &str| TenantQuota { name: name.into(), bytes: 64 * KIB };
    let tenants = Some(vec![quota("a"), quota("b")]);
    let options = MasterOptions { tenants, high_watermark: 1.0, ..MasterOptions::default() };
    let rig = Rig::with_policy(options, PolicyKind::Lru);
    rig.mount(1, 8 * KIB);
    let whole = keeping(KeepPart::Whole);
    assert_eq!(put_of(&rig, "a", 1, &["x", "y"], &whole), [Ok(()); 2]);
    // The block before is one of the same tenant: here there is none.
    let goes_on = PutHints { parent: Some(b"x".to_vec()), ..whole };
    assert_eq!(put_of(&rig, "b", 1, &["z"], &goes_on), [Ok(())]);
    assert_eq!(put_of(&rig, "a", 1, &["z"], &goes_on), [Ok(())]);
    assert_eq!(put_of(&rig, "c", 1, &["z"], &goes_on), [Err(ErrorCode::TenantNotRegistered)]);
    // The quotas shrink with the memory: each tenant may use 4 KiB.
    for number in 0..2 {
        assert_eq!(put_of(&rig, "a", 1, &[&format!("{number}")], &PutHints::default()), [Ok(())]);
    }
    let there = |key: &[u8]| rig.master.peek(key).is_ok();
    let left = [b"a\0x", b"a\0y", b"a\0z", b"b\0z"].map(|key| there(key));
    assert_eq!(left, [false, false, false, true]);
}

#[test]
fn requests_with_hints_are_decoded_or_refused() {
    let keys: &[&[u8]] = &[b"a"];
    let sizes: &[u64] = &[KIB];
    let hints = PutHints {
        parent: Some(b"p".to_vec()),
        position: Some(7),
        keep: KeepPart::Whole,
        ttl_ms: Some(9),
        delete_after_read: true,
    };
    let request = StartHintedWrites {
        client: client(1),
        attempt: 3,
        replace: false,
        keys: Cow::Borrowed(keys),
        sizes: Cow::Borrowed(sizes),
        config: Cow::Owned(ReplicateConfig::default()),
        hints: Cow::Owned(hints.clone()),
        tenant: DEFAULT_TENANT,
    };
    let mut body = Vec::new();
    pack::encode(&request, &mut body);
    assert_eq!(pack::decode::<StartHintedWrites>(&body).unwrap(), request);
    for cut in 0..body.len() {
        assert!(pack::decode::<StartHintedWrites>(&body[..cut]).is_err(), "{cut}");
    }
    let at = body.windows(4).position(|bytes| bytes == [2, 1, 9, 0]).unwrap();
    body[at] = 3;
    assert!(pack::decode::<StartHintedWrites>(&body).is_err(), "there is no such part to keep");
    // The settings travel as before: hints are not a part of them.
    let plain = ReplicateConfig::default();
    let hinted = ReplicateConfig { hints: Some(Box::new(hints)), ..plain.clone() };
    let encoded = [&plain, &hinted].map(|config| {
        let mut body = Vec::new();
        pack::encode(config, &mut body);
        body
    });
    assert_eq!(encoded[0], encoded[1]);
    assert_eq!(pack::decode::<ReplicateConfig>(&encoded[1]).unwrap(), plain);
}

/// A client that repeats a part of its call names the key before, so the group stays one.
#[test]
fn the_rest_of_a_whole_batch_joins_its_group() {
    let rig = rig(PolicyKind::Lru, 10);
    let whole = keeping(KeepPart::Whole);
    put(&rig, 1, &["a", "b"], &whole);
    put(&rig, 1, &["c", "d"], &whole.after_keys(2, b"b"));
    put(&rig, 1, &["other"], &whole);
    assert_eq!(first_to_go(&rig, &["a", "b", "c", "d"]), ["a", "b", "c", "d"]);
    assert!(rig.has("other"));
}
