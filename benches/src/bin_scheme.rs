//! Reimplementation of the default allocator of Mooncake C++, from its description, for comparison.
//!
//! 32 × 8 size bins, which are small floats with three mantissa bits. A request is rounded up to
//! the size of its bin, a free block is filed in the bin below, and neighbours merge. Sizes are
//! 32-bit; beyond 3.75 GiB everything is counted in units of a power of two. A handle is the index
//! of the block, so a release needs no lookup. [`BinAllocator`] has the interface of the other
//! allocators, which release by offset and refuse extents that are not live.

use std::collections::HashMap;

use hashbrown::DefaultHashBuilder;
use mooncake_core::alloc::{AllocError, Extent, SegmentAllocator};

const NIL: u32 = u32::MAX;
const LARGEST_BIN: u64 = 15 << 28;

/// Handle of an allocation.
#[derive(Clone, Copy, Debug)]
pub struct Handle {
    /// Offset of the first byte.
    pub offset: u64,
    node: u32,
}

#[derive(Clone, Copy)]
struct Node {
    offset: u32,
    len: u32,
    live: bool,
    bin_next: u32,
    bin_prev: u32,
    before: u32,
    after: u32,
}

/// Bin scheme over one segment.
pub struct BinScheme {
    /// Logarithm of the unit: a unit is `1 << scale` bytes.
    scale: u32,
    tops: u32,
    leaves: [u8; 32],
    heads: [u32; 256],
    nodes: Vec<Node>,
    spare: Vec<u32>,
}

fn bin_below(len: u32) -> u32 {
    if len < 8 {
        return len;
    }
    let shift = len.ilog2() - 3;
    (shift + 1) << 3 | (len >> shift) & 7
}

fn bin_above(len: u32) -> u32 {
    let below = bin_below(len);
    below + u32::from(bin_len(below) < len)
}

fn bin_len(bin: u32) -> u32 {
    let (exponent, mantissa) = (bin >> 3, bin & 7);
    if exponent == 0 { mantissa } else { (mantissa | 8) << (exponent - 1) }
}

impl BinScheme {
    /// Creates the scheme over `capacity` bytes, all free.
    pub fn new(capacity: u64) -> Self {
        let mut scale = 0;
        while capacity >> scale > LARGEST_BIN {
            scale += 1;
        }
        let mut new = Self {
            scale,
            tops: 0,
            leaves: [0; 32],
            heads: [NIL; 256],
            nodes: Vec::with_capacity((capacity / 4096).clamp(1 << 10, 1 << 16) as usize),
            spare: Vec::new(),
        };
        let whole = new.node(0, (capacity >> scale) as u32);
        new.file(whole);
        new
    }

    /// Allocates at least `len` bytes.
    pub fn allocate(&mut self, len: u64) -> Option<Handle> {
        let units = u32::try_from(len.div_ceil(1 << self.scale)).ok().filter(|&units| units != 0)?;
        if u64::from(units) > LARGEST_BIN {
            return None;
        }
        let bin = self.first_from(bin_above(units))?;
        let len = bin_len(bin_above(units));
        let node = self.heads[bin as usize];
        self.unfile(node);
        let Node { offset, len: had, after, .. } = self.nodes[node as usize];
        self.nodes[node as usize].len = len;
        self.nodes[node as usize].live = true;
        if had > len {
            let rest = self.node(offset + len, had - len);
            self.link(node, rest);
            self.link(rest, after);
            self.file(rest);
        }
        Some(Handle { offset: u64::from(offset) << self.scale, node })
    }

    /// Frees an allocation.
    pub fn release(&mut self, handle: Handle) {
        let Node { mut offset, mut len, mut before, mut after, .. } = self.nodes[handle.node as usize];
        if before != NIL && !self.nodes[before as usize].live {
            self.unfile(before);
            let merged = self.nodes[before as usize];
            offset = merged.offset;
            len += merged.len;
            self.spare.push(before);
            before = merged.before;
        }
        if after != NIL && !self.nodes[after as usize].live {
            self.unfile(after);
            let merged = self.nodes[after as usize];
            len += merged.len;
            self.spare.push(after);
            after = merged.after;
        }
        let node = handle.node;
        let block = &mut self.nodes[node as usize];
        (block.offset, block.len, block.live) = (offset, len, false);
        self.link(before, node);
        self.link(node, after);
        self.file(node);
    }

    fn node(&mut self, offset: u32, len: u32) -> u32 {
        let node = Node { offset, len, live: false, bin_next: NIL, bin_prev: NIL, before: NIL, after: NIL };
        if let Some(index) = self.spare.pop() {
            self.nodes[index as usize] = node;
            return index;
        }
        self.nodes.push(node);
        self.nodes.len() as u32 - 1
    }

