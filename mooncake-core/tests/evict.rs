//! Tests of the policies of this crate: they pass the public suite and keep their order exactly,
//! and the suite finds planted bugs.

// Miri would take hours, and there is no unsafe code here to check.
#![cfg(not(miri))]

use std::collections::{BTreeSet, VecDeque};
use std::panic::catch_unwind;

use mooncake_core::clock::Rng;
use mooncake_core::evict::{
    BuiltinPolicy, CustomPolicy, EvictionPolicy, Fifo, Gittins, GittinsConfig, Lru, MergeableOrder,
    PolicyKind, S3Fifo, S3FifoConfig, Tenure, TenureConfig,
};
use mooncake_core::ids::SlotId;
use mooncake_core::testkit::evict::{Checked, EvictStep, evict_steps};
use mooncake_core::{eviction_conformance, testkit};
use proptest::prelude::*;

eviction_conformance!(fifo, Fifo, ());
eviction_conformance!(lru, Lru, ());
eviction_conformance!(s3fifo, S3Fifo, S3FifoConfig::default());
eviction_conformance!(
    s3fifo_without_queues,
    S3Fifo,
    S3FifoConfig { small_percent: 0, ghost_percent: 0, promote_after: 0 }
);
eviction_conformance!(
    s3fifo_all_small,
    S3Fifo,
    S3FifoConfig { small_percent: 255, ghost_percent: 255, promote_after: 255 }
);
eviction_conformance!(tenure, Tenure, TenureConfig::default());
eviction_conformance!(tenure_without_any, Tenure, TenureConfig { patience: 0, memory: 0 });
eviction_conformance!(tenure_for_long, Tenure, TenureConfig { patience: 255, memory: 255 });
eviction_conformance!(gittins, Gittins, GittinsConfig::default());
eviction_conformance!(builtin_fifo, BuiltinPolicy, PolicyKind::Fifo.into());
eviction_conformance!(builtin_lru, BuiltinPolicy, PolicyKind::Lru.into());
eviction_conformance!(builtin_s3fifo, BuiltinPolicy, PolicyKind::S3Fifo.into());
eviction_conformance!(builtin_tenure, BuiltinPolicy, PolicyKind::Tenure.into());
eviction_conformance!(builtin_gittins, BuiltinPolicy, PolicyKind::Gittins.into());
eviction_conformance!(
    builtin_custom_gittins,
    BuiltinPolicy,
    CustomPolicy::new::<Gittins>(GittinsConfig::default()).into()
);
eviction_conformance!(
    builtin_custom,
    BuiltinPolicy,
    CustomPolicy::new::<Tenure>(TenureConfig::default()).into()
);

/// Eviction order of a policy, written as simply as possible.
trait Model: Default {
    type Policy: MergeableOrder;
    fn insert(&mut self, slot: SlotId, bytes: u64);
    fn touch(&mut self, slot: SlotId);
    fn remove(&mut self, slot: SlotId);
    fn evict(&mut self, refused: &BTreeSet<SlotId>) -> Option<SlotId>;
}

fn agrees<M: Model>(steps: &[EvictStep]) -> Result<(), TestCaseError> {
    let config = <M::Policy as EvictionPolicy>::Config::default();
    let (mut model, mut policy) = (M::default(), Checked::<M::Policy>::new(0, &config));
    for step in steps {
        let expected = match step {
            EvictStep::Evict { refused } => model.evict(refused),
            &EvictStep::Insert { slot, .. } if policy.held().contains(&slot) => {
                model.touch(slot);
                None
            }
            &EvictStep::Insert { slot, bytes, .. } => {
                model.insert(slot, bytes);
                None
            }
            &EvictStep::Touch(slot) => {
                model.touch(slot);
                None
            }
            &EvictStep::Remove(slot) => {
                model.remove(slot);
                None
            }
        };
        // The models have no ghosts, so hashes are left out.
        let victim = match *step {
            EvictStep::Insert { slot, bytes, .. } => {
                policy.step(&EvictStep::Insert { slot, bytes, hash: None })
            }
            ref step => policy.step(step),
        };
        prop_assert_eq!(victim, expected, "after {:?}", step);
    }
    Ok(())
}

