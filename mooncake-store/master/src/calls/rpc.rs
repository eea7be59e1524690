//! RPC interfaces of the master.
//!
//! With tenants on, keys get the prefix of the tenant of the caller here.

use std::time::Duration;

use mooncake_core::alloc::{Extent, SegmentAllocator};
use mooncake_core::error::{Error, ErrorCode, Result};
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ClientId, ObjectKey, SegmentId, Uuid};
use mooncake_core::replica::{Replica, ReplicaList, ReplicaType, ReplicateConfig, Segment, SegmentStatus};

use mooncake_protocol::api::{Caller, CopyToken, EndItem, PingReply, PutItem, WriteMode};
use mooncake_protocol::inventory::InventoryCalls;
use mooncake_protocol::pack;
use mooncake_protocol::service::{ObjectCalls, OwnerCalls, SegmentCalls, TaskCalls};
use mooncake_protocol::tiers::TierCalls;
use mooncake_protocol::wire::{
    CopyPlan, DiskWork, DrainProgress, InventoryPage, MovePlan, OffloadItem, PromotionPlan, StorageConfig,
    StoredAt, StoredReplica, Task, TaskInfo, TaskKind, TaskReport, Welcome,
};

use super::master::Master;
use super::put::Put;
use crate::model::value::Writer;

impl<A: SegmentAllocator, E: MergeableOrder> ObjectCalls for Master<A, E> {
    fn exist(&self, tenant: &str, key: &[u8]) -> Result<bool> {
        Ok(self.scoped_if_known(tenant, key).is_ok_and(|key| self.exists(&key)))
    }

    fn locate(&self, tenant: &str, key: &[u8]) -> Result<ReplicaList> {
        self.locate(&self.scoped_if_known(tenant, key)?)
    }

    fn locate_to(&self, tenant: &str, key: &[u8], out: &mut pack::Writer<'_>) -> Result<()> {
        self.locate_to(&self.scoped_if_known(tenant, key)?, out)
    }

    fn locate_matching(&self, tenant: &str, pattern: &str) -> Result<Vec<(ObjectKey, Vec<Replica>)>> {
        self.locate_matching_of(tenant, pattern)
    }

    fn put_start(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        item: PutItem<'_>,
        config: &ReplicateConfig,
        group: &str,
    ) -> Result<Vec<Replica>> {
        let (key, group) = (self.scoped(caller.tenant, item.key)?, self.scoped_group(caller.tenant, group));
        let put = Put { writer: caller.into(), mode, key: &key, len: item.len, config, group: &group };
        self.put_start(&put).map_err(|error| self.refusal(caller, item.len, error))
    }

    fn put_start_to(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        item: PutItem<'_>,
        config: &ReplicateConfig,
        group: &str,
        out: &mut pack::Writer<'_>,
    ) -> Result<()> {
        let (key, group) = (self.scoped(caller.tenant, item.key)?, self.scoped_group(caller.tenant, group));
        let put = Put { writer: caller.into(), mode, key: &key, len: item.len, config, group: &group };
        self.put_start_to(&put, out).map_err(|error| self.refusal(caller, item.len, error))
    }

    fn put_end(
        &self,
        caller: Caller<'_>,
        _: WriteMode,
        item: EndItem<'_>,
        replicas: ReplicaType,
    ) -> Result<()> {
        self.put_end(
            Writer::from(caller),
            &self.scoped_if_known(caller.tenant, item.key)?,
            item.checksum,
            replicas,
        )
    }

    fn put_revoke(&self, caller: Caller<'_>, _: WriteMode, key: &[u8], replicas: ReplicaType) -> Result<()> {
        self.put_revoke(Writer::from(caller), &self.scoped_if_known(caller.tenant, key)?, replicas)
    }

    fn remove(&self, tenant: &str, key: &[u8], force: bool) -> Result<()> {
        self.remove(&self.scoped_if_known(tenant, key)?, force)
    }

    fn remove_matching(&self, tenant: &str, pattern: &str, force: bool) -> Result<u64> {
        self.remove_matching_of(tenant, pattern, force)
    }

