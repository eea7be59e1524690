//! RPC service of a master: decodes each call, runs its handler and encodes the response.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::error::{Error, ErrorCode, Result};
use mooncake_core::ids::{ClientId, ObjectKey, SegmentId, Uuid};
use mooncake_core::replica::{Replica, ReplicaList, ReplicaType, ReplicateConfig, Segment, SegmentStatus};

pub use super::dispatch::Tally;
use super::dispatch::{Call, Outcome, each, signed};
use super::frame::Status;
use super::inventory::{InventoryCalls, inventory_calls};
use super::message::*;
use super::pack::{Pack, Pairs, Writer};
use super::server::{Class, Refusal, Service};
use super::tiers::{TierCalls, tier_calls};
use super::wire::{CopyPlan, MovePlan, StorageConfig, Task, TaskInfo, TaskKind, TaskReport};
use crate::api::{Caller, CopyToken, EndItem, PingReply, PutItem, WriteMode};

/// Calls about one object each, without waiting.
pub trait ObjectCalls: Send + Sync + 'static {
    /// Returns whether the object can be read. Grants a lease if so.
    fn exist(&self, tenant: &str, key: &[u8]) -> Result<bool>;

    /// Returns the replicas of the object and grants a lease.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY`.
    fn locate(&self, tenant: &str, key: &[u8]) -> Result<ReplicaList>;

    /// Appends the result of [`locate`](Self::locate) to a response.
    fn locate_to(&self, tenant: &str, key: &[u8], out: &mut Writer<'_>) -> Result<()> {
        self.locate(tenant, key).map(|list| list.pack(out))
    }

    /// Returns the replicas of each object whose key matches the pattern, and grants leases.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for an invalid pattern.
    fn locate_matching(&self, tenant: &str, pattern: &str) -> Result<Vec<(ObjectKey, Vec<Replica>)>>;

    /// Grants space for an object. `group` is empty for an object without a group.
    fn put_start(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        item: PutItem<'_>,
        config: &ReplicateConfig,
        group: &str,
    ) -> Result<Vec<Replica>>;

    /// Appends the result of [`put_start`](Self::put_start) to a response.
    fn put_start_to(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        item: PutItem<'_>,
        config: &ReplicateConfig,
        group: &str,
        out: &mut Writer<'_>,
    ) -> Result<()> {
        self.put_start(caller, mode, item, config, group).map(|replicas| replicas.pack(out))
    }

    /// Marks the write as complete.
    fn put_end(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        item: EndItem<'_>,
        replicas: ReplicaType,
    ) -> Result<()>;

    /// Cancels the write.
    fn put_revoke(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        key: &[u8],
        replicas: ReplicaType,
    ) -> Result<()>;

    /// Removes the object; `force` overrides leases.
    fn remove(&self, tenant: &str, key: &[u8], force: bool) -> Result<()>;

    /// Removes every object whose key matches the pattern, and returns their number. Objects in use
    /// are skipped.
    fn remove_matching(&self, tenant: &str, pattern: &str, force: bool) -> Result<u64>;

    /// Removes every object, and returns their number. Objects in use are skipped.
    fn remove_all(&self, tenant: &str, force: bool) -> Result<u64>;
}

/// Calls about clients and their segments.
pub trait SegmentCalls: Send + Sync + 'static {
    /// Returns the version of the master. The client of Mooncake C++ requires [`MASTER_VERSION`].
    fn version(&self) -> Result<String> {
        Ok(MASTER_VERSION.to_owned())
    }

    /// Returns the location of objects on a shared file system; by default none.
    fn storage_config(&self) -> Result<StorageConfig> {
        Ok(StorageConfig { fs_dir: String::new(), evict: true, quota: 0 })
    }

    /// Records that a client is alive.
    fn ping(&self, client: ClientId) -> Result<PingReply>;

    /// Mounts memory for objects. Mounting the same id again changes nothing.
    fn mount(&self, client: ClientId, segment: &Segment) -> Result<()>;

    /// Mounts memory again after the master forgot the client.
    fn remount(&self, client: ClientId, segments: &[Segment]) -> Result<()>;

    /// Unmounts memory at once. Unmounting an unknown segment succeeds.
    fn unmount(&self, client: ClientId, segment: SegmentId) -> Result<()>;

    /// Records that the node at this endpoint did not respond to a client.
    fn report_unreachable(&self, client: ClientId, endpoint: &str) -> Result<()>;

    /// Unmounts memory after a grace period in which its objects stay readable.
    fn unmount_later(&self, client: ClientId, segment: SegmentId, grace: Duration) -> Result<()>;

    /// Returns the state of a segment by name.
    fn segment_status_by_name(&self, name: &str) -> Result<SegmentStatus>;

    /// Returns the state of a segment.
    fn segment_status(&self, segment: SegmentId) -> Result<SegmentStatus>;
}