/// Slots in order, oldest first.
#[derive(Default)]
struct InOrder<const BY_USE: bool>(Vec<SlotId>);

impl<const BY_USE: bool> InOrder<BY_USE> {
    fn take(&mut self, slot: SlotId) -> bool {
        let at = self.0.iter().position(|&other| other == slot);
        at.map(|at| self.0.remove(at)).is_some()
    }
}

struct FifoModel(InOrder<false>);
struct LruModel(InOrder<true>);

macro_rules! in_order {
    ($model:ident, $policy:ty, $by_use:expr) => {
        impl Default for $model {
            fn default() -> Self {
                Self(InOrder(Vec::new()))
            }
        }

        impl Model for $model {
            type Policy = $policy;

            fn insert(&mut self, slot: SlotId, _: u64) {
                self.0.0.push(slot);
            }

            fn touch(&mut self, slot: SlotId) {
                if $by_use && self.0.take(slot) {
                    self.0.0.push(slot);
                }
            }

            fn remove(&mut self, slot: SlotId) {
                self.0.take(slot);
            }

            fn evict(&mut self, refused: &BTreeSet<SlotId>) -> Option<SlotId> {
                let victim = self.0.0.iter().copied().find(|slot| !refused.contains(slot))?;
                self.0.take(victim);
                Some(victim)
            }
        }
    };
}

in_order!(FifoModel, Fifo, false);
in_order!(LruModel, Lru, true);

/// S3-FIFO without its ghost queue: (slot, bytes, touches), oldest at the front.
#[derive(Default)]
struct S3Model {
    small: VecDeque<(SlotId, u64, u32)>,
    main: VecDeque<(SlotId, u64, u32)>,
}

impl Model for S3Model {
    type Policy = S3Fifo;

    fn insert(&mut self, slot: SlotId, bytes: u64) {
        self.small.push_back((slot, bytes, 0));
    }

    fn touch(&mut self, slot: SlotId) {
        let held = self.small.iter_mut().chain(&mut self.main);
        held.filter(|entry| entry.0 == slot).for_each(|entry| entry.2 = 3.min(entry.2 + 1));
    }

    fn remove(&mut self, slot: SlotId) {
        self.small.retain(|entry| entry.0 != slot);
        self.main.retain(|entry| entry.0 != slot);
    }

    fn evict(&mut self, refused: &BTreeSet<SlotId>) -> Option<SlotId> {
        let mut tried = BTreeSet::new();
        let bytes =
            |queue: &VecDeque<(SlotId, u64, u32)>| queue.iter().map(|e| u128::from(e.1)).sum::<u128>();
        loop {
            let open = |queue: &VecDeque<(SlotId, u64, u32)>| queue.iter().any(|e| !tried.contains(&e.0));
            let small_is_full = bytes(&self.small) * 10 >= bytes(&self.small) + bytes(&self.main);
            let (queue, small) = match (open(&self.small), open(&self.main)) {
                (false, false) => return None,
                (true, true) if small_is_full => (&mut self.small, true),
                (true, false) => (&mut self.small, true),
                _ => (&mut self.main, false),
            };
            let entry = queue.pop_front()?;
            let (slot, bytes, touches) = entry;
            if tried.contains(&slot) {
                queue.push_back(entry);
            } else if small && touches >= 2 {
                self.main.push_back((slot, bytes, 0));
            } else if !small && touches > 0 {
                queue.push_back((slot, bytes, touches - 1));
            } else if refused.contains(&slot) {
                tried.insert(slot);
                queue.push_back(entry);
            } else {
                return Some(slot);
            }
        }
    }
}

/// Tenure without a ghost: (slot, last use, tenured), in no order.
#[derive(Default)]
struct TenureModel {
    held: Vec<(SlotId, u64, bool)>,
    now: u64,
}

impl Model for TenureModel {
    type Policy = Tenure;

    fn insert(&mut self, slot: SlotId, _: u64) {
        self.now += 1;
        self.held.push((slot, self.now, false));
    }

    fn touch(&mut self, slot: SlotId) {
        if let Some(entry) = self.held.iter_mut().find(|entry| entry.0 == slot) {
            self.now += 1;
            (entry.1, entry.2) = (self.now, true);
        }
    }

