//! What a client asks of a master: the calls, whoever answers them.
//!
//! The master answers them itself (embedded, no sockets) and so does the RPC client that stands for a remote one.
//! Every call takes a batch; on the wire a batch of one travels as the existing system's single call, where it has one.
//! The RPC server does not come through here: it calls the master's own synchronous methods.

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
    CopyPlan, DiskWork, InventoryPage, MovePlan, OffloadItem, StorageConfig, StoredAt, StoredReplica, Task,
    TaskInfo, TaskKind, TaskReport, Welcome,
};

/// Tenant of every call when the cluster has none.
pub const DEFAULT_TENANT: &str = "default";

/// One object of a put or upsert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutItem<'a> {
    /// Its key.
    pub key: &'a [u8],
    /// Its length in bytes.
    pub len: u64,
}

/// One object whose bytes have landed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndItem<'a> {
    /// Its key.
    pub key: &'a [u8],
    /// CRC-64 of its value, when the writer computed one.
    pub checksum: Option<u64>,
}

/// Whether a write may replace an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WriteMode {
    /// Refused with `OBJECT_ALREADY_EXISTS` when the key is there.
    Put,
    /// Replaces it.
    Upsert,
}

/// Who asks, for whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller<'a> {
    /// The client.
    pub client: ClientId,
    /// The tenant; [`DEFAULT_TENANT`] when the cluster has none.
    pub tenant: &'a str,
    /// Which write the call belongs to: a number drawn for each put start, 0 for none. See
    /// [`ObjectService::fences_writes`].
    pub attempt: u64,
}

/// Which copy of a hot object a call is about. The master says so in the task; nil is no such copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyToken {
    /// Number of the master's decision.
    pub lease: Uuid,
    /// Which value of the object it was made about.
    pub epoch: u64,
}

impl CopyToken {
    /// Whether it is about an ordinary copy.
    pub fn is_nil(self) -> bool {
        self.lease == Uuid::default()
    }
}

/// What the master thinks of a client that pinged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PingReply {
    /// Changes when the leader changes.
    pub view: i64,
    /// The master does not know this client (it was silent too long, or the master is a new one): it must mount again.
    pub need_remount: bool,
}

