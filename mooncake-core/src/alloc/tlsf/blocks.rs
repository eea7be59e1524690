//! Blocks of a segment, in a table beside it: the memory itself may be on another machine.
//!
//! Every link leads to an entry of the table, so that no link needs a test for "no such block".
//! Entry 0 stands for everything outside the segment. The next entries stand for the ends of the
//! ring of each size class.

use super::bins::{Bins, Class, class_of};
use crate::tables::Tables;

/// Entry for everything outside the segment; never free.
const EDGE: u32 = 0;
/// Value of `older` in a live block.
const LIVE: u32 = u32::MAX;
/// Number of no entry.
const NIL: u32 = u32::MAX;

/// Contiguous range, free or live. Two free blocks never touch.
///
/// The alignment keeps each block within one cache line.
#[derive(Clone, Copy)]
#[repr(align(32))]
pub(super) struct Block {
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Block that ends where this one starts.
    pub(super) before: u32,
    /// Block that starts where this one ends. In an unused entry, the next unused entry.
    pub(super) after: u32,
    /// Next block in the ring of its size class, towards the newest.
    newer: u32,
    /// Next block in the ring, towards the oldest, or `LIVE`.
    older: u32,
}

/// Table of all blocks. An index stays valid until the block is merged away.
pub(super) struct Blocks {
    table: Vec<Block>,
    bins: Bins,
    /// Live blocks by their offset.
    index: Tables,
    live: usize,
    /// First unused entry of the table.
    spare: u32,
}

impl Blocks {
    /// Creates one free block of `capacity` bytes, if any.
    pub(super) fn new(capacity: u64) -> Self {
        let mut table: Vec<_> = (0..=class_of(capacity) + 1)
            .map(|end| Block { offset: 0, len: u64::MAX, before: EDGE, after: EDGE, newer: end, older: end })
            .collect();
        table[EDGE as usize].older = LIVE;
        let mut blocks = Self { table, bins: Bins::new(), index: Tables::default(), live: 0, spare: NIL };
        if capacity != 0 {
            let whole = blocks.entry(Block {
                offset: 0,
                len: capacity,
                before: EDGE,
                after: EDGE,
                newer: NIL,
                older: NIL,
            });
            blocks.file(whole);
        }
        blocks
    }

    /// Returns whether the table can number two more blocks.
    pub(super) fn has_free_ids(&self) -> bool {
        self.table.len() < (u32::MAX - 2) as usize
    }

    pub(super) fn is_free(&self, block: u32) -> bool {
        self[block].older != LIVE
    }

    /// Returns the number of live blocks.
    pub(super) fn live(&self) -> usize {
        self.live
    }

    /// Returns the smallest class from `class` upwards that has a block.
    pub(super) fn first_from(&self, class: Class) -> Option<Class> {
        self.bins.first_from(class)
    }

    /// Returns the largest class that has a block.
    pub(super) fn last_class(&self) -> Option<Class> {
        self.bins.last()
    }

    /// Returns the newest block of a class that is not empty.
    pub(super) fn newest(&self, class: Class) -> u32 {
        self[ring_end(class)].older
    }

    /// Returns the blocks of `class`, newest first.
    pub(super) fn list(&self, class: Class) -> impl Iterator<Item = u32> {
        let end = ring_end(class);
        let real = move |block: u32| (block != end).then_some(block);
        std::iter::successors(real(self[end].older), move |&block| real(self[block].older))
    }

    /// Returns the first block of at least `len` bytes among the `scan` newest of `class`.
    pub(super) fn first_fit(&self, class: Class, len: u64, scan: u32) -> Option<u32> {
        let end = ring_end(class);
        let mut at = self[end].older;
        for _ in 0..scan {
            let block = &self[at];
            // The end of the ring counts as a block that fits everything.
            if block.len >= len {
                return (at != end).then_some(at);
            }
            at = block.older;
        }
        None
    }

    /// Puts a block that is in no ring at the head of its class.
    pub(super) fn file(&mut self, block: u32) {
        let class = class_of(self[block].len);
        let end = ring_end(class);
        let second = std::mem::replace(&mut self[end].older, block);
        self[second].newer = block;
        self[block].newer = end;
        self[block].older = second;
        self.bins.mark_filled(class);
    }

