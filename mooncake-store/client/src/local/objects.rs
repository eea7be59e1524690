//! Operations of a shared client. They have the semantics and the errors of the operations of
//! [`Client`](crate::Client). All of them fail with `RPC_FAIL` while no daemon responds.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use mooncake_core::ErrorKind::{NotFound, Timeout, Unavailable};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::Uuid;
use mooncake_core::replica::ReplicaList;
use mooncake_core::{Error, ErrorKind, Result};
use mooncake_protocol::message::{
    CheckHealth, CopyObject, CountPrefixObjects, FetchObject, FindTask, ListPrefixReplicas, ListReplicas,
    LocateObjects, LocatePrefixObjects, MoveObject, ObjectsExist, ProbeObjects, ReadObjects, ReadRanges,
    RemoveEvery, RemoveMatching, RemoveObjects, Request, RequestPrefetch,
};
use mooncake_protocol::parts::{KEY_OVERHEAD, MAX_ITEMS, OnFailure, call_in_parts, front, probe_in_parts};
use mooncake_protocol::report::Reported;
use mooncake_protocol::wire::{LocatedObject, MemoryRange, ObjectRange, ObjectSink};
use mooncake_transport::{SliceMut, Transport};

use super::call::PartResults;
use super::client::{LocalClient, LocalInner};
use super::read_plan::{LocalRead, PartOutcome, ReadPlan, by_parts, each_part};
use super::released::HeldObject;
use super::shared::{LocalBuf, Pool};
use crate::batch_parts::call_by_parts;
use crate::deadline::Deadline;
use crate::errors::is_lost;
use crate::exist_options::ExistOptions;
use crate::ranges::RangeRead;
use mooncake_protocol::api::ProbePolicy;
use mooncake_protocol::wire::TaskInfo;

/// Length of a memory range in a request, in bytes.
pub(super) const PIECE_LEN: usize = 32;
/// Minimum number of bytes for a read of unknown length.
const MIN_READ_LEN: u64 = 4 << 10;
/// Maximum number of objects that a batch locates before it reads them. The daemon removes the
/// oldest located objects of a shared client beyond a number.
pub(super) const LOCATED_AT_ONCE: usize = 4096;

/// Located object: its length and its number at the daemon. Cloning is cheap. The value is usable
/// while the lease lasts. The space of a removed object is free once no value of its read exists.
#[derive(Clone, Debug)]
pub struct LocatedLocal {
    held: Arc<HeldObject>,
    size: u64,
}

impl LocatedLocal {
    /// Returns the length of the object in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }
}

impl LocalInner {
    /// Returns an object that the daemon has located.
    fn located(&self, found: LocatedObject) -> LocatedLocal {
        LocatedLocal { held: HeldObject::new(found.number, &self.released), size: found.size }
    }
}

/// Part of an object to read.
pub type LocalRange<T> = RangeRead<T, LocatedLocal>;

/// Reads.
impl LocalClient {
    /// Returns the value of a key in a shared buffer, or `None` if there is no object. Drop the
    /// value soon, because it occupies the buffer of this shared client.
    ///
    /// # Errors
    /// Returns the errors of [`Client::get`](crate::Client::get).
    pub async fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Bytes>> {
        Ok(self.fetch(key.as_ref()).await?.map(LocalBuf::into_bytes))
    }

    /// Returns the values of many keys, as [`get`](Self::get) does. Each key has its own result.
    ///
    /// # Errors
    /// Returns an outer error if the outcome of every key is unknown.
    pub async fn batch_get<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Result<Option<Bytes>>>> {
        let bytes = |value: Result<Option<LocalBuf>>| Ok(value?.map(LocalBuf::into_bytes));
        Ok(self.batch_get_buf(keys).await?.into_iter().map(bytes).collect())
    }

