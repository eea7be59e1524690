//! Segments: memory of this client that the master may place objects in.

use mooncake_core::ids::SegmentId;
use mooncake_core::memory::HostMemory;
use mooncake_core::replica::Segment;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::{Region, Slice, Transport};
use std::sync::Arc;

/// Memory of this client that the master may place objects in.
#[derive(Debug)]
pub(crate) struct Mounted<T: Transport> {
    pub(crate) segment: Segment,
    // Dropped when the segment is taken back: from then on the wire refuses whoever still comes.
    pub(crate) region: Region<T>,
    /// The memory under the region, when this client allocated it.
    pub(crate) own: Option<Arc<HostMemory>>,
    /// No master before the present one was told of it.
    pub(crate) new: bool,
    /// The present master is known to have it.
    pub(crate) confirmed: bool,
    /// It has objects of before, to be announced.
    pub(crate) kept: bool,
    /// It goes when its grace period is over; nobody is offered it any more.
    pub(crate) leaving: bool,
}

/// A segment between two places.
#[derive(Clone, Debug)]
pub(crate) struct Moving {
    pub(crate) segment: Segment,
    /// Its place in the list.
    pub(crate) at: usize,
    pub(crate) memory: Arc<HostMemory>,
    /// With its objects.
    pub(crate) kept: bool,
}

impl<T: Transport> Mounted<T> {
    /// Its number.
    pub(crate) fn id(&self) -> SegmentId {
        self.segment.id
    }

    /// These bytes, if they lie here.
    pub(crate) fn slice(&self, address: u64, len: u64) -> Option<Slice<T>> {
        let start = self.holds(address, len).then(|| address - self.region.addr())?;
        let range = usize::try_from(start).ok()?..usize::try_from(start + len).ok()?;
        self.region.slice(range).ok()
    }

    /// Whether its memory outlives the process.
    pub(crate) fn is_lasting(&self) -> bool {
        self.own.as_ref().is_some_and(|memory| memory.is_lasting())
    }

    /// Whether the bytes lie here.
    pub(crate) fn holds(&self, address: u64, len: u64) -> bool {
        self.region.span().contains(address, len)
    }
}

/// Deregistering waits for transfers of peers that are under way, so it does not belong on a task's thread.
pub(crate) async fn drop_region<T: Transport>(mounted: Option<Mounted<T>>) -> Result<()> {
    let Some(mounted) = mounted else { return Ok(()) };
    tokio::task::spawn_blocking(move || drop(mounted))
        .await
        .map_err(|e| Error::new(ErrorCode::InternalError, format!("deregistering failed: {e}")))
}
