//! The blocks a segment is divided into, in a table beside it: the memory itself may be on another machine.
//!
//! Every link leads to an entry of the table, real or not, so that none needs a test for "no such block": entry 0
//! stands for what lies outside the segment, the next ones for the ends of the ring of each size class.

use super::bins::{Bins, Class, class_of};
use crate::tables::Tables;

/// Outside the segment; never free.
const EDGE: u32 = 0;
/// In `older`: the block is live.
const LIVE: u32 = u32::MAX;
/// No entry.
const NIL: u32 = u32::MAX;

/// One contiguous range, free or live. Two free blocks never touch.
///
/// Aligned so that none lies across two cache lines.
#[derive(Clone, Copy)]
#[repr(align(32))]
pub(super) struct Block {
    pub(super) offset: u64,
    pub(super) len: u64,
    /// The block that ends where this one starts.
    pub(super) before: u32,
    /// The block that starts where this one ends. In an unused entry, the next unused one.
    pub(super) after: u32,
    /// The next in the ring of its size class, towards the one filed last.
    newer: u32,
    /// The next in the ring, towards the one filed first, or `LIVE`.
    older: u32,
}

/// All blocks; an index stays valid until the block is merged away.
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
    /// One free block of `capacity` bytes, if any.
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

    /// Whether two more blocks can be numbered.
    pub(super) fn has_room(&self) -> bool {
        self.table.len() < (u32::MAX - 2) as usize
    }

    pub(super) fn is_free(&self, block: u32) -> bool {
        self[block].older != LIVE
    }

    /// Number of live blocks.
    pub(super) fn live(&self) -> usize {
        self.live
    }

    /// The smallest class from `class` upwards with a block in it.
    pub(super) fn first_from(&self, class: Class) -> Option<Class> {
        self.bins.first_from(class)
    }

    /// The largest class with a block in it.
    pub(super) fn last_class(&self) -> Option<Class> {
        self.bins.last()
    }

    /// The block filed last in a class that is not empty.
    pub(super) fn newest(&self, class: Class) -> u32 {
        self[ring_end(class)].older
    }

    /// The blocks filed in `class`, newest first.
    pub(super) fn list(&self, class: Class) -> impl Iterator<Item = u32> {
        let end = ring_end(class);
        let real = move |block: u32| (block != end).then_some(block);
        std::iter::successors(real(self[end].older), move |&block| real(self[block].older))
    }

    /// The first block of at least `len` bytes among the `scan` newest of `class`.
    pub(super) fn first_fit(&self, class: Class, len: u64, scan: u32) -> Option<u32> {
        let end = ring_end(class);
        let mut at = self[end].older;
        for _ in 0..scan {
            let block = &self[at];
            // The ring's end counts as a block that fits everything.
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

    /// Changes the length of a free block, which may move it to another class.
    pub(super) fn resize(&mut self, block: u32, len: u64) {
        if class_of(self[block].len) == class_of(len) {
            self[block].len = len;
            return;
        }
        self.unfile(block);
        self[block].len = len;
        self.file(block);
    }

    /// A new block between `at` and the block before it, in no ring.
    pub(super) fn insert_before(&mut self, at: u32, offset: u64, len: u64) -> u32 {
        let before = self[at].before;
        let new = self.entry(Block { offset, len, before, after: at, newer: NIL, older: LIVE });
        self[at].before = new;
        self[before].after = new;
        new
    }

    /// A new block between `at` and the block after it, in no ring.
    pub(super) fn insert_after(&mut self, at: u32, offset: u64, len: u64) -> u32 {
        let after = self[at].after;
        let new = self.entry(Block { offset, len, before: at, after, newer: NIL, older: LIVE });
        self[at].after = new;
        self[after].before = new;
        new
    }

    /// Takes a block that is in no ring out of the chain of neighbours and frees its entry.
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

    /// The live block of exactly this range, no longer indexed.
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

/// Multiplying by the golden ratio spreads offsets, mostly multiples of something, over the upper bits.
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
    fn offsets_that_are_multiples_of_something_have_tags_of_their_own() {
        const BLOCKS: u64 = 50_000;
        for len in [64, 4096, 3 << 20, 1 << 33] {
            let tags: HashSet<u32> = (0..BLOCKS).map(|block| tag(block * len)).collect();
            assert!(tags.len() as u64 > BLOCKS - 50, "{len}: {} of {BLOCKS}", tags.len());
            // By the bits that choose a table; those of a place in it are mixed once more.
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
