//! Handlers of calls about tiers below memory: clients' disks and NVMe-oF targets.

use mooncake_core::error::{Error, ErrorCode, Result};
use mooncake_core::ids::{ClientId, SegmentId};
use mooncake_core::replica::ReplicaType;

use super::dispatch::{Call, Outcome, each};
use super::message::*;
use super::wire::{DiskWork, NofOwner, NofSegment, OffloadItem, PromotionPlan, StoredAt};

/// Calls about tiers below memory. The defaults are the responses of Mooncake C++ with these
/// features off.
pub trait TierCalls: Send + Sync + 'static {
    /// Checks that an object exists, readable or not.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`.
    fn find(&self, tenant: &str, key: &[u8]) -> Result<()>;

    /// Mounts the disk of a client.
    ///
    /// # Errors
    /// `UNABLE_OFFLOAD`.
    fn mount_disk(&self, _client: ClientId, _enabled: bool) -> Result<()> {
        Err(no_disks())
    }

    /// Unmounts the disk of a client.
    fn unmount_disk(&self, _client: ClientId) -> Result<()> {
        Err(no_disks())
    }

    /// Hands out the objects that a client shall write to its disk.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` if the client has no disk.
    fn to_offload(&self, _client: ClientId, _enabled: bool) -> Result<Vec<OffloadItem>> {
        Err(not_offered())
    }

    /// Records objects as written, each with its location on the disk.
    fn offloaded(&self, _client: ClientId, items: &[OffloadItem], places: &[StoredAt]) -> Result<()> {
        if items.len() == places.len() {
            Ok(())
        } else {
            Err(Error::invalid(format!(
                "cannot record written objects: {} locations for {} objects",
                places.len(),
                items.len()
            )))
        }
    }

    /// Returns whether a client shall empty its disk.
    fn must_clear_disk(&self, _client: ClientId) -> Result<bool> {
        Err(not_offered())
    }

    /// Hands out the work for the owner of a disk.
    fn disk_work(&self, _client: ClientId, _begin: bool, _done: u64) -> Result<DiskWork> {
        Err(not_offered())
    }

    /// Records the capacity of a client's disk in bytes.
    fn disk_capacity(&self, _client: ClientId, bytes: i64) -> Result<()> {
        if bytes < 0 {
            return Err(Error::invalid(format!(
                "invalid disk capacity: must not be negative. bytes={bytes}"
            )));
        }
        Err(not_offered())
    }

    /// Hands out the objects that a client shall read back into memory.
    fn to_promote(&self, _client: ClientId) -> Result<Vec<OffloadItem>> {
        Err(not_offered())
    }

    /// Grants space for an object that returns to memory.
    fn promotion_start(
        &self,
        _client: ClientId,
        tenant: &str,
        key: &[u8],
        _len: u64,
        _preferred: &[&str],
    ) -> Result<PromotionPlan> {
        self.find(tenant, key)?;
        Err(nothing_promoted())
    }

    /// Completes a promotion.
    fn promoted(&self, _client: ClientId, tenant: &str, key: &[u8]) -> Result<()> {
        self.find(tenant, key)?;
        Err(nothing_promoted())
    }

    /// Cancels a promotion.
    fn promotion_failed(&self, _client: ClientId, tenant: &str, key: &[u8]) -> Result<()> {
        self.find(tenant, key)
    }

    /// Records that a client dropped an object from a disk.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `INVALID_PARAMS` for a type of replica that is not on a disk.
    fn dropped_from_disk(
        &self,
        _client: ClientId,
        tenant: &str,
        key: &[u8],
        replicas: ReplicaType,
    ) -> Result<()> {
        self.find(tenant, key)?;
        match replicas {
            ReplicaType::Disk | ReplicaType::LocalDisk => Ok(()),
            other => Err(Error::invalid(format!(
                "invalid replica type: expected Disk or LocalDisk. type={other:?}"
            ))),
        }
    }

    /// Mounts NVMe-oF targets of a client, again after a restart.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE`.
    fn mount_nof(&self, _client: ClientId, _segments: &[NofSegment]) -> Result<()> {
        Err(no_nof())
    }

    /// Unmounts an NVMe-oF target.
    fn unmount_nof(&self, _client: ClientId, _segment: SegmentId) -> Result<()> {
        Err(no_nof())
    }

    /// Returns all NVMe-oF targets.
    fn nof_segments(&self) -> Result<Vec<NofSegment>> {
        Ok(Vec::new())
    }

    /// Returns the NVMe-oF targets with a name.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`.
    fn nof_named(&self, name: &str) -> Result<Vec<NofOwner>> {
        Err(Error::new(ErrorCode::SegmentNotFound, format!("NVMe-oF target not found. name={name}")))
    }
}

