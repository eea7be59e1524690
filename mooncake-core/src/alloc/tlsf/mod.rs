//! [`Tlsf`]: constant-time allocation without waste inside a block and with little between blocks.

mod bins;
mod blocks;

use std::collections::BTreeMap;

use self::bins::{Class, class_of};
use self::blocks::Blocks;
use super::{AllocError, Extent, SegmentAllocator, padding};

/// Options of [`Tlsf`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsfConfig {
    /// Number of free blocks that may be too short to try before a request is refused, at least 1.
    /// A higher number finds space in a nearly full segment more often, and makes refusals slower.
    pub scan: u32,
}

impl Default for TlsfConfig {
    fn default() -> Self {
        Self { scan: 32 }
    }
}

/// Two-level segregated fit, the default allocator.
///
/// Free blocks are filed by size in 64 classes per power of two, found through two levels of
/// bitmaps. The first class that has a block long enough serves a request. A block is cut to the
/// byte, so that nothing is lost inside it, and merged with its free neighbours when it is
/// released. Every step takes constant time, except that tables double now and then.
///
/// `largest_free` is exact for `align` 1: that length can be allocated, and one byte more is
/// refused.
///
/// `reserve` takes logarithmic time in a run of nothing but `reserve` calls. The first `reserve`
/// after an `allocate` or `release` visits every free block.
pub struct Tlsf {
    capacity: u64,
    used: u64,
    scan: u32,
    blocks: Blocks,
    /// Free blocks by offset; present only while space is being reserved.
    free_by_offset: Option<BTreeMap<u64, u32>>,
}

impl SegmentAllocator for Tlsf {
    type Config = TlsfConfig;

    fn new(capacity: u64, config: &TlsfConfig) -> Self {
        Self {
            capacity,
            used: 0,
            scan: config.scan.max(1),
            blocks: Blocks::new(capacity),
            free_by_offset: None,
        }
    }

    fn allocate(&mut self, len: u64, align: u64) -> Result<Extent, AllocError> {
        super::check_request(len, align, self.capacity)?;
        let found = if align == 1 { self.find(len) } else { self.find_aligned(len, align) };
        let block = found.filter(|_| self.blocks.has_free_ids()).ok_or(AllocError::Full)?;
        self.free_by_offset = None;
        let start = self.blocks[block].offset;
        let extent = Extent { offset: start + padding(start, align), len };
        self.carve(block, extent);
        Ok(extent)
    }

    fn release(&mut self, extent: Extent) {
        self.free_by_offset = None;
        let Some(mut block) = self.blocks.leave_live(extent.offset, extent.len) else {
            super::not_live(extent)
        };
        self.used -= extent.len;
        let (before, after) = (self.blocks[block].before, self.blocks[block].after);
        let (free_before, free_after) = (self.blocks.is_free(before), self.blocks.is_free(after));
        let mut len = extent.len;
        if free_after {
            self.blocks.unfile(after);
            len += self.blocks[after].len;
            self.blocks.dissolve(after);
        }
        if free_before {
            self.blocks.unfile(before);
            len += self.blocks[before].len;
            self.blocks.dissolve(block);
            block = before;
        }
        self.blocks[block].len = len;
        self.blocks.file(block);
    }

