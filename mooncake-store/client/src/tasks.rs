//! Copies and moves between segments: requests for them, and execution of those that the master
//! assigns to this client.

use std::sync::{Arc, Weak};
use std::time::Duration;

use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::{ObjectKey, Uuid};
use mooncake_core::replica::{MemoryLocation, Replica};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_transport::engine::{LookUps, Request};
use mooncake_transport::{Slice, Transport};
use serde::Deserialize;

use crate::deadline::Deadline;
use crate::handles::ClientReplicas;
use crate::issuer::Issuer;
use crate::state::{Inner, Unreached, is_newer};
use mooncake_protocol::api::{Caller, CopyToken};
use mooncake_protocol::message::{CreateCopyTask, CreateMoveTask, FetchTasks, MarkTaskToComplete, QueryTask};
use mooncake_protocol::wire::{CopyPlan, Task, TaskInfo, TaskKind, TaskReport, TaskStatus};

/// Maximum number of tasks that one request fetches.
const MAX_FETCHED: u64 = 16;
/// Maximum number of tasks that run at the same time.
pub(crate) const MAX_RUNNING: usize = 4;
/// Pause between the end of tasks and the request for those that follow. The master begins further
/// moves of a drain meanwhile.
const NEXT_TASKS: Duration = Duration::from_millis(50);
/// Pause before a copy that found no space is retried, multiplied by the number of the retry.
const PAUSE: Duration = Duration::from_millis(50);
/// Maximum number of repeated requests for the space of a copy.
const CONFIRMATIONS: usize = 3;
/// Number of times that the start and the end of a copy are sent if no response arrives.
const REPETITIONS: usize = 3;
/// Pause between two checks of whether a client responds after a copy to it timed out.
const PROBE: Duration = Duration::from_secs(1);
/// Maximum number of these checks. After ten minutes the master drops the copy.
const PROBES: usize = 600;

/// Requests for copies and moves. The client that has the bytes executes them.
impl<T: Transport> ClientReplicas<'_, T> {
    /// Requests another copy of an object in each of the named segments. [`task`](Self::task)
    /// returns the progress.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` without a target, for a target that is not mounted, and for a key
    /// that is not UTF-8. Returns `OBJECT_NOT_FOUND`, `UNAVAILABLE_IN_CURRENT_STATUS` or
    /// `TASK_PENDING_LIMIT_EXCEEDED` from the master, or the error of the RPC.
    pub async fn copy(self, key: impl AsRef<[u8]>, targets: &[&str]) -> Result<Uuid> {
        let inner = &self.client.inner;
        inner.usable()?;
        let call = inner.master.call(CreateCopyTask {
            key: key.as_ref(),
            tenant: &inner.config.tenant,
            targets: targets.into(),
        });
        inner.deadline().bound("asking for a copy", call).await
    }

    /// Requests to move the copy in segment `source` to segment `target`.
    ///
    /// # Errors
    /// Returns the errors of [`copy`](Self::copy).
    pub async fn move_to(self, key: impl AsRef<[u8]>, source: &str, target: &str) -> Result<Uuid> {
        let inner = &self.client.inner;
        inner.usable()?;
        let call = inner.master.call(CreateMoveTask {
            key: key.as_ref(),
            tenant: &inner.config.tenant,
            source,
            target,
        });
        inner.deadline().bound("asking for a move", call).await
    }

    /// Removes copies of objects that this client wrote and that have no reader now. Only copies in
    /// `segment` are removed, or all copies if `segment` is empty. Returns the keys of which copies
    /// were removed.
    ///
    /// # Errors
    /// Returns `NOT_SUPPORTED` from the master, or the error of the RPC.
    pub async fn clear<K: AsRef<[u8]>>(self, keys: &[K], segment: &str) -> Result<Vec<ObjectKey>> {
        let inner = &self.client.inner;
        inner.usable()?;
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        let call = inner.master.clear_replicas(inner.caller(0), &keys, segment);
        inner.deadline().bound("clearing copies", call).await
    }

    /// Returns the state of a task.
    ///
    /// # Errors
    /// Returns `TASK_NOT_FOUND` from the master, or the error of the RPC.
    pub async fn task(self, task: Uuid) -> Result<TaskInfo> {
        let inner = &self.client.inner;
        inner.usable()?;
        inner.deadline().bound("asking for a task", inner.master.call(QueryTask { task })).await
    }
}

