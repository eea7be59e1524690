//! The verbs of a light client. They mean what those of [`Client`](crate::Client) mean, and fail as
//! they do; all fail with `RPC_FAIL` while no owner answers.

use std::borrow::Cow;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use mooncake_core::ErrorKind::{NotFound, Timeout, Unavailable};
use mooncake_core::ids::Uuid;
use mooncake_core::replica::{ReplicaList, ReplicateConfig};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::{Slice, SliceMut, Transport};

use super::client::{Inner, LocalClient};
use super::message::{
    self, Copy, Fetch, Item, Keys, NO_ROOM, Pattern, Place, RangeItem, Ranges, Read, ReadItem, Replicas,
    TaskOf, Verb, Write, WriteItem,
};
use super::shared::{LocalBuf, Pool};
use crate::deadline::Deadline;
use crate::payload::PutOutcome;
use mooncake_protocol::api::WriteMode;
use mooncake_protocol::wire::TaskInfo;

/// Fewest bytes asked for with a read of unknown length.
const GUESS: u64 = 4 << 10;

/// An object, and where the owner knows it to lie. Cheap to clone; good for as long as a lease.
#[derive(Clone, Debug)]
pub struct LocatedLocal {
    number: u64,
    size: u64,
}

impl LocatedLocal {
    /// Length of the object in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }
}

/// A part of an object to read.
#[derive(Debug)]
pub struct LocalRange<T: Transport> {
    /// Of which object.
    pub object: LocatedLocal,
    /// From which byte on.
    pub offset: u64,
    /// To where, and with that how much.
    pub into: SliceMut<T>,
}

/// What became of a read: how it ended, and the memory, unless the owner may still be writing to
/// it.
type Ended<R, T> = (Result<R>, Option<SliceMut<T>>);

