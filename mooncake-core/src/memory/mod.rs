//! Memory that wires may touch behind the compiler's back.
//!
//! A *source* owns bytes at a fixed address; a *span* is where they are; a *location* says on which device.
//! Registering a span with a wire makes it a region (crate `mooncake-transport`). Nothing here hands out `&[u8]`
//! of memory that a peer may write: whoever needs bytes copies them through raw pointers.

#[allow(unsafe_code)]
mod device;
mod dma_buf;
#[allow(unsafe_code)]
mod host;
mod mapped;
#[allow(unsafe_code)]
mod shared;

use std::fmt;
use std::ptr::NonNull;

pub use device::{
    DeviceDriver, PendingCopy, copy_memory, device_driver, driver_for, offer_device_memory,
    serve_device_memory,
};
pub use dma_buf::{DmaBuf, ListedDmaBuf, dma_buf};
pub use host::{AddressHole, HostMemory, HostMemoryOptions, HugePages, lock_alone};
pub use mapped::{Mapped, mapped};
pub use shared::{SharedMapping, SharedPages, shared_pages};

/// Which memory a span lies in; the text is the one of the segment descriptors (`cpu:0`, `cuda:1`, `*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Location {
    /// Host memory, NUMA node not known.
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

/// Where bytes are, and whether they can be written at all. Says nothing about who may touch them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySpan {
    /// First byte.
    pub ptr: NonNull<u8>,
    /// Length in bytes.
    pub len: usize,
    /// On which device.
    pub location: Location,
    /// Writing to it would end the process ([`Mapped::ReadOnly`]): wires read it and refuse to write it, for peers too.
    pub read_only: bool,
    /// Its owner may take it away while it is registered, although it should not: wires that copy to it have the kernel do that, which refuses.
    pub lent: bool,
}

// SAFETY: a span is an address and a length; using it is what needs care, and that is `unsafe` everywhere.
#[allow(unsafe_code)]
unsafe impl Send for MemorySpan {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for MemorySpan {}

impl MemorySpan {
    /// A span of host memory that can be written.
    pub fn new(ptr: NonNull<u8>, len: usize) -> Self {
        Self { ptr, len, location: Location::Any, read_only: false, lent: false }
    }

    /// The first byte's address as peers see it.
    pub fn addr(&self) -> u64 {
        self.ptr.as_ptr().addr() as u64
    }

    /// Whether `[addr, addr + len)` lies wholly inside; false on overflow and for a length of zero.
    pub fn contains(&self, addr: u64, len: u64) -> bool {
        let Some(end) = addr.checked_add(len) else { return false };
        len != 0 && addr >= self.addr() && end <= self.addr() + self.len as u64
    }
}

/// Owner of memory that wires may touch.
///
/// # Safety
/// `span` returns the same span every time, and its bytes stay allocated, readable and (unless it says read-only) writable at that address
/// until the value is dropped, even when the value itself is moved (so hold a `NonNull`, not a `Box`). No Rust
/// reference to the bytes exists while a wire may write them.
#[allow(unsafe_code)]
pub unsafe trait MemorySource: Send + Sync + 'static {
    /// Where the bytes are.
    fn span(&self) -> MemorySpan;
}
