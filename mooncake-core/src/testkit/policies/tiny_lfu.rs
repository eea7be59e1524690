//! [`TinyLfu`]: a window before a cache with admission by frequency.

use std::collections::HashMap;

use super::queue::Queue;
use crate::evict::{EvictionPolicy, MergeableOrder};
use crate::ids::SlotId;
use crate::sketch::Sketch;

/// W-TinyLFU (Einziger, Friedman and Manes, 2017): a new object enters a window of one hundredth.
/// At its end the object is admitted to the main part if it was used more often than the object
/// that would have to go for it. The main part is a segmented LRU, with four fifths for objects
/// that were used there.
///
/// A sketch counts the uses, and halves its counts after ten times as many uses as objects are
/// held.
#[derive(Debug)]
pub struct TinyLfu {
    window: Queue<SlotId>,
    /// Objects of the main part that were not used there.
    probation: Queue<SlotId>,
    protected: Queue<SlotId>,
    /// Hash of the key of each slot, 0 if unknown.
    keys: HashMap<SlotId, u64>,
    counts: Counts,
}

/// Share of the window, in percent.
const WINDOW_PERCENT: usize = 1;
/// Share of the protected objects in the main part, in percent.
const PROTECTED_PERCENT: usize = 80;
/// Uses per object held after which the counts are halved.
const FADES_AFTER: usize = 10;

impl EvictionPolicy for TinyLfu {
    type Config = ();

    fn new(slots: usize, (): &()) -> Self {
        Self {
            window: Queue::default(),
            probation: Queue::default(),
            protected: Queue::default(),
            keys: HashMap::new(),
            counts: Counts::with_capacity(slots),
        }
    }

    fn insert(&mut self, slot: SlotId, bytes: u64) {
        self.insert_hashed(slot, bytes, 0);
    }

    fn touch(&mut self, slot: SlotId) {
        let Some(key) = self.keys.get(&slot) else { return };
        self.counts.add(*key);
        if self.window.contains(slot) {
            return self.window.push(slot);
        }
        self.probation.remove(slot);
        self.protected.push(slot);
        let main = self.probation.len() + self.protected.len();
        while self.protected.len() * 100 > main * PROTECTED_PERCENT
            && let Some(slot) = self.protected.pop()
        {
            self.probation.push(slot);
        }
    }

    fn remove(&mut self, slot: SlotId) {
        for queue in [&mut self.window, &mut self.probation, &mut self.protected] {
            queue.remove(slot);
        }
        self.keys.remove(&slot);
    }

    fn evict(&mut self, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        let (victim, admitted) = self.choose(allowed)?;
        if let Some(slot) = admitted {
            self.window.remove(slot);
            self.probation.push(slot);
        }
        self.remove(victim);
        Some(victim)
    }

    fn len(&self) -> usize {
        self.window.len() + self.probation.len() + self.protected.len()
    }
}

impl MergeableOrder for TinyLfu {
    fn insert_hashed(&mut self, slot: SlotId, _bytes: u64, key_hash: u64) {
        if self.keys.contains_key(&slot) {
            return self.touch(slot);
        }
        self.counts.fit(self.len() + 1);
        self.counts.add(key_hash);
        self.keys.insert(slot, key_hash);
        self.window.push(slot);
        // A cache that is not full admits every object that leaves the window.
        while self.window.len() > window_len(self.len())
            && let Some(slot) = self.window.pop()
        {
            self.probation.push(slot);
        }
    }
}

