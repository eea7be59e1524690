//! The one table of calls and their shapes, as version 0.3.13.post1 of the existing system has them.
//!
//! A call is a line: its name, its arguments in order, what it answers. From the line come the function's number, the
//! hash and spelling of both bodies, reading and writing. A shape that changes in another version is a change here.

use std::borrow::Cow;

use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::{Replica, ReplicaList, ReplicaType, ReplicateConfig, Segment, SegmentStatus};

use super::literal::function_id;
use super::pack::{self, Answer, List, Pack, PackError, Pairs, Unpack, wire_fields};
use super::wire::{
    CopyPlan, DiskWork, InventoryPage, Lent, LentParts, MovePlan, NofOwner, NofSegment, OffloadItem,
    PromotionPlan, StorageConfig, StoredAt, StoredReplica, Task, TaskInfo, TaskReport, Welcome,
};
use crate::api::{EndItem, PingReply};

/// Version of the master that speaks this table, as it introduces itself. The existing client insists on equality.
pub const MASTER_VERSION: &str = "2.0.0";

/// Version of the existing package the table was taken from.
pub const TABLE_VERSION: &str = "0.3.13.post1";

/// The arguments of a call, and with them the call.
pub trait Request: Pack {
    /// What it is called.
    const NAME: &'static str;
    /// What it is called on the wire.
    const FUNCTION: u32;
    /// Whether it has arguments; a call without any has an empty body.
    const HAS_ARGUMENTS: bool;
    /// Whether Mooncake C++ lacks the call, so that every caller of it can do without.
    const IS_EXTENSION: bool;
    /// What it answers.
    type Reply: Pack + for<'a> Unpack<'a>;
}

/// One call of the table, for whoever wants to look at all of them.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// What the call is called.
    pub name: &'static str,
    /// What it is called on the wire.
    pub function: u32,
    /// How its arguments are spelled; empty for none.
    pub arguments: &'static [u8],
    /// How its answer is spelled.
    pub reply: &'static [u8],
    rewrite_arguments: Rewrite,
    rewrite_reply: Rewrite,
}

type Rewrite = fn(&[u8], bool) -> Result<Vec<u8>, PackError>;

impl Shape {
    /// Reads a body as the arguments and writes them again, spelled out or not: for tests and fuzzing.
    pub fn rewrite_arguments(&self, body: &[u8], spelled: bool) -> Result<Vec<u8>, PackError> {
        (self.rewrite_arguments)(body, spelled)
    }

    /// Reads a body as the answer and writes it again, spelled out or not: for tests and fuzzing.
    pub fn rewrite_reply(&self, body: &[u8], spelled: bool) -> Result<Vec<u8>, PackError> {
        (self.rewrite_reply)(body, spelled)
    }
}

fn rewritten<'a, T: Pack + Unpack<'a>>(body: &'a [u8], spelled: bool) -> Result<Vec<u8>, PackError> {
    let value = pack::decode::<T>(body)?;
    let mut out = Vec::new();
    if spelled {
        pack::encode_spelled(&value, &mut out);
    } else {
        pack::encode(&value, &mut out);
    }
    Ok(out)
}

