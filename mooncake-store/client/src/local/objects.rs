//! Operations of a shared client. They have the semantics and the errors of the operations of
//! [`Client`](crate::Client). All of them fail with `RPC_FAIL` while no daemon responds.

use std::borrow::Cow;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use mooncake_core::ErrorKind::{NotFound, Timeout, Unavailable};
use mooncake_core::ids::Uuid;
use mooncake_core::replica::ReplicaList;
use mooncake_core::{Error, Result};
use mooncake_protocol::message::{
    CheckHealth, CopyObject, CountPrefixObjects, FetchObject, FindTask, ListPrefixReplicas, ListReplicas,
    LocateObjects, LocatePrefixObjects, MoveObject, ObjectsExist, ReadObjects, ReadRanges, RemoveEvery,
    RemoveMatching, RemoveObjects, Request, WriteObjects,
};
use mooncake_protocol::report::Reported;
use mooncake_protocol::wire::{LocatedObject, MemoryRange, ObjectPieces, ObjectRange, ObjectSink};
use mooncake_transport::{Slice, SliceMut, Transport};

use super::client::{Inner, LocalClient};
use super::shared::{LocalBuf, Pool};
use crate::deadline::Deadline;
use crate::errors::is_lost;
use crate::payload::PutOutcome;
use crate::put_options::PutOptions;
use crate::ranges::RangeRead;
use mooncake_protocol::api::WriteMode;
use mooncake_protocol::wire::TaskInfo;

/// Minimum number of bytes for a read of unknown length.
const GUESS: u64 = 4 << 10;

/// Located object: its length and its number at the daemon. Cloning is cheap. The value is usable
/// while the lease lasts.
#[derive(Clone, Debug)]
pub struct LocatedLocal {
    number: u64,
    size: u64,
}

impl LocatedLocal {
    /// Returns the length of the object in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }
}

impl From<LocatedObject> for LocatedLocal {
    fn from(found: LocatedObject) -> Self {
        Self { number: found.number, size: found.size }
    }
}

/// Part of an object to read.
pub type LocalRange<T> = RangeRead<T, LocatedLocal>;

/// Outcome of a read into memory of the caller, and the memory.
#[derive(Debug)]
pub struct LocalRead<R, T: Transport> {
    /// Outcome of the read.
    pub result: Result<R>,
    /// Memory of the caller, or `None` if the daemon may still write to it.
    pub into: Option<SliceMut<T>>,
}

impl<R, T: Transport> LocalRead<R, T> {
    fn failed(error: Error, into: Option<SliceMut<T>>) -> Self {
        Self { result: Err(error), into }
    }
}

/// Writes.
impl LocalClient {
    /// Stores a value under a new key. The value is copied once, into memory that the daemon also
    /// maps.
    ///
    /// # Errors
    /// Returns the errors of [`Client::put`](crate::Client::put).
    pub async fn put(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<PutOutcome> {
        self.put_with(key, value, &PutOptions::default()).await
    }

    /// Stores a value as [`put`](Self::put) does, with these settings.
    ///
    /// # Errors
    /// Returns the errors of [`Client::put_with`](crate::Client::put_with).
    pub async fn put_with(
        &self,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        options: &PutOptions,
    ) -> Result<PutOutcome> {
        self.write_bytes(&[(key.as_ref(), value.as_ref())], options).await.and_then(one)
    }

    /// Stores a value that already lies in shared memory, as [`put_with`](Self::put_with) does but
    /// without a copy.
    ///
    /// # Errors
    /// Returns the errors of [`put_with`](Self::put_with).
    pub async fn put_buf(
        &self,
        key: impl AsRef<[u8]>,
        value: LocalBuf,
        options: &PutOptions,
    ) -> Result<PutOutcome> {
        let pieces = vec![value.place(0, value.len())];
        let items = vec![ObjectPieces { key: key.as_ref(), pieces }];
        one(self.write(items, options, value, &self.inner.deadline()).await?)
    }

    /// Stores many values with one call. Each value has its own result.
    ///
    /// # Errors
    /// Returns an outer error if the outcome of every value is unknown.
    pub async fn batch_put<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        &self,
        items: &[(K, V)],
        options: &PutOptions,
    ) -> Result<Vec<Result<PutOutcome>>> {
        let items: Vec<_> = items.iter().map(|(key, value)| (key.as_ref(), value.as_ref())).collect();
        self.write_bytes(&items, options).await
    }

