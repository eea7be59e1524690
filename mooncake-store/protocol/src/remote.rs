//! Remote master, reached over RPC.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use async_trait::async_trait;
use mooncake_core::alloc::Extent;
use mooncake_core::error::{Error, ErrorCode, Result};
use mooncake_core::ids::{ClientId, ObjectKey, SegmentId, Uuid};
use mooncake_core::replica::{Replica, ReplicaList, ReplicaType, ReplicateConfig, Segment};

use super::client::{RpcClient, RpcOptions};
use super::message::*;
use super::pack::Answer;
use super::wire::{
    CopyPlan, DiskWork, DrainProgress, InventoryPage, MovePlan, OffloadItem, StorageConfig, StoredAt,
    StoredReplica, Task, TaskInfo, TaskKind, TaskReport, Welcome,
};
use crate::api::{
    Caller, CopyToken, DiskService, EndItem, InventoryService, ObjectService, PingReply, PutItem,
    SegmentService, TaskService, WriteMode,
};

/// Client of a remote master. A batch of one travels as the single call, except for numbered
/// writes, which have only a batch call.
#[derive(Debug)]
pub struct RemoteMaster {
    rpc: RpcClient,
    /// True if the master lacks the calls that Mooncake C++ does not have.
    existing: AtomicBool,
}

impl RemoteMaster {
    /// Creates a client of the master at `host:port`. The first call opens the first connection.
    pub fn new(address: impl Into<String>, options: RpcOptions) -> Self {
        Self::over(RpcClient::new(address, options))
    }

    /// Creates a client that uses an existing RPC client.
    pub fn over(rpc: RpcClient) -> Self {
        Self { rpc, existing: AtomicBool::new(false) }
    }

    /// Returns the RPC client, for calls that [`ObjectService`] and [`SegmentService`] lack.
    pub fn rpc(&self) -> &RpcClient {
        &self.rpc
    }

    /// Makes a batch call and checks that the response has one result per item.
    async fn batch<R, T>(&self, request: R, items: usize) -> Result<Vec<Result<T>>>
    where
        R: Request<Reply = Vec<Answer<T>>> + Sync,
    {
        self.batch_as(R::FUNCTION, request, items).await
    }

    /// Makes a call like [`RemoteMaster::batch`], and counts it as function `counted`.
    async fn batch_as<R, T>(&self, counted: u32, request: R, items: usize) -> Result<Vec<Result<T>>>
    where
        R: Request<Reply = Vec<Answer<T>>> + Sync,
    {
        if items == 0 {
            return Ok(Vec::new());
        }
        let answers = self.rpc.call_as(counted, &request).await?;
        if answers.len() != items {
            let text =
                format!("invalid response: {} results for {items} items in {}", answers.len(), R::NAME);
            return Err(Error::new(ErrorCode::RpcFail, text));
        }
        Ok(answers.into_iter().map(|answer| answer.map_err(Error::from)).collect())
    }

    /// Makes a single call as a batch of one.
    async fn single<R, T>(&self, request: R) -> Result<Vec<Result<T>>>
    where
        R: Request<Reply = Answer<T>> + Sync,
    {
        Ok(vec![self.rpc.call(&request).await?.map_err(Error::from)])
    }

    /// Makes a call of a numbered write. Returns `None` if the write has no number or the master is
    /// known to lack these calls.
    ///
    /// The discovery that the master lacks them is the error `NOT_SUPPORTED`. The caller must then
    /// check whether an end or a revoke without a number is still safe.
    ///
    /// The call is counted as the corresponding call of Mooncake C++: one of `calls`, for one item
    /// or for several.
    async fn numbered<R, T>(
        &self,
        attempt: u64,
        calls: [u32; 2],
        request: R,
        items: usize,
    ) -> Option<Result<Vec<Result<T>>>>
    where
        R: Request<Reply = Vec<Answer<T>>> + Sync,
    {
        if attempt == 0 || !self.fences_writes() {
            return None;
        }
        let answer = self.batch_as(calls[usize::from(items > 1)], request, items).await;
        if answer.as_ref().is_err_and(|error| error.code() == ErrorCode::NotSupported) {
            self.existing.store(true, Relaxed);
        }
        Some(answer)
    }