/// One line for each member, so that an argument says the same wherever it stands.
macro_rules! meaning {
    (endpoint) => {
        "What a peer opens to reach a member."
    };
    (key) => {
        "Name of the object."
    };
    (keys) => {
        "Names of the objects."
    };
    (tenant) => {
        "Whose objects; `default` when the cluster has no tenants."
    };
    (client) => {
        "Who asks."
    };
    (clients) => {
        "The clients asked about."
    };
    (pattern) => {
        "Regular expression, found anywhere in a key."
    };
    (force) => {
        "Whether leases are ignored."
    };
    (size) => {
        "Length of the object in bytes."
    };
    (sizes) => {
        "Length of each object in bytes."
    };
    (config) => {
        "How the objects are to be kept."
    };
    (item) => {
        "The object, and its checksum."
    };
    (items) => {
        "The objects, and their checksums."
    };
    (attempt) => {
        "Which write of the client it is about: a number drawn for each start."
    };
    (replace) => {
        "Whether it is an upsert."
    };
    (replicas) => {
        "Which replicas it is about."
    };
    (segment) => {
        "The segment."
    };
    (segments) => {
        "The segments."
    };
    (segment_name) => {
        "Name of a segment; empty for all."
    };
    (grace_ms) => {
        "How long its objects stay readable, in milliseconds."
    };
    (limit) => {
        "Most tasks to hand out."
    };
    (source) => {
        "Name of the segment to read from."
    };
    (target) => {
        "Name of the segment to write to."
    };
    (targets) => {
        "Names of the segments to write to."
    };
    (task) => {
        "The task."
    };
    (after) => {
        "Number of the last change that was heard of, 0 for none."
    };
    (offsets) => {
        "Where the objects start."
    };
    (lengths) => {
        "How many bytes each takes."
    };
    (begin) => {
        "Only that the client will ask from now on: what it finds on its disk comes after."
    };
    (done) => {
        "Number of the last answer that the client has seen to."
    };
    (starts) => {
        "From which byte of each object on."
    };
    (counts) => {
        "How many bytes of each."
    };
    (open) => {
        "Whether that was all."
    };
    (promise_ms) => {
        "Longest time, in milliseconds, for which leases or grants of earlier masters may still hold."
    };
    (stored) => {
        "The objects that are still what they were."
    };
    (report) => {
        "How the task ended."
    };
    (lease) => {
        "Which copy of a hot object it is about; nil for none of these."
    };
    (epoch) => {
        "Which value of the object: from the task."
    };
    (enabled) => {
        "Whether the client's disk takes objects."
    };
    (offloaded) => {
        "The objects that were written to disk."
    };
    (places) => {
        "Where each of them lies."
    };
    (bytes) => {
        "How many bytes the client's disk holds."
    };
    (batch) => {
        "Number of the loan."
    };
    (preferred) => {
        "Names of the segments that come first."
    };
    (nof_segment) => {
        "The target."
    };
    (nof_segments) => {
        "The targets."
    };
}

/// Whether a class of calls is one that Mooncake C++ lacks.
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

/// What a call is called in the existing system.
macro_rules! spelled {
    ($name:ident) => {
        stringify!($name)
    };
    ($name:ident $spelled:literal) => {
        $spelled
    };
}

