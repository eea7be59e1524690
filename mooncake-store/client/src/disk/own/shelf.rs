//! Buffer of the owner of a disk from which other clients read. Parts of the buffer are lent for a
//! limited time.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::alloc::{BuiltinAllocator, Extent, SegmentAllocator};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::region::{Local, Source};
use mooncake_transport::{Region, SliceMut, Transport};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Alignment of objects in the buffer, in bytes.
const ALIGN: u64 = 4096;

/// Registered memory that is divided among loans.
#[derive(Debug)]
pub(crate) struct Shelf<T: Transport> {
    region: Region<T>,
    space: Arc<Space>,
}

#[derive(Debug)]
struct Space {
    allocator: Mutex<BuiltinAllocator>,
    freed: Notify,
}

/// Part of the buffer that belongs to one holder.
#[derive(Debug)]
pub(crate) struct LentBuffer<T: Transport> {
    slice: SliceMut<T>,
    _extent: ReservedExtent,
}

/// Extent that is released on drop.
#[derive(Debug)]
struct ReservedExtent {
    extent: Extent,
    space: Arc<Space>,
}

impl Drop for ReservedExtent {
    fn drop(&mut self) {
        self.space.allocator.lock().release(self.extent);
        self.space.freed.notify_waiters();
    }
}

impl<T: Transport> Shelf<T> {
    pub(crate) fn new(region: Region<T>) -> Self {
        let allocator = BuiltinAllocator::new(region.len() as u64, &Default::default());
        Self { region, space: Arc::new(Space { allocator: Mutex::new(allocator), freed: Notify::new() }) }
    }

    /// Returns the number of bytes that are lent.
    pub(crate) fn used(&self) -> u64 {
        self.space.allocator.lock().used()
    }

    /// Allocates space for all of these lengths at once, as soon as there is enough.
    ///
    /// # Errors
    /// Returns `BUFFER_OVERFLOW` if the buffer is too small for all of them, and
    /// `NO_AVAILABLE_HANDLE` if not enough space was freed within `patience`.
    pub(crate) async fn take(&self, lens: &[u64], patience: Duration) -> Result<Vec<LentBuffer<T>>> {
        let bytes = lens.iter().fold(0u64, |sum, len| sum.saturating_add(len.next_multiple_of(ALIGN)));
        if bytes > self.region.len() as u64 {
            let text = format!("{bytes} bytes are read at once, the buffer has {}", self.region.len());
            return Err(Error::new(ErrorCode::BufferOverflow, text));
        }
        let taken = async {
            loop {
                let freed = self.space.freed.notified();
                tokio::pin!(freed);
                // The notification is enabled before the attempt, so that space freed after the
                // attempt is noticed.
                freed.as_mut().enable();
                if let Some(buffers) = self.try_take(lens) {
                    return buffers;
                }
                freed.await;
            }
        };
        let none =
            |_| Error::new(ErrorCode::NoAvailableHandle, "no space in the buffer for readers of this disk");
        tokio::time::timeout(patience, taken).await.map_err(none)?
    }

    fn try_take(&self, lens: &[u64]) -> Option<Result<Vec<LentBuffer<T>>>> {
        let mut extents = Vec::with_capacity(lens.len());
        {
            let mut allocator = self.space.allocator.lock();
            for len in lens {
                match allocator.allocate(*len, ALIGN) {
                    Ok(extent) => extents.push(extent),
                    Err(_) => {
                        extents.into_iter().for_each(|extent| allocator.release(extent));
                        return None;
                    }
                }
            }
        }
        let extents: Vec<_> =
            extents.into_iter().map(|extent| ReservedExtent { extent, space: self.space.clone() }).collect();
        Some(extents.into_iter().zip(lens).map(|(extent, len)| self.lend(extent, *len)).collect())
    }

    fn lend(&self, reserved: ReservedExtent, len: u64) -> Result<LentBuffer<T>> {
        // The offset lies inside a region, so it fits in `usize`.
        let start = reserved.extent.offset as usize;
        // SAFETY: the allocator has granted these bytes to no other holder. They return to the
        // allocator after the slice is dropped, because the field `slice` precedes the field
        // `_room`.
        let slice = unsafe { self.region.slice_mut_unchecked(start..start + len as usize)? };
        Ok(LentBuffer { slice, _extent: reserved })
    }
}

impl<T: Transport> LentBuffer<T> {
    /// Returns the address of the memory.
    pub(crate) fn address(&self) -> u64 {
        self.slice.addr()
    }

    /// Copies bytes to the beginning of the memory.
    pub(crate) fn copy_from(&mut self, bytes: &[u8]) -> Result<()> {
        self.slice.copy_from(0, bytes)
    }
}

// SAFETY: `LentBuffer` forwards to the slice inside, which upholds the contract of `Source`.
unsafe impl<T: Transport> Source<T> for LentBuffer<T> {
    fn local(&self) -> Local<'_, T::Registration> {
        self.slice.local()
    }
}
