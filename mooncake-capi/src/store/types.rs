//! Types of the C interface. `mooncake_replicate_config` is laid out as in the header of Mooncake
//! C++.

use std::ffi::{c_char, c_int, c_void};

/// Handle of a store. The value is a number, not a valid address.
pub type mooncake_store_t = *mut c_void;

/// Maximum number of items of one call.
pub const MOONCAKE_STORE_MAX_BATCH: usize = 1 << 20;

/// Replica in the memory of a client.
pub const MOONCAKE_REPLICA_MEMORY: c_int = 0;
/// File on a shared file system.
pub const MOONCAKE_REPLICA_DISK: c_int = 1;
/// Replica on the disk of a client.
pub const MOONCAKE_REPLICA_LOCAL_DISK: c_int = 2;
/// Replica on an NVMe-oF target.
pub const MOONCAKE_REPLICA_NOF_SSD: c_int = 3;
/// Replica in a distributed file system.
pub const MOONCAKE_REPLICA_DFS: c_int = 5;

/// Options of a put. NULL in place of the options means one replica, without pins.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct mooncake_replicate_config {
    /// Number of replicas in memory.
    pub replica_num: usize,
    /// Not 0 if the object is evicted only when nothing else is left.
    pub with_soft_pin: c_int,
    /// Not 0 if the object is never evicted.
    pub with_hard_pin: c_int,
    /// Names of the segments to try first, or NULL. Names that are NULL are skipped.
    pub preferred_segments: *mut *const c_char,
    /// Number of these names.
    pub preferred_segments_count: usize,
}
/// Options of a put.
pub type mooncake_replicate_config_t = mooncake_replicate_config;

/// Position of one replica.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct mooncake_replica {
    /// Kind of the position, one of the `MOONCAKE_REPLICA_...` constants.
    pub kind: c_int,
    /// Endpoint of the client that has the replica, or the path of a file.
    pub endpoint: *const c_char,
    /// Transport of the memory. Empty for a replica on a disk.
    pub protocol: *const c_char,
    /// Address in the memory of the client, offset in a file of a distributed file system, else 0.
    pub address: u64,
    /// Length in bytes.
    pub length: u64,
}
/// Position of one replica.
pub type mooncake_replica_t = mooncake_replica;

/// Positions of an object.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct mooncake_object {
    /// Milliseconds from the response of the master during which the positions are valid.
    pub lease_ms: u64,
    /// Readable replicas.
    pub replicas: *const mooncake_replica,
    /// Number of these replicas, at least 1.
    pub replica_count: usize,
}
/// Positions of an object.
pub type mooncake_object_t = mooncake_object;

/// Objects of the keys from the front that are readable.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct mooncake_prefix {
    /// Object of each of these keys.
    pub objects: *const mooncake_object,
    /// Number of these keys.
    pub count: usize,
}
/// Objects of the keys from the front that are readable.
pub type mooncake_prefix_t = mooncake_prefix;

#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<mooncake_replicate_config>() == 32);
    assert!(std::mem::offset_of!(mooncake_replicate_config, with_hard_pin) == 12);
    assert!(std::mem::offset_of!(mooncake_replicate_config, preferred_segments) == 16);
};
