//! Room in a completion queue, who waits for it, and when the poller looks at the clock: what callers and a device's thread share on the
//! way of a completion. `tests/interleavings.rs` runs this file through every order in which they may come.

use crate::sync::{AtomicU64, AtomicUsize, Mutex, Ordering};

/// Room in a completion queue, shared by all that report to it: a queue that overflows is lost.
#[derive(Debug)]
pub(crate) struct Credits {
    free: AtomicUsize,
}

impl Credits {
    pub(crate) fn new(n: usize) -> Self {
        Self { free: AtomicUsize::new(n) }
    }

    /// Takes up to `n`; how many.
    pub(crate) fn take(&self, n: usize) -> usize {
        let mut taken = 0;
        let _ = self.free.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |free| {
            taken = free.min(n);
            (taken != 0).then(|| free - taken)
        });
        taken
    }

    pub(crate) fn give(&self, n: usize) {
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

/// A queue that is looked at, and that can be asked to wake the looker once.
pub(crate) trait Watched {
    /// What the queue says when it is lost.
    type Lost;

    /// Takes out what is there; whether there was anything.
    fn take(&mut self) -> Result<bool, Self::Lost>;

    /// Asks for a wake-up when the next one comes.
    fn arm(&mut self) -> Result<(), Self::Lost>;
}

/// Looks, and says whether it may be slept now: there is nothing, and whatever comes from now on wakes the sleeper.
pub(crate) fn is_quiet<Q: Watched>(queue: &mut Q) -> Result<bool, Q::Lost> {
    if queue.take()? {
        return Ok(false);
    }
    queue.arm()?;
    // What came between the look and the request wakes nobody.
    Ok(!queue.take()?)
}

/// Connections that wait for room.
#[derive(Debug)]
pub(crate) struct Starved<T>(Mutex<Vec<T>>);

impl<T> Starved<T> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Puts somebody on the list who found no room. True when there is some by now: it may have come before the list was read, so
    /// the poller has to be woken.
    pub(crate) fn add(&self, who: T, credits: &Credits) -> bool {
        self.0.lock().push(who);
        credits.any()
    }

    /// Everybody on the list, to be asked again; after room was given. `into` is empty, and its room is the list's next.
    pub(crate) fn take(&self, into: &mut Vec<T>) {
        std::mem::swap(&mut *self.0.lock(), into);
    }
}

/// When the poller looks at the clock next, in its clock's numbers.
#[derive(Debug)]
pub(crate) struct Alarm(AtomicU64);

/// Nothing is planned.
const NEVER: u64 = u64::MAX;

impl Alarm {
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(NEVER))
    }

    /// Plans a look no later than that; after what is to be seen was put there. True when it is earlier than what was planned: whoever
    /// sleeps has to be woken.
    pub(crate) fn set(&self, at: u64) -> bool {
        self.0.fetch_min(at, Ordering::AcqRel) > at
    }

    pub(crate) fn at(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Before the look: what is planned from now on is new.
    pub(crate) fn clear(&self) {
        self.0.store(NEVER, Ordering::Release);
    }
}
