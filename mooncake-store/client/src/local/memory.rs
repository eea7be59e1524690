//! Memory of a shared client: memory shared with its daemon, a pool of it for values, and separate
//! memory blocks for values that do not fit into the pool.

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
    /// Shares a memory block with the daemon.
    async fn share(&self, pages: SharedPages, deadline: &Deadline) -> Result<Share> {
        let number = self.memories.next.fetch_add(1, Ordering::Relaxed);
        let share = Share { number, memories: self.memories.clone(), commands: self.commands.clone() };
        let (told, answer) = oneshot::channel();
        let gone = || Error::new(ErrorCode::RpcFail, "the runtime of the shared client is closed");
        self.commands.send(Command::Share(SharedMemory { number, pages }, told)).map_err(|_| gone())?;
        deadline.bound("sharing memory", async { answer.await.map_err(|_| lost())? }).await?;
        Ok(share)
    }

    /// Allocates memory and shares it with the daemon.
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

    /// Returns a buffer of `len` bytes from the pool, or else in new memory. If there is no memory
    /// for either, waits for free space in the pool.
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
                deadline.bound("waiting for space in the buffer", pool.take(len)).await
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

/// Memory of the caller that is shared with the daemon.
struct SharedSource {
    // This field drops first, as in a `LocalBuf`.
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
    /// Returns a buffer for a value to put, in memory that the daemon also maps.
    ///
    /// # Errors
    /// Returns `NO_AVAILABLE_HANDLE` if the daemon accepts no more memory, `BUFFER_OVERFLOW` if the
    /// host has no free memory, and `INVALID_PARAMS` for a length of 0.
    pub async fn alloc(&self, len: usize) -> Result<LocalBuf> {
        self.inner.room(len, &self.inner.deadline()).await
    }

    /// Shares memory of the caller with the daemon until the last handle of the region is dropped.
    /// Objects move into and out of that memory without a copy.
    ///
    /// The memory must come from [`HostMemoryOptions::shared`] or a
    /// [`SharedMapping`](mooncake_core::memory::SharedMapping), in a file with a sealed size. Whole
    /// pages are shared. Device memory is accepted but not shared: its bytes are copied.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for other memory, and `NO_AVAILABLE_HANDLE` if the daemon accepts
    /// no more memory.
    pub async fn register<T: Transport>(&self, memory: Arc<dyn MemorySource>) -> Result<Region<T>> {
        let span = memory.span().located();
        if span.location.is_device() {
            return Region::unregistered(memory);
        }
        let pages = shared_pages(span).ok_or_else(|| {
            Error::invalid(format!(
                "{} bytes at {:#x} are memory of this process alone, which mooncake_client \
                 cannot see; use memory of \
                 alloc_from_mem_pool or MooncakeHostMemAllocator",
                span.len,
                span.addr()
            ))
        })?;
        let share = self.inner.share(pages, &self.inner.deadline()).await?;
        Region::unregistered(Arc::new(SharedSource { _share: share, memory }))
    }

    /// Allocates a region of memory that is shared with the daemon.
    ///
    /// # Errors
    /// Returns the errors of [`register`](Self::register), and `BUFFER_OVERFLOW` if the host has
    /// too little free memory.
    pub async fn alloc_registered<T: Transport>(&self, len: usize) -> Result<Region<T>> {
        let (share, memory) = self.inner.new_shared(len, &self.inner.deadline()).await?;
        Region::unregistered(Arc::new(SharedSource { _share: share, memory: Arc::new(memory) }))
    }
}
