//! Conformance suite of [`EvictionPolicy`](crate::evict::EvictionPolicy): one case per sentence of
//! its contract, and random steps beside an oracle.
//!
//! [`eviction_conformance!`](crate::eviction_conformance) turns it into tests of your policy:
//!
//! ```
//! #[cfg(test)]
//! mod tests {
//!     use mooncake_core::evict::Lru; // yours
//!
//!     mooncake_core::eviction_conformance!(Lru);
//! }
//! ```
//!
//! The suite does not test which slot goes first; that is up to the policy.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::evict::MergeableOrder;
use crate::ids::SlotId;

/// Generates the tests of an [`EvictionPolicy`](crate::evict::EvictionPolicy):
/// `eviction_conformance!(MyPolicy)` or, with options,
/// `eviction_conformance!(module_name, MyPolicy, config)`.
#[macro_export]
macro_rules! eviction_conformance {
    ($policy:ty) => {
        $crate::eviction_conformance!(
            eviction_conformance,
            $policy,
            <<$policy as $crate::evict::EvictionPolicy>::Config as ::core::default::Default>::default()
        );
    };
    ($module:ident, $policy:ty, $config:expr) => {
        #[cfg(test)]
        mod $module {
            #[allow(unused_imports)]
            use super::*;

            $crate::eviction_conformance!(@cases $policy, $config;
                evict_returns_only_slots_held, evict_respects_allowed, evict_removes_victim, a_refused_slot_stays,
                a_slot_is_offered_once_per_call, none_means_that_nothing_may_go, insert_of_a_known_slot_is_a_touch,
                unknown_slots_are_ignored, len_counts_the_slots_held, the_same_calls_give_the_same_victims,
                slots_may_be_reused, everything_can_be_evicted, random_steps_agree_with_the_oracle);
        }
    };
    (@cases $policy:ty, $config:expr; $($case:ident),*) => {$(
        #[test]
        fn $case() {
            $crate::testkit::evict::$case::<$policy>(&$config);
        }
    )*};
}

/// Call of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EvictStep {
    /// Calls `insert(slot, bytes)`, or `insert_hashed(slot, bytes, hash)`.
    Insert {
        /// Slot of the object.
        slot: SlotId,
        /// Size of the object.
        bytes: u64,
        /// Hash of the key, if the policy gets one.
        hash: Option<u64>,
    },
    /// Calls `touch`.
    Touch(SlotId),
    /// Calls `remove`.
    Remove(SlotId),
    /// Calls `evict` and refuses some slots.
    Evict {
        /// Slots to refuse, as if leased or pinned.
        refused: BTreeSet<SlotId>,
    },
}

/// Returns a strategy of random steps over `slots` slots.
pub fn evict_steps(slots: u32, max_steps: usize) -> impl Strategy<Value = Vec<EvictStep>> {
    let slot = || (0..slots.max(1)).prop_map(SlotId);
    let bytes = prop_oneof![4 => 1..=10_000u64, 1 => Just(0u64), 1 => any::<u64>()];
    let hash = proptest::option::of(0..u64::from(slots) * 3 + 1);
    let refused = prop_oneof![
        2 => Just(BTreeSet::new()),
        2 => proptest::collection::btree_set(slot(), 0..=slots as usize / 2),
        1 => Just((0..slots).map(SlotId).collect()),
    ];
    let step = prop_oneof![
        5 => (slot(), bytes, hash).prop_map(|(slot, bytes, hash)| EvictStep::Insert { slot, bytes, hash }),
        4 => slot().prop_map(EvictStep::Touch),
        1 => slot().prop_map(EvictStep::Remove),
        3 => refused.prop_map(|refused| EvictStep::Evict { refused }),
    ];
    proptest::collection::vec(step, 0..=max_steps)
}

/// Policy beside the set of slots that it should hold. Every call is checked. A violation panics
/// with the broken sentence of the contract.
#[derive(Debug)]
pub struct Checked<P> {
    policy: P,
    held: BTreeSet<SlotId>,
}

impl<P: MergeableOrder> Checked<P> {
    /// Creates a policy that expects about `slots` slots.
    pub fn new(slots: usize, config: &P::Config) -> Self {
        let checked = Self { policy: P::new(slots, config), held: BTreeSet::new() };
        checked.check_len();
        checked
    }

    /// Performs one step. Returns the victim, if any, for comparison.
    pub fn step(&mut self, step: &EvictStep) -> Option<SlotId> {
        match step {
            &EvictStep::Insert { slot, bytes, hash: None } => self.insert(slot, bytes),
            &EvictStep::Insert { slot, bytes, hash: Some(hash) } => {
                self.policy.insert_hashed(slot, bytes, hash);
                self.held.insert(slot);
            }
            &EvictStep::Touch(slot) => self.touch(slot),
            &EvictStep::Remove(slot) => self.remove(slot),
            EvictStep::Evict { refused } => return self.evict(|slot| !refused.contains(&slot)),
        }
        self.check_len();
        None
    }

