//! Fault injection: a disk that misbehaves as a test tells it to (feature `testkit`).

use std::sync::Arc;
use std::{fmt, io};

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

/// Faults of the requests to a disk. The default has none. Only a build with feature `testkit`
/// creates others.
#[derive(Clone, Debug, Default)]
pub struct Faults(Option<Arc<dyn IoFaults>>);

impl PartialEq for Faults {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (one, other) => one.is_none() && other.is_none(),
        }
    }
}

impl Eq for Faults {}

impl Faults {
    /// Creates faults on which `faults` decides.
    pub fn new(faults: Arc<dyn IoFaults>) -> Self {
        Self(Some(faults))
    }

    /// Applies a fault to a request, which may shorten `len` to a multiple of `align`. The error is
    /// the failure of the request, or `None` if the request gets no response.
    pub(crate) fn apply(
        &self,
        write: bool,
        offset: u64,
        len: &mut usize,
        align: usize,
    ) -> Result<(), Option<io::Error>> {
        let Some(faults) = &self.0 else { return Ok(()) };
        match faults.fault(IoRequest { write, offset, len: *len }) {
            IoFault::None => Ok(()),
            IoFault::Short(max_len) => {
                *len = (*len).min((max_len - max_len % align).max(align));
                Ok(())
            }
            IoFault::Errno(errno) => Err(Some(io::Error::from_raw_os_error(errno))),
            IoFault::Stall => Err(None),
        }
    }
}
