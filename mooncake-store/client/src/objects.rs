//! The calls about objects, single and in batches.

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

/// What a read into a slice comes to: the length of the value or `None` for a miss, and the slice.
pub type ReadInto<T> = (Result<Option<usize>>, SliceMut<T>);

/// Writing. Each call takes how the object is to be kept; `&ReplicateConfig::default()` is one
/// evictable copy.
impl<T: Transport> Client<T> {
    /// Stores a value under a key that is not there yet. One copy, by way of the local buffer.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for an empty key or value and for a key that is too long,
    /// `NO_AVAILABLE_HANDLE` when the cluster has no room, kind `Unavailable` or `Timeout` when it
    /// could not be stored in time. Nothing is left behind then.
    pub async fn put(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<PutOutcome> {
        self.put_with(key, value, &ReplicateConfig::default()).await
    }

    /// [`put`](Self::put), kept as `config` says.
    pub async fn put_with(
        &self,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        config: &ReplicateConfig,
    ) -> Result<PutOutcome> {
        self.write_one(WriteMode::Put, Operation::Put, key.as_ref(), Payload::Bytes(value.as_ref()), config)
            .await
    }

    /// [`put`](Self::put) of bytes that stay as they are, so that a wire that does not ask for
    /// registered memory (TCP does not) sends them without a copy.
    pub async fn put_bytes(
        &self,
        key: impl AsRef<[u8]>,
        value: &Bytes,
        config: &ReplicateConfig,
    ) -> Result<PutOutcome> {
        self.write_one(WriteMode::Put, Operation::Put, key.as_ref(), Payload::Shared(value), config).await
    }

    /// [`put_bytes`](Self::put_bytes) of many values, as [`batch_put`](Self::batch_put).
    ///
    /// # Errors
    /// As there.
    pub async fn batch_put_bytes<K: AsRef<[u8]>>(
        &self,
        items: &[(K, Bytes)],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<PutOutcome>>> {
        let items: Vec<_> = items.iter().map(|(k, v)| item(k, Payload::Shared(v))).collect();
        put::write(&self.inner, WriteMode::Put, Operation::PutBatch, &items, config).await
    }

    /// [`put`](Self::put) from registered memory: the bytes go from there to where they are kept,
    /// without a copy between.
    pub async fn put_from(
        &self,
        key: impl AsRef<[u8]>,
        value: &Slice<T>,
        config: &ReplicateConfig,
    ) -> Result<PutOutcome> {
        self.write_one(WriteMode::Put, Operation::PutFrom, key.as_ref(), Payload::Slice(value), config).await
    }

    /// Stores a value in place of the one that is there, if any. Readers see the old one or the new
    /// one, never a mixture.
    ///
    /// # Errors
    /// As [`put`](Self::put); kind `Busy` while another write of the key is under way.
    pub async fn upsert(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<()> {
        let config = ReplicateConfig::default();
        let value = Payload::Bytes(value.as_ref());
        self.write_one(WriteMode::Upsert, Operation::Upsert, key.as_ref(), value, &config).await.map(drop)
    }

    /// [`upsert`](Self::upsert) from registered memory.
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

    /// Stores many values: one call to the master before and one after, one posting per member.
    /// Each may fail on its own.
    ///
    /// # Errors
    /// The outer one means that nothing is known of any.
    pub async fn batch_put<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        &self,
        items: &[(K, V)],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<PutOutcome>>> {
        let items: Vec<_> = items.iter().map(|(k, v)| item(k, Payload::Bytes(v.as_ref()))).collect();
        put::write(&self.inner, WriteMode::Put, Operation::PutBatch, &items, config).await
    }

    /// [`batch_put`](Self::batch_put) from registered memory.
    ///
    /// # Errors
    /// As there.
    pub async fn batch_put_from<K: AsRef<[u8]>>(
        &self,
        items: &[(K, Slice<T>)],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<PutOutcome>>> {
        let items: Vec<_> = items.iter().map(|(k, v)| item(k, Payload::Slice(v))).collect();
        put::write(&self.inner, WriteMode::Put, Operation::BatchPutFrom, &items, config).await
    }

    /// [`upsert`](Self::upsert) of many values.
    ///
    /// # Errors
    /// As [`batch_put`](Self::batch_put).
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

    /// [`upsert_from`](Self::upsert_from) of many values.
    ///
    /// # Errors
    /// As [`batch_put`](Self::batch_put).
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

    /// [`batch_put_from`](Self::batch_put_from) with each value in pieces that follow each other,
    /// wherever they lie.
    ///
    /// # Errors
    /// As there.
    pub async fn batch_put_pieces<K: AsRef<[u8]>>(
        &self,
        items: &[(K, Vec<Slice<T>>)],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<PutOutcome>>> {
        let items: Vec<_> = items.iter().map(|(k, v)| item(k, Payload::Pieces(v))).collect();
        put::write(&self.inner, WriteMode::Put, Operation::BatchPutFromMultiBuffers, &items, config).await
    }

    /// [`batch_upsert_from`](Self::batch_upsert_from) with each value in pieces that follow each
    /// other.
    ///
    /// # Errors
    /// As [`batch_put`](Self::batch_put).
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

/// Reading.
impl<T: Transport> Client<T> {
    /// The value of a key, `None` when it is not there (any more). The bytes are those of one whole
    /// put.
    ///
    /// They lie in the local buffer while it has room, so let go of them soon.
    ///
    /// # Errors
    /// `LEASE_EXPIRED` when the bytes came too late to be trusted, twice; kind `Unavailable` or
    /// `Timeout` when the master does not answer; `BUFFER_OVERFLOW` when there is no memory for the
    /// value.
    pub async fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Bytes>> {
        one(self.read_anywhere(Operation::GetBuffer, &[key.as_ref()]).await?)
    }

    /// Reads a value to the front of registered memory, without a copy between. Gives its length,
    /// `None` for a miss, and the memory, whatever happened. After anything but a length, what is
    /// in the memory is not defined.
    ///
    /// # Errors
    /// As [`get`](Self::get), and `INVALID_PARAMS` when the value is longer than the memory.
    pub async fn get_into(&self, key: impl AsRef<[u8]>, into: SliceMut<T>) -> ReadInto<T> {
        let (asked, mut outcomes) =
            get::read(&self.inner, Operation::GetInto, &[key.as_ref()], vec![Want::Into(into)]).await;
        let (result, slice) = into_slice(outcomes.remove(0));
        (asked.and(result), slice)
    }

    /// The values of many keys: one call to the master, one posting per member. Each may fail on
    /// its own.
    ///
    /// # Errors
    /// The outer one means that nothing is known of any.
    pub async fn batch_get<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Result<Option<Bytes>>>> {
        self.read_anywhere(Operation::BatchGetBuffer, &slices(keys)).await
    }

    /// [`get_into`](Self::get_into) of many keys. Every slice comes back, in order.
    ///
    /// # Errors
    /// The outer one means that nothing is known of any.
    pub async fn batch_get_into<K: AsRef<[u8]>>(
        &self,
        items: Vec<(K, SliceMut<T>)>,
    ) -> (Result<()>, Vec<ReadInto<T>>) {
        let (keys, wants): (Vec<K>, Vec<Want<T>>) =
            items.into_iter().map(|(key, slice)| (key, Want::Into(slice))).unzip();
        let (asked, outcomes) = get::read(&self.inner, Operation::BatchGetInto, &slices(&keys), wants).await;
        (asked, outcomes.into_iter().map(into_slice).collect())
    }

    /// The same, but a miss is an error that says why: `OBJECT_NOT_FOUND` for a key that is not
    /// there, and for one whose value nobody could give, because its members died, what the last of
    /// them failed with.
    ///
    /// # Errors
    /// As [`batch_get_into`](Self::batch_get_into).
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

    /// Whether a key can be read now. If so, nothing takes it away for the time of a lease.
    ///
    /// # Errors
    /// The master does not answer.
    pub async fn exist(&self, key: impl AsRef<[u8]>) -> Result<bool> {
        one(self.exist_all(&[key.as_ref()]).await?)
    }

    /// [`exist`](Self::exist) of many keys, in one call.
    ///
    /// # Errors
    /// The outer one means that nothing is known of any.
    pub async fn batch_exist<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Result<bool>>> {
        self.exist_all(&slices(keys)).await
    }

    /// Length of a value in bytes, `None` when it is not there.
    ///
    /// # Errors
    /// The master does not answer.
    pub async fn size(&self, key: impl AsRef<[u8]>) -> Result<Option<u64>> {
        let found = self.replicas(key).await?;
        Ok(found.and_then(|list| list.replicas.first().map(|replica| replica.location.size())))
    }

    /// Where a key lies, with a lease on it; `None` when it is not there.
    ///
    /// # Errors
    /// The master does not answer.
    pub async fn replicas(&self, key: impl AsRef<[u8]>) -> Result<Option<ReplicaList>> {
        one(self.batch_replicas(&[key]).await?)
    }

    /// [`replicas`](Self::replicas) of many keys, in one call.
    ///
    /// # Errors
    /// The outer one means that nothing is known of any.
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

/// Removing.
impl<T: Transport> Client<T> {
    /// Removes a key; whether it was there. Readers that have begun still finish, or fail, but
    /// never see other bytes.
    ///
    /// # Errors
    /// `OBJECT_HAS_LEASE` while somebody may be reading it (`force` overrides that),
    /// `REPLICA_IS_NOT_READY` while it is being written, and when the master does not answer.
    pub async fn remove(&self, key: impl AsRef<[u8]>, force: bool) -> Result<bool> {
        one(self.remove_keys(&[key.as_ref()], force).await?)
    }

    /// [`remove`](Self::remove) of many keys, in one call.
    ///
    /// # Errors
    /// The outer one means that nothing is known of any.
    pub async fn batch_remove<K: AsRef<[u8]>>(&self, keys: &[K], force: bool) -> Result<Vec<Result<bool>>> {
        self.remove_keys(&slices(keys), force).await
    }

    /// Removes every key that the regular expression finds a match in; how many. Those in use are
    /// skipped.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for a pattern that is none, and when the master does not answer.
    pub async fn remove_matching(&self, pattern: &str, force: bool) -> Result<u64> {
        let inner = &self.inner;
        inner.usable()?;
        let call = inner.master.remove_matching(&inner.config.tenant, pattern, force);
        let removed = inner.deadline().bound("remove by pattern", call).await;
        inner.forget_all();
        #[cfg(feature = "disk")]
        inner.look_after_files();
        removed
    }

    /// Removes every key; how many. Those in use are skipped.
    ///
    /// # Errors
    /// The master does not answer.
    pub async fn remove_all(&self, force: bool) -> Result<u64> {
        let inner = &self.inner;
        inner.usable()?;
        let call = inner.master.remove_all(&inner.config.tenant, force);
        let removed = inner.deadline().bound("remove all", call).await;
        inner.forget_all();
        #[cfg(feature = "disk")]
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
        #[cfg(feature = "disk")]
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

/// Registered memory, for the zero-copy calls.
impl<T: Transport> Client<T> {
    /// Registers memory of the caller's, closed to peers.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for memory of no bytes, and whatever the wire has against it.
    pub fn register(&self, memory: Arc<dyn MemorySource>) -> Result<Region<T>> {
        self.inner.usable()?;
        self.inner.engine.register_local(memory)
    }

    /// New registered memory, closed to peers.
    ///
    /// # Errors
    /// `BUFFER_OVERFLOW` when there is not that much, `INVALID_PARAMS` for no bytes.
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

/// The answer to a batch of one.
fn one<A>(mut answers: Vec<Result<A>>) -> Result<A> {
    answers.pop().unwrap_or_else(|| Err(Error::internal("an answer without an item")))
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
