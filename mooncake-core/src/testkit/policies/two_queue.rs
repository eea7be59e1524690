//! [`TwoQueue`]: a queue of new objects before a list by last use.

use std::collections::HashMap;

use super::queue::Queue;
use crate::evict::{EvictionPolicy, MergeableOrder};
use crate::ids::SlotId;

/// 2Q (Johnson and Shasha, VLDB 1994): new objects leave in order of arrival, however often they
/// are used. An object that comes back soon after its eviction enters a list by last use.
///
/// The queue of new objects has a quarter of the cache, and half as many keys as the cache has
/// objects are remembered, as its authors recommend.
#[derive(Debug, Default)]
pub struct TwoQueue {
    /// New objects (`A1in`), by arrival.
    new: Queue<SlotId>,
    /// Objects that came back (`Am`), by last use.
    main: Queue<SlotId>,
    /// Keys evicted from the queue of new objects (`A1out`).
    ghosts: Queue<u64>,
    /// Hash of the key of each slot, if known.
    keys: HashMap<SlotId, u64>,
}

/// Share of the new objects (`Kin`), in percent.
const NEW_PERCENT: usize = 25;
/// Number of remembered keys (`Kout`), in percent of the objects held.
const GHOST_PERCENT: usize = 50;

impl EvictionPolicy for TwoQueue {
    type Config = ();

    fn new(_slots: usize, (): &()) -> Self {
        Self::default()
    }

    fn insert(&mut self, slot: SlotId, _bytes: u64) {
        self.enter(slot, None);
    }

    fn touch(&mut self, slot: SlotId) {
        if self.main.contains(slot) {
            self.main.push(slot);
        }
    }

    fn remove(&mut self, slot: SlotId) {
        self.new.remove(slot);
        self.main.remove(slot);
        self.keys.remove(&slot);
    }

    fn evict(&mut self, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        let len = self.len();
        let is_new_first = self.new.len() > len * NEW_PERCENT / 100;
        let (first, second) = if is_new_first { (&self.new, &self.main) } else { (&self.main, &self.new) };
        let victim = first.iter().chain(second.iter()).find(|slot| allowed(*slot))?;
        if let Some(key) = self.keys.remove(&victim)
            && self.new.contains(victim)
        {
            self.ghosts.push(key);
            while self.ghosts.len() > len * GHOST_PERCENT / 100 && self.ghosts.pop().is_some() {}
        }
        self.remove(victim);
        Some(victim)
    }

    fn len(&self) -> usize {
        self.new.len() + self.main.len()
    }
}

impl MergeableOrder for TwoQueue {
    fn insert_hashed(&mut self, slot: SlotId, _bytes: u64, key_hash: u64) {
        self.enter(slot, Some(key_hash));
    }

    fn remembers(&self, key_hash: u64) -> bool {
        self.ghosts.contains(key_hash)
    }
}

impl TwoQueue {
    fn enter(&mut self, slot: SlotId, key: Option<u64>) {
        if self.new.contains(slot) || self.main.contains(slot) {
            return self.touch(slot);
        }
        self.keys.extend(key.map(|key| (slot, key)));
        if key.is_some_and(|key| self.ghosts.remove(key)) {
            self.main.push(slot);
        } else {
            self.new.push(slot);
        }
    }
}

// Miri would take long, and there is no unsafe code here to check.
#[cfg(all(test, not(miri)))]
mod tests {
    use super::super::scripts::{SmallCache, play, victims};
    use super::*;
    use proptest::prelude::*;

    crate::eviction_conformance!(TwoQueue);

    #[test]
    fn an_object_that_comes_back_enters_the_list_by_last_use() {
        let mut cache = SmallCache::<TwoQueue>::new(4);
        assert_eq!(cache.use_keys([1, 2, 3, 4, 1, 5]), [1], "a use of a new object does not count");
        assert_eq!(cache.use_keys([6, 7]), [2, 3]);
        assert!(!cache.policy.remembers(1) && cache.policy.remembers(2), "two keys are remembered");
        assert_eq!(cache.use_keys([3, 4, 5]), [4, 5, 6]);
        assert_eq!(cache.policy.main.iter().collect::<Vec<_>>(), [3, 4, 5].map(SlotId));
        assert_eq!(cache.use_keys([8]), [3], "no more than a quarter is new");
        assert_eq!(cache.use_keys([4, 9]), [7]);
        assert_eq!(victims(&mut cache.policy), [8, 9, 5, 4]);
    }

    proptest! {
        #[test]
        #[cfg_attr(miri, ignore = "numbers only, and slow")]
        fn an_object_is_in_one_queue(steps in crate::testkit::evict::evict_steps(12, 200)) {
            let mut most = 0;
            play::<TwoQueue>(&steps, |_, _, policy| {
                most = most.max(policy.len());
                assert!(policy.new.iter().all(|slot| !policy.main.contains(slot)));
                assert!(policy.keys.len() <= policy.len() && policy.ghosts.len() <= most / 2);
            });
        }
    }
}
