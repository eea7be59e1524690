//! [`MemoryCurve`]: how often a cache would find its objects with less or more memory.

mod feed;
mod miniature;

pub use self::feed::{CacheEvent, CacheEvents, KeyUse, UseFeed};

use std::sync::Arc;

use self::miniature::Miniature;
use super::MergeableOrder;
use super::sample::KeySample;

/// Sizes of memory that a [`MemoryCurve`] compares, in halves of the actual one.
pub const CURVE_HALVES: [u64; 4] = [1, 2, 4, 8];

/// Number of sampled objects that suffices for errors of about a hundredth.
pub const CURVE_OBJECTS: usize = 16_384;

/// Index of the actual size of memory.
const ACTUAL: usize = 1;

/// Estimate of the misses of a cache at half, one, two and four times its memory.
///
/// For each size there is a miniature: the same policy over a sample of the keys, with the same
/// share of the memory. Each sampled use that misses stands for as many misses as there are keys
/// for each sampled one. All other uses are hits. Misses are spread over many keys, and hits over
/// few, so the count of misses varies less with the sample. (Waldspurger et al., "Cache modeling
/// and optimization using miniature simulations", 2017.)
///
/// The blocks of a prefix are hits by themselves exactly if they are hits as a prefix, as long as
/// no parent is evicted before its children. So each key is sampled by its own hash.
#[derive(Debug)]
pub struct MemoryCurve<P> {
    sample: Arc<KeySample>,
    miniatures: [Miniature<P>; CURVE_HALVES.len()],
    /// Maximum number of objects in the miniature of the actual size.
    limit: usize,
    memory: u64,
    now: u64,
    misses: [f64; CURVE_HALVES.len()],
}

impl<P: MergeableOrder> MemoryCurve<P> {
    /// Creates a curve for the keys in a sample. The sample shrinks whenever more than `limit`
    /// objects of it fit into the memory.
    pub fn new(config: &P::Config, sample: &Arc<KeySample>, limit: usize) -> Self {
        Self {
            sample: sample.clone(),
            miniatures: std::array::from_fn(|_| Miniature::new(&P::for_sample(config, sample))),
            limit,
            memory: 0,
            now: 0,
            misses: [0.0; CURVE_HALVES.len()],
        }
    }

    /// Sets the size of the memory in bytes.
    pub fn set_memory(&mut self, bytes: u64) {
        if std::mem::replace(&mut self.memory, bytes) > bytes {
            self.shrink();
        }
    }

    /// Returns the number of misses so far at each size of memory.
    pub fn misses(&self) -> [f64; CURVE_HALVES.len()] {
        self.misses
    }

    /// Follows the cache. The misses among events that were lost are estimated from the others.
    pub fn follow(&mut self, events: &CacheEvents) {
        let known = events.events.len() as f64;
        let weight = (known + events.lost as f64) / known;
        for event in &events.events {
            match event {
                // A use may wait for the curve while the sample shrinks.
                CacheEvent::Use(one) if self.sample.contains(one.hash) => self.use_key(one, weight),
                CacheEvent::Use(_) => {}
                CacheEvent::Removal(hash) => {
                    self.miniatures.iter_mut().for_each(|cache| cache.remove(*hash));
                }
            }
        }
    }

    fn use_key(&mut self, one: &KeyUse, weight: f64) {
        self.now = self.now.max(one.place.number);
        let keys = f64::from(self.sample.shift()).exp2();
        for at in 0..CURVE_HALVES.len() {
            let memory = self.memory_of(at);
            if !self.miniatures[at].use_key(one, self.now, memory) {
                self.misses[at] += weight * keys;
            }
        }
        if self.miniatures[ACTUAL].len() > self.limit {
            self.shrink_sample(1);
        }
    }

    /// Divides the number of sampled keys by 2^`steps`.
    pub fn shrink_sample(&mut self, steps: u32) {
        self.sample.set_shift(self.sample.shift().saturating_add(steps));
        self.miniatures.iter_mut().for_each(|cache| cache.keep_sampled(&self.sample));
        self.shrink();
    }

