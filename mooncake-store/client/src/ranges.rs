//! Reads of parts of objects. The objects are located once. Then any ranges of them go directly to
//! their targets. The ranges of many objects are read in parts of the batch (`batch_parts.rs`).
//!
//! If a replica cannot be read, the next replica is tried, as for whole objects. If all replicas
//! have failed, the master is asked once more. Ranges that no replica in memory returns are
//! requested from the owners of disks (`borrow.rs`).

mod borrow;
mod files;
mod in_parts;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt, OptionFuture};
use futures::stream::{FuturesUnordered, StreamExt};
use mooncake_core::clock::Moment;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::replica::{Replica, ReplicaList};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_transport::engine::Request;
use mooncake_transport::{SliceMut, Transport};

use crate::batch_parts::call_by_parts;
use crate::buffers::COPY_CHUNK;
use crate::checksum::Sum;
use crate::deadline::{Deadline, deadline_exceeded};
use crate::disk::{Loan, MAX_BORROWED_OBJECTS};
use crate::errors::{display_key, transfer_error};
use crate::handles::ClientRanges;
use crate::issuer::{Issuer, RequestStamp};
use crate::located::{DiskVersion, LocateResponse, Located, ObjectLocation, Reading, Renewed, identity};
use crate::metrics::{Counting, Operation};
use crate::read_reports::NumberedRead;
use crate::state::{Inner, MemoryOwner};

/// Maximum number of responses of the master that are tried.
const MAX_ROUNDS: usize = 2;

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
        call_by_parts(keys, |part| self.locate_part(part)).await
    }

    async fn locate_part<K: AsRef<[u8]>>(self, keys: &[K]) -> Result<Vec<Result<Option<Located>>>> {
        let inner = &self.client.inner;
        let number = NumberedRead::begin(inner);
        let request = || self.client.replicas().lists(keys, Some(number.number()));
        let first =
            |results: &Vec<Result<Option<ReplicaList>>>| first_lease(results.iter().flatten().flatten());
        let (results, stamp) = inner.request_in_time(request, first).await?;
        inner.count_misses(results.iter().filter(|result| matches!(result, Ok(None))).count());
        let longest = results.iter().flatten().flatten().map(|list| list.lease).max();
        let read = number.of_located(stamp.at.after(longest.unwrap_or_default()));
        let located = |(key, result): (&K, Result<Option<ReplicaList>>)| {
            result?.map(|list| inner.located(key.as_ref(), list, stamp, Some(read.clone()))).transpose()
        };
        Ok(keys.iter().zip(results).map(located).collect())
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
        let request = || self.client.replicas().list_prefix(keys);
        let (lists, stamp) =
            inner.request_in_time(request, |lists: &Vec<ReplicaList>| first_lease(lists)).await?;
        let located = |(key, list): (&K, ReplicaList)| inner.located(key.as_ref(), list, stamp, None).ok();
        let prefix: Vec<Located> = keys.iter().zip(lists).map_while(located).collect();
        inner.count_misses(usize::from(prefix.len() < keys.len()));
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
        self.read_as(reads, false).await
    }

    /// Reads ranges like [`read`](Self::read), of objects that the same operation has located. An
    /// object whose lease has ended before the read began is located again. If nothing of the
    /// object has been read, the bytes may then belong to a later value of the same length.
    pub async fn read_current(self, reads: Vec<RangeRead<T>>) -> Vec<RangeOutcome<T>> {
        self.read_as(reads, true).await
    }

    async fn read_as(self, reads: Vec<RangeRead<T>>, relocates: bool) -> Vec<RangeOutcome<T>> {
        let inner = &self.client.inner;
        let mut counting = inner.counting(Operation::GetIntoRanges);
        let (usable, now) = (inner.can_transfer(), inner.config.clock.now());
        let mut ranges: Vec<Range<T>> =
            reads.into_iter().map(|read| Range::new(read, now, relocates)).collect();
        if let Err(error) = &usable {
            ranges.iter_mut().for_each(|range| range.outcome = Some(Err(error.clone())));
        }
        let ranges = inner.read_in_parts(ranges, &mut counting).await;
        inner.record_remote_reads(&ranges);
        let ended: Vec<RangeOutcome<T>> = ranges.into_iter().filter_map(Range::finish).collect();
        ended.iter().for_each(|range| counting.part(&range.result, range.into.len()));
        counting.end();
        ended
    }
}

