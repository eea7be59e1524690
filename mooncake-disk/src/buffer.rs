//! Memory aligned for `O_DIRECT`.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::Transport;
use mooncake_transport::region::{Local, Sink, Source};

use crate::layout::BLOCK;

/// Zero-filled memory that begins at a block boundary and consists of whole blocks. Writes from it
/// and reads into it need no copy on the way to a disk.
pub struct Frame {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: the allocation belongs to this value alone.
unsafe impl Send for Frame {}
// SAFETY: shared access only reads.
unsafe impl Sync for Frame {}

impl Frame {
    /// Allocates at least `len` bytes, rounded up to blocks of 4096.
    ///
    /// # Errors
    ///
    /// Returns `BufferOverflow` if there is not enough memory.
    pub fn new(len: usize) -> Result<Self> {
        let none = || {
            Error::new(ErrorCode::BufferOverflow, format!("cannot allocate aligned buffer of {len} bytes"))
        };
        let len = len.max(1).checked_next_multiple_of(BLOCK as usize).ok_or_else(none)?;
        let layout = Layout::from_size_align(len, BLOCK as usize).map_err(|_| none())?;
        // SAFETY: the layout is not empty.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(none)?;
        Ok(Self { ptr, len })
    }

    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        if let Ok(layout) = Layout::from_size_align(self.len, BLOCK as usize) {
            // SAFETY: allocated in `new` with the same layout.
            unsafe { dealloc(self.ptr.as_ptr(), layout) };
        }
    }
}

impl Deref for Frame {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: owned and initialised; while a transport uses it, the transport holds the value.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for Frame {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Frame({} bytes)", self.len)
    }
}

// SAFETY: the bytes are on the heap and stay there when the value is moved; the holder of the value
// is their only user.
unsafe impl<T: Transport> Source<T> for Frame {
    fn local(&self) -> Local<'_, T::Registration> {
        Local { registration: None, span: MemorySpan::new(self.ptr, self.len) }
    }
}

// SAFETY: as above.
unsafe impl<T: Transport> Sink<T> for Frame {}