/// Calls about copies and moves. The defaults are those of a master without copies: it has no
/// tasks, and refuses requests with `NOT_SUPPORTED`.
pub trait TaskCalls: Send + Sync + 'static {
    /// Hands out at most `limit` tasks to this client.
    fn fetch_tasks(&self, _client: ClientId, _limit: u64) -> Result<Vec<Task>> {
        Ok(Vec::new())
    }

    /// Requests more copies.
    fn create_copy(&self, _tenant: &str, _key: &[u8], _targets: &[&str]) -> Result<Uuid> {
        Err(unsupported())
    }

    /// Requests a move of a copy.
    fn create_move(&self, _tenant: &str, _key: &[u8], _source: &str, _target: &str) -> Result<Uuid> {
        Err(unsupported())
    }

    /// Returns the state of a task.
    fn task(&self, _task: Uuid) -> Result<TaskInfo> {
        Err(ErrorCode::TaskNotFound.into())
    }

    /// Completes a task.
    fn complete_task(&self, _client: ClientId, _report: &TaskReport) -> Result<()> {
        Err(ErrorCode::TaskNotFound.into())
    }

    /// Grants space for copies. `token` is that of the task for a copy of a hot object, and nil
    /// otherwise.
    fn copy_start(
        &self,
        _caller: Caller<'_>,
        _key: &[u8],
        _from: &str,
        _to: &[&str],
        _token: CopyToken,
    ) -> Result<CopyPlan> {
        Err(unsupported())
    }

    /// Grants space for a copy in another segment.
    fn move_start(&self, _caller: Caller<'_>, _key: &[u8], _from: &str, _to: &str) -> Result<MovePlan> {
        Err(unsupported())
    }

    /// Marks copies as completely written.
    fn replication_end(
        &self,
        _caller: Caller<'_>,
        _kind: TaskKind,
        _key: &[u8],
        _token: CopyToken,
    ) -> Result<()> {
        Err(unsupported())
    }

    /// Cancels copies.
    fn replication_revoke(
        &self,
        _caller: Caller<'_>,
        _kind: TaskKind,
        _key: &[u8],
        _token: CopyToken,
    ) -> Result<()> {
        Err(unsupported())
    }
}

/// Calls about addresses of clients and the objects they wrote.
pub trait OwnerCalls: Send + Sync + 'static {
    /// Returns the addresses of clients, taken from their segments. Unknown clients are left out.
    fn client_addresses(&self, clients: &[ClientId]) -> Result<Vec<(ClientId, Vec<String>)>>;

    /// Removes unleased objects that the client wrote, or only their replicas in one segment.
    /// Returns their keys.
    fn clear_replicas(&self, client: ClientId, keys: &[&[u8]], segment: &str) -> Result<Vec<ObjectKey>>;
}

/// All calls that a master handles.
pub trait MasterCalls:
    ObjectCalls + SegmentCalls + TaskCalls + OwnerCalls + TierCalls + InventoryCalls
{
}

impl<T: ObjectCalls + SegmentCalls + TaskCalls + OwnerCalls + TierCalls + InventoryCalls> MasterCalls for T {}

fn unsupported() -> Error {
    Error::new(ErrorCode::NotSupported, "this master makes no copies")
}

/// RPC service of a master.
#[derive(Debug)]
pub struct MasterService<M>(pub Arc<M>);

impl<M: MasterCalls> Service for MasterService<M> {
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        self.counted(function, body, out).0
    }

    fn has_heartbeats(&self) -> bool {
        true
    }

    /// Returns the class of a call. Reads and starts of writes can be refused; a call that ends a
    /// write or keeps a client alive cannot.
    fn class(&self, function: u32) -> Class {
        match function {
            Ping::FUNCTION => Class::Heartbeat,
            ExistKey::FUNCTION
            | BatchExistKey::FUNCTION
            | GetReplicaList::FUNCTION
            | BatchGetReplicaList::FUNCTION
            | GetReplicaListByRegex::FUNCTION
            | StartWrites::FUNCTION
            | PutStart::FUNCTION
            | BatchPutStart::FUNCTION
            | UpsertStart::FUNCTION
            | BatchUpsertStart::FUNCTION => Class::Sheddable,
            _ => Class::Kept,
        }
    }
}

