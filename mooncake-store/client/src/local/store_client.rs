//! Interface of both clients of a store: a full client of the cluster in this process, and a shared
//! client of the `mooncake_client` process on this host.

use std::future::Future;

use mooncake_core::ids::{ObjectKey, Uuid};
use mooncake_core::memory::{HostMemory, HostMemoryOptions, MemorySource};
use mooncake_core::replica::{ReplicaList, ReplicateConfig};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_engine::transport_set::TransportSet;
use mooncake_protocol::api::ProbePolicy;
use mooncake_protocol::wire::TaskInfo;
use mooncake_transport::{Region, Slice, SliceMut, Transport};
use std::sync::Arc;
use std::time::Duration;

use super::client::LocalClient;
use super::objects::LocatedLocal;
use super::read_plan::LocalRead;
use crate::batch_parts::PART_OBJECTS;
use crate::exist_options::ExistOptions;
use crate::located::Located;
use crate::metrics::{Operation, StartedCall};
use crate::payload::PutOutcome;
use crate::put_options::PutOptions;
use crate::ranges::RangeRead;
use crate::state::Client;

/// Client of a store: full or shared. Programs that work with both take this type.
#[derive(Debug)]
pub enum StoreClient<T: Transport = TransportSet> {
    /// Full client, which joined the cluster in this process.
    Full(Client<T>),
    /// Shared client, whose calls the `mooncake_client` process of this host makes.
    Ipc(LocalClient),
}

impl<T: Transport> Clone for StoreClient<T> {
    fn clone(&self) -> Self {
        match self {
            Self::Full(client) => Self::Full(client.clone()),
            Self::Ipc(client) => Self::Ipc(client.clone()),
        }
    }
}

/// Located object of a [`StoreClient`].
#[derive(Clone, Debug)]
pub enum StoreObject {
    /// Object that a full client located.
    Full(Located),
    /// Object that a shared client located.
    Ipc(LocatedLocal),
}

impl StoreObject {
    /// Returns the length of the object in bytes.
    pub fn size(&self) -> u64 {
        match self {
            Self::Full(object) => object.size(),
            Self::Ipc(object) => object.size(),
        }
    }
}

/// Part of an object to read with a [`StoreClient`].
pub type StoreRange<T> = RangeRead<T, StoreObject>;

