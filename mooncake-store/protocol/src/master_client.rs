//! Client of a master, which runs in this process or is reached over RPC.
//!
//! Every call of the table is made by [`MasterClient::call`] or [`MasterClient::call_each`]. The
//! other methods choose between several calls, or convert arguments.

use std::borrow::Cow;
use std::fmt::Debug;
use std::slice::from_ref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use async_trait::async_trait;
use mooncake_core::alloc::Extent;
use mooncake_core::clock::SharedClock;
use mooncake_core::error::{Error, ErrorCode, Result};
use mooncake_core::hints::{KeepPart, PutHints};
use mooncake_core::ids::{ClientId, ObjectKey, ReplicaId, SegmentId};
use mooncake_core::replica::{Replica, ReplicaList, ReplicaType, ReplicateConfig, Segment};

use super::call::Reply;
use super::client::{RpcClient, RpcOptions};
use super::message::*;
use super::pack;
use super::service::MasterCalls;
use super::wire::{CopyPlan, ReadablePrefix, TaskKind, TimedInventoryPage};
use crate::api::{Caller, CopyToken, EndItem, PingReply, PutItem, WriteMode};

/// A master in the process of its clients.
pub trait EmbeddedMaster: MasterCalls + Debug {
    /// Returns the master's clock, which becomes that of its clients.
    fn clock(&self) -> &SharedClock;

    /// Runs the work that is due. Clients call it at short intervals while one of them lives.
    fn do_due_work(&self);
}

/// Connection to a master that the program provides itself.
#[async_trait]
pub trait MasterConnection: Debug + Send + Sync + 'static {
    /// Makes the call with this number. Takes the body of the request, and returns the body of the
    /// response.
    ///
    /// # Errors
    /// Returns an error if there is no response; `NOT_SUPPORTED` if the master lacks the call.
    async fn call(&self, function: u32, body: &[u8]) -> Result<Vec<u8>>;
}

