//! Sets of ranks.

use std::fmt;

use crate::view::{GlobalRank, MAX_RANKS};

const _: () = assert!(MAX_RANKS == u64::BITS as usize, "a set is one word");

/// Set of ranks below [`MAX_RANKS`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct RankSet(u64);

impl RankSet {
    /// Set without ranks.
    pub const EMPTY: Self = Self(0);

    /// Adds a rank. Returns whether it was absent.
    pub fn insert(&mut self, rank: GlobalRank) -> bool {
        let before = self.0;
        self.0 |= bit(rank);
        self.0 != before
    }

    /// Removes a rank. Returns whether it was present.
    pub fn remove(&mut self, rank: GlobalRank) -> bool {
        let before = self.0;
        self.0 &= !bit(rank);
        self.0 != before
    }

    /// Returns whether the set has the rank.
    pub fn contains(self, rank: GlobalRank) -> bool {
        self.0 & bit(rank) != 0
    }

    /// Returns whether the set has every rank of `other`.
    pub fn contains_all(self, other: Self) -> bool {
        other.0 & !self.0 == 0
    }

    /// Returns the ranks that both sets have.
    #[must_use]
    pub fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns the ranks that at least one set has.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the ranks that `other` does not have.
    #[must_use]
    pub fn difference(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns the set without `rank`.
    #[must_use]
    pub fn without(mut self, rank: GlobalRank) -> Self {
        self.remove(rank);
        self
    }

    /// Returns the number of ranks.
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Returns whether the set has no rank.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the ranks in ascending order.
    pub fn iter(self) -> impl Iterator<Item = GlobalRank> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let rank = (rest != 0).then(|| rest.trailing_zeros() as u8)?;
            rest &= rest - 1;
            Some(GlobalRank(rank))
        })
    }
}

impl FromIterator<GlobalRank> for RankSet {
    fn from_iter<I: IntoIterator<Item = GlobalRank>>(ranks: I) -> Self {
        let mut set = Self::EMPTY;
        for rank in ranks {
            set.insert(rank);
        }
        set
    }
}

impl fmt::Debug for RankSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter().map(|rank| rank.0)).finish()
    }
}

/// Returns the bit of a rank, or no bit for a number above all ranks.
fn bit(rank: GlobalRank) -> u64 {
    1_u64.checked_shl(u32::from(rank.0)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_the_ranks_that_were_inserted() {
        let set: RankSet = [5, 0, 63, 5].into_iter().map(GlobalRank).collect();
        assert_eq!(set.iter().map(|rank| rank.0).collect::<Vec<_>>(), [0, 5, 63]);
        assert_eq!(set.len(), 3);
        assert!(set.contains(GlobalRank(63)) && !set.contains(GlobalRank(62)));
        assert!(
            set.contains_all(set.without(GlobalRank(5))) && !set.without(GlobalRank(5)).contains_all(set)
        );
        assert!(set.difference(set).is_empty());
        assert_eq!(set.without(GlobalRank(0)).union(set), set);
        let mut other = set;
        assert!(!other.insert(GlobalRank(64)), "no rank has this number");
        assert!(other.remove(GlobalRank(0)) && !other.remove(GlobalRank(0)));
        assert_eq!(other.intersection(set), other);
    }
}