    /// Calls `insert` and checks the effect.
    pub fn insert(&mut self, slot: SlotId, bytes: u64) {
        self.policy.insert(slot, bytes);
        self.held.insert(slot);
        self.check_len();
    }

    /// Calls `touch` and checks the effect.
    pub fn touch(&mut self, slot: SlotId) {
        self.policy.touch(slot);
        self.check_len();
    }

    /// Calls `remove` and checks the effect.
    pub fn remove(&mut self, slot: SlotId) {
        self.policy.remove(slot);
        self.held.remove(&slot);
        self.check_len();
    }

    /// Calls `evict` and checks the result.
    pub fn evict(&mut self, allowed: impl Fn(SlotId) -> bool) -> Option<SlotId> {
        let mut offered = BTreeSet::new();
        let victim = self.policy.evict(&mut |slot| {
            assert!(
                self.held.contains(&slot),
                "evict offers only slots inserted and not removed since: {slot:?}"
            );
            assert!(offered.insert(slot), "each slot is offered at most once per call: {slot:?}");
            allowed(slot)
        });
        match victim {
            Some(slot) => {
                assert!(offered.contains(&slot), "evict returns only a slot that it has offered: {slot:?}");
                assert!(allowed(slot), "evict returns only slots for which allowed returned true: {slot:?}");
                self.held.remove(&slot);
            }
            None => assert_eq!(offered, self.held, "None means that every slot was refused or there is none"),
        }
        self.check_len();
        victim
    }

    /// Returns the slots that the policy should hold.
    pub fn held(&self) -> &BTreeSet<SlotId> {
        &self.held
    }

    /// Evicts everything, and checks that each slot comes out once.
    pub fn finish(mut self) {
        for _ in 0..self.held.len() {
            assert!(self.evict(|_| true).is_some(), "a slot that is held and allowed can be evicted");
        }
        assert!(self.held.is_empty(), "as many victims as slots");
        assert_eq!(self.evict(|_| true), None, "nothing is left");
        assert!(self.policy.is_empty(), "is_empty is true");
    }

    fn check_len(&self) {
        assert_eq!(self.policy.len(), self.held.len(), "len counts the slots held");
    }
}

fn filled<P: MergeableOrder>(config: &P::Config, slots: u32) -> Checked<P> {
    let mut checked = Checked::new(slots as usize, config);
    (0..slots).for_each(|slot| checked.insert(SlotId(slot), 100));
    checked
}

/// Checks that `evict` returns only slots that were inserted and not removed since.
pub fn evict_returns_only_slots_held<P: MergeableOrder>(config: &P::Config) {
    let mut checked = filled::<P>(config, 20);
    (0..20).step_by(3).for_each(|slot| checked.remove(SlotId(slot)));
    checked.finish();
}

/// Checks that `evict` returns only slots for which `allowed` returned true.
pub fn evict_respects_allowed<P: MergeableOrder>(config: &P::Config) {
    let mut checked = filled::<P>(config, 20);
    for _ in 0..10 {
        let victim = checked.evict(|slot| slot.0 % 2 == 1).expect("every other slot is allowed");
        assert_eq!(victim.0 % 2, 1);
    }
    assert_eq!(checked.evict(|slot| slot.0 % 2 == 1), None);
    checked.finish();
}

/// Checks that `evict` removes the slot that it returns from the policy.
pub fn evict_removes_victim<P: MergeableOrder>(config: &P::Config) {
    let mut checked = filled::<P>(config, 3);
    let victim = checked.evict(|_| true).expect("a slot is there");
    checked.touch(victim);
    checked.remove(victim);
    checked.finish();
}

/// Checks that a slot that `allowed` refused stays, and goes when it is allowed.
pub fn a_refused_slot_stays<P: MergeableOrder>(config: &P::Config) {
    let mut checked = filled::<P>(config, 10);
    for _ in 0..5 {
        assert_eq!(checked.evict(|_| false), None, "everything was refused");
    }
    for slot in [7, 0, 9].map(SlotId) {
        assert_eq!(checked.evict(|other| other == slot), Some(slot), "only {slot:?} was allowed");
    }
    checked.finish();
}

