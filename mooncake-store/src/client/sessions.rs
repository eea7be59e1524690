//! Writing objects in parts: space first, then any ranges of it in any order, then all of it readable at once.

use std::collections::HashSet;
use std::ops::Range;

use mooncake_core::clock::Moment;
use mooncake_core::ids::ObjectKey;
use mooncake_core::replica::{MemoryLocation, Replica, ReplicaType, ReplicateConfig};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_transport::engine::Request;
use mooncake_transport::{Slice, Transport};
use parking_lot::Mutex;

use super::metrics::Operation;
use super::put::{Attempt, OURS_FOR, of_some};
use super::room::{Room, may_come, too_large};
use super::{Client, again, shown};
use crate::api::{EndItem, PutItem, WriteMode};

/// Space granted for an object that nobody can read yet.
#[derive(Debug)]
pub struct Reservation {
    key: Vec<u8>,
    size: u64,
    replicas: Vec<MemoryLocation>,
    attempt: Attempt,
    /// Ranges that were to be written, and were not.
    missing: Mutex<Vec<Range<u64>>>,
}

impl Reservation {
    /// The key it is for.
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    /// Length of the object in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether a range that was to be written was not, nor later.
    pub fn is_incomplete(&self) -> bool {
        !self.missing.lock().is_empty()
    }

    fn written(&self, range: Range<u64>, outcome: &Result<()>) {
        match outcome {
            Ok(()) => self.missing.lock().retain(|lost| lost.start < range.start || lost.end > range.end),
            // Nobody could have meant that.
            Err(error) if error.kind() == ErrorKind::Invalid => {}
            Err(_) => self.missing.lock().push(range),
        }
    }
}

/// A part of a reserved object to write.
#[derive(Debug)]
pub struct RangeWrite<'a, T: Transport> {
    /// Of which object.
    pub object: &'a Reservation,
    /// From which byte on.
    pub offset: u64,
    /// The bytes.
    pub from: Slice<T>,
}

