//! Calls from a client to a master, independent of where the master runs.
//!
//! The embedded master implements these traits directly, without sockets. `RemoteMaster` implements
//! them by RPC. Every call takes a batch. An RPC for a batch of one item is the single call of
//! Mooncake C++, where there is such a call. The RPC server does not use these traits: it calls the
//! synchronous methods of the master.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use mooncake_core::alloc::Extent;
use mooncake_core::clock::SharedClock;
use mooncake_core::ids::{ClientId, ObjectKey, SegmentId, Uuid};
use mooncake_core::replica::{Replica, ReplicaList, ReplicaType, ReplicateConfig, Segment};
use mooncake_core::{Error, ErrorCode, Result};

use crate::wire::{
    CopyPlan, DiskWork, DrainProgress, InventoryPage, MovePlan, OffloadItem, StorageConfig, StoredAt,
    StoredReplica, Task, TaskInfo, TaskKind, TaskReport, Welcome,
};
pub use crate::wire::{EndItem, PingReply};

/// Tenant of every call if the cluster has no tenants.
pub const DEFAULT_TENANT: &str = "default";

/// Object of a put or upsert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutItem<'a> {
    /// Key of the object.
    pub key: &'a [u8],
    /// Length of the object in bytes.
    pub len: u64,
}

/// Behaviour of a write whose key exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WriteMode {
    /// The write is refused with `OBJECT_ALREADY_EXISTS`.
    Put,
    /// The write replaces the object.
    Upsert,
}

/// Origin of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller<'a> {
    /// Client that makes the call.
    pub client: ClientId,
    /// Tenant of the objects; [`DEFAULT_TENANT`] if the cluster has no tenants.
    pub tenant: &'a str,
    /// Number of the write that the call belongs to, drawn at random for each put start; 0 for
    /// none. See [`ObjectService::fences_writes`].
    pub attempt: u64,
}

/// Identity of a copy of a hot object, as the task states it. The nil token stands for an ordinary
/// copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyToken {
    /// Number of the master's decision.
    pub lease: Uuid,
    /// Version of the object's value at the decision.
    pub epoch: u64,
}

impl CopyToken {
    /// Returns whether the token stands for an ordinary copy.
    pub fn is_nil(self) -> bool {
        self.lease == Uuid::default()
    }
}

