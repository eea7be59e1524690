//! Slots of a shard. An object keeps its slot until it is removed.

use mooncake_core::ids::SlotId;

/// Number of slots in a chunk.
const CHUNK: usize = 1024;

/// Table of slots. Empty slots are filled first. The table grows by chunks that never move, so
/// growing takes little time at any size.
pub(crate) struct Slots<T> {
    /// Chunks, of which all but the last are full.
    chunks: Vec<Vec<SlotEntry<T>>>,
    len: usize,
    /// Next empty slot to fill.
    hole: Option<SlotId>,
}

enum SlotEntry<T> {
    Taken(T),
    /// Empty slot, with the next empty one.
    Hole(Option<SlotId>),
}

impl<T> Slots<T> {
    pub(crate) fn new() -> Self {
        Self { chunks: Vec::new(), len: 0, hole: None }
    }

    /// Returns the number of taken slots.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the first index above every slot that was ever taken.
    pub(crate) fn end(&self) -> usize {
        self.chunks.last().map_or(0, |last| (self.chunks.len() - 1) * CHUNK + last.len())
    }

    /// Puts a value into an empty slot.
    pub(crate) fn insert(&mut self, thing: T) -> SlotId {
        self.len += 1;
        if let Some(slot) = self.hole
            && let Some(entry) = self.entry_mut(slot)
        {
            if let SlotEntry::Hole(next) = std::mem::replace(entry, SlotEntry::Taken(thing)) {
                self.hole = next;
            }
            return slot;
        }
        // A shard of 2^32 objects does not fit into the memory of any machine.
        let slot = SlotId(self.end() as u32);
        match self.chunks.last_mut() {
            Some(last) if last.len() < CHUNK => last.push(SlotEntry::Taken(thing)),
            last => {
                // The first chunk grows on demand: there may be many shards with few objects.
                let mut chunk = Vec::with_capacity(if last.is_some() { CHUNK } else { 0 });
                chunk.push(SlotEntry::Taken(thing));
                self.chunks.push(chunk);
            }
        }
        slot
    }

    /// Empties a slot.
    pub(crate) fn remove(&mut self, slot: SlotId) -> Option<T> {
        let hole = self.hole;
        let entry = self.entry_mut(slot).filter(|entry| matches!(entry, SlotEntry::Taken(_)))?;
        let before = std::mem::replace(entry, SlotEntry::Hole(hole));
        self.hole = Some(slot);
        self.len -= 1;
        match before {
            SlotEntry::Taken(thing) => Some(thing),
            SlotEntry::Hole(_) => None,
        }
    }

    pub(crate) fn get(&self, slot: SlotId) -> Option<&T> {
        match self.chunks.get(slot.index() / CHUNK)?.get(slot.index() % CHUNK)? {
            SlotEntry::Taken(thing) => Some(thing),
            SlotEntry::Hole(_) => None,
        }
    }

    fn entry_mut(&mut self, slot: SlotId) -> Option<&mut SlotEntry<T>> {
        self.chunks.get_mut(slot.index() / CHUNK)?.get_mut(slot.index() % CHUNK)
    }
}

impl<T> std::ops::Index<SlotId> for Slots<T> {
    type Output = T;

    fn index(&self, slot: SlotId) -> &T {
        match &self.chunks[slot.index() / CHUNK][slot.index() % CHUNK] {
            SlotEntry::Taken(thing) => thing,
            SlotEntry::Hole(_) => empty(slot),
        }
    }
}

impl<T> std::ops::IndexMut<SlotId> for Slots<T> {
    fn index_mut(&mut self, slot: SlotId) -> &mut T {
        match &mut self.chunks[slot.index() / CHUNK][slot.index() % CHUNK] {
            SlotEntry::Taken(thing) => thing,
            SlotEntry::Hole(_) => empty(slot),
        }
    }
}

#[cold]
fn empty(slot: SlotId) -> ! {
    panic!("{slot:?} is empty")
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use mooncake_core::clock::Rng;

    use super::*;

    #[test]
    fn keeps_what_is_put_there_and_fills_holes() {
        let (mut rng, mut slots, mut there) = (Rng::seeded(5), Slots::new(), HashMap::new());
        for step in 0..50_000u64 {
            if rng.below(5) < 3 || there.is_empty() {
                let slot = slots.insert(step);
                assert_eq!(there.insert(slot, step), None, "{slot:?} was taken");
            } else {
                let slot = SlotId(rng.below(slots.end() as u64) as u32);
                assert_eq!(slots.remove(slot), there.remove(&slot));
            }
            assert_eq!(slots.len(), there.len());
        }
        assert!(slots.end() > 4 * CHUNK);
        for (slot, thing) in &mut there {
            assert_eq!((slots[*slot], slots.get(*slot)), (*thing, Some(&*thing)));
            slots[*slot] += 1;
            *thing += 1;
        }
        let all = (0..slots.end() as u32).map(SlotId);
        let seen: HashMap<_, _> = all.filter_map(|slot| Some((slot, *slots.get(slot)?))).collect();
        assert_eq!(seen, there);
        // Empty slots are filled before new ones are taken.
        let end = slots.end();
        for _ in slots.len()..end {
            slots.insert(0);
        }
        assert_eq!((slots.len(), slots.end()), (end, end));
        assert_eq!(slots.get(SlotId(end as u32)), None);
        assert_eq!(slots.remove(SlotId(u32::MAX)), None);
    }
}
