//! Drain jobs: segments are emptied replica by replica, by moves that their clients make.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::{ClientId, Uuid};
use mooncake_core::replica::SegmentStatus;
use mooncake_core::{Error, ErrorCode, Result};

use super::drain_table::{ActiveMove, DrainJob, DrainJobs, DrainUnit};
use super::state::Jobs;
use crate::directory::Object;
use crate::model::drain::{DrainInfo, DrainRequest, DrainStatus};
use crate::model::segment::{Allocation, MountedSegment};
use crate::space::registry::Registry;
use crate::sync::atomic::Ordering::SeqCst;

/// Time between two rounds of a job while none of its moves ends.
const ROUND: Duration = Duration::from_millis(500);

/// Time without new moves after a cancel that came while moves were in progress.
const HOLD: Duration = Duration::from_secs(10);

/// Time without any move after which a job ends, if replicas are left that cannot be moved.
const STALL: Duration = Duration::from_secs(60);

/// Maximum number of replicas that the end of a stalled job names.
const NAMED: usize = 20;

/// Maximum number of blocked replicas that are checked again per round.
const RECHECKED: usize = 4096;

/// Maximum number of replicas that are moved away from a leaving client at the same time.
const LEAVING_AT_ONCE: u64 = 16;

/// Next step for a unit.
enum NextStep {
    /// Move to this segment, of so many bytes.
    Move(String, u64),
    /// No segment has so many free bytes.
    NoSpace(u64),
    /// The reason why the replica cannot be moved now.
    Blocked(String),
    /// The object uses no space in the segment any more.
    Done,
}

impl<A: SegmentAllocator, E: MergeableOrder> Jobs<A, E> {
    /// Begins a drain job for named segments.
    pub(crate) fn drain_start(&self, request: &DrainRequest<'_>) -> Result<Uuid> {
        check_names(request)?;
        let mut jobs = self.drains.jobs.lock();
        let sources = {
            // A placement in progress holds this lock. Afterwards there are no new ones in the
            // segments.
            let registry = self.space.segments.write();
            let mut sources = Vec::new();
            for name in request.segments {
                sources.extend_from_slice(all_ok(&registry, name)?);
            }
            for name in request.targets {
                all_ok(&registry, name)?;
            }
            sources.iter().for_each(|source| source.set_drain(SegmentStatus::Draining));
            sources
        };
        let id = self.add_drain(&mut jobs, request, sources, None);
        self.drains.due.store(0, SeqCst);
        Ok(id)
    }

    fn add_drain(
        &self,
        jobs: &mut DrainJobs<A>,
        request: &DrainRequest<'_>,
        sources: Vec<Arc<MountedSegment<A>>>,
        leaving: Option<ClientId>,
    ) -> Uuid {
        let wall = self.space.clock.wall_ms();
        let id = jobs.new_id();
        tracing::info!(job = %id, segments = ?request.segments, "drain started");
        let info = DrainInfo {
            id,
            status: DrainStatus::Created,
            created_ms: wall,
            updated_ms: wall,
            segments: request.segments.to_vec(),
            succeeded: 0,
            failed: 0,
            blocked: 0,
            waiting: 0,
            active: 0,
            migrated_bytes: 0,
            message: "Drain job created".into(),
        };
        let job = DrainJob::new(info, request.targets.to_vec(), request.max_concurrency);
        jobs.add(DrainJob { sources, leaving, ..job });
        id
    }

    /// Begins, or reports on, the drain job of a client that leaves.
    pub(crate) fn drain_client(&self, client: ClientId) -> Result<DrainInfo> {
        let mut jobs = self.drains.jobs.lock();
        let sources: Vec<_> = {
            // A placement in progress holds this lock. Afterwards there are no new ones in the
            // segments.
            let registry = self.space.segments.write();
            let own = |segment: &&Arc<MountedSegment<A>>| {
                segment.client == client && segment.status() == SegmentStatus::Ok
            };
            let sources: Vec<_> = registry.list.iter().filter(own).cloned().collect();
            sources.iter().for_each(|source| source.set_drain(SegmentStatus::Draining));
            sources
        };
        if sources.is_empty() {
            // Jobs by request may be emptying segments, or have emptied them. Those in progress
            // come first, so that the client does not end before them.
            let names = self.draining_segments(client);
            let is_own = |job: &DrainJob<A>| {
                let is_about = |name: &String| job.info.segments.contains(name);
                let ends_well = !job.info.status.is_over() || job.info.status == DrainStatus::Succeeded;
                job.leaving == Some(client) || ends_well && names.iter().any(is_about)
            };
            let own = || jobs.list.iter().rev().filter(|job| is_own(job));
            let in_progress = own().find(|job| !job.info.status.is_over());
            if let Some(job) = in_progress.or_else(|| own().next()) {
                return Ok(job.info());
            }
            return Err(Error::new(
                ErrorCode::SegmentNotFound,
                format!("cannot drain client: it has no segment in use. client={client}"),
            ));
        }
        let mut names: Vec<_> = sources.iter().map(|source| source.info.name.clone()).collect();
        names.dedup();
        let request = DrainRequest { segments: &names, targets: &[], max_concurrency: LEAVING_AT_ONCE };
        let id = self.add_drain(&mut jobs, &request, sources, Some(client));
        self.drains.due.store(0, SeqCst);
        jobs.find(id).map(|job| job.info())
    }

