//! Feed of the uses of sampled keys, from many threads to one [`MemoryCurve`](super::MemoryCurve).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

use crate::evict::chain::{Batch, Place};
use crate::evict::sample::KeySample;

/// Maximum number of events that wait for the curve.
const MAX_EVENTS: usize = 4096;

/// Number of keys whose ancestors are remembered, a power of two.
const ANCESTORS: usize = 4096;

/// Use of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyUse {
    /// Hash of the key.
    pub hash: u64,
    /// Memory that the object takes, in bytes.
    pub bytes: u64,
    /// Place of the use. Its parent is the nearest one in the sample.
    pub place: Place,
}

/// Event in a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// A read that finds an object, or the put that stores it.
    Use(KeyUse),
    /// A removal other than an eviction, by the hash of the key.
    Removal(u64),
}

/// Events that were taken from a feed.
#[derive(Debug, Default)]
pub struct CacheEvents {
    /// Events in their order.
    pub events: Vec<CacheEvent>,
    /// Number of events that were dropped because too many waited.
    pub lost: u64,
}

/// Queue of the events of sampled keys. Other keys cost a multiplication.
///
/// Uses never wait: one that comes while another thread is in the queue is lost.
#[derive(Debug, Default)]
pub struct UseFeed {
    sample: Arc<KeySample>,
    waiting: Mutex<CacheEvents>,
    /// Number of uses that were lost because another thread was in the queue.
    lost: AtomicU64,
    ancestors: Mutex<Ancestors>,
}

/// Keys with the nearest sampled keys before them in their chains, at indices that the hashes give.
/// Empty as long as all keys are in the sample.
#[derive(Debug, Default)]
struct Ancestors(Vec<(u64, u64)>);

impl UseFeed {
    /// Creates a feed of all keys.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the sample, which may change at any time.
    pub fn sample(&self) -> &Arc<KeySample> {
        &self.sample
    }

    /// Notes the chain of a batch whose uses follow.
    pub fn note_chain(&self, batch: &Batch) {
        if self.sample.shift() == 0 {
            return;
        }
        let sampled: Vec<u64> =
            batch.hashes().iter().copied().filter(|hash| self.sample.contains(*hash)).collect();
        let (Some(_), Some(last)) = (sampled.first(), batch.hashes().last().copied()) else { return };
        let before = batch.place(0).parent;
        let mut ancestors = self.ancestors.lock();
        let mut nearest =
            if self.sample.contains(before) { before } else { ancestors.of(before).unwrap_or(0) };
        for hash in sampled {
            ancestors.set(hash, nearest);
            nearest = hash;
        }
        // A later batch may go on from the last key.
        if nearest != last {
            ancestors.set(last, nearest);
        }
    }

    /// Notes a use of a key of the sample, whose object takes `bytes` of memory. Callers hold no
    /// lock that others wait for.
    pub fn note_use(&self, hash: u64, place: &Place, bytes: u64) {
        let given = if self.sample.contains(place.parent) { place.parent } else { 0 };
        let nearest = if self.sample.shift() == 0 { None } else { self.ancestors.lock().of(hash) };
        let place = Place { parent: nearest.unwrap_or(given), ..*place };
        match self.waiting.try_lock() {
            Some(mut waiting) => push(&mut waiting, CacheEvent::Use(KeyUse { hash, bytes, place })),
            None => drop(self.lost.fetch_add(1, Relaxed)),
        }
    }

    /// Notes the removal of an object by another way than an eviction.
    pub fn note_removal(&self, hash: u64) {
        if self.sample.contains(hash) {
            push(&mut self.waiting.lock(), CacheEvent::Removal(hash));
        }
    }

    /// Exchanges the events that wait for `taken`, which is emptied.
    pub fn take(&self, taken: &mut CacheEvents) {
        taken.events.clear();
        taken.lost = 0;
        std::mem::swap(&mut *self.waiting.lock(), taken);
        taken.lost += self.lost.swap(0, Relaxed);
    }
}

fn push(waiting: &mut CacheEvents, event: CacheEvent) {
    if waiting.events.len() < MAX_EVENTS {
        waiting.events.push(event);
    } else {
        waiting.lost += 1;
    }
}

impl Ancestors {
    /// Returns the nearest sampled key before a key, 0 for none, if remembered.
    fn of(&self, hash: u64) -> Option<u64> {
        self.0.get(index(hash)).filter(|(key, _)| *key == hash).map(|(_, ancestor)| *ancestor)
    }

    fn set(&mut self, hash: u64, ancestor: u64) {
        self.0.resize(ANCESTORS, (0, 0));
        self.0[index(hash)] = (hash, ancestor);
    }
}

fn index(hash: u64) -> usize {
    (hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 52) as usize % ANCESTORS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evict::chain::ChainEnd;

    fn uses(feed: &UseFeed) -> (Vec<(u64, u64)>, u64) {
        let mut taken = CacheEvents::default();
        feed.take(&mut taken);
        let uses = taken.events.iter().map(|event| match event {
            CacheEvent::Use(one) => (one.hash, one.place.parent),
            CacheEvent::Removal(hash) => (*hash, u64::MAX),
        });
        (uses.collect(), taken.lost)
    }

    /// Returns hashes of keys, the even ones in the sample and the others not.
    fn hashes(sample: &KeySample) -> [u64; 8] {
        let mut all = (1..).map(|n: u64| n.wrapping_mul(0xd6e8_feb8_6659_fd93));
        std::array::from_fn(|at| all.find(|hash| sample.contains(*hash) == at.is_multiple_of(2)).unwrap())
    }

    #[test]
    fn parents_are_the_nearest_sampled_ones() {
        let feed = UseFeed::new();
        feed.sample().set_shift(2);
        let [a, b, c, d, e, f, g, h] = hashes(feed.sample());
        // A request that finds four keys, and stores the next four.
        for (hashes, last) in [(vec![a, b, c, d], 0), (vec![f, e, h, g], d)] {
            let before = ChainEnd { last, ..ChainEnd::default() };
            let batch = Batch::new(hashes.clone(), 8, before, |_| true);
            feed.note_chain(&batch);
            let sampled = (0..4).filter(|at| feed.sample().contains(hashes[*at]));
            sampled.for_each(|at| feed.note_use(hashes[at], &batch.place(at), 1));
        }
        assert_eq!(uses(&feed), (vec![(a, 0), (c, a), (e, c), (g, e)], 0));
        feed.note_removal(a);
        feed.note_removal(b);
        assert_eq!(uses(&feed), (vec![(a, u64::MAX)], 0));
    }

    #[test]
    fn a_use_never_waits_for_the_queue() {
        let feed = Arc::new(UseFeed::new());
        let busy = feed.waiting.lock();
        let (other, (done, ended)) = (feed.clone(), std::sync::mpsc::channel());
        std::thread::spawn(move || {
            other.note_use(1, &Place::numbered(1), 1);
            done.send(()).unwrap();
        });
        let received = ended.recv_timeout(std::time::Duration::from_secs(10));
        drop(busy);
        assert_eq!(received, Ok(()));
        feed.note_use(2, &Place::numbered(2), 1);
        assert_eq!(uses(&feed), (vec![(2, 0)], 1));
    }

    #[test]
    fn a_full_feed_counts_what_it_drops() {
        let feed = UseFeed::new();
        (1..=MAX_EVENTS as u64 + 5).for_each(|hash| feed.note_use(hash, &Place::numbered(hash), 1));
        let (taken, lost) = uses(&feed);
        assert_eq!((taken.len(), lost), (MAX_EVENTS, 5));
        assert_eq!(uses(&feed), (Vec::new(), 0));
    }
}
