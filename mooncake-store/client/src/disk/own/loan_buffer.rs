//! Buffer of the owner of a disk from which other clients read. Parts of the buffer are lent for a
//! limited time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use mooncake_core::alloc::{BuiltinAllocator, Extent, SegmentAllocator};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::memory::HostMemory;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::engine::Engine;
use mooncake_transport::region::{Local, Source};
use mooncake_transport::{Region, SliceMut, Transport};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Alignment of objects in the buffer, in bytes.
const ALIGN: u64 = 4096;

/// Registered memory that is divided among loans. The memory grows if an object is longer, so that
/// every object on the disk can be read.
#[derive(Debug)]
pub(crate) struct LoanBuffer<T: Transport> {
    /// Engine that registers more memory.
    engine: Option<Engine<T>>,
    arenas: Mutex<Vec<Arena<T>>>,
    freed: Arc<Notify>,
    /// Lock of the request that is served next. The others wait for it in their order.
    queue_head: tokio::sync::Mutex<()>,
    /// Number of requests that wait.
    waiting: AtomicUsize,
}

/// Request that waits for space.
struct WaitingRequest<'s>(&'s AtomicUsize);

impl<'s> WaitingRequest<'s> {
    fn new(waiting: &'s AtomicUsize) -> Self {
        waiting.fetch_add(1, Ordering::SeqCst);
        Self(waiting)
    }
}

impl Drop for WaitingRequest<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Block of memory, and its free space.
#[derive(Debug)]
struct Arena<T: Transport> {
    region: Region<T>,
    space: Arc<ArenaSpace>,
}

#[derive(Debug)]
struct ArenaSpace {
    allocator: Mutex<BuiltinAllocator>,
    freed: Arc<Notify>,
}

/// Part of the buffer that belongs to one holder.
#[derive(Debug)]
pub(crate) struct LoanSlice<T: Transport> {
    slice: SliceMut<T>,
    _extent: ReservedExtent,
}

/// Extent that is released on drop.
#[derive(Debug)]
struct ReservedExtent {
    extent: Extent,
    space: Arc<ArenaSpace>,
}

impl Drop for ReservedExtent {
    fn drop(&mut self) {
        self.space.allocator.lock().release(self.extent);
        self.space.freed.notify_waiters();
    }
}

/// Outcome of an attempt to allocate.
enum AllocationAttempt<T: Transport> {
    /// Space for all of the lengths.
    Allocated(Result<Vec<LoanSlice<T>>>),
    /// Space that loans occupy.
    Full,
    /// Space that is too small even without loans.
    TooSmall,
}

impl<T: Transport> LoanBuffer<T> {
    /// Allocates and registers a buffer of `bytes` bytes.
    ///
    /// # Errors
    /// Returns the errors of the allocation and of the registration.
    pub(crate) async fn new(engine: &Engine<T>, bytes: u64) -> Result<Self> {
        let mut buffer = Self::over(register(engine, bytes).await?);
        buffer.engine = Some(engine.clone());
        Ok(buffer)
    }

    /// Creates a buffer in memory that is registered, and that does not grow.
    fn over(region: Region<T>) -> Self {
        let freed = Arc::default();
        let arenas = Mutex::new(vec![Arena::new(region, &freed)]);
        Self {
            engine: None,
            arenas,
            freed,
            queue_head: tokio::sync::Mutex::default(),
            waiting: AtomicUsize::new(0),
        }
    }

    /// Returns the number of bytes that are lent.
    pub(crate) fn used(&self) -> u64 {
        self.arenas.lock().iter().map(|arena| arena.space.allocator.lock().used()).sum()
    }

