//! Segments: memory of this client that the master may place objects in.

use mooncake_core::ids::SegmentId;
use mooncake_core::memory::{AddressHole, HostMemory};
use mooncake_core::replica::Segment;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::{Region, Slice, Transport};
use std::sync::Arc;

/// Memory of this client that the master may place objects in.
#[derive(Debug)]
pub(crate) struct Mounted<T: Transport> {
    pub(crate) segment: Segment,
    // The region is dropped when the segment is unmounted. From then on the transport refuses
    // access to the memory.
    pub(crate) region: Region<T>,
    /// The memory under the region, when this client allocated it.
    pub(crate) own: Option<Arc<HostMemory>>,
    /// True if no master before the present one knew the segment.
    pub(crate) new: bool,
    /// True if the present master has confirmed the segment.
    pub(crate) confirmed: bool,
    /// True if the segment holds objects of an earlier master that are to be announced.
    pub(crate) has_retained: bool,
    /// True if the segment is unmounted at the end of its grace period and is no longer offered.
    pub(crate) leaving: bool,
}

/// Lock of the list of segments. Each part of a change holds a reference, so that a part that
/// outlives a dropped call keeps the lock.
pub(crate) type Changing = Arc<tokio::sync::OwnedMutexGuard<()>>;

/// A segment that moves from one address range to another.
#[derive(Clone, Debug)]
pub(crate) struct Moving {
    pub(crate) segment: Segment,
    /// Position in the list of segments.
    pub(crate) at: usize,
    pub(crate) memory: Arc<HostMemory>,
    /// True if the segment keeps its objects.
    pub(crate) has_retained: bool,
}

impl<T: Transport> Mounted<T> {
    /// Creates a segment that no master knows, without objects.
    pub(crate) fn new(segment: Segment, region: Region<T>, own: Option<Arc<HostMemory>>) -> Self {
        Self { segment, region, own, new: true, confirmed: false, has_retained: false, leaving: false }
    }

    /// Returns the identifier of the segment.
    pub(crate) fn id(&self) -> SegmentId {
        self.segment.id
    }

    /// Returns the bytes at `address` if they lie in this segment.
    pub(crate) fn slice(&self, address: u64, len: u64) -> Option<Slice<T>> {
        let start = self.holds(address, len).then(|| address - self.region.addr())?;
        let range = usize::try_from(start).ok()?..usize::try_from(start + len).ok()?;
        self.region.slice(range).ok()
    }

    /// Returns whether the memory outlives the process.
    pub(crate) fn is_lasting(&self) -> bool {
        self.own.as_ref().is_some_and(|memory| memory.is_lasting())
    }

    /// Returns whether the bytes at `address` lie in this segment.
    pub(crate) fn holds(&self, address: u64, len: u64) -> bool {
        self.region.span().contains(address, len)
    }
}

/// Deregisters a segment on a blocking thread, because deregistration waits for the transfers of
/// other clients that are in progress. Frees memory that this client allocated, and returns its
/// addresses, so that the caller may keep them reserved.
pub(crate) async fn drop_region<T: Transport>(mounted: Option<Mounted<T>>) -> Result<Option<AddressHole>> {
    let Some(Mounted { region, own, .. }) = mounted else { return Ok(None) };
    tokio::task::spawn_blocking(move || {
        drop(region);
        // Memory that another part of this process uses is freed with the last slice.
        Arc::try_unwrap(own?).ok()?.into_hole().ok()
    })
    .await
    .map_err(|e| Error::new(ErrorCode::InternalError, format!("deregistering failed: {e}")))
}
