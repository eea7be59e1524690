//! Outlook of a put that found no space: whether waiting may help.

use std::cell::Cell;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;

use super::state::Space;
use crate::directory::Position;
use crate::model::segment::{Allocation, GRAIN, MountedSegment};

/// Reason why waiting cannot help a put that found no space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoOutlook {
    /// Waiting may help.
    None = 0,
    /// No segment is mounted.
    NoSegment = 1,
    /// No segment is large enough.
    TooLarge = 2,
    /// Every object in memory is hard-pinned.
    HardPinned = 3,
}

impl<A: SegmentAllocator, E: MergeableOrder> Space<A, E> {
    /// Returns why a put of `len` bytes in the named segment, or in any, can only be refused.
    pub(crate) fn why_never(&self, len: u64, only: Option<&str>, now: Moment) -> NoOutlook {
        let need = space_of(len);
        let before = match self.used_if_full(len, only, now) {
            Ok(used) => used,
            Err(outlook) => return outlook,
        };
        let (may_leave, pinned) = (Cell::new(false), Cell::new(0));
        self.directory.visit_from(
            Position::FIRST,
            |shard, slot| {
                let object = &shard[slot];
                let stays = object.hard_pin && object.write().is_none() && object.copying().is_none();
                // Objects in segments that can never take the put do not help.
                let helps =
                    |held: &&Allocation<A>| held.segment.is_alive() && may_take(&held.segment, need, only);
                let space = object.value().into_iter().flat_map(|value| value.replicas.iter()).filter(helps);
                let space: u64 = space.map(|held| held.extent.len).sum();
                let ends = object.is_limited;
                let leaves = space > 0 && (!stays || ends) || object.write().is_some();
                may_leave.set(may_leave.get() || leaves);
                pinned.set(pinned.get() + space);
            },
            || !may_leave.get(),
        );
        if may_leave.get() {
            return NoOutlook::None;
        }
        // Objects come and go during the visit. Space that no pinned object has will be free.
        match self.used_if_full(len, only, now) {
            Ok(after) if before == after && after == pinned.get() => NoOutlook::HardPinned,
            Ok(_) => NoOutlook::None,
            Err(outlook) => outlook,
        }
    }

    /// Returns the allocated bytes of all segments that may take `len` bytes if none of them has
    /// space for them, nor will have some without a removal.
    fn used_if_full(&self, len: u64, only: Option<&str>, now: Moment) -> Result<u64, NoOutlook> {
        let need = space_of(len);
        let registry = self.segments.read();
        if !registry.list.iter().any(|segment| may_take(segment, 0, only)) {
            return Err(NoOutlook::NoSegment);
        }
        let mut candidates = registry.list.iter().filter(|segment| may_take(segment, need, only)).peekable();
        if candidates.peek().is_none() {
            return Err(NoOutlook::TooLarge);
        }
        // Space in quarantine becomes free, and so may segments that are closed for a while.
        let used = candidates.map(|segment| segment.used_if_full(need).filter(|_| segment.is_open(now)));
        used.sum::<Option<u64>>().ok_or(NoOutlook::None)
    }
}

/// Returns the space that a value of `len` bytes takes.
fn space_of(len: u64) -> u64 {
    len.checked_next_multiple_of(GRAIN).unwrap_or(u64::MAX)
}

/// Returns whether a segment has the size for `need` bytes, and the name, if one is given.
fn may_take<A: SegmentAllocator>(segment: &MountedSegment<A>, need: u64, only: Option<&str>) -> bool {
    segment.info.size >= need && only.is_none_or(|name| segment.info.name == name)
}
