//! A light client's memory: what its owner was told of, a pool of it for values, and pieces for
//! those the pool has no room for.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use mooncake_core::memory::{
    HostMemory, HostMemoryOptions, MemorySource, MemorySpan, SharedPages, shared_pages,
};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_transport::{BufferPool, Loopback, PoolConfig, Region, Transport};
use tokio::sync::oneshot;

use super::client::{Inner, LocalClient};
use super::shared::{Command, LocalBuf, Pool, Share, SharedMemory};
use crate::deadline::Deadline;

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

    /// Room for that many bytes: in the pool, or for itself; failing both, in the pool as soon as
    /// there is some.
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
    /// `NO_AVAILABLE_HANDLE` when the owner takes no more memory, `BUFFER_OVERFLOW` when the
    /// machine has none, `INVALID_PARAMS` for no bytes.
    pub async fn alloc(&self, len: usize) -> Result<LocalBuf> {
        self.inner.room(len, &self.inner.deadline()).await
    }

    /// Shares memory of the caller's with the owner until the last handle of the region is dropped:
    /// objects move into and out of it without a copy. It must lie in shared memory that is listed
    /// ([`HostMemoryOptions::shared`], or a
    /// [`SharedMapping`](mooncake_core::memory::SharedMapping)), in a file whose size is sealed.
    /// Whole pages are shared. A device's memory is not shared, but taken all the same: its bytes
    /// are copied.
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
