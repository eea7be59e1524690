//! Memory that a light client and its owner both see.

use bytes::Bytes;
use mooncake_core::memory::{HostMemory, SharedPages};
use mooncake_core::{Error, Result};
use mooncake_transport::{BufferPool, Loopback, PoolBuf, PoolConfig, Region, Source};
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use tokio::sync::{mpsc, oneshot};

use super::message::Place;

/// Some memory, as an owner is told of it.
#[derive(Clone, Debug)]
pub(super) struct SharedMemory {
    pub(super) number: u32,
    pub(super) pages: SharedPages,
}

/// What a light client has to say to its owner.
pub(super) enum Command {
    /// Here is memory; how it was taken.
    Share(SharedMemory, oneshot::Sender<Result<()>>),
    /// That memory is not used any more.
    Unshare(u32),
}

/// What the owner was told of, by first address and number.
#[derive(Default)]
pub(super) struct Memories {
    pub(super) listed: RwLock<BTreeMap<(u64, u32), SharedMemory>>,
    pub(super) next: AtomicU32,
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
pub(super) struct Share {
    pub(super) number: u32,
    pub(super) memories: Arc<Memories>,
    pub(super) commands: mpsc::UnboundedSender<Command>,
}

impl Drop for Share {
    fn drop(&mut self) {
        // At once: the addresses may be another mapping's in a moment.
        self.memories.forget(self.number);
        // Nobody is there to be told when the runtime is gone.
        let _ = self.commands.send(Command::Unshare(self.number));
    }
}

/// Memory through which values travel.
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

/// Memory that a light client and its owner see, for a value to be put or one that was read: what
/// is written here is stored without another copy. It is given back when it is dropped.
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
    pub(super) fn own(share: Share, memory: HostMemory) -> Result<Self> {
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
