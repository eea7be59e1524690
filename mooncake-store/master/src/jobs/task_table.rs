//! Table of tasks: copy jobs whose clients report an outcome, which callers can query.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use mooncake_core::clock::{Moment, Rng};
use mooncake_core::ids::{ClientId, Uuid};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::wire::{Task, TaskInfo, TaskKind, TaskReport, TaskStatus};

use crate::model::copy_jobs::{CopyJob, CopyJobs, JobState};
use crate::model::options::TaskOptions;
use crate::model::snapshot::SnapshotTask;

/// Maximum number of bytes of the message of a task that are kept. The message comes from a client.
const MAX_MESSAGE: usize = 4096;

struct TaskRecord {
    info: TaskInfo,
    payload: String,
}

/// Table of tasks.
pub(crate) struct TaskTable {
    rng: Rng,
    options: TaskOptions,
    jobs: CopyJobs<Uuid, TaskRecord>,
    ended: HashMap<Uuid, TaskInfo>,
    /// Ids of ended tasks, in the order of their ends.
    ended_order: VecDeque<Uuid>,
}

impl TaskTable {
    pub(crate) fn new(seed: u64, options: TaskOptions) -> Self {
        Self {
            rng: Rng::seeded(seed),
            options,
            jobs: CopyJobs::default(),
            ended: HashMap::new(),
            ended_order: VecDeque::new(),
        }
    }

    /// Draws the id of a new task.
    pub(crate) fn new_id(&mut self) -> Uuid {
        Uuid::new(self.rng.next_u64(), self.rng.next_u64())
    }

    /// Adds a task for a client.
    ///
    /// # Errors
    /// `TASK_PENDING_LIMIT_EXCEEDED`.
    pub(crate) fn add(
        &mut self,
        id: Uuid,
        kind: TaskKind,
        client: ClientId,
        payload: String,
        now: Moment,
        wall_ms: u64,
    ) -> Result<()> {
        if self.jobs.queued() >= self.options.max_pending {
            let text = format!("{} tasks are waiting already", self.jobs.queued());
            return Err(Error::new(ErrorCode::TaskPendingLimitExceeded, text));
        }
        let (created_ms, status) = (signed(wall_ms), TaskStatus::Pending);
        let info =
            TaskInfo { id, kind, status, created_ms, updated_ms: created_ms, client, message: String::new() };
        let until = now.after(self.options.pending_timeout);
        self.jobs.add(id, client, JobState::Queued, until, TaskRecord { info, payload });
        Ok(())
    }

    /// Returns waiting tasks of a client, which are in progress from now on.
    pub(crate) fn fetch(&mut self, client: ClientId, limit: u64, now: Moment, wall_ms: u64) -> Vec<Task> {
        let available = self.options.max_processing.saturating_sub(self.jobs.handed_out());
        let most = available.min(usize::try_from(limit).unwrap_or(usize::MAX));
        let ids = self.jobs.hand_out(client, most, now.after(self.options.processing_timeout));
        let begin = |id| {
            let TaskRecord { info, payload } = &mut self.jobs.get_mut(&id)?.work;
            (info.status, info.updated_ms) = (TaskStatus::Processing, signed(wall_ms));
            Some(Task {
                id,
                kind: info.kind,
                payload: payload.clone(),
                created_ms: info.created_ms,
                max_retries: self.options.max_retries,
            })
        };
        ids.into_iter().filter_map(begin).collect()
    }

    /// Returns every task with its deadline: waiting tasks, then those in progress, then ended
    /// ones, each in order.
    pub(crate) fn ids(&self) -> Vec<(Uuid, Moment)> {
        let jobs = self.jobs.in_order().into_iter().map(|(id, job)| (*id, job.deadline));
        jobs.chain(self.ended_order.iter().map(|id| (*id, Moment(0)))).collect()
    }

    /// Returns a task for a snapshot, if it is still known.
    pub(crate) fn to_snapshot(&self, id: Uuid, until: Moment, now: Moment) -> Option<SnapshotTask> {
        let payload = self.jobs.get(&id).map(|job| job.work.payload.clone()).unwrap_or_default();
        let TaskInfo { kind, status, created_ms, updated_ms, client, message, .. } = self.info(id).ok()?;
        let left_ms = u64::try_from(until.since(now).as_millis()).unwrap_or(u64::MAX);
        Some(SnapshotTask { id, kind, status, client, payload, created_ms, updated_ms, message, left_ms })
    }

