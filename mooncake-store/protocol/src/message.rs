//! Table of calls with their signatures, as in version 0.3.14 of Mooncake C++. Version 0.3.13.post1
//! has the same ones, and other forms of those in [`EARLIER`].
//!
//! A call is one row: its name, its arguments in order, its response, and its treatment by a
//! master. The macro derives the function number, the hashes and signatures of both bodies,
//! encoding, decoding, dispatch and counters from the row. A new version of a signature is a change
//! here.
//!
//! # How to add a call
//!
//! 1. Add a row to [`ADDED`], or to [`TABLE`] if Mooncake C++ has the call.
//! 2. Add the types of its arguments and of its response to [`wire`](super::wire), as far as they
//!    are new. An argument with a new name needs a line of documentation in `message/meaning.rs`.
//! 3. Implement [`Handle`] for the master, in `calls/handlers.rs` of `mooncake-master`.
//!
//! Calls of IPC clients have a table of their own, [`IPC_TABLE`]. Their handlers implement
//! [`HandleAsync`], in `local/session.rs` of `mooncake-client`.
//!
//! A row without brackets has the treatment [`Treatment::DEFAULT`]. The brackets contain, in any
//! order and separated by commas:
//!
//! | attribute | meaning |
//! |---|---|
//! | `in Heartbeat`, `in Sheddable` | the [`Class`] under overload |
//! | `counter name` | counters `master_name_requests_total` and `_failures_total` |
//! | `batch_counter name` | the same, with counters of items |
//! | `visits_all` | the call visits every object, or may have to |
//! | `remote_only` | the call serves to outlive the master; an embedded master refuses it |
//!
//! An argument with `[since <version>]` behind its type is a
//! compatible field: it is absent in messages of peers that do not know it.

#[macro_use]
mod macros;
#[macro_use]
mod meaning;

use std::borrow::Cow;

use mooncake_core::hints::PutHints;
use mooncake_core::ids::{ClientId, ReplicaId, SegmentId, Uuid};
use mooncake_core::replica::{Replica, ReplicaList, ReplicaType, ReplicateConfig, Segment, SegmentStatus};

pub use super::call::{Handle, HandleAsync, Outcome, Request, TABLE_VERSION, Treatment};
use super::call::{Response, run, run_async};
use super::frame::Refusal;
use super::heartbeat::Class;
use super::pack::{self, Answer, List, Pack, PackError, Pairs, Unpack, wire_field, wire_fields};
use super::report::Reported;
use super::type_signature::{TypeSignature, function_id};
use super::wire::{
    AddressCheck, Attached, CopyPlan, DiskWork, DrainProgress, EndItem, EpochPair, HeldObjects,
    InventoryPage, ItemLifetime, Lent, LentParts, LocatedObject, MasterKeys, MatchingPage, MemoryRange,
    MovePlan, NofOwner, NofSegment, ObjectPieces, ObjectRange, ObjectSink, OffloadItem, PingReply,
    ProbePolicy, PromotionPlan, ReadablePrefix, SpaceOutlook, StorageConfig, StoredAt, StoredReplica, Task,
    TaskInfo, TaskReport, TimedInventoryPage, VerifiedReplicas, WeightChange, WeightCommit, WeightError,
    WeightImport, WeightLease, WeightLeaseRelease, WeightLeaseRenewal, WeightLeaseRequest, WeightList,
    WeightMoveRequest, WeightOperation, WeightOperationQuery, WeightPage, WeightQuery, WeightRevision,
    WeightView, Welcome, ZeroWork,
};

/// Version that a master of this table reports. The client of Mooncake C++ requires an equal
/// version.
pub const MASTER_VERSION: &str = "2.0.0";
/// Version of this program, for people.
pub const DISPLAY_VERSION: &str = env!("CARGO_PKG_VERSION");

/// Description of one call of the table.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Name of the call.
    pub name: &'static str,
    /// Number of the call in frames.
    pub function: u32,
    /// Signature of the arguments; empty for none.
    pub arguments: &'static [u8],
    /// Signature of the response.
    pub reply: &'static [u8],
    /// Treatment of the call by a master.
    pub treatment: Treatment,
    rewrite_arguments: Rewrite,
    rewrite_reply: Rewrite,
}

type Rewrite = fn(&[u8], bool) -> Result<Vec<u8>, PackError>;

impl Shape {
    /// Returns whether a body has the type of the arguments, according to its hash.
    pub fn takes(&self, body: &[u8]) -> bool {
        pack::hash_of(body) == Some(TypeSignature::new(self.arguments).hash())
    }

    /// Decodes and re-encodes arguments, with or without their signature. For tests and fuzzing.
    pub fn rewrite_arguments(&self, body: &[u8], spelled: bool) -> Result<Vec<u8>, PackError> {
        (self.rewrite_arguments)(body, spelled)
    }

    /// Decodes and re-encodes a response, with or without its signature. For tests and fuzzing.
    pub fn rewrite_reply(&self, body: &[u8], spelled: bool) -> Result<Vec<u8>, PackError> {
        (self.rewrite_reply)(body, spelled)
    }
}

