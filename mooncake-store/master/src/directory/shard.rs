//! Shard of the directory: the objects under one lock.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::{MergeableOrder, Place};
use mooncake_core::ids::{ObjectKey, SlotId};
use mooncake_core::tables::Tables;

use super::absent_disks::AbsentDisks;
use super::copying::CopyList;
use super::departed::Departed;
use super::expired::ExpiredReplicas;
use super::lifetimes::Lifetimes;
use super::object::{Object, OrderPosition, Value, Write};
use super::order::{EvictionOrder, Pass};
use super::read_rates::ReadRates;
use super::removals::RemovalRecord;
use super::replicas::{Replicas, drop_retired};
use super::slots::Slots;
use crate::model::group::{Group, Groups};
use crate::model::journal::Journal;
use crate::model::lifetime::Lifetime;
use crate::model::misses::{MissCause, MissCounts};
use crate::model::readers::ObjectReads;
use crate::model::segment::Allocation;
use crate::model::tenants::Tenants;
use crate::model::value::Stamp;

/// Maximum number of freed `Write` allocations that a shard keeps for reuse.
const SPARE_WRITES: usize = 1024;

/// Objects under one lock.
///
/// An object has a position in the order of eviction exactly while it has a value that is not
/// hard-pinned. It is listed in `writing` exactly while it has a write, and in `copies` exactly
/// while it has a copy.
pub(crate) struct Shard<A, E: MergeableOrder> {
    keys: Tables,
    pub(crate) objects: Slots<Object<A>>,
    order: EvictionOrder<E>,
    tenants: Arc<Tenants>,
    groups: Arc<Groups>,
    writing: Vec<SlotId>,
    /// Objects with a copy, and copies that ended lately.
    pub(super) copies: CopyList,
    /// Freed allocations of writes, for reuse. Writes come and go in large numbers, and at other
    /// times than objects.
    #[allow(clippy::vec_box, reason = "the boxes are reused")]
    spare: Vec<Box<Write<A>>>,
    values: usize,
    journal: Option<Arc<dyn Journal>>,
    /// Name of the session that writes the next value, for the journal.
    session: Option<Box<[u8]>>,
    pub(crate) reads: ReadCounters,
    pub(crate) read_rates: ReadRates,
    /// Replicas that expired clients may announce again.
    pub(crate) expired: ExpiredReplicas,
    /// Record of removals, while values of earlier masters may be announced.
    pub(crate) removals: Option<Box<RemovalRecord>>,
    /// Objects on disks whose owners are gone.
    pub(crate) absent: AbsentDisks,
    lifetimes: Lifetimes,
    departed: Departed,
    /// Misses of keys of this shard. They are under its lock, like the counters of reads.
    pub(crate) misses: MissCounts,
}

/// Counters of reads. They are under the lock of the shard, so that readers share no counter.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReadCounters {
    pub(crate) requests: u64,
    pub(crate) hits: u64,
    pub(crate) hit_bytes: u64,
    /// Hits on objects that are only on disk.
    pub(crate) disk_hits: u64,
    pub(crate) disk_hit_bytes: u64,
}

impl<A: SegmentAllocator, E: MergeableOrder> Shard<A, E> {
    pub(crate) fn new(config: &E::Config, tenants: Arc<Tenants>, groups: Arc<Groups>) -> Self {
        Self {
            keys: Tables::default(),
            objects: Slots::new(),
            order: EvictionOrder::new(config),
            tenants,
            groups,
            writing: Vec::new(),
            copies: CopyList::default(),
            spare: Vec::new(),
            values: 0,
            journal: None,
            session: None,
            reads: ReadCounters::default(),
            read_rates: ReadRates::default(),
            expired: ExpiredReplicas::default(),
            removals: None,
            absent: AbsentDisks::default(),
            lifetimes: Lifetimes::default(),
            departed: Departed::default(),
            misses: MissCounts::default(),
        }
    }

