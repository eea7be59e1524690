//! Copies of values in progress, and those that ended lately.
//!
//! A copy belongs to its client, like a write. It is lost with its client, its source or its last
//! target. A lost copy blocks nothing: its space is in quarantine, and its client learns of the
//! loss when it ends the copy.

use std::collections::VecDeque;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::ids::{ReplicaId, SlotId};
use mooncake_protocol::api::CopyToken;
use mooncake_protocol::wire::TaskKind;

use super::replicas::Replicas;
use crate::model::value::Writer;

/// Number of numbered copies that ended lately and that a shard remembers.
const REMEMBERED: usize = 128;

/// Copies of a value in progress. Meanwhile the value is neither replaced nor removed.
pub(crate) struct Copying<A> {
    /// Client that copies, and the number of its copy.
    pub(crate) copier: Writer,
    pub(crate) kind: TaskKind,
    /// Token of the copy of a hot object; nil for others.
    pub(crate) token: CopyToken,
    pub(crate) started: Moment,
    /// Logical time of the start. The server had not read a request about this copy before.
    pub(crate) begun: u64,
    /// Replica that is read. A move drops it at the end.
    pub(crate) source: ReplicaId,
    /// Names of the target segments in the request.
    pub(crate) requested_targets: Box<[Box<str>]>,
    pub(crate) targets: Replicas<A>,
    /// True if a start without a number was answered twice. The client may then have two tasks that
    /// write to the targets, and the end of one says nothing of the other.
    pub(crate) is_shared: bool,
    /// True if all targets, the source or the client are gone.
    pub(crate) lost: bool,
    /// Index of the object in the list of copies of its shard.
    pub(super) index: usize,
}

impl<A: SegmentAllocator> Copying<A> {
    pub(crate) fn new(
        copier: Writer,
        kind: TaskKind,
        token: CopyToken,
        (started, begun): (Moment, u64),
        source: ReplicaId,
        (requested_targets, targets): (&[&str], Replicas<A>),
    ) -> Self {
        let requested_targets = requested_targets.iter().map(|name| Box::from(*name)).collect();
        let (is_shared, lost) = (false, false);
        Self {
            copier,
            kind,
            token,
            started,
            begun,
            source,
            requested_targets,
            targets,
            is_shared,
            lost,
            index: 0,
        }
    }

    pub(crate) fn quarantine(self, until: Moment, now: Moment) {
        self.targets.into_iter().for_each(|held| held.quarantine(until, now));
    }
}

/// Outcome of a numbered copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyOutcome {
    Made,
    Revoked,
}

/// Copies of a shard.
#[derive(Default)]
pub(crate) struct CopyList {
    /// Objects with a copy in progress, or with one that was lost.
    pub(super) slots: Vec<SlotId>,
    /// Numbered copies that their clients have ended, the latest last.
    ended: VecDeque<(Writer, CopyOutcome)>,
}

impl CopyList {
    /// Remembers the outcome of a numbered copy; the first outcome counts.
    pub(super) fn record_end(&mut self, copier: Writer, outcome: CopyOutcome) {
        if copier.attempt == 0 || self.outcome(copier).is_some() {
            return;
        }
        if self.ended.len() >= REMEMBERED {
            self.ended.pop_front();
        }
        self.ended.push_back((copier, outcome));
    }

    /// Returns the outcome of a numbered copy that ended lately.
    pub(super) fn outcome(&self, copier: Writer) -> Option<CopyOutcome> {
        if copier.attempt == 0 {
            return None;
        }
        let found = self.ended.iter().rev().find(|(ended, _)| *ended == copier);
        found.map(|(_, outcome)| *outcome)
    }
}

#[cfg(test)]
mod tests {
    use mooncake_core::ids::ClientId;

    use super::*;

    #[test]
    fn copies_that_ended_are_remembered_for_a_while() {
        let mut copies = CopyList::default();
        let copier = |attempt| Writer { attempt, ..ClientId::default().into() };
        for attempt in 0..=REMEMBERED as u64 {
            copies.record_end(copier(attempt), CopyOutcome::Made);
            copies.record_end(copier(attempt), CopyOutcome::Revoked);
        }
        assert_eq!(copies.ended.len(), REMEMBERED);
        assert_eq!(copies.outcome(copier(0)), None, "not a number");
        assert_eq!(copies.outcome(copier(1)), Some(CopyOutcome::Made), "the first outcome counts");
        copies.record_end(copier(1000), CopyOutcome::Revoked);
        assert_eq!(copies.outcome(copier(1)), None);
        assert_eq!(copies.outcome(copier(1000)), Some(CopyOutcome::Revoked));
    }
}
