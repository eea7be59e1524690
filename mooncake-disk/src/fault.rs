//! Fault injection: a disk that misbehaves as a test tells it to (feature `testkit`).

use std::fmt;

/// Request that is about to go to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoRequest {
    /// True if the request writes.
    pub write: bool,
    /// Offset in the file.
    pub offset: u64,
    /// Length in bytes.
    pub len: usize,
}

/// Fault of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoFault {
    /// No fault.
    None,
    /// Failure with this `errno`. The kernel never sees the request.
    Errno(i32),
    /// Transfer of only that many bytes (at least one, rounded to blocks where the file needs
    /// that).
    Short(usize),
    /// Request without a response.
    Stall,
}

/// Fault decisions of a test. The I/O threads call this.
pub trait IoFaults: fmt::Debug + Send + Sync + 'static {
    /// Returns the fault of a request.
    fn fault(&self, request: IoRequest) -> IoFault;
}
