//! Statistics of a master, as a caller sees them.

use mooncake_core::ids::{ClientId, SegmentId};
use mooncake_core::replica::{Segment, SegmentStatus};

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
    /// ClientTable heard of in time.
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
    /// ClientTable' disks.
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
