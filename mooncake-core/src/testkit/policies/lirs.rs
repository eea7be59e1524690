//! [`Lirs`]: a stack by recency and a queue of the objects that go next.

use std::collections::HashMap;

use super::queue::Queue;
use crate::evict::{EvictionPolicy, MergeableOrder};
use crate::ids::SlotId;

/// LIRS (Jiang and Zhang, SIGMETRICS 2002): an object that was used twice within a short time, in
/// number of other objects, stays (*LIR*). The others (*HIR*) share one hundredth of the cache.
///
/// The number of evicted objects in the stack is bounded by twice the number of objects held.
#[derive(Debug, Default)]
pub struct Lirs {
    /// All LIR objects, and what was used since the oldest of their last uses.
    stack: Queue<Entry>,
    /// HIR objects that are held, the next victim first.
    next: Queue<SlotId>,
    /// Evicted objects in the stack, by eviction.
    non_resident: Queue<u64>,
    states: HashMap<SlotId, State>,
    /// Number of LIR objects.
    lirs: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Entry {
    Held(SlotId),
    /// Evicted HIR object with the hash of its key.
    NonResident(u64),
}

#[derive(Clone, Copy, Debug)]
struct State {
    /// Hash of the key, if known.
    key: Option<u64>,
    is_lir: bool,
}

/// Share of the HIR objects, in percent.
const HIR_PERCENT: usize = 1;
/// Evicted objects in the stack, as a multiple of the objects held.
const MAX_NON_RESIDENT: usize = 2;

impl EvictionPolicy for Lirs {
    type Config = ();

    fn new(_slots: usize, (): &()) -> Self {
        Self::default()
    }

    fn insert(&mut self, slot: SlotId, _bytes: u64) {
        self.enter(slot, None);
    }

    fn touch(&mut self, slot: SlotId) {
        let Some(state) = self.states.get_mut(&slot) else { return };
        if !state.is_lir && self.stack.contains(Entry::Held(slot)) {
            state.is_lir = true;
            self.lirs += 1;
            self.next.remove(slot);
        } else if !state.is_lir {
            self.next.push(slot);
        }
        self.stack.push(Entry::Held(slot));
        self.balance();
    }

    fn remove(&mut self, slot: SlotId) {
        if let Some(state) = self.states.remove(&slot) {
            self.lirs -= usize::from(state.is_lir);
            self.next.remove(slot);
            self.stack.remove(Entry::Held(slot));
            self.prune();
        }
    }

    fn evict(&mut self, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        let lirs = self.stack.iter().filter_map(|entry| match entry {
            Entry::Held(slot) => Some(slot).filter(|slot| self.states[slot].is_lir),
            Entry::NonResident(_) => None,
        });
        let victim = self.next.iter().chain(lirs).find(|slot| allowed(*slot))?;
        if let State { key: Some(key), is_lir: false } = self.states[&victim]
            && self.stack.contains(Entry::Held(victim))
        {
            self.stack.remove(Entry::NonResident(key));
            self.stack.replace(Entry::Held(victim), Entry::NonResident(key));
            self.non_resident.push(key);
        }
        self.remove(victim);
        while self.non_resident.len() > MAX_NON_RESIDENT * (self.len() + 1)
            && let Some(key) = self.non_resident.pop()
        {
            self.stack.remove(Entry::NonResident(key));
        }
        Some(victim)
    }

    fn len(&self) -> usize {
        self.states.len()
    }
}

impl MergeableOrder for Lirs {
    fn insert_hashed(&mut self, slot: SlotId, _bytes: u64, key_hash: u64) {
        self.enter(slot, Some(key_hash));
    }

    fn remembers(&self, key_hash: u64) -> bool {
        self.non_resident.contains(key_hash)
    }
}

impl Lirs {
    fn enter(&mut self, slot: SlotId, key: Option<u64>) {
        if self.states.contains_key(&slot) {
            return self.touch(slot);
        }
        let is_known = key
            .is_some_and(|key| self.non_resident.remove(key) && self.stack.remove(Entry::NonResident(key)));
        let is_lir = is_known || self.lirs < max_lirs(self.len() + 1);
        self.states.insert(slot, State { key, is_lir });
        self.stack.push(Entry::Held(slot));
        if is_lir {
            self.lirs += 1;
        } else {
            self.next.push(slot);
        }
        self.balance();
    }

