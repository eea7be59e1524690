//! Record of the keys that have left a shard. Values of earlier masters may still be announced for
//! a while after the start of a master; the record keeps those away that were removed or replaced
//! meanwhile.
//!
//! A removal counts for the key alone, whether or not an object was there: its owner may not have
//! announced it yet. The record is bounded. Once it is full, no value of an earlier master is
//! admitted, which is a miss and never an old value.

use std::collections::HashMap;

use mooncake_core::ids::ClientId;
use smallvec::SmallVec;

use crate::model::value::Stamp;

/// Number of slots of the largest table: 512 KiB for each shard.
const MAX_SLOTS: usize = 1 << 16;
/// Number of slots of the smallest table.
const MIN_SLOTS: usize = 1 << 6;
/// Maximum number of values that have left without a removal, and of keys that clients have
/// cleared. Further ones count as removed.
const MAX_LOST: usize = 1 << 12;

/// Keys that have left a shard.
#[derive(Debug)]
pub(crate) struct RemovalRecord {
    /// Epoch of this master.
    epoch: u64,
    /// Keys of which no value of an earlier master counts.
    removed: HashTable,
    /// Values of earlier masters that left by eviction or with their owner, by the hash of the key.
    /// Further replicas of them count.
    lost: HashMap<u64, Stamp>,
    /// Clients whose values do not count, by the hash of a key that they have cleared.
    cleared: HashMap<u64, SmallVec<[ClientId; 1]>>,
    /// Number of clears.
    clears: usize,
    is_full: bool,
}

impl RemovalRecord {
    pub(crate) fn new(epoch: u64) -> Self {
        let (lost, cleared) = (HashMap::new(), HashMap::new());
        Self { epoch, removed: HashTable::default(), lost, cleared, clears: 0, is_full: false }
    }

    /// Records that no value of an earlier master counts for the key with this hash.
    pub(crate) fn record_removal(&mut self, hash: u64) {
        if self.is_full {
            return;
        }
        self.lost.remove(&hash);
        if !self.removed.insert(hash) {
            self.is_full = true;
            (self.removed, self.lost) = (HashTable::default(), HashMap::new());
            (self.cleared, self.clears) = (HashMap::new(), 0);
        }
    }

    /// Records that a client has cleared the key with this hash. No earlier value that this client
    /// wrote counts.
    pub(crate) fn record_clear(&mut self, hash: u64, client: ClientId) {
        if self.cleared.get(&hash).is_some_and(|clients| clients.contains(&client)) {
            return;
        }
        if self.clears >= MAX_LOST {
            self.record_removal(hash);
        } else if !self.is_full && !self.removed.contains(hash) {
            self.cleared.entry(hash).or_default().push(client);
            self.clears += 1;
        }
    }

    /// Records that a value has left, but not by a removal. No earlier value counts.
    pub(crate) fn record_loss(&mut self, hash: u64, stamp: Stamp) {
        if stamp.epoch == self.epoch || self.lost.len() >= MAX_LOST && !self.lost.contains_key(&hash) {
            self.record_removal(hash);
        } else if !self.is_full && !self.removed.contains(hash) {
            self.lost.insert(hash, stamp);
        }
    }

    /// Returns whether a value of an earlier master may count for the key with this hash.
    /// `is_of` returns whether one of these clients may have written it. `follows` returns whether
    /// the value is the one with a stamp, or is newer.
    pub(crate) fn admits(
        &self,
        hash: u64,
        is_of: impl Fn(&[ClientId]) -> bool,
        follows: impl Fn(&Stamp) -> bool,
    ) -> bool {
        !self.is_full
            && !self.cleared.get(&hash).is_some_and(|clients| is_of(clients))
            && !self.removed.contains(hash)
            && self.lost.get(&hash).is_none_or(follows)
    }
}

/// Set of hashes with open addressing. Its number of slots is a power of two, or 0.
#[derive(Debug, Default)]
struct HashTable {
    /// Hash in each slot; 0 for none.
    slots: Vec<u64>,
    len: usize,
}

