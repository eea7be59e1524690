//! Segments that are gone, for as long as somebody may still use their memory.
//!
//! A reader with a lease or a writer with a grant does not learn that a segment was unmounted or its client expired. If the same
//! memory is mounted again, what they were promised must not be handed out before its time.

use std::sync::Arc;

use mooncake_core::alloc::{Extent, SegmentAllocator};
use mooncake_core::clock::Moment;
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::ids::SegmentId;
use mooncake_core::replica::Segment;

use super::Master;
use super::segments::Mounted;

/// Dead mounts.
pub(super) struct Graves<A> {
    list: Vec<Grave<A>>,
}

struct Grave<A> {
    mounted: Arc<Mounted<A>>,
    /// Every replica in it has been dropped, so that what it holds is exactly what must rest.
    swept: bool,
}

impl<A> Default for Graves<A> {
    fn default() -> Self {
        Self { list: Vec::new() }
    }
}

impl<A: SegmentAllocator> Graves<A> {
    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(super) fn add(&mut self, mounted: Arc<Mounted<A>>) {
        self.list.push(Grave { mounted, swept: false });
    }

    /// Whether this master has seen the segment before.
    pub(super) fn knows(&self, id: SegmentId) -> bool {
        self.list.iter().any(|grave| grave.mounted.info.id == id)
    }

    /// Whether replicas may still be in memory that this segment has, or in one of its name.
    pub(super) fn is_under(&self, segment: &Segment) -> bool {
        self.list.iter().any(|grave| !grave.swept && grave.was_in(segment))
    }

    fn unswept(&self) -> Vec<Arc<Mounted<A>>> {
        self.list.iter().filter(|grave| !grave.swept).map(|grave| grave.mounted.clone()).collect()
    }

    /// What must rest in a segment that is about to be mounted: extents in it, none overlapping. Call after a sweep of what
    /// [is under it](Self::is_under).
    pub(super) fn inherit(&mut self, segment: &Segment) -> Vec<(Moment, Extent)> {
        let end = segment.base.saturating_add(segment.size);
        let mut inherited = Vec::new();
        self.list.retain(|grave| {
            let dead = &grave.mounted;
            if !grave.was_in(segment) {
                return true;
            }
            for (until, at) in dead.resting_addresses() {
                let (from, to) = (at.offset.max(segment.base), (at.offset + at.len).min(end));
                if from < to {
                    inherited.push((until, Extent { offset: from - segment.base, len: to - from }));
                }
            }
            // What lies outside of the new segment still needs its grave.
            dead.info.base < segment.base || dead.info.base.saturating_add(dead.info.size) > end
        });
        merge(inherited)
    }
}

impl<A: SegmentAllocator> Grave<A> {
    fn was_in(&self, segment: &Segment) -> bool {
        self.mounted.info.id == segment.id || self.mounted.overlaps(segment)
    }
}

/// Joins what overlaps; the later time counts for both.
fn merge(mut extents: Vec<(Moment, Extent)>) -> Vec<(Moment, Extent)> {
    extents.sort_unstable_by_key(|(_, extent)| extent.offset);
    let mut merged: Vec<(Moment, Extent)> = Vec::with_capacity(extents.len());
    for (until, extent) in extents {
        match merged.last_mut() {
            Some((last_until, last)) if extent.offset < last.offset + last.len => {
                last.len = last.len.max(extent.offset + extent.len - last.offset);
                *last_until = (*last_until).max(until);
            }
            _ => merged.push((until, extent)),
        }
    }
    merged
}

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// Drops every replica in a dead segment. Slow (it sees every object), so only `tick` does it, and a mount of memory that is among
    /// the dead's.
    pub(super) fn sweep(&self, graves: &mut Graves<A>) {
        self.drop_dead();
        graves.list.iter_mut().for_each(|grave| grave.swept = true);
    }

    /// The same, while segments come and go: it is done with those that were dead before.
    pub(super) fn sweep_beside(&self) {
        let dead = self.membership.lock().unswept();
        if dead.is_empty() {
            return;
        }
        self.drop_dead();
        for grave in &mut self.membership.lock().list {
            grave.swept |= dead.iter().any(|dead| Arc::ptr_eq(dead, &grave.mounted));
        }
    }

    /// A replica placed before a burial is in its shard before this comes by: puts hold the shard's lock throughout.
    fn drop_dead(&self) {
        let now = self.clock.now();
        self.directory.visit(|shard, slot| {
            shard.prune(slot, now, self.options.put_release);
            shard.settle(slot);
        });
    }

    /// Forgets the dead whose space nobody may use any more.
    pub(super) fn forget_graves(&self, graves: &mut Graves<A>, now: Moment) {
        graves.list.retain(|grave| {
            grave.mounted.reclaim(now);
            !grave.swept || grave.mounted.resting() > 0
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_joins_overlaps_and_keeps_the_later_time() {
        let at = |until, offset, len| (Moment(until), Extent { offset, len });
        let merged = merge(vec![at(1, 10, 5), at(9, 0, 4), at(5, 12, 10), at(2, 4, 2), at(3, 13, 1)]);
        assert_eq!(merged, [at(9, 0, 4), at(2, 4, 2), at(5, 10, 12)]);
    }
}