    /// Doubles the number of sampled keys, if that stays far from the limit. The keys that are new
    /// in the sample miss once too often. Returns whether there are more keys now.
    pub fn grow_sample(&mut self) -> bool {
        let shift = self.sample.shift();
        let grows = shift > 0 && self.miniatures[ACTUAL].len() < self.limit / 4;
        if grows {
            self.sample.set_shift(shift - 1);
        }
        grows
    }

    fn memory_of(&self, at: usize) -> u64 {
        (self.memory / 2).saturating_mul(CURVE_HALVES[at]) >> self.sample.shift()
    }

    fn shrink(&mut self) {
        for at in 0..CURVE_HALVES.len() {
            let memory = self.memory_of(at);
            self.miniatures[at].shrink_to(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evict::{Lru, Place};

    fn follow(curve: &mut MemoryCurve<Lru>, feed: &UseFeed) {
        let mut events = CacheEvents::default();
        feed.take(&mut events);
        curve.follow(&events);
    }

    fn curve(feed: &UseFeed, memory: u64, limit: usize) -> MemoryCurve<Lru> {
        let mut curve = MemoryCurve::new(&(), feed.sample(), limit);
        curve.set_memory(memory);
        curve
    }

    /// A loop over six objects of ten bytes fits into twice the memory of forty bytes, not into
    /// one.
    #[test]
    fn a_loop_is_found_where_it_fits() {
        let feed = UseFeed::new();
        let mut curve = curve(&feed, 40, 100);
        for number in 0..60 {
            feed.note_use(1 + number % 6, &Place::numbered(number), 10);
        }
        follow(&mut curve, &feed);
        assert_eq!(curve.misses(), [60.0, 60.0, 6.0, 6.0]);
        feed.note_removal(3);
        feed.note_use(3, &Place::numbered(60), 10);
        follow(&mut curve, &feed);
        assert_eq!(curve.misses(), [61.0, 61.0, 7.0, 7.0], "what was removed is gone at each size");
    }

    #[test]
    #[cfg_attr(miri, ignore = "numbers only, and slow")]
    fn the_sample_shrinks_and_grows() {
        let feed = UseFeed::new();
        let mut curve = curve(&feed, 100_000, 1000);
        let use_all = |curve: &mut MemoryCurve<Lru>, from: u64| {
            for part in 0..100 {
                (0..100).for_each(|at| {
                    let number = from + part * 100 + at;
                    let hash = (number + 1).wrapping_mul(0xd6e8_feb8_6659_fd93);
                    feed.note_use(hash, &Place::numbered(number), 10);
                });
                follow(curve, &feed);
            }
        };
        use_all(&mut curve, 0);
        assert_eq!(feed.sample().shift(), 4, "10,000 objects fit, and at most 1000 are watched");
        assert!(curve.miniatures[ACTUAL].len() <= 1000);
        assert!(
            curve.misses().iter().all(|misses| (misses - 10_000.0).abs() < 800.0),
            "{:?}",
            curve.misses()
        );
        assert!(!curve.grow_sample(), "the limit is near");
        curve.set_memory(10_000);
        assert!(curve.miniatures[ACTUAL].len() <= 1000 >> 4);
        assert!(curve.grow_sample() && feed.sample().shift() == 3);
        curve.shrink_sample(2);
        assert_eq!(feed.sample().shift(), 5);
    }

    #[test]
    fn objects_may_be_as_large_as_numbers_can_say() {
        let feed = UseFeed::new();
        let mut curve = curve(&feed, u64::MAX, 100);
        // The first object grows in place, beside the second one.
        for (number, (hash, bytes)) in
            [(1, 5), (2, u64::MAX / 2), (1, u64::MAX), (2, 5)].into_iter().enumerate()
        {
            feed.note_use(hash, &Place::numbered(number as u64), bytes);
        }
        follow(&mut curve, &feed);
        assert_eq!(curve.misses()[ACTUAL], 3.0, "the second object had to go");
    }

    #[test]
    #[cfg_attr(miri, ignore = "numbers only, and slow")]
    fn lost_events_count_as_the_others() {
        let feed = UseFeed::new();
        let mut curve = curve(&feed, 40, 100);
        (1..=8192).for_each(|hash| feed.note_use(hash, &Place::numbered(hash), 10));
        follow(&mut curve, &feed);
        assert_eq!(curve.misses(), [8192.0; 4]);
    }
}
