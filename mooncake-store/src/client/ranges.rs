//! Reading parts of objects: where they lie is asked once, then any ranges of them go straight to where they are wanted.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use mooncake_core::clock::Moment;
use mooncake_core::replica::{MemoryLocation, ReplicaList, ReplicaStatus};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::engine::Request;
use mooncake_transport::{SliceMut, Transport};

use super::buffers::COPIED_AT_ONCE;
use super::checksum::Sum;
use super::deadline::{Deadline, late};
use super::metrics::{Counting, Operation};
use super::{Client, Inner, again, shown};

/// Where an object lay when the master was asked, and until when that holds. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Located {
    place: Arc<Place>,
}

#[derive(Debug)]
struct Place {
    key: Vec<u8>,
    size: u64,
    /// The best last.
    replicas: Vec<MemoryLocation>,
    lease: Moment,
    /// What the bytes must come to, when this client compares.
    checksum: Option<u64>,
    /// The value, as this client has kept it.
    kept: Option<Bytes>,
}

impl Located {
    /// Its key.
    pub fn key(&self) -> &[u8] {
        &self.place.key
    }

    /// Length of the object in bytes.
    pub fn size(&self) -> u64 {
        self.place.size
    }
}

/// A part of an object to read.
#[derive(Debug)]
pub struct RangeRead<T: Transport> {
    /// Of which object.
    pub object: Located,
    /// From which byte on.
    pub offset: u64,
    /// To where, and with that how much.
    pub into: SliceMut<T>,
}

/// What became of a range: read or not, and the memory.
pub type RangeOutcome<T> = (Result<()>, SliceMut<T>);

impl<T: Transport> Client<T> {
    /// Where each key lies, with a lease on it; `None` for a miss.
    ///
    /// # Errors
    /// The outer one means that nothing is known of any. `INVALID_REPLICA` for an object that is not in memory.
    pub async fn locate<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Result<Option<Located>>>> {
        let inner = &self.inner;
        let asked = inner.config.clock.now();
        let answers = self.batch_replicas(keys).await?;
        inner.missed(answers.iter().filter(|answer| matches!(answer, Ok(None))).count());
        let located = |(key, answer): (&K, Result<Option<ReplicaList>>)| {
            answer?.map(|list| inner.located(key.as_ref(), list, asked)).transpose()
        };
        Ok(keys.iter().zip(answers).map(located).collect())
    }

    /// Reads ranges of located objects, all at once. A member that fails is stood in for by the next replica. Each range
    /// fails on its own: `INVALID_PARAMS` when it does not lie in its object, `LEASE_EXPIRED` when the bytes came too late to be
    /// trusted. A range that is the whole object is compared with its checksum, when this client compares
    /// ([`ClientConfig::checksum`](super::ClientConfig::checksum)).
    pub async fn read_ranges(&self, reads: Vec<RangeRead<T>>) -> Vec<RangeOutcome<T>> {
        let mut counting = self.inner.counting(Operation::GetIntoRanges);
        let deadline = self.inner.deadline();
        let usable = self.inner.usable();
        let mut ranges: Vec<Range<T>> = reads.into_iter().map(Range::new).collect();
        if let Err(error) = &usable {
            ranges.iter_mut().for_each(|range| range.outcome = Some(Err(again(error))));
        }
        self.inner.copy_kept(&mut ranges).await;
        let tries = ranges.iter().map(|range| range.object.place.replicas.len()).max().unwrap_or(0);
        for attempt in 0..tries {
            if !self.inner.fetch(&mut ranges, attempt, attempt + 1 < tries, &deadline, &mut counting).await {
                break;
            }
        }
        self.inner.came_in_parts(&ranges);
        let ended: Vec<_> = ranges.into_iter().filter_map(Range::finish).collect();
        ended.iter().for_each(|(outcome, into)| counting.part(outcome, into.len()));
        counting.end();
        ended
    }
}