    /// Restores the tasks of an earlier master, in the order of [`TaskTable::ids`]. The deadlines
    /// keep the time that was left.
    pub(crate) fn restore(&mut self, tasks: Vec<SnapshotTask>, now: Moment) {
        for task in tasks {
            if self.info(task.id).is_ok() {
                continue;
            }
            let SnapshotTask { id, kind, status, client, payload, created_ms, updated_ms, message, left_ms } =
                task;
            let info = TaskInfo { id, kind, status, created_ms, updated_ms, client, message };
            let (state, longest) = match status {
                TaskStatus::Pending => (JobState::Queued, self.options.pending_timeout),
                TaskStatus::Processing => (JobState::HandedOut, self.options.processing_timeout),
                TaskStatus::Failed | TaskStatus::Success => {
                    self.remember(info);
                    continue;
                }
            };
            let until = now.after(Duration::from_millis(left_ms).min(longest));
            self.jobs.add(id, client, state, until, TaskRecord { info, payload });
        }
    }

    /// Ends a task that a client reports as done. A repeated report has no effect.
    ///
    /// # Errors
    /// `TASK_NOT_FOUND`; `ILLEGAL_CLIENT` if it is a task of another client.
    pub(crate) fn complete(&mut self, client: ClientId, report: &TaskReport, wall_ms: u64) -> Result<()> {
        let known = self.jobs.get(&report.id).map(|job| &job.work.info);
        let info = known.or_else(|| self.ended.get(&report.id)).ok_or(ErrorCode::TaskNotFound)?;
        if info.client != client {
            return Err(ErrorCode::IllegalClient.into());
        }
        if let Some(job) = self.jobs.end(&report.id) {
            self.record_end(job, report.status, &report.message, wall_ms);
        }
        Ok(())
    }

    /// Ends a task that no client has fetched. Returns whether there was one.
    pub(crate) fn withdraw(&mut self, id: Uuid, message: &str, wall_ms: u64) -> bool {
        let waits = self.jobs.get(&id).is_some_and(|job| !job.is_handed_out());
        if waits && let Some(job) = self.jobs.end(&id) {
            self.record_end(job, TaskStatus::Failed, message, wall_ms);
        }
        waits
    }

    /// Ends the tasks of clients that are lost. Returns their number.
    pub(crate) fn end_of(&mut self, lost: &HashSet<ClientId>, message: &str, wall_ms: u64) -> usize {
        let of_lost =
            |(id, job): (&Uuid, &CopyJob<TaskRecord>)| lost.contains(&job.work.info.client).then_some(*id);
        let ids: Vec<_> = self.jobs.in_order().into_iter().filter_map(of_lost).collect();
        for id in &ids {
            if let Some(job) = self.jobs.end(id) {
                self.record_end(job, TaskStatus::Failed, message, wall_ms);
            }
        }
        ids.len()
    }

    /// Returns whether a task waits to be fetched, by any client.
    pub(crate) fn has_waiting(&self) -> bool {
        self.jobs.queued() > 0
    }

    /// Ends tasks that no client fetched, or ended, in time.
    pub(crate) fn expire(&mut self, now: Moment, wall_ms: u64) {
        for (state, message) in
            [(JobState::Queued, "pending timeout"), (JobState::HandedOut, "processing timeout")]
        {
            for (_, job) in self.jobs.expire(state, now) {
                self.record_end(job, TaskStatus::Failed, message, wall_ms);
            }
        }
    }

    /// Records the outcome of a job that has ended.
    fn record_end(&mut self, job: CopyJob<TaskRecord>, status: TaskStatus, message: &str, wall_ms: u64) {
        let mut info = job.work.info;
        (info.status, info.updated_ms) = (status, signed(wall_ms));
        let mut len = message.len().min(MAX_MESSAGE);
        while !message.is_char_boundary(len) {
            len -= 1;
        }
        info.message = message[..len].to_owned();
        self.remember(info);
    }

    /// Adds an ended task, and forgets the oldest of many.
    fn remember(&mut self, info: TaskInfo) {
        self.ended_order.push_back(info.id);
        self.ended.insert(info.id, info);
        while self.ended_order.len() > self.options.max_finished {
            let Some(oldest) = self.ended_order.pop_front() else { break };
            self.ended.remove(&oldest);
        }
    }

    /// Returns the state of a task.
    ///
    /// # Errors
    /// `TASK_NOT_FOUND`, also for a task that ended long ago.
    pub(crate) fn info(&self, id: Uuid) -> Result<TaskInfo> {
        let job = self.jobs.get(&id).map(|job| &job.work.info);
        Ok(job.or_else(|| self.ended.get(&id)).ok_or(ErrorCode::TaskNotFound)?.clone())
    }

    /// Returns the outcome of a task that has ended, with the reason of a failure. A task that was
    /// forgotten counts as failed.
    pub(crate) fn outcome(&self, id: Uuid) -> Option<Result<(), String>> {
        if self.jobs.get(&id).is_some() {
            return None;
        }
        Some(match self.ended.get(&id) {
            Some(info) if info.status == TaskStatus::Success => Ok(()),
            Some(info) => Err(info.message.clone()),
            None => Err(Error::from(ErrorCode::TaskNotFound).to_string()),
        })
    }
}

