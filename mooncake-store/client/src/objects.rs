//! Operations on objects, single and in batches.

use bytes::Bytes;
use mooncake_core::memory::{HostMemory, MemorySource};
use mooncake_core::replica::ReplicaList;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::{Region, SliceMut, Transport};
use std::sync::Arc;

use crate::batch_parts::call_by_parts;
use crate::buffers::Incoming;
use crate::exist_options::ExistOptions;
use crate::get::{self, Destination, ReadOutcome};
use crate::handles::{ClientMemory, ClientReplicas};
use crate::metrics::Operation;
use crate::payload::{AsPayload, Item, Payload, PutOutcome};
use crate::put;
use crate::put_options::PutOptions;
use crate::state::Client;
use mooncake_protocol::api::{ProbePolicy, WriteMode};
use mooncake_protocol::master_client::ReadNumber;

/// Outcome of a read into memory of the caller, and the memory.
#[derive(Debug)]
#[non_exhaustive]
pub struct ReadInto<T: Transport> {
    /// Length of the value in bytes, or `None` for a miss. Without a length, the content of the
    /// memory is undefined.
    pub result: Result<Option<usize>>,
    /// Reason of a miss if the object has replicas and none of them could be read.
    pub miss: Option<Error>,
    /// Memory of the caller.
    pub into: SliceMut<T>,
}

impl<T: Transport> ReadInto<T> {
    /// Returns the length of the value. A miss is an error.
    ///
    /// # Errors
    /// Returns the error of the read. Returns `OBJECT_NOT_FOUND` for a key without an object. If no
    /// replica can be read because its clients failed, returns the error of the last attempt.
    pub fn found(self) -> Result<usize> {
        self.result?.ok_or_else(|| self.miss.unwrap_or_else(|| ErrorCode::ObjectNotFound.into()))
    }
}

/// Outcome of a batch of reads into memory of the caller.
#[derive(Debug)]
#[non_exhaustive]
pub struct BatchRead<T: Transport> {
    /// Outcome of the request for the locations of the objects. After an error, the outcome of
    /// every key is unknown, and each item of `reads` has the same error.
    pub located: Result<()>,
    /// Outcome of each read, in the order of the items.
    pub reads: Vec<ReadInto<T>>,
}

/// Writes of objects.
impl<T: Transport> Client<T> {
    /// Stores a value under a new key, as one copy.
    ///
    /// A value in registered memory ([`Slice`](mooncake_transport::Slice), or several of them for
    /// consecutive pieces) goes straight from that memory to the replicas. A transport that needs
    /// no registered memory, such as TCP, also sends [`Bytes`] without a copy. All other values are
    /// copied once, into the local buffer.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for an empty key or value and for a key that is too long. Returns
    /// `NO_AVAILABLE_HANDLE` if the cluster has no space. Returns an error of kind `Unavailable` or
    /// `Timeout` if the value cannot be stored in time. Nothing stays stored after an error.
    pub async fn put(&self, key: impl AsRef<[u8]>, value: impl AsPayload<T>) -> Result<PutOutcome> {
        self.put_with(key, value, &PutOptions::default()).await
    }

    /// Stores a value as [`put`](Self::put) does, with these settings.
    ///
    /// # Errors
    /// Returns the errors of [`put`](Self::put). An [upsert](PutOptions::upsert) returns an error
    /// of kind `Busy` while another write of the key is in progress.
    pub async fn put_with(
        &self,
        key: impl AsRef<[u8]>,
        value: impl AsPayload<T>,
        options: &PutOptions,
    ) -> Result<PutOutcome> {
        let value = value.as_payload();
        let operation = Operation::of_put(options.mode, &value);
        let items = [Item { key: key.as_ref(), value }];
        one(put::write(&self.inner, options.mode, operation, &items, &options.replication).await?)
    }

