//! Reads of parts of objects. The objects are located once. Then any ranges of them go directly to
//! their targets.
//!
//! If a replica cannot be read, the next replica is tried, as for whole objects. If all replicas
//! have failed, the master is asked once more. Ranges that no replica in memory returns are
//! requested from the owners of disks (`borrow.rs`).

mod borrow;
mod files;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt, OptionFuture};
use futures::stream::{FuturesUnordered, StreamExt};
use mooncake_core::clock::Moment;
use mooncake_core::replica::{Replica, ReplicaList};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::engine::Request;
use mooncake_transport::{SliceMut, Transport};

use crate::buffers::COPIED_AT_ONCE;
use crate::checksum::Sum;
use crate::deadline::{Deadline, late};
use crate::disk::{BORROWED, Loan};
use crate::errors::shown;
use crate::handles::ClientRanges;
use crate::issuer::{Asked, Issuer};
use crate::located::{Answer, Located, ObjectLocation, Reading, Renewed, Version, name};
use crate::metrics::{Counting, Operation};
use crate::state::{Inner, Owner};

/// Maximum number of responses of the master that are tried.
const ROUNDS: usize = 2;

/// Maximum number of additional requests if a client was found after the master was asked.
const LATE_ROUNDS: usize = 2;

/// A part of an object to read. The clients of this crate have located objects of different types.
#[derive(Debug)]
pub struct RangeRead<T: Transport, O = Located> {
    /// Object to read from.
    pub object: O,
    /// Offset of the first byte in the object.
    pub offset: u64,
    /// Target of the bytes. The length of the slice is the length of the range.
    pub into: SliceMut<T>,
}

/// Outcome of the read of a range, and its memory.
#[derive(Debug)]
pub struct RangeOutcome<T: Transport> {
    /// Outcome of the read. After an error, the content of the memory is undefined.
    pub result: Result<()>,
    /// Memory of the caller.
    pub into: SliceMut<T>,
}

/// Reads of ranges.
impl<T: Transport> ClientRanges<'_, T> {
    /// Locates each key and grants a lease on its replicas. Returns `None` for a key without an
    /// object.
    ///
    /// At the first contact with a process that owns a replica, the master is asked again. If the
    /// object was replaced meanwhile and nothing of it has been read yet, reads return the later
    /// value.
    ///
    /// # Errors
    /// The outer error means that no result is known. Returns `INVALID_REPLICA` for an object that
    /// is neither in memory nor on the disk of a client.
    pub async fn locate<K: AsRef<[u8]>>(self, keys: &[K]) -> Result<Vec<Result<Option<Located>>>> {
        let inner = &self.client.inner;
        let ask = || self.client.replicas().batch_list(keys);
        let first =
            |answers: &Vec<Result<Option<ReplicaList>>>| first_lease(answers.iter().flatten().flatten());
        let (answers, asked) = inner.ask_in_time(ask, first).await?;
        inner.missed(answers.iter().filter(|answer| matches!(answer, Ok(None))).count());
        let located = |(key, answer): (&K, Result<Option<ReplicaList>>)| {
            answer?.map(|list| inner.located(key.as_ref(), list, asked)).transpose()
        };
        Ok(keys.iter().zip(answers).map(located).collect())
    }

    /// Locates the keys from the front until the first one that cannot be read, with one RPC, and
    /// grants a lease on these objects. Returns one object for each of these keys.
    ///
    /// For the keys of the blocks of a prompt, in order, these are the blocks that need not be
    /// computed. [`read`](Self::read) reads them without another request to the master. Keys behind
    /// the first miss get no lease and count as no use. A master that lacks this call, such as one
    /// of Mooncake C++, is asked about all keys instead, and grants a lease on each object.
    ///
    /// # Errors
    /// Returns an error if the master does not respond.
    pub async fn locate_prefix<K: AsRef<[u8]>>(self, keys: &[K]) -> Result<Vec<Located>> {
        let inner = &self.client.inner;
        let ask = || self.client.replicas().list_prefix(keys);
        let (lists, asked) = inner.ask_in_time(ask, |lists: &Vec<ReplicaList>| first_lease(lists)).await?;
        let located = |(key, list): (&K, ReplicaList)| inner.located(key.as_ref(), list, asked).ok();
        let prefix: Vec<Located> = keys.iter().zip(lists).map_while(located).collect();
        inner.missed(usize::from(prefix.len() < keys.len()));
        Ok(prefix)
    }

    /// Reads ranges of located objects, all at the same time. If a client fails, the next replica
    /// is tried. If all replicas have failed, the master is asked once more and its new response is
    /// tried. During the transfers, a lease is renewed after half of its time.
    ///
    /// Each range has an outcome of its own:
    ///
    /// - `INVALID_PARAMS` if the range is not inside its object,
    /// - `LEASE_EXPIRED` if the object was located too long ago, or if the bytes arrived too late
    ///   to be trusted,
    /// - `OBJECT_NOT_FOUND` if the object is gone,
    /// - otherwise the error of the last replica.
    ///
    /// If this client compares checksums
    /// ([`ClientConfig::checksum`](crate::ClientConfig::checksum)), a range that is the whole
    /// object is compared with its checksum. Ranges of one object that cover the whole object
    /// together are compared, too.
    pub async fn read(self, reads: Vec<RangeRead<T>>) -> Vec<RangeOutcome<T>> {
        let inner = &self.client.inner;
        let mut counting = inner.counting(Operation::GetIntoRanges);
        let deadline = inner.deadline();
        let (usable, now) = (inner.can_transfer(), inner.config.clock.now());
        let mut ranges: Vec<Range<T>> = reads.into_iter().map(|read| Range::new(read, now)).collect();
        if let Err(error) = &usable {
            ranges.iter_mut().for_each(|range| range.outcome = Some(Err(error.clone())));
        }
        let (mut round, mut rounds) = (0, ROUNDS);
        while round < rounds {
            if round > 0 && (deadline.is_over() || !inner.locate_again(&mut ranges, &deadline).await) {
                break;
            }
            inner.copy_kept(&mut ranges).await;
            loop {
                while inner.fetch(&mut ranges, &deadline, &mut counting).await {}
                if !(inner.config.checksum && compare_parts(&mut ranges)) {
                    break;
                }
            }
            rounds += usize::from(rounds < ROUNDS + LATE_ROUNDS && ranges.iter().any(Range::is_too_early));
            round += 1;
        }
        inner.came_in_parts(&ranges);
        let ended: Vec<RangeOutcome<T>> = ranges.into_iter().filter_map(Range::finish).collect();
        ended.iter().for_each(|range| counting.part(&range.result, range.into.len()));
        counting.end();
        ended
    }
}

