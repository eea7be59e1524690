//! Tasks: copies and moves that somebody asked for and a client is to make. The table, and what goes into it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::{Moment, Rng};
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::ids::{ClientId, Uuid};
use mooncake_core::{Error, ErrorCode, Result};
use serde::Serialize;

use super::Master;
use super::options::TaskOptions;
use super::put::absent;
use super::snapshot::NotedTask;
use mooncake_protocol::api::CopyToken;
use mooncake_protocol::wire::{Task, TaskInfo, TaskKind, TaskReport, TaskStatus};

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// Has another copy of an object made in each of the segments named, by the owner of one that is there.
    ///
    /// # Errors
    /// `INVALID_PARAMS` (no target, or one that is not mounted; a key that is not UTF-8, because a task travels as JSON);
    /// `UNAVAILABLE_IN_CURRENT_STATUS` (a target takes no objects); `OBJECT_NOT_FOUND`; `REPLICA_IS_NOT_READY`;
    /// `TASK_PENDING_LIMIT_EXCEEDED`.
    pub fn create_copy(&self, key: &[u8], targets: &[&str]) -> Result<Uuid> {
        if targets.is_empty() {
            return Err(Error::invalid("a copy needs a target segment"));
        }
        // A key that no task can name is refused whether there is such an object or not.
        self.key_text(key)?;
        let (source, client) = self.source_of(key, None)?;
        targets.iter().try_for_each(|target| self.check_target(target))?;
        // Each once: a task is kept for a while, whatever list it was asked for with.
        let mut seen = HashSet::new();
        let once: Vec<&str> = targets.iter().copied().filter(|target| seen.insert(*target)).collect();
        self.add_copy(key, &source, client, &once, CopyToken::default())
    }

    /// Has the owner of a replica of a hot object make another one.
    pub(super) fn add_hot_copy(
        &self,
        key: &[u8],
        source: &str,
        client: ClientId,
        target: &str,
        token: CopyToken,
    ) -> Result<Uuid> {
        self.add_copy(key, source, client, &[target], token)
    }

    fn add_copy(
        &self,
        key: &[u8],
        source: &str,
        client: ClientId,
        targets: &[&str],
        token: CopyToken,
    ) -> Result<Uuid> {
        let (tenant_id, key) = self.key_text(key)?;
        let payload = CopyPayload {
            tenant_id,
            key,
            source,
            targets,
            dynamic_replication_lease_id_high: token.lease.first,
            dynamic_replication_lease_id_low: token.lease.second,
            dynamic_replication_version_epoch: token.epoch,
        };
        self.add_task(TaskKind::Copy, client, &payload)
    }

    /// Has the copy in segment `source` moved to segment `target`, by the owner of the former.
    ///
    /// # Errors
    /// As [`Master::create_copy`]; `INVALID_PARAMS` too when there is no copy in `source`, or both are the same.
    pub fn create_move(&self, key: &[u8], source: &str, target: &str) -> Result<Uuid> {
        if source == target {
            return Err(Error::invalid("source and target of a move are the same segment"));
        }
        let (tenant_id, text) = self.key_text(key)?;
        self.check_target(target)?;
        let (source, client) = self.source_of(key, Some(source))?;
        let payload = MovePayload { tenant_id, key: text, source: &source, target };
        self.add_task(TaskKind::Move, client, &payload)
    }

    /// Work for a client, at most `limit` tasks; from now on they count as begun.
    pub fn fetch_tasks(&self, client: ClientId, limit: u64) -> Vec<Task> {
        let mut tasks = self.tasks.lock();
        if tasks.waiting.is_empty() {
            return Vec::new();
        }
        tasks.fetch(client, limit, self.clock.now(), self.clock.wall_ms(), &self.options.tasks)
    }

    /// Where a task stands.
    ///
    /// # Errors
    /// `TASK_NOT_FOUND`; tasks that are over are forgotten one day.
    pub fn task(&self, id: Uuid) -> Result<TaskInfo> {
        let tasks = self.tasks.lock();
        let entry = tasks.by_id.get(&id).ok_or(ErrorCode::TaskNotFound)?;
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

    /// A task is over. May be repeated.
    ///
    /// # Errors
    /// `TASK_NOT_FOUND`; `ILLEGAL_CLIENT` (another's); `INVALID_PARAMS` (a status that is no end).
    pub fn complete_task(&self, client: ClientId, report: &TaskReport) -> Result<()> {
        if !matches!(report.status, TaskStatus::Failed | TaskStatus::Success) {
            return Err(Error::invalid(format!("{:?} is no end of a task", report.status)));
        }
        let mut tasks = self.tasks.lock();
        let entry = tasks.by_id.get(&report.id).ok_or(ErrorCode::TaskNotFound)?;
        if entry.client != client {
            return Err(ErrorCode::IllegalClient.into());
        }
        tasks.end(report.id, report.status, &report.message, self.clock.wall_ms(), &self.options.tasks);
        drop(tasks);
        self.drains.wake();
        Ok(())
    }

    /// Ends a task that nobody has fetched; whether there was one.
    pub(super) fn withdraw_task(&self, id: Uuid, message: &str) -> bool {
        let mut tasks = self.tasks.lock();
        let waiting = tasks.by_id.get(&id).is_some_and(|entry| entry.status == TaskStatus::Pending);
        if waiting {
            tasks.end(id, TaskStatus::Failed, message, self.clock.wall_ms(), &self.options.tasks);
        }
        waiting
    }

    fn check_target(&self, name: &str) -> Result<()> {
        let now = self.clock.now();
        let registry = self.segments.read();
        let named = registry.named(name);
        if named.is_empty() {
            return Err(Error::invalid(format!("no segment {name} is mounted")));
        }
        if !named.iter().any(|segment| segment.would_open(now)) {
            let text = format!("segment {name} takes no objects now");
            return Err(Error::new(ErrorCode::UnavailableInCurrentStatus, text));
        }
        Ok(())
    }

    /// A segment that holds a replica, by chance unless it is named, and its owner.
    fn source_of(&self, key: &[u8], name: Option<&str>) -> Result<(String, ClientId)> {
        let hash = self.directory.hash(key);
        let shard = self.directory.lock(hash);
        let slot = shard.find(hash, key).ok_or_else(absent)?;
        let Some(value) = shard[slot].value() else { return Err(ErrorCode::ReplicaIsNotReady.into()) };
        let live: Vec<_> = value.live().map(|held| &held.segment).collect();
        let found = match name {
            Some(name) => live
                .into_iter()
                .find(|segment| segment.info.name == name)
                .ok_or_else(|| Error::invalid(format!("no copy of it is in segment {name}")))?,
            None if live.is_empty() => return Err(absent()),
            None => live[self.dice.below(live.len())],
        };
        Ok((found.info.name.clone(), found.client))
    }

    /// A key as tenant and text.
    fn key_text<'a>(&self, key: &'a [u8]) -> Result<(&'a str, &'a str)> {
        let (tenant, key) = self.tenants.split(key);
        match std::str::from_utf8(key) {
            Ok(text) => Ok((tenant, text)),
            Err(_) => {
                Err(Error::invalid("only objects whose key is UTF-8 have copies made of them by tasks"))
            }
        }
    }

    fn add_task(&self, kind: TaskKind, client: ClientId, payload: &impl Serialize) -> Result<Uuid> {
        let payload =
            serde_json::to_string(payload).map_err(|e| Error::internal(format!("a task's payload: {e}")))?;
        let (now, wall) = (self.clock.now(), self.clock.wall_ms());
        self.tasks.lock().add(kind, client, payload, now, wall, &self.options.tasks)
    }
}

