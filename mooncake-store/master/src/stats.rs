//! What the master counts.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::ids::{ClientId, SegmentId};
use mooncake_core::replica::{Segment, SegmentStatus};

use super::Master;

/// Upper bounds of the histogram of value sizes, in bytes.
pub(super) const VALUE_SIZES: [u64; 7] = [4096, 65536, 262_144, 1_048_576, 4_194_304, 16_777_216, 67_108_864];

/// Where a master stands. Counters count from its start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Keys, those being written for the first time included.
    pub keys: u64,
    /// Objects that can be read.
    pub objects: u64,
    /// Of these, soft-pinned ones.
    pub soft_pinned: u64,
    /// Writes in progress.
    pub writing: u64,
    /// Clients heard of in time.
    pub clients: u64,
    /// Live segments.
    pub segments: Vec<SegmentStats>,
    /// Reads asked for.
    pub reads: u64,
    /// Reads that found their object.
    pub hits: u64,
    /// Bytes of the objects they found.
    pub hit_bytes: u64,
    /// Of the hits, those of objects that are on a client's disk only.
    pub disk_hits: u64,
    /// Bytes of these.
    pub disk_hit_bytes: u64,
    /// Clients' disks.
    pub disks: DiskStats,
    /// Times that room was looked for.
    pub evictions_attempted: u64,
    /// Times that some was made.
    pub evictions_successful: u64,
    /// Objects evicted.
    pub evicted_keys: u64,
    /// Bytes they took.
    pub evicted_bytes: u64,
    /// Puts refused because no room could be made.
    pub no_room: u64,
    /// Puts that got fewer replicas than they asked for.
    pub partial: u64,
    /// Writes taken back from writers that did not end them.
    pub discarded: u64,
    /// Of these, those whose grant had run out.
    pub released: u64,
    /// Replicas of hot objects that were asked for, or would have been.
    pub hot_proposed: u64,
    /// Of these, those that were made.
    pub hot_made: u64,
    /// Of these, those that went again.
    pub hot_dropped: u64,
    /// Replicas of hot objects there are.
    pub hot_replicas: u64,
    /// Values completed, by size: counts for each upper bound, then for all.
    pub value_sizes: Vec<(u64, u64)>,
    /// Sum of their sizes.
    pub value_bytes: u64,
}

/// Where clients' disks stand. Every promotion that was admitted is in flight or one of completed, failed, cancelled and expired.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Copies of objects there.
    pub objects: u64,
    /// Bytes of these.
    pub used: u64,
    /// Sizes of the disks, as far as their owners have told, in bytes.
    pub capacity: u64,
    /// Objects that are to come back to memory, or on their way.
    pub promotions_in_flight: u64,
    /// Objects that were to.
    pub promotions_admitted: u64,
    /// Those that did.
    pub promotions_completed: u64,
    /// Their bytes.
    pub promoted_bytes: u64,
    /// Those that their owner could not bring back.
    pub promotions_failed: u64,
    /// Those that were gone, or whose disk was.
    pub promotions_cancelled: u64,
    /// Those that their owner said nothing of.
    pub promotions_expired: u64,
    /// Reads that were too few for their object to come back.
    pub promotions_too_rare: u64,
    /// Reads after which it did not because memory was too full.
    pub promotions_too_full: u64,
    /// Reads after which it did not because too many were on their way.
    pub promotions_over_limit: u64,
}

/// Where a segment stands.
#[derive(Clone, Debug, PartialEq)]
pub struct SegmentStats {
    /// The segment.
    pub segment: Segment,
    /// Its owner.
    pub client: ClientId,
    /// Its state.
    pub status: SegmentStatus,
    /// Bytes taken.
    pub used: u64,
    /// Of these, bytes that are nobody's any more and rest until nobody can still read or write them.
    pub resting: u64,
}

impl SegmentStats {
    /// Its id.
    pub fn id(&self) -> SegmentId {
        self.segment.id
    }
}

impl Stats {
    /// Bytes taken in all segments.
    pub fn used(&self) -> u64 {
        total(self.segments.iter().map(|segment| segment.used))
    }

    /// Bytes in all segments that rest.
    pub fn resting(&self) -> u64 {
        total(self.segments.iter().map(|segment| segment.resting))
    }

