//! [`S3Fifo`]: two queues and a memory of evicted objects.

use super::ghost::{Ghost, fingerprint};
use super::rings::Rings;
use super::{EvictionPolicy, MergeableOrder};
use crate::ids::SlotId;

/// Options of [`S3Fifo`]. The defaults are those of its authors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct S3FifoConfig {
    /// Share of the held bytes, in percent, above which the next victim is a new object.
    pub small_percent: u8,
    /// Number of remembered evicted objects, as a percentage of the slots held.
    pub ghost_percent: u8,
    /// Touches (1 to 3) that promote a new object to the main queue.
    pub promote_after: u8,
}

impl Default for S3FifoConfig {
    fn default() -> Self {
        Self { small_percent: 10, ghost_percent: 90, promote_after: 2 }
    }
}

/// S3-FIFO (Yang and others, SOSP 2023): objects used once leave soon, and objects that come back
/// stay.
///
/// A new object enters a small queue. At the end of that queue it is dropped, or moves to the main
/// queue when it was touched enough. At the end of the main queue it goes round again once for each
/// of up to three touches. An object dropped from the small queue is remembered for a while, and
/// enters the main queue at once when it comes back. As slots are reused for other objects, only
/// [`insert_hashed`](MergeableOrder::insert_hashed) can tell that an object comes back. With plain
/// `insert` the policy works without that memory, and evicts less well.
///
/// A slot that `allowed` refuses goes round its queue once more, so that objects refused for long
/// do not delay every call. All operations take amortised constant time unless nearly everything is
/// refused.
#[derive(Debug)]
pub struct S3Fifo {
    config: S3FifoConfig,
    rings: Rings<2>,
    /// State of each slot; meaningful while the slot is in a ring.
    slots: Vec<Slot>,
    bytes: [u128; 2],
    ghost: Ghost,
    /// Number of objects remembered so far.
    remembered: u32,
    /// Number of calls of `evict` so far.
    round: u64,
}

const SMALL: usize = 0;
const MAIN: usize = 1;
const MAX_TOUCHES: u8 = 3;

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    bytes: u64,
    /// Last `round` in which the slot was refused.
    refused: u64,
    /// Fingerprint of the key, 0 if unknown.
    print: u32,
    touches: u8,
    ring: u8,
}

impl EvictionPolicy for S3Fifo {
    type Config = S3FifoConfig;

    fn new(slots: usize, config: &S3FifoConfig) -> Self {
        Self {
            config: config.clone(),
            rings: Rings::new(slots),
            slots: Vec::new(),
            bytes: [0; 2],
            ghost: Ghost::new(),
            remembered: 0,
            round: 0,
        }
    }

    fn insert(&mut self, slot: SlotId, bytes: u64) {
        self.enter(slot, bytes, 0);
    }

    fn touch(&mut self, slot: SlotId) {
        if self.rings.contains(slot) {
            let touches = &mut self.slots[slot.index()].touches;
            *touches = (*touches + 1).min(MAX_TOUCHES);
        }
    }

    fn remove(&mut self, slot: SlotId) {
        if self.rings.contains(slot) {
            self.leave(slot);
        }
    }

    fn evict(&mut self, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        self.round += 1;
        // Slots of each queue that were not refused in this call.
        let mut left = [self.rings.len(SMALL), self.rings.len(MAIN)];
        while left != [0, 0] {
            let ring =
                if left[MAIN] == 0 || (left[SMALL] != 0 && self.small_is_full()) { SMALL } else { MAIN };
            let Some(oldest) = self.rings.oldest(ring) else { break };
            if self.slots[oldest.index()].refused == self.round {
                self.rings.renew(ring, oldest);
            } else if self.moves_on(ring, oldest) {
                left[ring] -= 1;
                left[MAIN] += 1;
            } else if allowed(oldest) {
                self.leave(oldest);
                self.remember(ring, oldest);
                return Some(oldest);
            } else {
                self.slots[oldest.index()].refused = self.round;
                self.rings.renew(ring, oldest);
                left[ring] -= 1;
            }
        }
        None
    }

    fn len(&self) -> usize {
        self.rings.len(SMALL) + self.rings.len(MAIN)
    }
}

impl MergeableOrder for S3Fifo {
    fn insert_hashed(&mut self, slot: SlotId, bytes: u64, key_hash: u64) {
        self.enter(slot, bytes, fingerprint(key_hash));
    }
}

impl S3Fifo {
    fn enter(&mut self, slot: SlotId, bytes: u64, print: u32) {
        if self.rings.contains(slot) {
            return self.touch(slot);
        }
        let evicted_at = if print == 0 { None } else { self.ghost.recall(print) };
        let known =
            evicted_at.is_some_and(|at| (self.remembered.wrapping_sub(at) as usize) < self.ghost_limit());
        let ring = if known { MAIN } else { SMALL };
        self.rings.push(ring, slot);
        self.bytes[ring] += u128::from(bytes);
        if slot.index() >= self.slots.len() {
            self.slots.resize(slot.index() + 1, Slot::default());
        }
        self.slots[slot.index()] = Slot { bytes, print, ring: ring as u8, ..Slot::default() };
    }

    fn leave(&mut self, slot: SlotId) {
        let Slot { bytes, ring, .. } = self.slots[slot.index()];
        self.rings.unlink(ring.into(), slot);
        self.bytes[usize::from(ring)] -= u128::from(bytes);
    }

    /// Spares the oldest slot of a queue if it has enough touches. The slot becomes the youngest of
    /// the main queue.
    fn moves_on(&mut self, ring: usize, slot: SlotId) -> bool {
        let state = &mut self.slots[slot.index()];
        if ring == MAIN {
            let spared = state.touches != 0;
            if spared {
                state.touches -= 1;
                self.rings.renew(MAIN, slot);
            }
            return spared;
        }
        if state.touches < self.config.promote_after.clamp(1, MAX_TOUCHES) {
            return false;
        }
        (state.touches, state.ring) = (0, MAIN as u8);
        let bytes = u128::from(state.bytes);
        self.rings.unlink(SMALL, slot);
        self.rings.push(MAIN, slot);
        self.bytes[SMALL] -= bytes;
        self.bytes[MAIN] += bytes;
        true
    }

    fn remember(&mut self, ring: usize, slot: SlotId) {
        let print = self.slots[slot.index()].print;
        let limit = self.ghost_limit();
        if ring == SMALL && print != 0 && limit != 0 {
            self.remembered = self.remembered.wrapping_add(1);
            self.ghost.remember(print, self.remembered, limit);
        }
    }

    fn ghost_limit(&self) -> usize {
        (self.len() + 1) * usize::from(self.config.ghost_percent) / 100
    }

    fn small_is_full(&self) -> bool {
        self.bytes[SMALL] * 100
            >= (self.bytes[SMALL] + self.bytes[MAIN]) * u128::from(self.config.small_percent)
    }
}
