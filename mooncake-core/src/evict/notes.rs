//! Notes of the next victims of the shards of a cache.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use super::{MergeableOrder, Place};
use crate::ids::SlotId;

/// Rank of the next victim of each shard of a cache, as far as known. The least goes first.
///
/// The notes are read and changed without a lock, so that an eviction looks only into the shards
/// that matter. A note that is too high delays the victim of its shard until the note is renewed.
#[derive(Debug)]
pub struct VictimNotes {
    ranks: Box<[AtomicU64]>,
    turn: AtomicUsize,
}

impl VictimNotes {
    /// Creates notes for `shards` shards, none of which has been looked into.
    pub fn new(shards: usize) -> Self {
        Self { ranks: (0..shards).map(|_| AtomicU64::new(0)).collect(), turn: AtomicUsize::new(0) }
    }

    /// Returns the shard with the least note, its note, and the least note of the others.
    pub fn least(&self) -> (usize, u64, u64) {
        let (mut least, mut second) = ((0, u64::MAX), u64::MAX);
        for (index, rank) in self.ranks.iter().enumerate() {
            let rank = rank.load(Relaxed);
            if rank < least.1 {
                (least, second) = ((index, rank), least.1);
            } else {
                second = second.min(rank);
            }
        }
        (least.0, least.1, second)
    }

    /// Notes the rank of the next victim of a shard.
    pub fn note(&self, shard: usize, rank: u64) {
        self.ranks[shard].store(rank, Relaxed);
    }

    /// Lowers the note of a shard, which has an object of this rank.
    pub fn lower(&self, shard: usize, rank: u64) {
        // Most uses lower nothing, and share the note with other readers.
        if self.ranks[shard].load(Relaxed) > rank {
            self.ranks[shard].fetch_min(rank, Relaxed);
        }
    }

    /// Lowers the note of a shard after a use, at `place`, of an object that `policy` holds in a
    /// slot. Most uses make no object the next victim.
    pub fn lower_after_use<E: MergeableOrder>(&self, shard: usize, policy: &E, slot: SlotId, place: &Place) {
        if self.ranks[shard].load(Relaxed) > policy.least_value_of_use(place)
            && let Some(value) = policy.value(slot)
        {
            self.lower(shard, value);
        }
    }

    /// Returns the shards in turn.
    pub fn next_shard(&self) -> usize {
        self.turn.fetch_add(1, Relaxed) % self.ranks.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_and_the_second_least() {
        let notes = VictimNotes::new(3);
        assert_eq!(notes.least(), (0, 0, 0));
        [5, 3, 9].into_iter().enumerate().for_each(|(shard, rank)| notes.note(shard, rank));
        assert_eq!(notes.least(), (1, 3, 5));
        notes.lower(2, 4);
        notes.lower(2, 6);
        assert_eq!(notes.least(), (1, 3, 4));
        notes.note(1, u64::MAX);
        assert_eq!(notes.least(), (2, 4, 5));
        assert_eq!([0; 4].map(|_| notes.next_shard()), [0, 1, 2, 0]);
        assert_eq!(VictimNotes::new(1).least(), (0, 0, u64::MAX));
    }
}
