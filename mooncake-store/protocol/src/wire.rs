//! Encoding of the types of `mooncake-core` and of the store's API, and structs that only messages
//! use.
//!
//! The types are encoded directly: there is no second set of structs and no conversion.

mod replicas;

use std::time::Duration;

use mooncake_core::error::Error;
use mooncake_core::hints::{KeepPart, PutHints};
use mooncake_core::ids::{ClientId, ObjectKey, ReplicaId, SegmentId, Uuid};
use mooncake_core::replica::{
    DataType, Locality, Replica, ReplicaList, ReplicaStatus, ReplicaType, ReplicateConfig, Segment,
    SegmentStatus, SoftPin,
};

pub use self::replicas::pack_in_memory;
use super::pack::{Byte, Pack, PackError, Pairs, Reader, Unpack, Wire, Writer, wire_fields, written_as};
use super::type_signature::TypeSignature;

/// Declares a struct that is encoded field by field in the order of its declaration.
macro_rules! wire_struct {
    (
        $(#[$meta:meta])*
        pub struct $name:ident { $($(#[$field_meta:meta])* pub $field:ident: $type:ty,)* }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $name { $($(#[$field_meta])* pub $field: $type,)* }

        wire_fields!(structure $name { $($field: $type),* });
    };
}

// Behind the macro, which the module uses.
mod weights;

pub use self::weights::{
    WeightAvailability, WeightChange, WeightCommit, WeightError, WeightId, WeightImport, WeightLease,
    WeightLeaseRelease, WeightLeaseRenewal, WeightLeaseRequest, WeightList, WeightManifest, WeightMove,
    WeightMoveRequest, WeightOperation, WeightOperationQuery, WeightPage, WeightQuery, WeightResidency,
    WeightRevision, WeightView,
};

wire_struct! {
    /// Location of objects on a shared file system; an empty directory stands for none.
    pub struct StorageConfig {
        /// Directory.
        pub fs_dir: String,
        /// True if files may be evicted.
        pub evict: bool,
        /// Maximum size of all files in bytes; 0 for no limit.
        pub quota: u64,
    }
}

wire_struct! {
    /// Work for a client.
    pub struct Task {
        /// Number of the task.
        pub id: Uuid,
        /// Kind of the task.
        pub kind: TaskKind,
        /// Parameters of the task, as JSON.
        pub payload: String,
        /// Time of creation in milliseconds since 1970.
        pub created_ms: i64,
        /// Maximum number of retries.
        pub max_retries: u32,
    }
}

wire_struct! {
    /// Outcome of a task.
    pub struct TaskReport {
        /// Number of the task.
        pub id: Uuid,
        /// Status at the end of the task.
        pub status: TaskStatus,
        /// Message for people.
        pub message: String,
    }
}

wire_struct! {
    /// State of a task.
    pub struct TaskInfo {
        /// Number of the task.
        pub id: Uuid,
        /// Kind of the task.
        pub kind: TaskKind,
        /// Status of the task.
        pub status: TaskStatus,
        /// Time of creation in milliseconds since 1970.
        pub created_ms: i64,
        /// Time of the last change in milliseconds since 1970.
        pub updated_ms: i64,
        /// Client that runs the task.
        pub client: ClientId,
        /// Message for people.
        pub message: String,
    }
}

wire_struct! {
    /// Granted copy: the source and the targets.
    pub struct CopyPlan {
        /// Replica to read from.
        pub source: Replica,
        /// Replicas to write. Targets that already have a replica are left out.
        pub targets: Vec<Replica>,
    }
}

wire_struct! {
    /// Granted move: the source and the target.
    pub struct MovePlan {
        /// Replica to read from.
        pub source: Replica,
        /// Replica to write; `None` if the target already has one.
        pub target: Option<Replica>,
    }
}

wire_struct! {
    /// Object to write to disk or to read back from it.
    pub struct OffloadItem {
        /// Tenant of the object.
        pub tenant: String,
        /// Key of the object.
        pub key: Vec<u8>,
        /// Length of the object in bytes.
        pub size: i64,
    }
}

wire_struct! {
    /// Location of an object on a client's disk.
    pub struct StoredAt {
        /// Number of the file, counted by the client.
        pub bucket: i64,
        /// Offset in the file in bytes.
        pub offset: i64,
        /// Length of the key in bytes.
        pub key_size: i64,
        /// Length of the value in bytes; -1 for a failed write.
        pub data_size: i64,
        /// Endpoint that serves the object.
        pub endpoint: String,
    }
}

wire_struct! {
    /// Work for the owner of a disk.
    #[derive(Default)]
    pub struct DiskWork {
        /// Number of this response, for its acknowledgement. Unchanged if there is no new work.
        pub number: u64,
        /// True if this cluster has tenants.
        pub tenants: bool,
        /// True if the disk shall be emptied, before anything else.
        pub clear: bool,
        /// Obsolete objects to delete.
        pub dropped: Vec<OffloadItem>,
        /// Objects to write after the deletions.
        pub write: Vec<OffloadItem>,
    }
}

wire_struct! {
    /// Extent of a segment that its owner shall zero.
    pub struct ZeroExtent {
        /// Number of the request, for its report.
        pub number: u64,
        /// Segment of the client.
        pub segment: SegmentId,
        /// Offset in the segment in bytes.
        pub offset: u64,
        /// Length in bytes.
        pub len: u64,
    }
}

wire_struct! {
    /// Memory for its owner to zero.
    pub struct ZeroWork {
        /// False if this master never requests any.
        pub needed: bool,
        /// Requests without a report, earlier ones included.
        pub extents: Vec<ZeroExtent>,
    }
}

wire_struct! {
    /// Objects from a disk, in memory of its owner where others read them.
    pub struct Lent {
        /// Number of the loan, for its return.
        pub batch: u64,
        /// Address of each object.
        pub addresses: Vec<u64>,
        /// Endpoint for the transfers from that memory.
        pub endpoint: String,
        /// Duration of the loan in milliseconds.
        pub ttl_ms: u64,
    }
}

wire_struct! {
    /// Parts of objects from a disk, in memory of its owner where others read them.
    pub struct LentParts {
        /// Addresses and duration.
        pub lent: Lent,
        /// Version of the value of each part. A replacement on the disk has another version.
        pub versions: Vec<u64>,
    }
}

wire_struct! {
    /// States of objects on a disk.
    pub struct VerifiedReplicas {
        /// State of each object: 0 for an object whose file is missing and whose replica was
        /// dropped, 1 for one that is there, 2 for one that could not be checked.
        pub states: Vec<Byte>,
    }
}

impl VerifiedReplicas {
    /// State of an object that is missing, and whose replica was dropped.
    pub const MISSING: Byte = Byte(0);
    /// State of an object that is on the disk.
    pub const PRESENT: Byte = Byte(1);
    /// State of an object that could not be checked. It may be there.
    pub const UNKNOWN: Byte = Byte(2);
}

wire_struct! {
    /// Granted space for an object that returns from disk.
    pub struct PromotionPlan {
        /// Replica to write.
        pub memory: Replica,
    }
}

wire_struct! {
    /// An NVMe-oF target.
    pub struct NofSegment {
        /// Number of the target.
        pub id: SegmentId,
        /// Name of the target.
        pub name: String,
        /// Start address of the target.
        pub base: u64,
        /// Length of the target in bytes.
        pub size: u64,
        /// Endpoint for transfers.
        pub endpoint: String,
    }
}

wire_struct! {
    /// Owner of an NVMe-oF target.
    pub struct NofOwner {
        /// The target.
        pub segment: SegmentId,
        /// The client.
        pub client: ClientId,
    }
}

wire_struct! {
    /// Object in a segment, as the owner of the segment receives it and announces it to another
    /// master.
    pub struct StoredReplica {
        /// Segment of the object.
        pub segment: SegmentId,
        /// Offset in the segment in bytes.
        pub offset: u64,
        /// Length of the object in bytes.
        pub len: u64,
        /// Key of the object; with tenants, the internal key of the master.
        pub key: Vec<u8>,
        /// CRC-64 of the value, if the writer computed one.
        pub checksum: Option<u64>,
        /// Client that wrote the object.
        pub writer: ClientId,
        /// Group of the object, empty for none.
        pub group: String,
        /// True if the object is never evicted.
        pub hard_pin: bool,
        /// Duration of the soft pin in milliseconds.
        pub soft_pin_ms: u64,
        /// Epoch of the master during the write.
        pub epoch: u64,
        /// Order of writes under one master: a later value of a key has a larger number.
        pub number: u64,
    }
}

wire_struct! {
    /// End of a lifetime that outlives the master: when the object ends by itself.
    #[derive(Copy)]
    pub struct StoredLifetime {
        /// Time of the end in milliseconds since 1970; 0 for none.
        pub ends_ms: u64,
        /// True if the first read ends the object.
        pub ends_at_read: bool,
    }
}

wire_struct! {
    /// Lifetime of an item of a list. Items without one do not end by themselves.
    #[derive(Copy)]
    pub struct ItemLifetime {
        /// Index of the item.
        pub index: u64,
        /// Lifetime of the item.
        pub lifetime: StoredLifetime,
    }
}

wire_struct! {
    /// Changes in the segments of a client, with the lifetimes of the objects.
    pub struct TimedInventoryPage {
        /// Changes.
        pub page: InventoryPage,
        /// Lifetimes of the objects in the list of changes.
        pub lifetimes: Vec<ItemLifetime>,
    }
}

wire_struct! {
    /// Addition or removal of a replica.
    pub struct InventoryChange {
        /// Identity of the replica.
        pub replica: ReplicaId,
        /// The added replica; `None` for a removal.
        pub stored: Option<StoredReplica>,
    }
}

wire_struct! {
    /// Response of a master to a client that mounts memory.
    pub struct Welcome {
        /// Longest time in milliseconds for which leases and grants of this master may hold.
        pub promise_ms: u64,
        /// Time in milliseconds that the client waits before it announces objects.
        pub announce_after_ms: u64,
    }
}

wire_struct! {
    /// Objects of the first keys of a request that can be read.
    #[derive(Default)]
    pub struct ReadablePrefix {
        /// Replicas of each object, in the order of the keys; empty if not requested.
        pub replicas: Vec<ReplicaList>,
        /// Number of objects.
        pub count: u64,
    }
}

/// Encodes a [`ReadablePrefix`] of at most `most` objects, without an intermediate copy. `each`
/// appends the [`ReplicaList`] of an object and fails at the end of the prefix. Returns the number
/// of objects.
pub fn pack_prefix(
    most: usize,
    out: &mut Writer<'_>,
    each: impl FnMut(usize, &mut Writer<'_>) -> Result<(), Error>,
) -> usize {
    let count = out.list_until_failure(most, each);
    (count as u64).pack(out);
    count
}

wire_struct! {
    /// Objects whose keys match a pattern.
    pub struct MatchingPage {
        /// Keys and replicas of the objects. Other pages have other objects.
        pub objects: Pairs<Vec<u8>, Vec<Replica>>,
        /// Position of the next page; 0 if this page is the last one.
        pub next: u64,
    }
}

wire_struct! {
    /// Outlook of a put that found no space.
    pub struct SpaceOutlook {
        /// Reason why waiting cannot help: 0 for none, 1 if no segment is mounted, 2 if no segment
        /// is large enough, 3 if every object in memory is hard-pinned.
        pub reason: u32,
        /// Age of the master in milliseconds. Clients mount their segments again at a new one.
        pub age_ms: u64,
    }
}

wire_struct! {
    /// Progress of moving objects away from a client that leaves.
    pub struct DrainProgress {
        /// True if the move has ended.
        pub done: bool,
        /// Number of moved replicas.
        pub moved: u64,
        /// Size of the moved replicas in bytes.
        pub bytes: u64,
        /// Number of replicas that are being moved or cannot be moved now.
        pub left: u64,
    }
}

wire_struct! {
    /// Order of two masters of one cluster, each named by its epoch.
    #[derive(Copy, Hash)]
    pub struct EpochPair {
        /// Epoch of the master that led later.
        pub newer: u64,
        /// Epoch of the master that led earlier.
        pub older: u64,
    }
}

wire_struct! {
    /// Objects of earlier masters that a client is about to announce.
    #[derive(Copy)]
    pub struct HeldObjects {
        /// True if their keys begin with the names of tenants.
        pub has_tenants: bool,
        /// Number of the objects of the tenant `default`; without tenants, of all objects.
        pub of_default: u64,
        /// Number of the objects of other tenants.
        pub of_others: u64,
    }
}

wire_struct! {
    /// State of the check of a client's address.
    pub struct AddressCheck {
        /// True once the master has connected to the address, or has failed to.
        pub is_over: bool,
        /// Reason why the address does not lead to the client; `None` if it does.
        pub finding: Option<String>,
    }
}

wire_struct! {
    /// Form of the keys of a master.
    #[derive(Copy)]
    pub struct MasterKeys {
        /// Epoch of the master.
        pub epoch: u64,
        /// True if its keys begin with the names of tenants.
        pub has_tenants: bool,
    }
}

wire_struct! {
    /// Changes in the segments of a client.
    pub struct InventoryPage {
        /// Epoch of the master.
        pub epoch: u64,
        /// Number of the last change here, for the next request.
        pub next: u64,
        /// True if earlier changes were dropped, so that the earlier inventory is invalid.
        pub lost: bool,
        /// True if there were no more changes at the time of the request.
        pub whole: bool,
        /// Changes in order.
        pub changes: Vec<InventoryChange>,
    }
}

/// Kind of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum TaskKind {
    /// Make another copy.
    Copy = 0,
    /// Make a copy in another segment and drop this one.
    Move = 1,
}

/// Status of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum TaskStatus {
    /// Not handed out yet.
    Pending = 0,
    /// In progress.
    Processing = 1,
    /// Failed.
    Failed = 2,
    /// Successful.
    Success = 3,
}

fn known<T>(value: Option<T>, name: &'static str, number: impl Into<i64>) -> Result<T, PackError> {
    value.ok_or_else(|| PackError::Enum { name, value: number.into() })
}

impl TaskKind {
    fn from_number(number: i32) -> Option<Self> {
        [Self::Copy, Self::Move].into_iter().find(|kind| *kind as i32 == number)
    }
}

impl TaskStatus {
    fn from_number(number: i32) -> Option<Self> {
        let all = [Self::Pending, Self::Processing, Self::Failed, Self::Success];
        all.into_iter().find(|status| *status as i32 == number)
    }
}

fn segment_status(number: i32) -> Option<SegmentStatus> {
    use SegmentStatus::*;
    let all = [Undefined, Ok, Draining, Drained, GracefullyUnmounting, Unmounting];
    all.into_iter().find(|status| *status as i32 == number)
}

/// Encodes a lease in milliseconds; a longer one than fits becomes the maximum.
fn milliseconds(span: &Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

written_as! {
    Duration as u64: span => milliseconds(span), |ms| Ok(Duration::from_millis(ms));
    DataType as Byte: kind => Byte(kind.0), |byte| Ok(DataType(byte.0));
    KeepPart as Byte: part => Byte(*part as u8), |byte| known(KeepPart::from_number(byte.0), "part to keep", byte.0);
    SoftPin as Byte: pin => Byte(*pin as u8), |byte| known(SoftPin::from_number(byte.0), "soft pin action", byte.0);
    ReplicaType as i32: kind => *kind as i32, |n| known(ReplicaType::from_number(n), "replica type", n);
    ReplicaStatus as i32: status => *status as i32, |n| known(ReplicaStatus::from_number(n), "replica status", n);
    SegmentStatus as i32: status => *status as i32, |n| known(segment_status(n), "segment status", n);
    TaskKind as i32: kind => *kind as i32, |n| known(TaskKind::from_number(n), "task type", n);
    TaskStatus as i32: status => *status as i32, |n| known(TaskStatus::from_number(n), "task status", n);
}

wire_fields!(structure Segment {
    id: SegmentId,
    name: String,
    base: u64,
    size: u64,
    endpoint: String,
    protocol: String,
    host_id: String,
    locality: Box<Locality> [since 1],
});

wire_fields!(structure Locality { numa_node: i32, hca_names: Vec<String> });

wire_fields!(structure ReplicateConfig {
    replicas: u64,
    nof_replicas: u64,
    dfs_replicas: u64,
    soft_pin: SoftPin,
    soft_pin_ttl_ms: Option<u64>,
    hard_pin: bool,
    preferred_segments: Vec<String>,
    preferred_segment: String,
    preferred_nof_segments: Vec<String>,
    same_node: bool,
    data_type: DataType,
    host_id: String,
    group_ids: Option<Vec<String>>,
    session_ids: Vec<Vec<u8>> [since 1],
    preferred_hca_names: Vec<String> [since 2],
    per_key_preferred_hca_names: Vec<Vec<String>> [since 3],
    residency_affinity_ids: Vec<Vec<u8>> [since 4],
} without { hints: None });

wire_fields!(structure PutHints {
    parent: Option<Vec<u8>>,
    position: Option<u64>,
    keep: KeepPart,
    ttl_ms: Option<u64>,
    delete_after_read: bool,
});

/// Object whose bytes are completely written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndItem<'a> {
    /// Key of the object.
    pub key: &'a [u8],
    /// CRC-64 of the value, if the writer computed one.
    pub checksum: Option<u64>,
}

wire_fields!(structure EndItem<'a> {
    key: &'a [u8],
    checksum: Option<u64>,
});

/// Encoding of a key as a string. A decoded key is a `Vec<u8>` or a slice, because the limits of
/// keys do not apply to it.
impl Wire for ObjectKey {
    const SIGNATURE: TypeSignature = String::SIGNATURE;
    const MIN_LEN: usize = String::MIN_LEN;
}

impl Pack for ObjectKey {
    fn widest(&self) -> usize {
        self.as_bytes().len()
    }

    fn pack(&self, out: &mut Writer<'_>) {
        self.as_bytes().pack(out);
    }
}

/// Response of the master to a ping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PingReply {
    /// Number of the leadership; changes with the leader.
    pub view: i64,
    /// True if the master does not know the client, because the client expired or the master is
    /// new.
    /// new. The client must mount again.
    pub need_remount: bool,
}

/// Client states with the numbers of Mooncake C++.
const CLIENT_OK: i32 = 1;
const CLIENT_MUST_REMOUNT: i32 = 2;

impl Wire for PingReply {
    const SIGNATURE: TypeSignature = TypeSignature::structure(&[i64::SIGNATURE, i32::SIGNATURE]);
    const MIN_LEN: usize = i64::MIN_LEN + i32::MIN_LEN;
}

impl Pack for PingReply {
    fn widest(&self) -> usize {
        0
    }

    fn pack(&self, out: &mut Writer<'_>) {
        self.view.pack(out);
        if self.need_remount { CLIENT_MUST_REMOUNT } else { CLIENT_OK }.pack(out);
    }
}

impl<'a> Unpack<'a> for PingReply {
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        let view = i64::unpack(body)?;
        let need_remount = match i32::unpack(body)? {
            CLIENT_OK => false,
            CLIENT_MUST_REMOUNT => true,
            other => return Err(PackError::Enum { name: "client status", value: other.into() }),
        };
        Ok(Self { view, need_remount })
    }
}

