//! Buffers that an allocator cuts from one registered region. [`PoolBuf`] is the only view of bytes
//! in this crate. It can return `&[u8]`, because it has the only access to them.

use std::collections::VecDeque;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::channel::oneshot;
use mooncake_core::alloc::{AllocError, BuiltinAllocator, BuiltinAllocatorConfig, Extent, SegmentAllocator};
use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;

use crate::region::{Local, Sink, SliceMut, Source};
use crate::transport::{Access, Transport};

/// Settings of a [`BufferPool`].
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Alignment of every buffer, in bytes from the start of the pool. A power of two.
    pub align: u64,
    /// Maximum number of waiting callers of [`BufferPool::take`]. Further calls fail.
    pub max_waiters: usize,
    /// Settings of the allocator.
    pub allocator: BuiltinAllocatorConfig,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self { align: 64, max_waiters: 1024, allocator: BuiltinAllocatorConfig::default() }
    }
}

/// Pool of the buffers of one region. Clones are handles of the same pool.
pub struct BufferPool<T: Transport> {
    inner: Arc<Inner<T>>,
}

struct Inner<T: Transport> {
    state: Mutex<State<T>>,
    memory: SliceMut<T>,
    align: u64,
    max_waiters: usize,
}

struct State<T: Transport> {
    // The type is not generic, because `PoolBuf` is sound only if live extents never overlap.
    allocator: BuiltinAllocator,
    waiters: VecDeque<Waiter<T>>,
}

struct Waiter<T: Transport> {
    len: u64,
    sender: oneshot::Sender<PoolBuf<T>>,
}

impl<T: Transport> BufferPool<T> {
    /// Creates a pool over a range of host memory that is not open to peers (`Access::Local`).
    /// Bytes that a peer may write cannot be borrowed.
    pub fn new(memory: SliceMut<T>, config: &PoolConfig) -> Result<Self> {
        if memory.access() != Access::Local {
            return Err(Error::invalid("cannot create buffer pool: its memory must not be open to peers"));
        }
        let span = memory.local().span;
        if span.location.is_device() {
            return Err(Error::invalid(format!(
                "cannot create buffer pool: memory of {} is not host memory",
                span.location
            )));
        }
        if !config.align.is_power_of_two() {
            return Err(Error::invalid(format!(
                "invalid alignment: it is not a power of two. align={}",
                config.align
            )));
        }
        let allocator = BuiltinAllocator::new(span.len as u64, &config.allocator);
        let state = Mutex::new(State { allocator, waiters: VecDeque::new() });
        let inner = Inner { state, memory, align: config.align, max_waiters: config.max_waiters };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Returns a buffer of exactly `len` bytes. Returns `NoSpace` if none is free now (or if others
    /// wait already), and `Invalid` for a length that never fits.
    pub fn try_take(&self, len: usize) -> Result<PoolBuf<T>> {
        self.inner.allocate(len as u64, false).map(|extent| self.buffer(extent))
    }

    /// Waits for a buffer of exactly `len` bytes; requests are served in order. Fails at once with
    /// `Invalid` for a length that never fits, and with `NoSpace` if too many wait already.
    pub async fn take(&self, len: usize) -> Result<PoolBuf<T>> {
        let receiver = {
            let mut state = self.inner.state.lock();
            match self.inner.allocate_in(&mut state, len as u64, false) {
                Ok(extent) => {
                    drop(state);
                    return Ok(self.buffer(extent));
                }
                Err(error) if error.code() != ErrorCode::NoAvailableHandle => return Err(error),
                Err(_) if state.waiters.len() >= self.inner.max_waiters => {
                    let waiting = state.waiters.len();
                    return Err(Error::new(
                        ErrorCode::NoAvailableHandle,
                        format!("cannot take buffer: the pool is full. len={len} waiting={waiting}"),
                    ));
                }
                Err(_) => {
                    let (sender, receiver) = oneshot::channel();
                    state.waiters.push_back(Waiter { len: len as u64, sender });
                    receiver
                }
            }
        };
        WaiterGuard { receiver, inner: &self.inner, is_served: false }.await
    }

    /// Returns the number of bytes in buffers.
    pub fn used(&self) -> u64 {
        self.inner.state.lock().allocator.used()
    }

    /// Returns the number of bytes of the pool.
    pub fn capacity(&self) -> u64 {
        self.inner.memory.len() as u64
    }

    fn buffer(&self, extent: Extent) -> PoolBuf<T> {
        PoolBuf { inner: self.inner.clone(), extent }
    }
}

impl<T: Transport> Clone for BufferPool<T> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<T: Transport> fmt::Debug for BufferPool<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferPool").field("capacity", &self.capacity()).field("used", &self.used()).finish()
    }
}

impl<T: Transport> Inner<T> {
    fn allocate(&self, len: u64, is_first_waiter: bool) -> Result<Extent> {
        self.allocate_in(&mut self.state.lock(), len, is_first_waiter)
    }

