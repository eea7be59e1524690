//! Jobs for the kernel, their queue, the files that they share, and shares of completions that must
//! be completed by their deadline whatever the disk does.

#[cfg(feature = "disk-io-uring")]
mod ring;

use std::collections::VecDeque;
use std::fmt;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mooncake_core::clock::{Moment, SharedClock};
use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::{Completion, Opcode};
use parking_lot::{Condvar, Mutex};
use slab::Slab;

use crate::fault::Faults;
use crate::file::BlockFile;
use crate::file_ranges::RangeUse;
use crate::stats::{Counters, add};

/// Request of at most `piece_bytes`, with everything that it needs until it is complete.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) queue: Arc<Queue>,
    /// Key of the entry in the table of the queue, where the share of the completion is parked.
    pub(crate) key: usize,
    pub(crate) opcode: Opcode,
    /// Use of the file range, which keeps it from being closed.
    pub(crate) used: RangeUse<SharedFile>,
    /// Offset of the first byte in the file.
    pub(crate) start: u64,
    /// Memory of the caller.
    pub(crate) local: MemorySpan,
    pub(crate) claim: Option<u64>,
}

impl Job {
    pub(crate) fn file(&self) -> &Arc<SharedFile> {
        self.used.file()
    }

    pub(crate) fn writes(&self) -> bool {
        self.opcode == Opcode::Write
    }

    pub(crate) fn end(&self) -> u64 {
        self.start + self.local.len as u64
    }

    /// Returns the range of blocks that contains the job.
    pub(crate) fn blocks(&self) -> (u64, u64) {
        let align = self.file().align();
        (self.start - self.start % align, self.end().next_multiple_of(align))
    }

    /// Returns whether the job covers only a part of its blocks.
    pub(crate) fn is_partial(&self) -> bool {
        self.blocks() != (self.start, self.end())
    }
}

/// File with the writes in progress on it.
#[derive(Debug)]
pub(crate) struct SharedFile {
    file: BlockFile,
    claims: Mutex<Claims>,
}

/// Writes in progress on a file whose partial blocks are read, changed and written back.
#[derive(Debug, Default)]
struct Claims {
    last: u64,
    active: Vec<Claim>,
    waiting: Vec<Job>,
}

#[derive(Debug)]
struct Claim {
    id: u64,
    lo: u64,
    hi: u64,
    partial: bool,
}

impl Deref for SharedFile {
    type Target = BlockFile;

    fn deref(&self) -> &BlockFile {
        &self.file
    }
}

impl SharedFile {
    pub(crate) fn new(file: BlockFile) -> Arc<Self> {
        Arc::new(Self { file, claims: Mutex::default() })
    }

    /// Returns a job that may start, or keeps it until the jobs that it collides with are done.
    pub(crate) fn admit(&self, mut job: Job) -> Option<Job> {
        if !job.writes() || self.align() == 1 {
            return Some(job);
        }
        let mut claims = self.claims.lock();
        if claims.waiting.iter().any(|other| collide(&claim_of(other), &claim_of(&job)))
            || claims.active.iter().any(|active| collide(active, &claim_of(&job)))
        {
            claims.waiting.push(job);
            return None;
        }
        claims.hold(&mut job);
        Some(job)
    }

    /// Ends the claim of a job. Returns the jobs that may start now.
    pub(crate) fn release(&self, id: u64) -> Vec<Job> {
        let mut claims = self.claims.lock();
        claims.active.retain(|claim| claim.id != id);
        if claims.waiting.is_empty() {
            return Vec::new();
        }
        let mut free = Vec::new();
        let mut waiting = Vec::new();
        for mut job in std::mem::take(&mut claims.waiting) {
            let claim = claim_of(&job);
            let blocked = claims.active.iter().any(|active| collide(active, &claim))
                || waiting.iter().any(|other| collide(&claim_of(other), &claim));
            if blocked {
                waiting.push(job);
            } else {
                claims.hold(&mut job);
                free.push(job);
            }
        }
        claims.waiting = waiting;
        free
    }
}

impl Claims {
    fn hold(&mut self, job: &mut Job) {
        self.last += 1;
        job.claim = Some(self.last);
        self.active.push(Claim { id: self.last, ..claim_of(job) });
    }
}

