//! Feed of the uses of sampled keys, from many threads to one [`MemoryCurve`](super::MemoryCurve).

use std::sync::Arc;

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
#[derive(Debug, Default)]
pub struct UseFeed {
    sample: Arc<KeySample>,
    queue: Mutex<FeedQueue>,
}

#[derive(Debug, Default)]
struct FeedQueue {
    waiting: CacheEvents,
    /// Keys with the nearest sampled keys before them in their chains, at indices that the hashes
    /// give. Empty as long as all keys are in the sample.
    ancestors: Vec<(u64, u64)>,
}

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
        let sampled = |hash: u64| self.sample.contains(hash);
        if self.sample.shift() == 0 || !batch.hashes().iter().any(|hash| sampled(*hash)) {
            return;
        }
        let mut queue = self.queue.lock();
        queue.ancestors.resize(ANCESTORS, (0, 0));
        let before = batch.place(0).parent;
        let mut nearest = if sampled(before) { before } else { queue.ancestor(before) };
        let last = batch.hashes().len() - 1;
        for (at, hash) in batch.hashes().iter().copied().enumerate() {
            // A later batch may go on from the last key.
            if sampled(hash) || at == last {
                queue.ancestors[index(hash)] = (hash, nearest);
            }
            if sampled(hash) {
                nearest = hash;
            }
        }
    }

    /// Notes a use of a key. `bytes` returns the memory that its object takes.
    pub fn note_use(&self, hash: u64, place: &Place, bytes: impl FnOnce() -> u64) {
        if self.sample.contains(hash) {
            let bytes = bytes();
            let mut queue = self.queue.lock();
            let parent = match queue.ancestors.get(index(hash)) {
                Some(&(key, ancestor)) if key == hash => ancestor,
                _ if self.sample.contains(place.parent) => place.parent,
                _ => 0,
            };
            queue.push(CacheEvent::Use(KeyUse { hash, bytes, place: Place { parent, ..*place } }));
        }
    }

    /// Notes the removal of an object by another way than an eviction.
    pub fn note_removal(&self, hash: u64) {
        if self.sample.contains(hash) {
            self.queue.lock().push(CacheEvent::Removal(hash));
        }
    }

    /// Exchanges the events that wait for `taken`, which is emptied.
    pub fn take(&self, taken: &mut CacheEvents) {
        taken.events.clear();
        taken.lost = 0;
        std::mem::swap(&mut self.queue.lock().waiting, taken);
    }
}

impl FeedQueue {
    fn push(&mut self, event: CacheEvent) {
        if self.waiting.events.len() < MAX_EVENTS {
            self.waiting.events.push(event);
        } else {
            self.waiting.lost += 1;
        }
    }

    /// Returns the nearest sampled key before a key, as far as remembered; 0 for none.
    fn ancestor(&self, hash: u64) -> u64 {
        match self.ancestors[index(hash)] {
            (key, ancestor) if key == hash => ancestor,
            _ => 0,
        }
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
            (0..4).for_each(|at| feed.note_use(hashes[at], &batch.place(at), || 1));
        }
        assert_eq!(uses(&feed), (vec![(a, 0), (c, a), (e, c), (g, e)], 0));
        feed.note_removal(a);
        feed.note_removal(b);
        assert_eq!(uses(&feed), (vec![(a, u64::MAX)], 0));
    }

    #[test]
    fn a_full_feed_counts_what_it_drops() {
        let feed = UseFeed::new();
        (1..=MAX_EVENTS as u64 + 5).for_each(|hash| feed.note_use(hash, &Place::numbered(hash), || 1));
        let (taken, lost) = uses(&feed);
        assert_eq!((taken.len(), lost), (MAX_EVENTS, 5));
        assert_eq!(uses(&feed), (Vec::new(), 0));
    }
}
