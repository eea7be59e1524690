//! Shared file of words and bytes that another process of this host opens.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use bytes::{Buf, BufMut};
use mooncake_core::clock::Rng;
use mooncake_core::memory::{HostMemory, HostMemoryOptions, MemorySource};
use mooncake_core::{Error, Result};
use mooncake_ipc::socket::sealed;

/// Name of the files, which other descriptors do not have.
pub(crate) const NAME: &str = "mooncake-pg-nearby";

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

    /// Makes the file of the memory known under the result, until [`withdraw`](Self::withdraw). The
    /// first eight bytes are in use from then on. Returns [`NONE`](Self::NONE) for memory without a
    /// file.
    pub(crate) fn publish(memory: &HostMemory) -> Self {
        let Some(descriptor) = memory.fd() else { return Self::NONE };
        let address = Self {
            process: std::process::id(),
            descriptor: descriptor.as_raw_fd().cast_unsigned(),
            secret: Rng::from_os().next_u64() | 1,
        };
        secret_of(memory).store(address.secret, Ordering::Release);
        address
    }

    /// Tells processes that have mapped the file that it ends.
    pub(crate) fn withdraw(memory: &HostMemory) {
        secret_of(memory).store(0, Ordering::Release);
    }

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

/// Returns the word at the start of a file.
fn secret_of(memory: &HostMemory) -> &AtomicU64 {
    assert!(memory.len() >= 8, "beyond the file");
    // SAFETY: inside the mapping, aligned, and accessed only as an atomic by all processes.
    unsafe { AtomicU64::from_ptr(memory.span().ptr.cast().as_ptr()) }
}

/// File of sealed length, mapped.
pub(crate) struct SharedFile {
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
        let address = FileAddress::publish(&file.memory);
        if address == FileAddress::NONE {
            return Err(Error::internal("shared memory without a file"));
        }
        Ok((file, address))
    }

    /// Opens the file of another process of this host, with this length.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the address does not lead to such a file.
    pub(super) fn open(address: FileAddress, len: usize) -> Result<Self> {
        Self::open_part(address, Some(len))
    }

    /// Opens a whole file of another process of this host.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub(super) fn open_whole(address: FileAddress) -> Result<Self> {
        Self::open_part(address, None)
    }

    fn open_part(address: FileAddress, len: Option<usize>) -> Result<Self> {
        let path = format!("/proc/{}/fd/{}", address.process, address.descriptor);
        let target = fs::read_link(&path).map_err(Error::from)?;
        // Another kind of file is not even opened.
        if !target.to_string_lossy().starts_with(&format!("/memfd:{NAME} ")) {
            return Err(Error::invalid("cannot open shared file: the descriptor is not one"));
        }
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file: File = sealed(Some(file.map_err(Error::from)?.into()))?;
        let len = match len {
            Some(len) => len,
            None => usize::try_from(file.metadata().map_err(Error::from)?.len()).unwrap_or(usize::MAX),
        };
        let file = Self { memory: HostMemory::map_file(&file, 0, len)? };
        if !file.is_at(address) {
            return Err(Error::invalid("cannot open shared file: it is another one"));
        }
        Ok(file)
    }

    /// Returns whether the file is still known under the address.
    pub(super) fn is_at(&self, address: FileAddress) -> bool {
        self.memory.len() >= 8 && self.long(0).load(Ordering::Acquire) == address.secret
    }

    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }

    /// Returns the word of 8 bytes at an offset.
    pub(crate) fn long(&self, at: usize) -> &AtomicU64 {
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

    /// Copies bytes out. The other process may write them at the same time.
    ///
    /// # Safety
    /// The bytes from `to` on are writable, and nothing else touches them.
    pub(crate) unsafe fn copy_out(&self, at: usize, len: usize, to: *mut u8) {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.memory.len()), "beyond the file");
        // SAFETY: inside the mapping; the caller promises the other side. No reference to bytes of
        // the file is ever made.
        unsafe { to.copy_from_nonoverlapping(self.memory.span().ptr.add(at).as_ptr().cast_const(), len) };
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
