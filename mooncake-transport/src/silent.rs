//! Room for one more connection where all places are taken: whoever opens connections and says nothing keeps nobody else out.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::task::AbortHandle;

/// Queues shorter than this are not worth a look at who has gone.
const FEW: usize = 64;

/// Whether a connection is in use; at first it is not.
#[derive(Clone, Debug, Default)]
pub struct Busy(Arc<AtomicBool>);

impl Busy {
    /// Says so, or takes it back.
    pub fn set(&self, busy: bool) {
        self.0.store(busy, Ordering::Relaxed);
    }
}

/// The connections of a server in the order they came. Where there is no place left, the oldest that is not in use makes room.
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

    /// Ends the oldest that is not in use; whether there was one.
    pub fn end_oldest(&mut self) -> bool {
        let is_silent =
            |(task, busy): &(AbortHandle, Busy)| !task.is_finished() && !busy.0.load(Ordering::Relaxed);
        let oldest = self.queue.iter().position(is_silent).and_then(|at| self.queue.remove(at));
        if let Some((task, _)) = &oldest {
            task.abort();
        }
        oldest.is_some()
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
    async fn the_oldest_that_is_not_in_use_makes_room() {
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
