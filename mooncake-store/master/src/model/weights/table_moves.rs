//! Moves of revisions in the table of managed weights.

use mooncake_protocol::wire::{
    WeightAvailability, WeightError, WeightId, WeightMove, WeightOperation, WeightResidency,
};

use super::moves::{COMPLETED, Move, PATIENCE};
use super::table::Weights;
use super::values::{Due, Instants, Progress, Result};

impl Weights {
    /// Begins to move the objects of a revision. `can` tells whether this master can move objects
    /// there.
    pub(crate) fn start_move(
        &mut self,
        id: &WeightId,
        generation: u64,
        target: WeightResidency,
        can: impl FnOnce(WeightResidency) -> Result<()>,
        at: Instants,
    ) -> Result<WeightOperation> {
        let leases = self.leases.count(id, at.now);
        let number = self.moves.last + 1;
        let record = self.record(id)?;
        record.expect(generation)?;
        if !record.is(WeightAvailability::Ready) {
            return Err(WeightError::NotReady);
        }
        if leases > 0 || record.revision.operation_id != 0 {
            return Err(WeightError::Busy);
        }
        if record.revision.residency != target {
            can(target)?;
        }
        record.change(at.wall_ms)?;
        let kind = if target == WeightResidency::Hot { WeightMove::Promote } else { WeightMove::Demote };
        (record.revision.operation, record.revision.operation_id) = (kind, number);
        let operation = WeightOperation {
            id: number,
            revision: id.clone(),
            kind,
            target,
            metadata_generation: record.revision.metadata_generation,
            started_ms: at.wall_ms,
            updated_ms: at.wall_ms,
            done: 0,
            total: record.objects(),
            cursor: String::new(),
            message: String::new(),
        };
        self.moves.last = number;
        let begun = Move { operation: operation.clone(), started: at.now, progressed: at.now };
        self.moves.moves.insert(number, begun);
        Ok(operation)
    }

    /// Returns the state of a move.
    pub(crate) fn query_move(&self, tenant: &str, number: u64) -> Result<WeightOperation> {
        let found = self.moves.moves.get(&number).filter(|it| it.operation.revision.tenant == tenant);
        found.map(|it| it.operation.clone()).ok_or(WeightError::NotFound)
    }

    /// Records the progress of the move of a revision, and ends it if every object has moved, if it
    /// cannot go on, or if there was no progress for long.
    pub(crate) fn progress(&mut self, due: &Due, progress: Progress, at: Instants) {
        let Some(record) = self.records.get_mut(&due.id) else { return };
        let Some(moving) = self.moves.moves.get_mut(&record.revision.operation_id) else { return };
        if due.target != Some(moving.operation.target) || !moving.is_pending() {
            return;
        }
        let operation = &mut moving.operation;
        if operation.done != progress.done {
            (operation.done, operation.updated_ms) = (progress.done, at.wall_ms);
            moving.progressed = at.now;
        }
        let outcome = if progress.done >= operation.total {
            COMPLETED.to_owned()
        } else if let Some(obstacle) = progress.obstacle {
            obstacle
        } else if moving.progressed.after(PATIENCE) <= at.now {
            let (done, total) = (operation.done, operation.total);
            format!("cannot move weights: no progress for {PATIENCE:?}. done={done} total={total}")
        } else {
            return;
        };
        if outcome != COMPLETED {
            self.failures += 1;
        }
        (operation.message, operation.updated_ms) = (outcome, at.wall_ms);
        (record.revision.operation, record.revision.operation_id) = (WeightMove::None, 0);
        if record.change(at.wall_ms).is_err() {
            self.failures += 1;
        }
    }
}
