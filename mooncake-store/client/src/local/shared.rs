//! Memory that a shared client and its daemon both map.

use bytes::Bytes;
use mooncake_core::memory::{HostMemory, SharedPages};
use mooncake_core::{Error, Result};
use mooncake_protocol::wire::MemoryRange;
use mooncake_transport::{BufferPool, Loopback, PoolBuf, PoolConfig, Region, Source};
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use tokio::sync::{Notify, mpsc, oneshot};

/// Memory block that is shared with a daemon.
#[derive(Clone, Debug)]
pub(super) struct SharedMemory {
    pub(super) number: u32,
    pub(super) pages: SharedPages,
}

/// Command of a shared client to the task of its control connection.
pub(super) enum Command {
    /// Request to share a memory block; the sender receives the outcome.
    Share(SharedMemory, oneshot::Sender<Result<()>>),
    /// Request to stop sharing the memory block of that number.
    Unshare(u32),
}

/// Memory blocks that the daemon has mapped, by first address and number.
#[derive(Default)]
pub(super) struct Memories {
    pub(super) listed: RwLock<BTreeMap<(u64, u32), SharedMemory>>,
    pub(super) next: AtomicU32,
    refusals: Mutex<Refusals>,
    /// Notified when shared memory becomes free.
    pub(super) freed: Notify,
    /// Number of buffers in memory blocks beside the pool.
    buffers: AtomicUsize,
}

/// Lengths that the daemon has refused to share since a memory block was last released.
#[derive(Clone, Copy)]
struct Refusals {
    /// Number of releases.
    releases: u64,
    /// Shortest refused length in bytes.
    shortest: usize,
}

impl Default for Refusals {
    fn default() -> Self {
        Self { releases: 0, shortest: usize::MAX }
    }
}

impl Memories {
    /// Returns the range of these bytes in shared memory, or `None` unless one memory block
    /// contains them all.
    pub(super) fn find_range(&self, address: u64, len: usize) -> Option<MemoryRange> {
        let end = address.checked_add(len as u64)?;
        let listed = self.listed.read();
        let below = listed.range(..=(address, u32::MAX)).rev();
        let (_, memory) = { below }.find(|(_, memory)| end <= memory.pages.range().end)?;
        let offset = address - memory.pages.range().start;
        Some(MemoryRange { memory: memory.number, offset, len: len as u64 })
    }

    pub(super) fn add(&self, memory: SharedMemory) {
        self.listed.write().insert((memory.pages.range().start, memory.number), memory);
    }

    /// Returns whether the daemon would refuse a memory block of `len` bytes, and the number of
    /// releases so far.
    pub(super) fn refuses(&self, len: usize) -> (bool, u64) {
        let refusals = self.refusals.lock();
        (len >= refusals.shortest, refusals.releases)
    }

    /// Returns whether a buffer lies in a memory block beside the pool.
    pub(super) fn is_occupied(&self) -> bool {
        self.buffers.load(Ordering::Acquire) > 0
    }

    /// Records that the daemon has refused `len` bytes, unless a memory block was released since.
    pub(super) fn record_refusal(&self, len: usize, releases: u64) {
        let mut refusals = self.refusals.lock();
        if refusals.releases == releases {
            refusals.shortest = refusals.shortest.min(len);
        }
    }

    /// Records that a memory block was released, and notifies the calls that wait for memory.
    pub(super) fn record_release(&self) {
        let mut refusals = self.refusals.lock();
        *refusals = Refusals { releases: refusals.releases + 1, shortest: usize::MAX };
        drop(refusals);
        self.freed.notify_waiters();
    }

    pub(super) fn remove(&self, number: u32) {
        self.listed.write().retain(|(_, listed), _| *listed != number);
    }

    pub(super) fn all(&self) -> Vec<SharedMemory> {
        let mut all: Vec<_> = self.listed.read().values().cloned().collect();
        all.sort_unstable_by_key(|memory| memory.number);
        all
    }
}

/// Registration of a memory block at the daemon; dropping the value ends it.
pub(super) struct Share {
    pub(super) number: u32,
    pub(super) memories: Arc<Memories>,
    pub(super) commands: mpsc::UnboundedSender<Command>,
}

impl Drop for Share {
    fn drop(&mut self) {
        // The entry is removed at once, because the addresses may soon belong to another mapping.
        self.memories.remove(self.number);
        // Sending fails only if the runtime, and with it the control connection, is gone.
        let _ = self.commands.send(Command::Unshare(self.number));
        self.memories.record_release();
    }
}

/// Pool of shared memory for values that do not lie in shared memory already.
pub(super) struct Pool {
    pub(super) share: Arc<Share>,
    pub(super) start: u64,
    pub(super) free: BufferPool<Loopback>,
}

impl Pool {
    pub(super) fn used(&self) -> u64 {
        self.free.used()
    }

    pub(super) fn capacity(&self) -> u64 {
        self.free.capacity()
    }

    /// Returns whether a value would fit into an empty pool.
    pub(super) fn fits(pool: Option<&Self>, len: usize) -> bool {
        pool.is_some_and(|pool| len as u64 <= pool.capacity())
    }

    pub(super) fn try_take(&self, len: usize) -> Option<LocalBuf> {
        self.free.try_take(len).ok().map(|bytes| self.buffer(bytes))
    }