fn claim_of(job: &Job) -> Claim {
    let (lo, hi) = job.blocks();
    Claim { id: 0, lo, hi, partial: job.is_partial() }
}

/// Returns whether two claims collide. Two whole writes may run in parallel: callers that post both
/// have no right to an order.
fn collide(a: &Claim, b: &Claim) -> bool {
    (a.partial || b.partial) && a.lo < b.hi && b.lo < a.hi
}

/// Queue between a transport and its engine.
pub(crate) struct Queue {
    state: Mutex<QueueState>,
    /// Condition of threads that wait for a job.
    work: Condvar,
    /// Condition of the watch thread, which waits for the next deadline.
    watch: Condvar,
    /// Event that io_uring waits for instead, and whether it waits.
    event: Option<OwnedFd>,
    asleep: AtomicBool,
    clock: SharedClock,
    pub(crate) counters: Counters,
    pub(crate) faults: Faults,
}

#[derive(Default)]
struct QueueState {
    ready: VecDeque<Job>,
    parked: Slab<Parked>,
    /// Time of the next check of the watch thread.
    next_check: Option<Moment>,
    /// Time of the last completed job, or when the first pending one arrived.
    last_progress: Moment,
    closed: bool,
}

struct Parked {
    deadline: Option<Moment>,
    /// Share of the completion, absent while an engine moves bytes of the caller, and once it is
    /// completed.
    done: Option<Completion>,
}

impl Queue {
    pub(crate) fn new(event: Option<OwnedFd>, clock: SharedClock, faults: Faults) -> Self {
        Self {
            state: Mutex::default(),
            work: Condvar::new(),
            watch: Condvar::new(),
            event,
            asleep: AtomicBool::new(false),
            clock,
            counters: Counters::default(),
            faults,
        }
    }

    /// Parks a share; its key goes into the job that will complete it. Returns the share if the
    /// queue is closed.
    pub(crate) fn enter(&self, done: Completion) -> Result<usize, Completion> {
        let deadline = done.deadline();
        let mut state = self.state.lock();
        if state.closed {
            return Err(done);
        }
        if state.parked.is_empty() {
            state.last_progress = self.clock.now();
        }
        self.schedule_check(&mut state, deadline);
        Ok(state.parked.insert(Parked { deadline, done: Some(done) }))
    }

    fn schedule_check(&self, state: &mut QueueState, deadline: Option<Moment>) {
        if let Some(deadline) = deadline
            && state.next_check.is_none_or(|at| deadline < at)
        {
            state.next_check = Some(deadline);
            self.watch.notify_one();
        }
    }

    /// Queues a job. The caller then calls [`wake`](Self::wake).
    pub(crate) fn push(&self, job: Job) {
        let mut state = self.state.lock();
        if state.closed {
            drop(state);
            return self.retire(job, Err(closed_error()));
        }
        state.ready.push_back(job);
    }

    /// Notifies the engine of queued jobs.
    pub(crate) fn wake(&self, jobs: usize) {
        match &self.event {
            Some(event) => {
                if self.asleep.swap(false, Ordering::SeqCst) {
                    // A full counter wakes the engine, too.
                    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
                }
            }
            None if jobs == 1 => {
                self.work.notify_one();
            }
            None => {
                self.work.notify_all();
            }
        }
    }

