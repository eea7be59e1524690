//! Tests of the policy `gittins` beside the conformance suite: chains, comparison with LRU on made
//! workloads, and one cache in many shards.

// Miri would take hours, and there is no unsafe code here to check.
#![cfg(not(miri))]

use std::collections::{BTreeMap, BTreeSet};

use mooncake_core::evict::{EvictionPolicy, Gittins, GittinsConfig, Lru, MergeableOrder, Place};
use mooncake_core::ids::SlotId;
use mooncake_core::testkit::simulate::{Belady, Cache, Calls, PolicyCache, hit_rate};
use mooncake_core::testkit::workloads::{self, Requests};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Use { slot: u32, key: u64, parent: Option<u32>, fresh: u32, goes_on: bool },
    Remove(u32),
    Evict { refused: BTreeSet<u32>, is_taken_back: bool },
}

const SLOTS: u32 = 16;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let parent = proptest::option::of(0..SLOTS);
    let used = (0..SLOTS, 1..60u64, parent, 0..40u32, any::<bool>());
    let refused =
        prop_oneof![Just(BTreeSet::new()), proptest::collection::btree_set(0..SLOTS, 0..SLOTS as usize),];
    let step = prop_oneof![
        6 => used.prop_map(|(slot, key, parent, fresh, goes_on)| Step::Use { slot, key, parent, fresh, goes_on }),
        1 => (0..SLOTS).prop_map(Step::Remove),
        3 => (refused, any::<bool>()).prop_map(|(refused, is_taken_back)| Step::Evict { refused, is_taken_back }),
    ];
    proptest::collection::vec(step, 0..300)
}

proptest! {
    /// No slot is evicted that is refused, and no parent before a leaf that is not. A victim that
    /// is taken back is the next one again. Parents are those that were given.
    #[test]
    fn refused_slots_and_parents_stay(steps in steps()) {
        let mut policy = Gittins::new(0, &GittinsConfig::default());
        // Key and parent of each slot that is held.
        let mut held: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
        let mut number = 0;
        let children = |held: &BTreeMap<u32, (u64, u64)>, key| held.values().filter(|of| of.1 == key).count();
        for step in steps {
            match step {
                Step::Use { slot, key, parent, fresh, goes_on } => {
                    number += 1;
                    let is_elsewhere = held.iter().any(|(other, of)| of.0 == key && *other != slot);
                    let parent = parent.filter(|parent| *parent < slot).and_then(|parent| held.get(&parent));
                    let parent = parent.map_or(0, |parent| parent.0);
                    let place = Place { number, parent, fresh, goes_on };
                    if held.contains_key(&slot) {
                        policy.touch_at(SlotId(slot), &place);
                    } else if !is_elsewhere && parent != key {
                        policy.insert_at(SlotId(slot), 1, key, &place);
                        (0..children(&held, key)).for_each(|_| policy.change_children(SlotId(slot), true));
                        held.insert(slot, (key, parent));
                        let at = held.iter().find(|(_, of)| of.0 == parent);
                        at.into_iter().for_each(|(slot, _)| policy.change_children(SlotId(*slot), true));
                    }
                }
                Step::Remove(slot) => {
                    policy.remove(SlotId(slot));
                    if let Some((_, parent)) = held.remove(&slot) {
                        let at = held.iter().find(|(_, of)| of.0 == parent);
                        at.into_iter().for_each(|(slot, _)| policy.change_children(SlotId(*slot), false));
                    }
                }
                Step::Evict { refused, is_taken_back } => {
                    let evict = |policy: &mut Gittins| policy.evict(&mut |slot| !refused.contains(&slot.0));
                    let victim = evict(&mut policy);
                    let allowed = || held.iter().filter(|(slot, _)| !refused.contains(slot));
                    let Some(victim) = victim else {
                        prop_assert_eq!(allowed().count(), 0);
                        continue;
                    };
                    prop_assert!(allowed().any(|(slot, _)| *slot == victim.0));
                    let of = held[&victim.0];
                    if children(&held, of.0) > 0 {
                        prop_assert!(allowed().all(|(_, of)| children(&held, of.0) > 0), "{victim:?}");
                        prop_assert!(policy.victim_value() >= Some(1 << 63));
                    } else {
                        prop_assert!(policy.victim_value() < Some(1 << 63));
                    }
                    prop_assert_eq!(policy.parent(victim), of.1);
                    if is_taken_back {
                        policy.take_back(victim, 1, of.0);
                        prop_assert_eq!(policy.len(), held.len());
                        prop_assert_eq!(evict(&mut policy), Some(victim));
                    }
                    prop_assert!(policy.remembers(of.0));
                    held.remove(&victim.0);
                    let at = held.iter().find(|(_, other)| other.0 == of.1);
                    at.into_iter().for_each(|(slot, _)| policy.change_children(SlotId(*slot), false));
                }
            }
            prop_assert_eq!(policy.len(), held.len());
        }
    }
}

