//! [`Tenure`]: LRU with a longer life for objects that were used again.

use super::ghost::{Ghost, fingerprint};
use super::rings::Rings;
use super::{EvictionPolicy, MergeableOrder};
use crate::ids::SlotId;

/// Options of [`Tenure`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenureConfig {
    /// Factor by which a tenured object may stay unused longer than a new one (1 to 16). 1 makes
    /// the policy [`Lru`](super::Lru).
    pub patience: u8,
    /// Time for which an evicted object is remembered, in lives of a new object. An object that
    /// comes back within that time is tenured.
    pub memory: u8,
}

impl Default for TenureConfig {
    fn default() -> Self {
        Self { patience: 2, memory: 2 }
    }
}

/// LRU in which an object that was used after it was stored may stay unused twice as long as one
/// that was not. The default policy.
///
/// An object also gets tenure by coming back soon after it was evicted, which only
/// [`insert_hashed`](MergeableOrder::insert_hashed) can tell. The number of touches makes no
/// difference (a lookup of an object and the read that follows are two touches).
///
/// Times are numbers of uses. Every decision follows from one of them, the life of a new object. So
/// many shards of a cache with a common clock ([`set_time`](MergeableOrder::set_time)) decide
/// alike, and blocks of one prefix stay or go together. Queues with shares of their own, as in
/// [`S3Fifo`](super::S3Fifo), do not: cut into 64 they lose half of their gain.
///
/// Slots that `allowed` refuses keep their position, as with [`Lru`](super::Lru).
#[derive(Debug)]
pub struct Tenure {
    patience: u64,
    memory: u64,
    rings: Rings<2>,
    /// State of each slot; meaningful while the slot is in a ring.
    states: Vec<SlotState>,
    ghost: Ghost,
    now: u64,
    /// Time for which the last evicted new object had been unused; 0 before there was one.
    life: u64,
    victim_since: u64,
}

const NEW: usize = 0;
const TENURED: usize = 1;

#[derive(Clone, Copy, Debug, Default)]
struct SlotState {
    used: u64,
    /// Fingerprint of the key, 0 if unknown.
    print: u32,
    ring: u8,
}

impl EvictionPolicy for Tenure {
    type Config = TenureConfig;

    fn new(slots: usize, config: &TenureConfig) -> Self {
        Self {
            patience: config.patience.clamp(1, 16).into(),
            memory: config.memory.into(),
            rings: Rings::new(slots),
            states: Vec::new(),
            ghost: Ghost::new(),
            now: 0,
            life: 0,
            victim_since: 0,
        }
    }

    fn insert(&mut self, slot: SlotId, _bytes: u64) {
        self.enter(slot, 0);
    }

    fn touch(&mut self, slot: SlotId) {
        if self.rings.contains(slot) {
            let print = self.leave(slot).print;
            self.push(TENURED, slot, print);
        }
    }

    fn remove(&mut self, slot: SlotId) {
        if self.rings.contains(slot) {
            self.leave(slot);
        }
    }

    fn evict(&mut self, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        let oldest = |ring, allowed: &mut dyn FnMut(SlotId) -> bool| {
            let slot = self.rings.oldest_of(ring, allowed)?;
            Some((self.counts_since(ring, self.states[slot.index()].used), slot))
        };
        let tenured = oldest(TENURED, allowed);
        let (since, victim) = match (oldest(NEW, allowed), tenured) {
            (Some(new), Some(tenured)) => new.min(tenured),
            (new, tenured) => new.or(tenured)?,
        };
        let state = self.leave(victim);
        if usize::from(state.ring) == NEW {
            self.life = self.now.saturating_sub(state.used).max(1);
        }
        self.victim_since = since;
        if state.print != 0 && self.memory != 0 {
            // The time in the table wraps around. An entry that old has been overwritten long
            // before, or costs a wrong guess.
            self.ghost.remember(state.print, self.now as u32, self.rings.len(NEW) / 2 + 1);
        }
        Some(victim)
    }

    fn len(&self) -> usize {
        self.rings.len(NEW) + self.rings.len(TENURED)
    }
}

impl MergeableOrder for Tenure {
    fn insert_hashed(&mut self, slot: SlotId, _bytes: u64, key_hash: u64) {
        self.enter(slot, fingerprint(key_hash));
    }

    fn set_time(&mut self, now: u64) {
        self.now = self.now.max(now);
    }

    fn victim_since(&self) -> Option<u64> {
        Some(self.victim_since)
    }
}

impl Tenure {
    fn enter(&mut self, slot: SlotId, print: u32) {
        if self.rings.contains(slot) {
            return self.touch(slot);
        }
        let evicted_at = if print == 0 { None } else { self.ghost.recall(print) };
        let since_eviction = evicted_at.map(|at| u64::from((self.now as u32).wrapping_sub(at)));
        let known = since_eviction.is_some_and(|time| time <= self.memory * self.life);
        self.push(if known { TENURED } else { NEW }, slot, print);
    }

    fn push(&mut self, ring: usize, slot: SlotId, print: u32) {
        self.now += 1;
        self.rings.push(ring, slot);
        if slot.index() >= self.states.len() {
            self.states.resize(slot.index() + 1, SlotState::default());
        }
        self.states[slot.index()] = SlotState { used: self.now, print, ring: ring as u8 };
    }

    fn leave(&mut self, slot: SlotId) -> SlotState {
        let state = self.states[slot.index()];
        self.rings.unlink(state.ring.into(), slot);
        state
    }

    /// Returns the last use of a new object that would be evicted at the same time.
    fn counts_since(&self, ring: usize, used: u64) -> u64 {
        let unused = self.now.saturating_sub(used);
        if ring == TENURED { self.now - unused / self.patience } else { used }
    }
}
