//! Links to the other processes, as an agent knows them.

use std::collections::{BTreeMap, VecDeque};

use mooncake_core::backoff::{Backoff, Pace};
use mooncake_core::clock::{Moment, Rng};

use crate::protocol::{LinkEvidence, RankInfo};
use crate::view::GlobalRank;

/// Largest number of reports that wait for their acknowledgement. The oldest ones are dropped.
const MAX_REPORTS: usize = 256;

/// Attempt to open a link.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LinkAttempt {
    /// Rank at the other end.
    pub rank: GlobalRank,
    /// Number of the attempt, unique in the agent.
    pub number: u64,
}

/// Action on a link.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum LinkAction {
    Open(LinkAttempt, RankInfo),
    Close(LinkAttempt),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LinkStatus {
    /// Closed until this time.
    Closed(Moment),
    Opening,
    Open,
}

#[derive(Debug)]
struct PeerLink {
    info: RankInfo,
    status: LinkStatus,
    attempt: LinkAttempt,
    /// Time at which the attempt began.
    began: Moment,
    backoff: Backoff,
    /// Last observation that was reported.
    reported: Option<bool>,
}

/// Links to all processes, and the reports about them.
#[derive(Debug)]
pub(super) struct Peers {
    links: BTreeMap<GlobalRank, PeerLink>,
    reports: VecDeque<(u64, LinkEvidence)>,
    last_report: u64,
    last_attempt: u64,
    pace: Pace,
    rng: Rng,
    /// Actions that the owner carries out.
    pub(super) actions: Vec<LinkAction>,
    /// Number of the first report that was not sent yet.
    unsent: u64,
}

impl Peers {
    pub(super) fn new(pace: Pace, rng: Rng) -> Self {
        Self {
            links: BTreeMap::new(),
            reports: VecDeque::new(),
            last_report: 0,
            last_attempt: 0,
            pace,
            rng,
            actions: Vec::new(),
            unsent: 1,
        }
    }

    pub(super) fn info(&self, rank: GlobalRank) -> Option<&RankInfo> {
        self.links.get(&rank).map(|link| &link.info)
    }

    /// Takes the list of processes. Links to new ones are opened, links to others are closed.
    pub(super) fn update(&mut self, ranks: Vec<RankInfo>, now: Moment) {
        let mut before = std::mem::take(&mut self.links);
        for info in ranks {
            let known = before.remove(&info.rank);
            let link = match known {
                Some(link) if link.info == info => link,
                other => {
                    self.close(other);
                    self.opened_to(info, now)
                }
            };
            self.links.insert(link.info.rank, link);
        }
        for (_, link) in before {
            self.close(Some(link));
        }
    }

    /// Closes all links and opens them again: the own incarnation has changed, and the coordinator
    /// has forgotten all observations.
    pub(super) fn reset(&mut self, now: Moment) {
        for (_, link) in std::mem::take(&mut self.links) {
            let info = link.info.clone();
            self.close(Some(link));
            let link = self.opened_to(info, now);
            self.links.insert(link.info.rank, link);
        }
    }

    /// Closes all links.
    pub(super) fn clear(&mut self) {
        for (_, link) in std::mem::take(&mut self.links) {
            self.close(Some(link));
        }
    }

    fn opened_to(&mut self, info: RankInfo, now: Moment) -> PeerLink {
        let attempt = self.next_attempt(info.rank);
        self.actions.push(LinkAction::Open(attempt, info.clone()));
        let backoff = Backoff::new(self.rng.split());
        PeerLink { info, status: LinkStatus::Opening, attempt, began: now, backoff, reported: None }
    }

    fn close(&mut self, link: Option<PeerLink>) {
        if let Some(link) = link
            && !matches!(link.status, LinkStatus::Closed(_))
        {
            self.actions.push(LinkAction::Close(link.attempt));
        }
    }

    fn next_attempt(&mut self, rank: GlobalRank) -> LinkAttempt {
        self.last_attempt += 1;
        LinkAttempt { rank, number: self.last_attempt }
    }

    fn current(&mut self, attempt: LinkAttempt) -> Option<&mut PeerLink> {
        self.links.get_mut(&attempt.rank).filter(|link| link.attempt == attempt)
    }

