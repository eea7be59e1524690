//! Mounted segments: the space in each, and the extents that stay in quarantine before reuse.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use mooncake_core::alloc::{Extent, SegmentAllocator};
use mooncake_core::clock::Moment;
use mooncake_core::ids::{ClientId, ReplicaId};
use mooncake_core::replica::{
    MemoryLocation, Replica, ReplicaLocation, ReplicaStatus, Segment, SegmentStatus,
};
use mooncake_core::{Error, Result};

use super::ledger::Ledger;
use super::residue::{Grantee, Residue};
use super::suspicion::Suspicion;
use crate::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use crate::sync::{Mutex, MutexGuard};

/// Alignment of objects in bytes. Objects begin on cache lines, so that copies run at full speed.
pub(crate) const GRAIN: u64 = 64;

/// Maximum number of extents that are freed under one lock.
const SLICE: usize = 2048;

/// Maximum number of extents that one allocation examines for remains of other tenants.
const MAX_EXAMINED: usize = 16;

/// Mount of one segment. Mounting the same segment again creates another value.
pub(crate) struct MountedSegment<A> {
    pub(crate) info: Segment,
    pub(crate) client: ClientId,
    /// Earliest time of a placement.
    opens: Moment,
    alive: AtomicBool,
    /// True if the mount was retired because its client expired.
    expired: AtomicBool,
    /// True if the mount was retired because its client hands the memory over to its next process.
    handed_over: AtomicBool,
    /// End of the grace period of a graceful unmount; 0 for none.
    leaves: AtomicU64,
    /// Number of the status that a drain has set: OK, DRAINING or DRAINED.
    drain: AtomicU8,
    /// True if another client could not reach the owner, and no heartbeat of the owner has arrived
    /// since.
    reported_unreachable: AtomicBool,
    /// Suspicion of the owner.
    pub(crate) suspicion: Suspicion,
    /// True if the owner has still to announce the objects in the segment.
    closed: AtomicBool,
    /// Ledger of the owner, if it fetches the inventory.
    pub(crate) ledger: Option<Arc<Ledger>>,
    space: Mutex<SegmentSpace<A>>,
    // Copies of numbers of the space, readable without its lock.
    used: AtomicU64,
    largest: AtomicU64,
    quarantined: AtomicU64,
    next_release: AtomicU64,
}

struct SegmentSpace<A> {
    allocator: A,
    /// Extents in quarantine, by the time at which each is free.
    quarantined: BTreeSet<(Moment, Extent)>,
    quarantined_bytes: u64,
    /// Lengths of the extents that are reserved for objects that the owner will announce, by
    /// offset.
    reserved: BTreeMap<u64, u64>,
    /// Earliest times of reuse of extents of readable replicas to which a client may still write,
    /// by offset.
    held: BTreeMap<u64, Moment>,
    /// Bytes of earlier objects, if writers are kept from those of other tenants.
    residue: Option<Residue>,
}

/// Reason why a segment has no space for an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoSpace {
    /// No free extent has that length.
    Full,
    /// Free memory has bytes of other tenants.
    Remains,
}

impl<A: SegmentAllocator> SegmentSpace<A> {
    /// Allocates `len` bytes for a writer.
    fn allocate(&mut self, len: u64, grantee: Grantee) -> Result<Extent, NoSpace> {
        let allocator = &mut self.allocator;
        let mut next = || allocator.allocate(len, 1).map_err(|_| NoSpace::Full);
        let Some(residue) = &mut self.residue else { return next() };
        let (mut refused, mut found) = (Vec::new(), Err(NoSpace::Remains));
        while refused.len() < MAX_EXAMINED {
            let extent = match next() {
                Ok(extent) => extent,
                Err(full) if refused.is_empty() => return Err(full),
                Err(_) => break,
            };
            if residue.admits(extent, grantee) {
                residue.record(extent, grantee.tenant);
                found = Ok(extent);
                break;
            }
            refused.push(extent);
        }
        for extent in refused {
            if !residue.take(extent) {
                allocator.release(extent);
            }
        }
        found
    }

    /// Frees an extent.
    fn release(&mut self, extent: Extent) {
        self.allocator.release(extent);
        if let Some(residue) = &mut self.residue {
            residue.note_free(extent);
        }
    }

    /// Keeps an extent in quarantine, or frees it if the time is over. Returns whether it is free.
    fn begin_quarantine(&mut self, extent: Extent, until: Moment, now: Moment) -> bool {
        let is_free = until <= now;
        if is_free {
            self.release(extent);
        } else {
            self.quarantined_bytes += extent.len;
            self.quarantined.insert((until, extent));
        }
        is_free
    }
}