fn rewritten<'a, T: Pack + Unpack<'a>>(body: &'a [u8], spelled: bool) -> Result<Vec<u8>, PackError> {
    let value = pack::decode::<T>(body)?;
    let mut out = Vec::new();
    match spelled {
        true if pack::has_total(body) => pack::encode_spelled(&value, &mut out),
        true => pack::encode_spelled_ordinary(&value, &mut out),
        false => pack::encode(&value, &mut out),
    }
    Ok(out)
}

/// Returns whether Mooncake C++ lacks the calls of this class.
const fn is_extension(class: &str) -> bool {
    let (class, prefix) = (class.as_bytes(), b"mooncake_rs::");
    let mut at = 0;
    while at < prefix.len() {
        if at >= class.len() || class[at] != prefix[at] {
            return false;
        }
        at += 1;
    }
    true
}

calls! {
    /// All supported calls of Mooncake C++, in the order of the table.
    TABLE of "mooncake::WrappedMasterService", handled by MooncakeCalls;

    /// Returns the version of the master.
    ServiceReady() -> Answer<String>;
    /// Returns the location of objects on a shared file system.
    GetStorageConfig() -> Answer<StorageConfig>;
    /// Returns the directory alone, for older clients.
    GetFsdir() -> Answer<String>;
    /// Reports that the client is alive.
    Ping(client: ClientId) -> Answer<PingReply> [in Heartbeat, counter ping];

    /// Returns whether the object can be read, and grants a lease if so.
    ExistKey<'a>(key: &'a [u8], tenant: &'a str) -> Answer<bool> [in Sheddable, counter exist_key];
    /// [`ExistKey`] for many.
    BatchExistKey<'a>(keys: List<'a, &'a [u8]>, tenant: &'a str) -> Vec<Answer<bool>>
        [in Sheddable, batch_counter batch_exist_key];
    /// Returns whether the object can be read, and grants no lease.
    ProbeKey<'a>(key: &'a [u8], tenant: &'a str) -> Answer<bool> [in Sheddable, counter probe_key];
    /// [`ProbeKey`] for many. The policy may grant leases on some of them.
    BatchProbeKey<'a>(policy: ProbePolicy, keys: List<'a, &'a [u8]>, tenant: &'a str) -> Vec<Answer<bool>>
        [in Sheddable, batch_counter batch_probe_key];
    /// Returns the replicas of the object and grants a lease.
    GetReplicaList<'a>(key: &'a [u8], tenant: &'a str) -> Answer<ReplicaList>
        [in Sheddable, counter get_replica_list];
    /// [`GetReplicaList`] for many.
    BatchGetReplicaList<'a>(keys: List<'a, &'a [u8]>, tenant: &'a str) -> Vec<Answer<ReplicaList>>
        [in Sheddable, batch_counter batch_get_replica_list];
    /// [`GetReplicaList`] without a lease: the call counts as no read.
    GetReplicaListForAdmin<'a>(key: &'a [u8], tenant: &'a str) -> Answer<ReplicaList> [in Sheddable];
    /// [`GetReplicaListForAdmin`] for many.
    BatchGetReplicaListForAdmin<'a>(keys: List<'a, &'a [u8]>, tenant: &'a str) -> Vec<Answer<ReplicaList>>
        [in Sheddable];
    /// Returns the replicas of each object whose key matches.
    GetReplicaListByRegex<'a>(pattern: &'a str, tenant: &'a str) -> Answer<Pairs<Vec<u8>, Vec<Replica>>>
        [in Sheddable, counter get_replica_list_by_regex, visits_all];
    /// Returns the addresses of clients, taken from their segments.
    BatchQueryIp<'a>(clients: List<'a, ClientId>) -> Answer<Pairs<ClientId, Vec<String>>>
        [batch_counter batch_query_ip];
    /// Removes unleased objects that this client wrote, and returns their keys.
    BatchReplicaClear<'a>(
        keys: List<'a, &'a [u8]>,
        client: ClientId,
        segment_name: &'a str,
        tenant: &'a str,
    ) -> Answer<Vec<Vec<u8>>> [batch_counter batch_replica_clear];

    /// Grants space for a new object.
    PutStart<'a>(client: ClientId, key: &'a [u8], size: u64, config: Cow<'a, ReplicateConfig>, tenant: &'a str)
        -> Answer<Vec<Replica>> [in Sheddable, counter put_start];
    /// Marks the write as complete.
    PutEnd<'a>(client: ClientId, item: EndItem<'a>, replicas: ReplicaType, tenant: &'a str) -> Answer<()>
        [counter put_end];
    /// Cancels the write.
    PutRevoke<'a>(client: ClientId, key: &'a [u8], replicas: ReplicaType, tenant: &'a str) -> Answer<()>
        [counter put_revoke];
    /// [`PutStart`] for many.
    BatchPutStart<'a>(
        client: ClientId,
        keys: List<'a, &'a [u8]>,
        sizes: List<'a, u64>,
        config: Cow<'a, ReplicateConfig>,
        tenant: &'a str,
    ) -> Vec<Answer<Vec<Replica>>> [in Sheddable, batch_counter batch_put_start];
    /// [`PutEnd`] for many.
    BatchPutEnd<'a>(client: ClientId, items: List<'a, EndItem<'a>>, replicas: ReplicaType, tenant: &'a str)
        -> Vec<Answer<()>> [batch_counter batch_put_end];
    /// [`PutRevoke`] for many.
    BatchPutRevoke<'a>(client: ClientId, keys: List<'a, &'a [u8]>, replicas: ReplicaType, tenant: &'a str)
        -> Vec<Answer<()>> [batch_counter batch_put_revoke];

    /// Grants space for a new value of an object that may exist.
    UpsertStart<'a>(client: ClientId, key: &'a [u8], size: u64, config: Cow<'a, ReplicateConfig>, tenant: &'a str)
        -> Answer<Vec<Replica>> [in Sheddable, counter put_start];
    /// Marks the write as complete.
    UpsertEnd<'a>(client: ClientId, item: EndItem<'a>, replicas: ReplicaType, tenant: &'a str) -> Answer<()>
        [counter put_end];
    /// Cancels the write.
    UpsertRevoke<'a>(client: ClientId, key: &'a [u8], replicas: ReplicaType, tenant: &'a str) -> Answer<()>
        [counter put_revoke];
    /// [`UpsertStart`] for many.
    BatchUpsertStart<'a>(
        client: ClientId,
        keys: List<'a, &'a [u8]>,
        sizes: List<'a, u64>,
        config: Cow<'a, ReplicateConfig>,
        tenant: &'a str,
    ) -> Vec<Answer<Vec<Replica>>> [in Sheddable, batch_counter batch_upsert_start];
    /// [`UpsertEnd`] for many, of all replicas.
    BatchUpsertEnd<'a>(client: ClientId, items: List<'a, EndItem<'a>>, tenant: &'a str) -> Vec<Answer<()>>
        [batch_counter batch_upsert_end];
    /// [`UpsertRevoke`] for many, of all replicas.
    BatchUpsertRevoke<'a>(client: ClientId, keys: List<'a, &'a [u8]>, tenant: &'a str) -> Vec<Answer<()>>
        [batch_counter batch_upsert_revoke];

    /// Removes the object.
    Remove<'a>(key: &'a [u8], force: bool, tenant: &'a str) -> Answer<()> [counter remove];
    /// [`Remove`] for many.
    BatchRemove<'a>(keys: List<'a, &'a [u8]>, force: bool, tenant: &'a str) -> Vec<Answer<()>>
        [batch_counter batch_remove];
    /// Removes every object whose key matches, and returns their number.
    RemoveByRegex<'a>(pattern: &'a str, force: bool, tenant: &'a str) -> Answer<i64>
        [counter remove_by_regex, visits_all];
    /// Removes every object, and returns their number. The response has no field for an error.
    RemoveAll<'a>(force: bool, tenant: &'a str) -> i64 [counter remove_all, visits_all];

    /// Mounts memory.
    MountSegment<'a>(segment: Cow<'a, Segment>, client: ClientId) -> Answer<()>
        [counter mount_segment, visits_all];
    /// Mounts memory again.
    ReMountSegment<'a>(segments: List<'a, Segment>, client: ClientId) -> Answer<()>
        [counter remount_segment, visits_all];
    /// Unmounts memory.
    UnmountSegment(segment: SegmentId, client: ClientId) -> Answer<()> [counter unmount_segment];
    /// Unmounts memory after a grace period.
    GracefulUnmountSegment(segment: SegmentId, client: ClientId, grace_ms: u64) -> Answer<()>
        [counter unmount_segment];
    /// Returns the state of a segment by name.
    QuerySegmentStatus<'a>(segment_name: &'a str) -> Answer<SegmentStatus>;
    /// Returns the state of a segment.
    QuerySegmentStatusById(segment: SegmentId) -> Answer<SegmentStatus>;

    /// Hands out tasks to this client.
    FetchTasks(client: ClientId, limit: u64) -> Answer<Vec<Task>> [counter fetch_tasks];
    /// Requests more copies.
    CreateCopyTask<'a>(key: &'a [u8], tenant: &'a str, targets: List<'a, &'a str>) -> Answer<Uuid>
        [counter create_copy_task];
    /// Requests a move of a copy.
    CreateMoveTask<'a>(key: &'a [u8], tenant: &'a str, source: &'a str, target: &'a str) -> Answer<Uuid>
        [counter create_move_task];
    /// Returns the state of a task.
    QueryTask(task: Uuid) -> Answer<TaskInfo> [counter query_task];
    /// Reports the end of the task.
    MarkTaskToComplete(client: ClientId, report: TaskReport) -> Answer<()> [counter update_task];

    /// Grants space for copies.
    CopyStart<'a>(
        client: ClientId,
        key: &'a [u8],
        tenant: &'a str,
        source: &'a str,
        targets: List<'a, &'a str>,
    ) -> Answer<CopyPlan> [counter copy_start];
    /// Marks the copies as complete.
    CopyEnd<'a>(client: ClientId, key: &'a [u8], tenant: &'a str) -> Answer<()> [counter copy_end];
    /// Cancels the copies.
    CopyRevoke<'a>(client: ClientId, key: &'a [u8], tenant: &'a str) -> Answer<()>
        [counter copy_revoke];
    /// Grants space for a copy in another segment.
    MoveStart<'a>(client: ClientId, key: &'a [u8], tenant: &'a str, source: &'a str, target: &'a str)
        -> Answer<MovePlan> [counter move_start];
    /// Marks the copy as complete; the source may be dropped.
    MoveEnd<'a>(client: ClientId, key: &'a [u8], tenant: &'a str) -> Answer<()> [counter move_end];
    /// Cancels the move.
    MoveRevoke<'a>(client: ClientId, key: &'a [u8], tenant: &'a str) -> Answer<()>
        [counter move_revoke];

    /// [`CopyStart`] of a hot object.
    DynamicReplicaCopyStart<'a>(
        client: ClientId,
        key: &'a [u8],
        tenant: &'a str,
        source: &'a str,
        targets: List<'a, &'a str>,
        lease: Uuid,
        epoch: u64,
    ) -> Answer<CopyPlan> [counter copy_start];
    /// Marks the copies as complete.
    DynamicReplicaCopyEnd<'a>(client: ClientId, key: &'a [u8], tenant: &'a str, lease: Uuid, epoch: u64)
        -> Answer<()> [counter copy_end];
    /// Cancels the copies.
    DynamicReplicaCopyRevoke<'a>(client: ClientId, key: &'a [u8], tenant: &'a str, lease: Uuid, epoch: u64)
        -> Answer<()> [counter copy_revoke];

    /// Mounts a disk.
    MountLocalDiskSegment(client: ClientId, enabled: bool) -> Answer<()>;
    /// Unmounts the disk.
    UnmountLocalDiskSegment(client: ClientId) -> Answer<()> [visits_all];
    /// Hands out objects that the client shall write to its disk.
    OffloadObjectHeartbeat(client: ClientId, enabled: bool) -> Answer<Vec<OffloadItem>>;
    /// Reports objects that were written to disk.
    NotifyOffloadSuccess<'a>(
        client: ClientId,
        offloaded: List<'a, OffloadItem>,
        places: List<'a, StoredAt>,
    ) -> Answer<()>;
    /// Returns whether the client shall empty its disk.
    PollRemoveAll(client: ClientId) -> Answer<bool> [visits_all];
    /// Reports the capacity of the disk.
    ReportSsdCapacity(client: ClientId, bytes: i64) -> Answer<()>;
    /// Hands out objects that the client shall read back into memory.
    PromotionObjectHeartbeat(client: ClientId) -> Answer<Vec<OffloadItem>>;
    /// Grants space for an object that returns to memory.
    PromotionAllocStart<'a>(
        client: ClientId,
        key: &'a [u8],
        tenant: &'a str,
        size: u64,
        preferred: List<'a, &'a str>,
    ) -> Answer<PromotionPlan>;
    /// Reports a successful promotion.
    NotifyPromotionSuccess<'a>(client: ClientId, key: &'a [u8], tenant: &'a str) -> Answer<()>;
    /// Reports a failed promotion.
    NotifyPromotionFailure<'a>(client: ClientId, key: &'a [u8], tenant: &'a str) -> Answer<()>;
    /// Reserves the promotion of an object whose only readable replica is on the disk of the
    /// client. The client goes on with [`PromotionAllocStart`].
    RegisterPrefetchTask<'a>(client: ClientId, key: &'a [u8], tenant: &'a str) -> Answer<()> [in Sheddable];
    /// Reports that the client dropped the object from its disk or a shared one.
    EvictDiskReplica<'a>(client: ClientId, key: &'a [u8], tenant: &'a str, replicas: ReplicaType) -> Answer<()>
        [counter evict_disk_replica];
    /// [`EvictDiskReplica`] for many.
    BatchEvictDiskReplica<'a>(
        client: ClientId,
        keys: List<'a, &'a [u8]>,
        tenant: &'a str,
        replicas: ReplicaType,
    ) -> Vec<Answer<()>> [counter evict_disk_replica];

    /// Drops the replica of the object on the disk of the client, if it is still this one. Returns
    /// whether it was.
    EvictDiskReplicaIfCurrent<'a>(
        client: ClientId,
        key: &'a [u8],
        tenant: &'a str,
        replicas: ReplicaType,
        replica: ReplicaId,
    ) -> Answer<bool> [counter evict_disk_replica];

    /// Mounts an NVMe-oF target.
    MountNoFSegment<'a>(nof_segment: Cow<'a, NofSegment>, client: ClientId) -> Answer<()>
        [counter mount_nof_segment];
    /// Mounts NVMe-oF targets again.
    ReMountNoFSegment<'a>(nof_segments: List<'a, NofSegment>, client: ClientId) -> Answer<()>
        [counter remount_nof_segment];
    /// Unmounts an NVMe-oF target.
    UnmountNoFSegment(segment: SegmentId, client: ClientId) -> Answer<()> [counter unmount_nof_segment];
    /// Returns all NVMe-oF targets.
    GetAllNoFSegments() -> Answer<Vec<NofSegment>>;
    /// Returns the targets with a name, and their owners.
    GetNoFSegmentsByName<'a>(segment_name: &'a str) -> Answer<Vec<NofOwner>>;

    /// Begins to import a revision of weights. A repetition has no effect.
    BeginWeightImport<'a>(import: WeightImport, tenant: &'a str) -> Result<WeightRevision, WeightError>;
    /// Completes the import, if the objects of its group are those of the manifest.
    CommitWeightImport<'a>(commit: WeightCommit, tenant: &'a str) -> Result<WeightRevision, WeightError>;
    /// Cancels the import and removes its objects.
    AbortWeightImport<'a>(change: WeightChange, tenant: &'a str) -> Result<WeightRevision, WeightError>;
    /// Returns the record of a revision, and its leases.
    GetWeightRevision<'a>(query: WeightQuery, tenant: &'a str) -> Result<WeightView, WeightError>;
    /// Returns the revisions of a resource by pages.
    ListWeightRevisions<'a>(list: WeightList, tenant: &'a str) -> Result<WeightPage, WeightError>;
    /// Grants a lease on a revision.
    AcquireWeightRevisionLease<'a>(request: WeightLeaseRequest, tenant: &'a str)
        -> Result<WeightLease, WeightError>;
    /// Extends a lease on a revision.
    RenewWeightRevisionLease<'a>(renewal: WeightLeaseRenewal, tenant: &'a str)
        -> Result<WeightLease, WeightError>;
    /// Ends a lease on a revision. Repeating the call has no effect.
    ReleaseWeightRevisionLease<'a>(release: WeightLeaseRelease, tenant: &'a str) -> Result<(), WeightError>;
    /// Removes the objects of a revision.
    DeleteWeightRevision<'a>(change: WeightChange, tenant: &'a str) -> Result<WeightRevision, WeightError>;
    /// Begins to move the objects of a revision between memory and disk.
    StartWeightResidencyOperation<'a>(movement: WeightMoveRequest, tenant: &'a str)
        -> Result<WeightOperation, WeightError>;
    /// Returns the state of a move.
    QueryWeightOperation<'a>(operation: WeightOperationQuery, tenant: &'a str)
        -> Result<WeightOperation, WeightError>;
}

