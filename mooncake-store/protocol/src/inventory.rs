//! The master's side of the calls by which objects outlive it.

use mooncake_core::alloc::Extent;
use mooncake_core::error::{Error, ErrorCode, Result};
use mooncake_core::ids::{ClientId, SegmentId};
use mooncake_core::replica::Segment;

use super::message::*;
use super::service::{Call, MasterCalls, Outcome};
use super::wire::{InventoryPage, StoredReplica, Welcome};

/// What a master tells owners of segments of the objects there, and is told by them. A master that does without keeps the defaults.
pub trait InventoryCalls: Send + Sync + 'static {
    /// What came to and went from the client's segments.
    fn inventory(&self, _client: ClientId, _after: u64) -> Result<InventoryPage> {
        Err(no_inventory())
    }

    /// Offers memory that objects lie in.
    fn mount_kept(&self, _client: ClientId, _segment: &Segment) -> Result<()> {
        Err(no_inventory())
    }

    /// Keeps the space of objects that are going to be announced.
    fn keep(&self, _client: ClientId, _segment: SegmentId, _extents: &[Extent], _open: bool) -> Result<()> {
        Err(no_inventory())
    }

    /// An object whose space was kept is what it was.
    fn announce(&self, _client: ClientId, _stored: &StoredReplica) -> Result<()> {
        Err(no_inventory())
    }

    /// Gives back what space is still kept.
    fn release_kept(&self, _client: ClientId, _segment: SegmentId) -> Result<()> {
        Err(no_inventory())
    }

    /// Takes note of the longest promise of earlier masters. Returns the longest promise of this one, and when to announce.
    fn exchange_promise(&self, _client: ClientId, _promise_ms: u64) -> Result<Welcome> {
        Err(no_inventory())
    }

    /// Replicas of a segment whose client expired.
    fn expired(&self, _client: ClientId, _segment: SegmentId, _after: u64) -> Result<InventoryPage> {
        Err(no_inventory())
    }

    /// Serves a replica of an expired client again.
    fn announce_expired(&self, _client: ClientId, _stored: &StoredReplica) -> Result<()> {
        Err(no_inventory())
    }
}

fn no_inventory() -> Error {
    Error::new(ErrorCode::NotSupported, "this master keeps no inventories")
}

pub(super) fn inventory_calls<M: MasterCalls>(
    master: &M,
    function: u32,
    call: &mut Call<'_>,
) -> Option<Outcome> {
    Some(match function {
        FetchInventory::FUNCTION => call.answer(|r: FetchInventory| master.inventory(r.client, r.after)),
        MountKeptSegment::FUNCTION => {
            call.answer(|r: MountKeptSegment<'_>| master.mount_kept(r.client, &r.segment))
        }
        KeepExtents::FUNCTION => call.answer(|r: KeepExtents<'_>| {
            if r.offsets.len() != r.lengths.len() {
                return Err(Error::invalid(format!(
                    "{} lengths for {} places",
                    r.lengths.len(),
                    r.offsets.len()
                )));
            }
            let extents = r.offsets.iter().zip(r.lengths.iter());
            let extents: Vec<_> = extents.map(|(&offset, &len)| Extent { offset, len }).collect();
            master.keep(r.client, r.segment, &extents, r.open)
        }),
        AnnounceReplicas::FUNCTION => call.answer(|r: AnnounceReplicas<'_>| {
            r.stored.iter().map(|stored| master.announce(r.client, stored)).collect::<Vec<_>>()
        }),
        ReleaseKept::FUNCTION => call.answer(|r: ReleaseKept| master.release_kept(r.client, r.segment)),
        ExchangePromise::FUNCTION => {
            call.answer(|r: ExchangePromise| master.exchange_promise(r.client, r.promise_ms))
        }
        FetchExpired::FUNCTION => call.answer(|r: FetchExpired| master.expired(r.client, r.segment, r.after)),
        AnnounceExpired::FUNCTION => call.answer(|r: AnnounceExpired<'_>| {
            r.stored.iter().map(|stored| master.announce_expired(r.client, stored)).collect::<Vec<_>>()
        }),
        _ => return None,
    })
}