impl<A: SegmentAllocator> MountedSegment<A> {
    /// Creates a mount. The extents in quarantine must be inside the segment and must not overlap.
    pub(crate) fn new(
        info: Segment,
        client: ClientId,
        opens: Moment,
        config: &A::Config,
        quarantined: &[(Moment, Extent)],
    ) -> Self {
        let mut allocator = A::new(info.size, config);
        let mut waiting = BTreeSet::new();
        let mut quarantined_bytes = 0;
        for &(until, extent) in quarantined {
            if allocator.reserve(extent).is_ok() {
                quarantined_bytes += extent.len;
                waiting.insert((until, extent));
            }
        }
        let mounted = Self {
            info,
            client,
            opens,
            alive: AtomicBool::new(true),
            expired: AtomicBool::new(false),
            handed_over: AtomicBool::new(false),
            leaves: AtomicU64::new(0),
            drain: AtomicU8::new(SegmentStatus::Ok as u8),
            reported_unreachable: AtomicBool::new(false),
            suspicion: Suspicion::default(),
            closed: AtomicBool::new(false),
            ledger: None,
            used: AtomicU64::new(0),
            largest: AtomicU64::new(0),
            quarantined: AtomicU64::new(0),
            next_release: AtomicU64::new(u64::MAX),
            space: Mutex::new(SegmentSpace {
                allocator,
                quarantined: waiting,
                quarantined_bytes,
                reserved: BTreeMap::new(),
                held: BTreeMap::new(),
                residue: None,
            }),
        };
        mounted.publish(&mounted.space.lock());
        mounted
    }

    /// Keeps writers that may leave bytes out from memory with bytes of other tenants. Memory that
    /// is not `fresh` may have bytes of every tenant. Called before anything is placed.
    pub(crate) fn separate_tenants(&mut self, fresh: bool) {
        self.space.get_mut().residue = Some(Residue::new(self.info.size, fresh));
    }

    /// Returns the time before which nothing is placed in the segment.
    pub(crate) fn opens(&self) -> Moment {
        self.opens
    }

    /// Allocates `len` bytes for a writer, if there are enough in one piece.
    pub(crate) fn allocate(&self, len: u64, grantee: Grantee) -> Result<Extent, NoSpace> {
        let len = len.checked_next_multiple_of(GRAIN).ok_or(NoSpace::Full)?;
        let mut space = self.space.lock();
        let extent = space.allocate(len, grantee);
        self.publish(&space);
        extent
    }

    /// Returns extents for the owner to zero, up to `most` bytes, with the number of each request.
    /// The extents stay taken until they are [acknowledged](Self::acknowledge_zeroed).
    pub(crate) fn request_zeroes(&self, most: u64, number: impl FnMut() -> u64) -> Vec<(u64, Extent)> {
        let mut space = self.space.lock();
        let SegmentSpace { allocator, residue, .. } = &mut *space;
        let Some(residue) = residue else { return Vec::new() };
        let requested = residue.request(most, number, |extent| allocator.reserve(extent).is_ok());
        self.publish(&space);
        requested
    }

    /// Frees the extent of a request that the owner has zeroed. Returns whether there is one.
    pub(crate) fn acknowledge_zeroed(&self, number: u64) -> bool {
        let mut space = self.space.lock();
        let Some(extent) = space.residue.as_mut().and_then(|residue| residue.acknowledge(number)) else {
            return false;
        };
        space.allocator.release(extent);
        self.publish(&space);
        true
    }

    /// Returns an extent, which is free from `until` on. A time in the past means now.
    pub(crate) fn quarantine(&self, extent: Extent, until: Moment, now: Moment) {
        self.quarantine_for_readers(extent, until, until, now);
    }

    /// Returns an extent like [`quarantine`](Self::quarantine). Without readers that will report
    /// the end of their reads, it would be free from `rest` on. Returns both times with regard to
    /// writers; `None` if the extent is free.
    pub(crate) fn quarantine_for_readers(
        &self,
        extent: Extent,
        until: Moment,
        rest: Moment,
        now: Moment,
    ) -> Option<(Moment, Moment)> {
        let mut space = self.space.lock();
        let held = if space.held.is_empty() { None } else { space.held.remove(&extent.offset) };
        let [until, rest] = [until, rest].map(|until| held.map_or(until, |held| held.max(until)));
        let is_free = space.begin_quarantine(extent, until, now);
        self.publish(&space);
        (!is_free).then_some((until, rest))
    }

