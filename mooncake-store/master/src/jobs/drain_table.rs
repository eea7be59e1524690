//! Table of drain jobs.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::{Moment, Rng};
use mooncake_core::ids::{ClientId, ObjectKey, SegmentId, Uuid};
use mooncake_core::replica::SegmentStatus;
use mooncake_core::{ErrorCode, Result};

use crate::model::drain::{DrainInfo, DrainStatus};
use crate::model::segment::MountedSegment;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// Number of times that the move of one replica is tried.
const TRIES: u32 = 3;

/// Number of jobs that stay in the table; beyond it, those that have ended are removed.
const REMEMBERED: usize = 1000;

/// Replica to move away.
pub(crate) struct DrainUnit {
    pub(crate) key: ObjectKey,
    /// Index of the segment among the sources of the job.
    pub(crate) source: usize,
    pub(crate) tries: u32,
}

/// Unit whose move is in progress.
pub(crate) struct ActiveMove {
    pub(crate) unit: DrainUnit,
    pub(crate) task: Uuid,
    pub(crate) bytes: u64,
    /// Name of the segment that the replica moves to, if it is known.
    pub(crate) target: String,
}

/// Drain job with its progress.
pub(crate) struct DrainJob<A> {
    /// State that callers see, without the blocked and active replicas of a job in progress.
    pub(crate) info: DrainInfo,
    pub(crate) sources: Vec<Arc<MountedSegment<A>>>,
    /// Source segments that are not mounted again yet.
    pub(crate) awaited: Option<AwaitedSegments>,
    pub(crate) targets: Vec<String>,
    pub(crate) at_once: usize,
    pub(crate) ready: VecDeque<DrainUnit>,
    pub(crate) blocked: VecDeque<DrainUnit>,
    pub(crate) active: Vec<ActiveMove>,
    /// Segments to which the last move failed. They are chosen last.
    pub(crate) failing: HashSet<String>,
    /// Time before which no move begins.
    pub(crate) hold: Moment,
    /// Client that leaves, if it requested the job. Then objects with another replica stay, nothing
    /// is evicted for the rest, and the segments accept no objects afterwards.
    pub(crate) leaving: Option<ClientId>,
    /// Time of the next check of the blocked replicas.
    pub(crate) recheck: Moment,
    /// Time at which only extents in quarantine were left.
    pub(crate) emptied: Option<Moment>,
    /// Time since which no move has begun or ended. `None` while moves are in progress.
    pub(crate) stalled: Option<Moment>,
}

/// Segments that a job of an earlier master waits for.
pub(crate) struct AwaitedSegments {
    pub(crate) segments: Vec<SegmentId>,
    /// Time until which promises of the earlier master may hold, and clients return.
    pub(crate) from: Moment,
    /// Time after which missing segments are given up.
    pub(crate) until: Moment,
}

/// Table of drain jobs.
pub(crate) struct DrainTable<A> {
    pub(crate) jobs: Mutex<DrainJobs<A>>,
    /// Time of the next round; the end of time if there are no jobs.
    pub(crate) due: AtomicU64,
}

/// Jobs under the lock of the table.
pub(crate) struct DrainJobs<A> {
    rng: Rng,
    /// Jobs, the oldest first.
    pub(crate) list: VecDeque<DrainJob<A>>,
}

impl<A: SegmentAllocator> DrainTable<A> {
    pub(crate) fn new(seed: u64) -> Self {
        let jobs = DrainJobs { rng: Rng::seeded(seed), list: VecDeque::new() };
        Self { jobs: Mutex::new(jobs), due: AtomicU64::new(u64::MAX) }
    }

    /// Returns the state of a job.
    ///
    /// # Errors
    /// `JOB_NOT_FOUND`; of the jobs that have ended, the latest [`REMEMBERED`] are known.
    pub(crate) fn info(&self, id: Uuid) -> Result<DrainInfo> {
        self.jobs.lock().find(id).map(|job| job.info())
    }

    /// Runs the jobs at the next tick, because a task has ended that may be one of their moves.
    pub(crate) fn wake(&self) {
        if self.due.load(SeqCst) != u64::MAX {
            self.due.store(0, SeqCst);
        }
    }

    /// Returns whether a job is due.
    pub(crate) fn is_due(&self, now: Moment) -> bool {
        self.due.load(SeqCst) <= now.0
    }
}

impl<A> DrainJobs<A> {
    pub(crate) fn find(&mut self, id: Uuid) -> Result<&mut DrainJob<A>> {
        self.list.iter_mut().find(|job| job.info.id == id).ok_or_else(|| ErrorCode::JobNotFound.into())
    }

    /// Draws an id that no job has.
    pub(crate) fn new_id(&mut self) -> Uuid {
        loop {
            let id = Uuid::new(self.rng.next_u64(), self.rng.next_u64());
            if self.find(id).is_err() {
                return id;
            }
        }
    }

    /// Adds a job, and forgets the oldest of many jobs that have ended.
    pub(crate) fn add(&mut self, job: DrainJob<A>) {
        self.list.push_back(job);
        while self.list.len() > REMEMBERED && self.list.front().is_some_and(|job| job.info.status.is_over()) {
            self.list.pop_front();
        }
    }
}

impl<A: SegmentAllocator> DrainJob<A> {
    /// Creates a job that has begun nothing.
    pub(crate) fn new(info: DrainInfo, targets: Vec<String>, at_once: u64) -> Self {
        Self {
            info,
            sources: Vec::new(),
            awaited: None,
            targets,
            at_once: usize::try_from(at_once).unwrap_or(usize::MAX),
            ready: VecDeque::new(),
            blocked: VecDeque::new(),
            active: Vec::new(),
            failing: HashSet::new(),
            hold: Moment(0),
            leaving: None,
            recheck: Moment(0),
            emptied: None,
            stalled: None,
        }
    }

    /// Sets the message and the time of the last change.
    pub(crate) fn touch(&mut self, message: String, wall: u64) {
        (self.info.message, self.info.updated_ms) = (message, wall);
    }

    /// Blocks a unit whose move failed, or gives it up after several tries.
    pub(crate) fn retry(&mut self, mut unit: DrainUnit, why: &str, wall: u64) {
        unit.tries += 1;
        self.touch(format!("{}: {why}", unit.key.as_bytes().escape_ascii()), wall);
        if unit.tries < TRIES {
            self.blocked.push_back(unit);
        } else {
            self.info.failed += 1;
        }
    }

    /// Ends the job and sets the status of its segments.
    pub(crate) fn end(&mut self, status: DrainStatus, message: String, wall: u64) {
        let is_drained = status == DrainStatus::Succeeded || self.leaving.is_some();
        let then = if is_drained { SegmentStatus::Drained } else { SegmentStatus::Ok };
        self.sources.iter().for_each(|source| source.set_drain(then));
        let DrainInfo { id, succeeded, failed, .. } = self.info;
        tracing::info!(job = %id, ?status, moved = succeeded, failed, "drain ended: {message}");
        self.info.status = status;
        self.touch(message, wall);
        // A retired segment keeps its memory as long as it is referenced.
        self.sources.clear();
        let left = std::mem::take(&mut self.ready).len() + std::mem::take(&mut self.blocked).len();
        self.info.blocked = left as u64;
    }

    pub(crate) fn info(&self) -> DrainInfo {
        let blocked = self.blocked.len() as u64 + self.info.blocked;
        let (waiting, active) = (self.ready.len() as u64, self.active.len() as u64);
        DrainInfo { blocked, waiting, active, ..self.info.clone() }
    }
}
