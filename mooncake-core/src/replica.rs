//! Data model of objects: segments, replicas, and the options of a put.

use std::time::Duration;

use crate::hints::PutHints;
use crate::ids::{ClientId, ReplicaId, SegmentId};
use crate::{Error, Result};

/// Range of a client's memory in which the master places objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Identifier chosen by the client. A second mount of the same id is the same mount.
    pub id: SegmentId,
    /// `host:port` of the client. Several segments may share a name; preferences refer to it.
    pub name: String,
    /// Virtual address of the first byte in the process of the client.
    pub base: u64,
    /// Length in bytes.
    pub size: u64,
    /// Endpoint to open: `ip:port` in peer-to-peer mode, else the name of the segment in the
    /// directory.
    pub endpoint: String,
    /// Transport that the segment is registered with (`tcp`, `rdma`, ..).
    pub protocol: String,
    /// Host of the client, empty when unknown. Replicas of one object go to distinct hosts first.
    pub host_id: String,
    /// Place of the memory inside its host, if the client knows it.
    pub locality: Option<Box<Locality>>,
}

/// Place of memory inside a host, as in Mooncake C++ 0.3.14.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Locality {
    /// Number of the NUMA node.
    pub numa_node: i32,
    /// Names of the RDMA devices near the memory.
    pub hca_names: Vec<String>,
}

/// State of a mounted segment, with the numbers of Mooncake C++.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum SegmentStatus {
    /// Unknown.
    Undefined = 0,
    /// Readable and open for new objects.
    Ok = 1,
    /// Draining: objects are being moved away, and no new ones are placed here.
    Draining = 2,
    /// Drained: no object is left.
    Drained = 3,
    /// Unmounting after a grace period; no new objects are placed here.
    GracefullyUnmounting = 4,
    /// Unmounting now.
    Unmounting = 5,
}

/// State of one replica, with the numbers of Mooncake C++.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum ReplicaStatus {
    /// Unknown.
    Undefined = 0,
    /// Created, not yet being written.
    Initialized = 1,
    /// Space allocated, write in progress.
    Processing = 2,
    /// Readable.
    Complete = 3,
    /// Removed.
    Removed = 4,
    /// Failed write.
    Failed = 5,
}

impl ReplicaStatus {
    /// Returns the status of a number.
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

/// Kind of replicas that the end or the revocation of a put refers to, with the numbers of Mooncake
/// C++.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum ReplicaType {
    /// Replica in the memory of a client.
    Memory = 0,
    /// File on a shared file system.
    Disk = 1,
    /// Replica on a client's own disk, served by that client.
    LocalDisk = 2,
    /// Replica on an NVMe-oF target.
    NofSsd = 3,
    /// Replicas of every kind.
    All = 4,
    /// Replica in a sharded distributed file system.
    Dfs = 5,
}

impl ReplicaType {
    /// Returns the type of a number.
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

/// Place of a replica in the memory of a client.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MemoryLocation {
    /// Length in bytes.
    pub size: u64,
    /// Virtual address in the process of the client.
    pub address: u64,
    /// Transport of the segment.
    pub protocol: String,
    /// Endpoint of the segment ([`Segment::endpoint`]).
    pub endpoint: String,
    /// Place of the memory inside its host ([`Segment::locality`]).
    pub locality: Option<Box<Locality>>,
}

/// Place of one replica.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ReplicaLocation {
    /// Memory of a client.
    Memory(MemoryLocation),
    /// NVMe-oF target, described like memory.
    NofSsd(MemoryLocation),
    /// File on a shared file system.
    Disk {
        /// Path of the file.
        path: String,
        /// Length in bytes.
        size: u64,
    },
    /// Disk of a client.
    LocalDisk {
        /// Client that owns the disk.
        client: ClientId,
        /// Length in bytes.
        size: u64,
        /// Endpoint at which the client serves reads.
        endpoint: String,
    },
    /// Shard of a distributed file system.
    Dfs {
        /// Path of the shard.
        path: String,
        /// Offset of the first byte in the shard.
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
    /// Returns the length of the object in bytes.
    pub fn size(&self) -> u64 {
        match self {
            Self::Memory(at) | Self::NofSsd(at) => at.size,
            Self::Disk { size, .. } | Self::LocalDisk { size, .. } | Self::Dfs { size, .. } => *size,
        }
    }

    /// Returns the location of a replica that is described like memory.
    pub fn like_memory(&self) -> Option<&MemoryLocation> {
        match self {
            Self::Memory(at) | Self::NofSsd(at) => Some(at),
            _ => None,
        }
    }

    /// Returns the memory location, if the replica is in memory.
    pub fn memory(&self) -> Option<&MemoryLocation> {
        match self {
            Self::Memory(at) => Some(at),
            _ => None,
        }
    }
}

/// Copy of an object.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Replica {
    /// Number of the replica, which one master never uses twice.
    pub id: ReplicaId,
    /// Place of the replica.
    pub location: ReplicaLocation,
    /// State of the replica.
    pub status: ReplicaStatus,
}

/// Readable replicas of an object, and the lease on them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaList {
    /// Readable replicas, at least one.
    pub replicas: Vec<Replica>,
    /// Time after the response during which the master neither moves the replicas nor reuses their
    /// space.
    pub lease: Duration,
    /// CRC-64 of the value, if the writer sent one.
    pub checksum: Option<u64>,
    /// Tenant that the master found the object under, if it differs from that of the request.
    pub resolved_tenant: Option<String>,
}

/// Change of the soft pin of an object, with the numbers of Mooncake C++.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum SoftPin {
    /// Leaves the pin unchanged.
    #[default]
    Preserve = 0,
    /// Pins the object: it is evicted only when nothing else is left.
    Enable = 1,
    /// Unpins the object.
    Disable = 2,
}