/// Choice of the objects that a probe grants leases on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbePolicy {
    /// Number of the choice: 0 for none of the objects, 1 for the last group of keys that can be
    /// read as a whole.
    pub mode: u8,
    /// Number of keys in a group.
    pub candidate_size: u64,
}

impl ProbePolicy {
    /// Choice of no object.
    pub const NONE: Self = Self { mode: 0, candidate_size: 1 };
    /// Number of the choice of the last group.
    pub const LAST_HIT_ONLY: u8 = 1;

    /// Returns the choice of the last group of this many keys that can be read as a whole.
    pub const fn last_hit_only(candidate_size: u64) -> Self {
        Self { mode: Self::LAST_HIT_ONLY, candidate_size }
    }

    /// Returns the number of keys in each group of this many keys.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the keys do not form whole groups.
    pub fn group_of(self, keys: usize) -> Result<usize, Error> {
        let group = usize::try_from(self.candidate_size).unwrap_or(usize::MAX);
        if group > 0 && keys.is_multiple_of(group) {
            return Ok(group);
        }
        Err(Error::invalid(format!(
            "cannot probe: the number of keys is not a multiple of the group size. keys={keys} \
             candidate_size={}",
            self.candidate_size
        )))
    }
}

/// Number of unused bytes behind the mode.
const PROBE_PADDING: usize = 7;