impl HashTable {
    /// Returns the slot that has a hash, or the empty one where it belongs.
    fn slot(&self, hash: u64) -> Option<usize> {
        let mask = self.slots.len().checked_sub(1)?;
        let first = (hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize;
        (0..=mask).map(|step| (first + step) & mask).find(|at| [0, hash].contains(&self.slots[*at]))
    }

    fn contains(&self, hash: u64) -> bool {
        let hash = hash.max(1);
        self.slot(hash).is_some_and(|at| self.slots[at] == hash)
    }

    /// Adds a hash. Returns false if the largest table is full.
    fn insert(&mut self, hash: u64) -> bool {
        let hash = hash.max(1);
        if self.len >= self.slots.len() / 8 * 7 && !self.contains(hash) && !self.grow() {
            return false;
        }
        if let Some(at) = self.slot(hash) {
            self.len += usize::from(self.slots[at] == 0);
            self.slots[at] = hash;
        }
        true
    }

    fn grow(&mut self) -> bool {
        let slots = (2 * self.slots.len()).max(MIN_SLOTS);
        if slots > MAX_SLOTS {
            return false;
        }
        for hash in std::mem::replace(&mut self.slots, vec![0; slots]) {
            if hash != 0
                && let Some(at) = self.slot(hash)
            {
                self.slots[at] = hash;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: u64 = 9;

    fn stamp(number: u64) -> Stamp {
        Stamp { epoch: 1, number }
    }

    fn admits(record: &RemovalRecord, hash: u64, number: u64) -> bool {
        record.admits(hash, |_| true, |lost| lost.number <= number)
    }

    #[test]
    fn a_removed_key_stays_away_and_a_lost_value_admits_its_replicas() {
        let mut record = RemovalRecord::new(OWN);
        assert!(admits(&record, 5, 1));
        record.record_removal(5);
        record.record_removal(0);
        record.record_loss(6, stamp(3));
        record.record_loss(7, Stamp { epoch: OWN, number: 1 });
        assert!(!admits(&record, 5, 1) && !admits(&record, 0, 1) && !admits(&record, 7, 100));
        assert_eq!([2, 3, 4].map(|number| admits(&record, 6, number)), [false, true, true]);
        record.record_loss(5, stamp(8));
        assert!(!admits(&record, 5, 8), "a removal is not undone");
        record.record_removal(6);
        assert!(!admits(&record, 6, 3));
    }

    #[test]
    fn a_full_record_admits_nothing_and_is_bounded() {
        let mut record = RemovalRecord::new(OWN);
        let hash = |number: u64| number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let limit = MAX_SLOTS / 8 * 7;
        for number in 1..=limit as u64 {
            record.record_removal(hash(number));
            record.record_removal(hash(number));
        }
        assert_eq!((record.removed.len, record.removed.slots.len()), (limit, MAX_SLOTS));
        assert!((1..=limit as u64).all(|number| !admits(&record, hash(number), 1)));
        assert!(admits(&record, hash(1 << 40), 1));
        record.record_removal(hash(1 << 41));
        assert!(!admits(&record, hash(1 << 40), 1) && record.removed.slots.is_empty());
    }

    #[test]
    fn a_client_that_clears_a_key_ends_its_own_values() {
        let client = |number| ClientId(mooncake_core::ids::Uuid::new(number, 1));
        let mut record = RemovalRecord::new(OWN);
        record.record_clear(5, client(1));
        record.record_clear(5, client(1));
        assert_eq!(record.clears, 1);
        let by = |number| record.admits(5, |clients| clients.contains(&client(number)), |_| true);
        assert!(!by(1) && by(2) && !admits(&record, 5, 1), "an unknown writer may be the client");
        (0..MAX_LOST as u64).for_each(|hash| record.record_clear(100 + hash, client(1)));
        let last = 99 + MAX_LOST as u64;
        assert!(!record.admits(last, |_| false, |_| true), "too many: it counts as removed");
        assert_eq!((record.cleared.len(), record.clears), (MAX_LOST, MAX_LOST));
    }

    #[test]
    fn lost_values_beyond_the_limit_count_as_removed() {
        let mut record = RemovalRecord::new(OWN);
        (0..=MAX_LOST as u64).for_each(|hash| record.record_loss(hash, stamp(hash)));
        record.record_loss(0, stamp(1));
        assert!(admits(&record, 0, 1) && admits(&record, 5, 5) && !admits(&record, MAX_LOST as u64, 1 << 40));
        assert_eq!(record.lost.len(), MAX_LOST);
    }
}
