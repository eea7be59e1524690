//! Links between ranks, and the set of ranks that are connected to each other.

use crate::rank_set::RankSet;
use crate::view::{GlobalRank, MAX_RANKS};

/// Latest observations of all links. A rank also has a link to itself.
#[derive(Debug)]
pub(super) struct LinkMatrix {
    /// Ranks to which each rank has observed a working link.
    up: [RankSet; MAX_RANKS],
    /// Ranks with which each rank has a working link in both directions.
    mutual: [RankSet; MAX_RANKS],
}

impl LinkMatrix {
    pub(super) fn new() -> Self {
        Self { up: [RankSet::EMPTY; MAX_RANKS], mutual: [RankSet::EMPTY; MAX_RANKS] }
    }

    /// Records an observation of `from`. Returns whether it differs from the one before.
    pub(super) fn set(&mut self, from: GlobalRank, to: GlobalRank, is_up: bool) -> bool {
        let row = &mut self.up[usize::from(from.0)];
        let changed = if is_up { row.insert(to) } else { row.remove(to) };
        if self.is_up(from, to) && self.is_up(to, from) {
            self.mutual[usize::from(from.0)].insert(to);
            self.mutual[usize::from(to.0)].insert(from);
        } else {
            self.mutual[usize::from(from.0)].remove(to);
            self.mutual[usize::from(to.0)].remove(from);
        }
        changed
    }

    pub(super) fn is_up(&self, from: GlobalRank, to: GlobalRank) -> bool {
        self.up[usize::from(from.0)].contains(to)
    }

    /// Returns the ranks with a working link to `rank` in both directions.
    pub(super) fn mutual(&self, rank: GlobalRank) -> RankSet {
        self.mutual[usize::from(rank.0)]
    }

    /// Removes all observations by and about a rank.
    pub(super) fn forget(&mut self, rank: GlobalRank) {
        for other in 0..MAX_RANKS {
            self.up[other].remove(rank);
            self.mutual[other].remove(rank);
        }
        self.up[usize::from(rank.0)] = RankSet::EMPTY;
        self.mutual[usize::from(rank.0)] = RankSet::EMPTY;
    }
}

/// Returns the set of ranks that are connected to each other in both directions. Ranks of `current`
/// stay if possible; those of `preferred` stay before others.
pub(super) fn connected_set(
    links: &LinkMatrix,
    online: RankSet,
    current: RankSet,
    preferred: RankSet,
) -> RankSet {
    let linked: RankSet = online.iter().filter(|rank| links.mutual(*rank).contains(*rank)).collect();
    let others = |rank: GlobalRank| links.mutual(rank).intersection(linked).without(rank);
    // A rank without a link does not keep others out that have links.
    let paired: RankSet = linked.iter().filter(|rank| !others(*rank).is_empty()).collect();
    let eligible = if paired.is_empty() { linked } else { paired };

    let mut set = current.intersection(linked);
    while let Some(rank) = least_connected(links, set, preferred) {
        set.remove(rank);
    }
    if set.len() == 1 {
        set = set.intersection(eligible);
    }
    for rank in eligible.difference(set).iter() {
        if links.mutual(rank).contains_all(set) {
            set.insert(rank);
        }
    }
    set
}

/// Returns the rank to evict from a set, if it lacks a link: one that is not preferred if possible,
/// then the least connected one, then the highest.
fn least_connected(links: &LinkMatrix, set: RankSet, preferred: RankSet) -> Option<GlobalRank> {
    let missing = |rank: GlobalRank| set.difference(links.mutual(rank)).len();
    let suspects = set.iter().filter(|rank| missing(*rank) > 0);
    suspects.max_by_key(|rank| (!preferred.contains(*rank), missing(*rank), *rank))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(ranks: &[u8]) -> RankSet {
        ranks.iter().copied().map(GlobalRank).collect()
    }

    /// Links between all of the ranks, except the given pairs.
    fn links(ranks: &[u8], broken: &[(u8, u8)]) -> LinkMatrix {
        let mut links = LinkMatrix::new();
        for from in ranks {
            for to in ranks {
                links.set(GlobalRank(*from), GlobalRank(*to), !broken.contains(&(*from, *to)));
            }
        }
        links
    }

    #[test]
    fn the_least_connected_rank_is_evicted_then_the_highest() {
        let all = set(&[0, 1, 2, 3]);
        let connected = |broken: &[(u8, u8)]| connected_set(&links(&[0, 1, 2, 3], broken), all, all, all);
        assert_eq!(connected(&[]), all);
        assert_eq!(connected(&[(0, 1), (2, 1)]), set(&[0, 2, 3]), "two ranks have lost 1");
        assert_eq!(connected(&[(1, 2)]), set(&[0, 1, 3]), "a tie evicts the higher rank");
        assert_eq!(connected(&[(0, 1), (0, 2), (0, 3)]), set(&[1, 2, 3]));
    }

    #[test]
    fn a_rank_that_is_not_preferred_leaves_first() {
        let all = set(&[0, 1, 2]);
        let links = links(&[0, 1, 2], &[(1, 2)]);
        assert_eq!(connected_set(&links, all, all, set(&[0, 2])), set(&[0, 2]));
    }

    #[test]
    fn ranks_join_in_order_once_they_are_connected_to_all() {
        let all = set(&[0, 1, 2, 3]);
        let links = links(&[0, 1, 2, 3], &[(2, 3), (0, 3)]);
        assert_eq!(connected_set(&links, all, set(&[0]), all), set(&[0, 1, 2]));
        assert_eq!(connected_set(&links, set(&[1, 3]), RankSet::EMPTY, all), set(&[1, 3]));
    }

    #[test]
    fn a_lonely_rank_keeps_no_others_out() {
        let all = set(&[0, 1, 2]);
        let mut links = links(&[1, 2], &[]);
        links.set(GlobalRank(0), GlobalRank(0), true);
        assert_eq!(connected_set(&links, all, set(&[0]), all), set(&[1, 2]));
        assert_eq!(connected_set(&links, set(&[0]), set(&[0]), all), set(&[0]), "a world of one");
    }

    #[test]
    fn a_rank_needs_its_link_to_itself() {
        let mut links = links(&[0, 1], &[]);
        links.set(GlobalRank(1), GlobalRank(1), false);
        assert_eq!(connected_set(&links, set(&[0, 1]), set(&[0, 1]), RankSet::EMPTY), set(&[0]));
    }

    #[test]
    fn forgotten_ranks_have_no_link() {
        let mut links = links(&[0, 1], &[]);
        links.forget(GlobalRank(1));
        assert!(!links.is_up(GlobalRank(0), GlobalRank(1)) && links.mutual(GlobalRank(1)).is_empty());
        assert!(links.mutual(GlobalRank(0)).contains(GlobalRank(0)));
    }
}
