//! Writes of objects in parts. Space is reserved first, then ranges are written in any order, and a
//! commit makes the whole object readable.

mod coverage;
mod relocation;
mod reservation;
mod write_batch;
mod written;

use std::collections::HashSet;
use std::sync::Arc;

use mooncake_core::ids::ObjectKey;
use mooncake_core::replica::{MemoryLocation, Replica, ReplicaType, ReplicateConfig};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_transport::Transport;
use mooncake_transport::engine::Request;

pub use self::reservation::{RangeWrite, Reservation};
use self::reservation::{refused, too_old};
use self::write_batch::WriteBatch;
use self::written::{GrantedSpace, Written};
use crate::attempt::Attempt;
use crate::deadline::Deadline;
use crate::errors::{display_key, transfer_error};
use crate::handles::ClientRanges;
use crate::issuer::Issuer;
use crate::metrics::{Counting, Operation};
use crate::put::{are_at, config_of_items, dropped_write};
use crate::refusals::explain;
use crate::retry_on_full::{RetryOnFull, is_full, too_large};
use crate::state::{MemoryOwner, is_newer};
use mooncake_protocol::api::{EndItem, PutItem, WriteMode};

/// Maximum number of attempts to write ranges of objects whose space is replaced.
const ATTEMPTS: usize = 4;