impl<M: MasterCalls> MasterService<M> {
    /// Handles a call like [`Service::call`], and also returns the outcomes of its items.
    pub fn counted(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> (Result<(), Refusal>, Tally) {
        let mut call = Call::new(body, out);
        let groups: [Group<M>; 7] =
            [read_calls, write_calls, remove_calls, segment_calls, task_calls, tier_calls, inventory_calls];
        let outcome =
            groups.iter().find_map(|group| group(&self.0, function, &mut call)).unwrap_or_else(|| {
                Err((Status::NotRegistered, format!("unknown function. number={function:#010x}")))
            });
        (outcome, call.tally())
    }
}

/// Handler of a group of calls. Returns `None` for a call of another group.
type Group<M> = fn(&M, u32, &mut Call<'_>) -> Option<Outcome>;

fn read_calls<M: MasterCalls>(master: &M, function: u32, call: &mut Call<'_>) -> Option<Outcome> {
    Some(match function {
        ExistKey::FUNCTION => call.answer(|r: ExistKey<'_>| master.exist(r.tenant, r.key)),
        BatchExistKey::FUNCTION => {
            call.answer(|r: BatchExistKey<'_>| each(&r.keys, |key| master.exist(r.tenant, key)))
        }
        GetReplicaList::FUNCTION => {
            call.answer_one(|r: &GetReplicaList<'_>, out| master.locate_to(r.tenant, r.key, out))
        }
        BatchGetReplicaList::FUNCTION => call.answer_each(
            |r: &BatchGetReplicaList<'_>| r.keys.len(),
            |r, index, out| master.locate_to(r.tenant, r.keys[index], out),
        ),
        GetReplicaListByRegex::FUNCTION => {
            call.answer(|r: GetReplicaListByRegex<'_>| master.locate_matching(r.tenant, r.pattern).map(Pairs))
        }
        BatchQueryIp::FUNCTION => {
            call.answer(|r: BatchQueryIp<'_>| master.client_addresses(&r.clients).map(Pairs))
        }
        _ => return None,
    })
}

fn write_calls<M: MasterCalls>(master: &M, function: u32, call: &mut Call<'_>) -> Option<Outcome> {
    use WriteMode::{Put, Upsert};
    Some(match function {
        PutStart::FUNCTION => call.answer_one(|r: &PutStart<'_>, out| {
            let item = PutItem { key: r.key, len: r.size };
            start_one(master, caller(r.client, r.tenant), Put, item, &r.config, out)
        }),
        UpsertStart::FUNCTION => call.answer_one(|r: &UpsertStart<'_>, out| {
            let item = PutItem { key: r.key, len: r.size };
            start_one(master, caller(r.client, r.tenant), Upsert, item, &r.config, out)
        }),
        BatchPutStart::FUNCTION => call.answer_each(
            |r: &BatchPutStart<'_>| r.keys.len(),
            |r, at, out| {
                let items = (&r.keys[..], &r.sizes[..]);
                start_at(master, caller(r.client, r.tenant), Put, items, at, &r.config, out)
            },
        ),
        BatchUpsertStart::FUNCTION => call.answer_each(
            |r: &BatchUpsertStart<'_>| r.keys.len(),
            |r, at, out| {
                let items = (&r.keys[..], &r.sizes[..]);
                start_at(master, caller(r.client, r.tenant), Upsert, items, at, &r.config, out)
            },
        ),
        PutEnd::FUNCTION => {
            call.answer(|r: PutEnd<'_>| master.put_end(caller(r.client, r.tenant), Put, r.item, r.replicas))
        }
        UpsertEnd::FUNCTION => call.answer(|r: UpsertEnd<'_>| {
            master.put_end(caller(r.client, r.tenant), Upsert, r.item, r.replicas)
        }),
        BatchPutEnd::FUNCTION => call.answer(|r: BatchPutEnd<'_>| {
            let caller = caller(r.client, r.tenant);
            each(&r.items, |item| master.put_end(caller, Put, *item, r.replicas))
        }),
        BatchUpsertEnd::FUNCTION => call.answer(|r: BatchUpsertEnd<'_>| {
            let caller = caller(r.client, r.tenant);
            each(&r.items, |item| master.put_end(caller, Upsert, *item, ReplicaType::All))
        }),
        PutRevoke::FUNCTION => call
            .answer(|r: PutRevoke<'_>| master.put_revoke(caller(r.client, r.tenant), Put, r.key, r.replicas)),
        UpsertRevoke::FUNCTION => call.answer(|r: UpsertRevoke<'_>| {
            master.put_revoke(caller(r.client, r.tenant), Upsert, r.key, r.replicas)
        }),
        BatchPutRevoke::FUNCTION => call.answer(|r: BatchPutRevoke<'_>| {
            let caller = caller(r.client, r.tenant);
            each(&r.keys, |key| master.put_revoke(caller, Put, key, r.replicas))
        }),
        BatchUpsertRevoke::FUNCTION => call.answer(|r: BatchUpsertRevoke<'_>| {
            let caller = caller(r.client, r.tenant);
            each(&r.keys, |key| master.put_revoke(caller, Upsert, key, ReplicaType::All))
        }),
        StartWrites::FUNCTION => call.answer_each(
            |r: &StartWrites<'_>| r.keys.len(),
            |r, at, out| {
                let caller = writer(r.client, r.tenant, r.attempt);
                let items = (&r.keys[..], &r.sizes[..]);
                start_at(master, caller, write_mode(r.replace), items, at, &r.config, out)
            },
        ),
        EndWrites::FUNCTION => call.answer(|r: EndWrites<'_>| {
            let caller = writer(r.client, r.tenant, r.attempt);
            each(&r.items, |item| master.put_end(caller, write_mode(r.replace), *item, r.replicas))
        }),
        RevokeWrites::FUNCTION => call.answer(|r: RevokeWrites<'_>| {
            let caller = writer(r.client, r.tenant, r.attempt);
            each(&r.keys, |key| master.put_revoke(caller, write_mode(r.replace), key, r.replicas))
        }),
        _ => return None,
    })
}