    /// Reports every change from now on to `journal`.
    pub(crate) fn set_journal(&mut self, journal: Arc<dyn Journal>) {
        self.journal = Some(journal);
    }

    /// Returns the slot of a key.
    pub(crate) fn find(&self, hash: u64, key: &[u8]) -> Option<SlotId> {
        self.keys.find(tag(hash), |slot| self[SlotId(slot)].key.as_bytes() == key).map(SlotId)
    }

    /// Adds an object without value and write. The caller adds one of them before it releases the
    /// lock.
    pub(crate) fn add(&mut self, hash: u64, key: ObjectKey, tenant: u32) -> SlotId {
        let object = Object {
            key,
            hash,
            lease: Moment(0),
            looked_up_since: Moment(0),
            reads: ObjectReads::default(),
            soft_pin: Moment(0),
            hard_pin: false,
            position: OrderPosition::None,
            is_limited: false,
            tenant,
            group: None,
            used: 0,
            value: None,
            write: None,
            copying: None,
            tier: None,
        };
        let slot = self.objects.insert(object);
        self.keys.insert(tag(hash), slot.0);
        slot
    }

    /// Sets the readable value and returns the previous one. The hard pin must be final.
    pub(super) fn put_value(&mut self, slot: SlotId, value: Value<A>, place: &Place) -> Option<Value<A>> {
        let session = self.session.take();
        let before = self.remove_value(slot);
        self.expired.forget_unless(&self.objects[slot].key, value.stamp);
        self.absent.forget(self.objects[slot].key.as_bytes());
        self.with_charge(slot, |shard| {
            let object = &mut shard.objects[slot];
            object.used = place.number;
            object.value = Some(value);
            shard.order.insert(&mut shard.objects, slot, place);
            shard.values += 1;
            shard.notify_journal(slot, Some(session.as_deref()));
            shard.notify_ledgers(slot);
        });
        before
    }

    /// Removes and returns the readable value. No earlier value of the key is admitted.
    pub(crate) fn take_value(&mut self, slot: SlotId, now: Moment) -> Option<Value<A>> {
        let has_ended = self.end_of_lifetime(slot, now).is_some();
        let value = self.remove_value(slot)?;
        self.record_loss(slot, value.stamp, has_ended);
        Some(value)
    }

    /// Records that a value has left, but not by a removal. No further replica of it is admitted if
    /// it has ended by itself.
    fn record_loss(&mut self, slot: SlotId, stamp: Stamp, has_ended: bool) {
        if has_ended {
            self.record_removal_of(slot);
        } else if let Some(removals) = &mut self.removals {
            removals.record_loss(self.objects[slot].hash, stamp);
        }
    }

    fn remove_value(&mut self, slot: SlotId) -> Option<Value<A>> {
        self.with_charge(slot, |shard| {
            let object = &mut shard.objects[slot];
            let value = object.value.take()?;
            shard.expired.forget(object.key.as_bytes());
            for held in &value.replicas {
                held.segment.ledger.iter().for_each(|ledger| ledger.removed(held.id));
            }
            shard.remove_from_order(slot);
            Some(value)
        })
    }

    /// Makes a change and charges the tenant for it. Every change of the space of an object goes
    /// through here. Calls must not be nested.
    pub(super) fn with_charge<R>(&mut self, slot: SlotId, change: impl FnOnce(&mut Self) -> R) -> R {
        let object = &self.objects[slot];
        let tenant = object.tenant;
        if tenant == 0 {
            return change(self);
        }
        let before = object.charged_bytes();
        let outcome = change(self);
        self.tenants.charge(tenant, before, self.objects[slot].charged_bytes());
        outcome
    }

    /// Removes an object whose value is gone from the order of eviction.
    fn remove_from_order(&mut self, slot: SlotId) {
        self.values -= 1;
        self.notify_journal(slot, None);
        self.order.remove(&mut self.objects, slot);
    }

    /// Names the session that writes the next value.
    pub(crate) fn name_session(&mut self, session: Option<Box<[u8]>>) {
        self.session = session;
    }