/// Checks that `evict` offers each slot at most once per call, however often it was used.
pub fn a_slot_is_offered_once_per_call<P: MergeableOrder>(config: &P::Config) {
    let mut checked = filled::<P>(config, 50);
    for round in 0..8 {
        (0..50).filter(|slot| slot % 8 < round).for_each(|slot| checked.touch(SlotId(slot)));
        assert_eq!(checked.evict(|_| false), None);
        assert_eq!(checked.evict(|slot| slot.0 == 49 - round), Some(SlotId(49 - round)));
    }
    checked.finish();
}

/// Checks that `None` means that every slot was refused or there is none.
pub fn none_means_that_nothing_may_go<P: MergeableOrder>(config: &P::Config) {
    let mut checked = Checked::<P>::new(0, config);
    assert_eq!(checked.evict(|_| true), None);
    checked.insert(SlotId(5), 1);
    assert_eq!(checked.evict(|_| false), None);
    assert_eq!(checked.evict(|_| true), Some(SlotId(5)));
}

/// Checks that `insert` of a known slot is a `touch`.
pub fn insert_of_a_known_slot_is_a_touch<P: MergeableOrder>(config: &P::Config) {
    let victims = |again: fn(&mut Checked<P>, SlotId)| {
        let mut checked = filled::<P>(config, 12);
        [3, 3, 0, 7].map(SlotId).into_iter().for_each(|slot| again(&mut checked, slot));
        std::iter::from_fn(|| checked.evict(|_| true)).collect::<Vec<_>>()
    };
    let inserted = victims(|checked, slot| checked.insert(slot, 5000));
    assert_eq!(inserted, victims(|checked, slot| checked.touch(slot)), "insert of a known slot is a touch");
}

/// Checks that `touch` and `remove` of an unknown slot do nothing.
pub fn unknown_slots_are_ignored<P: MergeableOrder>(config: &P::Config) {
    let mut checked = filled::<P>(config, 4);
    for slot in [4, 1000, u32::MAX].map(SlotId) {
        checked.touch(slot);
        checked.remove(slot);
    }
    checked.remove(SlotId(2));
    checked.touch(SlotId(2));
    checked.remove(SlotId(2));
    checked.finish();
}

/// Checks that `len` counts the slots held.
pub fn len_counts_the_slots_held<P: MergeableOrder>(config: &P::Config) {
    let mut checked = filled::<P>(config, 9);
    checked.insert(SlotId(3), 1);
    assert_eq!(checked.policy.len(), 9);
    checked.remove(SlotId(3));
    checked.evict(|_| true);
    assert_eq!(checked.policy.len(), 7);
    assert!(!checked.policy.is_empty());
}

/// Checks that the same calls give the same victims.
pub fn the_same_calls_give_the_same_victims<P: MergeableOrder>(config: &P::Config) {
    let victims = || {
        let mut checked = filled::<P>(config, 100);
        (0..100).step_by(7).for_each(|slot| checked.touch(SlotId(slot)));
        std::iter::from_fn(|| checked.evict(|_| true)).collect::<Vec<_>>()
    };
    assert_eq!(victims(), victims(), "the same calls give the same victims");
}

/// Checks that a slot may be inserted again once it has left, with another object, and that slots
/// need not come in order.
pub fn slots_may_be_reused<P: MergeableOrder>(config: &P::Config) {
    let mut checked = Checked::<P>::new(1, config);
    for turn in 0..200u64 {
        checked.insert(SlotId((turn * 37 % 64) as u32), turn);
        if turn % 3 == 0 {
            let victim = checked.evict(|_| true).expect("a slot is there");
            checked.insert(victim, u64::MAX);
            checked.touch(victim);
        }
    }
    checked.finish();
}

/// Checks that everything can be evicted, whatever was used how often.
pub fn everything_can_be_evicted<P: MergeableOrder>(config: &P::Config) {
    let mut checked = filled::<P>(config, 64);
    for slot in 0..64 {
        (0..slot % 9).for_each(|_| checked.touch(SlotId(slot)));
    }
    checked.finish();
}

/// Checks random steps one by one beside the oracle, twice with the same outcome, and evicts
/// everything.
pub fn random_steps_agree_with_the_oracle<P: MergeableOrder>(config: &P::Config) {
    let cases = (1..=40u32).prop_flat_map(|slots| (Just(slots), evict_steps(slots, 200)));
    let run = |slots: u32, steps: &[EvictStep]| {
        let mut checked = Checked::<P>::new(slots as usize, config);
        let victims: Vec<_> = steps.iter().map(|step| checked.step(step)).collect();
        checked.finish();
        victims
    };
    let result =
        TestRunner::new(Config { failure_persistence: None, ..Config::default() }).run(&cases, |case| {
            let (slots, steps) = case;
            prop_assert_eq!(run(slots, &steps), run(slots, &steps), "the same calls give the same victims");
            Ok(())
        });
    if let Err(error) = result {
        panic!("{error}");
    }
}