struct Range<T: Transport> {
    object: Located,
    /// Response of the master that the read uses.
    answer: Arc<Answer>,
    /// True if a client was found after the master was asked. The master has to be asked again.
    too_early: bool,
    /// Number of replicas that were not tried yet, including those on disks.
    left: usize,
    /// Maximum number of pieces in one request to an owner of a disk. The maximum is lowered when
    /// an owner refuses more. At 0, the range also shares no piece with other ranges.
    company: usize,
    /// Loan of an owner of a disk, if the range is read from one.
    lent: Option<Lent>,
    /// Loan whose bytes have arrived and count only if the master confirms them.
    came: Option<Lent>,
    offset: u64,
    /// Target of the bytes. `None` while a transfer is in progress.
    into: Option<SliceMut<T>>,
    /// True if the bytes came over a network transport.
    from_afar: bool,
    /// Reason of the last failure.
    failure: Option<Error>,
    outcome: Option<Result<()>>,
}

/// Part of a loan that contains a range.
#[derive(Debug)]
struct Lent {
    loan: Arc<Loan>,
    address: u64,
    /// Replica on the disk, as the master described it.
    copy: Replica,
    /// Version of the value, if the owner reports one.
    version: Option<Version>,
}

impl Lent {
    fn until(&self) -> Moment {
        self.loan.until
    }
}

impl<T: Transport> Range<T> {
    fn new(read: RangeRead<T>, now: Moment) -> Self {
        let RangeRead { object, offset, into } = read;
        let answer = object.location.answer();
        let end = offset.checked_add(into.len() as u64);
        let outcome = if end.is_none_or(|end| end > object.size()) {
            let text = format!("{} bytes from {offset} of an object of {}", into.len(), object.size());
            Some(Err(Error::invalid(text)))
        } else if now >= answer.lease {
            Some(Err(Error::from(ErrorCode::LeaseExpired)))
        } else {
            None
        };
        let left = answer.tries();
        Self {
            object,
            answer,
            too_early: false,
            left,
            company: BORROWED,
            lent: None,
            came: None,
            offset,
            into: Some(into),
            from_afar: false,
            failure: None,
            outcome,
        }
    }

    /// Returns whether the range has no outcome yet and may use the present response.
    fn is_open(&self) -> bool {
        self.outcome.is_none() && !self.too_early
    }

    fn is_too_early(&self) -> bool {
        self.outcome.is_none() && self.too_early
    }

