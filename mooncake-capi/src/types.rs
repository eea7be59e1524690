//! What goes over the border, laid out as C programs expect it.

use std::ffi::{c_char, c_int, c_void};

/// An engine. A number in disguise: it leads nowhere.
pub type transfer_engine_t = *mut c_void;
/// A wire of an engine; it is only compared with NULL.
pub type transport_t = *mut c_void;
/// An opened segment.
pub type segment_id_t = i32;
/// Older name of `segment_id_t`.
pub type segment_handle_t = i32;
/// A batch.
pub type batch_id_t = u64;

/// The engine's own segment.
pub const LOCAL_SEGMENT: i32 = 0;
/// No batch.
pub const INVALID_BATCH: u64 = u64::MAX;

/// From the target into local memory.
pub const OPCODE_READ: c_int = 0;
/// From local memory to the target.
pub const OPCODE_WRITE: c_int = 1;

/// Not sent yet.
pub const STATUS_WAITING: c_int = 0;
/// Under way.
pub const STATUS_PENDING: c_int = 1;
/// Makes no sense.
pub const STATUS_INVALID: c_int = 2;
/// Given up.
pub const STATUS_CANCELED: c_int = 3;
/// Done.
pub const STATUS_COMPLETED: c_int = 4;
/// Not done in time.
pub const STATUS_TIMEOUT: c_int = 5;
/// Failed.
pub const STATUS_FAILED: c_int = 6;

/// One transfer.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct transfer_request {
    /// `OPCODE_READ` or `OPCODE_WRITE`.
    pub opcode: c_int,
    /// Local memory, registered.
    pub source: *mut c_void,
    /// The other side.
    pub target_id: segment_id_t,
    /// Address in the other process.
    pub target_offset: u64,
    /// Bytes.
    pub length: u64,
}
/// One transfer.
pub type transfer_request_t = transfer_request;

/// How a transfer stands.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct transfer_status {
    /// `STATUS_...`
    pub status: c_int,
    /// Bytes that were moved for sure.
    pub transferred_bytes: u64,
}
/// How a transfer stands.
pub type transfer_status_t = transfer_status;

/// A message of one engine to another.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct notify_msg {
    /// What it is about.
    pub name: *mut c_char,
    /// The message.
    pub msg: *mut c_char,
}
/// A message of one engine to another.
pub type notify_msg_t = notify_msg;

/// A piece of memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct buffer_entry {
    /// Where it begins.
    pub addr: *mut c_void,
    /// Bytes.
    pub length: usize,
}
/// A piece of memory.
pub type buffer_entry_t = buffer_entry;
