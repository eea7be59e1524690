//! Region that an allocator divides into parts. Each part is a region of its own.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use mooncake_core::alloc::{AllocError, BuiltinAllocator, BuiltinAllocatorConfig, Extent, SegmentAllocator};
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;

use crate::region::{Region, WeakRegion};
use crate::transport::Transport;

/// Pool of the parts of one region. Clones are handles of the same pool.
///
/// The space of a part is free again when the last handle, slice and transfer of that part is
/// dropped. So a caller that drops the future of a transfer, and every handle, frees no memory that
/// the transport still writes to.
pub struct RegionPool<T: Transport> {
    inner: Arc<Inner<T>>,
}

struct Inner<T: Transport> {
    region: Region<T>,
    space: Arc<Space<T>>,
}

struct Space<T: Transport> {
    state: Mutex<State<T>>,
}

struct State<T: Transport> {
    allocator: BuiltinAllocator,
    /// Length and handle of each allocated part, by offset.
    allocated: BTreeMap<u64, (u64, WeakRegion<T>)>,
}

/// Space of one part. The drop frees the space.
struct PartAllocation<T: Transport> {
    extent: Extent,
    space: Arc<Space<T>>,
}

impl<T: Transport> Drop for PartAllocation<T> {
    fn drop(&mut self) {
        let mut state = self.space.state.lock();
        state.allocated.remove(&self.extent.offset);
        state.allocator.release(self.extent);
    }
}

impl<T: Transport> RegionPool<T> {
    /// Creates a pool over a region. No slice of the region may be in use, and only the pool may
    /// make slices of it afterwards.
    ///
    /// # Safety
    /// No other slice of the region is used while the pool, a part of it or a slice of a part
    /// lives.
    pub unsafe fn new(region: Region<T>) -> Self {
        let allocator = BuiltinAllocator::new(region.len() as u64, &BuiltinAllocatorConfig::default());
        let state = Mutex::new(State { allocator, allocated: BTreeMap::new() });
        Self { inner: Arc::new(Inner { region, space: Arc::new(Space { state }) }) }
    }

    /// Returns the region of the pool.
    pub fn region(&self) -> &Region<T> {
        &self.inner.region
    }

    /// Allocates `len` bytes that begin at a multiple of `align`, counted from the start of the
    /// region. No handle of a part is [`exclusive`](Region::exclusive), because
    /// [`find`](Self::find) may create another at any time.
    ///
    /// # Errors
    /// Returns `NO_AVAILABLE_HANDLE` if no such space is free, and `INVALID_PARAMS` for a length
    /// that never fits.
    pub fn allocate(&self, len: usize, align: u64) -> Result<Region<T>> {
        let Inner { region, space } = &*self.inner;
        let mut state = space.state.lock();
        let extent = state.allocator.allocate(len as u64, align).map_err(|error| {
            let text = format!("cannot lend memory: {error}. len={len} capacity={}", region.len());
            match error {
                AllocError::Full => Error::new(ErrorCode::NoAvailableHandle, text),
                _ => Error::invalid(text),
            }
        })?;
        // Both fit: the extent lies inside the region.
        let (start, end) = (extent.offset as usize, (extent.offset + extent.len) as usize);
        let span = match region.range(start..end) {
            Ok(span) => span,
            Err(error) => {
                state.allocator.release(extent);
                return Err(error);
            }
        };
        // SAFETY: the allocator gives these bytes to one part only, and gets them back when the
        // allocation is dropped.
        let part = unsafe { region.part(span, Box::new(PartAllocation { extent, space: space.clone() })) };
        state.allocated.insert(extent.offset, (extent.len, part.downgrade()));
        Ok(part)
    }