calls! {
    /// Calls that have other arguments in Mooncake C++ 0.3.13 than in [`TABLE`]. The hash of a body
    /// tells the form.
    EARLIER of "mooncake::WrappedMasterService", handled by EarlierCalls;

    /// [`BatchReplicaClear`] of objects of any tenant.
    ClearOfAnyTenant as "BatchReplicaClear"<'a>(
        keys: List<'a, &'a [u8]>,
        client: ClientId,
        segment_name: &'a str,
    ) -> Answer<Vec<Vec<u8>>> [batch_counter batch_replica_clear];
}

calls! {
    /// Calls that Mooncake C++ lacks. A master of Mooncake C++ responds with error 11, and the
    /// caller works without them.
    ADDED of "mooncake_rs::Master", handled by AddedCalls;

    /// [`BatchPutStart`] or [`BatchUpsertStart`] of a numbered write. A repetition returns the same
    /// space.
    StartWrites<'a>(
        client: ClientId,
        attempt: u64,
        replace: bool,
        keys: List<'a, &'a [u8]>,
        sizes: List<'a, u64>,
        config: Cow<'a, ReplicateConfig>,
        tenant: &'a str,
    ) -> Vec<Answer<Vec<Replica>>> [in Sheddable, counter put_start, batch_counter batch_put_start];
    /// Marks a numbered write as complete.
    EndWrites<'a>(
        client: ClientId,
        attempt: u64,
        replace: bool,
        items: List<'a, EndItem<'a>>,
        replicas: ReplicaType,
        tenant: &'a str,
    ) -> Vec<Answer<()>> [counter put_end, batch_counter batch_put_end];
    /// Cancels a numbered write.
    RevokeWrites<'a>(
        client: ClientId,
        attempt: u64,
        replace: bool,
        keys: List<'a, &'a [u8]>,
        replicas: ReplicaType,
        tenant: &'a str,
    ) -> Vec<Answer<()>> [counter put_revoke, batch_counter batch_put_revoke];
    /// Reports that the node at this endpoint did not respond.
    ReportUnreachable<'a>(client: ClientId, endpoint: &'a str) -> Answer<()>;
    /// Returns the changes in the client's segments.
    FetchInventory(client: ClientId, after: u64) -> Answer<InventoryPage> [remote_only];
    /// [`MountSegment`] of memory that holds objects.
    MountKeptSegment<'a>(segment: Cow<'a, Segment>, client: ClientId) -> Answer<()>
        [visits_all, remote_only];
    /// Reserves the space of objects that will be announced.
    KeepExtents<'a>(
        client: ClientId,
        segment: SegmentId,
        offsets: List<'a, u64>,
        lengths: List<'a, u64>,
        open: bool,
    ) -> Answer<()> [remote_only];
    /// Announces objects whose space was reserved and whose bytes are unchanged.
    AnnounceReplicas<'a>(client: ClientId, stored: List<'a, StoredReplica>) -> Vec<Answer<()>>
        [remote_only];
    /// Releases the space that is still reserved.
    ReleaseKept(client: ClientId, segment: SegmentId) -> Answer<()> [remote_only];
    /// Sends the longest promise of earlier masters. The response is the longest promise of this
    /// master, and the time to announce objects.
    ExchangePromise(client: ClientId, promise_ms: u64) -> Answer<Welcome> [remote_only];
    /// Moves the only replicas of objects away from a client that leaves. The response is the
    /// progress.
    DrainClient(client: ClientId) -> Answer<DrainProgress> [remote_only];
    /// Returns replicas that a segment held when its client expired, and that have been neither
    /// removed nor replaced since.
    FetchExpired(client: ClientId, segment: SegmentId, after: u64) -> Answer<InventoryPage>
        [visits_all, remote_only];
    /// [`AnnounceReplicas`] of replicas that [`FetchExpired`] listed.
    AnnounceExpired<'a>(client: ClientId, stored: List<'a, StoredReplica>) -> Vec<Answer<()>>
        [remote_only];
    /// [`PollRemoveAll`] and [`OffloadObjectHeartbeat`] in one, numbered and repeated until
    /// acknowledged, with the obsolete objects.
    FetchDiskWork(client: ClientId, begin: bool, done: u64) -> Answer<DiskWork>;
    /// Counts the keys from the front until the first one that cannot be read, and grants leases on
    /// these objects. The order of the keys is that of the blocks of a prompt.
    LocatePrefix<'a>(keys: List<'a, &'a [u8]>, with_replicas: bool, tenant: &'a str)
        -> Answer<ReadablePrefix> [in Sheddable, batch_counter locate_prefix];
    /// [`BatchGetReplicaList`] of objects that the caller has located and not read yet. The caller
    /// names one replica of each. An object whose first read is the last one is located again
    /// under its lease. It misses, and is not read, if it has no such replica.
    LocateAgain<'a>(keys: List<'a, &'a [u8]>, located: List<'a, ReplicaId>, tenant: &'a str)
        -> Vec<Answer<ReplicaList>> [in Sheddable, batch_counter batch_get_replica_list];
    /// [`StartWrites`] with hints.
    StartHintedWrites<'a>(
        client: ClientId,
        attempt: u64,
        replace: bool,
        keys: List<'a, &'a [u8]>,
        sizes: List<'a, u64>,
        config: Cow<'a, ReplicateConfig>,
        hints: Cow<'a, PutHints>,
        tenant: &'a str,
    ) -> Vec<Answer<Vec<Replica>>> [in Sheddable, counter put_start, batch_counter batch_put_start];
    /// [`FetchInventory`] with the objects that end by themselves. [`FetchInventory`] leaves these
    /// out.
    FetchTimedInventory(client: ClientId, after: u64) -> Answer<TimedInventoryPage> [remote_only];
    /// Returns the number of mounted segments.
    CountSegments() -> Answer<u64>;
    /// [`GetReplicaListByRegex`] by pages. Grants leases on the objects of the page.
    LocateMatching<'a>(pattern: &'a str, position: u64, tenant: &'a str) -> Answer<MatchingPage>
        [in Sheddable, counter get_replica_list_by_regex, visits_all];
    /// [`AnnounceReplicas`] with the lifetimes of objects.
    AnnounceTimed<'a>(client: ClientId, stored: List<'a, StoredReplica>, lifetimes: List<'a, ItemLifetime>)
        -> Vec<Answer<()>> [remote_only];
    /// Sends the order of the masters that the client has met or knows from others. The response is
    /// what this master knows of it.
    ExchangeEpochs<'a>(client: ClientId, epochs: List<'a, EpochPair>) -> Answer<Vec<EpochPair>>
        [remote_only];
    /// Returns replicas of earlier masters in a segment that still count, although the time to
    /// announce replicas of earlier masters is over. [`AnnounceExpired`] announces them.
    FetchUnclaimed(client: ClientId, segment: SegmentId, after: u64) -> Answer<InventoryPage>
        [visits_all, remote_only];
    /// [`UnmountSegment`] of memory that the same client mounts again with its objects, as the next
    /// process of a segment file does.
    HandOverSegment(segment: SegmentId, client: ClientId) -> Answer<()>
        [counter unmount_segment, remote_only];
    /// Returns memory of the client to zero, before writers that may leave bytes out receive it.
    FetchZeroWork<'a>(client: ClientId, zeroed: List<'a, u64>) -> Answer<ZeroWork>;
    /// [`CopyStart`] of a numbered copy, or with a token [`DynamicReplicaCopyStart`]. A repetition
    /// returns the same space. The start of a copy that was ended or revoked is refused.
    StartCopy<'a>(
        client: ClientId,
        attempt: u64,
        key: &'a [u8],
        tenant: &'a str,
        source: &'a str,
        targets: List<'a, &'a str>,
        lease: Uuid,
        epoch: u64,
    ) -> Answer<CopyPlan> [counter copy_start];
    /// Marks a numbered copy as complete, and no other copy of the object.
    EndCopy<'a>(client: ClientId, attempt: u64, key: &'a [u8], tenant: &'a str, lease: Uuid, epoch: u64)
        -> Answer<()> [counter copy_end];
    /// Cancels a numbered copy, whether its start has arrived or not.
    RevokeCopy<'a>(client: ClientId, attempt: u64, key: &'a [u8], tenant: &'a str, lease: Uuid, epoch: u64)
        -> Answer<()> [counter copy_revoke];
    /// [`MoveStart`] of a numbered move, like [`StartCopy`].
    StartMove<'a>(
        client: ClientId,
        attempt: u64,
        key: &'a [u8],
        tenant: &'a str,
        source: &'a str,
        target: &'a str,
    ) -> Answer<MovePlan> [counter move_start];
    /// Marks a numbered move as complete, like [`EndCopy`].
    EndMove<'a>(client: ClientId, attempt: u64, key: &'a [u8], tenant: &'a str) -> Answer<()>
        [counter move_end];
    /// Cancels a numbered move, like [`RevokeCopy`].
    RevokeMove<'a>(client: ClientId, attempt: u64, key: &'a [u8], tenant: &'a str) -> Answer<()>
        [counter move_revoke];
    /// [`PromotionAllocStart`] of a numbered promotion. A repetition returns the same space.
    StartPromotion<'a>(
        client: ClientId,
        attempt: u64,
        key: &'a [u8],
        tenant: &'a str,
        size: u64,
        preferred: List<'a, &'a str>,
    ) -> Answer<PromotionPlan>;
    /// [`NotifyPromotionSuccess`] of a numbered promotion, and of no other one.
    EndPromotion<'a>(client: ClientId, attempt: u64, key: &'a [u8], tenant: &'a str) -> Answer<()>;
    /// [`NotifyPromotionFailure`] of a numbered promotion, and of no other one.
    RevokePromotion<'a>(client: ClientId, attempt: u64, key: &'a [u8], tenant: &'a str) -> Answer<()>;
    /// [`NotifyOffloadSuccess`] about the work with this number. A report about earlier work has no
    /// effect.
    ReportOffloaded<'a>(
        client: ClientId,
        work: u64,
        offloaded: List<'a, OffloadItem>,
        places: List<'a, StoredAt>,
    ) -> Answer<()>;
    /// [`BatchEvictDiskReplica`] of the disk of the client, during the work with this number. A
    /// report from the time of earlier work has no effect.
    ReportDropped<'a>(client: ClientId, work: u64, keys: List<'a, &'a [u8]>, tenant: &'a str)
        -> Vec<Answer<()>> [counter evict_disk_replica];
    /// [`BatchGetReplicaList`] for a read with a number, whose reader reports its end. All earlier
    /// reads of this reader up to the number `ended` have ended. With replicas, [`LocateAgain`].
    LocateForRead<'a>(
        reader: u64,
        number: u64,
        ended: u64,
        keys: List<'a, &'a [u8]>,
        located: List<'a, ReplicaId>,
        tenant: &'a str,
    ) -> Vec<Answer<ReplicaList>>
        [in Sheddable, counter get_replica_list, batch_counter batch_get_replica_list];
    /// Reports that all reads of this reader up to the number `ended` have ended. Space of removed
    /// objects is then free before the leases end. Returns the time in milliseconds after which the
    /// reader reports again.
    ReportReads(reader: u64, ended: u64) -> Answer<u64>;
    /// Returns whether waiting may help puts of these sizes that found no space. Upserts have keys,
    /// because one may be written over a value of its size. The name is that of the segment that
    /// the puts prefer, or empty.
    CheckSpace<'a>(
        keys: List<'a, &'a [u8]>,
        sizes: List<'a, u64>,
        segment_name: &'a str,
        tenant: &'a str,
    ) -> Answer<SpaceOutlook>;
    /// Reports objects of earlier masters that the client is about to announce. Returns the form of
    /// the keys of this master, to which the client converts those of the objects.
    ExchangeKeyForm(client: ClientId, held: Option<HeldObjects>) -> Answer<MasterKeys> [remote_only];
    /// Asks the master to connect to the handshake port that the client advertises, and returns the
    /// outcome as far as it is known. An embedded master refuses the call.
    CheckAddress<'a>(client: ClientId, endpoint: &'a str, instance: &'a str, again: bool)
        -> Answer<AddressCheck> [remote_only];
}

