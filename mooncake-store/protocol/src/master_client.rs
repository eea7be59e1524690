//! Client of a master, which runs in this process or is reached over RPC.
//!
//! Every call of the table is made by [`MasterClient::call`] or [`MasterClient::call_each`]. The
//! other methods choose between several calls, or convert arguments.

mod batches;
mod copies;
mod weights;
mod writes;

use std::borrow::Cow;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use async_trait::async_trait;
use mooncake_core::alloc::Extent;
use mooncake_core::clock::SharedClock;
use mooncake_core::error::{Error, ErrorCode, ErrorKind, Result};
use mooncake_core::ids::{ClientId, ObjectKey, ReplicaId, SegmentId};
use mooncake_core::replica::{Replica, ReplicaList, ReplicaType, Segment};

use super::call::Reply;
use super::client::{RpcClient, RpcOptions};
use super::message::*;
use super::pack;
use super::service::MasterCalls;
use super::wire::{MatchingPage, ProbePolicy, ReadablePrefix, TimedInventoryPage};
use crate::api::{Caller, PingReply};

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

/// Read of objects, and the earlier reads of its reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadNumber {
    /// Identity that the reader has drawn at random.
    pub reader: u64,
    /// Number of the read. Later reads have larger ones.
    pub number: u64,
    /// Number up to which all reads of the reader have ended.
    pub ended: u64,
}

/// Returns whether an error means that the master lacks a call or has another version of it.
pub fn is_missing_call(error: &Error) -> bool {
    error.code() == ErrorCode::NotSupported || error.kind() == ErrorKind::VersionMismatch
}

/// Key and replicas of an object.
pub type Matching = (Vec<u8>, Vec<Replica>);

/// Client of a master. Clones share its connections.
///
/// Each call may be repeated if its response was lost; the outcome is the same. A batch of one
/// object travels as the single call, except for numbered writes, which have only a batch call.
#[derive(Clone, Debug)]
pub struct MasterClient {
    master: Location,
    missing: Arc<MissingCalls>,
}

/// Calls that the master is known to lack.
#[derive(Debug, Default)]
struct MissingCalls {
    /// True if the master lacks the calls of numbered writes.
    numbered_writes: AtomicBool,
    /// True if the master lacks the call for prefixes.
    prefixes: AtomicBool,
    /// True if the master lacks the call for hints.
    hints: AtomicBool,
    /// True if the master lacks the call for located objects.
    relocation: AtomicBool,
    /// True if the master lacks the calls of reads whose end is reported.
    reported_reads: AtomicBool,
    /// True if the master lacks the call for lifetimes in the inventory.
    lifetimes: AtomicBool,
    /// True if the master lacks the calls of numbered copies, promotions and reports of disks.
    numbered_copies: AtomicBool,
    /// True if the master lacks the call for pages of matching objects.
    pages: AtomicBool,
    /// True if the master lacks the calls of prefetches.
    prefetches: AtomicBool,
    /// True if the master lacks the tenant in the call that clears replicas.
    tenant_of_clear: AtomicBool,
    /// True if the master is an earlier version of this system, which refuses compatible fields.
    members: AtomicBool,
}