/// Description of a task by the master. A copy has `targets`, a move has `target`.
#[derive(Deserialize)]
struct TaskPayload {
    #[serde(default)]
    tenant_id: String,
    key: String,
    source: String,
    #[serde(default)]
    targets: Vec<String>,
    #[serde(default)]
    target: String,
    #[serde(default)]
    dynamic_replication_lease_id_high: u64,
    #[serde(default)]
    dynamic_replication_lease_id_low: u64,
    #[serde(default)]
    dynamic_replication_version_epoch: u64,
}

impl TaskPayload {
    /// Returns the token of the copy, which is zero unless the object is hot.
    fn token(&self) -> CopyToken {
        let lease = Uuid::new(self.dynamic_replication_lease_id_high, self.dynamic_replication_lease_id_low);
        CopyToken { lease, epoch: self.dynamic_replication_version_epoch }
    }
}

impl<T: Transport> Inner<T> {
    /// Fetches the tasks of the master for this client, and starts them. The heartbeat calls this
    /// function, so it does not wait for the tasks.
    pub(crate) async fn take_tasks(self: &Arc<Self>, deadline: &Deadline) -> Result<()> {
        if self.segments.lock().is_empty() || self.task_permits.available_permits() == 0 {
            return Ok(());
        }
        let tasks = self.fetch_tasks(deadline).await?;
        if !tasks.is_empty() {
            self.runtime.spawn(Self::finish_tasks(Arc::downgrade(self), tasks));
        }
        Ok(())
    }

    async fn fetch_tasks(&self, deadline: &Deadline) -> Result<Vec<Task>> {
        let call = self.master.call(FetchTasks { client: self.id, limit: MAX_FETCHED });
        deadline.bound("fetching tasks", call).await
    }

    /// Executes tasks, and those that follow them: the master moves a few objects of a drain at a
    /// time, and the next ones should not wait for a heartbeat.
    async fn finish_tasks(client: Weak<Self>, mut tasks: Vec<Task>) {
        while !tasks.is_empty() {
            let Some(here) = client.upgrade() else { return };
            let start = |task| {
                let client = here.clone();
                here.runtime.spawn(async move {
                    // The semaphore is never closed.
                    let Ok(_permit) = client.task_permits.acquire().await else { return };
                    client.finish_task(task).await;
                })
            };
            let started: Vec<_> = tasks.into_iter().map(start).collect();
            // Between the tasks, the client may be dropped.
            drop(here);
            for task in started {
                // A task that panicked has ended, too.
                let _ = task.await;
            }
            tokio::time::sleep(NEXT_TASKS).await;
            let Some(here) = client.upgrade().filter(|here| here.usable().is_ok()) else { return };
            tasks = here.fetch_tasks(&here.deadline()).await.unwrap_or_default();
        }
    }

    async fn finish_task(self: &Arc<Self>, task: Task) {
        let outcome = self.execute(&task).await;
        let (status, message) = match outcome {
            Ok(()) => (TaskStatus::Success, "Task completed successfully".to_owned()),
            Err(error) if error.code() == ErrorCode::NoAvailableHandle => {
                let text = format!("{} (max retries reached: {})", error.code().name(), task.max_retries);
                (TaskStatus::Failed, text)
            }
            Err(error) => (TaskStatus::Failed, format!("{}: {error}", error.code().name())),
        };
        let report = TaskReport { id: task.id, status, message };
        let outcome = self
            .deadline()
            .bound("end of a task", self.master.call(MarkTaskToComplete { client: self.id, report }))
            .await;
        if let Err(error) = outcome {
            tracing::debug!(client = %self.id, "the master was not notified of the end of a task: {error}");
        }
    }

    async fn execute(self: &Arc<Self>, task: &Task) -> Result<()> {
        let payload: TaskPayload = serde_json::from_str(&task.payload)
            .map_err(|error| Error::invalid(format!("a task that cannot be read: {error}")))?;
        let mut tries = 0;
        loop {
            self.usable()?;
            match self.replicate(task.kind, &payload).await {
                Err(error) if error.code() == ErrorCode::NoAvailableHandle && tries < task.max_retries => {
                    tries += 1;
                    tokio::time::sleep(PAUSE * tries).await;
                }
                outcome => return outcome,
            }
        }
    }