/// Declares calls, and a table of them.
macro_rules! calls {
    (
        $(#[$about:meta])*
        $table:ident of $class:literal;
        $(
        $(#[$meta:meta])*
        $name:ident $(as $spelled:literal)? $(<$life:lifetime>)? ($($argument:ident: $type:ty),* $(,)?) -> $reply:ty;
    )*) => {
        $(
            $(#[$meta])*
            #[derive(Clone, Debug, PartialEq, Eq)]
            pub struct $name $(<$life>)? {
                $(#[doc = meaning!($argument)] pub $argument: $type,)*
            }

            wire_fields!(arguments $name $(<$life>)? { $($argument: $type),* });

            #[allow(unused_lifetimes)]
            impl<'a> Request for $name $(<$life>)? {
                const NAME: &'static str = stringify!($name);
                const FUNCTION: u32 = function_id(concat!($class, "::", spelled!($name $($spelled)?)));
                const HAS_ARGUMENTS: bool =
                    !<Self as super::pack::Wire>::LITERAL.as_bytes().is_empty();
                const IS_EXTENSION: bool = is_extension($class);
                type Reply = $reply;
            }
        )*

        $(#[$about])*
        pub static $table: &[Shape] = &[$(
            Shape {
                name: stringify!($name),
                function: <$name as Request>::FUNCTION,
                arguments: <$name as super::pack::Wire>::LITERAL.as_bytes(),
                reply: <$reply as super::pack::Wire>::LITERAL.as_bytes(),
                rewrite_arguments: |body, spelled| rewritten::<$name>(body, spelled),
                rewrite_reply: |body, spelled| rewritten::<$reply>(body, spelled),
            },
        )*];
    };
}

calls! {
    /// Every call of the existing system that is known here, in the order of the table.
    TABLE of "mooncake::WrappedMasterService";

    /// Which version the master is.
    ServiceReady() -> Answer<String>;
    /// Where objects lie on a shared file system.
    GetStorageConfig() -> Answer<StorageConfig>;
    /// The directory alone, as older clients ask.
    GetFsdir() -> Answer<String>;
    /// The client lives.
    Ping(client: ClientId) -> Answer<PingReply>;

    /// Whether the object can be read; grants a lease if so.
    ExistKey<'a>(key: &'a [u8], tenant: &'a str) -> Answer<bool>;
    /// [`ExistKey`] for many.
    BatchExistKey<'a>(keys: List<'a, &'a [u8]>, tenant: &'a str) -> Vec<Answer<bool>>;
    /// Where the object lies; grants a lease.
    GetReplicaList<'a>(key: &'a [u8], tenant: &'a str) -> Answer<ReplicaList>;
    /// [`GetReplicaList`] for many.
    BatchGetReplicaList<'a>(keys: List<'a, &'a [u8]>, tenant: &'a str) -> Vec<Answer<ReplicaList>>;
    /// Where each object whose key matches lies.
    GetReplicaListByRegex<'a>(pattern: &'a str, tenant: &'a str) -> Answer<Pairs<Vec<u8>, Vec<Replica>>>;
    /// Addresses of clients, from their segments.
    BatchQueryIp<'a>(clients: List<'a, ClientId>) -> Answer<Pairs<ClientId, Vec<String>>>;
    /// Drops unleased objects this client wrote; answers which.
    BatchReplicaClear<'a>(keys: List<'a, &'a [u8]>, client: ClientId, segment_name: &'a str)
        -> Answer<Vec<Vec<u8>>>;

    /// Space for a new object.
    PutStart<'a>(client: ClientId, key: &'a [u8], size: u64, config: Cow<'a, ReplicateConfig>, tenant: &'a str)
        -> Answer<Vec<Replica>>;
    /// The bytes have landed.
    PutEnd<'a>(client: ClientId, item: EndItem<'a>, replicas: ReplicaType, tenant: &'a str) -> Answer<()>;
    /// The write failed.
    PutRevoke<'a>(client: ClientId, key: &'a [u8], replicas: ReplicaType, tenant: &'a str) -> Answer<()>;
    /// [`PutStart`] for many.
    BatchPutStart<'a>(
        client: ClientId,
        keys: List<'a, &'a [u8]>,
        sizes: List<'a, u64>,
        config: Cow<'a, ReplicateConfig>,
        tenant: &'a str,
    ) -> Vec<Answer<Vec<Replica>>>;
    /// [`PutEnd`] for many.
    BatchPutEnd<'a>(client: ClientId, items: List<'a, EndItem<'a>>, replicas: ReplicaType, tenant: &'a str)
        -> Vec<Answer<()>>;
    /// [`PutRevoke`] for many.
    BatchPutRevoke<'a>(client: ClientId, keys: List<'a, &'a [u8]>, replicas: ReplicaType, tenant: &'a str)
        -> Vec<Answer<()>>;

    /// Space for a new value of an object that may exist.
    UpsertStart<'a>(client: ClientId, key: &'a [u8], size: u64, config: Cow<'a, ReplicateConfig>, tenant: &'a str)
        -> Answer<Vec<Replica>>;
    /// The bytes have landed.
    UpsertEnd<'a>(client: ClientId, item: EndItem<'a>, replicas: ReplicaType, tenant: &'a str) -> Answer<()>;
    /// The write failed.
    UpsertRevoke<'a>(client: ClientId, key: &'a [u8], replicas: ReplicaType, tenant: &'a str) -> Answer<()>;
    /// [`UpsertStart`] for many.
    BatchUpsertStart<'a>(
        client: ClientId,
        keys: List<'a, &'a [u8]>,
        sizes: List<'a, u64>,
        config: Cow<'a, ReplicateConfig>,
        tenant: &'a str,
    ) -> Vec<Answer<Vec<Replica>>>;
    /// [`UpsertEnd`] for many, of all replicas.
    BatchUpsertEnd<'a>(client: ClientId, items: List<'a, EndItem<'a>>, tenant: &'a str) -> Vec<Answer<()>>;
    /// [`UpsertRevoke`] for many, of all replicas.
    BatchUpsertRevoke<'a>(client: ClientId, keys: List<'a, &'a [u8]>, tenant: &'a str) -> Vec<Answer<()>>;

    /// Drops the object.
    Remove<'a>(key: &'a [u8], force: bool, tenant: &'a str) -> Answer<()>;
    /// [`Remove`] for many.
    BatchRemove<'a>(keys: List<'a, &'a [u8]>, force: bool, tenant: &'a str) -> Vec<Answer<()>>;
    /// Drops every object whose key matches; how many.
    RemoveByRegex<'a>(pattern: &'a str, force: bool, tenant: &'a str) -> Answer<i64>;
    /// Drops every object; how many. It has no way to say that it failed.
    RemoveAll<'a>(force: bool, tenant: &'a str) -> i64;

    /// Offers memory.
    MountSegment<'a>(segment: Cow<'a, Segment>, client: ClientId) -> Answer<()>;
    /// Offers it again.
    ReMountSegment<'a>(segments: List<'a, Segment>, client: ClientId) -> Answer<()>;
    /// Takes it back.
    UnmountSegment(segment: SegmentId, client: ClientId) -> Answer<()>;
    /// Takes it back after a while.
    GracefulUnmountSegment(segment: SegmentId, client: ClientId, grace_ms: u64) -> Answer<()>;
    /// State of a segment, by name.
    QuerySegmentStatus<'a>(segment_name: &'a str) -> Answer<SegmentStatus>;
    /// State of a segment.
    QuerySegmentStatusById(segment: SegmentId) -> Answer<SegmentStatus>;

    /// Work for this client.
    FetchTasks(client: ClientId, limit: u64) -> Answer<Vec<Task>>;
    /// Asks for more copies.
    CreateCopyTask<'a>(key: &'a [u8], tenant: &'a str, targets: List<'a, &'a str>) -> Answer<Uuid>;
    /// Asks for a copy to be moved.
    CreateMoveTask<'a>(key: &'a [u8], tenant: &'a str, source: &'a str, target: &'a str) -> Answer<Uuid>;
    /// Where a task stands.
    QueryTask(task: Uuid) -> Answer<TaskInfo>;
    /// The task is over.
    MarkTaskToComplete(client: ClientId, report: TaskReport) -> Answer<()>;

    /// Space for copies.
    CopyStart<'a>(
        client: ClientId,
        key: &'a [u8],
        tenant: &'a str,
        source: &'a str,
        targets: List<'a, &'a str>,
    ) -> Answer<CopyPlan>;
    /// The copies have landed.
    CopyEnd<'a>(client: ClientId, key: &'a [u8], tenant: &'a str) -> Answer<()>;
    /// The copies failed.
    CopyRevoke<'a>(client: ClientId, key: &'a [u8], tenant: &'a str) -> Answer<()>;
    /// Space for a copy elsewhere.
    MoveStart<'a>(client: ClientId, key: &'a [u8], tenant: &'a str, source: &'a str, target: &'a str)
        -> Answer<MovePlan>;
    /// The copy has landed; the source may go.
    MoveEnd<'a>(client: ClientId, key: &'a [u8], tenant: &'a str) -> Answer<()>;
    /// The copy failed.
    MoveRevoke<'a>(client: ClientId, key: &'a [u8], tenant: &'a str) -> Answer<()>;

    /// [`CopyStart`] of a hot object.
    DynamicReplicaCopyStart<'a>(
        client: ClientId,
        key: &'a [u8],
        tenant: &'a str,
        source: &'a str,
        targets: List<'a, &'a str>,
        lease: Uuid,
        epoch: u64,
    ) -> Answer<CopyPlan>;
    /// The copies have landed.
    DynamicReplicaCopyEnd<'a>(client: ClientId, key: &'a [u8], tenant: &'a str, lease: Uuid, epoch: u64)
        -> Answer<()>;
    /// The copies failed.
    DynamicReplicaCopyRevoke<'a>(client: ClientId, key: &'a [u8], tenant: &'a str, lease: Uuid, epoch: u64)
        -> Answer<()>;

    /// Offers a disk.
    MountLocalDiskSegment(client: ClientId, enabled: bool) -> Answer<()>;
    /// Takes it back.
    UnmountLocalDiskSegment(client: ClientId) -> Answer<()>;
    /// What the client is to write to its disk.
    OffloadObjectHeartbeat(client: ClientId, enabled: bool) -> Answer<Vec<OffloadItem>>;
    /// It was written.
    NotifyOffloadSuccess<'a>(
        client: ClientId,
        offloaded: List<'a, OffloadItem>,
        places: List<'a, StoredAt>,
    ) -> Answer<()>;
    /// Whether the client is to empty its disk.
    PollRemoveAll(client: ClientId) -> Answer<bool>;
    /// How large the disk is.
    ReportSsdCapacity(client: ClientId, bytes: i64) -> Answer<()>;
    /// What the client is to read back into memory.
    PromotionObjectHeartbeat(client: ClientId) -> Answer<Vec<OffloadItem>>;
    /// Space for that.
    PromotionAllocStart<'a>(
        client: ClientId,
        key: &'a [u8],
        tenant: &'a str,
        size: u64,
        preferred: List<'a, &'a str>,
    ) -> Answer<PromotionPlan>;
    /// It was read back.
    NotifyPromotionSuccess<'a>(client: ClientId, key: &'a [u8], tenant: &'a str) -> Answer<()>;
    /// It could not be read back.
    NotifyPromotionFailure<'a>(client: ClientId, key: &'a [u8], tenant: &'a str) -> Answer<()>;
    /// The client dropped the object from its disk, or a shared one.
    EvictDiskReplica<'a>(client: ClientId, key: &'a [u8], tenant: &'a str, replicas: ReplicaType) -> Answer<()>;
    /// [`EvictDiskReplica`] for many.
    BatchEvictDiskReplica<'a>(
        client: ClientId,
        keys: List<'a, &'a [u8]>,
        tenant: &'a str,
        replicas: ReplicaType,
    ) -> Vec<Answer<()>>;

    /// Offers an NVMe-oF target.
    MountNoFSegment<'a>(nof_segment: Cow<'a, NofSegment>, client: ClientId) -> Answer<()>;
    /// Offers it again.
    ReMountNoFSegment<'a>(nof_segments: List<'a, NofSegment>, client: ClientId) -> Answer<()>;
    /// Takes it back.
    UnmountNoFSegment(segment: SegmentId, client: ClientId) -> Answer<()>;
    /// Every NVMe-oF target.
    GetAllNoFSegments() -> Answer<Vec<NofSegment>>;
    /// Those of a name, and whose they are.
    GetNoFSegmentsByName<'a>(segment_name: &'a str) -> Answer<Vec<NofOwner>>;
}

