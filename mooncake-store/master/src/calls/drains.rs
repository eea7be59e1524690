//! Drain jobs.

use mooncake_core::Result;
use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ClientId, Uuid};

use super::master::Master;
use crate::model::drain::{DrainInfo, DrainRequest};

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Begins to empty segments. Nothing is placed in them from now on, and their objects are moved
    /// away. [`Master::tick`] and the clients of the segments do the work.
    ///
    /// Objects with leases are moved as well: their old replicas stay in quarantine until the
    /// leases end.
    ///
    /// # Errors
    /// `INVALID_PARAMS` (no segment, one twice, a source that is a target too, no concurrency);
    /// `SEGMENT_NOT_FOUND`; `UNAVAILABLE_IN_CURRENT_STATUS` (a source or target has another status
    /// than OK).
    pub fn drain_start(&self, request: &DrainRequest<'_>) -> Result<Uuid> {
        self.jobs.drain_start(request)
    }

    /// Moves the only replicas of objects away from a client that is about to leave, as far as
    /// other clients have free space. The first call begins, and each call returns the progress.
    /// Nothing is placed in the segments of the client from the first call on.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` for a client without a segment.
    pub fn drain_client(&self, client: ClientId) -> Result<DrainInfo> {
        self.jobs.drain_client(client)
    }

    /// Returns the state of a drain job.
    ///
    /// # Errors
    /// `JOB_NOT_FOUND`. Of the jobs that have ended, the latest thousand are known.
    pub fn drain(&self, id: Uuid) -> Result<DrainInfo> {
        self.jobs.drains.info(id)
    }

    /// Cancels a drain job. Its segments accept objects again; replicas that were moved stay at
    /// their new positions.
    ///
    /// # Errors
    /// `JOB_NOT_FOUND`; `UNAVAILABLE_IN_CURRENT_STATUS` if the job has ended or moves are in
    /// progress. The job then begins no new moves for ten seconds, so that another attempt soon
    /// succeeds.
    pub fn drain_cancel(&self, id: Uuid) -> Result<()> {
        self.jobs.drain_cancel(id)
    }
}
