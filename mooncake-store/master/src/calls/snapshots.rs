//! Snapshots: what a master knows of its objects, tasks and drain jobs, written down while it goes on, for the one that comes after it.
//!
//! A snapshot makes nothing readable. Objects come back as they do without one: the owner of a segment mounts it again, looks at the bytes, and announces
//! what is there. The snapshot adds what owners do not know: which of that had been removed or replaced, in which order objects were used, what objects on
//! disks are pinned to and belong to, tasks, and which segments are being emptied, or were.

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::time::Duration;

use mooncake_core::Result;
use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::EvictionPolicy;

use super::master::Master;
use crate::directory::Object;
use crate::jobs::recovery::Recovery;
use crate::model::disk_replicas::DiskReplicas;
use crate::model::segment::Allocation;
use crate::model::snapshot::{
    Horizon, ReplicaPosition, Snapshot, SnapshotDrains, SnapshotHead, SnapshotObject, SnapshotPart,
    encode_head,
};

/// Objects and tasks in one record.
const PART: usize = 4096;

/// Drain jobs in one record: each may have many moves under way.
const JOBS: usize = 16;

/// Masters before this one whose word is passed on.
const FOREBEARS: usize = 16;

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// Writes down what can be read, every task and every drain job; how many objects that were. Calls go on meanwhile: nothing is locked for longer than a few hundred
    /// objects take. `write` is given the next bytes, and may end it with an error.
    ///
    /// # Errors
    /// Those of `write`.
    pub fn snapshot(&self, mut write: impl FnMut(&[u8]) -> Result<()>) -> Result<u64> {
        // All that was written before this number is met, or was gone.
        let since = Horizon { epoch: self.space().epoch, number: self.space().directory.next_use_number() };
        let now = self.space().clock.now();
        let mut horizons = vec![since];
        horizons.extend(self.jobs.recovery.get().into_iter().flat_map(Recovery::horizons).take(FOREBEARS));
        let promise_ms = self.space().promise_ms(now);
        write(&encode_head(&SnapshotHead { uses: since.number, horizons, promise_ms }))?;
        let (mut objects, mut number) = (0u64, 0u64);
        let batch = RefCell::new(Vec::new());
        let mut put = |part: SnapshotPart| {
            let mut bytes = Vec::new();
            mooncake_protocol::record::append(&SnapshotPart { number, ..part }, &mut bytes);
            number += 1;
            write(&bytes)
        };
        if let Some(recovery) = self.jobs.recovery.get() {
            // Those whose owners may come yet. First: who comes meanwhile is met below.
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
            |shard, slot| batch.borrow_mut().extend(to_snapshot(&shard[slot], now)),
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
        // Objects whose client expires during the walk are in one of the two lists at least.
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

    /// Takes over what a master before this one wrote down, before the first call is answered. The first time counts.
    pub fn recall(&self, snapshot: Snapshot) {
        let now = self.space().clock.now();
        let Snapshot { head, objects, tasks, drains } = snapshot;
        let used = objects.iter().map(|object| object.used).max().unwrap_or(0);
        self.space().directory.raise_use_number(head.uses.max(used));
        self.note_promise(Duration::from_millis(head.promise_ms), &"snapshot");
        self.jobs.tasks.lock().restore(tasks, now, &self.space().options.tasks);
        self.jobs.restore_drains(drains, now);
        let _ = self
            .jobs
            .recovery
            .set(Recovery::new(head.horizons, objects, now, |key| self.space().directory.hash(key)));
    }

    /// Forgets what was recalled, a part of it, once its time is over.
    pub(crate) fn forget_recovered(&self, now: Moment) {
        if let Some(recovery) = self.jobs.recovery.get()
            && recovery.forget_next_part(now)
        {
            self.space().segments.write().drain_states.clear();
        }
    }
}

fn to_snapshot<A: SegmentAllocator>(object: &Object<A>, now: Moment) -> Option<SnapshotObject> {
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
        positions: value.into_iter().flat_map(|value| value.live().map(place)).collect(),
        disks: disk.into_iter().flat_map(DiskReplicas::owners).collect(),
    })
}
