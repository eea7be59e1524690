//! Order of eviction in one shard.
//!
//! Soft-pinned objects are kept apart from those that a policy orders, and sorted by their last
//! use. A search for an ordinary object thus never skips over them, however many there are.
//!
//! A group goes as one, and its value is the largest of its objects. So under a policy that ranks
//! by value, an object that comes up as the next victim waits instead, unless all others of its
//! group wait already: the last object that comes up is the one with the largest value. The policy
//! sets waiting objects aside, like parents. A use ends the wait.

use std::collections::BTreeSet;
use std::sync::Arc;

use mooncake_core::clock::Moment;
use mooncake_core::evict::{MergeableOrder, Place};
use mooncake_core::ids::SlotId;

use super::object::{Object, OrderPosition};
use super::slots::Slots;
use crate::model::group::Group;

/// Maximum number of pinned objects that are examined, and of ended pins that are processed, under
/// one lock.
pub(super) const AT_ONCE: usize = 1024;

/// Maximum number of parents of removed objects, and of idle groups, that a shard remembers.
const MAX_LEFT: usize = 1 << 16;

/// Number of parents of removed objects that one eviction goes through.
const LEFT_AT_ONCE: usize = 64;

/// Objects that an eviction may choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// Objects without a pin.
    Ordinary,
    /// Objects without a pin, also those with a lease that only look-ups extended.
    LookedUp,
    /// Objects without a pin, and soft-pinned ones.
    SoftPinned,
    /// Objects of all kinds that an eviction may ever choose.
    Any,
}

impl Pass {
    /// Returns whether the eviction may choose soft-pinned objects.
    pub(crate) fn takes_soft_pinned(self) -> bool {
        matches!(self, Self::SoftPinned | Self::Any)
    }

    /// Returns whether the lease of a look-up yields to the eviction.
    pub(crate) fn takes_looked_up(self) -> bool {
        matches!(self, Self::LookedUp | Self::Any)
    }
}

/// Order of the objects of one tenant in a shard.
pub(crate) struct TenantOrder<E> {
    policy: E,
    /// Next victim of the policy, with the time or value by which it compares with other victims.
    /// The victim is outside of the policy during the comparison.
    next: Option<(SlotId, u64)>,
    pinned: UseOrder,
    unpinned: UseOrder,
}

impl<E: MergeableOrder> TenantOrder<E> {
    pub(crate) fn new(config: &E::Config) -> Self {
        Self {
            policy: E::new(0, config),
            next: None,
            pinned: UseOrder::default(),
            unpinned: UseOrder::default(),
        }
    }

    fn is_next(&self, slot: SlotId) -> bool {
        self.next.is_some_and(|(next, _)| next == slot)
    }
}

/// Objects sorted by their last use.
struct UseOrder {
    slots: BTreeSet<(u64, SlotId)>,
    /// First object of the next search. Those before it were refused when there were too many to
    /// examine under one lock.
    from: (u64, SlotId),
}

impl Default for UseOrder {
    fn default() -> Self {
        Self { slots: BTreeSet::new(), from: (0, SlotId(0)) }
    }
}

impl UseOrder {
    /// Returns the least recently used object that `allowed` accepts, and keeps it in the list.
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

/// Order in which the objects of a shard are evicted.
///
/// A slot is in exactly one list of the order of its tenant while its object has a value that is
/// not hard-pinned.
pub(crate) struct EvictionOrder<E: MergeableOrder> {
    config: E::Config,
    /// Objects without a tenant.
    own: TenantOrder<E>,
    /// Objects of tenants, by the number of the tenant less one.
    others: Vec<TenantOrder<E>>,
    /// Soft-pinned objects that have a value, by the end of the pin.
    pins: BTreeSet<(Moment, SlotId)>,
    /// Victim that [`choose`](Self::choose) found last.
    chosen: Option<SlotId>,
    /// True if victims compare by value.
    ranks_by_value: bool,
    /// Number of the latest use of any object.
    time: u64,
    /// Hashes of the parents that have lost a child.
    left: Vec<u64>,
    /// Groups whose objects all wait, because another one has left.
    idle: Vec<Arc<Group>>,
}

impl<E: MergeableOrder> EvictionOrder<E> {
    pub(crate) fn new(config: &E::Config) -> Self {
        let own = TenantOrder::<E>::new(config);
        Self {
            config: config.clone(),
            ranks_by_value: own.policy.ranks_by_value(),
            own,
            others: Vec::new(),
            pins: BTreeSet::new(),
            chosen: None,
            time: 0,
            left: Vec::new(),
            idle: Vec::new(),
        }
    }