/// Bytes of a task's message that are kept: it comes from whoever made the copy.
const MAX_MESSAGE: usize = 4096;

/// As the existing system's clients read it.
#[derive(Serialize)]
struct CopyPayload<'a> {
    tenant_id: &'a str,
    key: &'a str,
    source: &'a str,
    targets: &'a [&'a str],
    dynamic_replication_lease_id_high: u64,
    dynamic_replication_lease_id_low: u64,
    dynamic_replication_version_epoch: u64,
}

/// As the existing system's clients read it.
#[derive(Serialize)]
struct MovePayload<'a> {
    tenant_id: &'a str,
    key: &'a str,
    source: &'a str,
    target: &'a str,
}

struct Entry {
    kind: TaskKind,
    status: TaskStatus,
    client: ClientId,
    payload: String,
    created_ms: i64,
    updated_ms: i64,
    message: String,
}

/// All tasks that are known.
pub(super) struct Tasks {
    rng: Rng,
    by_id: HashMap<Uuid, Entry>,
    /// Not fetched yet.
    waiting: HashMap<ClientId, VecDeque<Uuid>>,
    pending: usize,
    processing: usize,
    /// In the order they ended.
    finished: VecDeque<Uuid>,
    /// When each is given up, in order; those that went on meanwhile are passed over.
    pending_until: VecDeque<(Moment, Uuid)>,
    processing_until: VecDeque<(Moment, Uuid)>,
}

