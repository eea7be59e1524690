//! [`Tlsf`]: constant-time allocation that wastes no byte inside a block and little between blocks.

mod bins;
mod blocks;

use std::collections::BTreeMap;

use hashbrown::HashTable;

use self::bins::{Bins, Class, class_of};
use self::blocks::{Blocks, NIL};
use super::{AllocError, Extent, SegmentAllocator, padding};

/// What [`Tlsf`] can be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsfConfig {
    /// How many free blocks of about the right size are looked at for the best fit, at least 1. More finds better
    /// fits and costs time.
    pub scan: u32,
}

impl Default for TlsfConfig {
    fn default() -> Self {
        Self { scan: 16 }
    }
}

/// Two-level segregated fit. The default allocator.
///
/// Free blocks are filed by size in 64 classes per power of two, found through two levels of bitmaps. A request looks
/// at a bounded number of blocks of its own class, where some may be a little too short, and otherwise takes
/// the best of the first few from the next class that has any. A block is cut to the byte and merged with its free
/// neighbours when released. Every step takes constant time, except that tables double now and then.
///
/// `largest_free` is exact for `align` 1: that length can be allocated, one byte more is refused.
///
/// `reserve` takes logarithmic time in a run of nothing but `reserve` calls; the first after an `allocate` or
/// `release` looks at every block.
pub struct Tlsf {
    capacity: u64,
    used: u64,
    scan: u32,
    bins: Bins,
    blocks: Blocks,
    /// Live blocks by offset.
    live: HashTable<u32>,
    /// Free blocks by offset; only while space is being reserved.
    free_by_offset: Option<BTreeMap<u64, u32>>,
}

impl SegmentAllocator for Tlsf {
    type Config = TlsfConfig;

    fn new(capacity: u64, config: &TlsfConfig) -> Self {
        let mut tlsf = Self {
            capacity,
            used: 0,
            scan: config.scan.max(1),
            bins: Bins::new(capacity),
            blocks: Blocks::new(),
            live: HashTable::new(),
            free_by_offset: None,
        };
        if capacity != 0 {
            let whole = tlsf.blocks.add(0, capacity);
            tlsf.file(whole);
        }
        tlsf
    }

    fn allocate(&mut self, len: u64, align: u64) -> Result<Extent, AllocError> {
        super::check_request(len, align, self.capacity)?;
        let found = if align == 1 { self.find(len) } else { self.find_aligned(len, align) };
        let block = found.filter(|_| self.blocks.has_room()).ok_or(AllocError::Full)?;
        self.free_by_offset = None;
        let start = self.blocks[block].offset;
        let extent = Extent { offset: start + padding(start, align), len };
        self.carve(block, extent);
        Ok(extent)
    }

    fn release(&mut self, extent: Extent) {
        self.free_by_offset = None;
        let block = self.forget_live(extent);
        self.used -= extent.len;
        let (before, after) = (self.blocks[block].before, self.blocks[block].after);
        let free_before = before != NIL && self.blocks[before].is_free();
        let free_after = after != NIL && self.blocks[after].is_free();
        match (free_before, free_after) {
            (false, false) => self.file(block),
            (true, false) => {
                self.blocks.drop_block(block);
                self.resize_free(before, self.blocks[before].len + extent.len);
            }
            (false, true) => {
                self.blocks.drop_block(block);
                self.blocks[after].offset = extent.offset;
                self.resize_free(after, self.blocks[after].len + extent.len);
            }
            (true, true) => {
                let behind = self.blocks[after].len;
                self.unfile(after);
                self.blocks.drop_block(block);
                self.blocks.drop_block(after);
                self.resize_free(before, self.blocks[before].len + extent.len + behind);
            }
        }
    }

    fn reserve(&mut self, extent: Extent) -> Result<(), AllocError> {
        if extent.len == 0 {
            return Err(AllocError::Invalid);
        }
        let end = extent.end().filter(|&end| end <= self.capacity).ok_or(AllocError::Occupied)?;
        if !self.blocks.has_room() {
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
        let Some(class) = self.bins.last() else { return 0 };
        self.list(class).take(self.scan as usize).map(|block| self.blocks[block].len).max().unwrap_or(0)
    }
}

impl Tlsf {
    /// A free block of at least `len` bytes.
    fn find(&self, len: u64) -> Option<u32> {
        let own = class_of(len);
        if let Some(block) = self.best_of(own, len) {
            return Some(block);
        }
        let class = self.bins.first_from(own + 1)?;
        self.best_of(class, len)
    }

    /// The shortest of the first few blocks in `class` that have `len` bytes.
    fn best_of(&self, class: Class, len: u64) -> Option<u32> {
        let (mut best, mut best_len) = (NIL, u64::MAX);
        let mut at = self.bins.head(class);
        for _ in 0..self.scan {
            if at == NIL {
                break;
            }
            let block = &self.blocks[at];
            if block.len >= len && block.len < best_len {
                (best, best_len) = (at, block.len);
                if best_len == len {
                    break;
                }
            }
            at = block.older;
        }
        (best != NIL).then_some(best)
    }

