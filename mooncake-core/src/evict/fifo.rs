//! [`Fifo`]: first in, first out.

use super::rings::Rings;
use super::{EvictionPolicy, MergeableOrder};
use crate::ids::SlotId;

/// FIFO policy: evicts the allowed slot that was inserted first. Touches make no difference.
///
/// Slots that `allowed` refuses keep their position, so each call passes over the refused slots
/// older than its victim. Slots that will be refused for long (hard pins) are better removed
/// meanwhile.
#[derive(Debug)]
pub struct Fifo {
    rings: Rings<1>,
}

impl EvictionPolicy for Fifo {
    type Config = ();

    fn new(slots: usize, (): &()) -> Self {
        Self { rings: Rings::new(slots) }
    }

    fn insert(&mut self, slot: SlotId, _bytes: u64) {
        if !self.rings.contains(slot) {
            self.rings.push(0, slot);
        }
    }

    fn touch(&mut self, _slot: SlotId) {}

    fn remove(&mut self, slot: SlotId) {
        if self.rings.contains(slot) {
            self.rings.unlink(0, slot);
        }
    }

    fn evict(&mut self, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        self.rings.take_oldest(0, allowed)
    }

    fn len(&self) -> usize {
        self.rings.len(0)
    }
}

impl MergeableOrder for Fifo {
    fn heeds_use(&self) -> bool {
        false
    }
}