impl Tasks {
    pub(super) fn new(seed: u64) -> Self {
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

    fn add(
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
        let entry =
            Entry { kind, status, client, payload, created_ms: at, updated_ms: at, message: String::new() };
        self.by_id.insert(id, entry);
        self.waiting.entry(client).or_default().push_back(id);
        self.pending += 1;
        self.pending_until.push_back((now.after(options.pending_timeout), id));
        self.forget_over(TaskStatus::Pending);
        Ok(id)
    }

    fn fetch(
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
        self.forget_over(TaskStatus::Processing);
        tasks
    }

    /// Every task, and until when it has time: first those that wait, then those under way, then those that are over, each in order.
    pub(super) fn ids(&self) -> Vec<(Uuid, Moment)> {
        let is = |id: &Uuid, status| self.by_id.get(id).is_some_and(|entry| entry.status == status);
        let waiting = self.pending_until.iter().filter(|(_, id)| is(id, TaskStatus::Pending));
        let begun = self.processing_until.iter().filter(|(_, id)| is(id, TaskStatus::Processing));
        let there = waiting.chain(begun).map(|(until, id)| (*id, *until));
        there.chain(self.finished.iter().map(|id| (*id, Moment(0)))).collect()
    }

    /// One of them, if it is known yet.
    pub(super) fn note(&self, id: Uuid, until: Moment, now: Moment) -> Option<NotedTask> {
        let entry = self.by_id.get(&id)?;
        Some(NotedTask {
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

    /// Takes over the tasks of a master before, in the order of [`Tasks::ids`]. Those that had time left have as much now.
    pub(super) fn recall(&mut self, tasks: Vec<NotedTask>, now: Moment, options: &TaskOptions) {
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
            let entry = Entry {
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

    /// Forgets when tasks were to be given up that are over long before: otherwise there were one for each of the last minutes.
    fn forget_over(&mut self, status: TaskStatus) {
        let (until, there) = match status {
            TaskStatus::Pending => (&mut self.pending_until, self.pending),
            _ => (&mut self.processing_until, self.processing),
        };
        if until.len() > 2 * there + 1024 {
            until.retain(|(_, id)| self.by_id.get(id).is_some_and(|entry| entry.status == status));
        }
    }

    /// Ends a task that is not over yet.
    fn end(&mut self, id: Uuid, status: TaskStatus, message: &str, wall_ms: u64, options: &TaskOptions) {
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

    /// Gives up what nobody fetched, or nobody ended, in time.
    pub(super) fn expire(&mut self, now: Moment, wall_ms: u64, options: &TaskOptions) {
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
            (Tasks::new(1), TaskOptions { max_finished: 10, ..TaskOptions::default() });
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
        // Those that are not over still are given up in time.
        let late = Moment(20_000);
        let id = tasks.add(TaskKind::Copy, client, String::new(), late, 0, &options).unwrap();
        tasks.expire(late.after(options.pending_timeout), 0, &options);
        assert_eq!(tasks.by_id[&id].message, "pending timeout");
    }
}