struct Range<T: Transport> {
    object: Located,
    /// Response of the master that the read uses.
    response: Arc<LocateResponse>,
    /// True if a client was found after the master was asked. The master has to be asked again.
    stale_response: bool,
    /// Number of replicas that were not tried yet, including those on disks.
    left: usize,
    /// Maximum number of pieces in one request to an owner of a disk. The maximum is lowered when
    /// an owner refuses more. At 0, the range also shares no piece with other ranges.
    max_batch: usize,
    /// Loan of an owner of a disk, if the range is read from one.
    borrowed: Option<BorrowedRange>,
    /// Loan whose bytes have arrived and count only if the master confirms them.
    unconfirmed: Option<BorrowedRange>,
    offset: u64,
    /// Target of the bytes. `None` while a transfer is in progress.
    into: Option<SliceMut<T>>,
    /// Refusal of an owner of a disk without free buffers.
    busy: Option<Error>,
    /// True if such an owner is to be asked again.
    waits: bool,
    /// True unless the master has refused a later lease during the present transfer.
    renews: bool,
    /// True if the bytes came over a network transport.
    over_network: bool,
    /// Reason of the last failure.
    failure: Option<Error>,
    outcome: Option<Result<()>>,
}

/// Part of a loan that contains a range.
#[derive(Debug)]
struct BorrowedRange {
    loan: Arc<Loan>,
    address: u64,
    /// Replica on the disk, as the master described it.
    copy: Replica,
    /// Version of the value, if the owner reports one.
    version: Option<DiskVersion>,
}

impl BorrowedRange {
    fn until(&self) -> Moment {
        self.loan.until
    }
}

impl<T: Transport> Range<T> {
    fn new(read: RangeRead<T>, now: Moment, relocates: bool) -> Self {
        let RangeRead { object, offset, into } = read;
        let response = object.location.response();
        let end = offset.checked_add(into.len() as u64);
        let outcome = if end.is_none_or(|end| end > object.size()) {
            let text = format!("{} bytes from {offset} of an object of {}", into.len(), object.size());
            Some(Err(Error::invalid(text)))
        } else if now >= response.lease && !(relocates && may_relocate(&object)) {
            Some(Err(Error::from(ErrorCode::LeaseExpired)))
        } else {
            None
        };
        let left = response.replica_count();
        // The object is located again before it is read.
        let stale_response = now >= response.lease && outcome.is_none();
        let failure = stale_response.then(|| Error::from(ErrorCode::LeaseExpired));
        Self {
            object,
            response,
            stale_response,
            left,
            max_batch: MAX_BORROWED_OBJECTS,
            borrowed: None,
            unconfirmed: None,
            offset,
            into: Some(into),
            busy: None,
            waits: false,
            renews: true,
            over_network: false,
            failure,
            outcome,
        }
    }

    /// Returns whether the range has no outcome yet and may use the present response.
    fn is_open(&self) -> bool {
        self.outcome.is_none() && !self.stale_response
    }

    fn has_stale_response(&self) -> bool {
        self.outcome.is_none() && self.stale_response
    }

    /// Returns whether the bytes arrived after the end of the lease.
    fn is_late(&self) -> bool {
        let late = |error: &Error| error.kind() == ErrorKind::Expired;
        self.outcome.is_none() && self.failure.as_ref().is_some_and(late)
    }

    fn finish(self) -> Option<RangeOutcome<T>> {
        let none = || Err(Error::from(ErrorCode::InvalidReplica));
        // An object at a busy owner is there: another read may find a free buffer.
        let failure = self.busy.or(self.failure);
        let outcome = self.outcome.unwrap_or_else(|| failure.map_or_else(none, Err));
        let key = &self.object.location.key;
        Some(RangeOutcome {
            result: outcome.map_err(|error| error.context(display_key(key))),
            into: self.into?,
        })
    }

    /// Compares bytes with the checksum if they are the whole object. A part has no checksum.
    fn compare(&self, bytes: &SliceMut<T>) -> Result<()> {
        if bytes.len() as u64 == self.object.size() { self.compare_all([bytes]) } else { Ok(()) }
    }

    /// Compares consecutive pieces, which are the whole object together, with its checksum.
    fn compare_all<'a>(&self, pieces: impl IntoIterator<Item = &'a SliceMut<T>>) -> Result<()> {
        let Some(expected) = self.response.checksum() else { return Ok(()) };
        let mut sum = Sum::new();
        for piece in pieces {
            sum.front(piece, piece.len())?;
        }
        if sum.value() == expected {
            return Ok(());
        }
        tracing::warn!(key = %display_key(self.object.key()), "a replica holds other bytes than were written");
        Err(Error::from(ErrorCode::ChecksumMismatch))
    }

    fn landed(&mut self, result: Result<()>, into: SliceMut<T>, now: Moment, compares: bool) {
        let borrowed = self.borrowed.take();
        // After the end of the lease, the bytes may belong to another object and are not compared.
        let in_time = now < borrowed.as_ref().map_or(self.response.lease, BorrowedRange::until);
        let result = result.and_then(|()| if in_time && compares { self.compare(&into) } else { Ok(()) });
        self.into = Some(into);
        let delivered = result.map(|()| match borrowed {
            None => self.object.location.deliver(&self.response, now),
            Some(_) if !in_time => Err(Error::from(ErrorCode::LeaseExpired)),
            Some(borrowed) => self.take_from_disk(borrowed, now),
        });
        match delivered {
            Ok(Ok(())) if self.unconfirmed.is_some() => {}
            Ok(Ok(())) => self.outcome = Some(Ok(())),
            // The bytes do not count, because the space may have been overwritten after the end of
            // the lease.
            Ok(Err(error)) => (self.left, self.failure) = (0, Some(error)),
            Err(error) => self.failure = Some(transfer_error(error)),
        }
    }
}

