//! Snapshots: objects, tasks and drain jobs, written for the next master while this one goes on.
//!
//! A snapshot makes nothing readable. Objects return as they do without one: the owner of a segment
//! mounts it again, checks the bytes, and announces the intact objects. The snapshot adds what the
//! owners do not know: removals and replacements, the order of use, what the eviction policy has
//! learned, pins and groups of objects on disks, tasks, and drained segments.

use std::cell::RefCell;
use std::cmp::Ordering::Greater;
use std::ops::ControlFlow;
use std::time::Duration;

use mooncake_core::Result;
use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::SlotId;
use mooncake_protocol::wire::{EpochPair, StoredLifetime, WeightRevision};

use super::master::Master;
use crate::directory::{Object, Shard};
use crate::jobs::recovery::Recovery;
use crate::model::disk_replicas::DiskReplicas;
use crate::model::lifetime::Lifetime;
use crate::model::returned_keys::{Returned, SnapshotRecord};
use crate::model::segment::Allocation;
use crate::model::snapshot::{
    Horizon, ReplicaPosition, Snapshot, SnapshotDrains, SnapshotHead, SnapshotObject, SnapshotPart,
    SnapshotWeights, disk_position, encode_head, encode_part,
};
use crate::model::value::Stamp;

/// Maximum number of objects or tasks in one record.
const PART: usize = 4096;

/// Maximum number of drain jobs in one record. Each may have many moves in progress.
const JOBS: usize = 16;

/// Maximum number of parts of the restored state that one tick forgets.
const PARTS_AT_ONCE: usize = 16;

