//! Rings of slots, linked by index. No operation allocates once the table has grown to the highest
//! slot.

use std::ops::{Index, IndexMut};

use crate::ids::SlotId;

/// Value of `newer` in a slot that is in no ring.
const ABSENT: u32 = u32::MAX;

/// Neighbours of a slot in its ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    newer: u32,
    older: u32,
}

impl Link {
    /// Link of a slot that is in no ring.
    pub(super) const NONE: Self = Self { newer: ABSENT, older: ABSENT };
}

/// State of a slot together with its link. A policy that has a state for each slot keeps both on
/// one cache line.
pub(super) trait Linked: Copy {
    /// State of a slot that is in no ring.
    const NONE: Self;

    fn link(&self) -> &Link;

    fn link_mut(&mut self) -> &mut Link;
}

impl Linked for Link {
    const NONE: Self = Link::NONE;

    fn link(&self) -> &Link {
        self
    }

    fn link_mut(&mut self) -> &mut Link {
        self
    }
}

/// `N` rings over one table of slots. A slot is in at most one of them. The first `N` entries are
/// the ends of the rings, so that no link needs a test for "none".
#[derive(Debug)]
pub(super) struct Rings<const N: usize, T = Link> {
    slots: Vec<T>,
    lens: [usize; N],
}

/// Largest hint for which memory is reserved up front.
pub(super) const MAX_HINT: usize = 1 << 16;

impl<const N: usize, T: Linked> Rings<N, T> {
    pub(super) fn new(slots: usize) -> Self {
        let mut rings = Self { slots: Vec::with_capacity(slots.min(MAX_HINT) + N), lens: [0; N] };
        rings.slots.resize(N, T::NONE);
        (0..N as u32).for_each(|end| *rings.link(end) = Link { newer: end, older: end });
        rings
    }

    /// Returns the number of slots in a ring.
    pub(super) fn len(&self, ring: usize) -> usize {
        self.lens[ring]
    }

    pub(super) fn contains(&self, slot: SlotId) -> bool {
        self.slots.get(slot.index() + N).is_some_and(|state| state.link().newer != ABSENT)
    }

    /// Puts a slot that is in no ring at the new end of one.
    pub(super) fn push(&mut self, ring: usize, slot: SlotId) {
        let at = self.reserve(slot);
        let second = std::mem::replace(&mut self.link(ring as u32).older, at);
        self.link(second).newer = at;
        *self.link(at) = Link { newer: ring as u32, older: second };
        self.lens[ring] += 1;
    }

    /// Puts a slot that is in no ring at the old end of one.
    pub(super) fn push_oldest(&mut self, ring: usize, slot: SlotId) {
        let at = self.reserve(slot);
        let second = std::mem::replace(&mut self.link(ring as u32).newer, at);
        self.link(second).older = at;
        *self.link(at) = Link { newer: second, older: ring as u32 };
        self.lens[ring] += 1;
    }

    /// Puts a slot that is in no ring behind one that is: as the next older one.
    pub(super) fn push_behind(&mut self, ring: usize, slot: SlotId, newer: SlotId) {
        let (at, newer) = (self.reserve(slot), newer.0 + N as u32);
        let older = std::mem::replace(&mut self.link(newer).older, at);
        self.link(older).newer = at;
        *self.link(at) = Link { newer, older };
        self.lens[ring] += 1;
    }

    /// Returns the number of the link of a slot, for which there is a state from now on.
    pub(super) fn reserve(&mut self, slot: SlotId) -> u32 {
        let at = slot.index() + N;
        assert!(
            at < ABSENT as usize,
            "cannot insert slot: number exceeds the limit of a policy. slot={slot:?}"
        );
        if at >= self.slots.len() {
            self.slots.resize(at + 1, T::NONE);
        }
        at as u32
    }

    /// Removes a slot from `ring`. The slot must be in it.
    pub(super) fn unlink(&mut self, ring: usize, slot: SlotId) {
        let link = self.link(slot.0 + N as u32);
        let Link { newer, older } = std::mem::replace(link, Link::NONE);
        self.link(newer).older = older;
        self.link(older).newer = newer;
        self.lens[ring] -= 1;
    }

    /// Returns the slot that has been in `ring` for longest.
    pub(super) fn oldest(&self, ring: usize) -> Option<SlotId> {
        self.slot(self.slots[ring].link().newer)
    }

    /// Returns the slot that has been in `ring` for the shortest time.
    pub(super) fn youngest(&self, ring: usize) -> Option<SlotId> {
        self.slot(self.slots[ring].link().older)
    }

    /// Returns the next younger slot in the same ring.
    pub(super) fn newer(&self, slot: SlotId) -> Option<SlotId> {
        self.slot(self[slot].link().newer)
    }

    /// Returns the next older slot in the same ring.
    pub(super) fn older(&self, slot: SlotId) -> Option<SlotId> {
        self.slot(self[slot].link().older)
    }

    /// Moves a slot to the new end of its ring.
    pub(super) fn renew(&mut self, ring: usize, slot: SlotId) {
        self.unlink(ring, slot);
        self.push(ring, slot);
    }

    /// Returns the oldest slot of `ring` that `allowed` agrees to.
    pub(super) fn oldest_of(&self, ring: usize, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        let first = self.oldest(ring)?;
        std::iter::successors(Some(first), |&slot| self.newer(slot)).find(|&slot| allowed(slot))
    }

    /// Removes the oldest slot of `ring` that `allowed` agrees to.
    pub(super) fn take_oldest(
        &mut self,
        ring: usize,
        allowed: &mut dyn FnMut(SlotId) -> bool,
    ) -> Option<SlotId> {
        let victim = self.oldest_of(ring, allowed)?;
        self.unlink(ring, victim);
        Some(victim)
    }

    fn link(&mut self, at: u32) -> &mut Link {
        self.slots[at as usize].link_mut()
    }

    fn slot(&self, link: u32) -> Option<SlotId> {
        (link >= N as u32).then(|| SlotId(link - N as u32))
    }
}

/// State of a slot that is or was in a ring, or was [reserved](Rings::reserve).
impl<const N: usize, T> Index<SlotId> for Rings<N, T> {
    type Output = T;

    fn index(&self, slot: SlotId) -> &T {
        &self.slots[slot.index() + N]
    }
}

impl<const N: usize, T> IndexMut<SlotId> for Rings<N, T> {
    fn index_mut(&mut self, slot: SlotId) -> &mut T {
        &mut self.slots[slot.index() + N]
    }
}
