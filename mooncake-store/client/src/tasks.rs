//! Copies and moves between segments: asking for them, and making those that the master wants of
//! this client.

use std::sync::{Arc, Weak};
use std::time::Duration;

use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::{ObjectKey, Uuid};
use mooncake_core::replica::{MemoryLocation, Replica};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_transport::engine::Request;
use mooncake_transport::{Slice, Transport};
use serde::Deserialize;

use crate::deadline::Deadline;
use crate::state::{Client, Inner};
use mooncake_protocol::api::{Caller, CopyToken};
use mooncake_protocol::wire::{Task, TaskInfo, TaskKind, TaskReport, TaskStatus};

/// Most tasks fetched at a time, and most made at a time.
const FETCHED: u64 = 16;
pub(crate) const AT_ONCE: usize = 4;
/// Pause before a copy that found no room is tried again, times the number of tries.
const PAUSE: Duration = Duration::from_millis(50);
/// Between two looks at whether a member answers that a copy was too late for, and how many. After
/// ten minutes the master drops it.
const PROBE: Duration = Duration::from_secs(1);
const PROBES: usize = 600;

/// Copies, moved and made elsewhere: asked for here, made by whoever has the bytes.
impl<T: Transport> Client<T> {
    /// Asks for another copy of an object in each of the segments named; [`task`](Self::task) tells
    /// how it goes.
    ///
    /// # Errors
    /// `INVALID_PARAMS` (no target, one that is not mounted, a key that is not UTF-8),
    /// `OBJECT_NOT_FOUND`, `UNAVAILABLE_IN_CURRENT_STATUS`, `TASK_PENDING_LIMIT_EXCEEDED`, and what
    /// keeps the master from answering.
    pub async fn copy_task(&self, key: impl AsRef<[u8]>, targets: &[&str]) -> Result<Uuid> {
        let inner = &self.inner;
        inner.usable()?;
        let call = inner.master.create_copy(&inner.config.tenant, key.as_ref(), targets);
        inner.deadline().bound("asking for a copy", call).await
    }

    /// Asks for the copy in segment `source` to be moved to segment `target`.
    ///
    /// # Errors
    /// As [`copy_task`](Self::copy_task).
    pub async fn move_task(&self, key: impl AsRef<[u8]>, source: &str, target: &str) -> Result<Uuid> {
        let inner = &self.inner;
        inner.usable()?;
        let call = inner.master.create_move(&inner.config.tenant, key.as_ref(), source, target);
        inner.deadline().bound("asking for a move", call).await
    }

    /// Drops copies of objects that this client wrote and nobody reads now: those in the segment
    /// named, or all for an empty name. The keys of which something was dropped.
    ///
    /// # Errors
    /// `NOT_SUPPORTED`, and what keeps the master from answering.
    pub async fn clear_replicas<K: AsRef<[u8]>>(&self, keys: &[K], segment: &str) -> Result<Vec<ObjectKey>> {
        let inner = &self.inner;
        inner.usable()?;
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        let call = inner.master.clear_replicas(inner.id, &keys, segment);
        inner.deadline().bound("clearing copies", call).await
    }

    /// Where a task stands.
    ///
    /// # Errors
    /// `TASK_NOT_FOUND`, and what keeps the master from answering.
    pub async fn task(&self, task: Uuid) -> Result<TaskInfo> {
        let inner = &self.inner;
        inner.usable()?;
        inner.deadline().bound("asking for a task", inner.master.task(task)).await
    }
}

/// What the master says of a task; a copy has targets, a move has one.
#[derive(Deserialize)]
struct Payload {
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

impl Payload {
    /// Of the copy, if it is one of a hot object.
    fn token(&self) -> CopyToken {
        let lease = Uuid::new(self.dynamic_replication_lease_id_high, self.dynamic_replication_lease_id_low);
        CopyToken { lease, epoch: self.dynamic_replication_version_epoch }
    }
}

impl<T: Transport> Inner<T> {
    /// Fetches what the master wants done and begins with it. Part of the heartbeat, so it waits
    /// for nothing else.
    pub(crate) async fn take_tasks(self: &Arc<Self>, deadline: &Deadline) -> Result<()> {
        if self.segments.lock().is_empty() || self.working.available_permits() == 0 {
            return Ok(());
        }
        let tasks = deadline.bound("fetching tasks", self.master.fetch_tasks(self.id, FETCHED)).await?;
        for task in tasks {
            let client = self.clone();
            self.runtime.spawn(async move {
                // The semaphore is never closed.
                let Ok(_permit) = client.working.acquire().await else { return };
                client.finish_task(task).await;
            });
        }
        Ok(())
    }

    async fn finish_task(self: &Arc<Self>, task: Task) {
        let outcome = self.make(&task).await;
        let (status, message) = match outcome {
            Ok(()) => (TaskStatus::Success, "Task completed successfully".to_owned()),
            Err(error) if error.code() == ErrorCode::NoAvailableHandle => {
                let text = format!("{} (max retries reached: {})", error.code().name(), task.max_retries);
                (TaskStatus::Failed, text)
            }
            Err(error) => (TaskStatus::Failed, format!("{}: {error}", error.code().name())),
        };
        let report = TaskReport { id: task.id, status, message };
        let told = self.deadline().bound("end of a task", self.master.complete_task(self.id, &report)).await;
        if let Err(error) = told {
            tracing::debug!(client = %self.id, "the master was not told of the end of a task: {error}");
        }
    }