    /// Stores many values with one RPC to the master before the transfers and one after them. Each
    /// client receives its bytes in one batch. Each value has a result of its own.
    ///
    /// More than 16,384 values are stored in consecutive parts, each with the time of one
    /// operation. After a part whose outcomes are unknown, no other part is stored, and the other
    /// values have its error.
    ///
    /// # Errors
    /// Returns an error if the outcome of every value is unknown.
    pub async fn batch_put<K: AsRef<[u8]>, V: AsPayload<T>>(
        &self,
        items: &[(K, V)],
        options: &PutOptions,
    ) -> Result<Vec<Result<PutOutcome>>> {
        let items: Vec<Item<'_, T>> =
            items.iter().map(|(key, value)| Item { key: key.as_ref(), value: value.as_payload() }).collect();
        let operation = Operation::of_batch_put(options.mode, items.first().map(|item| &item.value));
        put::write(&self.inner, options.mode, operation, &items, &options.replication).await
    }
}

/// Reads of objects.
impl<T: Transport> Client<T> {
    /// Returns the value of a key, or `None` if there is no object. The bytes are those of one
    /// whole put.
    ///
    /// The bytes lie in the local buffer while it has space. Drop them soon.
    ///
    /// # Errors
    /// Returns `LEASE_EXPIRED` if the bytes arrived too late to be trusted, twice. Returns an error
    /// of kind `Unavailable` or `Timeout` if the master does not respond. Returns `BUFFER_OVERFLOW`
    /// if there is no memory for the value.
    pub async fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Bytes>> {
        one(self.read_anywhere(Operation::GetBuffer, &[key.as_ref()]).await?)
    }

    /// Reads a value to the start of registered memory, without a copy in between. Returns the
    /// memory in any case.
    ///
    /// Dropping the future does not end a transfer that has begun. The transfer keeps the memory
    /// until it ends, and then drops it.
    ///
    /// # Errors
    /// The result has the errors of [`get`](Self::get), and `INVALID_PARAMS` if the value is longer
    /// than the memory.
    pub async fn get_into(&self, key: impl AsRef<[u8]>, into: SliceMut<T>) -> ReadInto<T> {
        let (located, mut outcomes) =
            get::read(&self.inner, Operation::GetInto, &[key.as_ref()], vec![Destination::Into(into)]).await;
        read_into(&located, outcomes.remove(0))
    }

    /// Returns the values of many keys with one RPC to the master. Each client is read in one
    /// batch. Each key has a result of its own.
    ///
    /// # Errors
    /// Returns an error if the outcome of every key is unknown.
    pub async fn batch_get<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Result<Option<Bytes>>>> {
        self.read_anywhere(Operation::BatchGetBuffer, &slices(keys)).await
    }

    /// Reads many values as [`get_into`](Self::get_into) does. Returns every slice, in order.
    pub async fn batch_get_into<K: AsRef<[u8]>>(&self, items: Vec<(K, SliceMut<T>)>) -> BatchRead<T> {
        let (keys, destinations): (Vec<K>, Vec<Destination<T>>) =
            items.into_iter().map(|(key, slice)| (key, Destination::Into(slice))).unzip();
        let (located, outcomes) =
            get::read(&self.inner, Operation::BatchGetInto, &slices(&keys), destinations).await;
        let reads = outcomes.into_iter().map(|outcome| read_into(&located, outcome)).collect();
        BatchRead { located, reads }
    }

    /// Returns whether a key can be read now. An object that can be read stays for the time of a
    /// lease.
    ///
    /// # Errors
    /// Returns an error if the master does not respond.
    pub async fn exist(&self, key: impl AsRef<[u8]>) -> Result<bool> {
        one(self.exist_all(&[key.as_ref()]).await?)
    }

    /// Returns whether many keys can be read, as [`exist`](Self::exist) does, with one RPC.
    ///
    /// # Errors
    /// Returns an error if the outcome of every key is unknown.
    pub async fn batch_exist<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Result<bool>>> {
        self.exist_all(&slices(keys)).await
    }

    /// Returns whether a key can be read now as [`exist`](Self::exist) does, with these settings.
    ///
    /// # Errors
    /// Returns an error if the master does not respond.
    pub async fn exist_with(&self, key: impl AsRef<[u8]>, options: &ExistOptions) -> Result<bool> {
        one(self.batch_exist_with(&[key], options).await?)
    }

