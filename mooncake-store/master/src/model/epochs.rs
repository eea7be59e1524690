//! Order of the masters of a cluster.
//!
//! Each master has an epoch, a random number. Stamps of one epoch are ordered by their number; the
//! order of two epochs comes from snapshots, which name the masters before them, and from clients,
//! which have met one master after another. No clock decides. The order of two masters that no
//! snapshot and no client connects is unknown.

use std::cmp::Ordering;

use mooncake_core::fault_injection::is_planted;
use mooncake_protocol::wire::EpochPair;

use super::value::Stamp;

/// Maximum number of known pairs. Further ones are ignored, so that their order is unknown.
const MAX_PAIRS: usize = 128;

/// Maximum number of pairs in a message and in a snapshot.
pub(crate) const MAX_SENT: usize = 64;

/// Known order of epochs, as pairs of masters that followed each other.
#[derive(Debug)]
pub(crate) struct EpochOrder {
    /// Epoch of this master, which is newer than every other one.
    own: u64,
    pairs: Vec<EpochPair>,
}

impl EpochOrder {
    pub(crate) fn new(own: u64) -> Self {
        Self { own, pairs: Vec::new() }
    }

    /// Adds the order of two masters.
    pub(crate) fn add(&mut self, pair: EpochPair) {
        let EpochPair { newer, older } = pair;
        // A client that met this master and then an earlier one is wrong.
        let is_possible = newer != older && older != self.own;
        if is_possible && self.pairs.len() < MAX_PAIRS && !self.pairs.contains(&pair) {
            self.pairs.push(pair);
        }
    }

    /// Returns whether the master of `older` led before that of `newer`, as far as is known.
    pub(crate) fn is_older(&self, older: u64, newer: u64) -> bool {
        if older == newer || older == self.own || newer == Stamp::BEFORE {
            return false;
        }
        older == Stamp::BEFORE
            || newer == self.own
            || self.leads_to(newer, older) && !self.leads_to(older, newer)
    }

    /// Compares the times of two writes; `None` if their order is unknown.
    pub(crate) fn compare(&self, one: Stamp, other: Stamp) -> Option<Ordering> {
        if one.epoch == other.epoch {
            let is_ordered = one.epoch != Stamp::BEFORE || one == other;
            is_ordered.then(|| one.number.cmp(&other.number))
        } else if is_planted("epochs-unordered") {
            None
        } else if self.is_older(one.epoch, other.epoch) {
            Some(Ordering::Less)
        } else if self.is_older(other.epoch, one.epoch) {
            Some(Ordering::Greater)
        } else {
            None
        }
    }

    /// Returns the pairs that are closest to this master.
    pub(crate) fn nearest(&self) -> Vec<EpochPair> {
        let mut found: Vec<EpochPair> = Vec::new();
        let mut reached = vec![self.own];
        let mut at = 0;
        while let Some(epoch) = reached.get(at).copied() {
            for pair in self.pairs.iter().filter(|pair| pair.newer == epoch) {
                if found.len() == MAX_SENT {
                    return found;
                }
                found.push(*pair);
                if !reached.contains(&pair.older) {
                    reached.push(pair.older);
                }
            }
            at += 1;
        }
        found
    }

    /// Returns whether pairs lead from `newer` to `older`.
    fn leads_to(&self, newer: u64, older: u64) -> bool {
        let mut reached = vec![newer];
        let mut at = 0;
        while let Some(epoch) = reached.get(at).copied() {
            for pair in self.pairs.iter().filter(|pair| pair.newer == epoch) {
                if pair.older == older {
                    return true;
                }
                if !reached.contains(&pair.older) {
                    reached.push(pair.older);
                }
            }
            at += 1;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(pairs: &[(u64, u64)]) -> EpochOrder {
        let mut order = EpochOrder::new(9);
        pairs.iter().for_each(|(newer, older)| order.add(EpochPair { newer: *newer, older: *older }));
        order
    }

    #[test]
    fn pairs_make_a_chain_and_leave_the_rest_unknown() {
        let known = order(&[(9, 4), (4, 3), (3, 1), (9, 2)]);
        assert!(known.is_older(1, 4) && known.is_older(3, 4) && !known.is_older(4, 3));
        assert!(!known.is_older(2, 4) && !known.is_older(4, 2), "no client has met both");
        assert!(known.is_older(2, 9) && known.is_older(77, 9) && !known.is_older(9, 77));
        let at = |epoch, number| Stamp { epoch, number };
        assert_eq!(known.compare(at(1, 8), at(4, 2)), Some(Ordering::Less));
        assert_eq!(known.compare(at(4, 2), at(1, 8)), Some(Ordering::Greater));
        assert_eq!(known.compare(at(4, 2), at(4, 3)), Some(Ordering::Less));
        assert_eq!(known.compare(at(4, 2), at(2, 3)), None);
    }

    #[test]
    fn a_value_of_an_unknown_earlier_master_is_the_oldest() {
        let known = order(&[(4, 3)]);
        let at = |epoch, number| Stamp { epoch, number };
        for epoch in [3, 4, 9, 77] {
            assert_eq!(known.compare(at(0, 8), at(epoch, 2)), Some(Ordering::Less));
            assert_eq!(known.compare(at(epoch, 2), at(0, 8)), Some(Ordering::Greater));
        }
        assert_eq!(known.compare(at(0, 8), at(0, 8)), Some(Ordering::Equal));
        assert_eq!(known.compare(at(0, 8), at(0, 9)), None);
    }

    #[test]
    fn contradictions_leave_the_order_unknown() {
        let known = order(&[(4, 3), (3, 2), (2, 4), (3, 9), (5, 5)]);
        assert!(!known.is_older(3, 4) && !known.is_older(4, 3));
        assert!(known.is_older(3, 9) && !known.is_older(9, 3) && !known.is_older(5, 5));
    }

    #[test]
    fn the_nearest_pairs_are_sent_and_the_table_is_bounded() {
        let mut known = order(&[(9, 100)]);
        (100..400).for_each(|epoch| known.add(EpochPair { newer: epoch, older: epoch + 1 }));
        known.add(EpochPair { newer: 7, older: 8 });
        assert_eq!(known.pairs.len(), MAX_PAIRS);
        let sent = known.nearest();
        assert_eq!((sent.len(), sent[0]), (MAX_SENT, EpochPair { newer: 9, older: 100 }));
        assert!(known.is_older(101 + MAX_PAIRS as u64 - 2, 100));
    }
}