    /// Reports to the journal that a value was stored, with the name of its session, or that a
    /// value was removed.
    fn notify_journal(&self, slot: SlotId, stored: Option<Option<&[u8]>>) {
        let Some(journal) = &self.journal else { return };
        let object = &self.objects[slot];
        let Some((tenant, key)) = self.tenants.unscoped(&object.key) else { return };
        // The name of a group has the prefix of its tenant, as a key does.
        let group = object.group_name();
        let group =
            if object.tenant == 0 { group } else { group.split_once('\0').map_or(group, |(_, name)| name) };
        match stored {
            Some(session) => journal.stored(tenant, &key, group, session),
            None => journal.removed(tenant, &key, group),
        }
    }

    /// Drops the replicas in retired segments. Their space stays in quarantine there.
    pub(crate) fn prune(&mut self, slot: SlotId, now: Moment, put_release: Duration) {
        self.with_charge(slot, |shard| shard.prune_parts(slot, now, put_release));
    }

    fn prune_parts(&mut self, slot: SlotId, now: Moment, put_release: Duration) {
        // The owner of a disk may be reading the value without a lease.
        let in_use = self.objects[slot].lease.max(self.objects[slot].offloaded_until());
        self.prune_disks(slot);
        let lifetime = self.lifetime(slot);
        let object = &mut self.objects[slot];
        self.expired.record(object, lifetime, now);
        if let Some(value) = &mut object.value {
            drop_retired(&mut value.replicas, in_use, now);
            if value.replicas.is_empty() {
                let stamp = value.stamp;
                object.value = None;
                self.record_loss(slot, stamp, lifetime.is_some_and(|lifetime| lifetime.end(now).is_some()));
                self.remove_from_order(slot);
            }
        }
        let object = &mut self.objects[slot];
        if let Some(write) = &mut object.write {
            drop_retired(&mut write.replicas, write.started.after(put_release), now);
            if write.replicas.is_empty() {
                self.remove_write(slot);
            }
        }
        self.prune_copy(slot, now, put_release);
    }

    /// Changes the replicas of the readable value. One must remain.
    pub(crate) fn change_replicas(&mut self, slot: SlotId, change: impl FnOnce(&mut Replicas<A>)) {
        self.with_charge(slot, |shard| {
            let mut before = Vec::new();
            if let Some(value) = &mut shard.objects[slot].value {
                before.extend(value.replicas.iter().map(|held| (held.id, held.segment.clone())));
                change(&mut value.replicas);
            }
            let object = &shard[slot];
            let Some(value) = &object.value else { return };
            let is = |held: &Allocation<A>, id| held.id == id;
            let lifetime = shard.lifetime(slot);
            for (id, segment) in
                before.iter().filter(|(id, _)| !value.replicas.iter().any(|held| is(held, *id)))
            {
                segment.ledger.iter().for_each(|ledger| ledger.removed(*id));
            }
            for held in value.replicas.iter().filter(|held| !before.iter().any(|(id, _)| is(held, *id))) {
                held.segment
                    .ledger
                    .iter()
                    .for_each(|ledger| ledger.stored(held.id, object.stored_at(held, value, lifetime)));
            }
        });
    }

    /// Reports to the owners of the replicas that the object can be read there.
    pub(crate) fn notify_ledgers(&self, slot: SlotId) {
        let object = &self[slot];
        let Some(value) = &object.value else { return };
        let lifetime = self.lifetime(slot);
        for held in &value.replicas {
            held.segment
                .ledger
                .iter()
                .for_each(|ledger| ledger.stored(held.id, object.stored_at(held, value, lifetime)));
        }
    }

    /// Adds a write, for which `prepaid` bytes have been charged.
    pub(crate) fn put_write(&mut self, slot: SlotId, write: Write<A>, prepaid: u64) {
        let before = self[slot].charged_bytes();
        self.insert_write(slot, write);
        let object = &self.objects[slot];
        self.tenants.charge(object.tenant, before + prepaid, object.charged_bytes());
    }