fn signed(wall_ms: u64) -> i64 {
    i64::try_from(wall_ms).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(options: TaskOptions) -> (TaskTable, ClientId) {
        (TaskTable::new(1, options), ClientId(Uuid::new(1, 2)))
    }

    fn add(tasks: &mut TaskTable, client: ClientId, now: Moment) -> Uuid {
        let id = tasks.new_id();
        tasks.add(id, TaskKind::Copy, client, "{}".into(), now, 0).unwrap();
        id
    }

    #[test]
    fn ended_tasks_are_bounded_in_number_and_size() {
        let options = TaskOptions { max_finished: 10, ..TaskOptions::default() };
        let (mut tasks, client) = table(options);
        for round in 0..20_000 {
            let id = add(&mut tasks, client, Moment(round));
            if round % 2 == 0 {
                assert_eq!(tasks.fetch(client, 9, Moment(round), 0).len(), 1);
            }
            let report = TaskReport { id, status: TaskStatus::Success, message: "é".repeat(1 << 16) };
            tasks.complete(client, &report, 0).unwrap();
            assert_eq!(tasks.outcome(id), Some(Ok(())));
        }
        assert_eq!((tasks.ended.len(), tasks.ended_order.len(), tasks.jobs.len()), (10, 10, 0));
        assert!(tasks.ended.values().all(|info| info.message.len() == MAX_MESSAGE));
        // Tasks that have not ended still expire in time.
        let late = Moment(20_000);
        let id = add(&mut tasks, client, late);
        assert_eq!(tasks.outcome(id), None);
        tasks.expire(late.after(options.pending_timeout), 0);
        assert_eq!(tasks.outcome(id), Some(Err("pending timeout".into())));
    }

    #[test]
    fn an_end_counts_once_whichever_comes_first() {
        let options = TaskOptions::default();
        let (mut tasks, client) = table(options);
        let [reported, expired, withdrawn] = [0; 3].map(|_| add(&mut tasks, client, Moment(0)));
        assert!(tasks.withdraw(withdrawn, "not needed", 1));
        assert_eq!(tasks.fetch(client, 9, Moment(0), 1).len(), 2, "a withdrawn task is not handed out");
        assert!(!tasks.withdraw(reported, "not needed", 1), "the client may be at work");
        let success = |id| TaskReport { id, status: TaskStatus::Success, message: String::new() };
        tasks.complete(client, &success(reported), 2).unwrap();
        tasks.expire(Moment(0).after(options.processing_timeout), 3);
        for id in [reported, expired, withdrawn] {
            tasks.complete(client, &success(id), 4).unwrap();
        }
        let ends = [reported, expired, withdrawn].map(|id| {
            let info = tasks.info(id).unwrap();
            (info.status, info.updated_ms, info.message)
        });
        let expected = [
            (TaskStatus::Success, 2, ""),
            (TaskStatus::Failed, 3, "processing timeout"),
            (TaskStatus::Failed, 1, "not needed"),
        ];
        assert_eq!(ends, expected.map(|(status, at, message)| (status, at, message.to_owned())));
    }

    #[test]
    fn a_restored_table_goes_on_in_order_with_the_time_that_was_left() {
        let options = TaskOptions::default();
        let (mut tasks, client) = table(options);
        let [ended, begun, first, second] = [0; 4].map(|_| add(&mut tasks, client, Moment(0)));
        assert_eq!(tasks.fetch(client, 2, Moment(0), 0).len(), 2);
        let report = TaskReport { id: ended, status: TaskStatus::Failed, message: "no".into() };
        tasks.complete(client, &report, 0).unwrap();
        let now = Moment(0).after(options.pending_timeout / 2);
        let saved = |tasks: &TaskTable, now| -> Vec<_> {
            tasks.ids().iter().filter_map(|(id, until)| tasks.to_snapshot(*id, *until, now)).collect()
        };
        let before = saved(&tasks, now);
        assert_eq!(before.iter().map(|task| task.id).collect::<Vec<_>>(), [first, second, begun, ended]);
        let mut next = TaskTable::new(2, options);
        next.restore(before.clone(), Moment(7));
        next.restore(before.clone(), Moment(7));
        assert_eq!(saved(&next, Moment(7)), before, "restored once");
        let ids: Vec<_> = next.fetch(client, 9, Moment(7), 0).iter().map(|task| task.id).collect();
        assert_eq!(ids, [first, second]);
        next.expire(Moment(7).after(options.processing_timeout / 2), 0);
        assert_eq!(next.outcome(begun), Some(Err("processing timeout".into())));
        assert_eq!(next.outcome(first), None, "handed out by the new master");
    }
}