    fn reserve(&mut self, extent: Extent) -> Result<(), AllocError> {
        if extent.len == 0 {
            return Err(AllocError::Invalid);
        }
        let end = extent.end().filter(|&end| end <= self.capacity).ok_or(AllocError::Occupied)?;
        if !self.blocks.has_free_ids() {
            return Err(AllocError::Full);
        }
        let mut free = self.free_by_offset.take().unwrap_or_else(|| self.index_free());
        let holder = free.range(..=extent.offset).next_back().map(|(&offset, &block)| (offset, block));
        let holder = holder.filter(|&(offset, block)| end <= offset + self.blocks[block].len);
        if let Some((offset, block)) = holder {
            free.remove(&offset);
            let (front, back) = self.carve(block, extent);
            free.extend([front, back].into_iter().flatten().map(|rest| (self.blocks[rest].offset, rest)));
        }
        self.free_by_offset = Some(free);
        holder.map(|_| ()).ok_or(AllocError::Occupied)
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn used(&self) -> u64 {
        self.used
    }

    fn largest_free(&self) -> u64 {
        let Some(class) = self.blocks.last_class() else { return 0 };
        self.blocks
            .list(class)
            .take(self.scan as usize)
            .map(|block| self.blocks[block].len)
            .max()
            .unwrap_or(0)
    }
}

impl Tlsf {
    /// Returns a free block of at least `len` bytes. Blocks of the class of `len` may be too short,
    /// so the search tries only the newest (a recently released length is often requested again).
    /// Then it takes a block of the next class, which always fits. It tries more of the own class
    /// when there is no other.
    fn find(&self, len: u64) -> Option<u32> {
        let own = class_of(len);
        self.blocks.first_fit(own, len, 1).or_else(|| match self.blocks.first_from(own + 1) {
            Some(class) => Some(self.blocks.newest(class)),
            None => self.blocks.first_fit(own, len, self.scan),
        })
    }

    /// Returns a free block with `len` bytes from a multiple of `align` on. Blocks shorter than
    /// `len + align - 1` may not fit, so the search tries a bounded number of them before one that
    /// is long enough in any case.
    fn find_aligned(&self, len: u64, align: u64) -> Option<u32> {
        let enough = len.saturating_add(align - 1);
        self.try_aligned(class_of(len), len, align)
            .or_else(|| self.try_aligned(class_of(enough), len, align))
            .or_else(|| {
                let class = self.blocks.first_from(class_of(enough) + 1)?;
                Some(self.blocks.newest(class))
            })
    }

    fn try_aligned(&self, from: Class, len: u64, align: u64) -> Option<u32> {
        let mut left = self.scan as usize;
        let mut class = self.blocks.first_from(from)?;
        loop {
            for block in self.blocks.list(class).take(left) {
                left -= 1;
                let padded = padding(self.blocks[block].offset, align).checked_add(len);
                if padded.is_some_and(|padded| padded <= self.blocks[block].len) {
                    return Some(block);
                }
            }
            class = self.blocks.first_from(class + 1).filter(|_| left > 0)?;
        }
    }

    /// Makes `extent`, a part of the free `block`, live. The parts in front and behind stay free.
    fn carve(&mut self, block: u32, extent: Extent) -> (Option<u32>, Option<u32>) {
        let (offset, len) = (self.blocks[block].offset, self.blocks[block].len);
        let front = extent.offset - offset;
        let back = len - front - extent.len;
        let (live, rest) = match (front, back) {
            (0, 0) => {
                self.blocks.unfile(block);
                (block, (None, None))
            }
            (0, _) => {
                let live = self.blocks.insert_before(block, extent.offset, extent.len);
                self.blocks[block].offset += extent.len;
                self.blocks.resize(block, back);
                (live, (None, Some(block)))
            }
            (_, 0) => {
                self.blocks.resize(block, front);
                (self.blocks.insert_after(block, extent.offset, extent.len), (Some(block), None))
            }
            (_, _) => {
                self.blocks.resize(block, front);
                let live = self.blocks.insert_after(block, extent.offset, extent.len);
                let tail = self.blocks.insert_after(live, extent.offset + extent.len, back);
                self.blocks.file(tail);
                (live, (Some(block), Some(tail)))
            }
        };
        self.used += extent.len;
        self.blocks.enter_live(live);
        rest
    }

    fn index_free(&self) -> BTreeMap<u64, u32> {
        let mut free = BTreeMap::new();
        let mut class = self.blocks.first_from(0);
        while let Some(found) = class {
            free.extend(self.blocks.list(found).map(|block| (self.blocks[block].offset, block)));
            class = self.blocks.first_from(found + 1);
        }
        free
    }
}

impl std::fmt::Debug for Tlsf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tlsf")
            .field("capacity", &self.capacity)
            .field("used", &self.used)
            .field("live", &self.blocks.live())
            .field("largest_free", &self.largest_free())
            .finish()
    }
}