    /// Allocates a buffer. `is_first_waiter` is set for the first waiter.
    fn allocate_in(&self, state: &mut State<T>, len: u64, is_first_waiter: bool) -> Result<Extent> {
        if !is_first_waiter && len != 0 && len <= state.allocator.capacity() && !state.waiters.is_empty() {
            return Err(Error::from(AllocError::Full));
        }
        state.allocator.allocate(len, self.align).map_err(|error| match error {
            AllocError::Full => Error::from(AllocError::Full),
            _ => Error::invalid(format!(
                "cannot take buffer: {error}. len={len} capacity={}",
                state.allocator.capacity()
            )),
        })
    }

    /// Passes free space to the waiters, in order.
    fn serve(self: &Arc<Self>) {
        loop {
            let (waiter, extent) = {
                let mut state = self.state.lock();
                let Some(waiter) = state.waiters.front() else { return };
                if waiter.sender.is_canceled() {
                    state.waiters.pop_front();
                    continue;
                }
                let len = waiter.len;
                let Ok(extent) = self.allocate_in(&mut state, len, true) else { return };
                (state.waiters.pop_front(), extent)
            };
            let buffer = PoolBuf { inner: self.clone(), extent };
            if let Some(waiter) = waiter
                && let Err(mut unclaimed) = waiter.sender.send(buffer)
            {
                // The buffer is returned here and not by its drop, which would recurse into this
                // loop.
                unclaimed.release();
            }
        }
    }
}

/// Guard of a waiter. If it is dropped early, the next waiter is served.
struct WaiterGuard<'a, T: Transport> {
    receiver: oneshot::Receiver<PoolBuf<T>>,
    inner: &'a Arc<Inner<T>>,
    is_served: bool,
}

impl<T: Transport> Future for WaiterGuard<'_, T> {
    type Output = Result<PoolBuf<T>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.receiver).poll(cx).map(|buffer| {
            self.is_served = true;
            buffer.map_err(|_| Error::internal("the pool dropped a waiter"))
        })
    }
}

impl<T: Transport> Drop for WaiterGuard<'_, T> {
    fn drop(&mut self) {
        if !self.is_served {
            // A buffer that was sent in the meantime is received here, and its drop returns it.
            self.receiver.close();
            drop(self.receiver.try_recv());
            self.inner.serve();
        }
    }
}

/// Buffer of a [`BufferPool`]. Its holder has the only access to the bytes. The drop returns them
/// to the pool.
///
/// A transfer takes the buffer by value, as source or sink. The initial contents are those of the
/// last user.
pub struct PoolBuf<T: Transport> {
    inner: Arc<Inner<T>>,
    // Empty once the buffer is returned.
    extent: Extent,
}

impl<T: Transport> PoolBuf<T> {
    /// Converts the buffer into immutable bytes, without a copy. The drop of the last clone returns
    /// them to the pool.
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(Frozen(self))
    }

    fn span(&self) -> MemorySpan {
        let span = self.inner.memory.local().span;
        // Both fit, because the extent lies inside the span.
        let (offset, len) = (self.extent.offset as usize, self.extent.len as usize);
        // SAFETY: the allocator manages exactly the span, and live extents lie inside.
        MemorySpan { ptr: unsafe { span.ptr.add(offset) }, len, ..span }
    }

    fn release(&mut self) -> bool {
        let extent = std::mem::replace(&mut self.extent, Extent { offset: 0, len: 0 });
        if extent.len == 0 {
            return false;
        }
        let mut state = self.inner.state.lock();
        state.allocator.release(extent);
        !state.waiters.is_empty()
    }
}

impl<T: Transport> Deref for PoolBuf<T> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let span = self.span();
        // SAFETY: live extents do not overlap, the pool has the only access to the region, peers
        // are excluded (`Access::Local`), and a transfer takes the buffer by value. The source's
        // bytes are readable.
        unsafe { std::slice::from_raw_parts(span.ptr.as_ptr(), span.len) }
    }
}

impl<T: Transport> DerefMut for PoolBuf<T> {
    fn deref_mut(&mut self) -> &mut [u8] {
        let span = self.span();
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(span.ptr.as_ptr(), span.len) }
    }
}

impl<T: Transport> fmt::Debug for PoolBuf<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PoolBuf({}+{})", self.extent.offset, self.extent.len)
    }
}

impl<T: Transport> Drop for PoolBuf<T> {
    fn drop(&mut self) {
        if self.release() {
            self.inner.serve();
        }
    }
}

// SAFETY: the extent belongs to this value until its drop, and the pool keeps memory and
// registration.
unsafe impl<T: Transport> Source<T> for PoolBuf<T> {
    fn local(&self) -> Local<'_, T::Registration> {
        Local { registration: self.inner.memory.local().registration, span: self.span() }
    }
}

// SAFETY: as above.
unsafe impl<T: Transport> Sink<T> for PoolBuf<T> {}

struct Frozen<T: Transport>(PoolBuf<T>);

