//! Retired segments. A segment is listed here while a reader or a writer may still use its memory.
//!
//! A reader with a lease or a writer with an allocation does not learn that a segment was unmounted
//! or that its client expired. If the same memory is mounted again, the promised extents must not
//! be reused too early.

use std::sync::Arc;

use mooncake_core::alloc::{Extent, SegmentAllocator};
use mooncake_core::clock::Moment;
use mooncake_core::replica::Segment;

use crate::model::segment::MountedSegment;

/// Maximum number of segments that are remembered although nothing in them is in use.
const MAX_REMEMBERED: usize = 4096;

/// Segments that were unmounted or whose client expired.
pub(crate) struct RetiredSegments<A> {
    list: Vec<RetiredSegment<A>>,
}

struct RetiredSegment<A> {
    mounted: Arc<MountedSegment<A>>,
    /// True if every replica in the segment has been dropped, so that exactly the extents in
    /// quarantine are still allocated.
    swept: bool,
}

impl<A> Default for RetiredSegments<A> {
    fn default() -> Self {
        Self { list: Vec::new() }
    }
}

impl<A: SegmentAllocator> RetiredSegments<A> {
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(crate) fn add(&mut self, mounted: Arc<MountedSegment<A>>) {
        self.list.push(RetiredSegment { mounted, swept: false });
    }

    /// Returns whether a retired mount had all memory of `segment`, so that its quarantine has all
    /// extents that are in use.
    pub(crate) fn knows(&self, segment: &Segment) -> bool {
        self.list.iter().any(|retired| retired.mounted.info.id == segment.id || retired.covers(segment))
    }

    /// Returns the time before which nothing may be placed in memory of `segment`, because clients
    /// of earlier masters may use it.
    pub(crate) fn opening_of(&self, segment: &Segment) -> Moment {
        let of_memory = self.list.iter().filter(|retired| retired.shares_memory_with(segment));
        of_memory.map(|retired| retired.mounted.opens()).max().unwrap_or_default()
    }

    /// Returns whether a replica may still lie in memory of `segment`, or in a retired mount of it.
    pub(crate) fn has_unswept_replicas_in(&self, segment: &Segment) -> bool {
        self.list.iter().any(|retired| !retired.swept && retired.shares_memory_with(segment))
    }

    /// Returns the segments in which replicas may still lie.
    pub(crate) fn unswept(&self) -> Vec<Arc<MountedSegment<A>>> {
        self.list.iter().filter(|retired| !retired.swept).map(|retired| retired.mounted.clone()).collect()
    }

    /// Returns the extents of `segment` that must stay in quarantine when it is mounted, without
    /// overlaps. Call it after a sweep if
    /// [`has_unswept_replicas_in`](Self::has_unswept_replicas_in).
    pub(crate) fn take_quarantined(&mut self, segment: &Segment) -> Vec<(Moment, Extent)> {
        let end = segment.base.saturating_add(segment.size);
        let mut inherited = Vec::new();
        self.list.retain(|retired| {
            let mounted = &retired.mounted;
            if !retired.shares_memory_with(segment) {
                return true;
            }
            for (until, at) in mounted.quarantined_addresses() {
                let (from, to) = (at.offset.max(segment.base), (at.offset + at.len).min(end));
                if from < to {
                    inherited.push((until, Extent { offset: from - segment.base, len: to - from }));
                }
            }
            // Keep the entry for the memory outside of the new segment.
            mounted.info.base < segment.base || mounted.info.base.saturating_add(mounted.info.size) > end
        });
        merge_extents(inherited)
    }

    /// Records that every replica in these segments has been dropped.
    pub(crate) fn mark_swept(&mut self, swept: &[Arc<MountedSegment<A>>]) {
        for segment in &mut self.list {
            segment.swept |= swept.iter().any(|other| Arc::ptr_eq(other, &segment.mounted));
        }
    }

    /// Forgets the segments in which no extent is in quarantine any longer. Until `rested`, memory
    /// that is mounted again opens at once only if its retired mount is known, so some more are
    /// remembered.
    pub(crate) fn forget_unused(&mut self, now: Moment, rested: Moment) {
        let remembers = rested > now && self.list.len() <= MAX_REMEMBERED;
        self.list.retain(|segment| {
            segment.mounted.reclaim(now);
            let is_in_use = !segment.swept || segment.mounted.quarantined() > 0;
            is_in_use || remembers || segment.mounted.opens() > now
        });
    }
}

impl<A: SegmentAllocator> RetiredSegment<A> {
    fn shares_memory_with(&self, segment: &Segment) -> bool {
        self.mounted.info.id == segment.id || self.mounted.overlaps(segment)
    }

    fn covers(&self, segment: &Segment) -> bool {
        let info = &self.mounted.info;
        let end = |segment: &Segment| segment.base.saturating_add(segment.size);
        info.endpoint == segment.endpoint && info.base <= segment.base && end(segment) <= end(info)
    }
}

/// Joins overlapping extents. The later time holds for both.
fn merge_extents(mut extents: Vec<(Moment, Extent)>) -> Vec<(Moment, Extent)> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_joins_overlaps_and_keeps_the_later_time() {
        let at = |until, offset, len| (Moment(until), Extent { offset, len });
        let merged = merge_extents(vec![at(1, 10, 5), at(9, 0, 4), at(5, 12, 10), at(2, 4, 2), at(3, 13, 1)]);
        assert_eq!(merged, [at(9, 0, 4), at(2, 4, 2), at(5, 10, 12)]);
    }
}
