//! Handlers of the calls by which objects outlive the master.

use mooncake_core::alloc::Extent;
use mooncake_core::error::{Error, ErrorCode, Result};
use mooncake_core::ids::{ClientId, SegmentId};
use mooncake_core::replica::Segment;

use super::dispatch::{Call, Outcome};
use super::message::*;
use super::wire::{DrainProgress, InventoryPage, StoredReplica, Welcome};

/// Calls about the objects in the segments of clients. The defaults are those of a master without
/// inventories.
pub trait InventoryCalls: Send + Sync + 'static {
    /// Returns the changes in the client's segments after change number `after`.
    fn inventory(&self, _client: ClientId, _after: u64) -> Result<InventoryPage> {
        Err(no_inventory())
    }

    /// Mounts memory that holds objects.
    fn mount_kept(&self, _client: ClientId, _segment: &Segment) -> Result<()> {
        Err(no_inventory())
    }

    /// Reserves the space of objects that will be announced.
    fn keep(&self, _client: ClientId, _segment: SegmentId, _extents: &[Extent], _open: bool) -> Result<()> {
        Err(no_inventory())
    }

    /// Accepts an object whose space was reserved and whose bytes are unchanged.
    fn announce(&self, _client: ClientId, _stored: &StoredReplica) -> Result<()> {
        Err(no_inventory())
    }

    /// Releases the space that is still reserved.
    fn release_kept(&self, _client: ClientId, _segment: SegmentId) -> Result<()> {
        Err(no_inventory())
    }

    /// Records the longest promise of earlier masters. Returns the longest promise of this master
    /// and when to announce objects.
    fn exchange_promise(&self, _client: ClientId, _promise_ms: u64) -> Result<Welcome> {
        Err(no_inventory())
    }

    /// Moves objects away from a client that leaves, and returns the progress.
    fn drain_client(&self, _client: ClientId) -> Result<DrainProgress> {
        Err(no_inventory())
    }

    /// Returns the replicas of a segment whose client expired.
    fn expired(&self, _client: ClientId, _segment: SegmentId, _after: u64) -> Result<InventoryPage> {
        Err(no_inventory())
    }

    /// Serves a replica of an expired client again.
    fn announce_expired(&self, _client: ClientId, _stored: &StoredReplica) -> Result<()> {
        Err(no_inventory())
    }
}

fn no_inventory() -> Error {
    Error::new(ErrorCode::NotSupported, "this master keeps no inventory")
}

pub(super) fn inventory_calls<M: InventoryCalls>(
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
                    "cannot reserve extents: {} lengths for {} offsets",
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
        DrainClient::FUNCTION => call.answer(|r: DrainClient| master.drain_client(r.client)),
        FetchExpired::FUNCTION => call.answer(|r: FetchExpired| master.expired(r.client, r.segment, r.after)),
        AnnounceExpired::FUNCTION => call.answer(|r: AnnounceExpired<'_>| {
            r.stored.iter().map(|stored| master.announce_expired(r.client, stored)).collect::<Vec<_>>()
        }),
        _ => return None,
    })
}