    async fn write_bytes(
        &self,
        items: &[(&[u8], &[u8])],
        options: &PutOptions,
    ) -> Result<Vec<Result<PutOutcome>>> {
        let deadline = self.inner.deadline();
        let total: usize = items.iter().map(|(_, value)| value.len()).sum();
        // An empty value needs no memory; the daemon refuses it.
        let mut room = match total {
            0 => None,
            len => Some(self.inner.room(len, &deadline).await?),
        };
        let mut at = 0;
        let items = items
            .iter()
            .map(|(key, value)| {
                let pieces = room.as_mut().filter(|_| !value.is_empty()).map(|room| {
                    room[at..at + value.len()].copy_from_slice(value);
                    let place = room.place(at, value.len());
                    at += value.len();
                    place
                });
                ObjectPieces { key, pieces: pieces.into_iter().collect() }
            })
            .collect();
        self.write(items, options, room, &deadline).await
    }

    /// Stores many values, each from consecutive pieces. Pieces in shared memory are not copied.
    ///
    /// # Errors
    /// Returns the errors of [`batch_put`](Self::batch_put).
    pub async fn batch_put_pieces<K: AsRef<[u8]>, T: Transport>(
        &self,
        items: &[(K, Vec<Slice<T>>)],
        options: &PutOptions,
    ) -> Result<Vec<Result<PutOutcome>>> {
        let deadline = self.inner.deadline();
        let (mut rooms, mut slices) = (Vec::new(), Vec::new());
        let mut calls = Vec::with_capacity(items.len());
        for (key, pieces) in items {
            let mut places = Vec::with_capacity(pieces.len());
            for piece in pieces {
                if let Some(place) = self.inner.memories.place(piece.addr(), piece.len()) {
                    slices.push(piece.clone());
                    places.push(place);
                    continue;
                }
                let mut room = self.inner.room(piece.len(), &deadline).await?;
                piece.copy_to(0, &mut room)?;
                places.push(room.place(0, room.len()));
                rooms.push(room);
            }
            calls.push(ObjectPieces { key: key.as_ref(), pieces: places });
        }
        self.write(calls, options, (rooms, slices), &deadline).await
    }

    async fn write<H: Send + 'static>(
        &self,
        items: Vec<ObjectPieces<'_>>,
        options: &PutOptions,
        held: H,
        deadline: &Deadline,
    ) -> Result<Vec<Result<PutOutcome>>> {
        let PutOptions { replication, mode } = options;
        let n = items.len();
        let call = WriteObjects {
            replace: *mode == WriteMode::Upsert,
            config: Cow::Borrowed(replication),
            hints: replication.hints.as_deref().map_or_else(Cow::default, Cow::Borrowed),
            objects: items.into(),
        };
        let (existed, _) = self.inner.call_each(n, &call, held, deadline).await?;
        let outcome = |existed| if existed { PutOutcome::Existed } else { PutOutcome::Stored };
        Ok(existed.into_iter().map(|existed| existed.map(outcome)).collect())
    }
}

/// Destination of the bytes of a read.
enum Sink<T: Transport> {
    /// Memory of the caller, which the daemon also maps.
    Direct(SliceMut<T>),
    /// Shared buffer, from which the bytes are then copied to the caller.
    Copied(LocalBuf),
}

impl Inner {
    /// Returns the shared memory that receives the bytes for `into`. If the daemon does not map
    /// `into`, the slice is returned, too, for a later copy.
    async fn sink<T: Transport>(
        &self,
        into: SliceMut<T>,
        deadline: &Deadline,
    ) -> Result<(Sink<T>, MemoryRange, Option<SliceMut<T>>), (Error, SliceMut<T>)> {
        match self.memories.place(into.addr(), into.len()) {
            Some(place) => Ok((Sink::Direct(into), place, None)),
            None => match self.room(into.len(), deadline).await {
                Ok(room) => {
                    let place = room.place(0, room.len());
                    Ok((Sink::Copied(room), place, Some(into)))
                }
                Err(error) => Err((error, into)),
            },
        }
    }
}