    /// Returns whether many keys can be read as [`batch_exist`](Self::batch_exist) does, with these
    /// settings. Existence checks succeed although a prefetch fails.
    ///
    /// # Errors
    /// Returns an error if the outcome of every key is unknown.
    pub async fn batch_exist_with<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        options: &ExistOptions,
    ) -> Result<Vec<Result<bool>>> {
        let keys = slices(keys);
        let found = self.exist_all(&keys).await?;
        if options.prefetch_to_memory && self.inner.config.prefetch.on_exist {
            let readable = keys.iter().zip(&found).filter(|(_, found)| matches!(found, Ok(true)));
            self.inner.prefetch_later(readable.map(|(key, _)| *key));
        }
        Ok(found)
    }

    /// Returns whether a key can be read now, as [`exist`](Self::exist) does, without a lease.
    ///
    /// # Errors
    /// Those of [`batch_probe`](Self::batch_probe).
    pub async fn probe(&self, key: impl AsRef<[u8]>) -> Result<bool> {
        one(self.batch_probe(&[key], ProbePolicy::NONE).await?)
    }

    /// Returns whether many keys can be read now. Objects get a lease only as the policy says.
    ///
    /// # Errors
    /// Returns an error if the outcome of every key is unknown; `NOT_SUPPORTED` if the master lacks
    /// the call, as that of Mooncake C++ 0.3.13 does. `INVALID_PARAMS` for each key if the policy
    /// is unknown, or the number of keys is not a multiple of its group size.
    pub async fn batch_probe<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        policy: ProbePolicy,
    ) -> Result<Vec<Result<bool>>> {
        let inner = &self.inner;
        inner.usable()?;
        let keys = slices(keys);
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        inner.deadline().bound("probe", inner.master.probe(&inner.config.tenant, &keys, policy)).await
    }

    /// Returns the length of a value in bytes, or `None` if there is no object.
    ///
    /// # Errors
    /// Returns an error if the master does not respond.
    pub async fn size(&self, key: impl AsRef<[u8]>) -> Result<Option<u64>> {
        let found = self.replicas().list(key).await?;
        Ok(found.and_then(|list| list.replicas.first().map(|replica| replica.location.size())))
    }

    async fn exist_all(&self, keys: &[&[u8]]) -> Result<Vec<Result<bool>>> {
        let inner = &self.inner;
        inner.usable()?;
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        call_by_parts(keys, |part| async move {
            inner.deadline().bound("exist", inner.master.exist(&inner.config.tenant, part)).await
        })
        .await
    }

    async fn read_anywhere(
        &self,
        operation: Operation,
        keys: &[&[u8]],
    ) -> Result<Vec<Result<Option<Bytes>>>> {
        let destinations = keys.iter().map(|_| Destination::Allocated).collect();
        let (located, outcomes) = get::read(&self.inner, operation, keys, destinations).await;
        located?;
        let value = |outcome: ReadOutcome<T>| {
            let found = outcome.result?;
            Ok(found.and(outcome.buffer.and_then(Incoming::into_bytes)))
        };
        Ok(outcomes.into_iter().map(value).collect())
    }
}