calls! {
    /// What we add. A master of the existing system answers error 11, and the caller does without.
    ADDED of "mooncake_rs::Master";

    /// [`BatchPutStart`] or [`BatchUpsertStart`] of a numbered write. Repeated, it gets the same space.
    StartWrites<'a>(
        client: ClientId,
        attempt: u64,
        replace: bool,
        keys: List<'a, &'a [u8]>,
        sizes: List<'a, u64>,
        config: Cow<'a, ReplicateConfig>,
        tenant: &'a str,
    ) -> Vec<Answer<Vec<Replica>>>;
    /// The bytes of a numbered write have landed.
    EndWrites<'a>(
        client: ClientId,
        attempt: u64,
        replace: bool,
        items: List<'a, EndItem<'a>>,
        replicas: ReplicaType,
        tenant: &'a str,
    ) -> Vec<Answer<()>>;
    /// A numbered write failed.
    RevokeWrites<'a>(
        client: ClientId,
        attempt: u64,
        replace: bool,
        keys: List<'a, &'a [u8]>,
        replicas: ReplicaType,
        tenant: &'a str,
    ) -> Vec<Answer<()>>;
    /// The member at this endpoint did not answer.
    ReportUnreachable<'a>(client: ClientId, endpoint: &'a str) -> Answer<()>;
    /// What came to and went from the client's segments.
    FetchInventory(client: ClientId, after: u64) -> Answer<InventoryPage>;
    /// [`MountSegment`] of memory that objects lie in.
    MountKeptSegment<'a>(segment: Cow<'a, Segment>, client: ClientId) -> Answer<()>;
    /// Keeps the space of objects that are going to be announced.
    KeepExtents<'a>(
        client: ClientId,
        segment: SegmentId,
        offsets: List<'a, u64>,
        lengths: List<'a, u64>,
        open: bool,
    ) -> Answer<()>;
    /// Objects whose space was kept are what they were.
    AnnounceReplicas<'a>(client: ClientId, stored: List<'a, StoredReplica>) -> Vec<Answer<()>>;
    /// Gives back what space is still kept.
    ReleaseKept(client: ClientId, segment: SegmentId) -> Answer<()>;
    /// Tells the longest promise of earlier masters. The response is the longest promise of this master, and when to announce.
    ExchangePromise(client: ClientId, promise_ms: u64) -> Answer<Welcome>;
    /// Replicas that a segment held when its client expired, and that nobody has removed or replaced since.
    FetchExpired(client: ClientId, segment: SegmentId, after: u64) -> Answer<InventoryPage>;
    /// [`AnnounceReplicas`] of replicas that [`FetchExpired`] listed.
    AnnounceExpired<'a>(client: ClientId, stored: List<'a, StoredReplica>) -> Vec<Answer<()>>;
    /// [`PollRemoveAll`] and [`OffloadObjectHeartbeat`] in one, numbered and repeated until it is done; and what does not count any more.
    FetchDiskWork(client: ClientId, begin: bool, done: u64) -> Answer<DiskWork>;
}

calls! {
    /// Calls to the owner of a disk, as the existing system's clients make them.
    DISK_TABLE of "mooncake::RealClient";

    /// Objects of a disk, read into memory that the caller then reads. Keys are scoped: the tenant's name, a NUL and the key.
    LendObjects as "batch_get_offload_object"<'a>(keys: List<'a, &'a [u8]>, sizes: List<'a, i64>) -> Answer<Lent>;
    /// They have been read; whether they were still there.
    ReturnObjects as "release_offload_buffer"(batch: u64) -> bool;
}

calls! {
    /// What we add to these. An owner of the existing system answers error 11, and the caller asks for the whole objects.
    DISK_ADDED of "mooncake_rs::Disk";

    /// [`LendObjects`] for parts of objects. They are given back as those are.
    LendParts<'a>(
        keys: List<'a, &'a [u8]>,
        sizes: List<'a, u64>,
        starts: List<'a, u64>,
        counts: List<'a, u64>,
    ) -> Answer<LentParts>;
}