    fn finish(self) -> Option<RangeOutcome<T>> {
        let none = || Err(Error::from(ErrorCode::InvalidReplica));
        let outcome = self.outcome.unwrap_or_else(|| self.failure.map_or_else(none, Err));
        let key = &self.object.location.key;
        Some(RangeOutcome { result: outcome.map_err(|error| error.context(shown(key))), into: self.into? })
    }

    /// Compares bytes with the checksum if they are the whole object. A part has no checksum.
    fn compare(&self, bytes: &SliceMut<T>) -> Result<()> {
        if bytes.len() as u64 == self.object.size() { self.compare_all([bytes]) } else { Ok(()) }
    }

    /// Compares consecutive pieces, which are the whole object together, with its checksum.
    fn compare_all<'a>(&self, pieces: impl IntoIterator<Item = &'a SliceMut<T>>) -> Result<()> {
        let Some(expected) = self.answer.checksum() else { return Ok(()) };
        let mut sum = Sum::new();
        for piece in pieces {
            sum.front(piece, piece.len())?;
        }
        if sum.value() == expected {
            return Ok(());
        }
        tracing::warn!(key = %shown(self.object.key()), "a replica holds other bytes than were written");
        Err(Error::from(ErrorCode::ChecksumMismatch))
    }

    fn landed(&mut self, result: Result<()>, into: SliceMut<T>, now: Moment, compares: bool) {
        let lent = self.lent.take();
        // After the end of the lease, the bytes may belong to another object and are not compared.
        let in_time = now < lent.as_ref().map_or(self.answer.lease, Lent::until);
        let result = result.and_then(|()| if in_time && compares { self.compare(&into) } else { Ok(()) });
        self.into = Some(into);
        let given = result.map(|()| match lent {
            None => self.object.location.give(&self.answer, now),
            Some(_) if !in_time => Err(Error::from(ErrorCode::LeaseExpired)),
            Some(lent) => self.take_from_disk(lent, now),
        });
        match given {
            Ok(Ok(())) if self.came.is_some() => {}
            Ok(Ok(())) => self.outcome = Some(Ok(())),
            // The bytes do not count, because the space may have been overwritten after the end of
            // the lease.
            Ok(Err(error)) => (self.left, self.failure) = (0, Some(error)),
            Err(error) => self.failure = Some(error),
        }
    }
}

/// Returns the duration of the shortest lease.
fn first_lease<'l>(lists: impl IntoIterator<Item = &'l ReplicaList>) -> Option<Duration> {
    lists.into_iter().map(|list| list.lease).min()
}

/// Compares objects that were read completely in several parts with their checksums. If an object
/// differs, its parts have no outcome again. Returns whether an object differs.
fn compare_parts<T: Transport>(ranges: &mut [Range<T>]) -> bool {
    let mut parts: HashMap<usize, Vec<usize>> = HashMap::new();
    for (i, range) in ranges.iter().enumerate() {
        let is_part = range.into.as_ref().is_some_and(|into| (into.len() as u64) < range.object.size());
        if is_part && matches!(range.outcome, Some(Ok(()))) && range.answer.checksum().is_some() {
            parts.entry(name(&range.object.location)).or_default().push(i);
        }
    }
    let mut differ = false;
    for mut parts in parts.into_values() {
        parts.sort_by_key(|&i| ranges[i].offset);
        let mut end = 0;
        let whole = parts.iter().all(|&i| {
            let follows = ranges[i].offset == end;
            end += ranges[i].into.as_ref().map_or(0, |into| into.len() as u64);
            follows
        });
        let first = &ranges[parts[0]];
        if !whole || end != first.object.size() {
            continue;
        }
        let Err(error) = first.compare_all(parts.iter().filter_map(|&i| ranges[i].into.as_ref())) else {
            continue;
        };
        differ = true;
        for i in parts {
            (ranges[i].outcome, ranges[i].failure) = (None, Some(error.clone()));
        }
    }
    differ
}

impl<T: Transport> Inner<T> {
    /// Asks the master for leases. A lease that ended before the response arrived is useless. The
    /// master responds now, so it is asked again. Returns the response with the time of the
    /// request.
    async fn ask_in_time<A, F: Future<Output = Result<A>>>(
        &self,
        ask: impl Fn() -> F,
        first_lease: impl FnOnce(&A) -> Option<Duration>,
    ) -> Result<(A, Asked)> {
        let asked = self.asked();
        let answer = ask().await?;
        let now = self.asked();
        match first_lease(&answer) {
            Some(lease) if asked.at.after(lease) <= now.at => Ok((ask().await?, now)),
            _ => Ok((answer, asked)),
        }
    }

