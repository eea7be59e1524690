//! Drain jobs: segments are emptied, replica by replica, by moves that their owners make.

mod noted;

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::{Moment, Rng};
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::ids::{ObjectKey, SegmentId, Uuid};
use mooncake_core::replica::SegmentStatus;
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;

use super::Master;
use super::directory::{Object, Value};
use super::segments::{Held, Mounted, Registry};
use mooncake_protocol::wire::TaskStatus;

/// How often a job is looked at while nothing is heard of its moves.
const ROUND: Duration = Duration::from_millis(500);
/// How often the move of one replica is tried.
const TRIES: u32 = 3;
/// How long a job begins nothing new after a cancel that came while moves were under way.
const HOLD: Duration = Duration::from_secs(10);
/// Blocked replicas that are looked at again per round.
const RECHECKED: usize = 4096;
/// Jobs that are over and still known.
const REMEMBERED: usize = 1000;

/// Segments to empty.
#[derive(Clone, Copy, Debug)]
pub struct DrainRequest<'a> {
    /// Their names; each once.
    pub segments: &'a [String],
    /// Names of the segments that their objects may go to; any, if there are none.
    pub targets: &'a [String],
    /// Replicas that are moved at the same time, at least 1.
    pub max_concurrency: u64,
}

/// How far a drain job is, with the existing system's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum DrainStatus {
    /// Nobody has looked at it yet.
    Created = 0,
    /// What is to be moved is being looked for.
    Planning = 1,
    /// Replicas are being moved, or waited for.
    Running = 2,
    /// The segments are empty.
    Succeeded = 3,
    /// Some replicas could not be moved, or a segment went before it was empty. What is left of the segments takes objects again.
    Failed = 4,
    /// Somebody ended it. The segments take objects again.
    Canceled = 5,
}

impl DrainStatus {
    pub(super) fn from_number(number: i32) -> Option<Self> {
        use DrainStatus::*;
        let all = [Created, Planning, Running, Succeeded, Failed, Canceled];
        all.into_iter().find(|status| *status as i32 == number)
    }

    fn is_over(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Canceled)
    }
}

/// Where a drain job stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrainInfo {
    /// Its id.
    pub id: Uuid,
    /// How far it is.
    pub status: DrainStatus,
    /// When it was asked for, in milliseconds of the wall clock.
    pub created_ms: u64,
    /// When it last changed.
    pub updated_ms: u64,
    /// What it empties.
    pub segments: Vec<String>,
    /// Replicas moved.
    pub succeeded: u64,
    /// Replicas given up.
    pub failed: u64,
    /// Replicas that cannot be moved now: hard-pinned, being written or copied, or there is no room for them.
    pub blocked: u64,
    /// Replicas being moved.
    pub active: u64,
    /// Bytes moved.
    pub migrated_bytes: u64,
    /// The state in words, or what went wrong last.
    pub message: String,
}

/// One replica to move away.
struct Unit {
    key: ObjectKey,
    /// Which of the job's sources it lies in.
    source: usize,
    tries: u32,
}

/// A unit whose move somebody is to make.
struct Active {
    unit: Unit,
    task: Uuid,
    bytes: u64,
}

struct Job<A> {
    id: Uuid,
    status: DrainStatus,
    created_ms: u64,
    updated_ms: u64,
    sources: Vec<Arc<Mounted<A>>>,
    /// Its sources, as long as they are not.
    awaited: Option<Awaited>,
    names: Vec<String>,
    targets: Vec<String>,
    at_once: usize,
    ready: VecDeque<Unit>,
    blocked: VecDeque<Unit>,
    active: Vec<Active>,
    succeeded: u64,
    failed: u64,
    migrated_bytes: u64,
    message: String,
    /// How many were blocked when it ended.
    left: u64,
    /// Nothing new is begun before.
    hold: Moment,
    /// When what is blocked is looked at again.
    recheck: Moment,
    /// When nothing was left but what readers may still hold leases on.
    emptied: Option<Moment>,
}

/// What a job waits for that was begun under a master before.
struct Awaited {
    segments: Vec<SegmentId>,
    /// Until then readers and writers may hold what that master has promised them, and members come back.
    from: Moment,
    /// What has not come by then does not come.
    until: Moment,
}