    /// Bytes of all segments.
    pub fn capacity(&self) -> u64 {
        total(self.segments.iter().map(|segment| segment.segment.size))
    }
}

/// Who mounts says how large its memory is, so a sum may be beyond all numbers.
fn total(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

#[derive(Default)]
pub(super) struct Counters {
    evictions_attempted: AtomicU64,
    evictions_successful: AtomicU64,
    evicted_keys: AtomicU64,
    evicted_bytes: AtomicU64,
    no_room: AtomicU64,
    partial: AtomicU64,
    discarded: AtomicU64,
    released: AtomicU64,
    value_sizes: [AtomicU64; VALUE_SIZES.len() + 1],
    value_bytes: AtomicU64,
}

impl Counters {
    pub(super) fn placed(&self, wanted: u64, got: usize) {
        if (got as u64) < wanted {
            self.partial.fetch_add(1, Relaxed);
        }
    }

    pub(super) fn no_room(&self) {
        self.no_room.fetch_add(1, Relaxed);
    }

    pub(super) fn eviction_attempted(&self) {
        self.evictions_attempted.fetch_add(1, Relaxed);
    }

    pub(super) fn evicted(&self, keys: u64, bytes: u64) {
        self.evictions_successful.fetch_add(1, Relaxed);
        self.evicted_keys.fetch_add(keys, Relaxed);
        self.evicted_bytes.fetch_add(bytes, Relaxed);
    }

    pub(super) fn discarded(&self) {
        self.discarded.fetch_add(1, Relaxed);
    }

    pub(super) fn released(&self) {
        self.released.fetch_add(1, Relaxed);
    }

    pub(super) fn value_size(&self, len: u64) {
        let bucket = VALUE_SIZES.partition_point(|bound| *bound < len);
        self.value_sizes[bucket].fetch_add(1, Relaxed);
        self.value_bytes.fetch_add(len, Relaxed);
    }
}

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// Where it stands. Looks at every shard, one after the other: for a scrape now and then.
    pub fn stats(&self) -> Stats {
        let now = self.clock.now();
        let read = |counter: &AtomicU64| counter.load(Relaxed);
        let counters = &self.counters;
        let clients = self.clients.lock().len() as u64;
        let mut stats = Stats {
            clients,
            segments: self.segment_stats(),
            evictions_attempted: read(&counters.evictions_attempted),
            evictions_successful: read(&counters.evictions_successful),
            evicted_keys: read(&counters.evicted_keys),
            evicted_bytes: read(&counters.evicted_bytes),
            no_room: read(&counters.no_room),
            partial: read(&counters.partial),
            discarded: read(&counters.discarded),
            released: read(&counters.released),
            value_bytes: read(&counters.value_bytes),
            disks: self.disks.stats(self.options.files.as_ref().map_or(0, |files| files.capacity)),
            ..Stats::default()
        };
        if let Some(hot) = &self.hot {
            [stats.hot_proposed, stats.hot_made, stats.hot_dropped, stats.hot_replicas] = hot.counts();
        }
        let mut below = 0;
        for (at, count) in counters.value_sizes.iter().enumerate() {
            below += read(count);
            stats.value_sizes.push((VALUE_SIZES.get(at).copied().unwrap_or(u64::MAX), below));
        }
        for shard in self.directory.each() {
            stats.keys += shard.len() as u64;
            stats.objects += shard.values() as u64;
            stats.writing += shard.writing().len() as u64;
            stats.soft_pinned += shard.soft_pinned(now) as u64;
            stats.reads += shard.reads.asked;
            stats.hits += shard.reads.hits;
            stats.hit_bytes = stats.hit_bytes.saturating_add(shard.reads.hit_bytes);
            stats.disk_hits += shard.reads.disk_hits;
            stats.disk_hit_bytes = stats.disk_hit_bytes.saturating_add(shard.reads.disk_hit_bytes);
        }
        stats
    }

    /// The live segments, in the order they came.
    pub fn segment_stats(&self) -> Vec<SegmentStats> {
        let registry = self.segments.read();
        let stats = registry.list.iter().map(|mounted| SegmentStats {
            segment: mounted.info.clone(),
            client: mounted.client,
            status: mounted.status(),
            used: mounted.used(),
            resting: mounted.resting(),
        });
        stats.collect()
    }
}
