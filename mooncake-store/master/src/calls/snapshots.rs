//! Snapshots: objects, tasks and drain jobs, written for the next master while this one goes on.
//!
//! A snapshot makes nothing readable. Objects return as they do without one: the owner of a segment
//! mounts it again, checks the bytes, and announces the intact objects. The snapshot adds what the
//! owners do not know: removals and replacements, the order of use, what the eviction policy has
//! learned, pins and groups of objects on disks, tasks, and drained segments.

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::time::Duration;

use mooncake_core::Result;
use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_protocol::wire::StoredLifetime;

use super::master::Master;
use crate::directory::Object;
use crate::jobs::recovery::Recovery;
use crate::model::disk_replicas::DiskReplicas;
use crate::model::segment::Allocation;
use crate::model::snapshot::{
    Horizon, ReplicaPosition, Snapshot, SnapshotDrains, SnapshotHead, SnapshotObject, SnapshotPart,
    encode_head, encode_part,
};

/// Maximum number of objects or tasks in one record.
const PART: usize = 4096;

/// Maximum number of drain jobs in one record. Each may have many moves in progress.
const JOBS: usize = 16;

/// Number of earlier masters whose points of history are passed on.
const FOREBEARS: usize = 16;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Writes every readable object, task and drain job to a snapshot. Returns the number of
    /// objects. Calls go on meanwhile: nothing is locked for longer than a few hundred objects
    /// take. `write` receives the next bytes, and may end the snapshot with an error.
    ///
    /// # Errors
    /// Those of `write`.
    pub fn snapshot(&self, mut write: impl FnMut(&[u8]) -> Result<()>) -> Result<u64> {
        // An object that was written before this number is visited below, or was gone.
        let since = Horizon { epoch: self.space().epoch, number: self.space().directory.next_use_number() };
        let (now, wall_ms) = (self.space().clock.now(), self.space().clock.wall_ms());
        let mut horizons = vec![since];
        horizons.extend(self.jobs.recovery.get().into_iter().flat_map(Recovery::horizons).take(FOREBEARS));
        let promise_ms = self.space().promise_ms(now);
        let learned = self.space().directory.learned.as_ref().map_or_else(Vec::new, |learned| learned.save());
        write(&encode_head(&SnapshotHead { uses: since.number, horizons, promise_ms, learned }))?;
        let (mut objects, mut number) = (0u64, 0u64);
        let batch = RefCell::new(Vec::new());
        let mut put = |part: SnapshotPart| {
            let mut bytes = Vec::new();
            encode_part(SnapshotPart { number, ..part }, &mut bytes);
            number += 1;
            write(&bytes)
        };
        if let Some(recovery) = self.jobs.recovery.get() {
            // First the objects whose owners may return: one that returns meanwhile is visited
            // below.
            for part in recovery.parts() {
                let unclaimed = recovery.unclaimed(part);
                if unclaimed.is_empty() {
                    continue;
                }
                objects += unclaimed.len() as u64;
                put(SnapshotPart { objects: unclaimed, ..SnapshotPart::default() })?;
            }
        }
        objects += self.expired_to_snapshot(&mut put)?;
        let mut failed = Ok(());
        self.space().directory.visit_while(
            |shard, slot| {
                let lifetime = shard.lifetime(slot);
                if lifetime.is_none_or(|lifetime| lifetime.end(now).is_none()) {
                    let lifetime = lifetime.map(|lifetime| lifetime.to_stored(now, wall_ms));
                    batch.borrow_mut().extend(to_snapshot(&shard[slot], lifetime, now));
                }
            },
            || {
                let mut noted = batch.borrow_mut();
                if noted.len() < PART {
                    return ControlFlow::Continue(());
                }
                objects += noted.len() as u64;
                failed =
                    put(SnapshotPart { objects: std::mem::take(&mut *noted), ..SnapshotPart::default() });
                if failed.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            },
        );
        failed?;
        // Objects whose client expires during the visit are in at least one of the two lists.
        objects += self.expired_to_snapshot(&mut put)?;
        let left = batch.into_inner();
        objects += left.len() as u64;
        put(SnapshotPart { objects: left, ..SnapshotPart::default() })?;
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
        put(SnapshotPart { last: true, ..SnapshotPart::default() })?;
        Ok(objects)
    }

    /// Restores a snapshot of an earlier master, before the first call is served. Only the first
    /// snapshot counts.
    pub fn recall(&self, snapshot: Snapshot) {
        let now = self.space().clock.now();
        let Snapshot { head, objects, tasks, drains } = snapshot;
        let used = objects.iter().map(|object| object.used).max().unwrap_or(0);
        self.space().directory.raise_use_number(head.uses.max(used));
        self.note_promise(Duration::from_millis(head.promise_ms), &"snapshot");
        self.restore_learned(&head.learned);
        self.jobs.tasks.lock().restore(tasks, now);
        self.jobs.restore_drains(drains, now);
        let _ = self
            .jobs
            .recovery
            .set(Recovery::new(head.horizons, objects, now, |key| self.space().directory.hash(key)));
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

    /// Forgets one part of the restored state at a time, once its time has ended.
    pub(crate) fn forget_recovered(&self, now: Moment) {
        if let Some(recovery) = self.jobs.recovery.get()
            && recovery.forget_next_part(now)
        {
            self.space().segments.write().drain_states.clear();
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
        positions: value.into_iter().flat_map(|value| value.live().map(place)).collect(),
        disks: disk.into_iter().flat_map(DiskReplicas::owners).collect(),
    })
}