impl TinyLfu {
    /// Returns the victim, and the object of the window that is admitted instead.
    fn choose(&self, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<(SlotId, Option<SlotId>)> {
        let is_full = self.window.len() >= window_len(self.len());
        let mut new = self.window.iter().peekable();
        let mut main = self.probation.iter().chain(self.protected.iter()).peekable();
        loop {
            let from_main = match (new.peek(), main.peek()) {
                (Some(new), Some(main)) => !is_full || self.count(*new) > self.count(*main),
                (_, main) => main.is_some(),
            };
            let slot = if from_main { main.next()? } else { new.next()? };
            if allowed(slot) {
                return Some((slot, new.next().filter(|_| from_main && is_full)));
            }
        }
    }

    fn count(&self, slot: SlotId) -> u8 {
        self.keys.get(&slot).map_or(0, |key| self.counts.of(*key))
    }
}

fn window_len(capacity: usize) -> usize {
    (capacity * WINDOW_PERCENT / 100).max(1)
}

/// Counts of the uses of keys.
#[derive(Debug)]
struct Counts {
    sketch: Sketch,
    capacity: usize,
}

/// Highest count, as in the paper.
const MAX_COUNT: u8 = 15;
/// Counters in a row of the sketch, per object.
const WIDTH: usize = 4;
/// Fewest objects for which a sketch is made.
const MIN_CAPACITY: usize = 256;

impl Counts {
    fn with_capacity(capacity: usize) -> Self {
        let capacity = capacity.max(MIN_CAPACITY);
        Self { sketch: Sketch::new(capacity * WIDTH, capacity * FADES_AFTER), capacity }
    }

    /// Replaces the sketch when the cache has outgrown it. The counts begin at zero.
    fn fit(&mut self, capacity: usize) {
        if capacity > self.capacity {
            *self = Self::with_capacity(capacity.next_power_of_two());
        }
    }

    fn add(&mut self, key: u64) {
        if key != 0 {
            self.sketch.add(key);
        }
    }

    fn of(&self, key: u64) -> u8 {
        if key == 0 { 0 } else { self.sketch.count(key).min(MAX_COUNT) }
    }
}

// Miri would take long, and there is no unsafe code here to check.
#[cfg(all(test, not(miri)))]
mod tests {
    use super::super::scripts::{SmallCache, play};
    use super::*;
    use crate::testkit::evict::EvictStep;
    use proptest::prelude::*;

    crate::eviction_conformance!(TinyLfu);

    fn queues(policy: &TinyLfu) -> [Vec<u32>; 3] {
        [&policy.window, &policy.probation, &policy.protected]
            .map(|queue| queue.iter().map(|slot| slot.0).collect())
    }

    #[test]
    fn an_object_used_more_often_is_admitted() {
        let mut cache = SmallCache::<TinyLfu>::new(5);
        assert_eq!(cache.use_keys(1..=5), []);
        assert_eq!(queues(&cache.policy), [vec![5], vec![1, 2, 3, 4], vec![]]);
        assert_eq!(cache.use_keys([6, 7]), [5, 6], "no object was used more often than 1");
        assert_eq!(cache.use_keys([1]), []);
        assert_eq!(queues(&cache.policy), [vec![7], vec![2, 3, 4], vec![1]]);
        assert_eq!(cache.use_keys([5, 8]), [7, 2], "the second use of 5 counts");
        assert_eq!(queues(&cache.policy), [vec![8], vec![3, 4, 5], vec![1]]);
        cache.use_keys([3, 4, 5]);
        assert_eq!(queues(&cache.policy), [vec![8], vec![1], vec![3, 4, 5]], "four fifths are protected");
    }

    proptest! {
        #[test]
        #[cfg_attr(miri, ignore = "numbers only, and slow")]
        fn each_object_is_in_one_queue(steps in crate::testkit::evict::evict_steps(12, 200)) {
            play::<TinyLfu>(&steps, |step, _, policy| {
                let mut all = queues(policy).concat();
                all.sort_unstable();
                let mut keys: Vec<u32> = policy.keys.keys().map(|slot| slot.0).collect();
                keys.sort_unstable();
                assert_eq!(all, keys);
                assert!(policy.window.len() <= 1);
                let EvictStep::Touch(slot) = step else { return };
                if policy.protected.contains(*slot) {
                    let main = policy.probation.len() + policy.protected.len();
                    assert!(policy.protected.len() * 100 <= main * PROTECTED_PERCENT);
                }
            });
        }
    }
}
