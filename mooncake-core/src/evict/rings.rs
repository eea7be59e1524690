//! Rings of slots, linked by index. No operation allocates once the table has grown to the highest
//! slot.

use crate::ids::SlotId;

/// Value of `newer` in a slot that is in no ring.
const ABSENT: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Link {
    newer: u32,
    older: u32,
}

/// `N` rings over one table of slots. A slot is in at most one of them. The first `N` entries are
/// the ends of the rings, so that no link needs a test for "none".
#[derive(Debug)]
pub(super) struct Rings<const N: usize> {
    links: Vec<Link>,
    lens: [usize; N],
}

/// Largest hint for which memory is reserved up front.
pub(super) const MAX_HINT: usize = 1 << 16;

impl<const N: usize> Rings<N> {
    pub(super) fn new(slots: usize) -> Self {
        let mut links = Vec::with_capacity(slots.min(MAX_HINT) + N);
        links.extend((0..N as u32).map(|end| Link { newer: end, older: end }));
        Self { links, lens: [0; N] }
    }

    /// Returns the number of slots in a ring.
    pub(super) fn len(&self, ring: usize) -> usize {
        self.lens[ring]
    }

    pub(super) fn contains(&self, slot: SlotId) -> bool {
        self.links.get(slot.index() + N).is_some_and(|link| link.newer != ABSENT)
    }

    /// Puts a slot that is in no ring at the new end of one.
    pub(super) fn push(&mut self, ring: usize, slot: SlotId) {
        let at = self.reserve(slot);
        let second = std::mem::replace(&mut self.links[ring].older, at as u32);
        self.links[second as usize].newer = at as u32;
        self.links[at] = Link { newer: ring as u32, older: second };
        self.lens[ring] += 1;
    }

    /// Puts a slot that is in no ring at the old end of one.
    pub(super) fn push_oldest(&mut self, ring: usize, slot: SlotId) {
        let at = self.reserve(slot);
        let second = std::mem::replace(&mut self.links[ring].newer, at as u32);
        self.links[second as usize].older = at as u32;
        self.links[at] = Link { newer: second, older: ring as u32 };
        self.lens[ring] += 1;
    }

    /// Puts a slot that is in no ring behind one that is: as the next older one.
    pub(super) fn push_behind(&mut self, ring: usize, slot: SlotId, newer: SlotId) {
        let (at, newer) = (self.reserve(slot), newer.index() + N);
        let older = std::mem::replace(&mut self.links[newer].older, at as u32);
        self.links[older as usize].newer = at as u32;
        self.links[at] = Link { newer: newer as u32, older };
        self.lens[ring] += 1;
    }

    /// Returns the index of the link of a slot.
    fn reserve(&mut self, slot: SlotId) -> usize {
        let at = slot.index() + N;
        assert!(
            at < ABSENT as usize,
            "cannot insert slot: number exceeds the limit of a policy. slot={slot:?}"
        );
        if at >= self.links.len() {
            self.links.resize(at + 1, Link { newer: ABSENT, older: ABSENT });
        }
        at
    }

    /// Removes a slot from `ring`. The slot must be in it.
    pub(super) fn unlink(&mut self, ring: usize, slot: SlotId) {
        let Link { newer, older } = self.links[slot.index() + N];
        self.links[newer as usize].older = older;
        self.links[older as usize].newer = newer;
        self.links[slot.index() + N].newer = ABSENT;
        self.lens[ring] -= 1;
    }

    /// Returns the slot that has been in `ring` for longest.
    pub(super) fn oldest(&self, ring: usize) -> Option<SlotId> {
        self.slot(self.links[ring].newer)
    }

    /// Returns the slot that has been in `ring` for the shortest time.
    pub(super) fn youngest(&self, ring: usize) -> Option<SlotId> {
        self.slot(self.links[ring].older)
    }

    /// Returns the next younger slot in the same ring.
    pub(super) fn newer(&self, slot: SlotId) -> Option<SlotId> {
        self.slot(self.links[slot.index() + N].newer)
    }

    /// Returns the next older slot in the same ring.
    pub(super) fn older(&self, slot: SlotId) -> Option<SlotId> {
        self.slot(self.links[slot.index() + N].older)
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

    fn slot(&self, link: u32) -> Option<SlotId> {
        (link >= N as u32).then(|| SlotId(link - N as u32))
    }
}
