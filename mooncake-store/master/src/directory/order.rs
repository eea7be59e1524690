//! What goes first: the objects of a shard as eviction sees them.
//!
//! Objects that are soft-pinned are kept apart from those that a policy orders, by their last use: however many there are, nobody
//! who looks for an ordinary one passes over them.

use std::collections::BTreeSet;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::ids::SlotId;

use super::{Object, Shard};
use crate::evict::Pass;

/// Pinned objects that are looked at, and pins whose end is noticed, under one lock.
const AT_ONCE: usize = 1024;

/// Where an object with a value is among those that may go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Seat {
    /// Nowhere: it has no value, or is pinned for ever.
    #[default]
    None,
    /// Where its pool's policy says.
    Policy,
    /// Among the soft-pinned ones.
    Pinned,
    /// Its pin is over, or it is from before this master's time, and it has not been used since.
    Over,
}

/// The objects of one tenant in a shard among which eviction chooses.
pub(super) struct Pool<E> {
    policy: E,
    /// What the policy would evict next, and since when: taken out of it so that it can be compared with what others would.
    next: Option<(SlotId, u64)>,
    pinned: ByUse,
    over: ByUse,
}

impl<E: EvictionPolicy> Pool<E> {
    pub(super) fn new(config: &E::Config) -> Self {
        Self { policy: E::new(0, config), next: None, pinned: ByUse::default(), over: ByUse::default() }
    }

    fn is_next(&self, slot: SlotId) -> bool {
        self.next.is_some_and(|(next, _)| next == slot)
    }
}

/// Objects by their last use.
struct ByUse {
    slots: BTreeSet<(u64, SlotId)>,
    /// Those before were refused when there were too many to look at under one lock.
    from: (u64, SlotId),
}

impl Default for ByUse {
    fn default() -> Self {
        Self { slots: BTreeSet::new(), from: (0, SlotId(0)) }
    }
}

impl ByUse {
    /// The one that was not used for the longest of those allowed; none is taken out.
    fn oldest(&mut self, mut allowed: impl FnMut(SlotId) -> bool) -> Option<(SlotId, u64)> {
        for (looked_at, &(used, slot)) in self.slots.range(self.from..).enumerate() {
            if looked_at == AT_ONCE {
                self.from = (used, slot);
                return None;
            }
            if allowed(slot) {
                return Some((slot, used));
            }
        }
        self.from = (0, SlotId(0));
        None
    }
}

impl<A: SegmentAllocator, E: EvictionPolicy> Shard<A, E> {
    /// The object was used, as number `use_number` of all uses.
    pub(crate) fn touch(&mut self, slot: SlotId, use_number: u64) {
        if !self.own.policy.heeds_use() {
            return;
        }
        let object = &mut self.objects[slot];
        let before = std::mem::replace(&mut object.used, use_number);
        let (tenant, seat) = (object.tenant, object.seat);
        let pool = self.pool(tenant);
        match seat {
            Seat::None => {}
            Seat::Policy => {
                pool.policy.set_time(use_number);
                if pool.is_next(slot) {
                    self.put_back(tenant);
                } else {
                    pool.policy.touch(slot);
                }
            }
            Seat::Pinned => {
                pool.pinned.slots.remove(&(before, slot));
                pool.pinned.slots.insert((use_number, slot));
            }
            // As new as any now.
            Seat::Over => {
                pool.over.slots.remove(&(before, slot));
                self.give_to_policy(slot);
            }
        }
    }

    /// The slot has a value from now on; its pins are as they shall be.
    pub(super) fn enter(&mut self, slot: SlotId) {
        let object = &mut self.objects[slot];
        let (tenant, used) = (object.tenant, object.used);
        if object.soft_pin != Moment(0) {
            self.pins.insert((object.soft_pin, slot));
        }
        // The policy would pass over what is pinned for ever at every eviction.
        if object.hard_pin {
            object.seat = Seat::None;
        } else if object.soft_pin != Moment(0) {
            object.seat = Seat::Pinned;
            self.pool(tenant).pinned.slots.insert((used, slot));
        } else {
            self.give_to_policy(slot);
        }
    }

    /// An object that has a value was last used before all that is here: then, by its number.
    pub(crate) fn recall_use(&mut self, slot: SlotId, used: u64) {
        self.leave(slot);
        self.objects[slot].used = used;
        if self.objects[slot].hard_pin || self.objects[slot].soft_pin != Moment(0) {
            return self.enter(slot);
        }
        // A policy takes what is as new as any. Where those are whose pin is over, each has its own time.
        let object = &mut self.objects[slot];
        object.seat = Seat::Over;
        let tenant = object.tenant;
        self.pool(tenant).over.slots.insert((used, slot));
    }

    fn give_to_policy(&mut self, slot: SlotId) {
        let object = &mut self.objects[slot];
        object.seat = Seat::Policy;
        let (tenant, used, hash) = (object.tenant, object.used, object.hash);
        let len = object.value.as_ref().map_or(0, |value| value.len);
        let policy = &mut self.pool(tenant).policy;
        policy.set_time(used);
        policy.insert_hashed(slot, len, hash);
    }

