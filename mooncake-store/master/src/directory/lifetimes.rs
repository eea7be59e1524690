//! Lifetimes of the objects of one shard that end by themselves. The other objects have no entry
//! here.

use std::collections::{BTreeSet, HashMap};

use foldhash::fast::FixedState;
use mooncake_core::clock::Moment;
use mooncake_core::ids::SlotId;

use crate::model::lifetime::Lifetime;

/// Lifetimes by slot, and sorted by their end.
#[derive(Default)]
pub(crate) struct Lifetimes {
    by_slot: HashMap<SlotId, Lifetime, FixedState>,
    ends: BTreeSet<(Moment, SlotId)>,
}

impl Lifetimes {
    /// Returns the lifetime of an object.
    pub(crate) fn get(&self, slot: SlotId) -> Option<Lifetime> {
        self.by_slot.get(&slot).copied()
    }

    /// Sets the lifetime of an object; `None` for an object that does not end by itself.
    pub(crate) fn set(&mut self, slot: SlotId, lifetime: Option<Lifetime>) {
        let before = match lifetime {
            Some(lifetime) => {
                self.ends.insert((lifetime.until, slot));
                self.by_slot.insert(slot, lifetime)
            }
            None => self.by_slot.remove(&slot),
        };
        if let Some(before) = before
            && lifetime.is_none_or(|lifetime| lifetime.until != before.until)
        {
            self.ends.remove(&(before.until, slot));
        }
    }

    /// Returns the object that is to be removed first, and when.
    pub(crate) fn first(&self) -> Option<(Moment, SlotId)> {
        self.ends.first().copied()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use mooncake_core::clock::Rng;

    use super::*;

    #[test]
    fn the_first_end_is_that_of_a_list() {
        let (mut rng, mut lifetimes, mut model) = (Rng::seeded(3), Lifetimes::default(), BTreeMap::new());
        for _ in 0..20_000 {
            let slot = SlotId(rng.below(40) as u32);
            let lifetime = (rng.below(3) > 0).then(|| Lifetime {
                until: Moment(rng.below(50)),
                ends_at_read: true,
                was_read: rng.below(4) == 0,
            });
            lifetimes.set(slot, lifetime);
            match lifetime {
                Some(lifetime) => drop(model.insert(slot, lifetime)),
                None => drop(model.remove(&slot)),
            }
            assert_eq!(lifetimes.get(slot), lifetime);
            let first = model.iter().map(|(slot, lifetime)| (lifetime.until, *slot)).min();
            assert_eq!((lifetimes.first(), lifetimes.ends.len()), (first, model.len()));
        }
    }
}