impl MissingCalls {
    /// Forgets what the master lacks.
    fn forget(&self) {
        let Self { numbered_writes, prefixes, hints, relocation, reported_reads, .. } = self;
        let Self { lifetimes, numbered_copies, pages, prefetches, tenant_of_clear, members, .. } = self;
        for lack in [numbered_writes, prefixes, hints, relocation, reported_reads] {
            lack.store(false, Relaxed);
        }
        for lack in [lifetimes, numbered_copies, pages, prefetches, tenant_of_clear, members] {
            lack.store(false, Relaxed);
        }
    }
}

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
        Self { master, missing: Arc::default() }
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

    /// Returns whether this master respects [`Caller::attempt`].
    ///
    /// If it does, a put start repeated with the same number gets the same grant, and an end or
    /// revoke affects only the write with its number. If it does not, a client must neither repeat
    /// a put start nor send an end so late that another write may use the key.
    pub fn fences_writes(&self) -> bool {
        !self.missing.numbered_writes.load(Relaxed)
    }

    async fn exist_part(&self, tenant: &str, keys: &[&[u8]]) -> Result<Vec<Result<bool>>> {
        match keys {
            [key] => self.call_one(ExistKey { key, tenant }).await,
            keys => self.call_each(BatchExistKey { keys: keys.into(), tenant }, keys.len()).await,
        }
    }

    async fn probe_part(
        &self,
        tenant: &str,
        keys: &[&[u8]],
        policy: ProbePolicy,
    ) -> Result<Vec<Result<bool>>> {
        match keys {
            [key] if policy.mode == ProbePolicy::NONE.mode => self.call_one(ProbeKey { key, tenant }).await,
            keys => self.call_each(BatchProbeKey { policy, keys: keys.into(), tenant }, keys.len()).await,
        }
    }

    async fn locate_part(&self, tenant: &str, keys: &[&[u8]]) -> Result<Vec<Result<ReplicaList>>> {
        match keys {
            [key] => self.call_one(GetReplicaList { key, tenant }).await,
            keys => self.call_each(BatchGetReplicaList { keys: keys.into(), tenant }, keys.len()).await,
        }
    }

    async fn locate_for_read_part(
        &self,
        tenant: &str,
        keys: &[&[u8]],
        located: &[ReplicaId],
        read: ReadNumber,
    ) -> Result<Vec<Result<ReplicaList>>> {
        if !self.missing.reported_reads.load(Relaxed) {
            let counted =
                if keys.len() > 1 { BatchGetReplicaList::FUNCTION } else { GetReplicaList::FUNCTION };
            let ReadNumber { reader, number, ended } = read;
            let located = located.into();
            let request = LocateForRead { reader, number, ended, keys: keys.into(), located, tenant };
            match self.call_each_as(counted, request, keys.len()).await {
                Err(error) if is_missing_call(&error) => self.missing.reported_reads.store(true, Relaxed),
                outcomes => return outcomes,
            }
        }
        if located.is_empty() {
            return self.locate_part(tenant, keys).await;
        }
        self.locate_again_part(tenant, keys, located).await
    }

    /// Reports that all reads of a reader up to a number have ended. Returns the time after which
    /// the reader reports again; `None` if the master counts leases only.
    ///
    /// # Errors
    /// Returns an error if no valid response arrived.
    pub async fn report_reads(&self, reader: u64, ended: u64) -> Result<Option<Duration>> {
        if self.missing.reported_reads.load(Relaxed) {
            return Ok(None);
        }
        match self.call(ReportReads { reader, ended }).await {
            Ok(pause_ms) => Ok(Some(Duration::from_millis(pause_ms))),
            Err(error) if is_missing_call(&error) => {
                self.missing.reported_reads.store(true, Relaxed);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    async fn locate_again_part(
        &self,
        tenant: &str,
        keys: &[&[u8]],
        located: &[ReplicaId],
    ) -> Result<Vec<Result<ReplicaList>>> {
        if !self.missing.relocation.load(Relaxed) {
            let counted =
                if keys.len() > 1 { BatchGetReplicaList::FUNCTION } else { GetReplicaList::FUNCTION };
            let request = LocateAgain { keys: keys.into(), located: located.into(), tenant };
            match self.call_each_as(counted, request, keys.len()).await {
                Err(error) if error.code() == ErrorCode::NotSupported => {
                    self.missing.relocation.store(true, Relaxed);
                }
                outcomes => return outcomes,
            }
        }
        self.locate_part(tenant, keys).await
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
        if self.missing.prefixes.load(Relaxed) {
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
                self.missing.prefixes.store(true, Relaxed);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns key and replicas of each object whose key matches, and grants leases on them. They
    /// arrive by pages, so that no response is too long. An object that is stored or removed
    /// meanwhile may be missing.
    ///
    /// A master without pages answers in one response, or refuses that with `INVALID_PARAMS`.
    pub async fn locate_matching(&self, tenant: &str, pattern: &str) -> Result<Vec<Matching>> {
        if self.missing.pages.load(Relaxed) {
            return Ok(self.call(GetReplicaListByRegex { pattern, tenant }).await?.0);
        }
        let (mut found, mut position) = (Vec::new(), 0);
        loop {
            match self.call(LocateMatching { pattern, position, tenant }).await {
                Ok(MatchingPage { objects, next }) => {
                    found.extend(objects.0);
                    if next == 0 {
                        return Ok(found);
                    }
                    if next <= position {
                        let text = format!("invalid response: page {next} follows page {position}");
                        return Err(Error::new(ErrorCode::RpcFail, text));
                    }
                    position = next;
                }
                Err(error) if error.code() == ErrorCode::NotSupported => {
                    self.missing.pages.store(true, Relaxed);
                    return Ok(self.call(GetReplicaListByRegex { pattern, tenant }).await?.0);
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn remove_part(&self, tenant: &str, keys: &[&[u8]], force: bool) -> Result<Vec<Result<()>>> {
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
        self.missing.forget();
    }

    /// Reports that the client is alive.
    pub async fn ping(&self, client: ClientId) -> Result<PingReply> {
        self.call(Ping { client }).await
    }

    /// Returns the address of the current leader, if it is known and another master may lead later.
    pub fn leader(&self) -> Option<Arc<str>> {
        self.rpc()?.location().leader()
    }

    /// Returns the error of a directory that was to name the leader, if the directory is
    /// unreachable. Never returns otherwise.
    pub async fn unreachable_directory(&self) -> Error {
        match self.rpc() {
            Some(rpc) => rpc.location().unreachable_directory().await,
            None => std::future::pending().await,
        }
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
        if !self.missing.lifetimes.load(Relaxed) {
            match self.call(FetchTimedInventory { client, after }).await {
                Err(error) if error.code() == ErrorCode::NotSupported => {
                    self.missing.lifetimes.store(true, Relaxed);
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

    /// Removes copies of the objects of one request. A master like that of Mooncake C++ 0.3.13
    /// takes no tenant.
    async fn clear_replicas_part(
        &self,
        Caller { client, tenant, .. }: Caller<'_>,
        keys: &[&[u8]],
        segment_name: &str,
    ) -> Result<Vec<ObjectKey>> {
        let of_any_tenant = ClearOfAnyTenant { keys: keys.into(), client, segment_name };
        let cleared = if self.missing.tenant_of_clear.load(Relaxed) {
            self.call(of_any_tenant).await?
        } else {
            match self.call(BatchReplicaClear { keys: keys.into(), client, segment_name, tenant }).await {
                Err(error) if error.code() == ErrorCode::InvalidVersion => {
                    self.missing.tenant_of_clear.store(true, Relaxed);
                    self.call(of_any_tenant).await?
                }
                cleared => cleared?,
            }
        };
        cleared.into_iter().map(|key| ObjectKey::new(key).map_err(Error::from)).collect()
    }

    /// Reserves the space of objects that will be announced; `open` marks the last call.
    pub async fn reserve_extents(
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

    async fn drop_from_disk_part(
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