/// An object that was evicted counts its uses on when it comes back, and is then worth more than a
/// new one once the policy has learned that such objects are used again.
#[test]
fn an_object_that_comes_back_is_recognised() {
    let mut policy = Gittins::new(0, &GittinsConfig::default());
    policy.insert_hashed(SlotId(0), 1, 77);
    assert!(!policy.remembers(77) && policy.evict(&mut |_| true) == Some(SlotId(0)));
    assert!(policy.remembers(77), "the victim is remembered at once");
    policy.insert_hashed(SlotId(1), 1, 77);
    assert!(!policy.remembers(77), "what is held is no ghost");
    policy.insert_hashed(SlotId(0), 1, 78);
    policy.remove(SlotId(1));
    assert!(!policy.remembers(77), "a removed object is forgotten");
}

fn rates(requests: &Requests, capacity: usize, calls: Calls, shards: usize) -> (f64, f64) {
    let chains = || requests.iter().map(|chain| &chain[..]);
    let lru = hit_rate(&mut PolicyCache::<Lru>::new(&(), capacity, 1, calls), chains());
    let mut gittins = PolicyCache::<Gittins>::new(&GittinsConfig::default(), capacity, shards, calls);
    (lru, hit_rate(&mut gittins, chains()))
}

/// Checks that the policy finds at least `least`, and nowhere noticeably less than LRU.
fn check(name: &str, requests: &Requests, capacity: usize, least: f64) {
    let calls = Calls::default();
    let (lru, gittins) = rates(requests, capacity, calls, 16);
    assert!(gittins >= least, "{name}, {capacity} blocks: {gittins:.4}, expected {least}; LRU {lru:.4}");
    assert!(gittins >= lru * 0.99, "{name}, {capacity} blocks: {gittins:.4} against {lru:.4}");
}

const USES: usize = 120_000;

#[test]
fn keys_that_are_all_alike_cost_nothing() {
    check("uniform", &workloads::uniform(10_000, USES, 1), 3000, 0.28);
}

#[test]
fn popular_keys_stay() {
    check("Zipf 0.8", &workloads::zipf(0.8, 50_000, USES, 2), 1000, 0.29);
    check("Zipf 1.0", &workloads::zipf(1.0, 50_000, USES, 3), 1000, 0.59);
}

#[test]
fn scans_do_little_harm() {
    check("scans", &workloads::zipf_with_scans(0.9, 50_000, USES, 4), 1000, 0.36);
}

#[test]
fn popularity_may_move() {
    check("moving", &workloads::moving_zipf(1.0, 50_000, 30_000, USES, 5), 1000, 0.58);
}

/// On a loop that does not fit, LRU finds nothing, and the policy nearly what can be found.
#[test]
fn loops_are_found() {
    for (chains, blocks) in [(4000, 1), (250, 16)] {
        let requests = workloads::chain_loop(chains, blocks, USES as u64);
        let (lru, gittins) = rates(&requests, 2000, Calls::default(), 16);
        let belady = hit_rate(
            &mut Belady::new(2000, requests.iter().map(|chain| &chain[..])),
            requests.iter().map(|chain| &chain[..]),
        );
        assert!(lru < 0.01 && gittins > belady - 0.05, "{blocks}: {lru} {gittins} {belady}");
    }
}