    /// Makes a call and merges the error in the response with the error of the call.
    async fn plain<R, T>(&self, request: R) -> Result<T>
    where
        R: Request<Reply = Answer<T>> + Sync,
    {
        self.rpc.call(&request).await?.map_err(|code| Error::from(code).context(R::NAME))
    }
}

#[async_trait]
impl ObjectService for RemoteMaster {
    fn fences_writes(&self) -> bool {
        !self.existing.load(Relaxed)
    }

    async fn exist(&self, tenant: &str, keys: &[&[u8]]) -> Result<Vec<Result<bool>>> {
        match keys {
            [key] => self.single(ExistKey { key, tenant }).await,
            keys => self.batch(BatchExistKey { keys: keys.into(), tenant }, keys.len()).await,
        }
    }

    async fn locate(&self, tenant: &str, keys: &[&[u8]]) -> Result<Vec<Result<ReplicaList>>> {
        match keys {
            [key] => self.single(GetReplicaList { key, tenant }).await,
            keys => self.batch(BatchGetReplicaList { keys: keys.into(), tenant }, keys.len()).await,
        }
    }

    async fn put_start(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        items: &[PutItem<'_>],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<Vec<Replica>>>> {
        let Caller { client, tenant, attempt } = caller;
        let config = Cow::Borrowed(config);
        let request = StartWrites {
            client,
            attempt,
            replace: mode == WriteMode::Upsert,
            keys: items.iter().map(|item| item.key).collect(),
            sizes: items.iter().map(|item| item.len).collect(),
            config: config.clone(),
            tenant,
        };
        let calls = match mode {
            WriteMode::Put => [PutStart::FUNCTION, BatchPutStart::FUNCTION],
            WriteMode::Upsert => [UpsertStart::FUNCTION, BatchUpsertStart::FUNCTION],
        };
        match self.numbered(attempt, calls, request, items.len()).await {
            // A start needs no number to be correct.
            Some(Err(error)) if error.code() == ErrorCode::NotSupported => {}
            Some(answer) => return answer,
            None => {}
        }
        if let [PutItem { key, len: size }] = *items {
            return match mode {
                WriteMode::Put => self.single(PutStart { client, key, size, config, tenant }).await,
                WriteMode::Upsert => self.single(UpsertStart { client, key, size, config, tenant }).await,
            };
        }
        let keys = items.iter().map(|item| item.key).collect();
        let sizes = items.iter().map(|item| item.len).collect();
        match mode {
            WriteMode::Put => {
                self.batch(BatchPutStart { client, keys, sizes, config, tenant }, items.len()).await
            }
            WriteMode::Upsert => {
                self.batch(BatchUpsertStart { client, keys, sizes, config, tenant }, items.len()).await
            }
        }
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
        let request = EndWrites { client, attempt, replace, items: items.into(), replicas, tenant };
        let calls = match mode {
            WriteMode::Put => [PutEnd::FUNCTION, BatchPutEnd::FUNCTION],
            WriteMode::Upsert => [UpsertEnd::FUNCTION, BatchUpsertEnd::FUNCTION],
        };
        if let Some(answer) = self.numbered(attempt, calls, request, items.len()).await {
            return answer;
        }
        match (mode, items) {
            (WriteMode::Put, &[item]) => self.single(PutEnd { client, item, replicas, tenant }).await,
            (WriteMode::Upsert, &[item]) => self.single(UpsertEnd { client, item, replicas, tenant }).await,
            (WriteMode::Put, items) => {
                let request = BatchPutEnd { client, items: items.into(), replicas, tenant };
                self.batch(request, items.len()).await
            }
            (WriteMode::Upsert, items) if replicas == ReplicaType::All => {
                let request = BatchUpsertEnd { client, items: items.into(), tenant };
                self.batch(request, items.len()).await
            }
            // The batch call lacks a field for the type of replicas.
            (WriteMode::Upsert, items) => {
                let mut answers = Vec::with_capacity(items.len());
                for &item in items {
                    answers.extend(self.single(UpsertEnd { client, item, replicas, tenant }).await?);
                }
                Ok(answers)
            }
        }
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
        let request = RevokeWrites { client, attempt, replace, keys: keys.into(), replicas, tenant };
        let calls = match mode {
            WriteMode::Put => [PutRevoke::FUNCTION, BatchPutRevoke::FUNCTION],
            WriteMode::Upsert => [UpsertRevoke::FUNCTION, BatchUpsertRevoke::FUNCTION],
        };
        if let Some(answer) = self.numbered(attempt, calls, request, keys.len()).await {
            return answer;
        }
        match (mode, keys) {
            (WriteMode::Put, &[key]) => self.single(PutRevoke { client, key, replicas, tenant }).await,
            (WriteMode::Upsert, &[key]) => self.single(UpsertRevoke { client, key, replicas, tenant }).await,
            (WriteMode::Put, keys) => {
                let request = BatchPutRevoke { client, keys: keys.into(), replicas, tenant };
                self.batch(request, keys.len()).await
            }
            (WriteMode::Upsert, keys) if replicas == ReplicaType::All => {
                self.batch(BatchUpsertRevoke { client, keys: keys.into(), tenant }, keys.len()).await
            }
            (WriteMode::Upsert, keys) => {
                let mut answers = Vec::with_capacity(keys.len());
                for &key in keys {
                    answers.extend(self.single(UpsertRevoke { client, key, replicas, tenant }).await?);
                }
                Ok(answers)
            }
        }
    }

    async fn remove(&self, tenant: &str, keys: &[&[u8]], force: bool) -> Result<Vec<Result<()>>> {
        match keys {
            [key] => self.single(Remove { key, force, tenant }).await,
            keys => self.batch(BatchRemove { keys: keys.into(), force, tenant }, keys.len()).await,
        }
    }

    async fn remove_matching(&self, tenant: &str, pattern: &str, force: bool) -> Result<u64> {
        let removed = self.plain(RemoveByRegex { pattern, force, tenant }).await?;
        u64::try_from(removed).map_err(|_| negative_count(removed))
    }

    async fn remove_all(&self, tenant: &str, force: bool) -> Result<u64> {
        let removed = self.rpc.call(&RemoveAll { force, tenant }).await?;
        u64::try_from(removed).map_err(|_| negative_count(removed))
    }
}

/// Converts a negative count into an error. A count has no field for an error, so a negative value
/// is an error number.
fn negative_count(count: i64) -> Error {
    i32::try_from(count).map_or_else(
        |_| Error::internal(format!("invalid response: count must not be negative. count={count}")),
        |number| ErrorCode::from_number(number).into(),
    )
}

#[async_trait]
impl SegmentService for RemoteMaster {
    async fn version(&self) -> Result<String> {
        // Another master may have answered than before.
        self.existing.store(false, Relaxed);
        self.plain(ServiceReady {}).await
    }

