//! [`Gittins`]: evicts what is least likely to be used soon, as learned from the uses themselves.

mod ages;
mod class;
mod ghosts;
mod learner;
mod saved;
mod values;

pub use self::learner::Learner;

use std::sync::Arc;

use self::class::{CLASSES, class};
use self::ghosts::{GhostEntry, Ghosts};
use self::learner::Watch;
use self::values::{AgePoint, FRESH, Values, YOUNG_MARGIN};
use super::chain::Place;
use super::ghost::fingerprint;
use super::rings::{Link, Linked, MAX_HINT, Rings};
use super::{EvictionPolicy, KeySample, Learned, MergeableOrder};
use crate::ids::SlotId;

/// Options of [`Gittins`].
#[derive(Clone, Debug, Default)]
pub struct GittinsConfig {
    /// Learner that the policies of one cache share. Without one, each policy learns by itself.
    pub learner: Option<Arc<Learner>>,
}

impl PartialEq for GittinsConfig {
    /// Returns whether both name the same learner, or none.
    fn eq(&self, other: &Self) -> bool {
        match (&self.learner, &other.learner) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (one, other) => one.is_none() && other.is_none(),
        }
    }
}

impl Eq for GittinsConfig {}

/// Policy that evicts the object with the lowest Gittins index: the expected number of uses per
/// unit of time that the object would still occupy memory.
///
/// A use puts an object into one of 46 classes, by the number of its uses, the time since the
/// previous one, and its chain. For each class the [`Learner`] finds how likely a use is at each
/// age. Within a class, only the longest and the shortest unused object can have the lowest index,
/// so an eviction compares at most two objects of each class.
///
/// An object that is the parent of others in memory is evicted only when all others are refused. An
/// object that comes back after its eviction is recognised by the hash of its key, and its uses
/// count on. Only [`insert_at`](MergeableOrder::insert_at) and
/// [`insert_hashed`](MergeableOrder::insert_hashed) can tell.
///
/// Slots that `allowed` refuses keep their position.
#[derive(Debug)]
pub struct Gittins {
    learner: Arc<Learner>,
    values: Arc<Values>,
    edition: u64,
    /// Rings of the classes, by last use, and a ring of parents that are set aside.
    rings: Rings<{ CLASSES + 1 }, RingEntry>,
    /// Origins of the slots.
    origins: Vec<Origin>,
    /// Classes whose rings hold a slot, as bits.
    occupied: u64,
    /// Largest number of a use of each class.
    latest: [u64; CLASSES],
    /// Slot that was last put into each class.
    last: [SlotId; CLASSES],
    ghosts: Ghosts,
    now: u64,
    /// Number of slots held, without the last victim.
    len: usize,
    /// Number of slots that the learner counts for this policy.
    reported: usize,
    /// Number of objects that fit into memory, as the learner counted last.
    held: u64,
    /// Last victim with its value. It stays in its ring until the next call that cannot take it
    /// back.
    victim: Option<(SlotId, u64)>,
    /// Slots that the eviction in progress has offered, and that may be met again.
    offered: Vec<SlotId>,
    /// Candidates of the eviction in progress.
    candidates: Vec<Candidate>,
    /// Uses that the learner does not know yet.
    waiting: Vec<Watch>,
}

/// Ring of the parents that are set aside.
const ASIDE: usize = CLASSES;

/// Number of parents at the young end of a class that an eviction passes over.
const YOUNG_PARENTS: usize = 4;

/// Number of refused slots at the young end of a class that an eviction passes over.
const YOUNG_REFUSED: usize = 64;

/// Maximum number of younger slots of a class that a use passes to get to its position.
const MAX_SORTED: usize = 256;

/// Added to the rank of a parent, so that it compares after all other objects.
const PARENT: u64 = 1 << 63;

/// Returns an integer that orders like a value, and like the last use among equal values. The
/// sign of a value is zero. The number of the use is cut off, so that one in four billion compares
/// wrongly.
fn rank_of(value: f32, used: u64) -> u64 {
    u64::from(value.to_bits()) << 32 | u64::from(used as u32)
}

/// The number of objects is reported when it has changed by this part.
const REPORT_PART: usize = 64;

