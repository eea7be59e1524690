//! Hash index in many small tables instead of one that doubles. Doubling a table of a million
//! entries takes tens of milliseconds, during which a caller would wait.

use hashbrown::HashTable;

/// Entries of a table before it is split in two. A split takes less than a tenth of a millisecond.
const FULL: usize = 3584;
/// The upper bits of a tag choose a table, from the lowest of them upwards.
const FIRST_BIT: u32 = 12;
const MOST_BITS: u32 = u32::BITS - FIRST_BIT;

/// Index of numbers by a hash of each (extendible hashing).
///
/// The index keeps the hash beside the number, so that growth never reads the hashed values, which
/// would have to be fetched from memory one by one.
pub struct Tables {
    tables: Vec<Table>,
    /// Table of each value of the routing bits.
    routes: Vec<u32>,
}

struct Table {
    entries: HashTable<Entry>,
    /// Number of bits that all entries of the table share.
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
    /// Returns the number with this hash for which `is` returns true.
    pub fn find(&self, tag: u32, mut is: impl FnMut(u32) -> bool) -> Option<u32> {
        let entries = &self.tables[self.route(tag)].entries;
        entries.find(spread(tag), |entry| entry.tag == tag && is(entry.number)).map(|entry| entry.number)
    }

    /// Adds a number that is not in the index.
    pub fn insert(&mut self, tag: u32, number: u32) {
        let mut at = self.route(tag);
        while self.tables[at].entries.len() >= FULL && self.tables[at].bits < MOST_BITS {
            self.split(at);
            at = self.route(tag);
        }
        self.tables[at].entries.insert_unique(spread(tag), Entry { tag, number }, |entry| spread(entry.tag));
    }

    /// Removes and returns the number with this hash for which `is` returns true.
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

    /// Moves the entries with a one in the next bit to a new table.
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

/// Mixes a tag: a table uses the lowest bits and the highest seven.
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
    fn finds_every_entry_after_any_split() {
        let mut rng = Rng::seeded(3);
        // Uses bits that are often equal, so that one split does not always help, and repeated
        // tags.
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
