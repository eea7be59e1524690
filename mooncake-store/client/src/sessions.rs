//! Writes of objects in parts. Space is reserved first, then ranges are written in any order, and a
//! commit makes the whole object readable.

mod coverage;
mod relocation;
mod requested_space;
mod reservation;
mod write_batch;
mod written;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use futures::StreamExt as _;
use mooncake_core::ids::ObjectKey;
use mooncake_core::replica::{MemoryLocation, Replica, ReplicaType, ReplicateConfig};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_transport::Transport;
use mooncake_transport::engine::Request;

use self::requested_space::RequestedSpace;
pub use self::reservation::{RangeWrite, Reservation};
use self::reservation::{refused, too_old};
use self::write_batch::WriteBatch;
use self::written::{GrantedSpace, Written};
use crate::attempt::Attempt;
use crate::deadline::Deadline;
use crate::errors::{display_key, transfer_error};
use crate::grants::ReservedSpace;
use crate::handles::ClientRanges;
use crate::issuer::Issuer;
use crate::metrics::{Counting, Operation};
use crate::put::{are_at, config_of_items, dropped_write};
use crate::refusals::explain;
use crate::retry_on_full::{RetryOnFull, is_full, too_large};
use crate::state::{Inner, MemoryOwner, is_newer};
use mooncake_protocol::api::{EndItem, PutItem, WriteMode};

/// Number of revokes at the same time when a client ends.
const REVOKES: usize = 64;

/// Maximum number of attempts to write ranges of objects whose space is replaced.
const ATTEMPTS: usize = 4;