    fn insert_write(&mut self, slot: SlotId, mut write: Write<A>) {
        debug_assert!(self[slot].write.is_none());
        write.index = self.writing.len();
        self.writing.push(slot);
        let object = &mut self.objects[slot];
        object.write = Some(match self.spare.pop() {
            Some(mut spare) => {
                *spare = write;
                spare
            }
            None => Box::new(write),
        });
        if let Some(value) = &mut object.value {
            value.superseded = true;
        }
    }

    /// Ends the write in progress and returns it.
    pub(crate) fn take_write(&mut self, slot: SlotId) -> Option<Write<A>> {
        self.with_charge(slot, |shard| shard.remove_write(slot))
    }

    fn remove_write(&mut self, slot: SlotId) -> Option<Write<A>> {
        let mut spare = self.objects[slot].write.take()?;
        let none = Write::new(spare.writer, spare.started, 0, Replicas::new());
        let write = std::mem::replace(&mut *spare, none);
        if self.spare.len() < SPARE_WRITES {
            self.spare.push(spare);
        }
        self.writing.swap_remove(write.index);
        if let Some(moved) = self.writing.get(write.index)
            && let Some(other) = &mut self.objects[*moved].write
        {
            other.index = write.index;
        }
        Some(write)
    }

    /// Removes the object if it has neither value nor write nor disk replica. Later misses of the
    /// key have the cause `why`.
    pub(crate) fn remove_if_empty(&mut self, slot: SlotId, why: MissCause) {
        let object = &self[slot];
        if object.value.is_none() && object.write.is_none() && object.disk().is_none() {
            self.keys.remove(tag(object.hash), |other| other == slot.0);
            self.remove_copy(slot);
            let Some(mut object) = self.objects.remove(slot) else { return };
            self.record_departure(object.hash, why);
            if object.is_limited {
                self.lifetimes.set(slot, None);
            }
            object.drop_disk_replicas();
            self.read_rates.forget(slot);
            if let Some(group) = &object.group {
                self.groups.leave(group, object.hash);
            }
        }
    }

    /// Returns the lifetime of an object; `None` if it does not end by itself.
    pub(crate) fn lifetime(&self, slot: SlotId) -> Option<Lifetime> {
        if self[slot].is_limited { self.lifetimes.get(slot) } else { None }
    }

    /// Returns why the value of an object has ended by itself; `None` if it has not.
    pub(crate) fn end_of_lifetime(&self, slot: SlotId, now: Moment) -> Option<MissCause> {
        self.lifetime(slot).and_then(|lifetime| lifetime.end(now))
    }

    /// Sets the lifetime of an object; `None` if it does not end by itself.
    pub(crate) fn set_lifetime(&mut self, slot: SlotId, lifetime: Option<Lifetime>) {
        let was_limited = std::mem::replace(&mut self[slot].is_limited, lifetime.is_some());
        if was_limited || lifetime.is_some() {
            self.lifetimes.set(slot, lifetime);
        }
    }

    /// Reports to the owners of the replicas of an object that the object was removed, so that they
    /// do not announce it to the next master.
    pub(crate) fn report_removal(&self, slot: SlotId) {
        for held in self[slot].value.iter().flat_map(|value| &value.replicas) {
            held.segment.ledger.iter().for_each(|ledger| ledger.removed(held.id));
        }
    }

    /// Returns the object whose lifetime ends first, and when.
    pub(crate) fn next_end_of_lifetime(&self) -> Option<(Moment, SlotId)> {
        self.lifetimes.first()
    }

    /// Remembers why the object with a hash is not here.
    pub(crate) fn record_departure(&mut self, hash: u64, why: MissCause) {
        self.departed.remember(hash, why, self.objects.len());
    }

    /// Returns why the object with a hash is not here.
    pub(crate) fn why_absent(&self, hash: u64) -> MissCause {
        self.departed.cause(hash)
    }