fn no_disks() -> Error {
    Error::new(ErrorCode::UnableOffload, "this master does not offload objects to disks of clients")
}

fn not_offered() -> Error {
    Error::new(ErrorCode::SegmentNotFound, "client has no mounted disk segment")
}

fn nothing_promoted() -> Error {
    Error::new(ErrorCode::ReplicaIsNotReady, "no promotion from disk is in progress for this object")
}

fn no_nof() -> Error {
    Error::new(ErrorCode::UnavailableInCurrentMode, "this master does not support NVMe-oF targets")
}

pub(super) fn tier_calls<M: TierCalls>(master: &M, function: u32, call: &mut Call<'_>) -> Option<Outcome> {
    Some(match function {
        MountLocalDiskSegment::FUNCTION => {
            call.answer(|r: MountLocalDiskSegment| master.mount_disk(r.client, r.enabled))
        }
        UnmountLocalDiskSegment::FUNCTION => {
            call.answer(|r: UnmountLocalDiskSegment| master.unmount_disk(r.client))
        }
        OffloadObjectHeartbeat::FUNCTION => {
            call.answer(|r: OffloadObjectHeartbeat| master.to_offload(r.client, r.enabled))
        }
        NotifyOffloadSuccess::FUNCTION => {
            call.answer(|r: NotifyOffloadSuccess<'_>| master.offloaded(r.client, &r.offloaded, &r.places))
        }
        PollRemoveAll::FUNCTION => call.answer(|r: PollRemoveAll| master.must_clear_disk(r.client)),
        ReportSsdCapacity::FUNCTION => {
            call.answer(|r: ReportSsdCapacity| master.disk_capacity(r.client, r.bytes))
        }
        PromotionObjectHeartbeat::FUNCTION => {
            call.answer(|r: PromotionObjectHeartbeat| master.to_promote(r.client))
        }
        PromotionAllocStart::FUNCTION => call.answer(|r: PromotionAllocStart<'_>| {
            master.promotion_start(r.client, r.tenant, r.key, r.size, &r.preferred)
        }),
        NotifyPromotionSuccess::FUNCTION => {
            call.answer(|r: NotifyPromotionSuccess<'_>| master.promoted(r.client, r.tenant, r.key))
        }
        NotifyPromotionFailure::FUNCTION => {
            call.answer(|r: NotifyPromotionFailure<'_>| master.promotion_failed(r.client, r.tenant, r.key))
        }
        EvictDiskReplica::FUNCTION => call.answer(|r: EvictDiskReplica<'_>| {
            master.dropped_from_disk(r.client, r.tenant, r.key, r.replicas)
        }),
        FetchDiskWork::FUNCTION => {
            call.answer(|r: FetchDiskWork| master.disk_work(r.client, r.begin, r.done))
        }
        BatchEvictDiskReplica::FUNCTION => call.answer(|r: BatchEvictDiskReplica<'_>| {
            each(&r.keys, |key| master.dropped_from_disk(r.client, r.tenant, key, r.replicas))
        }),
        MountNoFSegment::FUNCTION => call.answer(|r: MountNoFSegment<'_>| {
            master.mount_nof(r.client, std::slice::from_ref(&*r.nof_segment))
        }),
        ReMountNoFSegment::FUNCTION => {
            call.answer(|r: ReMountNoFSegment<'_>| master.mount_nof(r.client, &r.nof_segments))
        }
        UnmountNoFSegment::FUNCTION => {
            call.answer(|r: UnmountNoFSegment| master.unmount_nof(r.client, r.segment))
        }
        GetAllNoFSegments::FUNCTION => call.answer(|_: GetAllNoFSegments| master.nof_segments()),
        GetNoFSegmentsByName::FUNCTION => {
            call.answer(|r: GetNoFSegmentsByName<'_>| master.nof_named(r.segment_name))
        }
        _ => return None,
    })
}
