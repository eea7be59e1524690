//! Ends of lifetimes. A value that has ended cannot be read from then on; this module gives its
//! memory back, once no lease protects it.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::SlotId;

use super::state::Space;
use crate::directory::Shard;
use crate::model::lifetime::Lifetime;
use crate::model::misses::MissCause;
use crate::model::readers::ReadObject;
use crate::sync::atomic::Ordering::SeqCst;

/// Maximum number of values that are removed under one lock.
const AT_ONCE: usize = 256;

impl<A: SegmentAllocator, E: MergeableOrder> Space<A, E> {
    /// Sets the lifetime of an object, before its value is set.
    pub(crate) fn set_lifetime(&self, shard: &mut Shard<A, E>, slot: SlotId, lifetime: Option<Lifetime>) {
        shard.set_lifetime(slot, lifetime);
        if let Some(lifetime) = lifetime {
            self.timers.lifetimes.fetch_min(lifetime.until.0, SeqCst);
        }
    }

    /// Ends an object that was just read, if its first read is the last one. The object stays until
    /// the lease of the reader ends.
    pub(crate) fn end_at_read(&self, shard: &mut Shard<A, E>, slot: SlotId) {
        if let Some(lifetime) = shard.lifetime(slot).filter(|lifetime| lifetime.ends_at_read) {
            if !lifetime.was_read {
                shard.report_removal(slot);
                // From now on no replica of it returns, however the object leaves.
                shard.record_removal_of(slot);
            }
            let until = shard[slot].lease;
            self.set_lifetime(shard, slot, Some(Lifetime { until, was_read: true, ..lifetime }));
        }
    }

    /// Removes an object whose first read was the last one, once no reader may read it any more.
    pub(crate) fn remove_read_object(&self, object: &ReadObject, now: Moment) {
        let mut shard = self.directory.lock(object.hash);
        let Some(slot) = shard.find_hash(object.hash) else { return };
        let is_same = shard[slot].value().is_some_and(|value| value.stamp == object.stamp);
        let was_read = shard.lifetime(slot).is_some_and(|lifetime| lifetime.was_read);
        if is_same && was_read && shard[slot].copying().is_none() && self.in_use_until(&shard[slot]) <= now {
            self.remove_ended(&mut shard, slot, MissCause::DeletedAfterRead, now);
            drop(shard);
            if self.curve.feed.sample().contains(object.hash) {
                self.curve.feed.note_removal(object.hash);
            }
        }
    }

    /// Removes an object that has ended by now.
    pub(crate) fn remove_if_ended(&self, shard: &mut Shard<A, E>, slot: SlotId, now: Moment) {
        if let Some(why) = shard.end_of_lifetime(slot, now) {
            self.remove_ended(shard, slot, why, now);
        }
    }

    /// Removes the objects whose time is over by now. Returns whether there were any.
    pub(crate) fn remove_all_ended(&self, now: Moment) -> bool {
        if self.timers.lifetimes.load(SeqCst) > now.0 {
            return false;
        }
        self.timers.lifetimes.store(u64::MAX, SeqCst);
        let (sample, mut sampled, mut any) = (self.curve.feed.sample(), Vec::new(), false);
        for index in 0..self.directory.len() {
            let mut more = true;
            while more {
                let mut shard = self.directory.lock_at(index);
                for _ in 0..AT_ONCE {
                    let next = shard.next_end_of_lifetime();
                    let Some((_, slot)) = next.filter(|(end, _)| *end <= now) else {
                        let next = next.map_or(u64::MAX, |(end, _)| end.0);
                        self.timers.lifetimes.fetch_min(next, SeqCst);
                        more = false;
                        break;
                    };
                    sampled.extend(Some(shard[slot].hash).filter(|hash| sample.contains(*hash)));
                    let why = shard.end_of_lifetime(slot, now).unwrap_or(MissCause::Expired);
                    self.remove_ended(&mut shard, slot, why, now);
                    any = true;
                }
            }
        }
        sampled.into_iter().for_each(|hash| self.curve.feed.note_removal(hash));
        any
    }

    fn remove_ended(&self, shard: &mut Shard<A, E>, slot: SlotId, why: MissCause, now: Moment) {
        let used = self.take_use(&mut shard[slot]);
        shard[slot].drop_disk_replicas();
        shard.record_removal_of(slot);
        // The client that copies finds no copy to end.
        if let Some(copying) = shard.take_copy(slot) {
            let until = copying.started.after(self.options.put_release);
            copying.quarantine(self.quarantine_end(until), now);
        }
        if let Some(value) = shard.take_value(slot, now) {
            self.give_back(value, used, now);
        }
        shard.set_lifetime(slot, None);
        shard.remove_if_empty(slot, why);
    }
}
