//! Look-ups of the readable prefix of a list of keys, compared with an oracle.

use std::collections::HashSet;

use mooncake_core::clock::Rng;
use mooncake_core::evict::PolicyKind;
use mooncake_core::replica::ReplicaList;
use mooncake_core::testkit::test_seed;
use mooncake_store::api::DEFAULT_TENANT;
use mooncake_store::master::MasterOptions;
use mooncake_store::protocol::message::{Handle, LocatePrefix};
use mooncake_store::protocol::wire::ReadablePrefix;

use crate::common::rig::{KIB, MIB, Rig};

fn look_up(rig: &Rig, keys: &[impl AsRef<str>], with_replicas: bool) -> ReadablePrefix {
    let keys: Vec<&[u8]> = keys.iter().map(|key| key.as_ref().as_bytes()).collect();
    rig.master
        .handle(LocatePrefix { keys: (&keys[..]).into(), with_replicas, tenant: DEFAULT_TENANT })
        .unwrap()
}

/// Number of keys of the property test.
const KEYS: usize = 60;

/// Brings a key from its state into a random one. Returns whether the object can then be read.
fn change(rig: &Rig, rng: &mut Rng, key: &str, was_readable: bool) -> bool {
    match rng.below(8) {
        0 if was_readable => {
            rig.remove(key, true).unwrap();
            false
        }
        // The first write of the object does not end, or ends without a value.
        1 if rig.start(2, key, KIB).is_ok() => false,
        2 if !was_readable => {
            let _ = rig.revoke(2, key);
            false
        }
        _ if was_readable => true,
        3 => rig.put(1, key, KIB).is_ok(),
        4..8 => rig.end(2, key).is_ok() || rig.put(1, key, KIB).is_ok(),
        _ => false,
    }
}

#[test]
fn a_prefix_ends_at_the_first_gap_and_leases_end_there_too() {
    let seed = test_seed();
    let mut rng = Rng::seeded(seed);
    let rig = Rig::without_watermark();
    rig.mount(1, 16 * MIB);
    let names: Vec<String> = (0..KEYS).map(|number| format!("block/{number}")).collect();
    let mut readable = [false; KEYS];
    let mut lengths = HashSet::new();
    for round in 0..400 {
        for (key, readable) in names.iter().zip(&mut readable) {
            *readable = change(&rig, &mut rng, key, *readable);
        }
        // The keys are in order, so that prefixes are long in some rounds, or in none.
        let [first, count, step] = [60, 61, 2].map(|bound| rng.below(bound) as usize);
        let asked: Vec<usize> = (0..count).map(|at| (first + at * (1 + 6 * step)) % KEYS).collect();
        let keys: Vec<&str> = asked.iter().map(|at| &*names[*at]).collect();
        let hits = asked.iter().position(|at| !readable[*at]).unwrap_or(asked.len());
        let expected: Vec<_> =
            keys[..hits].iter().map(|key| rig.master.peek(key.as_bytes()).unwrap()).collect();
        // All earlier leases have ended.
        rig.alive_for(11.0);
        let before = rig.master.stats();
        let with_replicas = round % 2 == 0;
        let found = look_up(&rig, &keys, with_replicas);
        assert_eq!(found.count, hits as u64, "seed {seed}, round {round}");
        lengths.insert(hits);
        let leased: HashSet<usize> = asked[..hits].iter().copied().collect();
        for (at, key) in names.iter().enumerate() {
            let is_leased = rig.master.leased_for(key.as_bytes()).is_some();
            assert_eq!(is_leased, leased.contains(&at), "seed {seed}, round {round}, {key}");
        }
        let after = rig.master.stats();
        let reads = (after.reads - before.reads, after.hits - before.hits);
        if with_replicas {
            let replicas = |list: ReplicaList| list.replicas;
            assert_eq!(found.replicas.into_iter().map(replicas).collect::<Vec<_>>(), expected, "seed {seed}");
            // The first miss counts as a read, and the keys behind it do not.
            assert_eq!(reads, ((hits + usize::from(hits < keys.len())) as u64, hits as u64), "seed {seed}");
        } else {
            assert_eq!((found.replicas.len(), reads), (0, (0, 0)), "seed {seed}");
        }
    }
    assert!(lengths.len() > 5, "the lengths vary: {lengths:?}, seed {seed}");
}

#[test]
fn keys_behind_a_gap_are_not_used() {
    for with_replicas in [false, true] {
        let options = MasterOptions { high_watermark: 1.0, ..MasterOptions::default() };
        let rig = Rig::with_policy(options, PolicyKind::Lru);
        rig.mount(1, 64 * KIB);
        for key in ["a", "b", "c", "d"] {
            rig.put(1, key, 16 * KIB).unwrap();
        }
        assert_eq!(look_up(&rig, &["b", "missing", "a", "c"], with_replicas).count, 1);
        rig.alive_for(11.0);
        for key in ["e", "f"] {
            rig.put(1, key, 16 * KIB).unwrap();
        }
        let left = ["a", "b", "c", "d"].map(|key| rig.has(key));
        assert_eq!(left, [false, true, false, true], "only `b` was used");
    }
}

#[test]
fn a_prefix_of_nothing_is_empty() {
    let rig = Rig::new();
    assert_eq!(look_up(&rig, &[""; 0], true), ReadablePrefix::default());
    assert_eq!(look_up(&rig, &["k"], true), ReadablePrefix::default());
    rig.mount(1, MIB);
    rig.put(1, "k", 10).unwrap();
    // Invalid keys end a prefix as missing ones do.
    let long = "k".repeat(mooncake_core::ids::MAX_KEY_LEN + 1);
    assert_eq!(look_up(&rig, &["k", "", "k"], false).count, 1);
    assert_eq!(look_up(&rig, &["k", "k", &long, "k"], true).count, 2);
}