    /// Ends the quarantine of an extent until `until`, because its readers have ended. It is free
    /// from `rest` on.
    pub(crate) fn end_quarantine(&self, extent: Extent, until: Moment, rest: Moment, now: Moment) {
        let mut space = self.space.lock();
        if space.quarantined.remove(&(until, extent)) {
            space.quarantined_bytes -= extent.len;
            space.begin_quarantine(extent, rest, now);
            self.publish(&space);
        }
    }

    /// Keeps an extent, once it is returned, in quarantine until `until` at least.
    pub(crate) fn hold(&self, extent: Extent, until: Moment) {
        self.space.lock().held.insert(extent.offset, until);
    }

    /// Reserves space for an object that the owner will announce. Repeating the call has no effect.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the space is not free, or cannot be that of an object.
    pub(crate) fn reserve(&self, extent: Extent) -> Result<()> {
        let mut space = self.space.lock();
        if space.reserved.get(&extent.offset) == Some(&extent.len) {
            return Ok(());
        }
        let whole = extent.len > 0 && extent.len.is_multiple_of(GRAIN) && extent.offset.is_multiple_of(GRAIN);
        if !whole || space.allocator.reserve(extent).is_err() {
            return Err(Error::invalid(format!(
                "cannot reserve space: it is in use or not aligned. segment={} offset={} len={}",
                self.info.id, extent.offset, extent.len
            )));
        }
        space.reserved.insert(extent.offset, extent.len);
        self.publish(&space);
        Ok(())
    }

    /// Takes a reserved extent. Returns whether it was reserved; if so, it belongs to the caller.
    pub(crate) fn take_reserved(&self, extent: Extent) -> bool {
        let mut space = self.space.lock();
        let reserved = space.reserved.get(&extent.offset) == Some(&extent.len);
        if reserved {
            space.reserved.remove(&extent.offset);
        }
        reserved
    }

    /// Frees the extents that are still reserved.
    pub(crate) fn release_reserved(&self) {
        let mut space = self.space.lock();
        for (offset, len) in std::mem::take(&mut space.reserved) {
            space.release(Extent { offset, len });
        }
        self.publish(&space);
    }

    /// Refuses new objects until [`open`](Self::open).
    pub(crate) fn close(&self) {
        self.closed.store(true, Relaxed);
    }

    /// Accepts new objects again.
    pub(crate) fn open(&self) {
        self.closed.store(false, Relaxed);
    }

    /// Returns whether the owner has announced everything that was reserved.
    pub(crate) fn is_fully_announced(&self) -> bool {
        !self.closed.load(Relaxed) && self.space.lock().reserved.is_empty()
    }

    /// Frees extents whose quarantine has ended, and returns their bytes. One call frees a slice at
    /// most: the leases of a million readers may end at once, and puts wait for the same lock.
    pub(crate) fn reclaim(&self, now: Moment) -> u64 {
        if !self.has_reclaimable(now) {
            return 0;
        }
        let mut space = self.space.lock();
        let before = space.quarantined_bytes;
        for _ in 0..SLICE {
            let Some(&(until, extent)) = space.quarantined.first() else { break };
            if until > now {
                break;
            }
            space.quarantined.pop_first();
            space.quarantined_bytes -= extent.len;
            space.release(extent);
        }
        self.publish(&space);
        let freed = before - space.quarantined_bytes;
        MutexGuard::unlock_fair(space);
        freed
    }

    /// Returns whether the quarantine of an extent has ended.
    pub(crate) fn has_reclaimable(&self, now: Moment) -> bool {
        self.next_release.load(Relaxed) <= now.0
    }

    /// Returns the extents in quarantine, as absolute addresses.
    pub(crate) fn quarantined_addresses(&self) -> Vec<(Moment, Extent)> {
        let space = self.space.lock();
        let absolute = |extent: Extent| Extent { offset: self.info.base + extent.offset, len: extent.len };
        space.quarantined.iter().map(|(until, extent)| (*until, absolute(*extent))).collect()
    }

    fn publish(&self, space: &SegmentSpace<A>) {
        self.used.store(space.allocator.used(), Relaxed);
        self.largest.store(space.allocator.largest_free(), Relaxed);
        self.quarantined.store(space.quarantined_bytes, Relaxed);
        self.next_release.store(space.quarantined.first().map_or(u64::MAX, |(until, _)| until.0), Relaxed);
    }

    /// Returns the allocated bytes, including those in quarantine.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    /// Returns the allocated bytes if `len` bytes fit nowhere and nothing is in quarantine, all at
    /// one time. Objects that come and go leave no such time behind.
    pub(crate) fn used_if_full(&self, len: u64) -> Option<u64> {
        let space = self.space.lock();
        let is_full = space.quarantined_bytes == 0 && space.allocator.largest_free() < len;
        is_full.then(|| space.allocator.used())
    }