    /// The slot's value has gone, or is about to enter anew.
    pub(super) fn leave(&mut self, slot: SlotId) {
        let object = &mut self.objects[slot];
        let (tenant, used) = (object.tenant, object.used);
        let seat = std::mem::take(&mut object.seat);
        self.pins.remove(&(object.soft_pin, slot));
        let pool = self.pool(tenant);
        match seat {
            Seat::None => {}
            Seat::Policy if pool.is_next(slot) => pool.next = None,
            Seat::Policy => pool.policy.remove(slot),
            Seat::Pinned => {
                pool.pinned.slots.remove(&(used, slot));
            }
            Seat::Over => {
                pool.over.slots.remove(&(used, slot));
            }
        }
    }

    /// Soft-pins an object until then; zero ends it.
    pub(crate) fn set_soft_pin(&mut self, slot: SlotId, until: Moment) {
        let there = self.objects[slot].value.is_some();
        if there {
            self.leave(slot);
        }
        self.objects[slot].soft_pin = until;
        if there {
            self.enter(slot);
        }
    }

    /// Objects that are soft-pinned now.
    pub(crate) fn soft_pinned(&self, now: Moment) -> usize {
        self.pins.iter().rev().take_while(|(until, _)| *until > now).count()
    }

    /// Lets go of some of those whose soft pin is over.
    fn unpin(&mut self, now: Moment) {
        for _ in 0..AT_ONCE {
            let Some(&(_, slot)) = self.pins.first().filter(|(until, _)| *until <= now) else { return };
            self.pins.pop_first();
            let object = &mut self.objects[slot];
            object.soft_pin = Moment(0);
            if object.seat == Seat::Pinned {
                object.seat = Seat::Over;
                let (tenant, used) = (object.tenant, object.used);
                let pool = self.pool(tenant);
                pool.pinned.slots.remove(&(used, slot));
                pool.over.slots.insert((used, slot));
            }
        }
    }

    fn pool(&mut self, tenant: u32) -> &mut Pool<E> {
        let Some(at) = (tenant as usize).checked_sub(1) else { return &mut self.own };
        while self.others.len() <= at {
            self.others.push(Pool::new(&self.config));
        }
        &mut self.others[at]
    }

    /// Gives what would have gone next back to the policy.
    fn put_back(&mut self, tenant: u32) {
        if let Some((slot, _)) = self.pool(tenant).next.take() {
            let object = &self.objects[slot];
            let (len, hash) = (object.value.as_ref().map_or(0, |value| value.len), object.hash);
            self.pool(tenant).policy.insert_hashed(slot, len, hash);
        }
    }

    /// Chooses what to evict next, if anything may go, and says when it was last used.
    pub(crate) fn choose(
        &mut self,
        pass: Pass,
        now: Moment,
        mut allowed: impl FnMut(&Object<A>) -> bool,
    ) -> Option<u64> {
        let mut best: Option<(SlotId, u64)> = None;
        for tenant in 0..=self.others.len() as u32 {
            if let Some((slot, used)) = self.choose_of(tenant, pass, now, &mut allowed)
                && best.is_none_or(|(_, least)| used < least)
            {
                best = Some((slot, used));
            }
        }
        self.chosen = best.map(|(slot, _)| slot);
        best.map(|(_, used)| used)
    }

    /// As [`Shard::choose`] among the objects of a tenant: the object, and when it was last used.
    pub(crate) fn choose_of(
        &mut self,
        tenant: u32,
        pass: Pass,
        now: Moment,
        mut allowed: impl FnMut(&Object<A>) -> bool,
    ) -> Option<(SlotId, u64)> {
        self.unpin(now);
        let next = self.pool(tenant).next;
        if next.is_some_and(|(slot, _)| !allowed(&self.objects[slot])) {
            self.put_back(tenant);
        }
        let objects = &self.objects;
        let pool = if tenant == 0 { &mut self.own } else { self.others.get_mut(tenant as usize - 1)? };
        let mut may_go = |slot: SlotId| objects.get(slot).is_some_and(&mut allowed);
        if pool.next.is_none() {
            let victim = pool.policy.evict(&mut may_go);
            let since = pool.policy.victim_since();
            pool.next = victim.map(|slot| (slot, since.unwrap_or(objects[slot].used)));
        }
        let over = pool.over.oldest(&mut may_go);
        let ordinary = [pool.next, over].into_iter().flatten().min_by_key(|(_, used)| *used);
        match pass {
            Pass::SoftPinned if ordinary.is_none() => pool.pinned.oldest(may_go),
            _ => ordinary,
        }
    }