    pub(super) async fn take(&self, len: usize) -> Result<LocalBuf> {
        self.free.take(len).await.map(|bytes| self.buffer(bytes))
    }

    fn buffer(&self, bytes: PoolBuf<Loopback>) -> LocalBuf {
        LocalBuf {
            memory: Some(self.share.clone()),
            start: self.start,
            len: bytes.len(),
            block: None,
            bytes,
            freed: None,
        }
    }
}

/// Memory blocks for buffers that do not fit into the pool. A block is released with its last
/// buffer.
#[derive(Default)]
pub(super) struct Blocks {
    listed: Mutex<Vec<Weak<Pool>>>,
    /// Lock of the creation of a block.
    pub(super) creation: tokio::sync::Mutex<()>,
    /// Lock of the first call that waits for a block, because its buffer fits nowhere else.
    pub(super) queue_head: tokio::sync::Mutex<()>,
    /// Number of these calls.
    pub(super) waiting: AtomicUsize,
}

impl Blocks {
    pub(super) fn add(&self, block: &Arc<Pool>) {
        self.listed.lock().push(Arc::downgrade(block));
    }

    /// Returns a buffer in a block.
    pub(super) fn try_take(&self, len: usize) -> Option<LocalBuf> {
        // Blocks are dropped outside the lock.
        let mut listed = self.listed.lock();
        listed.retain(|block| block.strong_count() > 0);
        let blocks: Vec<Arc<Pool>> = listed.iter().filter_map(Weak::upgrade).collect();
        drop(listed);
        blocks.iter().find_map(|block| Pool::take_in_block(block, len))
    }

    /// Returns whether there is no block.
    pub(super) fn is_empty(&self) -> bool {
        self.listed.lock().iter().all(|block| block.strong_count() == 0)
    }
}

impl Pool {
    /// Returns a buffer that keeps its block.
    pub(super) fn take_in_block(block: &Arc<Self>, len: usize) -> Option<LocalBuf> {
        let mut buffer = block.try_take(len)?;
        buffer.block = Some(block.clone());
        block.share.memories.buffers.fetch_add(1, Ordering::AcqRel);
        buffer.freed = Some(Freed(block.share.memories.clone()));
        Some(buffer)
    }
}

/// Notification that the bytes of a block are free.
struct Freed(Arc<Memories>);

impl Drop for Freed {
    fn drop(&mut self) {
        self.0.buffers.fetch_sub(1, Ordering::AcqRel);
        self.0.freed.notify_waiters();
    }
}

/// Buffer in memory that a shared client and its daemon both map, for a value to put or a value
/// that was read. A put of this buffer makes no other copy. Dropping the buffer frees its memory.
pub struct LocalBuf {
    // This field drops before `bytes`: the daemon must be notified before the last bytes of a
    // memory block are freed.
    /// `None` for memory of this process alone.
    memory: Option<Arc<Share>>,
    /// First address of the memory block.
    start: u64,
    /// Memory block of the buffer, unless it lies in the pool of the client. The last buffer of a
    /// block releases it.
    block: Option<Arc<Pool>>,
    bytes: PoolBuf<Loopback>,
    /// Number of valid bytes.
    len: usize,
    // This field drops after `bytes`.
    freed: Option<Freed>,
}

impl LocalBuf {
    /// Shortens the buffer to its first `len` bytes. The memory of the others stays reserved until
    /// the buffer is dropped.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Creates a buffer in memory of this process alone, which the daemon does not see.
    pub(super) fn private(len: usize) -> Result<Self> {
        let memory = HostMemory::new(len)?;
        let region = Region::<Loopback>::unregistered(Arc::new(memory))?;
        let start = region.addr();
        let memory = region.exclusive().map_err(|_| Error::internal("new memory is not ours alone"))?;
        // A pool with a single buffer gives access to the bytes; a region does not.
        let bytes = BufferPool::new(memory, &PoolConfig::default())?.try_take(len)?;
        Ok(Self { memory: None, start, block: None, bytes, len, freed: None })
    }

    /// Returns the first address of the buffer in this process.
    pub fn address(&self) -> u64 {
        self.bytes.local().span.addr()
    }

    /// Converts the buffer into immutable bytes without a copy.
    pub fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }

    /// Moves the bytes into memory of this process alone, if there is some, and frees the shared
    /// memory.
    pub(super) fn stop_sharing(&mut self) {
        if self.is_shared()
            && let Ok(mut copy) = Self::private(self.len.max(1))
        {
            copy.truncate(self.len);
            copy.copy_from_slice(self);
            *self = copy;
        }
    }

    /// Returns whether the daemon maps the buffer, too.
    pub(super) fn is_shared(&self) -> bool {
        self.memory.is_some()
    }

    /// Returns the range of a part of the buffer in shared memory. The daemon knows no range of a
    /// buffer that is not shared.
    pub(super) fn shared_range(&self, offset: usize, len: usize) -> MemoryRange {
        let offset = self.address() - self.start + offset as u64;
        let memory = self.memory.as_ref().map_or(u32::MAX, |share| share.number);
        MemoryRange { memory, offset, len: len as u64 }
    }
}

impl Deref for LocalBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl DerefMut for LocalBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len]
    }
}

impl AsRef<[u8]> for LocalBuf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for LocalBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LocalBuf({} bytes)", self.len())
    }
}