impl<T: Transport> Sink<T> {
    /// Returns the memory of the caller, with the first `len` bytes of the read in it.
    fn finish(self, kept: Option<SliceMut<T>>, len: usize) -> LocalRead<(), T> {
        match (self, kept) {
            (Sink::Direct(into), _) => LocalRead { result: Ok(()), into: Some(into) },
            (Sink::Copied(room), Some(mut into)) => {
                LocalRead { result: into.copy_from(0, &room[..len.min(room.len())]), into: Some(into) }
            }
            (Sink::Copied(_), None) => LocalRead::failed(Error::internal("a read lost its memory"), None),
        }
    }
}

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
        let deadline = self.inner.deadline();
        let located = self.locate_by(keys, &deadline).await?;
        let (mut values, mut ranges, mut rooms) = (Vec::with_capacity(keys.len()), Vec::new(), Vec::new());
        for found in located {
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
            let room = match usize::try_from(object.size) {
                Ok(len) => self.inner.room(len, &deadline).await,
                Err(_) => Err(Error::invalid(format!("a value of {} bytes", object.size))),
            };
            match room {
                Ok(room) => {
                    ranges.push(ObjectRange {
                        object: object.number,
                        offset: 0,
                        into: room.place(0, room.len()),
                    });
                    rooms.push(room);
                    values.push(None);
                }
                Err(error) => values.push(Some(Err(error))),
            }
        }
        let (n, call) = (ranges.len(), ReadRanges { ranges: ranges.into() });
        let (results, rooms) = self.inner.call_each(n, &call, rooms, &deadline).await?;
        let mut read = results.into_iter().zip(rooms).map(|(result, room)| match result {
            Ok(()) => Ok(Some(room)),
            // The node with the replica is gone, so the value is lost.
            Err(error) if matches!(error.kind(), NotFound | Unavailable | Timeout) => Ok(None),
            Err(error) => Err(error),
        });
        let lost = || Err(Error::internal("response without an item"));
        Ok(values.into_iter().map(|known| known.or_else(|| read.next()).unwrap_or_else(lost)).collect())
    }

    /// Reads one value of unknown length. One call suffices if the value fits into the estimated
    /// length.
    async fn fetch(&self, key: &[u8]) -> Result<Option<LocalBuf>> {
        let inner = &self.inner;
        let deadline = inner.deadline();
        let most = inner.pool.as_ref().map_or(GUESS, |pool| Pool::capacity(pool) / 4);
        let guess = inner.longest.load(Ordering::Relaxed).max(GUESS).min(most).max(1);
        let mut room = inner.room(usize::try_from(guess).unwrap_or(1), &deadline).await?;
        let call = FetchObject { key, into: room.place(0, room.len()) };
        let (found, held) = inner.call(&call, room, &deadline).await?;
        room = held;
        let Some(LocatedObject { size: len, number }) = found.outcome()? else { return Ok(None) };
        // Short values reduce the estimate slowly.
        inner.longest.store(len.max(guess - guess / 64), Ordering::Relaxed);
        let size = usize::try_from(len).map_err(|_| Error::invalid(format!("a value of {len} bytes")))?;
        if size > room.len() {
            drop(room);
            let room = inner.room(size, &deadline).await?;
            // The object was located once. An object that ends at its first read is gone by now.
            let ranges = vec![ObjectRange { object: number, offset: 0, into: room.place(0, size) }];
            let call = ReadRanges { ranges: ranges.into() };
            let (read, mut room) = inner.call_each(1, &call, room, &deadline).await?;
            match one(read) {
                Ok(()) => {}
                Err(error) if is_lost(&error) => return Ok(None),
                Err(error) => return Err(error),
            }
            room.truncate(size);
            return Ok(Some(room));
        }
        room.truncate(size);
        if size * 2 < usize::try_from(guess).unwrap_or(usize::MAX)
            && let Some(mut fitting) = inner.pool.as_ref().and_then(|pool| pool.try_take(size))
        {
            // Callers may hold values for long, so a value should not occupy twice the memory that
            // it needs.
            fitting.copy_from_slice(&room);
            return Ok(Some(fitting));
        }
        Ok(Some(room))
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
        let deadline = self.inner.deadline();
        let (keys, slices): (Vec<K>, Vec<SliceMut<T>>) = items.into_iter().unzip();
        let aim = Aim::of(&self.inner, slices, &deadline).await;
        let objects: Vec<ObjectSink<'_>> =
            aim.places.iter().map(|(i, place)| ObjectSink { key: keys[*i].as_ref(), into: *place }).collect();
        let (n, call) = (objects.len(), ReadObjects { objects: objects.into() });
        let answer = self.inner.call_each(n, &call, aim.sinks, &deadline).await;
        let length = |len: u64| usize::try_from(len).unwrap_or(usize::MAX);
        aim.rest.settle(answer, |len| len.map(length), |read| read.unwrap_or(0))
    }

    /// Reads ranges of located objects. The result of a range is `LEASE_EXPIRED` if its object was
    /// located too long ago.
    pub async fn read_ranges<T: Transport>(&self, reads: Vec<LocalRange<T>>) -> Vec<LocalRead<(), T>> {
        let deadline = self.inner.deadline();
        let (of, slices): (Vec<(u64, u64)>, Vec<SliceMut<T>>) =
            reads.into_iter().map(|read| ((read.object.number, read.offset), read.into)).unzip();
        let lengths: Vec<usize> = slices.iter().map(SliceMut::len).collect();
        let aim = Aim::of(&self.inner, slices, &deadline).await;
        let ranges: Vec<_> = aim
            .places
            .iter()
            .map(|(i, place)| ObjectRange { object: of[*i].0, offset: of[*i].1, into: *place })
            .collect();
        let (n, call) = (ranges.len(), ReadRanges { ranges: ranges.into() });
        let answer = self.inner.call_each(n, &call, aim.sinks, &deadline).await;
        let longest = lengths.into_iter().max().unwrap_or(0);
        aim.rest.settle(answer, |()| (), |()| longest)
    }

    /// Returns each object with a lease on it, or `None` for a key without an object.
    ///
    /// # Errors
    /// Returns an outer error if the outcome of every key is unknown.
    pub async fn locate<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Result<Option<LocatedLocal>>>> {
        self.locate_by(keys, &self.inner.deadline()).await
    }

    async fn locate_by<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        deadline: &Deadline,
    ) -> Result<Vec<Result<Option<LocatedLocal>>>> {
        let (found, ()) =
            self.inner.call_each(keys.len(), &LocateObjects { keys: listed(keys) }, (), deadline).await?;
        Ok(found.into_iter().map(|found| Ok(found?.map(LocatedLocal::from))).collect())
    }

    /// Makes a call about keys.
    async fn ask_each<R, T>(&self, n: usize, call: R) -> Result<Vec<Result<T>>>
    where
        R: Request<Reply = Reported<Vec<Reported<T>>>> + Sync,
    {
        Ok(self.inner.call_each(n, &call, (), &self.inner.deadline()).await?.0)
    }

    /// Returns for each key whether it can be read now.
    ///
    /// # Errors
    /// Returns an outer error if the outcome of every key is unknown.
    pub async fn batch_exist<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Result<bool>>> {
        self.ask_each(keys.len(), ObjectsExist { keys: listed(keys) }).await
    }

    /// Returns whether the key can be read now.
    ///
    /// # Errors
    /// Returns an error if the master or the daemon does not respond.
    pub async fn exist(&self, key: impl AsRef<[u8]>) -> Result<bool> {
        one(self.batch_exist(&[key]).await?)
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
        self.ask_each(keys.len(), ListReplicas { keys: listed(keys) }).await
    }

    /// Returns the number of keys from the front that can be read now, as
    /// [`ClientReplicas::prefix_hits`](crate::ClientReplicas::prefix_hits) does.
    ///
    /// # Errors
    /// Returns an error if the master or the daemon does not respond.
    pub async fn prefix_hits<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<usize> {
        let hits = self.inner.ask(&CountPrefixObjects { keys: listed(keys) }).await?;
        Ok(usize::try_from(hits).unwrap_or(usize::MAX).min(keys.len()))
    }

    /// Returns the objects of the keys from the front that can be read, with a lease on each, as
    /// [`ClientRanges::locate_prefix`](crate::ClientRanges::locate_prefix) does.
    ///
    /// # Errors
    /// Returns the errors of [`prefix_hits`](Self::prefix_hits).
    pub async fn locate_prefix<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<LocatedLocal>> {
        let found = self.inner.ask(&LocatePrefixObjects { keys: listed(keys) }).await?;
        Ok(found.into_iter().map(LocatedLocal::from).collect())
    }

    /// Returns the replicas of the keys from the front that can be read, as
    /// [`ClientReplicas::list_prefix`](crate::ClientReplicas::list_prefix) does.
    ///
    /// # Errors
    /// Returns the errors of [`prefix_hits`](Self::prefix_hits).
    pub async fn list_prefix<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<ReplicaList>> {
        self.inner.ask(&ListPrefixReplicas { keys: listed(keys) }).await
    }

    /// Returns whether the daemon and its master respond.
    pub async fn is_healthy(&self) -> bool {
        let asked = self.inner.call(&CheckHealth {}, (), &self.inner.deadline()).await;
        asked.is_ok_and(|(healthy, ())| healthy)
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
        self.ask_each(keys.len(), RemoveObjects { keys: listed(keys), force }).await
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
        self.inner.ask(&RemoveMatching { pattern, force }).await
    }

    /// Removes every object. Returns the number of removed objects.
    ///
    /// # Errors
    /// Returns an error if the daemon or the master does not respond.
    pub async fn remove_all(&self, force: bool) -> Result<u64> {
        self.inner.ask(&RemoveEvery { force }).await
    }

    /// Requests a copy of an object, as [`ClientReplicas::copy`](crate::ClientReplicas::copy) does.
    ///
    /// # Errors
    /// Returns the errors of [`ClientReplicas::copy`](crate::ClientReplicas::copy).
    pub async fn copy_task(&self, key: impl AsRef<[u8]>, targets: &[&str]) -> Result<Uuid> {
        self.inner.ask(&CopyObject { key: key.as_ref(), targets: targets.into() }).await
    }

    /// Requests a move of an object, as [`ClientReplicas::move_to`](crate::ClientReplicas::move_to)
    /// does.
    ///
    /// # Errors
    /// Returns the errors of [`ClientReplicas::move_to`](crate::ClientReplicas::move_to).
    pub async fn move_task(&self, key: impl AsRef<[u8]>, source: &str, target: &str) -> Result<Uuid> {
        self.inner.ask(&MoveObject { key: key.as_ref(), source, target }).await
    }

    /// Returns the progress of a task.
    ///
    /// # Errors
    /// Returns `TASK_NOT_FOUND` for an unknown task, and an error if the daemon or the master does
    /// not respond.
    pub async fn task(&self, task: Uuid) -> Result<TaskInfo> {
        self.inner.ask(&FindTask { task }).await
    }
}

