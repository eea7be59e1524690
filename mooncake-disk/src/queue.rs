//! Jobs that wait for the kernel, and shares of completions that must be finished by their deadline whatever the disk does.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mooncake_core::clock::{Moment, SharedClock};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::{Completion, Opcode};
use parking_lot::{Condvar, Mutex};
use slab::Slab;

use crate::job::Job;
use crate::stats::{Counters, add};

/// What a transport hands to its engine.
pub(crate) struct Queue {
    state: Mutex<State>,
    /// Threads wait here for a job.
    work: Condvar,
    /// The watch waits here for the next deadline.
    watch: Condvar,
    /// Where io_uring waits instead, and whether it does.
    event: Option<OwnedFd>,
    asleep: AtomicBool,
    clock: SharedClock,
    pub(crate) counters: Counters,
    #[cfg(feature = "testkit")]
    pub(crate) faults: Option<std::sync::Arc<dyn crate::fault::IoFaults>>,
}

#[derive(Default)]
struct State {
    ready: VecDeque<Job>,
    parked: Slab<Parked>,
    /// When the watch looks again.
    next_look: Option<Moment>,
    /// When a job was last through, or the first of those that are there came.
    moved: Moment,
    closed: bool,
}

struct Parked {
    deadline: Option<Moment>,
    /// Nothing while an engine moves bytes of the caller, or once it has been finished.
    done: Option<Completion>,
}

impl Queue {
    pub(crate) fn new(event: Option<OwnedFd>, clock: SharedClock) -> Self {
        Self {
            state: Mutex::default(),
            work: Condvar::new(),
            watch: Condvar::new(),
            event,
            asleep: AtomicBool::new(false),
            clock,
            counters: Counters::default(),
            #[cfg(feature = "testkit")]
            faults: None,
        }
    }

    /// Takes a share in; the result goes into the job that will finish it. The share comes back when the queue is closed.
    pub(crate) fn enter(&self, done: Completion) -> Result<usize, Completion> {
        let deadline = done.deadline();
        let mut state = self.state.lock();
        if state.closed {
            return Err(done);
        }
        if state.parked.is_empty() {
            state.moved = self.clock.now();
        }
        self.look_by(&mut state, deadline);
        Ok(state.parked.insert(Parked { deadline, done: Some(done) }))
    }

    fn look_by(&self, state: &mut State, deadline: Option<Moment>) {
        if let Some(deadline) = deadline
            && state.next_look.is_none_or(|at| deadline < at)
        {
            state.next_look = Some(deadline);
            self.watch.notify_one();
        }
    }

    /// Puts a job in line. [`wake`](Self::wake) is still to be called.
    pub(crate) fn push(&self, job: Job) {
        let mut state = self.state.lock();
        if state.closed {
            drop(state);
            return self.retire(job, Err(gone()));
        }
        state.ready.push_back(job);
    }

    /// Tells the engine of jobs that were pushed.
    pub(crate) fn wake(&self, jobs: usize) {
        match &self.event {
            Some(event) => {
                if self.asleep.swap(false, Ordering::SeqCst) {
                    // A full counter is as good as a written one.
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

    /// The next job, if there is one.
    #[cfg(feature = "disk-io-uring")]
    pub(crate) fn next(&self) -> Option<Job> {
        self.state.lock().ready.pop_front()
    }

    /// Waits for the next job; `None` when the queue is closed.
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

    /// Says that the engine is about to sleep until the event is written; false when there is something to do first.
    #[cfg(feature = "disk-io-uring")]
    pub(crate) fn falls_asleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        let state = self.state.lock();
        let idle = state.ready.is_empty() && !state.closed;
        if !idle {
            self.asleep.store(false, Ordering::SeqCst);
        }
        idle
    }

    /// The event, read so that it can be waited for again.
    #[cfg(feature = "disk-io-uring")]
    pub(crate) fn clear_event(&self) {
        if let Some(event) = &self.event {
            let _ = rustix::io::read(event, &mut [0u8; 8]);
        }
    }

    #[cfg(feature = "disk-io-uring")]
    pub(crate) fn event(&self) -> Option<&OwnedFd> {
        self.event.as_ref()
    }

    #[cfg(feature = "disk-io-uring")]
    pub(crate) fn is_closed(&self) -> bool {
        self.state.lock().closed
    }

    /// Takes a share away from the watch; `None` when it was given up, or its deadline has come.
    pub(crate) fn unpark(&self, key: usize) -> Option<Completion> {
        self.state.lock().parked.get_mut(key).and_then(|parked| parked.done.take())
    }

    /// Gives a share back to the watch.
    pub(crate) fn park(&self, key: usize, done: Completion) {
        let deadline = done.deadline();
        let mut state = self.state.lock();
        if let Some(parked) = state.parked.get_mut(key) {
            parked.done = Some(done);
        }
        self.look_by(&mut state, deadline);
    }

    /// Whether a deadline has come.
    pub(crate) fn is_late(&self, deadline: Option<Moment>) -> bool {
        deadline.is_some_and(|deadline| self.clock.now() >= deadline)
    }

    /// Ends a job whose share is parked.
    pub(crate) fn retire(&self, job: Job, result: Result<()>) {
        let done = self.unpark(job.key);
        self.end(job, done, result);
    }

    /// Ends a job: frees what it held, counts, starts what waited for it, and finishes its share.
    pub(crate) fn end(&self, job: Job, done: Option<Completion>, result: Result<()>) {
        let parked = {
            let mut state = self.state.lock();
            state.moved = self.clock.now();
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
        // Before the share: whoever waits for it may close the file.
        drop(job);
        if let Some(done) = done.or(parked) {
            done.finish(result);
        }
    }

    /// For how long there has been something to do and nothing was through.
    pub(crate) fn stalled_for(&self) -> Duration {
        let state = self.state.lock();
        match state.parked.is_empty() {
            true => Duration::ZERO,
            false => self.clock.now().since(state.moved),
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

    /// Ends the engine's threads and fails what has not begun.
    pub(crate) fn close(&self) {
        let waiting = {
            let mut state = self.state.lock();
            state.closed = true;
            std::mem::take(&mut state.ready)
        };
        for job in waiting {
            self.retire(job, Err(gone()));
        }
        self.work.notify_all();
        self.watch.notify_all();
        self.wake(1);
    }

    /// Finishes parked shares at their deadline, until the queue is closed and nothing is parked with a deadline.
    pub(crate) fn watch(&self) {
        let mut state = self.state.lock();
        loop {
            let now = self.clock.now();
            let late: Vec<Completion> = state
                .parked
                .iter_mut()
                .filter(|(_, parked)| parked.deadline.is_some_and(|at| at <= now))
                .filter_map(|(_, parked)| parked.done.take())
                .collect();
            if !late.is_empty() {
                drop(state);
                add(&self.counters.timeouts, late.len() as u64);
                late.into_iter().for_each(|done| done.finish(Err(crate::queue::late())));
                state = self.state.lock();
                continue;
            }
            let open = state.parked.iter().filter(|(_, parked)| parked.done.is_some());
            state.next_look = open.filter_map(|(_, parked)| parked.deadline).min();
            match state.next_look {
                // At least a millisecond, so that a clock that stands still costs little.
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

pub(crate) fn late() -> Error {
    Error::new(ErrorCode::RpcTimeout, "the deadline passed before the disk had answered")
}

pub(crate) fn gone() -> Error {
    Error::new(ErrorCode::TransferFail, "the disk has been closed")
}