/// Calls about objects. Each call may be repeated if its response was lost; the outcome is the
/// same.
///
/// Batches return one result per item, in order. The outer error means that no result is known,
/// because no valid response arrived.
#[async_trait]
pub trait ObjectService: Debug + Send + Sync + 'static {
    /// Returns whether this master respects [`Caller::attempt`].
    ///
    /// If it does, a put start repeated with the same number gets the same grant, and an end or
    /// revoke affects only the write with its number. If it does not, a client must neither repeat
    /// a put start nor send an end so late that another write may use the key.
    fn fences_writes(&self) -> bool;

    /// Returns for each key whether it can be read now. Grants a lease on those that can.
    async fn exist(&self, tenant: &str, keys: &[&[u8]]) -> Result<Vec<Result<bool>>>;

    /// Returns the replicas of each object and grants a lease on them.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY`.
    async fn locate(&self, tenant: &str, keys: &[&[u8]]) -> Result<Vec<Result<ReplicaList>>>;

    /// Grants space for each object.
    async fn put_start(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        items: &[PutItem<'_>],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<Vec<Replica>>>>;

    /// Marks each object as completely written: it is readable from now on.
    async fn put_end(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        items: &[EndItem<'_>],
        replicas: ReplicaType,
    ) -> Result<Vec<Result<()>>>;

    /// Cancels the write of each object. A failed upsert keeps the old value.
    async fn put_revoke(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        keys: &[&[u8]],
        replicas: ReplicaType,
    ) -> Result<Vec<Result<()>>>;

    /// Removes each object; `force` overrides leases. Readers that hold a lease never see the bytes
    /// of another object.
    async fn remove(&self, tenant: &str, keys: &[&[u8]], force: bool) -> Result<Vec<Result<()>>>;

    /// Removes every object whose key matches the pattern, and returns their number. Objects in use
    /// are skipped.
    async fn remove_matching(&self, tenant: &str, pattern: &str, force: bool) -> Result<u64>;

    /// Removes every object, and returns their number. Objects in use are skipped.
    async fn remove_all(&self, tenant: &str, force: bool) -> Result<u64>;
}

/// Calls about clients and their segments. Each call may be repeated if its response was lost.
#[async_trait]
pub trait SegmentService: Debug + Send + Sync + 'static {
    /// Returns the version of the master. A client compares it before any other call.
    async fn version(&self) -> Result<String>;

    /// Reports that the client is alive.
    async fn ping(&self, client: ClientId) -> Result<PingReply>;

    /// Offers memory for objects.
    async fn mount(&self, client: ClientId, segment: &Segment) -> Result<()>;

    /// Offers memory again after the master forgot the client.
    async fn remount(&self, client: ClientId, segments: &[Segment]) -> Result<()>;

    /// Withdraws memory: its objects are gone at once, and its transport refuses later requests.
    async fn unmount(&self, client: ClientId, segment: SegmentId) -> Result<()>;

    /// Withdraws a segment after `grace`. Until then its objects are readable, and no object is
    /// added.
    async fn unmount_after(&self, client: ClientId, segment: SegmentId, grace: Duration) -> Result<()>;

    /// Returns the address of the current leader, if it is known and another master may lead later.
    fn leader(&self) -> Option<Arc<str>> {
        None
    }

    /// Returns as soon as the [leader](Self::leader) is known and differs from `than`. Never
    /// returns if there is only one master.
    async fn another_leads(&self, than: Option<&str>) {
        let _ = than;
        std::future::pending().await
    }

    /// Reports that the node at this endpoint did not respond to the caller.
    ///
    /// The call is a hint: the master places nothing on that node until its next ping. Mooncake C++
    /// lacks this call, so an error may be ignored.
    async fn report_unreachable(&self, client: ClientId, endpoint: &str) -> Result<()> {
        let _ = (client, endpoint);
        Ok(())
    }
}

/// Calls about copies and moves between segments. The defaults are those of a master without
/// copies: it has no tasks, and refuses requests with `NOT_SUPPORTED`.
#[async_trait]
pub trait TaskService: Debug + Send + Sync + 'static {
    /// Requests another copy in each of the named segments.
    async fn create_copy(&self, _tenant: &str, _key: &[u8], _targets: &[&str]) -> Result<Uuid> {
        Err(no_copies())
    }

    /// Requests a move of the copy in one segment to another segment.
    async fn create_move(&self, _tenant: &str, _key: &[u8], _source: &str, _target: &str) -> Result<Uuid> {
        Err(no_copies())
    }

    /// Returns the state of a task.
    ///
    /// # Errors
    /// `TASK_NOT_FOUND`.
    async fn task(&self, _task: Uuid) -> Result<TaskInfo> {
        Err(no_copies())
    }

    /// Removes unleased copies that the caller wrote: those in the named segment, or all for an
    /// empty name. Returns the keys of the affected objects.
    async fn clear_replicas(
        &self,
        _client: ClientId,
        _keys: &[&[u8]],
        _segment: &str,
    ) -> Result<Vec<ObjectKey>> {
        Err(Error::new(ErrorCode::NotSupported, "cannot clear replicas: this master has no such call"))
    }

    /// Hands out tasks to this client, which owns them from now on.
    async fn fetch_tasks(&self, _client: ClientId, _limit: u64) -> Result<Vec<Task>> {
        Ok(Vec::new())
    }

    /// Reports the end of a task.
    async fn complete_task(&self, _client: ClientId, _report: &TaskReport) -> Result<()> {
        Err(no_copies())
    }

    /// Grants space for copies in the named segments. `token` is that of the task for a copy of a
    /// hot object, and nil otherwise; the same holds for the end and the revoke.
    async fn copy_start(
        &self,
        _caller: Caller<'_>,
        _key: &[u8],
        _source: &str,
        _targets: &[&str],
        _token: CopyToken,
    ) -> Result<CopyPlan> {
        Err(no_copies())
    }

    /// Grants space for a copy in another segment.
    async fn move_start(
        &self,
        _caller: Caller<'_>,
        _key: &[u8],
        _source: &str,
        _target: &str,
    ) -> Result<MovePlan> {
        Err(no_copies())
    }

    /// Marks a copy or move as completely written.
    async fn replication_end(
        &self,
        _caller: Caller<'_>,
        _kind: TaskKind,
        _key: &[u8],
        _token: CopyToken,
    ) -> Result<()> {
        Err(no_copies())
    }

    /// Cancels a copy or move.
    async fn replication_revoke(
        &self,
        _caller: Caller<'_>,
        _kind: TaskKind,
        _key: &[u8],
        _token: CopyToken,
    ) -> Result<()> {
        Err(no_copies())
    }
}

