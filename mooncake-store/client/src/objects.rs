//! Operations on objects, single and in batches.

use bytes::Bytes;
use mooncake_core::memory::{HostMemory, MemorySource};
use mooncake_core::replica::{ReplicaList, ReplicateConfig};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::{Region, Slice, SliceMut, Transport};
use std::sync::Arc;

use crate::buffers::Incoming;
use crate::get::{self, Outcome, Want};
use crate::metrics::Operation;
use crate::payload::{Item, Payload, PutOutcome};
use crate::put;
use crate::state::Client;
use mooncake_protocol::api::WriteMode;

/// Result of a read into a slice: the length of the value, or `None` for a miss, and the slice.
pub type ReadInto<T> = (Result<Option<usize>>, SliceMut<T>);

/// Writes of objects. Each call takes the replication settings. `&ReplicateConfig::default()` means
/// one copy that can be evicted.
impl<T: Transport> Client<T> {
    /// Stores a value under a new key, as one copy, through the local buffer.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for an empty key or value and for a key that is too long. Returns
    /// `NO_AVAILABLE_HANDLE` if the cluster has no space. Returns an error of kind `Unavailable` or
    /// `Timeout` if the value cannot be stored in time. Nothing stays stored after an error.
    pub async fn put(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<PutOutcome> {
        self.put_with(key, value, &ReplicateConfig::default()).await
    }

    /// Stores a value as [`put`](Self::put) does, with the replication settings in `config`.
    pub async fn put_with(
        &self,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        config: &ReplicateConfig,
    ) -> Result<PutOutcome> {
        self.write_one(WriteMode::Put, Operation::Put, key.as_ref(), Payload::Bytes(value.as_ref()), config)
            .await
    }

    /// Stores immutable bytes as [`put`](Self::put) does. A transport that needs no registered
    /// memory, such as TCP, sends them without a copy.
    pub async fn put_bytes(
        &self,
        key: impl AsRef<[u8]>,
        value: &Bytes,
        config: &ReplicateConfig,
    ) -> Result<PutOutcome> {
        self.write_one(WriteMode::Put, Operation::Put, key.as_ref(), Payload::Shared(value), config).await
    }

    /// Stores many values as [`batch_put`](Self::batch_put) does, each as
    /// [`put_bytes`](Self::put_bytes).
    ///
    /// # Errors
    /// Returns the errors of [`batch_put`](Self::batch_put).
    pub async fn batch_put_bytes<K: AsRef<[u8]>>(
        &self,
        items: &[(K, Bytes)],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<PutOutcome>>> {
        let items: Vec<_> = items.iter().map(|(k, v)| item(k, Payload::Shared(v))).collect();
        put::write(&self.inner, WriteMode::Put, Operation::PutBatch, &items, config).await
    }

    /// Stores a value in registered memory as [`put`](Self::put) does. The bytes go straight from
    /// that memory to the replicas, without a copy in between.
    pub async fn put_from(
        &self,
        key: impl AsRef<[u8]>,
        value: &Slice<T>,
        config: &ReplicateConfig,
    ) -> Result<PutOutcome> {
        self.write_one(WriteMode::Put, Operation::PutFrom, key.as_ref(), Payload::Slice(value), config).await
    }

    /// Stores a value, and replaces the present value of the key if there is one. Readers see the
    /// old value or the new one, never a mixture.
    ///
    /// # Errors
    /// Returns the errors of [`put`](Self::put), and an error of kind `Busy` while another write of
    /// the key is in progress.
    pub async fn upsert(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<()> {
        let config = ReplicateConfig::default();
        let value = Payload::Bytes(value.as_ref());
        self.write_one(WriteMode::Upsert, Operation::Upsert, key.as_ref(), value, &config).await.map(drop)
    }

    /// Stores a value in registered memory as [`upsert`](Self::upsert) does.
    pub async fn upsert_from(
        &self,
        key: impl AsRef<[u8]>,
        value: &Slice<T>,
        config: &ReplicateConfig,
    ) -> Result<()> {
        self.write_one(WriteMode::Upsert, Operation::UpsertFrom, key.as_ref(), Payload::Slice(value), config)
            .await
            .map(drop)
    }

    /// Stores many values with one RPC to the master before the transfers and one after them. Each
    /// client receives its bytes in one batch. Each value has a result of its own.
    ///
    /// # Errors
    /// Returns an error if the outcome of every value is unknown.
    pub async fn batch_put<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        &self,
        items: &[(K, V)],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<PutOutcome>>> {
        let items: Vec<_> = items.iter().map(|(k, v)| item(k, Payload::Bytes(v.as_ref()))).collect();
        put::write(&self.inner, WriteMode::Put, Operation::PutBatch, &items, config).await
    }

    /// Stores values in registered memory as [`batch_put`](Self::batch_put) does.
    ///
    /// # Errors
    /// Returns the errors of [`batch_put`](Self::batch_put).
    pub async fn batch_put_from<K: AsRef<[u8]>>(
        &self,
        items: &[(K, Slice<T>)],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<PutOutcome>>> {
        let items: Vec<_> = items.iter().map(|(k, v)| item(k, Payload::Slice(v))).collect();
        put::write(&self.inner, WriteMode::Put, Operation::BatchPutFrom, &items, config).await
    }

    /// Stores many values as [`upsert`](Self::upsert) does.
    ///
    /// # Errors
    /// Returns the errors of [`batch_put`](Self::batch_put).
    pub async fn batch_upsert<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        &self,
        items: &[(K, V)],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<()>>> {
        let items: Vec<_> = items.iter().map(|(k, v)| item(k, Payload::Bytes(v.as_ref()))).collect();
        let outcomes =
            put::write(&self.inner, WriteMode::Upsert, Operation::UpsertBatch, &items, config).await?;
        Ok(outcomes.into_iter().map(|outcome| outcome.map(drop)).collect())
    }

    /// Stores many values in registered memory as [`upsert_from`](Self::upsert_from) does.
    ///
    /// # Errors
    /// Returns the errors of [`batch_put`](Self::batch_put).
    pub async fn batch_upsert_from<K: AsRef<[u8]>>(
        &self,
        items: &[(K, Slice<T>)],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<()>>> {
        let items: Vec<_> = items.iter().map(|(k, v)| item(k, Payload::Slice(v))).collect();
        let outcomes =
            put::write(&self.inner, WriteMode::Upsert, Operation::BatchUpsertFrom, &items, config).await?;
        Ok(outcomes.into_iter().map(|outcome| outcome.map(drop)).collect())
    }

    /// Stores values as [`batch_put_from`](Self::batch_put_from) does. Each value consists of
    /// consecutive pieces in any registered memory.
    ///
    /// # Errors
    /// Returns the errors of [`batch_put`](Self::batch_put).
    pub async fn batch_put_pieces<K: AsRef<[u8]>>(
        &self,
        items: &[(K, Vec<Slice<T>>)],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<PutOutcome>>> {
        let items: Vec<_> = items.iter().map(|(k, v)| item(k, Payload::Pieces(v))).collect();
        put::write(&self.inner, WriteMode::Put, Operation::BatchPutFromMultiBuffers, &items, config).await
    }

    /// Stores values as [`batch_upsert_from`](Self::batch_upsert_from) does. Each value consists of
    /// consecutive pieces in any registered memory.
    ///
    /// # Errors
    /// Returns the errors of [`batch_put`](Self::batch_put).
    pub async fn batch_upsert_pieces<K: AsRef<[u8]>>(
        &self,
        items: &[(K, Vec<Slice<T>>)],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<()>>> {
        let items: Vec<_> = items.iter().map(|(k, v)| item(k, Payload::Pieces(v))).collect();
        let outcomes =
            put::write(&self.inner, WriteMode::Upsert, Operation::BatchUpsertFrom, &items, config).await?;
        Ok(outcomes.into_iter().map(|outcome| outcome.map(drop)).collect())
    }

    async fn write_one(
        &self,
        mode: WriteMode,
        operation: Operation,
        key: &[u8],
        value: Payload<'_, T>,
        config: &ReplicateConfig,
    ) -> Result<PutOutcome> {
        one(put::write(&self.inner, mode, operation, &[Item { key, value }], config).await?)
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
    /// length, or `None` for a miss, and always the memory. Without a length, the content of the
    /// memory is undefined.
    ///
    /// # Errors
    /// Returns the errors of [`get`](Self::get), and `INVALID_PARAMS` if the value is longer than
    /// the memory.
    pub async fn get_into(&self, key: impl AsRef<[u8]>, into: SliceMut<T>) -> ReadInto<T> {
        let (asked, mut outcomes) =
            get::read(&self.inner, Operation::GetInto, &[key.as_ref()], vec![Want::Into(into)]).await;
        let (result, slice) = into_slice(outcomes.remove(0));
        (asked.and(result), slice)
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
    ///
    /// # Errors
    /// Returns an outer error if the outcome of every key is unknown.
    pub async fn batch_get_into<K: AsRef<[u8]>>(
        &self,
        items: Vec<(K, SliceMut<T>)>,
    ) -> (Result<()>, Vec<ReadInto<T>>) {
        let (keys, wants): (Vec<K>, Vec<Want<T>>) =
            items.into_iter().map(|(key, slice)| (key, Want::Into(slice))).unzip();
        let (asked, outcomes) = get::read(&self.inner, Operation::BatchGetInto, &slices(&keys), wants).await;
        (asked, outcomes.into_iter().map(into_slice).collect())
    }

    /// Reads values as [`batch_get_into`](Self::batch_get_into) does, but reports a miss as an
    /// error. The error is `OBJECT_NOT_FOUND` for a key without an object. If no replica can be
    /// read because its clients failed, the error is that of the last attempt.
    ///
    /// # Errors
    /// Returns the errors of [`batch_get_into`](Self::batch_get_into).
    pub async fn batch_read_into<K: AsRef<[u8]>>(
        &self,
        items: Vec<(K, SliceMut<T>)>,
    ) -> (Result<()>, Vec<(Result<usize>, SliceMut<T>)>) {
        let (keys, wants): (Vec<K>, Vec<Want<T>>) =
            items.into_iter().map(|(key, slice)| (key, Want::Into(slice))).unzip();
        let (asked, outcomes) = get::read(&self.inner, Operation::BatchGetInto, &slices(&keys), wants).await;
        let or_why = |mut outcome: Outcome<T>| {
            let why = outcome.lost.take().unwrap_or_else(|| ErrorCode::ObjectNotFound.into());
            let (result, slice) = into_slice(outcome);
            (result.and_then(|len| len.ok_or(why)), slice)
        };
        (asked, outcomes.into_iter().map(or_why).collect())
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

    /// Returns the length of a value in bytes, or `None` if there is no object.
    ///
    /// # Errors
    /// Returns an error if the master does not respond.
    pub async fn size(&self, key: impl AsRef<[u8]>) -> Result<Option<u64>> {
        let found = self.replicas(key).await?;
        Ok(found.and_then(|list| list.replicas.first().map(|replica| replica.location.size())))
    }

    /// Returns the replicas of a key with a lease on them, or `None` if there is no object.
    ///
    /// # Errors
    /// Returns an error if the master does not respond.
    pub async fn replicas(&self, key: impl AsRef<[u8]>) -> Result<Option<ReplicaList>> {
        one(self.batch_replicas(&[key]).await?)
    }

    /// Returns the replicas of many keys, as [`replicas`](Self::replicas) does, with one RPC.
    ///
    /// # Errors
    /// Returns an error if the outcome of every key is unknown.
    pub async fn batch_replicas<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
    ) -> Result<Vec<Result<Option<ReplicaList>>>> {
        let inner = &self.inner;
        inner.usable()?;
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let keys = slices(keys);
        let call = inner.master.locate(&inner.config.tenant, &keys);
        let answers = inner.deadline().bound("replica list", call).await?;
        let found = |answer| match answer {
            Ok(list) => Ok(Some(list)),
            Err(error) if is_miss(&error) => Ok(None),
            Err(error) => Err(error),
        };
        Ok(answers.into_iter().map(found).collect())
    }

    async fn exist_all(&self, keys: &[&[u8]]) -> Result<Vec<Result<bool>>> {
        let inner = &self.inner;
        inner.usable()?;
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        inner.deadline().bound("exist", inner.master.exist(&inner.config.tenant, keys)).await
    }

    async fn read_anywhere(
        &self,
        operation: Operation,
        keys: &[&[u8]],
    ) -> Result<Vec<Result<Option<Bytes>>>> {
        let wants = keys.iter().map(|_| Want::Anywhere).collect();
        let (asked, outcomes) = get::read(&self.inner, operation, keys, wants).await;
        asked?;
        let value = |outcome: Outcome<T>| {
            let found = outcome.result?;
            Ok(found.and(outcome.place.and_then(Incoming::into_bytes)))
        };
        Ok(outcomes.into_iter().map(value).collect())
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
        let removed = inner.deadline().bound("remove by pattern", call).await;
        inner.forget_all();
        inner.look_after_files();
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
        let removed = inner.deadline().bound("remove all", call).await;
        inner.forget_all();
        inner.look_after_files();
        removed
    }

    async fn remove_keys(&self, keys: &[&[u8]], force: bool) -> Result<Vec<Result<bool>>> {
        let inner = &self.inner;
        inner.usable()?;
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let call = inner.master.remove(&inner.config.tenant, keys, force);
        let answers = inner.deadline().bound("remove", call).await;
        inner.forget(keys.iter().copied());
        let answers = answers?;
        inner.forget_files(
            keys.iter().zip(&answers).filter(|(_, answer)| answer.is_ok()).map(|(key, _)| *key),
        );
        let removed = |answer: Result<()>| match answer {
            Ok(()) => Ok(true),
            Err(error) if error.code() == ErrorCode::ObjectNotFound => Ok(false),
            Err(error) => Err(error),
        };
        Ok(answers.into_iter().map(removed).collect())
    }
}

/// Registered memory for operations without a copy.
impl<T: Transport> Client<T> {
    /// Registers memory of the caller. Other clients cannot access this memory.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for an empty range, and the errors of the transport.
    pub fn register(&self, memory: Arc<dyn MemorySource>) -> Result<Region<T>> {
        self.inner.usable()?;
        self.inner.engine.register_local(memory)
    }

    /// Allocates registered memory. Other clients cannot access this memory.
    ///
    /// # Errors
    /// Returns `BUFFER_OVERFLOW` if the memory cannot be allocated, and `INVALID_PARAMS` for zero
    /// bytes.
    pub fn alloc_registered(&self, len: usize) -> Result<Region<T>> {
        self.register(Arc::new(HostMemory::with(len, &self.inner.config.memory)?))
    }
}

fn item<'a, T: Transport>(key: &'a impl AsRef<[u8]>, value: Payload<'a, T>) -> Item<'a, T> {
    Item { key: key.as_ref(), value }
}

fn slices<K: AsRef<[u8]>>(keys: &[K]) -> Vec<&[u8]> {
    keys.iter().map(AsRef::as_ref).collect()
}

/// Returns the result of a batch with one item.
fn one<A>(mut answers: Vec<Result<A>>) -> Result<A> {
    answers.pop().unwrap_or_else(|| Err(Error::internal("response without an item")))
}

fn is_miss(error: &Error) -> bool {
    matches!(error.code(), ErrorCode::ReplicaIsNotReady) || error.kind() == mooncake_core::ErrorKind::NotFound
}

fn into_slice<T: Transport>(outcome: Outcome<T>) -> ReadInto<T> {
    match (outcome.place, outcome.slice) {
        (Some(Incoming::Into(front)), _) => (outcome.result, front.into_slice()),
        (_, Some(slice)) => (outcome.result, slice),
        _ => unreachable!("a read gives the slice back that it was given"),
    }
}
