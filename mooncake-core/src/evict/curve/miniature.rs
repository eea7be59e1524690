//! Miniature of a cache: the same policy over a sample of the keys, with the same share of the
//! memory.

use hashbrown::HashTable;

use super::feed::KeyUse;
use crate::evict::MergeableOrder;
use crate::evict::sample::KeySample;
use crate::ids::SlotId;

/// Object in a miniature. The slot of an object that has left is free.
#[derive(Clone, Copy, Debug)]
struct MiniatureObject {
    hash: u64,
    bytes: u64,
}

/// Cache without values.
#[derive(Debug)]
pub(super) struct Miniature<P> {
    policy: P,
    slots: HashTable<u32>,
    objects: Vec<MiniatureObject>,
    free: Vec<SlotId>,
    used: u128,
}

impl<P: MergeableOrder> Miniature<P> {
    pub(super) fn new(config: &P::Config) -> Self {
        Self {
            policy: P::new(0, config),
            slots: HashTable::new(),
            objects: Vec::new(),
            free: Vec::new(),
            used: 0,
        }
    }

    /// Returns the number of objects held.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Uses a key, and stores its object if it is not there. `now` is the largest number of a use
    /// so far, and `memory` the size of the cache. Returns whether the object was there.
    pub(super) fn use_key(&mut self, one: &KeyUse, now: u64, memory: u64) -> bool {
        self.policy.set_time(now);
        if let Some(slot) = self.find(one.hash) {
            self.policy.touch_at(slot, &one.place);
            let before = std::mem::replace(&mut self.objects[slot.index()].bytes, one.bytes);
            self.used = self.used - u128::from(before) + u128::from(one.bytes);
            self.shrink_to(memory);
            return true;
        }
        if let Some(rest) = memory.checked_sub(one.bytes) {
            self.shrink_to(rest);
            self.insert(one);
        }
        false
    }

    fn insert(&mut self, one: &KeyUse) {
        let object = MiniatureObject { hash: one.hash, bytes: one.bytes };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.objects[slot.index()] = object;
                slot
            }
            None => {
                self.objects.push(object);
                SlotId(self.objects.len() as u32 - 1)
            }
        };
        let objects = &self.objects;
        self.slots.insert_unique(one.hash, slot.0, |&slot| objects[slot as usize].hash);
        self.used += u128::from(one.bytes);
        self.policy.insert_at(slot, one.bytes, one.hash, &one.place);
        self.change_children(one.place.parent, true);
    }

    /// Evicts until at most so many bytes are in use.
    pub(super) fn shrink_to(&mut self, memory: u64) {
        while self.used > u128::from(memory) {
            let Some(slot) = self.policy.evict(&mut |_| true) else { return };
            let parent = self.policy.parent(slot);
            self.free_slot(slot);
            self.change_children(parent, false);
        }
    }

    /// Removes the object of a key, if it is there.
    pub(super) fn remove(&mut self, hash: u64) {
        let Some(slot) = self.find(hash) else { return };
        let parent = self.policy.parent(slot);
        self.policy.remove(slot);
        self.free_slot(slot);
        self.change_children(parent, false);
    }

    /// Removes the objects that are not in the sample.
    pub(super) fn keep_sampled(&mut self, sample: &KeySample) {
        let hashes = self.slots.iter().map(|&slot| self.objects[slot as usize].hash);
        let unsampled: Vec<u64> = hashes.filter(|hash| !sample.contains(*hash)).collect();
        unsampled.into_iter().for_each(|hash| self.remove(hash));
    }

    fn find(&self, hash: u64) -> Option<SlotId> {
        let is_it = |&slot: &u32| self.objects[slot as usize].hash == hash;
        self.slots.find(hash, is_it).map(|slot| SlotId(*slot))
    }

    fn free_slot(&mut self, slot: SlotId) {
        let MiniatureObject { hash, bytes } = self.objects[slot.index()];
        if let Ok(entry) = self.slots.find_entry(hash, |&other| other == slot.0) {
            entry.remove();
            self.used -= u128::from(bytes);
            self.free.push(slot);
        }
    }

    fn change_children(&mut self, parent: u64, more: bool) {
        if parent != 0
            && let Some(slot) = self.find(parent)
        {
            self.policy.change_children(slot, more);
        }
    }
}