/// State of a slot that each use reads and changes; meaningful while the slot is in a ring, and of
/// the last victim. A quarter of a cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(16))]
struct RingEntry {
    link: Link,
    /// Lower 48 bits of the number of the last use.
    used: [u16; 3],
    /// Class of the last use, and [`IS_PARENT`] and [`IS_ASIDE`].
    class: u8,
    /// Number of uses, saturating, and above it the number of zeros at the end of the fingerprint,
    /// saturating.
    uses_and_zeros: u8,
}

/// State of a slot that few uses need.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(16))]
struct Origin {
    /// Hash of the key of the parent, 0 for none.
    parent: u64,
    /// Fingerprint of the key, 0 if unknown.
    print: u32,
    /// Number of children in memory, saturating.
    children: u16,
}

/// Bit of [`RingEntry::class`] of a slot that has children in memory.
const IS_PARENT: u8 = 1 << 6;

/// Bit of [`RingEntry::class`] of a slot that is set aside.
const IS_ASIDE: u8 = 1 << 7;

const _: () = assert!(CLASSES <= IS_PARENT as usize);

/// Bits of [`RingEntry::used`].
const USED_BITS: u32 = 48;

/// Largest number of uses, and of zeros, in [`RingEntry::uses_and_zeros`].
const NIBBLE: u8 = (1 << 4) - 1;

impl Linked for RingEntry {
    const NONE: Self = Self { link: Link::NONE, used: [0; 3], class: 0, uses_and_zeros: 0 };

    fn link(&self) -> &Link {
        &self.link
    }

    fn link_mut(&mut self) -> &mut Link {
        &mut self.link
    }
}

impl RingEntry {
    fn class(self) -> u8 {
        self.class & !(IS_PARENT | IS_ASIDE)
    }

    fn is_parent(self) -> bool {
        self.class & IS_PARENT != 0
    }

    fn ring(self) -> usize {
        if self.class & IS_ASIDE == 0 { self.class().into() } else { ASIDE }
    }

    fn uses(self) -> u8 {
        self.uses_and_zeros & NIBBLE
    }

    fn zeros(self) -> u8 {
        self.uses_and_zeros >> 4
    }

    /// Returns the time since the last use. It is less than 2^48, and `now` not before the use.
    fn age(self, now: u64) -> u64 {
        let [low, middle, high] = self.used.map(u64::from);
        now.wrapping_sub(low | middle << 16 | high << 32) & ((1 << USED_BITS) - 1)
    }

    /// Returns the number of the last use.
    fn used(self, now: u64) -> u64 {
        now.wrapping_sub(self.age(now))
    }

    fn set_used(&mut self, number: u64) {
        self.used = [number as u16, (number >> 16) as u16, (number >> 32) as u16];
    }
}

/// Slot at one end of a class that an eviction may choose.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    slot: SlotId,
    class: u8,
    is_young: bool,
    is_accepted: bool,
    /// Value by which it compares.
    rank: f32,
    age: u64,
}

impl Candidate {
    /// Returns whether this candidate goes before another one. Of equal ones the older goes first.
    fn goes_before(&self, other: &Self) -> bool {
        self.rank < other.rank || (self.rank == other.rank && self.age > other.age)
    }
}

impl EvictionPolicy for Gittins {
    type Config = GittinsConfig;

    fn new(slots: usize, config: &GittinsConfig) -> Self {
        let learner = config.learner.clone().unwrap_or_default();
        Self {
            values: learner.values(),
            edition: 0,
            held: learner.held(),
            learner,
            rings: Rings::new(slots),
            origins: Vec::with_capacity(slots.min(MAX_HINT)),
            occupied: 0,
            latest: [0; CLASSES],
            last: [SlotId(0); CLASSES],
            ghosts: Ghosts::new(),
            now: 0,
            len: 0,
            reported: 0,
            victim: None,
            offered: Vec::new(),
            candidates: Vec::new(),
            waiting: Vec::new(),
        }
    }

    fn insert(&mut self, slot: SlotId, _bytes: u64) {
        let place = self.next_place();
        self.enter(slot, 0, &place);
    }

