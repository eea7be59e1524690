//! Managed weights: import, leases and removal of groups of objects. [`moves`](super::weight_moves)
//! has their periodic work.

use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::SlotId;
use mooncake_core::replica::DataType;
use mooncake_core::{Error, ErrorCode};
use mooncake_protocol::api::DEFAULT_TENANT;
use mooncake_protocol::wire::{
    WeightChange, WeightCommit, WeightError, WeightId, WeightImport, WeightLease, WeightLeaseRelease,
    WeightLeaseRenewal, WeightLeaseRequest, WeightList, WeightPage, WeightQuery, WeightRevision, WeightView,
};

use super::lookup::is_readable;
use super::master::Master;
use crate::directory::{Object, Shard};
use crate::model::group::MAX_OBJECTS;
use crate::model::misses::MissCause;
use crate::model::weights::{
    Found, Instants, Result, check_change, check_commit, check_id, check_import, check_lease, check_list,
    check_number, check_ttl, group_of,
};

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Begins to import a revision of weights. Objects that are then put into its group belong to
    /// the revision: no call but those about weights removes or replaces them, and eviction leaves
    /// them in memory. Repeating the call has no effect.
    ///
    /// # Errors
    /// `InvalidArgument`; `Conflict` if the revision has other numbers or is removed; `Busy` if
    /// there are too many revisions.
    pub fn begin_weight_import(&self, tenant: &str, import: WeightImport) -> Result<WeightRevision> {
        let WeightImport { id, group, payloads, bytes } = import;
        let id = self.weight_id(tenant, id)?;
        let group = check_import(&id, &group, payloads, bytes)?;
        if self.space().tenants.are_on() && self.space().tenants.prefix(&id.tenant).is_none() {
            return Err(WeightError::InvalidArgument);
        }
        let directory_group = self.scoped_group(&id.tenant, &group).into_owned();
        let at = self.instants();
        self.space().weights.add(|table| table.begin(id, group, &directory_group, (payloads, bytes), at))
    }

    /// Completes an import if the objects of the group are exactly those of the manifest. Repeating
    /// the call has no effect.
    ///
    /// # Errors
    /// `InvalidArgument`; `NotFound`, also if the group has no objects; `StaleGeneration`;
    /// `Conflict` if an object is missing, being written, or not of the manifest; `Busy` during
    /// another commit of the revision.
    pub fn commit_weight_import(&self, tenant: &str, commit: WeightCommit) -> Result<WeightRevision> {
        let WeightCommit { id, metadata_generation, mut manifest } = commit;
        let id = self.weight_id(tenant, id)?;
        check_commit(&id, metadata_generation, &manifest)?;
        manifest.group = group_of(&id);
        let begun = self.space().weights.lock().begin_commit(&id, metadata_generation, &manifest)?;
        let group = match begun {
            Ok(group) => group,
            Err(same) => return Ok(*same),
        };
        self.await_starts();
        let mut found = self.find_objects(&group, true);
        // The table compares keys as clients name them.
        let prefix = self.space().tenants.prefix(&id.tenant).map_or(0, |prefix| prefix.len());
        if self.space().tenants.are_on() {
            found.objects.iter_mut().for_each(|(key, _)| drop(key.drain(..prefix.min(key.len()))));
        }
        let at = self.instants();
        self.space().weights.lock().end_commit(&id, manifest, found, at)
    }

    /// Cancels an import and removes its objects. Repeating the call has no effect.
    ///
    /// # Errors
    /// `InvalidArgument`; `NotFound`; `StaleGeneration`; `Conflict` if the import is complete.
    pub fn abort_weight_import(&self, tenant: &str, change: WeightChange) -> Result<WeightRevision> {
        let WeightChange { id, metadata_generation } = change;
        let id = self.weight_id(tenant, id)?;
        check_change(&id, metadata_generation)?;
        let at = self.instants();
        let revision = self.space().weights.lock().abort(&id, metadata_generation, at)?;
        self.remove_weights(&id);
        Ok(revision)
    }

    /// Returns the record of a revision, and its leases.
    ///
    /// # Errors
    /// `InvalidArgument`; `NotFound`.
    pub fn weight_revision(&self, tenant: &str, query: WeightQuery) -> Result<WeightView> {
        let id = self.weight_id(tenant, query.id)?;
        check_id(&id)?;
        self.space().weights.lock().view(&id, self.space().clock.now())
    }

    /// Returns the revisions of a resource by pages.
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub fn weight_revisions(&self, tenant: &str, list: WeightList) -> Result<WeightPage> {
        let WeightList { tenant: of, namespace, resource, token, limit } = list;
        let tenant = self.weight_tenant(tenant, &of)?;
        check_list(&namespace, &resource)?;
        let of = WeightId { tenant, namespace, resource, ..WeightId::default() };
        self.space().weights.lock().page(&of, &token, limit, self.space().clock.now())
    }

    /// Grants a lease on a revision, which is neither removed nor moved until the end. A holder
    /// that has a lease receives the same one.
    ///
    /// # Errors
    /// `InvalidArgument`; `NotFound`; `StaleGeneration`; `NotReady`; `Busy` during a move, or for
    /// too many leases.
    pub fn lease_weights(&self, tenant: &str, request: WeightLeaseRequest) -> Result<WeightLease> {
        let WeightLeaseRequest { id, metadata_generation, holder, ttl_ms } = request;
        let id = self.weight_id(tenant, id)?;
        check_change(&id, metadata_generation)?;
        let ttl = check_lease(&holder, ttl_ms)?;
        let at = self.instants();
        self.space().weights.lock().acquire(&id, metadata_generation, &holder, ttl, at)
    }

    /// Extends a lease on a revision. A lease is never shortened.
    ///
    /// # Errors
    /// `InvalidArgument`; `NotFound`; `LeaseExpired`.
    pub fn renew_weight_lease(&self, tenant: &str, renewal: WeightLeaseRenewal) -> Result<WeightLease> {
        let WeightLeaseRenewal { tenant: of, lease, ttl_ms } = renewal;
        let tenant = self.weight_tenant(tenant, &of)?;
        check_number(lease)?;
        let (ttl, at) = (check_ttl(ttl_ms)?, self.instants());
        self.space().weights.lock().renew(&tenant, lease, ttl, at)
    }

    /// Ends a lease on a revision. An unknown lease has ended.
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub fn release_weight_lease(&self, tenant: &str, release: WeightLeaseRelease) -> Result<()> {
        let tenant = self.weight_tenant(tenant, &release.tenant)?;
        check_number(release.lease)?;
        self.space().weights.lock().release(&tenant, release.lease);
        Ok(())
    }

    /// Removes the objects of a revision. Objects in a write or copy follow within seconds.
    /// Repeating the call has no effect.
    ///
    /// # Errors
    /// `InvalidArgument`; `NotFound`; `StaleGeneration`; `NotReady` during the import; `Busy` while
    /// there are leases.
    pub fn delete_weights(&self, tenant: &str, change: WeightChange) -> Result<WeightRevision> {
        let WeightChange { id, metadata_generation } = change;
        let id = self.weight_id(tenant, id)?;
        check_change(&id, metadata_generation)?;
        let at = self.instants();
        let revision = self.space().weights.lock().delete(&id, metadata_generation, at)?;
        self.remove_weights(&id);
        Ok(self.end_removal_of(&id).unwrap_or(revision))
    }

    /// Returns the tenant of a call about weights. `of` is the one in the request.
    pub(super) fn weight_tenant(&self, tenant: &str, of: &str) -> Result<String> {
        if !self.space().tenants.are_on() {
            return Ok(DEFAULT_TENANT.to_owned());
        }
        let tenant = if tenant.is_empty() { DEFAULT_TENANT } else { tenant };
        if of.is_empty() || of == tenant { Ok(tenant.to_owned()) } else { Err(WeightError::InvalidArgument) }
    }

    /// Returns the identity in a call with its tenant.
    pub(super) fn weight_id(&self, tenant: &str, id: WeightId) -> Result<WeightId> {
        let tenant = self.weight_tenant(tenant, &id.tenant)?;
        Ok(WeightId { tenant, ..id })
    }

    /// Returns the present time by both clocks.
    pub(super) fn instants(&self) -> Instants {
        Instants { now: self.space().clock.now(), wall_ms: self.space().clock.wall_ms() }
    }

    /// Waits until no start of a write is in progress that began before this call. A start compares
    /// the state of its group under the lock of its shard.
    fn await_starts(&self) {
        self.space().directory.shards().for_each(drop);
    }

    /// Checks whether a write may start, as far as managed weights are concerned. The caller holds
    /// the lock of the shard of the object.
    pub(super) fn admit_to_weights(
        &self,
        group: &str,
        key: &[u8],
        data_type: DataType,
        now: Moment,
    ) -> mooncake_core::Result<()> {
        let weights = &self.space().weights;
        if !weights.may_manage(group) {
            return Ok(());
        }
        // Both names have the prefix of the tenant.
        let (_, name) = self.space().tenants.split(key);
        if weights.lock().admit(group, name, data_type, now).is_err() {
            return Err(managed(key));
        }
        let known = self.space().directory.group(group);
        if weights.manage(group) && known.is_some_and(|known| known.len() >= MAX_OBJECTS) {
            return Err(managed(key));
        }
        Ok(())
    }

    /// Visits the objects of a group, each under the lock of its shard.
    pub(super) fn visit_group(&self, group: &str, mut see: impl FnMut(&mut Shard<A, E>, SlotId)) {
        let Some(known) = self.space().directory.group(group) else { return };
        for hash in known.hashes() {
            let mut shard = self.space().directory.lock(hash);
            if let Some(slot) = shard.find_hash(hash)
                && shard[slot].group_name() == group
            {
                see(&mut shard, slot);
            }
        }
    }

    /// Returns the objects of a group, whose keys have the prefix of the tenant. With `pin`, they
    /// are hard-pinned from now on.
    pub(super) fn find_objects(&self, group: &str, pin: bool) -> Found {
        let now = self.space().clock.now();
        let mut found = Found::default();
        self.visit_group(group, |shard, slot| {
            shard.prune(slot, now, self.space().options.put_release);
            if pin {
                shard.pin_hard(slot);
            }
            let object = &shard[slot];
            found.writes += u64::from(object.write().is_some_and(|write| !write.promotes));
            if is_readable(shard, slot, now) {
                found.objects.push((object.key.as_bytes().to_vec(), len_of(object)));
                found.in_memory += u64::from(is_in_memory(object));
            }
        });
        found
    }

    /// Removes the objects of a revision that is being removed, as far as none is being written or
    /// copied.
    pub(super) fn remove_weights(&self, id: &WeightId) {
        let group = self.space().weights.lock().group(id);
        let Some(group) = group else { return };
        self.await_starts();
        self.remove_group(&group);
    }

    /// Removes the objects of a group.
    pub(super) fn remove_group(&self, group: &Arc<str>) {
        let now = self.space().clock.now();
        let mut sampled = Vec::new();
        self.visit_group(group, |shard, slot| {
            shard.prune(slot, now, self.space().options.put_release);
            if self.blocked(&shard[slot], true, now).is_none() {
                let hash = shard[slot].hash;
                sampled.extend(Some(hash).filter(|hash| self.space().curve.feed.sample().contains(*hash)));
                self.drop_object(shard, slot, now);
            } else {
                shard.remove_if_empty(slot, MissCause::OwnerLost);
            }
        });
        sampled.into_iter().for_each(|hash| self.space().curve.feed.note_removal(hash));
        self.space().eviction.end_backoff();
    }

    /// Records that a revision is removed, if its group has no objects.
    pub(super) fn end_removal_of(&self, id: &WeightId) -> Option<WeightRevision> {
        let group = self.space().weights.lock().group(id)?;
        if self.space().directory.group(&group).is_some() {
            return None;
        }
        let at = self.instants();
        self.space().weights.lock().end_removal(id, at)
    }
}

/// Returns whether an object can be read from memory.
pub(super) fn is_in_memory<A: SegmentAllocator>(object: &Object<A>) -> bool {
    object.value().is_some_and(|value| value.readable().next().is_some())
}

fn len_of<A: SegmentAllocator>(object: &Object<A>) -> u64 {
    let on_disk = || object.disk().map_or(0, |disk| disk.len);
    object.value().map_or_else(on_disk, |value| value.len)
}

/// Returns the error of a call that would change managed weights.
#[cold]
pub(super) fn managed(key: &[u8]) -> Error {
    Error::new(
        ErrorCode::UnavailableInCurrentStatus,
        format!(
            "cannot change object: it belongs to managed weights. key={}; delete the revision of the weights",
            key.escape_ascii()
        ),
    )
}