    async fn make(self: &Arc<Self>, task: &Task) -> Result<()> {
        let payload: Payload = serde_json::from_str(&task.payload)
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

    /// One copy or move, from start to end.
    async fn replicate(self: &Arc<Self>, kind: TaskKind, payload: &Payload) -> Result<()> {
        let deadline = self.deadline();
        let (key, source, token) = (payload.key.as_bytes(), payload.source.as_str(), payload.token());
        let caller = self.caller_for(&payload.tenant_id);
        let (from, to) = match kind {
            TaskKind::Copy => {
                let targets: Vec<&str> = payload.targets.iter().map(String::as_str).collect();
                let start = self.master.copy_start(caller, key, source, &targets, token);
                let plan = deadline.bound("copy start", start).await?;
                (plan.source, plan.targets)
            }
            TaskKind::Move => {
                let start = self.master.move_start(caller, key, source, &payload.target);
                let plan = deadline.bound("move start", start).await?;
                (plan.source, plan.target.into_iter().collect())
            }
        };
        if let Err(error) = self.copy_bytes(&from, &to, &deadline).await {
            let begun = Begun { kind, key: key.to_vec(), token, tenant: payload.tenant_id.clone() };
            if error.kind() == ErrorKind::Timeout {
                // What ran out of time may still land.
                self.runtime.spawn(revoke_later(Arc::downgrade(self), begun, to));
            } else {
                self.revoke_copy(&begun).await;
            }
            return Err(error);
        }
        deadline.bound("end of a copy", self.master.replication_end(caller, kind, key, token)).await
    }

    /// Asks in the name of a tenant; an empty one is our own.
    fn caller_for<'c>(&'c self, tenant: &'c str) -> Caller<'c> {
        let caller = self.caller(0);
        if tenant.is_empty() { caller } else { Caller { tenant, ..caller } }
    }

    async fn revoke_copy(&self, begun: &Begun) {
        let caller = self.caller_for(&begun.tenant);
        let revoke = self.master.replication_revoke(caller, begun.kind, &begun.key, begun.token);
        if let Err(failed) = self.deadline().bound("revoke of a copy", revoke).await {
            tracing::debug!(client = %self.id, "a copy was not revoked: {failed}");
        }
    }

    /// Whether the owner of this memory reads what is sent to it.
    async fn answers(&self, at: &MemoryLocation) -> bool {
        let deadline = self.deadline();
        let Ok(into) = self.place(1) else { return false };
        let Ok(target) = deadline.bound("reaching a member", self.engine.open(&at.endpoint)).await else {
            return false;
        };
        let (read, _) = self.engine.read(&target, at.address, into, Some(deadline.portion(1, 1))).await;
        if read.is_err() {
            self.engine.forget(&at.endpoint);
        }
        read.is_ok()
    }

    /// Writes our replica to every place granted for another one.
    async fn copy_bytes(&self, from: &Replica, to: &[Replica], deadline: &Deadline) -> Result<()> {
        let bytes = self.own_bytes(from).ok_or(ErrorCode::ReplicaNotInLocalMemory)?;
        let mut requests = Vec::with_capacity(to.len());
        for replica in to {
            let at =
                replica.location.memory().filter(|at| at.size == bytes.len() as u64).ok_or_else(|| {
                    Error::internal("the master granted something else than memory for the whole of a copy")
                })?;
            let target = self.reach(&at.endpoint, deadline).await?;
            requests.push(Request::new(&target, at.address, bytes.clone()));
        }
        // What is left after this is for the call that ends the copy.
        let (results, _) = self.engine.write_batch(requests, Some(deadline.portion(7, 8))).await;
        may_land_first(results)
    }

    /// A replica that lies in a segment of ours.
    pub(crate) fn own_bytes(&self, replica: &Replica) -> Option<Slice<T>> {
        let at = replica.location.memory().filter(|at| at.endpoint == self.endpoint)?;
        let segments = self.segments.lock();
        segments.iter().find_map(|mounted| mounted.slice(at.address, at.size))
    }
}

/// Outcome of several writes to one grant: a timeout before any other failure, since the bytes of
/// that write may still land.
fn may_land_first(results: Vec<Result<()>>) -> Result<()> {
    let late = |error: &Error| error.kind() == ErrorKind::Timeout && !is_planted("copy-hides-late-writes");
    results.into_iter().filter_map(Result::err).min_by_key(|error| !late(error)).map_or(Ok(()), Err)
}

/// A copy or move that the master knows of.
struct Begun {
    kind: TaskKind,
    key: Vec<u8>,
    token: CopyToken,
    tenant: String,
}

/// Revokes a copy some of whose bytes may still be on their way, so that its object can be replaced
/// and removed again. That is, once the members it goes to answer: then they have taken what was
/// sent to them before, and the master lets the space rest for a while besides. With a member that
/// does not come back the copy is over anyway.
async fn revoke_later<T: Transport>(client: Weak<Inner<T>>, begun: Begun, to: Vec<Replica>) {
    let mut waiting: Vec<_> = to.iter().filter_map(|replica| replica.location.memory()).collect();
    for _ in 0..PROBES {
        {
            let Some(client) = client.upgrade().filter(|client| client.usable().is_ok()) else { return };
            while let Some(at) = waiting.last()
                && client.answers(at).await
            {
                waiting.pop();
            }
            if waiting.is_empty() {
                return client.revoke_copy(&begun).await;
            }
        }
        tokio::time::sleep(PROBE).await;
    }
}
