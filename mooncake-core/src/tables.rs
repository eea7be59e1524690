//! Entries found by a hash, in many small tables instead of one that doubles: to double a table of a million entries takes
//! tens of milliseconds, for which whoever needs it waits.

use hashbrown::HashTable;

/// Entries of a table before it is split in two: what moves then moves in less than a tenth of a millisecond.
const FULL: usize = 3584;
/// The upper bits of a tag choose a table, from the lowest of them upwards.
const FIRST_BIT: u32 = 12;
const MOST_BITS: u32 = u32::BITS - FIRST_BIT;

/// Numbers of things, by a hash of each (extendible hashing).
///
/// The hash is kept beside the number, so that growing never looks at the things themselves, which would have to be fetched from memory one by one.
pub struct Tables {
    tables: Vec<Table>,
    /// For each value of the bits that count, which table it is in.
    routes: Vec<u32>,
}

struct Table {
    entries: HashTable<Entry>,
    /// How many bits are the same for all of its entries.
    bits: u32,
}

#[derive(Clone, Copy)]
struct Entry {
    tag: u32,
    number: u32,
}

impl Default for Tables {
    fn default() -> Self {
        Self { tables: vec![Table { entries: HashTable::new(), bits: 0 }], routes: vec![0] }
    }
}

impl Tables {
    /// The number with this hash that `is` says is the one.
    pub fn find(&self, tag: u32, mut is: impl FnMut(u32) -> bool) -> Option<u32> {
        let entries = &self.tables[self.route(tag)].entries;
        entries.find(spread(tag), |entry| entry.tag == tag && is(entry.number)).map(|entry| entry.number)
    }

    /// Adds a number that is not there.
    pub fn insert(&mut self, tag: u32, number: u32) {
        let mut at = self.route(tag);
        while self.tables[at].entries.len() >= FULL && self.tables[at].bits < MOST_BITS {
            self.split(at);
            at = self.route(tag);
        }
        self.tables[at].entries.insert_unique(spread(tag), Entry { tag, number }, |entry| spread(entry.tag));
    }

    /// Removes the number with this hash that `is` says is the one, and returns it.
    pub fn remove(&mut self, tag: u32, mut is: impl FnMut(u32) -> bool) -> Option<u32> {
        let at = self.route(tag);
        let found =
            self.tables[at].entries.find_entry(spread(tag), |entry| entry.tag == tag && is(entry.number));
        found.ok().map(|entry| entry.remove().0.number)
    }

    fn route(&self, tag: u32) -> usize {
        let bits = (tag >> FIRST_BIT) as usize & (self.routes.len() - 1);
        self.routes[bits] as usize
    }

    /// Moves what has a one in the next bit to a table of its own.
    #[cold]
    fn split(&mut self, at: usize) {
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
        let mut entries = HashTable::with_capacity(FULL);
        for entry in before.entries.extract_if(|entry| entry.tag >> (FIRST_BIT + bit) & 1 == 1) {
            entries.insert_unique(spread(entry.tag), entry, |entry| spread(entry.tag));
        }
        self.tables.push(Table { entries, bits: bit + 1 });
    }
}

/// A table looks at the lowest bits and the highest seven.
fn spread(tag: u32) -> u64 {
    let product = u64::from(tag).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ product >> 32
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::clock::Rng;

    const ENTRIES: u64 = if cfg!(miri) { 400 } else { 60_000 };
    const STEPS: u64 = if cfg!(miri) { 1_000 } else { 200_000 };

    #[test]
    fn finds_what_is_there_whatever_was_split() {
        let mut rng = Rng::seeded(3);
        // Bits that are often the same, so that splitting once does not always help, and tags of more than one.
        let tag = |rng: &mut Rng| {
            let same = rng.below(64) << FIRST_BIT;
            (rng.next_u64() & !same) as u32 & !(rng.below(2) as u32)
        };
        let tags: Vec<u32> = (0..ENTRIES).map(|_| tag(&mut rng)).collect();
        let mut tables = Tables::default();
        let mut there = HashMap::new();
        for step in 0..STEPS {
            let number = rng.below(ENTRIES) as u32;
            let tag = tags[number as usize];
            match there.remove(&number) {
                Some(()) if step % 3 == 0 => {
                    assert_eq!(tables.remove(tag, |other| other == number), Some(number));
                }
                known => {
                    if known.is_none() {
                        tables.insert(tag, number);
                    }
                    there.insert(number, ());
                }
            }
        }
        assert!(cfg!(miri) || tables.tables.len() > 8, "{} tables", tables.tables.len());
        assert_eq!(tables.tables.iter().map(|table| table.entries.len()).sum::<usize>(), there.len());
        for number in 0..ENTRIES as u32 {
            let tag = tags[number as usize];
            let expected = there.contains_key(&number).then_some(number);
            assert_eq!(tables.find(tag, |other| other == number), expected);
            if expected.is_none() {
                assert_eq!(tables.remove(tag, |other| other == number), None);
            }
        }
        let fullest =
            tables.tables.iter().filter(|table| table.bits < MOST_BITS).map(|table| table.entries.len());
        assert!(fullest.max() <= Some(FULL));
    }

    #[test]
    fn equal_hashes_are_no_reason_to_split_for_ever() {
        let mut tables = Tables::default();
        let many = if cfg!(miri) { 100 } else { FULL as u32 + 2 };
        (0..many).for_each(|number| tables.insert(7, number));
        assert!((0..many).all(|number| tables.find(7, |other| other == number) == Some(number)));
    }
}
