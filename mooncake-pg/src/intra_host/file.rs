//! Shared file of words and bytes that another process of this host opens.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use bytes::{Buf, BufMut};
use mooncake_core::clock::Rng;
use mooncake_core::memory::{HostMemory, HostMemoryOptions, MemorySource};
use mooncake_core::{Error, Result};
use mooncake_ipc::socket::sealed;
use rustix::fs::{CWD, Mode, OFlags, openat};

/// Name of the files, which other descriptors do not have.
const NAME: &str = "mooncake-pg-nearby";

/// Place of a file: a descriptor of the process that made it. Processes of other hosts and of other
/// process namespaces do not find the file, and processes of other users may not open it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FileAddress {
    pub(crate) process: u32,
    pub(crate) descriptor: u32,
    /// First eight bytes of the file.
    pub(crate) secret: u64,
}

impl FileAddress {
    /// Length of an encoded address.
    pub(crate) const BYTES: usize = 16;

    /// Address of no file.
    pub(crate) const NONE: Self = Self { process: 0, descriptor: 0, secret: 0 };

    pub(crate) fn encode(self, out: &mut impl BufMut) {
        out.put_u32_le(self.process);
        out.put_u32_le(self.descriptor);
        out.put_u64_le(self.secret);
    }

    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        let mut bytes = &bytes[..];
        Self { process: bytes.get_u32_le(), descriptor: bytes.get_u32_le(), secret: bytes.get_u64_le() }
    }
}

/// File of sealed length, mapped.
pub(super) struct SharedFile {
    memory: HostMemory,
}

impl SharedFile {
    /// Creates a file of zeros behind its first eight bytes.
    ///
    /// # Errors
    /// The errors of the allocation.
    pub(super) fn create(len: usize) -> Result<(Self, FileAddress)> {
        let options = HostMemoryOptions { shared: Some(NAME.into()), ..HostMemoryOptions::default() };
        let file = Self { memory: HostMemory::with(len, &options)? };
        let descriptor = file.memory.fd().ok_or_else(|| Error::internal("shared memory without a file"))?;
        let address = FileAddress {
            process: std::process::id(),
            descriptor: descriptor.as_raw_fd().cast_unsigned(),
            secret: Rng::from_os().next_u64() | 1,
        };
        file.word64(0).store(address.secret, Ordering::Release);
        Ok((file, address))
    }

    /// Opens the file of another process of this host.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the address does not lead to such a file of this length.
    pub(super) fn open(address: FileAddress, len: usize) -> Result<Self> {
        let path = format!("/proc/{}/fd/{}", address.process, address.descriptor);
        // The descriptor stands for the file, which is not opened yet: another kind of file never
        // is, although its process may replace it at any time.
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let handle = openat(CWD, &path, flags, Mode::empty()).map_err(std::io::Error::from)?;
        let path = format!("/proc/self/fd/{}", handle.as_raw_fd());
        let target = fs::read_link(&path).map_err(Error::from)?;
        if !target.to_string_lossy().starts_with(&format!("/memfd:{NAME} ")) {
            return Err(Error::invalid("cannot open shared file: the descriptor is not one"));
        }
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file: File = sealed(Some(file.map_err(Error::from)?.into()))?;
        let file = Self { memory: HostMemory::map_file(&file, 0, len)? };
        if file.word64(0).load(Ordering::Acquire) != address.secret {
            return Err(Error::invalid("cannot open shared file: it is another one"));
        }
        Ok(file)
    }

    /// Returns the word of 8 bytes at an offset.
    pub(super) fn word64(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.memory.len(), "beyond the file");
        // SAFETY: inside the mapping, aligned, and accessed only as an atomic by all processes. The
        // length of the file is sealed.
        unsafe { AtomicU64::from_ptr(self.memory.span().ptr.add(at).cast().as_ptr()) }
    }

    /// Returns the word of 4 bytes at an offset.
    pub(super) fn word(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at + 4 <= self.memory.len(), "beyond the file");
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.memory.span().ptr.add(at).cast().as_ptr()) }
    }

    /// Copies bytes in. The other process may read them at the same time.
    pub(super) fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at.checked_add(bytes.len()).is_some_and(|end| end <= self.memory.len()), "beyond the file");
        // SAFETY: inside the mapping; the source is memory of this process. No reference to bytes
        // of the file is ever made.
        unsafe {
            self.memory.span().ptr.add(at).as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
    }

    /// Appends bytes to `out`. The other process may write them at the same time.
    pub(super) fn read(&self, at: usize, len: usize, out: &mut Vec<u8>) {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.memory.len()), "beyond the file");
        out.reserve(len);
        // SAFETY: inside the mapping, and as many bytes of the vector are reserved. No reference to
        // bytes of the file is ever made.
        unsafe {
            let from = self.memory.span().ptr.add(at).as_ptr().cast_const();
            out.as_mut_ptr().add(out.len()).copy_from_nonoverlapping(from, len);
            out.set_len(out.len() + len);
        }
    }
}