/// Returns whether an object whose lease has ended may be located again. If it has been read in
/// part, only a response about the same value counts.
fn may_relocate(object: &Located) -> bool {
    object.location.is_untouched() || !is_planted("parts-are-of-one-lease")
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
        if is_part && matches!(range.outcome, Some(Ok(()))) && range.response.checksum().is_some() {
            parts.entry(identity(&range.object.location)).or_default().push(i);
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
    async fn request_in_time<A, F: Future<Output = Result<A>>>(
        &self,
        request: impl Fn() -> F,
        first_lease: impl FnOnce(&A) -> Option<Duration>,
    ) -> Result<(A, RequestStamp)> {
        let stamp = self.request_stamp();
        let response = request().await?;
        let later_stamp = self.request_stamp();
        match first_lease(&response) {
            Some(lease) if stamp.at.after(lease) <= later_stamp.at => Ok((request().await?, later_stamp)),
            _ => Ok((response, stamp)),
        }
    }

    /// Copies ranges of values in the cache of this client. A damaged value is read from its
    /// replicas instead.
    async fn copy_cached(&self, ranges: &mut [Range<T>]) {
        for range in ranges.iter_mut().filter(|range| range.is_open()) {
            let response = range.response.clone();
            let Some(cached_value) = &response.cached_value else { continue };
            let Some(mut into) = range.into.take() else { continue };
            // The range is inside the object, as `Range::new` has checked.
            let from = usize::try_from(range.offset).unwrap_or(usize::MAX).min(cached_value.len());
            let bytes = &cached_value[from..cached_value.len().min(from.saturating_add(into.len()))];
            let mut result = Ok(());
            for (part, bytes) in bytes.chunks(COPY_CHUNK).enumerate() {
                if part > 0 {
                    tokio::task::yield_now().await;
                }
                result = result.and_then(|()| into.copy_from(part * COPY_CHUNK, bytes));
            }
            range.landed(result, into, self.config.clock.now(), self.config.checksum);
            match (&range.outcome, &self.cache) {
                (Some(Ok(())), Some(cache)) => cache.count_hit(),
                _ => self.forget([range.object.key()]),
            }
        }
    }

    /// Offers objects to the cache if all of their bytes came over a network transport, in any
    /// number of parts.
    fn record_remote_reads(self: &Arc<Self>, ranges: &[Range<T>]) {
        if self.cache.is_none() {
            return;
        }
        let mut remote_reads: HashMap<usize, (&ObjectLocation, u64)> = HashMap::new();
        for range in ranges.iter().filter(|range| range.over_network && matches!(range.outcome, Some(Ok(()))))
        {
            let location = &range.object.location;
            let (_, bytes) = remote_reads.entry(identity(location)).or_insert((location, 0));
            *bytes += range.into.as_ref().map_or(0, SliceMut::len) as u64;
        }
        for (location, _) in remote_reads.into_values().filter(|(location, bytes)| *bytes >= location.size) {
            if let Some(replica_id) = location.response().replica_id() {
                self.record_remote_read(&location.key, location.size, replica_id);
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
        let mut owners: Vec<MemoryOwner> = Vec::new();
        let mut attempts: Vec<(usize, usize, u64)> = Vec::new();
        let mut has_other_replicas = false;
        for (i, range) in ranges.iter_mut().enumerate().filter(|(_, range)| range.is_open()) {
            let Some((endpoint, address)) = range.next_memory() else { continue };
            has_other_replicas |= range.left > 0;
            let issuer = range.borrowed.as_ref();
            let issuer =
                issuer.map_or(Issuer::Master(range.response.look_ups), |borrowed| borrowed.loan.issuer);
            let peer = owners.iter().position(|(e, i)| *e == endpoint && *i == issuer);
            let peer = peer.unwrap_or_else(|| {
                owners.push((endpoint, issuer));
                owners.len() - 1
            });
            attempts.push((i, peer, address));
        }
        if attempts.is_empty() {
            if self.borrow(ranges, deadline).await {
                return true;
            }
            return self.read_files(ranges, deadline).await || self.wait_for_disks(ranges, deadline).await;
        }
        let peers = self.reach_owners(&owners, deadline).await;
        // A slow client must not use up the time of the replica that is tried after it.
        let landing = if has_other_replicas { deadline.portion(1, 2) } else { deadline.portion(15, 16) };
        let start = counting.transfer_start();
        // Each client has a ticket of its own, so that a slow one does not cost the others their
        // leases.
        let transfers = FuturesUnordered::new();
        for (peer, reached) in peers.iter().enumerate() {
            let (mut indices, mut requests) = (Vec::new(), Vec::new());
            for &(i, _, remote) in attempts.iter().filter(|(_, p, _)| *p == peer) {
                match reached {
                    Err(why) => {
                        (ranges[i].failure, ranges[i].borrowed) = (Some(why.error().clone()), None);
                        ranges[i].stale_response = why.is_newer();
                    }
                    Ok(reached) => {
                        let Some(into) = ranges[i].into.take() else { continue };
                        indices.push(i);
                        requests.push(Request::new(reached, remote, into));
                    }
                }
            }
            if !indices.is_empty() {
                let results = self.engine.post_read(requests, Some(landing)).results();
                transfers.push(async move { (peer, indices, results.await) });
            }
        }
        let bytes = self.land(ranges, transfers, &owners, deadline).await;
        counting.record_transfer(start, bytes);
        self.confirm(ranges, deadline).await;
        if deadline.is_over() {
            for range in ranges.iter_mut().filter(|range| range.outcome.is_none()) {
                range.failure.get_or_insert_with(|| deadline_exceeded("a transfer"));
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
        mut transfers: FuturesUnordered<impl Future<Output = RangeResults<T>>>,
        owners: &[MemoryOwner],
        deadline: &Deadline,
    ) -> u64 {
        let mut bytes = 0;
        let clock = &self.config.clock;
        let mut renewal_timer = std::pin::pin!(tokio::time::sleep(half_lease_left(ranges, clock.now())));
        let mut renewing = true;
        let mut renewal: OptionFuture<BoxFuture<'static, Vec<Renewed>>> = OptionFuture::from(None);
        loop {
            tokio::select! {
                biased;
                // Transfers to memory of the caller are always waited for, because the memory has
                // to be returned. A transport ends its transfers in time.
                finished = transfers.next() => {
                    let Some((peer, indices, (results, requests))) = finished else { return bytes };
                    let now = clock.now();
                    for ((i, result), request) in indices.into_iter().zip(results).zip(requests) {
                        self.record_outcome(&owners[peer].0, &result);
                        bytes += if result.is_ok() { request.transfer.buffer.len() as u64 } else { 0 };
                        ranges[i].over_network = self.needs_transport(&owners[peer].0);
                        ranges[i].landed(result, request.transfer.buffer, now, self.config.checksum);
                    }
                }
                Some(renewed) = &mut renewal => {
                    renewal = OptionFuture::from(None);
                    // If the master renewed no lease, it is not asked again.
                    renewing = adopt(ranges, &renewed);
                    renewal_timer.set(tokio::time::sleep(half_lease_left(ranges, clock.now())));
                }
                () = &mut renewal_timer, if renewing => {
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
type RangeResults<T> = (usize, Vec<usize>, (Vec<Result<()>>, Vec<Request<T, SliceMut<T>>>));

/// Returns the objects and responses of the transfers in progress, each response once.
fn reading<T: Transport>(ranges: &[Range<T>]) -> Vec<Reading> {
    let mut all: HashMap<usize, Reading> = HashMap::new();
    for range in ranges.iter().filter(|range| range.into.is_none() && range.renews) {
        let reading = || (range.object.location.clone(), range.response.clone());
        all.entry(identity(&range.response)).or_insert_with(reading);
    }
    all.into_values().collect()
}

/// Returns half of the time that is left of the first lease to end among the transfers in progress.
fn half_lease_left<T: Transport>(ranges: &[Range<T>], now: Moment) -> Duration {
    let under_way = ranges.iter().filter(|range| range.into.is_none() && range.renews);
    under_way.map(|range| range.response.lease.since(now) / 2).min().unwrap_or(Duration::ZERO)
}

/// Applies renewed leases. Returns whether there is one. The other objects in progress are not
/// asked for again.
fn adopt<T: Transport>(ranges: &mut [Range<T>], renewed: &[Renewed]) -> bool {
    let renewed: HashMap<usize, &Arc<LocateResponse>> =
        renewed.iter().map(|(before, now)| (identity(before), now)).collect();
    for range in ranges {
        match renewed.get(&identity(&range.response)) {
            Some(now) => range.response = Arc::clone(now),
            None => range.renews &= range.into.is_some(),
        }
    }
    !renewed.is_empty()
}
