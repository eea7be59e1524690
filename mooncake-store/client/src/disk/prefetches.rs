//! Prefetches, which bring objects from disks back to memory before they are read: those that began
//! a short time ago, and the requests that are in progress.

use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;
use std::sync::Arc;

use foldhash::quality::FixedState;
use mooncake_core::clock::{Moment, SharedClock};
use mooncake_core::fault_injection::is_planted;
use parking_lot::Mutex;

use crate::config::PrefetchConfig;

/// Maximum number of recent prefetches that are remembered. Above it, the oldest are forgotten.
const MAX_RECENT: usize = 1 << 16;
/// Maximum number of background requests that run at the same time.
const MAX_REQUESTS: usize = 16;
/// Maximum number of keys of all background requests.
const MAX_KEYS: usize = 1 << 16;

/// Prefetches of one client.
#[derive(Debug)]
pub(crate) struct Prefetches {
    recent: Mutex<Recent>,
    requests: Mutex<Requests>,
    hasher: FixedState,
    pub(crate) clock: SharedClock,
    pub(crate) config: PrefetchConfig,
}

/// Hashes of the keys that were prefetched a short time ago.
#[derive(Debug, Default)]
struct Recent {
    until: HashMap<u64, Moment>,
    /// Entries in the order of their ends. An entry that is not in `until` was released.
    order: VecDeque<(Moment, u64)>,
}

/// Background requests in progress.
#[derive(Debug, Default)]
struct Requests {
    count: usize,
    keys: usize,
}

/// Permission for a background request. Dropping it ends the request.
#[derive(Debug)]
pub(crate) struct RequestPermit {
    prefetches: Arc<Prefetches>,
    keys: usize,
}

impl Drop for RequestPermit {
    fn drop(&mut self) {
        let mut requests = self.prefetches.requests.lock();
        requests.count -= 1;
        requests.keys -= self.keys;
    }
}

impl Recent {
    fn contains(&self, hash: u64, now: Moment) -> bool {
        self.until.get(&hash).is_some_and(|until| *until > now)
    }

    /// Drops the entries that have ended, and the oldest one if there are many.
    fn expire(&mut self, now: Moment) {
        while let Some((until, hash)) = self.order.front().copied()
            && (until <= now || self.order.len() >= MAX_RECENT)
        {
            self.order.pop_front();
            if self.until.get(&hash) == Some(&until) {
                self.until.remove(&hash);
            }
        }
    }
}

impl Prefetches {
    pub(crate) fn new(config: PrefetchConfig, clock: SharedClock, seed: u64) -> Self {
        let hasher = FixedState::with_seed(seed);
        Self { recent: Mutex::default(), requests: Mutex::default(), hasher, clock, config }
    }

    fn hash(&self, tenant: &str, key: &[u8]) -> u64 {
        self.hasher.hash_one((tenant, key))
    }

    /// Returns whether a prefetch of the key began a short time ago.
    pub(crate) fn is_recent(&self, tenant: &str, key: &[u8]) -> bool {
        let (hash, now) = (self.hash(tenant, key), self.clock.now());
        self.recent.lock().contains(hash, now) && !is_planted("prefetches-repeat")
    }

    /// Records a prefetch of the key. Returns false if one began a short time ago.
    pub(crate) fn claim(&self, tenant: &str, key: &[u8]) -> bool {
        if self.config.dedup.is_zero() || is_planted("prefetches-repeat") {
            return true;
        }
        let (hash, now) = (self.hash(tenant, key), self.clock.now());
        let mut recent = self.recent.lock();
        if recent.contains(hash, now) {
            return false;
        }
        recent.expire(now);
        let until = now.after(self.config.dedup);
        recent.until.insert(hash, until);
        recent.order.push_back((until, hash));
        true
    }

    /// Forgets a prefetch that failed, so that the next one is made.
    pub(crate) fn release(&self, tenant: &str, key: &[u8]) {
        let hash = self.hash(tenant, key);
        self.recent.lock().until.remove(&hash);
    }

    /// Begins a background request about `keys` keys, unless too many are in progress.
    pub(crate) fn begin_request(self: &Arc<Self>, keys: usize) -> Option<RequestPermit> {
        let mut requests = self.requests.lock();
        if requests.count >= MAX_REQUESTS || requests.keys + keys > MAX_KEYS {
            return None;
        }
        requests.count += 1;
        requests.keys += keys;
        Some(RequestPermit { prefetches: self.clone(), keys })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mooncake_core::clock::ManualClock;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn prefetches(dedup: Duration) -> (Arc<ManualClock>, Arc<Prefetches>) {
        let clock = Arc::new(ManualClock::new());
        let config = PrefetchConfig { dedup, ..PrefetchConfig::default() };
        (clock.clone(), Arc::new(Prefetches::new(config, clock, 7)))
    }

    #[test]
    fn a_key_is_prefetched_once_in_a_time() {
        let (clock, prefetches) = prefetches(2 * SECOND);
        assert!(prefetches.claim("t", b"k") && !prefetches.claim("t", b"k"));
        assert!(prefetches.claim("u", b"k"), "it is another object");
        clock.advance(SECOND);
        prefetches.release("u", b"k");
        assert!(prefetches.claim("u", b"k"), "the first one failed");
        clock.advance(SECOND);
        assert!(!prefetches.is_recent("t", b"k") && prefetches.is_recent("u", b"k"));
        assert!(prefetches.claim("t", b"k") && !prefetches.claim("u", b"k"));
        let (_, always) = self::prefetches(Duration::ZERO);
        assert!(always.claim("t", b"k") && always.claim("t", b"k") && !always.is_recent("t", b"k"));
    }

    #[test]
    fn a_bounded_number_of_prefetches_is_remembered() {
        let (clock, prefetches) = prefetches(30 * SECOND);
        for number in 0..3 * MAX_RECENT {
            let key = number.to_le_bytes();
            assert!(prefetches.claim("t", &key));
            prefetches.release("t", &key);
            assert!(prefetches.claim("t", &key));
            let recent = prefetches.recent.lock();
            assert!(recent.order.len() <= MAX_RECENT && recent.until.len() <= MAX_RECENT);
        }
        clock.advance(30 * SECOND);
        assert!(prefetches.claim("t", b"k"));
        assert_eq!(prefetches.recent.lock().order.len(), 1);
    }

    #[test]
    fn background_requests_are_bounded() {
        let (_, prefetches) = prefetches(SECOND);
        let all: Vec<_> = (0..MAX_REQUESTS).map(|_| prefetches.begin_request(1).unwrap()).collect();
        assert!(prefetches.begin_request(1).is_none());
        drop(all);
        let one = prefetches.begin_request(MAX_KEYS).unwrap();
        assert!(prefetches.begin_request(1).is_none());
        drop(one);
        assert!(prefetches.begin_request(1).is_some());
    }
}
