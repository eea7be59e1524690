//! [`Lru`]: least recently used.

use super::rings::Rings;
use super::{EvictionPolicy, MergeableOrder};
use crate::ids::SlotId;

/// LRU policy: evicts the allowed slot with the oldest insert or touch.
///
/// Slots that `allowed` refuses keep their position, so each call passes over the refused slots
/// older than its victim. A lease granted along with a touch costs nothing, because it has expired
/// before the slot is the oldest. Slots that will be refused for long (hard pins) are better
/// removed meanwhile.
#[derive(Debug)]
pub struct Lru {
    rings: Rings<1>,
}

impl EvictionPolicy for Lru {
    type Config = ();

    fn new(slots: usize, (): &()) -> Self {
        Self { rings: Rings::new(slots) }
    }

    fn insert(&mut self, slot: SlotId, _bytes: u64) {
        if self.rings.contains(slot) {
            self.rings.renew(0, slot);
        } else {
            self.rings.push(0, slot);
        }
    }

    fn touch(&mut self, slot: SlotId) {
        if self.rings.contains(slot) {
            self.rings.renew(0, slot);
        }
    }

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

impl MergeableOrder for Lru {}
