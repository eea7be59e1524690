//! The local buffer: registered memory through which values in ordinary memory travel.

use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::pool::{BufferPool, PoolBuf, PoolConfig};
use mooncake_transport::{Region, Transport};

/// Most bytes copied before they are sent: few enough to be sent out of the processor's cache, and
/// enough to keep a wire busy while the next are copied.
const CHUNK: usize = 256 << 10;
/// A buffer is cut into this many chunks at least, so that several operations find room.
const CHUNKS: usize = 4;

/// The local buffer and how it is shared out.
pub(crate) struct Staging<T: Transport> {
    pool: BufferPool<T>,
    chunk: usize,
}

/// A part of a value on its way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Which value.
    pub(crate) value: usize,
    /// First byte of it.
    pub(crate) offset: usize,
    /// How many.
    pub(crate) len: usize,
}

impl<T: Transport> Staging<T> {
    /// A buffer over memory that nobody else uses.
    pub(crate) fn new(region: Region<T>) -> Result<Self> {
        let memory = region
            .exclusive()
            .map_err(|_| Error::new(ErrorCode::InvalidParams, "the local buffer is used by somebody else"))?;
        let chunk = (memory.len() / CHUNKS).clamp(1, CHUNK);
        Ok(Self { pool: BufferPool::new(memory, &PoolConfig::default())?, chunk })
    }

    /// Most bytes to fill at a time.
    pub(crate) fn chunk(&self) -> usize {
        self.chunk
    }

    /// Room for what is on its way out, if there is some now.
    pub(crate) fn room(&self, len: usize) -> Option<PoolBuf<T>> {
        self.pool.try_take(len).ok()
    }

    /// Room for what is on its way out, as soon as there is some.
    pub(crate) async fn wait_for_room(&self, len: usize) -> Result<PoolBuf<T>> {
        self.pool.take(len).await
    }

    /// Room for a value that is read, unless that would leave the writers too little: values stay
    /// as long as the caller likes.
    pub(crate) fn room_for_value(&self, len: usize) -> Option<PoolBuf<T>> {
        let left = self.pool.capacity().saturating_sub(self.pool.used());
        if (len as u64).checked_add(self.chunk as u64)? > left {
            return None;
        }
        self.room(len)
    }

    /// Bytes in use now.
    pub(crate) fn used(&self) -> u64 {
        self.pool.used()
    }
}

impl<T: Transport> std::fmt::Debug for Staging<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.pool.fmt(f)
    }
}

/// Cuts values up into fills of at most `chunk` bytes, in order; a fill holds parts of several
/// values where they are small.
#[derive(Debug)]
pub(crate) struct Cutter<I> {
    values: I,
    current: Option<Piece>,
    chunk: usize,
}

impl<I: Iterator<Item = (usize, usize)>> Cutter<I> {
    /// Cuts values given as index and length.
    pub(crate) fn new(values: I, chunk: usize) -> Self {
        Self { values, current: None, chunk }
    }

    /// The next fill; false when nothing is left.
    pub(crate) fn fill(&mut self, pieces: &mut Vec<Piece>) -> bool {
        pieces.clear();
        let mut room = self.chunk;
        while room > 0 {
            let Some(rest) = self
                .current
                .take()
                .or_else(|| self.values.next().map(|(value, len)| Piece { value, offset: 0, len }))
            else {
                break;
            };
            let len = rest.len.min(room);
            pieces.push(Piece { len, ..rest });
            room -= len;
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
        let mut cutter = Cutter::new(lens.iter().copied().enumerate(), chunk);
        let (mut pieces, mut all) = (Vec::new(), Vec::new());
        while cutter.fill(&mut pieces) {
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
