//! The master's side of the table: reads a call, asks the master, writes the answer.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::error::{Error, ErrorCode, Result};
use mooncake_core::ids::{ClientId, ObjectKey, SegmentId, Uuid};
use mooncake_core::replica::{Replica, ReplicaList, ReplicaType, ReplicateConfig, Segment, SegmentStatus};

use super::frame::Status;
use super::inventory::{InventoryCalls, inventory_calls};
use super::message::*;
use super::pack::{self, Answer, Items, Pack, Pairs, Unpack, Wire, Writer};
use super::server::{Class, Refusal, Service};
use super::tiers::{TierCalls, tier_calls};
use super::wire::{CopyPlan, MovePlan, StorageConfig, Task, TaskInfo, TaskKind, TaskReport};
use crate::api::{Caller, CopyToken, EndItem, PingReply, PutItem, WriteMode};

/// What a master answers about objects, one object at a time and without waiting.
pub trait ObjectCalls: Send + Sync + 'static {
    /// Whether the object can be read; grants a lease if so.
    fn exist(&self, tenant: &str, key: &[u8]) -> Result<bool>;

    /// Where the object lies; grants a lease. `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY`.
    fn locate(&self, tenant: &str, key: &[u8]) -> Result<ReplicaList>;

    /// As [`locate`](Self::locate), appended as the answer has it.
    fn locate_to(&self, tenant: &str, key: &[u8], out: &mut Writer<'_>) -> Result<()> {
        self.locate(tenant, key).map(|list| list.pack(out))
    }

    /// Where each object lies whose key the pattern finds a match in; grants leases. `INVALID_PARAMS` for a bad pattern.
    fn locate_matching(&self, tenant: &str, pattern: &str) -> Result<Vec<(ObjectKey, Vec<Replica>)>>;

    /// Space for an object; `group` is empty for none.
    fn put_start(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        item: PutItem<'_>,
        config: &ReplicateConfig,
        group: &str,
    ) -> Result<Vec<Replica>>;

    /// As [`put_start`](Self::put_start), appended as the answer has it.
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

    /// The bytes have landed.
    fn put_end(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        item: EndItem<'_>,
        replicas: ReplicaType,
    ) -> Result<()>;

    /// The write failed.
    fn put_revoke(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        key: &[u8],
        replicas: ReplicaType,
    ) -> Result<()>;

    /// Drops the object; `force` overrides leases.
    fn remove(&self, tenant: &str, key: &[u8], force: bool) -> Result<()>;

    /// Drops every object whose key the pattern finds a match in; how many. Those in use are skipped.
    fn remove_matching(&self, tenant: &str, pattern: &str, force: bool) -> Result<u64>;

    /// Drops every object; how many. Those in use are skipped.
    fn remove_all(&self, tenant: &str, force: bool) -> Result<u64>;
}

/// What a master answers about clients and their segments.
pub trait SegmentCalls: Send + Sync + 'static {
    /// Version of the master. The existing client insists on [`MASTER_VERSION`].
    fn version(&self) -> Result<String> {
        Ok(MASTER_VERSION.to_owned())
    }

    /// Where objects lie on a shared file system; by default nowhere.
    fn storage_config(&self) -> Result<StorageConfig> {
        Ok(StorageConfig { fs_dir: String::new(), evict: true, quota: 0 })
    }

    /// The client lives.
    fn ping(&self, client: ClientId) -> Result<PingReply>;

    /// Offers memory for objects. Mounting the same id again is the same mount.
    fn mount(&self, client: ClientId, segment: &Segment) -> Result<()>;

    /// Offers memory again after the master forgot the client.
    fn remount(&self, client: ClientId, segments: &[Segment]) -> Result<()>;

    /// Takes memory back at once. An unknown segment is none too many.
    fn unmount(&self, client: ClientId, segment: SegmentId) -> Result<()>;

    /// A client could not reach the member at this endpoint.
    fn report_unreachable(&self, client: ClientId, endpoint: &str) -> Result<()>;

    /// Takes memory back after its objects were readable for a while longer.
    fn unmount_later(&self, client: ClientId, segment: SegmentId, grace: Duration) -> Result<()>;

    /// State of a segment, by name.
    fn segment_status_by_name(&self, name: &str) -> Result<SegmentStatus>;

    /// State of a segment.
    fn segment_status(&self, segment: SegmentId) -> Result<SegmentStatus>;
}