    /// Allocates space for all of these lengths at once, as soon as there is enough. Requests that
    /// wait are served in their order. For a single object that is longer than the buffer, the
    /// buffer grows.
    ///
    /// # Errors
    /// Returns `BUFFER_OVERFLOW` if the buffer is too small for all of several objects, and
    /// `NO_AVAILABLE_HANDLE` if not enough space was freed within `timeout`.
    pub(crate) async fn allocate(&self, lens: &[u64], timeout: Duration) -> Result<Vec<LoanSlice<T>>> {
        if self.waiting.load(Ordering::SeqCst) == 0 {
            match self.try_allocate(lens) {
                AllocationAttempt::Allocated(buffers) => return buffers,
                AllocationAttempt::TooSmall if lens.len() != 1 => return Err(too_small(lens)),
                _ => {}
            }
        }
        let _waiting = WaitingRequest::new(&self.waiting);
        let allocated = async {
            let _head = self.queue_head.lock().await;
            loop {
                let freed = self.freed.notified();
                tokio::pin!(freed);
                // The notification is enabled before the attempt, so that space freed after the
                // attempt is noticed.
                freed.as_mut().enable();
                match self.try_allocate(lens) {
                    AllocationAttempt::Allocated(buffers) => return buffers,
                    AllocationAttempt::Full => freed.await,
                    AllocationAttempt::TooSmall => self.grow(lens).await?,
                }
            }
        };
        let no_space =
            |_| Error::new(ErrorCode::NoAvailableHandle, "no space in the buffer for readers of this disk");
        tokio::time::timeout(timeout, allocated).await.map_err(no_space)?
    }

    /// Adds memory for a single object that is longer than the buffer. The caller holds
    /// `queue_head`.
    async fn grow(&self, lens: &[u64]) -> Result<()> {
        let (Some(engine), [len]) = (&self.engine, lens) else { return Err(too_small(lens)) };
        if is_planted("longer-than-the-buffer") {
            return Err(too_small(lens));
        }
        // Objects of similar lengths use the same memory.
        let more = len.max(&ALIGN).checked_next_power_of_two().unwrap_or(*len);
        tracing::warn!(
            object = len,
            more,
            "the buffer for readers of the disk grows, because it is smaller than an object; set MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES"
        );
        let region = register(engine, more).await?;
        self.arenas.lock().push(Arena::new(region, &self.freed));
        Ok(())
    }

    fn try_allocate(&self, lens: &[u64]) -> AllocationAttempt<T> {
        let arenas = self.arenas.lock();
        let mut full = false;
        for arena in &*arenas {
            match arena.try_allocate(lens) {
                AllocationAttempt::TooSmall => {}
                AllocationAttempt::Full => full = true,
                allocated => return allocated,
            }
        }
        if full { AllocationAttempt::Full } else { AllocationAttempt::TooSmall }
    }
}

impl<T: Transport> Arena<T> {
    fn new(region: Region<T>, freed: &Arc<Notify>) -> Self {
        let allocator = BuiltinAllocator::new(region.len() as u64, &Default::default());
        Self {
            region,
            space: Arc::new(ArenaSpace { allocator: Mutex::new(allocator), freed: freed.clone() }),
        }
    }

    fn try_allocate(&self, lens: &[u64]) -> AllocationAttempt<T> {
        let bytes = lens.iter().fold(0u64, |sum, len| sum.saturating_add(len.next_multiple_of(ALIGN)));
        let mut extents = Vec::with_capacity(lens.len());
        {
            let mut allocator = self.space.allocator.lock();
            if bytes > allocator.capacity() {
                return AllocationAttempt::TooSmall;
            }
            let is_empty = allocator.used() == 0;
            for len in lens {
                match allocator.allocate(*len, ALIGN) {
                    Ok(extent) => extents.push(extent),
                    Err(_) => {
                        extents.into_iter().for_each(|extent| allocator.release(extent));
                        return if is_empty { AllocationAttempt::TooSmall } else { AllocationAttempt::Full };
                    }
                }
            }
        }
        let extents: Vec<_> =
            extents.into_iter().map(|extent| ReservedExtent { extent, space: self.space.clone() }).collect();
        AllocationAttempt::Allocated(
            extents.into_iter().zip(lens).map(|(extent, len)| self.to_slice(extent, *len)).collect(),
        )
    }

