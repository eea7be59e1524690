//! Memory of a shared client: memory shared with its daemon, a pool of it for values, and separate
//! memory blocks for values that do not fit into the pool.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mooncake_core::fault_injection::is_planted;
use mooncake_core::memory::{
    HostMemory, HostMemoryOptions, HugePages, MemorySource, MemorySpan, SharedPages, check_free_memory,
    shared_pages,
};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_transport::{BufferPool, Loopback, PoolConfig, Region, Transport};
use tokio::sync::oneshot;

use super::client::{LocalClient, LocalInner};
use super::shared::{Command, LocalBuf, Pool, Share, SharedMemory};
use crate::deadline::Deadline;

/// Length of a memory block for short buffers, in bytes.
const MIN_BLOCK_LEN: usize = 16 << 20;
/// Maximum number of bytes of a batch that are copied at once, unless the pool is longer.
const MAX_BATCH_BYTES: usize = 64 << 20;

impl LocalInner {
    /// Shares a memory block with the daemon.
    async fn share(&self, pages: SharedPages, deadline: &Deadline) -> Result<Share> {
        let number = self.memories.next.fetch_add(1, Ordering::Relaxed);
        let share = Share { number, memories: self.memories.clone(), commands: self.commands.clone() };
        let (reply, response) = oneshot::channel();
        let runtime_closed = || Error::new(ErrorCode::RpcFail, "the runtime of the shared client is closed");
        self.commands
            .send(Command::Share(SharedMemory { number, pages }, reply))
            .map_err(|_| runtime_closed())?;
        deadline.bound("sharing memory", async { response.await.map_err(|_| daemon_lost())? }).await?;
        Ok(share)
    }

    /// Checks that the host has the memory, unless the settings admit more.
    pub(super) fn check_allocation(&self, len: usize) -> Result<()> {
        if self.config.allow_overcommit || self.config.memory.huge_pages != HugePages::Off {
            return Ok(());
        }
        check_free_memory(len)
    }

    /// Allocates memory and shares it with the daemon.
    pub(super) async fn new_shared(&self, len: usize, deadline: &Deadline) -> Result<(Share, HostMemory)> {
        self.check_allocation(len)?;
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
        self.new_block(len, &self.deadline()).await.map(Some)
    }

    async fn new_block(&self, len: usize, deadline: &Deadline) -> Result<Pool> {
        let (share, memory) = self.new_shared(len, deadline).await?;
        let memory = Region::<Loopback>::unregistered(Arc::new(memory))?;
        let start = memory.addr();
        let memory = memory.exclusive().map_err(|_| Error::internal("new memory is not ours alone"))?;
        // The callers wait for space within their deadlines, however many there are.
        let config = PoolConfig { max_waiters: usize::MAX, ..PoolConfig::default() };
        Ok(Pool { share: Arc::new(share), start, free: BufferPool::new(memory, &config)? })
    }

    /// Returns a buffer of `len` bytes at once, from the pool or else in a memory block.
    ///
    /// # Errors
    /// Returns kind `NoSpace` if neither has space and the daemon shares no more memory, or if
    /// other calls wait for a block.
    pub(super) async fn allocate_now(&self, len: usize, deadline: &Deadline) -> Result<LocalBuf> {
        if let Some(buffer) = self.pool.as_ref().and_then(|pool| pool.try_take(len)) {
            return Ok(buffer);
        }
        if self.blocks.waiting.load(Ordering::Acquire) > 0 {
            return Err(others_wait());
        }
        self.allocate_in_block(len, deadline).await
    }

    /// Returns a buffer in a memory block. Short buffers share their block, because every block
    /// needs descriptors.
    async fn allocate_in_block(&self, len: usize, deadline: &Deadline) -> Result<LocalBuf> {
        if let Some(buffer) = self.blocks.try_take(len) {
            return Ok(buffer);
        }
        let _creation = self.blocks.creation.lock().await;
        if let Some(buffer) = self.blocks.try_take(len) {
            return Ok(buffer);
        }
        let mut size = if is_planted("a-block-for-each-buffer") { len } else { len.max(MIN_BLOCK_LEN) };
        loop {
            let (is_refused, releases) = self.memories.refuses(size);
            let error = match is_refused && size > len {
                true => None,
                false => match self.new_block(size, deadline).await {
                    Ok(block) => {
                        let block = Arc::new(block);
                        self.blocks.add(&block);
                        return Pool::take_in_block(&block, len)
                            .ok_or_else(|| Error::internal("new memory does not have its length"));
                    }
                    Err(error) if error.kind() != ErrorKind::NoSpace => return Err(error),
                    Err(error) => {
                        if error.code() == ErrorCode::NoAvailableHandle {
                            self.memories.record_refusal(size, releases);
                        }
                        Some(error)
                    }
                },
            };
            match error {
                Some(error) if size == len => return Err(error),
                _ => size = (size / 4).max(len),
            }
        }
    }