fn no_copies() -> Error {
    Error::new(ErrorCode::NotSupported, "this master makes no copies")
}

/// Calls by which the objects in a client's memory outlive the master. The defaults return
/// `NOT_SUPPORTED`: Mooncake C++ lacks these calls, and an embedded master ends with its clients.
#[async_trait]
pub trait InventoryService: Debug + Send + Sync + 'static {
    /// Returns the changes in the client's segments after change number `after`, which is 0 for a
    /// client that has received none. Segments that are mounted after the first such call are
    /// recorded.
    async fn inventory(&self, _client: ClientId, _after: u64) -> Result<InventoryPage> {
        Err(no_inventory())
    }

    /// Offers memory that holds objects. No new object is placed there until the space of the old
    /// ones is reserved.
    async fn mount_kept(&self, _client: ClientId, _segment: &Segment) -> Result<()> {
        Err(no_inventory())
    }

    /// Reserves the space of objects that will be announced; `open` marks the last call.
    async fn keep(
        &self,
        _client: ClientId,
        _segment: SegmentId,
        _extents: &[Extent],
        _open: bool,
    ) -> Result<()> {
        Err(no_inventory())
    }

    /// Announces objects whose space was reserved and whose bytes are unchanged.
    async fn announce(&self, _client: ClientId, _stored: &[StoredReplica]) -> Result<Vec<Result<()>>> {
        Err(no_inventory())
    }

    /// Releases the space that is still reserved.
    async fn release_kept(&self, _client: ClientId, _segment: SegmentId) -> Result<()> {
        Err(no_inventory())
    }

    /// Sends the master the longest time for which leases or grants of earlier masters may still
    /// hold. Returns the longest time for which leases or grants of this master may hold, and when
    /// to announce objects.
    async fn exchange_promise(&self, _client: ClientId, _promise: Duration) -> Result<Welcome> {
        Err(no_inventory())
    }

    /// Requests that the master moves the only replicas of objects away from a client that leaves,
    /// as far as other clients have free space. The first call begins the move; each call returns
    /// its progress.
    async fn drain_client(&self, _client: ClientId) -> Result<DrainProgress> {
        Err(no_inventory())
    }

    /// Returns replicas that a segment held when its client expired, and that have been neither
    /// removed nor replaced since, from page `after` on.
    async fn expired(&self, _client: ClientId, _segment: SegmentId, _after: u64) -> Result<InventoryPage> {
        Err(no_inventory())
    }

    /// Announces replicas that [`InventoryService::expired`] listed. Their space was reserved.
    async fn announce_expired(
        &self,
        _client: ClientId,
        _stored: &[StoredReplica],
    ) -> Result<Vec<Result<()>>> {
        Err(no_inventory())
    }
}

fn no_inventory() -> Error {
    Error::new(ErrorCode::NotSupported, "this master keeps no inventory")
}