    fn touch(&mut self, slot: SlotId) {
        if self.holds(slot) {
            let place = self.next_place();
            self.renew(slot, &place);
        }
    }

    fn remove(&mut self, slot: SlotId) {
        if self.holds(slot) {
            self.unlink(slot);
            self.change_len(self.len - 1);
        }
    }

    fn evict(&mut self, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        self.settle_victim();
        self.learner.refresh(&mut self.values, &mut self.edition, self.now);
        self.held = self.learner.held();
        let slot = self.least(allowed).or_else(|| self.rings.oldest_of(ASIDE, allowed))?;
        self.victim = Some((slot, self.rank(slot)));
        self.change_len(self.len - 1);
        Some(slot)
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl MergeableOrder for Gittins {
    fn for_one_cache(config: &GittinsConfig) -> GittinsConfig {
        GittinsConfig { learner: Some(config.learner.clone().unwrap_or_default()) }
    }

    fn for_sample(_config: &GittinsConfig, sample: &Arc<KeySample>) -> GittinsConfig {
        GittinsConfig { learner: Some(Arc::new(Learner::of_sample(sample.clone()))) }
    }

    fn learned(config: &GittinsConfig) -> Option<Arc<dyn Learned>> {
        config.learner.clone().map(|learner| learner as Arc<dyn Learned>)
    }

    fn insert_hashed(&mut self, slot: SlotId, _bytes: u64, key_hash: u64) {
        let place = self.next_place();
        self.enter(slot, fingerprint(key_hash), &place);
    }

    fn insert_at(&mut self, slot: SlotId, _bytes: u64, key_hash: u64, place: &Place) {
        self.enter(slot, fingerprint(key_hash), place);
    }

    fn touch_at(&mut self, slot: SlotId, place: &Place) {
        if self.holds(slot) {
            self.renew(slot, place);
        }
    }

    fn remembers(&self, key_hash: u64) -> bool {
        let print = fingerprint(key_hash);
        self.is_victim_print(print) || self.ghosts.contains(print)
    }

    fn take_back(&mut self, slot: SlotId, bytes: u64, key_hash: u64) {
        if self.victim.take_if(|victim| victim.0 == slot).is_some() {
            self.change_len(self.len + 1);
        } else {
            self.insert_hashed(slot, bytes, key_hash);
        }
    }

    fn set_time(&mut self, now: u64) {
        self.now = self.now.max(now);
    }

    fn ranks_by_value(&self) -> bool {
        true
    }

    fn victim_value(&self) -> Option<u64> {
        self.victim.map(|(_, value)| value)
    }

    fn value(&self, slot: SlotId) -> Option<u64> {
        self.rings.contains(slot).then(|| self.rank(slot))
    }

    fn least_value_of_use(&self, place: &Place) -> u64 {
        let age = self.now.saturating_sub(place.number);
        if age < FRESH { rank_of(self.values.least_of_fresh(), 0) } else { 0 }
    }

    fn value_since(&self, used: u64) -> Option<u64> {
        let class = class(1, 0, 0, &Place::default());
        Some(rank_of(self.values.at(class, self.now.saturating_sub(used).into()), used))
    }

    fn value_if_used(&self, key_hash: u64, place: &Place) -> Option<u64> {
        let ghost = self.ghosts.get(fingerprint(key_hash), self.now);
        let gap = ghost.map_or(0, |ghost| place.number.saturating_sub(ghost.used));
        let uses = ghost.map_or(0, |ghost| ghost.uses).saturating_add(1);
        let class = class(uses, gap, self.held, place);
        let value = self.values.at(class, self.now.saturating_sub(place.number).into());
        // Below the rank of each object that is of equal value.
        Some(rank_of(value, 0))
    }

    fn parent(&self, slot: SlotId) -> u64 {
        if self.rings.contains(slot) { self.origins[slot.index()].parent } else { 0 }
    }

    fn change_children(&mut self, slot: SlotId, more: bool) {
        if !self.rings.contains(slot) {
            return;
        }
        let children = &mut self.origins[slot.index()].children;
        *children = if more { children.saturating_add(1) } else { children.saturating_sub(1) };
        let is_parent = *children > 0;
        let entry = &mut self.rings[slot];
        let (ring, class) = (entry.ring(), entry.class());
        entry.class = if is_parent { entry.class | IS_PARENT } else { entry.class & !IS_PARENT };
        if !is_parent && ring == ASIDE {
            entry.class = class;
            self.rings.unlink(ASIDE, slot);
            self.rings.push_oldest(class.into(), slot);
            self.occupied |= 1 << class;
        }
    }
}

impl Gittins {
    /// Returns the place of a use of which nothing else is known.
    fn next_place(&mut self) -> Place {
        self.now += 1;
        Place::numbered(self.now)
    }

    /// Returns whether a slot is held. The last victim is not.
    fn holds(&self, slot: SlotId) -> bool {
        self.rings.contains(slot) && self.victim.is_none_or(|(victim, _)| victim != slot)
    }

    fn is_victim_print(&self, print: u32) -> bool {
        self.victim.is_some_and(|(slot, _)| self.origins[slot.index()].print == print)
    }

    fn enter(&mut self, slot: SlotId, print: u32, place: &Place) {
        if self.holds(slot) {
            return self.renew(slot, place);
        }
        if self.rings.contains(slot) || (print != 0 && self.is_victim_print(print)) {
            self.settle_victim();
        }
        let ghost = if print == 0 { None } else { self.ghosts.take(print, self.now) };
        self.rings.reserve(slot);
        if slot.index() >= self.origins.len() {
            self.origins.resize(slot.index() + 1, Origin::default());
        }
        self.origins[slot.index()] = Origin { parent: place.parent, print, children: 0 };
        let zeros = if print == 0 { 0 } else { (print.trailing_zeros() as u8).min(NIBBLE) };
        let uses = ghost.map_or(0, |ghost| ghost.uses.min(NIBBLE));
        self.rings[slot] = RingEntry { uses_and_zeros: zeros << 4 | uses, ..RingEntry::NONE };
        self.now = self.now.max(place.number);
        self.push_young(slot, ghost.map_or(0, |ghost| place.number.saturating_sub(ghost.used)), place);
        self.change_len(self.len + 1);
    }

    /// Records a use of a slot that is held.
    fn renew(&mut self, slot: SlotId, place: &Place) {
        self.unlink(slot);
        self.now = self.now.max(place.number);
        let before = self.rings[slot].used(self.now);
        self.push_young(slot, place.number.saturating_sub(before), place);
    }

    /// Puts a slot at the young end of its class. `gap` is the time since its previous use.
    fn push_young(&mut self, slot: SlotId, gap: u64, place: &Place) {
        let entry = &mut self.rings[slot];
        let (uses, zeros) = ((entry.uses() + 1).min(NIBBLE), entry.zeros());
        let class = class(uses, gap, self.held, place);
        entry.set_used(place.number);
        entry.class = class | entry.class & IS_PARENT;
        entry.uses_and_zeros = zeros << 4 | uses;
        if self.learner.may_watch(zeros, NIBBLE) {
            self.watch(slot, place.number, class);
        }
        self.occupied |= 1 << class;
        let latest = &mut self.latest[usize::from(class)];
        if place.number >= *latest {
            *latest = place.number;
            self.rings.push(class.into(), slot);
        } else {
            self.push_sorted(class.into(), slot, place.number);
        }
        self.last[usize::from(class)] = slot;
    }

    /// Lets the learner know of a use, as soon as no other policy does so.
    fn watch(&mut self, slot: SlotId, number: u64, class: u8) {
        let print = self.origins[slot.index()].print;
        if print != 0 {
            self.waiting.push(Watch { print, class, number });
        }
        self.learner.record(&mut self.waiting);
    }

    /// Puts a slot at its position in a class that may hold younger ones: the keys of a batch may
    /// come in any order, and those of several threads, too.
    fn push_sorted(&mut self, class: usize, slot: SlotId, used: u64) {
        let is_newer = |slot: &SlotId| self.rings[*slot].used(self.now) > used;
        // Most often the keys of a batch come one after the other, the youngest first.
        let last = self.last[class];
        let is_here = self.rings.contains(last) && self.rings[last].ring() == class;
        let start = Some(last).filter(|last| is_here && is_newer(last));
        let young = std::iter::successors(start.or_else(|| self.rings.youngest(class)), |&slot| {
            self.rings.older(slot)
        });
        match young.take_while(is_newer).take(MAX_SORTED).last() {
            Some(newer) => self.rings.push_behind(class, slot, newer),
            None => self.rings.push(class, slot),
        }
    }

    fn unlink(&mut self, slot: SlotId) {
        let ring = self.rings[slot].ring();
        self.rings.unlink(ring, slot);
        if ring != ASIDE && self.rings.len(ring) == 0 {
            self.occupied &= !(1 << ring);
        }
    }

    /// Makes the last victim a ghost.
    fn settle_victim(&mut self) {
        let Some((slot, _)) = self.victim.take() else { return };
        self.unlink(slot);
        let (entry, print) = (self.rings[slot], self.origins[slot.index()].print);
        if print != 0 {
            let ghost = GhostEntry { used: entry.used(self.now), uses: entry.uses() };
            self.ghosts.remember(print, ghost, self.len, self.held, self.now);
        }
    }

    fn change_len(&mut self, len: usize) {
        self.len = len;
        if len.abs_diff(self.reported) * REPORT_PART > self.reported {
            self.learner.change_held(self.reported, len);
            self.reported = len;
            self.held = self.learner.held();
        }
    }

    fn value_of(&self, slot: SlotId) -> f32 {
        let entry = self.rings[slot];
        self.values.at(entry.class(), entry.age(self.now).into())
    }

    /// Returns the rank of a slot, parents last.
    fn rank(&self, slot: SlotId) -> u64 {
        let entry = self.rings[slot];
        let parent = if entry.is_parent() { PARENT } else { 0 };
        parent | rank_of(self.value_of(slot), entry.used(self.now))
    }

    fn candidate(&self, slot: SlotId, is_young: bool) -> Candidate {
        let (entry, value) = (self.rings[slot], self.value_of(slot));
        let rank = if is_young { value / YOUNG_MARGIN } else { value };
        Candidate { slot, class: entry.class(), is_young, is_accepted: false, rank, age: entry.age(self.now) }
    }

    /// Returns the slot with the least value that `allowed` accepts. Sets parents aside that are at
    /// the old end of a class.
    fn least(&mut self, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        self.offered.clear();
        // Most candidates that go first are accepted, so the others are not collected.
        loop {
            let mut first: Option<Candidate> = None;
            self.for_each_candidate(|candidate| {
                let before = *first.get_or_insert(candidate);
                if candidate.goes_before(&before) {
                    first = Some(candidate);
                }
                candidate.rank.min(before.rank)
            });
            let Candidate { slot, is_young, .. } = first?;
            if is_young {
                break;
            }
            if self.rings[slot].is_parent() {
                self.set_aside(slot);
            } else if allowed(slot) {
                return Some(slot);
            } else {
                self.offered.push(slot);
                break;
            }
        }
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.clear();
        self.for_each_candidate(|candidate| {
            candidates.push(candidate);
            f32::INFINITY
        });
        let found = self.least_of(&mut candidates, allowed);
        self.candidates = candidates;
        found
    }

    /// Passes each candidate to `see`, which returns the largest rank that is of interest.
    fn for_each_candidate(&self, mut see: impl FnMut(Candidate) -> f32) {
        let mut classes = self.occupied;
        while classes != 0 {
            let class = classes.trailing_zeros() as u8;
            classes &= classes - 1;
            let Some(slot) = self.rings.oldest(class.into()) else { continue };
            let age = self.rings[slot].age(self.now);
            let point = AgePoint::from(age);
            let rank = self.values.at(class, point);
            let limit = see(Candidate { slot, class, is_young: false, is_accepted: false, rank, age });
            if self.values.rises_before(class, point)
                && self.values.least_before(class, point) / YOUNG_MARGIN <= limit
                && let Some(young) = self.young(class.into(), slot)
            {
                see(self.candidate(young, true));
            }
        }
    }

    /// Sets a parent aside until its last child is gone.
    fn set_aside(&mut self, slot: SlotId) {
        self.unlink(slot);
        self.rings[slot].class |= IS_ASIDE;
        self.rings.push(ASIDE, slot);
    }

    /// Returns the candidate that goes first. Only candidates that would be first are offered.
    fn least_of(
        &mut self,
        candidates: &mut Vec<Candidate>,
        allowed: &mut dyn FnMut(SlotId) -> bool,
    ) -> Option<SlotId> {
        loop {
            let first = |one: usize, other: usize| {
                if candidates[other].goes_before(&candidates[one]) { other } else { one }
            };
            let at = (0..candidates.len()).reduce(first)?;
            let Candidate { slot, class, is_young, is_accepted, .. } = candidates[at];
            if is_accepted {
                return Some(slot);
            }
            let accepted = if is_young {
                // Those from there to the old end have been offered.
                let until = |other: &&Candidate| other.class == class && other.is_accepted;
                let until = candidates.iter().find(until).map(|other| other.slot);
                self.accept_young(slot, until, allowed)
            } else {
                self.accept_oldest(class.into(), allowed)
            };
            match accepted {
                Some(slot) => {
                    candidates[at] = Candidate { is_accepted: true, ..self.candidate(slot, is_young) };
                }
                None if is_young => drop(candidates.swap_remove(at)),
                // All of the class have been offered.
                None => candidates.retain(|other| other.class != class || other.is_accepted),
            }
        }
    }

    /// Returns the slot at the young end of a class, past some parents.
    fn young(&self, class: usize, oldest: SlotId) -> Option<SlotId> {
        let young = std::iter::successors(self.rings.youngest(class), |&slot| self.rings.older(slot));
        let mut young = young.take_while(|&slot| slot != oldest).take(YOUNG_PARENTS + 1);
        young.find(|slot| !self.rings[*slot].is_parent())
    }

    /// Returns the first slot from `slot` to before `until`, or to the old end, that is accepted,
    /// past some refused ones.
    fn accept_young(
        &mut self,
        slot: SlotId,
        until: Option<SlotId>,
        allowed: &mut dyn FnMut(SlotId) -> bool,
    ) -> Option<SlotId> {
        let mut next = Some(slot);
        for _ in 0..=YOUNG_REFUSED {
            let slot = next.filter(|slot| Some(*slot) != until)?;
            next = self.rings.older(slot);
            if !self.rings[slot].is_parent() && !self.offered.contains(&slot) {
                self.offered.push(slot);
                if allowed(slot) {
                    return Some(slot);
                }
            }
        }
        None
    }

    /// Returns the oldest slot of a class that is accepted.
    fn accept_oldest(&mut self, class: usize, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        let mut next = self.rings.oldest(class);
        while let Some(slot) = next {
            next = self.rings.newer(slot);
            if self.rings[slot].is_parent() {
                self.set_aside(slot);
            } else if !self.offered.contains(&slot) && allowed(slot) {
                return Some(slot);
            }
        }
        None
    }
}

impl Drop for Gittins {
    fn drop(&mut self) {
        self.learner.record(&mut self.waiting);
        self.learner.change_held(self.reported, 0);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::values::Counts;
    use super::*;

    const SLOTS: u32 = 24;

    /// A slot keeps 48 bits of the number of its last use.
    #[test]
    fn numbers_of_uses_may_exceed_what_a_slot_keeps() {
        let mut policy = Gittins::new(0, &GittinsConfig::default());
        let first = (1 << USED_BITS) - 4000;
        for slot in 0..8 {
            policy.insert_at(SlotId(slot), 1, slot.into(), &Place::numbered(first + u64::from(slot) * 1000));
        }
        // The number lies between those of the second and the third slot.
        policy.insert_at(SlotId(8), 1, 8, &Place::numbered(first + 1500));
        let victims = std::iter::from_fn(|| policy.evict(&mut |_| true));
        assert_eq!(victims.map(|slot| slot.0).collect::<Vec<_>>(), [0, 1, 8, 2, 3, 4, 5, 6, 7]);
    }

    /// Chooses among the oldest and the youngest slot of each class.
    fn by_brute_force(policy: &Gittins) -> Option<SlotId> {
        let held = || (0..SLOTS).map(SlotId).filter(|slot| policy.holds(*slot));
        let used = |slot: SlotId| policy.rings[slot].used(policy.now);
        let mut best: Option<(f32, u64, SlotId)> = None;
        for class in 0..CLASSES as u8 {
            let of_class = || held().filter(|slot| policy.rings[*slot].class() == class);
            let Some(oldest) = of_class().min_by_key(|slot| used(*slot)) else { continue };
            let youngest = of_class().max_by_key(|slot| used(*slot)).filter(|slot| *slot != oldest);
            let old = (policy.value_of(oldest), used(oldest), oldest);
            let young = youngest.map(|slot| (policy.value_of(slot) / YOUNG_MARGIN, used(slot), slot));
            for candidate in [Some(old), young].into_iter().flatten() {
                let is_less = |best: (f32, u64, SlotId)| {
                    candidate.0 < best.0 || (candidate.0 == best.0 && candidate.1 < best.1)
                };
                if best.is_none_or(is_less) {
                    best = Some(candidate);
                }
            }
        }
        best.map(|(_, _, slot)| slot)
    }

    proptest! {
        #[test]
        #[cfg_attr(miri, ignore = "numbers only, and slow")]
        fn the_victim_has_the_least_value(
            counts in proptest::collection::vec((0u32..1000, 0u32..3000), CLASSES * 8),
            steps in proptest::collection::vec(
                (0..SLOTS, 1..200u64, 1..500u64, 0..200u32, any::<bool>(), 0..3u8), 1..300),
        ) {
            let mut classes = [Counts::ZERO; CLASSES];
            for (at, (reused, reached)) in counts.into_iter().enumerate() {
                classes[at / 8].reused[at % 8] = reused as f32;
                classes[at / 8].reached[at % 8] = reached as f32;
            }
            let mut policy = Gittins::new(0, &GittinsConfig::default());
            policy.values = Arc::new(Values::compute(&classes));
            let mut number = 0;
            for (slot, key, pause, fresh, goes_on, kind) in steps {
                number += pause;
                let place = Place { number, parent: 0, fresh, goes_on };
                match kind {
                    0 => {
                        policy.set_time(number);
                        let expected = by_brute_force(&policy);
                        prop_assert_eq!(policy.least(&mut |_| true), expected);
                        if let Some(victim) = expected {
                            policy.remove(victim);
                        }
                    }
                    1 => policy.touch_at(SlotId(slot), &place),
                    _ => policy.insert_at(SlotId(slot), 1, key, &place),
                }
                if policy.holds(SlotId(slot)) && policy.rings[SlotId(slot)].used(number) == number {
                    prop_assert!(policy.value(SlotId(slot)) >= Some(policy.least_value_of_use(&place)));
                }
            }
        }

        /// The keys of several batches are used in turn, each batch from its first key to its last.
        #[test]
        #[cfg_attr(miri, ignore = "numbers only, and slow")]
        fn each_class_is_in_the_order_of_its_uses(
            steps in proptest::collection::vec((0..SLOTS, 0..3u64, 0..4u32, 0..8u8), 1..400),
        ) {
            let mut policy = Gittins::new(0, &GittinsConfig::default());
            let (mut end, mut next) = (0, [0; 3]);
            for (slot, batch, fresh, kind) in steps {
                let number = &mut next[batch as usize];
                if *number % 16 == 0 {
                    end += 16;
                    *number = end + 15;
                } else {
                    *number -= 1;
                }
                let place = Place { fresh, ..Place::numbered(*number) };
                match kind {
                    0 => policy.remove(SlotId(slot)),
                    1..4 => policy.touch_at(SlotId(slot), &place),
                    _ => policy.insert_at(SlotId(slot), 1, slot.into(), &place),
                }
                for class in 0..CLASSES {
                    let oldest = policy.rings.oldest(class);
                    let all = std::iter::successors(oldest, |&slot| policy.rings.newer(slot));
                    let used: Vec<_> = all.map(|slot| policy.rings[slot].used(policy.now)).collect();
                    prop_assert!(used.is_sorted(), "{used:?}");
                }
            }
        }
    }
}
