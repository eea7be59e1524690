//! [`Lru`]: least recently used.

use super::EvictionPolicy;
use super::rings::Rings;
use crate::ids::SlotId;

/// Evicts the slot of those allowed whose last insert or touch is longest ago.
///
/// Slots that `allowed` refuses keep their place, so each call passes over the refused slots older than its victim. A
/// lease that is granted along with a touch costs nothing by that, as it has ended before the slot is the oldest;
/// slots that will be refused for long (hard pins) are better taken out with `remove` meanwhile.
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
