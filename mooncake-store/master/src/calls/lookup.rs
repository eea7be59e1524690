//! Reads: existence and replicas of objects.

use std::borrow::Cow;
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ReplicaId, SlotId};
use mooncake_core::replica::{Replica, ReplicaList, ReplicaLocation, ReplicaStatus};
use mooncake_core::{Error, ErrorCode, Result};
use smallvec::SmallVec;

use mooncake_protocol::api::DEFAULT_TENANT;
use mooncake_protocol::pack::{Pack, Writer};
use mooncake_protocol::wire::pack_in_memory;

use super::chains::KeyInCall;
use super::master::Master;
use crate::directory::object::not_found;
use crate::directory::{Object, Shard};
use crate::model::disk_replicas::DiskReplicas;
use crate::model::readers::ReadObject;
use crate::model::segment::Allocation;
use crate::sync::atomic::Ordering::Relaxed;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Returns whether an object can be read now. If so, grants a lease on it.
    pub fn exists(&self, key: &[u8]) -> bool {
        self.exists_in(key, KeyInCall::default())
    }

    /// Returns whether an object of a tenant can be read, like [`Master::exists`].
    pub(super) fn exists_of(&self, tenant: &str, key: &[u8], call: KeyInCall<'_>) -> bool {
        let found = self.of_tenant(tenant, key).map(|key| self.exists_in(&key, call));
        found.unwrap_or(false)
    }

    fn exists_in(&self, key: &[u8], call: KeyInCall<'_>) -> bool {
        let now = call.now().unwrap_or_else(|| self.space().clock.now());
        let hash = self.hash_of(key, call);
        let mut shard = self.space().directory.lock(hash);
        let found = shard.find(hash, key);
        let Some(slot) = found.filter(|slot| is_readable(&shard, *slot, now)) else {
            self.count_miss(&mut shard, key, hash, found, now, call);
            return false;
        };
        if call.is_behind_gap {
            self.count_miss(&mut shard, key, hash, found, now, call);
        }
        let (lease, pause) = (self.space().lease_from(now), self.space().options.look_up_pause());
        shard[slot].grant_look_up(now, lease, pause);
        // A policy that counts uses learns from those that read. The lease protects the object.
        if !self.space().directory.ranks_by_value() {
            self.space().directory.touch(&mut shard, slot, &self.space().next_place());
        }
        true
    }

    /// Returns the replicas of an object, and grants a lease on them.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `REPLICA_IS_NOT_READY` while its first write is in progress.
    pub fn locate(&self, key: &[u8]) -> Result<ReplicaList> {
        self.locate_in(key, KeyInCall::default())
    }

    /// Returns the replicas of an object of a tenant, like [`Master::locate`].
    ///
    /// # Errors
    /// Those of [`Master::locate`].
    pub(super) fn locate_of(&self, tenant: &str, key: &[u8], call: KeyInCall<'_>) -> Result<ReplicaList> {
        let mut list = self.locate_in(&self.of_tenant(tenant, key)?, call)?;
        list.resolved_tenant = self.is_other_tenant(tenant).then(|| DEFAULT_TENANT.to_owned());
        Ok(list)
    }

    /// Returns whether objects of this tenant are those of the default one, because the cluster has
    /// no tenants.
    fn is_other_tenant(&self, tenant: &str) -> bool {
        !self.space().tenants.are_on() && !matches!(tenant, DEFAULT_TENANT | "")
    }

    /// Returns whether replicas of objects of this tenant may be described with compatible fields.
    pub(super) fn may_have_members(&self, tenant: &str) -> bool {
        self.has_localities() || self.is_other_tenant(tenant)
    }

    /// Returns whether a description of a replica in memory may have a locality.
    pub(super) fn has_localities(&self) -> bool {
        self.space().has_localities.load(Relaxed)
    }

    /// Returns the directory key of a key that is read, and counts a miss if the tenant is not
    /// registered.
    fn of_tenant<'a>(&self, tenant: &str, key: &'a [u8]) -> Result<Cow<'a, [u8]>> {
        let unknown = |_: &Error| self.space().counters.missed_without_tenant(1);
        self.scoped_if_known(tenant, key).inspect_err(unknown)
    }

    pub(super) fn locate_in(&self, key: &[u8], call: KeyInCall<'_>) -> Result<ReplicaList> {
        self.read(key, call, |object| {
            let mut replicas = object.describe();
            let is_in_memory = |replica: &Replica| matches!(replica.location, ReplicaLocation::Memory(_));
            let in_memory = replicas.partition_point(is_in_memory);
            let turn = self.turn(in_memory);
            replicas[..in_memory].rotate_left(turn);
            ReplicaList {
                replicas,
                lease: self.space().options.lease_ttl,
                checksum: object.checksum(),
                resolved_tenant: None,
            }
        })
    }

    /// Returns the index of the replica that comes first. Many readers take the first one, so
    /// replicas of hot objects take turns.
    fn turn(&self, replicas: usize) -> usize {
        if self.space().hot.is_some() && replicas > 1 { self.space().random.below(replicas) } else { 0 }
    }

    /// Encodes the replicas of an object of a tenant as a [`ReplicaList`]; see [`Master::locate`].
    pub(super) fn locate_to(
        &self,
        tenant: &str,
        key: &[u8],
        call: KeyInCall<'_>,
        out: &mut Writer<'_>,
    ) -> Result<()> {
        self.read(&self.of_tenant(tenant, key)?, call, |object| {
            match object.value() {
                Some(value) if object.disk().is_none() => {
                    // Collected once: a segment may be retired meanwhile, and the number of
                    // replicas comes first.
                    let mut live: SmallVec<[_; 4]> = value.readable().collect();
                    let turn = self.turn(live.len());
                    live.rotate_left(turn);
                    let places = live.into_iter().map(Allocation::position);
                    pack_in_memory(places, value.len, ReplicaStatus::Complete, out);
                }
                _ => object.describe().pack(out),
            }
            self.space().options.lease_ttl.pack(out);
            object.checksum().pack(out);
        })
    }

    /// Checks that a key is known, readable or not, without a lease or a count.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`.
    pub fn find(&self, key: &[u8]) -> Result<()> {
        let hash = self.space().directory.hash(key);
        self.space().directory.lock(hash).find(hash, key).map(drop).ok_or_else(not_found)
    }

    /// Returns the replicas of an object without a lease, a count or an effect on eviction.
    ///
    /// # Errors
    /// Those of [`Master::locate`].
    pub fn peek(&self, key: &[u8]) -> Result<Vec<Replica>> {
        self.peek_with_checksum(key).map(|(replicas, _)| replicas)
    }

    /// Returns the replicas of an object, and the checksum of the same value.
    fn peek_with_checksum(&self, key: &[u8]) -> Result<(Vec<Replica>, Option<u64>)> {
        let hash = self.space().directory.hash(key);
        let shard = self.space().directory.lock(hash);
        let slot = shard.find(hash, key).ok_or_else(not_found)?;
        let object = &shard[slot];
        let has_ended = shard.end_of_lifetime(slot, self.space().clock.now()).is_some();
        let replicas = if has_ended { Vec::new() } else { object.describe() };
        if replicas.is_empty() { Err(unreadable(object)) } else { Ok((replicas, object.checksum())) }
    }

    /// Returns the replicas of an object of a tenant like [`Master::peek`]. The response has no
    /// lease.
    ///
    /// # Errors
    /// Those of [`Master::locate`].
    pub(super) fn list_of(&self, tenant: &str, key: &[u8]) -> Result<ReplicaList> {
        let key = self.scoped_if_known(tenant, key)?;
        let (replicas, checksum) = self.peek_with_checksum(&key)?;
        Ok(ReplicaList { replicas, lease: Duration::ZERO, checksum, resolved_tenant: None })
    }

    /// Returns the time for which leases protect an object or its group; `None` without a lease.
    pub fn leased_for(&self, key: &[u8]) -> Option<Duration> {
        let now = self.space().clock.now();
        let hash = self.space().directory.hash(key);
        let shard = self.space().directory.lock(hash);
        let object = shard.find(hash, key).map(|slot| &shard[slot])?;
        let group = object.group().map_or(Moment(0), |group| group.lease());
        let until = object.lease.max(group);
        let now = now.after(self.space().options.unprotected_lease);
        (until > now).then(|| until.since(now))
    }

    /// Lets the removal of an object that has ended with this read wait for the end of the read.
    fn await_end_of_read(&self, shard: &Shard<A, E>, slot: SlotId, call: KeyInCall<'_>) {
        let (object, was_read) = (&shard[slot], shard.lifetime(slot).is_some_and(|it| it.was_read));
        if let (true, Some(value), Some((reader, number))) = (was_read, object.value(), call.read) {
            reader.await_object(number, object.lease, ReadObject { hash: object.hash, stamp: value.stamp });
        }
    }

    /// Grants a lease and passes the object to `show`.
    fn read<R>(&self, key: &[u8], call: KeyInCall<'_>, show: impl FnOnce(&Object<A>) -> R) -> Result<R> {
        let now = call.now().unwrap_or_else(|| self.space().clock.now());
        let hash = self.hash_of(key, call);
        let mut shard = self.space().directory.lock(hash);
        let found = shard.find(hash, key);
        if let (Some(slot), Some(ReplicaId::OF_OFFLOAD)) = (found, call.located)
            && shard[slot].offloaded_until() >= self.space().lease_from(now)
            && is_readable_again(&shard, slot, ReplicaId::OF_OFFLOAD, now)
        {
            // The space waits for the report of the owner for longer than a lease, so the owner
            // needs none. A lease would keep memory occupied that the disk is to free.
            return Ok(show(&shard[slot]));
        }
        shard.reads.requests += 1;
        let can_read = |slot: &SlotId| match call.located {
            Some(id) => is_readable_again(&shard, *slot, id, now),
            None => is_readable(&shard, *slot, now),
        };
        let Some(slot) = found.filter(can_read) else {
            // A readable object that the caller has not located is none to the caller.
            let missed = found.filter(|slot| !is_readable(&shard, *slot, now));
            self.count_miss(&mut shard, key, hash, missed, now, call);
            return Err(found.map_or_else(not_found, |slot| unreadable(&shard[slot])));
        };
        if call.is_behind_gap {
            self.count_miss(&mut shard, key, hash, found, now, call);
        }
        let object = &mut shard[slot];
        let in_memory =
            object.value().filter(|value| value.readable().next().is_some()).map(|value| value.len);
        let len = in_memory.or_else(|| object.disk().map(|disk| disk.len)).unwrap_or_default();
        let shown = show(object);
        let lease = self.space().lease_from(now);
        object.grant_lease(lease);
        match call.read {
            Some((reader, number)) => object.reads.add(reader, number, object.lease),
            None => object.reads.add_unreported(lease),
        }
        let place = call.place().unwrap_or_else(|| self.space().next_place());
        self.space().directory.touch(&mut shard, slot, &place);
        if in_memory.is_none() {
            self.jobs.read_from_disk(&mut shard, slot, now);
        }
        let sampled = self.sampled_bytes(&shard, slot);
        if shard[slot].is_limited {
            self.space().end_at_read(&mut shard, slot);
            self.await_end_of_read(&shard, slot, call);
        }
        shard.reads.hits += 1;
        shard.reads.hit_bytes = shard.reads.hit_bytes.saturating_add(len);
        if in_memory.is_none() {
            shard.reads.disk_hits += 1;
            shard.reads.disk_hit_bytes = shard.reads.disk_hit_bytes.saturating_add(len);
        }
        if let Some(hot) = &self.space().hot {
            let key = shard[slot].key.clone();
            hot.count_read(&mut shard.read_rates, slot, &key, now);
        }
        drop(shard);
        if let Some(bytes) = sampled {
            self.space().curve.feed.note_use(hash, &place, bytes);
        }
        Ok(shown)
    }
}