fn remove_calls<M: MasterCalls>(master: &M, function: u32, call: &mut Call<'_>) -> Option<Outcome> {
    Some(match function {
        Remove::FUNCTION => call.answer(|r: Remove<'_>| master.remove(r.tenant, r.key, r.force)),
        BatchRemove::FUNCTION => {
            call.answer(|r: BatchRemove<'_>| each(&r.keys, |key| master.remove(r.tenant, key, r.force)))
        }
        RemoveByRegex::FUNCTION => call
            .answer(|r: RemoveByRegex<'_>| master.remove_matching(r.tenant, r.pattern, r.force).map(signed)),
        RemoveAll::FUNCTION => call.answer_count(|r: RemoveAll<'_>| master.remove_all(r.tenant, r.force)),
        BatchReplicaClear::FUNCTION => {
            call.answer(|r: BatchReplicaClear<'_>| master.clear_replicas(r.client, &r.keys, r.segment_name))
        }
        _ => return None,
    })
}

fn segment_calls<M: MasterCalls>(master: &M, function: u32, call: &mut Call<'_>) -> Option<Outcome> {
    Some(match function {
        ServiceReady::FUNCTION => call.answer(|_: ServiceReady| master.version()),
        GetStorageConfig::FUNCTION => call.answer(|_: GetStorageConfig| master.storage_config()),
        GetFsdir::FUNCTION => call.answer(|_: GetFsdir| master.storage_config().map(|config| config.fs_dir)),
        Ping::FUNCTION => call.answer(|r: Ping| master.ping(r.client)),
        ReportUnreachable::FUNCTION => {
            call.answer(|r: ReportUnreachable<'_>| master.report_unreachable(r.client, r.endpoint))
        }
        MountSegment::FUNCTION => call.answer(|r: MountSegment<'_>| master.mount(r.client, &r.segment)),
        ReMountSegment::FUNCTION => {
            call.answer(|r: ReMountSegment<'_>| master.remount(r.client, &r.segments))
        }
        UnmountSegment::FUNCTION => call.answer(|r: UnmountSegment| master.unmount(r.client, r.segment)),
        GracefulUnmountSegment::FUNCTION => call.answer(|r: GracefulUnmountSegment| {
            master.unmount_later(r.client, r.segment, Duration::from_millis(r.grace_ms))
        }),
        QuerySegmentStatus::FUNCTION => {
            call.answer(|r: QuerySegmentStatus<'_>| master.segment_status_by_name(r.segment_name))
        }
        QuerySegmentStatusById::FUNCTION => {
            call.answer(|r: QuerySegmentStatusById| master.segment_status(r.segment))
        }
        _ => return None,
    })
}

fn task_calls<M: MasterCalls>(master: &M, function: u32, call: &mut Call<'_>) -> Option<Outcome> {
    use TaskKind::{Copy, Move};
    Some(match function {
        FetchTasks::FUNCTION => call.answer(|r: FetchTasks| master.fetch_tasks(r.client, r.limit)),
        CreateCopyTask::FUNCTION => {
            call.answer(|r: CreateCopyTask<'_>| master.create_copy(r.tenant, r.key, &r.targets))
        }
        CreateMoveTask::FUNCTION => {
            call.answer(|r: CreateMoveTask<'_>| master.create_move(r.tenant, r.key, r.source, r.target))
        }
        QueryTask::FUNCTION => call.answer(|r: QueryTask| master.task(r.task)),
        MarkTaskToComplete::FUNCTION => {
            call.answer(|r: MarkTaskToComplete| master.complete_task(r.client, &r.report))
        }
        CopyStart::FUNCTION => call.answer(|r: CopyStart<'_>| {
            let token = CopyToken::default();
            master.copy_start(caller(r.client, r.tenant), r.key, r.source, &r.targets, token)
        }),
        CopyEnd::FUNCTION => call.answer(|r: CopyEnd<'_>| {
            master.replication_end(caller(r.client, r.tenant), Copy, r.key, CopyToken::default())
        }),
        CopyRevoke::FUNCTION => call.answer(|r: CopyRevoke<'_>| {
            master.replication_revoke(caller(r.client, r.tenant), Copy, r.key, CopyToken::default())
        }),
        DynamicReplicaCopyStart::FUNCTION => call.answer(|r: DynamicReplicaCopyStart<'_>| {
            let token = CopyToken { lease: r.lease, epoch: r.epoch };
            master.copy_start(caller(r.client, r.tenant), r.key, r.source, &r.targets, token)
        }),
        DynamicReplicaCopyEnd::FUNCTION => call.answer(|r: DynamicReplicaCopyEnd<'_>| {
            let token = CopyToken { lease: r.lease, epoch: r.epoch };
            master.replication_end(caller(r.client, r.tenant), Copy, r.key, token)
        }),
        DynamicReplicaCopyRevoke::FUNCTION => call.answer(|r: DynamicReplicaCopyRevoke<'_>| {
            let token = CopyToken { lease: r.lease, epoch: r.epoch };
            master.replication_revoke(caller(r.client, r.tenant), Copy, r.key, token)
        }),
        MoveStart::FUNCTION => call.answer(|r: MoveStart<'_>| {
            master.move_start(caller(r.client, r.tenant), r.key, r.source, r.target)
        }),
        MoveEnd::FUNCTION => call.answer(|r: MoveEnd<'_>| {
            master.replication_end(caller(r.client, r.tenant), Move, r.key, CopyToken::default())
        }),
        MoveRevoke::FUNCTION => call.answer(|r: MoveRevoke<'_>| {
            master.replication_revoke(caller(r.client, r.tenant), Move, r.key, CopyToken::default())
        }),
        _ => return None,
    })
}

fn caller(client: ClientId, tenant: &str) -> Caller<'_> {
    Caller { client, tenant, attempt: 0 }
}

/// Returns the caller of a call about a numbered write.
fn writer(client: ClientId, tenant: &str, attempt: u64) -> Caller<'_> {
    Caller { client, tenant, attempt }
}

