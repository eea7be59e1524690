//! Removal of one object, by pattern, and of all objects.

use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::{ClientId, ObjectKey, SlotId};
use mooncake_core::{Error, ErrorCode, Result};

use super::master::Master;
use super::weights::managed;
use crate::directory::object::not_found;
use crate::directory::{Object, Replicas, Shard};
use crate::model::announcements::KeyFilter;
use crate::model::misses::MissCause;
use crate::model::pattern::compile;
use crate::model::segment::Allocation;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Removes an object; with `force` even while readers hold leases on it. Those readers read on,
    /// because its space stays in quarantine until the last lease has ended.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `OBJECT_HAS_LEASE` (not with `force`); `REPLICA_IS_NOT_READY` while a
    /// write or copy is in progress; `OBJECT_HAS_REPLICATION_TASK` during a move that needs no
    /// copy.
    pub fn remove(&self, key: &[u8], force: bool) -> Result<()> {
        let now = self.space().clock.now();
        let hash = self.space().directory.hash(key);
        let mut shard = self.space().directory.lock(hash);
        let Some(slot) = shard.find(hash, key) else {
            // The owner may not have announced it yet.
            shard.record_removal(hash, key);
            return Err(not_found());
        };
        shard.prune(slot, now, self.space().options.put_release);
        if shard[slot].is_limited {
            self.space().remove_if_ended(&mut shard, slot, now);
            if shard.find(hash, key).is_none() {
                return Err(not_found());
            }
        }
        if self.space().is_managed(&shard[slot]) && !is_planted("weights-removed-like-others") {
            return Err(managed(key));
        }
        let object = &shard[slot];
        if object.value().is_none() && object.write().is_none() && object.disk().is_none() {
            shard.record_removal(hash, key);
            shard.remove_if_empty(slot, MissCause::OwnerLost);
            return Err(not_found());
        }
        if let Some(code) = self.blocked(object, force, now) {
            return Err(Error::new(
                code,
                format!("cannot remove object: {}. key={}", code.meaning(), key.escape_ascii()),
            ));
        }
        self.drop_object(&mut shard, slot, now);
        drop(shard);
        self.space().curve.feed.note_removal(hash);
        self.space().eviction.end_backoff();
        Ok(())
    }

    /// Removes every object whose key matches the pattern, except those that [`Master::remove`]
    /// would refuse. Returns their number. Objects of an earlier master that no client has
    /// announced yet are removed, too.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the text is not a pattern, or is too large.
    pub fn remove_matching(&self, pattern: &str, force: bool) -> Result<u64> {
        let pattern = compile(pattern)?;
        Ok(self.remove_where(force, KeyFilter::new(b"", Some(pattern))))
    }

    /// Removes every object except those that [`Master::remove`] would refuse. Returns their
    /// number. Objects of an earlier master that no client has announced yet are removed, too.
    ///
    /// Without tenants, clients are asked to clear their disks; with tenants, a disk holds objects
    /// of others.
    pub fn remove_all(&self, force: bool) -> u64 {
        // Disks may hold managed weights, which stay.
        if !self.space().weights.have_objects() {
            self.clear_disks();
        }
        self.remove_where(force, KeyFilter::new(b"", None))
    }

    /// Removes those of the named objects that this client wrote and that have no lease, or only
    /// their replicas in segments of one name. Returns their keys. Other objects are ignored, as in
    /// Mooncake C++.
    pub fn clear_replicas(&self, keys: &[&[u8]], client: ClientId, segment_name: &str) -> Vec<ObjectKey> {
        let now = self.space().clock.now();
        let mut cleared = Vec::new();
        for key in keys {
            let hash = self.space().directory.hash(key);
            let mut shard = self.space().directory.lock(hash);
            let Some(slot) = shard.find(hash, key) else {
                // The owner may not have announced it yet.
                if segment_name.is_empty() {
                    shard.record_clear(hash, key, client);
                }
                continue;
            };
            let object = &shard[slot];
            if object.value().is_none_or(|value| value.writer.client != client) {
                // A value of this client may still return with another owner.
                if segment_name.is_empty() {
                    shard.record_clear(hash, key, client);
                }
                continue;
            }
            if self.space().is_managed(object) || self.blocked(object, false, now).is_some() {
                continue;
            }
            let name = object.key.clone();
            if segment_name.is_empty() {
                self.drop_object(&mut shard, slot, now);
                drop(shard);
                self.space().curve.feed.note_removal(hash);
                cleared.push(name);
            } else if self.drop_replicas(&mut shard, slot, segment_name, now) {
                cleared.push(name);
            }
        }
        self.space().eviction.end_backoff();
        cleared
    }

    /// Removes each object whose key matches. Returns their number.
    pub(crate) fn remove_where(&self, force: bool, wanted: KeyFilter) -> u64 {
        let wanted = Arc::new(wanted);
        self.space().announcements.begin_removal(&wanted);
        let removed = self.remove_visited(force, |key| wanted.matches(key));
        self.space().announcements.end_removal(&wanted);
        self.space().eviction.end_backoff();
        removed
    }

    fn remove_visited(&self, force: bool, wanted: impl Fn(&[u8]) -> bool) -> u64 {
        let now = self.space().clock.now();
        let feed = &self.space().curve.feed;
        let (mut removed, mut sampled) = (0, Vec::new());
        self.space().directory.visit(|shard, slot| {
            if !wanted(shard[slot].key.as_bytes()) || self.space().is_managed(&shard[slot]) {
                return;
            }
            // Replicas in retired segments are gone, and could return with their client.
            shard.prune(slot, now, self.space().options.put_release);
            let object = &shard[slot];
            if self.blocked(object, force, now).is_none() {
                let exists = object.value().is_some() || object.disk().is_some();
                removed += u64::from(exists && shard.end_of_lifetime(slot, now).is_none());
                sampled.extend(Some(object.hash).filter(|hash| feed.sample().contains(*hash)));
                self.drop_object(shard, slot, now);
            }
        });
        sampled.into_iter().for_each(|hash| feed.note_removal(hash));
        // Replicas that pruning listed meanwhile are among these.
        self.space().forget_absent(&wanted);
        removed
    }

    /// Returns the reason why an object may not be removed now.
    pub(super) fn blocked(&self, object: &Object<A>, force: bool, now: Moment) -> Option<ErrorCode> {
        // In the order in which Mooncake C++ checks.
        if !force
            && (object.value().is_some() || object.disk().is_some())
            && self.space().is_read(object, now)
        {
            Some(ErrorCode::ObjectHasLease)
        } else if object
            .write()
            .is_some_and(|write| now < write.started.after(self.space().options.put_discard))
        {
            Some(ErrorCode::ReplicaIsNotReady)
        } else if let Some(copying) = object.copying() {
            let moved = copying.targets.is_empty();
            Some(if moved { ErrorCode::ObjectHasReplicationTask } else { ErrorCode::ReplicaIsNotReady })
        } else {
            None
        }
    }

    pub(super) fn drop_object(&self, shard: &mut Shard<A, E>, slot: SlotId, now: Moment) {
        let used = self.space().take_use(&mut shard[slot]);
        shard[slot].drop_disk_replicas();
        shard.record_removal_of(slot);
        if let Some(value) = shard.take_value(slot, now) {
            self.space().give_back(value, used, now);
        }
        if let Some(abandoned) = shard.take_write(slot) {
            self.space().quarantine_write(abandoned, now);
        }
        shard.remove_if_empty(slot, MissCause::Removed);
    }

    /// Drops the replicas in segments of a name. Returns whether there were any.
    fn drop_replicas(&self, shard: &mut Shard<A, E>, slot: SlotId, segment_name: &str, now: Moment) -> bool {
        let lease = self.space().quarantine_end(self.space().in_use_until(&shard[slot]));
        let there = |held: &Allocation<A>| held.segment.info.name == segment_name;
        if !shard[slot].value().is_some_and(|value| value.replicas.iter().any(there)) {
            return false;
        }
        let _held = self.space().tenants.hold(shard[slot].tenant(), shard[slot].charged_bytes());
        let Some(mut value) = shard.take_value(slot, now) else { return false };
        let (removed, remaining): (Replicas<A>, Replicas<A>) = value.replicas.into_iter().partition(there);
        removed.into_iter().for_each(|held| held.quarantine(lease, now));
        value.replicas = remaining;
        if value.replicas.is_empty() {
            shard.record_removal_of(slot);
        } else {
            self.space().directory.put_value(shard, slot, value, &self.space().next_place());
        }
        shard.remove_if_empty(slot, MissCause::Removed);
        true
    }
}
