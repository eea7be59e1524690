//! Tasks: requests for copies and moves, and the calls of the clients that make them.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ClientId, Uuid};
use mooncake_core::{Error, Result};
use mooncake_protocol::wire::{Task, TaskInfo, TaskReport, TaskStatus};

use super::master::Master;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Requests a copy of an object in each of the named segments, from the client of one of its
    /// replicas.
    ///
    /// # Errors
    /// `INVALID_PARAMS` (no target, or one that is not mounted; a key that is not UTF-8, because a
    /// task travels as JSON); `UNAVAILABLE_IN_CURRENT_STATUS` (a target accepts no objects);
    /// `OBJECT_NOT_FOUND`; `REPLICA_IS_NOT_READY`; `TASK_PENDING_LIMIT_EXCEEDED`.
    pub fn create_copy(&self, key: &[u8], targets: &[&str]) -> Result<Uuid> {
        self.jobs.create_copy(key, targets)
    }

    /// Requests a move of the replica in segment `source` to segment `target`, from the client of
    /// `source`.
    ///
    /// # Errors
    /// Those of [`Master::create_copy`]; `INVALID_PARAMS` also if there is no replica in `source`,
    /// or both are the same.
    pub fn create_move(&self, key: &[u8], source: &str, target: &str) -> Result<Uuid> {
        self.jobs.create_move(key, source, target)
    }

    /// Returns tasks for a client, `limit` at most. They are in progress from now on.
    pub fn fetch_tasks(&self, client: ClientId, limit: u64) -> Vec<Task> {
        let mut tasks = self.jobs.tasks.lock();
        if !tasks.has_waiting() {
            return Vec::new();
        }
        tasks.fetch(client, limit, self.clock().now(), self.clock().wall_ms())
    }

    /// Returns the state of a task.
    ///
    /// # Errors
    /// `TASK_NOT_FOUND`, also for a task that ended long ago.
    pub fn task(&self, id: Uuid) -> Result<TaskInfo> {
        self.jobs.tasks.lock().info(id)
    }

    /// Ends a task. Repeating the call has no effect.
    ///
    /// # Errors
    /// `TASK_NOT_FOUND`; `ILLEGAL_CLIENT` (the task of another client); `INVALID_PARAMS` (not a
    /// final status).
    pub fn complete_task(&self, client: ClientId, report: &TaskReport) -> Result<()> {
        if !matches!(report.status, TaskStatus::Failed | TaskStatus::Success) {
            return Err(Error::invalid(format!(
                "cannot complete task: not a final status. status={:?}",
                report.status
            )));
        }
        self.jobs.tasks.lock().complete(client, report, self.clock().wall_ms())?;
        self.jobs.drains.wake();
        Ok(())
    }
}
