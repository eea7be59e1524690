//! Inventory: owners of segments fetch descriptions of the objects in them and announce them to the
//! next master, so that the cache outlives its master.
//!
//! A ledger holds the changes in the segments of one client since its last request. A master that
//! does not know the client lets it mount memory with objects in it. First the space of the objects
//! is reserved, so that the rest can be used at once. Then the owner checks the bytes of each
//! object and announces the intact ones, which become readable.

use std::cmp::Ordering::Less;
use std::time::Duration;

use mooncake_core::alloc::{Extent, SegmentAllocator};
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::{ClientId, ObjectKey, SegmentId, SlotId};
use mooncake_core::replica::Segment;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::wire::{
    InventoryPage, ItemLifetime, StoredLifetime, StoredReplica, TimedInventoryPage,
};

use super::master::Master;
use crate::directory::{Object, Replicas, Shard, Value};
use crate::jobs::recovery::{KnownReplica, Recovery};
use crate::model::lifetime::Lifetime;
use crate::model::misses::MissCause;
use crate::model::segment::{Allocation, GRAIN};
use crate::model::tenants::{QuotaRefusal, unknown as unregistered};
use crate::model::value::{Stamp, Writer};
use crate::space::mount::{Mount, unknown};

/// Relation of an announced value to the known one.
enum AnnouncedAge {
    /// The announced replica belongs to the known value.
    Same,
    /// The announced value was written later.
    Newer,
    /// The announced value is older, or this master wrote the known one.
    Older,
    /// Different earlier masters wrote the two values, and their order is unknown.
    Unclear,
}

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Returns the objects that came to and went from the segments of a client after change number
    /// `after`; 0 for a client that knows of none. From the first call on, later mounts of the
    /// client are recorded until it expires.
    ///
    /// Objects that end by themselves are left out. A client that asks this way would announce them
    /// to the next master without their end.
    pub fn inventory(&self, client: ClientId, after: u64) -> InventoryPage {
        let TimedInventoryPage { mut page, lifetimes } = self.timed_inventory(client, after);
        for ItemLifetime { index, .. } in lifetimes {
            if let Some(change) = page.changes.get_mut(index as usize) {
                change.stored = None;
            }
        }
        page
    }

    /// Returns the objects like [`Master::inventory`], with those that end by themselves.
    pub fn timed_inventory(&self, client: ClientId, after: u64) -> TimedInventoryPage {
        let now = self.space().clock.now();
        let ledger = self.space().ledgers.lock().open(client, now);
        self.space().timers.schedule(now.after(self.space().options.client_ttl));
        let epoch = self.space().epoch;
        match ledger {
            Some(ledger) => ledger.page(after, epoch, now, self.space().clock.wall_ms()),
            // Nothing is recorded for this client, as if its changes had been dropped.
            None => TimedInventoryPage {
                page: InventoryPage { epoch, next: after, lost: true, whole: true, changes: Vec::new() },
                lifetimes: Vec::new(),
            },
        }
    }

    /// Mounts memory with objects in it, like [`Master::mount`]. It accepts no new objects until
    /// [`Master::reserve_extents`] has been called with `open`.
    ///
    /// # Errors
    /// Those of [`Master::mount`].
    pub fn mount_with_objects(&self, client: ClientId, segment: &Segment) -> Result<()> {
        self.mount_as(client, segment, Mount::WithObjects)
    }

    /// Reserves space for objects that the owner will announce; `open` marks the last call.
    /// Repeating the call has no effect.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`; `ILLEGAL_CLIENT`; `INVALID_PARAMS` if the space is not free, or cannot
    /// be that of an object. The extents before it stay reserved.
    pub fn reserve_extents(
        &self,
        client: ClientId,
        segment: SegmentId,
        extents: &[Extent],
        open: bool,
    ) -> Result<()> {
        let _retired = self.space().retired.lock();
        let mounted = self.space().own_segment(client, segment)?.ok_or_else(|| unknown(&segment))?;
        for extent in extents {
            mounted.reserve(*extent)?;
        }
        if open {
            mounted.open();
            self.space().eviction.end_backoff();
        }
        Ok(())
    }

    /// Frees the space that is still reserved.
    ///
    /// # Errors
    /// `ILLEGAL_CLIENT` if another client mounted the segment.
    pub fn release_reserved(&self, client: ClientId, segment: SegmentId) -> Result<()> {
        let _retired = self.space().retired.lock();
        if let Some(mounted) = self.space().own_segment(client, segment)? {
            mounted.release_reserved();
            mounted.open();
            self.space().eviction.end_backoff();
        }
        Ok(())
    }

    /// Makes an announced replica readable. Its space was reserved, and its bytes are intact.
    /// Repeating the call has no effect. If the replica is refused, its space is freed.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`; `ILLEGAL_CLIENT`; `INVALID_PARAMS` (no such space was reserved, or key
    /// or length is impossible); `OBJECT_ALREADY_EXISTS` (a newer value exists; or the order of the
    /// two is unknown, and both are dropped; or the value was removed or replaced, as this master
    /// or a snapshot knows; or the time for announcements is over); `TENANT_NOT_REGISTERED`;
    /// `TENANT_QUOTA_EXCEEDED`.
    pub fn announce(&self, client: ClientId, replica: &StoredReplica) -> Result<()> {
        self.announce_as(client, replica, None, false)
    }

    /// Announces like [`Master::announce`] an object that ends by itself.
    ///
    /// # Errors
    /// Those of [`Master::announce`]; `OBJECT_ALREADY_EXISTS` if the object has ended.
    pub fn announce_timed(
        &self,
        client: ClientId,
        replica: &StoredReplica,
        lifetime: Option<StoredLifetime>,
    ) -> Result<()> {
        self.announce_as(client, replica, lifetime, false)
    }

    /// Announces like [`Master::announce`] a replica that [`Master::expired`] listed. A replica
    /// that was removed or replaced since is refused.
    ///
    /// # Errors
    /// Those of [`Master::announce`].
    pub fn announce_expired(&self, client: ClientId, replica: &StoredReplica) -> Result<()> {
        self.announce_as(client, replica, None, true)
    }

    /// Logs how many announced replicas the policy of the tenants has refused, and how many are of
    /// masters that the snapshot does not know. Returns the outcomes. Other refusals are of objects
    /// that were removed or replaced.
    pub(super) fn log_refused(&self, client: ClientId, outcomes: Vec<Result<()>>) -> Vec<Result<()>> {
        let refused = |outcome: &&Result<()>| {
            let codes = [ErrorCode::TenantNotRegistered, ErrorCode::TenantQuotaExceeded];
            outcome.as_ref().is_err_and(|error| codes.contains(&error.code()))
        };
        if let Some(Err(error)) = outcomes.iter().find(refused) {
            let (dropped, of) = (outcomes.iter().filter(refused).count(), outcomes.len());
            let flag = "--tenant_quota_connector_uri";
            tracing::warn!(%client, flag, dropped, of, %error, "objects of an earlier master dropped");
        }
        let unknown = self.jobs.recovery.get().map_or(0, Recovery::take_of_unknown_masters);
        if unknown > 0 {
            let (flag, of) = ("--enable_snapshot_restore", outcomes.len());
            tracing::warn!(%client, flag, dropped = unknown, of, "objects of a master that the snapshot does not know dropped");
        }
        outcomes
    }

    fn announce_as(
        &self,
        client: ClientId,
        replica: &StoredReplica,
        lifetime: Option<StoredLifetime>,
        expired: bool,
    ) -> Result<()> {
        let replica = self.in_own_form(replica);
        let replica = &*replica;
        let key = ObjectKey::new(replica.key.as_slice())?;
        let now = self.space().clock.now();
        let hash = self.space().directory.hash(key.as_bytes());
        let mut shard = self.space().directory.lock(hash);
        let found = shard.find(hash, key.as_bytes());
        let held = match self.take_reserved(client, replica)? {
            Some(held) => held,
            None if found.is_some_and(|slot| has_replica(&shard[slot], replica)) => return Ok(()),
            None => {
                return Err(Error::invalid(format!(
                    "cannot announce replica: no space is reserved. offset={}",
                    replica.offset
                )));
            }
        };
        let known = match self.check_announced(&mut shard, hash, replica, lifetime, expired) {
            Ok(known) => known,
            Err(error) => {
                held.quarantine(now, now);
                return Err(error);
            }
        };
        let tenant = self.space().tenants.number(key.as_bytes());
        let _charged = match self.space().tenants.reserve(tenant, replica.len, 0) {
            Ok(charged) => charged,
            Err(refusal) => {
                held.quarantine(now, now);
                return Err(match refusal {
                    QuotaRefusal::Unknown => unregistered(self.space().tenants.split(key.as_bytes()).0),
                    QuotaRefusal::TooLarge | QuotaRefusal::Full => {
                        self.space().quota_exceeded(tenant, key.as_bytes(), replica.len)
                    }
                });
            }
        };
        self.space().announcements.returned.record(&key);
        let age = found.and_then(|slot| self.compare(&shard[slot], replica));
        if age.is_some() && found.is_some_and(|slot| shard.end_of_lifetime(slot, now).is_some()) {
            held.quarantine(now, now);
            return Err(has_ended());
        }
        match (found, age) {
            (None, _) => {
                let slot = shard.add(hash, key, tenant);
                self.admit_announced(&mut shard, slot, replica, held, known, now);
            }
            (Some(slot), None) if shard[slot].write().is_none_or(|write| write.promotes) => {
                // The value on the disk may be older.
                if let Some(promotion) = shard.take_write(slot) {
                    let until = promotion.started.after(self.space().options.put_release);
                    promotion.quarantine(self.space().quarantine_end(until), now);
                }
                self.admit_announced(&mut shard, slot, replica, held, known, now);
            }
            (Some(slot), Some(AnnouncedAge::Newer)) => {
                // The copy in progress is one of the earlier value.
                shard.lose_copy(slot, self.space().options.put_release, now);
                self.admit_announced(&mut shard, slot, replica, held, known, now)
            }
            (Some(slot), Some(AnnouncedAge::Same)) => {
                shard.change_replicas(slot, |replicas| replicas.push(held))
            }
            (Some(slot), Some(AnnouncedAge::Unclear)) => {
                held.quarantine(now, now);
                self.drop_value(&mut shard, slot, now);
                return Err(ErrorCode::ObjectAlreadyExists.into());
            }
            (Some(_), None | Some(AnnouncedAge::Older)) => {
                held.quarantine(now, now);
                return Err(ErrorCode::ObjectAlreadyExists.into());
            }
        }
        self.space().eviction.end_backoff();
        Ok(())
    }

    /// Checks whether an announced replica counts. Returns what is known of it. `listed` is true
    /// for one that this master has listed.
    fn check_announced(
        &self,
        shard: &mut Shard<A, E>,
        hash: u64,
        replica: &StoredReplica,
        lifetime: Option<StoredLifetime>,
        listed: bool,
    ) -> Result<KnownReplica> {
        let (now, wall_ms) = (self.space().clock.now(), self.space().clock.wall_ms());
        let removed = || {
            let text = "cannot announce replica: the object was removed or replaced since";
            Error::new(ErrorCode::ObjectAlreadyExists, text)
        };
        if self.space().announcements.is_being_removed(&replica.key) {
            return Err(removed());
        }
        let mut known = if listed {
            let (used, lifetime) = shard.expired.take(replica)?;
            KnownReplica { used: Some(used), lifetime }
        } else if let Some((used, lifetime)) = shard.expired.take_unlisted(replica) {
            KnownReplica { used: Some(used), lifetime }
        } else {
            let recovery = self.jobs.recovery.get();
            let order = self.space().announcements.order.read();
            let in_snapshot = match recovery {
                Some(recovery) => recovery.check_announced(hash, replica, &order, now, wall_ms)?,
                None => None,
            };
            drop(order);
            let stamp = stamp(replica);
            let found = shard.find(hash, &replica.key).and_then(|slot| shard[slot].value());
            let is_here = found.is_some_and(|value| value.stamp == stamp);
            // A value of this master is announced only if it is listed. The seeds of tests let two
            // masters have one epoch.
            let is_own = stamp.epoch == self.space().epoch && in_snapshot.is_none();
            let written = (Some(stamp), Some(replica.writer));
            let admitted = || self.space().admits_earlier(shard, hash, &replica.key, written);
            if !is_here && (is_own || !admitted()) {
                return Err(removed());
            }
            in_snapshot.unwrap_or_default()
        };
        if known.lifetime.is_none() {
            known.lifetime = lifetime.map(|stored| Lifetime::from_stored(stored, now, wall_ms));
        }
        if known.lifetime.is_some_and(|lifetime| lifetime.end(now).is_some()) {
            return Err(has_ended());
        }
        Ok(known)
    }

    /// Takes the reserved space of a replica.
    fn take_reserved(&self, client: ClientId, replica: &StoredReplica) -> Result<Option<Allocation<A>>> {
        let len = replica.len.checked_next_multiple_of(GRAIN).filter(|len| *len > 0);
        let len = len.ok_or_else(|| {
            Error::invalid(format!("cannot announce replica: invalid length. len={}", replica.len))
        })?;
        // Locked until the space is taken, as in `place`: nothing is added to a segment after its
        // unmount.
        let registry = self.space().segments.read();
        let mounted = registry.get(replica.segment).ok_or_else(|| unknown(&replica.segment))?;
        if mounted.client != client {
            let text = format!("segment belongs to another client. segment={}", replica.segment);
            return Err(Error::new(ErrorCode::IllegalClient, text));
        }
        let extent = Extent { offset: replica.offset, len };
        let taken = mounted.take_reserved(extent);
        let id = self.space().new_replica();
        Ok(taken.then(|| Allocation { id, segment: mounted.clone(), extent }))
    }

    /// Compares the announced value with the known one; `None` if there is none.
    fn compare(&self, object: &Object<A>, replica: &StoredReplica) -> Option<AnnouncedAge> {
        let value = object.value()?;
        let stamp = stamp(replica);
        let order = self.space().announcements.order.read().compare(value.stamp, stamp);
        Some(if value.stamp == stamp && value.len == replica.len {
            AnnouncedAge::Same
        } else if value.stamp.epoch == self.space().epoch {
            AnnouncedAge::Older
        } else if order.is_none() {
            AnnouncedAge::Unclear
        } else if order == Some(Less) {
            AnnouncedAge::Newer
        } else {
            AnnouncedAge::Older
        })
    }

    fn admit_announced(
        &self,
        shard: &mut Shard<A, E>,
        slot: SlotId,
        replica: &StoredReplica,
        held: Allocation<A>,
        known: KnownReplica,
        now: Moment,
    ) {
        if !replica.group.is_empty() {
            shard.join_group(slot, &replica.group);
        }
        let in_use = if is_planted("announcement-ignores-disk-promises") {
            shard[slot].lease
        } else {
            self.space().in_use_until(&shard[slot])
        };
        let object = &mut shard[slot];
        object.lease = Moment(0);
        object.hard_pin |= replica.hard_pin;
        if replica.soft_pin_ms > 0 {
            shard.set_soft_pin(slot, now.after(Duration::from_millis(replica.soft_pin_ms)));
        }
        let mut replicas = Replicas::new();
        replicas.push(held);
        let value = Value {
            len: replica.len,
            checksum: replica.checksum,
            writer: Writer::from(replica.writer),
            // The end of a write that began under the earlier master must not be taken for a
            // repeated end of this one.
            superseded: !is_planted("announced-value-confirms-ends"),
            stamp: stamp(replica),
            replicas,
        };
        if known.lifetime.is_some() || shard[slot].is_limited {
            self.space().set_lifetime(shard, slot, known.lifetime);
        }
        // The replicas on disks may be older.
        shard[slot].drop_disk_replicas();
        if let Some(old) = self.space().directory.put_value(shard, slot, value, &self.space().next_place()) {
            old.quarantine(self.space().quarantine_end(in_use), now);
        }
        if let Some(used) = known.used {
            shard.restore_use(slot, used);
            self.space().directory.lower_age(self.space().directory.hash(&replica.key), used);
        }
    }

    fn drop_value(&self, shard: &mut Shard<A, E>, slot: SlotId, now: Moment) {
        let lease = self.space().in_use_until(&shard[slot]);
        shard.lose_copy(slot, self.space().options.put_release, now);
        if let Some(value) = shard.take_value(slot, now) {
            value.quarantine(self.space().quarantine_end(lease), now);
            // Neither value may return with another owner.
            shard.record_removal_of(slot);
            shard.remove_if_empty(slot, MissCause::OwnerLost);
        }
    }
}

fn stamp(replica: &StoredReplica) -> Stamp {
    Stamp { epoch: replica.epoch, number: replica.number }
}

#[cold]
fn has_ended() -> Error {
    let text = "cannot announce replica: the object has ended by itself";
    Error::new(ErrorCode::ObjectAlreadyExists, text)
}

/// Returns whether an object has exactly that replica.
fn has_replica<A: SegmentAllocator>(object: &Object<A>, replica: &StoredReplica) -> bool {
    object.value().is_some_and(|value| {
        let there = |held: &Allocation<A>| {
            held.segment.info.id == replica.segment && held.extent.offset == replica.offset
        };
        value.stamp == stamp(replica) && value.replicas.iter().any(there)
    })
}