/// Reads with the destinations of their bytes.
struct Aim<T: Transport> {
    /// Index and memory range of each read that is sent to the daemon.
    places: Vec<(usize, MemoryRange)>,
    /// Destinations of these reads, in the same order.
    sinks: Vec<Sink<T>>,
    rest: Rest<T>,
}

/// Results of the reads that were sent, and their destinations.
type Answered<A, T> = (Vec<Result<A>>, Vec<Sink<T>>);

/// State of every read on the side of the caller.
struct Rest<T: Transport>(Vec<Kept<T>>);

/// Slice that the bytes are copied to, if they are copied. The error holds the reason for which the
/// read was not sent, and its slice.
type Kept<T> = Result<Option<SliceMut<T>>, (Error, SliceMut<T>)>;

impl<T: Transport> Aim<T> {
    async fn of(inner: &Inner, slices: Vec<SliceMut<T>>, deadline: &Deadline) -> Self {
        let mut aim =
            Self { places: Vec::new(), sinks: Vec::new(), rest: Rest(Vec::with_capacity(slices.len())) };
        for (i, into) in slices.into_iter().enumerate() {
            aim.rest.0.push(match inner.sink(into, deadline).await {
                Ok((sink, place, kept)) => {
                    aim.places.push((i, place));
                    aim.sinks.push(sink);
                    Ok(kept)
                }
                Err(failed) => Err(failed),
            });
        }
        aim
    }
}