    /// Returns whether victims compare by value and not by time.
    pub(crate) fn ranks_by_value(&self) -> bool {
        self.ranks_by_value
    }

    /// Sets the number of the latest use of any object.
    pub(crate) fn set_time(&mut self, use_number: u64) {
        self.time = use_number;
    }

    /// Records a use of an object.
    pub(crate) fn touch<A>(&mut self, objects: &mut Slots<Object<A>>, slot: SlotId, place: &Place) {
        if !self.own.policy.heeds_use() {
            return;
        }
        let (use_number, by_value) = (place.number, self.ranks_by_value);
        // A waiting object may be the next victim, like others.
        self.end_wait(objects, slot);
        let object = &mut objects[slot];
        let before = std::mem::replace(&mut object.used, use_number);
        let (tenant, position) = (object.tenant, object.position);
        let order = self.tenant(tenant);
        match position {
            OrderPosition::None => {}
            OrderPosition::Policy if order.is_next(slot) => {
                order.policy.set_time(use_number);
                self.put_back(objects, tenant);
                // Without values, the return to the policy is the use.
                if by_value {
                    self.tenant(tenant).policy.touch_at(slot, place);
                }
            }
            OrderPosition::Policy | OrderPosition::Waiting => order.policy.touch_at(slot, place),
            OrderPosition::Pinned => {
                order.pinned.slots.remove(&(before, slot));
                order.pinned.slots.insert((use_number, slot));
            }
            // The use makes the object as new as any other.
            OrderPosition::Unpinned | OrderPosition::Recovered => {
                order.unpinned.slots.remove(&(before, slot));
                self.give_to_policy(objects, slot, &Place { parent: 0, ..*place });
            }
        }
    }

    /// Inserts an object. Call it when the value is complete and the pins are final.
    pub(crate) fn insert<A>(&mut self, objects: &mut Slots<Object<A>>, slot: SlotId, place: &Place) {
        let object = &mut objects[slot];
        let (tenant, used) = (object.tenant, object.used);
        if object.soft_pin != Moment(0) {
            self.pins.insert((object.soft_pin, slot));
        }
        // A policy would skip a hard-pinned object at every eviction.
        if object.hard_pin {
            object.position = OrderPosition::None;
        } else if object.soft_pin != Moment(0) {
            object.position = OrderPosition::Pinned;
            self.tenant(tenant).pinned.slots.insert((used, slot));
        } else {
            self.give_to_policy(objects, slot, place);
        }
    }

    /// Restores the last use of a recovered object: the object sorts before all live ones, by
    /// `used`.
    pub(crate) fn restore_use<A>(&mut self, objects: &mut Slots<Object<A>>, slot: SlotId, used: u64) {
        self.remove(objects, slot);
        objects[slot].used = used;
        if objects[slot].hard_pin || objects[slot].soft_pin != Moment(0) {
            return self.insert(objects, slot, &Place::numbered(used));
        }
        // A policy would take the object as a new one. Among the unpinned, each has its own time.
        let object = &mut objects[slot];
        object.position = OrderPosition::Recovered;
        let tenant = object.tenant;
        self.tenant(tenant).unpinned.slots.insert((used, slot));
    }

    fn give_to_policy<A>(&mut self, objects: &mut Slots<Object<A>>, slot: SlotId, place: &Place) {
        let object = &mut objects[slot];
        object.position = OrderPosition::Policy;
        if let Some(group) = object.group.as_ref().filter(|_| self.ranks_by_value) {
            group.add_running();
        }
        let (tenant, used, hash) = (object.tenant, object.used, object.hash);
        let len = object.value.as_ref().map_or(0, |value| value.len);
        let policy = &mut self.tenant(tenant).policy;
        policy.set_time(used);
        policy.insert_at(slot, len, hash, place);
    }

