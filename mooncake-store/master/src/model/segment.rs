//! MountedSegment segments: the space in each, and the extents that stay in quarantine before reuse.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

use mooncake_core::alloc::{Extent, SegmentAllocator};
use mooncake_core::clock::Moment;
use mooncake_core::ids::{ClientId, ReplicaId};
use mooncake_core::replica::{
    MemoryLocation, Replica, ReplicaLocation, ReplicaStatus, Segment, SegmentStatus,
};
use mooncake_core::{Error, Result};
use parking_lot::{Mutex, MutexGuard};

use super::ledger::Ledger;

/// Objects start on cache lines, so that copies run at full speed.
pub(crate) const GRAIN: u64 = 64;

/// Extents freed under one lock.
const SLICE: usize = 2048;

/// One mount of one segment. Mounting the same segment again makes another of these.
pub(crate) struct MountedSegment<A> {
    pub(crate) info: Segment,
    pub(crate) client: ClientId,
    /// Nothing is placed here before.
    opens: Moment,
    alive: AtomicBool,
    /// Whether it is dead because its client was silent for too long.
    expired: AtomicBool,
    /// End of the grace period of a graceful unmount, 0 for none.
    leaves: AtomicU64,
    /// Number of the state that a drain has brought it to: OK, DRAINING, DRAINED.
    drain: AtomicU8,
    /// Somebody could not reach its owner, and the owner has not been heard of since.
    doubted: AtomicBool,
    /// Its owner has not yet said what lies in it.
    closed: AtomicBool,
    /// Where its owner is told of what comes and is_evictable_noting, if it asks.
    pub(crate) ledger: Option<Arc<Ledger>>,
    space: Mutex<SegmentSpace<A>>,
    // Copies of what the space says, to look at without its lock.
    used: AtomicU64,
    largest: AtomicU64,
    resting: AtomicU64,
    next_release: AtomicU64,
}

struct SegmentSpace<A> {
    allocator: A,
    /// Taken, but nobody's any more: free from the moment given.
    quarantined: BinaryHeap<Reverse<(Moment, Extent)>>,
    quarantined_bytes: u64,
    /// Taken for objects that the owner is going to announce: lengths by offset.
    kept: BTreeMap<u64, u64>,
}

impl<A: SegmentAllocator> MountedSegment<A> {
    /// `resting` must not overlap and lie inside the segment.
    pub(crate) fn new(
        info: Segment,
        client: ClientId,
        opens: Moment,
        config: &A::Config,
        resting: &[(Moment, Extent)],
    ) -> Self {
        let mut allocator = A::new(info.size, config);
        let mut heap = BinaryHeap::new();
        let mut quarantined_bytes = 0;
        for &(until, extent) in resting {
            if allocator.reserve(extent).is_ok() {
                quarantined_bytes += extent.len;
                heap.push(Reverse((until, extent)));
            }
        }
        let mounted = Self {
            info,
            client,
            opens,
            alive: AtomicBool::new(true),
            expired: AtomicBool::new(false),
            leaves: AtomicU64::new(0),
            drain: AtomicU8::new(SegmentStatus::Ok as u8),
            doubted: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            ledger: None,
            used: AtomicU64::new(0),
            largest: AtomicU64::new(0),
            resting: AtomicU64::new(0),
            next_release: AtomicU64::new(u64::MAX),
            space: Mutex::new(SegmentSpace {
                allocator,
                quarantined: heap,
                quarantined_bytes,
                kept: BTreeMap::new(),
            }),
        };
        mounted.publish(&mounted.space.lock());
        mounted
    }

    /// Room for `len` bytes, if there is any.
    pub(crate) fn allocate(&self, len: u64) -> Option<Extent> {
        let mut space = self.space.lock();
        let extent = space.allocator.allocate(len.checked_next_multiple_of(GRAIN)?, 1).ok();
        self.publish(&space);
        extent
    }

    /// Gives an extent back from `until` on. The past means now.
    pub(crate) fn quarantine(&self, extent: Extent, until: Moment, now: Moment) {
        let mut space = self.space.lock();
        if until <= now {
            space.allocator.release(extent);
        } else {
            space.quarantined_bytes += extent.len;
            space.quarantined.push(Reverse((until, extent)));
        }
        self.publish(&space);
    }