impl<T: Transport> Client<T> {
    /// Asks for space for each object, of which nothing can be read before [`commit`](Self::commit). A reservation that is neither
    /// committed nor revoked is taken back by the master in its own time.
    ///
    /// # Errors
    /// The outer one means that nothing is known of any. `OBJECT_ALREADY_EXISTS` for a key that is there or named before, and as
    /// [`put`](Self::put).
    pub async fn reserve<K: AsRef<[u8]>>(
        &self,
        items: &[(K, u64)],
        config: &ReplicateConfig,
    ) -> Result<Vec<Result<Reservation>>> {
        let inner = &self.inner;
        inner.usable()?;
        let deadline = inner.deadline();
        let puts: Vec<PutItem<'_>> =
            items.iter().map(|(key, len)| PutItem { key: key.as_ref(), len: *len }).collect();
        let reservation = |put: &PutItem<'_>, answer: Result<Vec<Replica>>, attempt| {
            let replicas = answer.map_err(|error| error.context(shown(put.key)))?;
            let memory = replicas.iter().filter_map(|replica| replica.location.memory().cloned());
            let replicas: Vec<MemoryLocation> = memory.filter(|at| at.size == put.len).collect();
            if replicas.is_empty() {
                return Err(
                    Error::internal("the master granted no memory to write to").context(shown(put.key))
                );
            }
            let missing = Mutex::default();
            Ok(Reservation { key: put.key.to_vec(), size: put.len, replicas, attempt, missing })
        };
        let mut room = Room::new(inner, &deadline);
        let mut named = HashSet::with_capacity(puts.len());
        let refusal = |put: PutItem<'_>, first: bool| match ObjectKey::check(put.key) {
            Err(error) => Some(Err(Error::from(error).context(shown(put.key)))),
            Ok(()) if first => None,
            // To the master it would be the same write again, and get the same space.
            Ok(()) => Some(Err(Error::from(ErrorCode::ObjectAlreadyExists).context(shown(put.key)))),
        };
        let mut outcomes: Vec<Option<Result<Reservation>>> =
            puts.iter().map(|put| refusal(*put, named.insert(put.key))).collect();
        let mut pending: Vec<usize> = (0..puts.len()).filter(|&i| outcomes[i].is_none()).collect();
        let all = pending.len();
        while !pending.is_empty() {
            let attempt = Attempt::new(inner, WriteMode::Put);
            let asked: Vec<PutItem<'_>> = pending.iter().map(|&i| puts[i]).collect();
            let config = of_some(config, &pending, puts.len());
            let call = inner.master.put_start(inner.caller(attempt.number), WriteMode::Put, &asked, &config);
            match deadline.bound("put start", call).await {
                Ok(answers) => {
                    for (&i, answer) in pending.iter().zip(answers) {
                        outcomes[i] = Some(reservation(&puts[i], answer, attempt));
                    }
                }
                Err(error) if pending.len() == all => return Err(error),
                // What was refused before stays refused.
                Err(_) => break,
            }
            pending.retain(|&i| outcomes[i].as_ref().is_some_and(may_come));
            if pending.is_empty() || !room.wait(inner).await {
                break;
            }
        }
        let lost = || Err(Error::internal("a reservation without an outcome"));
        Ok(outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(lost).map_err(too_large)).collect())
    }

    /// Writes ranges of reserved objects to every replica of theirs, each range for itself.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for a range outside its object, `UNAVAILABLE_IN_CURRENT_STATUS` for a reservation so old that the master may
    /// have taken it back, and whatever keeps the bytes from landing.
    pub async fn write_ranges(&self, writes: Vec<RangeWrite<'_, T>>) -> Vec<Result<()>> {
        let inner = &self.inner;
        let mut counting = inner.counting(Operation::BatchPutFromMultiBufferRanges);
        let deadline = inner.deadline();
        let now = inner.config.clock.now();
        let mut outcomes: Vec<Result<()>> =
            writes.iter().map(|write| write.check(inner.usable(), now)).collect();
        let mut endpoints: Vec<String> = Vec::new();
        let mut posting = Vec::new();
        for (i, write) in writes.iter().enumerate().filter(|(i, _)| outcomes[*i].is_ok()) {
            for at in &write.object.replicas {
                let peer = endpoints.iter().position(|e| *e == at.endpoint).unwrap_or_else(|| {
                    endpoints.push(at.endpoint.clone());
                    endpoints.len() - 1
                });
                posting.push((peer, i, at.address.saturating_add(write.offset), write.from.clone()));
            }
        }
        let peers = inner.reach_all(&endpoints, &deadline).await;
        posting.sort_by_key(|(peer, ..)| *peer);
        let (mut of, mut requests) = (Vec::new(), Vec::new());
        for (peer, i, remote, from) in posting {
            match &peers[peer] {
                Ok(target) => {
                    of.push((peer, i));
                    requests.push(Request::new(target, remote, from));
                }
                Err(error) => outcomes[i] = Err(again(error)),
            }
        }
        let landing = deadline.portion(15, 16);
        let (since, mut bytes) = (counting.moving(), 0);
        let results = match requests.is_empty() {
            true => Vec::new(),
            false => inner.engine.post_write(requests, Some(landing)).results().await.0,
        };
        for ((peer, i), result) in of.into_iter().zip(results) {
            inner.note(&endpoints[peer], &result);
            bytes += if result.is_ok() { writes[i].from.len() as u64 } else { 0 };
            if result.is_err() && outcomes[i].is_ok() {
                outcomes[i] = result.map_err(|error| error.context(shown(&writes[i].object.key)));
            }
        }
        counting.moved(since, bytes);
        for (outcome, write) in outcomes.iter().zip(&writes) {
            write.object.written(write.offset..write.offset.saturating_add(write.from.len() as u64), outcome);
        }
        outcomes.iter().zip(&writes).for_each(|(outcome, write)| counting.part(outcome, write.from.len()));
        counting.end();
        outcomes
    }

    /// Makes reserved objects readable. All of their bytes must have landed; what was never to be written is whatever lay there.
    ///
    /// # Errors
    /// The outer one means that nothing is known of any. `UNAVAILABLE_IN_CURRENT_STATUS` for a reservation which the master may have taken back, and
    /// for one of which a range could not be written; that may be written again, or given back.
    pub async fn commit(&self, objects: &[&Reservation]) -> Result<Vec<Result<()>>> {
        let inner = &self.inner;
        inner.usable()?;
        let deadline = inner.deadline();
        let mut outcomes: Vec<Option<Result<()>>> = objects.iter().map(|_| None).collect();
        for (attempt, mut of) in by_attempt(objects) {
            of.retain(|&i| {
                let complete = !objects[i].is_incomplete();
                if !complete {
                    outcomes[i] = Some(Err(incomplete(&objects[i].key)));
                }
                complete
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

    /// Gives the space of reserved objects back, unless they are so old that the keys may be somebody else's by now. Nothing
    /// may be under way to them; whether the master has it.
    pub async fn give_back(&self, objects: &[&Reservation]) -> bool {
        let deadline = self.inner.deadline();
        let mut all = true;
        for (attempt, of) in by_attempt(objects) {
            let keys: Vec<&[u8]> = of.into_iter().map(|i| objects[i].key()).collect();
            all &= attempt.revoke(&self.inner, &keys, &deadline).await;
        }
        all
    }
}

/// Indices of reservations by the call that made them.
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

fn incomplete(key: &[u8]) -> Error {
    Error::new(ErrorCode::UnavailableInCurrentStatus, "a part of it could not be written").context(shown(key))
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