    /// Returns the names of the segments of a client that jobs empty or have emptied.
    fn draining_segments(&self, client: ClientId) -> Vec<String> {
        let is_emptied = |status| matches!(status, SegmentStatus::Draining | SegmentStatus::Drained);
        let registry = self.space.segments.read();
        let own = registry.list.iter().filter(|segment| segment.client == client);
        own.filter(|segment| is_emptied(segment.status())).map(|segment| segment.info.name.clone()).collect()
    }

    /// Cancels a drain job.
    pub(crate) fn drain_cancel(&self, id: Uuid) -> Result<()> {
        let mut jobs = self.drains.jobs.lock();
        let job = jobs.find(id)?;
        if job.info.status.is_over() {
            return Err(ErrorCode::UnavailableInCurrentStatus.into());
        }
        let (now, wall) = (self.space.clock.now(), self.space.clock.wall_ms());
        self.poll_moves(job, wall);
        // A move that no client has fetched is not in progress.
        let active = std::mem::take(&mut job.active);
        for active in active {
            if self.withdraw_task(active.task, "drain job canceled") {
                job.ready.push_back(active.unit);
            } else {
                job.active.push(active);
            }
        }
        if !job.active.is_empty() {
            job.hold = now.after(HOLD);
            let text = format!("cannot cancel drain: moves are in progress. moves={}", job.active.len());
            return Err(Error::new(ErrorCode::UnavailableInCurrentStatus, text));
        }
        self.stop_waiting(job);
        job.end(DrainStatus::Canceled, "Drain job canceled".into(), wall);
        Ok(())
    }

    /// Runs one round of every job. Call it when [`DrainTable::is_due`].
    pub(crate) fn drive_drains(&self, now: Moment) {
        self.drains.due.store(u64::MAX, SeqCst);
        let running: Vec<_> = {
            let jobs = self.drains.jobs.lock();
            jobs.list.iter().filter(|job| !job.info.status.is_over()).map(|job| job.info.id).collect()
        };
        for id in &running {
            if !self.collect_sources(*id, now) {
                continue;
            }
            self.plan(*id);
            if let Ok(job) = self.drains.jobs.lock().find(*id)
                && !job.info.status.is_over()
            {
                self.advance(job, now);
            }
        }
        if !running.is_empty() {
            self.drains.due.fetch_min(now.after(ROUND).0, SeqCst);
        }
    }

    /// Searches the replicas that a job is to move, unless they are known. The search visits all
    /// objects; the table of jobs is not locked meanwhile.
    fn plan(&self, id: Uuid) {
        let sources = {
            let mut jobs = self.drains.jobs.lock();
            let Ok(job) = jobs.find(id) else { return };
            if !matches!(job.info.status, DrainStatus::Created | DrainStatus::Planning) {
                return;
            }
            job.info.status = DrainStatus::Planning;
            job.sources.clone()
        };
        let (mut ready, mut blocked) = (VecDeque::new(), VecDeque::new());
        self.space.directory.visit(|shard, slot| {
            let object = &shard[slot];
            for (source, segment) in sources.iter().enumerate() {
                if uses_space_in(object, |held| Arc::ptr_eq(&held.segment, segment)) {
                    let is_blocked = blocking_change(object).is_some();
                    let list = if is_blocked { &mut blocked } else { &mut ready };
                    list.push_back(DrainUnit { key: object.key.clone(), source, tries: 0 });
                }
            }
        });
        if let Ok(job) = self.drains.jobs.lock().find(id)
            && job.info.status == DrainStatus::Planning
        {
            // Some moves may have begun under an earlier master.
            let moving: HashSet<_> = job.active.iter().map(|one| (&one.unit.key, one.unit.source)).collect();
            let rests = |unit: &DrainUnit| !moving.contains(&(&unit.key, unit.source));
            ready.retain(rests);
            blocked.retain(rests);
            (job.ready, job.blocked) = (ready, blocked);
            job.info.status = DrainStatus::Running;
            job.touch("Drain job running".into(), self.space.clock.wall_ms());
        }
    }