    /// Takes space for an object that is going to be announced. Once is as good as twice.
    ///
    /// # Errors
    /// `INVALID_PARAMS` when it is not free, or no object takes such space.
    pub(crate) fn keep(&self, extent: Extent) -> Result<()> {
        let mut space = self.space.lock();
        if space.kept.get(&extent.offset) == Some(&extent.len) {
            return Ok(());
        }
        let whole = extent.len > 0 && extent.len.is_multiple_of(GRAIN) && extent.offset.is_multiple_of(GRAIN);
        if !whole || space.allocator.reserve(extent).is_err() {
            return Err(Error::invalid(format!(
                "{} bytes at {} cannot be kept in segment {}",
                extent.len, extent.offset, self.info.id
            )));
        }
        space.kept.insert(extent.offset, extent.len);
        self.publish(&space);
        Ok(())
    }

    /// Whether this space was kept; from now on it is the caller's.
    pub(crate) fn take_reserved(&self, extent: Extent) -> bool {
        let mut space = self.space.lock();
        let kept = space.kept.get(&extent.offset) == Some(&extent.len);
        if kept {
            space.kept.remove(&extent.offset);
        }
        kept
    }

    /// Frees what is still kept.
    pub(crate) fn release_kept(&self) {
        let mut space = self.space.lock();
        for (offset, len) in std::mem::take(&mut space.kept) {
            space.allocator.release(Extent { offset, len });
        }
        self.publish(&space);
    }

    /// Takes no objects until it is opened.
    pub(crate) fn close(&self) {
        self.closed.store(true, Relaxed);
    }

    pub(crate) fn open(&self) {
        self.closed.store(false, Relaxed);
    }

    /// Whether its owner has announced all that was kept.
    pub(crate) fn is_fully_announced(&self) -> bool {
        !self.closed.load(Relaxed) && self.space.lock().kept.is_empty()
    }

    /// Frees what has rested long enough, a slice of it at most: a million readers' leases may end at once, and puts wait for the
    /// same lock. How many bytes.
    pub(crate) fn reclaim(&self, now: Moment) -> u64 {
        if !self.has_reclaimable(now) {
            return 0;
        }
        let mut space = self.space.lock();
        let before = space.quarantined_bytes;
        for _ in 0..SLICE {
            let Some(&Reverse((until, extent))) = space.quarantined.peek() else { break };
            if until > now {
                break;
            }
            space.quarantined.pop();
            space.quarantined_bytes -= extent.len;
            space.allocator.release(extent);
        }
        self.publish(&space);
        let freed = before - space.quarantined_bytes;
        MutexGuard::unlock_fair(space);
        freed
    }

    /// Whether there is something to reclaim.
    pub(crate) fn has_reclaimable(&self, now: Moment) -> bool {
        self.next_release.load(Relaxed) <= now.0
    }

    /// What rests, as absolute addresses.
    pub(crate) fn quarantined_addresses(&self) -> Vec<(Moment, Extent)> {
        let space = self.space.lock();
        let absolute = |extent: Extent| Extent { offset: self.info.base + extent.offset, len: extent.len };
        space.quarantined.iter().map(|Reverse((until, extent))| (*until, absolute(*extent))).collect()
    }

    fn publish(&self, space: &SegmentSpace<A>) {
        self.used.store(space.allocator.used(), Relaxed);
        self.largest.store(space.allocator.largest_free(), Relaxed);
        self.resting.store(space.quarantined_bytes, Relaxed);
        self.next_release
            .store(space.quarantined.peek().map_or(u64::MAX, |Reverse((until, _))| until.0), Relaxed);
    }

    /// Bytes taken, those that rest included.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    /// Bytes that rest.
    pub(crate) fn resting(&self) -> u64 {
        self.resting.load(Relaxed)
    }

    /// When the next of them is free, the end of time for never.
    pub(crate) fn next_release(&self) -> Moment {
        Moment(self.next_release.load(Relaxed))
    }

    pub(crate) fn free_ratio(&self) -> f64 {
        1.0 - self.used() as f64 / self.info.size as f64
    }