    /// A free block with `len` bytes from a multiple of `align` on. Blocks shorter than `len + align - 1` may or
    /// may not do, so a bounded number of them is tried before one that is long enough in any case.
    fn find_aligned(&self, len: u64, align: u64) -> Option<u32> {
        let enough = len.saturating_add(align - 1);
        self.try_aligned(class_of(len), len, align).or_else(|| self.try_aligned(class_of(enough), len, align)).or_else(
            || {
                let class = self.bins.first_from(class_of(enough) + 1)?;
                Some(self.bins.head(class))
            },
        )
    }

    fn try_aligned(&self, from: Class, len: u64, align: u64) -> Option<u32> {
        let mut left = self.scan as usize;
        let mut class = self.bins.first_from(from)?;
        loop {
            for block in self.list(class).take(left) {
                left -= 1;
                let padded = padding(self.blocks[block].offset, align).checked_add(len);
                if padded.is_some_and(|padded| padded <= self.blocks[block].len) {
                    return Some(block);
                }
            }
            class = self.bins.first_from(class + 1).filter(|_| left > 0)?;
        }
    }

    /// The blocks filed in `class`, newest first.
    fn list(&self, class: Class) -> impl Iterator<Item = u32> {
        let next = |block: u32| (block != NIL).then_some(block);
        std::iter::successors(next(self.bins.head(class)), move |&block| next(self.blocks[block].older))
    }

    /// Makes `extent`, a part of the free `block`, live. What is left in front and behind stays free.
    fn carve(&mut self, block: u32, extent: Extent) -> (Option<u32>, Option<u32>) {
        let (offset, len) = (self.blocks[block].offset, self.blocks[block].len);
        let front = extent.offset - offset;
        let back = len - front - extent.len;
        let (live, rest) = match (front, back) {
            (0, 0) => {
                self.unfile(block);
                self.blocks.mark_live(block);
                (block, (None, None))
            }
            (0, _) => {
                let live = self.blocks.add_before(block, extent.offset, extent.len);
                self.blocks[block].offset += extent.len;
                self.resize_free(block, back);
                (live, (None, Some(block)))
            }
            (_, 0) => {
                self.resize_free(block, front);
                (self.blocks.add_after(block, extent.offset, extent.len), (Some(block), None))
            }
            (_, _) => {
                self.resize_free(block, front);
                let live = self.blocks.add_after(block, extent.offset, extent.len);
                let tail = self.blocks.add_after(live, extent.offset + extent.len, back);
                self.file(tail);
                (live, (Some(block), Some(tail)))
            }
        };
        self.used += extent.len;
        let blocks = &self.blocks;
        self.live.insert_unique(hash(extent.offset), live, |&other| hash(blocks[other].offset));
        rest
    }

    /// Takes a live extent out of the index.
    fn forget_live(&mut self, extent: Extent) -> u32 {
        let blocks = &self.blocks;
        let is_it = |&block: &u32| blocks[block].offset == extent.offset && blocks[block].len == extent.len;
        match self.live.find_entry(hash(extent.offset), is_it) {
            Ok(entry) => entry.remove().0,
            Err(_) => super::not_live(extent),
        }
    }

    /// Puts a block at the head of its class.
    fn file(&mut self, block: u32) {
        let class = class_of(self.blocks[block].len);
        let head = self.bins.head(class);
        self.blocks[block].newer = NIL;
        self.blocks[block].older = head;
        if head != NIL {
            self.blocks[head].newer = block;
        }
        self.bins.set_head(class, block);
    }

    fn unfile(&mut self, block: u32) {
        let (newer, older) = (self.blocks[block].newer, self.blocks[block].older);
        if newer == NIL {
            self.bins.set_head(class_of(self.blocks[block].len), older);
        } else {
            self.blocks[newer].older = older;
        }
        if older != NIL {
            self.blocks[older].newer = newer;
        }
    }

    /// Changes the length of a free block, which may move it to another class.
    fn resize_free(&mut self, block: u32, len: u64) {
        if class_of(self.blocks[block].len) == class_of(len) {
            self.blocks[block].len = len;
            return;
        }
        self.unfile(block);
        self.blocks[block].len = len;
        self.file(block);
    }

    fn index_free(&self) -> BTreeMap<u64, u32> {
        let mut free = BTreeMap::new();
        let mut class = self.bins.first_from(0);
        while let Some(found) = class {
            free.extend(self.list(found).map(|block| (self.blocks[block].offset, block)));
            class = self.bins.first_from(found + 1);
        }
        free
    }
}

impl std::fmt::Debug for Tlsf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tlsf")
            .field("capacity", &self.capacity)
            .field("used", &self.used)
            .field("live", &self.live.len())
            .field("largest_free", &self.largest_free())
            .finish()
    }
}

/// Spreads offsets, which are mostly multiples of something, over all 64 bits.
fn hash(offset: u64) -> u64 {
    let product = u128::from(offset ^ 0x9e37_79b9_7f4a_7c15) * 0xda94_2042_e4dd_58b5;
    (product >> 64) as u64 ^ product as u64
}
