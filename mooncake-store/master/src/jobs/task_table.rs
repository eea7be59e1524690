//! Table of tasks: copies and moves that a client is to make.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use mooncake_core::clock::{Moment, Rng};
use mooncake_core::ids::{ClientId, Uuid};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::wire::{Task, TaskInfo, TaskKind, TaskReport, TaskStatus};

use crate::model::options::TaskOptions;
use crate::model::snapshot::SnapshotTask;

/// Maximum number of bytes of the message of a task that are kept. The message comes from a client.
const MAX_MESSAGE: usize = 4096;

struct TaskRecord {
    kind: TaskKind,
    pub(crate) status: TaskStatus,
    pub(crate) client: ClientId,
    payload: String,
    created_ms: i64,
    updated_ms: i64,
    message: String,
}

/// Table of tasks.
pub(crate) struct TaskTable {
    rng: Rng,
    by_id: HashMap<Uuid, TaskRecord>,
    /// Tasks that were not fetched.
    waiting: HashMap<ClientId, VecDeque<Uuid>>,
    pending: usize,
    processing: usize,
    /// Ended tasks, in the order of their ends.
    finished: VecDeque<Uuid>,
    /// Deadlines of waiting tasks, in order. Entries of tasks in another state are skipped.
    pending_until: VecDeque<(Moment, Uuid)>,
    processing_until: VecDeque<(Moment, Uuid)>,
}