    fn remove_all(&self, tenant: &str, force: bool) -> Result<u64> {
        Ok(self.remove_all_of(tenant, force))
    }
}

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Returns the error that a caller of a refused put receives.
    fn refusal(&self, caller: Caller<'_>, len: u64, error: Error) -> Error {
        // Mooncake C++ does not number writes, so it does not receive this error: no client need
        // wait for free space that cannot exist.
        if caller.attempt != 0
            && error.code() == ErrorCode::NoAvailableHandle
            && self.space().is_too_large(len)
        {
            return Error::new(ErrorCode::BufferOverflow, "no segment is large enough").with_source(error);
        }
        error
    }
}

impl<A: SegmentAllocator, E: MergeableOrder> SegmentCalls for Master<A, E> {
    fn storage_config(&self) -> Result<StorageConfig> {
        Ok(self.storage())
    }

    fn ping(&self, client: ClientId) -> Result<PingReply> {
        Ok(self.ping(client))
    }

    fn report_unreachable(&self, client: ClientId, endpoint: &str) -> Result<()> {
        self.doubt(client, endpoint);
        Ok(())
    }

    fn mount(&self, client: ClientId, segment: &Segment) -> Result<()> {
        self.mount(client, segment)
    }

    fn remount(&self, client: ClientId, segments: &[Segment]) -> Result<()> {
        self.remount(client, segments)
    }

    fn unmount(&self, client: ClientId, segment: SegmentId) -> Result<()> {
        self.unmount(client, segment)
    }

    fn unmount_later(&self, client: ClientId, segment: SegmentId, grace: Duration) -> Result<()> {
        self.unmount_after(client, segment, grace)
    }

    fn segment_status_by_name(&self, name: &str) -> Result<SegmentStatus> {
        self.segment_status_named(name)
    }

    fn segment_status(&self, segment: SegmentId) -> Result<SegmentStatus> {
        self.segment_status(segment)
    }
}

impl<A: SegmentAllocator, E: MergeableOrder> TaskCalls for Master<A, E> {
    fn fetch_tasks(&self, client: ClientId, limit: u64) -> Result<Vec<Task>> {
        Ok(self.fetch_tasks(client, limit))
    }

    fn create_copy(&self, tenant: &str, key: &[u8], targets: &[&str]) -> Result<Uuid> {
        self.create_copy(&self.scoped(tenant, key)?, targets)
    }

    fn create_move(&self, tenant: &str, key: &[u8], source: &str, target: &str) -> Result<Uuid> {
        self.create_move(&self.scoped(tenant, key)?, source, target)
    }

    fn task(&self, task: Uuid) -> Result<TaskInfo> {
        self.task(task)
    }

    fn complete_task(&self, client: ClientId, report: &TaskReport) -> Result<()> {
        self.complete_task(client, report)
    }

    fn copy_start(
        &self,
        caller: Caller<'_>,
        key: &[u8],
        from: &str,
        to: &[&str],
        token: CopyToken,
    ) -> Result<CopyPlan> {
        self.hot_copy_start(caller.client, &self.scoped(caller.tenant, key)?, from, to, token)
    }

    fn move_start(&self, caller: Caller<'_>, key: &[u8], from: &str, to: &str) -> Result<MovePlan> {
        self.move_start(caller.client, &self.scoped(caller.tenant, key)?, from, to)
    }

    fn replication_end(
        &self,
        caller: Caller<'_>,
        kind: TaskKind,
        key: &[u8],
        token: CopyToken,
    ) -> Result<()> {
        self.jobs.end_copy(caller.client, kind, &self.scoped_if_known(caller.tenant, key)?, token)
    }

    fn replication_revoke(
        &self,
        caller: Caller<'_>,
        kind: TaskKind,
        key: &[u8],
        token: CopyToken,
    ) -> Result<()> {
        self.jobs.revoke_copy(caller.client, kind, &self.scoped_if_known(caller.tenant, key)?, token)
    }
}

impl<A: SegmentAllocator, E: MergeableOrder> OwnerCalls for Master<A, E> {
    fn client_addresses(&self, clients: &[ClientId]) -> Result<Vec<(ClientId, Vec<String>)>> {
        Ok(self.addresses(clients))
    }

    fn clear_replicas(&self, client: ClientId, keys: &[&[u8]], segment: &str) -> Result<Vec<ObjectKey>> {
        Ok(self.clear_replicas_anywhere(keys, client, segment))
    }
}