/// Number of earlier masters whose points of history are passed on.
const MAX_EARLIER_MASTERS: usize = 16;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Writes every readable object, task and drain job to a snapshot. Returns the number of
    /// objects. Calls go on meanwhile: nothing is locked for longer than a few hundred objects
    /// take. `write` receives the next bytes, and may end the snapshot with an error.
    ///
    /// # Errors
    /// Those of `write`.
    pub fn snapshot(&self, mut write: impl FnMut(&[u8]) -> Result<()>) -> Result<u64> {
        let returned = self.space().announcements.returned.begin();
        // An object that was written before this number is visited below, or was gone.
        let since = Horizon { epoch: self.space().epoch, number: self.space().directory.next_stamp_number() };
        let uses = self.space().directory.next_use_number();
        let now = self.space().clock.now();
        let mut horizons = vec![since];
        horizons.extend(
            self.jobs.recovery.get().into_iter().flat_map(Recovery::horizons).take(MAX_EARLIER_MASTERS),
        );
        let promise_ms = self.space().promise_ms(now);
        let learned = self.space().directory.learned.as_ref().map_or_else(Vec::new, |learned| learned.save());
        let epochs = self.space().announcements.order.read().nearest();
        let has_tenants = Some(true).filter(|_| self.space().tenants.are_on());
        write(&encode_head(&SnapshotHead { uses, horizons, promise_ms, learned, epochs, has_tenants }))?;
        let weights = self.weights_to_snapshot(now);
        let (mut objects, mut number) = (0u64, 0u64);
        let mut put = |part: SnapshotPart| {
            let mut bytes = Vec::new();
            encode_part(SnapshotPart { number, ..part }, &mut bytes);
            number += 1;
            write(&bytes)
        };
        // First the objects whose owners may return: one that returns meanwhile is visited below.
        objects += self.recovered_to_snapshot(false, &mut put)?;
        // An object that is also elsewhere follows below with all its replicas, and counts.
        objects += self.absent_to_snapshot(false, &mut put)?;
        objects += self.expired_to_snapshot(&mut put)?;
        let (count, left) = self.readable_to_snapshot(&mut put)?;
        objects += count;
        // Objects whose client expires during the visit are in at least one of the two lists.
        objects += self.expired_to_snapshot(&mut put)?;
        // Objects that left the directory before their visit are only in these lists.
        objects += self.absent_to_snapshot(true, &mut put)?;
        objects += self.recovered_to_snapshot(true, &mut put)?;
        objects += left.len() as u64;
        put(SnapshotPart { objects: left, ..SnapshotPart::default() })?;
        objects += self.returned_to_snapshot(&returned, &mut put)?;
        let (SnapshotDrains { mut jobs, drained }, ids) = self.jobs.drains_to_snapshot();
        put(SnapshotPart {
            drains: SnapshotDrains { jobs: Vec::new(), drained },
            ..SnapshotPart::default()
        })?;
        while !jobs.is_empty() {
            let some = jobs.drain(..JOBS.min(jobs.len())).collect();
            put(SnapshotPart {
                drains: SnapshotDrains { jobs: some, drained: Vec::new() },
                ..SnapshotPart::default()
            })?;
        }
        for ids in ids.chunks(PART / 16) {
            let tasks = self.jobs.tasks.lock();
            let noted: Vec<_> =
                ids.iter().filter_map(|(id, until)| tasks.to_snapshot(*id, *until, now)).collect();
            drop(tasks);
            put(SnapshotPart { tasks: noted, ..SnapshotPart::default() })?;
        }
        for weights in weights {
            put(SnapshotPart { weights: Some(weights), ..SnapshotPart::default() })?;
        }
        put(SnapshotPart { last: true, ..SnapshotPart::default() })?;
        Ok(objects)
    }

    /// Writes the readable objects to a snapshot. Returns the number of those that are written, and
    /// the last objects, which are not.
    fn readable_to_snapshot(
        &self,
        put: &mut impl FnMut(SnapshotPart) -> Result<()>,
    ) -> Result<(u64, Vec<SnapshotObject>)> {
        let (now, wall_ms) = (self.space().clock.now(), self.space().clock.wall_ms());
        let (batch, mut count, mut failed) = (RefCell::new(Vec::new()), 0, Ok(()));
        self.space().directory.visit_while(
            |shard, slot| batch.borrow_mut().extend(self.object_to_snapshot(shard, slot, now, wall_ms)),
            || {
                let mut objects = batch.borrow_mut();
                if objects.len() < PART {
                    return ControlFlow::Continue(());
                }
                count += objects.len() as u64;
                failed =
                    put(SnapshotPart { objects: std::mem::take(&mut *objects), ..SnapshotPart::default() });
                if failed.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            },
        );
        failed.map(|()| (count, batch.into_inner()))
    }

    fn object_to_snapshot(
        &self,
        shard: &Shard<A, E>,
        slot: SlotId,
        now: Moment,
        wall_ms: u64,
    ) -> Option<SnapshotObject> {
        let lifetime = shard.lifetime(slot);
        if lifetime.is_some_and(|lifetime| lifetime.end(now).is_some()) {
            return None;
        }
        let lifetime = lifetime.map(|lifetime| lifetime.to_stored(now, wall_ms));
        let mut object = to_snapshot(&shard[slot], lifetime, now)?;
        self.add_absent(shard, slot, &mut object);
        Some(object)
    }

    /// Writes the objects to a snapshot that have returned since it began, until there are none.
    /// Owners announce each object once, so there is an end. Returns the number of objects.
    fn returned_to_snapshot(
        &self,
        returned: &SnapshotRecord<'_>,
        put: &mut impl FnMut(SnapshotPart) -> Result<()>,
    ) -> Result<u64> {
        let mut count = 0;
        loop {
            let keys = match returned.take() {
                Returned::These(_) if is_planted("snapshot-forgets-returns") => return Ok(count),
                Returned::These(keys) if keys.is_empty() => return Ok(count),
                Returned::These(keys) => keys,
                Returned::TooMany => {
                    let (written, objects) = self.readable_to_snapshot(put)?;
                    count += written + objects.len() as u64;
                    put(SnapshotPart { objects, ..SnapshotPart::default() })?;
                    continue;
                }
            };
            let (now, wall_ms) = (self.space().clock.now(), self.space().clock.wall_ms());
            for keys in keys.chunks(PART) {
                let objects: Vec<_> = keys
                    .iter()
                    .filter_map(|key| {
                        let hash = self.space().directory.hash(key.as_bytes());
                        let shard = self.space().directory.lock(hash);
                        let slot = shard.find(hash, key.as_bytes());
                        // The client may have expired since.
                        slot.and_then(|slot| self.object_to_snapshot(&shard, slot, now, wall_ms))
                            .or_else(|| shard.expired.object_to_snapshot(key.as_bytes(), now, wall_ms))
                    })
                    .collect();
                count += objects.len() as u64;
                put(SnapshotPart { objects, ..SnapshotPart::default() })?;
            }
        }
    }

    /// Restores a snapshot of an earlier master, before the first call is served. Only the first
    /// snapshot counts.
    pub fn recall(&self, mut snapshot: Snapshot) {
        let now = self.space().clock.now();
        if let Some((converted, dropped)) = snapshot.convert_keys(self.key_form()) {
            tracing::warn!(converted, dropped, "objects of a snapshot with another --enable_multi_tenants");
        }
        let Snapshot { head, objects, tasks, drains, weights } = snapshot;
        let used = objects.iter().map(|object| object.used).max().unwrap_or(0);
        self.space().directory.raise_use_number(head.uses.max(used));
        self.note_promise(Duration::from_millis(head.promise_ms), &"snapshot");
        self.restore_learned(&head.learned);
        self.restore_order(&head);
        self.jobs.tasks.lock().restore(tasks, now);
        self.jobs.restore_drains(drains, now);
        self.restore_weights(weights);
        let _ = self
            .jobs
            .recovery
            .set(Recovery::new(head.horizons, objects, now, |key| self.space().directory.hash(key)));
    }

    /// Returns the managed weights in parts of a snapshot.
    fn weights_to_snapshot(&self, now: Moment) -> Vec<SnapshotWeights> {
        if !self.space().weights.are_used() {
            return Vec::new();
        }
        let (revisions, leases) = self.space().weights.lock().save(now);
        let revisions = revisions.chunks(PART).map(|some| (some.to_vec(), Vec::new()));
        let leases = leases.chunks(PART).map(|some| (Vec::new(), some.to_vec()));
        revisions.chain(leases).map(|(revisions, leases)| SnapshotWeights { revisions, leases }).collect()
    }

    /// Restores the managed weights of an earlier master.
    fn restore_weights(&self, weights: SnapshotWeights) {
        let SnapshotWeights { revisions, leases } = weights;
        let group = |of: &WeightRevision| self.scoped_group(&of.id.tenant, &of.manifest.group).into_owned();
        let at = self.instants();
        self.space().weights.add(|table| table.restore(revisions, leases, group, at));
    }

    /// Restores the order of earlier masters.
    fn restore_order(&self, head: &SnapshotHead) {
        let mut order = self.space().announcements.order.write();
        let mut newer = self.space().epoch;
        for horizon in &head.horizons {
            order.add(EpochPair { newer, older: horizon.epoch });
            newer = horizon.epoch;
        }
        head.epochs.iter().for_each(|pair| order.add(*pair));
    }

    /// Writes the objects of the snapshot of an earlier master to a snapshot, with the replicas
    /// that no client has announced. With `claimed`, only those of which a client has announced
    /// another replica and that are not in the directory, and otherwise those of which no client
    /// has announced any. Returns their number.
    fn recovered_to_snapshot(
        &self,
        claimed: bool,
        put: &mut impl FnMut(SnapshotPart) -> Result<()>,
    ) -> Result<u64> {
        let Some(recovery) = self.jobs.recovery.get() else { return Ok(0) };
        let mut count = 0;
        for part in recovery.parts() {
            let mut objects = recovery.unclaimed(part, claimed);
            objects.retain(|object| {
                let hash = self.space().directory.hash(&object.key);
                let shard = self.space().directory.lock(hash);
                let is_there = claimed && shard.find(hash, &object.key).is_some();
                !is_there && self.still_counts(&shard, hash, object)
            });
            count += objects.len() as u64;
            if !objects.is_empty() {
                put(SnapshotPart { objects, ..SnapshotPart::default() })?;
            }
        }
        Ok(count)
    }

    /// Adds the replicas whose owners may return to the description of an object for a snapshot.
    fn add_absent(&self, shard: &Shard<A, E>, slot: SlotId, object: &mut SnapshotObject) {
        shard.absent.complete(object);
        let hash = shard[slot].hash;
        let recovery = self.jobs.recovery.get();
        let Some(rest) = recovery.and_then(|it| it.rest_of_claimed(hash, &object.key)) else { return };
        let is_same = object.written.is_none_or(|written| rest.written == Some(written));
        if is_same && rest.len == object.len && self.still_counts(shard, hash, &rest) {
            object.add_replicas(&rest);
        }
    }

    /// Returns whether an object of the snapshot of an earlier master was neither removed nor
    /// replaced since the start. `hash` is that of its key, and `shard` the shard.
    fn still_counts(&self, shard: &Shard<A, E>, hash: u64, object: &SnapshotObject) -> bool {
        let written = object.written.map(Stamp::from);
        let found = shard.find(hash, &object.key).and_then(|slot| shard[slot].value());
        let is_replaced = found.is_some_and(|value| {
            let order = self.space().announcements.order.read();
            written.is_none_or(|written| order.compare(value.stamp, written) == Some(Greater))
        });
        let known = found.filter(|value| Some(value.stamp) == written);
        let written = (written, known.map(|value| value.writer.client));
        !is_replaced && self.space().admits_earlier(shard, hash, &object.key, written)
    }

    /// Restores what an eviction policy has learned under an earlier master.
    fn restore_learned(&self, saved: &[u8]) {
        let Some(learned) = &self.space().directory.learned else { return };
        if saved.is_empty() {
            tracing::info!("the snapshot has no learned values: the eviction policy starts without");
        } else if let Err(error) = learned.load(saved) {
            tracing::warn!(%error, "the eviction policy starts without learned values");
        } else {
            tracing::info!(uses = learned.uses(), "learned values of the eviction policy restored");
        }
    }

    /// Ends announcements of values of earlier masters, once their time is over. The restored state
    /// is forgotten part by part before. Clients that return later find in a list what still counts
    /// of it.
    pub(crate) fn forget_recovered(&self, now: Moment) {
        if self.space().announcements.is_closed() || !self.space().announcements_are_due_to_end(now) {
            return;
        }
        let Some(recovery) = self.jobs.recovery.get() else { return self.space().end_announcements() };
        let mut examined = 0;
        for _ in 0..PARTS_AT_ONCE {
            let Some(part) = recovery.next_part() else { return self.space().end_announcements() };
            if part.number == 0 {
                self.space().segments.write().drain_states.clear();
            }
            examined += part.keys.len();
            for key in &part.keys {
                let hash = self.space().directory.hash(key);
                let mut shard = self.space().directory.lock(hash);
                // Forgotten and listed under one lock: a client may just announce the object.
                let Some(object) = recovery.forget(&part, key) else { continue };
                if self.still_counts(&shard, hash, &object) {
                    let wall_ms = self.space().clock.wall_ms();
                    let soft_pin = recovery.end_of_soft_pin(object.soft_pin_ms);
                    let lifetime = object.lifetime.map(|it| Lifetime::from_stored(it, now, wall_ms));
                    shard.absent.record_late(&object);
                    shard.expired.record_late(object, soft_pin, lifetime, now);
                }
            }
            if examined >= PART {
                return;
            }
        }
    }
}