    fn to_slice(&self, reserved: ReservedExtent, len: u64) -> Result<LoanSlice<T>> {
        // The offset lies inside a region, so it fits in `usize`.
        let start = reserved.extent.offset as usize;
        // SAFETY: the allocator has granted these bytes to no other holder. They return to the
        // allocator after the slice is dropped, because the field `slice` precedes the field
        // `_extent`.
        let slice = unsafe { self.region.slice_mut_unchecked(start..start + len as usize)? };
        Ok(LoanSlice { slice, _extent: reserved })
    }
}

impl<T: Transport> LoanSlice<T> {
    /// Returns the address of the memory.
    pub(crate) fn address(&self) -> u64 {
        self.slice.addr()
    }

    /// Copies bytes to the beginning of the memory.
    pub(crate) fn copy_from(&mut self, bytes: &[u8]) -> Result<()> {
        self.slice.copy_from(0, bytes)
    }
}

// SAFETY: `LoanSlice` forwards to the slice inside, which upholds the contract of `Source`.
unsafe impl<T: Transport> Source<T> for LoanSlice<T> {
    fn local(&self) -> Local<'_, T::Registration> {
        self.slice.local()
    }
}

async fn register<T: Transport>(engine: &Engine<T>, bytes: u64) -> Result<Region<T>> {
    let len = usize::try_from(bytes).map_err(|_| Error::invalid("offload: buffer is too large"))?;
    let memory = HostMemory::new(len).map_err(|error| error.context("offload buffer"))?;
    engine.register(Arc::new(memory)).await
}

fn too_small(lens: &[u64]) -> Error {
    let bytes = lens.iter().fold(0u64, |sum, len| sum.saturating_add(len.next_multiple_of(ALIGN)));
    let text = format!("the buffer for readers is smaller than the objects of one request. bytes={bytes}");
    Error::new(ErrorCode::BufferOverflow, text)
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use mooncake_core::memory::HostMemory;
    use mooncake_transport::Loopback;

    use super::*;

    const PAGES: u64 = 16;
    const TIMEOUT: Duration = Duration::from_secs(60);

    fn pages(number: u64) -> Vec<u64> {
        vec![ALIGN; usize::try_from(number).unwrap()]
    }

    #[tokio::test]
    async fn requests_that_wait_are_served_in_their_order() {
        let memory = HostMemory::new(usize::try_from(PAGES * ALIGN).unwrap()).unwrap();
        let buffer: LoanBuffer<Loopback> = LoanBuffer::over(Region::unregistered(Arc::new(memory)).unwrap());
        let (eight, two) = (pages(8), pages(2));
        let mut all = buffer.allocate(&pages(PAGES), TIMEOUT).await.unwrap();
        let mut large = Box::pin(buffer.allocate(&eight, TIMEOUT));
        let mut small = Box::pin(buffer.allocate(&two, TIMEOUT));
        let mut dropped = Box::pin(buffer.allocate(&eight, TIMEOUT));
        let mut last = Box::pin(buffer.allocate(&two, TIMEOUT));
        for waiting in [&mut large, &mut small, &mut dropped, &mut last] {
            assert!(waiting.as_mut().now_or_never().is_none());
        }
        all.truncate(12);
        assert!(
            small.as_mut().now_or_never().is_none(),
            "space for it is free, and another request came first"
        );
        assert!(large.as_mut().now_or_never().is_none());
        all.truncate(6);
        let large = large.await.unwrap();
        let small = small.await.unwrap();
        assert!(dropped.as_mut().now_or_never().is_none());
        assert!(last.as_mut().now_or_never().is_none());
        drop(all);
        drop(dropped);
        assert_eq!(last.await.unwrap().len(), 2);
        drop((large, small));
        assert_eq!((buffer.used(), buffer.waiting.load(Ordering::SeqCst)), (0, 0));
        assert_eq!(buffer.allocate(&pages(PAGES), TIMEOUT).await.unwrap().len(), 16);
    }
}
