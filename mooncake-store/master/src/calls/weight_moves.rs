//! Managed weights: moves between memory and disk, and periodic work.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::SlotId;
use mooncake_protocol::wire::{
    WeightAvailability, WeightError, WeightMoveRequest, WeightOperation, WeightOperationQuery,
    WeightResidency,
};

use super::master::Master;
use super::weights::is_in_memory;
use crate::directory::Shard;
use crate::model::disk_replicas::DiskReplicas;
use crate::model::misses::MissCause;
use crate::model::weights::{Due, Progress, Result, WeightStats, check_change, check_number};
use crate::space::Victim;

/// Maximum number of objects of managed weights that one tick inspects.
const OBJECTS_AT_ONCE: u64 = 1 << 14;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Begins to move the objects of a revision to memory (`Hot`) or to the disks of clients
    /// (`Cold`). The heartbeats of the owners carry the move on.
    ///
    /// # Errors
    /// `InvalidArgument`; `NotFound`; `StaleGeneration`; `NotReady`, also for `Cold` without disks;
    /// `Busy` while there are leases or another move; `PolicyUnsatisfiable` for `Hot` if objects
    /// are on disk and this master does not promote.
    pub fn start_weight_move(&self, tenant: &str, request: WeightMoveRequest) -> Result<WeightOperation> {
        let WeightMoveRequest { id, metadata_generation, target } = request;
        let id = self.weight_id(tenant, id)?;
        check_change(&id, metadata_generation)?;
        let target = match WeightResidency::from_number(target.0) {
            Some(target @ (WeightResidency::Hot | WeightResidency::Cold)) => target,
            _ => return Err(WeightError::InvalidArgument),
        };
        let disks = self.space().options.disks.as_ref();
        let can = |target| match target {
            WeightResidency::Cold if disks.is_none() => Err(WeightError::NotReady),
            WeightResidency::Hot if disks.is_none_or(|disks| disks.promotion.is_none()) => {
                Err(WeightError::PolicyUnsatisfiable)
            }
            _ => Ok(()),
        };
        let at = self.instants();
        self.space().weights.lock().start_move(&id, metadata_generation, target, can, at)
    }

    /// Returns the state of a move.
    ///
    /// # Errors
    /// `InvalidArgument`; `NotFound`.
    pub fn weight_move(&self, tenant: &str, query: WeightOperationQuery) -> Result<WeightOperation> {
        let tenant = self.weight_tenant(tenant, &query.tenant)?;
        check_number(query.operation)?;
        self.space().weights.lock().query_move(&tenant, query.operation)
    }

    /// Aborts idle imports, removes the rest of removed revisions, carries moves on, and records
    /// what is lost.
    pub(super) fn tend_weights(&self, now: Moment) {
        let weights = &self.space().weights;
        if !weights.are_used() {
            return;
        }
        let aborted = weights.lock().expire(self.space().options.weight_import_idle, self.instants());
        for id in aborted {
            tracing::info!(resource = %id.resource, revision = %id.revision, "idle import of weights aborted");
            self.remove_weights(&id);
        }
        let mut position = self.weight_position.lock();
        let (due, is_last) = weights.lock().due(position.as_ref(), OBJECTS_AT_ONCE);
        *position = due.last().filter(|_| !is_last).map(|due| due.id.clone());
        drop(position);
        due.iter().for_each(|due| self.tend_revision(due, now));
    }

    fn tend_revision(&self, due: &Due, now: Moment) {
        match due.availability {
            WeightAvailability::Importing => {}
            WeightAvailability::Deleting | WeightAvailability::Deleted => {
                // Objects of an earlier master may return later.
                if self.space().directory.group(&due.group).is_some() {
                    self.remove_group(&due.group);
                }
                if due.availability == WeightAvailability::Deleting {
                    self.end_removal_of(&due.id);
                }
            }
            WeightAvailability::Ready | WeightAvailability::Degraded => {
                if let Some(target) = due.target {
                    let progress = self.carry_on(due, target, now);
                    let at = self.instants();
                    return self.space().weights.lock().progress(due, progress, at);
                }
                let found = self.find_objects(&due.group, false);
                let may_return = !self.space().announcements.is_closed();
                let at = self.instants();
                self.space().weights.lock().observe(due, &found, may_return, at);
            }
        }
    }

    /// Requests what moves the objects of a revision, and returns the progress.
    fn carry_on(&self, due: &Due, target: WeightResidency, now: Moment) -> Progress {
        let mut progress = Progress { done: 0, obstacle: None };
        let (mut seen, mut victim) = (0, Victim::empty());
        self.visit_group(&due.group, |shard, slot| {
            seen += 1;
            shard.prune(slot, now, self.space().options.put_release);
            let moved = match target {
                WeightResidency::Hot => self.promote_weight(shard, slot),
                _ => self.demote_weight(shard, slot, now, &mut victim),
            };
            match moved {
                Ok(moved) => progress.done += u64::from(moved),
                Err(why) => {
                    let key = shard[slot].key.as_bytes().escape_ascii();
                    progress.obstacle.get_or_insert_with(|| format!("cannot move weights: {why}. key={key}"));
                }
            }
        });
        self.space().release_parents(&mut victim);
        if victim.objects > 0 {
            self.space().eviction.end_backoff();
        }
        if seen < due.objects {
            progress.obstacle.get_or_insert_with(|| {
                format!("cannot move weights: objects are lost. found={seen} expected={}", due.objects)
            });
        }
        progress
    }

    /// Drops the replicas in memory of an object that is on disk, and requests the write to a disk
    /// of one that is not. Returns whether the object is on disk only.
    fn demote_weight(
        &self,
        shard: &mut Shard<A, E>,
        slot: SlotId,
        now: Moment,
        victim: &mut Victim<A>,
    ) -> Result<bool, &'static str> {
        let object = &shard[slot];
        let on_disk = object.disk().is_some_and(DiskReplicas::is_live);
        if object.value().is_none() {
            return Ok(on_disk);
        }
        if on_disk {
            let in_use = object.write().is_some() || object.copying().is_some();
            if in_use || self.space().is_read(object, now) {
                return Ok(false);
            }
            self.space().evict_slot(shard, slot, MissCause::Evicted, now, victim);
            return Ok(true);
        }
        let is_requested =
            object.offload().is_some_and(|owner| owner.is_offloading(object.key.as_bytes(), now));
        if !is_requested {
            self.jobs.offload(shard, slot, now);
            if shard[slot].offload().is_none() {
                return Err("no client with the object has a disk that takes it");
            }
        }
        Ok(false)
    }

    /// Requests the promotion of an object that is on disk only. Returns whether the object is in
    /// memory.
    fn promote_weight(&self, shard: &mut Shard<A, E>, slot: SlotId) -> Result<bool, &'static str> {
        let object = &shard[slot];
        if is_in_memory(object) {
            return Ok(true);
        }
        let promotion = self.space().options.disks.as_ref().and_then(|disks| disks.promotion);
        let Some(promotion) = promotion else { return Err("this master does not promote") };
        let owner = self.space().disk_owner(object).ok_or("no disk has the object")?;
        owner.queue_promotion(&object.key, promotion.queue_limit);
        Ok(false)
    }

    /// Returns the numbers of managed weights for the metrics.
    pub(super) fn weight_stats(&self) -> WeightStats {
        if !self.space().weights.are_used() {
            return WeightStats::default();
        }
        self.space().weights.lock().stats(self.space().clock.now())
    }
}