/// Calls of clients that store objects on a disk of their own. The defaults are those of a master
/// that uses no disks: `UNABLE_OFFLOAD`.
#[async_trait]
pub trait DiskService: Debug + Send + Sync + 'static {
    /// Offers a disk, and states whether it accepts objects.
    async fn mount_disk(&self, _client: ClientId, _enabled: bool) -> Result<()> {
        Err(no_disks())
    }

    /// Withdraws the disk: its objects are gone at once.
    async fn unmount_disk(&self, _client: ClientId) -> Result<()> {
        Err(no_disks())
    }

    /// Reports the capacity of the disk in bytes.
    async fn disk_capacity(&self, _client: ClientId, _bytes: u64) -> Result<()> {
        Err(no_disks())
    }

    /// Hands out the objects that the client shall write to its disk, each of them once.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` if the client has offered no disk or has expired.
    async fn to_offload(&self, _client: ClientId, _enabled: bool) -> Result<Vec<OffloadItem>> {
        Err(no_disks())
    }

    /// Reports objects that were written, each with its location; a length of -1 stands for a
    /// failure. Before the first [`to_offload`](Self::to_offload) the call reports objects that
    /// survived a restart.
    async fn offloaded(&self, _client: ClientId, _items: &[OffloadItem], _places: &[StoredAt]) -> Result<()> {
        Err(no_disks())
    }

    /// Returns whether the client shall empty its disk.
    async fn must_clear_disk(&self, _client: ClientId) -> Result<bool> {
        Err(no_disks())
    }

    /// Combines [`must_clear_disk`](Self::must_clear_disk) and [`to_offload`](Self::to_offload),
    /// and lists objects on the disk that are obsolete: replaced, removed, or never accepted.
    ///
    /// The work is numbered and repeated until the client acknowledges it. `begin` is set once,
    /// before the client reports the objects that survived a restart; that response is empty.
    /// Mooncake C++ lacks this call (`NOT_SUPPORTED`): there a lost response loses its work, and a
    /// removed object may return when the client restarts.
    async fn disk_work(&self, _client: ClientId, _begin: bool, _done: u64) -> Result<DiskWork> {
        Err(Error::new(ErrorCode::NotSupported, "cannot fetch disk work: this master has no such call"))
    }

    /// Reports that the client has dropped objects of a tenant from its disk.
    async fn dropped_from_disk(
        &self,
        _client: ClientId,
        _tenant: &str,
        _keys: &[&[u8]],
    ) -> Result<Vec<Result<()>>> {
        Err(no_disks())
    }

    /// Returns the shared folder of object files that all clients reach; an empty path if there is
    /// none.
    async fn storage(&self) -> Result<StorageConfig> {
        Ok(StorageConfig { fs_dir: String::new(), evict: true, quota: 0 })
    }

    /// Reports that the files of these objects of a tenant are missing or unreadable.
    async fn dropped_files(
        &self,
        _client: ClientId,
        _tenant: &str,
        _keys: &[&[u8]],
    ) -> Result<Vec<Result<()>>> {
        Err(no_disks())
    }

    /// Hands out the objects that the client shall read back into memory, each of them once.
    async fn to_promote(&self, _client: ClientId) -> Result<Vec<OffloadItem>> {
        Err(no_disks())
    }

    /// Grants space for an object that returns to memory, preferably in one of the named segments.
    async fn promotion_start(
        &self,
        _caller: Caller<'_>,
        _key: &[u8],
        _len: u64,
        _preferred: &[&str],
    ) -> Result<Replica> {
        Err(no_disks())
    }

    /// Reports the end of a promotion and whether it succeeded.
    async fn promotion_end(&self, _caller: Caller<'_>, _key: &[u8], _done: bool) -> Result<()> {
        Err(no_disks())
    }
}

fn no_disks() -> Error {
    Error::new(ErrorCode::UnableOffload, "this master does not offload objects to disks of clients")
}

/// All calls from a client to a master.
pub trait MasterApi: ObjectService + SegmentService + TaskService + InventoryService + DiskService {}

impl<T: ObjectService + SegmentService + TaskService + InventoryService + DiskService> MasterApi for T {}

/// A master in the process of its clients.
pub trait EmbeddedMaster: MasterApi {
    /// Returns the master's clock, which becomes that of its clients.
    fn clock(&self) -> &SharedClock;

    /// Runs the work that is due. Clients call it at short intervals while one of them lives.
    fn do_due_work(&self);
}