    /// Makes the LIR objects with the oldest uses HIR while there are too many.
    fn balance(&mut self) {
        self.prune();
        while self.lirs > max_lirs(self.len())
            && let Some(Entry::Held(slot)) = self.stack.pop()
        {
            if let Some(state) = self.states.get_mut(&slot) {
                state.is_lir = false;
            }
            self.lirs -= 1;
            self.next.push(slot);
            self.prune();
        }
    }

    /// Removes entries from the old end of the stack until it is a LIR object.
    fn prune(&mut self) {
        while let Some(entry) = self.stack.oldest() {
            match entry {
                Entry::Held(slot) if self.states.get(&slot).is_some_and(|state| state.is_lir) => return,
                Entry::Held(_) => {}
                Entry::NonResident(key) => {
                    self.non_resident.remove(key);
                }
            }
            self.stack.pop();
        }
    }
}

/// Returns the number of LIR objects in a cache of this number of objects.
fn max_lirs(len: usize) -> usize {
    len - (len * HIR_PERCENT / 100).max(1).min(len)
}

// Miri would take long, and there is no unsafe code here to check.
#[cfg(all(test, not(miri)))]
mod tests {
    use super::super::scripts::{SmallCache, play};
    use super::*;
    use proptest::prelude::*;

    crate::eviction_conformance!(Lirs);

    fn stack(policy: &Lirs) -> Vec<i64> {
        let number = |entry| match entry {
            Entry::Held(slot) => i64::from(slot.0),
            Entry::NonResident(key) => -(key as i64),
        };
        policy.stack.iter().map(number).collect()
    }

    /// Evicted objects are negative.
    #[test]
    fn an_object_that_comes_back_soon_stays() {
        let mut cache = SmallCache::<Lirs>::new(3);
        assert_eq!(cache.use_keys([1, 2, 3]), []);
        assert_eq!(stack(&cache.policy), [2, 3], "1 is the only HIR object");
        assert_eq!(cache.use_keys([4, 5]), [1, 4]);
        assert_eq!(stack(&cache.policy), [2, 3, -4, 5]);
        assert_eq!(cache.use_keys([4]), [5]);
        assert_eq!(stack(&cache.policy), [3, -5, 4], "4 is LIR, and 2 is HIR and has left the stack");
        assert_eq!(cache.use_keys([6, 3]), [2]);
        assert_eq!(stack(&cache.policy), [4, 6, 3], "5 is forgotten");
        assert_eq!(cache.use_keys([5, 6]), [6, 5]);
        assert_eq!(stack(&cache.policy), [3, -5, 6], "6 came back, 4 is HIR");
        assert!(cache.policy.remembers(5) && !cache.policy.remembers(6));
    }

    #[test]
    fn a_loop_keeps_most_of_its_objects() {
        let mut cache = SmallCache::<Lirs>::new(10);
        let evicted: Vec<u64> = (0..5).flat_map(|_| cache.use_keys(0..12)).collect();
        // Objects 0 and 9 to 11 share one slot; LRU would evict at each use.
        assert!(evicted.len() < 20, "{evicted:?}");
    }

    proptest! {
        #[test]
        #[cfg_attr(miri, ignore = "numbers only, and slow")]
        fn the_stack_ends_with_a_lir_object(steps in crate::testkit::evict::evict_steps(12, 200)) {
            play::<Lirs>(&steps, |_, _, policy| {
                let of = |slot: SlotId| policy.states[&slot];
                match policy.stack.oldest() {
                    Some(Entry::Held(slot)) => assert!(of(slot).is_lir),
                    Some(Entry::NonResident(_)) => panic!("an evicted object is the oldest of the stack"),
                    None => assert_eq!(policy.lirs, 0),
                }
                let lirs = policy.states.iter().filter(|(_, state)| state.is_lir);
                assert!(lirs.clone().all(|(slot, _)| policy.stack.contains(Entry::Held(*slot))));
                assert_eq!(lirs.count(), policy.lirs);
                assert!(policy.next.iter().all(|slot| !of(slot).is_lir));
                assert_eq!(policy.lirs + policy.next.len(), policy.len());
                let non_resident = policy.stack.iter().filter(|entry| matches!(entry, Entry::NonResident(_)));
                assert_eq!(non_resident.count(), policy.non_resident.len());
            });
        }
    }
}