/// Writes of ranges.
impl<T: Transport> ClientRanges<'_, T> {
    /// Requests space for each object. Nothing of an object can be read before
    /// [`commit`](Self::commit). If a reservation is neither committed nor revoked, the master
    /// reclaims its space after a timeout.
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
        let options = Arc::new(options_of_each(config));
        let puts: Vec<PutItem<'_>> =
            items.iter().map(|(key, len)| PutItem { key: key.as_ref(), len: *len }).collect();
        let reservation = |i: usize, put: &PutItem<'_>, result: Result<Vec<Replica>>, attempt, look_ups| {
            let replicas = result.map_err(|error| error.context(display_key(put.key)))?;
            let memory = replicas.iter().filter_map(|replica| replica.location.memory().cloned());
            let replicas: Vec<MemoryLocation> = memory.filter(|at| at.size == put.len).collect();
            if replicas.is_empty() {
                return Err(
                    Error::internal("the master granted no memory to write to").context(display_key(put.key))
                );
            }
            Ok(Reservation {
                key: put.key.to_vec(),
                size: put.len,
                config: options.clone(),
                item: (i, items.len()),
                written: Arc::new(Written::new(GrantedSpace { replicas, attempt, look_ups })),
            })
        };
        let mut retry = RetryOnFull::new(inner, &deadline);
        let mut seen_keys = HashSet::with_capacity(puts.len());
        let refusal = |put: PutItem<'_>, first: bool| match ObjectKey::check(put.key) {
            Err(error) => Some(Err(Error::from(error).context(display_key(put.key)))),
            Ok(()) if first => None,
            // The master would take the repeated key for the same write and grant the same space.
            Ok(()) => Some(Err(Error::from(ErrorCode::ObjectAlreadyExists).context(display_key(put.key)))),
        };
        let mut outcomes: Vec<Option<Result<Reservation>>> =
            puts.iter().map(|put| refusal(*put, seen_keys.insert(put.key))).collect();
        let mut pending: Vec<usize> = (0..puts.len()).filter(|&i| outcomes[i].is_none()).collect();
        let all = pending.len();
        while !pending.is_empty() {
            let attempt = Attempt::new(inner, WriteMode::Put);
            let look_ups = inner.engine.look_ups();
            let requested: Vec<PutItem<'_>> = pending.iter().map(|&i| puts[i]).collect();
            let config = config_of_items(config, &pending, puts.len(), |i| puts[i].key);
            let keys = requested.iter().map(|put| put.key);
            // Held until the response, so that no file of an earlier value is reported meanwhile.
            let _files = match inner.reserve_files(keys, &deadline).await {
                Ok(files) => files,
                Err(error) if pending.len() == all => return Err(error),
                Err(_) => break,
            };
            let call =
                inner.master.put_start(inner.caller(attempt.number), WriteMode::Put, &requested, &config);
            match deadline.bound("put start", call).await {
                Ok(results) => {
                    for (&i, result) in pending.iter().zip(results) {
                        outcomes[i] = Some(reservation(i, &puts[i], result, attempt, look_ups));
                    }
                    let indices: Vec<usize> =
                        pending.iter().copied().filter(|&i| matches!(outcomes[i], Some(Ok(_)))).collect();
                    self.confirm_reserved(&indices, &outcomes, &config, &deadline).await;
                }
                Err(error) if pending.len() == all => return Err(error),
                // Items that were refused before stay refused.
                Err(_) => break,
            }
            pending.retain(|&i| outcomes[i].as_ref().is_some_and(is_full));
            let full = pending.iter().map(|&i| puts[i]);
            if pending.is_empty() || !retry.wait(inner, WriteMode::Put, &config, full).await {
                break;
            }
        }
        let lost = || Err(Error::internal("a reservation without an outcome"));
        let mut ended: Vec<_> = outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(lost)).collect();
        let keys = || puts.iter().map(|put| put.key);
        retry.name_refusal(keys(), &mut ended);
        let mut ended: Vec<_> = ended.into_iter().map(|outcome| outcome.map_err(too_large)).collect();
        explain(inner, config, keys(), &mut ended).await;
        Ok(ended)
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
        let mut objects: Vec<&Reservation> = Vec::with_capacity(indices.len());
        for (i, outcome) in outcomes.iter().enumerate() {
            if let Some(Ok(object)) = outcome.as_ref().filter(|_| indices.contains(&i)) {
                objects.push(object);
            }
        }
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
        let call = inner.master.put_start(inner.caller(first.attempt.number), WriteMode::Put, &puts, config);
        let Ok(results) = deadline.bound("put start", call).await else { return };
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
        let mut objects: Vec<&Reservation> = Vec::new();
        for &i in indices.iter().filter(|&&i| outcomes[i].is_err()) {
            if !objects.iter().any(|object| std::ptr::eq(*object, writes[i].object)) {
                objects.push(writes[i].object);
            }
        }
        for object in objects {
            let of_object = || indices.iter().copied().filter(|&i| std::ptr::eq(writes[i].object, object));
            let may_have_left = |i: usize| {
                outcomes[i].as_ref().err().is_none_or(|error| error.kind() == ErrorKind::Unavailable)
            };
            if of_object().all(may_have_left) && batch.relocate(&self.client.inner, object, deadline).await {
                again.extend(of_object());
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
    /// can only be given back.
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
        for (attempt, indices) in by_attempt(closed) {
            if !attempt.is_unambiguous(inner) {
                indices.iter().for_each(|&i| outcomes[i] = Some(Err(too_old(&objects[i].key))));
                continue;
            }
            let items: Vec<EndItem<'_>> =
                indices.iter().map(|&i| EndItem { key: &objects[i].key, checksum: None }).collect();
            let caller = inner.caller(attempt.number);
            let call = inner.master.put_end(caller, WriteMode::Put, &items, ReplicaType::Memory);
            for (i, result) in indices.into_iter().zip(deadline.bound("put end", call).await?) {
                let key = &objects[i].key;
                outcomes[i] = Some(result.map_err(|error| dropped_write(error).context(display_key(key))));
            }
        }
        inner.forget(objects.iter().map(|object| object.key()));
        let lost = || Err(Error::internal("a put without an outcome"));
        Ok(outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(lost)).collect())
    }

    /// Returns the space of reserved objects to the master. Returns whether the master has
    /// confirmed all of it. Nothing can be written to the objects afterwards.
    ///
    /// If a timed-out write may still arrive in the space, the space stays granted until the master
    /// reclaims it. If a dropped call still writes to the space, the space is returned in the
    /// background after the write has ended. Objects that are so old that another client may write
    /// their keys by now are left alone.
    pub async fn give_back(self, objects: &[&Reservation]) -> bool {
        let deadline = self.client.inner.deadline();
        let given_up = objects.iter().enumerate();
        let free: Vec<(usize, Attempt)> =
            given_up.filter_map(|(i, object)| Some((i, object.written.give_up()?))).collect();
        let mut all = free.len() == objects.len();
        for (attempt, indices) in by_attempt(free) {
            let keys: Vec<&[u8]> = indices.into_iter().map(|i| objects[i].key()).collect();
            all &= attempt.revoke(&self.client.inner, &keys, &deadline).await;
        }
        all
    }
}

/// Groups the indices of reservations by the request that granted their space.
fn by_attempt(indices: Vec<(usize, Attempt)>) -> Vec<(Attempt, Vec<usize>)> {
    let mut groups: Vec<(Attempt, Vec<usize>)> = Vec::new();
    for (i, granted) in indices {
        match groups.iter_mut().find(|(attempt, _)| attempt.number == granted.number) {
            Some((_, indices)) => indices.push(i),
            None => groups.push((granted, vec![i])),
        }
    }
    groups
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