calls! {
    /// Calls to the owner of a disk, as in Mooncake C++.
    DISK_TABLE of "mooncake::RealClient";

    /// Reads objects of a disk into memory for the caller. Keys are scoped: the tenant's name, a
    /// NUL and the key.
    LendObjects as "batch_get_offload_object"<'a>(keys: List<'a, &'a [u8]>, sizes: List<'a, i64>) -> Answer<Lent>;
    /// Returns the objects to their owner, and reports whether they were still in place.
    ReturnObjects as "release_offload_buffer"(batch: u64) -> bool;
    /// [`LendObjects`] for ranges of objects. [`ReturnObjects`] returns them. Mooncake C++ 0.3.13
    /// lacks this call.
    LendRanges as "batch_get_offload_object_ranges"<'a>(
        keys: List<'a, &'a [u8]>,
        offsets: List<'a, i64>,
        lengths: List<'a, i64>,
        sizes: List<'a, i64>,
    ) -> Answer<Lent>;
    /// Checks whether objects are still on the disk. The owner lets the master drop the replicas of
    /// those that are gone. Mooncake C++ 0.3.13 lacks this call.
    VerifyReplicas as "verify_disk_replica"<'a>(
        tenant: &'a str,
        keys: List<'a, &'a [u8]>,
        resolved_tenant: String [since 1],
        replica_ids: Vec<u64> [since 2],
    ) -> Answer<VerifiedReplicas>;
    /// Requests that the owner brings objects back to memory. The owner registers and promotes them
    /// after the response. Returns whether the owner took the request. Mooncake C++ 0.3.13 lacks
    /// this call.
    PrefetchObjects as "prefetch_offload_object"<'a>(
        keys: List<'a, &'a [u8]>,
        sizes: List<'a, i64>,
        tenant: &'a str,
    ) -> bool;
}

