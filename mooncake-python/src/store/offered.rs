//! Parts of files that stores offer to the cluster: each byte once on this host, as two objects would share it else.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use mooncake_core::memory::{HostMemory, MemorySource, MemorySpan};
use mooncake_core::{Error, ErrorCode, Result};

/// A mapped part of a file, of which nobody else on this host offers a byte.
pub(super) struct Offered {
    memory: HostMemory,
    /// Holds the lock. Not inherited by programs, and gone with the process.
    _locked: File,
}

impl Offered {
    /// Maps so many bytes from `offset` on, of a file opened for this.
    ///
    /// # Errors
    /// `SEGMENT_ALREADY_EXISTS` when some of them are offered, by this process or another, and what keeps a file from being mapped.
    pub(super) fn new(file: File, offset: u64, len: usize) -> Result<Self> {
        let memory = HostMemory::map_file(&file, offset, len)?;
        if let Err(error) = lock(&file, offset, len) {
            if [io::ErrorKind::WouldBlock, io::ErrorKind::PermissionDenied].contains(&error.kind()) {
                return Err(Error::new(
                    ErrorCode::SegmentAlreadyExists,
                    format!(
                        "of bytes {offset} to {} of this file some are offered already",
                        offset + len as u64
                    ),
                ));
            }
            tracing::warn!("nobody is kept from offering the same bytes of this file: {error}");
        }
        Ok(Self { memory, _locked: file })
    }
}

/// Locks these bytes for this opening of the file: it is in the way of all others, in this process too.
#[allow(unsafe_code)]
fn lock(file: &File, offset: u64, len: usize) -> io::Result<()> {
    let beyond = |_| io::Error::from(io::ErrorKind::InvalidInput);
    // SAFETY: plain numbers, of which zeroes are allowed.
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

// SAFETY: the memory inside keeps the promise.
#[allow(unsafe_code)]
unsafe impl MemorySource for Offered {
    fn span(&self) -> MemorySpan {
        self.memory.span()
    }
}
