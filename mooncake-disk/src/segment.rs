//! Files opened as segments.

use std::path::PathBuf;

use crate::file_ranges::RangeRegistration;
use crate::queue::SharedFile;

/// Options of [`DiskTransport::open`](crate::DiskTransport::open).
#[derive(Clone, Debug)]
pub struct OpenSegment {
    /// Path of a file, created if missing, or of a block device.
    pub path: PathBuf,
    /// Length in bytes.
    pub len: u64,
    /// True if the file grows as it is written, through the page cache. `len` is then only its
    /// limit.
    pub grows: bool,
}

/// File opened as a segment. Addresses from [`addr`](Self::addr) on stand for its bytes from 0 on.
/// Closed on drop.
#[derive(Debug)]
pub struct DiskSegment {
    pub(crate) range: RangeRegistration<SharedFile>,
}

impl DiskSegment {
    /// Returns the address of the first byte.
    pub fn addr(&self) -> u64 {
        self.range.addr()
    }

    /// Returns the length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "a segment is never empty")]
    pub fn len(&self) -> u64 {
        self.range.len()
    }

    /// Returns whether I/O bypasses the page cache.
    pub fn is_direct(&self) -> bool {
        self.range.file().align() != 1
    }
}
