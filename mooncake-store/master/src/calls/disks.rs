//! Disks of clients: mount and unmount, offload reports, cleared disks.

use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::{ClientId, ObjectKey, ReplicaId};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::api::DEFAULT_TENANT;
use mooncake_protocol::key_form::KeyForm;
use mooncake_protocol::wire::{OffloadItem, StoredAt};

use super::client_table::MAX_CLIENTS;
use super::master::Master;
use crate::directory::Shard;
use crate::directory::object::not_found;
use crate::model::disk::{DiskOwner, DiskOwnerState, OffloadReport, count, not_offered};
use crate::model::disk_replicas::{DiskHolding, DiskReplica};
use crate::model::misses::MissCause;
use crate::model::value::Stamp;
use crate::space::mount::MAX_WORD;
use crate::sync::atomic::Ordering::Relaxed;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Offers the disk of a client, or changes whether objects may be written there. Replicas of an
    /// earlier offer stay.
    ///
    /// # Errors
    /// `UNABLE_OFFLOAD` if this master uses no disks; `UNAVAILABLE_IN_CURRENT_STATUS` for too many
    /// disks.
    pub fn mount_disk(&self, client: ClientId, enabled: bool) -> Result<()> {
        if self.space().options.disks.is_none() {
            return Err(Error::new(
                ErrorCode::UnableOffload,
                "this master does not offload to disks of clients; start it with --enable_offload",
            ));
        }
        let now = self.space().clock.now();
        self.space().timers.schedule(now.after(self.space().options.client_ttl));
        if let Some(owner) = self.space().disks.get(client) {
            let mut state = owner.state.lock();
            (state.enabled, state.announcing, state.seen) = (enabled, true, now);
            return Ok(());
        }
        if self.space().disks.count.load(Relaxed) >= MAX_CLIENTS {
            let text = format!("cannot mount disk: {MAX_CLIENTS} disks are mounted. client={client}");
            return Err(Error::new(ErrorCode::UnavailableInCurrentStatus, text));
        }
        let mut state =
            DiskOwnerState { enabled, announcing: true, joined: now, seen: now, ..DiskOwnerState::default() };
        // A late report about work for an earlier offer has another number.
        state.assigned.number = self.space().disks.removed.load(Relaxed) << 32;
        let (suspicion, counters) = (self.space().suspicions.of(client), self.space().disks.counters());
        self.space().disks.insert(DiskOwner::new(client, suspicion, 0, counters, state));
        tracing::info!(%client, "disk mounted");
        Ok(())
    }

    /// Withdraws the disk of a client. Its replicas are gone at once.
    ///
    /// # Errors
    /// `UNABLE_OFFLOAD` if this master uses no disks; `SEGMENT_NOT_FOUND` if there is no such disk.
    pub fn unmount_disk(&self, client: ClientId) -> Result<()> {
        if self.space().options.disks.is_none() {
            return Err(Error::new(
                ErrorCode::UnableOffload,
                "this master does not offload to disks of clients; start it with --enable_offload",
            ));
        }
        let lost = self.space().disks.remove(|owner| owner.client == client);
        if lost.is_empty() {
            return Err(not_offered());
        }
        self.jobs.end_promotions_of(&lost, self.space().clock.now());
        self.space().sweep_disks();
        Ok(())
    }

    /// Records the heartbeat of a disk. Returns the objects that its owner is to write. They are
    /// returned once.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` if the client has offered no disk, or has expired: it offers the disk
    /// again and reports its objects.
    pub fn to_offload(&self, client: ClientId, enabled: bool) -> Result<Vec<OffloadItem>> {
        let owner = self.space().disks.get(client).ok_or_else(not_offered)?;
        let mut state = owner.state.lock();
        let now = self.space().clock.now();
        (state.enabled, state.announcing, state.seen) = (enabled, false, now);
        let jobs = state.send_offloads(now, self.space().options.put_release);
        Ok(jobs.iter().map(|(key, len)| self.jobs.offload_item(key, *len)).collect())
    }

    /// Records what [`Master::offloaded`] records, if the report is about the last work of the
    /// owner: `work` is its number. An owner that announces what is on its disk reports 0. A report
    /// about earlier work has no effect: by now the owner may write later values of the objects.
    ///
    /// # Errors
    /// Those of [`Master::offloaded`].
    pub fn report_offloaded(
        &self,
        client: ClientId,
        work: u64,
        items: &[OffloadItem],
        places: &[StoredAt],
    ) -> Result<()> {
        let is_current = |owner: Arc<DiskOwner>| {
            let state = owner.state.lock();
            if state.announcing { work == 0 } else { work != 0 && work == state.assigned.number }
        };
        // Without a disk, the call is refused below.
        let is_current = self.space().disks.get(client).is_none_or(is_current);
        if is_current || is_planted("copy-end-any") {
            return self.offloaded(client, items, places);
        }
        tracing::debug!(%client, work, "late report of a disk ignored");
        Ok(())
    }

    /// Records objects that an owner has written, or could not write (a length of -1). Objects that
    /// it was not asked to write survived its restart or that of the master. They count before its
    /// first heartbeat, if no other client has them and they were neither removed nor replaced.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the lists differ in length; `SEGMENT_NOT_FOUND` if the client has
    /// offered no disk.
    pub fn offloaded(&self, client: ClientId, items: &[OffloadItem], places: &[StoredAt]) -> Result<()> {
        if items.len() != places.len() {
            return Err(Error::invalid(format!(
                "request has {} locations for {} objects",
                places.len(),
                items.len()
            )));
        }
        if places.iter().any(|place| place.endpoint.len() > MAX_WORD) {
            return Err(Error::invalid(format!("an endpoint is longer than {MAX_WORD} bytes")));
        }
        if items.is_empty() || self.space().options.disks.is_none() {
            return Ok(());
        }
        let owner = self.space().disks.get(client).ok_or_else(not_offered)?;
        // Without tenants, any client could read an object of another tenant.
        let is_of_other = |item: &OffloadItem| !matches!(&*item.tenant, "" | DEFAULT_TENANT);
        let is_hidden = |item: &OffloadItem| self.key_form() == KeyForm::Plain && is_of_other(item);
        let hidden = items.iter().filter(|item| is_hidden(item)).count();
        if hidden > 0 {
            let flag = "--enable_multi_tenants=false";
            tracing::warn!(%client, flag, dropped = hidden, "objects of other tenants on a disk are not read");
        }
        let announcing = owner.state.lock().announcing;
        // Without any tenant, the policy is likely to be missing.
        let has_tenants = !self.space().tenants.infos().is_empty();
        let (mut of_unregistered, mut unlisted) = (0, 0);
        for (item, place) in items.iter().zip(places).filter(|(item, _)| !is_hidden(item)) {
            let Ok(key) = self.scoped(&item.tenant, &item.key) else {
                // A tenant that is not registered has no objects.
                let key = self.scoped_to_remove(&item.tenant, &item.key).ok().filter(|_| has_tenants);
                if let Some(key) = key.and_then(|key| ObjectKey::new(&key).ok()) {
                    owner.state.lock().mark_dropped(&key);
                    of_unregistered += 1;
                }
                continue;
            };
            let Ok(key) = ObjectKey::new(&key) else { continue };
            unlisted += usize::from(!self.note_offload(&owner, &key, place) && announcing);
        }
        let of = items.len();
        if of_unregistered > 0 {
            let flag = "--tenant_quota_connector_uri";
            tracing::warn!(%client, flag, dropped = of_unregistered, of, "objects on a disk dropped: their tenants are not registered");
        }
        if unlisted > 0 {
            tracing::info!(%client, dropped = unlisted, of, "objects on a disk dropped: removed, replaced or not in the snapshot");
        }
        self.space().eviction.end_backoff();
        Ok(())
    }

    /// Returns whether the report counts.
    fn note_offload(&self, owner: &Arc<DiskOwner>, key: &ObjectKey, place: &StoredAt) -> bool {
        let now = self.space().clock.now();
        let hash = self.space().directory.hash(key.as_bytes());
        let mut shard = self.space().directory.lock(hash);
        if !owner.is_alive() {
            // The removal of the disk visits this shard before or afterwards.
            return true;
        }
        let report = owner.end_offload(key, now);
        let len = u64::try_from(place.data_size).ok().filter(|len| *len > 0);
        let copy = DiskReplica::new(self.space().new_replica(), owner, len.unwrap_or(0), place);
        let found = shard.find(hash, key.as_bytes());
        // A disk whose owner has just gone is listed before what it holds is compared.
        found.into_iter().for_each(|slot| shard.prune_disks(slot));
        let counts = match (report, found, len) {
            (OffloadReport::Current, Some(slot), _) => {
                let object = &mut shard[slot];
                object.end_offload();
                let known = object.value().map(|value| (value.len, value.checksum, value.stamp));
                let on_disk = || object.disk().map(|disk| (disk.len, disk.checksum, disk.stamp));
                match known.or_else(on_disk) {
                    Some((there, checksum, stamp)) if Some(there) == len => {
                        object.add_disk_replica(there, checksum, stamp, copy);
                        true
                    }
                    _ => {
                        object.fail_offload();
                        false
                    }
                }
            }
            (OffloadReport::Unrequested, Some(slot), Some(len)) if shard[slot].has_any_holder() => {
                // The owner may have reported it before.
                shard[slot].disk().is_some_and(|disk| disk.len == len && disk.has_owner(owner.client))
                    || owner.state.lock().announcing && shard[slot].add_successor(copy)
            }
            (OffloadReport::Unrequested, _, Some(_)) if owner.state.lock().announcing => {
                self.admit_found(&mut shard, hash, key, copy, now)
            }
            _ => false,
        };
        if report == OffloadReport::Current {
            let offloads = &self.space().disks.offloads;
            count(match found {
                _ if counts => &offloads.completed,
                Some(_) => &offloads.failed,
                None => &offloads.cancelled,
            });
        }
        if !counts {
            owner.state.lock().mark_dropped(key);
        }
        counts
    }

    /// Adds an object that an owner found on its disk, if it was neither removed nor replaced.
    /// Returns whether it counts. An object counts that this master has listed as its owner left,
    /// or, while values of earlier masters are announced, one of the snapshot, or any without a
    /// snapshot.
    fn admit_found(
        &self,
        shard: &mut Shard<A, E>,
        hash: u64,
        key: &ObjectKey,
        copy: DiskReplica,
        now: Moment,
    ) -> bool {
        let Some(client) = copy.owner().map(|owner| owner.client) else { return false };
        let found = DiskHolding { client, version: copy.version };
        if self.space().announcements.is_being_removed(key.as_bytes()) {
            return false;
        }
        let is_unchecked = is_planted("disk-reports-unchecked");
        let listed = shard.absent.take(key, copy.len, found);
        let mut known = None;
        if listed.is_none() && !is_unchecked {
            if let Some(recovery) = self.jobs.recovery.get() {
                known = recovery.claim_on_disk(hash, key.as_bytes(), copy.len, found);
                if known.is_none() {
                    return false;
                }
            }
            let stamp = known.as_ref().and_then(|known| known.stamp);
            if !self.space().admits_earlier(shard, hash, key.as_bytes(), (stamp, None)) {
                return false;
            }
        }
        let checksum = listed.flatten().or_else(|| known.as_ref().and_then(|known| known.checksum));
        let slot = shard.find(hash, key.as_bytes());
        let add = || shard.add(hash, key.clone(), self.space().tenants.number(key.as_bytes()));
        let slot = slot.unwrap_or_else(add);
        let stamp = known.as_ref().and_then(|known| known.stamp).unwrap_or(Stamp::UNKNOWN);
        let owner = copy.owner().cloned();
        shard[slot].add_disk_replica(copy.len, checksum, stamp, copy);
        // An earlier announcement may have come while the tenant was not registered.
        owner.into_iter().for_each(|owner| owner.state.lock().spare(key));
        self.space().announcements.returned.record(key);
        if let Some(pins) = known {
            shard[slot].hard_pin |= pins.hard_pin;
            if pins.soft_pin > now {
                shard.set_soft_pin(slot, pins.soft_pin);
            }
            if !pins.group.is_empty() {
                shard.join_group(slot, &pins.group);
            }
        }
        true
    }

    /// Returns whether an owner is to clear its disk. It is returned once; from then on nothing on
    /// the disk counts.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` if the client has offered no disk.
    pub fn must_clear_disk(&self, client: ClientId) -> Result<bool> {
        let owner = self.space().disks.get(client).ok_or_else(not_offered)?;
        Ok(self.clear_disk(&owner, false))
    }

    /// Replaces the owner of a disk that is to be cleared by one with an empty disk. Returns
    /// whether the disk is to be cleared. If the work is numbered, the assignment is recorded.
    pub(crate) fn clear_disk(&self, owner: &Arc<DiskOwner>, numbered: bool) -> bool {
        let state = {
            let mut state = owner.state.lock();
            state.seen = self.space().clock.now();
            if !std::mem::take(&mut state.must_clear) {
                return false;
            }
            let (enabled, seen, fetches_work) = (state.enabled, state.seen, state.fetches_work);
            let assigned = state.assigned.clearing(numbered);
            DiskOwnerState { enabled, seen, fetches_work, assigned, ..DiskOwnerState::default() }
        };
        let (client, capacity) = (owner.client, owner.capacity.load(Relaxed));
        self.space().disks.insert(DiskOwner::new(
            client,
            owner.suspicion.clone(),
            capacity,
            self.space().disks.counters(),
            state,
        ));
        self.space().sweep_disks();
        true
    }

    /// Asks every owner to clear its disk.
    pub(crate) fn clear_disks(&self) {
        self.space().disks.owners.lock().values().for_each(|owner| owner.state.lock().must_clear = true);
    }

    /// Sets the size of a disk.
    ///
    /// # Errors
    /// `INVALID_PARAMS` below 0; `SEGMENT_NOT_FOUND` if the client has offered no disk.
    pub fn disk_capacity(&self, client: ClientId, bytes: i64) -> Result<()> {
        let bytes = u64::try_from(bytes)
            .map_err(|_| Error::invalid(format!("invalid disk capacity. bytes={bytes}")))?;
        let owner = self.space().disks.get(client).ok_or_else(not_offered)?;
        owner.capacity.store(bytes, Relaxed);
        Ok(())
    }

    /// Records that an owner has dropped an object from its disk.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`.
    pub fn dropped_from_disk(&self, client: ClientId, key: &[u8]) -> Result<()> {
        let hash = self.space().directory.hash(key);
        let mut shard = self.space().directory.lock(hash);
        let slot = shard.find(hash, key).ok_or_else(not_found)?;
        shard.prune_disks(slot);
        shard[slot].retain_disk_replicas(|owner| owner != client);
        shard.remove_if_empty(slot, MissCause::Evicted);
        Ok(())
    }

    /// Records that an owner has lost the object of a replica, if the disk of the owner has no
    /// later replica of the key. Returns whether the replica was dropped.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`.
    pub fn dropped_from_disk_if_current(
        &self,
        client: ClientId,
        key: &[u8],
        replica: ReplicaId,
    ) -> Result<bool> {
        let hash = self.space().directory.hash(key);
        let mut shard = self.space().directory.lock(hash);
        let slot = shard.find(hash, key).ok_or_else(not_found)?;
        shard.prune_disks(slot);
        let is_it = |copy: &DiskReplica| copy.id == replica && copy.is_of(client);
        if !shard[slot].disk().is_some_and(|disk| disk.copies.iter().any(is_it)) {
            shard.remove_if_empty(slot, MissCause::OwnerLost);
            return Ok(false);
        }
        shard[slot].retain_disk_replicas(|owner| owner != client);
        shard.remove_if_empty(slot, MissCause::Evicted);
        Ok(true)
    }

    /// Records that an owner has dropped an object from its disk, like
    /// [`Master::dropped_from_disk`], if the report came during the last work of the owner: `work`
    /// is its number. Since an earlier report, the object may have been written again.
    ///
    /// # Errors
    /// Those of [`Master::dropped_from_disk`].
    pub fn report_dropped(&self, client: ClientId, work: u64, key: &[u8]) -> Result<()> {
        let is_current = |owner: Arc<DiskOwner>| owner.state.lock().assigned.number == work;
        let is_current = self.space().disks.get(client).is_some_and(is_current);
        if is_current || is_planted("copy-end-any") { self.dropped_from_disk(client, key) } else { Ok(()) }
    }

    /// Drops the disks of clients without a recent heartbeat, with their replicas and promotions.
    pub(crate) fn expire_disks(&self, now: Moment) {
        let due = |owner: &DiskOwner| owner.state.lock().seen.after(self.space().options.client_lifetime());
        let lost = self.space().disks.remove(|owner| due(owner) <= now);
        if self.space().disks.count.load(Relaxed) != 0 {
            self.space()
                .disks
                .owners
                .lock()
                .values()
                .for_each(|owner| self.space().timers.schedule(due(owner)));
        }
        if !lost.is_empty() {
            self.jobs.end_promotions_of(&lost, now);
            self.space().sweep_disks();
        }
    }
}