    /// Returns the values of many keys as buffers, as [`batch_get`](Self::batch_get) does.
    ///
    /// # Errors
    /// Returns the errors of [`batch_get`](Self::batch_get).
    pub async fn batch_get_buf<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Result<Option<LocalBuf>>>> {
        if let [key] = keys {
            return Ok(vec![self.fetch(key.as_ref()).await]);
        }
        let mut values = Vec::with_capacity(keys.len());
        let at_once = if is_planted("shared-clients-read-once") { usize::MAX } else { LOCATED_AT_ONCE };
        // Each part has the time of one operation.
        for part in keys.chunks(at_once) {
            match self.fetch_each(part, &mut values, &self.inner.deadline()).await {
                Ok(read) => values.extend(read),
                Err(error) if values.is_empty() => return Err(error),
                Err(error) => {
                    // The values of the earlier keys are known.
                    values.resize_with(keys.len(), || Err(error.clone()));
                    break;
                }
            }
        }
        // The buffers for a large batch can take longer than a lease, and calls wait for their
        // turn. Each repetition reads at least one value, or is the last.
        loop {
            let late = |value: &Result<Option<LocalBuf>>| {
                value.as_ref().is_err_and(|error| error.kind() == ErrorKind::Expired)
            };
            let late_indices: Vec<usize> = (0..keys.len()).filter(|&i| late(&values[i])).collect();
            if late_indices.is_empty() || is_planted("shared-clients-read-once") {
                return Ok(values);
            }
            let mut more = false;
            for late_indices in late_indices.chunks(LOCATED_AT_ONCE) {
                let late_keys: Vec<&[u8]> = late_indices.iter().map(|&i| keys[i].as_ref()).collect();
                let Ok(read) = self.fetch_each(&late_keys, &mut values, &self.inner.deadline()).await else {
                    return Ok(values);
                };
                for (&i, value) in late_indices.iter().zip(read) {
                    more |= !late(&value);
                    values[i] = value;
                }
            }
            if !more {
                return Ok(values);
            }
        }
    }

