//! [`BestFit`]: an allocator that takes the shortest free range that is long enough.

use std::collections::{BTreeMap, BTreeSet};

use super::{AllocError, Extent, SegmentAllocator, padding};

/// Exact best-fit allocator. Of equally short ranges, it takes the one at the lowest offset.
///
/// Best fit wastes the least space, at logarithmic cost for `align` 1. With a larger alignment, it
/// skips ranges that are too short once aligned, one by one. It is the oracle that other allocators
/// are measured against, and suits a segment of few large objects. `largest_free` is exact.
#[derive(Debug)]
pub struct BestFit {
    capacity: u64,
    used: u64,
    /// Free ranges as (length, offset).
    by_len: BTreeSet<(u64, u64)>,
    /// Lengths of free ranges, by offset.
    by_offset: BTreeMap<u64, u64>,
    /// Lengths of live ranges, by offset.
    live: BTreeMap<u64, u64>,
}

impl SegmentAllocator for BestFit {
    type Config = ();

    fn new(capacity: u64, (): &()) -> Self {
        let mut new = Self {
            capacity,
            used: 0,
            by_len: BTreeSet::new(),
            by_offset: BTreeMap::new(),
            live: BTreeMap::new(),
        };
        new.insert_free(0, capacity);
        new
    }

    fn allocate(&mut self, len: u64, align: u64) -> Result<Extent, AllocError> {
        super::check_request(len, align, self.capacity)?;
        let fits = |&&(free, start): &&(u64, u64)| {
            padding(start, align).checked_add(len).is_some_and(|padded| padded <= free)
        };
        let &(_, start) = self.by_len.range((len, 0)..).find(fits).ok_or(AllocError::Full)?;
        let extent = Extent { offset: start + padding(start, align), len };
        self.carve(start, extent);
        Ok(extent)
    }

    fn release(&mut self, extent: Extent) {
        if self.live.get(&extent.offset) != Some(&extent.len) {
            super::not_live(extent);
        }
        self.live.remove(&extent.offset);
        self.used -= extent.len;
        let (mut start, mut end) = (extent.offset, extent.offset + extent.len);
        if let Some((&offset, &len)) =
            self.by_offset.range(..start).next_back().filter(|&(o, l)| o + l == start)
        {
            self.remove_free(offset, len);
            start = offset;
        }
        if let Some(&len) = self.by_offset.get(&end) {
            self.remove_free(end, len);
            end += len;
        }
        self.insert_free(start, end - start);
    }

    fn reserve(&mut self, extent: Extent) -> Result<(), AllocError> {
        if extent.len == 0 {
            return Err(AllocError::Invalid);
        }
        let end = extent.end().ok_or(AllocError::Occupied)?;
        let holder = self.by_offset.range(..=extent.offset).next_back();
        let (&start, _) = holder.filter(|&(start, len)| end <= start + len).ok_or(AllocError::Occupied)?;
        self.carve(start, extent);
        Ok(())
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn used(&self) -> u64 {
        self.used
    }

    fn largest_free(&self) -> u64 {
        self.by_len.last().map_or(0, |&(len, _)| len)
    }
}

impl BestFit {
    /// Makes `extent` live. The extent lies in the free range that begins at `start`.
    fn carve(&mut self, start: u64, extent: Extent) {
        let len = self.by_offset[&start];
        let (front, end) = (extent.offset - start, extent.offset + extent.len);
        self.remove_free(start, len);
        self.insert_free(start, front);
        self.insert_free(end, len - front - extent.len);
        self.live.insert(extent.offset, extent.len);
        self.used += extent.len;
    }

    fn insert_free(&mut self, offset: u64, len: u64) {
        if len != 0 {
            self.by_len.insert((len, offset));
            self.by_offset.insert(offset, len);
        }
    }

    fn remove_free(&mut self, offset: u64, len: u64) {
        self.by_len.remove(&(len, offset));
        self.by_offset.remove(&offset);
    }
}