impl TaskTable {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            rng: Rng::seeded(seed),
            by_id: HashMap::new(),
            waiting: HashMap::new(),
            pending: 0,
            processing: 0,
            finished: VecDeque::new(),
            pending_until: VecDeque::new(),
            processing_until: VecDeque::new(),
        }
    }

    /// Adds a task for a client.
    pub(crate) fn add(
        &mut self,
        kind: TaskKind,
        client: ClientId,
        payload: String,
        now: Moment,
        wall_ms: u64,
        options: &TaskOptions,
    ) -> Result<Uuid> {
        if self.pending >= options.max_pending {
            let text = format!("{} tasks are waiting already", self.pending);
            return Err(Error::new(ErrorCode::TaskPendingLimitExceeded, text));
        }
        let id = Uuid::new(self.rng.next_u64(), self.rng.next_u64());
        let at = signed(wall_ms);
        let status = TaskStatus::Pending;
        let entry = TaskRecord {
            kind,
            status,
            client,
            payload,
            created_ms: at,
            updated_ms: at,
            message: String::new(),
        };
        self.by_id.insert(id, entry);
        self.waiting.entry(client).or_default().push_back(id);
        self.pending += 1;
        self.pending_until.push_back((now.after(options.pending_timeout), id));
        self.compact_deadlines(TaskStatus::Pending);
        Ok(id)
    }

    /// Returns waiting tasks of a client, which are in progress from now on.
    pub(crate) fn fetch(
        &mut self,
        client: ClientId,
        limit: u64,
        now: Moment,
        wall_ms: u64,
        options: &TaskOptions,
    ) -> Vec<Task> {
        let Some(waiting) = self.waiting.get_mut(&client) else { return Vec::new() };
        let room = options.max_processing.saturating_sub(self.processing);
        let count = waiting.len().min(room).min(usize::try_from(limit).unwrap_or(usize::MAX));
        let taken: Vec<_> = waiting.drain(..count).collect();
        if waiting.is_empty() {
            self.waiting.remove(&client);
        }
        let mut tasks = Vec::with_capacity(taken.len());
        for id in taken {
            let Some(entry) = self.by_id.get_mut(&id) else { continue };
            entry.status = TaskStatus::Processing;
            entry.updated_ms = signed(wall_ms);
            self.pending -= 1;
            self.processing += 1;
            self.processing_until.push_back((now.after(options.processing_timeout), id));
            tasks.push(Task {
                id,
                kind: entry.kind,
                payload: entry.payload.clone(),
                created_ms: entry.created_ms,
                max_retries: options.max_retries,
            });
        }
        self.compact_deadlines(TaskStatus::Processing);
        tasks
    }

    /// Returns every task with its deadline: waiting tasks, then those in progress, then ended
    /// ones, each in order.
    pub(crate) fn ids(&self) -> Vec<(Uuid, Moment)> {
        let is = |id: &Uuid, status| self.by_id.get(id).is_some_and(|entry| entry.status == status);
        let waiting = self.pending_until.iter().filter(|(_, id)| is(id, TaskStatus::Pending));
        let begun = self.processing_until.iter().filter(|(_, id)| is(id, TaskStatus::Processing));
        let there = waiting.chain(begun).map(|(until, id)| (*id, *until));
        there.chain(self.finished.iter().map(|id| (*id, Moment(0)))).collect()
    }

    /// Returns a task for a snapshot, if it is still known.
    pub(crate) fn to_snapshot(&self, id: Uuid, until: Moment, now: Moment) -> Option<SnapshotTask> {
        let entry = self.by_id.get(&id)?;
        Some(SnapshotTask {
            id,
            kind: entry.kind,
            status: entry.status,
            client: entry.client,
            payload: entry.payload.clone(),
            created_ms: entry.created_ms,
            updated_ms: entry.updated_ms,
            message: entry.message.clone(),
            left_ms: u64::try_from(until.since(now).as_millis()).unwrap_or(u64::MAX),
        })
    }

    /// Restores the tasks of an earlier master, in the order of [`TaskTable::ids`]. The deadlines
    /// keep the time that was left.
    pub(crate) fn restore(&mut self, tasks: Vec<SnapshotTask>, now: Moment, options: &TaskOptions) {
        for task in tasks {
            if self.by_id.contains_key(&task.id) {
                continue;
            }
            let until = |longest: Duration| now.after(Duration::from_millis(task.left_ms).min(longest));
            match task.status {
                TaskStatus::Pending => {
                    self.waiting.entry(task.client).or_default().push_back(task.id);
                    self.pending += 1;
                    self.pending_until.push_back((until(options.pending_timeout), task.id));
                }
                TaskStatus::Processing => {
                    self.processing += 1;
                    self.processing_until.push_back((until(options.processing_timeout), task.id));
                }
                TaskStatus::Failed | TaskStatus::Success => self.finished.push_back(task.id),
            }
            let entry = TaskRecord {
                kind: task.kind,
                status: task.status,
                client: task.client,
                payload: task.payload,
                created_ms: task.created_ms,
                updated_ms: task.updated_ms,
                message: task.message,
            };
            self.by_id.insert(task.id, entry);
        }
        while self.finished.len() > options.max_finished {
            let Some(oldest) = self.finished.pop_front() else { break };
            self.by_id.remove(&oldest);
        }
    }

    /// Removes deadlines of tasks in another state once there are many.
    fn compact_deadlines(&mut self, status: TaskStatus) {
        let (until, there) = match status {
            TaskStatus::Pending => (&mut self.pending_until, self.pending),
            _ => (&mut self.processing_until, self.processing),
        };
        if until.len() > 2 * there + 1024 {
            until.retain(|(_, id)| self.by_id.get(id).is_some_and(|entry| entry.status == status));
        }
    }

    /// Ends a task that has not ended.
    pub(crate) fn end(
        &mut self,
        id: Uuid,
        status: TaskStatus,
        message: &str,
        wall_ms: u64,
        options: &TaskOptions,
    ) {
        let Some(entry) = self.by_id.get_mut(&id) else { return };
        match entry.status {
            TaskStatus::Pending => {
                self.pending -= 1;
                if let Some(waiting) = self.waiting.get_mut(&entry.client) {
                    waiting.retain(|other| *other != id);
                    if waiting.is_empty() {
                        self.waiting.remove(&entry.client);
                    }
                }
            }
            TaskStatus::Processing => self.processing -= 1,
            TaskStatus::Failed | TaskStatus::Success => return,
        }
        entry.status = status;
        entry.updated_ms = signed(wall_ms);
        let mut kept = message.len().min(MAX_MESSAGE);
        while !message.is_char_boundary(kept) {
            kept -= 1;
        }
        entry.message = message[..kept].to_owned();
        entry.payload = String::new();
        self.finished.push_back(id);
        while self.finished.len() > options.max_finished {
            let Some(oldest) = self.finished.pop_front() else { break };
            self.by_id.remove(&oldest);
        }
    }

    /// Ends a task that a client reports as done. A repeated report has no effect.
    ///
    /// # Errors
    /// `TASK_NOT_FOUND`; `ILLEGAL_CLIENT` if it is a task of another client.
    pub(crate) fn complete(
        &mut self,
        client: ClientId,
        report: &TaskReport,
        wall_ms: u64,
        options: &TaskOptions,
    ) -> Result<()> {
        let entry = self.by_id.get(&report.id).ok_or(ErrorCode::TaskNotFound)?;
        if entry.client != client {
            return Err(ErrorCode::IllegalClient.into());
        }
        self.end(report.id, report.status, &report.message, wall_ms, options);
        Ok(())
    }

    /// Ends a task that no client has fetched. Returns whether there was one.
    pub(crate) fn withdraw(&mut self, id: Uuid, message: &str, wall_ms: u64, options: &TaskOptions) -> bool {
        let waiting = self.by_id.get(&id).is_some_and(|entry| entry.status == TaskStatus::Pending);
        if waiting {
            self.end(id, TaskStatus::Failed, message, wall_ms, options);
        }
        waiting
    }

    /// Returns whether a task waits to be fetched, by any client.
    pub(crate) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Ends tasks that no client fetched, or ended, in time.
    pub(crate) fn expire(&mut self, now: Moment, wall_ms: u64, options: &TaskOptions) {
        for (status, message) in
            [(TaskStatus::Pending, "pending timeout"), (TaskStatus::Processing, "processing timeout")]
        {
            loop {
                let until = match status {
                    TaskStatus::Pending => &mut self.pending_until,
                    _ => &mut self.processing_until,
                };
                let Some(&(_, id)) = until.front().filter(|(at, _)| *at <= now) else { break };
                until.pop_front();
                if self.by_id.get(&id).is_some_and(|entry| entry.status == status) {
                    self.end(id, TaskStatus::Failed, message, wall_ms, options);
                }
            }
        }
    }

    /// Returns the state of a task.
    ///
    /// # Errors
    /// `TASK_NOT_FOUND`, also for a task that ended long ago.
    pub(crate) fn info(&self, id: Uuid) -> Result<TaskInfo> {
        let entry = self.by_id.get(&id).ok_or(ErrorCode::TaskNotFound)?;
        Ok(TaskInfo {
            id,
            kind: entry.kind,
            status: entry.status,
            created_ms: entry.created_ms,
            updated_ms: entry.updated_ms,
            client: entry.client,
            message: entry.message.clone(),
        })
    }
}