impl Place {
    /// Whether these bytes are the object, as far as that can be told: of a part it cannot.
    fn compare<T: Transport>(&self, bytes: &SliceMut<T>) -> Result<()> {
        let Some(expected) = self.checksum.filter(|_| bytes.len() as u64 == self.size) else { return Ok(()) };
        let mut sum = Sum::new();
        sum.front(bytes, bytes.len())?;
        if sum.value() == expected {
            return Ok(());
        }
        tracing::warn!(key = %shown(&self.key), "a replica holds other bytes than were written");
        Err(Error::from(ErrorCode::ChecksumMismatch))
    }
}

struct Range<T: Transport> {
    object: Located,
    offset: u64,
    into: Option<SliceMut<T>>,
    /// A wire was needed.
    from_afar: bool,
    /// Why it was not read so far.
    failure: Option<Error>,
    outcome: Option<Result<()>>,
}

impl<T: Transport> Range<T> {
    fn new(read: RangeRead<T>) -> Self {
        let RangeRead { object, offset, into } = read;
        let end = offset.checked_add(into.len() as u64);
        let outcome = end.is_none_or(|end| end > object.size()).then(|| {
            let text = format!("{} bytes from {offset} of an object of {}", into.len(), object.size());
            Err(Error::invalid(text).context(shown(&object.place.key)))
        });
        Self { object, offset, into: Some(into), from_afar: false, failure: None, outcome }
    }

    fn finish(self) -> Option<RangeOutcome<T>> {
        let none = || Err(Error::from(ErrorCode::InvalidReplica));
        let outcome = self.outcome.unwrap_or_else(|| self.failure.map_or_else(none, Err));
        let key = &self.object.place.key;
        Some((outcome.map_err(|error| error.context(shown(key))), self.into?))
    }
}

impl<T: Transport> Inner<T> {
    pub(super) fn located(&self, key: &[u8], list: ReplicaList, asked: Moment) -> Result<Located> {
        let readable = list.replicas.iter().filter(|replica| replica.status == ReplicaStatus::Complete);
        let mut replicas: Vec<MemoryLocation> =
            readable.filter_map(|replica| replica.location.memory()).cloned().collect();
        let Some(size) = replicas.first().map(|at| at.size) else {
            return Err(Error::from(ErrorCode::InvalidReplica).context(shown(key)));
        };
        replicas.retain(|at| at.size == size);
        self.rank(&mut replicas);
        // The lease began when the master answered; counting from before we asked is on the safe side.
        let lease = asked.after(list.lease);
        let kept = self.kept(key, &list).filter(|kept| kept.len() as u64 == size);
        let checksum = list.checksum.filter(|_| self.config.checksum);
        Ok(Located { place: Arc::new(Place { key: key.to_vec(), size, replicas, lease, checksum, kept }) })
    }

    /// Copies what lies in values that this client has kept. What turns out to be damaged is read as if there were none.
    async fn copy_kept(&self, ranges: &mut [Range<T>]) {
        for range in ranges.iter_mut().filter(|range| range.outcome.is_none()) {
            let place = range.object.place.clone();
            let Some(kept) = &place.kept else { continue };
            let Some(mut into) = range.into.take() else { continue };
            // Inside, as `Range::new` has made sure.
            let from = usize::try_from(range.offset).unwrap_or(usize::MAX).min(kept.len());
            let bytes = &kept[from..kept.len().min(from.saturating_add(into.len()))];
            let mut result = Ok(());
            for (part, bytes) in bytes.chunks(COPIED_AT_ONCE).enumerate() {
                if part > 0 {
                    tokio::task::yield_now().await;
                }
                result = result.and_then(|()| into.copy_from(part * COPIED_AT_ONCE, bytes));
            }
            range.landed(result, into, self.config.clock.now());
            match (&range.outcome, &self.cache) {
                (Some(Ok(())), Some(cache)) => cache.hit(),
                _ => self.forget([&*place.key]),
            }
        }
    }

