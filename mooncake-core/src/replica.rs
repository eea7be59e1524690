//! What the master says about objects: segments, replicas, and how a put wants them placed.

use std::time::Duration;

use crate::ids::{ClientId, ReplicaId, SegmentId};

/// A range of a client's memory that the master may place objects in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Chosen by the client when it mounts; mounting the same id again is the same mount.
    pub id: SegmentId,
    /// The client's `host:port`. Several segments may share it; preferences name it.
    pub name: String,
    /// Virtual address of the first byte in the owner's process.
    pub base: u64,
    /// Length in bytes.
    pub size: u64,
    /// What a peer opens to reach it: `ip:port` in peer-to-peer mode, else the segment's name in the directory.
    pub endpoint: String,
    /// Wire it is registered with (`tcp`, `rdma`, ..).
    pub protocol: String,
    /// Host of the owner, empty when unknown; replicas of one object go to distinct hosts first.
    pub host_id: String,
}

/// State of a mounted segment, with the existing system's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum SegmentStatus {
    /// Not known.
    Undefined = 0,
    /// Readable and open for new objects.
    Ok = 1,
    /// Objects are being moved away; nothing new is placed here.
    Draining = 2,
    /// Nothing is left in it.
    Drained = 3,
    /// Will go after a grace period; nothing new is placed here.
    GracefullyUnmounting = 4,
    /// Going now.
    Unmounting = 5,
}

/// State of one replica, with the existing system's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum ReplicaStatus {
    /// Not known.
    Undefined = 0,
    /// Made, not yet being written.
    Initialized = 1,
    /// Space granted, bytes on their way.
    Processing = 2,
    /// Readable.
    Complete = 3,
    /// Dropped.
    Removed = 4,
    /// The write failed.
    Failed = 5,
}

impl ReplicaStatus {
    /// The status of a number.
    pub fn from_number(number: i32) -> Option<Self> {
        Some(match number {
            0 => Self::Undefined,
            1 => Self::Initialized,
            2 => Self::Processing,
            3 => Self::Complete,
            4 => Self::Removed,
            5 => Self::Failed,
            _ => return None,
        })
    }
}

/// Which replicas an end or revoke speaks of, with the existing system's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum ReplicaType {
    /// In a client's memory.
    Memory = 0,
    /// A file on a shared file system.
    Disk = 1,
    /// On the owner's own disk, served by the owner.
    LocalDisk = 2,
    /// On an NVMe-oF target.
    NofSsd = 3,
    /// Every kind.
    All = 4,
    /// In a sharded distributed file system.
    Dfs = 5,
}

impl ReplicaType {
    /// The type of a number.
    pub fn from_number(number: i32) -> Option<Self> {
        Some(match number {
            0 => Self::Memory,
            1 => Self::Disk,
            2 => Self::LocalDisk,
            3 => Self::NofSsd,
            4 => Self::All,
            5 => Self::Dfs,
            _ => return None,
        })
    }
}

/// Where one replica lies in a client's memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MemoryLocation {
    /// Length in bytes.
    pub size: u64,
    /// Virtual address in the owner's process.
    pub address: u64,
    /// Wire to reach it with.
    pub protocol: String,
    /// What to open to reach it ([`Segment::endpoint`]).
    pub endpoint: String,
}

/// Where one replica lies.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ReplicaLocation {
    /// In a client's memory.
    Memory(MemoryLocation),
    /// On an NVMe-oF target, described like memory.
    NofSsd(MemoryLocation),
    /// A file on a shared file system.
    Disk {
        /// Path of the file.
        path: String,
        /// Length in bytes.
        size: u64,
    },
    /// On a client's own disk.
    LocalDisk {
        /// The owner.
        client: ClientId,
        /// Length in bytes.
        size: u64,
        /// Where the owner serves reads.
        endpoint: String,
    },
    /// In a shard of a distributed file system.
    Dfs {
        /// Path of the shard.
        path: String,
        /// First byte in the shard.
        offset: u64,
        /// Length in bytes.
        size: u64,
        /// Length on disk.
        aligned_size: u64,
        /// Number of the shard.
        shard: i32,
    },
}