    async fn ping(&self, client: ClientId) -> Result<PingReply> {
        self.plain(Ping { client }).await
    }

    fn leader(&self) -> Option<Arc<str>> {
        self.rpc.place().leader()
    }

    async fn another_leads(&self, than: Option<&str>) {
        self.rpc.place().another_leads(than).await;
    }

    async fn report_unreachable(&self, client: ClientId, endpoint: &str) -> Result<()> {
        match self.plain(ReportUnreachable { client, endpoint }).await {
            Err(error) if error.code() == ErrorCode::NotSupported => Ok(()),
            outcome => outcome,
        }
    }

    async fn mount(&self, client: ClientId, segment: &Segment) -> Result<()> {
        self.plain(MountSegment { segment: Cow::Borrowed(segment), client }).await
    }

    async fn remount(&self, client: ClientId, segments: &[Segment]) -> Result<()> {
        self.plain(ReMountSegment { segments: segments.into(), client }).await
    }

    async fn unmount(&self, client: ClientId, segment: SegmentId) -> Result<()> {
        self.plain(UnmountSegment { segment, client }).await
    }

    async fn unmount_after(&self, client: ClientId, segment: SegmentId, grace: Duration) -> Result<()> {
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        self.plain(GracefulUnmountSegment { segment, client, grace_ms }).await
    }
}

#[async_trait]
impl TaskService for RemoteMaster {
    async fn create_copy(&self, tenant: &str, key: &[u8], targets: &[&str]) -> Result<Uuid> {
        self.plain(CreateCopyTask { key, tenant, targets: targets.into() }).await
    }

