//! Memory of operations: staging memory that other ranks read, scratch memory that only this
//! process uses, and memory of the caller.
//!
//! A reader may be stopped in the middle of a read, for any time. So a stamp stands before the
//! staged bytes, which is erased before the memory is used again. A reader looks at the stamp after
//! the bytes. If the stamp is still there, the bytes are those that were announced.
//!
//! All communicators of a process share one pool. It grows on demand and keeps at most
//! [`RETAINED`] unused bytes. So a communicator without operations costs nothing.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use mooncake_core::clock::Rng;
use mooncake_core::memory::{HostMemory, HostMemoryOptions, MemorySource, MemorySpan};
use mooncake_core::{Error, Result};
use mooncake_engine::{TransferEngine, TransportSet};
use mooncake_transport::{Region, RegionPool, SliceMut};
use parking_lot::Mutex;

use crate::message::StagedDescriptor;

/// Least size of a part by which the staging memory grows.
const ARENA_BYTES: usize = 64 << 20;
/// Staging memory that is kept for later operations.
const RETAINED: u64 = 256 << 20;
/// Size of a scratch buffer.
pub(crate) const SCRATCH_BYTES: usize = 4 << 20;
/// Number of unused scratch buffers that are kept.
const MAX_UNUSED_SCRATCH: usize = 4;
/// Alignment of staged bytes, one cache line.
const ALIGNMENT: u64 = 64;
/// Bytes before staged bytes, for their stamp.
const HEAD: usize = ALIGNMENT as usize;

/// Memory pool of a process.
pub(crate) struct Pool {
    engine: TransferEngine,
    arenas: Mutex<Vec<RegionPool<TransportSet>>>,
    /// Held while the pool grows, so that concurrent operations share the new part.
    growth_lock: tokio::sync::Mutex<()>,
    /// Last stamp, an odd number. The first one is random, so that other bytes are hardly equal.
    stamp: AtomicU64,
    scratch: Arc<Mutex<Vec<Region<TransportSet>>>>,
}

impl Pool {
    pub(crate) fn new(engine: TransferEngine) -> Self {
        Self {
            engine,
            arenas: Mutex::default(),
            growth_lock: tokio::sync::Mutex::default(),
            stamp: AtomicU64::new(Rng::from_os().next_u64() | 1),
            scratch: Arc::default(),
        }
    }

    /// Allocates staging memory. It is free again when the result and every transfer of it is
    /// dropped.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for a length of 0, or the errors of the allocation and the registration.
    pub(crate) async fn allocate(&self, len: usize) -> Result<Staged> {
        if len == 0 {
            return Err(Error::invalid("cannot stage data: it has no bytes"));
        }
        if let Some(staged) = self.allocate_from_arenas(len) {
            return Ok(staged);
        }
        let _guard = self.growth_lock.lock().await;
        if let Some(staged) = self.allocate_from_arenas(len) {
            return Ok(staged);
        }
        let options =
            HostMemoryOptions { shared: Some("mooncake-pg".into()), ..HostMemoryOptions::default() };
        let space = HEAD + len;
        let memory = HostMemory::with(space.next_multiple_of(4096).max(ARENA_BYTES), &options)?;
        let region = self.engine.register(Arc::new(memory)).await?;
        // SAFETY: the region is new, and only the pool makes slices of it.
        let arena = unsafe { RegionPool::new(region) };
        let region = arena.allocate(space, ALIGNMENT)?;
        self.arenas.lock().push(arena);
        Ok(self.stamped(region))
    }

    fn allocate_from_arenas(&self, len: usize) -> Option<Staged> {
        let arenas = self.arenas.lock();
        let region = arenas.iter().find_map(|arena| arena.allocate(HEAD + len, ALIGNMENT).ok())?;
        Some(self.stamped(region))
    }

    fn stamped(&self, region: Region<TransportSet>) -> Staged {
        let staged = Staged { stamp: self.stamp.fetch_add(2, Ordering::Relaxed), region };
        staged.stamp_word().store(staged.stamp, Ordering::Relaxed);
        staged
    }

    /// Frees unused staging memory beyond the limit.
    pub(crate) fn trim(&self) {
        let mut unused = Vec::new();
        {
            let mut arenas = self.arenas.lock();
            let mut total: u64 = arenas.iter().map(RegionPool::capacity).sum();
            arenas.retain(|arena| {
                let is_surplus = total > RETAINED && arena.used() == 0;
                if is_surplus {
                    total -= arena.capacity();
                    unused.push(arena.clone());
                }
                !is_surplus
            });
        }
        if !unused.is_empty() {
            // The deregistration waits until no other process uses the memory.
            tokio::task::spawn_blocking(move || drop(unused));
        }
    }

    /// Returns the bytes of staging memory that operations use.
    pub(crate) fn used(&self) -> u64 {
        self.arenas.lock().iter().map(RegionPool::used).sum()
    }

    /// Returns the bytes of staging memory.
    pub(crate) fn capacity(&self) -> u64 {
        self.arenas.lock().iter().map(RegionPool::capacity).sum()
    }

    /// Returns a scratch buffer of [`SCRATCH_BYTES`].
    ///
    /// # Errors
    /// The errors of the allocation and the registration.
    pub(crate) fn scratch(&self) -> Result<Scratch> {
        let unused = self.scratch.lock().pop();
        let region = match unused {
            Some(region) => region,
            None => self.engine.register_local(Arc::new(HostMemory::new(SCRATCH_BYTES)?))?,
        };
        Ok(Scratch { region: Some(region), pool: self.scratch.clone() })
    }
}

