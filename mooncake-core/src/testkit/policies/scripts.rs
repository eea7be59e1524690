//! Steps for the tests of the policies.

use crate::evict::{EvictionPolicy, MergeableOrder};
use crate::ids::SlotId;
use crate::testkit::evict::EvictStep;

/// Performs steps. `check` receives each step, the victim, and the policy after it.
pub(super) fn play<P: MergeableOrder>(
    steps: &[EvictStep],
    mut check: impl FnMut(&EvictStep, Option<SlotId>, &P),
) where
    P::Config: Default,
{
    let mut policy = P::new(0, &P::Config::default());
    for step in steps {
        let mut victim = None;
        match step {
            EvictStep::Insert { slot, bytes, hash } => match hash {
                Some(hash) => policy.insert_hashed(*slot, *bytes, *hash),
                None => policy.insert(*slot, *bytes),
            },
            EvictStep::Touch(slot) => policy.touch(*slot),
            EvictStep::Remove(slot) => policy.remove(*slot),
            EvictStep::Evict { refused } => victim = policy.evict(&mut |slot| !refused.contains(&slot)),
        }
        check(step, victim, &policy);
    }
}

/// Evicts everything. Returns the numbers of the slots in this order.
pub(super) fn victims(policy: &mut impl EvictionPolicy) -> Vec<u32> {
    std::iter::from_fn(|| policy.evict(&mut |_| true)).map(|slot| slot.0).collect()
}

/// Cache of a few keys under a policy, in which the slot of a key is its number.
pub(super) struct SmallCache<P> {
    pub(super) policy: P,
    held: Vec<u64>,
    capacity: usize,
}

impl<P: MergeableOrder> SmallCache<P> {
    pub(super) fn new(capacity: usize) -> Self
    where
        P::Config: Default,
    {
        Self { policy: P::new(capacity, &P::Config::default()), held: Vec::new(), capacity }
    }

    /// Uses keys one after the other. Returns the keys that are evicted for them.
    pub(super) fn use_keys(&mut self, keys: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let mut evicted = Vec::new();
        for key in keys {
            if self.held.contains(&key) {
                self.policy.touch(SlotId(key as u32));
                continue;
            }
            if self.held.len() == self.capacity {
                let victim = self.policy.evict(&mut |_| true).expect("the cache is full");
                self.held.retain(|key| *key != victim.0.into());
                evicted.push(victim.0.into());
            }
            self.policy.insert_hashed(SlotId(key as u32), 1, key);
            self.held.push(key);
        }
        evicted
    }
}