    /// Returns the bytes in quarantine.
    pub(crate) fn quarantined(&self) -> u64 {
        self.quarantined.load(Relaxed)
    }

    /// Returns the end of the next quarantine; the end of time if nothing is in quarantine.
    pub(crate) fn next_release(&self) -> Moment {
        Moment(self.next_release.load(Relaxed))
    }

    /// Returns the free part of the segment.
    pub(crate) fn free_ratio(&self) -> f64 {
        1.0 - self.used() as f64 / self.info.size as f64
    }

    /// Returns whether an object of `len` bytes would fit, as far as is known without a lock.
    pub(crate) fn fits(&self, len: u64) -> bool {
        len.checked_next_multiple_of(GRAIN).is_some_and(|len| len <= self.largest.load(Relaxed))
    }

    /// Returns whether new objects may be placed here.
    pub(crate) fn is_open(&self, now: Moment) -> bool {
        self.would_open(now) && !self.is_reported_unreachable()
    }

    /// Returns whether new objects could be placed here if the owner is reachable after all.
    pub(crate) fn would_open(&self, now: Moment) -> bool {
        self.is_readable()
            && self.leaves.load(Relaxed) == 0
            && self.opens <= now
            && !self.is_draining()
            && !self.closed.load(Relaxed)
    }

    /// Returns whether a drain empties the segment or has emptied it.
    fn is_draining(&self) -> bool {
        self.drain.load(Relaxed) != SegmentStatus::Ok as u8
    }

    /// Sets the status of a drain: OK, DRAINING or DRAINED.
    pub(crate) fn set_drain(&self, status: SegmentStatus) {
        self.drain.store(status as u8, Relaxed);
    }

    /// Returns whether the owner may be unreachable. Its next heartbeat clears the flag.
    pub(crate) fn is_reported_unreachable(&self) -> bool {
        self.reported_unreachable.load(Relaxed)
    }

    /// Records whether the owner may be unreachable.
    pub(crate) fn set_reported_unreachable(&self, reported_unreachable: bool) {
        self.reported_unreachable.store(reported_unreachable, Relaxed);
    }

    /// Returns whether the mount has not been retired.
    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(SeqCst)
    }

    /// Returns whether the objects of this mount can be read: the mount has not been retired, and
    /// heartbeats of the owner are not overdue.
    pub(crate) fn is_readable(&self) -> bool {
        self.is_alive() && !self.suspicion.is_suspected()
    }

    /// Marks the mount as one whose client expired. Call it before [`retire`](Self::retire).
    pub(crate) fn expire(&self) {
        self.expired.store(true, SeqCst);
    }

    /// Marks the mount as one that the next process of its client mounts again. Call it before
    /// [`retire`](Self::retire).
    pub(crate) fn hand_over(&self) {
        self.handed_over.store(true, SeqCst);
    }

    /// Returns whether the mount was retired so that the next process of its client mounts it
    /// again.
    pub(crate) fn is_handed_over(&self) -> bool {
        !self.is_alive() && self.handed_over.load(SeqCst)
    }

    /// Returns whether the mount was retired because its client expired.
    pub(crate) fn has_expired(&self) -> bool {
        !self.is_alive() && self.expired.load(SeqCst)
    }

    /// Ends the mount: its objects cannot be read any more.
    pub(crate) fn retire(&self) {
        self.alive.store(false, SeqCst);
    }

    /// Begins a graceful unmount that ends at `at`.
    pub(crate) fn set_unmount_at(&self, at: Moment) {
        self.leaves.store(at.0.max(1), Relaxed);
    }

    /// Returns the end of a graceful unmount that has begun.
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

    /// Returns whether both mounts denote the same memory. Addresses are compared only between
    /// segments of one endpoint.
    pub(crate) fn overlaps(&self, other: &Segment) -> bool {
        self.info.endpoint == other.endpoint
            && self.info.base < other.base.saturating_add(other.size)
            && other.base < self.info.base.saturating_add(self.info.size)
    }
}

/// Space of one replica. It is not `Clone`: it must be returned exactly once.
pub(crate) struct Allocation<A> {
    pub(crate) id: ReplicaId,
    pub(crate) segment: Arc<MountedSegment<A>>,
    pub(crate) extent: Extent,
}

impl<A: SegmentAllocator> Allocation<A> {
    pub(crate) fn quarantine(self, until: Moment, now: Moment) {
        self.segment.quarantine(self.extent, until, now);
    }

    /// Returns the number of the replica, its address and its segment.
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
                locality: segment.locality.clone(),
            }),
            status,
        }
    }
}