/// Writing.
impl LocalClient {
    /// Stores a value under a key that is not there yet. One copy, into memory that the owner sees.
    ///
    /// # Errors
    /// As [`Client::put`](crate::Client::put).
    pub async fn put(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<PutOutcome> {
        let (key, config) = (key.as_ref(), ReplicateConfig::default());
        self.write_bytes(WriteMode::Put, &[(key, value.as_ref())], &config).await.and_then(one)
    }

    /// [`put`](Self::put) of a value that was written where the owner sees it, without a copy.
    ///
    /// # Errors
    /// As there.
    pub async fn put_buf(
        &self,
        key: impl AsRef<[u8]>,
        value: LocalBuf,
        config: &ReplicateConfig,
    ) -> Result<PutOutcome> {
        let pieces = vec![value.place(0, value.len())];
        let items = vec![WriteItem { key: key.as_ref(), pieces }];
        let outcomes = self.write(WriteMode::Put, items, config, value, &self.inner.deadline()).await?;
        one(outcomes)
    }

    /// Stores a value in place of the one that is there, if any.
    ///
    /// # Errors
    /// As [`Client::upsert`](crate::Client::upsert).
    pub async fn upsert(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<()> {
        let (key, config) = (key.as_ref(), ReplicateConfig::default());
        self.write_bytes(WriteMode::Upsert, &[(key, value.as_ref())], &config).await.and_then(one).map(drop)
    }

    /// Stores many values, each for itself.
    ///
    /// # Errors
    /// The outer one means that nothing is known of any.
    pub async fn batch_put<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        &self,
        items: &[(K, V)],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<PutOutcome>>> {
        let items: Vec<_> = items.iter().map(|(key, value)| (key.as_ref(), value.as_ref())).collect();
        self.write_bytes(WriteMode::Put, &items, config).await
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
        let items: Vec<_> = items.iter().map(|(key, value)| (key.as_ref(), value.as_ref())).collect();
        Ok(all_done(self.write_bytes(WriteMode::Upsert, &items, config).await?))
    }

    /// Stores many values, each in pieces that follow each other. Pieces in shared memory are not
    /// copied.
    ///
    /// # Errors
    /// As [`batch_put`](Self::batch_put).
    pub async fn batch_put_pieces<K: AsRef<[u8]>, T: Transport>(
        &self,
        items: &[(K, Vec<Slice<T>>)],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<PutOutcome>>> {
        self.write_pieces(WriteMode::Put, items, config).await
    }

    /// The same with [`upsert`](Self::upsert).
    ///
    /// # Errors
    /// As [`batch_put`](Self::batch_put).
    pub async fn batch_upsert_pieces<K: AsRef<[u8]>, T: Transport>(
        &self,
        items: &[(K, Vec<Slice<T>>)],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<()>>> {
        Ok(all_done(self.write_pieces(WriteMode::Upsert, items, config).await?))
    }

    async fn write_bytes(
        &self,
        mode: WriteMode,
        items: &[(&[u8], &[u8])],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<PutOutcome>>> {
        let deadline = self.inner.deadline();
        let total: usize = items.iter().map(|(_, value)| value.len()).sum();
        // An empty value is for the owner to refuse.
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
                WriteItem { key, pieces: pieces.into_iter().collect() }
            })
            .collect();
        self.write(mode, items, config, room, &deadline).await
    }

    async fn write_pieces<K: AsRef<[u8]>, T: Transport>(
        &self,
        mode: WriteMode,
        items: &[(K, Vec<Slice<T>>)],
        config: &ReplicateConfig,
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
            calls.push(WriteItem { key: key.as_ref(), pieces: places });
        }
        self.write(mode, calls, config, (rooms, slices), &deadline).await
    }

    async fn write<H: Send + 'static>(
        &self,
        mode: WriteMode,
        items: Vec<WriteItem<'_>>,
        config: &ReplicateConfig,
        held: H,
        deadline: &Deadline,
    ) -> Result<Vec<Result<PutOutcome>>> {
        let n = items.len();
        if n == 0 {
            return Ok(Vec::new());
        }
        let call = Write { upsert: mode == WriteMode::Upsert, config: Cow::Borrowed(config), items };
        let (items, _) = self.inner.call_items(Verb::Write, &call, n, held, deadline).await?;
        let outcome = |item: Item| match item.result()? {
            (0, _) => Ok(PutOutcome::Stored),
            _ => Ok(PutOutcome::Existed),
        };
        Ok(items.into_iter().map(outcome).collect())
    }
}

/// Where bytes of a read go.
enum Sink<T: Transport> {
    /// Straight to where they are wanted.
    Direct(SliceMut<T>),
    /// By way of memory that the owner sees.
    Copied(LocalBuf),
}

impl Inner {
    /// Where the owner is to put what is wanted in `into`. A slice that it cannot see stays with
    /// the caller.
    async fn sink<T: Transport>(
        &self,
        into: SliceMut<T>,
        deadline: &Deadline,
    ) -> Result<(Sink<T>, Place, Option<SliceMut<T>>), (Error, SliceMut<T>)> {
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
    /// The caller's memory, with the first bytes of what was read in it.
    fn finish(self, kept: Option<SliceMut<T>>, len: usize) -> Ended<(), T> {
        match (self, kept) {
            (Sink::Direct(into), _) => (Ok(()), Some(into)),
            (Sink::Copied(room), Some(mut into)) => {
                (into.copy_from(0, &room[..len.min(room.len())]), Some(into))
            }
            (Sink::Copied(_), None) => (Err(Error::internal("a read lost its memory")), None),
        }
    }
}

/// Reading.
impl LocalClient {
    /// The value of a key, in memory that the owner filled; `None` when it is not there. Let go of
    /// it soon: the buffer holds only so much.
    ///
    /// # Errors
    /// As [`Client::get`](crate::Client::get).
    pub async fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Bytes>> {
        Ok(self.fetch(key.as_ref()).await?.map(LocalBuf::into_bytes))
    }

    /// [`get`](Self::get) of many keys, each for itself.
    ///
    /// # Errors
    /// The outer one means that nothing is known of any.
    pub async fn batch_get<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Result<Option<Bytes>>>> {
        let bytes = |value: Result<Option<LocalBuf>>| Ok(value?.map(LocalBuf::into_bytes));
        Ok(self.batch_get_buf(keys).await?.into_iter().map(bytes).collect())
    }