/// Locations of objects.
impl<T: Transport> ClientReplicas<'_, T> {
    /// Returns the replicas of a key with a lease on them, or `None` if there is no object.
    ///
    /// # Errors
    /// Returns an error if the master does not respond.
    pub async fn list(self, key: impl AsRef<[u8]>) -> Result<Option<ReplicaList>> {
        one(self.batch_list(&[key]).await?)
    }

    /// Returns the replicas of many keys, as [`list`](Self::list) does, with one RPC.
    ///
    /// # Errors
    /// Returns an error if the outcome of every key is unknown.
    pub async fn batch_list<K: AsRef<[u8]>>(self, keys: &[K]) -> Result<Vec<Result<Option<ReplicaList>>>> {
        self.lists(keys, None).await
    }

    /// Returns the replicas of many keys, for the read of that number.
    pub(crate) async fn lists<K: AsRef<[u8]>>(
        self,
        keys: &[K],
        number: Option<ReadNumber>,
    ) -> Result<Vec<Result<Option<ReplicaList>>>> {
        let inner = &self.client.inner;
        inner.usable()?;
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let keys = slices(keys);
        let results = call_by_parts(&keys, |part| async move {
            let deadline = inner.deadline();
            match number {
                Some(number) => {
                    deadline.bound("replica list", inner.locate_for_read(part, &[], number)).await
                }
                None => {
                    let call = inner.master.locate(&inner.config.tenant, part);
                    deadline.bound("replica list", call).await
                }
            }
        })
        .await?;
        let found = |result| match result {
            Ok(list) => Ok(Some(list)),
            Err(error) if is_miss(&error) => Ok(None),
            Err(error) => Err(error),
        };
        Ok(results.into_iter().map(found).collect())
    }

    /// Returns the number of keys from the front that can be read now, with one RPC. For the keys
    /// of the blocks of a prompt, in order, this is the number of blocks that need not be computed.
    ///
    /// The objects of these keys stay for the time of a lease. Later keys get no lease, whether
    /// they exist or not. A master that lacks this call, such as one of Mooncake C++, is asked
    /// about all keys, and grants a lease on each object.
    ///
    /// # Errors
    /// Returns an error if the master does not respond.
    pub async fn prefix_hits<K: AsRef<[u8]>>(self, keys: &[K]) -> Result<usize> {
        let inner = &self.client.inner;
        inner.usable()?;
        let keys = slices(keys);
        inner.deadline().bound("prefix", inner.master.prefix_hits(&inner.config.tenant, &keys)).await
    }

    /// Returns the replicas of the keys that [`prefix_hits`](Self::prefix_hits) counts, with one
    /// RPC. Their number is the number of keys from the front that can be read.
    ///
    /// # Errors
    /// Returns the errors of [`prefix_hits`](Self::prefix_hits).
    pub async fn list_prefix<K: AsRef<[u8]>>(self, keys: &[K]) -> Result<Vec<ReplicaList>> {
        let inner = &self.client.inner;
        inner.usable()?;
        let keys = slices(keys);
        inner.deadline().bound("prefix", inner.master.locate_prefix(&inner.config.tenant, &keys)).await
    }
}

/// Removal of objects.
impl<T: Transport> Client<T> {
    /// Removes an object. Returns whether the key existed. Reads in progress finish or fail, but
    /// never return other bytes.
    ///
    /// # Errors
    /// Returns `OBJECT_HAS_LEASE` while a client may read the object, unless `force` is set.
    /// Returns `REPLICA_IS_NOT_READY` while the object is being written. Returns an error if the
    /// master does not respond.
    pub async fn remove(&self, key: impl AsRef<[u8]>, force: bool) -> Result<bool> {
        one(self.remove_keys(&[key.as_ref()], force).await?)
    }

    /// Removes many objects as [`remove`](Self::remove) does, with one RPC.
    ///
    /// # Errors
    /// Returns an error if the outcome of every key is unknown.
    pub async fn batch_remove<K: AsRef<[u8]>>(&self, keys: &[K], force: bool) -> Result<Vec<Result<bool>>> {
        self.remove_keys(&slices(keys), force).await
    }

    /// Removes every object whose key contains a match of the regular expression. Returns the
    /// number of removed objects. Objects in use are skipped.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for an invalid pattern, and an error if the master does not
    /// respond.
    pub async fn remove_matching(&self, pattern: &str, force: bool) -> Result<u64> {
        let inner = &self.inner;
        inner.usable()?;
        let call = inner.master.remove_matching(&inner.config.tenant, pattern, force);
        let deadline = inner.deadline();
        let removed = deadline.bound("remove by pattern", call);
        let (removed, _) = futures::future::join(removed, inner.report_reads(&deadline)).await;
        inner.forget_all();
        inner.remove_orphaned_files();
        removed
    }

    /// Removes every object. Returns the number of removed objects. Objects in use are skipped.
    ///
    /// # Errors
    /// Returns an error if the master does not respond.
    pub async fn remove_all(&self, force: bool) -> Result<u64> {
        let inner = &self.inner;
        inner.usable()?;
        let call = inner.master.remove_all(&inner.config.tenant, force);
        let deadline = inner.deadline();
        let removed = deadline.bound("remove all", call);
        let (removed, _) = futures::future::join(removed, inner.report_reads(&deadline)).await;
        inner.forget_all();
        inner.remove_orphaned_files();
        removed
    }