    /// Returns whether an object was not used since its soft pin ended.
    pub(crate) fn is_after_pin(&self, slot: SlotId) -> bool {
        self[slot].position == OrderPosition::Unpinned
    }

    /// Moves an object from its group to the group of that name.
    pub(crate) fn join_group(&mut self, slot: SlotId, name: &str) {
        let object = &self[slot];
        if object.group_name() == name {
            return;
        }
        let hash = object.hash;
        let group = self.groups.join(name, hash, object.lease);
        if let Some(before) = self.order.change_group(&mut self.objects, slot, group) {
            self.groups.leave(&before, hash);
        }
    }

    /// Records a use of an object.
    pub(super) fn touch(&mut self, slot: SlotId, place: &Place) {
        self.order.touch(&mut self.objects, slot, place);
    }

    /// Returns the slot of the object with a hash.
    pub(crate) fn find_hash(&self, hash: u64) -> Option<SlotId> {
        self.keys.find(tag(hash), |slot| self[SlotId(slot)].hash == hash).map(SlotId)
    }

    /// Reads what a look-up of the object with a hash will read.
    pub(super) fn fetch(&self, hash: u64) -> Option<u64> {
        let slot = self.find_hash(hash)?;
        self.policy(slot).and_then(|policy| policy.value(slot))
    }

    /// Returns whether the object with a hash is here, or the policy of its tenant remembers it.
    pub(crate) fn knows(&self, tenant: u32, hash: u64) -> bool {
        let is_here = self.find_hash(hash).is_some_and(|slot| self[slot].value.is_some());
        is_here || self.order.remembers(tenant, hash)
    }

    /// Returns the hash of the parent of an object; 0 for none.
    pub(crate) fn parent(&self, slot: SlotId) -> u64 {
        self.order.parent(&self.objects, slot)
    }

    /// Returns the value of an object to the policy, if victims compare by value.
    pub(super) fn value_to_policy(&self, slot: SlotId) -> Option<u64> {
        self.order.value(&self.objects, slot)
    }

    /// Returns the policy that holds an object, if one does.
    pub(super) fn policy(&self, slot: SlotId) -> Option<&E> {
        self.order.policy(&self.objects, slot)
    }

    /// Returns the value of an object after a use; see [`EvictionOrder::value_if_used`].
    pub(super) fn value_if_used(&mut self, slot: SlotId, place: &Place, now: u64) -> Option<u64> {
        self.order.value_if_used(&self.objects, slot, place, now)
    }

    /// Records that an object has one child more, or one less.
    pub(super) fn change_children(&mut self, slot: SlotId, more: bool) {
        self.order.change_children(&self.objects, slot, more);
    }

    /// Takes the hashes of some of the parents of objects that have left.
    pub(crate) fn take_left_parents(&mut self) -> Vec<u64> {
        self.order.take_left()
    }

    /// Lets a chosen object wait for the others of its group; see [`EvictionOrder::begin_wait`].
    pub(crate) fn begin_wait(&mut self, slot: SlotId) -> bool {
        self.order.begin_wait(&mut self.objects, slot)
    }

    /// Ends the wait of an object. Returns whether it waited.
    pub(crate) fn end_wait(&mut self, slot: SlotId) -> bool {
        self.order.end_wait(&mut self.objects, slot)
    }

    /// Returns the groups that have become idle since the last call.
    pub(crate) fn take_idle_groups(&mut self) -> Vec<Arc<Group>> {
        self.order.take_idle()
    }

    /// Returns whether victims compare by value and not by time.
    pub(super) fn ranks_by_value(&self) -> bool {
        self.order.ranks_by_value()
    }

    /// Sets the number of the latest use of any object.
    pub(super) fn set_time(&mut self, use_number: u64) {
        self.order.set_time(use_number);
    }