/// A call that a master handles, in this process or elsewhere. Implemented for every call of
/// [`TABLE`] and [`ADDED`].
pub trait MasterCall: Request + Send + Sync + Sized {
    /// Handles the call in this process.
    fn handle_by(self, master: &(dyn EmbeddedMaster + 'static)) -> Outcome<Self>;
}

impl<R: Request + Send + Sync> MasterCall for R
where
    dyn EmbeddedMaster: Handle<R>,
{
    fn handle_by(self, master: &(dyn EmbeddedMaster + 'static)) -> Outcome<R> {
        <dyn EmbeddedMaster as Handle<R>>::handle(master, self)
    }
}

/// Client of a master. Clones share its connections.
///
/// Each call may be repeated if its response was lost; the outcome is the same. A batch of one
/// object travels as the single call, except for numbered writes, which have only a batch call.
#[derive(Clone, Debug)]
pub struct MasterClient {
    master: Location,
    lacks: Arc<Lacks>,
}

/// Calls that the master is known to lack.
#[derive(Debug, Default)]
struct Lacks {
    /// True if the master lacks the calls of numbered writes.
    numbered_writes: AtomicBool,
    /// True if the master lacks the call for prefixes.
    prefixes: AtomicBool,
    /// True if the master lacks the call for hints.
    hints: AtomicBool,
    /// True if the master lacks the call for located objects.
    relocation: AtomicBool,
    /// True if the master lacks the call for lifetimes in the inventory.
    lifetimes: AtomicBool,
}

/// True once this process has warned that a master ignores hints.
static WARNED_OF_HINTS: AtomicBool = AtomicBool::new(false);

#[derive(Clone, Debug)]
enum Location {
    Embedded(Arc<dyn EmbeddedMaster>),
    Remote(Arc<RpcClient>),
    Custom(Arc<dyn MasterConnection>),
}

impl MasterClient {
    /// Creates a client of the master at `host:port`. The first call opens the first connection.
    pub fn remote(address: impl Into<String>, options: RpcOptions) -> Self {
        Self::over(RpcClient::new(address, options))
    }

    /// Creates a client that uses an RPC client.
    pub fn over(rpc: RpcClient) -> Self {
        Self::at(Location::Remote(Arc::new(rpc)))
    }

    /// Creates a client of a master in this process.
    pub fn embedded(master: Arc<dyn EmbeddedMaster>) -> Self {
        Self::at(Location::Embedded(master))
    }

    /// Creates a client that uses a connection of the program.
    pub fn custom(connection: Arc<dyn MasterConnection>) -> Self {
        Self::at(Location::Custom(connection))
    }

    fn at(master: Location) -> Self {
        Self { master, lacks: Arc::default() }
    }

    /// Returns the RPC client of a remote master.
    pub fn rpc(&self) -> Option<&RpcClient> {
        match &self.master {
            Location::Remote(rpc) => Some(rpc),
            _ => None,
        }
    }

    /// Makes a call about one object or none.
    ///
    /// # Errors
    /// Returns the error of the call, or that of [`RpcClient::call`]. A master in this process
    /// refuses calls that serve to outlive it with `NOT_SUPPORTED`.
    pub async fn call<R, T>(&self, request: R) -> Result<T>
    where
        R: MasterCall,
        R::Reply: Reply<Outcome = Result<T>>,
    {
        let outcome = self.exchange(R::FUNCTION, request).await?;
        match self.master {
            Location::Embedded(_) => outcome,
            _ => outcome.map_err(|error| error.context(R::NAME)),
        }
    }

    /// Makes a call about `items` items. The response has one result for each of them, in order.
    ///
    /// # Errors
    /// Returns an error if no result is known, because no valid response arrived.
    pub async fn call_each<R, T>(&self, request: R, items: usize) -> Result<Vec<Result<T>>>
    where
        R: MasterCall,
        R::Reply: Reply<Outcome = Vec<Result<T>>>,
    {
        self.call_each_as(R::FUNCTION, request, items).await
    }

    /// Makes a call like [`MasterClient::call_each`], and counts it as function `counted`.
    async fn call_each_as<R, T>(&self, counted: u32, request: R, items: usize) -> Result<Vec<Result<T>>>
    where
        R: MasterCall,
        R::Reply: Reply<Outcome = Vec<Result<T>>>,
    {
        if items == 0 {
            return Ok(Vec::new());
        }
        let outcomes = self.exchange(counted, request).await?;
        if outcomes.len() != items {
            let text =
                format!("invalid response: {} results for {items} items in {}", outcomes.len(), R::NAME);
            return Err(Error::new(ErrorCode::RpcFail, text));
        }
        Ok(outcomes)
    }

    /// Makes a single call as a batch of one.
    async fn call_one<R, T>(&self, request: R) -> Result<Vec<Result<T>>>
    where
        R: MasterCall,
        R::Reply: Reply<Outcome = Result<T>>,
    {
        Ok(vec![self.exchange(R::FUNCTION, request).await?])
    }

    /// Makes a call. An RPC counts as a call of function `counted`.
    async fn exchange<R: MasterCall>(&self, counted: u32, request: R) -> Result<Outcome<R>> {
        match &self.master {
            Location::Embedded(_) if R::TREATMENT.remote_only => Err(Error::new(
                ErrorCode::NotSupported,
                "cannot make call: the master is embedded and ends with its clients",
            )),
            Location::Embedded(master) => Ok(request.handle_by(&**master)),
            Location::Remote(rpc) => Ok(rpc.call_as(counted, &request).await?.into_outcome()),
            Location::Custom(connection) => {
                let mut body = Vec::new();
                if R::HAS_ARGUMENTS {
                    pack::encode(&request, &mut body);
                }
                let body = connection.call(R::FUNCTION, &body).await?;
                Ok(pack::decode::<R::Reply>(&body)?.into_outcome())
            }
        }
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
        R: MasterCall,
        R::Reply: Reply<Outcome = Vec<Result<T>>>,
    {
        if attempt == 0 || !self.fences_writes() {
            return None;
        }
        let outcomes = self.call_each_as(calls[usize::from(items > 1)], request, items).await;
        if outcomes.as_ref().is_err_and(|error| error.code() == ErrorCode::NotSupported) {
            self.lacks.numbered_writes.store(true, Relaxed);
        }
        Some(outcomes)
    }

    /// Returns whether this master respects [`Caller::attempt`].
    ///
    /// If it does, a put start repeated with the same number gets the same grant, and an end or
    /// revoke affects only the write with its number. If it does not, a client must neither repeat
    /// a put start nor send an end so late that another write may use the key.
    pub fn fences_writes(&self) -> bool {
        !self.lacks.numbered_writes.load(Relaxed)
    }

    /// Returns for each key whether it can be read now. Grants a lease on those that can.
    pub async fn exist(&self, tenant: &str, keys: &[&[u8]]) -> Result<Vec<Result<bool>>> {
        match keys {
            [key] => self.call_one(ExistKey { key, tenant }).await,
            keys => self.call_each(BatchExistKey { keys: keys.into(), tenant }, keys.len()).await,
        }
    }

    /// Returns the replicas of each object and grants a lease on them.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY` for an object.
    pub async fn locate(&self, tenant: &str, keys: &[&[u8]]) -> Result<Vec<Result<ReplicaList>>> {
        match keys {
            [key] => self.call_one(GetReplicaList { key, tenant }).await,
            keys => self.call_each(BatchGetReplicaList { keys: keys.into(), tenant }, keys.len()).await,
        }
    }

    /// Returns the replicas like [`locate`](Self::locate), of objects that this client has located
    /// before. `located` is the number of a replica of each.
    ///
    /// An object whose first read is the last one can be located again under its lease. A master
    /// without hints is asked as for the first time.
    pub async fn locate_again(
        &self,
        tenant: &str,
        keys: &[&[u8]],
        located: &[ReplicaId],
    ) -> Result<Vec<Result<ReplicaList>>> {
        if !self.lacks.relocation.load(Relaxed) {
            let counted =
                if keys.len() > 1 { BatchGetReplicaList::FUNCTION } else { GetReplicaList::FUNCTION };
            let request = LocateAgain { keys: keys.into(), located: located.into(), tenant };
            match self.call_each_as(counted, request, keys.len()).await {
                Err(error) if error.code() == ErrorCode::NotSupported => {
                    self.lacks.relocation.store(true, Relaxed);
                }
                outcomes => return outcomes,
            }
        }
        self.locate(tenant, keys).await
    }

    /// Returns the number of keys from the front that can be read now. Grants a lease on each of
    /// these objects.
    ///
    /// A master without this call is asked about all keys. It grants leases on later objects, too.
    pub async fn prefix_hits(&self, tenant: &str, keys: &[&[u8]]) -> Result<usize> {
        if let Some(prefix) = self.prefix(tenant, keys, false).await? {
            return Ok(usize::try_from(prefix.count).unwrap_or(keys.len()));
        }
        let found = self.exist(tenant, keys).await?;
        Ok(found.into_iter().take_while(|found| matches!(found, Ok(true))).count())
    }

    /// Returns the replicas of the objects of the keys from the front that can be read now, and
    /// grants a lease on each, as [`prefix_hits`](Self::prefix_hits) does.
    pub async fn locate_prefix(&self, tenant: &str, keys: &[&[u8]]) -> Result<Vec<ReplicaList>> {
        match self.prefix(tenant, keys, true).await? {
            Some(prefix) => Ok(prefix.replicas),
            None => Ok(self.locate(tenant, keys).await?.into_iter().map_while(Result::ok).collect()),
        }
    }

    /// Returns the readable prefix of the keys, or `None` if the master lacks this call.
    async fn prefix(
        &self,
        tenant: &str,
        keys: &[&[u8]],
        with_replicas: bool,
    ) -> Result<Option<ReadablePrefix>> {
        if keys.is_empty() {
            return Ok(Some(ReadablePrefix::default()));
        }
        if self.lacks.prefixes.load(Relaxed) {
            return Ok(None);
        }
        match self.call(LocatePrefix { keys: keys.into(), with_replicas, tenant }).await {
            Ok(prefix) => {
                let (count, listed) = (prefix.count, prefix.replicas.len() as u64);
                if count <= keys.len() as u64 && listed == if with_replicas { count } else { 0 } {
                    return Ok(Some(prefix));
                }
                let text = format!(
                    "invalid response: {count} readable objects, {listed} lists of replicas for {} keys in {}",
                    keys.len(),
                    LocatePrefix::NAME
                );
                Err(Error::new(ErrorCode::RpcFail, text))
            }
            Err(error) if error.code() == ErrorCode::NotSupported => {
                self.lacks.prefixes.store(true, Relaxed);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Grants space for each object.
    pub async fn put_start(
        &self,
        caller: Caller<'_>,
        mode: WriteMode,
        items: &[PutItem<'_>],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<Vec<Replica>>>> {
        let Caller { client, tenant, attempt } = caller;
        let (hints, config) = (config.hints.as_deref(), Cow::Borrowed(config));
        let (keys, sizes): (Cow<'_, [&[u8]]>, Cow<'_, [u64]>) = match items {
            [item] => (from_ref(&item.key).into(), from_ref(&item.len).into()),
            items => {
                (items.iter().map(|item| item.key).collect(), items.iter().map(|item| item.len).collect())
            }
        };
        let (keys, sizes) = (Cow::Borrowed(&keys[..]), Cow::Borrowed(&sizes[..]));
        let calls = match mode {
            WriteMode::Put => [PutStart::FUNCTION, BatchPutStart::FUNCTION],
            WriteMode::Upsert => [UpsertStart::FUNCTION, BatchUpsertStart::FUNCTION],
        };
        if let Some(hints) = hints.filter(|_| !self.lacks.hints.load(Relaxed)) {
            let request = StartHintedWrites {
                client,
                attempt,
                replace: mode == WriteMode::Upsert,
                keys: keys.clone(),
                sizes: sizes.clone(),
                config: config.clone(),
                hints: Cow::Borrowed(hints),
                tenant,
            };
            match self.call_each_as(calls[usize::from(items.len() > 1)], request, items.len()).await {
                Err(error) if error.code() == ErrorCode::NotSupported => {
                    self.lacks.hints.store(true, Relaxed);
                    warn_of_hints(hints);
                }
                outcomes => return outcomes,
            }
        }
        let request = StartWrites {
            client,
            attempt,
            replace: mode == WriteMode::Upsert,
            keys: keys.clone(),
            sizes: sizes.clone(),
            config: config.clone(),
            tenant,
        };
        match self.numbered(attempt, calls, request, items.len()).await {
            // A start needs no number to be correct.
            Some(Err(error)) if error.code() == ErrorCode::NotSupported => {}
            Some(outcomes) => return outcomes,
            None => {}
        }
        match (mode, items) {
            (WriteMode::Put, &[PutItem { key, len: size }]) => {
                self.call_one(PutStart { client, key, size, config, tenant }).await
            }
            (WriteMode::Upsert, &[PutItem { key, len: size }]) => {
                self.call_one(UpsertStart { client, key, size, config, tenant }).await
            }
            (WriteMode::Put, items) => {
                self.call_each(BatchPutStart { client, keys, sizes, config, tenant }, items.len()).await
            }
            (WriteMode::Upsert, items) => {
                self.call_each(BatchUpsertStart { client, keys, sizes, config, tenant }, items.len()).await
            }
        }
    }

    /// Marks each object as completely written: it is readable from now on.
    pub async fn put_end(
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
        if let Some(outcomes) = self.numbered(attempt, calls, request, items.len()).await {
            return outcomes;
        }
        match (mode, items) {
            (WriteMode::Put, &[item]) => self.call_one(PutEnd { client, item, replicas, tenant }).await,
            (WriteMode::Upsert, &[item]) => self.call_one(UpsertEnd { client, item, replicas, tenant }).await,
            (WriteMode::Put, items) => {
                let request = BatchPutEnd { client, items: items.into(), replicas, tenant };
                self.call_each(request, items.len()).await
            }
            (WriteMode::Upsert, items) if replicas == ReplicaType::All => {
                let request = BatchUpsertEnd { client, items: items.into(), tenant };
                self.call_each(request, items.len()).await
            }
            // The batch call lacks a field for the type of replicas.
            (WriteMode::Upsert, items) => {
                let mut outcomes = Vec::with_capacity(items.len());
                for &item in items {
                    outcomes.extend(self.call_one(UpsertEnd { client, item, replicas, tenant }).await?);
                }
                Ok(outcomes)
            }
        }
    }

    /// Cancels the write of each object. A failed upsert keeps the old value.
    pub async fn put_revoke(
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
        if let Some(outcomes) = self.numbered(attempt, calls, request, keys.len()).await {
            return outcomes;
        }
        match (mode, keys) {
            (WriteMode::Put, &[key]) => self.call_one(PutRevoke { client, key, replicas, tenant }).await,
            (WriteMode::Upsert, &[key]) => {
                self.call_one(UpsertRevoke { client, key, replicas, tenant }).await
            }
            (WriteMode::Put, keys) => {
                let request = BatchPutRevoke { client, keys: keys.into(), replicas, tenant };
                self.call_each(request, keys.len()).await
            }
            (WriteMode::Upsert, keys) if replicas == ReplicaType::All => {
                self.call_each(BatchUpsertRevoke { client, keys: keys.into(), tenant }, keys.len()).await
            }
            (WriteMode::Upsert, keys) => {
                let mut outcomes = Vec::with_capacity(keys.len());
                for &key in keys {
                    outcomes.extend(self.call_one(UpsertRevoke { client, key, replicas, tenant }).await?);
                }
                Ok(outcomes)
            }
        }
    }

    /// Removes each object; `force` overrides leases. Readers that hold a lease never see the bytes
    /// of another object.
    pub async fn remove(&self, tenant: &str, keys: &[&[u8]], force: bool) -> Result<Vec<Result<()>>> {
        match keys {
            [key] => self.call_one(Remove { key, force, tenant }).await,
            keys => self.call_each(BatchRemove { keys: keys.into(), force, tenant }, keys.len()).await,
        }
    }

    /// Removes every object whose key matches the pattern, and returns their number. Objects in use
    /// are skipped.
    pub async fn remove_matching(&self, tenant: &str, pattern: &str, force: bool) -> Result<u64> {
        count(self.call(RemoveByRegex { pattern, force, tenant }).await?)
    }

    /// Removes every object, and returns their number. Objects in use are skipped.
    pub async fn remove_all(&self, tenant: &str, force: bool) -> Result<u64> {
        count(self.call(RemoveAll { force, tenant }).await?)
    }

    /// Returns the version of the master. A client compares it before any other call.
    pub async fn version(&self) -> Result<String> {
        self.expect_another_master();
        self.call(ServiceReady {}).await
    }

    /// Forgets the calls that the master lacks, because another master may respond from now on.
    pub fn expect_another_master(&self) {
        let Lacks { numbered_writes, prefixes, hints, relocation, lifetimes } = &*self.lacks;
        [numbered_writes, prefixes, hints, relocation, lifetimes]
            .iter()
            .for_each(|lack| lack.store(false, Relaxed));
    }

    /// Reports that the client is alive.
    pub async fn ping(&self, client: ClientId) -> Result<PingReply> {
        self.call(Ping { client }).await
    }

    /// Returns the address of the current leader, if it is known and another master may lead later.
    pub fn leader(&self) -> Option<Arc<str>> {
        self.rpc()?.location().leader()
    }

    /// Returns as soon as the [leader](Self::leader) is known and differs from `than`. Never
    /// returns if there is only one master.
    pub async fn another_leads(&self, than: Option<&str>) {
        match self.rpc() {
            Some(rpc) => rpc.location().another_leads(than).await,
            None => std::future::pending().await,
        }
    }

    /// Returns the changes in the segments of a client after change number `after`, with the
    /// lifetimes of the objects. A master without lifetimes has none.
    pub async fn inventory(&self, client: ClientId, after: u64) -> Result<TimedInventoryPage> {
        if !self.lacks.lifetimes.load(Relaxed) {
            match self.call(FetchTimedInventory { client, after }).await {
                Err(error) if error.code() == ErrorCode::NotSupported => {
                    self.lacks.lifetimes.store(true, Relaxed);
                }
                outcome => return outcome,
            }
        }
        let page = self.call(FetchInventory { client, after }).await?;
        Ok(TimedInventoryPage { page, lifetimes: Vec::new() })
    }

    /// Reports that the node at this endpoint did not respond to the caller.
    ///
    /// The call is a hint: the master places nothing on that node until its next ping. Mooncake C++
    /// lacks this call, so its absence is not an error.
    pub async fn report_unreachable(&self, client: ClientId, endpoint: &str) -> Result<()> {
        match self.call(ReportUnreachable { client, endpoint }).await {
            Err(error) if error.code() == ErrorCode::NotSupported => Ok(()),
            outcome => outcome,
        }
    }

    /// Offers memory for objects.
    pub async fn mount(&self, client: ClientId, segment: &Segment) -> Result<()> {
        self.call(MountSegment { segment: Cow::Borrowed(segment), client }).await
    }

    /// Offers memory again after the master forgot the client.
    pub async fn remount(&self, client: ClientId, segments: &[Segment]) -> Result<()> {
        self.call(ReMountSegment { segments: segments.into(), client }).await
    }

    /// Withdraws memory: its objects are gone at once, and its transport refuses later requests.
    pub async fn unmount(&self, client: ClientId, segment: SegmentId) -> Result<()> {
        self.call(UnmountSegment { segment, client }).await
    }

    /// Withdraws a segment after `grace`. Until then its objects are readable, and no object is
    /// added.
    pub async fn unmount_after(&self, client: ClientId, segment: SegmentId, grace: Duration) -> Result<()> {
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        self.call(GracefulUnmountSegment { segment, client, grace_ms }).await
    }

    /// Removes unleased copies that the caller wrote: those in the named segment, or all for an
    /// empty name. Returns the keys of the affected objects.
    pub async fn clear_replicas(
        &self,
        client: ClientId,
        keys: &[&[u8]],
        segment_name: &str,
    ) -> Result<Vec<ObjectKey>> {
        let cleared = self.call(BatchReplicaClear { keys: keys.into(), client, segment_name }).await?;
        cleared.into_iter().map(|key| ObjectKey::new(key).map_err(Error::from)).collect()
    }

    /// Grants space for copies in the named segments. `token` is that of the task for a copy of a
    /// hot object, and nil otherwise; the same holds for the end and the revoke.
    pub async fn copy_start(
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
            return self.call(CopyStart { client, key, tenant, source, targets }).await;
        }
        let CopyToken { lease, epoch } = token;
        self.call(DynamicReplicaCopyStart { client, key, tenant, source, targets, lease, epoch }).await
    }

    /// Marks a copy or move as completely written.
    pub async fn replication_end(
        &self,
        caller: Caller<'_>,
        kind: TaskKind,
        key: &[u8],
        token: CopyToken,
    ) -> Result<()> {
        let (Caller { client, tenant, .. }, CopyToken { lease, epoch }) = (caller, token);
        match kind {
            TaskKind::Copy if token.is_nil() => self.call(CopyEnd { client, key, tenant }).await,
            TaskKind::Copy => self.call(DynamicReplicaCopyEnd { client, key, tenant, lease, epoch }).await,
            TaskKind::Move => self.call(MoveEnd { client, key, tenant }).await,
        }
    }

    /// Cancels a copy or move.
    pub async fn replication_revoke(
        &self,
        caller: Caller<'_>,
        kind: TaskKind,
        key: &[u8],
        token: CopyToken,
    ) -> Result<()> {
        let (Caller { client, tenant, .. }, CopyToken { lease, epoch }) = (caller, token);
        match kind {
            TaskKind::Copy if token.is_nil() => self.call(CopyRevoke { client, key, tenant }).await,
            TaskKind::Copy => self.call(DynamicReplicaCopyRevoke { client, key, tenant, lease, epoch }).await,
            TaskKind::Move => self.call(MoveRevoke { client, key, tenant }).await,
        }
    }

    /// Reserves the space of objects that will be announced; `open` marks the last call.
    pub async fn keep(
        &self,
        client: ClientId,
        segment: SegmentId,
        extents: &[Extent],
        open: bool,
    ) -> Result<()> {
        let offsets = extents.iter().map(|extent| extent.offset).collect();
        let lengths = extents.iter().map(|extent| extent.len).collect();
        self.call(KeepExtents { client, segment, offsets, lengths, open }).await
    }

    /// Reports that copies of objects of a tenant are gone: from the client's disk
    /// ([`ReplicaType::LocalDisk`]) or from a shared folder ([`ReplicaType::Disk`]).
    pub async fn drop_from_disk(
        &self,
        client: ClientId,
        tenant: &str,
        keys: &[&[u8]],
        replicas: ReplicaType,
    ) -> Result<Vec<Result<()>>> {
        let request = BatchEvictDiskReplica { client, keys: keys.into(), tenant, replicas };
        self.call_each(request, keys.len()).await
    }
}

/// Warns once in this process that the master ignores hints, with those of the first put.
fn warn_of_hints(hints: &PutHints) {
    if WARNED_OF_HINTS.swap(true, Relaxed) {
        return;
    }
    let named = [
        ("parent_key", hints.parent.is_some()),
        ("position", hints.position.is_some()),
        ("keep", hints.keep != KeepPart::Any),
        ("ttl_ms", hints.ttl_ms.is_some()),
        ("delete_after_read", hints.delete_after_read),
    ];
    let named: Vec<&str> = named.into_iter().filter_map(|(name, is_set)| is_set.then_some(name)).collect();
    tracing::warn!("this master ignores hints of puts: it is an older one, or Mooncake C++. hints={named:?}");
}

/// Converts a count of a response. A count has no field for an error, so a negative value is an
/// error number.
fn count(count: i64) -> Result<u64> {
    u64::try_from(count).map_err(|_| {
        i32::try_from(count).map_or_else(
            |_| Error::internal(format!("invalid response: count must not be negative. count={count}")),
            |number| ErrorCode::from_number(number).into(),
        )
    })
}