    /// Runs one round of a job whose replicas are known.
    fn advance(&self, job: &mut DrainJob<A>, now: Moment) {
        let wall = self.space.clock.wall_ms();
        self.poll_moves(job, wall);
        if let Some(lost) = job.sources.iter().find(|source| !source.is_alive()) {
            if !job.active.is_empty() {
                return;
            }
            let message = if job.emptied.is_some() {
                "Drain job finished successfully".into()
            } else {
                format!("segment {} was unmounted before it was empty", lost.info.name)
            };
            let status = if job.emptied.is_some() { DrainStatus::Succeeded } else { DrainStatus::Failed };
            job.end(status, message, wall);
            return;
        }
        if job.hold <= now {
            if job.recheck <= now {
                job.recheck = now.after(ROUND);
                self.recheck(job, now);
            }
            self.start_moves(job, now, wall);
        }
        if !job.blocked.is_empty() {
            self.end_if_stalled(job, now, wall);
        } else if job.ready.is_empty() && job.active.is_empty() {
            self.finish_if_empty(job, now, wall);
        }
    }

    /// Records the outcomes of moves that have ended.
    fn poll_moves(&self, job: &mut DrainJob<A>, wall: u64) {
        let tasks = self.tasks.lock();
        for active in std::mem::take(&mut job.active) {
            match tasks.outcome(active.task) {
                None => job.active.push(active),
                Some(Ok(())) => {
                    job.failing.remove(&active.target);
                    job.info.succeeded += 1;
                    job.info.migrated_bytes = job.info.migrated_bytes.saturating_add(active.bytes);
                    job.touch("Drain job running".into(), wall);
                }
                Some(Err(why)) => {
                    job.failing.insert(active.target);
                    job.retry(active.unit, &why, wall);
                }
            }
        }
    }

    /// Checks some of the blocked replicas again.
    fn recheck(&self, job: &mut DrainJob<A>, now: Moment) {
        let some = job.blocked.len().min(RECHECKED);
        for unit in job.blocked.drain(..some).collect::<Vec<_>>() {
            match self.next_step(&unit, job, now) {
                NextStep::Done => {}
                NextStep::Move(..) => job.ready.push_back(unit),
                NextStep::NoSpace(_) if job.targets.is_empty() && job.leaving.is_none() => {
                    job.ready.push_back(unit)
                }
                NextStep::NoSpace(_) | NextStep::Blocked(_) => job.blocked.push_back(unit),
            }
        }
    }

    /// Ends a job that has moved nothing for a while. The segments accept objects again, unless
    /// their client leaves.
    fn end_if_stalled(&self, job: &mut DrainJob<A>, now: Moment, wall: u64) {
        if !job.active.is_empty() || !job.ready.is_empty() || job.hold > now {
            job.stalled = None;
            return;
        }
        if job.stalled.get_or_insert(now).after(STALL) > now {
            return;
        }
        let mut left: Vec<String> = Vec::new();
        for unit in job.blocked.iter().take(NAMED) {
            let why = match self.next_step(unit, job, now) {
                NextStep::Blocked(why) => why,
                NextStep::NoSpace(len) => format!("no segment has {len} bytes of free space in one piece"),
                // The object has just left, or may be moved from now on.
                NextStep::Done | NextStep::Move(..) => return,
            };
            left.push(format!("key=\"{}\" {why}", unit.key.as_bytes().escape_ascii()));
        }
        let count = job.blocked.len();
        let more =
            if count > left.len() { format!("; and {} more", count - left.len()) } else { String::new() };
        let message = format!(
            "cannot drain: {count} replicas could not be moved for {} s: {}{more}",
            STALL.as_secs(),
            left.join("; ")
        );
        job.end(DrainStatus::Failed, message, wall);
    }