/// Writes of ranges.
impl<T: Transport> ClientRanges<'_, T> {
    /// Requests space for each object. Nothing of an object can be read before
    /// [`commit`](Self::commit). If a reservation is neither committed nor given back,
    /// [`close`](crate::Client::close) returns its space, or the master reclaims the space after a
    /// timeout. If the response is lost or the future is dropped, the space is returned in the
    /// background.
    ///
    /// # Errors
    /// The outer error means that no result is known. Returns `OBJECT_ALREADY_EXISTS` for a key
    /// that exists or that occurs earlier in `items`, and the errors of
    /// [`Client::put`](crate::Client::put).
    pub async fn reserve<K: AsRef<[u8]>>(
        self,
        items: &[(K, u64)],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<Reservation>>> {
        let inner = &self.client.inner;
        inner.can_transfer()?;
        let deadline = inner.deadline();
        let puts: Vec<PutItem<'_>> =
            items.iter().map(|(key, len)| PutItem { key: key.as_ref(), len: *len }).collect();
        let mut outcomes = refusals(&puts);
        let mut retry = RetryOnFull::new(inner, &deadline);
        let mut pending: Vec<usize> = (0..puts.len()).filter(|&i| outcomes[i].is_none()).collect();
        // Returned to the master unless the caller gets the reservations.
        let mut granted = Vec::new();
        let all = pending.len();
        while !pending.is_empty() {
            let some = config_of_items(config, &pending, puts.len(), |i| puts[i].key);
            match self.request(&puts, &pending, config, &some, &mut outcomes, &deadline).await {
                Ok(space) => granted.push(space),
                Err(error) if pending.len() == all => return Err(error),
                // Items that were refused before stay refused.
                Err(_) => break,
            }
            pending.retain(|&i| outcomes[i].as_ref().is_some_and(is_full));
            let full = pending.iter().map(|&i| puts[i]);
            if pending.is_empty() || !retry.wait(inner, WriteMode::Put, &some, full).await {
                break;
            }
        }
        let lost = || Err(Error::internal("a reservation without an outcome"));
        let mut ended: Vec<_> = outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(lost)).collect();
        let keys = || puts.iter().map(|put| put.key);
        retry.name_refusal(keys(), &mut ended);
        let mut ended: Vec<_> = ended.into_iter().map(|outcome| outcome.map_err(too_large)).collect();
        explain(inner, config, keys(), &mut ended).await;
        granted.into_iter().for_each(RequestedSpace::hand_over);
        Ok(ended)
    }

    /// Requests space for the items in `pending`, once. Each of them gets an outcome. `config` has
    /// the options of all items, and `some` those of the pending ones. Returns the space that was
    /// granted.
    async fn request<'p>(
        self,
        puts: &[PutItem<'p>],
        pending: &[usize],
        config: &ReplicateConfig,
        some: &ReplicateConfig,
        outcomes: &mut [Option<Result<Reservation>>],
        deadline: &Deadline,
    ) -> Result<RequestedSpace<'p, T>>
    where
        Self: 'p,
    {
        let inner = &self.client.inner;
        let attempt = Attempt::new(inner, WriteMode::Put);
        let look_ups = inner.engine.look_ups();
        let requested: Vec<PutItem<'_>> = pending.iter().map(|&i| puts[i]).collect();
        let keys = || requested.iter().map(|put| put.key);
        // Held until the response, so that no file of an earlier value is reported meanwhile.
        let _files = inner.reserve_files(keys(), deadline).await?;
        let unanswered = RequestedSpace::new(inner, attempt, keys().collect());
        let results = attempt.request_space(inner, &requested, some, deadline).await?;
        unanswered.hand_over();
        let options = Arc::new(options_of_each(config));
        let (mut reserved, mut unusable, mut indices) = (Vec::new(), Vec::new(), Vec::new());
        for (&i, result) in pending.iter().zip(results) {
            let PutItem { key, len } = puts[i];
            let outcome = result.and_then(|replicas| {
                let memory = replicas.iter().filter_map(|replica| replica.location.memory().cloned());
                let replicas: Vec<MemoryLocation> = memory.filter(|at| at.size == len).collect();
                if replicas.is_empty() {
                    unusable.push(key);
                    return Err(Error::internal("the master granted no memory to write to"));
                }
                reserved.push(key);
                indices.push(i);
                Ok(Reservation {
                    key: key.to_vec(),
                    size: len,
                    config: options.clone(),
                    item: (i, puts.len()),
                    written: Arc::new(Written::new(GrantedSpace { replicas, attempt, look_ups })),
                })
            });
            if let Ok(reservation) = &outcome {
                let space: Weak<Written> = Arc::downgrade(&reservation.written);
                inner.reserved.add(key, space);
            }
            outcomes[i] = Some(outcome.map_err(|error| error.context(display_key(key))));
        }
        drop(RequestedSpace::granted(inner, attempt, unusable));
        let space = RequestedSpace::granted(inner, attempt, reserved);
        self.confirm_reserved(&indices, outcomes, some, deadline).await;
        Ok(space)
    }

    /// Connects to the owners of reserved space. If an owner was found after the master was asked,
    /// the space may be in memory of an earlier process. So the master is asked for the same space
    /// again, and repeats the grant only if the grant is still valid.
    async fn confirm_reserved(
        self,
        indices: &[usize],
        outcomes: &[Option<Result<Reservation>>],
        config: &ReplicateConfig,
        deadline: &Deadline,
    ) {
        let inner = &self.client.inner;
        let reserved = |&i: &usize| outcomes[i].as_ref()?.as_ref().ok();
        let objects: Vec<&Reservation> = indices.iter().filter_map(reserved).collect();
        let Some(first) = objects.first() else { return };
        let first = first.written.space();
        let mut endpoints: Vec<String> = Vec::new();
        for space in objects.iter().map(|object| object.written.space()) {
            for at in &space.replicas {
                if !endpoints.contains(&at.endpoint) {
                    endpoints.push(at.endpoint.clone());
                }
            }
        }
        // If a client does not respond, the later writes to it fail.
        if !inner.reach_granted(&endpoints, first.look_ups, deadline).await.iter().any(is_newer) {
            return;
        }
        let look_ups = inner.engine.look_ups();
        if !inner.master.fences_writes() {
            objects.iter().for_each(|object| object.written.confirm(look_ups));
            return;
        }
        let puts: Vec<PutItem<'_>> =
            objects.iter().map(|object| PutItem { key: &object.key, len: object.size }).collect();
        let Ok(results) = first.attempt.request_space(inner, &puts, config, deadline).await else { return };
        for (object, result) in objects.into_iter().zip(results) {
            let space = object.written.space();
            let granted = space.replicas.iter().map(|at| (&*at.endpoint, at.address));
            if result.is_ok_and(|replicas: Vec<Replica>| are_at(&replicas, granted)) {
                object.written.confirm(look_ups);
            }
        }
    }

    /// Writes ranges of reserved objects to all replicas of each object. Each range has an outcome
    /// of its own.
    ///
    /// Dropping the future does not stop transfers that have begun. Its ranges count as not
    /// written. The objects can be committed only after these transfers have ended and the ranges
    /// have been written again.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for a range outside its object. Returns
    /// `UNAVAILABLE_IN_CURRENT_STATUS` for a reservation that was committed or given back, or that
    /// is so old that the master may have reclaimed it. If the segment of an object has left before
    /// anything was written to it, the ranges are written to new space. All other errors are those
    /// of the transfers. After a timeout (`RPC_TIMEOUT`) the bytes may still arrive, so the object
    /// cannot be committed any more.
    pub async fn write(self, writes: Vec<RangeWrite<'_, T>>) -> Vec<Result<()>> {
        let inner = &self.client.inner;
        let mut counting = inner.counting(Operation::BatchPutFromMultiBufferRanges);
        let deadline = inner.deadline();
        let mut outcomes: Vec<Result<()>> = writes.iter().map(|write| write.check(inner.usable())).collect();
        // The batch begins before the first await, so that a dropped future leaves its ranges
        // unwritten.
        let mut batch = WriteBatch::begin(inner, &writes, &mut outcomes, inner.config.clock.now());
        let mut todo: Vec<usize> = (0..writes.len()).filter(|&i| outcomes[i].is_ok()).collect();
        for attempt in 1.. {
            self.transfer(&writes, &todo, &mut batch, &mut outcomes, &deadline, &mut counting).await;
            let failed = |&i: &usize| outcomes[i].is_err();
            if attempt == ATTEMPTS || !todo.iter().any(failed) {
                break;
            }
            todo = self.relocate(&writes, &todo, &mut batch, &mut outcomes, &deadline).await;
            if todo.is_empty() {
                break;
            }
        }
        batch.end(&outcomes);
        outcomes.iter().zip(&writes).for_each(|(outcome, write)| counting.part(outcome, write.from.len()));
        counting.end();
        outcomes
    }

    /// Requests new space for the objects of failed ranges. Returns the ranges to write again.
    async fn relocate(
        self,
        writes: &[RangeWrite<'_, T>],
        indices: &[usize],
        batch: &mut WriteBatch<'_, T>,
        outcomes: &mut [Result<()>],
        deadline: &Deadline,
    ) -> Vec<usize> {
        let mut again = Vec::new();
        if indices.iter().all(|&i| outcomes[i].is_ok()) {
            return again;
        }
        for (object, of_object) in by_object(writes, indices) {
            let may_have_left = |&i: &usize| {
                outcomes[i].as_ref().err().is_none_or(|error| error.kind() == ErrorKind::Unavailable)
            };
            if of_object.iter().any(|&i| outcomes[i].is_err())
                && of_object.iter().all(may_have_left)
                && batch.relocate(&self.client.inner, object, &of_object, deadline).await
            {
                again.extend(of_object);
            }
        }
        again.iter().for_each(|&i| outcomes[i] = Ok(()));
        again
    }

    /// Writes some of the ranges to the space of their objects.
    async fn transfer(
        self,
        writes: &[RangeWrite<'_, T>],
        indices: &[usize],
        batch: &mut WriteBatch<'_, T>,
        outcomes: &mut [Result<()>],
        deadline: &Deadline,
        counting: &mut Counting<'_>,
    ) {
        let inner = &self.client.inner;
        let mut owners: Vec<MemoryOwner> = Vec::new();
        let mut posting = Vec::new();
        for &i in indices {
            let Some(space) = batch.space(i) else { continue };
            for at in &space.replicas {
                let issuer = Issuer::Master(space.look_ups);
                let peer = owners.iter().position(|(e, i)| *e == at.endpoint && *i == issuer);
                let peer = peer.unwrap_or_else(|| {
                    owners.push((at.endpoint.clone(), issuer));
                    owners.len() - 1
                });
                let remote = at.address.saturating_add(writes[i].offset);
                posting.push((peer, i, remote, writes[i].from.clone()));
            }
        }
        let peers = inner.reach_owners(&owners, deadline).await;
        posting.sort_by_key(|(peer, ..)| *peer);
        let (mut indices, mut requests) =
            (Vec::with_capacity(posting.len()), Vec::with_capacity(posting.len()));
        for (peer, i, remote, from) in posting {
            match &peers[peer] {
                Ok(target) => {
                    indices.push((peer, i));
                    requests.push(Request::new(target, remote, from));
                }
                Err(why) => outcomes[i] = Err(why.error().clone()),
            }
        }
        let landing = deadline.portion(15, 16);
        let (start, mut bytes) = (counting.transfer_start(), 0);
        if !requests.is_empty() {
            batch.post(indices, inner.engine.post_write(requests, Some(landing)).results());
        }
        for ((peer, i), result) in batch.landed().await {
            inner.record_outcome(&owners[peer].0, &result);
            batch.record_outcome(i, &result);
            bytes += if result.is_ok() { writes[i].from.len() as u64 } else { 0 };
            if result.is_err() && outcomes[i].is_ok() {
                outcomes[i] =
                    result.map_err(|error| transfer_error(error).context(display_key(&writes[i].object.key)));
            }
        }
        counting.record_transfer(start, bytes);
    }

    /// Makes reserved objects readable. Every byte of an object must have been written: memory
    /// without a write has bytes of earlier objects.
    ///
    /// # Errors
    /// The outer error means that no result is known. Returns `UNAVAILABLE_IN_CURRENT_STATUS` for a
    /// reservation that the master may have reclaimed, and for one that is
    /// [incomplete](Reservation::is_incomplete); the error names the first range that was never
    /// written. A range that is missing or failed may still be written. After a timeout the object
    /// can only be given back. If the response of the master is lost twice, the object may be
    /// readable or not. On a master that recognizes writers, it stays
    /// [open](Reservation::is_open), and a second commit has the result.
    pub async fn commit(self, objects: &[&Reservation]) -> Result<Vec<Result<()>>> {
        let inner = &self.client.inner;
        inner.usable()?;
        let deadline = inner.deadline();
        let mut outcomes: Vec<Option<Result<()>>> = objects.iter().map(|_| None).collect();
        let mut closed = Vec::with_capacity(objects.len());
        for (i, object) in objects.iter().enumerate() {
            match object.written.close_if_complete(object.size) {
                Ok(attempt) => closed.push((i, attempt)),
                Err(why) => outcomes[i] = Some(Err(refused(&object.key, why))),
            }
        }
        let mut unanswered = None;
        for (attempt, indices) in by_attempt(closed) {
            if !attempt.is_unambiguous(inner) {
                for i in indices {
                    objects[i].written.record_end();
                    outcomes[i] = Some(Err(too_old(&objects[i].key)));
                }
                continue;
            }
            let items: Vec<EndItem<'_>> =
                indices.iter().map(|&i| EndItem { key: &objects[i].key, checksum: None }).collect();
            // Without writer numbers, another end or revoke could concern a later write of the key.
            // So it is sent once, and the space is left to the master if there is no response.
            let is_sent_once = !inner.master.fences_writes();
            if is_sent_once {
                indices.iter().for_each(|&i| objects[i].written.seal());
            }
            let calls = if is_sent_once { 1 } else { 2 };
            let (response, calls) = attempt.end(inner, &items, ReplicaType::Memory, &deadline, calls).await;
            match response {
                Ok(results) => {
                    for (i, result) in indices.into_iter().zip(results) {
                        let Reservation { key, written, .. } = objects[i];
                        written.record_end();
                        let result = result.map_err(|error| dropped_write(error).context(display_key(key)));
                        outcomes[i] = Some(result);
                    }
                }
                Err(error) => {
                    if calls == 0 && is_sent_once {
                        indices.into_iter().for_each(|i| objects[i].written.unseal());
                    }
                    unanswered = Some(unanswered.unwrap_or(error));
                }
            }
        }
        inner.forget(objects.iter().map(|object| object.key()));
        if let Some(error) = &unanswered
            && outcomes.iter().all(Option::is_none)
        {
            return Err(error.clone());
        }
        let lost = |object: &&Reservation| match &unanswered {
            Some(error) => error.clone().context(display_key(object.key())),
            None => Error::internal("a put without an outcome"),
        };
        let ended = outcomes.into_iter().zip(objects);
        Ok(ended.map(|(outcome, object)| outcome.unwrap_or_else(|| Err(lost(object)))).collect())
    }

    /// Returns the space of reserved objects to the master. Returns whether the master has
    /// confirmed all of it. Nothing can be written to the objects afterwards.
    ///
    /// If the master does not respond, the return is repeated in the background. If a timed-out
    /// write may still arrive in the space, the space stays granted until the master reclaims it.
    /// If a dropped call still writes to the space, the space is returned in the background after
    /// the write has ended. Objects that are so old that another client may write their keys by now
    /// are left alone.
    pub async fn give_back(self, objects: &[&Reservation]) -> bool {
        let inner = &self.client.inner;
        let deadline = inner.deadline();
        let given_up = objects.iter().enumerate();
        let free: Vec<(usize, Attempt)> =
            given_up.filter_map(|(i, object)| Some((i, object.written.give_up()?))).collect();
        if !inner.master.fences_writes() {
            objects.iter().for_each(|object| object.written.seal());
        }
        let mut all = free.len() == objects.len();
        let keys = |indices: Vec<usize>| indices.into_iter().map(|i| objects[i].key()).collect();
        let groups = by_attempt(free).into_iter();
        // Created before the first call: dropping the future returns the space of all of them.
        let spaces: Vec<_> =
            groups.map(|(attempt, indices)| RequestedSpace::granted(inner, attempt, keys(indices))).collect();
        for space in spaces {
            all &= space.revoke(&deadline).await;
        }
        all
    }
}

impl<T: Transport> Inner<T> {
    /// Refuses all later writes of open reservations and returns their space to the master. Space
    /// that a write may still arrive in is left to the master.
    pub(crate) async fn return_reserved_space(&self, deadline: &Deadline) {
        let spaces = self.reserved.take_open();
        let given_up = spaces.iter().enumerate();
        let free = given_up.filter_map(|(i, (_, space))| Some((i, space.give_up()?))).collect();
        let revoke = async |(attempt, indices): (Attempt, Vec<usize>)| {
            let keys: Vec<&[u8]> = indices.into_iter().map(|i| spaces[i].0.as_slice()).collect();
            attempt.revoke(self, &keys, deadline).await;
        };
        futures::stream::iter(by_attempt(free)).for_each_concurrent(REVOKES, revoke).await;
    }
}

/// Groups the indices of reservations by the request that granted their space.
fn by_attempt(indices: Vec<(usize, Attempt)>) -> Vec<(Attempt, Vec<usize>)> {
    let mut groups: Vec<(Attempt, Vec<usize>)> = Vec::new();
    let mut positions: HashMap<u64, usize> = HashMap::new();
    for (i, granted) in indices {
        match positions.entry(granted.number) {
            Entry::Occupied(position) => groups[*position.get()].1.push(i),
            Entry::Vacant(position) => {
                position.insert(groups.len());
                groups.push((granted, vec![i]));
            }
        }
    }
    groups
}

/// Groups the indices of writes by their objects.
fn by_object<'w, T: Transport>(
    writes: &[RangeWrite<'w, T>],
    indices: &[usize],
) -> Vec<(&'w Reservation, Vec<usize>)> {
    let mut groups: Vec<(&Reservation, Vec<usize>)> = Vec::new();
    let mut positions: HashMap<*const Reservation, usize> = HashMap::new();
    for &i in indices {
        let object = writes[i].object;
        match positions.entry(std::ptr::from_ref(object)) {
            Entry::Occupied(position) => groups[*position.get()].1.push(i),
            Entry::Vacant(position) => {
                position.insert(groups.len());
                groups.push((object, vec![i]));
            }
        }
    }
    groups
}

/// Returns the refusals of items that are not requested: invalid keys, and keys that occur earlier.
fn refusals<'k>(puts: &[PutItem<'k>]) -> Vec<Option<Result<Reservation>>> {
    let mut seen_keys = HashSet::with_capacity(puts.len());
    let refusal = |put: PutItem<'k>| {
        let is_first = seen_keys.insert(put.key);
        let error = match ObjectKey::check(put.key) {
            Err(error) => Error::from(error),
            Ok(()) if is_first => return None,
            // The master would take the repeated key for the same write and grant the same space.
            Ok(()) => Error::from(ErrorCode::ObjectAlreadyExists),
        };
        Some(Err(error.context(display_key(put.key))))
    };
    puts.iter().copied().map(refusal).collect()
}

/// Returns the options of a call with hints that hold for any one of its objects.
fn options_of_each(config: &ReplicateConfig) -> ReplicateConfig {
    let hints = config.hints.as_ref().map(|hints| Box::new(hints.of_object()));
    ReplicateConfig { hints, ..config.clone() }
}

impl<T: Transport> RangeWrite<'_, T> {
    fn check(&self, usable: Result<()>) -> Result<()> {
        usable?;
        let Reservation { key, size, .. } = self.object;
        let end = self.offset.checked_add(self.from.len() as u64);
        if end.is_none_or(|end| end > *size) {
            let text = format!("{} bytes to {} of an object of {size}", self.from.len(), self.offset);
            return Err(Error::invalid(text).context(display_key(key)));
        }
        Ok(())
    }
}
