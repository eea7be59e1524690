//! Calls about tiers below memory: clients' own disks, NVMe-oF targets.

use mooncake_core::error::{Error, ErrorCode, Result};
use mooncake_core::ids::{ClientId, SegmentId};
use mooncake_core::replica::ReplicaType;

use super::message::*;
use super::service::{Call, MasterCalls, Outcome, each};
use super::wire::{DiskWork, NofOwner, NofSegment, OffloadItem, PromotionPlan, StoredAt};

/// What a master answers about tiers below memory. One without them keeps the defaults, which are what the existing master
/// answers with these features off.
pub trait TierCalls: Send + Sync + 'static {
    /// Whether there is an object of that key, readable or not. `OBJECT_NOT_FOUND`.
    fn find(&self, tenant: &str, key: &[u8]) -> Result<()>;

    /// A client offers its disk. `UNABLE_OFFLOAD`.
    fn mount_disk(&self, _client: ClientId, _enabled: bool) -> Result<()> {
        Err(no_disks())
    }

    /// It takes it back.
    fn unmount_disk(&self, _client: ClientId) -> Result<()> {
        Err(no_disks())
    }

    /// What a client is to write to its disk. `SEGMENT_NOT_FOUND` when it offered none.
    fn to_offload(&self, _client: ClientId, _enabled: bool) -> Result<Vec<OffloadItem>> {
        Err(not_offered())
    }

    /// It was written; each item with its place.
    fn offloaded(&self, _client: ClientId, items: &[OffloadItem], places: &[StoredAt]) -> Result<()> {
        if items.len() == places.len() {
            Ok(())
        } else {
            Err(Error::invalid(format!("{} places for {} objects", places.len(), items.len())))
        }
    }

    /// Whether a client is to empty its disk.
    fn must_clear_disk(&self, _client: ClientId) -> Result<bool> {
        Err(not_offered())
    }

    /// What the owner of a disk is to do there.
    fn disk_work(&self, _client: ClientId, _begin: bool, _done: u64) -> Result<DiskWork> {
        Err(not_offered())
    }

    /// How large a client's disk is, in bytes.
    fn disk_capacity(&self, _client: ClientId, bytes: i64) -> Result<()> {
        if bytes < 0 {
            return Err(Error::invalid(format!("a disk of {bytes} bytes")));
        }
        Err(not_offered())
    }

    /// What a client is to read back into memory.
    fn to_promote(&self, _client: ClientId) -> Result<Vec<OffloadItem>> {
        Err(not_offered())
    }

    /// Space for an object that comes back.
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

    /// It came back.
    fn promoted(&self, _client: ClientId, tenant: &str, key: &[u8]) -> Result<()> {
        self.find(tenant, key)?;
        Err(nothing_promoted())
    }

    /// It did not.
    fn promotion_failed(&self, _client: ClientId, tenant: &str, key: &[u8]) -> Result<()> {
        self.find(tenant, key)
    }

    /// A client dropped an object from a disk. `OBJECT_NOT_FOUND`; `INVALID_PARAMS` (a kind of replica that lies on none).
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
            other => Err(Error::invalid(format!("{other:?} is no replica on a disk"))),
        }
    }

    /// A client offers NVMe-oF targets, or offers them again. `UNAVAILABLE_IN_CURRENT_MODE`.
    fn mount_nof(&self, _client: ClientId, _segments: &[NofSegment]) -> Result<()> {
        Err(no_nof())
    }

    /// It takes one back.
    fn unmount_nof(&self, _client: ClientId, _segment: SegmentId) -> Result<()> {
        Err(no_nof())
    }

    /// Every NVMe-oF target.
    fn nof_segments(&self) -> Result<Vec<NofSegment>> {
        Ok(Vec::new())
    }

    /// The NVMe-oF targets of a name. `SEGMENT_NOT_FOUND`.
    fn nof_named(&self, name: &str) -> Result<Vec<NofOwner>> {
        Err(Error::new(ErrorCode::SegmentNotFound, format!("no NVMe-oF target {name}")))
    }
}

fn no_disks() -> Error {
    Error::new(ErrorCode::UnableOffload, "this master puts no objects on clients' disks")
}

fn not_offered() -> Error {
    Error::new(ErrorCode::SegmentNotFound, "this client has offered no disk")
}

fn nothing_promoted() -> Error {
    Error::new(ErrorCode::ReplicaIsNotReady, "nothing of it is on the way back from a disk")
}

fn no_nof() -> Error {
    Error::new(ErrorCode::UnavailableInCurrentMode, "this master knows no NVMe-oF targets")
}

pub(super) fn tier_calls<M: MasterCalls>(master: &M, function: u32, call: &mut Call<'_>) -> Option<Outcome> {
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