    fn remove(&mut self, slot: SlotId) {
        self.held.retain(|entry| entry.0 != slot);
    }

    fn evict(&mut self, refused: &BTreeSet<SlotId>) -> Option<SlotId> {
        // A tenured slot counts as unused half as long, in whole uses. Of two slots that are due at
        // the same time, the lower slot goes first, and of one kind the older.
        let unused = |entry: &(SlotId, u64, bool)| {
            let unused = self.now - entry.1;
            if entry.2 { unused / 2 } else { unused }
        };
        let open = || self.held.iter().filter(|entry| !refused.contains(&entry.0));
        let oldest = |kind| open().filter(move |entry| entry.2 == kind).min_by_key(|entry| entry.1);
        let due = [oldest(false), oldest(true)].into_iter().flatten();
        let victim = due.min_by_key(|entry| (std::cmp::Reverse(unused(entry)), entry.0))?.0;
        self.remove(victim);
        Some(victim)
    }
}

proptest! {
    #[test]
    fn tenure_order_is_exact(steps in evict_steps(12, 150)) {
        agrees::<TenureModel>(&steps)?;
    }

    #[test]
    fn fifo_order_is_exact(steps in evict_steps(12, 150)) {
        agrees::<FifoModel>(&steps)?;
    }

    #[test]
    fn lru_order_is_exact(steps in evict_steps(12, 150)) {
        agrees::<LruModel>(&steps)?;
    }

    #[test]
    fn s3fifo_order_is_exact(steps in evict_steps(12, 150)) {
        agrees::<S3Model>(&steps)?;
    }
}

/// Refused slots keep their position in a strict order: they go first once they are allowed.
#[test]
fn refusal_does_not_reorder() {
    fn order<P: EvictionPolicy>(config: P::Config) -> Vec<u32> {
        let mut policy = P::new(8, &config);
        (0..8).for_each(|slot| policy.insert(SlotId(slot), 1));
        assert_eq!(policy.evict(&mut |slot| slot.0 >= 5), Some(SlotId(5)));
        std::iter::from_fn(|| policy.evict(&mut |_| true)).map(|slot| slot.0).collect()
    }
    assert_eq!(order::<Fifo>(()), [0, 1, 2, 3, 4, 6, 7]);
    assert_eq!(order::<Lru>(()), [0, 1, 2, 3, 4, 6, 7]);
}

/// An evicted object that comes back under the same key enters the main queue; under another key it
/// does not.
#[test]
fn s3fifo_recognises_objects_that_come_back() {
    let survives = |hash_again: Option<u64>| {
        let mut policy = S3Fifo::new(100, &S3FifoConfig::default());
        (0..100).for_each(|slot| policy.insert_hashed(SlotId(slot), 1, slot.into()));
        let slot = policy.evict(&mut |_| true).expect("a slot is there");
        assert_eq!(slot, SlotId(0));
        match hash_again {
            Some(hash) => policy.insert_hashed(slot, 1, hash),
            None => policy.insert(slot, 1),
        }
        // More new objects pass through than the small queue can hold.
        (1000..1150u64).all(|hash| {
            let victim = policy.evict(&mut |_| true).expect("a slot is there");
            policy.insert_hashed(victim, 1, hash);
            victim != slot
        })
    };
    assert!(survives(Some(0)), "the key is known");
    assert!(!survives(Some(1000)), "another key in the same slot is not");
    assert!(!survives(None), "nor is an unknown key");
}

/// A slot that is refused for long costs little: the policy asks about it once per round of its
/// queue.
#[test]
fn s3fifo_rarely_queries_pinned_slots() {
    let (mut policy, mut queries) = (S3Fifo::new(2000, &S3FifoConfig::default()), 0);
    (0..2000).for_each(|slot| policy.insert(SlotId(slot), 1));
    for _ in 0..10_000 {
        let victim = policy.evict(&mut |slot| {
            queries += 1;
            slot.0 >= 1000
        });
        policy.insert(victim.expect("half of the slots are allowed"), 1);
    }
    assert!(queries < 25_000, "{queries} questions for 10000 victims");
}

