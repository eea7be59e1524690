//! A place for a new connection where all places are taken: the connection that has waited longest for a request is closed.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use mooncake_core::clock::{Clock, SystemClock};
use mooncake_core::fault_injection::is_planted;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::task::AbortHandle;

/// Queues shorter than this are not worth a look at who has gone.
const FEW: usize = 64;
/// Searches for a waiting connection, each of which may begin to serve in that instant.
const ATTEMPTS: usize = 16;

/// State of a connection that serves a request.
const SERVING: u64 = u64::MAX;
/// State of a connection that was closed to make room.
const ENDED: u64 = u64::MAX - 1;

/// Whether a connection serves a request or waits for one. A new connection waits.
/// The number is the moment since which the connection waits, or one of the states above.
#[derive(Clone, Debug)]
pub struct Busy(Arc<AtomicU64>);

/// The present moment, on one clock for all connections.
fn now() -> u64 {
    static CLOCK: LazyLock<SystemClock> = LazyLock::new(SystemClock::new);
    CLOCK.now().0.min(ENDED - 1)
}

impl Default for Busy {
    fn default() -> Self {
        Self(Arc::new(AtomicU64::new(now())))
    }
}

impl Busy {
    /// Marks the connection as serving (`true`) or waiting.
    pub fn set(&self, busy: bool) {
        if busy {
            let _ = self.begin();
        } else {
            self.wait();
        }
    }

    /// Marks the connection as serving a request. Returns whether it may: a connection that was closed to make room ends without
    /// serving what has come.
    #[must_use]
    pub fn begin(&self) -> bool {
        let seen = self.0.load(Ordering::Relaxed);
        // A waiting state changes to `ENDED` only, so one attempt decides.
        seen == SERVING
            || (seen != ENDED
                && self.0.compare_exchange(seen, SERVING, Ordering::SeqCst, Ordering::Relaxed).is_ok())
    }

    /// Marks the connection as waiting for a request, from now on if it served one.
    pub fn wait(&self) {
        if self.0.load(Ordering::Relaxed) == SERVING && !is_planted("busy-for-ever") {
            self.0.store(now(), Ordering::SeqCst);
        }
    }

    /// The moment since which the connection waits.
    fn waits_since(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|state| *state < ENDED)
    }

    /// Takes the right to serve from a connection that still waits since that moment. Returns whether it does.
    fn end(&self, since: u64) -> bool {
        self.0.compare_exchange(since, ENDED, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }
}

/// The connections of a server in the order they came. Where there is no place left, the one that has waited longest makes room.
#[derive(Debug, Default)]
pub struct Silent {
    queue: VecDeque<(AbortHandle, Busy)>,
    /// How long the queue may become before those that have gone are looked for.
    bound: usize,
}

impl Silent {
    /// One more, served by this task.
    pub fn add(&mut self, task: AbortHandle, busy: Busy) {
        if self.queue.len() >= self.bound {
            self.queue.retain(|(task, _)| !task.is_finished());
            self.bound = self.queue.len().max(FEW) * 2;
        }
        self.queue.push_back((task, busy));
    }

    /// Ends the connection that has waited longest. Returns whether one waited.
    pub fn end_oldest(&mut self) -> bool {
        for _ in 0..ATTEMPTS {
            let waiting = self.queue.iter().enumerate().filter(|(_, (task, _))| !task.is_finished());
            let waiting = waiting.filter_map(|(at, (_, busy))| Some((busy.waits_since()?, at)));
            let Some((since, at)) = waiting.min() else { return false };
            if self.queue.get(at).is_some_and(|(_, busy)| busy.end(since)) {
                if let Some((task, _)) = self.queue.remove(at) {
                    task.abort();
                }
                return true;
            }
        }
        false
    }
}

/// Takes all the files that the process may open: every peer is one or more.
pub fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        // Where the kernel refuses, it stays as it was.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    }
}

/// So many connections, but no more than a part of the files that this process may open, `1 / share` of them: peers that fill one port leave
/// something for the others, and for what the process opens itself.
pub fn within_descriptors(most: usize, share: u64) -> usize {
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(files / share).map_or(most, |part| most.min(part.max(1)))
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test]
    async fn the_connection_that_waits_longest_makes_room() {
        let (mut silent, mut tasks, mut signs) = (Silent::default(), Vec::new(), Vec::new());
        for _ in 0..4 {
            let (task, busy) = (tokio::spawn(pending::<()>()), Busy::default());
            silent.add(task.abort_handle(), busy.clone());
            tasks.push(task);
            signs.push(busy);
        }
        signs[0].set(true);
        signs[2].set(true);
        for expected in [1, 3] {
            assert!(silent.end_oldest());
            let ended = (&mut tasks[expected]).await;
            assert!(ended.unwrap_err().is_cancelled());
        }
        assert!(!silent.end_oldest(), "the others are in use");
        assert!(!signs[1].begin(), "its place is gone");
        signs[0].set(false);
        assert!(silent.end_oldest());
        assert!((&mut tasks[0]).await.unwrap_err().is_cancelled());
        assert!(!tasks[2].is_finished());
    }

    #[tokio::test]
    async fn who_has_gone_is_forgotten_behind_one_who_stays() {
        let mut silent = Silent::default();
        silent.add(tokio::spawn(pending::<()>()).abort_handle(), Busy::default());
        for _ in 0..10_000 {
            let task = tokio::spawn(async {});
            silent.add(task.abort_handle(), Busy::default());
            task.await.unwrap();
        }
        assert!(silent.queue.len() <= 2 * FEW, "{}", silent.queue.len());
    }

    #[test]
    fn descriptors_are_shared() {
        assert_eq!(within_descriptors(1, 2), 1);
        assert_eq!(within_descriptors(usize::MAX, u64::MAX), 1);
        assert!(within_descriptors(usize::MAX, 2) >= 1);
    }
}