impl SoftPin {
    /// Returns the action of a number.
    pub fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::Preserve,
            1 => Self::Enable,
            2 => Self::Disable,
            _ => return None,
        })
    }
}

/// Type of a value, for statistics, with the numbers of Mooncake C++ (unknown ones are kept).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct DataType(pub u8);

/// Maximum length of the name of a session in bytes.
pub const MAX_SESSION_ID: usize = 256;

/// Replication options of a put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicateConfig {
    /// Number of copies in memory, each in another segment. Best effort: at least one.
    pub replicas: u64,
    /// Number of copies on NVMe-oF targets (refused: not supported here).
    pub nof_replicas: u64,
    /// Number of copies in a distributed file system (refused).
    pub dfs_replicas: u64,
    /// Change of the soft pin.
    pub soft_pin: SoftPin,
    /// Duration of a soft pin, or the default of the master when absent. Only with
    /// [`SoftPin::Enable`].
    pub soft_pin_ttl_ms: Option<u64>,
    /// True if the object is never evicted. Only an explicit remove deletes it.
    pub hard_pin: bool,
    /// Names of the segments to try first, in order.
    pub preferred_segments: Vec<String>,
    /// Older form of [`preferred_segments`](Self::preferred_segments); wins when not empty.
    pub preferred_segment: String,
    /// Names of the segments for NVMe-oF copies.
    pub preferred_nof_segments: Vec<String>,
    /// True if segments on the host of the writer are preferred.
    pub same_node: bool,
    /// Type of the value.
    pub data_type: DataType,
    /// Host of the writer, empty when unknown.
    pub host_id: String,
    /// Group of each key of the batch, empty for none.
    pub group_ids: Option<Vec<String>>,
    /// Session of each key of the batch, with at most [`MAX_SESSION_ID`] bytes. Events name it.
    pub session_ids: Option<Vec<Vec<u8>>>,
    /// Names of the RDMA devices that the writer prefers.
    pub preferred_hca_names: Option<Vec<String>>,
    /// Names of the RDMA devices that the writer prefers, for each key of the batch.
    pub per_key_preferred_hca_names: Option<Vec<Vec<String>>>,
    /// Group of each key of the batch that stays in memory together, in managed weights of Mooncake
    /// C++.
    pub residency_affinity_ids: Option<Vec<Vec<u8>>>,
    /// Hints for the master. They travel in a call of their own, because Mooncake C++ has no field
    /// for them.
    pub hints: Option<Box<PutHints>>,
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
            session_ids: None,
            preferred_hca_names: None,
            per_key_preferred_hca_names: None,
            residency_affinity_ids: None,
            hints: None,
        }
    }
}

impl ReplicateConfig {
    /// Returns whether an option has an item for each key of a batch.
    pub fn has_lists(&self) -> bool {
        self.group_ids.is_some()
            || self.session_ids.is_some()
            || self.per_key_preferred_hca_names.is_some()
            || self.residency_affinity_ids.is_some()
    }

    /// Returns these options for the keys at the indices `some` of a batch of `all`. A list with
    /// another number of items stays as it is, so that the master refuses it.
    #[must_use]
    pub fn of_keys(&self, some: impl Iterator<Item = usize> + Clone, all: usize) -> Self {
        fn items<T: Clone>(
            list: &Option<Vec<T>>,
            some: impl Iterator<Item = usize>,
            all: usize,
        ) -> Option<Vec<T>> {
            match list {
                Some(list) if list.len() == all => {
                    Some(some.filter_map(|at| list.get(at).cloned()).collect())
                }
                other => other.clone(),
            }
        }
        Self {
            preferred_segments: self.preferred_segments.clone(),
            preferred_segment: self.preferred_segment.clone(),
            preferred_nof_segments: self.preferred_nof_segments.clone(),
            host_id: self.host_id.clone(),
            group_ids: items(&self.group_ids, some.clone(), all),
            session_ids: items(&self.session_ids, some.clone(), all),
            preferred_hca_names: self.preferred_hca_names.clone(),
            per_key_preferred_hca_names: items(&self.per_key_preferred_hca_names, some.clone(), all),
            residency_affinity_ids: items(&self.residency_affinity_ids, some, all),
            hints: self.hints.clone(),
            ..*self
        }
    }

    /// Creates the default options with this many copies in memory.
    pub fn replicas(replicas: u64) -> Self {
        Self { replicas, ..Self::default() }
    }

    /// Checks the options that every master refuses.
    ///
    /// # Errors
    /// `INVALID_PARAMS`, naming the option.
    pub fn check(&self) -> Result<()> {
        if self.nof_replicas > 0 || self.dfs_replicas > 1 {
            return Err(Error::invalid(format!(
                "cannot put object: replicas on NVMe-oF targets or in a distributed file system \
                 are not supported. nof_replica_num={} dfs_replica_num={}",
                self.nof_replicas, self.dfs_replicas
            )));
        }
        if self.replicas == 0 {
            return Err(Error::invalid("cannot put object: replica_num must be at least 1. replica_num=0"));
        }
        if let Some(hints) = &self.hints {
            hints.check()?;
        }
        match self.soft_pin_ttl_ms {
            Some(ttl) if self.soft_pin != SoftPin::Enable => Err(Error::invalid(format!(
                "cannot put object: soft_pin_ttl_ms needs soft_pin_action ENABLE. soft_pin_ttl_ms={ttl}"
            ))),
            _ => Ok(()),
        }
    }

    /// Returns the names of the segments to try first. The older single form wins when it is set.
    pub fn preferred(&self) -> &[String] {
        if self.preferred_segment.is_empty() {
            &self.preferred_segments
        } else {
            std::slice::from_ref(&self.preferred_segment)
        }
    }
}