    /// Makes one copy or move, from start to end.
    async fn replicate(self: &Arc<Self>, kind: TaskKind, payload: &TaskPayload) -> Result<()> {
        let deadline = self.deadline();
        let look_ups = self.engine.look_ups();
        let mut job = self.new_copy(kind, payload);
        let mut plan = self.start_copy(&mut job, payload, &deadline).await?;
        let copied = async {
            let look_ups = self.confirm_copy(&mut job, payload, &mut plan, look_ups, &deadline).await?;
            self.copy_bytes(&plan.source, &plan.targets, look_ups, &deadline).await
        };
        if let Err(error) = copied.await {
            if error.kind() == ErrorKind::Timeout {
                // Bytes of a transfer that timed out may still arrive.
                self.runtime.spawn(revoke_later(Arc::downgrade(self), job, plan.targets));
            } else {
                self.revoke_copy(&job).await;
            }
            return Err(error);
        }
        self.end_copy(&job, &deadline).await
    }

    /// Returns a copy with a number of its own that has not started.
    fn new_copy(&self, kind: TaskKind, payload: &TaskPayload) -> CopyJob {
        let attempt = self.rng.lock().next_u64().max(1);
        let (key, tenant) = (payload.key.clone().into_bytes(), payload.tenant_id.clone());
        CopyJob { kind, key, token: payload.token(), tenant, attempt }
    }

    /// Requests space for a copy or move. If the response is lost, the request is repeated, or the
    /// copy is revoked.
    async fn start_copy(
        self: &Arc<Self>,
        job: &mut CopyJob,
        payload: &TaskPayload,
        deadline: &Deadline,
    ) -> Result<CopyPlan> {
        let targets: Vec<&str> = match job.kind {
            TaskKind::Copy => payload.targets.iter().map(String::as_str).collect(),
            TaskKind::Move => vec![payload.target.as_str()],
        };
        let mut outcome = Err(Error::from(ErrorCode::RpcFail));
        for _ in 0..REPETITIONS {
            let (caller, segments) = (self.caller_of(job), (payload.source.as_str(), &*targets));
            let start = self.master.copy_start(caller, job.kind, &job.key, segments, job.token);
            outcome = deadline.bound("copy start", start).await;
            if !outcome.as_ref().is_err_and(is_unanswered) {
                break;
            }
        }
        match outcome {
            Ok((plan, number)) => {
                job.attempt = number;
                Ok(plan)
            }
            Err(error) => {
                if is_unanswered(&error) {
                    let (client, job) = (self.clone(), job.clone());
                    self.runtime.spawn(async move { client.revoke_copy(&job).await });
                }
                Err(error)
            }
        }
    }

    /// Reports that the bytes of a copy are complete. If no response arrives, the copy may have
    /// ended or not; it is then cancelled in case it has not.
    async fn end_copy(&self, job: &CopyJob, deadline: &Deadline) -> Result<()> {
        let mut outcome = Ok(());
        for repetition in 0..REPETITIONS {
            let end = self.master.replication_end(self.caller_of(job), job.kind, &job.key, job.token);
            // A repetition has no effect on another copy, so it may come late.
            let own = self.deadline();
            outcome = if repetition == 0 { deadline } else { &own }.bound("end of a copy", end).await;
            let is_final = job.attempt == 0 || !outcome.as_ref().is_err_and(is_unanswered);
            if is_final {
                return outcome;
            }
        }
        self.revoke_copy(job).await;
        outcome
    }

    /// Requests the space again while one of its owners was found after the request: it may be in
    /// memory of an earlier process. Returns the look-ups before the last request.
    async fn confirm_copy(
        self: &Arc<Self>,
        job: &mut CopyJob,
        payload: &TaskPayload,
        plan: &mut CopyPlan,
        mut look_ups: LookUps,
        deadline: &Deadline,
    ) -> Result<LookUps> {
        for _ in 0..CONFIRMATIONS {
            let targets = plan.targets.iter().filter_map(|replica| replica.location.memory());
            let targets: Vec<String> = targets.map(|at| at.endpoint.clone()).collect();
            if !self.reach_granted(&targets, look_ups, deadline).await.iter().any(is_newer) {
                break;
            }
            look_ups = self.engine.look_ups();
            if job.token.is_nil() {
                self.revoke_copy(job).await;
                *job = self.new_copy(job.kind, payload);
                *plan = self.start_copy(job, payload, deadline).await?;
                continue;
            }
            // After a revoke, the master would not replicate the object for a while. It repeats the
            // plan, or refuses a second start, unless the target was lost.
            match self.start_copy(job, payload, deadline).await {
                Err(error) if error.code() == ErrorCode::ObjectHasReplicationTask => {}
                again => *plan = again?,
            }
        }
        Ok(look_ups)
    }

