//! Drain jobs.

use mooncake_core::Result;
use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::ids::{ClientId, Uuid};

use super::master::Master;
use crate::model::drain::{DrainInfo, DrainRequest};

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// Begins to empty segments: nothing is placed in them from now on, and what is there is moved away. The rest is done by
    /// [`Master::tick`] and the owners of the segments.
    ///
    /// An object that somebody reads is moved like any other: what its readers were promised stays until their leases are over.
    ///
    /// # Errors
    /// `INVALID_PARAMS` (no segment, one twice, a source that is a target too, no concurrency); `SEGMENT_NOT_FOUND`;
    /// `UNAVAILABLE_IN_CURRENT_STATUS` (a segment, source or target, is in another state than OK).
    pub fn drain_start(&self, request: &DrainRequest<'_>) -> Result<Uuid> {
        self.jobs.drain_start(request)
    }

    /// Moves the only replicas of objects away from a client that is about to leave, as far as other members have room. The first call begins,
    /// each call returns how far the move is. Nothing is placed in the segments of the client from the first call on.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` for a client without a segment.
    pub fn drain_client(&self, client: ClientId) -> Result<DrainInfo> {
        self.jobs.drain_client(client)
    }

    /// Where a drain job stands.
    ///
    /// # Errors
    /// `JOB_NOT_FOUND`; of those that are over, the latest thousand are known.
    pub fn drain(&self, id: Uuid) -> Result<DrainInfo> {
        self.jobs.drains.info(id)
    }

    /// Ends a drain job. Its segments take objects again; what was moved stays where it is.
    ///
    /// # Errors
    /// `JOB_NOT_FOUND`; `UNAVAILABLE_IN_CURRENT_STATUS` when it is over, or while moves are under way. The job then begins no
    /// new ones for ten seconds, so that trying again soon succeeds.
    pub fn drain_cancel(&self, id: Uuid) -> Result<()> {
        self.jobs.drain_cancel(id)
    }
}