    fn link(&mut self, before: u32, after: u32) {
        if before != NIL {
            self.nodes[before as usize].after = after;
        }
        if after != NIL {
            self.nodes[after as usize].before = before;
        }
    }

    fn first_from(&self, bin: u32) -> Option<u32> {
        let (top, leaf) = (bin >> 3, bin & 7);
        let here = self.leaves[top as usize] & (u8::MAX << leaf);
        if here != 0 {
            return Some(top << 3 | here.trailing_zeros());
        }
        let above = self.tops & (u32::MAX << top) & !(1 << top);
        let top = (above != 0).then(|| above.trailing_zeros())?;
        Some(top << 3 | self.leaves[top as usize].trailing_zeros())
    }

    fn file(&mut self, node: u32) {
        let bin = bin_below(self.nodes[node as usize].len);
        let head = self.heads[bin as usize];
        if head == NIL {
            self.leaves[(bin >> 3) as usize] |= 1 << (bin & 7);
            self.tops |= 1 << (bin >> 3);
        } else {
            self.nodes[head as usize].bin_prev = node;
        }
        self.nodes[node as usize].bin_next = head;
        self.nodes[node as usize].bin_prev = NIL;
        self.heads[bin as usize] = node;
    }

    fn unfile(&mut self, node: u32) {
        let Node { bin_next, bin_prev, len, .. } = self.nodes[node as usize];
        if bin_next != NIL {
            self.nodes[bin_next as usize].bin_prev = bin_prev;
        }
        if bin_prev != NIL {
            self.nodes[bin_prev as usize].bin_next = bin_next;
            return;
        }
        let bin = bin_below(len);
        self.heads[bin as usize] = bin_next;
        if bin_next == NIL {
            let top = (bin >> 3) as usize;
            self.leaves[top] &= !(1 << (bin & 7));
            if self.leaves[top] == 0 {
                self.tops &= !(1 << top);
            }
        }
    }
}

/// [`BinScheme`] as a [`SegmentAllocator`] (without `reserve`, and with `align` 1 only).
pub struct BinAllocator {
    bins: BinScheme,
    /// Nodes by offset.
    live: HashMap<u64, u32, DefaultHashBuilder>,
    capacity: u64,
    used: u64,
}

impl SegmentAllocator for BinAllocator {
    type Config = ();

    fn new(capacity: u64, (): &()) -> Self {
        Self { bins: BinScheme::new(capacity), live: HashMap::default(), capacity, used: 0 }
    }

    fn allocate(&mut self, len: u64, align: u64) -> Result<Extent, AllocError> {
        if len == 0 || align != 1 {
            return Err(AllocError::Invalid);
        }
        let handle = self.bins.allocate(len).ok_or(AllocError::Full)?;
        self.live.insert(handle.offset, handle.node);
        self.used += len;
        Ok(Extent { offset: handle.offset, len })
    }

    fn release(&mut self, extent: Extent) {
        let node = self.live.remove(&extent.offset).expect("the extent is live");
        self.used -= extent.len;
        self.bins.release(Handle { offset: extent.offset, node });
    }

    fn reserve(&mut self, _: Extent) -> Result<(), AllocError> {
        Err(AllocError::Occupied)
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn used(&self) -> u64 {
        self.used
    }

    fn largest_free(&self) -> u64 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_are_small_floats() {
        for (len, below, above) in
            [(7, 7, 7), (8, 8, 8), (16, 16, 16), (17, 16, 17), (18, 17, 17), (1025, 64, 65)]
        {
            assert_eq!((bin_below(len), bin_above(len)), (below, above), "{len}");
        }
        assert_eq!(u64::from(bin_len(bin_below(u32::MAX))), LARGEST_BIN);
    }

    #[test]
    fn wastes_an_eighth_and_merges() {
        let mut bins = BinScheme::new(1 << 20);
        let taken: Vec<_> = std::iter::from_fn(|| bins.allocate(4097)).collect();
        assert_eq!(taken.len(), (1 << 20) / 4608);
        taken.into_iter().step_by(1).for_each(|handle| bins.release(handle));
        assert!(bins.allocate(1 << 20).is_some());
    }

    #[test]
    fn scales_beyond_32_bits() {
        let mut bins = BinScheme::new(16 << 30);
        let offsets: Vec<_> = std::iter::from_fn(|| bins.allocate(1 << 30)).map(|h| h.offset).collect();
        assert_eq!(offsets, (0..16).map(|i| i << 30).collect::<Vec<u64>>());
    }
}