    pub(super) fn unfile(&mut self, block: u32) {
        let Block { newer, older, len, .. } = self[block];
        self[newer].older = older;
        self[older].newer = newer;
        self.bins.mark_emptied(class_of(len), newer == older);
    }

    /// Changes the length of a free block, and moves the block to another class if needed.
    pub(super) fn resize(&mut self, block: u32, len: u64) {
        if class_of(self[block].len) == class_of(len) {
            self[block].len = len;
            return;
        }
        self.unfile(block);
        self[block].len = len;
        self.file(block);
    }

    /// Creates a block between `at` and the block before it, in no ring.
    pub(super) fn insert_before(&mut self, at: u32, offset: u64, len: u64) -> u32 {
        let before = self[at].before;
        let new = self.entry(Block { offset, len, before, after: at, newer: NIL, older: LIVE });
        self[at].before = new;
        self[before].after = new;
        new
    }

    /// Creates a block between `at` and the block after it, in no ring.
    pub(super) fn insert_after(&mut self, at: u32, offset: u64, len: u64) -> u32 {
        let after = self[at].after;
        let new = self.entry(Block { offset, len, before: at, after, newer: NIL, older: LIVE });
        self[at].after = new;
        self[after].before = new;
        new
    }

    /// Removes a block that is in no ring from the chain of neighbours, and frees its entry.
    pub(super) fn dissolve(&mut self, block: u32) {
        let Block { before, after, .. } = self[block];
        self[before].after = after;
        self[after].before = before;
        self[block].after = self.spare;
        self.spare = block;
    }

    /// Makes a block that is in no ring live.
    pub(super) fn enter_live(&mut self, block: u32) {
        self.index.insert(tag(self[block].offset), block);
        self.live += 1;
        self[block].older = LIVE;
    }

    /// Returns the live block of exactly this range, and removes it from the index.
    pub(super) fn leave_live(&mut self, offset: u64, len: u64) -> Option<u32> {
        let Self { table, index, .. } = self;
        let is = |block: u32| {
            let block = &table[block as usize];
            (block.offset, block.len) == (offset, len)
        };
        let block = index.remove(tag(offset), is)?;
        self.live -= 1;
        Some(block)
    }

    fn entry(&mut self, block: Block) -> u32 {
        if self.spare == NIL {
            self.table.push(block);
            return (self.table.len() - 1) as u32;
        }
        let index = self.spare;
        self.spare = self[index].after;
        self[index] = block;
        index
    }
}

/// Returns the hash of an offset. Multiplication by the golden ratio spreads offsets, which are
/// mostly multiples of a size, over the upper bits.
fn tag(offset: u64) -> u32 {
    let product = offset.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (product ^ product >> 32) as u32
}

fn ring_end(class: Class) -> u32 {
    class + 1
}

impl std::ops::Index<u32> for Blocks {
    type Output = Block;

    fn index(&self, index: u32) -> &Block {
        &self.table[index as usize]
    }
}

impl std::ops::IndexMut<u32> for Blocks {
    fn index_mut(&mut self, index: u32) -> &mut Block {
        &mut self.table[index as usize]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "numbers only, and slow")]
    fn offsets_that_are_multiples_of_a_size_have_distinct_tags() {
        const BLOCKS: u64 = 50_000;
        for len in [64, 4096, 3 << 20, 1 << 33] {
            let tags: HashSet<u32> = (0..BLOCKS).map(|block| tag(block * len)).collect();
            assert!(tags.len() as u64 > BLOCKS - 50, "{len}: {} of {BLOCKS}", tags.len());
            // Checks the bits that choose a table. The bits that choose a slot in a table are mixed
            // once more.
            for shift in [12, 20] {
                let mut tables = [0; 64];
                tags.iter().for_each(|tag| tables[(tag >> shift & 63) as usize] += 1);
                assert!(
                    tables.iter().all(|&entries| entries < 2 * BLOCKS / 64),
                    "{len}, {shift}: {tables:?}"
                );
            }
        }
    }
}