    async fn remove_keys(&self, keys: &[&[u8]], force: bool) -> Result<Vec<Result<bool>>> {
        let inner = &self.inner;
        inner.usable()?;
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let results = call_by_parts(keys, |part| async move {
            let call = inner.master.remove(&inner.config.tenant, part, force);
            inner.deadline().bound("remove", call).await
        });
        // The report frees the space of objects that this client has read.
        let deadline = inner.deadline();
        let (results, _) = futures::future::join(results, inner.report_reads(&deadline)).await;
        inner.forget(keys.iter().copied());
        let results = results?;
        inner.forget_files(
            keys.iter().zip(&results).filter(|(_, result)| result.is_ok()).map(|(key, _)| *key),
        );
        let removed = |result: Result<()>| match result {
            Ok(()) => Ok(true),
            Err(error) if error.code() == ErrorCode::ObjectNotFound => Ok(false),
            Err(error) => Err(error),
        };
        Ok(results.into_iter().map(removed).collect())
    }
}

/// Registered memory for operations without a copy.
impl<T: Transport> ClientMemory<'_, T> {
    /// Registers memory of the caller. Other clients cannot access this memory.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for an empty range, and the errors of the transport.
    pub fn register(self, memory: Arc<dyn MemorySource>) -> Result<Region<T>> {
        self.client.inner.can_transfer()?;
        self.client.inner.engine.register_local(memory)
    }

    /// Allocates registered memory. Other clients cannot access this memory.
    ///
    /// # Errors
    /// Returns `BUFFER_OVERFLOW` if the memory cannot be allocated, and `INVALID_PARAMS` for zero
    /// bytes.
    pub fn alloc(self, len: usize) -> Result<Region<T>> {
        let config = &self.client.inner.config;
        config.check_allocation(len)?;
        self.register(Arc::new(HostMemory::with(len, &config.memory)?))
    }
}

impl Operation {
    /// Returns the operation that metrics count for a put of one value.
    fn of_put<T: Transport>(mode: WriteMode, value: &Payload<'_, T>) -> Self {
        match (mode, value) {
            (WriteMode::Put, Payload::Bytes(_) | Payload::Shared(_)) => Self::Put,
            (WriteMode::Put, Payload::Slice(_)) => Self::PutFrom,
            (WriteMode::Put, Payload::Pieces(_)) => Self::PutParts,
            (WriteMode::Upsert, Payload::Bytes(_) | Payload::Shared(_)) => Self::Upsert,
            (WriteMode::Upsert, Payload::Slice(_)) => Self::UpsertFrom,
            (WriteMode::Upsert, Payload::Pieces(_)) => Self::UpsertParts,
        }
    }

    /// Returns the operation that metrics count for a put of many values. The first value decides.
    fn of_batch_put<T: Transport>(mode: WriteMode, first: Option<&Payload<'_, T>>) -> Self {
        match (mode, first) {
            (WriteMode::Put, Some(Payload::Slice(_))) => Self::BatchPutFrom,
            (WriteMode::Put, Some(Payload::Pieces(_))) => Self::BatchPutFromMultiBuffers,
            (WriteMode::Put, _) => Self::PutBatch,
            (WriteMode::Upsert, Some(Payload::Slice(_) | Payload::Pieces(_))) => Self::BatchUpsertFrom,
            (WriteMode::Upsert, _) => Self::UpsertBatch,
        }
    }
}

fn slices<K: AsRef<[u8]>>(keys: &[K]) -> Vec<&[u8]> {
    keys.iter().map(AsRef::as_ref).collect()
}

/// Returns the result of a batch with one item.
fn one<A>(mut results: Vec<Result<A>>) -> Result<A> {
    results.pop().unwrap_or_else(|| Err(Error::internal("response without an item")))
}

fn is_miss(error: &Error) -> bool {
    matches!(error.code(), ErrorCode::ReplicaIsNotReady) || error.kind() == mooncake_core::ErrorKind::NotFound
}

fn read_into<T: Transport>(located: &Result<()>, outcome: ReadOutcome<T>) -> ReadInto<T> {
    let ReadOutcome { result, lost: miss, buffer, slice } = outcome;
    let into = match (buffer, slice) {
        (Some(Incoming::Into(front)), _) => front.into_slice(),
        (_, Some(slice)) => slice,
        _ => unreachable!("a read gives the slice back that it was given"),
    };
    ReadInto { result: located.clone().and(result), miss, into }
}