/// All drain jobs.
pub(super) struct Drains<A> {
    jobs: Mutex<Jobs<A>>,
    /// When one of them is to be looked at, the end of time if there are none.
    due: AtomicU64,
}

struct Jobs<A> {
    rng: Rng,
    /// Oldest first.
    list: VecDeque<Job<A>>,
}

impl<A> Drains<A> {
    pub(super) fn new(seed: u64) -> Self {
        let jobs = Jobs { rng: Rng::seeded(seed), list: VecDeque::new() };
        Self { jobs: Mutex::new(jobs), due: AtomicU64::new(u64::MAX) }
    }

    /// A task is over: it may have been a move of ours.
    pub(super) fn wake(&self) {
        if self.due.load(SeqCst) != u64::MAX {
            self.due.store(0, SeqCst);
        }
    }

    pub(super) fn is_due(&self, now: Moment) -> bool {
        self.due.load(SeqCst) <= now.0
    }
}

impl<A> Jobs<A> {
    fn find(&mut self, id: Uuid) -> Result<&mut Job<A>> {
        self.list.iter_mut().find(|job| job.id == id).ok_or_else(|| ErrorCode::JobNotFound.into())
    }

    /// An id that none of them has.
    fn new_id(&mut self) -> Uuid {
        loop {
            let id = Uuid::new(self.rng.next_u64(), self.rng.next_u64());
            if self.find(id).is_err() {
                return id;
            }
        }
    }

    /// The latest. Of those that are over, some are known.
    fn add(&mut self, job: Job<A>) {
        self.list.push_back(job);
        while self.list.len() > REMEMBERED && self.list.front().is_some_and(|job| job.status.is_over()) {
            self.list.pop_front();
        }
    }
}