    /// Records that a link is open.
    pub(super) fn link_opened(&mut self, attempt: LinkAttempt) {
        let Some(link) = self.current(attempt) else { return };
        link.status = LinkStatus::Open;
        link.backoff.worked();
        self.report(attempt.rank, true, false);
    }

    /// Records that an attempt has failed. If the link worked before, that is a failure of the
    /// link.
    pub(super) fn link_failed(&mut self, attempt: LinkAttempt, now: Moment) {
        let pace = self.pace;
        let Some(link) = self.current(attempt) else { return };
        let until = link.backoff.failed(link.began, now, &pace);
        link.status = LinkStatus::Closed(until);
        if link.reported == Some(true) {
            self.report(attempt.rank, false, false);
        }
    }

    /// Records that an open link was closed by the other end. The link fails only if it cannot be
    /// opened again.
    pub(super) fn link_broken(&mut self, attempt: LinkAttempt, now: Moment) {
        if self.current(attempt).is_some() {
            self.open_again(attempt.rank, now);
        }
    }

    fn open_again(&mut self, rank: GlobalRank, now: Moment) {
        let attempt = self.next_attempt(rank);
        let Some(link) = self.links.get_mut(&rank) else { return };
        (link.status, link.attempt, link.began) = (LinkStatus::Opening, attempt, now);
        self.actions.push(LinkAction::Open(attempt, link.info.clone()));
    }

    /// Records an observation of the data plane or of a probe. A failure closes the link, which is
    /// tried again after a pause. Other incarnations than the present one are ignored.
    pub(super) fn observe(
        &mut self,
        rank: GlobalRank,
        incarnation: u64,
        is_up: bool,
        always: bool,
        now: Moment,
    ) {
        let pace = self.pace;
        let Some(link) = self.links.get_mut(&rank) else { return };
        if link.info.incarnation != incarnation {
            return;
        }
        if !is_up && link.reported != Some(false) {
            if !matches!(link.status, LinkStatus::Closed(_)) {
                self.actions.push(LinkAction::Close(link.attempt));
            }
            link.status = LinkStatus::Closed(link.backoff.failed(now, now, &pace));
        }
        self.report(rank, is_up, always);
    }

    /// Reports an observation if it differs from the last one, or in any case.
    fn report(&mut self, rank: GlobalRank, is_up: bool, always: bool) {
        let Some(link) = self.links.get_mut(&rank) else { return };
        if link.reported == Some(is_up) && !always {
            return;
        }
        link.reported = Some(is_up);
        let incarnation = link.info.incarnation;
        self.last_report += 1;
        if self.reports.len() >= MAX_REPORTS {
            self.reports.pop_front();
        }
        self.reports.push_back((self.last_report, LinkEvidence { rank, incarnation, is_up }));
    }

    /// Returns the reports that were not sent yet, as one message: its number and the observations.
    pub(super) fn take_unsent(&mut self) -> Option<(u64, Vec<LinkEvidence>)> {
        let unsent = self.unsent;
        let links: Vec<LinkEvidence> =
            self.reports.iter().filter(|(report, _)| *report >= unsent).map(|(_, link)| *link).collect();
        self.unsent = self.last_report + 1;
        (!links.is_empty()).then_some((self.last_report, links))
    }

    /// Records the acknowledgement of all reports up to a number.
    pub(super) fn acknowledged(&mut self, report: u64) {
        self.reports.retain(|(number, _)| *number > report);
    }

    /// Sends the reports without acknowledgement again.
    pub(super) fn send_again(&mut self) {
        self.unsent = 0;
    }

    /// Opens the links whose pause is over.
    pub(super) fn tick(&mut self, now: Moment) {
        let due = |link: &&PeerLink| matches!(link.status, LinkStatus::Closed(until) if until <= now);
        let due: Vec<GlobalRank> = self.links.values().filter(due).map(|link| link.info.rank).collect();
        for rank in due {
            self.open_again(rank, now);
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Moment> {
        let closed = self.links.values().filter_map(|link| match link.status {
            LinkStatus::Closed(until) => Some(until),
            _ => None,
        });
        closed.min()
    }
}