/// What a master answers about copies and moves. A master without them keeps the defaults: there is nothing to do,
/// and what a client asks for is refused with `NOT_SUPPORTED`.
pub trait TaskCalls: Send + Sync + 'static {
    /// Work for this client, at most `limit` tasks.
    fn fetch_tasks(&self, _client: ClientId, _limit: u64) -> Result<Vec<Task>> {
        Ok(Vec::new())
    }

    /// Asks for more copies.
    fn create_copy(&self, _tenant: &str, _key: &[u8], _targets: &[&str]) -> Result<Uuid> {
        Err(unsupported())
    }

    /// Asks for a copy to be moved.
    fn create_move(&self, _tenant: &str, _key: &[u8], _source: &str, _target: &str) -> Result<Uuid> {
        Err(unsupported())
    }

    /// Where a task stands.
    fn task(&self, _task: Uuid) -> Result<TaskInfo> {
        Err(ErrorCode::TaskNotFound.into())
    }

    /// A task is over.
    fn complete_task(&self, _client: ClientId, _report: &TaskReport) -> Result<()> {
        Err(ErrorCode::TaskNotFound.into())
    }

    /// Space for copies; the token is that of the task where they are of a hot object, and nil otherwise.
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

    /// Space for a copy elsewhere.
    fn move_start(&self, _caller: Caller<'_>, _key: &[u8], _from: &str, _to: &str) -> Result<MovePlan> {
        Err(unsupported())
    }

    /// The copies have landed.
    fn replication_end(
        &self,
        _caller: Caller<'_>,
        _kind: TaskKind,
        _key: &[u8],
        _token: CopyToken,
    ) -> Result<()> {
        Err(unsupported())
    }

    /// The copies failed.
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

/// What a master answers about where clients are and what they wrote.
pub trait OwnerCalls: Send + Sync + 'static {
    /// Addresses of clients, from their segments; unknown clients are left out.
    fn client_addresses(&self, clients: &[ClientId]) -> Result<Vec<(ClientId, Vec<String>)>>;

    /// Drops unleased objects that the client wrote, or only their replicas in one segment; answers which.
    fn clear_replicas(&self, client: ClientId, keys: &[&[u8]], segment: &str) -> Result<Vec<ObjectKey>>;
}

/// Everything a master answers over RPC.
pub trait MasterCalls:
    ObjectCalls + SegmentCalls + TaskCalls + OwnerCalls + TierCalls + InventoryCalls
{
}

impl<T: ObjectCalls + SegmentCalls + TaskCalls + OwnerCalls + TierCalls + InventoryCalls> MasterCalls for T {}

fn unsupported() -> Error {
    Error::new(ErrorCode::NotSupported, "this master makes no copies")
}

/// A master behind the RPC server.
#[derive(Debug)]
pub struct MasterService<M>(pub Arc<M>);

impl<M: MasterCalls> Service for MasterService<M> {
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        self.counted(function, body, out).0
    }

    fn has_heartbeats(&self) -> bool {
        true
    }

    /// Reads and the beginnings of writes can be refused. What ends a write or keeps a client known is always answered.
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
    /// As [`Service::call`], with how the items of the call ended.
    pub fn counted(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> (Result<(), Refusal>, Tally) {
        let mut call = Call { body, out, tally: Tally::default() };
        let groups: [Group<M>; 7] =
            [read_calls, write_calls, remove_calls, segment_calls, task_calls, tier_calls, inventory_calls];
        let outcome =
            groups.iter().find_map(|group| group(&self.0, function, &mut call)).unwrap_or_else(|| {
                Err((Status::NotRegistered, format!("no function has the number {function:#010x}")))
            });
        (outcome, call.tally)
    }
}

/// How the items of one call ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// How many there were: one, unless the call is about many.
    pub items: u64,
    /// How many of them were refused.
    pub failed: u64,
}

impl Tally {
    fn add<T, E>(&mut self, outcome: &Result<T, E>) {
        self.items += 1;
        self.failed += u64::from(outcome.is_err());
    }
}

/// An answer, item by item.
pub(super) trait Outcomes {
    fn tell(&self, tally: &mut Tally);
}

impl<T, E> Outcomes for Result<T, E> {
    fn tell(&self, tally: &mut Tally) {
        tally.add(self);
    }
}

impl<T, E> Outcomes for Vec<Result<T, E>> {
    fn tell(&self, tally: &mut Tally) {
        self.iter().for_each(|outcome| tally.add(outcome));
    }
}

pub(super) type Outcome = Result<(), Refusal>;

