//! [`Tenure`]: least recently used, with a longer life for what has been used again.

use super::EvictionPolicy;
use super::ghost::{Ghost, fingerprint};
use super::rings::Rings;
use crate::ids::SlotId;

/// What [`Tenure`] can be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenureConfig {
    /// How many times as long as a new object a tenured one may be unused (1 to 16). 1 makes the policy [`Lru`](super::Lru).
    pub patience: u8,
    /// For how many lives of a new object one that was evicted is remembered. What comes back within that time is tenured.
    pub memory: u8,
}

impl Default for TenureConfig {
    fn default() -> Self {
        Self { patience: 2, memory: 2 }
    }
}

/// LRU in which an object that was used after it was stored may stay unused twice as long as one that was not. The default.
///
/// An object also gets tenure by coming back soon after it was evicted, which only
/// [`insert_hashed`](EvictionPolicy::insert_hashed) can tell. How often it is touched makes no difference (asking for an object and then
/// reading it are two touches). Times are numbers of uses, and all that is decided follows from one of them, the life of a new object:
/// so many shards of a cache, told one time ([`set_time`](EvictionPolicy::set_time)), decide alike, and blocks of one prefix stay or go
/// together. (Queues with shares of their own, as in [`S3Fifo`](super::S3Fifo), do not: cut into 64 they lose half of their gain.)
///
/// Slots that `allowed` refuses keep their place, as with [`Lru`](super::Lru).
#[derive(Debug)]
pub struct Tenure {
    patience: u64,
    memory: u64,
    rings: Rings<2>,
    /// By slot; meaningful while the slot is in a ring.
    seats: Vec<Seat>,
    ghost: Ghost,
    now: u64,
    /// For how long the last new object to go had been unused; 0 before there was one.
    life: u64,
    victim_since: u64,
}

const NEW: usize = 0;
const TENURED: usize = 1;

#[derive(Clone, Copy, Debug, Default)]
struct Seat {
    used: u64,
    /// 0 for an object of unknown key.
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
            seats: Vec::new(),
            ghost: Ghost::new(),
            now: 0,
            life: 0,
            victim_since: 0,
        }
    }

    fn insert(&mut self, slot: SlotId, _bytes: u64) {
        self.enter(slot, 0);
    }

    fn insert_hashed(&mut self, slot: SlotId, _bytes: u64, key_hash: u64) {
        self.enter(slot, fingerprint(key_hash));
    }

    fn touch(&mut self, slot: SlotId) {
        if self.rings.contains(slot) {
            let print = self.leave(slot).print;
            self.sit(TENURED, slot, print);
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
            Some((self.counts_since(ring, self.seats[slot.index()].used), slot))
        };
        let tenured = oldest(TENURED, allowed);
        let (since, victim) = match (oldest(NEW, allowed), tenured) {
            (Some(new), Some(tenured)) => new.min(tenured),
            (new, tenured) => new.or(tenured)?,
        };
        let seat = self.leave(victim);
        if usize::from(seat.ring) == NEW {
            self.life = self.now.saturating_sub(seat.used).max(1);
        }
        self.victim_since = since;
        if seat.print != 0 && self.memory != 0 {
            // The time as the table keeps it goes round; what is that old is overwritten long before, or costs a wrong guess.
            self.ghost.remember(seat.print, self.now as u32, self.rings.len(NEW) / 2 + 1);
        }
        Some(victim)
    }

    fn set_time(&mut self, now: u64) {
        self.now = self.now.max(now);
    }

    fn victim_since(&self) -> Option<u64> {
        Some(self.victim_since)
    }

    fn len(&self) -> usize {
        self.rings.len(NEW) + self.rings.len(TENURED)
    }
}

impl Tenure {
    fn enter(&mut self, slot: SlotId, print: u32) {
        if self.rings.contains(slot) {
            return self.touch(slot);
        }
        let gone_at = if print == 0 { None } else { self.ghost.recall(print) };
        let gone_for = gone_at.map(|at| u64::from((self.now as u32).wrapping_sub(at)));
        let known = gone_for.is_some_and(|time| time <= self.memory * self.life);
        self.sit(if known { TENURED } else { NEW }, slot, print);
    }

    fn sit(&mut self, ring: usize, slot: SlotId, print: u32) {
        self.now += 1;
        self.rings.push(ring, slot);
        if slot.index() >= self.seats.len() {
            self.seats.resize(slot.index() + 1, Seat::default());
        }
        self.seats[slot.index()] = Seat { used: self.now, print, ring: ring as u8 };
    }

    fn leave(&mut self, slot: SlotId) -> Seat {
        let seat = self.seats[slot.index()];
        self.rings.unlink(seat.ring.into(), slot);
        seat
    }

    /// The last use of a new object that would go at the same time.
    fn counts_since(&self, ring: usize, used: u64) -> u64 {
        let unused = self.now.saturating_sub(used);
        if ring == TENURED { self.now - unused / self.patience } else { used }
    }
}