    /// Returns the caller of an RPC about a copy. An empty tenant means the tenant of this client.
    fn caller_of<'c>(&'c self, job: &'c CopyJob) -> Caller<'c> {
        let caller = self.caller(job.attempt);
        if job.tenant.is_empty() { caller } else { Caller { tenant: &job.tenant, ..caller } }
    }

    async fn revoke_copy(&self, job: &CopyJob) {
        let caller = self.caller_of(job);
        let revoke = self.master.replication_revoke(caller, job.kind, &job.key, job.token);
        if let Err(failed) = self.deadline().bound("revoke of a copy", revoke).await {
            tracing::debug!(client = %self.id, "a copy was not revoked: {failed}");
        }
    }

    /// Returns whether the owner of granted memory responds to a read.
    async fn responds(&self, at: &MemoryLocation) -> bool {
        let deadline = self.deadline();
        let Ok(into) = self.allocate_buffer(1) else { return false };
        let Ok(target) = deadline.bound("connecting to a client", self.engine.open(&at.endpoint)).await
        else {
            return false;
        };
        let (read, _) = self.engine.read(&target, at.address, into, Some(deadline.portion(1, 1))).await;
        if read.is_err() {
            self.engine.forget(&at.endpoint);
        }
        read.is_ok()
    }

    /// Writes the local replica to every target that the master granted.
    async fn copy_bytes(
        &self,
        from: &Replica,
        to: &[Replica],
        look_ups: LookUps,
        deadline: &Deadline,
    ) -> Result<()> {
        let bytes = self.own_bytes(from).ok_or(ErrorCode::ReplicaNotInLocalMemory)?;
        let mut requests = Vec::with_capacity(to.len());
        for replica in to {
            let at =
                replica.location.memory().filter(|at| at.size == bytes.len() as u64).ok_or_else(|| {
                    Error::internal("the master granted something else than memory for the whole of a copy")
                })?;
            let target = self.reach_owner(&at.endpoint, Issuer::Master(look_ups), deadline).await;
            let target = target.map_err(Unreached::into_error)?;
            requests.push(Request::new(&target, at.address, bytes.clone()));
        }
        // The remaining time is for the RPC that ends the copy.
        let (results, _) = self.engine.write_batch(requests, Some(deadline.portion(7, 8))).await;
        may_land_first(results)
    }

    /// Returns the bytes of a replica that lies in a segment of this client.
    pub(crate) fn own_bytes(&self, replica: &Replica) -> Option<Slice<T>> {
        let at = replica.location.memory().filter(|at| at.endpoint == self.endpoint)?;
        let segments = self.segments.lock();
        segments.iter().find_map(|mounted| mounted.slice(at.address, at.size))
    }
}

/// Returns the outcome of several writes to one grant. A timeout takes precedence over other
/// errors, because the bytes of that write may still arrive.
fn may_land_first(results: Vec<Result<()>>) -> Result<()> {
    let first = |error: &Error| (error.kind() == ErrorKind::Timeout) != is_planted("copy-hides-late-writes");
    results.into_iter().filter_map(Result::err).min_by_key(|error| !first(error)).map_or(Ok(()), Err)
}

/// Copy or move of this client.
#[derive(Clone)]
struct CopyJob {
    kind: TaskKind,
    key: Vec<u8>,
    token: CopyToken,
    tenant: String,
    /// Number of the copy; 0 if the master does not number copies.
    attempt: u64,
}

/// Returns whether the master may have handled a call although no response arrived.
fn is_unanswered(error: &Error) -> bool {
    matches!(error.code(), ErrorCode::RpcFail | ErrorCode::RpcTimeout)
}

/// Revokes a copy whose bytes may still be in transit, so that its object can be replaced and
/// removed again.
///
/// The revoke waits until the target clients respond. They have then received everything that was
/// sent to them before. The master also keeps the space in quarantine for some time. If a target
/// does not return, the master drops the copy by itself.
async fn revoke_later<T: Transport>(client: Weak<Inner<T>>, job: CopyJob, to: Vec<Replica>) {
    let mut waiting: Vec<_> = to.iter().filter_map(|replica| replica.location.memory()).collect();
    for _ in 0..PROBES {
        {
            let Some(client) = client.upgrade().filter(|client| client.usable().is_ok()) else { return };
            while let Some(at) = waiting.last()
                && client.responds(at).await
            {
                waiting.pop();
            }
            if waiting.is_empty() {
                return client.revoke_copy(&job).await;
            }
        }
        tokio::time::sleep(PROBE).await;
    }
}