    /// Returns a buffer of `len` bytes from the pool, or else in a memory block. If there is no
    /// memory for either, waits for free space. The caller has no other buffer of its call: calls
    /// that wait with buffers could wait for each other.
    ///
    /// # Errors
    /// Returns kind `NoSpace` at once for a buffer for which there is no space although no other
    /// buffer occupies a block.
    pub(super) async fn allocate(&self, len: usize, deadline: &Deadline) -> Result<LocalBuf> {
        match self.allocate_now(len, deadline).await {
            Err(error) if error.kind() == ErrorKind::NoSpace => {}
            outcome => return outcome,
        }
        deadline.bound("waiting for space in the buffer", self.wait_for_space(len, deadline)).await
    }

    async fn wait_for_space(&self, len: usize, deadline: &Deadline) -> Result<LocalBuf> {
        if let Some(pool) = self.pool.as_ref().filter(|pool| len as u64 <= pool.capacity()) {
            let mut taking = pin!(pool.take(len));
            loop {
                let mut freed = pin!(self.memories.freed.notified());
                freed.as_mut().enable();
                match self.allocate_now(len, deadline).await {
                    Err(error) if error.kind() == ErrorKind::NoSpace => {}
                    outcome => return outcome,
                }
                tokio::select! {
                    biased;
                    buffer = &mut taking => return buffer,
                    () = freed => {}
                }
            }
        }
        let _waiting = Waiting::new(&self.blocks.waiting);
        let _head = self.blocks.queue_head.lock().await;
        loop {
            let mut freed = pin!(self.memories.freed.notified());
            freed.as_mut().enable();
            // Blocks that are released during the attempt may be enough for the next one.
            let is_occupied = self.memories.is_occupied() || !self.blocks.is_empty();
            match self.allocate_in_block(len, deadline).await {
                Err(error) if error.kind() == ErrorKind::NoSpace && is_occupied => freed.await,
                outcome => return outcome,
            }
        }
    }

    /// Returns one buffer for values from the front, given by their lengths, and the number of
    /// these values. Waits for space for the first one only.
    ///
    /// # Errors
    /// Returns the errors of [`allocate`](Self::allocate) for the first value.
    pub(super) async fn allocate_batch(
        &self,
        lens: impl Iterator<Item = usize>,
        deadline: &Deadline,
    ) -> Result<(Option<LocalBuf>, usize)> {
        let max = self.pool.as_ref().map_or(0, |pool| usize::try_from(pool.capacity()).unwrap_or(usize::MAX));
        let max = max.max(MAX_BATCH_BYTES);
        // Bytes of the values up to each one.
        let mut ends: Vec<usize> = Vec::new();
        for len in lens {
            let end = ends.last().map_or(0, |end| *end).saturating_add(len);
            if end > max && !ends.is_empty() {
                break;
            }
            ends.push(end);
        }
        let mut count = ends.len();
        while count > 1 {
            match ends[count - 1] {
                0 => return Ok((None, count)),
                len => match self.allocate_now(len, deadline).await {
                    Err(error) if error.kind() == ErrorKind::NoSpace => count = count.div_ceil(2),
                    buffer => return Ok((Some(buffer?), count)),
                },
            }
            if is_planted("writes-wait-for-whole-batches") {
                return Ok((Some(self.allocate(ends[count - 1], deadline).await?), count));
            }
        }
        match ends.first() {
            None | Some(0) => Ok((None, count)),
            Some(len) => Ok((Some(self.allocate(*len, deadline).await?), 1)),
        }
    }

    pub(super) fn deadline(&self) -> Deadline {
        Deadline::after(&self.config.clock, self.config.timeout)
    }
}

/// Call that waits for a memory block.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(waiting: &'a AtomicUsize) -> Self {
        waiting.fetch_add(1, Ordering::AcqRel);
        Self(waiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn others_wait() -> Error {
    Error::new(
        ErrorCode::NoAvailableHandle,
        "cannot share memory with mooncake_client: other calls of this process wait for it (--max_client_memory)",
    )
}

fn daemon_lost() -> Error {
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
        self.inner.allocate(len, &self.inner.deadline()).await
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