    /// Waits for the next job. Returns `None` when the queue is closed.
    pub(crate) fn wait(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.ready.pop_front() {
                return Some(job);
            }
            if state.closed {
                return None;
            }
            self.work.wait(&mut state);
        }
    }

    /// Takes a share from the watch thread. Returns `None` if the share was cancelled, or its
    /// deadline has passed.
    pub(crate) fn unpark(&self, key: usize) -> Option<Completion> {
        self.state.lock().parked.get_mut(key).and_then(|parked| parked.done.take())
    }

    /// Returns a share to the watch thread.
    pub(crate) fn park(&self, key: usize, done: Completion) {
        let deadline = done.deadline();
        let mut state = self.state.lock();
        if let Some(parked) = state.parked.get_mut(key) {
            parked.done = Some(done);
        }
        self.schedule_check(&mut state, deadline);
    }

    /// Returns whether a deadline has passed.
    pub(crate) fn is_expired(&self, deadline: Option<Moment>) -> bool {
        deadline.is_some_and(|deadline| self.clock.now() >= deadline)
    }

    /// Ends a job whose share is parked.
    pub(crate) fn retire(&self, job: Job, result: Result<()>) {
        let done = self.unpark(job.key);
        self.end(job, done, result);
    }

    /// Ends a job: frees its resources, updates the counters, starts the jobs that waited for it,
    /// and completes its share.
    pub(crate) fn end(&self, job: Job, done: Option<Completion>, result: Result<()>) {
        let parked = {
            let mut state = self.state.lock();
            state.last_progress = self.clock.now();
            let parked = state.parked.contains(job.key).then(|| state.parked.remove(job.key));
            parked.and_then(|parked| parked.done)
        };
        self.count(&job, &result);
        let released = job.claim.map(|claim| job.file().release(claim)).unwrap_or_default();
        for other in released {
            let queue = other.queue.clone();
            queue.push(other);
            queue.wake(1);
        }
        // Dropped before the share is completed: the waiter may then close the file.
        drop(job);
        if let Some(done) = done.or(parked) {
            done.finish(result);
        }
    }

    /// Returns the time for which jobs have been pending without a completed one.
    pub(crate) fn stalled_for(&self) -> Duration {
        let state = self.state.lock();
        match state.parked.is_empty() {
            true => Duration::ZERO,
            false => self.clock.now().since(state.last_progress),
        }
    }

    fn count(&self, job: &Job, result: &Result<()>) {
        let (counters, len) = (&self.counters, job.local.len as u64);
        match (job.opcode, result) {
            (Opcode::Read, Ok(())) => {
                add(&counters.reads, 1);
                add(&counters.read_bytes, len);
            }
            (Opcode::Write, Ok(())) => {
                add(&counters.writes, 1);
                add(&counters.written_bytes, len);
            }
            (_, Err(error)) if error.code() == ErrorCode::RpcTimeout => {}
            (Opcode::Read, Err(_)) => add(&counters.read_errors, 1),
            (Opcode::Write, Err(error)) => {
                add(&counters.write_errors, 1);
                if error.code() == ErrorCode::NoAvailableHandle {
                    add(&counters.no_space, 1);
                }
            }
        }
    }

    /// Ends the threads of the engine and fails the jobs that have not begun.
    pub(crate) fn close(&self) {
        let waiting = {
            let mut state = self.state.lock();
            state.closed = true;
            std::mem::take(&mut state.ready)
        };
        for job in waiting {
            self.retire(job, Err(closed_error()));
        }
        self.work.notify_all();
        self.watch.notify_all();
        self.wake(1);
    }

    /// Completes parked shares at their deadline, until the queue is closed and nothing is parked
    /// with a deadline.
    pub(crate) fn watch(&self) {
        let mut state = self.state.lock();
        loop {
            let now = self.clock.now();
            let expired: Vec<Completion> = state
                .parked
                .iter_mut()
                .filter(|(_, parked)| parked.deadline.is_some_and(|at| at <= now))
                .filter_map(|(_, parked)| parked.done.take())
                .collect();
            if !expired.is_empty() {
                drop(state);
                add(&self.counters.timeouts, expired.len() as u64);
                expired.into_iter().for_each(|done| done.finish(Err(crate::queue::deadline_error())));
                state = self.state.lock();
                continue;
            }
            let open = state.parked.iter().filter(|(_, parked)| parked.done.is_some());
            state.next_check = open.filter_map(|(_, parked)| parked.deadline).min();
            match state.next_check {
                // At least a millisecond, so that a stopped clock costs little.
                Some(at) => {
                    let span = at.since(now).max(Duration::from_millis(1));
                    self.watch.wait_for(&mut state, span);
                }
                None if state.closed => return,
                None => self.watch.wait(&mut state),
            }
        }
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Queue")
    }
}

pub(crate) fn deadline_error() -> Error {
    Error::new(ErrorCode::RpcTimeout, "disk did not answer before the deadline")
}

pub(crate) fn closed_error() -> Error {
    Error::new(ErrorCode::TransferFail, "disk is closed")
}