    /// Objects of which the whole has come from afar, in however many parts, may be worth keeping.
    fn came_in_parts(self: &Arc<Self>, ranges: &[Range<T>]) {
        if self.cache.is_none() {
            return;
        }
        let mut came: HashMap<*const Place, (&Place, u64)> = HashMap::new();
        for range in ranges.iter().filter(|range| range.from_afar && matches!(range.outcome, Some(Ok(())))) {
            let place = &range.object.place;
            let (_, bytes) = came.entry(Arc::as_ptr(place)).or_insert((place, 0));
            *bytes += range.into.as_ref().map_or(0, SliceMut::len) as u64;
        }
        for (place, _) in came.into_values().filter(|(place, bytes)| *bytes >= place.size) {
            self.came(&place.key, place.size);
        }
    }

    /// Tries what is open at the replica of that rank; whether anything was tried.
    async fn fetch(
        &self,
        ranges: &mut [Range<T>],
        rank: usize,
        more: bool,
        deadline: &Deadline,
        counting: &mut Counting<'_>,
    ) -> bool {
        let mut endpoints: Vec<String> = Vec::new();
        let mut wanted: Vec<(usize, usize, u64)> = Vec::new();
        for (i, range) in ranges.iter().enumerate().filter(|(_, range)| range.outcome.is_none()) {
            let Some(at) = range.object.place.replicas.iter().rev().nth(rank) else { continue };
            let peer = endpoints.iter().position(|e| *e == at.endpoint).unwrap_or_else(|| {
                endpoints.push(at.endpoint.clone());
                endpoints.len() - 1
            });
            wanted.push((i, peer, at.address.saturating_add(range.offset)));
        }
        if wanted.is_empty() {
            return false;
        }
        let peers = self.reach_all(&endpoints, deadline).await;
        // A member that keeps us waiting must not use up the time of the one that stands in for it.
        let landing = if more { deadline.portion(1, 2) } else { deadline.portion(15, 16) };
        let flights = peers.iter().enumerate().map(|(peer, reached)| {
            let (mut of, mut requests) = (Vec::new(), Vec::new());
            for &(i, _, remote) in wanted.iter().filter(|(_, p, _)| *p == peer) {
                match reached {
                    Err(error) => ranges[i].failure = Some(again(error)),
                    Ok(reached) => {
                        let Some(into) = ranges[i].into.take() else { continue };
                        of.push(i);
                        requests.push(Request::new(reached, remote, into));
                    }
                }
            }
            let results = (!of.is_empty()).then(|| self.engine.post_read(requests, Some(landing)).results());
            async move {
                match results {
                    Some(results) => Some((peer, of, results.await)),
                    None => None,
                }
            }
        });
        let (since, mut bytes) = (counting.moving(), 0);
        let flights: Vec<_> = flights.collect();
        // The caller's own memory has to come back, so it is waited for; a wire ends its transfers in time.
        for (peer, of, (results, requests)) in futures::future::join_all(flights).await.into_iter().flatten()
        {
            let now = self.config.clock.now();
            for ((i, result), request) in of.into_iter().zip(results).zip(requests) {
                self.note(&endpoints[peer], &result);
                bytes += if result.is_ok() { request.transfer.buffer.len() as u64 } else { 0 };
                ranges[i].from_afar = self.is_afar(&endpoints[peer]);
                ranges[i].landed(result, request.transfer.buffer, now);
            }
        }
        counting.moved(since, bytes);
        if deadline.is_over() {
            for range in ranges.iter_mut().filter(|range| range.outcome.is_none()) {
                range.failure.get_or_insert_with(|| late("a transfer"));
            }
            return false;
        }
        true
    }
}

impl<T: Transport> Range<T> {
    fn landed(&mut self, result: Result<()>, into: SliceMut<T>, now: Moment) {
        let place = &self.object.place;
        // After the lease they may well be another object's.
        let result = result.and_then(|()| if now < place.lease { place.compare(&into) } else { Ok(()) });
        self.into = Some(into);
        match result {
            // Written over or not, nobody can tell any more: the bytes do not count.
            Ok(()) if now >= self.object.place.lease => {
                self.outcome = Some(Err(Error::from(ErrorCode::LeaseExpired)));
            }
            Ok(()) => self.outcome = Some(Ok(())),
            Err(error) => self.failure = Some(error),
        }
    }
}
