//! Memory that a shared client and its daemon both map.

use bytes::Bytes;
use mooncake_core::memory::{HostMemory, SharedPages};
use mooncake_core::{Error, Result};
use mooncake_protocol::wire::MemoryRange;
use mooncake_transport::{BufferPool, Loopback, PoolBuf, PoolConfig, Region, Source};
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use tokio::sync::{mpsc, oneshot};

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
}

impl Memories {
    /// Returns the range of these bytes in shared memory, or `None` unless one memory block
    /// contains them all.
    pub(super) fn place(&self, address: u64, len: usize) -> Option<MemoryRange> {
        let end = address.checked_add(len as u64)?;
        let listed = self.listed.read();
        let below = listed.range(..=(address, u32::MAX)).rev();
        let (_, memory) = { below }.find(|(_, memory)| end <= memory.pages.range().end)?;
        let offset = address - memory.pages.range().start;
        Some(MemoryRange { memory: memory.number, offset, len: len as u64 })
    }

    pub(super) fn list(&self, memory: SharedMemory) {
        self.listed.write().insert((memory.pages.range().start, memory.number), memory);
    }

    pub(super) fn forget(&self, number: u32) {
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
        self.memories.forget(self.number);
        // Sending fails only if the runtime, and with it the control connection, is gone.
        let _ = self.commands.send(Command::Unshare(self.number));
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

    pub(super) fn try_take(&self, len: usize) -> Option<LocalBuf> {
        self.free.try_take(len).ok().map(|bytes| self.buffer(bytes))
    }

    pub(super) async fn take(&self, len: usize) -> Result<LocalBuf> {
        self.free.take(len).await.map(|bytes| self.buffer(bytes))
    }

    fn buffer(&self, bytes: PoolBuf<Loopback>) -> LocalBuf {
        LocalBuf { memory: self.share.clone(), start: self.start, len: bytes.len(), bytes }
    }
}

/// Buffer in memory that a shared client and its daemon both map, for a value to put or a value
/// that was read. A put of this buffer makes no other copy. Dropping the buffer frees its memory.
pub struct LocalBuf {
    // This field drops before `bytes`: the daemon must be notified before the last bytes of a
    // memory block are freed.
    memory: Arc<Share>,
    /// First address of the memory block.
    start: u64,
    bytes: PoolBuf<Loopback>,
    /// Number of valid bytes.
    len: usize,
}

impl LocalBuf {
    /// Shortens the buffer to its first `len` bytes. The memory of the others stays reserved until
    /// the buffer is dropped.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Creates a buffer that is a whole memory block.
    pub(super) fn own(share: Share, memory: HostMemory) -> Result<Self> {
        let len = memory.len();
        let region = Region::<Loopback>::unregistered(Arc::new(memory))?;
        let start = region.addr();
        let memory = region.exclusive().map_err(|_| Error::internal("new memory is not ours alone"))?;
        // A pool with a single buffer gives access to the bytes; a region does not.
        let bytes = BufferPool::new(memory, &PoolConfig::default())?.try_take(len)?;
        Ok(Self { memory: Arc::new(share), start, bytes, len })
    }

    /// Returns the first address of the buffer in this process.
    pub fn address(&self) -> u64 {
        self.bytes.local().span.addr()
    }

    /// Converts the buffer into immutable bytes without a copy.
    pub fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }

    /// Returns the range of a part of the buffer in shared memory.
    pub(super) fn place(&self, offset: usize, len: usize) -> MemoryRange {
        let offset = self.address() - self.start + offset as u64;
        MemoryRange { memory: self.memory.number, offset, len: len as u64 }
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