/// Calls about objects. Each may be repeated when its answer was lost; the outcome is the same.
///
/// Batches answer item by item, in order; the outer error means that nothing is known (no answer, or none that counts).
#[async_trait]
pub trait ObjectService: Debug + Send + Sync + 'static {
    /// Whether this master heeds [`Caller::attempt`]: a put start repeated with the same number gets the same grant, and an
    /// end or revoke touches no other write of the key than the one of its number. One that does not must not be asked twice
    /// for space, nor told of the end of a write so late that the key may be under another one.
    fn fences_writes(&self) -> bool;

    /// Whether each key can be read now. Grants a lease on those that can.
    async fn exist(&self, tenant: &str, keys: &[&[u8]]) -> Result<Vec<Result<bool>>>;

    /// Where each object lies, and a lease on it. `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY`.
    async fn locate(&self, tenant: &str, keys: &[&[u8]]) -> Result<Vec<Result<ReplicaList>>>;

    /// Grants space to write each object to.
    async fn put_start(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        items: &[PutItem<'_>],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<Vec<Replica>>>>;

    /// The bytes of each object have landed: readable from now on.
    async fn put_end(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        items: &[EndItem<'_>],
        replicas: ReplicaType,
    ) -> Result<Vec<Result<()>>>;

    /// The write of each object failed; a failed upsert keeps the old value.
    async fn put_revoke(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        keys: &[&[u8]],
        replicas: ReplicaType,
    ) -> Result<Vec<Result<()>>>;

    /// Drops each object; `force` overrides leases (readers that hold one still never see other bytes).
    async fn remove(&self, tenant: &str, keys: &[&[u8]], force: bool) -> Result<Vec<Result<()>>>;

    /// Drops every object whose key the pattern finds a match in; how many. Those in use are skipped.
    async fn remove_matching(&self, tenant: &str, pattern: &str, force: bool) -> Result<u64>;

    /// Drops every object; how many. Those in use are skipped.
    async fn remove_all(&self, tenant: &str, force: bool) -> Result<u64>;
}

/// Calls about clients and their segments. Each may be repeated when its answer was lost.
#[async_trait]
pub trait SegmentService: Debug + Send + Sync + 'static {
    /// Version of the master; a client compares it before anything else.
    async fn version(&self) -> Result<String>;

    /// The client lives.
    async fn ping(&self, client: ClientId) -> Result<PingReply>;

    /// Offers memory for objects.
    async fn mount(&self, client: ClientId, segment: &Segment) -> Result<()>;

    /// Offers it again after the master forgot the client.
    async fn remount(&self, client: ClientId, segments: &[Segment]) -> Result<()>;

    /// Takes memory back: objects in it are gone at once, and its wire refuses whoever still comes.
    async fn unmount(&self, client: ClientId, segment: SegmentId) -> Result<()>;

    /// Takes a segment back after `grace`: until then its objects are readable, and none are added.
    async fn unmount_after(&self, client: ClientId, segment: SegmentId, grace: Duration) -> Result<()>;

    /// Where the master is that answers now, if another one may answer later and it is known.
    fn leader(&self) -> Option<Arc<str>> {
        None
    }

    /// Returns when there is a [leader](Self::leader), and it is another than this. Never, where there is only one master.
    async fn another_leads(&self, than: Option<&str>) {
        let _ = than;
        std::future::pending().await
    }

    /// The member at this endpoint did not answer the caller. A hint: a master that heeds it places nothing there until
    /// the member's next ping. The existing system has no such call; a master that does not know it is none the worse.
    async fn report_unreachable(&self, client: ClientId, endpoint: &str) -> Result<()> {
        let _ = (client, endpoint);
        Ok(())
    }
}

/// Calls about copies and moves between segments. A master without them keeps the defaults: there is nothing to do, and
/// what is asked for is refused with `NOT_SUPPORTED`.
#[async_trait]
pub trait TaskService: Debug + Send + Sync + 'static {
    /// Asks for another copy in each of the segments named.
    async fn create_copy(&self, _tenant: &str, _key: &[u8], _targets: &[&str]) -> Result<Uuid> {
        Err(no_copies())
    }

    /// Asks for the copy in a segment to be moved to another one.
    async fn create_move(&self, _tenant: &str, _key: &[u8], _source: &str, _target: &str) -> Result<Uuid> {
        Err(no_copies())
    }

    /// Where a task stands. `TASK_NOT_FOUND`.
    async fn task(&self, _task: Uuid) -> Result<TaskInfo> {
        Err(no_copies())
    }

    /// Drops copies that the caller wrote and nobody reads: those in the segment named, or all for an empty name. The keys of which
    /// something was dropped.
    async fn clear_replicas(
        &self,
        _client: ClientId,
        _keys: &[&[u8]],
        _segment: &str,
    ) -> Result<Vec<ObjectKey>> {
        Err(Error::new(ErrorCode::NotSupported, "this master clears no copies"))
    }

    /// Tasks for this client; from now on they are its own.
    async fn fetch_tasks(&self, _client: ClientId, _limit: u64) -> Result<Vec<Task>> {
        Ok(Vec::new())
    }

    /// A task is over.
    async fn complete_task(&self, _client: ClientId, _report: &TaskReport) -> Result<()> {
        Err(no_copies())
    }

    /// Space for copies in the segments named. The token is that of the task where they are of a hot object, and nil otherwise;
    /// so it is with the end and the revoke.
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

    /// Space for a copy elsewhere.
    async fn move_start(
        &self,
        _caller: Caller<'_>,
        _key: &[u8],
        _source: &str,
        _target: &str,
    ) -> Result<MovePlan> {
        Err(no_copies())
    }

    /// The bytes of a copy or move have landed.
    async fn replication_end(
        &self,
        _caller: Caller<'_>,
        _kind: TaskKind,
        _key: &[u8],
        _token: CopyToken,
    ) -> Result<()> {
        Err(no_copies())
    }

    /// A copy or move failed.
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

/// Calls by which the objects in a client's memory outlive the master. One that knows nothing of them (the existing system's, and one in the client's own
/// process, which dies with it) keeps the defaults: `NOT_SUPPORTED`.
#[async_trait]
pub trait InventoryService: Debug + Send + Sync + 'static {
    /// What came to and went from the client's segments after change number `after`, 0 for a client that has heard of none. Segments
    /// that are mounted after the first such call are recorded.
    async fn inventory(&self, _client: ClientId, _after: u64) -> Result<InventoryPage> {
        Err(no_inventory())
    }

    /// Offers memory that objects lie in. It takes no new ones until their space is kept.
    async fn mount_kept(&self, _client: ClientId, _segment: &Segment) -> Result<()> {
        Err(no_inventory())
    }

    /// Keeps the space of objects that are going to be announced; `open` when that was all.
    async fn keep(
        &self,
        _client: ClientId,
        _segment: SegmentId,
        _extents: &[Extent],
        _open: bool,
    ) -> Result<()> {
        Err(no_inventory())
    }

    /// Objects whose space was kept are what they were.
    async fn announce(&self, _client: ClientId, _stored: &[StoredReplica]) -> Result<Vec<Result<()>>> {
        Err(no_inventory())
    }

    /// Gives back what space is still kept.
    async fn release_kept(&self, _client: ClientId, _segment: SegmentId) -> Result<()> {
        Err(no_inventory())
    }

    /// Tells the master the longest time for which leases or grants of earlier masters may still hold. Returns the longest
    /// time for which leases or grants of this master may hold, and when the client is to announce objects.
    async fn exchange_promise(&self, _client: ClientId, _promise: Duration) -> Result<Welcome> {
        Err(no_inventory())
    }

    /// Replicas that a segment held when its client expired, and that nobody has removed or replaced since; from page `after` on.
    async fn expired(&self, _client: ClientId, _segment: SegmentId, _after: u64) -> Result<InventoryPage> {
        Err(no_inventory())
    }

    /// Announces replicas that [`InventoryService::expired`] listed. Their space was kept.
    async fn announce_expired(
        &self,
        _client: ClientId,
        _stored: &[StoredReplica],
    ) -> Result<Vec<Result<()>>> {
        Err(no_inventory())
    }
}