/// What can be done for a unit now.
enum Outlook {
    /// To this segment, and so many bytes.
    Move(String, u64),
    /// So many bytes find no room.
    NoRoom(u64),
    Blocked,
    /// There is nothing of it in the segment any more.
    Gone,
}

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// Begins to empty segments: nothing is placed in them from now on, and what is there is moved away. The rest is done by
    /// [`Master::tick`] and the owners of the segments.
    ///
    /// An object that somebody reads is moved like any other: what its readers were promised stays until their leases are over.
    ///
    /// # Errors
    /// `INVALID_PARAMS` (no segment, one twice, a source that is a target too, no concurrency); `SEGMENT_NOT_FOUND`;
    /// `UNAVAILABLE_IN_CURRENT_STATUS` (a segment, source or target, is in another state than OK).
    pub fn drain_start(&self, request: &DrainRequest<'_>) -> Result<Uuid> {
        check_names(request)?;
        let mut jobs = self.drains.jobs.lock();
        let sources = {
            // A placement under way holds this lock: afterwards there are no new ones in the segments.
            let registry = self.segments.write();
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
        let wall = self.clock.wall_ms();
        let id = jobs.new_id();
        tracing::info!(job = %id, segments = ?request.segments, "drain begins");
        jobs.add(Job {
            id,
            status: DrainStatus::Created,
            created_ms: wall,
            updated_ms: wall,
            sources,
            awaited: None,
            names: request.segments.to_vec(),
            targets: request.targets.to_vec(),
            at_once: usize::try_from(request.max_concurrency).unwrap_or(usize::MAX),
            ready: VecDeque::new(),
            blocked: VecDeque::new(),
            active: Vec::new(),
            succeeded: 0,
            failed: 0,
            migrated_bytes: 0,
            message: "Drain job created".into(),
            left: 0,
            hold: Moment(0),
            recheck: Moment(0),
            emptied: None,
        });
        self.drains.due.store(0, SeqCst);
        Ok(id)
    }

    /// Where a drain job stands.
    ///
    /// # Errors
    /// `JOB_NOT_FOUND`; of those that are over, the latest thousand are known.
    pub fn drain(&self, id: Uuid) -> Result<DrainInfo> {
        self.drains.jobs.lock().find(id).map(|job| job.info())
    }

    /// Ends a drain job. Its segments take objects again; what was moved stays where it is.
    ///
    /// # Errors
    /// `JOB_NOT_FOUND`; `UNAVAILABLE_IN_CURRENT_STATUS` when it is over, or while moves are under way. The job then begins no
    /// new ones for ten seconds, so that trying again soon succeeds.
    pub fn drain_cancel(&self, id: Uuid) -> Result<()> {
        let mut jobs = self.drains.jobs.lock();
        let job = jobs.find(id)?;
        if job.status.is_over() {
            return Err(ErrorCode::UnavailableInCurrentStatus.into());
        }
        let (now, wall) = (self.clock.now(), self.clock.wall_ms());
        self.look_after(job, wall);
        // What nobody has fetched is not under way.
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
            let text = format!("{} moves are under way", job.active.len());
            return Err(Error::new(ErrorCode::UnavailableInCurrentStatus, text));
        }
        self.await_no_more(job);
        job.end(DrainStatus::Canceled, "Drain job canceled".into(), wall);
        Ok(())
    }

    /// Lets every job go on. Call when [`Drains::is_due`].
    pub(super) fn drive_drains(&self, now: Moment) {
        self.drains.due.store(u64::MAX, SeqCst);
        let running: Vec<_> = {
            let jobs = self.drains.jobs.lock();
            jobs.list.iter().filter(|job| !job.status.is_over()).map(|job| job.id).collect()
        };
        for id in &running {
            if !self.gather(*id, now) {
                continue;
            }
            self.plan(*id);
            if let Ok(job) = self.drains.jobs.lock().find(*id)
                && !job.status.is_over()
            {
                self.go_on(job, now);
            }
        }
        if !running.is_empty() {
            self.drains.due.fetch_min(now.after(ROUND).0, SeqCst);
        }
    }

    /// Looks for what a job is to move, if it does not know. A pass over all objects; the table of jobs is not locked meanwhile.
    fn plan(&self, id: Uuid) {
        let sources = {
            let mut jobs = self.drains.jobs.lock();
            let Ok(job) = jobs.find(id) else { return };
            if !matches!(job.status, DrainStatus::Created | DrainStatus::Planning) {
                return;
            }
            job.status = DrainStatus::Planning;
            job.sources.clone()
        };
        let (mut ready, mut blocked) = (VecDeque::new(), VecDeque::new());
        self.directory.visit(|shard, slot| {
            let object = &shard[slot];
            for (source, segment) in sources.iter().enumerate() {
                if holds(object, |held| Arc::ptr_eq(&held.segment, segment)) {
                    let list = if is_blocked(object) { &mut blocked } else { &mut ready };
                    list.push_back(Unit { key: object.key.clone(), source, tries: 0 });
                }
            }
        });
        if let Ok(job) = self.drains.jobs.lock().find(id)
            && job.status == DrainStatus::Planning
        {
            // Some may have been begun under a master before.
            let moving: HashSet<_> = job.active.iter().map(|one| (&one.unit.key, one.unit.source)).collect();
            let rests = |unit: &Unit| !moving.contains(&(&unit.key, unit.source));
            ready.retain(rests);
            blocked.retain(rests);
            (job.ready, job.blocked) = (ready, blocked);
            job.status = DrainStatus::Running;
            job.touch("Drain job running".into(), self.clock.wall_ms());
        }
    }

    /// One round of a job that knows what to move.
    fn go_on(&self, job: &mut Job<A>, now: Moment) {
        let wall = self.clock.wall_ms();
        self.look_after(job, wall);
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
            self.begin_moves(job, now, wall);
        }
        if job.ready.is_empty() && job.blocked.is_empty() && job.active.is_empty() {
            self.conclude(job, now, wall);
        }
    }

    /// Learns how the moves under way have ended.
    fn look_after(&self, job: &mut Job<A>, wall: u64) {
        for active in std::mem::take(&mut job.active) {
            let failed = match self.task(active.task) {
                Ok(task) if task.status == TaskStatus::Success => None,
                Ok(task) if task.status == TaskStatus::Failed => Some(task.message),
                Ok(_) => {
                    job.active.push(active);
                    continue;
                }
                Err(forgotten) => Some(forgotten.to_string()),
            };
            match failed {
                None => {
                    job.succeeded += 1;
                    job.migrated_bytes = job.migrated_bytes.saturating_add(active.bytes);
                    job.touch("Drain job running".into(), wall);
                }
                Some(why) => job.retry(active.unit, &why, wall),
            }
        }
    }

    /// Looks at some of what was blocked: whatever has changed goes its way.
    fn recheck(&self, job: &mut Job<A>, now: Moment) {
        let some = job.blocked.len().min(RECHECKED);
        for unit in job.blocked.drain(..some).collect::<Vec<_>>() {
            match self.outlook(&unit, job, now) {
                Outlook::Gone => {}
                Outlook::Move(..) => job.ready.push_back(unit),
                Outlook::NoRoom(_) if job.targets.is_empty() => job.ready.push_back(unit),
                Outlook::NoRoom(_) | Outlook::Blocked => job.blocked.push_back(unit),
            }
        }
    }

    fn begin_moves(&self, job: &mut Job<A>, now: Moment, wall: u64) {
        let mut room_made = false;
        while job.active.len() < job.at_once {
            let Some(unit) = job.ready.pop_front() else { return };
            match self.outlook(&unit, job, now) {
                Outlook::Gone => {}
                Outlook::Blocked => job.blocked.push_back(unit),
                Outlook::NoRoom(len) => {
                    // There is less memory from now on: what was not used for the longest has to go, wherever it is. Targets
                    // that were named are left as they are.
                    if job.targets.is_empty() && !room_made && self.make_room(len, None, now) {
                        job.ready.push_front(unit);
                    } else {
                        job.blocked.push_back(unit);
                    }
                    room_made = true;
                }
                Outlook::Move(target, bytes) => {
                    let source = &job.sources[unit.source].info.name;
                    match self.create_move(unit.key.as_bytes(), source, &target) {
                        Ok(task) => {
                            room_made = false;
                            job.active.push(Active { unit, task, bytes });
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

    fn outlook(&self, unit: &Unit, job: &Job<A>, now: Moment) -> Outlook {
        let key = unit.key.as_bytes();
        let hash = self.directory.hash(key);
        let shard = self.directory.lock(hash);
        let Some(slot) = shard.find(hash, key) else { return Outlook::Gone };
        let object = &shard[slot];
        if !holds(object, |held| Arc::ptr_eq(&held.segment, &job.sources[unit.source])) {
            return Outlook::Gone;
        }
        // Two moves of one object at the same time could have the same target, and leave one replica of two.
        let moving = job.sources.len() > 1 && job.active.iter().any(|active| active.unit.key == unit.key);
        let free = |_: &&Value<A>| !moving && !is_blocked(object);
        let Some(value) = object.value().filter(free) else { return Outlook::Blocked };
        let registry = self.segments.read();
        let holds_one = |segment: &Arc<Mounted<A>>| {
            value.replicas.iter().any(|held| held.segment.info.name == segment.info.name)
        };
        let allowed = |segment: &&Arc<Mounted<A>>| {
            segment.would_open(now) && (job.targets.is_empty() || job.targets.contains(&segment.info.name))
        };
        let fits = |segment: &&Arc<Mounted<A>>| holds_one(segment) || segment.fits(value.len);
        // A segment that has a replica already makes the move a removal: only if there is nothing else.
        let rank = |segment: &&Arc<Mounted<A>>| (holds_one(segment), segment.is_doubted());
        let best = registry
            .list
            .iter()
            .filter(allowed)
            .filter(fits)
            .min_by(|a, b| rank(a).cmp(&rank(b)).then_with(|| b.free_ratio().total_cmp(&a.free_ratio())));
        match best {
            Some(segment) => Outlook::Move(segment.info.name.clone(), value.len),
            None if registry
                .list
                .iter()
                .any(|segment| allowed(&segment) && value.len <= segment.info.size) =>
            {
                Outlook::NoRoom(value.len)
            }
            None => Outlook::Blocked,
        }
    }

    /// All units are done with.
    fn conclude(&self, job: &mut Job<A>, now: Moment, wall: u64) {
        if job.failed > 0 {
            let message = format!("{} replicas could not be moved: {}", job.failed, job.message);
            job.end(DrainStatus::Failed, message, wall);
            return;
        }
        if job.sources.iter().any(|source| source.used() > source.resting()) {
            // Something came to be readable that was not to be seen before.
            job.emptied = None;
            job.status = DrainStatus::Planning;
            return;
        }
        // Readers that were sent here before the moves are let finish, so that the segment can go as soon as it is drained.
        let emptied = *job.emptied.get_or_insert(now);
        let quiet = job.sources.iter().all(|source| source.resting() == 0);
        if quiet || emptied.after(self.options.lease_ttl) <= now {
            job.end(DrainStatus::Succeeded, "Drain job finished successfully".into(), wall);
        }
    }
}

impl<A: SegmentAllocator> Job<A> {
    fn touch(&mut self, message: String, wall: u64) {
        self.message = message;
        self.updated_ms = wall;
    }

    fn retry(&mut self, mut unit: Unit, why: &str, wall: u64) {
        unit.tries += 1;
        self.touch(format!("{}: {why}", unit.key.as_bytes().escape_ascii()), wall);
        if unit.tries < TRIES {
            self.blocked.push_back(unit);
        } else {
            self.failed += 1;
        }
    }

    fn end(&mut self, status: DrainStatus, message: String, wall: u64) {
        let then = if status == DrainStatus::Succeeded { SegmentStatus::Drained } else { SegmentStatus::Ok };
        self.sources.iter().for_each(|source| source.set_drain(then));
        tracing::info!(job = %self.id, ?status, moved = self.succeeded, failed = self.failed, "drain ends: {message}");
        self.status = status;
        self.touch(message, wall);
        // The dead keep their space until nobody knows them.
        self.sources.clear();
        self.ready = VecDeque::new();
        self.left = std::mem::take(&mut self.blocked).len() as u64;
    }

    fn info(&self) -> DrainInfo {
        DrainInfo {
            id: self.id,
            status: self.status,
            created_ms: self.created_ms,
            updated_ms: self.updated_ms,
            segments: self.names.clone(),
            succeeded: self.succeeded,
            failed: self.failed,
            blocked: self.blocked.len() as u64 + self.left,
            active: self.active.len() as u64,
            migrated_bytes: self.migrated_bytes,
            message: self.message.clone(),
        }
    }
}

/// Whether anything of the object takes space there.
fn holds<A: SegmentAllocator>(object: &Object<A>, there: impl Fn(&Held<A>) -> bool) -> bool {
    object.value().is_some_and(|value| value.replicas.iter().any(&there))
        || object.write().is_some_and(|write| write.replicas.iter().any(&there))
        || object.copying().is_some_and(|copying| copying.targets.iter().any(&there))
}

/// Whether what there is of the object has to stay where it is for now.
fn is_blocked<A: SegmentAllocator>(object: &Object<A>) -> bool {
    object.hard_pin || object.write().is_some() || object.copying().is_some()
}

fn check_names(request: &DrainRequest<'_>) -> Result<()> {
    if request.segments.is_empty() {
        return Err(Error::invalid("a drain needs a segment"));
    }
    if request.max_concurrency == 0 {
        return Err(Error::invalid("max_concurrency must not be 0"));
    }
    let mut seen = HashSet::new();
    for name in request.segments {
        if !seen.insert(name) {
            return Err(Error::invalid(format!("segment {name} is named twice")));
        }
        if request.targets.contains(name) {
            return Err(Error::invalid(format!("segment {name} cannot be emptied into itself")));
        }
    }
    Ok(())
}

/// The segments of a name, if all of them are in order.
fn all_ok<'a, A: SegmentAllocator>(registry: &'a Registry<A>, name: &str) -> Result<&'a [Arc<Mounted<A>>]> {
    let named = registry.named(name);
    if named.is_empty() {
        return Err(Error::new(ErrorCode::SegmentNotFound, format!("no segment {name}")));
    }
    match named.iter().find(|segment| segment.status() != SegmentStatus::Ok) {
        None => Ok(named),
        Some(other) => Err(Error::new(
            ErrorCode::UnavailableInCurrentStatus,
            format!("segment {name} is {:?}", other.status()),
        )),
    }
}
