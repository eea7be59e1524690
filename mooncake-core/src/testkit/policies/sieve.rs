//! [`Sieve`]: one queue and a hand.

use std::collections::HashSet;

use super::queue::Queue;
use crate::evict::{EvictionPolicy, MergeableOrder};
use crate::ids::SlotId;

/// SIEVE (Zhang and others, NSDI 2024): a use marks an object and does not move it. A hand goes
/// from the oldest object to the youngest, clears the marks, and evicts the first object without
/// one.
#[derive(Debug, Default)]
pub struct Sieve {
    queue: Queue<SlotId>,
    marked: HashSet<SlotId>,
    /// Next object that the hand looks at; the oldest one if none.
    hand: Option<SlotId>,
}

impl EvictionPolicy for Sieve {
    type Config = ();

    fn new(_slots: usize, (): &()) -> Self {
        Self::default()
    }

    fn insert(&mut self, slot: SlotId, _bytes: u64) {
        if self.queue.contains(slot) {
            self.touch(slot);
        } else {
            self.queue.push(slot);
        }
    }

    fn touch(&mut self, slot: SlotId) {
        if self.queue.contains(slot) {
            self.marked.insert(slot);
        }
    }

    fn remove(&mut self, slot: SlotId) {
        if self.hand == Some(slot) {
            self.hand = self.queue.newer(slot);
        }
        self.queue.remove(slot);
        self.marked.remove(&slot);
    }

    fn evict(&mut self, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        let mut refused = HashSet::new();
        while refused.len() < self.queue.len() {
            let slot = self.hand.or_else(|| self.queue.oldest())?;
            self.hand = self.queue.newer(slot);
            if self.marked.remove(&slot) || refused.contains(&slot) {
                continue;
            }
            if allowed(slot) {
                self.remove(slot);
                return Some(slot);
            }
            refused.insert(slot);
        }
        None
    }

    fn len(&self) -> usize {
        self.queue.len()
    }
}

impl MergeableOrder for Sieve {}

// Miri would take long, and there is no unsafe code here to check.
#[cfg(all(test, not(miri)))]
mod tests {
    use super::super::scripts::{play, victims};
    use super::*;
    use crate::testkit::evict::EvictStep;
    use proptest::prelude::*;

    crate::eviction_conformance!(Sieve);

    /// The example of the paper: seven objects, of which A, B and G are marked.
    #[test]
    fn the_hand_keeps_its_place() {
        let mut policy = Sieve::default();
        // The oldest first: G F E D C B A.
        (0..7).for_each(|slot| policy.insert(SlotId(slot), 1));
        [0, 5, 6].into_iter().for_each(|slot| policy.touch(SlotId(slot)));
        assert_eq!(policy.evict(&mut |_| true), Some(SlotId(1)), "G is marked, F goes");
        policy.insert(SlotId(7), 1);
        policy.touch(SlotId(0));
        policy.touch(SlotId(3));
        assert_eq!(policy.evict(&mut |_| true), Some(SlotId(2)), "E goes, though G is older");
        policy.insert(SlotId(8), 1);
        assert_eq!(policy.evict(&mut |_| true), Some(SlotId(4)), "D is marked, C goes");
        assert_eq!(policy.evict(&mut |_| true), Some(SlotId(7)), "B and A were marked");
        assert_eq!(victims(&mut policy), [8, 3, 5, 6, 0]);
    }

    /// SIEVE over a plain list.
    #[derive(Default)]
    struct Model {
        list: Vec<(SlotId, bool)>,
        hand: usize,
    }

    impl Model {
        fn drop_at(&mut self, at: usize) -> SlotId {
            let (slot, _) = self.list.remove(at);
            self.hand = if at < self.hand { self.hand - 1 } else { self.hand };
            self.hand %= self.list.len().max(1);
            slot
        }

        fn step(&mut self, step: &EvictStep) -> Option<SlotId> {
            let at = |list: &[(SlotId, bool)], slot| list.iter().position(|entry| entry.0 == slot);
            match step {
                EvictStep::Insert { slot, .. } | EvictStep::Touch(slot) => match at(&self.list, *slot) {
                    Some(at) => self.list[at].1 = true,
                    None if matches!(step, EvictStep::Insert { .. }) => self.list.push((*slot, false)),
                    None => {}
                },
                EvictStep::Remove(slot) => {
                    at(&self.list, *slot).map(|at| self.drop_at(at));
                }
                EvictStep::Evict { refused } => {
                    let mut tried = std::collections::BTreeSet::new();
                    while tried.len() < self.list.len() {
                        let (at, len) = (self.hand, self.list.len());
                        let (slot, marked) = &mut self.list[at];
                        self.hand = (at + 1) % len;
                        if std::mem::take(marked) || tried.contains(slot) {
                            continue;
                        }
                        if !refused.contains(slot) {
                            self.hand = at;
                            return Some(self.drop_at(at));
                        }
                        tried.insert(*slot);
                    }
                }
            }
            None
        }
    }

    proptest! {
        #[test]
        #[cfg_attr(miri, ignore = "numbers only, and slow")]
        fn the_order_is_exact(steps in crate::testkit::evict::evict_steps(12, 150)) {
            let mut model = Model::default();
            play::<Sieve>(&steps, |step, victim, _| {
                assert_eq!(model.step(step), victim, "{step:?}");
            });
        }
    }
}