/// Defines operations of both clients. The name in the full client follows `=`; the name in the
/// shared client is that of the method.
macro_rules! both {
    ($(
        $(#[$about:meta])*
        $name:ident($($argument:ident: $type:ty),*) -> $result:ty = $full:ident $(.$of_handle:ident)?;
    )*) => {$(
        $(#[$about])*
        ///
        /// # Errors
        /// Returns the errors of the operation of that name of the client.
        pub async fn $name(&self, $($argument: $type),*) -> $result {
            match self {
                Self::Full(client) => client.$full $(().$of_handle)? ($($argument),*).await,
                Self::Ipc(client) => client.$name($($argument),*).await,
            }
        }
    )*};
}

/// Operations of both clients.
impl<T: Transport> StoreClient<T> {
    both! {
        /// Returns whether the key can be read now.
        exist(key: impl AsRef<[u8]>) -> Result<bool> = exist;
        /// Returns for each key whether it can be read now.
        batch_exist(keys: &[impl AsRef<[u8]>]) -> Result<Vec<Result<bool>>> = batch_exist;
        /// Returns whether the key can be read now, with these settings.
        exist_with(key: impl AsRef<[u8]>, options: &ExistOptions) -> Result<bool> = exist_with;
        /// Returns for each key whether it can be read now, with these settings.
        batch_exist_with(keys: &[impl AsRef<[u8]>], options: &ExistOptions) -> Result<Vec<Result<bool>>>
            = batch_exist_with;
        /// Returns whether the key can be read now, without a lease.
        probe(key: impl AsRef<[u8]>) -> Result<bool> = probe;
        /// Returns for each key whether it can be read now. Objects get a lease only as the policy
        /// says.
        batch_probe(keys: &[impl AsRef<[u8]>], policy: ProbePolicy) -> Result<Vec<Result<bool>>> = batch_probe;
        /// Returns the number of keys from the front that can be read now, and grants leases on
        /// these objects.
        prefix_hits(keys: &[impl AsRef<[u8]>]) -> Result<usize> = replicas.prefix_hits;
        /// Returns the replicas of the keys from the front that can be read now, and grants leases
        /// on these objects.
        list_prefix(keys: &[impl AsRef<[u8]>]) -> Result<Vec<ReplicaList>> = replicas.list_prefix;
        /// Returns the length of a value in bytes, or `None` if there is no object.
        size(key: impl AsRef<[u8]>) -> Result<Option<u64>> = size;
        /// Returns the replicas of each key, or `None` for a key without an object.
        batch_replicas(keys: &[impl AsRef<[u8]>]) -> Result<Vec<Result<Option<ReplicaList>>>>
            = replicas.batch_list;
        /// Removes one key. Returns whether it existed.
        remove(key: impl AsRef<[u8]>, force: bool) -> Result<bool> = remove;
        /// Removes each key. Returns for each whether it existed.
        batch_remove(keys: &[impl AsRef<[u8]>], force: bool) -> Result<Vec<Result<bool>>> = batch_remove;
        /// Removes every object whose key contains a match of the regular expression. Returns the
        /// number of removed objects.
        remove_matching(pattern: &str, force: bool) -> Result<u64> = remove_matching;
        /// Removes every object. Returns the number of removed objects.
        remove_all(force: bool) -> Result<u64> = remove_all;
        /// Requests a copy of an object.
        copy_task(key: impl AsRef<[u8]>, targets: &[&str]) -> Result<Uuid> = replicas.copy;
        /// Requests a move of an object.
        move_task(key: impl AsRef<[u8]>, source: &str, target: &str) -> Result<Uuid> = replicas.move_to;
        /// Returns the progress of a task.
        task(task: Uuid) -> Result<TaskInfo> = replicas.task;
        /// Stores many values, each from consecutive pieces.
        batch_put_pieces(items: &[(impl AsRef<[u8]>, Vec<Slice<T>>)], options: &PutOptions)
            -> Result<Vec<Result<PutOutcome>>> = batch_put;
    }

    /// Returns whether the master responds, and the daemon of a shared client.
    pub async fn is_healthy(&self) -> bool {
        match self {
            Self::Full(client) => client.status().is_healthy().await,
            Self::Ipc(client) => client.is_healthy().await,
        }
    }

    /// Returns each object with a lease on it, or `None` for a key without an object.
    ///
    /// # Errors
    /// Returns an outer error if the outcome of every key is unknown.
    pub async fn locate<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Result<Option<StoreObject>>>> {
        fn convert<L>(
            found: Vec<Result<Option<L>>>,
            object: fn(L) -> StoreObject,
        ) -> Vec<Result<Option<StoreObject>>> {
            found.into_iter().map(|found| Ok(found?.map(object))).collect()
        }
        Ok(match self {
            Self::Full(client) => convert(client.ranges().locate(keys).await?, StoreObject::Full),
            Self::Ipc(client) => convert(client.locate(keys).await?, StoreObject::Ipc),
        })
    }

    /// Returns half of the time for which the lease on a located object lasts from now on. Returns
    /// zero for an object of a shared client, whose lease is not known here.
    pub fn half_lease(&self, object: &StoreObject) -> Duration {
        match (self, object) {
            (Self::Full(client), StoreObject::Full(object)) => {
                object.lease().since(client.inner.config.clock.now()) / 2
            }
            _ => Duration::ZERO,
        }
    }

    /// Returns the objects of the keys from the front that can be read now, each with a lease.
    ///
    /// # Errors
    /// Returns an error if the master does not respond, or the daemon of a shared client.
    pub async fn locate_prefix<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<StoreObject>> {
        Ok(match self {
            Self::Full(client) => {
                client.ranges().locate_prefix(keys).await?.into_iter().map(StoreObject::Full).collect()
            }
            Self::Ipc(client) => {
                client.locate_prefix(keys).await?.into_iter().map(StoreObject::Ipc).collect()
            }
        })
    }

    /// Reads ranges of located objects. The result of an object that the other kind of client
    /// located is `LEASE_EXPIRED`.
    pub async fn read_ranges(&self, reads: Vec<StoreRange<T>>) -> Vec<LocalRead<(), T>> {
        self.read_ranges_as(reads, false).await
    }

    /// Reads ranges like [`read_ranges`](Self::read_ranges), of objects that the same operation has
    /// located. An object whose lease has ended is located again, as by
    /// [`ClientRanges::read_current`](crate::ClientRanges::read_current).
    pub async fn read_current_ranges(&self, reads: Vec<StoreRange<T>>) -> Vec<LocalRead<(), T>> {
        self.read_ranges_as(reads, true).await
    }

    async fn read_ranges_as(&self, reads: Vec<StoreRange<T>>, relocates: bool) -> Vec<LocalRead<(), T>> {
        let stale = |into| {
            let text = "cannot read object: another client located it; locate it again";
            LocalRead { result: Err(Error::new(ErrorCode::LeaseExpired, text)), into: Some(into) }
        };
        let (mut own, mut shared, mut refused) = (Vec::new(), Vec::new(), Vec::new());
        for (at, StoreRange { object, offset, into }) in reads.into_iter().enumerate() {
            match (self, object) {
                (Self::Full(_), StoreObject::Full(object)) => own.push(RangeRead { object, offset, into }),
                (Self::Ipc(_), StoreObject::Ipc(object)) => shared.push(RangeRead { object, offset, into }),
                _ => refused.push((at, stale(into))),
            }
        }
        let mut ended = match self {
            Self::Full(client) => {
                let ranges = client.ranges();
                let read = if relocates { ranges.read_current(own).await } else { ranges.read(own).await };
                read.into_iter()
                    .map(|read| LocalRead { result: read.result, into: Some(read.into) })
                    .collect()
            }
            Self::Ipc(client) if relocates => client.read_current_ranges(shared).await,
            Self::Ipc(client) => client.read_ranges(shared).await,
        };
        for (at, read) in refused {
            ended.insert(at, read);
        }
        ended
    }

    /// Reads values to the start of each memory. Returns their lengths; a missing object is an
    /// error.
    ///
    /// # Errors
    /// Returns an outer error if the outcome of every key is unknown.
    pub async fn batch_get_into<K: AsRef<[u8]>>(
        &self,
        items: Vec<(K, SliceMut<T>)>,
    ) -> Result<Vec<Result<usize>>> {
        let missing = || Error::from(ErrorCode::ObjectNotFound);
        Ok(match self {
            Self::Full(client) => {
                let batch = client.batch_get_into(items).await;
                batch.located?;
                batch.reads.into_iter().map(|read| read.found()).collect()
            }
            Self::Ipc(client) => {
                let reads = client.batch_get_into(items).await.into_iter();
                reads.map(|read| read.result?.ok_or_else(missing)).collect()
            }
        })
    }

    /// Stores many values, each from consecutive pieces, as one `operation` of the metrics. A key
    /// that exists already counts as stored.
    ///
    /// # Errors
    /// Returns an outer error if the outcome of every key is unknown.
    pub async fn write(
        &self,
        operation: Operation,
        items: &[(impl AsRef<[u8]>, Vec<Slice<T>>)],
        config: ReplicateConfig,
    ) -> Result<Vec<Result<()>>> {
        if items.is_empty() {
            return Ok(Vec::new());
        }
        let mut options = PutOptions::from(config);
        if operation.replaces() {
            options = options.upsert();
        }
        let started = self.begin(operation);
        let outcomes = self.counted(started, self.batch_put_pieces(items, &options)).await?;
        Ok(outcomes.into_iter().map(|outcome| outcome.map(drop)).collect())
    }

    /// Stores the values that have pieces as [`write`](Self::write) does. A value with an error in
    /// place of pieces has this error as its outcome.
    ///
    /// # Errors
    /// Returns the errors of [`write`](Self::write).
    pub async fn write_valid<K: AsRef<[u8]>>(
        &self,
        operation: Operation,
        values: impl IntoIterator<Item = (K, Result<Vec<Slice<T>>>)>,
        mut config: ReplicateConfig,
    ) -> Result<Vec<Result<()>>> {
        let (mut refused, mut items, mut valid) = (Vec::new(), Vec::new(), Vec::new());
        for (at, (key, pieces)) in values.into_iter().enumerate() {
            match pieces {
                Ok(pieces) => {
                    valid.push(at);
                    items.push((key, pieces));
                    refused.push(None);
                }
                Err(error) => refused.push(Some(error)),
            }
        }
        if valid.len() < refused.len() && config.has_lists() {
            config = config.of_keys(valid.iter().copied(), refused.len());
        }
        let mut written = self.write(operation, &items, config).await?.into_iter();
        let outcome = |refused: Option<Error>| match refused {
            Some(error) => Err(error),
            None => written.next().unwrap_or_else(missing_result),
        };
        Ok(refused.into_iter().map(outcome).collect())
    }

    /// Removes the replicas that this client wrote. A shared client has written none itself.
    ///
    /// # Errors
    /// Returns the errors of [`ClientReplicas::clear`](crate::ClientReplicas::clear).
    pub async fn clear_replicas<K: AsRef<[u8]>>(&self, keys: &[K], segment: &str) -> Result<Vec<ObjectKey>> {
        match self {
            Self::Full(client) => client.replicas().clear(keys, segment).await,
            Self::Ipc(_) => Ok(Vec::new()),
        }
    }

    /// Leaves the cluster. A shared client closes with its last handle.
    ///
    /// # Errors
    /// Returns the errors of [`Client::close`].
    pub async fn close(&self) -> Result<()> {
        match self {
            Self::Full(client) => client.close().await,
            Self::Ipc(_) => Ok(()),
        }
    }
}

/// Properties and memory.
impl<T: Transport> StoreClient<T> {
    /// Returns the full client, if this is one.
    pub fn as_full(&self) -> Option<&Client<T>> {
        match self {
            Self::Full(client) => Some(client),
            Self::Ipc(_) => None,
        }
    }

    /// Returns the shared client, if this is one.
    pub fn as_ipc(&self) -> Option<&LocalClient> {
        match self {
            Self::Full(_) => None,
            Self::Ipc(client) => Some(client),
        }
    }

    /// Returns the maximum number of objects that a call locates before it reads them. Leases last
    /// for a limited time, and the daemon of a shared client keeps only the last objects.
    pub fn located_at_once(&self) -> usize {
        match self {
            Self::Full(_) => PART_OBJECTS,
            Self::Ipc(_) => super::objects::LOCATED_AT_ONCE,
        }
    }

    /// Returns the name in the cluster, which is empty for a shared client.
    pub fn hostname(&self) -> &str {
        self.as_full().map_or("", Client::hostname)
    }

    /// Returns whether the transport moves registered memory only.
    pub fn needs_registration(&self) -> bool {
        self.as_full().is_some_and(|client| client.engine().transport().capabilities().needs_registration)
    }

    /// Returns the size of the local buffer in bytes.
    pub fn local_buffer(&self) -> u64 {
        match self {
            Self::Full(client) => client.config().local_buffer,
            Self::Ipc(client) => client.config().buffer,
        }
    }

    /// Allocates memory that operations can use without a copy, once it is
    /// [registered](Self::register).
    ///
    /// # Errors
    /// Returns `BUFFER_OVERFLOW` if the host has too little free memory.
    pub fn allocate(&self, len: usize) -> Result<HostMemory> {
        match self {
            Self::Full(client) => {
                client.config().check_allocation(len)?;
                HostMemory::with(len, &client.config().memory)
            }
            Self::Ipc(client) => {
                client.inner.check_allocation(len)?;
                let shared = Some("mooncake_shm".to_owned());
                HostMemory::with(len, &HostMemoryOptions { shared, ..client.config().memory.clone() })
            }
        }
    }

    /// Registers memory, until the last handle of the region is dropped. Operations use registered
    /// memory without a copy.
    ///
    /// # Errors
    /// Returns the errors of [`ClientMemory::register`](crate::ClientMemory::register) or of
    /// [`LocalClient::register`].
    pub async fn register(&self, memory: Arc<dyn MemorySource>) -> Result<Region<T>> {
        match self {
            Self::Full(client) => client.memory().register(memory),
            Self::Ipc(client) => client.register(memory).await,
        }
    }

    /// Begins to measure a call that consists of several operations. The operations of a shared
    /// client are counted by `mooncake_client`, which makes them.
    pub fn begin(&self, operation: Operation) -> Option<StartedCall> {
        self.as_full().map(|client| client.status().begin(operation))
    }

    /// Runs operations that are counted as the call `started`.
    pub async fn counted<F: Future>(&self, started: Option<StartedCall>, calls: F) -> F::Output {
        match (self, started) {
            (Self::Full(client), Some(started)) => client.status().counted(started, calls).await,
            _ => calls.await,
        }
    }
}

/// Returns the error of a response that has fewer results than the request has items.
pub(super) fn missing_result<R>() -> Result<R> {
    Err(Error::internal("the response has fewer results than the request has items"))
}
