//! How the values of `mooncake-core` and of the store's API lie on the wire, and the few structs only messages have.
//!
//! The core's types are written and read as they are: no second set of structs, no conversion on the way.

use std::time::Duration;

use mooncake_core::ids::{ClientId, ObjectKey, ReplicaId, SegmentId, Uuid};
use mooncake_core::replica::{
    DataType, MemoryLocation, Replica, ReplicaList, ReplicaLocation, ReplicaStatus, ReplicaType,
    ReplicateConfig, Segment, SegmentStatus, SoftPin,
};

use super::literal::{Literal, symbol};
use super::pack::{Byte, Pack, PackError, Reader, Unpack, Wire, Writer, wire_fields, written_as};
use crate::api::{EndItem, PingReply};

/// Declares a struct of its own that goes on the wire as it is declared.
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

wire_struct! {
    /// Where the master wants objects on a shared file system; an empty directory means not at all.
    pub struct StorageConfig {
        /// Directory.
        pub fs_dir: String,
        /// Whether files may be evicted.
        pub evict: bool,
        /// Bytes the files may take in all, 0 for no limit.
        pub quota: u64,
    }
}

wire_struct! {
    /// Work a client is asked to do.
    pub struct Task {
        /// Its number.
        pub id: Uuid,
        /// What it is.
        pub kind: TaskKind,
        /// Its particulars, as JSON.
        pub payload: String,
        /// When it was made, in milliseconds since 1970.
        pub created_ms: i64,
        /// How often it may be tried again.
        pub max_retries: u32,
    }
}

wire_struct! {
    /// How a task ended.
    pub struct TaskReport {
        /// Its number.
        pub id: Uuid,
        /// Whether it succeeded.
        pub status: TaskStatus,
        /// A sentence about it.
        pub message: String,
    }
}

wire_struct! {
    /// Where a task stands.
    pub struct TaskInfo {
        /// Its number.
        pub id: Uuid,
        /// What it is.
        pub kind: TaskKind,
        /// Where it stands.
        pub status: TaskStatus,
        /// When it was made, in milliseconds since 1970.
        pub created_ms: i64,
        /// When it last changed, in milliseconds since 1970.
        pub updated_ms: i64,
        /// Who does it.
        pub client: ClientId,
        /// A sentence about it.
        pub message: String,
    }
}

wire_struct! {
    /// A granted copy: what to read and where to write it.
    pub struct CopyPlan {
        /// The copy that is there.
        pub source: Replica,
        /// The copies to be made; those that were there already are left out.
        pub targets: Vec<Replica>,
    }
}

wire_struct! {
    /// A granted move: what to read and where to write it.
    pub struct MovePlan {
        /// The copy that is there.
        pub source: Replica,
        /// The copy to be made; none if it is there already.
        pub target: Option<Replica>,
    }
}

wire_struct! {
    /// An object to be written to disk, or read back from it.
    pub struct OffloadItem {
        /// Whose it is.
        pub tenant: String,
        /// Its key.
        pub key: Vec<u8>,
        /// Its length in bytes.
        pub size: i64,
    }
}

wire_struct! {
    /// Where an object lies on a client's disk.
    pub struct StoredAt {
        /// Number of the file, as the client counts them.
        pub bucket: i64,
        /// Where in it, in bytes.
        pub offset: i64,
        /// Length of the key in bytes.
        pub key_size: i64,
        /// Length of the value in bytes; -1 when it could not be written.
        pub data_size: i64,
        /// Who serves it.
        pub endpoint: String,
    }
}

wire_struct! {
    /// What the owner of a disk is to do there.
    #[derive(Default)]
    pub struct DiskWork {
        /// Number of this answer, for saying that all of it is done. The same as before when there is nothing to do.
        pub number: u64,
        /// Whether this cluster has tenants.
        pub tenants: bool,
        /// The disk is to be emptied, before anything else.
        pub clear: bool,
        /// What lies there and does not count any more.
        pub dropped: Vec<OffloadItem>,
        /// What is to be written, after that.
        pub write: Vec<OffloadItem>,
    }
}

