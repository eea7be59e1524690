//! Send credit of a completion queue, the connections that wait for it, and the time of the
//! poller's next look at the clock: the state that callers and the thread of a device share on the
//! path of a completion. `tests/interleavings.rs` runs this file under every interleaving.

use crate::sync::{AtomicU64, AtomicUsize, Mutex, Ordering};

/// Credit of a completion queue, shared by all senders that report to it: a queue that overflows is
/// lost.
#[derive(Debug)]
pub(crate) struct Credits {
    free: AtomicUsize,
}

impl Credits {
    pub(crate) fn new(n: usize) -> Self {
        Self { free: AtomicUsize::new(n) }
    }

    /// Takes up to `n` credits. Returns how many.
    pub(crate) fn take(&self, n: usize) -> usize {
        let mut taken = 0;
        let _ = self.free.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |free| {
            taken = free.min(n);
            (taken != 0).then(|| free - taken)
        });
        taken
    }

    pub(crate) fn release(&self, n: usize) {
        self.free.fetch_add(n, Ordering::AcqRel);
    }

    pub(crate) fn any(&self) -> bool {
        self.free.load(Ordering::Acquire) != 0
    }

    #[cfg(test)]
    pub(crate) fn free(&self) -> usize {
        self.free.load(Ordering::SeqCst)
    }
}

/// Queue that can be polled, and that sends one wake-up on request.
pub(crate) trait WakeableQueue {
    /// Error of a lost queue.
    type Error;

    /// Takes the available completions. Returns whether there were any.
    fn take(&mut self) -> Result<bool, Self::Error>;

    /// Requests a wake-up for the next completion.
    fn arm(&mut self) -> Result<(), Self::Error>;
}

/// Polls the queue. Returns whether the thread may sleep now: the queue is empty, and any later
/// completion wakes the thread.
pub(crate) fn may_sleep<Q: WakeableQueue>(queue: &mut Q) -> Result<bool, Q::Error> {
    if queue.take()? {
        return Ok(false);
    }
    queue.arm()?;
    // A completion between the poll and the request causes no wake-up, so this polls again.
    Ok(!queue.take()?)
}

/// Connections that wait for credit.
#[derive(Debug)]
pub(crate) struct Starved<T>(Mutex<Vec<T>>);

impl<T> Starved<T> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Adds a connection that found no credit. Returns true if credit is available by now: it may
    /// have become free before the list was read, so the poller has to be woken.
    pub(crate) fn add(&self, connection: T, credits: &Credits) -> bool {
        self.0.lock().push(connection);
        credits.any()
    }

    /// Takes all connections, which send again after credit became free. `into` is empty, and the
    /// list reuses its allocation.
    pub(crate) fn take(&self, into: &mut Vec<T>) {
        std::mem::swap(&mut *self.0.lock(), into);
    }
}

/// Time of the poller's next look at the clock, as a number of its clock.
#[derive(Debug)]
pub(crate) struct Alarm(AtomicU64);

/// Time of no planned look.
const NEVER: u64 = u64::MAX;

impl Alarm {
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(NEVER))
    }

    /// Plans a look at that time at the latest, after the state to look at was stored. Returns true
    /// if that is earlier than before: a sleeping poller has to be woken.
    pub(crate) fn set(&self, at: u64) -> bool {
        self.0.fetch_min(at, Ordering::AcqRel) > at
    }

    pub(crate) fn at(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Clears the plan before a look, so that later plans count as new.
    pub(crate) fn clear(&self) {
        self.0.store(NEVER, Ordering::Release);
    }
}