    /// [`batch_get`](Self::batch_get), as buffers.
    ///
    /// # Errors
    /// As there.
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
                    ranges.push(RangeItem {
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
        let n = ranges.len();
        let (items, rooms) = if n == 0 {
            (Vec::new(), rooms)
        } else {
            self.inner.call_items(Verb::Ranges, &Ranges { items: ranges }, n, rooms, &deadline).await?
        };
        let mut read = items.into_iter().zip(rooms).map(|(item, room)| match item.result() {
            Ok(_) => Ok(Some(room)),
            // Whoever had it is gone, and it with him.
            Err(error) if matches!(error.kind(), NotFound | Unavailable | Timeout) => Ok(None),
            Err(error) => Err(error),
        });
        let lost = || Err(Error::internal("an answer without an item"));
        Ok(values.into_iter().map(|known| known.or_else(|| read.next()).unwrap_or_else(lost)).collect())
    }

    /// Reads one value whose length is not known, in one question if the guess is good.
    async fn fetch(&self, key: &[u8]) -> Result<Option<LocalBuf>> {
        let inner = &self.inner;
        let deadline = inner.deadline();
        let most = inner.pool.as_ref().map_or(GUESS, |pool| Pool::capacity(pool) / 4);
        let guess = inner.longest.load(Ordering::Relaxed).max(GUESS).min(most).max(1);
        let mut room = inner.room(usize::try_from(guess).unwrap_or(1), &deadline).await?;
        let call = Fetch { keys: vec![key].into(), into: room.place(0, room.len()) };
        let (item, held) = inner.call_items(Verb::Fetch, &call, 1, room, &deadline).await?;
        room = held;
        let Some((len, at)) = found(one_item(item))? else { return Ok(None) };
        // Short values let the guess sink, by and by.
        inner.longest.store(len.max(guess - guess / 64), Ordering::Relaxed);
        let size = usize::try_from(len).map_err(|_| Error::invalid(format!("a value of {len} bytes")))?;
        if at == NO_ROOM {
            drop(room);
            let room = inner.room(size, &deadline).await?;
            let items = vec![ReadItem { key, into: room.place(0, size) }];
            let (item, mut room) =
                inner.call_items(Verb::Read, &Read { items: items.into() }, 1, room, &deadline).await?;
            let Some((len, _)) = found(one_item(item))? else { return Ok(None) };
            room.truncate(usize::try_from(len).unwrap_or(size));
            return Ok(Some(room));
        }
        room.truncate(size);
        if size * 2 < usize::try_from(guess).unwrap_or(usize::MAX)
            && let Some(mut fitting) = inner.pool.as_ref().and_then(|pool| pool.try_take(size))
        {
            // Values may be held for long; they are not to take twice the memory they need.
            fitting.copy_from_slice(&room);
            return Ok(Some(fitting));
        }
        Ok(Some(room))
    }

    /// Reads a value to the front of memory: its length, `None` for a miss.
    ///
    /// # Errors
    /// As [`Client::get_into`](crate::Client::get_into).
    pub async fn get_into<T: Transport>(
        &self,
        key: impl AsRef<[u8]>,
        into: SliceMut<T>,
    ) -> Ended<Option<usize>, T> {
        self.batch_get_into(vec![(key, into)])
            .await
            .pop()
            .unwrap_or_else(|| (Err(Error::internal("an answer without an item")), None))
    }

    /// [`get_into`](Self::get_into) of many keys. Slices come back, but for those that the owner
    /// may still be writing to.
    pub async fn batch_get_into<K: AsRef<[u8]>, T: Transport>(
        &self,
        items: Vec<(K, SliceMut<T>)>,
    ) -> Vec<Ended<Option<usize>, T>> {
        let deadline = self.inner.deadline();
        let (keys, slices): (Vec<K>, Vec<SliceMut<T>>) = items.into_iter().unzip();
        let aim = Aim::of(&self.inner, slices, &deadline).await;
        let asked: Vec<ReadItem<'_>> =
            aim.places.iter().map(|(i, place)| ReadItem { key: keys[*i].as_ref(), into: *place }).collect();
        let n = asked.len();
        let answer = match n {
            0 => Ok((Vec::new(), aim.sinks)),
            _ => {
                let call = Read { items: asked.into() };
                self.inner.call_items(Verb::Read, &call, n, aim.sinks, &deadline).await
            }
        };
        aim.rest.settle(
            answer,
            |item| {
                let read = found(item)?;
                Ok(read.map(|(len, _)| usize::try_from(len).unwrap_or(usize::MAX)))
            },
            |read| read.unwrap_or(0),
        )
    }

    /// Reads ranges of located objects. `LEASE_EXPIRED` where that was too long ago.
    pub async fn read_ranges<T: Transport>(&self, reads: Vec<LocalRange<T>>) -> Vec<Ended<(), T>> {
        let deadline = self.inner.deadline();
        let (of, slices): (Vec<(u64, u64)>, Vec<SliceMut<T>>) =
            reads.into_iter().map(|read| ((read.object.number, read.offset), read.into)).unzip();
        let lengths: Vec<usize> = slices.iter().map(SliceMut::len).collect();
        let aim = Aim::of(&self.inner, slices, &deadline).await;
        let asked = aim.places.iter().map(|(i, place)| RangeItem {
            object: of[*i].0,
            offset: of[*i].1,
            into: *place,
        });
        let call = Ranges { items: asked.collect() };
        let n = call.items.len();
        let answer = match n {
            0 => Ok((Vec::new(), aim.sinks)),
            _ => self.inner.call_items(Verb::Ranges, &call, n, aim.sinks, &deadline).await,
        };
        let longest = lengths.into_iter().max().unwrap_or(0);
        aim.rest.settle(answer, |item| item.result().map(drop), |()| longest)
    }

    /// Where each key lies, with a lease on it; `None` for a miss.
    ///
    /// # Errors
    /// The outer one means that nothing is known of any.
    pub async fn locate<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Result<Option<LocatedLocal>>>> {
        self.locate_by(keys, &self.inner.deadline()).await
    }

    async fn locate_by<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        deadline: &Deadline,
    ) -> Result<Vec<Result<Option<LocatedLocal>>>> {
        let items = self.ask(Verb::Locate, keys, false, deadline).await?;
        let located = |item| Ok(found(item)?.map(|(size, number)| LocatedLocal { number, size }));
        Ok(items.into_iter().map(located).collect())
    }

