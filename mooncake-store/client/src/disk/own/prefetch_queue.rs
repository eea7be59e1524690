//! Objects on the disk of this client that are to return to memory.

use std::collections::VecDeque;
use std::sync::Arc;

use mooncake_core::clock::Moment;
use mooncake_core::fault_injection::is_planted;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::disk::Prefetches;

/// Maximum number of objects that wait.
const MAX_QUEUED: usize = 4096;

/// Object that is to return to memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QueuedPrefetch {
    pub(crate) tenant: String,
    pub(crate) key: Vec<u8>,
    pub(crate) size: i64,
}

/// Objects that wait for their return to memory.
#[derive(Debug)]
pub(crate) struct PrefetchQueue {
    pub(crate) prefetches: Arc<Prefetches>,
    state: Mutex<QueueState>,
    /// Notified when an object is queued.
    queued: Notify,
}

#[derive(Debug, Default)]
struct QueueState {
    objects: VecDeque<QueuedPrefetch>,
    /// Time until which nothing returns, because memory had no space.
    paused_until: Moment,
}

impl PrefetchQueue {
    pub(crate) fn new(prefetches: Arc<Prefetches>) -> Self {
        Self { prefetches, state: Mutex::default(), queued: Notify::new() }
    }

    /// Records that memory has no space. Nothing returns for a while.
    pub(crate) fn pause(&self) {
        let until = self.prefetches.clock.now().after(self.prefetches.config.cooldown);
        let mut state = self.state.lock();
        state.paused_until = state.paused_until.max(until);
    }

    /// Returns whether memory had no space a short time ago.
    pub(crate) fn is_paused(&self) -> bool {
        self.state.lock().paused_until > self.prefetches.clock.now() && !is_planted("prefetches-hurry")
    }

    /// Queues objects, except those that were prefetched a short time ago. Returns false, and
    /// queues nothing, if the queue has no space for all, or memory had no space a short time ago.
    pub(crate) fn add(&self, tenant: &str, objects: &[(&[u8], i64)]) -> bool {
        if self.is_paused() {
            return false;
        }
        let mut state = self.state.lock();
        if state.objects.len() + objects.len() > MAX_QUEUED {
            return false;
        }
        for (key, size) in objects {
            if self.prefetches.claim(tenant, key) {
                let (tenant, key) = (tenant.to_owned(), key.to_vec());
                state.objects.push_back(QueuedPrefetch { tenant, key, size: *size });
            }
        }
        drop(state);
        self.queued.notify_one();
        true
    }

    /// Returns the next objects, `max` at most and at least one.
    pub(crate) async fn next(&self, max: usize) -> Vec<QueuedPrefetch> {
        loop {
            {
                let mut state = self.state.lock();
                let count = max.min(state.objects.len());
                if count > 0 {
                    return state.objects.drain(..count).collect();
                }
            }
            self.queued.notified().await;
        }
    }

    /// Drops the objects that wait, because the disk closes.
    pub(crate) fn clear(&self) {
        let dropped = std::mem::take(&mut self.state.lock().objects);
        for QueuedPrefetch { tenant, key, .. } in dropped {
            self.prefetches.release(&tenant, &key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::FutureExt;
    use mooncake_core::clock::ManualClock;

    use super::*;
    use crate::config::PrefetchConfig;

    const SECOND: Duration = Duration::from_secs(1);

    fn queue(cooldown: Duration) -> (Arc<ManualClock>, PrefetchQueue) {
        let clock = Arc::new(ManualClock::new());
        let config = PrefetchConfig { cooldown, ..PrefetchConfig::default() };
        (clock.clone(), PrefetchQueue::new(Arc::new(Prefetches::new(config, clock, 7))))
    }

    #[test]
    fn objects_wait_in_order_up_to_a_limit() {
        let (_, queue) = queue(SECOND);
        let keys: Vec<Vec<u8>> = (0..MAX_QUEUED).map(|number| number.to_le_bytes().to_vec()).collect();
        let objects: Vec<(&[u8], i64)> = keys.iter().map(|key| (&**key, 1)).collect();
        assert!(queue.add("t", &objects[1..]) && queue.add("t", &objects[..1]));
        assert!(!queue.add("t", &[(b"k", 1)]), "it is full");
        let next = || queue.next(3).now_or_never().map(|all| all.into_iter().map(|object| object.key));
        assert!(next().unwrap().eq(keys[1..4].iter().cloned()));
        assert!(queue.add("t", &[(b"k", 1)]));
        assert!(queue.add("t", &[(b"k", 1)]), "it is taken, and queued once");
        assert_eq!(queue.state.lock().objects.len(), MAX_QUEUED - 2);
        queue.clear();
        assert!(next().is_none() && queue.add("t", &[(b"k", 1)]) && next().is_some());
    }

    #[test]
    fn a_full_memory_pauses_the_queue() {
        let (clock, queue) = queue(SECOND);
        queue.pause();
        assert!(queue.is_paused() && !queue.add("t", &[(b"k", 1)]));
        clock.advance(SECOND);
        assert!(!queue.is_paused() && queue.add("t", &[(b"k", 1)]));
        let (_, unpaused) = self::queue(Duration::ZERO);
        unpaused.pause();
        assert!(!unpaused.is_paused());
    }
}