/// Answers a call if it is one of its own.
type Group<M> = fn(&M, u32, &mut Call<'_>) -> Option<Outcome>;

/// A call being answered.
pub(super) struct Call<'c> {
    body: &'c [u8],
    out: &'c mut Vec<u8>,
    tally: Tally,
}

impl<'c> Call<'c> {
    /// Reads the arguments, asks, and writes the answer, whose type is the table's up to the kind of error.
    pub(super) fn answer<R, T>(&mut self, ask: impl FnOnce(R) -> T) -> Outcome
    where
        R: Request + Unpack<'c>,
        T: Pack + Outcomes,
    {
        const { assert!(<R::Reply as Wire>::LITERAL.hash() == T::LITERAL.hash()) };
        let answer = ask(self.read()?);
        answer.tell(&mut self.tally);
        pack::encode(&answer, self.out);
        Ok(())
    }

    /// As [`Call::answer`] where the answer is a count, which has no room for an error.
    fn answer_count<R>(&mut self, ask: impl FnOnce(R) -> Result<u64>) -> Outcome
    where
        R: Request<Reply = i64> + Unpack<'c>,
    {
        let count = ask(self.read()?);
        self.tally.add(&count);
        let count = count.unwrap_or_else(|error| {
            tracing::warn!(%error, "{} failed", R::NAME);
            0
        });
        pack::encode(&signed(count), self.out);
        Ok(())
    }

    fn read<R: Request + Unpack<'c>>(&self) -> Result<R, Refusal> {
        let request =
            if R::HAS_ARGUMENTS { pack::decode(self.body) } else { pack::decode_nothing(self.body) };
        request.map_err(|error| {
            let text = format!("{}: {error}; version {TABLE_VERSION} is spoken here", R::NAME);
            (Status::InvalidArguments, text)
        })
    }

    /// As [`Call::answer`] for one item, whose value `ask` appends.
    fn answer_one<R, T>(&mut self, ask: impl Fn(&R, &mut Writer<'_>) -> Result<()>) -> Outcome
    where
        R: Request<Reply = Answer<T>> + Unpack<'c>,
        T: Wire,
    {
        let (request, tally) = (self.read()?, &mut self.tally);
        let ask = |_, out: &mut Writer<'_>| {
            let outcome = ask(&request, out);
            tally.add(&outcome);
            outcome
        };
        whole::<R>(pack::encode_answers::<T>(Items::One, self.out, ask))
    }

    /// As [`Call::answer`] for a list of items, of which `ask` appends one value after the other.
    fn answer_each<R, T>(
        &mut self,
        count: impl Fn(&R) -> usize,
        ask: impl Fn(&R, usize, &mut Writer<'_>) -> Result<()>,
    ) -> Outcome
    where
        R: Request<Reply = Vec<Answer<T>>> + Unpack<'c>,
        T: Wire,
    {
        let (request, tally) = (self.read()?, &mut self.tally);
        let items = Items::Many(count(&request));
        let ask = |index, out: &mut Writer<'_>| {
            let outcome = ask(&request, index, out);
            tally.add(&outcome);
            outcome
        };
        whole::<R>(pack::encode_answers::<T>(items, self.out, ask))
    }
}

fn whole<R: Request>(fits: bool) -> Outcome {
    match fits {
        true => Ok(()),
        false => Err((Status::BadResult, format!("{}: an answer names something too long", R::NAME))),
    }
}

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

/// Of a call that says which write it belongs to.
fn writer(client: ClientId, tenant: &str, attempt: u64) -> Caller<'_> {
    Caller { client, tenant, attempt }
}

fn write_mode(replace: bool) -> WriteMode {
    if replace { WriteMode::Upsert } else { WriteMode::Put }
}

pub(super) fn each<T, U>(items: &[T], ask: impl FnMut(&T) -> U) -> Vec<U> {
    items.iter().map(ask).collect()
}

fn signed(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// The group of item `at` of `count`; a list of groups has one for each.
fn group(config: &ReplicateConfig, at: usize, count: usize) -> Result<&str> {
    match &config.group_ids {
        None => Ok(""),
        Some(groups) if groups.len() == count => Ok(groups.get(at).map_or("", String::as_str)),
        Some(groups) => Err(Error::invalid(format!("{} group ids for {count} objects", groups.len()))),
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

/// One item of a batch.
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
        return Err(Error::invalid(format!("{} lengths for {} objects", sizes.len(), keys.len())));
    }
    let item = PutItem { key: keys[at], len: sizes[at] };
    master.put_start_to(caller, mode, item, config, group(config, at, keys.len())?, out)
}
