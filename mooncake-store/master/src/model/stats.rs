//! Statistics of a master, as a caller sees them.

use mooncake_core::ids::{ClientId, SegmentId};
use mooncake_core::replica::{Segment, SegmentStatus};

use super::misses::MissCounts;

/// State of a master. Counters count from its start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Number of keys, including those that are being written for the first time.
    pub keys: u64,
    /// Number of objects that can be read.
    pub objects: u64,
    /// Number of readable objects that are soft-pinned.
    pub soft_pinned: u64,
    /// Number of writes in progress.
    pub writing: u64,
    /// Number of clients that have not expired.
    pub clients: u64,
    /// Number of these clients whose heartbeats are overdue.
    pub suspected_clients: u64,
    /// Number of times that a client became suspected.
    pub suspicions: u64,
    /// Number of times that a suspected client sent a heartbeat.
    pub recoveries: u64,
    /// Number of clients that have expired.
    pub expired_clients: u64,
    /// Memory of the changes that owners of segments have not fetched yet, in bytes.
    pub ledger_bytes: u64,
    /// Limit of that memory in bytes.
    pub ledger_limit: u64,
    /// Number of times that an owner lost its changes because of that limit.
    pub ledgers_dropped: u64,
    /// Mounted segments.
    pub segments: Vec<SegmentStats>,
    /// Number of reads.
    pub reads: u64,
    /// Number of reads that found their object.
    pub hits: u64,
    /// Bytes of the objects that reads found.
    pub hit_bytes: u64,
    /// Number of hits on objects that are only on disk.
    pub disk_hits: u64,
    /// Bytes of the objects that are only on disk and that reads found.
    pub disk_hit_bytes: u64,
    /// Keys that requests asked for and could not use. Unlike `reads`, they include those that a
    /// request only looked for, and those behind the first miss of a prefix.
    pub misses: MissCounts,
    /// Disks of clients.
    pub disks: DiskStats,
    /// Number of times that eviction was attempted.
    pub evictions_attempted: u64,
    /// Number of times that eviction freed space.
    pub evictions_successful: u64,
    /// Number of evicted objects.
    pub evicted_keys: u64,
    /// Bytes of the evicted objects.
    pub evicted_bytes: u64,
    /// Number of evicted objects with a lease that only look-ups had extended.
    pub look_ups_yielded: u64,
    /// Number of puts that were refused because eviction could not free enough space.
    pub out_of_space: u64,
    /// Number of puts that got fewer replicas than they requested.
    pub partial: u64,
    /// Number of puts of one object that were refused because the object exists.
    pub existed: u64,
    /// Number of objects of batches that were refused because they exist.
    pub existed_in_batches: u64,
    /// Number of writes that the master took back because the writer did not end them.
    pub discarded: u64,
    /// Number of writes that the master took back because the allocation had expired.
    pub released: u64,
    /// Number of additional replicas of hot objects that were requested, or would have been.
    pub hot_proposed: u64,
    /// Number of additional replicas of hot objects that were made.
    pub hot_made: u64,
    /// Number of additional replicas of hot objects that were dropped.
    pub hot_dropped: u64,
    /// Number of additional replicas of hot objects that exist.
    pub hot_replicas: u64,
    /// Histogram of the sizes of completed values: the count up to each upper bound, then of all.
    pub value_sizes: Vec<(u64, u64)>,
    /// Sum of the sizes of completed values, in bytes.
    pub value_bytes: u64,
}

/// State of the disks of clients. An admitted promotion is in flight, completed, failed, cancelled
/// or expired. A queued offload waits, is in progress, or is completed, cancelled or failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Number of replicas on disks.
    pub objects: u64,
    /// Bytes of the replicas on disks.
    pub used: u64,
    /// Sizes of the disks that clients have reported, in bytes.
    pub capacity: u64,
    /// Number of objects that were queued for a disk.
    pub offloads_enqueued: u64,
    /// Number of objects that no queue took, because it was full or the disk takes none.
    pub offloads_rejected: u64,
    /// Number of objects that owners wrote to their disks on request.
    pub offloads_completed: u64,
    /// Number of queued objects that were removed or replaced, or whose disk disappeared.
    pub offloads_cancelled: u64,
    /// Number of queued objects that the owner could not write, or never reported on.
    pub offloads_failed: u64,
    /// Number of promotions that wait or are in progress.
    pub promotions_in_flight: u64,
    /// Number of promotions that were admitted.
    pub promotions_admitted: u64,
    /// Number of promotions that completed.
    pub promotions_completed: u64,
    /// Bytes of the completed promotions.
    pub promoted_bytes: u64,
    /// Number of promotions that the client could not make.
    pub promotions_failed: u64,
    /// Number of promotions whose object or disk disappeared.
    pub promotions_cancelled: u64,
    /// Number of promotions that the client never reported on.
    pub promotions_expired: u64,
    /// Number of reads that did not promote because the object is read too rarely.
    pub promotions_too_rare: u64,
    /// Number of reads that did not promote because memory was above the watermark, or
    /// full of objects of more value.
    pub promotions_too_full: u64,
    /// Number of reads that did not promote because too many promotions were in progress.
    pub promotions_over_limit: u64,
}

/// State of a segment.
#[derive(Clone, Debug, PartialEq)]
pub struct SegmentStats {
    /// Segment as its client mounted it.
    pub segment: Segment,
    /// Client that mounted the segment.
    pub client: ClientId,
    /// Status of the segment.
    pub status: SegmentStatus,
    /// Allocated bytes, including those in quarantine.
    pub used: u64,
    /// Bytes in quarantine: no object uses them, but a reader or a writer still may.
    pub resting: u64,
}

impl SegmentStats {
    /// Returns the id of the segment.
    pub fn id(&self) -> SegmentId {
        self.segment.id
    }
}

impl Stats {
    /// Returns the allocated bytes of all segments.
    pub fn used(&self) -> u64 {
        total(self.segments.iter().map(|segment| segment.used))
    }

    /// Returns the bytes in quarantine of all segments.
    pub fn resting(&self) -> u64 {
        total(self.segments.iter().map(|segment| segment.resting))
    }

    /// Returns the bytes of all segments.
    pub fn capacity(&self) -> u64 {
        total(self.segments.iter().map(|segment| segment.segment.size))
    }
}

/// Adds up, up to the largest number: a client chooses the size that it reports for a segment.
fn total(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}