/// Staging memory of an operation. Other ranks read it, and only this process writes it. The drop
/// erases the stamp.
pub(crate) struct Staged {
    region: Region<TransportSet>,
    stamp: u64,
}

impl Staged {
    pub(crate) fn len(&self) -> usize {
        self.region.len() - HEAD
    }

    /// Returns the first byte.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        // SAFETY: the region begins with the head.
        unsafe { self.region.span().ptr.add(HEAD).as_ptr() }
    }

    /// Returns a range for another process.
    pub(crate) fn descriptor(&self, range: Range<usize>) -> StagedDescriptor {
        let stamp_at = self.region.addr();
        let address = stamp_at + (HEAD + range.start) as u64;
        StagedDescriptor { address, len: range.len() as u64, stamp_at, stamp: self.stamp }
    }

    /// Returns all bytes as the destination of a transfer.
    ///
    /// # Errors
    /// `INVALID_PARAMS`, not for a value of [`Pool::allocate`].
    ///
    /// # Safety
    /// Nothing else uses the bytes while the result lives.
    pub(crate) unsafe fn sink(&self) -> Result<SliceMut<TransportSet>> {
        // SAFETY: promised by the caller.
        unsafe { self.region.slice_mut_unchecked(HEAD..self.region.len()) }
    }

    fn stamp_word(&self) -> &AtomicU64 {
        let word = self.region.span().ptr.cast::<u64>();
        // SAFETY: the word is aligned, lives as long as the region, and is only used here. Other
        // processes only read it.
        unsafe { AtomicU64::from_ptr(word.as_ptr()) }
    }

    /// Returns the first byte of a range.
    ///
    /// # Panics
    /// If the range is not inside.
    pub(crate) fn part(&self, range: Range<usize>) -> *mut u8 {
        assert!(range.start <= range.end && range.end <= self.len(), "beyond staging memory");
        // SAFETY: inside the memory.
        unsafe { self.as_ptr().add(range.start) }
    }

    /// Copies bytes in.
    ///
    /// # Safety
    /// The bytes at `from` are readable.
    ///
    /// # Panics
    /// If the bytes do not fit at the offset.
    pub(crate) unsafe fn write(&self, offset: usize, from: *const u8, len: usize) {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len()), "beyond staging memory");
        // SAFETY: inside the memory. The region belongs to this value alone; peers only read.
        unsafe { std::ptr::copy_nonoverlapping(from, self.as_ptr().add(offset), len) };
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.stamp_word().store(0, Ordering::Relaxed);
        // The next user of the memory writes after this.
        fence(Ordering::SeqCst);
    }
}

/// Buffer that only this process uses.
pub(crate) struct Scratch {
    region: Option<Region<TransportSet>>,
    pool: Arc<Mutex<Vec<Region<TransportSet>>>>,
}

impl Scratch {
    /// Splits the start of the buffer into `count` ranges of `len` bytes.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for a length of 0 and for more bytes than the buffer has.
    ///
    /// # Safety
    /// No range of an earlier call is in use.
    pub(crate) unsafe fn split(&self, len: usize, count: usize) -> Result<Vec<SliceMut<TransportSet>>> {
        let Some(region) = &self.region else { return Ok(Vec::new()) };
        // SAFETY: the ranges of this call are disjoint; the caller promises the rest.
        (0..count)
            .map(|index| unsafe { region.slice_mut_unchecked(index * len..(index + 1) * len) })
            .collect()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A transfer that still uses the buffer keeps it; then it is not used again.
        let Some(Ok(range)) = self.region.take().map(Region::exclusive) else { return };
        let Ok(region) = range.into_region() else { return };
        let mut pool = self.pool.lock();
        if pool.len() < MAX_UNUSED_SCRATCH {
            pool.push(region);
        }
    }
}

/// Value that keeps the memory of an operation allocated.
pub(crate) type MemoryGuard = Arc<Mutex<Option<Box<dyn Send>>>>;

/// Wraps the guard of the caller's memory. It is dropped with the last user of the memory.
pub(crate) fn share_guard(guard: Box<dyn Send>) -> MemoryGuard {
    Arc::new(Mutex::new(Some(guard)))
}

/// Memory of the caller as the destination of a transfer.
struct CallerMemory {
    span: MemorySpan,
    _guard: MemoryGuard,
}

// SAFETY: the caller of an operation promises that the guard keeps the bytes, and that nothing else
// touches them during the operation.
unsafe impl MemorySource for CallerMemory {
    fn span(&self) -> MemorySpan {
        self.span
    }
}

/// Returns the caller's memory as the destination of a transfer.
///
/// # Errors
/// `INVALID_PARAMS` for a span of 0 bytes.
///
/// # Safety
/// The guard keeps the bytes allocated, and nothing else uses them while the result or a transfer
/// into it lives.
pub(crate) unsafe fn destination(span: MemorySpan, guard: &MemoryGuard) -> Result<SliceMut<TransportSet>> {
    let region = Region::unregistered(Arc::new(CallerMemory { span, _guard: guard.clone() }))?;
    region.exclusive().map_err(|_| Error::internal("cannot use new memory: it has other users"))
}
