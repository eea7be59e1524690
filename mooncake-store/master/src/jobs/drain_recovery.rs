//! Drain jobs across masters: written to a snapshot, and restored from one.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ObjectKey, Uuid};
use mooncake_core::replica::SegmentStatus;

use super::drain_table::{ActiveMove, AwaitedSegments, DrainJob, DrainUnit};
use super::state::Jobs;
use crate::model::drain::{DrainInfo, DrainStatus};
use crate::model::snapshot::{SnapshotDrain, SnapshotDrains, SnapshotMove};
use crate::space::announcements::ANNOUNCED_FOR;
use crate::sync::atomic::Ordering::SeqCst;

impl<A: SegmentAllocator, E: MergeableOrder> Jobs<A, E> {
    /// Returns the drain jobs and the drained segments, and the tasks that exist at that moment,
    /// including those of the jobs.
    pub(crate) fn drains_to_snapshot(&self) -> (SnapshotDrains, Vec<(Uuid, Moment)>) {
        let jobs = self.drains.jobs.lock();
        let saved = jobs.list.iter().filter(|job| job.leaving.is_none()).map(DrainJob::to_snapshot).collect();
        let registry = self.space.segments.read();
        let mounted = registry.list.iter().map(|segment| (segment.info.id, segment.status()));
        let missing = registry.drain_states.iter().filter(|(id, _)| registry.get(**id).is_none());
        let all = mounted.chain(missing.map(|(id, status)| (*id, *status)));
        let drained = all.filter(|(_, status)| *status == SegmentStatus::Drained).map(|(id, _)| id).collect();
        drop(registry);
        (SnapshotDrains { jobs: saved, drained }, self.tasks.lock().ids())
    }

    /// Restores the drain jobs and the drained segments of an earlier master. The segments accept
    /// no objects when they are mounted again.
    pub(crate) fn restore_drains(&self, saved: SnapshotDrains, now: Moment) {
        let mut jobs = self.drains.jobs.lock();
        let mut registry = self.space.segments.write();
        registry.drain_states.extend(saved.drained.into_iter().map(|id| (id, SegmentStatus::Drained)));
        let from = now.after(self.space.rest_after_start());
        for saved in saved.jobs {
            if jobs.find(saved.id).is_ok() {
                continue;
            }
            if !saved.status.is_over() {
                registry.drain_states.extend(saved.sources.iter().map(|id| (*id, SegmentStatus::Draining)));
            }
            jobs.add(DrainJob::restore(saved, from, now.after(ANNOUNCED_FOR)));
        }
        self.drains.due.store(0, SeqCst);
    }
}

impl<A: SegmentAllocator> DrainJob<A> {
    fn to_snapshot(&self) -> SnapshotDrain {
        let sources = match &self.awaited {
            Some(awaited) => awaited.segments.clone(),
            None => self.sources.iter().map(|source| source.info.id).collect(),
        };
        let moves = self.active.iter().map(|active| SnapshotMove {
            key: active.unit.key.as_bytes().to_vec(),
            source: active.unit.source as u64,
            tries: active.unit.tries,
            task: active.task,
            bytes: active.bytes,
        });
        let info = self.info.clone();
        SnapshotDrain {
            id: info.id,
            status: info.status,
            created_ms: info.created_ms,
            updated_ms: info.updated_ms,
            names: info.segments,
            targets: self.targets.clone(),
            at_once: self.at_once as u64,
            sources,
            moves: moves.collect(),
            succeeded: info.succeeded,
            failed: info.failed,
            migrated_bytes: info.migrated_bytes,
            message: info.message,
            left: info.blocked,
        }
    }

    fn restore(saved: SnapshotDrain, from: Moment, until: Moment) -> Self {
        let over = saved.status.is_over();
        let sources = saved.sources.len();
        let taken = |one: SnapshotMove| {
            let source = usize::try_from(one.source).ok().filter(|source| *source < sources)?;
            let unit = DrainUnit { key: ObjectKey::new(one.key).ok()?, source, tries: one.tries };
            Some(ActiveMove { unit, task: one.task, bytes: one.bytes, target: String::new() })
        };
        let info = DrainInfo {
            id: saved.id,
            status: if over { saved.status } else { DrainStatus::Planning },
            created_ms: saved.created_ms,
            updated_ms: saved.updated_ms,
            segments: saved.names,
            succeeded: saved.succeeded,
            // Replicas that could not be moved are searched and tried again.
            failed: if over { saved.failed } else { 0 },
            blocked: saved.left,
            waiting: 0,
            active: 0,
            migrated_bytes: saved.migrated_bytes,
            message: if over { saved.message } else { WAITS.into() },
        };
        Self {
            awaited: (!over).then_some(AwaitedSegments { segments: saved.sources, from, until }),
            active: saved.moves.into_iter().filter_map(taken).collect(),
            ..Self::new(info, saved.targets, saved.at_once.max(1))
        }
    }
}

const WAITS: &str = "Drain job goes on once its segments are mounted again";
