//! Chains of keys: the keys of a batch are the blocks of a request, each after the one that it
//! depends on.

use std::time::Duration;

use parking_lot::Mutex;

use crate::clock::Moment;

/// Place of a use among all uses of a cache, and in its chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Number of the use, counted over the whole cache. Of one batch the first key has the largest
    /// number, so that the last one is the oldest.
    pub number: u64,
    /// Hash of the key before it in the chain; 0 for none.
    pub parent: u64,
    /// Number of keys of the batch that the cache neither holds nor remembers.
    pub fresh: u32,
    /// True if the cache holds or remembers more than one key of the chain, from the root.
    pub goes_on: bool,
}

impl Place {
    /// Returns the place of a use of which only the number is known.
    pub fn numbered(number: u64) -> Self {
        Self { number, parent: 0, fresh: 1, goes_on: false }
    }
}

/// End of a chain that a batch goes on from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChainEnd {
    /// Hash of the last key; 0 if the batch begins a chain.
    pub last: u64,
    /// Number of keys, from the root, that the cache held or remembered before the chain was used.
    pub known: u32,
    /// True if all keys of the chain were known.
    pub is_known: bool,
}

/// Batch of keys whose uses are about to be recorded. Each [`Place`] is that of before the first
/// use, so that the uses do not affect each other.
#[derive(Clone, Debug)]
pub struct Batch {
    hashes: Vec<u64>,
    number: u64,
    before: ChainEnd,
    known: u32,
    fresh: u32,
    /// True if more than the first key of the chain was known.
    goes_on: bool,
}

impl Batch {
    /// Describes a batch of keys with these hashes. `number` is the largest of the numbers of its
    /// uses, and `is_known` tells whether the cache holds or remembers the key with a hash.
    pub fn new(
        hashes: Vec<u64>,
        number: u64,
        before: ChainEnd,
        mut is_known: impl FnMut(u64) -> bool,
    ) -> Self {
        let (mut known, mut fresh) = (0, 0);
        for hash in &hashes {
            if !is_known(*hash) {
                fresh += 1;
            } else if fresh == 0 {
                known += 1;
            }
        }
        let mut batch = Self { hashes, number, before, known, fresh, goes_on: false };
        batch.goes_on = batch.end().known > 1;
        batch
    }

    /// Returns the hashes of the keys.
    pub fn hashes(&self) -> &[u64] {
        &self.hashes
    }

    /// Returns the place of the key at an index.
    pub fn place(&self, at: usize) -> Place {
        let parent = at.checked_sub(1).map_or(self.before.last, |before| self.hashes[before]);
        Place {
            number: self.number.saturating_sub(at as u64),
            parent,
            fresh: self.fresh,
            goes_on: self.goes_on,
        }
    }

    /// Returns the hash of the key at an index.
    pub fn hash(&self, at: usize) -> u64 {
        self.hashes[at]
    }

    /// Returns the chain up to the last key of the batch.
    pub fn end(&self) -> ChainEnd {
        let goes_on = self.before.last == 0 || self.before.is_known;
        ChainEnd {
            last: self.hashes.last().copied().unwrap_or(self.before.last),
            known: self.before.known.saturating_add(if goes_on { self.known } else { 0 }),
            is_known: goes_on && self.fresh == 0,
        }
    }
}

/// Number of ends that a table remembers.
const ENDS: usize = 4096;

/// Ends of chains, by the hash of what is expected to follow them. The table is direct-mapped: a
/// later end replaces an earlier one.
#[derive(Debug)]
pub struct ChainEnds {
    lifetime: Duration,
    ends: Box<[Mutex<Option<Remembered>>]>,
}

/// End of a chain in the table.
#[derive(Clone, Copy, Debug)]
struct Remembered {
    follower: u64,
    end: ChainEnd,
    since: Moment,
}

impl ChainEnds {
    /// Creates a table that forgets each end after `lifetime`.
    pub fn new(lifetime: Duration) -> Self {
        Self { lifetime, ends: (0..ENDS).map(|_| Mutex::new(None)).collect() }
    }

    /// Remembers the end that `follower` goes on from.
    pub fn remember(&self, follower: u64, end: ChainEnd, now: Moment) {
        *self.ends[index(follower)].lock() = Some(Remembered { follower, end, since: now });
    }

    /// Returns the end that `follower` goes on from.
    pub fn get(&self, follower: u64, now: Moment) -> Option<ChainEnd> {
        let found = (*self.ends[index(follower)].lock())?;
        (found.follower == follower && now.since(found.since) < self.lifetime).then_some(found.end)
    }
}

fn index(follower: u64) -> usize {
    (follower.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 52) as usize % ENDS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deepest_key_of_a_batch_is_the_oldest() {
        let batch = Batch::new(vec![7, 8, 9], 100, ChainEnd::default(), |hash| hash != 9);
        let place = |number, parent| Place { number, parent, fresh: 1, goes_on: true };
        assert_eq!([0, 1, 2].map(|at| batch.place(at)), [place(100, 0), place(99, 7), place(98, 8)]);
        assert_eq!(batch.end(), ChainEnd { last: 9, known: 2, is_known: false });
        let batch = Batch::new(vec![7, 8, 9], 100, ChainEnd::default(), |hash| hash != 8);
        assert_eq!(batch.place(2), Place { number: 98, parent: 8, fresh: 1, goes_on: false });
    }

    #[test]
    fn a_chain_goes_on_in_the_next_batch() {
        let first = Batch::new(vec![1, 2], 2, ChainEnd::default(), |_| true);
        let second = Batch::new(vec![3, 4], 4, first.end(), |hash| hash == 3);
        assert_eq!(second.place(0), Place { number: 4, parent: 2, fresh: 1, goes_on: true });
        assert_eq!(second.end(), ChainEnd { last: 4, known: 3, is_known: false });
        let third = Batch::new(vec![5], 5, second.end(), |_| true);
        assert_eq!(third.end(), ChainEnd { last: 5, known: 3, is_known: false });
    }

    #[test]
    fn an_end_is_remembered_for_a_while() {
        let ends = ChainEnds::new(Duration::from_secs(60));
        let end = ChainEnd { last: 2, known: 2, is_known: true };
        ends.remember(3, end, Moment(0));
        assert_eq!(ends.get(3, Moment(0).after(Duration::from_secs(59))), Some(end));
        assert_eq!(
            (ends.get(4, Moment(0)), ends.get(3, Moment(0).after(Duration::from_secs(60)))),
            (None, None)
        );
        let other = ChainEnd { last: 5, ..end };
        ends.remember(3, other, Moment(1));
        assert_eq!(ends.get(3, Moment(1)), Some(other));
    }
}
