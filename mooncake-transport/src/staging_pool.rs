//! Page-locked buffers for transfers of device memory: a bounded number, given out in order of the
//! requests.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use futures::channel::oneshot;
use mooncake_core::memory::{MemorySource, MemorySpan, device_driver};
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;

/// Pool of buffers of one length. They are allocated on demand, and kept.
pub struct StagingPool<R> {
    inner: Arc<Inner<R>>,
}

struct Inner<R> {
    len: usize,
    max_buffers: usize,
    state: Mutex<State<R>>,
}

struct State<R> {
    free: Vec<Memory<R>>,
    created: usize,
    waiters: VecDeque<oneshot::Sender<StagingBuffer<R>>>,
}

struct Memory<R> {
    // Dropped before the memory.
    registration: R,
    memory: Box<dyn MemorySource>,
}

/// Buffer with its registration. The drop returns it to its pool.
pub struct StagingBuffer<R> {
    memory: Option<Memory<R>>,
    span: MemorySpan,
    /// Pool of the buffer. `None` for a buffer of another length.
    pool: Option<Arc<Inner<R>>>,
}

impl<R> StagingPool<R> {
    /// Creates a pool of at most `max_buffers` buffers of `len` bytes.
    pub fn new(len: usize, max_buffers: usize) -> Self {
        let state = Mutex::new(State { free: Vec::new(), created: 0, waiters: VecDeque::new() });
        Self { inner: Arc::new(Inner { len, max_buffers: max_buffers.max(1), state }) }
    }

    /// Returns the length of a buffer in bytes.
    pub fn len(&self) -> usize {
        self.inner.len
    }

    /// Returns whether the buffers have no bytes.
    pub fn is_empty(&self) -> bool {
        self.inner.len == 0
    }

    /// Waits for a buffer; requests are served in order. `register` registers a new buffer with a
    /// transport.
    ///
    /// # Errors
    /// Returns an error if not even one page-locked buffer can be allocated, and the errors of
    /// `register`.
    pub async fn take(&self, register: impl Fn(MemorySpan) -> Result<R>) -> Result<StagingBuffer<R>> {
        let receiver = {
            let mut state = self.inner.state.lock();
            if let Some(memory) = state.free.pop() {
                return Ok(self.inner.staging(memory));
            }
            if state.created < self.inner.max_buffers && state.waiters.is_empty() {
                state.created += 1;
                None
            } else {
                Some(state.wait())
            }
        };
        if let Some(receiver) = receiver {
            return receiver.await.map_err(|_| out_of_memory_error());
        }
        match Memory::new(self.inner.len, register) {
            Ok(memory) => Ok(self.inner.staging(memory)),
            Err(error) => {
                let receiver = {
                    let mut state = self.inner.state.lock();
                    state.record_failed_allocation();
                    // The pool works with fewer buffers, at a lower speed.
                    (state.created > 0).then(|| state.wait())
                };
                match receiver {
                    Some(receiver) => receiver.await.map_err(|_| error),
                    None => Err(error),
                }
            }
        }
    }

    /// Returns a buffer if one is available now.
    pub fn try_take(&self, register: impl Fn(MemorySpan) -> Result<R>) -> Option<StagingBuffer<R>> {
        {
            let mut state = self.inner.state.lock();
            if let Some(memory) = state.free.pop() {
                return Some(self.inner.staging(memory));
            }
            if state.created >= self.inner.max_buffers || !state.waiters.is_empty() {
                return None;
            }
            state.created += 1;
        }
        match Memory::new(self.inner.len, register) {
            Ok(memory) => Some(self.inner.staging(memory)),
            Err(_) => {
                self.inner.state.lock().record_failed_allocation();
                None
            }
        }
    }

    /// Allocates a buffer of another length. Its drop frees the memory.
    ///
    /// # Errors
    /// Returns an error if no page-locked memory of that length is available, and the errors of
    /// `register`.
    pub fn of_length(
        &self,
        len: usize,
        register: impl Fn(MemorySpan) -> Result<R>,
    ) -> Result<StagingBuffer<R>> {
        let memory = Memory::new(len, register)?;
        Ok(StagingBuffer { span: memory.memory.span(), memory: Some(memory), pool: None })
    }
}

impl<R> State<R> {
    /// Records that a buffer could not be allocated. If no buffer is left, drops all waiters, which
    /// would otherwise wait forever.
    fn record_failed_allocation(&mut self) {
        self.created -= 1;
        if self.created == 0 {
            self.waiters.clear();
        }
    }

    fn wait(&mut self) -> oneshot::Receiver<StagingBuffer<R>> {
        let (sender, receiver) = oneshot::channel();
        self.waiters.push_back(sender);
        receiver
    }
}

