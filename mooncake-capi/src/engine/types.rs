//! Types of the C interface, laid out as in the header of Mooncake C++.

use std::ffi::{c_char, c_int, c_void};

/// Handle of an engine. The value is a number, not a valid address.
pub type transfer_engine_t = *mut c_void;
/// Transport of an engine. The value is only compared with NULL.
pub type transport_t = *mut c_void;
/// Number of an opened segment.
pub type segment_id_t = i32;
/// Older name of `segment_id_t`.
pub type segment_handle_t = i32;
/// Number of a batch.
pub type batch_id_t = u64;

/// Number of the engine's own segment.
pub const LOCAL_SEGMENT: i32 = 0;
/// Number of no batch.
pub const INVALID_BATCH: u64 = u64::MAX;

/// Transfer from the target into local memory.
pub const OPCODE_READ: c_int = 0;
/// Transfer from local memory to the target.
pub const OPCODE_WRITE: c_int = 1;

/// Not sent yet.
pub const STATUS_WAITING: c_int = 0;
/// In progress.
pub const STATUS_PENDING: c_int = 1;
/// Invalid request.
pub const STATUS_INVALID: c_int = 2;
/// Cancelled.
pub const STATUS_CANCELED: c_int = 3;
/// Completed.
pub const STATUS_COMPLETED: c_int = 4;
/// Not completed in time.
pub const STATUS_TIMEOUT: c_int = 5;
/// Failed.
pub const STATUS_FAILED: c_int = 6;

/// Transfer request.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct transfer_request {
    /// `OPCODE_READ` or `OPCODE_WRITE`.
    pub opcode: c_int,
    /// Registered local memory.
    pub source: *mut c_void,
    /// Segment of the other side.
    pub target_id: segment_id_t,
    /// Address in the other process.
    pub target_offset: u64,
    /// Length in bytes.
    pub length: u64,
}
/// Transfer request.
pub type transfer_request_t = transfer_request;

/// Status of a transfer.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct transfer_status {
    /// Status, one of the `STATUS_...` constants.
    pub status: c_int,
    /// Bytes that were certainly transferred.
    pub transferred_bytes: u64,
}
/// Status of a transfer.
pub type transfer_status_t = transfer_status;

/// Message of one engine to another.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct notify_msg {
    /// Subject of the message.
    pub name: *mut c_char,
    /// Text of the message.
    pub msg: *mut c_char,
}
/// Message of one engine to another.
pub type notify_msg_t = notify_msg;

/// Piece of memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct buffer_entry {
    /// Address of the first byte.
    pub addr: *mut c_void,
    /// Length in bytes.
    pub length: usize,
}
/// Piece of memory.
pub type buffer_entry_t = buffer_entry;

/// Length of a device name in bytes, its zero byte included.
pub const NIC_NAME_LEN: usize = 64;

/// Load of an RDMA device.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct nic_load_stat {
    /// Name of the device. A longer name is cut.
    pub device_name: [c_char; NIC_NAME_LEN],
    /// Bytes of the messages that are posted or wait.
    pub inflight_bytes: u64,
    /// Weighted mean of the throughput in bytes per second.
    pub ewma_bandwidth_bps: f64,
}
/// Load of an RDMA device.
pub type nic_load_stat_t = nic_load_stat;

/// Memory of a segment. No function takes it; programs compile with it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct segment_memory {
    /// Address of the first byte.
    pub addr: *mut c_void,
    /// Length in bytes.
    pub size: u64,
    /// Device of the memory.
    pub location: *const c_char,
}

/// File of a segment behind NVMe over Fabrics. No function takes it; programs compile with it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct segment_file {
    /// Path of the file.
    pub file_path: *const c_char,
    /// Name of the subsystem.
    pub subsystem_name: *const c_char,
    /// Protocol.
    pub proto: *const c_char,
    /// IP address.
    pub ip: *const c_char,
    /// Port.
    pub port: u64,
}

/// Kinds of segments.
#[derive(Clone, Copy)]
#[repr(C)]
pub union segment_kind {
    /// Memory.
    pub rdma: segment_memory,
    /// File.
    pub nvmeof: segment_file,
}

/// Description of a segment. No function takes it; programs compile with it.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct segment_desc {
    /// Kind of the segment.
    pub r#type: c_int,
    /// Description by kind.
    pub desc_: segment_kind,
}
/// Description of a segment.
pub type segment_desc_t = segment_desc;