/// Returns the share of hits among requests, in this order.
fn hit_rate<P: MergeableOrder>(config: &P::Config, slots: u32, requests: impl Iterator<Item = u64>) -> f64 {
    let mut policy = P::new(slots as usize, config);
    let mut held = std::collections::HashMap::new();
    let mut keys = vec![0u64; slots as usize];
    let mut free: Vec<SlotId> = (0..slots).map(SlotId).collect();
    let (mut hits, mut all) = (0, 0);
    for key in requests {
        all += 1;
        if let Some(&slot) = held.get(&key) {
            hits += 1;
            policy.touch(slot);
            continue;
        }
        let slot = free.pop().unwrap_or_else(|| {
            let victim = policy.evict(&mut |_| true).expect("all slots are held");
            held.remove(&keys[victim.index()]);
            victim
        });
        policy.insert_hashed(slot, 1, key);
        held.insert(key, slot);
        keys[slot.index()] = key;
    }
    f64::from(hits) / f64::from(all)
}

/// Returns requests that follow Zipf's law, among a stream of objects used once.
fn zipf_in_a_stream() -> impl Iterator<Item = u64> {
    let mut rng = Rng::seeded(11);
    (0..100_000).map(move |number| {
        let zipf = (10_000f64.powf(rng.below(1 << 30) as f64 / (1u64 << 30) as f64)) as u64;
        if rng.below(2) == 0 { 1_000_000 + number } else { zipf }
    })
}

/// Returns blocks of conversations: two in five requests continue one of the last thousand, the
/// others begin a new one.
fn conversations(seed: u64) -> impl Iterator<Item = u64> {
    let (mut rng, mut fresh) = (Rng::seeded(seed), 1);
    let mut recent: Vec<Vec<u64>> = vec![vec![0]];
    (0..3000).flat_map(move |_| {
        let mut blocks = vec![0];
        if rng.below(100) < 40 {
            let depth = (recent.len() as u64).min(1 << rng.below(10));
            blocks.clone_from(&recent[recent.len() - 1 - rng.below(depth) as usize]);
        }
        let growth = 1 + (1 << rng.below(6)) + rng.below(8);
        blocks.extend(fresh..fresh + growth);
        fresh += growth;
        recent.push(blocks.clone());
        blocks
    })
}

#[test]
fn s3fifo_resists_a_stream_of_objects_used_once() {
    let rate = |kind: PolicyKind| hit_rate::<BuiltinPolicy>(&kind.into(), 500, zipf_in_a_stream());
    let (fifo, lru, s3fifo) = (rate(PolicyKind::Fifo), rate(PolicyKind::Lru), rate(PolicyKind::S3Fifo));
    assert!(lru > fifo && s3fifo > lru + 0.02, "fifo {fifo}, lru {lru}, s3fifo {s3fifo}");
}

/// Compares hit rates on synthetic traces: at each size, of three traces together (a single one may
/// be slightly behind).
#[test]
fn the_default_is_nowhere_behind_lru() {
    let conversations = || (1..4).flat_map(|seed| conversations(seed).map(move |id| id + (seed << 32)));
    for slots in [100, 300, 1000, 3000, 20_000] {
        let default = PolicyKind::default().into();
        let (one_by_one, of_lru) = (
            hit_rate::<BuiltinPolicy>(&default, slots, zipf_in_a_stream()),
            hit_rate::<Lru>(&(), slots, zipf_in_a_stream()),
        );
        assert!(one_by_one >= of_lru, "one by one, {slots} slots: {one_by_one} against {of_lru}");
        let (blocks, of_lru) = (
            hit_rate::<BuiltinPolicy>(&default, slots, conversations()),
            hit_rate::<Lru>(&(), slots, conversations()),
        );
        assert!(blocks >= of_lru, "conversations, {slots} slots: {blocks} against {of_lru}");
    }
}