/// Encoding as in memory: both numbers at multiples of eight bytes.
impl Wire for ProbePolicy {
    const SIGNATURE: TypeSignature = TypeSignature::aligned(&[Byte::SIGNATURE, u64::SIGNATURE], 8);
    const MIN_LEN: usize = 1 + PROBE_PADDING + u64::MIN_LEN;
}

impl Pack for ProbePolicy {
    fn widest(&self) -> usize {
        0
    }

    fn pack(&self, out: &mut Writer<'_>) {
        out.byte(self.mode);
        out.bytes(&[0; PROBE_PADDING]);
        self.candidate_size.pack(out);
    }
}

impl<'a> Unpack<'a> for ProbePolicy {
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        let Byte(mode) = Byte::unpack(body)?;
        body.take(PROBE_PADDING)?;
        Ok(Self { mode, candidate_size: u64::unpack(body)? })
    }
}

wire_struct! {
    /// Registration of an IPC client.
    pub struct Attached {
        /// Number that the server gave to the client.
        pub guest: Uuid,
        /// Maximum number of concurrent calls.
        pub calls: u32,
        /// Milliseconds without a call after which the server drops the client.
        pub silence_ms: u32,
    }
}

wire_struct! {
    /// Located object of an IPC client.
    pub struct LocatedObject {
        /// Number that names the object in an [`ObjectRange`].
        pub number: u64,
        /// Length of the object in bytes.
        pub size: u64,
    }
}

/// Range of memory that an IPC client shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRange {
    /// Number of the memory block.
    pub memory: u32,
    /// Offset of the first byte in the memory block.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// Object to store, in shared memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectPieces<'a> {
    /// Key of the object.
    pub key: &'a [u8],
    /// Consecutive pieces of the value.
    pub pieces: Vec<MemoryRange>,
}

/// Object to read into shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectSink<'a> {
    /// Key of the object.
    pub key: &'a [u8],
    /// Memory that receives the value.
    pub into: MemoryRange,
}

/// Range of a located object to read into shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectRange {
    /// Number of the object, from [`LocatedObject`].
    pub object: u64,
    /// Offset of the first byte in the object.
    pub offset: u64,
    /// Memory that receives the bytes; its length is the length of the read.
    pub into: MemoryRange,
}

wire_fields!(structure MemoryRange { memory: u32, offset: u64, len: u64 });
wire_fields!(structure ObjectPieces<'a> { key: &'a [u8], pieces: Vec<MemoryRange> });
wire_fields!(structure ObjectSink<'a> { key: &'a [u8], into: MemoryRange });
wire_fields!(structure ObjectRange { object: u64, offset: u64, into: MemoryRange });
