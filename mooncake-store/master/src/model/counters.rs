//! Counters of events since the start of a master.

use std::ops::Deref;

use mooncake_protocol::metrics::Histogram;

use super::misses::MissCause;
use super::stats::Stats;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Upper bounds of the histogram of value sizes, in bytes.
pub(crate) const VALUE_SIZES: [u64; 7] = [4096, 65536, 262_144, 1_048_576, 4_194_304, 16_777_216, 67_108_864];

/// Upper bounds of the histogram of removals of expired clients, in milliseconds.
const REMOVAL_MS: [u64; 11] = [1, 5, 10, 25, 50, 100, 250, 500, 1000, 5000, 30_000];

pub(crate) struct RemovalTimes(Histogram<11>);

impl Default for RemovalTimes {
    fn default() -> Self {
        Self(Histogram::new(&REMOVAL_MS))
    }
}

impl Deref for RemovalTimes {
    type Target = Histogram<11>;

    fn deref(&self) -> &Histogram<11> {
        &self.0
    }
}

#[derive(Default)]
pub(crate) struct Counters {
    /// Times to remove expired clients in milliseconds.
    pub(crate) removal_ms: RemovalTimes,
    pub(crate) evictions_attempted: AtomicU64,
    pub(crate) evictions_successful: AtomicU64,
    pub(crate) evicted_keys: AtomicU64,
    pub(crate) evicted_bytes: AtomicU64,
    look_ups_yielded: AtomicU64,
    pub(crate) out_of_space: AtomicU64,
    pub(crate) partial: AtomicU64,
    pub(crate) existed: AtomicU64,
    pub(crate) existed_in_batches: AtomicU64,
    pub(crate) discarded: AtomicU64,
    pub(crate) released: AtomicU64,
    pub(crate) value_sizes: [AtomicU64; VALUE_SIZES.len() + 1],
    pub(crate) value_bytes: AtomicU64,
    missed_without_tenant: AtomicU64,
}

impl Counters {
    /// Counts a put that got fewer replicas than it requested.
    pub(crate) fn placed(&self, wanted: u64, got: usize) {
        if (got as u64) < wanted {
            self.partial.fetch_add(1, Relaxed);
        }
    }

    /// Counts a put that was refused because the object exists.
    pub(crate) fn existed(&self, in_batch: bool) {
        if in_batch { &self.existed_in_batches } else { &self.existed }.fetch_add(1, Relaxed);
    }

    /// Counts a put that was refused for lack of space.
    pub(crate) fn out_of_space(&self) {
        self.out_of_space.fetch_add(1, Relaxed);
    }

    /// Counts misses of keys of a tenant that is not registered.
    pub(crate) fn missed_without_tenant(&self, keys: usize) {
        self.missed_without_tenant.fetch_add(keys as u64, Relaxed);
    }

    /// Counts an attempt to evict.
    pub(crate) fn eviction_attempted(&self) {
        self.evictions_attempted.fetch_add(1, Relaxed);
    }

    /// Counts evicted objects and their bytes.
    pub(crate) fn evicted(&self, keys: u64, bytes: u64) {
        self.evictions_successful.fetch_add(1, Relaxed);
        self.evicted_keys.fetch_add(keys, Relaxed);
        self.evicted_bytes.fetch_add(bytes, Relaxed);
    }

    /// Counts an object that was evicted although look-ups had extended its lease.
    pub(crate) fn look_up_yielded(&self) {
        self.look_ups_yielded.fetch_add(1, Relaxed);
    }

    /// Counts a write that was taken back.
    pub(crate) fn discarded(&self) {
        self.discarded.fetch_add(1, Relaxed);
    }

    /// Counts a write whose allocation expired.
    pub(crate) fn released(&self) {
        self.released.fetch_add(1, Relaxed);
    }

    /// Counts a completed value in the histogram.
    pub(crate) fn value_size(&self, len: u64) {
        let bucket = VALUE_SIZES.partition_point(|bound| *bound < len);
        self.value_sizes[bucket].fetch_add(1, Relaxed);
        self.value_bytes.fetch_add(len, Relaxed);
    }

    /// Returns the number of completed values.
    pub(crate) fn values(&self) -> u64 {
        self.value_sizes.iter().map(|count| count.load(Relaxed)).sum()
    }

    /// Copies the counters into `stats`.
    pub(crate) fn fill(&self, stats: &mut Stats) {
        let read = |counter: &AtomicU64| counter.load(Relaxed);
        stats.evictions_attempted = read(&self.evictions_attempted);
        stats.evictions_successful = read(&self.evictions_successful);
        stats.evicted_keys = read(&self.evicted_keys);
        stats.evicted_bytes = read(&self.evicted_bytes);
        stats.look_ups_yielded = read(&self.look_ups_yielded);
        stats.out_of_space = read(&self.out_of_space);
        stats.partial = read(&self.partial);
        stats.existed = read(&self.existed);
        stats.existed_in_batches = read(&self.existed_in_batches);
        stats.discarded = read(&self.discarded);
        stats.released = read(&self.released);
        stats.value_bytes = read(&self.value_bytes);
        stats.misses.add(MissCause::Unknown, read(&self.missed_without_tenant));
        let mut below = 0;
        for (at, count) in self.value_sizes.iter().enumerate() {
            below += read(count);
            stats.value_sizes.push((VALUE_SIZES.get(at).copied().unwrap_or(u64::MAX), below));
        }
    }
}