    /// Asks the master once more for the locations of objects with unread ranges. Returns whether
    /// there is a new response to try.
    async fn locate_again(&self, ranges: &mut [Range<T>], deadline: &Deadline) -> bool {
        let open = ranges.iter().filter(|range| range.outcome.is_none());
        let locations: HashMap<usize, Arc<ObjectLocation>> =
            open.map(|range| (name(&range.object.location), range.object.location.clone())).collect();
        if locations.is_empty() {
            return false;
        }
        let locations: Vec<Arc<ObjectLocation>> = locations.into_values().collect();
        let learnt = self.ask_again(&locations, deadline).await;
        let mut more = false;
        for range in ranges.iter_mut().filter(|range| range.outcome.is_none()) {
            match learnt.get(&name(&range.object.location)) {
                Some(Ok(true)) => {
                    range.answer = range.object.location.answer();
                    range.too_early = false;
                    range.left = range.answer.tries();
                    more = true;
                }
                Some(Err(error)) => range.outcome = Some(Err(error.clone())),
                Some(Ok(false)) | None => {}
            }
        }
        more
    }

    /// Copies ranges of values in the cache of this client. A damaged value is read from its
    /// replicas instead.
    async fn copy_kept(&self, ranges: &mut [Range<T>]) {
        for range in ranges.iter_mut().filter(|range| range.outcome.is_none()) {
            let answer = range.answer.clone();
            let Some(kept) = &answer.kept else { continue };
            let Some(mut into) = range.into.take() else { continue };
            // The range is inside the object, as `Range::new` has checked.
            let from = usize::try_from(range.offset).unwrap_or(usize::MAX).min(kept.len());
            let bytes = &kept[from..kept.len().min(from.saturating_add(into.len()))];
            let mut result = Ok(());
            for (part, bytes) in bytes.chunks(COPIED_AT_ONCE).enumerate() {
                if part > 0 {
                    tokio::task::yield_now().await;
                }
                result = result.and_then(|()| into.copy_from(part * COPIED_AT_ONCE, bytes));
            }
            range.landed(result, into, self.config.clock.now(), self.config.checksum);
            match (&range.outcome, &self.cache) {
                (Some(Ok(())), Some(cache)) => cache.hit(),
                _ => self.forget([range.object.key()]),
            }
        }
    }

    /// Offers objects to the cache if all of their bytes came over a network transport, in any
    /// number of parts.
    fn came_in_parts(self: &Arc<Self>, ranges: &[Range<T>]) {
        if self.cache.is_none() {
            return;
        }
        let mut came: HashMap<usize, (&ObjectLocation, u64)> = HashMap::new();
        for range in ranges.iter().filter(|range| range.from_afar && matches!(range.outcome, Some(Ok(())))) {
            let location = &range.object.location;
            let (_, bytes) = came.entry(name(location)).or_insert((location, 0));
            *bytes += range.into.as_ref().map_or(0, SliceMut::len) as u64;
        }
        for (location, _) in came.into_values().filter(|(location, bytes)| *bytes >= location.size) {
            if let Some(named) = location.answer().named() {
                self.came(&location.key, location.size, named);
            }
        }
    }

    /// Tries the best untried replica of each open range. Returns whether to call this function
    /// again.
    async fn fetch(
        self: &Arc<Self>,
        ranges: &mut [Range<T>],
        deadline: &Deadline,
        counting: &mut Counting<'_>,
    ) -> bool {
        let mut owners: Vec<Owner> = Vec::new();
        let mut wanted: Vec<(usize, usize, u64)> = Vec::new();
        let mut others = false;
        for (i, range) in ranges.iter_mut().enumerate().filter(|(_, range)| range.is_open()) {
            let Some((endpoint, address)) = range.next_place() else { continue };
            others |= range.left > 0;
            let issuer = range.lent.as_ref();
            let issuer = issuer.map_or(Issuer::Master(range.answer.known), |lent| lent.loan.issuer);
            let peer = owners.iter().position(|(e, i)| *e == endpoint && *i == issuer);
            let peer = peer.unwrap_or_else(|| {
                owners.push((endpoint, issuer));
                owners.len() - 1
            });
            wanted.push((i, peer, address));
        }
        if wanted.is_empty() {
            if self.borrow(ranges, deadline).await {
                return true;
            }
            return self.read_files(ranges, deadline).await;
        }
        let peers = self.reach_owners(&owners, deadline).await;
        // A slow client must not use up the time of the replica that is tried after it.
        let landing = if others { deadline.portion(1, 2) } else { deadline.portion(15, 16) };
        let since = counting.moving();
        // Each client has a ticket of its own, so that a slow one does not cost the others their
        // leases.
        let flights = FuturesUnordered::new();
        for (peer, reached) in peers.iter().enumerate() {
            let (mut of, mut requests) = (Vec::new(), Vec::new());
            for &(i, _, remote) in wanted.iter().filter(|(_, p, _)| *p == peer) {
                match reached {
                    Err(why) => {
                        (ranges[i].failure, ranges[i].lent) = (Some(why.error().clone()), None);
                        ranges[i].too_early = why.is_newer();
                    }
                    Ok(reached) => {
                        let Some(into) = ranges[i].into.take() else { continue };
                        of.push(i);
                        requests.push(Request::new(reached, remote, into));
                    }
                }
            }
            if !of.is_empty() {
                let results = self.engine.post_read(requests, Some(landing)).results();
                flights.push(async move { (peer, of, results.await) });
            }
        }
        let bytes = self.land(ranges, flights, &owners, deadline).await;
        counting.moved(since, bytes);
        self.confirm(ranges, deadline).await;
        if deadline.is_over() {
            for range in ranges.iter_mut().filter(|range| range.outcome.is_none()) {
                range.failure.get_or_insert_with(|| late("a transfer"));
            }
            return false;
        }
        true
    }