fn signed(wall_ms: u64) -> i64 {
    i64::try_from(wall_ms).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_over_takes_no_memory_for_its_time_out() {
        let (mut tasks, options) =
            (TaskTable::new(1), TaskOptions { max_finished: 10, ..TaskOptions::default() });
        let client = ClientId(Uuid::new(1, 2));
        for round in 0..20_000 {
            let id = tasks.add(TaskKind::Copy, client, String::new(), Moment(round), 0, &options).unwrap();
            if round % 2 == 0 {
                assert_eq!(tasks.fetch(client, 9, Moment(round), 0, &options).len(), 1);
            }
            tasks.end(id, TaskStatus::Success, &"é".repeat(1 << 16), 0, &options);
            assert!(tasks.pending_until.len() < 2000 && tasks.processing_until.len() < 2000);
        }
        assert_eq!((tasks.by_id.len(), tasks.pending, tasks.processing), (10, 0, 0));
        assert!(tasks.by_id.values().all(|entry| entry.message.len() == MAX_MESSAGE));
        // Tasks that have not ended still expire in time.
        let late = Moment(20_000);
        let id = tasks.add(TaskKind::Copy, client, String::new(), late, 0, &options).unwrap();
        tasks.expire(late.after(options.pending_timeout), 0, &options);
        assert_eq!(tasks.by_id[&id].message, "pending timeout");
    }
}