impl<T: Transport> AsRef<[u8]> for Frozen<T> {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::{Loopback, LoopbackNet};
    use crate::region::Region;
    use crate::transfer::{Transfer, read, write};
    use futures::FutureExt;
    use mooncake_core::ErrorKind;
    use mooncake_core::memory::HostMemory;

    fn region(node: &Loopback, len: usize, access: Access) -> Region<Loopback> {
        Region::register(node, Arc::new(HostMemory::new(len).unwrap()), access).unwrap()
    }

    fn pool(len: usize, max_waiters: usize) -> BufferPool<Loopback> {
        let memory = region(&LoopbackNet::new().node(), len, Access::Local).exclusive().unwrap();
        BufferPool::new(memory, &PoolConfig { max_waiters, ..PoolConfig::default() }).unwrap()
    }

    #[test]
    fn buffers_are_separate_and_come_back() {
        let pool = pool(4096, 0);
        let (mut a, mut b) = (pool.try_take(100).unwrap(), pool.try_take(1).unwrap());
        a.fill(1);
        b.fill(2);
        assert!(a.iter().all(|x| *x == 1) && *b == [2]);
        assert_eq!((a.len(), pool.used()), (100, 101));
        assert_eq!(a.as_ptr().addr() % 64, b.as_ptr().addr() % 64);
        assert_eq!(pool.try_take(4096).unwrap_err().kind(), ErrorKind::NoSpace);
        assert_eq!(pool.try_take(4097).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(pool.try_take(0).unwrap_err().kind(), ErrorKind::Invalid);
        let bytes = a.freeze();
        drop(b);
        let part = bytes.slice(10..20);
        drop(bytes);
        assert_eq!((part.as_ref(), pool.used()), (&[1u8; 10][..], 100));
        drop(part);
        assert_eq!(pool.used(), 0);
        pool.try_take(4096).unwrap();
    }

    #[test]
    fn waiting_is_first_come_first_served_and_bounded() {
        let pool = pool(4096, 2);
        let all = pool.try_take(4096).unwrap();
        let mut large = Box::pin(pool.take(4000));
        let mut small = Box::pin(pool.take(10));
        assert!(large.as_mut().now_or_never().is_none() && small.as_mut().now_or_never().is_none());
        assert_eq!(pool.take(10).now_or_never().unwrap().unwrap_err().kind(), ErrorKind::NoSpace);
        assert_eq!(pool.take(5000).now_or_never().unwrap().unwrap_err().kind(), ErrorKind::Invalid);
        drop(all);
        assert_eq!(pool.try_take(4090).unwrap_err().kind(), ErrorKind::NoSpace);
        let large = large.now_or_never().unwrap().unwrap();
        let small = small.now_or_never().unwrap().unwrap();
        assert_eq!(pool.used(), 4010);
        drop((large, small));
        assert_eq!(pool.used(), 0);
    }

    #[test]
    fn a_waiter_that_gives_up_blocks_nobody_and_leaks_nothing() {
        let pool = pool(4096, 8);
        let half = pool.try_take(2048).unwrap();
        let mut large = Box::pin(pool.take(4096));
        let mut small = Box::pin(pool.take(100));
        assert!(large.as_mut().now_or_never().is_none() && small.as_mut().now_or_never().is_none());
        drop(large);
        let small = small.now_or_never().expect("its turn came").unwrap();
        // Granted, but dropped before it was polled.
        let mut second_large = Box::pin(pool.take(4096));
        assert!(second_large.as_mut().now_or_never().is_none());
        drop((half, small));
        assert_eq!(pool.used(), 4096);
        drop(second_large);
        assert_eq!(pool.used(), 0);
    }

    #[test]
    fn memory_open_to_peers_is_refused() {
        let node = LoopbackNet::new().node();
        let open = region(&node, 4096, Access::Remote).exclusive().unwrap();
        assert_eq!(BufferPool::new(open, &PoolConfig::default()).unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn buffers_travel() {
        let node = LoopbackNet::new().node();
        let remote = region(&node, 4096, Access::Remote);
        let mut desc = crate::SegmentDesc::new("n");
        node.describe(&mut desc);
        let peer = node.connect(&desc).now_or_never().unwrap().unwrap();
        let memory = region(&node, 4096, Access::Local).exclusive().unwrap();
        let pool: BufferPool<Loopback> = BufferPool::new(memory, &PoolConfig::default()).unwrap();
        let mut buffer = pool.try_take(10).unwrap();
        buffer.copy_from_slice(b"0123456789");
        let (result, _) = write(&node, &peer, [Transfer::new(remote.addr(), buffer)], None).wait();
        result.unwrap();
        assert_eq!(pool.used(), 0);
        let into = pool.try_take(4).unwrap();
        let (result, [into]) = read(&node, &peer, [Transfer::new(remote.addr() + 3, into)], None).wait();
        result.unwrap();
        assert_eq!(&*into.buffer.freeze(), b"3456");
    }
}