    /// Removes an object whose value is gone or is about to be inserted again.
    pub(crate) fn remove<A>(&mut self, objects: &mut Slots<Object<A>>, slot: SlotId) {
        let parent = self.parent(objects, slot);
        if parent != 0 && self.left.len() < MAX_LEFT {
            self.left.push(parent);
        }
        let object = &mut objects[slot];
        let (tenant, used) = (object.tenant, object.used);
        let position = std::mem::take(&mut object.position);
        self.pins.remove(&(object.soft_pin, slot));
        if position.is_in_policy()
            && let Some(group) = object.group.clone().filter(|_| self.ranks_by_value)
            && group.remove_ordered(position == OrderPosition::Waiting)
            && self.idle.len() < MAX_LEFT
        {
            self.idle.push(group);
        }
        let order = self.tenant(tenant);
        match position {
            OrderPosition::None => {}
            OrderPosition::Policy | OrderPosition::Waiting if order.is_next(slot) => order.next = None,
            OrderPosition::Policy | OrderPosition::Waiting => order.policy.remove(slot),
            OrderPosition::Pinned => {
                order.pinned.slots.remove(&(used, slot));
            }
            OrderPosition::Unpinned | OrderPosition::Recovered => {
                order.unpinned.slots.remove(&(used, slot));
            }
        }
    }

    /// Sets the end of the soft pin of an object; zero ends the pin.
    pub(crate) fn set_soft_pin<A>(&mut self, objects: &mut Slots<Object<A>>, slot: SlotId, until: Moment) {
        let has_value = objects[slot].value.is_some();
        if has_value {
            self.remove(objects, slot);
        }
        objects[slot].soft_pin = until;
        if has_value {
            let used = objects[slot].used;
            self.insert(objects, slot, &Place::numbered(used));
        }
    }

    /// Pins an object hard, so that the order has it no more.
    pub(crate) fn pin_hard<A>(&mut self, objects: &mut Slots<Object<A>>, slot: SlotId) {
        let has_value = objects[slot].value.is_some();
        if has_value {
            self.remove(objects, slot);
        }
        objects[slot].hard_pin = true;
        if has_value {
            let used = objects[slot].used;
            self.insert(objects, slot, &Place::numbered(used));
        }
    }

    /// Returns the parent that an object in the policy keeps in memory; 0 for none. An object of a
    /// group keeps none: it may wait for the others for long, and they may be its parents.
    pub(crate) fn parent<A>(&self, objects: &Slots<Object<A>>, slot: SlotId) -> u64 {
        let policy = self.policy(objects, slot).filter(|_| objects[slot].group.is_none());
        policy.map_or(0, |policy| policy.parent(slot))
    }

    /// Lets an object that was chosen wait for the others of its group. Returns false if it is the
    /// last of its group, or cannot wait.
    pub(crate) fn begin_wait<A>(&mut self, objects: &mut Slots<Object<A>>, slot: SlotId) -> bool {
        let object = &mut objects[slot];
        let may_wait = self.ranks_by_value && object.position == OrderPosition::Policy;
        if !may_wait || !object.group.as_ref().is_some_and(|group| group.begin_wait()) {
            return false;
        }
        object.position = OrderPosition::Waiting;
        let tenant = object.tenant;
        if self.tenant(tenant).is_next(slot) {
            self.put_back(objects, tenant);
        }
        self.tenant(tenant).policy.change_children(slot, true);
        true
    }

    /// Ends the wait of an object. Returns whether it waited.
    pub(crate) fn end_wait<A>(&mut self, objects: &mut Slots<Object<A>>, slot: SlotId) -> bool {
        let object = &mut objects[slot];
        if object.position != OrderPosition::Waiting {
            return false;
        }
        object.position = OrderPosition::Policy;
        object.group.iter().for_each(|group| group.end_wait());
        let tenant = object.tenant;
        self.tenant(tenant).policy.change_children(slot, false);
        true
    }