    fn start_moves(&self, job: &mut DrainJob<A>, now: Moment, wall: u64) {
        let mut evicted = false;
        while job.active.len() < job.at_once {
            let Some(unit) = job.ready.pop_front() else { return };
            match self.next_step(&unit, job, now) {
                NextStep::Done => {}
                NextStep::Blocked(_) => job.blocked.push_back(unit),
                NextStep::NoSpace(len) => {
                    // Memory shrinks by the drained segments, so the least recently used objects
                    // are evicted, wherever they are. Named targets are left as they are.
                    if job.targets.is_empty()
                        && job.leaving.is_none()
                        && !evicted
                        && self.space.free_space_for(len, None, now)
                    {
                        job.ready.push_front(unit);
                    } else {
                        job.blocked.push_back(unit);
                    }
                    evicted = true;
                }
                NextStep::Move(target, bytes) => {
                    let source = &job.sources[unit.source].info.name;
                    match self.create_move(unit.key.as_bytes(), source, &target) {
                        Ok(task) => {
                            (evicted, job.stalled) = (false, None);
                            job.active.push(ActiveMove { unit, task, bytes, target });
                        }
                        Err(full) if full.code() == ErrorCode::TaskPendingLimitExceeded => {
                            job.ready.push_front(unit);
                            return;
                        }
                        Err(error) => job.retry(unit, &error.to_string(), wall),
                    }
                }
            }
        }
    }

    fn next_step(&self, unit: &DrainUnit, job: &DrainJob<A>, now: Moment) -> NextStep {
        let key = unit.key.as_bytes();
        let hash = self.space.directory.hash(key);
        let shard = self.space.directory.lock(hash);
        let Some(slot) = shard.find(hash, key) else { return NextStep::Done };
        let object = &shard[slot];
        if !uses_space_in(object, |held| Arc::ptr_eq(&held.segment, &job.sources[unit.source])) {
            return NextStep::Done;
        }
        // Two moves of one object at the same time could have the same target, and leave one
        // replica of two.
        let moving = job.sources.len() > 1 && job.active.iter().any(|active| active.unit.key == unit.key);
        if let Some(why) = blocking_change(object).or(moving.then_some("is being moved")) {
            return NextStep::Blocked(why.into());
        }
        let Some(value) = object.value() else { return NextStep::Blocked("has no value".into()) };
        let stays =
            |held: &Allocation<A>| held.segment.is_alive() && held.segment.status() == SegmentStatus::Ok;
        if job.leaving.is_some() && value.replicas.iter().any(stays) {
            return NextStep::Done;
        }
        let registry = self.space.segments.read();
        let holds_one = |segment: &Arc<MountedSegment<A>>| {
            value.replicas.iter().any(|held| held.segment.info.name == segment.info.name)
        };
        let allowed = |segment: &&Arc<MountedSegment<A>>| {
            segment.would_open(now) && (job.targets.is_empty() || job.targets.contains(&segment.info.name))
        };
        let fits = |segment: &&Arc<MountedSegment<A>>| holds_one(segment) || segment.fits(value.len);
        // A move to a segment that has a replica already is a removal. It is the last choice.
        let rank = |segment: &&Arc<MountedSegment<A>>| {
            let fails = segment.is_reported_unreachable() || job.failing.contains(&segment.info.name);
            (holds_one(segment), fails)
        };
        let best = registry
            .list
            .iter()
            .filter(allowed)
            .filter(fits)
            .min_by(|a, b| rank(a).cmp(&rank(b)).then_with(|| b.free_ratio().total_cmp(&a.free_ratio())));
        match best {
            Some(segment) => NextStep::Move(segment.info.name.clone(), value.len),
            None if registry
                .list
                .iter()
                .any(|segment| allowed(&segment) && value.len <= segment.info.size) =>
            {
                NextStep::NoSpace(value.len)
            }
            None => NextStep::Blocked(format!(
                "has {} bytes, and no segment that may take it is so large",
                value.len
            )),
        }
    }

    /// Ends the job if all its units are done.
    fn finish_if_empty(&self, job: &mut DrainJob<A>, now: Moment, wall: u64) {
        if job.info.failed > 0 {
            let message = format!("{} replicas could not be moved: {}", job.info.failed, job.info.message);
            job.end(DrainStatus::Failed, message, wall);
            return;
        }
        let is_used = |source: &Arc<MountedSegment<A>>| source.used() > source.quarantined();
        if job.leaving.is_none() && job.sources.iter().any(is_used) {
            // An object became readable that the search did not find.
            job.emptied = None;
            job.info.status = DrainStatus::Planning;
            return;
        }
        // Readers that received the old replicas may finish, so that the segment can be unmounted
        // as soon as it is drained.
        let emptied = *job.emptied.get_or_insert(now);
        let quiet = job.sources.iter().all(|source| {
            let in_use = if job.leaving.is_some() { source.used() } else { source.quarantined() };
            in_use == 0
        });
        if quiet || emptied.after(self.space.options.lease_ttl) <= now {
            job.end(DrainStatus::Succeeded, "Drain job finished successfully".into(), wall);
        }
    }