    /// Waits for all transfers in progress, and renews their leases meanwhile. Returns the number
    /// of bytes that have arrived.
    async fn land(
        self: &Arc<Self>,
        ranges: &mut [Range<T>],
        mut flights: FuturesUnordered<impl Future<Output = Flight<T>>>,
        owners: &[Owner],
        deadline: &Deadline,
    ) -> u64 {
        let mut bytes = 0;
        let clock = &self.config.clock;
        let mut half_over = std::pin::pin!(tokio::time::sleep(half_life(ranges, clock.now())));
        let mut renewing = true;
        let mut renewal: OptionFuture<BoxFuture<'static, Vec<Renewed>>> = OptionFuture::from(None);
        loop {
            tokio::select! {
                biased;
                // Transfers to memory of the caller are always waited for, because the memory has
                // to be returned. A transport ends its transfers in time.
                flight = flights.next() => {
                    let Some((peer, of, (results, requests))) = flight else { return bytes };
                    let now = clock.now();
                    for ((i, result), request) in of.into_iter().zip(results).zip(requests) {
                        self.note(&owners[peer].0, &result);
                        bytes += if result.is_ok() { request.transfer.buffer.len() as u64 } else { 0 };
                        ranges[i].from_afar = self.is_afar(&owners[peer].0);
                        ranges[i].landed(result, request.transfer.buffer, now, self.config.checksum);
                    }
                }
                Some(renewed) = &mut renewal => {
                    renewal = OptionFuture::from(None);
                    // If the master renewed no lease, it is not asked again.
                    renewing = adopt(ranges, &renewed);
                    half_over.set(tokio::time::sleep(half_life(ranges, clock.now())));
                }
                () = &mut half_over, if renewing => {
                    renewing = false;
                    let (client, reading, deadline) = (self.clone(), reading(ranges), deadline.clone());
                    let renew = async move { client.renew(reading, deadline).await };
                    renewal = OptionFuture::from(Some(renew.boxed()));
                }
            }
        }
    }
}

/// Index of a client, the ranges requested from it, and their outcomes.
type Flight<T> = (usize, Vec<usize>, (Vec<Result<()>>, Vec<Request<T, SliceMut<T>>>));

/// Returns the objects and responses of the transfers in progress, each response once.
fn reading<T: Transport>(ranges: &[Range<T>]) -> Vec<Reading> {
    let mut all: HashMap<usize, Reading> = HashMap::new();
    for range in ranges.iter().filter(|range| range.into.is_none()) {
        let reading = || (range.object.location.clone(), range.answer.clone());
        all.entry(name(&range.answer)).or_insert_with(reading);
    }
    all.into_values().collect()
}

/// Returns half of the time that is left of the first lease to end among the transfers in progress.
fn half_life<T: Transport>(ranges: &[Range<T>], now: Moment) -> Duration {
    let under_way = ranges.iter().filter(|range| range.into.is_none());
    under_way.map(|range| range.answer.lease.since(now) / 2).min().unwrap_or(Duration::ZERO)
}

/// Applies renewed leases. Returns whether there is one.
fn adopt<T: Transport>(ranges: &mut [Range<T>], renewed: &[Renewed]) -> bool {
    let renewed: HashMap<usize, &Arc<Answer>> =
        renewed.iter().map(|(before, now)| (name(before), now)).collect();
    for range in ranges {
        if let Some(now) = renewed.get(&name(&range.answer)) {
            range.answer = Arc::clone(now);
        }
    }
    !renewed.is_empty()
}