    /// Locates and reads values. `earlier` are the values of the same call that were read before.
    async fn fetch_each<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        earlier: &mut [Result<Option<LocalBuf>>],
        deadline: &Deadline,
    ) -> Result<Vec<Result<Option<LocalBuf>>>> {
        let located = self.locate_by(keys, deadline).await?;
        let (mut values, mut ranges, mut buffers) = (Vec::with_capacity(keys.len()), Vec::new(), Vec::new());
        // Values for which there is no more shared memory.
        let mut without_buffer = Vec::new();
        // The daemon holds the objects until they are read.
        let mut held = Vec::new();
        for (at, found) in located.into_iter().enumerate() {
            let object = match found {
                Ok(Some(object)) => object,
                Ok(None) => {
                    values.push(Some(Ok(None)));
                    continue;
                }
                Err(error) => {
                    values.push(Some(Err(error)));
                    continue;
                }
            };
            let buffer = match usize::try_from(object.size) {
                Ok(len) => match self.inner.try_allocate(len, deadline).await {
                    Ok(None) => {
                        without_buffer.push((at, object.held.number, len));
                        held.push(object);
                        values.push(Some(Ok(None)));
                        continue;
                    }
                    buffer => buffer,
                },
                Err(_) => Err(Error::invalid(format!("a value of {} bytes", object.size))),
            };
            match buffer {
                Ok(None) => values.push(Some(Ok(None))),
                Ok(Some(buffer)) => {
                    ranges.push(ObjectRange {
                        object: object.held.number,
                        offset: 0,
                        into: buffer.shared_range(0, buffer.len()),
                    });
                    held.push(object);
                    buffers.push(buffer);
                    values.push(None);
                }
                Err(error) => values.push(Some(Err(error))),
            }
        }
        let answered = self.read_in_calls(&ranges, true, buffers, deadline).await?;
        let failure = answered.failure;
        let mut read =
            answered.results.into_iter().zip(answered.held.into_iter().flatten()).map(|(result, buffer)| {
                match result {
                    Ok(()) => Ok(Some(buffer)),
                    // The node with the replica is gone, so the value is lost.
                    Err(error) if matches!(error.kind(), NotFound | Unavailable | Timeout) => Ok(None),
                    Err(error) => Err(error),
                }
            });
        let lost = || Err(failure.clone().unwrap_or_else(|| Error::internal("response without an item")));
        let mut values: Vec<_> =
            values.into_iter().map(|known| known.or_else(|| read.next()).unwrap_or_else(lost)).collect();
        if let Some(error) = &failure {
            without_buffer.iter().for_each(|(at, ..)| values[*at] = Err(error.clone()));
        } else if !without_buffer.is_empty() {
            for value in earlier.iter_mut().chain(&mut values).flatten().flatten() {
                value.stop_sharing();
            }
            self.read_without_buffer(&mut values, without_buffer, deadline).await;
        }
        Ok(values)
    }

    /// Reads values of a batch for which there was no shared memory, given by their positions in
    /// the batch, their numbers and their lengths.
    async fn read_without_buffer(
        &self,
        values: &mut [Result<Option<LocalBuf>>],
        without_buffer: Vec<(usize, u64, usize)>,
        deadline: &Deadline,
    ) {
        for (at, object, len) in without_buffer {
            values[at] = match self.inner.read_in_pieces(object, len, deadline).await {
                Ok(value) => Ok(Some(value)),
                Err(error) if matches!(error.kind(), NotFound | Unavailable | Timeout) => Ok(None),
                Err(error) => Err(error),
            };
        }
    }

    /// Reads one value of unknown length. One call suffices if the value fits into the estimated
    /// length.
    async fn fetch(&self, key: &[u8]) -> Result<Option<LocalBuf>> {
        let deadline = self.inner.deadline();
        match self.fetch_once(key, &deadline).await {
            // The call waited for a buffer or for its turn until the lease was over. The buffer of
            // the next try has the length of the value.
            Err(error) if error.kind() == ErrorKind::Expired && !deadline.is_over() => {
                self.fetch_once(key, &deadline).await
            }
            outcome => outcome,
        }
    }

    async fn fetch_once(&self, key: &[u8], deadline: &Deadline) -> Result<Option<LocalBuf>> {
        let inner = &self.inner;
        let max = inner.pool.as_ref().map_or(MIN_READ_LEN, |pool| Pool::capacity(pool) / 4);
        let estimate = inner.longest.load(Ordering::Relaxed).max(MIN_READ_LEN).min(max).max(1);
        let mut buffer = inner.allocate(usize::try_from(estimate).unwrap_or(1), deadline).await?;
        let call = FetchObject { key, into: buffer.shared_range(0, buffer.len()) };
        let (found, held) = inner.call(&call, buffer, deadline).await?;
        buffer = held;
        let Some(found) = found.outcome()? else { return Ok(None) };
        let (len, number) = (found.size, found.number);
        // Short values reduce the estimate slowly.
        inner.longest.store(len.max(estimate - estimate / 64), Ordering::Relaxed);
        let size = usize::try_from(len).map_err(|_| Error::invalid(format!("a value of {len} bytes")))?;
        if size > buffer.len() {
            let _held = inner.located(found);
            drop(buffer);
            let buffer = match inner.try_allocate(size, deadline).await? {
                Some(buffer) => buffer,
                None if Pool::fits(inner.pool.as_ref(), size) => inner.allocate(size, deadline).await?,
                None => return read_or_miss(inner.read_in_pieces(number, size, deadline).await),
            };
            // The object was located once. An object that ends at its first read is gone by now.
            let ranges = vec![ObjectRange { object: number, offset: 0, into: buffer.shared_range(0, size) }];
            let call = ReadRanges { ranges: ranges.into(), relocates: true };
            let (read, mut buffer) = inner.call_each(1, &call, buffer, deadline).await?;
            buffer.truncate(size);
            return read_or_miss(one(read).map(|()| buffer));
        }
        buffer.truncate(size);
        if size * 2 < usize::try_from(estimate).unwrap_or(usize::MAX)
            && let Some(mut fitting) = inner.pool.as_ref().and_then(|pool| pool.try_take(size))
        {
            // Callers may hold values for long, so a value should not occupy twice the memory that
            // it needs.
            fitting.copy_from_slice(&buffer);
            return Ok(Some(fitting));
        }
        Ok(Some(buffer))
    }

    /// Reads a value to the front of memory. Returns its length, or `None` if there is no object.
    ///
    /// # Errors
    /// Returns the errors of [`Client::get_into`](crate::Client::get_into).
    pub async fn get_into<T: Transport>(
        &self,
        key: impl AsRef<[u8]>,
        into: SliceMut<T>,
    ) -> LocalRead<Option<usize>, T> {
        self.batch_get_into(vec![(key, into)])
            .await
            .pop()
            .unwrap_or_else(|| LocalRead::failed(Error::internal("response without an item"), None))
    }

    /// Reads many values, as [`get_into`](Self::get_into) does. Returns each slice, except those to
    /// which the daemon may still write.
    pub async fn batch_get_into<K: AsRef<[u8]>, T: Transport>(
        &self,
        items: Vec<(K, SliceMut<T>)>,
    ) -> Vec<LocalRead<Option<usize>, T>> {
        let parts = by_parts(items, |(_, into)| into.len());
        each_part(parts, |(_, into)| into, |items| self.read_objects(items)).await
    }

    async fn read_objects<K: AsRef<[u8]>, T: Transport>(
        &self,
        items: Vec<(K, SliceMut<T>)>,
    ) -> PartOutcome<Option<usize>, T> {
        let deadline = self.inner.deadline();
        let (keys, slices): (Vec<K>, Vec<SliceMut<T>>) = items.into_iter().unzip();
        let plan = ReadPlan::of(&self.inner, slices, &deadline).await;
        let sink = |(i, range): &(usize, MemoryRange)| ObjectSink { key: keys[*i].as_ref(), into: *range };
        let objects: Vec<ObjectSink<'_>> = plan.ranges.iter().map(sink).collect();
        let len = |object: &ObjectSink<'_>| object.key.len() + PIECE_LEN;
        let call = |_, part| ReadObjects { objects: Cow::Borrowed(part) };
        let mut sinks = plan.sinks.into_iter();
        let held = |count| sinks.by_ref().take(count).collect();
        let response = self.inner.call_each_in_parts(&objects, len, call, held, &deadline).await;
        let length = |len: u64| usize::try_from(len).unwrap_or(usize::MAX);
        plan.slices.combine(response, |len| len.map(length), |read| read.unwrap_or(0))
    }

    /// Reads ranges of located objects. The result of a range is `LEASE_EXPIRED` if its object was
    /// located too long ago, so that its lease has ended.
    pub async fn read_ranges<T: Transport>(&self, reads: Vec<LocalRange<T>>) -> Vec<LocalRead<(), T>> {
        self.read_ranges_as(reads, false).await
    }

    /// Reads ranges like [`read_ranges`](Self::read_ranges), of objects that the same operation has
    /// located. The daemon locates an object again whose lease has ended, as
    /// [`ClientRanges::read_current`](crate::ClientRanges::read_current) does.
    pub async fn read_current_ranges<T: Transport>(
        &self,
        reads: Vec<LocalRange<T>>,
    ) -> Vec<LocalRead<(), T>> {
        self.read_ranges_as(reads, true).await
    }

    async fn read_ranges_as<T: Transport>(
        &self,
        reads: Vec<LocalRange<T>>,
        relocates: bool,
    ) -> Vec<LocalRead<(), T>> {
        let parts = by_parts(reads, |read| read.into.len());
        each_part(parts, |read| read.into, |reads| self.read_some_ranges(reads, relocates)).await
    }

    async fn read_some_ranges<T: Transport>(
        &self,
        reads: Vec<LocalRange<T>>,
        relocates: bool,
    ) -> PartOutcome<(), T> {
        let deadline = self.inner.deadline();
        // The daemon holds the objects until they are read.
        let (positions, slices): (Vec<(LocatedLocal, u64)>, Vec<SliceMut<T>>) =
            reads.into_iter().map(|read| ((read.object, read.offset), read.into)).unzip();
        let longest = slices.iter().map(SliceMut::len).max().unwrap_or(0);
        let plan = ReadPlan::of(&self.inner, slices, &deadline).await;
        let ranges: Vec<_> = plan
            .ranges
            .iter()
            .map(|(i, range)| {
                let (object, offset) = &positions[*i];
                ObjectRange { object: object.held.number, offset: *offset, into: *range }
            })
            .collect();
        let response = self.read_in_calls(&ranges, relocates, plan.sinks, &deadline).await;
        plan.slices.combine(response, |()| (), |()| longest)
    }

    /// Returns each object with a lease on it, or `None` for a key without an object.
    ///
    /// # Errors
    /// Returns an outer error if the outcome of every key is unknown.
    pub async fn locate<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Result<Option<LocatedLocal>>>> {
        call_by_parts(keys, |part| async move { self.locate_by(part, &self.inner.deadline()).await }).await
    }

    async fn locate_by<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        deadline: &Deadline,
    ) -> Result<Vec<Result<Option<LocatedLocal>>>> {
        let len = |key: &K| key.as_ref().len() + KEY_OVERHEAD;
        call_in_parts(keys, len, OnFailure::KeepResults, |_, part| async move {
            let call = LocateObjects { keys: key_slices(part) };
            let found = self.inner.call(&call, (), deadline).await?.0.outcome()?;
            if found.len() != part.len() {
                let text =
                    format!("{} responses from mooncake_client to {} requests", found.len(), part.len());
                return Err(Error::internal(text));
            }
            let located =
                |found: Reported<Option<_>>| Ok(found.outcome()?.map(|found| self.inner.located(found)));
            Ok(found.into_iter().map(located).collect())
        })
        .await
    }

    /// Reads ranges of located objects. `destinations` has the memory of each range.
    async fn read_in_calls<D: Send + 'static>(
        &self,
        ranges: &[ObjectRange],
        relocates: bool,
        destinations: Vec<D>,
        deadline: &Deadline,
    ) -> Result<PartResults<(), Vec<D>>> {
        let call = |_, part| ReadRanges { ranges: Cow::Borrowed(part), relocates };
        let mut destinations = destinations.into_iter();
        let held = |count| destinations.by_ref().take(count).collect();
        self.inner.call_each_in_parts(ranges, |_| 2 * PIECE_LEN, call, held, deadline).await
    }

    /// Makes calls about keys.
    async fn request_each<'k, K: AsRef<[u8]>, R, T>(
        &self,
        keys: &'k [K],
        deadline: &Deadline,
        request: impl Fn(Cow<'k, [&'k [u8]]>) -> R,
    ) -> Result<Vec<Result<T>>>
    where
        R: Request<Reply = Reported<Vec<Reported<T>>>> + Sync,
    {
        let len = |key: &K| key.as_ref().len() + KEY_OVERHEAD;
        call_in_parts(keys, len, OnFailure::KeepResults, |_, part: &'k [K]| {
            let call = request(key_slices(part));
            async move { Ok(self.inner.call_each(part.len(), &call, (), deadline).await?.0) }
        })
        .await
    }

    /// Returns for each key whether it can be read now.
    ///
    /// # Errors
    /// Returns an outer error if the outcome of every key is unknown.
    pub async fn batch_exist<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Result<bool>>> {
        call_by_parts(keys, |part| async move {
            self.request_each(part, &self.inner.deadline(), |keys| ObjectsExist { keys }).await
        })
        .await
    }

    /// Returns whether the key can be read now.
    ///
    /// # Errors
    /// Returns an error if the master or the daemon does not respond.
    pub async fn exist(&self, key: impl AsRef<[u8]>) -> Result<bool> {
        one(self.batch_exist(&[key]).await?)
    }

    /// Returns whether the key can be read now, with these settings.
    ///
    /// # Errors
    /// Returns an error if the master or the daemon does not respond.
    pub async fn exist_with(&self, key: impl AsRef<[u8]>, options: &ExistOptions) -> Result<bool> {
        one(self.batch_exist_with(&[key], options).await?)
    }

    /// Returns for each key whether it can be read now, with these settings. The client of the
    /// daemon has to allow prefetches. Existence checks succeed without them.
    ///
    /// # Errors
    /// Returns an outer error if the outcome of every key is unknown.
    pub async fn batch_exist_with<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        options: &ExistOptions,
    ) -> Result<Vec<Result<bool>>> {
        let found = self.batch_exist(keys).await?;
        if options.prefetch_to_memory {
            let readable = keys.iter().zip(&found).filter(|(_, found)| matches!(found, Ok(true)));
            let readable: Vec<&[u8]> = readable.map(|(key, _)| key.as_ref()).collect();
            let mut rest = &readable[..];
            while !rest.is_empty() {
                let part = front(rest, MAX_ITEMS, |key| key.len() + KEY_OVERHEAD);
                rest = &rest[part.len()..];
                if let Err(error) = self.inner.send_request(&RequestPrefetch { keys: part.into() }).await {
                    tracing::debug!(objects = readable.len(), "not prefetched: {error}");
                    break;
                }
            }
        }
        Ok(found)
    }

    /// Returns whether the key can be read now, without a lease.
    ///
    /// # Errors
    /// Those of [`batch_probe`](Self::batch_probe).
    pub async fn probe(&self, key: impl AsRef<[u8]>) -> Result<bool> {
        one(self.batch_probe(&[key], ProbePolicy::NONE).await?)
    }

    /// Returns for each key whether it can be read now, as
    /// [`Client::batch_probe`](crate::Client::batch_probe) does.
    ///
    /// # Errors
    /// Returns an outer error if the outcome of every key is unknown; `NOT_SUPPORTED` if the daemon
    /// or the master lacks the call.
    pub async fn batch_probe<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        policy: ProbePolicy,
    ) -> Result<Vec<Result<bool>>> {
        let deadline = self.inner.deadline();
        let len = |key: &K| key.as_ref().len() + KEY_OVERHEAD;
        let call = async |part: &[K], policy| {
            let request = ProbeObjects { policy, keys: key_slices(part) };
            Ok(self.inner.call_each(part.len(), &request, (), &deadline).await?.0)
        };
        let lease = |part| self.request_each(part, &deadline, |keys| ObjectsExist { keys });
        probe_in_parts(keys, len, policy, call, lease).await
    }

    /// Returns the length of a value in bytes, or `None` if there is no object.
    ///
    /// # Errors
    /// Returns the errors of [`exist`](Self::exist).
    pub async fn size(&self, key: impl AsRef<[u8]>) -> Result<Option<u64>> {
        Ok(one(self.locate(&[key]).await?)?.map(|object| object.size))
    }

    /// Returns the replicas of each key, or `None` for a key without an object.
    ///
    /// # Errors
    /// Returns an outer error if the outcome of every key is unknown.
    pub async fn batch_replicas<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
    ) -> Result<Vec<Result<Option<ReplicaList>>>> {
        call_by_parts(keys, |part| async move {
            self.request_each(part, &self.inner.deadline(), |keys| ListReplicas { keys }).await
        })
        .await
    }

    /// Returns the number of keys from the front that can be read now, as
    /// [`ClientReplicas::prefix_hits`](crate::ClientReplicas::prefix_hits) does.
    ///
    /// # Errors
    /// Returns an error if the master or the daemon does not respond.
    pub async fn prefix_hits<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<usize> {
        let request =
            async |part| self.inner.send_request(&CountPrefixObjects { keys: key_slices(part) }).await;
        let count = |hits: &u64| usize::try_from(*hits).unwrap_or(usize::MAX);
        let hits: Vec<u64> = self.inner.request_prefix(keys, request, count).await?;
        Ok(hits.iter().map(count).fold(0, usize::saturating_add).min(keys.len()))
    }

    /// Returns the objects of the keys from the front that can be read, with a lease on each, as
    /// [`ClientRanges::locate_prefix`](crate::ClientRanges::locate_prefix) does.
    ///
    /// # Errors
    /// Returns the errors of [`prefix_hits`](Self::prefix_hits).
    pub async fn locate_prefix<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<LocatedLocal>> {
        let request = async |part| {
            let call = LocatePrefixObjects { keys: key_slices(part) };
            let found = self.inner.send_request(&call).await?;
            Ok(found.into_iter().map(|found| self.inner.located(found)).collect::<Vec<_>>())
        };
        Ok(self.inner.request_prefix(keys, request, Vec::len).await?.into_iter().flatten().collect())
    }

    /// Returns the replicas of the keys from the front that can be read, as
    /// [`ClientReplicas::list_prefix`](crate::ClientReplicas::list_prefix) does.
    ///
    /// # Errors
    /// Returns the errors of [`prefix_hits`](Self::prefix_hits).
    pub async fn list_prefix<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<ReplicaList>> {
        let request =
            async |part| self.inner.send_request(&ListPrefixReplicas { keys: key_slices(part) }).await;
        Ok(self.inner.request_prefix(keys, request, Vec::len).await?.into_iter().flatten().collect())
    }

    /// Returns whether the daemon and its master respond.
    pub async fn is_healthy(&self) -> bool {
        let outcome = self.inner.call(&CheckHealth {}, (), &self.inner.deadline()).await;
        outcome.is_ok_and(|(healthy, ())| healthy)
    }
}

