//! Counters of events since the start of a master.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::misses::MissCause;
use super::stats::Stats;

/// Upper bounds of the histogram of value sizes, in bytes.
pub(crate) const VALUE_SIZES: [u64; 7] = [4096, 65536, 262_144, 1_048_576, 4_194_304, 16_777_216, 67_108_864];

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) evictions_attempted: AtomicU64,
    pub(crate) evictions_successful: AtomicU64,
    pub(crate) evicted_keys: AtomicU64,
    pub(crate) evicted_bytes: AtomicU64,
    pub(crate) no_room: AtomicU64,
    pub(crate) partial: AtomicU64,
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

    /// Counts a put that was refused for lack of space.
    pub(crate) fn no_room(&self) {
        self.no_room.fetch_add(1, Relaxed);
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
        stats.no_room = read(&self.no_room);
        stats.partial = read(&self.partial);
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
