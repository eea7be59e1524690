//! Outlook of a put that found no space: whether waiting may help.

use std::cell::Cell;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;

use super::state::Space;
use crate::directory::Position;
use crate::model::segment::GRAIN;

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
                let is_in_memory = object.value().is_some() || object.write().is_some();
                let ends = object.is_limited;
                may_leave.set(may_leave.get() || is_in_memory && (!stays || ends));
                if let Some(value) = object.value() {
                    let alive = value.replicas.iter().filter(|held| held.segment.is_alive());
                    pinned.set(pinned.get() + alive.map(|held| held.extent.len).sum::<u64>());
                }
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

    /// Returns the allocated bytes of all segments if no segment that may take `len` bytes has
    /// space for them, nor will have some without a removal.
    fn used_if_full(&self, len: u64, only: Option<&str>, now: Moment) -> Result<u64, NoOutlook> {
        let need = len.checked_next_multiple_of(GRAIN).unwrap_or(u64::MAX);
        let registry = self.segments.read();
        let mut candidates = registry.list.iter().filter(|it| only.is_none_or(|name| it.info.name == name));
        if candidates.clone().next().is_none() {
            return Err(NoOutlook::NoSegment);
        }
        if candidates.clone().all(|segment| segment.info.size < need) {
            return Err(NoOutlook::TooLarge);
        }
        // Space in quarantine becomes free, and so may segments that are closed for a while.
        if candidates.any(|segment| segment.quarantined() > 0 || !segment.is_open(now) || segment.fits(len)) {
            return Err(NoOutlook::None);
        }
        Ok(registry.list.iter().map(|segment| segment.used()).sum())
    }
}
