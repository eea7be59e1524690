//! [`Learner`]: how soon objects of each class are used again, counted from the uses themselves.

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use parking_lot::Mutex;

use super::ages::{BUCKETS, bucket, lower_end};
use super::class::CLASSES;
use super::values::{Counts, Values};
use crate::evict::sample::{KeySample, is_in_sample};

/// Number of watched uses that are remembered.
const RING: u64 = 1 << 15;

/// Number of watched uses after which all counts are halved.
const HALVE_EVERY: u64 = 1 << 17;

/// Number of uses after which the values are computed again, in a small cache.
const COMPUTE_EVERY: u64 = 1 << 10;

/// Number of times that the values are computed while as many objects are used as a large cache
/// holds.
const COMPUTATIONS_PER_LIFE: u64 = 32;

/// Number of uses that wait in a policy before it waits for the learner.
const MAX_WAITING: usize = 64;

/// Values before anything was counted.
static FIRST_VALUES: LazyLock<Arc<Values>> =
    LazyLock::new(|| Arc::new(Values::compute(&[Counts::ZERO; CLASSES])));

/// Class of an entry whose key was used again, or is no longer watched.
const CLOSED: u8 = u8::MAX;

/// Knowledge that the policies of one cache share: how likely an object is used again at each age,
/// by class.
///
/// The learner watches some keys, held or not, so its estimates do not depend on what was evicted.
pub struct Learner {
    watched: Apart<Mutex<Watched>>,
    values: Mutex<Arc<Values>>,
    /// Number of times that the values were computed.
    edition: AtomicU64,
    /// Number of the use at which the values are to be computed again.
    due: AtomicU64,
    /// Number of objects that all policies hold.
    held: AtomicU64,
    /// Logarithm to base 2 of the number of keys of which one is watched.
    thinning: AtomicU32,
    /// Sample that holds all keys that are used; `None` if any key may be.
    sample: Option<Arc<KeySample>>,
}

/// Value on cache lines of its own: each use reads the fields beside it.
#[repr(align(128))]
struct Apart<T>(T);

/// Use of a watched key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watch {
    /// Fingerprint of the key, not 0.
    pub(super) print: u32,
    pub(super) class: u8,
    pub(super) number: u64,
}

/// Latest watched uses.
struct Watched {
    ring: Vec<Watch>,
    /// Number of watched uses so far. The last of them are in the ring.
    count: u64,
    /// Index in the ring of the last use of each key that may be used again.
    open: HashTable<u32>,
    /// Number of the last watched use.
    now: u64,
    /// Number of watched uses that were older than the lower end of each bucket when they were last
    /// passed.
    passed: [u64; BUCKETS],
    /// Uses of each class. Buckets that open entries have reached are counted when these are
    /// passed.
    classes: Box<[Counts; CLASSES]>,
}

impl Watched {
    fn new() -> Self {
        Self {
            ring: Vec::new(),
            count: 0,
            open: HashTable::new(),
            now: 0,
            passed: [0; BUCKETS],
            classes: Box::new([Counts::ZERO; CLASSES]),
        }
    }

    /// Records a use. Those of one key come in order, others may be late by a few uses.
    fn record(&mut self, new: Watch) {
        let Watch { print, class, number } = new;
        self.now = self.now.max(number);
        let at = (self.count % RING) as u32;
        match self.ring.get(at as usize) {
            // The entry leaves the ring. If it is of the same key, it is closed below.
            Some(oldest) if oldest.class != CLOSED && oldest.print != print => {
                if let Ok(entry) = self.open.find_entry(hash(oldest), |index| *index == at) {
                    entry.remove();
                }
                self.close(at, self.now);
            }
            _ => {}
        }
        let ring = &self.ring;
        let same = |index: &u32| ring[*index as usize].print == print;
        match self.open.entry(hash(&new), same, |index| hash(&ring[*index as usize])) {
            Entry::Occupied(mut entry) => {
                let index = std::mem::replace(entry.get_mut(), at);
                let before = self.ring[index as usize];
                let age = number.saturating_sub(before.number);
                self.classes[usize::from(before.class)].reused[bucket(age)] += 1.0;
                self.close(index, number);
            }
            Entry::Vacant(entry) => drop(entry.insert(at)),
        }
        match self.ring.get_mut(at as usize) {
            Some(oldest) => *oldest = new,
            None => self.ring.push(new),
        }
        self.classes[usize::from(class)].reached[0] += 1.0;
        self.count += 1;
        if self.count.is_multiple_of(HALVE_EVERY) {
            self.pass();
            self.classes.iter_mut().for_each(Counts::halve);
        }
    }

    /// Closes an entry that was open until `now`, and counts the buckets that it has reached since
    /// entries were passed.
    fn close(&mut self, index: u32, now: u64) {
        let watch = &mut self.ring[index as usize];
        let reached = bucket(now.saturating_sub(watch.number));
        let counts = &mut self.classes[usize::from(watch.class)];
        watch.class = CLOSED;
        let back = (self.count + RING - u64::from(index) - 1) % RING + 1;
        let entry = self.count - back;
        for b in (1..=reached).rev().take_while(|b| self.passed[*b] <= entry) {
            counts.reached[b] += 1.0;
        }
    }

