//! Copies of a shard: their begin, their end and their loss.

use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::SlotId;

use super::copying::{CopyOutcome, Copying};
use super::replicas::drop_retired;
use super::shard::Shard;
use crate::model::value::Writer;

impl<A: SegmentAllocator, E: MergeableOrder> Shard<A, E> {
    /// Begins a copy of the readable value.
    pub(crate) fn begin_copy(&mut self, slot: SlotId, mut copying: Copying<A>) {
        debug_assert!(self[slot].value.is_some() && self[slot].copying().is_none());
        self.with_charge(slot, |shard| {
            // A lost copy gives way.
            shard.remove_copy(slot);
            copying.index = shard.copies.slots.len();
            shard.copies.slots.push(slot);
            shard.objects[slot].copying = Some(Box::new(copying));
        });
    }

    /// Ends the copy in progress and returns it.
    pub(crate) fn take_copy(&mut self, slot: SlotId) -> Option<Copying<A>> {
        self.with_charge(slot, |shard| shard.remove_copy(slot))
    }

    pub(super) fn remove_copy(&mut self, slot: SlotId) -> Option<Copying<A>> {
        let copying = self.objects[slot].copying.take()?;
        let slots = &mut self.copies.slots;
        slots.swap_remove(copying.index);
        if let Some(moved) = slots.get(copying.index)
            && let Some(other) = &mut self.objects[*moved].copying
        {
            other.index = copying.index;
        }
        Some(*copying)
    }

    /// Records that the client or the source of a copy is gone. The space stays in quarantine as
    /// long as bytes of the client may arrive.
    pub(crate) fn lose_copy(&mut self, slot: SlotId, put_release: Duration, now: Moment) {
        self.with_charge(slot, |shard| shard.lose_space(slot, put_release, now));
    }

    fn lose_space(&mut self, slot: SlotId, put_release: Duration, now: Moment) {
        let Some(copying) = &mut self.objects[slot].copying else { return };
        copying.lost = true;
        let until = copying.started.after(put_release);
        std::mem::take(&mut copying.targets).into_iter().for_each(|held| held.quarantine(until, now));
    }

    /// Drops the targets of a copy in retired segments. The copy is lost with the last of them, and
    /// with its source: nothing keeps other bytes out of the extent that the client reads.
    pub(super) fn prune_copy(&mut self, slot: SlotId, now: Moment, put_release: Duration) {
        let object = &mut self.objects[slot];
        let Some(copying) = &mut object.copying else { return };
        let until = copying.started.after(put_release);
        let had_targets = !copying.targets.is_empty();
        drop_retired(&mut copying.targets, until, now);
        copying.lost |= had_targets && copying.targets.is_empty();
        match &object.value {
            None => {
                self.remove_copy(slot).into_iter().for_each(|copying| copying.quarantine(until, now));
            }
            Some(value) if value.replicas.iter().all(|held| held.id != copying.source) => {
                self.lose_space(slot, put_release, now);
            }
            Some(_) => {}
        }
    }

    /// Returns the slots with a copy in progress, or with one that was lost.
    pub(crate) fn copying(&self) -> &[SlotId] {
        &self.copies.slots
    }

    /// Remembers the outcome of a numbered copy, so that late and repeated calls about it have no
    /// effect.
    pub(crate) fn record_copy_end(&mut self, copier: Writer, outcome: CopyOutcome) {
        self.copies.record_end(copier, outcome);
    }

    /// Returns the outcome of a numbered copy that ended lately.
    pub(crate) fn copy_outcome(&self, copier: Writer) -> Option<CopyOutcome> {
        self.copies.outcome(copier)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mooncake_core::alloc::BuiltinAllocator;
    use mooncake_core::evict::{BuiltinPolicy, Place, PolicyKind};
    use mooncake_core::ids::{ClientId, ObjectKey, ReplicaId};
    use mooncake_protocol::api::CopyToken;
    use mooncake_protocol::wire::TaskKind;

    use super::*;
    use crate::directory::{Replicas, Value};
    use crate::model::group::Groups;
    use crate::model::misses::MissCause;
    use crate::model::tenants::Tenants;
    use crate::model::value::Stamp;

    type Tried = Shard<BuiltinAllocator, BuiltinPolicy>;

    fn put(shard: &mut Tried, number: u64) -> SlotId {
        let slot = shard.add(number, ObjectKey::new(number.to_le_bytes()).unwrap(), 0);
        let (writer, stamp) = (ClientId::default().into(), Stamp { epoch: 0, number });
        let replicas = Replicas::new();
        let value = Value { len: 1, checksum: None, writer, superseded: false, stamp, replicas };
        shard.put_value(slot, value, &Place::numbered(number));
        slot
    }

    #[test]
    fn the_list_of_copies_names_the_objects_with_a_copy() {
        let (tenants, groups) = (Arc::new(Tenants::new(None)), Arc::new(Groups::new(1)));
        let mut shard = Tried::new(&PolicyKind::Lru.into(), tenants, groups);
        let slots = [1, 2, 3, 4].map(|number| put(&mut shard, number));
        let copying = |lost| {
            let (copier, token) = (ClientId::default().into(), CopyToken::default());
            let targets = (&[][..], Replicas::new());
            let copying = Copying::new(copier, TaskKind::Copy, token, (Moment(0), 0), ReplicaId(0), targets);
            Copying { lost, ..copying }
        };
        let listed = |shard: &Tried| {
            let mut listed = shard.copying().to_vec();
            listed.sort();
            for (index, slot) in shard.copying().iter().enumerate() {
                assert_eq!(shard[*slot].copying.as_ref().unwrap().index, index);
            }
            listed
        };
        slots.iter().for_each(|slot| shard.begin_copy(*slot, copying(*slot == slots[1])));
        assert_eq!(listed(&shard), slots);
        assert!(shard.take_copy(slots[0]).is_some() && shard.take_copy(slots[0]).is_none());
        // A lost copy gives way to the next one.
        shard.begin_copy(slots[1], copying(true));
        assert_eq!(listed(&shard), slots[1..]);
        // The slot of a removed object may hold another object.
        shard.take_value(slots[1], Moment(0));
        shard.remove_if_empty(slots[1], MissCause::Removed);
        assert_eq!(put(&mut shard, 5), slots[1]);
        assert_eq!(listed(&shard), slots[2..]);
        assert!(shard[slots[1]].lost_copy().is_none());
        // A copy ends with its value.
        shard.objects[slots[2]].value = None;
        shard.prune(slots[2], Moment(0), Duration::ZERO);
        assert_eq!(listed(&shard), slots[3..]);
    }
}