fn out_of_memory_error() -> Error {
    Error::new(ErrorCode::BufferOverflow, "no page-locked memory is left")
}

impl<R> Memory<R> {
    fn new(len: usize, register: impl Fn(MemorySpan) -> Result<R>) -> Result<Self> {
        let driver = device_driver().ok_or_else(|| {
            Error::new(ErrorCode::NotSupported, "page-locked memory needs a driver of device memory")
        })?;
        let memory = driver.staging(len)?;
        let registration = register(memory.span())?;
        Ok(Self { registration, memory })
    }
}

impl<R> Inner<R> {
    fn staging(self: &Arc<Self>, memory: Memory<R>) -> StagingBuffer<R> {
        StagingBuffer { span: memory.memory.span(), memory: Some(memory), pool: Some(self.clone()) }
    }

    /// Passes a buffer to the waiter that has waited longest.
    fn put_back(self: &Arc<Self>, mut memory: Memory<R>) {
        loop {
            let waiter = {
                let mut state = self.state.lock();
                match state.waiters.pop_front() {
                    Some(waiter) => waiter,
                    None => return state.free.push(memory),
                }
            };
            // A waiter that was dropped returns the memory outside its buffer, so that the drop of
            // the buffer does not recurse.
            match waiter.send(self.staging(memory)).map_err(|mut staging| staging.memory.take()) {
                Err(Some(unclaimed)) => memory = unclaimed,
                Ok(()) | Err(None) => return,
            }
        }
    }
}

impl<R> StagingBuffer<R> {
    /// Returns the memory of the buffer.
    pub fn span(&self) -> MemorySpan {
        self.span
    }

    /// Returns a part of the buffer.
    ///
    /// # Errors
    /// Returns `Invalid` if the part is not inside.
    pub fn part(&self, at: usize, len: usize) -> Result<MemorySpan> {
        if at.checked_add(len).is_none_or(|end| end > self.span.len) {
            return Err(Error::internal(format!("{len} bytes at {at} of a buffer of {}", self.span.len)));
        }
        // SAFETY: inside, as checked above.
        Ok(MemorySpan { ptr: unsafe { self.span.ptr.add(at) }, len, ..self.span })
    }

    /// Returns the registration with the transport.
    pub fn registration(&self) -> Option<&R> {
        self.memory.as_ref().map(|memory| &memory.registration)
    }
}

impl<R> Drop for StagingBuffer<R> {
    fn drop(&mut self) {
        if let (Some(memory), Some(pool)) = (self.memory.take(), &self.pool) {
            pool.put_back(memory);
        }
    }
}

impl<R> fmt::Debug for StagingPool<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let created = self.inner.state.lock().created;
        write!(f, "StagingPool({created} of {} of {} bytes)", self.inner.max_buffers, self.inner.len)
    }
}

impl<R> fmt::Debug for StagingBuffer<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StagingBuffer({:#x}+{})", self.span.addr(), self.span.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use mooncake_core::testkit::device::TestDevice;

    #[test]
    #[cfg_attr(miri, ignore = "no memory without rights there")]
    fn buffers_are_bounded_and_handed_on_in_order() {
        let _device = TestDevice::new();
        let pool = StagingPool::<()>::new(4096, 2);
        let take = || pool.take(|_| Ok(()));
        let first = take().now_or_never().unwrap().unwrap();
        let second = take().now_or_never().unwrap().unwrap();
        assert_ne!(first.span(), second.span());
        let (mut a, mut b, mut c) = (Box::pin(take()), Box::pin(take()), Box::pin(take()));
        for receiver in [&mut a, &mut b, &mut c] {
            assert!(receiver.as_mut().now_or_never().is_none());
        }
        // A cancelled request does not block the others.
        drop(a);
        let span = first.span();
        drop(first);
        let handed = b.as_mut().now_or_never().unwrap().unwrap();
        assert_eq!(handed.span(), span);
        assert!(c.as_mut().now_or_never().is_none());
        drop((handed, second));
        c.now_or_never().unwrap().unwrap();
    }

    #[test]
    #[cfg_attr(miri, ignore = "no memory without rights there")]
    fn without_memory_it_fails_only_alone() {
        let _device = TestDevice::new();
        let pool = StagingPool::<()>::new(4096, 2);
        let refuse = |_| Err(Error::invalid("no"));
        assert!(pool.take(refuse).now_or_never().unwrap().is_err());
        let one = pool.take(|_| Ok(())).now_or_never().unwrap().unwrap();
        let mut next = Box::pin(pool.take(refuse));
        assert!(next.as_mut().now_or_never().is_none());
        drop(one);
        next.now_or_never().unwrap().unwrap();
        assert!(pool.of_length(10, |_| Ok(())).unwrap().part(5, 6).is_err());
    }
}