    /// Restores the last use of a recovered object; see [`EvictionOrder::restore_use`].
    pub(crate) fn restore_use(&mut self, slot: SlotId, used: u64) {
        self.order.restore_use(&mut self.objects, slot, used);
    }

    /// Sets the end of the soft pin of an object; zero ends the pin.
    pub(crate) fn set_soft_pin(&mut self, slot: SlotId, until: Moment) {
        self.order.set_soft_pin(&mut self.objects, slot, until);
    }

    /// Pins an object hard, so that it is never evicted.
    pub(crate) fn pin_hard(&mut self, slot: SlotId) {
        if !self[slot].hard_pin {
            self.order.pin_hard(&mut self.objects, slot);
            self.notify_ledgers(slot);
        }
    }

    /// Counts the objects that are soft-pinned at `now`.
    pub(crate) fn count_soft_pinned(&self, now: Moment) -> usize {
        self.order.count_soft_pinned(now)
    }

    /// Chooses the next victim; see [`EvictionOrder::choose`].
    pub(crate) fn choose(
        &mut self,
        pass: Pass,
        now: Moment,
        allowed: impl FnMut(&Object<A>) -> bool,
    ) -> Option<u64> {
        self.order.choose(&mut self.objects, pass, now, allowed)
    }

    /// Chooses the next victim of one tenant; see [`EvictionOrder::choose_of`].
    pub(crate) fn choose_of(
        &mut self,
        tenant: u32,
        pass: Pass,
        now: Moment,
        allowed: impl FnMut(&Object<A>) -> bool,
    ) -> Option<(SlotId, u64)> {
        self.order.choose_of(&mut self.objects, tenant, pass, now, allowed)
    }

    /// Takes the victim that [`choose`](Self::choose) found last.
    pub(crate) fn take_chosen(&mut self) -> Option<SlotId> {
        self.order.take_chosen()
    }

    /// Returns the slots with a write in progress.
    pub(crate) fn writing(&self) -> &[SlotId] {
        &self.writing
    }

    /// Returns the number of objects that have a value.
    pub(crate) fn values(&self) -> usize {
        self.values
    }

    pub(crate) fn len(&self) -> usize {
        self.objects.len()
    }
}

impl<A, E: MergeableOrder> std::ops::Index<SlotId> for Shard<A, E> {
    type Output = Object<A>;

    fn index(&self, slot: SlotId) -> &Object<A> {
        &self.objects[slot]
    }
}

impl<A, E: MergeableOrder> std::ops::IndexMut<SlotId> for Shard<A, E> {
    fn index_mut(&mut self, slot: SlotId) -> &mut Object<A> {
        &mut self.objects[slot]
    }
}