    /// Moves an object to a group. Returns the group that the object leaves.
    pub(crate) fn change_group<A>(
        &mut self,
        objects: &mut Slots<Object<A>>,
        slot: SlotId,
        group: Arc<Group>,
    ) -> Option<Arc<Group>> {
        self.end_wait(objects, slot);
        let object = &mut objects[slot];
        let is_counted = self.ranks_by_value && object.position.is_in_policy();
        if is_counted {
            group.add_running();
        }
        let before = object.group.replace(group);
        if is_counted
            && let Some(before) = before.as_ref().filter(|before| before.remove_ordered(false))
            && self.idle.len() < MAX_LEFT
        {
            self.idle.push(before.clone());
        }
        before
    }

    /// Returns the groups that have become idle since the last call.
    pub(crate) fn take_idle(&mut self) -> Vec<Arc<Group>> {
        std::mem::take(&mut self.idle)
    }

    /// Returns the value of an object that the policy holds, if victims compare by value.
    pub(crate) fn value<A>(&self, objects: &Slots<Object<A>>, slot: SlotId) -> Option<u64> {
        self.policy(objects, slot)?.value(slot)
    }

    /// Returns the policy that holds an object, if one does.
    pub(crate) fn policy<A>(&self, objects: &Slots<Object<A>>, slot: SlotId) -> Option<&E> {
        let object = &objects[slot];
        let order = object.position.is_in_policy().then(|| self.tenant_if_known(object.tenant))?;
        order.map(|order| &order.policy)
    }

    /// Returns the value that an object outside of the policy would have at `now` after a use at
    /// `place`, if victims compare by value.
    pub(crate) fn value_if_used<A>(
        &mut self,
        objects: &Slots<Object<A>>,
        slot: SlotId,
        place: &Place,
        now: u64,
    ) -> Option<u64> {
        let object = &objects[slot];
        let policy = &mut self.tenant(object.tenant).policy;
        policy.set_time(now);
        policy.value_if_used(object.hash, place)
    }

    /// Records that an object has one child more, or one less.
    pub(crate) fn change_children<A>(&mut self, objects: &Slots<Object<A>>, slot: SlotId, more: bool) {
        if objects[slot].position.is_in_policy() {
            self.tenant(objects[slot].tenant).policy.change_children(slot, more);
        }
    }

    /// Returns whether the policy of a tenant remembers an object that it does not hold.
    pub(crate) fn remembers(&self, tenant: u32, hash: u64) -> bool {
        self.tenant_if_known(tenant).is_some_and(|order| order.policy.remembers(hash))
    }

    /// Takes the hashes of some of the parents that have lost a child.
    pub(crate) fn take_left(&mut self) -> Vec<u64> {
        let rest = self.left.len().saturating_sub(LEFT_AT_ONCE);
        if rest == 0 { std::mem::take(&mut self.left) } else { self.left.split_off(rest) }
    }

    fn tenant_if_known(&self, tenant: u32) -> Option<&TenantOrder<E>> {
        match (tenant as usize).checked_sub(1) {
            None => Some(&self.own),
            Some(at) => self.others.get(at),
        }
    }

    /// Counts the objects that are soft-pinned at `now`.
    pub(crate) fn count_soft_pinned(&self, now: Moment) -> usize {
        self.pins.iter().rev().take_while(|(until, _)| *until > now).count()
    }

    #[cfg(test)]
    pub(crate) fn has_pins(&self) -> bool {
        !self.pins.is_empty()
    }

    /// Unpins some of the objects whose soft pin has ended.
    fn unpin<A>(&mut self, objects: &mut Slots<Object<A>>, now: Moment) {
        for _ in 0..AT_ONCE {
            let Some(&(_, slot)) = self.pins.first().filter(|(until, _)| *until <= now) else { return };
            self.pins.pop_first();
            let object = &mut objects[slot];
            object.soft_pin = Moment(0);
            if object.position == OrderPosition::Pinned {
                object.position = OrderPosition::Unpinned;
                let (tenant, used) = (object.tenant, object.used);
                let order = self.tenant(tenant);
                order.pinned.slots.remove(&(used, slot));
                order.unpinned.slots.insert((used, slot));
            }
        }
    }