impl<A: SegmentAllocator, E: MergeableOrder> TierCalls for Master<A, E> {
    fn find(&self, tenant: &str, key: &[u8]) -> Result<()> {
        self.find(&self.scoped_if_known(tenant, key)?)
    }

    fn mount_disk(&self, client: ClientId, enabled: bool) -> Result<()> {
        self.mount_disk(client, enabled)
    }

    fn unmount_disk(&self, client: ClientId) -> Result<()> {
        self.unmount_disk(client)
    }

    fn to_offload(&self, client: ClientId, enabled: bool) -> Result<Vec<OffloadItem>> {
        self.to_offload(client, enabled)
    }

    fn offloaded(&self, client: ClientId, items: &[OffloadItem], places: &[StoredAt]) -> Result<()> {
        self.offloaded(client, items, places)
    }

    fn must_clear_disk(&self, client: ClientId) -> Result<bool> {
        self.must_clear_disk(client)
    }

    fn disk_work(&self, client: ClientId, begin: bool, done: u64) -> Result<DiskWork> {
        self.disk_work(client, begin, done)
    }

    fn disk_capacity(&self, client: ClientId, bytes: i64) -> Result<()> {
        self.disk_capacity(client, bytes)
    }

    fn to_promote(&self, client: ClientId) -> Result<Vec<OffloadItem>> {
        self.to_promote(client)
    }

    fn promotion_start(
        &self,
        client: ClientId,
        tenant: &str,
        key: &[u8],
        len: u64,
        preferred: &[&str],
    ) -> Result<PromotionPlan> {
        let key = self.scoped_if_known(tenant, key)?;
        self.promotion_start(client, &key, len, preferred).map(|memory| PromotionPlan { memory })
    }

    fn promoted(&self, client: ClientId, tenant: &str, key: &[u8]) -> Result<()> {
        self.promoted(client, &self.scoped_if_known(tenant, key)?)
    }

    fn promotion_failed(&self, client: ClientId, tenant: &str, key: &[u8]) -> Result<()> {
        self.promotion_failed(client, &self.scoped_if_known(tenant, key)?)
    }

    fn dropped_from_disk(
        &self,
        client: ClientId,
        tenant: &str,
        key: &[u8],
        replicas: ReplicaType,
    ) -> Result<()> {
        let key = self.scoped_if_known(tenant, key)?;
        match replicas {
            ReplicaType::LocalDisk => self.dropped_from_disk(client, &key),
            ReplicaType::Disk => self.dropped_file(client, &key),
            other => self
                .find(&key)
                .and(Err(Error::invalid(format!("expected a replica type on disk. type={other:?}")))),
        }
    }
}

impl<A: SegmentAllocator, E: MergeableOrder> InventoryCalls for Master<A, E> {
    fn inventory(&self, client: ClientId, after: u64) -> Result<InventoryPage> {
        Ok(self.inventory(client, after))
    }

    fn mount_kept(&self, client: ClientId, segment: &Segment) -> Result<()> {
        self.mount_kept(client, segment)
    }

    fn keep(&self, client: ClientId, segment: SegmentId, extents: &[Extent], open: bool) -> Result<()> {
        self.keep(client, segment, extents, open)
    }

    fn announce(&self, client: ClientId, stored: &StoredReplica) -> Result<()> {
        self.announce(client, stored)
    }

    fn release_kept(&self, client: ClientId, segment: SegmentId) -> Result<()> {
        self.release_kept(client, segment)
    }

    fn exchange_promise(&self, client: ClientId, promise_ms: u64) -> Result<Welcome> {
        Ok(self.exchange_promise(client, promise_ms))
    }

    fn drain_client(&self, client: ClientId) -> Result<DrainProgress> {
        let job = self.drain_client(client)?;
        Ok(DrainProgress {
            done: job.status.is_over(),
            moved: job.succeeded,
            bytes: job.migrated_bytes,
            left: job.active + job.blocked + job.failed,
        })
    }

    fn expired(&self, client: ClientId, segment: SegmentId, after: u64) -> Result<InventoryPage> {
        Ok(self.expired(client, segment, after))
    }

    fn announce_expired(&self, client: ClientId, stored: &StoredReplica) -> Result<()> {
        self.announce_expired(client, stored)
    }
}
