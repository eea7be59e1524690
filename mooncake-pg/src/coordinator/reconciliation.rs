//! Reconciliation window: from the first failed link until the coordinator knows who has failed.

use mooncake_core::clock::Moment;

use super::ranks::{Caller, RankTable};
use crate::limits::CoordinatorLimits;
use crate::planted::{Bug, Planted};
use crate::protocol::GroupId;
use crate::rank_set::RankSet;
use crate::view::{GlobalRank, MAX_RANKS};

/// Window of the whole world.
#[derive(Debug)]
pub(super) struct Window {
    deadline: Moment,
    /// Ranks to which each rank has observed a failed link in this window.
    accused: [RankSet; MAX_RANKS],
    /// Ranks about which each rank has reported in this window.
    reported: [RankSet; MAX_RANKS],
    /// Ranks to which each rank has observed a working link after a failed one. Such links count
    /// when the window is closed, so that all ranks see one outcome of the failure.
    recovered: [RankSet; MAX_RANKS],
    /// Requests that wait for the end of the window.
    pub(super) syncs: Vec<(Caller, GroupId)>,
}

impl Window {
    pub(super) fn new(deadline: Moment) -> Self {
        Self {
            deadline,
            accused: [RankSet::EMPTY; MAX_RANKS],
            reported: [RankSet::EMPTY; MAX_RANKS],
            recovered: [RankSet::EMPTY; MAX_RANKS],
            syncs: Vec::new(),
        }
    }

    /// Records a failed link between healthy ranks. Returns whether `to` is newly accused.
    pub(super) fn accuse(&mut self, from: GlobalRank, to: GlobalRank) -> bool {
        let is_new = !self.targets().contains(to);
        self.accused[usize::from(from.0)].insert(to);
        self.recovered[usize::from(from.0)].remove(to);
        is_new
    }

    /// Records that `from` has observed its link to `to`.
    pub(super) fn report(&mut self, from: GlobalRank, to: GlobalRank) {
        self.reported[usize::from(from.0)].insert(to);
    }

    /// Records a working link. Returns false if the link counts as failed until the end of the
    /// window.
    pub(super) fn recover(&mut self, from: GlobalRank, to: GlobalRank) -> bool {
        let row = usize::from(from.0);
        let is_accused = self.accused[row].contains(to);
        if is_accused {
            self.recovered[row].insert(to);
        }
        !is_accused
    }

    /// Returns the ranks to which a failed link was observed.
    pub(super) fn targets(&self) -> RankSet {
        self.accused.iter().fold(RankSet::EMPTY, |all, row| all.union(*row))
    }

    /// Returns the links that have worked again since they failed.
    pub(super) fn recovered(&self) -> impl Iterator<Item = (GlobalRank, GlobalRank)> + '_ {
        pairs(&self.recovered)
    }

    /// Removes all observations by and about a rank, whose session has ended.
    pub(super) fn forget(&mut self, rank: GlobalRank) {
        for rows in [&mut self.accused, &mut self.reported, &mut self.recovered] {
            for row in rows.iter_mut() {
                row.remove(rank);
            }
            rows[usize::from(rank.0)] = RankSet::EMPTY;
        }
    }

    /// Returns whether no further report can change the outcome, or the time is over.
    pub(super) fn is_over(
        &self,
        ranks: &RankTable,
        now: Moment,
        limits: &CoordinatorLimits,
        planted: Planted,
    ) -> bool {
        let targets = self.targets();
        if self.deadline <= now || targets.is_empty() {
            return true;
        }
        if planted.has(Bug::WindowNeverClosesEarly) {
            return false;
        }
        // The lost connection of an accused rank confirms the accusation. That of an accuser does
        // not refute it.
        let confirmed = targets.difference(present(ranks, now, limits));
        let open = targets.difference(confirmed);
        if open.is_empty() {
            return true;
        }
        let has_reported =
            |rank: GlobalRank| self.reported[usize::from(rank.0)].contains_all(open.without(rank));
        ranks.healthy.difference(targets).iter().all(has_reported)
    }

    /// Returns the next time after `now` at which the window may be over.
    pub(super) fn next_deadline(&self, ranks: &RankTable, now: Moment, limits: &CoordinatorLimits) -> Moment {
        let lost = ranks.iter().filter(|(_, session)| session.connection.is_none());
        let graces = lost.map(|(_, session)| session.lost_at.after(limits.reconnection));
        graces.filter(|grace| *grace > now).fold(self.deadline, Moment::min)
    }
}

/// Returns the ranks that have a connection, or have had one until a moment ago.
pub(super) fn present(ranks: &RankTable, now: Moment, limits: &CoordinatorLimits) -> RankSet {
    let sessions = ranks.iter().filter(|(_, session)| {
        session.connection.is_some() || now < session.lost_at.after(limits.reconnection)
    });
    sessions.map(|(rank, _)| rank).collect()
}

fn pairs(rows: &[RankSet; MAX_RANKS]) -> impl Iterator<Item = (GlobalRank, GlobalRank)> + '_ {
    let from = (0..MAX_RANKS).map(|rank| GlobalRank(rank as u8));
    from.zip(rows).flat_map(|(from, row)| row.iter().map(move |to| (from, to)))
}