    fn tenant(&mut self, tenant: u32) -> &mut TenantOrder<E> {
        let Some(at) = (tenant as usize).checked_sub(1) else { return &mut self.own };
        while self.others.len() <= at {
            self.others.push(TenantOrder::new(&self.config));
        }
        &mut self.others[at]
    }

    /// Returns the victim that was set aside to the policy.
    fn put_back<A>(&mut self, objects: &Slots<Object<A>>, tenant: u32) {
        if let Some((slot, _)) = self.tenant(tenant).next.take() {
            let object = &objects[slot];
            let (len, hash) = (object.value.as_ref().map_or(0, |value| value.len), object.hash);
            self.tenant(tenant).policy.take_back(slot, len, hash);
        }
    }

    /// Chooses the next victim among the objects that `allowed` accepts. Returns its rank: its last
    /// use, or its value if victims compare by value. The least rank goes first.
    pub(crate) fn choose<A>(
        &mut self,
        objects: &mut Slots<Object<A>>,
        pass: Pass,
        now: Moment,
        mut allowed: impl FnMut(&Object<A>) -> bool,
    ) -> Option<u64> {
        let mut best: Option<(SlotId, u64)> = None;
        for tenant in 0..=self.others.len() as u32 {
            if let Some((slot, used)) = self.choose_of(objects, tenant, pass, now, &mut allowed)
                && best.is_none_or(|(_, least)| used < least)
            {
                best = Some((slot, used));
            }
        }
        self.chosen = best.map(|(slot, _)| slot);
        best.map(|(_, used)| used)
    }

    /// Chooses like [`choose`](Self::choose) among the objects of one tenant. Returns the victim
    /// and its rank.
    pub(crate) fn choose_of<A>(
        &mut self,
        objects: &mut Slots<Object<A>>,
        tenant: u32,
        pass: Pass,
        now: Moment,
        mut allowed: impl FnMut(&Object<A>) -> bool,
    ) -> Option<(SlotId, u64)> {
        self.unpin(objects, now);
        let next = self.tenant(tenant).next;
        // Values change, so that another victim may be next by now.
        if self.ranks_by_value || next.is_some_and(|(slot, _)| !allowed(&objects[slot])) {
            self.put_back(objects, tenant);
        }
        let (time, by_value) = (self.time, self.ranks_by_value);
        let order = if tenant == 0 { &mut self.own } else { self.others.get_mut(tenant as usize - 1)? };
        let mut may_go = |slot: SlotId| objects.get(slot).is_some_and(&mut allowed);
        if order.next.is_none() {
            if by_value {
                order.policy.set_time(time);
            }
            let victim = order.policy.evict(&mut may_go);
            let since = order.policy.victim_value().or_else(|| order.policy.victim_since());
            order.next = victim.map(|slot| (slot, since.unwrap_or(objects[slot].used)));
        }
        let policy = &order.policy;
        let rank = |(slot, used)| (slot, policy.value_since(used).unwrap_or(used));
        // An object of a group goes with those that the policy orders.
        let is_last =
            |slot: SlotId| !by_value || !objects[slot].group.as_ref().is_some_and(|group| group.is_running());
        let unpinned = order.unpinned.oldest(|slot| is_last(slot) && may_go(slot)).map(rank);
        let ordinary = [order.next, unpinned].into_iter().flatten().min_by_key(|(_, used)| *used);
        match pass {
            _ if pass.takes_soft_pinned() && ordinary.is_none() => order.pinned.oldest(may_go).map(rank),
            _ => ordinary,
        }
    }

    /// Takes the victim that [`choose`](Self::choose) found last.
    pub(crate) fn take_chosen(&mut self) -> Option<SlotId> {
        self.chosen.take()
    }
}