/// Returns the part of a hash that the key table stores.
fn tag(hash: u64) -> u32 {
    hash as u32
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mooncake_core::alloc::BuiltinAllocator;
    use mooncake_core::evict::{BuiltinPolicy, PolicyKind};
    use mooncake_core::ids::{ClientId, ObjectKey};

    use super::*;
    use crate::directory::order::AT_ONCE;

    type Tried = Shard<BuiltinAllocator, BuiltinPolicy>;

    fn shard() -> Tried {
        let (tenants, groups) = (Arc::new(Tenants::new(None)), Arc::new(Groups::new(1)));
        Shard::new(&PolicyKind::Lru.into(), tenants, groups)
    }

    /// Adds an object whose first use has the number `number`.
    fn put(shard: &mut Tried, number: u64, pinned: Moment) -> SlotId {
        let slot = shard.add(number, ObjectKey::new(number.to_le_bytes()).unwrap(), 0);
        shard.set_soft_pin(slot, pinned);
        let writer = ClientId::default().into();
        let stamp = Stamp { epoch: 0, number };
        let replicas = Replicas::new();
        let value = Value { len: 1, checksum: None, writer, superseded: false, stamp, replicas };
        shard.put_value(slot, value, &Place::numbered(number));
        slot
    }

    /// Returns the next victim and the number of objects that were examined.
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
        assert_eq!(shard.count_soft_pinned(Moment(99)), PINNED as usize);
        assert_eq!(next(&mut shard, Pass::Ordinary, 0, |_| true), (None, 0));
        let plain = put(&mut shard, PINNED + 1, Moment(0));
        assert_eq!(next(&mut shard, Pass::Ordinary, 0, |_| true), (Some(PINNED + 1), 1));
        assert_eq!(
            next(&mut shard, Pass::SoftPinned, 0, |_| true).0,
            Some(PINNED + 1),
            "before those that are pinned"
        );
        assert_eq!(shard.take_chosen(), Some(plain));
        shard.take_value(plain, Moment(0));
        assert_eq!(
            next(&mut shard, Pass::SoftPinned, 0, |_| true),
            (Some(1), 1),
            "the one that was not used for the longest"
        );
    }

    /// Returns the victim among those that `allowed` accepts.
    fn victim(shard: &mut Tried, allowed: impl Fn(u64) -> bool) -> Option<SlotId> {
        next(shard, Pass::Ordinary, 0, allowed).0?;
        shard.order.take_chosen()
    }

    fn shard_by_value() -> Tried {
        let (tenants, groups) = (Arc::new(Tenants::new(None)), Arc::new(Groups::new(1)));
        Shard::new(&PolicyKind::Gittins.into(), tenants, groups)
    }

    #[test]
    fn a_use_of_a_waiting_victim_counts() {
        let mut shard = shard_by_value();
        let [one, two] = [1, 2].map(|number| put(&mut shard, number, Moment(0)));
        shard.join_group(one, "g");
        // Another object of the group is in another shard.
        shard[one].group().unwrap().add_running();
        assert_eq!(victim(&mut shard, |used| used == 1), Some(one));
        assert!(shard.begin_wait(one));
        assert_eq!(victim(&mut shard, |used| used == 1), Some(one), "nothing else may go");
        shard.touch(one, &Place::numbered(3));
        assert_eq!(victim(&mut shard, |_| true), Some(two));
        assert!(shard.begin_wait(one), "both objects of the group run");
    }

    #[test]
    fn an_object_that_changes_its_group_counts_there() {
        let mut shard = shard_by_value();
        let [one, two, three] = [1, 2, 3].map(|number| put(&mut shard, number, Moment(0)));
        [one, two].iter().for_each(|slot| shard.join_group(*slot, "before"));
        let before = shard[one].group().unwrap().clone();
        shard.join_group(one, "after");
        assert!(!shard.begin_wait(two), "the last one of its group");
        shard.join_group(three, "after");
        assert!(shard.begin_wait(three) && !shard.begin_wait(one));
        shard.join_group(three, "before");
        assert!(shard.begin_wait(three), "the wait has ended with the change");
        shard.join_group(two, "after");
        assert!(before.is_idle() && shard.take_idle_groups().len() == 1);
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
        // The search begins at the front again after it has reached the end.
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
        assert_eq!((shard.count_soft_pinned(Moment(7)), shard[first].soft_pin()), (1, Moment(0)));
        shard.touch(first, &Place::numbered(4));
        assert_eq!(next(&mut shard, Pass::Ordinary, 7, |_| true).0, Some(2));
        shard.touch(third, &Place::numbered(5));
        shard.touch(second, &Place::numbered(6));
        assert_eq!(next(&mut shard, Pass::Ordinary, 9, |_| true).0, Some(4));
        // Pinned again, pinned for ever, and not pinned.
        shard.set_soft_pin(first, Moment(20));
        assert_eq!(next(&mut shard, Pass::Ordinary, 9, |_| true).0, Some(5));
        for slot in [first, second, third] {
            shard.take_value(slot, Moment(0));
            shard.remove_if_empty(slot, MissCause::Removed);
        }
        assert_eq!(next(&mut shard, Pass::SoftPinned, 99, |_| true), (None, 0));
        assert!(!shard.order.has_pins() && shard.len() == 0);
    }
}