/// An evicted object that comes back within two lives of a new object is tenured; later, or under
/// another key, it counts as new.
#[test]
fn tenure_recognises_objects_that_come_back() {
    let outlives = |between: u64, key: u64| {
        let mut policy = Tenure::new(100, &TenureConfig::default());
        (0..100).for_each(|slot| policy.insert_hashed(SlotId(slot), 1, slot.into()));
        let mut replace = |key: u64| {
            let victim = policy.evict(&mut |_| true).expect("a slot is there");
            policy.insert_hashed(victim, 1, key);
            victim
        };
        for n in 0..between {
            replace(1000 + n);
        }
        let slot = replace(key);
        // A new object would be gone after a hundred more.
        (0..130).all(|n| replace(5000 + n) != slot)
    };
    assert!(outlives(50, 0), "the key is known");
    assert!(!outlives(50, 4000), "another key is not");
    assert!(!outlives(350, 0), "nor is an object evicted long ago");
}

/// Shards with a common clock agree on the order: the victim of a busier shard is as old as that of
/// another.
#[test]
fn tenure_counts_in_the_given_time() {
    let mut policy = Tenure::new(4, &TenureConfig::default());
    for (time, slot) in [(100, 0), (200, 1)] {
        policy.set_time(time);
        policy.insert(SlotId(slot), 1);
    }
    policy.set_time(300);
    policy.touch(SlotId(0));
    policy.set_time(450);
    policy.insert(SlotId(2), 1);
    // A new object unused for 250, and a tenured one unused for 150, which counts as 75.
    assert_eq!(policy.evict(&mut |_| true), Some(SlotId(1)));
    assert_eq!(policy.evict(&mut |slot| slot.0 == 0), Some(SlotId(0)));
    assert_eq!(policy.victim_since(), Some(451 - 150 / 2));
}

/// LRU policy with one bug.
struct Buggy<const BUG: u8> {
    inner: Lru,
    calls: u32,
}

const BUGS: [(&str, fn()); 6] = [
    ("evicts without asking", || testkit::evict::random_steps_agree_with_the_oracle::<Buggy<0>>(&())),
    ("evicts refused slots", || testkit::evict::random_steps_agree_with_the_oracle::<Buggy<1>>(&())),
    ("forgets refused slots", || testkit::evict::random_steps_agree_with_the_oracle::<Buggy<2>>(&())),
    ("ignores remove", || testkit::evict::random_steps_agree_with_the_oracle::<Buggy<3>>(&())),
    ("gives up early", || testkit::evict::random_steps_agree_with_the_oracle::<Buggy<4>>(&())),
    ("inserts touched slots", || testkit::evict::random_steps_agree_with_the_oracle::<Buggy<5>>(&())),
];

impl<const BUG: u8> MergeableOrder for Buggy<BUG> {}

impl<const BUG: u8> EvictionPolicy for Buggy<BUG> {
    type Config = ();

    fn new(slots: usize, (): &()) -> Self {
        Self { inner: Lru::new(slots, &()), calls: 0 }
    }

    fn insert(&mut self, slot: SlotId, bytes: u64) {
        self.inner.insert(slot, bytes);
    }

    fn touch(&mut self, slot: SlotId) {
        if BUG == 5 {
            self.inner.insert(slot, 1);
        }
        self.inner.touch(slot);
    }

    fn remove(&mut self, slot: SlotId) {
        if BUG != 3 {
            self.inner.remove(slot);
        }
    }

    fn evict(&mut self, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        self.calls += 1;
        match BUG {
            0 if self.calls.is_multiple_of(4) => self.inner.evict(&mut |_| true),
            1 => self.inner.evict(&mut |slot| allowed(slot) || slot.0 == 3),
            2 => {
                let mut refused = Vec::new();
                let victim = self.inner.evict(&mut |slot| {
                    let yes = allowed(slot);
                    if !yes {
                        refused.push(slot);
                    }
                    yes
                });
                refused.into_iter().for_each(|slot| self.inner.remove(slot));
                victim
            }
            4 => {
                let mut tries = 0;
                self.inner.evict(&mut |slot| {
                    tries += 1;
                    tries < 4 && allowed(slot)
                })
            }
            _ => self.inner.evict(allowed),
        }
    }

    fn len(&self) -> usize {
        self.inner.len()
    }
}

#[test]
fn the_suite_finds_planted_bugs() {
    testkit::evict::random_steps_agree_with_the_oracle::<Buggy<255>>(&());
    for (bug, suite) in BUGS {
        assert!(catch_unwind(suite).is_err(), "the suite does not notice a policy that {bug}");
    }
}
