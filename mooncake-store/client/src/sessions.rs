//! Writes of objects in parts. Space is reserved first, then ranges are written in any order, and a
//! commit makes the whole object readable.

mod flight;
mod reservation;
mod written;

use std::collections::HashSet;
use std::sync::Arc;

use mooncake_core::clock::Moment;
use mooncake_core::ids::ObjectKey;
use mooncake_core::replica::{MemoryLocation, Replica, ReplicaType, ReplicateConfig};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::Transport;
use mooncake_transport::engine::Request;

use self::flight::Flight;
use self::reservation::refused;
pub use self::reservation::{RangeWrite, Reservation};
use crate::attempt::{Attempt, OURS_FOR};
use crate::deadline::Deadline;
use crate::errors::shown;
use crate::handles::ClientRanges;
use crate::issuer::Issuer;
use crate::metrics::Operation;
use crate::put::{are_at, of_some};
use crate::retry_on_full::{RetryOnFull, is_full, too_large};
use crate::state::{Owner, is_newer};
use mooncake_protocol::api::{EndItem, PutItem, WriteMode};

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
        let puts: Vec<PutItem<'_>> =
            items.iter().map(|(key, len)| PutItem { key: key.as_ref(), len: *len }).collect();
        let reservation = |put: &PutItem<'_>, answer: Result<Vec<Replica>>, attempt, known| {
            let replicas = answer.map_err(|error| error.context(shown(put.key)))?;
            let memory = replicas.iter().filter_map(|replica| replica.location.memory().cloned());
            let replicas: Vec<MemoryLocation> = memory.filter(|at| at.size == put.len).collect();
            if replicas.is_empty() {
                return Err(
                    Error::internal("the master granted no memory to write to").context(shown(put.key))
                );
            }
            Ok(Reservation {
                key: put.key.to_vec(),
                size: put.len,
                replicas,
                attempt,
                known,
                written: Arc::default(),
            })
        };
        let mut retry = RetryOnFull::new(inner, &deadline);
        let mut named = HashSet::with_capacity(puts.len());
        let refusal = |put: PutItem<'_>, first: bool| match ObjectKey::check(put.key) {
            Err(error) => Some(Err(Error::from(error).context(shown(put.key)))),
            Ok(()) if first => None,
            // The master would take the repeated key for the same write and grant the same space.
            Ok(()) => Some(Err(Error::from(ErrorCode::ObjectAlreadyExists).context(shown(put.key)))),
        };
        let mut outcomes: Vec<Option<Result<Reservation>>> =
            puts.iter().map(|put| refusal(*put, named.insert(put.key))).collect();
        let mut pending: Vec<usize> = (0..puts.len()).filter(|&i| outcomes[i].is_none()).collect();
        let all = pending.len();
        while !pending.is_empty() {
            let attempt = Attempt::new(inner, WriteMode::Put);
            let known = inner.engine.look_ups();
            let asked: Vec<PutItem<'_>> = pending.iter().map(|&i| puts[i]).collect();
            let config = of_some(config, &pending, puts.len(), |i| puts[i].key);
            let keys = asked.iter().map(|put| put.key);
            // Held until the response, so that no file of an earlier value is reported meanwhile.
            let _files = match inner.reserve_files(keys, &deadline).await {
                Ok(files) => files,
                Err(error) if pending.len() == all => return Err(error),
                Err(_) => break,
            };
            let call = inner.master.put_start(inner.caller(attempt.number), WriteMode::Put, &asked, &config);
            match deadline.bound("put start", call).await {
                Ok(answers) => {
                    for (&i, answer) in pending.iter().zip(answers) {
                        outcomes[i] = Some(reservation(&puts[i], answer, attempt, known));
                    }
                    let of: Vec<usize> =
                        pending.iter().copied().filter(|&i| matches!(outcomes[i], Some(Ok(_)))).collect();
                    self.confirm_reserved(&of, &mut outcomes, &config, &deadline).await;
                }
                Err(error) if pending.len() == all => return Err(error),
                // Items that were refused before stay refused.
                Err(_) => break,
            }
            pending.retain(|&i| outcomes[i].as_ref().is_some_and(is_full));
            if pending.is_empty() || !retry.wait(inner).await {
                break;
            }
        }
        let lost = || Err(Error::internal("a reservation without an outcome"));
        Ok(outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(lost).map_err(too_large)).collect())
    }

    /// Connects to the owners of reserved space. If an owner was found after the master was asked,
    /// the space may be in memory of an earlier process. So the master is asked for the same space
    /// again, and repeats the grant only if the grant is still valid.
    async fn confirm_reserved(
        self,
        of: &[usize],
        outcomes: &mut [Option<Result<Reservation>>],
        config: &ReplicateConfig,
        deadline: &Deadline,
    ) {
        let inner = &self.client.inner;
        let mut objects: Vec<&mut Reservation> = Vec::with_capacity(of.len());
        for (i, outcome) in outcomes.iter_mut().enumerate() {
            if let Some(Ok(object)) = outcome.as_mut().filter(|_| of.contains(&i)) {
                objects.push(object);
            }
        }
        let Some(first) = objects.first() else { return };
        let (attempt, known) = (first.attempt, first.known);
        let mut endpoints: Vec<String> = Vec::new();
        for at in objects.iter().flat_map(|object| &object.replicas) {
            if !endpoints.contains(&at.endpoint) {
                endpoints.push(at.endpoint.clone());
            }
        }
        // If a client does not respond, the later writes to it fail.
        if !inner.reach_granted(&endpoints, known, deadline).await.iter().any(is_newer) {
            return;
        }
        let known = inner.engine.look_ups();
        if !inner.master.fences_writes() {
            objects.iter_mut().for_each(|object| object.known = known);
            return;
        }
        let puts: Vec<PutItem<'_>> =
            objects.iter().map(|object| PutItem { key: &object.key, len: object.size }).collect();
        let call = inner.master.put_start(inner.caller(attempt.number), WriteMode::Put, &puts, config);
        let Ok(answers) = deadline.bound("put start", call).await else { return };
        for (object, answer) in objects.into_iter().zip(answers) {
            let granted = object.replicas.iter().map(|at| (&*at.endpoint, at.address));
            if answer.is_ok_and(|replicas: Vec<Replica>| are_at(&replicas, granted)) {
                object.known = known;
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
    /// is so old that the master may have reclaimed it. All other errors are those of the
    /// transfers. After a timeout (`RPC_TIMEOUT`) the bytes may still arrive, so the object cannot
    /// be committed any more.
    pub async fn write(self, writes: Vec<RangeWrite<'_, T>>) -> Vec<Result<()>> {
        let inner = &self.client.inner;
        let mut counting = inner.counting(Operation::BatchPutFromMultiBufferRanges);
        let deadline = inner.deadline();
        let now = inner.config.clock.now();
        let mut outcomes: Vec<Result<()>> =
            writes.iter().map(|write| write.check(inner.usable(), now)).collect();
        // The flight begins before the first await, so that a dropped future leaves its ranges
        // unwritten.
        let mut flight = Flight::begin(inner, &writes, &mut outcomes);
        let mut owners: Vec<Owner> = Vec::new();
        let mut posting = Vec::new();
        for (i, write) in writes.iter().enumerate().filter(|(i, _)| outcomes[*i].is_ok()) {
            for at in &write.object.replicas {
                let issuer = Issuer::Master(write.object.known);
                let peer = owners.iter().position(|(e, i)| *e == at.endpoint && *i == issuer);
                let peer = peer.unwrap_or_else(|| {
                    owners.push((at.endpoint.clone(), issuer));
                    owners.len() - 1
                });
                posting.push((peer, i, at.address.saturating_add(write.offset), write.from.clone()));
            }
        }
        let peers = inner.reach_owners(&owners, &deadline).await;
        posting.sort_by_key(|(peer, ..)| *peer);
        let (mut of, mut requests) = (Vec::with_capacity(posting.len()), Vec::with_capacity(posting.len()));
        for (peer, i, remote, from) in posting {
            match &peers[peer] {
                Ok(target) => {
                    of.push((peer, i));
                    requests.push(Request::new(target, remote, from));
                }
                Err(why) => outcomes[i] = Err(why.error().clone()),
            }
        }
        let landing = deadline.portion(15, 16);
        let (since, mut bytes) = (counting.moving(), 0);
        if !requests.is_empty() {
            flight.post(of, inner.engine.post_write(requests, Some(landing)).results());
        }
        for ((peer, i), result) in flight.landed().await {
            inner.note(&owners[peer].0, &result);
            flight.note(i, &result);
            bytes += if result.is_ok() { writes[i].from.len() as u64 } else { 0 };
            if result.is_err() && outcomes[i].is_ok() {
                outcomes[i] = result.map_err(|error| error.context(shown(&writes[i].object.key)));
            }
        }
        counting.moved(since, bytes);
        flight.end(&outcomes);
        outcomes.iter().zip(&writes).for_each(|(outcome, write)| counting.part(outcome, write.from.len()));
        counting.end();
        outcomes
    }

    /// Makes reserved objects readable. All bytes that were to be written must have arrived. Bytes
    /// that were never written have the previous content of the memory.
    ///
    /// # Errors
    /// The outer error means that no result is known. Returns `UNAVAILABLE_IN_CURRENT_STATUS` for a
    /// reservation that the master may have reclaimed, and for one that is
    /// [incomplete](Reservation::is_incomplete). A range that failed may be written again. After a
    /// timeout the object can only be given back.
    pub async fn commit(self, objects: &[&Reservation]) -> Result<Vec<Result<()>>> {
        let inner = &self.client.inner;
        inner.usable()?;
        let deadline = inner.deadline();
        let mut outcomes: Vec<Option<Result<()>>> = objects.iter().map(|_| None).collect();
        for (attempt, mut of) in by_attempt(objects) {
            of.retain(|&i| {
                let closed = objects[i].written.close_if_complete();
                outcomes[i] = closed.map_err(|why| refused(&objects[i].key, why)).err().map(Err);
                outcomes[i].is_none()
            });
            if of.is_empty() {
                continue;
            }
            if !attempt.is_ours(inner) {
                of.iter().for_each(|&i| outcomes[i] = Some(Err(too_old(&objects[i].key))));
                continue;
            }
            let items: Vec<EndItem<'_>> =
                of.iter().map(|&i| EndItem { key: &objects[i].key, checksum: None }).collect();
            let caller = inner.caller(attempt.number);
            let call = inner.master.put_end(caller, WriteMode::Put, &items, ReplicaType::Memory);
            for (i, answer) in of.into_iter().zip(deadline.bound("put end", call).await?) {
                outcomes[i] = Some(answer);
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
        let mut all = true;
        for (attempt, of) in by_attempt(objects) {
            let asked = of.len();
            let free = of.into_iter().map(|i| objects[i]).filter(|object| object.written.give_up());
            let keys: Vec<&[u8]> = free.map(Reservation::key).collect();
            all &= keys.len() == asked;
            all &= keys.is_empty() || attempt.revoke(&self.client.inner, &keys, &deadline).await;
        }
        all
    }
}

/// Groups the indices of reservations by the request that made them.
fn by_attempt(objects: &[&Reservation]) -> Vec<(Attempt, Vec<usize>)> {
    let mut groups: Vec<(Attempt, Vec<usize>)> = Vec::new();
    for (i, object) in objects.iter().enumerate() {
        match groups.iter_mut().find(|(attempt, _)| attempt.number == object.attempt.number) {
            Some((_, of)) => of.push(i),
            None => groups.push((object.attempt, vec![i])),
        }
    }
    groups
}

fn too_old(key: &[u8]) -> Error {
    Error::new(
        ErrorCode::UnavailableInCurrentStatus,
        "the space was reserved so long ago that the master may have taken it back",
    )
    .context(shown(key))
}

impl<T: Transport> RangeWrite<'_, T> {
    fn check(&self, usable: Result<()>, now: Moment) -> Result<()> {
        usable?;
        let Reservation { key, size, attempt, .. } = self.object;
        let end = self.offset.checked_add(self.from.len() as u64);
        if end.is_none_or(|end| end > *size) {
            let text = format!("{} bytes to {} of an object of {size}", self.from.len(), self.offset);
            return Err(Error::invalid(text).context(shown(key)));
        }
        if now.since(attempt.asked) > OURS_FOR {
            return Err(too_old(key));
        }
        Ok(())
    }
}
