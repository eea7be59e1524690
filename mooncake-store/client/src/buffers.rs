//! Sources of writes and targets of reads, in memory of any kind.

use std::ops::Range;
use std::sync::Arc;

use crate::checksum::Sum;
use bytes::Bytes;
use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, Result};
use mooncake_transport::pool::PoolBuf;
use mooncake_transport::region::Local;
use mooncake_transport::{Sink, Slice, SliceMut, Source, Transport};

/// Bytes copied before the task yields to others: about 60 microseconds.
pub(crate) const COPY_CHUNK: usize = 1 << 20;

/// Bytes that one write sends. Clones share the bytes, so that several replicas are written from
/// one copy.
pub(crate) enum Outgoing<T: Transport> {
    /// Registered memory of the caller.
    Slice(Slice<T>),
    /// Memory that is not registered, for transports that accept it.
    Plain(Bytes),
    /// Part of a staging buffer.
    Staged(Part<T>),
}

/// Range of a staging buffer that is shared with other ranges.
pub(crate) struct Part<T: Transport> {
    buffer: Arc<PoolBuf<T>>,
    range: Range<usize>,
}

impl<T: Transport> Part<T> {
    /// Returns a range of the buffer, cut at the end of the buffer.
    pub(crate) fn new(buffer: Arc<PoolBuf<T>>, range: Range<usize>) -> Self {
        let end = range.end.min(buffer.len());
        Self { range: range.start.min(end)..end, buffer }
    }
}

// SAFETY: slices and `Bytes` are valid sources. A part lies inside its buffer (`new`), whose bytes
// stay in place until the last part is dropped. No code can write the bytes, because that requires
// exclusive ownership of the buffer, which is shared.
unsafe impl<T: Transport> Source<T> for Outgoing<T> {
    fn local(&self) -> Local<'_, T::Registration> {
        match self {
            Self::Slice(slice) => slice.local(),
            Self::Plain(bytes) => <Bytes as Source<T>>::local(bytes),
            Self::Staged(part) => {
                let local = part.buffer.local();
                // SAFETY: `start <= end <= len` of the buffer.
                let ptr = unsafe { local.span.ptr.add(part.range.start) };
                let span = MemorySpan { ptr, len: part.range.len(), ..local.span };
                Local { registration: local.registration, span }
            }
        }
    }
}

/// Target of one read.
pub(crate) enum Incoming<T: Transport> {
    /// Registered memory of this client, as long as the value.
    Buffer(PoolBuf<T>),
    /// Memory that is not registered, for transports that accept it; as long as the value.
    Heap(Vec<u8>),
    /// Registered memory of the caller. The value occupies its first bytes.
    Into(Front<T>),
}

/// The first bytes of a slice.
pub(crate) struct Front<T: Transport> {
    slice: SliceMut<T>,
    len: usize,
}

impl<T: Transport> Front<T> {
    /// Returns the first `len` bytes, or the slice itself if it is shorter.
    pub(crate) fn new(slice: SliceMut<T>, len: usize) -> Result<Self, SliceMut<T>> {
        if len > slice.len() { Err(slice) } else { Ok(Self { slice, len }) }
    }

    /// Returns the whole slice.
    pub(crate) fn into_slice(self) -> SliceMut<T> {
        self.slice
    }
}

impl<T: Transport> Incoming<T> {
    /// Computes the checksum of the value after it has arrived.
    pub(crate) fn checksum(&self) -> Result<u64> {
        let mut sum = Sum::new();
        match self {
            Self::Buffer(buffer) => sum.bytes(buffer),
            Self::Heap(bytes) => sum.bytes(bytes),
            Self::Into(front) => sum.front(&front.slice, front.len)?,
        }
        Ok(sum.value())
    }

    /// Copies the value to the target. Yields to other tasks between parts of a long value.
    pub(crate) async fn copy_from(&mut self, value: &[u8]) -> Result<()> {
        for (part, bytes) in value.chunks(COPY_CHUNK).enumerate() {
            let at = part * COPY_CHUNK;
            if at > 0 {
                tokio::task::yield_now().await;
            }
            self.put(at, bytes)?;
        }
        Ok(())
    }

    /// Copies a part of the value to its offset.
    pub(crate) fn put(&mut self, at: usize, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Buffer(buffer) => fill(buffer, at, bytes),
            Self::Heap(heap) => fill(heap, at, bytes),
            Self::Into(front) => front.slice.copy_from(at, bytes),
        }
    }

    /// Returns the value after it has arrived, or `None` if it is in memory of the caller.
    pub(crate) fn into_bytes(self) -> Option<Bytes> {
        match self {
            Self::Buffer(buffer) => Some(buffer.freeze()),
            Self::Heap(bytes) => Some(bytes.into()),
            Self::Into(_) => None,
        }
    }
}

fn fill(target: &mut [u8], at: usize, bytes: &[u8]) -> Result<()> {
    let range = target.get_mut(at..at + bytes.len());
    range.ok_or_else(|| Error::internal("value is longer than its buffer"))?.copy_from_slice(bytes);
    Ok(())
}

// SAFETY: buffers, vectors and slices are valid sources. A front lies inside its slice
// (`Front::new`).
unsafe impl<T: Transport> Source<T> for Incoming<T> {
    fn local(&self) -> Local<'_, T::Registration> {
        match self {
            Self::Buffer(buffer) => buffer.local(),
            Self::Heap(bytes) => <Vec<u8> as Source<T>>::local(bytes),
            Self::Into(front) => {
                let local = front.slice.local();
                Local { span: MemorySpan { len: front.len, ..local.span }, ..local }
            }
        }
    }
}

// SAFETY: every variant holds a valid sink.
unsafe impl<T: Transport> Sink<T> for Incoming<T> {}