    async fn create_move(&self, tenant: &str, key: &[u8], source: &str, target: &str) -> Result<Uuid> {
        self.plain(CreateMoveTask { key, tenant, source, target }).await
    }

    async fn task(&self, task: Uuid) -> Result<TaskInfo> {
        self.plain(QueryTask { task }).await
    }

    async fn clear_replicas(
        &self,
        client: ClientId,
        keys: &[&[u8]],
        segment: &str,
    ) -> Result<Vec<ObjectKey>> {
        let cleared =
            self.plain(BatchReplicaClear { keys: keys.into(), client, segment_name: segment }).await?;
        cleared.into_iter().map(|key| ObjectKey::new(key).map_err(Error::from)).collect()
    }

    async fn fetch_tasks(&self, client: ClientId, limit: u64) -> Result<Vec<Task>> {
        self.plain(FetchTasks { client, limit }).await
    }

    async fn complete_task(&self, client: ClientId, report: &TaskReport) -> Result<()> {
        self.plain(MarkTaskToComplete { client, report: report.clone() }).await
    }

    async fn copy_start(
        &self,
        caller: Caller<'_>,
        key: &[u8],
        source: &str,
        targets: &[&str],
        token: CopyToken,
    ) -> Result<CopyPlan> {
        let Caller { client, tenant, .. } = caller;
        let targets = targets.into();
        if token.is_nil() {
            return self.plain(CopyStart { client, key, tenant, source, targets }).await;
        }
        let CopyToken { lease, epoch } = token;
        self.plain(DynamicReplicaCopyStart { client, key, tenant, source, targets, lease, epoch }).await
    }

    async fn move_start(
        &self,
        caller: Caller<'_>,
        key: &[u8],
        source: &str,
        target: &str,
    ) -> Result<MovePlan> {
        let Caller { client, tenant, .. } = caller;
        self.plain(MoveStart { client, key, tenant, source, target }).await
    }

    async fn replication_end(
        &self,
        caller: Caller<'_>,
        kind: TaskKind,
        key: &[u8],
        token: CopyToken,
    ) -> Result<()> {
        let (Caller { client, tenant, .. }, CopyToken { lease, epoch }) = (caller, token);
        match kind {
            TaskKind::Copy if token.is_nil() => self.plain(CopyEnd { client, key, tenant }).await,
            TaskKind::Copy => self.plain(DynamicReplicaCopyEnd { client, key, tenant, lease, epoch }).await,
            TaskKind::Move => self.plain(MoveEnd { client, key, tenant }).await,
        }
    }

    async fn replication_revoke(
        &self,
        caller: Caller<'_>,
        kind: TaskKind,
        key: &[u8],
        token: CopyToken,
    ) -> Result<()> {
        let (Caller { client, tenant, .. }, CopyToken { lease, epoch }) = (caller, token);
        match kind {
            TaskKind::Copy if token.is_nil() => self.plain(CopyRevoke { client, key, tenant }).await,
            TaskKind::Copy => {
                self.plain(DynamicReplicaCopyRevoke { client, key, tenant, lease, epoch }).await
            }
            TaskKind::Move => self.plain(MoveRevoke { client, key, tenant }).await,
        }
    }
}

#[async_trait]
impl InventoryService for RemoteMaster {
    async fn inventory(&self, client: ClientId, after: u64) -> Result<InventoryPage> {
        self.plain(FetchInventory { client, after }).await
    }

    async fn mount_kept(&self, client: ClientId, segment: &Segment) -> Result<()> {
        self.plain(MountKeptSegment { segment: Cow::Borrowed(segment), client }).await
    }

    async fn keep(&self, client: ClientId, segment: SegmentId, extents: &[Extent], open: bool) -> Result<()> {
        let offsets = extents.iter().map(|extent| extent.offset).collect();
        let lengths = extents.iter().map(|extent| extent.len).collect();
        self.plain(KeepExtents { client, segment, offsets, lengths, open }).await
    }

