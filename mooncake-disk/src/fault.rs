//! A disk that misbehaves as a test tells it to (feature `testkit`).

use std::fmt;

/// One request, as it is about to go to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoRequest {
    /// Whether it writes.
    pub write: bool,
    /// Where in the file.
    pub offset: u64,
    /// Length in bytes.
    pub len: usize,
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoFault {
    /// It goes through.
    None,
    /// It fails with this `errno`, and the kernel never sees it.
    Errno(i32),
    /// Only that many bytes are moved (at least one, rounded to blocks where the file needs that).
    Short(usize),
    /// It is never answered.
    Stall,
}

/// Decides about requests. Called from the threads that do the I/O.
pub trait IoFaults: fmt::Debug + Send + Sync + 'static {
    /// What becomes of this one.
    fn fault(&self, request: IoRequest) -> IoFault;
}