fn to_snapshot<A: SegmentAllocator>(
    object: &Object<A>,
    lifetime: Option<StoredLifetime>,
    now: Moment,
) -> Option<SnapshotObject> {
    let (value, disk) = (object.value(), object.disk());
    let len = value.map(|value| value.len).or_else(|| disk.map(|disk| disk.len))?;
    let place =
        |held: &Allocation<A>| ReplicaPosition { segment: held.segment.info.id, offset: held.extent.offset };
    let versions = disk.into_iter().flat_map(DiskReplicas::holdings);
    let versions = versions.filter_map(|holding| holding.version.map(disk_position));
    Some(SnapshotObject {
        key: object.key.as_bytes().to_vec(),
        len,
        checksum: object.checksum(),
        written: value.map(|value| Horizon { epoch: value.stamp.epoch, number: value.stamp.number }),
        used: object.used,
        group: object.group_name().to_owned(),
        hard_pin: object.hard_pin,
        soft_pin_ms: u64::try_from(object.soft_pin().since(now).as_millis()).unwrap_or(u64::MAX),
        lifetime,
        positions: value.into_iter().flat_map(|value| value.live().map(place)).chain(versions).collect(),
        disks: disk.into_iter().flat_map(DiskReplicas::owners).collect(),
    })
}