/// Returns whether an object has a replica to read.
pub(super) fn is_readable<A: SegmentAllocator, E: MergeableOrder>(
    shard: &Shard<A, E>,
    slot: SlotId,
    now: Moment,
) -> bool {
    let object = &shard[slot];
    has_replica(object) && (!object.is_limited || shard.end_of_lifetime(slot, now).is_none())
}

/// Returns whether a caller that has located an object can locate it again. An object whose first
/// read is the last one has to be the one that the caller has located: it has that replica. Its
/// reader may ask again under the lease.
fn is_readable_again<A: SegmentAllocator, E: MergeableOrder>(
    shard: &Shard<A, E>,
    slot: SlotId,
    replica: ReplicaId,
    now: Moment,
) -> bool {
    let object = &shard[slot];
    let Some(lifetime) = shard.lifetime(slot).filter(|lifetime| lifetime.ends_at_read) else {
        return is_readable(shard, slot, now);
    };
    let is_there = object.value().is_some_and(|value| value.readable().any(|held| held.id == replica));
    is_there && if lifetime.was_read { object.lease > now } else { lifetime.until > now }
}

fn has_replica<A: SegmentAllocator>(object: &Object<A>) -> bool {
    object.value().is_some_and(|value| value.readable().next().is_some())
        || object.disk().is_some_and(DiskReplicas::is_readable)
}

/// Returns the error for an object without a replica that can be read.
pub(super) fn unreadable<A: SegmentAllocator>(object: &Object<A>) -> Error {
    let key = object.key.as_bytes();
    match object.write() {
        Some(_) => Error::new(
            ErrorCode::ReplicaIsNotReady,
            format!("the first write of the object is in progress. key={}", key.escape_ascii()),
        ),
        None if is_of_silent_owners(object) => Error::new(
            ErrorCode::ReplicaIsNotReady,
            format!("the owners of the object send no heartbeats. key={}", key.escape_ascii()),
        ),
        None => not_found(),
    }
}

/// Returns whether all owners of an object send no heartbeats, and have not expired.
fn is_of_silent_owners<A: SegmentAllocator>(object: &Object<A>) -> bool {
    let has_live = object.value().is_some_and(|value| value.live().next().is_some())
        || object.disk().is_some_and(DiskReplicas::is_live);
    has_live && !has_replica(object)
}