impl<T: Transport> Rest<T> {
    /// Combines results with memory. `len` returns the number of bytes of a successful read.
    fn settle<A, R>(
        self,
        answer: Result<Answered<A, T>>,
        read: impl Fn(A) -> R,
        len: impl Fn(&R) -> usize,
    ) -> Vec<LocalRead<R, T>> {
        let (mut ended, failure) = match answer {
            Ok((results, sinks)) => (results.into_iter().zip(sinks), None),
            Err(error) => (Vec::new().into_iter().zip(Vec::new()), Some(error)),
        };
        let settled = self.0.into_iter().map(|kept| match (kept, &failure) {
            (Err((error, into)), _) => LocalRead::failed(error, Some(into)),
            (Ok(kept), Some(error)) => LocalRead::failed(error.clone(), kept),
            (Ok(kept), None) => {
                let Some((result, sink)) = ended.next() else {
                    return LocalRead::failed(Error::internal("response without an item"), kept);
                };
                match result.map(&read) {
                    Ok(value) => {
                        let LocalRead { result, into } = sink.finish(kept, len(&value));
                        LocalRead { result: result.map(|()| value), into }
                    }
                    Err(error) => LocalRead::failed(error, sink.finish(kept, 0).into),
                }
            }
        });
        settled.collect()
    }
}

fn listed<K: AsRef<[u8]>>(keys: &[K]) -> Cow<'_, [&[u8]]> {
    keys.iter().map(AsRef::as_ref).collect()
}

/// Returns the result of a batch with one item.
fn one<R>(mut outcomes: Vec<Result<R>>) -> Result<R> {
    outcomes.pop().unwrap_or_else(|| Err(Error::internal("response without an item")))
}