fn write_mode(replace: bool) -> WriteMode {
    if replace { WriteMode::Upsert } else { WriteMode::Put }
}

/// Returns the group of item `at` of `count` items.
fn group(config: &ReplicateConfig, at: usize, count: usize) -> Result<&str> {
    match &config.group_ids {
        None => Ok(""),
        Some(groups) if groups.len() == count => Ok(groups.get(at).map_or("", String::as_str)),
        Some(groups) => Err(Error::invalid(format!(
            "cannot start writes: {} group ids for {count} objects",
            groups.len()
        ))),
    }
}

fn start_one<M: MasterCalls>(
    master: &M,
    caller: Caller<'_>,
    mode: WriteMode,
    item: PutItem<'_>,
    config: &ReplicateConfig,
    out: &mut Writer<'_>,
) -> Result<()> {
    master.put_start_to(caller, mode, item, config, group(config, 0, 1)?, out)
}

/// Starts the write of one item of a batch.
fn start_at<M: MasterCalls>(
    master: &M,
    caller: Caller<'_>,
    mode: WriteMode,
    (keys, sizes): (&[&[u8]], &[u64]),
    at: usize,
    config: &ReplicateConfig,
    out: &mut Writer<'_>,
) -> Result<()> {
    if keys.len() != sizes.len() {
        return Err(Error::invalid(format!(
            "cannot start writes: {} lengths for {} objects",
            sizes.len(),
            keys.len()
        )));
    }
    let item = PutItem { key: keys[at], len: sizes[at] };
    master.put_start_to(caller, mode, item, config, group(config, at, keys.len())?, out)
}
