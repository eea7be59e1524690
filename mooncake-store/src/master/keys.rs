//! Where a shard's objects are found by key: many small tables instead of one that doubles, which with a hundred thousand objects holds
//! up whoever waits for the shard.

use hashbrown::HashTable;
use mooncake_core::ids::SlotId;

/// Entries of a table before it is split in two: what moves then moves in less than a millisecond.
const FULL: usize = 3584;
/// The bits of a hash that choose a table. Below are those that a table puts its entries in order by, above those that chose the shard.
const FIRST_BIT: u32 = 20;
const MOST_BITS: u32 = 20;

/// Slots by the hash of their object's key (extendible hashing).
pub(super) struct Keys {
    tables: Vec<Table>,
    /// For each value of the bits that count, which table it is in.
    routes: Vec<u32>,
}

struct Table {
    slots: HashTable<SlotId>,
    /// How many bits are the same for all of its entries.
    bits: u32,
}

impl Keys {
    pub(super) fn new() -> Self {
        Self { tables: vec![Table { slots: HashTable::new(), bits: 0 }], routes: vec![0] }
    }

    pub(super) fn find(&self, hash: u64, is: impl FnMut(&SlotId) -> bool) -> Option<SlotId> {
        self.tables[self.route(hash)].slots.find(hash, is).copied()
    }

    /// Adds a slot that is not there; `hash_of` tells the hash of any that is.
    pub(super) fn insert(&mut self, hash: u64, slot: SlotId, hash_of: impl Fn(SlotId) -> u64) {
        let mut at = self.route(hash);
        while self.tables[at].slots.len() >= FULL && self.tables[at].bits < MOST_BITS {
            self.split(at, &hash_of);
            at = self.route(hash);
        }
        self.tables[at].slots.insert_unique(hash, slot, |slot| hash_of(*slot));
    }

    pub(super) fn remove(&mut self, hash: u64, slot: SlotId) {
        let at = self.route(hash);
        if let Ok(entry) = self.tables[at].slots.find_entry(hash, |other| *other == slot) {
            entry.remove();
        }
    }

    fn route(&self, hash: u64) -> usize {
        let bits = (hash >> FIRST_BIT) as usize & (self.routes.len() - 1);
        self.routes[bits] as usize
    }

    /// Moves what has a one in the next bit to a table of its own.
    #[cold]
    fn split(&mut self, at: usize, hash_of: impl Fn(SlotId) -> u64) {
        let bit = self.tables[at].bits;
        if self.routes.len() == 1 << bit {
            self.routes.extend_from_within(..);
        }
        let new = self.tables.len() as u32;
        for (bits, route) in self.routes.iter_mut().enumerate() {
            if *route == at as u32 && bits >> bit & 1 == 1 {
                *route = new;
            }
        }
        let before = &mut self.tables[at];
        before.bits += 1;
        let goes = |slot: &mut SlotId| hash_of(*slot) >> (FIRST_BIT + bit) & 1 == 1;
        let mut slots = HashTable::with_capacity(FULL);
        for slot in before.slots.extract_if(goes) {
            slots.insert_unique(hash_of(slot), slot, |slot| hash_of(*slot));
        }
        self.tables.push(Table { slots, bits: bit + 1 });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use mooncake_core::clock::Rng;

    use super::*;

    #[test]
    fn finds_what_is_there_whatever_was_split() {
        let mut rng = Rng::seeded(3);
        // Low bits that are often the same, so that splitting once does not always help.
        let hashes: Vec<u64> = (0..60_000).map(|_| rng.next_u64() & !(rng.below(64) << FIRST_BIT)).collect();
        let hash_of = |slot: SlotId| hashes[slot.index()];
        let mut keys = Keys::new();
        let mut there = HashMap::new();
        for step in 0..200_000 {
            let slot = SlotId(rng.below(hashes.len() as u64) as u32);
            match there.remove(&slot) {
                Some(()) if step % 3 == 0 => keys.remove(hash_of(slot), slot),
                known => {
                    if known.is_none() {
                        keys.insert(hash_of(slot), slot, hash_of);
                    }
                    there.insert(slot, ());
                }
            }
        }
        assert!(keys.tables.len() > 8, "{} tables", keys.tables.len());
        assert_eq!(keys.tables.iter().map(|table| table.slots.len()).sum::<usize>(), there.len());
        for slot in (0..hashes.len() as u32).map(SlotId) {
            let found = keys.find(hash_of(slot), |other| *other == slot);
            assert_eq!(found, there.contains_key(&slot).then_some(slot));
        }
        let fullest =
            keys.tables.iter().filter(|table| table.bits < MOST_BITS).map(|table| table.slots.len());
        assert!(fullest.max() <= Some(FULL));
    }

    #[test]
    fn equal_hashes_are_no_reason_to_split_for_ever() {
        let mut keys = Keys::new();
        let many = FULL as u32 + 2;
        (0..many).for_each(|number| keys.insert(7, SlotId(number), |_| 7));
        assert!((0..many).map(SlotId).all(|slot| keys.find(7, |other| *other == slot) == Some(slot)));
    }
}
