//! Local buffer: registered memory through which values in other memory are copied.

use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::pool::{BufferPool, PoolBuf, PoolConfig};
use mooncake_transport::{Region, Transport};

/// Maximum number of bytes copied before they are sent. They fit into the cache of the processor,
/// and keep a transport busy while the next bytes are copied.
const CHUNK: usize = 256 << 10;
/// Minimum number of chunks of a buffer, so that several operations can use it.
const CHUNKS: usize = 4;

/// Local buffer, and the limits of its use.
pub(crate) struct Staging<T: Transport> {
    pool: BufferPool<T>,
    chunk: usize,
}

/// Part of a value that is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Index of the value.
    pub(crate) value: usize,
    /// Offset of the part in the value.
    pub(crate) offset: usize,
    /// Length in bytes.
    pub(crate) len: usize,
}

impl<T: Transport> Staging<T> {
    /// Creates a buffer over memory without other users.
    pub(crate) fn new(region: Region<T>) -> Result<Self> {
        let memory = region.exclusive().map_err(|_| {
            Error::new(ErrorCode::InvalidParams, "the local buffer is in use by another owner")
        })?;
        let chunk = (memory.len() / CHUNKS).clamp(1, CHUNK);
        // The callers wait for space within their deadlines, however many there are.
        let config = PoolConfig { max_waiters: usize::MAX, ..PoolConfig::default() };
        Ok(Self { pool: BufferPool::new(memory, &config)?, chunk })
    }

    /// Returns the maximum number of bytes of one chunk.
    pub(crate) fn chunk(&self) -> usize {
        self.chunk
    }

    /// Allocates space for bytes to send, if some is free.
    pub(crate) fn try_allocate(&self, len: usize) -> Option<PoolBuf<T>> {
        self.pool.try_take(len).ok()
    }

    /// Allocates space for bytes to send. Waits until some is free.
    pub(crate) async fn allocate(&self, len: usize) -> Result<PoolBuf<T>> {
        self.pool.take(len).await
    }

    /// Allocates space for a value that is read, unless too little would be left for writers. The
    /// caller can hold such a value for any time.
    pub(crate) fn try_allocate_value(&self, len: usize) -> Option<PoolBuf<T>> {
        let left = self.pool.capacity().saturating_sub(self.pool.used());
        if (len as u64).checked_add(self.chunk as u64)? > left {
            return None;
        }
        self.try_allocate(len)
    }

    /// Returns the number of bytes in use.
    pub(crate) fn used(&self) -> u64 {
        self.pool.used()
    }
}

impl<T: Transport> std::fmt::Debug for Staging<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.pool.fmt(f)
    }
}

/// Divides values into batches of at most `chunk` bytes, in order. A batch holds parts of several
/// values if they are small.
#[derive(Debug)]
pub(crate) struct Chunker<I> {
    values: I,
    current: Option<Piece>,
    chunk: usize,
}

impl<I: Iterator<Item = (usize, usize)>> Chunker<I> {
    /// Creates a chunker for values given by index and length.
    pub(crate) fn new(values: I, chunk: usize) -> Self {
        Self { values, current: None, chunk }
    }

    /// Returns the next batch in `pieces`, or false when no bytes are left.
    pub(crate) fn fill(&mut self, pieces: &mut Vec<Piece>) -> bool {
        pieces.clear();
        let mut space = self.chunk;
        while space > 0 {
            let Some(rest) = self
                .current
                .take()
                .or_else(|| self.values.next().map(|(value, len)| Piece { value, offset: 0, len }))
            else {
                break;
            };
            let len = rest.len.min(space);
            pieces.push(Piece { len, ..rest });
            space -= len;
            if len < rest.len {
                self.current =
                    Some(Piece { value: rest.value, offset: rest.offset + len, len: rest.len - len });
            }
        }
        !pieces.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fills(lens: &[usize], chunk: usize) -> Vec<Vec<(usize, usize, usize)>> {
        let mut chunker = Chunker::new(lens.iter().copied().enumerate(), chunk);
        let (mut pieces, mut all) = (Vec::new(), Vec::new());
        while chunker.fill(&mut pieces) {
            all.push(pieces.iter().map(|p| (p.value, p.offset, p.len)).collect());
        }
        all
    }

    #[test]
    fn values_are_packed_and_cut() {
        assert_eq!(fills(&[], 10), Vec::<Vec<_>>::new());
        assert_eq!(fills(&[3, 4], 10), [vec![(0, 0, 3), (1, 0, 4)]]);
        assert_eq!(
            fills(&[25, 5, 1], 10),
            [vec![(0, 0, 10)], vec![(0, 10, 10)], vec![(0, 20, 5), (1, 0, 5)], vec![(2, 0, 1)]]
        );
        assert_eq!(fills(&[10, 10], 10), [vec![(0, 0, 10)], vec![(1, 0, 10)]]);
    }
}