impl ReplicaLocation {
    /// Length of the object in bytes.
    pub fn size(&self) -> u64 {
        match self {
            Self::Memory(at) | Self::NofSsd(at) => at.size,
            Self::Disk { size, .. } | Self::LocalDisk { size, .. } | Self::Dfs { size, .. } => *size,
        }
    }

    /// The memory location, if that is what it is.
    pub fn memory(&self) -> Option<&MemoryLocation> {
        match self {
            Self::Memory(at) => Some(at),
            _ => None,
        }
    }
}

/// One copy of an object.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Replica {
    /// Its number, never used twice by one master.
    pub id: ReplicaId,
    /// Where it lies.
    pub location: ReplicaLocation,
    /// Whether it can be read.
    pub status: ReplicaStatus,
}

/// Answer to "where is this object?": its readable replicas and how long they stay put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaList {
    /// Readable replicas, at least one.
    pub replicas: Vec<Replica>,
    /// The master neither moves nor reuses their space for this long after it answered.
    pub lease: Duration,
    /// CRC-64 of the value, when the writer gave one.
    pub checksum: Option<u64>,
}

/// What to do with an object's soft pin, with the existing system's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum SoftPin {
    /// Leave it as it is.
    #[default]
    Preserve = 0,
    /// Pin: evicted only when nothing else is left.
    Enable = 1,
    /// Unpin.
    Disable = 2,
}

impl SoftPin {
    /// The action of a number.
    pub fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::Preserve,
            1 => Self::Enable,
            2 => Self::Disable,
            _ => return None,
        })
    }
}

/// What a value is, for statistics; with the existing system's numbers (unknown ones are kept).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct DataType(pub u8);

/// How a put wants its object kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicateConfig {
    /// Copies in memory, each in another segment. Best effort: at least one.
    pub replicas: u64,
    /// Copies on NVMe-oF targets (refused: no such targets here).
    pub nof_replicas: u64,
    /// Copies in a distributed file system (refused).
    pub dfs_replicas: u64,
    /// What to do with the soft pin.
    pub soft_pin: SoftPin,
    /// How long a soft pin lasts; the master's default when absent. Only with [`SoftPin::Enable`].
    pub soft_pin_ttl_ms: Option<u64>,
    /// Never evict; only an explicit remove takes it away.
    pub hard_pin: bool,
    /// Segment names to try first, in order.
    pub preferred_segments: Vec<String>,
    /// Older form of the above; wins when not empty.
    pub preferred_segment: String,
    /// Segment names for NVMe-oF copies.
    pub preferred_nof_segments: Vec<String>,
    /// Prefer segments of the writer's own host.
    pub same_node: bool,
    /// What the value is.
    pub data_type: DataType,
    /// Host of the writer, empty when unknown.
    pub host_id: String,
    /// One group per key of the batch, empty for none.
    pub group_ids: Option<Vec<String>>,
}

impl Default for ReplicateConfig {
    fn default() -> Self {
        Self {
            replicas: 1,
            nof_replicas: 0,
            dfs_replicas: 0,
            soft_pin: SoftPin::Preserve,
            soft_pin_ttl_ms: None,
            hard_pin: false,
            preferred_segments: Vec::new(),
            preferred_segment: String::new(),
            preferred_nof_segments: Vec::new(),
            same_node: false,
            data_type: DataType::default(),
            host_id: String::new(),
            group_ids: None,
        }
    }
}

impl ReplicateConfig {
    /// The defaults with this many copies in memory.
    pub fn replicas(replicas: u64) -> Self {
        Self { replicas, ..Self::default() }
    }

    /// Segment names to try first: the older single form wins when it is set.
    pub fn preferred(&self) -> &[String] {
        if self.preferred_segment.is_empty() {
            &self.preferred_segments
        } else {
            std::slice::from_ref(&self.preferred_segment)
        }
    }
}