/// Removals, copies and moves.
impl LocalClient {
    /// Removes each key. Returns for each whether it existed.
    ///
    /// # Errors
    /// Returns an outer error if the outcome of every key is unknown. The results of single keys
    /// have the errors of [`Client::remove`](crate::Client::remove).
    pub async fn batch_remove<K: AsRef<[u8]>>(&self, keys: &[K], force: bool) -> Result<Vec<Result<bool>>> {
        call_by_parts(keys, |part| async move {
            self.request_each(part, &self.inner.deadline(), |keys| RemoveObjects { keys, force }).await
        })
        .await
    }

    /// Removes one key. Returns whether it existed.
    ///
    /// # Errors
    /// Returns the errors of [`batch_remove`](Self::batch_remove).
    pub async fn remove(&self, key: impl AsRef<[u8]>, force: bool) -> Result<bool> {
        one(self.batch_remove(&[key], force).await?)
    }

    /// Removes every object whose key contains a match of the regular expression. Returns the
    /// number of removed objects.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for an invalid pattern, and an error if the daemon or the master
    /// does not respond.
    pub async fn remove_matching(&self, pattern: &str, force: bool) -> Result<u64> {
        self.inner.send_request(&RemoveMatching { pattern, force }).await
    }

    /// Removes every object. Returns the number of removed objects.
    ///
    /// # Errors
    /// Returns an error if the daemon or the master does not respond.
    pub async fn remove_all(&self, force: bool) -> Result<u64> {
        self.inner.send_request(&RemoveEvery { force }).await
    }