wire_struct! {
    /// Objects from a disk, in memory of its owner where others read them.
    pub struct Lent {
        /// Number of the loan, for giving it back.
        pub batch: u64,
        /// Where each of them lies.
        pub addresses: Vec<u64>,
        /// What a peer opens to reach that memory.
        pub endpoint: String,
        /// How long they lie there, in milliseconds.
        pub ttl_ms: u64,
    }
}

wire_struct! {
    /// Parts of objects from a disk, in memory of its owner where others read them.
    pub struct LentParts {
        /// Where, and for how long.
        pub lent: Lent,
        /// Of which value each is: what takes its place on the disk has another number.
        pub versions: Vec<u64>,
    }
}

wire_struct! {
    /// Space for an object that comes back from disk.
    pub struct PromotionPlan {
        /// Where to write it.
        pub memory: Replica,
    }
}

wire_struct! {
    /// An NVMe-oF target.
    pub struct NofSegment {
        /// Its number.
        pub id: SegmentId,
        /// Its name.
        pub name: String,
        /// Where it begins.
        pub base: u64,
        /// Its length in bytes.
        pub size: u64,
        /// What a peer opens to reach it.
        pub endpoint: String,
    }
}

wire_struct! {
    /// Who offered an NVMe-oF target.
    pub struct NofOwner {
        /// The target.
        pub segment: SegmentId,
        /// The client.
        pub client: ClientId,
    }
}

wire_struct! {
    /// An object in a segment, as its owner is told of it and announces it to another master.
    pub struct StoredReplica {
        /// The segment.
        pub segment: SegmentId,
        /// Where in the segment it starts, in bytes.
        pub offset: u64,
        /// Its length in bytes.
        pub len: u64,
        /// Its key; where tenants are on, as the master itself knows it.
        pub key: Vec<u8>,
        /// CRC-64 of its value, when the writer computed one.
        pub checksum: Option<u64>,
        /// Who wrote it.
        pub writer: ClientId,
        /// Its group, empty for none.
        pub group: String,
        /// Whether it is never evicted.
        pub hard_pin: bool,
        /// For how long it is soft-pinned, in milliseconds.
        pub soft_pin_ms: u64,
        /// The master under which it was written.
        pub epoch: u64,
        /// Of two values of one key that were written under the same master, the later one has the larger number.
        pub number: u64,
    }
}

wire_struct! {
    /// A replica came or went.
    pub struct InventoryChange {
        /// Which.
        pub replica: ReplicaId,
        /// What came, `None` when it went.
        pub stored: Option<StoredReplica>,
    }
}

wire_struct! {
    /// Answer of a master to a client that mounts memory.
    pub struct Welcome {
        /// Longest time, in milliseconds, for which leases and grants of this master may hold.
        pub promise_ms: u64,
        /// How long, in milliseconds, the client waits before it announces objects.
        pub announce_after_ms: u64,
    }
}

wire_struct! {
    /// What came to and went from a client's segments.
    pub struct InventoryPage {
        /// The master.
        pub epoch: u64,
        /// Number of the last change here, to ask for the next with.
        pub next: u64,
        /// Changes before these were dropped: what was told before is worth nothing.
        pub lost: bool,
        /// There were no more when it was asked.
        pub whole: bool,
        /// The changes, in order.
        pub changes: Vec<InventoryChange>,
    }
}

/// What a task is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum TaskKind {
    /// Make another copy.
    Copy = 0,
    /// Make a copy elsewhere and drop this one.
    Move = 1,
}

/// Where a task stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum TaskStatus {
    /// Nobody has it yet.
    Pending = 0,
    /// Somebody does it.
    Processing = 1,
    /// It failed.
    Failed = 2,
    /// It is done.
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

/// A lease travels in milliseconds; what does not fit is as good as for ever.
fn milliseconds(span: &Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

written_as! {
    Duration as u64: span => milliseconds(span), |ms| Ok(Duration::from_millis(ms));
    DataType as Byte: kind => Byte(kind.0), |byte| Ok(DataType(byte.0));
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
});

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
});

wire_fields!(structure EndItem<'a> {
    key: &'a [u8],
    checksum: Option<u64>,
});

wire_fields!(structure MemoryLocation {
    size: u64,
    address: u64,
    protocol: String,
    endpoint: String,
});

wire_fields!(structure Replica {
    id: ReplicaId,
    location: ReplicaLocation,
    status: ReplicaStatus,
});