    async fn ask<K: AsRef<[u8]>>(
        &self,
        verb: Verb,
        keys: &[K],
        force: bool,
        deadline: &Deadline,
    ) -> Result<Vec<Item>> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        let (n, call) = (keys.len(), Keys { keys: keys.into(), force });
        Ok(self.inner.call_items(verb, &call, n, (), deadline).await?.0)
    }

    /// Whether each key can be read now.
    ///
    /// # Errors
    /// The outer one means that nothing is known of any.
    pub async fn batch_exist<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Result<bool>>> {
        let items = self.ask(Verb::Exist, keys, false, &self.inner.deadline()).await?;
        Ok(items.into_iter().map(|item| item.result().map(|(there, _)| there != 0)).collect())
    }

    /// [`batch_exist`](Self::batch_exist) of one key.
    ///
    /// # Errors
    /// The master or the owner does not answer.
    pub async fn exist(&self, key: impl AsRef<[u8]>) -> Result<bool> {
        one(self.batch_exist(&[key]).await?)
    }

    /// Length of a value in bytes, `None` when it is not there.
    ///
    /// # Errors
    /// As [`exist`](Self::exist).
    pub async fn size(&self, key: impl AsRef<[u8]>) -> Result<Option<u64>> {
        Ok(one(self.locate(&[key]).await?)?.map(|object| object.size))
    }

    /// Where the replicas of each key lie; `None` for a miss.
    ///
    /// # Errors
    /// The outer one means that nothing is known of any.
    pub async fn batch_replicas<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
    ) -> Result<Vec<Result<Option<ReplicaList>>>> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        let call = Keys { keys: keys.into(), force: false };
        let (answer, ()) = self.inner.call(Verb::Replicas, &call, (), &self.inner.deadline()).await?;
        let Replicas { lists } = message::body(&answer)?;
        if lists.len() != call.keys.len() {
            return Err(Error::internal("another number of answers than of questions from mooncake_client"));
        }
        Ok(lists)
    }

    /// Whether the owner and its master answer.
    pub async fn is_healthy(&self) -> bool {
        let asked = self.inner.call_items(Verb::Health, &(), 1, (), &self.inner.deadline()).await;
        asked.and_then(|(item, ())| one_item(item).result()).is_ok_and(|(healthy, _)| healthy != 0)
    }
}

/// Removing, copying, moving.
impl LocalClient {
    /// Removes each key; whether it was there.
    ///
    /// # Errors
    /// The outer one means that nothing is known of any; the others as
    /// [`Client::remove`](crate::Client::remove).
    pub async fn batch_remove<K: AsRef<[u8]>>(&self, keys: &[K], force: bool) -> Result<Vec<Result<bool>>> {
        let items = self.ask(Verb::Remove, keys, force, &self.inner.deadline()).await?;
        Ok(items.into_iter().map(|item| item.result().map(|(gone, _)| gone != 0)).collect())
    }

    /// [`batch_remove`](Self::batch_remove) of one key.
    ///
    /// # Errors
    /// As there.
    pub async fn remove(&self, key: impl AsRef<[u8]>, force: bool) -> Result<bool> {
        one(self.batch_remove(&[key], force).await?)
    }

    /// Removes what a regular expression finds a match in; how many.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for a pattern that is none, and when owner or master do not answer.
    pub async fn remove_matching(&self, pattern: &str, force: bool) -> Result<u64> {
        self.remove_by(Some(pattern), force).await
    }

