//! A light client's memory: what its owner was told of, a pool of it for values, and pieces for those the pool has no room for.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use mooncake_core::memory::{
    HostMemory, HostMemoryOptions, MemorySource, MemorySpan, SharedPages, shared_pages,
};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_transport::{BufferPool, Loopback, PoolBuf, PoolConfig, Region, Source, Transport};
use parking_lot::RwLock;
use tokio::sync::{mpsc, oneshot};

use super::client::{Inner, LocalClient};
use super::link::{Command, SharedMemory};
use super::message::Place;
use crate::Deadline;

/// What the owner was told of, by first address and number.
#[derive(Default)]
pub(super) struct Memories {
    listed: RwLock<BTreeMap<(u64, u32), SharedMemory>>,
    next: AtomicU32,
}

impl Memories {
    /// What the owner calls these bytes, if they all lie in one piece of memory that it has.
    pub(super) fn place(&self, address: u64, len: usize) -> Option<Place> {
        let end = address.checked_add(len as u64)?;
        let listed = self.listed.read();
        let below = listed.range(..=(address, u32::MAX)).rev();
        let (_, memory) = { below }.find(|(_, memory)| end <= memory.pages.range().end)?;
        let offset = address - memory.pages.range().start;
        Some(Place { memory: memory.number, offset, len: len as u64 })
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

/// Some memory, taken back from the owner when it is dropped.
struct Share {
    number: u32,
    memories: Arc<Memories>,
    commands: mpsc::UnboundedSender<Command>,
}

impl Drop for Share {
    fn drop(&mut self) {
        // At once: the addresses may be another mapping's in a moment.
        self.memories.forget(self.number);
        // Nobody is there to be told when the runtime is gone.
        let _ = self.commands.send(Command::Unshare(self.number));
    }
}

impl Inner {
    /// Tells the owner of some memory.
    async fn share(&self, pages: SharedPages, deadline: &Deadline) -> Result<Share> {
        let number = self.memories.next.fetch_add(1, Ordering::Relaxed);
        let share = Share { number, memories: self.memories.clone(), commands: self.commands.clone() };
        let (told, answer) = oneshot::channel();
        let gone = || Error::new(ErrorCode::RpcFail, "the runtime of the light client is gone");
        self.commands.send(Command::Share(SharedMemory { number, pages }, told)).map_err(|_| gone())?;
        deadline.bound("sharing memory", async { answer.await.map_err(|_| lost())? }).await?;
        Ok(share)
    }

    /// New memory that the owner has, too.
    async fn new_shared(&self, len: usize, deadline: &Deadline) -> Result<(Share, HostMemory)> {
        let options = HostMemoryOptions { shared: Some("mooncake_shm".into()), ..self.config.memory.clone() };
        let memory = HostMemory::with(len, &options)?;
        let pages = shared_pages(memory.span()).ok_or_else(|| Error::internal("new memory is not shared"))?;
        Ok((self.share(pages, deadline).await?, memory))
    }

    pub(super) async fn new_pool(&self) -> Result<Option<Pool>> {
        let len = usize::try_from(self.config.buffer)
            .map_err(|_| Error::invalid(format!("a buffer of {} bytes", self.config.buffer)))?;
        if len == 0 {
            return Ok(None);
        }
        let (share, memory) = self.new_shared(len, &self.deadline()).await?;
        let memory = Region::<Loopback>::unregistered(Arc::new(memory))?;
        let start = memory.addr();
        let memory = memory.exclusive().map_err(|_| Error::internal("new memory is not ours alone"))?;
        Ok(Some(Pool {
            share: Arc::new(share),
            start,
            free: BufferPool::new(memory, &PoolConfig::default())?,
        }))
    }

    /// Room for that many bytes: in the pool, or for itself; failing both, in the pool as soon as there is some.
    pub(super) async fn room(&self, len: usize, deadline: &Deadline) -> Result<LocalBuf> {
        if let Some(buffer) = self.pool.as_ref().and_then(|pool| pool.try_take(len)) {
            return Ok(buffer);
        }
        let own = match self.new_shared(len, deadline).await {
            Ok((share, memory)) => return LocalBuf::own(share, memory),
            Err(error) => error,
        };
        match &self.pool {
            Some(pool) if own.kind() == ErrorKind::NoSpace && len as u64 <= pool.free.capacity() => {
                deadline.bound("waiting for room in the buffer", pool.take(len)).await
            }
            _ => Err(own),
        }
    }

    pub(super) fn deadline(&self) -> Deadline {
        Deadline::after(&self.config.clock, self.config.timeout)
    }
}

fn lost() -> Error {
    Error::new(ErrorCode::RpcFail, "mooncake_client went away in the middle")
}

/// Memory through which values travel.
pub(super) struct Pool {
    share: Arc<Share>,
    start: u64,
    free: BufferPool<Loopback>,
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

    async fn take(&self, len: usize) -> Result<LocalBuf> {
        self.free.take(len).await.map(|bytes| self.buffer(bytes))
    }

    fn buffer(&self, bytes: PoolBuf<Loopback>) -> LocalBuf {
        LocalBuf { memory: self.share.clone(), start: self.start, len: bytes.len(), bytes }
    }
}

/// Memory that a light client and its owner see, for a value to be put or one that was read: what is written here is stored without
/// another copy. It is given back when it is dropped.
pub struct LocalBuf {
    // Before the bytes: when they are the last of a piece of memory, the owner is told first.
    memory: Arc<Share>,
    /// First address of that piece.
    start: u64,
    bytes: PoolBuf<Loopback>,
    /// How many of them count.
    len: usize,
}

impl LocalBuf {
    /// Drops all but the first bytes. Their memory goes back with the rest.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// All of a piece of memory.
    fn own(share: Share, memory: HostMemory) -> Result<Self> {
        let len = memory.len();
        let region = Region::<Loopback>::unregistered(Arc::new(memory))?;
        let start = region.addr();
        let memory = region.exclusive().map_err(|_| Error::internal("new memory is not ours alone"))?;
        // A pool of one: it shows bytes, which a region does not.
        let bytes = BufferPool::new(memory, &PoolConfig::default())?.try_take(len)?;
        Ok(Self { memory: Arc::new(share), start, bytes, len })
    }

    /// Where it begins in this process.
    pub fn address(&self) -> u64 {
        self.bytes.local().span.addr()
    }

    /// The bytes for good, without a copy.
    pub fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }

    /// What the owner calls a part of it.
    pub(super) fn place(&self, offset: usize, len: usize) -> Place {
        let offset = self.address() - self.start + offset as u64;
        Place { memory: self.memory.number, offset, len: len as u64 }
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

/// Memory of the caller's that the owner has, too.
struct SharedSource {
    // First, as in a `LocalBuf`.
    _share: Share,
    memory: Arc<dyn MemorySource>,
}

// SAFETY: the memory inside keeps the promise.
unsafe impl MemorySource for SharedSource {
    fn span(&self) -> MemorySpan {
        self.memory.span()
    }
}

impl LocalClient {
    /// Room for a value to be put, in memory that the owner sees.
    ///
    /// # Errors
    /// `NO_AVAILABLE_HANDLE` when the owner takes no more memory, `BUFFER_OVERFLOW` when the machine has none, `INVALID_PARAMS` for no bytes.
    pub async fn alloc(&self, len: usize) -> Result<LocalBuf> {
        self.inner.room(len, &self.inner.deadline()).await
    }

    /// Shares memory of the caller's with the owner until the last handle of the region is dropped: objects move into and out of it
    /// without a copy. It must lie in shared memory that is listed ([`HostMemoryOptions::shared`], or a
    /// [`SharedMapping`](mooncake_core::memory::SharedMapping)), in a file whose size is sealed. Whole pages are shared. A device's memory is
    /// not shared, but taken all the same: its bytes are copied.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for other memory, `NO_AVAILABLE_HANDLE` when the owner takes no more.
    pub async fn register<T: Transport>(&self, memory: Arc<dyn MemorySource>) -> Result<Region<T>> {
        let span = memory.span().located();
        if span.location.is_device() {
            return Region::unregistered(memory);
        }
        let pages = shared_pages(span).ok_or_else(|| {
            Error::invalid(format!(
                "{} bytes at {:#x} are memory of this process alone, which mooncake_client cannot see; use memory of \
                 alloc_from_mem_pool or MooncakeHostMemAllocator",
                span.len,
                span.addr()
            ))
        })?;
        let share = self.inner.share(pages, &self.inner.deadline()).await?;
        Region::unregistered(Arc::new(SharedSource { _share: share, memory }))
    }

    /// New memory that is shared with the owner.
    ///
    /// # Errors
    /// As [`register`](Self::register), and `BUFFER_OVERFLOW` when there is not that much.
    pub async fn alloc_registered<T: Transport>(&self, len: usize) -> Result<Region<T>> {
        let (share, memory) = self.inner.new_shared(len, &self.inner.deadline()).await?;
        Region::unregistered(Arc::new(SharedSource { _share: share, memory: Arc::new(memory) }))
    }
}