    /// Returns the allocated part that contains all of these bytes.
    pub fn find(&self, address: u64, len: usize) -> Option<Region<T>> {
        let offset = address.checked_sub(self.inner.region.addr())?;
        let end = offset.checked_add(len as u64)?;
        let state = self.inner.space.state.lock();
        let (start, (allocated, part)) = state.allocated.range(..=offset).next_back()?;
        // This is checked before the upgrade, because the last handle must not be dropped under the
        // lock.
        if end > start + allocated {
            return None;
        }
        part.upgrade()
    }

    /// Returns the number of bytes that are allocated, or that a transfer still uses.
    pub fn used(&self) -> u64 {
        self.inner.space.state.lock().allocator.used()
    }

    /// Returns the number of bytes of the pool.
    pub fn capacity(&self) -> u64 {
        self.inner.region.len() as u64
    }
}

impl<T: Transport> Clone for RegionPool<T> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<T: Transport> fmt::Debug for RegionPool<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegionPool").field("capacity", &self.capacity()).field("used", &self.used()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::{Loopback, LoopbackNet};
    use crate::ticket::ticket;
    use crate::transport::Access;
    use mooncake_core::ErrorKind;
    use mooncake_core::memory::HostMemory;

    fn pool(len: usize) -> RegionPool<Loopback> {
        let memory = Arc::new(HostMemory::new(len).unwrap());
        let region = Region::register(&LoopbackNet::new().node(), memory, Access::Local).unwrap();
        // SAFETY: the region has no other handle.
        unsafe { RegionPool::new(region) }
    }

    #[test]
    fn parts_are_separate_and_come_back() {
        let pool = pool(4096);
        let (first, second) = (pool.allocate(100, 64).unwrap(), pool.allocate(1, 64).unwrap());
        assert!(!first.span().contains(second.addr(), 1) && second.addr() % 64 == first.addr() % 64);
        assert_eq!((first.len(), pool.used()), (100, 101));
        assert!(first.registration().is_some(), "that of the whole region");
        assert_eq!(pool.allocate(4096, 64).unwrap_err().kind(), ErrorKind::NoSpace);
        assert_eq!(pool.allocate(4097, 64).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(pool.allocate(0, 64).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(pool.find(first.addr() + 1, 99).unwrap().addr(), first.addr());
        for (address, len) in
            [(first.addr(), 101), (first.addr() + 100, 1), (first.addr(), usize::MAX), (0, 1)]
        {
            assert!(pool.find(address, len).is_none(), "{address:#x}+{len}");
        }
        let at = first.addr();
        drop(first);
        assert!(pool.find(at, 1).is_none());
        drop(second);
        assert_eq!(pool.used(), 0);
        pool.allocate(4096, 1).unwrap();
    }

    #[test]
    fn a_transfer_whose_future_is_dropped_keeps_its_part() {
        let pool = pool(4096);
        let part = pool.allocate(4096, 64).unwrap();
        // SAFETY: the only slice of a part without other users.
        let slice = unsafe { part.slice_mut_unchecked(0..part.len()) }.unwrap();
        let (mut done, ticket) = ticket(slice, 1, None);
        let second_share = done.share();
        let found = pool.find(part.addr(), 1).unwrap();
        drop((ticket, part, found));
        assert_eq!(pool.used(), 4096, "a share of the completion is not finished");
        done.finish(Ok(()));
        assert_eq!(
            pool.allocate(1, 64).unwrap_err().kind(),
            ErrorKind::NoSpace,
            "another share is not finished"
        );
        second_share.finish(Ok(()));
        assert_eq!(pool.used(), 0);
        pool.allocate(4096, 64).unwrap();
    }

    #[test]
    fn a_part_outlives_its_pool() {
        let pool = pool(4096);
        let part = pool.allocate(10, 64).unwrap();
        drop(pool);
        // SAFETY: the only slice of a part without other users.
        let mut all = unsafe { part.slice_mut_unchecked(0..10) }.unwrap();
        drop(part);
        all.copy_from(0, b"0123456789").unwrap();
        let mut bytes = [0; 10];
        all.copy_to(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"0123456789");
    }
}
