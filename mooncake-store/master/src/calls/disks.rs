//! Disks of clients: mount and unmount, offload reports, cleared disks.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ClientId, ObjectKey};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::wire::{OffloadItem, StoredAt};

use super::master::Master;
use crate::directory::object::not_found;
use crate::model::disk::{DiskOwner, DiskOwnerState, OffloadReport, not_offered};
use crate::model::disk_replicas::DiskReplica;
use crate::model::misses::MissCause;
use crate::space::mount::MAX_WORD;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Offers the disk of a client, or changes whether objects may be written there. Replicas of an
    /// earlier offer stay.
    ///
    /// # Errors
    /// `UNABLE_OFFLOAD` if this master uses no disks.
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
        let state =
            DiskOwnerState { enabled, announcing: true, joined: now, seen: now, ..DiskOwnerState::default() };
        self.space().disks.insert(DiskOwner::new(client, 0, self.space().disks.promotions.clone(), state));
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
        if self.space().disks.remove(|owner| owner.client == client) == 0 {
            return Err(not_offered());
        }
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

    /// Records objects that an owner has written, or could not write (a length of -1). Of objects
    /// that it was not asked to write, those that no other client has count before its first
    /// heartbeat: they survived its restart.
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
        for (item, place) in items.iter().zip(places) {
            // A tenant that was removed has no objects.
            let Ok(key) = self.scoped(&item.tenant, &item.key) else { continue };
            let Ok(key) = ObjectKey::new(&key) else { continue };
            self.note_offload(&owner, &key, place);
        }
        self.space().eviction.end_backoff();
        Ok(())
    }

    fn note_offload(&self, owner: &Arc<DiskOwner>, key: &ObjectKey, place: &StoredAt) {
        let now = self.space().clock.now();
        let hash = self.space().directory.hash(key.as_bytes());
        let mut shard = self.space().directory.lock(hash);
        if !owner.is_alive() {
            // The removal of the disk visits this shard before or afterwards.
            return;
        }
        let report = owner.end_offload(key, now);
        let len = u64::try_from(place.data_size).ok().filter(|len| *len > 0);
        let copy = DiskReplica::new(self.space().new_replica(), owner, len.unwrap_or(0), &place.endpoint);
        let found = shard.find(hash, key.as_bytes());
        let counts = match (report, found, len) {
            (OffloadReport::Current, Some(slot), _) => {
                let object = &mut shard[slot];
                object.end_offload();
                let known = object.value().map(|value| (value.len, value.checksum));
                let known = known.or_else(|| object.disk().map(|disk| (disk.len, disk.checksum)));
                match known {
                    Some((there, checksum)) if Some(there) == len => {
                        object.add_disk_replica(there, checksum, copy);
                        true
                    }
                    _ => {
                        object.fail_offload();
                        false
                    }
                }
            }
            (OffloadReport::Unasked, Some(slot), Some(len)) if shard[slot].has_any_holder() => {
                // The owner may have reported it before.
                shard[slot].disk().is_some_and(|disk| disk.len == len && disk.has_owner(owner.client))
                    || owner.state.lock().announcing && shard[slot].add_successor(copy)
            }
            (OffloadReport::Unasked, found, Some(len)) if owner.state.lock().announcing => {
                let add = || shard.add(hash, key.clone(), self.space().tenants.number(key.as_bytes()));
                let slot = found.unwrap_or_else(add);
                shard[slot].add_disk_replica(len, None, copy);
                let pins = self.jobs.recovery.get().and_then(|recovery| {
                    recovery.pins_of_disk_replica(hash, key.as_bytes(), len, owner.client)
                });
                if let Some(pins) = pins {
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
            _ => false,
        };
        if !counts {
            owner.state.lock().mark_dropped(key);
        }
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
            let (enabled, seen, asks_for_work) = (state.enabled, state.seen, state.asks_for_work);
            let assigned = state.assigned.clearing(numbered);
            DiskOwnerState { enabled, seen, asks_for_work, assigned, ..DiskOwnerState::default() }
        };
        let (client, capacity) = (owner.client, owner.capacity.load(Relaxed));
        self.space().disks.insert(DiskOwner::new(
            client,
            capacity,
            self.space().disks.promotions.clone(),
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
        shard[slot].retain_disk_replicas(|owner| owner != client);
        shard.remove_if_empty(slot, MissCause::Evicted);
        Ok(())
    }

    /// Drops the disks of clients without a recent heartbeat. Returns whether there were any.
    pub(crate) fn expire_disks(&self, now: Moment) -> bool {
        let due = |owner: &DiskOwner| owner.state.lock().seen.after(self.space().options.client_ttl);
        let gone = self.space().disks.remove(|owner| due(owner) <= now);
        if self.space().disks.count.load(Relaxed) != 0 {
            self.space()
                .disks
                .owners
                .lock()
                .values()
                .for_each(|owner| self.space().timers.schedule(due(owner)));
        }
        gone != 0
    }
}
