//! Segments in parts of files. A lock keeps two stores on this host from offering the same byte,
//! which two objects would share.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use mooncake_core::memory::{HostMemory, MemorySource, MemorySpan, check_free_memory, missing_file_memory};
use mooncake_core::{Error, ErrorCode, Result};

use crate::host::allow_overcommit;

/// Mapped and locked part of a file.
pub(super) struct FileSegment {
    memory: HostMemory,
    /// Holder of the lock, which is not inherited by child processes and ends with this process.
    _locked: File,
}

impl FileSegment {
    /// Maps `len` bytes from `offset` on. The file must have been opened for this segment only.
    ///
    /// # Errors
    /// Returns `SEGMENT_ALREADY_EXISTS` if this process or another one offers some of the bytes,
    /// `FILE_WRITE_FAIL` if the file has holes and its file system has no space for them, or the
    /// error that prevents the mapping.
    pub(super) fn new(file: File, offset: u64, len: usize) -> Result<Self> {
        // The kernel would end the process in the middle.
        if !allow_overcommit() {
            let missing = missing_file_memory(&file, offset, len as u64);
            check_free_memory(usize::try_from(missing).unwrap_or(usize::MAX))?;
        }
        // A hole in the file would end the process at its first use on a full file system.
        let memory = HostMemory::map_filled(&file, offset, len)?;
        if let Err(error) = lock(&file, offset, len) {
            if [io::ErrorKind::WouldBlock, io::ErrorKind::PermissionDenied].contains(&error.kind()) {
                return Err(Error::new(
                    ErrorCode::SegmentAlreadyExists,
                    format!(
                        "cannot mount file segment: some bytes are already offered. offset={offset} end={}",
                        offset + len as u64
                    ),
                ));
            }
            tracing::warn!(
                "cannot lock the file of a segment; other processes can offer the same bytes: {error}"
            );
        }
        Ok(Self { memory, _locked: file })
    }
}

/// Locks these bytes for this open file description. The lock excludes all others, also in this
/// process.
#[allow(unsafe_code)]
fn lock(file: &File, offset: u64, len: usize) -> io::Result<()> {
    let beyond = |_| io::Error::from(io::ErrorKind::InvalidInput);
    // SAFETY: plain integers, for which zero is valid.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = libc::F_WRLCK as _;
    range.l_whence = libc::SEEK_SET as _;
    range.l_start = libc::off_t::try_from(offset).map_err(beyond)?;
    range.l_len = libc::off_t::try_from(len).map_err(beyond)?;
    // SAFETY: the file is open, and the call only reads the range.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

// SAFETY: the memory inside upholds the contract.
#[allow(unsafe_code)]
unsafe impl MemorySource for FileSegment {
    fn span(&self) -> MemorySpan {
        self.memory.span()
    }
}