    /// Whether an object of `len` bytes would fit, as far as can be seen without a lock.
    pub(crate) fn fits(&self, len: u64) -> bool {
        len.checked_next_multiple_of(GRAIN).is_some_and(|len| len <= self.largest.load(Relaxed))
    }

    /// Whether new objects may go here.
    pub(crate) fn is_open(&self, now: Moment) -> bool {
        self.would_open(now) && !self.is_doubted()
    }

    /// Whether new objects could go here, if its owner is there after all.
    pub(crate) fn would_open(&self, now: Moment) -> bool {
        self.is_alive()
            && self.leaves.load(Relaxed) == 0
            && self.opens <= now
            && !self.is_draining()
            && !self.closed.load(Relaxed)
    }

    /// Whether it is being emptied, or is empty for good.
    fn is_draining(&self) -> bool {
        self.drain.load(Relaxed) != SegmentStatus::Ok as u8
    }

    /// OK, DRAINING or DRAINED.
    pub(crate) fn set_drain(&self, status: SegmentStatus) {
        self.drain.store(status as u8, Relaxed);
    }

    /// Whether its owner may be gone; `true` until the owner is heard of.
    pub(crate) fn is_doubted(&self) -> bool {
        self.doubted.load(Relaxed)
    }

    pub(crate) fn set_doubted(&self, doubted: bool) {
        self.doubted.store(doubted, Relaxed);
    }

    /// Whether its objects can be read.
    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(SeqCst)
    }

    /// Marks the mount as one whose client expired. Call before [`retire`](Self::retire).
    pub(crate) fn expire(&self) {
        self.expired.store(true, SeqCst);
    }

    /// Whether the mount is dead because its client expired.
    pub(crate) fn has_expired(&self) -> bool {
        !self.is_alive() && self.expired.load(SeqCst)
    }

    pub(crate) fn retire(&self) {
        self.alive.store(false, SeqCst);
    }

    /// Begins a graceful unmount that ends at `at`.
    pub(crate) fn set_unmount_at(&self, at: Moment) {
        self.leaves.store(at.0.max(1), Relaxed);
    }

    /// When a graceful unmount ends, if one has begun.
    pub(crate) fn unmount_at(&self) -> Option<Moment> {
        match self.leaves.load(Relaxed) {
            0 => None,
            at => Some(Moment(at)),
        }
    }

    pub(crate) fn status(&self) -> SegmentStatus {
        match (self.is_alive(), self.unmount_at()) {
            (false, _) => SegmentStatus::Unmounting,
            (true, Some(_)) => SegmentStatus::GracefullyUnmounting,
            (true, None) if !self.is_draining() => SegmentStatus::Ok,
            (true, None) if self.drain.load(Relaxed) == SegmentStatus::Drained as u8 => {
                SegmentStatus::Drained
            }
            (true, None) => SegmentStatus::Draining,
        }
    }

    /// Whether two mounts mean the same memory: addresses count only where both are reached alike.
    pub(crate) fn overlaps(&self, other: &Segment) -> bool {
        self.info.endpoint == other.endpoint
            && self.info.base < other.base.saturating_add(other.size)
            && other.base < self.info.base.saturating_add(self.info.size)
    }
}

/// SegmentSpace held for a replica. Not `Clone`: it must be retired exactly once.
pub(crate) struct Allocation<A> {
    pub(crate) id: ReplicaId,
    pub(crate) segment: Arc<MountedSegment<A>>,
    pub(crate) extent: Extent,
}

impl<A: SegmentAllocator> Allocation<A> {
    pub(crate) fn quarantine(self, until: Moment, now: Moment) {
        self.segment.quarantine(self.extent, until, now);
    }

    /// Number, address and segment.
    pub(crate) fn position(&self) -> (ReplicaId, u64, &Segment) {
        (self.id, self.segment.info.base + self.extent.offset, &self.segment.info)
    }

    pub(crate) fn describe(&self, len: u64, status: ReplicaStatus) -> Replica {
        let segment = &self.segment.info;
        Replica {
            id: self.id,
            location: ReplicaLocation::Memory(MemoryLocation {
                size: len,
                address: segment.base + self.extent.offset,
                protocol: segment.protocol.clone(),
                endpoint: segment.endpoint.clone(),
            }),
            status,
        }
    }
}