    /// Removes every key; how many.
    ///
    /// # Errors
    /// Owner or master do not answer.
    pub async fn remove_all(&self, force: bool) -> Result<u64> {
        self.remove_by(None, force).await
    }

    async fn remove_by(&self, pattern: Option<&str>, force: bool) -> Result<u64> {
        let call = Pattern { pattern, force };
        let (item, ()) =
            self.inner.call_items(Verb::RemoveMatching, &call, 1, (), &self.inner.deadline()).await?;
        Ok(one_item(item).result()?.0)
    }

    /// As [`Client::copy_task`](crate::Client::copy_task).
    ///
    /// # Errors
    /// As there.
    pub async fn copy_task(&self, key: impl AsRef<[u8]>, targets: &[&str]) -> Result<Uuid> {
        self.order(Copy { key: key.as_ref(), source: None, targets: targets.into() }).await
    }

    /// As [`Client::move_task`](crate::Client::move_task).
    ///
    /// # Errors
    /// As there.
    pub async fn move_task(&self, key: impl AsRef<[u8]>, source: &str, target: &str) -> Result<Uuid> {
        self.order(Copy { key: key.as_ref(), source: Some(source), targets: vec![target].into() }).await
    }

    async fn order(&self, call: Copy<'_>) -> Result<Uuid> {
        let (item, ()) = self.inner.call_items(Verb::Copy, &call, 1, (), &self.inner.deadline()).await?;
        let (first, second) = one_item(item).result()?;
        Ok(Uuid::new(first, second))
    }

    /// Where a task stands.
    ///
    /// # Errors
    /// `TASK_NOT_FOUND`, and when owner or master do not answer.
    pub async fn task(&self, task: Uuid) -> Result<TaskInfo> {
        let (answer, ()) = self.inner.call(Verb::Task, &TaskOf { task }, (), &self.inner.deadline()).await?;
        message::body(&answer)
    }
}

/// Reads, and where their bytes go.
struct Aim<T: Transport> {
    /// Which reads have a place, and where.
    places: Vec<(usize, Place)>,
    /// The memory of these, in the same order.
    sinks: Vec<Sink<T>>,
    rest: Rest<T>,
}

/// For every read either what is known already, or the slice that its bytes are copied to.
struct Rest<T: Transport>(Vec<Kept<T>>);

/// The slice that bytes are copied to, if they are; or why there is no place for them, and the
/// slice.
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
    /// Puts answers and memory together. `len` says how many bytes were read.
    fn settle<R>(
        self,
        answer: Result<(Vec<Item>, Vec<Sink<T>>)>,
        read: impl Fn(Item) -> Result<R>,
        len: impl Fn(&R) -> usize,
    ) -> Vec<Ended<R, T>> {
        let (mut ended, failure) = match answer {
            Ok((items, sinks)) => (items.into_iter().zip(sinks), None),
            Err(error) => (Vec::new().into_iter().zip(Vec::new()), Some(error)),
        };
        let settled = self.0.into_iter().map(|kept| match (kept, &failure) {
            (Err((error, into)), _) => (Err(error), Some(into)),
            (Ok(kept), Some(error)) => (Err(error.clone()), kept),
            (Ok(kept), None) => {
                let Some((item, sink)) = ended.next() else {
                    return (Err(Error::internal("an answer without an item")), kept);
                };
                match read(item) {
                    Ok(value) => {
                        let (copied, into) = sink.finish(kept, len(&value));
                        (copied.map(|()| value), into)
                    }
                    Err(error) => (Err(error), sink.finish(kept, 0).1),
                }
            }
        });
        settled.collect()
    }
}

/// The numbers, `None` for an object that is not there.
fn found(item: Item) -> Result<Option<(u64, u64)>> {
    match item.result() {
        Ok(numbers) => Ok(Some(numbers)),
        Err(error) if error.code() == ErrorCode::ObjectNotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn all_done(outcomes: Vec<Result<PutOutcome>>) -> Vec<Result<()>> {
    outcomes.into_iter().map(|outcome| outcome.map(drop)).collect()
}

/// The answer to a batch of one.
fn one<R>(mut outcomes: Vec<Result<R>>) -> Result<R> {
    outcomes.pop().unwrap_or_else(|| Err(Error::internal("an answer without an item")))
}

fn one_item(items: Vec<Item>) -> Item {
    items.into_iter().next().unwrap_or_else(|| Item::of(Err(Error::internal("an answer without an item"))))
}
