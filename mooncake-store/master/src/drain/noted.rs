//! Drain jobs across masters: written down, taken over, and gone on with once their segments are there again.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::SeqCst;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::ids::{ObjectKey, Uuid};
use mooncake_core::replica::SegmentStatus;

use super::super::Master;
use super::super::snapshot::{NotedDrains, NotedJob, NotedMove, PATIENCE};
use super::{Active, Awaited, DrainStatus, Job, Unit};

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// What segments are being emptied, or were; and the tasks there are then, those of the jobs among them.
    pub(crate) fn note_drains(&self) -> (NotedDrains, Vec<(Uuid, Moment)>) {
        let jobs = self.drains.jobs.lock();
        let noted = jobs.list.iter().map(Job::note).collect();
        let registry = self.segments.read();
        let mounted = registry.list.iter().map(|segment| (segment.info.id, segment.status()));
        let missing = registry.brought.iter().filter(|(id, _)| registry.get(**id).is_none());
        let all = mounted.chain(missing.map(|(id, status)| (*id, *status)));
        let drained = all.filter(|(_, status)| *status == SegmentStatus::Drained).map(|(id, _)| id).collect();
        drop(registry);
        (NotedDrains { jobs: noted, drained }, self.tasks.lock().ids())
    }

    /// Takes over what segments a master before was emptying, or had emptied: they take no objects when they come back.
    pub(crate) fn recall_drains(&self, noted: NotedDrains, now: Moment) {
        let mut jobs = self.drains.jobs.lock();
        let mut registry = self.segments.write();
        registry.brought.extend(noted.drained.into_iter().map(|id| (id, SegmentStatus::Drained)));
        let from = now.after(self.rest_after_start());
        for noted in noted.jobs {
            if jobs.find(noted.id).is_ok() {
                continue;
            }
            if !noted.status.is_over() {
                registry.brought.extend(noted.sources.iter().map(|id| (*id, SegmentStatus::Draining)));
            }
            jobs.add(Job::recall(noted, from, now.after(PATIENCE)));
        }
        self.drains.due.store(0, SeqCst);
    }

    /// Whether the segments of a job are there. Of one begun under a master before they have to come back, with all that is in them; it ends if they
    /// do not.
    pub(super) fn gather(&self, id: Uuid, now: Moment) -> bool {
        let mut jobs = self.drains.jobs.lock();
        let Ok(job) = jobs.find(id) else { return false };
        let Some(awaited) = &job.awaited else { return true };
        let found: Vec<_> = {
            let registry = self.segments.read();
            awaited.segments.iter().filter_map(|id| registry.get(*id).cloned()).collect()
        };
        let missing = awaited.segments.len() - found.len();
        if missing == 0 {
            let there = awaited.from <= now && found.iter().all(|segment| segment.is_settled());
            if there {
                let mut registry = self.segments.write();
                for segment in &found {
                    registry.brought.remove(&segment.info.id);
                }
                (job.sources, job.awaited) = (found, None);
            }
            return there;
        }
        if awaited.until <= now {
            let wall = self.clock.wall_ms();
            self.look_after(job, wall);
            if job.active.is_empty() {
                self.await_no_more(job);
                let message = format!("{missing} of its segments did not come back after a restart");
                job.end(DrainStatus::Failed, message, wall);
            }
        }
        false
    }

    /// Whatever of its segments has come back, or comes, is a segment like others.
    pub(super) fn await_no_more(&self, job: &mut Job<A>) {
        let Some(awaited) = job.awaited.take() else { return };
        let mut registry = self.segments.write();
        for id in awaited.segments {
            registry.brought.remove(&id);
            job.sources.extend(registry.get(id).cloned());
        }
    }
}

impl<A: SegmentAllocator> Job<A> {
    fn note(&self) -> NotedJob {
        let sources = match &self.awaited {
            Some(awaited) => awaited.segments.clone(),
            None => self.sources.iter().map(|source| source.info.id).collect(),
        };
        let moves = self.active.iter().map(|active| NotedMove {
            key: active.unit.key.as_bytes().to_vec(),
            source: active.unit.source as u64,
            tries: active.unit.tries,
            task: active.task,
            bytes: active.bytes,
        });
        NotedJob {
            id: self.id,
            status: self.status,
            created_ms: self.created_ms,
            updated_ms: self.updated_ms,
            names: self.names.clone(),
            targets: self.targets.clone(),
            at_once: self.at_once as u64,
            sources,
            moves: moves.collect(),
            succeeded: self.succeeded,
            failed: self.failed,
            migrated_bytes: self.migrated_bytes,
            message: self.message.clone(),
            left: self.left,
        }
    }

    fn recall(noted: NotedJob, from: Moment, until: Moment) -> Self {
        let over = noted.status.is_over();
        let sources = noted.sources.len();
        let taken = |one: NotedMove| {
            let source = usize::try_from(one.source).ok().filter(|source| *source < sources)?;
            let unit = Unit { key: ObjectKey::new(one.key).ok()?, source, tries: one.tries };
            Some(Active { unit, task: one.task, bytes: one.bytes })
        };
        Self {
            id: noted.id,
            status: if over { noted.status } else { DrainStatus::Planning },
            created_ms: noted.created_ms,
            updated_ms: noted.updated_ms,
            sources: Vec::new(),
            awaited: (!over).then_some(Awaited { segments: noted.sources, from, until }),
            names: noted.names,
            targets: noted.targets,
            at_once: usize::try_from(noted.at_once.max(1)).unwrap_or(usize::MAX),
            ready: VecDeque::new(),
            blocked: VecDeque::new(),
            active: noted.moves.into_iter().filter_map(taken).collect(),
            succeeded: noted.succeeded,
            // What was given up is looked for, and tried, anew.
            failed: if over { noted.failed } else { 0 },
            migrated_bytes: noted.migrated_bytes,
            message: if over { noted.message } else { WAITS.into() },
            left: noted.left,
            hold: Moment(0),
            recheck: Moment(0),
            emptied: None,
        }
    }
}

const WAITS: &str = "Drain job goes on once its segments are mounted again";
