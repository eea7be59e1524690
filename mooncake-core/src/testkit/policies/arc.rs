//! [`AdaptiveReplacement`]: two lists of objects and two of evicted ones.

use std::collections::HashMap;

use super::queue::Queue;
use crate::evict::{EvictionPolicy, MergeableOrder};
use crate::ids::SlotId;

/// ARC (Megiddo and Modha, FAST 2003): objects used once and objects used again are in two lists.
/// An evicted object that comes back shows which list was too short, and moves the bound between
/// both.
///
/// The bound moves when the object is inserted, which is after the eviction for it, and the rule
/// for equality that asks for the key of that object is left out.
#[derive(Debug, Default)]
pub struct AdaptiveReplacement {
    /// Objects used once (`T1`), and used again (`T2`), by last use.
    held: [Queue<SlotId>; 2],
    /// Keys evicted from the lists (`B1` and `B2`).
    ghosts: [Queue<u64>; 2],
    /// Hash of the key of each slot, if known.
    keys: HashMap<SlotId, u64>,
    /// Length that the first list should have (`p`).
    target: usize,
}

const ONCE: usize = 0;
const AGAIN: usize = 1;

impl EvictionPolicy for AdaptiveReplacement {
    type Config = ();

    fn new(_slots: usize, (): &()) -> Self {
        Self::default()
    }

    fn insert(&mut self, slot: SlotId, _bytes: u64) {
        self.enter(slot, None);
    }

    fn touch(&mut self, slot: SlotId) {
        if self.held.iter_mut().any(|list| list.remove(slot)) {
            self.held[AGAIN].push(slot);
        }
    }

    fn remove(&mut self, slot: SlotId) {
        for list in &mut self.held {
            list.remove(slot);
        }
        self.keys.remove(&slot);
    }

    fn evict(&mut self, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        let first = if self.held[ONCE].len() > self.target { ONCE } else { AGAIN };
        for list in [first, 1 - first] {
            let victim = self.held[list].iter().find(|slot| allowed(*slot));
            if let Some(slot) = victim {
                self.held[list].remove(slot);
                if let Some(key) = self.keys.remove(&slot) {
                    for ghosts in &mut self.ghosts {
                        ghosts.remove(key);
                    }
                    self.ghosts[list].push(key);
                }
                return Some(slot);
            }
        }
        None
    }

    fn len(&self) -> usize {
        self.held[ONCE].len() + self.held[AGAIN].len()
    }
}

impl MergeableOrder for AdaptiveReplacement {
    fn insert_hashed(&mut self, slot: SlotId, _bytes: u64, key_hash: u64) {
        self.enter(slot, Some(key_hash));
    }

    fn remembers(&self, key_hash: u64) -> bool {
        self.ghosts.iter().any(|ghosts| ghosts.contains(key_hash))
    }
}

impl AdaptiveReplacement {
    fn enter(&mut self, slot: SlotId, key: Option<u64>) {
        if self.held.iter().any(|list| list.contains(slot)) {
            return self.touch(slot);
        }
        self.keys.extend(key.map(|key| (slot, key)));
        let capacity = self.len() + 1;
        let [once, again] = [self.ghosts[ONCE].len(), self.ghosts[AGAIN].len()];
        let was_in = |ghosts: &mut Queue<u64>| key.is_some_and(|key| ghosts.remove(key));
        let list = if was_in(&mut self.ghosts[ONCE]) {
            self.target += (again / once).max(1);
            AGAIN
        } else if was_in(&mut self.ghosts[AGAIN]) {
            self.target = self.target.saturating_sub((once / again).max(1));
            AGAIN
        } else {
            ONCE
        };
        self.target = self.target.min(capacity);
        self.held[list].push(slot);
        // At most one capacity of objects used once, and two of all, held or ghosts.
        while self.held[ONCE].len() + self.ghosts[ONCE].len() > capacity && self.ghosts[ONCE].pop().is_some()
        {
        }
        while self.len() + self.ghosts[ONCE].len() + self.ghosts[AGAIN].len() > 2 * capacity {
            if self.ghosts[AGAIN].pop().is_none() {
                self.ghosts[ONCE].pop();
            }
        }
    }
}

// Miri would take long, and there is no unsafe code here to check.
#[cfg(all(test, not(miri)))]
mod tests {
    use super::super::scripts::{SmallCache, play, victims};
    use super::*;
    use proptest::prelude::*;

    crate::eviction_conformance!(AdaptiveReplacement);

    fn ghosts(policy: &AdaptiveReplacement) -> [Vec<u64>; 2] {
        [ONCE, AGAIN].map(|list| policy.ghosts[list].iter().collect())
    }

    #[test]
    fn objects_used_again_survive_a_scan() {
        let mut cache = SmallCache::<AdaptiveReplacement>::new(4);
        assert_eq!(cache.use_keys([1, 2, 1, 2, 3, 4]), []);
        assert_eq!(cache.use_keys([5, 6, 7]), [3, 4, 5], "1 and 2 were used again");
        // Two held and two ghosts are all that is remembered of objects used once.
        assert_eq!(ghosts(&cache.policy), [vec![4, 5], vec![]]);
        assert_eq!(victims(&mut cache.policy), [6, 7, 1, 2]);
    }

    #[test]
    fn the_bound_follows_what_comes_back() {
        let mut cache = SmallCache::<AdaptiveReplacement>::new(4);
        cache.use_keys([1, 2, 1, 2, 3, 4, 5, 6]);
        assert_eq!((ghosts(&cache.policy), cache.policy.target), ([vec![3, 4], vec![]], 0));
        // 4 comes back: the list of objects used once should have been longer.
        assert_eq!(cache.use_keys([4]), [5]);
        assert_eq!((ghosts(&cache.policy), cache.policy.target), ([vec![3, 5], vec![]], 1));
        // One object was used once, as many as the bound allows, so 1 goes.
        assert_eq!(cache.use_keys([3]), [1]);
        assert_eq!((ghosts(&cache.policy), cache.policy.target), ([vec![5], vec![1]], 2));
        assert_eq!(cache.use_keys([1]), [2]);
        assert_eq!((ghosts(&cache.policy), cache.policy.target), ([vec![5], vec![2]], 1));
        assert!(cache.policy.remembers(5) && !cache.policy.remembers(1));
    }

    proptest! {
        #[test]
        #[cfg_attr(miri, ignore = "numbers only, and slow")]
        fn the_lists_keep_their_bounds(steps in crate::testkit::evict::evict_steps(12, 200)) {
            let mut most = 0;
            play::<AdaptiveReplacement>(&steps, |_, _, policy| {
                most = most.max(policy.len());
                let [once, again] = [&policy.ghosts[ONCE], &policy.ghosts[AGAIN]];
                assert!(once.iter().all(|key| !again.contains(key)));
                assert!(policy.held[ONCE].iter().all(|slot| !policy.held[AGAIN].contains(slot)));
                assert!(policy.target <= most && policy.keys.len() <= policy.len());
                assert!(policy.held[ONCE].len() + once.len() <= most);
                assert!(policy.len() + once.len() + again.len() <= 2 * most);
            });
        }
    }
}
