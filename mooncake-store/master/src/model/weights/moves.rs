//! Moves of the objects of a revision between memory and disk.

use std::collections::BTreeMap;
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_protocol::wire::{WeightId, WeightOperation, WeightResidency};

/// Maximum number of remembered moves that have ended.
const MAX_ENDED: usize = 1 << 12;
/// Time without progress after which a move ends.
pub(super) const PATIENCE: Duration = Duration::from_secs(10 * 60);
/// Message of a move that moved every object.
pub(super) const COMPLETED: &str = "completed";

/// Moves by number.
pub(super) struct MoveTable {
    pub(super) moves: BTreeMap<u64, Move>,
    /// Number of the last move.
    pub(super) last: u64,
}

/// Move of the objects of a revision.
pub(super) struct Move {
    pub(super) operation: WeightOperation,
    pub(super) started: Moment,
    /// Time of the last progress.
    pub(super) progressed: Moment,
}

impl Move {
    /// Returns whether the move is in progress: the message is the outcome.
    pub(super) fn is_pending(&self) -> bool {
        self.operation.message.is_empty()
    }
}

impl MoveTable {
    pub(super) fn new(first: u64) -> Self {
        Self { moves: BTreeMap::new(), last: first }
    }

    /// Returns the destination of a move in progress.
    pub(super) fn target_of(&self, number: u64) -> Option<WeightResidency> {
        self.moves.get(&number).filter(|it| it.is_pending()).map(|it| it.operation.target)
    }

    pub(super) fn forget_all_of(&mut self, id: &WeightId) {
        self.moves.retain(|_, it| it.operation.revision != *id);
    }

    /// Forgets the oldest ended moves, if there are many.
    pub(super) fn prune(&mut self) {
        let ended = self.moves.iter().filter(|(_, it)| !it.is_pending()).map(|(number, _)| *number);
        let ended: Vec<_> = ended.collect();
        let over = ended.len().saturating_sub(MAX_ENDED);
        ended.into_iter().take(over).for_each(|number| {
            self.moves.remove(&number);
        });
    }

    /// Returns the number of moves in progress, and the age of the oldest in milliseconds.
    pub(super) fn pending(&self, now: Moment) -> (u64, u64) {
        let pending = || self.moves.values().filter(|it| it.is_pending());
        let oldest = pending().map(|it| now.since(it.started).as_millis()).max().unwrap_or(0);
        (pending().count() as u64, u64::try_from(oldest).unwrap_or(u64::MAX))
    }
}
