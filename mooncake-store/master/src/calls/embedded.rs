//! Interfaces of the master for a client in the same process.

use std::borrow::Cow;
use std::time::Duration;

use async_trait::async_trait;
use mooncake_core::Result;
use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::SharedClock;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ClientId, ObjectKey, SegmentId, Uuid};
use mooncake_core::replica::{Replica, ReplicaList, ReplicaType, ReplicateConfig, Segment};
use mooncake_protocol::api::{
    Caller, CopyToken, DiskService, EmbeddedMaster, EndItem, InventoryService, ObjectService, PingReply,
    PutItem, SegmentService, TaskService, WriteMode,
};
use mooncake_protocol::message::*;
use mooncake_protocol::wire::{
    CopyPlan, DiskWork, MovePlan, OffloadItem, StorageConfig, StoredAt, Task, TaskInfo, TaskKind, TaskReport,
};

use super::master::Master;

/// Batches, handled as those of the RPC server.
#[async_trait]
impl<A: SegmentAllocator, E: MergeableOrder> ObjectService for Master<A, E> {
    fn fences_writes(&self) -> bool {
        true
    }

    async fn exist(&self, tenant: &str, keys: &[&[u8]]) -> Result<Vec<Result<bool>>> {
        Ok(keys.iter().map(|key| self.handle(ExistKey { key, tenant })).collect())
    }

    async fn locate(&self, tenant: &str, keys: &[&[u8]]) -> Result<Vec<Result<ReplicaList>>> {
        Ok(keys.iter().map(|key| self.handle(GetReplicaList { key, tenant })).collect())
    }