    /// Passes the entries that have reached the lower end of a bucket by now, and counts those that
    /// are open. Passing many at once is cheap.
    fn pass(&mut self) {
        let first = self.count.saturating_sub(RING);
        for b in 1..BUCKETS {
            self.passed[b] = self.passed[b].max(first);
            while self.passed[b] < self.count {
                let watch = self.ring[(self.passed[b] % RING) as usize];
                if self.now.saturating_sub(watch.number) < lower_end(b) {
                    break;
                }
                if let Some(counts) = self.classes.get_mut(usize::from(watch.class)) {
                    counts.reached[b] += 1.0;
                }
                self.passed[b] += 1;
            }
        }
    }

    /// Closes the entries of keys that are no longer watched.
    fn thin(&mut self, thinning: u32) {
        self.pass();
        let Self { ring, open, .. } = self;
        open.retain(|&mut index| {
            let watch = &mut ring[index as usize];
            let stays = is_in_sample(watch.print, thinning);
            if !stays {
                watch.class = CLOSED;
            }
            stays
        });
    }
}

fn hash(watch: &Watch) -> u64 {
    u64::from(watch.print).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl Learner {
    /// Creates a learner that knows nothing.
    pub fn new() -> Self {
        Self {
            watched: Apart(Mutex::new(Watched::new())),
            values: Mutex::new(FIRST_VALUES.clone()),
            edition: AtomicU64::new(0),
            due: AtomicU64::new(COMPUTE_EVERY),
            held: AtomicU64::new(0),
            thinning: AtomicU32::new(0),
            sample: None,
        }
    }

    /// Creates a learner that knows nothing, for a cache of the keys in `sample`.
    pub(super) fn of_sample(sample: Arc<KeySample>) -> Self {
        Self { sample: Some(sample), ..Self::new() }
    }

    /// Returns the number of objects that fit into memory, as far as known.
    pub(super) fn held(&self) -> u64 {
        self.of_all_keys(self.held.load(Relaxed))
    }

    /// Returns the number of objects of all keys for a number of those in the sample.
    fn of_all_keys(&self, held: u64) -> u64 {
        self.sample.as_ref().map_or(held, |sample| held.saturating_mul(1 << sample.shift()))
    }

    /// Records that a policy holds `now` objects after `before`.
    pub(super) fn change_held(&self, before: usize, now: usize) {
        let change = (now as u64).wrapping_sub(before as u64);
        let held = self.held.fetch_add(change, Relaxed).wrapping_add(change);
        let wanted = self
            .of_all_keys(held)
            .saturating_mul(8)
            .div_ceil(RING)
            .max(1)
            .next_power_of_two()
            .ilog2()
            .min(31);
        // Keys that are no longer in the sample will not be used again.
        let wanted = self.sample.as_ref().map_or(wanted, |sample| wanted.max(sample.shift()));
        let thinning = self.thinning.load(Relaxed);
        // A cache that shrinks a little soon grows again.
        if wanted > thinning || wanted + 1 < thinning {
            let mut watched = self.watched.0.lock();
            self.thinning.store(wanted, Relaxed);
            watched.thin(wanted);
        }
    }

    /// Returns whether a key whose fingerprint ends in so many zeros, `most` at most, may be
    /// watched.
    pub(super) fn may_watch(&self, zeros: u8, most: u8) -> bool {
        u32::from(zeros) >= self.thinning.load(Relaxed).min(most.into())
    }

    /// Records and removes the uses that wait in a policy. While another caller is active in the
    /// learner, they stay there until there are many.
    pub(super) fn record(&self, waiting: &mut Vec<Watch>) {
        let free = self.watched.0.try_lock();
        let Some(mut watched) =
            free.or_else(|| (waiting.len() >= MAX_WAITING).then(|| self.watched.0.lock()))
        else {
            return;
        };
        let thinning = self.thinning.load(Relaxed);
        let watches = waiting.drain(..).filter(|watch| is_in_sample(watch.print, thinning));
        watches.for_each(|watch| watched.record(watch));
    }

    #[cfg(test)]
    pub(super) fn record_one(&self, print: u32, number: u64, class: u8) {
        self.record(&mut vec![Watch { print, class, number }]);
    }

    /// Brings `values` up to date with the learner. Computes them again when that is due, unless
    /// another caller is active in the learner.
    pub(super) fn refresh(&self, values: &mut Arc<Values>, edition: &mut u64, now: u64) {
        if now >= self.due.load(Relaxed)
            && let Some(mut watched) = self.watched.0.try_lock()
        {
            let pause = COMPUTE_EVERY.max(self.held() / COMPUTATIONS_PER_LIFE);
            self.due.store(now.saturating_add(pause), Relaxed);
            watched.pass();
            let classes = watched.classes.clone();
            drop(watched);
            let computed = Arc::new(Values::compute(&classes));
            *self.values.lock() = computed;
            self.edition.fetch_add(1, Relaxed);
        }
        let latest = self.edition.load(Relaxed);
        if *edition != latest {
            values.clone_from(&self.values.lock());
            *edition = latest;
        }
    }

    /// Returns the uses of each class.
    pub(super) fn counts(&self) -> Box<[Counts; CLASSES]> {
        let mut watched = self.watched.0.lock();
        watched.pass();
        watched.classes.clone()
    }

    /// Replaces the uses of each class, and computes the values.
    pub(super) fn replace_counts(&self, classes: Box<[Counts; CLASSES]>) {
        *self.values.lock() = Arc::new(Values::compute(&classes));
        let mut watched = self.watched.0.lock();
        watched.pass();
        watched.classes = classes;
        drop(watched);
        self.edition.fetch_add(1, Relaxed);
    }

    /// Returns the latest values.
    pub(super) fn values(&self) -> Arc<Values> {
        self.values.lock().clone()
    }
}

impl Default for Learner {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Learner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Learner")
            .field("watched", &self.watched.0.lock().count)
            .field("edition", &self.edition)
            .field("held", &self.held)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// Counts offline: each use together with the next use of its key.
    fn count_offline(uses: &[(u32, u64, u8)]) -> [Counts; CLASSES] {
        let mut counts = [Counts::ZERO; CLASSES];
        let mut next: HashMap<u32, u64> = HashMap::new();
        let end = uses.last().map_or(0, |last| last.1);
        for &(print, number, class) in uses.iter().rev() {
            let counts = &mut counts[usize::from(class)];
            let until = next.insert(print, number).map(|next| next - number);
            if let Some(age) = until {
                counts.reused[bucket(age)] += 1.0;
            }
            let reached = until.unwrap_or(end - number);
            (0..BUCKETS).filter(|&b| lower_end(b) <= reached).for_each(|b| counts.reached[b] += 1.0);
        }
        counts
    }

    proptest! {
        #[test]
        #[cfg_attr(miri, ignore = "numbers only, and slow")]
        fn the_learner_counts_what_an_offline_count_finds(
            uses in proptest::collection::vec((1u32..60, 1u64..2000, 0..CLASSES as u8), 0..400),
        ) {
            let (learner, mut now) = (Learner::new(), 0);
            let uses: Vec<_> = uses.into_iter().map(|(print, step, class)| {
                now += step;
                (print, now, class)
            }).collect();
            uses.iter().for_each(|&(print, number, class)| learner.record_one(print, number, class));
            prop_assert_eq!(&*learner.counts(), &count_offline(&uses));
        }
    }

    /// The counts of what has left the ring stay, and are halved.
    #[test]
    #[cfg_attr(miri, ignore = "numbers only, and slow")]
    fn counts_outlive_the_ring() {
        let learner = Learner::new();
        for number in 0..HALVE_EVERY - 1 {
            learner.record_one(1 + (number % 1000) as u32, number, 3);
        }
        let reused = |learner: &Learner| learner.watched.0.lock().classes[3].reused[bucket(1000)];
        assert_eq!(reused(&learner), (HALVE_EVERY - 1001) as f32);
        learner.record_one(1, 132_000, 3);
        assert_eq!(reused(&learner), (HALVE_EVERY - 1000) as f32 / 2.0);
        let watched = learner.watched.0.lock();
        assert_eq!((watched.ring.len() as u64, watched.open.len()), (RING, 1000));
    }

    /// A key that is not used again leaves the ring, and the table of open entries with it.
    #[test]
    #[cfg_attr(miri, ignore = "numbers only, and slow")]
    fn open_entries_leave_with_the_ring() {
        let learner = Learner::new();
        (0..3 * RING).for_each(|number| learner.record_one(1 + number as u32, number, 0));
        assert_eq!(learner.watched.0.lock().open.len() as u64, RING);
        let reached = &learner.counts()[0].reached;
        assert_eq!(reached[0], (3 * RING) as f32);
        assert_eq!(reached[1], (3 * RING - 64) as f32);
        assert_eq!(reached[BUCKETS - 1], 0.0);
    }

    #[test]
    fn a_large_cache_watches_few_keys() {
        let learner = Learner::new();
        (1..=4096u32).for_each(|print| learner.record_one(print, print.into(), 0));
        learner.change_held(0, 16 * RING as usize);
        assert_eq!(learner.thinning.load(Relaxed), 7);
        assert_eq!(learner.watched.0.lock().open.len(), 4096 / 128);
        learner.record_one(127, 9000, 0);
        learner.record_one(128, 9000, 0);
        assert_eq!(learner.watched.0.lock().count, 4097);
        learner.change_held(16 * RING as usize, 10 * RING as usize);
        assert_eq!(learner.thinning.load(Relaxed), 7, "a cache that shrinks a little keeps its sample");
        learner.change_held(10 * RING as usize, 0);
        assert_eq!(learner.thinning.load(Relaxed), 0);
    }
}