wire_fields!(structure ReplicaList {
    replicas: Vec<Replica>,
    lease: Duration,
    checksum: Option<u64>,
});

/// A key is written as the string it is. One that is read has no limits to keep: it is a `Vec<u8>` or a slice.
impl Wire for ObjectKey {
    const LITERAL: Literal = String::LITERAL;
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

/// Replicas in memory, written from where they are kept: the same bytes as of a list of [`Replica`]s. Each is its number, its address
/// and its segment.
#[doc(hidden)]
pub fn pack_in_memory<'s>(
    replicas: impl ExactSizeIterator<Item = (ReplicaId, u64, &'s Segment)>,
    len: u64,
    status: ReplicaStatus,
    out: &mut Writer<'_>,
) {
    out.length(replicas.len());
    for (id, address, segment) in replicas {
        id.pack(out);
        out.byte(IN_MEMORY);
        len.pack(out);
        address.pack(out);
        segment.protocol.pack(out);
        segment.endpoint.pack(out);
        status.pack(out);
    }
}

/// Index of memory among the kinds of places.
const IN_MEMORY: u8 = 0;

/// A variant of five structs. The two kinds of memory are structs around a struct.
impl Wire for ReplicaLocation {
    const LITERAL: Literal = Literal::new(&[symbol::VARIANT])
        .then(Literal::structure(&[MemoryLocation::LITERAL]))
        .then(Literal::structure(&[MemoryLocation::LITERAL]))
        .then(Literal::structure(&[String::LITERAL, u64::LITERAL]))
        .then(Literal::structure(&[ClientId::LITERAL, u64::LITERAL, String::LITERAL]))
        .then(Literal::structure(&[String::LITERAL, u64::LITERAL, u64::LITERAL, u64::LITERAL, i32::LITERAL]))
        .push(symbol::END);
    const MIN_LEN: usize = 1 + String::MIN_LEN + u64::MIN_LEN;
}

impl Pack for ReplicaLocation {
    fn widest(&self) -> usize {
        match self {
            Self::Memory(at) | Self::NofSsd(at) => at.widest(),
            Self::Disk { path, .. } | Self::Dfs { path, .. } => path.len(),
            Self::LocalDisk { endpoint, .. } => endpoint.len(),
        }
    }

    fn pack(&self, out: &mut Writer<'_>) {
        match self {
            Self::Memory(at) => {
                out.byte(IN_MEMORY);
                at.pack(out);
            }
            Self::NofSsd(at) => {
                out.byte(1);
                at.pack(out);
            }
            Self::Disk { path, size } => {
                out.byte(2);
                path.pack(out);
                size.pack(out);
            }
            Self::LocalDisk { client, size, endpoint } => {
                out.byte(3);
                client.pack(out);
                size.pack(out);
                endpoint.pack(out);
            }
            Self::Dfs { path, offset, size, aligned_size, shard } => {
                out.byte(4);
                path.pack(out);
                offset.pack(out);
                size.pack(out);
                aligned_size.pack(out);
                shard.pack(out);
            }
        }
    }
}

impl<'a> Unpack<'a> for ReplicaLocation {
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        // Members are read in the order written here.
        Ok(match body.array()? {
            [0] => Self::Memory(Unpack::unpack(body)?),
            [1] => Self::NofSsd(Unpack::unpack(body)?),
            [2] => Self::Disk { path: Unpack::unpack(body)?, size: Unpack::unpack(body)? },
            [3] => Self::LocalDisk {
                client: Unpack::unpack(body)?,
                size: Unpack::unpack(body)?,
                endpoint: Unpack::unpack(body)?,
            },
            [4] => Self::Dfs {
                path: Unpack::unpack(body)?,
                offset: Unpack::unpack(body)?,
                size: Unpack::unpack(body)?,
                aligned_size: Unpack::unpack(body)?,
                shard: Unpack::unpack(body)?,
            },
            [other] => return Err(PackError::Variant(other)),
        })
    }
}

/// What the master says of a client, with the existing system's numbers.
const CLIENT_OK: i32 = 1;
const CLIENT_MUST_REMOUNT: i32 = 2;

impl Wire for PingReply {
    const LITERAL: Literal = Literal::structure(&[i64::LITERAL, i32::LITERAL]);
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