    /// What was chosen last.
    pub(crate) fn chosen(&mut self) -> Option<SlotId> {
        self.chosen.take()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mooncake_core::alloc::BuiltinAllocator;
    use mooncake_core::evict::{BuiltinPolicy, PolicyKind};
    use mooncake_core::ids::{ClientId, ObjectKey};

    use super::super::{Replicas, Value};
    use super::*;
    use crate::groups::Groups;
    use crate::inventory::Stamp;
    use crate::tenants::Tenants;

    type Tried = Shard<BuiltinAllocator, BuiltinPolicy>;

    fn shard() -> Tried {
        let (tenants, groups) = (Arc::new(Tenants::new(None)), Arc::new(Groups::new(1)));
        Shard::new(&PolicyKind::Lru.into(), tenants, groups)
    }

    /// An object that is used for the first time as number `number` of all uses.
    fn put(shard: &mut Tried, number: u64, pinned: Moment) -> SlotId {
        let slot = shard.add(number, ObjectKey::new(number.to_le_bytes()).unwrap(), 0);
        shard.set_soft_pin(slot, pinned);
        let writer = ClientId::default().into();
        let stamp = Stamp { epoch: 0, number };
        let replicas = Replicas::new();
        let value = Value { len: 1, checksum: None, writer, followed: false, stamp, replicas };
        shard.put_value(slot, value, number);
        slot
    }

    /// What goes next, and how many objects were looked at for it.
    fn next(shard: &mut Tried, pass: Pass, now: u64, allowed: impl Fn(u64) -> bool) -> (Option<u64>, usize) {
        let mut looked_at = 0;
        let found = shard.choose(pass, Moment(now), |object| {
            looked_at += 1;
            allowed(object.used)
        });
        (found, looked_at)
    }

    const PINNED: u64 = 50_000;

    #[test]
    fn nobody_passes_over_soft_pins() {
        let mut shard = shard();
        for number in 1..=PINNED {
            put(&mut shard, number, Moment(100));
        }
        assert_eq!(shard.soft_pinned(Moment(99)), PINNED as usize);
        assert_eq!(next(&mut shard, Pass::Ordinary, 0, |_| true), (None, 0));
        let plain = put(&mut shard, PINNED + 1, Moment(0));
        assert_eq!(next(&mut shard, Pass::Ordinary, 0, |_| true), (Some(PINNED + 1), 1));
        assert_eq!(
            next(&mut shard, Pass::SoftPinned, 0, |_| true).0,
            Some(PINNED + 1),
            "before those that are pinned"
        );
        assert_eq!(shard.chosen(), Some(plain));
        shard.take_value(plain);
        assert_eq!(
            next(&mut shard, Pass::SoftPinned, 0, |_| true),
            (Some(1), 1),
            "the one that was not used for the longest"
        );
    }

    #[test]
    fn those_that_are_refused_are_looked_at_a_part_at_a_time() {
        let mut shard = shard();
        for number in 1..=PINNED {
            put(&mut shard, number, Moment(100));
        }
        let only_last = |used| used == PINNED;
        let mut rounds = 0;
        loop {
            let (found, looked_at) = next(&mut shard, Pass::SoftPinned, 0, only_last);
            assert!(looked_at <= AT_ONCE, "{looked_at}");
            rounds += 1;
            if found == Some(PINNED) {
                break;
            }
            assert!(rounds < PINNED as usize / AT_ONCE + 2);
        }
        // From the front again, once the end was seen.
        assert_eq!(next(&mut shard, Pass::SoftPinned, 0, |_| false).0, None);
        assert_eq!(next(&mut shard, Pass::SoftPinned, 0, |_| true).0, Some(1));
    }

    #[test]
    fn a_pin_that_is_over_leaves_an_object_where_its_use_puts_it() {
        let mut shard = shard();
        let [first, second, third] =
            [(1, 7), (2, 0), (3, 9)].map(|(number, pin)| put(&mut shard, number, Moment(pin)));
        assert_eq!(next(&mut shard, Pass::Ordinary, 6, |_| true).0, Some(2));
        assert_eq!(next(&mut shard, Pass::Ordinary, 7, |_| true).0, Some(1));
        assert_eq!((shard.soft_pinned(Moment(7)), shard[first].soft_pin()), (1, Moment(0)));
        shard.touch(first, 4);
        assert_eq!(next(&mut shard, Pass::Ordinary, 7, |_| true).0, Some(2));
        shard.touch(third, 5);
        shard.touch(second, 6);
        assert_eq!(next(&mut shard, Pass::Ordinary, 9, |_| true).0, Some(4));
        // Pinned again, and for ever, and neither.
        shard.set_soft_pin(first, Moment(20));
        assert_eq!(next(&mut shard, Pass::Ordinary, 9, |_| true).0, Some(5));
        for slot in [first, second, third] {
            shard.take_value(slot);
            shard.settle(slot);
        }
        assert_eq!(next(&mut shard, Pass::SoftPinned, 99, |_| true), (None, 0));
        assert!(shard.pins.is_empty() && shard.len() == 0);
    }
}
