//! Memory that transports may access outside the control of the compiler.
//!
//! A *source* owns bytes at a fixed address; a *span* is the address range; a *location* names the
//! device. Registering a span with a transport makes it a region (crate `mooncake-transport`).
//! Nothing here returns `&[u8]` of memory that a remote node may write: bytes are copied through
//! raw pointers.

#[allow(unsafe_code)]
mod allocator;
#[allow(unsafe_code)]
mod device;
mod dma_buf;
#[allow(unsafe_code)]
mod host;
mod limits;
mod mapped;
#[allow(unsafe_code)]
mod page;
#[allow(unsafe_code)]
mod promised;
#[allow(unsafe_code)]
mod reserve;
#[allow(unsafe_code)]
mod shared;

use std::fmt;
use std::ptr::NonNull;

use crate::{Error, Result};

pub use allocator::return_large_buffers;
pub use device::{
    DeviceDriver, PendingCopy, copy_memory, device_driver, driver_for, offer_device_memory,
    serve_device_memory,
};
pub use dma_buf::{DmaBuf, ListedDmaBuf, dma_buf};
pub use host::{AddressHole, HostMemory, HostMemoryOptions, HugePages, lock_alone};
pub use limits::{
    MemoryLimit, check_free_memory, memory_limits, missing_file_memory, numa_node_limit, unpromised_limits,
};
pub use mapped::{Mapped, mapped};
pub use shared::{SharedMapping, SharedPages, shared_pages};

/// Device that a span lies on. Its text is the one of the segment descriptors (`cpu:0`, `cuda:1`,
/// `*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Location {
    /// Host memory of an unknown NUMA node.
    #[default]
    Any,
    /// Host memory of one NUMA node.
    Cpu(u32),
    /// Memory of one GPU.
    Cuda(u32),
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Any => f.write_str("*"),
            Location::Cpu(node) => write!(f, "cpu:{node}"),
            Location::Cuda(device) => write!(f, "cuda:{device}"),
        }
    }
}

/// Address range, its device and its access rights. The span does not say who may access it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySpan {
    /// Address of the first byte.
    pub ptr: NonNull<u8>,
    /// Length in bytes.
    pub len: usize,
    /// Device of the bytes.
    pub location: Location,
    /// True if a write would end the process ([`Mapped::ReadOnly`]). Transports read such memory
    /// and refuse to write it, for remote nodes too.
    pub read_only: bool,
    /// True if the owner may unmap the memory while it is registered, although it should not.
    /// Transports that copy to such memory let the kernel copy, which refuses unmapped addresses.
    pub may_be_unmapped: bool,
}

// SAFETY: a span is an address and a length; only its use needs care, and that is `unsafe`
// everywhere.
#[allow(unsafe_code)]
unsafe impl Send for MemorySpan {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for MemorySpan {}

impl MemorySpan {
    /// Creates a span of writable host memory.
    pub fn new(ptr: NonNull<u8>, len: usize) -> Self {
        Self { ptr, len, location: Location::Any, read_only: false, may_be_unmapped: false }
    }

    /// Returns the address of the first byte, as remote nodes see it.
    pub fn addr(&self) -> u64 {
        self.ptr.as_ptr().addr() as u64
    }

    /// Checks the range of memory to register.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for an empty range and for one that exceeds the address space.
    pub fn check(&self) -> Result<()> {
        if self.len == 0 || self.addr().checked_add(self.len as u64).is_none() {
            return Err(Error::invalid(format!(
                "cannot register memory: invalid range. address={:#x} len={}",
                self.addr(),
                self.len
            )));
        }
        Ok(())
    }

    /// Returns whether `[addr, addr + len)` lies wholly inside. False on overflow and for a length
    /// of zero.
    pub fn contains(&self, addr: u64, len: u64) -> bool {
        let Some(end) = addr.checked_add(len) else { return false };
        len != 0 && addr >= self.addr() && end <= self.addr() + self.len as u64
    }
}

/// Owner of memory that transports may access.
///
/// # Safety
///
/// `span` returns the same span every time. Its bytes stay allocated, readable and (unless the span
/// is read-only) writable at that address until the value is dropped, even when the value itself is
/// moved (so hold a `NonNull`, not a `Box`). No Rust reference to the bytes exists while a
/// transport may write them.
#[allow(unsafe_code)]
pub unsafe trait MemorySource: Send + Sync + 'static {
    /// Returns the address range of the bytes.
    fn span(&self) -> MemorySpan;
}