    /// Requests a copy of an object, as [`ClientReplicas::copy`](crate::ClientReplicas::copy) does.
    ///
    /// # Errors
    /// Returns the errors of [`ClientReplicas::copy`](crate::ClientReplicas::copy).
    pub async fn copy_task(&self, key: impl AsRef<[u8]>, targets: &[&str]) -> Result<Uuid> {
        self.inner.send_request(&CopyObject { key: key.as_ref(), targets: targets.into() }).await
    }

    /// Requests a move of an object, as [`ClientReplicas::move_to`](crate::ClientReplicas::move_to)
    /// does.
    ///
    /// # Errors
    /// Returns the errors of [`ClientReplicas::move_to`](crate::ClientReplicas::move_to).
    pub async fn move_task(&self, key: impl AsRef<[u8]>, source: &str, target: &str) -> Result<Uuid> {
        self.inner.send_request(&MoveObject { key: key.as_ref(), source, target }).await
    }

    /// Returns the progress of a task.
    ///
    /// # Errors
    /// Returns `TASK_NOT_FOUND` for an unknown task, and an error if the daemon or the master does
    /// not respond.
    pub async fn task(&self, task: Uuid) -> Result<TaskInfo> {
        self.inner.send_request(&FindTask { task }).await
    }
}

/// Returns a value that was read, or `None` if the object is lost.
fn read_or_miss(read: Result<LocalBuf>) -> Result<Option<LocalBuf>> {
    match read {
        Err(error) if is_lost(&error) => Ok(None),
        read => read.map(Some),
    }
}

fn key_slices<K: AsRef<[u8]>>(keys: &[K]) -> Cow<'_, [&[u8]]> {
    keys.iter().map(AsRef::as_ref).collect()
}

/// Returns the result of a batch with one item.
pub(super) fn one<R>(mut outcomes: Vec<Result<R>>) -> Result<R> {
    outcomes.pop().unwrap_or_else(|| Err(Error::internal("response without an item")))
}