    /// Collects the segments of a job that began under an earlier master. They have to be mounted
    /// again, with everything in them; otherwise the job ends. Returns whether all segments of the
    /// job are mounted.
    pub(crate) fn collect_sources(&self, id: Uuid, now: Moment) -> bool {
        let mut jobs = self.drains.jobs.lock();
        let Ok(job) = jobs.find(id) else { return false };
        let Some(awaited) = &job.awaited else { return true };
        let found: Vec<_> = {
            let registry = self.space.segments.read();
            awaited.segments.iter().filter_map(|id| registry.get(*id).cloned()).collect()
        };
        let missing = awaited.segments.len() - found.len();
        if missing == 0 {
            let there = awaited.from <= now && found.iter().all(|segment| segment.is_fully_announced());
            if there {
                let mut registry = self.space.segments.write();
                for segment in &found {
                    registry.drain_states.remove(&segment.info.id);
                }
                (job.sources, job.awaited) = (found, None);
            }
            return there;
        }
        if awaited.until <= now {
            let wall = self.space.clock.wall_ms();
            self.poll_moves(job, wall);
            if job.active.is_empty() {
                self.stop_waiting(job);
                let message = format!("{missing} of its segments did not come back after a restart");
                job.end(DrainStatus::Failed, message, wall);
            }
        }
        false
    }

    /// Stops waiting for segments. Segments that are mounted again become ordinary ones.
    pub(crate) fn stop_waiting(&self, job: &mut DrainJob<A>) {
        let Some(awaited) = job.awaited.take() else { return };
        let mut registry = self.space.segments.write();
        for id in awaited.segments {
            registry.drain_states.remove(&id);
            job.sources.extend(registry.get(id).cloned());
        }
    }
}

/// Returns whether the object uses space that `there` accepts.
fn uses_space_in<A: SegmentAllocator>(object: &Object<A>, there: impl Fn(&Allocation<A>) -> bool) -> bool {
    object.value().is_some_and(|value| value.replicas.iter().any(&there))
        || object.write().is_some_and(|write| write.replicas.iter().any(&there))
        || object.copying().is_some_and(|copying| copying.targets.iter().any(&there))
}

/// Returns the change in progress that an object has to end before it can be moved. A pin forbids
/// eviction, not moves.
fn blocking_change<A: SegmentAllocator>(object: &Object<A>) -> Option<&'static str> {
    if is_planted("drain-leaves-pinned") && object.hard_pin {
        return Some("is hard-pinned");
    }
    let copying = object.copying().map(|_| "is being copied");
    object.write().map(|_| "is being written").or(copying)
}

fn check_names(request: &DrainRequest<'_>) -> Result<()> {
    if request.segments.is_empty() {
        return Err(Error::invalid("cannot drain: the request names no segment"));
    }
    if request.max_concurrency == 0 {
        return Err(Error::invalid("cannot drain: max_concurrency must not be 0"));
    }
    let mut seen = HashSet::new();
    for name in request.segments {
        if !seen.insert(name) {
            return Err(Error::invalid(format!("cannot drain segment: it is named twice. name={name}")));
        }
        if request.targets.contains(name) {
            return Err(Error::invalid(format!(
                "cannot drain segment: it is source and target. name={name}"
            )));
        }
    }
    Ok(())
}

/// Returns the segments of a name if all of them have the status OK.
fn all_ok<'a, A: SegmentAllocator>(
    registry: &'a Registry<A>,
    name: &str,
) -> Result<&'a [Arc<MountedSegment<A>>]> {
    let segments = registry.with_name(name);
    if segments.is_empty() {
        return Err(Error::new(
            ErrorCode::SegmentNotFound,
            format!("cannot drain segment: it is not mounted. name={name}"),
        ));
    }
    match segments.iter().find(|segment| segment.status() != SegmentStatus::Ok) {
        None => Ok(segments),
        Some(other) => Err(Error::new(
            ErrorCode::UnavailableInCurrentStatus,
            format!("cannot drain segment: its status is not OK. name={name} status={:?}", other.status()),
        )),
    }
}