    async fn announce(&self, client: ClientId, stored: &[StoredReplica]) -> Result<Vec<Result<()>>> {
        self.batch(AnnounceReplicas { client, stored: stored.into() }, stored.len()).await
    }

    async fn release_kept(&self, client: ClientId, segment: SegmentId) -> Result<()> {
        self.plain(ReleaseKept { client, segment }).await
    }

    async fn exchange_promise(&self, client: ClientId, promise: Duration) -> Result<Welcome> {
        let promise_ms = u64::try_from(promise.as_millis()).unwrap_or(u64::MAX);
        self.plain(ExchangePromise { client, promise_ms }).await
    }

    async fn drain_client(&self, client: ClientId) -> Result<DrainProgress> {
        self.plain(DrainClient { client }).await
    }

    async fn expired(&self, client: ClientId, segment: SegmentId, after: u64) -> Result<InventoryPage> {
        self.plain(FetchExpired { client, segment, after }).await
    }

    async fn announce_expired(&self, client: ClientId, stored: &[StoredReplica]) -> Result<Vec<Result<()>>> {
        self.batch(AnnounceExpired { client, stored: stored.into() }, stored.len()).await
    }
}

#[async_trait]
impl DiskService for RemoteMaster {
    async fn mount_disk(&self, client: ClientId, enabled: bool) -> Result<()> {
        self.plain(MountLocalDiskSegment { client, enabled }).await
    }

    async fn unmount_disk(&self, client: ClientId) -> Result<()> {
        self.plain(UnmountLocalDiskSegment { client }).await
    }

    async fn disk_capacity(&self, client: ClientId, bytes: u64) -> Result<()> {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.plain(ReportSsdCapacity { client, bytes }).await
    }

    async fn to_offload(&self, client: ClientId, enabled: bool) -> Result<Vec<OffloadItem>> {
        self.plain(OffloadObjectHeartbeat { client, enabled }).await
    }

    async fn offloaded(&self, client: ClientId, items: &[OffloadItem], places: &[StoredAt]) -> Result<()> {
        self.plain(NotifyOffloadSuccess { client, offloaded: items.into(), places: places.into() }).await
    }

    async fn must_clear_disk(&self, client: ClientId) -> Result<bool> {
        self.plain(PollRemoveAll { client }).await
    }

    async fn disk_work(&self, client: ClientId, begin: bool, done: u64) -> Result<DiskWork> {
        self.plain(FetchDiskWork { client, begin, done }).await
    }

    async fn dropped_from_disk(
        &self,
        client: ClientId,
        tenant: &str,
        keys: &[&[u8]],
    ) -> Result<Vec<Result<()>>> {
        let replicas = ReplicaType::LocalDisk;
        self.batch(BatchEvictDiskReplica { client, keys: keys.into(), tenant, replicas }, keys.len()).await
    }

    async fn storage(&self) -> Result<StorageConfig> {
        self.plain(GetStorageConfig {}).await
    }

    async fn dropped_files(&self, client: ClientId, tenant: &str, keys: &[&[u8]]) -> Result<Vec<Result<()>>> {
        let replicas = ReplicaType::Disk;
        self.batch(BatchEvictDiskReplica { client, keys: keys.into(), tenant, replicas }, keys.len()).await
    }

    async fn to_promote(&self, client: ClientId) -> Result<Vec<OffloadItem>> {
        self.plain(PromotionObjectHeartbeat { client }).await
    }

    async fn promotion_start(
        &self,
        caller: Caller<'_>,
        key: &[u8],
        len: u64,
        preferred: &[&str],
    ) -> Result<Replica> {
        let Caller { client, tenant, .. } = caller;
        let start = PromotionAllocStart { client, key, tenant, size: len, preferred: preferred.into() };
        Ok(self.plain(start).await?.memory)
    }

    async fn promotion_end(&self, caller: Caller<'_>, key: &[u8], done: bool) -> Result<()> {
        let Caller { client, tenant, .. } = caller;
        match done {
            true => self.plain(NotifyPromotionSuccess { client, key, tenant }).await,
            false => self.plain(NotifyPromotionFailure { client, key, tenant }).await,
        }
    }
}
