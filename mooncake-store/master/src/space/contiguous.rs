//! Contiguous space for an object that is larger than the gaps that eviction in order leaves: the
//! cheapest run of neighbours in a segment.

use std::sync::Arc;

use mooncake_core::alloc::{Extent, SegmentAllocator};
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ObjectKey, ReplicaId};

use super::state::Space;
use crate::directory::Pass;
use crate::model::segment::{Allocation, GRAIN, MountedSegment};

/// Upper bound of the cost of a used object, relative to an unused one of its size.
const MAX_USE_COST: u64 = 4;

/// Extent of a segment that is in use.
#[derive(Clone, Debug)]
struct Block {
    extent: Extent,
    /// Cost of losing the object; `None` if it cannot be evicted.
    cost: Option<u64>,
    object: Option<(ObjectKey, ReplicaId)>,
}

impl<A: SegmentAllocator, E: MergeableOrder> Space<A, E> {
    /// Evicts neighbours in one segment so that `len` bytes fit between the remaining extents.
    /// Returns whether that succeeded.
    pub(crate) fn evict_contiguous(
        &self,
        len: u64,
        takes: impl Fn(&MountedSegment<A>) -> bool,
        pass: Pass,
        now: Moment,
    ) -> bool {
        let segments: Vec<_> = {
            let registry = self.segments.read();
            registry
                .list
                .iter()
                .filter(|segment| takes(segment) && len <= segment.info.size)
                .cloned()
                .collect()
        };
        for segment in segments {
            let blocks = self.blocks(&segment, pass, now);
            let need = len.next_multiple_of(GRAIN);
            if let Some(run) = cheapest_run(&blocks, need, segment.info.size) {
                for block in run {
                    self.evict_block(block, pass, now);
                }
                if segment.fits(len) {
                    return true;
                }
            }
        }
        false
    }

    /// Returns the extents of a segment that are in use, by offset.
    fn blocks(&self, segment: &Arc<MountedSegment<A>>, pass: Pass, now: Moment) -> Vec<Block> {
        let here = |held: &&Allocation<A>| Arc::ptr_eq(&held.segment, segment);
        let oldest = now.0.saturating_sub((self.options.lease_ttl.as_nanos() as u64).saturating_mul(8));
        let mut blocks: Vec<_> = segment
            .quarantined_addresses()
            .into_iter()
            .map(|(_, at)| Extent { offset: at.offset - segment.info.base, len: at.len })
            .map(|extent| Block { extent, cost: None, object: None })
            .collect();
        self.directory.visit(|shard, slot| {
            let object = &shard[slot];
            let stays = |extent| Block { extent, cost: None, object: None };
            if let Some(write) = object.write() {
                blocks.extend(write.replicas.iter().filter(here).map(|held| stays(held.extent)));
            }
            if let Some(copying) = object.copying() {
                blocks.extend(copying.targets.iter().filter(here).map(|held| stays(held.extent)));
            }
            let Some(value) = object.value() else { return };
            for held in value.replicas.iter().filter(here) {
                // The lease tells when the object was last read.
                let use_cost = object.lease.0.saturating_sub(oldest).saturating_mul(MAX_USE_COST - 1)
                    / (now.0 - oldest).max(1);
                let cost = self
                    .is_evictable(object, pass, now)
                    .then(|| held.extent.len.saturating_mul(1 + use_cost.min(MAX_USE_COST - 1)));
                blocks.push(Block { extent: held.extent, cost, object: Some((object.key.clone(), held.id)) });
            }
        });
        blocks.sort_unstable_by_key(|block| block.extent.offset);
        blocks
    }

    /// Evicts an object if it has not changed since the search.
    fn evict_block(&self, block: &Block, pass: Pass, now: Moment) {
        let Some((key, id)) = &block.object else { return };
        let hash = self.directory.hash(key.as_bytes());
        let shard = self.directory.lock(hash);
        let Some(slot) = shard.find(hash, key.as_bytes()) else { return };
        let object = &shard[slot];
        let same = object.value().is_some_and(|value| value.replicas.iter().any(|held| held.id == *id));
        if !same || !self.is_evictable(object, pass, now) {
            return;
        }
        if let Some(mut victim) = self.evict_chosen(shard, slot, pass, now) {
            self.release_parents(&mut victim);
        }
    }
}

/// Returns the cheapest run of neighbours whose loss leaves a gap of `need` bytes.
fn cheapest_run(blocks: &[Block], need: u64, size: u64) -> Option<&[Block]> {
    let mut best: Option<(u64, &[Block])> = None;
    let (mut first, mut cost) = (0, 0u64);
    for (last, block) in blocks.iter().enumerate() {
        let Some(price) = block.cost else {
            (first, cost) = (last + 1, 0);
            continue;
        };
        cost += price;
        let end = blocks.get(last + 1).map_or(size, |next| next.extent.offset);
        let gap = |first: usize| {
            let start = first.checked_sub(1).map_or(0, |before| {
                let before = blocks[before].extent;
                before.offset + before.len
            });
            // Shards are examined one by one, so an extent and its later reuse may both be listed.
            end.saturating_sub(start)
        };
        // Leave out at the front the blocks that the gap does not need.
        while first < last && gap(first + 1) >= need {
            cost -= blocks[first].cost.unwrap_or(0);
            first += 1;
        }
        if gap(first) >= need && best.is_none_or(|(least, _)| cost < least) {
            best = Some((cost, &blocks[first..=last]));
        }
    }
    best.map(|(_, run)| run)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(offset: u64, len: u64, cost: Option<u64>) -> Block {
        Block { extent: Extent { offset, len }, cost, object: None }
    }

    #[test]
    fn takes_the_cheapest_run_that_is_wide_enough() {
        let blocks = [
            block(0, 10, Some(40)),
            block(10, 10, Some(10)),
            block(20, 10, Some(10)),
            block(30, 10, None),
            block(50, 10, Some(11)),
            block(60, 10, None),
        ];
        let offsets = |need| {
            cheapest_run(&blocks, need, 75).map(|run| run.iter().map(|b| b.extent.offset).collect::<Vec<_>>())
        };
        assert_eq!(offsets(10), Some(vec![10]));
        assert_eq!(offsets(20), Some(vec![50]), "the free bytes beside a block count");
        assert_eq!(offsets(30), Some(vec![0, 10, 20]));
        assert_eq!(offsets(31), None);
        assert!(cheapest_run(&[], 1, 75).is_none());
    }

    #[test]
    fn neighbours_that_overlap_leave_no_gap() {
        let blocks =
            [block(0, 30, Some(1)), block(10, 5, Some(1)), block(12, 3, Some(1)), block(60, 15, None)];
        assert!(cheapest_run(&blocks[..2], 71, 75).is_some());
        assert!(cheapest_run(&blocks, 61, 75).is_none());
        assert_eq!(cheapest_run(&blocks, 60, 75).map(<[Block]>::len), Some(3));
    }
}