calls! {
    /// Calls to the owner of a disk that Mooncake C++ lacks. An owner of Mooncake C++ responds with
    /// error 11, and the caller requests whole objects.
    DISK_ADDED of "mooncake_rs::Disk";

    /// [`LendObjects`] for parts of objects. [`ReturnObjects`] returns them.
    LendParts<'a>(
        keys: List<'a, &'a [u8]>,
        sizes: List<'a, u64>,
        starts: List<'a, u64>,
        counts: List<'a, u64>,
    ) -> Answer<LentParts>;
}

calls! {
    /// Calls of an IPC client to the `mooncake_client` process of its host. Mooncake C++ has other
    /// ones.
    ///
    /// The first call of a connection determines its use: [`Attach`] begins the control connection
    /// of a client, and [`Join`] a connection for calls about objects. No message contains a value:
    /// calls name ranges of memory that both processes map.
    IPC_TABLE of "mooncake_rs::Ipc", awaited by IpcCalls;

    /// Registers the client for as long as the connection is open.
    Attach() -> Reported<Attached>;
    /// Keeps the control connection open.
    KeepAlive() -> Reported<()>;
    /// Assigns the connection to a registered client.
    Join(guest: Uuid) -> Reported<()>;
    /// Shares memory. The file of the memory is attached to the hello of the connection, which
    /// closes after the response.
    ShareMemory(guest: Uuid, memory: u32, offset: u64, len: u64) -> Reported<()>;
    /// Ends the use of shared memory; later calls do not name it.
    UnshareMemory(memory: u32) -> Reported<()>;

    /// Stores objects. Returns for each whether the key existed.
    WriteObjects<'a>(
        replace: bool,
        config: Cow<'a, ReplicateConfig>,
        hints: Cow<'a, PutHints>,
        objects: List<'a, ObjectPieces<'a>>,
    ) -> Reported<Vec<Reported<bool>>>;
    /// Reads objects to the start of a memory range each. Returns their lengths.
    ReadObjects<'a>(objects: List<'a, ObjectSink<'a>>) -> Reported<Vec<Reported<Option<u64>>>>;
    /// Reads an object of unknown length if it fits into the memory range. Otherwise the object can
    /// be read by its number.
    FetchObject<'a>(key: &'a [u8], into: MemoryRange) -> Reported<Option<LocatedObject>>;
    /// Locates objects and grants leases on them.
    LocateObjects<'a>(keys: List<'a, &'a [u8]>) -> Reported<Vec<Reported<Option<LocatedObject>>>>;
    /// Reads ranges of located objects.
    ReadRanges<'a>(ranges: List<'a, ObjectRange>, relocates: bool) -> Reported<Vec<Reported<()>>>;
    /// Returns for each key whether the object can be read.
    ObjectsExist<'a>(keys: List<'a, &'a [u8]>) -> Reported<Vec<Reported<bool>>>;
    /// Brings objects that are only on disks back to memory, in the background. Returns whether the
    /// request was taken.
    RequestPrefetch<'a>(keys: List<'a, &'a [u8]>) -> Reported<bool>;
    /// [`ObjectsExist`] without leases but those of the policy.
    ProbeObjects<'a>(policy: ProbePolicy, keys: List<'a, &'a [u8]>) -> Reported<Vec<Reported<bool>>>;
    /// Returns the number of keys from the front that can be read.
    CountPrefixObjects<'a>(keys: List<'a, &'a [u8]>) -> Reported<u64>;
    /// [`LocateObjects`] from the front until the first key that cannot be read.
    LocatePrefixObjects<'a>(keys: List<'a, &'a [u8]>) -> Reported<Vec<LocatedObject>>;
    /// [`ListReplicas`] from the front until the first key that cannot be read.
    ListPrefixReplicas<'a>(keys: List<'a, &'a [u8]>) -> Reported<Vec<ReplicaList>>;
    /// Returns the replicas of objects.
    ListReplicas<'a>(keys: List<'a, &'a [u8]>) -> Reported<Vec<Reported<Option<ReplicaList>>>>;
    /// Removes objects. Returns for each whether it existed.
    RemoveObjects<'a>(keys: List<'a, &'a [u8]>, force: bool) -> Reported<Vec<Reported<bool>>>;
    /// Removes every object whose key matches. Returns their number.
    RemoveMatching<'a>(pattern: &'a str, force: bool) -> Reported<u64>;
    /// Removes every object. Returns their number.
    RemoveEvery(force: bool) -> Reported<u64>;
    /// Requests more copies of an object. Returns the number of the task.
    CopyObject<'a>(key: &'a [u8], targets: List<'a, &'a str>) -> Reported<Uuid>;
    /// Requests a move of a copy. Returns the number of the task.
    MoveObject<'a>(key: &'a [u8], source: &'a str, target: &'a str) -> Reported<Uuid>;
    /// Returns the state of a task.
    FindTask(task: Uuid) -> Reported<TaskInfo>;
    /// Returns whether the master responds.
    CheckHealth() -> bool;
    /// Ends the use of located objects; later calls do not name their numbers.
    ReleaseObjects<'a>(objects: List<'a, u64>) -> Reported<()>;
}