    async fn put_start(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        items: &[PutItem<'_>],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<Vec<Replica>>>> {
        Ok(self.handle(StartWrites {
            client: caller.client,
            attempt: caller.attempt,
            replace: mode == WriteMode::Upsert,
            keys: items.iter().map(|item| item.key).collect(),
            sizes: items.iter().map(|item| item.len).collect(),
            config: Cow::Borrowed(config),
            tenant: caller.tenant,
        }))
    }

    async fn put_end(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        items: &[EndItem<'_>],
        replicas: ReplicaType,
    ) -> Result<Vec<Result<()>>> {
        let Caller { client, tenant, attempt } = caller;
        let replace = mode == WriteMode::Upsert;
        Ok(self.handle(EndWrites { client, attempt, replace, items: items.into(), replicas, tenant }))
    }

    async fn put_revoke(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        keys: &[&[u8]],
        replicas: ReplicaType,
    ) -> Result<Vec<Result<()>>> {
        let Caller { client, tenant, attempt } = caller;
        let replace = mode == WriteMode::Upsert;
        Ok(self.handle(RevokeWrites { client, attempt, replace, keys: keys.into(), replicas, tenant }))
    }

    async fn remove(&self, tenant: &str, keys: &[&[u8]], force: bool) -> Result<Vec<Result<()>>> {
        Ok(keys.iter().map(|key| self.handle(Remove { key, force, tenant })).collect())
    }

    async fn remove_matching(&self, tenant: &str, pattern: &str, force: bool) -> Result<u64> {
        self.remove_matching_of(tenant, pattern, force)
    }

    async fn remove_all(&self, tenant: &str, force: bool) -> Result<u64> {
        Ok(self.remove_all_of(tenant, force))
    }
}

#[async_trait]
impl<A: SegmentAllocator, E: MergeableOrder> SegmentService for Master<A, E> {
    async fn version(&self) -> Result<String> {
        Ok(MASTER_VERSION.to_owned())
    }

    async fn ping(&self, client: ClientId) -> Result<PingReply> {
        Ok(Master::ping(self, client))
    }

    async fn report_unreachable(&self, client: ClientId, endpoint: &str) -> Result<()> {
        self.doubt(client, endpoint);
        Ok(())
    }

    async fn mount(&self, client: ClientId, segment: &Segment) -> Result<()> {
        Master::mount(self, client, segment)
    }

    async fn remount(&self, client: ClientId, segments: &[Segment]) -> Result<()> {
        Master::remount(self, client, segments)
    }

    async fn unmount(&self, client: ClientId, segment: SegmentId) -> Result<()> {
        Master::unmount(self, client, segment)
    }

    async fn unmount_after(&self, client: ClientId, segment: SegmentId, grace: Duration) -> Result<()> {
        Master::unmount_after(self, client, segment, grace)
    }
}

#[async_trait]
impl<A: SegmentAllocator, E: MergeableOrder> TaskService for Master<A, E> {
    async fn create_copy(&self, tenant: &str, key: &[u8], targets: &[&str]) -> Result<Uuid> {
        Master::create_copy(self, &self.scoped(tenant, key)?, targets)
    }

    async fn create_move(&self, tenant: &str, key: &[u8], source: &str, target: &str) -> Result<Uuid> {
        Master::create_move(self, &self.scoped(tenant, key)?, source, target)
    }

    async fn task(&self, task: Uuid) -> Result<TaskInfo> {
        Master::task(self, task)
    }

    async fn clear_replicas(
        &self,
        client: ClientId,
        keys: &[&[u8]],
        segment: &str,
    ) -> Result<Vec<ObjectKey>> {
        Ok(Master::clear_replicas(self, keys, client, segment))
    }

    async fn fetch_tasks(&self, client: ClientId, limit: u64) -> Result<Vec<Task>> {
        Ok(Master::fetch_tasks(self, client, limit))
    }

    async fn complete_task(&self, client: ClientId, report: &TaskReport) -> Result<()> {
        Master::complete_task(self, client, report)
    }

    async fn copy_start(
        &self,
        caller: Caller<'_>,
        key: &[u8],
        source: &str,
        targets: &[&str],
        token: CopyToken,
    ) -> Result<CopyPlan> {
        self.hot_copy_start(caller.client, &self.scoped(caller.tenant, key)?, source, targets, token)
    }

    async fn move_start(
        &self,
        caller: Caller<'_>,
        key: &[u8],
        source: &str,
        target: &str,
    ) -> Result<MovePlan> {
        Master::move_start(self, caller.client, &self.scoped(caller.tenant, key)?, source, target)
    }

    async fn replication_end(
        &self,
        caller: Caller<'_>,
        kind: TaskKind,
        key: &[u8],
        token: CopyToken,
    ) -> Result<()> {
        self.jobs.end_copy(caller.client, kind, &self.scoped_if_known(caller.tenant, key)?, token)
    }

    async fn replication_revoke(
        &self,
        caller: Caller<'_>,
        kind: TaskKind,
        key: &[u8],
        token: CopyToken,
    ) -> Result<()> {
        self.jobs.revoke_copy(caller.client, kind, &self.scoped_if_known(caller.tenant, key)?, token)
    }
}

/// Defaults: a client in the process of the master has no other master to announce objects to.
impl<A: SegmentAllocator, E: MergeableOrder> InventoryService for Master<A, E> {}

#[async_trait]
impl<A: SegmentAllocator, E: MergeableOrder> DiskService for Master<A, E> {
    async fn mount_disk(&self, client: ClientId, enabled: bool) -> Result<()> {
        self.mount_disk(client, enabled)
    }

    async fn unmount_disk(&self, client: ClientId) -> Result<()> {
        self.unmount_disk(client)
    }

    async fn disk_capacity(&self, client: ClientId, bytes: u64) -> Result<()> {
        self.disk_capacity(client, i64::try_from(bytes).unwrap_or(i64::MAX))
    }

    async fn to_offload(&self, client: ClientId, enabled: bool) -> Result<Vec<OffloadItem>> {
        self.to_offload(client, enabled)
    }

    async fn offloaded(&self, client: ClientId, items: &[OffloadItem], places: &[StoredAt]) -> Result<()> {
        self.offloaded(client, items, places)
    }

    async fn must_clear_disk(&self, client: ClientId) -> Result<bool> {
        self.must_clear_disk(client)
    }

    async fn disk_work(&self, client: ClientId, begin: bool, done: u64) -> Result<DiskWork> {
        self.disk_work(client, begin, done)
    }

    async fn dropped_from_disk(
        &self,
        client: ClientId,
        tenant: &str,
        keys: &[&[u8]],
    ) -> Result<Vec<Result<()>>> {
        let replicas = ReplicaType::LocalDisk;
        Ok(self.handle(BatchEvictDiskReplica { client, keys: keys.into(), tenant, replicas }))
    }

    async fn storage(&self) -> Result<StorageConfig> {
        Ok(self.storage())
    }

    async fn dropped_files(&self, client: ClientId, tenant: &str, keys: &[&[u8]]) -> Result<Vec<Result<()>>> {
        let replicas = ReplicaType::Disk;
        Ok(self.handle(BatchEvictDiskReplica { client, keys: keys.into(), tenant, replicas }))
    }

    async fn to_promote(&self, client: ClientId) -> Result<Vec<OffloadItem>> {
        self.to_promote(client)
    }

    async fn promotion_start(
        &self,
        caller: Caller<'_>,
        key: &[u8],
        len: u64,
        preferred: &[&str],
    ) -> Result<Replica> {
        let key = self.scoped_if_known(caller.tenant, key)?;
        Master::promotion_start(self, caller.client, &key, len, preferred)
    }

    async fn promotion_end(&self, caller: Caller<'_>, key: &[u8], done: bool) -> Result<()> {
        match done {
            true => self.promoted(caller.client, &self.scoped_if_known(caller.tenant, key)?),
            false => self.promotion_failed(caller.client, &self.scoped_if_known(caller.tenant, key)?),
        }
    }
}

impl<A: SegmentAllocator, E: MergeableOrder> EmbeddedMaster for Master<A, E> {
    fn clock(&self) -> &SharedClock {
        self.clock()
    }

    fn do_due_work(&self) {
        self.tick();
    }
}
