//! Custom allocator, used by a master and checked by the public conformance suite.
//!
//! First fit over a sorted list of free ranges: simple, and slow when the free memory is
//! fragmented.
#![allow(clippy::print_stdout, reason = "an example prints to its terminal")]

use std::sync::Arc;

use mooncake_core::alloc::{AllocError, Extent, SegmentAllocator};
use mooncake_core::clock::SystemClock;
use mooncake_core::evict::BuiltinPolicyConfig;
use mooncake_store::client::{Client, PutOptions};
use mooncake_store::master::{Master, MasterOptions};

/// Allocator that takes the first free range that is long enough.
#[derive(Debug)]
pub struct FirstFit {
    capacity: u64,
    used: u64,
    /// Free ranges in order of offset. No two ranges touch.
    free: Vec<Extent>,
    /// Live extents in order of offset, to detect a double release.
    live: Vec<Extent>,
}

impl FirstFit {
    fn take(&mut self, index: usize, extent: Extent) {
        let hole = self.free[index];
        let before = Extent { offset: hole.offset, len: extent.offset - hole.offset };
        let after_at = extent.offset + extent.len;
        let after = Extent { offset: after_at, len: hole.offset + hole.len - after_at };
        self.free.splice(index..=index, [before, after].into_iter().filter(|e| e.len > 0));
        let at = self.live.partition_point(|e| e.offset < extent.offset);
        self.live.insert(at, extent);
        self.used += extent.len;
    }
}

impl SegmentAllocator for FirstFit {
    type Config = ();

    fn new(capacity: u64, (): &()) -> Self {
        let free = if capacity == 0 { Vec::new() } else { vec![Extent { offset: 0, len: capacity }] };
        Self { capacity, used: 0, free, live: Vec::new() }
    }

    fn allocate(&mut self, len: u64, align: u64) -> Result<Extent, AllocError> {
        if len == 0 || !align.is_power_of_two() {
            return Err(AllocError::Invalid);
        }
        if len > self.capacity {
            return Err(AllocError::TooLarge);
        }
        let found = self.free.iter().enumerate().find_map(|(index, hole)| {
            let offset = hole.offset.checked_next_multiple_of(align)?;
            let end = offset.checked_add(len)?;
            (end <= hole.offset + hole.len).then_some((index, Extent { offset, len }))
        });
        let (index, extent) = found.ok_or(AllocError::Full)?;
        self.take(index, extent);
        Ok(extent)
    }

    fn release(&mut self, extent: Extent) {
        let at = self
            .live
            .binary_search(&extent)
            .unwrap_or_else(|_| panic!("cannot release extent: it is not live. extent={extent:?}"));
        self.live.remove(at);
        self.used -= extent.len;
        let next = self.free.partition_point(|hole| hole.offset < extent.offset);
        self.free.insert(next, extent);
        // Merges the range with its neighbours.
        if self.free.get(next + 1).is_some_and(|after| extent.offset + extent.len == after.offset) {
            let after = self.free.remove(next + 1);
            self.free[next].len += after.len;
        }
        if next > 0 && self.free[next - 1].offset + self.free[next - 1].len == extent.offset {
            let merged = self.free.remove(next);
            self.free[next - 1].len += merged.len;
        }
    }

    fn reserve(&mut self, extent: Extent) -> Result<(), AllocError> {
        if extent.len == 0 {
            return Err(AllocError::Invalid);
        }
        let end = extent.end().ok_or(AllocError::Occupied)?;
        let fits = |hole: &Extent| hole.offset <= extent.offset && end <= hole.offset + hole.len;
        let index = self.free.iter().position(fits).ok_or(AllocError::Occupied)?;
        self.take(index, extent);
        Ok(())
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn used(&self) -> u64 {
        self.used
    }

    fn largest_free(&self) -> u64 {
        self.free.iter().map(|hole| hole.len).max().unwrap_or(0)
    }
}

#[cfg(test)]
mooncake_core::allocator_conformance!(FirstFit);

#[tokio::main]
async fn main() -> mooncake_core::Result<()> {
    let clock = SystemClock::shared();
    let master: Master<FirstFit> =
        Master::with_parts(MasterOptions::default(), &(), &BuiltinPolicyConfig::default(), clock, 1)?;
    let client = Client::builder().master(Arc::new(master)).segment(1 << 20).connect().await?;
    for round in 0..100 {
        let value = vec![round; 1000 * usize::from(round + 1)];
        client.put_with(format!("key/{}", round % 7), value, &PutOptions::new().upsert()).await?;
    }
    let value = client.get("key/1").await?;
    println!("first fit holds {} bytes for key/1", value.as_deref().map_or(0, <[u8]>::len));
    client.close().await
}