fn no_inventory() -> Error {
    Error::new(ErrorCode::NotSupported, "this master keeps no inventories")
}

/// Calls of clients that keep objects on a disk of theirs. A master that uses no disks keeps the defaults: `UNABLE_OFFLOAD`.
#[async_trait]
pub trait DiskService: Debug + Send + Sync + 'static {
    /// Offers a disk, or says whether objects may go there.
    async fn mount_disk(&self, _client: ClientId, _enabled: bool) -> Result<()> {
        Err(no_disks())
    }

    /// Takes it back: what lies there is gone at once.
    async fn unmount_disk(&self, _client: ClientId) -> Result<()> {
        Err(no_disks())
    }

    /// How large the disk is, in bytes.
    async fn disk_capacity(&self, _client: ClientId, _bytes: u64) -> Result<()> {
        Err(no_disks())
    }

    /// What the client is to write to its disk; it is told once. `SEGMENT_NOT_FOUND` when it has offered none, or was silent too long.
    async fn to_offload(&self, _client: ClientId, _enabled: bool) -> Result<Vec<OffloadItem>> {
        Err(no_disks())
    }

    /// These were written, or could not be (a length of -1); each item with its place. Before the first [`to_offload`](Self::to_offload): these
    /// survived.
    async fn offloaded(&self, _client: ClientId, _items: &[OffloadItem], _places: &[StoredAt]) -> Result<()> {
        Err(no_disks())
    }

    /// Whether the client is to empty its disk.
    async fn must_clear_disk(&self, _client: ClientId) -> Result<bool> {
        Err(no_disks())
    }

    /// [`must_clear_disk`](Self::must_clear_disk) and [`to_offload`](Self::to_offload) in one, and what lies on the disk and does not count any more:
    /// replaced, removed, or never taken. It is numbered, and told again until the client says that it is done; `begin` is asked before what
    /// survived is announced, and answers nothing but that the rest follows. The existing system has no such call (`NOT_SUPPORTED`): there, what
    /// an answer said is lost with it, and what was removed may come back when its owner is restarted.
    async fn disk_work(&self, _client: ClientId, _begin: bool, _done: u64) -> Result<DiskWork> {
        Err(Error::new(ErrorCode::NotSupported, "this master does not number what it says"))
    }

    /// The client has dropped objects of a tenant from its disk.
    async fn dropped_from_disk(
        &self,
        _client: ClientId,
        _tenant: &str,
        _keys: &[&[u8]],
    ) -> Result<Vec<Result<()>>> {
        Err(no_disks())
    }

    /// Where files of objects lie that all clients reach; an empty folder where there are none.
    async fn storage(&self) -> Result<StorageConfig> {
        Ok(StorageConfig { fs_dir: String::new(), evict: true, quota: 0 })
    }

    /// The files of these objects of a tenant are gone, or cannot be read.
    async fn dropped_files(
        &self,
        _client: ClientId,
        _tenant: &str,
        _keys: &[&[u8]],
    ) -> Result<Vec<Result<()>>> {
        Err(no_disks())
    }

    /// What the client is to read back into memory; it is told once.
    async fn to_promote(&self, _client: ClientId) -> Result<Vec<OffloadItem>> {
        Err(no_disks())
    }

    /// Space for an object that comes back, in one of the segments named if there is room.
    async fn promotion_start(
        &self,
        _caller: Caller<'_>,
        _key: &[u8],
        _len: u64,
        _preferred: &[&str],
    ) -> Result<Replica> {
        Err(no_disks())
    }

    /// It came back, or did not.
    async fn promotion_end(&self, _caller: Caller<'_>, _key: &[u8], _done: bool) -> Result<()> {
        Err(no_disks())
    }
}

fn no_disks() -> Error {
    Error::new(ErrorCode::UnableOffload, "this master puts no objects on clients' disks")
}

/// Everything a client asks of a master.
pub trait MasterApi: ObjectService + SegmentService + TaskService + InventoryService + DiskService {}

impl<T: ObjectService + SegmentService + TaskService + InventoryService + DiskService> MasterApi for T {}

/// A master in the process of its clients.
pub trait EmbeddedMaster: MasterApi {
    /// Returns the master's clock, which becomes that of its clients.
    fn clock(&self) -> &SharedClock;

    /// Does the work whose time has come. Clients call it at short intervals while one of them lives.
    fn do_due_work(&self);
}