#[test]
fn shared_documents_stay() {
    check("documents", &workloads::documents(0.9, 5000, USES, 6), 2000, 0.30);
}

#[test]
fn conversations_by_chance_lose_little() {
    let requests = workloads::conversations(8000, 7);
    for capacity in [1000, 4000] {
        check("conversations", &requests, capacity, 0.0);
    }
}

/// Many shards with notes of their victims evict like one.
#[test]
fn shards_cost_nothing() {
    let requests = workloads::documents(0.9, 5000, 60_000, 8);
    let one = rates(&requests, 1000, Calls::default(), 1).1;
    let many = rates(&requests, 1000, Calls::default(), 64).1;
    assert!((one - many).abs() < 0.01, "{one} in one piece, {many} in 64");
}

/// Calls that are linked find about as much as the whole chain in one call.
#[test]
fn a_chain_that_is_cut_into_calls_is_linked() {
    let requests = workloads::documents(0.9, 5000, 60_000, 9);
    let rate = |keys, linked| rates(&requests, 2000, Calls { keys, linked, ..Calls::default() }, 1).1;
    let (whole, linked, cut) = (rate(usize::MAX, false), rate(4, true), rate(4, false));
    assert!(linked > cut - 0.005 && linked > whole - 0.02, "{whole} {linked} {cut}");
}

#[test]
fn belady_is_a_bound() {
    let requests = workloads::conversations(3000, 10);
    let chains = || requests.iter().map(|chain| &chain[..]);
    for capacity in [200, 2000] {
        let bound = hit_rate(&mut Belady::new(capacity, chains()), chains());
        let (lru, gittins) = rates(&requests, capacity, Calls::default(), 1);
        assert!(bound >= lru.max(gittins), "{bound} {lru} {gittins}");
    }
    // A cache of one block in the order 1 2 1 3 1 2 keeps the block that comes back first.
    let few: [&[u64]; 5] = [&[1], &[2], &[1], &[3], &[1]];
    let mut belady = Belady::new(2, few);
    assert_eq!(few.map(|chain| belady.request(chain)), [0, 0, 1, 0, 1]);
}

/// The value of an object that returns is known before it is stored.
#[test]
fn an_object_returns_with_the_value_that_was_expected() {
    const HELD: u32 = 100;
    let mut policy = Gittins::new(0, &GittinsConfig::default());
    let (mut slots, mut keys) = (BTreeMap::new(), vec![0; HELD as usize]);
    let mut values = BTreeSet::new();
    for (number, key) in (1..).zip(workloads::zipf(0.9, 400, 20_000, 3).into_iter().flatten()) {
        let (key, place) = (key + 1, Place { goes_on: key % 2 == 0, ..Place::numbered(number) });
        if let Some(slot) = slots.get(&key) {
            policy.touch_at(*slot, &place);
            continue;
        }
        policy.set_time(number);
        let free = Some(SlotId(slots.len() as u32)).filter(|slot| slot.0 < HELD);
        let slot = free.unwrap_or_else(|| policy.evict(&mut |_| true).unwrap());
        slots.remove(&keys[slot.index()]);
        // The lower half tells equal values apart.
        let value = |rank: Option<u64>| rank.unwrap() >> 32;
        let expected = policy.value_if_used(key, &place);
        policy.insert_at(slot, 1, key, &place);
        assert!(policy.value(slot) >= expected, "{key} at {number}");
        let expected = value(expected);
        assert_eq!(value(policy.value(slot)), expected, "{key} at {number}");
        values.insert(expected);
        slots.insert(key, slot);
        keys[slot.index()] = key;
    }
    assert!(values.len() > 50, "{}", values.len());
}
