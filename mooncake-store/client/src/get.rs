//! Reads of whole objects. One RPC locates all objects, one submission per client reads them, and
//! the bytes go directly to their target.
//!
//! If a replica cannot be read, the next replica is tried. If all replicas have failed, the master
//! is asked once more, because its response may have changed. Bytes count only if the lease was
//! valid until the last of them had arrived.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use mooncake_core::clock::Moment;
use mooncake_core::ids::ReplicaId;
use mooncake_core::memory::HostMemory;
use mooncake_core::replica::{MemoryLocation, ReplicaList, ReplicaStatus};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_transport::engine::{LookUps, Request};
use mooncake_transport::{BufferPool, PoolBuf, PoolConfig, SliceMut, Source, Transport};

use crate::buffers::{Front, Incoming};
use crate::deadline::{Deadline, late};
use crate::disk::{BORROWED, BYTES_BORROWED, Loan};
use crate::errors::{is_lost, shown};
use crate::issuer::{Asked, Issuer};
use crate::metrics::{Counting, Operation};
use crate::offload::is_gone;
use crate::replicas::{in_file, on_disk};
use crate::state::{Inner, Owner};

/// Maximum number of requests to the master for the locations of an object.
const ROUNDS: usize = 2;
/// Maximum number of additional requests if a client was found after the master was asked.
const LATE_ROUNDS: usize = 2;
/// Minimum length in bytes of a value that gets pages of its own if the local buffer is full.
const OWN_PAGES: usize = 64 << 10;

/// Target that the caller chooses for a value.
pub(crate) enum Want<T: Transport> {
    /// Memory that this client allocates.
    Anywhere,
    /// The first bytes of this slice.
    Into(SliceMut<T>),
}

/// Outcome of one read.
pub(crate) struct Outcome<T: Transport> {
    /// Length of the value in bytes, or `None` for a miss.
    pub(crate) result: Result<Option<usize>>,
    /// Reason of a miss if the master named replicas and none of them could be read.
    pub(crate) lost: Option<Error>,
    /// Memory with the value, or the slice of the caller. `None` only after a miss or a failure
    /// without memory.
    pub(crate) place: Option<Incoming<T>>,
    /// Slice of the caller, if nothing was read into it.
    pub(crate) slice: Option<SliceMut<T>>,
}

/// Reads every key. Each key has an outcome of its own. The outer error means that no outcome is
/// known. The slices are returned in every case.
pub(crate) async fn read<T: Transport>(
    client: &Arc<Inner<T>>,
    operation: Operation,
    keys: &[&[u8]],
    wants: Vec<Want<T>>,
) -> (Result<()>, Vec<Outcome<T>>) {
    let mut counting = client.counting(operation);
    let deadline = client.deadline();
    let mut reads: Vec<Read<'_, T>> =
        keys.iter().zip(wants).map(|(key, want)| Read::new(key, want)).collect();
    let mut asked = client.can_transfer();
    let (mut round, mut rounds) = (0, ROUNDS);
    while round < rounds {
        if asked.is_err() || (round > 0 && deadline.is_over()) {
            break;
        }
        let pending: Vec<usize> = (0..reads.len()).filter(|&i| reads[i].pending()).collect();
        if pending.is_empty() {
            break;
        }
        match locate(client, &mut reads, &pending, &deadline).await {
            Ok(()) => {
                copy_kept(client, &mut reads).await;
                fetch(client, &mut reads, &deadline, &mut counting).await;
            }
            // The outcomes of the first round stay valid.
            Err(error) if round == 0 => asked = Err(error),
            Err(_) => break,
        }
        rounds += usize::from(rounds < ROUNDS + LATE_ROUNDS && reads.iter().any(|read| read.too_early));
        round += 1;
    }
    for read in reads.iter().filter(|read| read.from_afar) {
        if let (State::Found(len), Some(named)) = (&read.state, read.named) {
            client.came(read.key, *len as u64, named);
        }
    }
    let gone = |read: &&Read<'_, T>| read.pending() && matches!(read.gone, Some((_, ROUNDS)));
    client.report_files(reads.iter().filter(gone).map(|read| read.key.to_vec()).collect());
    let outcomes: Vec<Outcome<T>> = reads.into_iter().map(Read::outcome).collect();
    match &asked {
        Ok(()) => outcomes.iter().for_each(|outcome| counting.read(&outcome.result)),
        Err(error) => outcomes.iter().for_each(|_| counting.failed(error.kind())),
    }
    counting.end();
    (asked, outcomes)
}

/// Reads one located value into a buffer of exactly its length, for the client itself. The read is
/// not counted and does not use the cache. Returns `None` if no replica could be read.
pub(crate) async fn read_to<T: Transport>(
    client: &Arc<Inner<T>>,
    key: &[u8],
    list: ReplicaList,
    asked: Asked,
    room: PoolBuf<T>,
    deadline: &Deadline,
) -> Result<Option<Bytes>> {
    let mut read = Read::new(key, Want::Anywhere);
    read.place = Some(Incoming::Buffer(room));
    read.located(client, Ok(list), asked);
    fetch(client, std::slice::from_mut(&mut read), deadline, &mut Counting::nothing()).await;
    let outcome = read.outcome();
    Ok(outcome.result?.and(outcome.place.and_then(Incoming::into_bytes)))
}

/// State of the read of one key.
struct Read<'a, T: Transport> {
    key: &'a [u8],
    want: Option<Want<T>>,
    place: Option<Incoming<T>>,
    /// True if `place` is memory of the caller.
    lent: bool,
    /// Replicas in memory that were not tried yet, the best last.
    replicas: Vec<MemoryLocation>,
    /// Files that contain the value and were not tried yet.
    files: Vec<String>,
    /// File that could not be read last, and the number of times that the master has named it.
    gone: Option<(String, usize)>,
    /// Endpoints of owners of disks that have the value and were not asked yet.
    disks: Vec<String>,
    /// Maximum number of objects in one request to an owner of a disk. The maximum is lowered when
    /// an owner refuses more.
    company: usize,
    /// Loan of an owner of a disk, if the value is read from one.
    loan: Option<Arc<Loan>>,
    lease: Moment,
    /// Look-ups that the engine had made before the master was asked.
    known: LookUps,
    /// True if a client was found after the master was asked. The master has to be asked again.
    too_early: bool,
    /// Number of a replica in the last response of the master.
    named: Option<ReplicaId>,
    /// Expected checksum of the value, if this client compares checksums.
    checksum: Option<u64>,
    /// Copy of the value in the cache of this client.
    kept: Option<Bytes>,
    /// True if the value came over a network transport.
    from_afar: bool,
    state: State,
}

enum State {
    /// No outcome yet, or a failure that a later response of the master may resolve.
    Pending(Option<Error>),
    Found(usize),
    Missing,
    Failed(Error),
}

impl<'a, T: Transport> Read<'a, T> {
    fn new(key: &'a [u8], want: Want<T>) -> Self {
        Self {
            key,
            lent: matches!(want, Want::Into(_)),
            want: Some(want),
            place: None,
            replicas: Vec::new(),
            files: Vec::new(),
            gone: None,
            disks: Vec::new(),
            company: BORROWED,
            loan: None,
            lease: Moment::default(),
            known: LookUps::default(),
            too_early: false,
            named: None,
            checksum: None,
            kept: None,
            from_afar: false,
            state: State::Pending(None),
        }
    }

    fn pending(&self) -> bool {
        matches!(self.state, State::Pending(_))
    }

    /// Returns whether the read has no outcome yet and may use the present response.
    fn open(&self) -> bool {
        self.pending() && !self.too_early
    }

    fn outcome(self) -> Outcome<T> {
        let mut lost = None;
        let result = match self.state {
            State::Found(len) => Ok(Some(len)),
            State::Missing | State::Pending(None) => Ok(None),
            State::Pending(Some(error)) if is_lost(&error) => {
                tracing::debug!(key = %shown(self.key), "no replica could be read: {error}");
                lost = Some(error.context(shown(self.key)));
                Ok(None)
            }
            State::Pending(Some(error)) | State::Failed(error) => Err(error.context(shown(self.key))),
        };
        let slice = match self.want {
            Some(Want::Into(slice)) => Some(slice),
            _ => None,
        };
        Outcome { result, lost, place: self.place, slice }
    }

    /// Stores the response of the master.
    fn located(&mut self, client: &Inner<T>, answer: Result<ReplicaList>, asked: Asked) {
        (self.known, self.too_early) = (asked.known, false);
        let list = match answer {
            Ok(list) => list,
            Err(error) => {
                self.state = match error.kind() {
                    ErrorKind::NotFound => State::Missing,
                    // An object that is still being written counts as missing.
                    ErrorKind::Busy if error.code() == ErrorCode::ReplicaIsNotReady => State::Missing,
                    _ => State::Failed(error),
                };
                return;
            }
        };
        self.named = list.replicas.first().map(|replica| replica.id);
        self.lease = asked.at.after(list.lease);
        self.checksum = list.checksum.filter(|_| client.config.checksum);
        self.replicas.clear();
        let readable = || list.replicas.iter().filter(|replica| replica.status == ReplicaStatus::Complete);
        self.replicas.extend(readable().filter_map(|replica| replica.location.memory()).cloned());
        let size = self.replicas.first().map(|at| at.size);
        let size = size.or_else(|| readable().find_map(on_disk).map(|(size, _)| size));
        let in_files = || readable().filter_map(in_file).filter(|_| client.files.is_some());
        let size = size.or_else(|| in_files().next().map(|(size, _)| size));
        let Some(size) = size else {
            self.state = State::Missing;
            return;
        };
        self.replicas.retain(|at| at.size == size);
        let disks = readable().filter_map(on_disk).filter(|(len, _)| *len == size);
        self.disks = disks.map(|(_, endpoint)| endpoint.to_owned()).collect();
        let files = in_files().filter(|(len, _)| *len == size);
        self.files = files.map(|(_, path)| path.to_owned()).collect();
        client.rank(&mut self.replicas, |at| Some(at));
        if let Err(error) = self.make_room(client, size) {
            self.state = State::Failed(error);
        }
    }

    fn make_room(&mut self, client: &Inner<T>, size: u64) -> Result<()> {
        let len = usize::try_from(size).ok().filter(|&len| len > 0);
        let len =
            len.ok_or_else(|| Error::internal(format!("the master speaks of a value of {size} bytes")))?;
        let place = match (self.want.take(), self.place.take()) {
            (Some(Want::Into(slice)), _) => self.front(slice, len)?,
            // The memory of the first try is used again if the value still has the same length.
            (_, Some(Incoming::Into(front))) => self.front(front.into_slice(), len)?,
            (_, Some(place)) if Source::<T>::local(&place).span.len == len => place,
            _ => client.place(len)?,
        };
        self.place = Some(place);
        Ok(())
    }

    fn front(&mut self, slice: SliceMut<T>, len: usize) -> Result<Incoming<T>> {
        Front::new(slice, len).map(Incoming::Into).map_err(|slice| {
            let text = format!("the value has {len} bytes, the memory for it {}", slice.len());
            self.want = Some(Want::Into(slice));
            Error::invalid(text)
        })
    }
}

async fn locate<T: Transport>(
    client: &Inner<T>,
    reads: &mut [Read<'_, T>],
    pending: &[usize],
    deadline: &Deadline,
) -> Result<()> {
    let keys: Vec<&[u8]> = pending.iter().map(|&i| reads[i].key).collect();
    // The lease began when the master responded. A lease counted from before the request ends
    // earlier, which is safe.
    let asked = client.asked();
    let tenant = &client.config.tenant;
    let answers = if pending.iter().all(|&i| reads[i].named.is_none()) {
        deadline.bound("replica list", client.master.locate(tenant, &keys)).await?
    } else {
        let named = pending.iter().map(|&i| reads[i].named.unwrap_or(ReplicaId(0)));
        let named: Vec<ReplicaId> = named.collect();
        let call = client.master.locate_again(tenant, &keys, &named);
        let mut answers = deadline.bound("replica list", call).await?;
        // An object without a name, or one that has taken the place of another, is read first here.
        let missed = answers
            .iter()
            .enumerate()
            .filter(|(_, answer)| answer.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound));
        let missed: Vec<usize> = missed.map(|(at, _)| at).collect();
        if !missed.is_empty() {
            let keys: Vec<&[u8]> = missed.iter().filter_map(|&at| keys.get(at).copied()).collect();
            let call = client.master.locate(tenant, &keys);
            for (&at, answer) in missed.iter().zip(deadline.bound("replica list", call).await?) {
                answers[at] = answer;
            }
        }
        answers
    };
    for (&i, answer) in pending.iter().zip(answers) {
        let kept = answer.as_ref().ok().and_then(|list| client.kept(reads[i].key, list));
        reads[i].kept = kept;
        reads[i].located(client, answer, asked);
    }
    Ok(())
}

/// Copies values from the cache of this client. A damaged value is read from its replicas instead.
async fn copy_kept<T: Transport>(client: &Inner<T>, reads: &mut [Read<'_, T>]) {
    for read in reads.iter_mut().filter(|read| read.pending()) {
        let Some(bytes) = read.kept.take() else { continue };
        let Some(mut place) = read.place.take() else { continue };
        let copied = place.copy_from(&bytes).await;
        read.landed(copied, place, client.config.clock.now());
        match (&read.state, &client.cache) {
            (State::Found(_), Some(cache)) => cache.hit(),
            _ => client.forget([read.key]),
        }
    }
}

/// Reads located objects. Tries one replica of each after the other until a replica returns the
/// bytes.
async fn fetch<T: Transport>(
    client: &Arc<Inner<T>>,
    reads: &mut [Read<'_, T>],
    deadline: &Deadline,
    counting: &mut Counting<'_>,
) {
    loop {
        let mut owners: Vec<Owner> = Vec::new();
        let mut wanted: Vec<(usize, usize, MemoryLocation)> = Vec::new();
        let mut others = false;
        for (i, read) in reads.iter_mut().enumerate().filter(|(_, read)| read.open()) {
            let Some(at) = read.replicas.pop() else { continue };
            others |= !read.replicas.is_empty();
            let issuer = read.loan.as_ref().map_or(Issuer::Master(read.known), |loan| loan.issuer);
            let peer = owners.iter().position(|(e, i)| *e == at.endpoint && *i == issuer);
            let peer = peer.unwrap_or_else(|| {
                owners.push((at.endpoint.clone(), issuer));
                owners.len() - 1
            });
            wanted.push((i, peer, at));
        }
        if wanted.is_empty() {
            if borrow(client, reads, deadline).await || read_files(client, reads, deadline).await {
                continue;
            }
            return;
        }
        let peers = client.reach_owners(&owners, deadline).await;
        // A slow client must not use up the time of the replica that is tried after it.
        let landing = if others { deadline.portion(1, 2) } else { deadline.portion(15, 16) };
        let (since, mut bytes) = (counting.moving(), 0);
        // Each client has a ticket of its own, so that a slow one does not cost the others their
        // leases.
        let mut flights = FuturesUnordered::new();
        for (peer, reached) in peers.iter().enumerate() {
            let (mut of, mut requests) = (Vec::new(), Vec::new());
            for (i, _, at) in wanted.iter().filter(|(_, p, _)| *p == peer) {
                match (reached, reads[*i].place.take()) {
                    (Ok(reached), Some(place)) => {
                        // The state holds until the transfer ends.
                        reads[*i].state = State::Pending(Some(late("a transfer")));
                        of.push(*i);
                        requests.push(Request::new(reached, at.address, place));
                    }
                    (Ok(_), None) => {}
                    (Err(why), place) => {
                        reads[*i].place = place;
                        reads[*i].loan = None;
                        reads[*i].too_early = why.is_newer();
                        reads[*i].state = State::Pending(Some(why.error().clone()));
                    }
                }
            }
            if !of.is_empty() {
                let results = client.engine.post_read(requests, Some(landing)).results();
                flights.push(async move { (peer, of, results.await) });
            }
        }
        // Transfers to memory of the caller are always waited for, because the memory has to be
        // returned. A transport ends its transfers in time.
        let ours = reads.iter().all(|read| !read.lent);
        loop {
            let landed = if ours {
                tokio::time::timeout(deadline.left(), flights.next()).await.ok().flatten()
            } else {
                flights.next().await
            };
            let Some((peer, of, (results, requests))) = landed else { break };
            let now = client.config.clock.now();
            for ((i, result), request) in of.into_iter().zip(results).zip(requests) {
                client.note(&owners[peer].0, &result);
                bytes += if result.is_ok() { request.transfer.buffer.local().span.len as u64 } else { 0 };
                reads[i].from_afar = client.is_afar(&owners[peer].0);
                reads[i].landed(result, request.transfer.buffer, now);
            }
        }
        counting.moved(since, bytes);
    }
}

/// Asks the owners of disks for values that no replica in memory returned. Each request has a
/// limited number of objects. Returns whether there is something to read now, or another owner to
/// ask.
async fn borrow<T: Transport>(
    client: &Arc<Inner<T>>,
    reads: &mut [Read<'_, T>],
    deadline: &Deadline,
) -> bool {
    let mut asked: Vec<(String, Vec<usize>, u64)> = Vec::new();
    let mut company = BORROWED;
    for (i, read) in reads.iter_mut().enumerate().filter(|(_, read)| read.open()) {
        let (Some(endpoint), Some(place)) = (read.disks.last(), &read.place) else { continue };
        let len = Source::<T>::local(place).span.len as u64;
        match asked.iter_mut().find(|(known, ..)| known == endpoint) {
            None => asked.push((endpoint.clone(), vec![i], len)),
            Some((_, some, bytes))
                if some.len() < company.min(read.company) && bytes.saturating_add(len) <= BYTES_BORROWED =>
            {
                some.push(i);
                *bytes += len;
            }
            Some(_) => continue,
        }
        company = company.min(read.company);
        read.disks.pop();
    }
    // An owner that does not respond must not use up the time for the transfers from the others.
    let asking = Deadline::until(&client.config.clock, deadline.portion(1, 2));
    let asking = &asking;
    let lent = futures::future::join_all(asked.iter().map(|(endpoint, some, _)| {
        let len =
            |i: usize| reads[i].place.as_ref().map_or(0, |place| Source::<T>::local(place).span.len as u64);
        let objects: Vec<(&[u8], u64)> = some.iter().map(|&i| (reads[i].key, len(i))).collect();
        async move { client.borrow_objects(endpoint, &objects, asking).await }
    }))
    .await;
    for ((endpoint, some, _), lent) in asked.iter().zip(lent) {
        match lent {
            Ok(Ok(loan)) => {
                let loan = Arc::new(loan);
                some.iter().zip(&loan.addresses).for_each(|(&i, address)| reads[i].borrowed(&loan, *address));
            }
            // An object is missing or the request is too large, so the next request has fewer
            // objects.
            Ok(Err(_)) if some.len() > 1 => {
                for &i in some {
                    reads[i].disks.push(endpoint.clone());
                    reads[i].company = some.len() / 2;
                }
            }
            Ok(Err(error)) | Err(error) => {
                // Every reason counts as loss of the copy on this disk.
                let error = Error::new(ErrorCode::TransferFail, error.to_string());
                some.iter().for_each(|&i| reads[i].state = State::Pending(Some(error.clone())));
            }
        }
    }
    !asked.is_empty() && !deadline.is_over()
}

/// Reads values from files that no other replica returned. Returns whether there was a file to try
/// and time is left.
async fn read_files<T: Transport>(
    client: &Arc<Inner<T>>,
    reads: &mut [Read<'_, T>],
    deadline: &Deadline,
) -> bool {
    let Some(files) = &client.files else { return false };
    let asked = reads.iter_mut().filter(|read| read.open()).filter_map(|read| {
        let path = read.files.pop()?;
        let mut place = read.place.take()?;
        Some(async move {
            let len = Source::<T>::local(&place).span.len;
            let read_it = async {
                let file = files.open(&path, len as u64, deadline).await?;
                files.read(&file, (0, len), deadline, |at, bytes| place.put(at, bytes)).await
            };
            let result = read_it.await;
            if let Err(error) = &result {
                files.not_read(&path, error);
                read.note_gone(path, error);
            }
            read.landed(result, place, client.config.clock.now());
        })
    });
    let asked = futures::future::join_all(asked).await.len();
    asked > 0 && !deadline.is_over()
}

impl<T: Transport> Read<'_, T> {
    fn note_gone(&mut self, path: String, error: &Error) {
        let times = match &self.gone {
            Some((before, times)) if *before == path => *times,
            _ => 0,
        };
        self.gone = is_gone(error).then_some((path, times + 1));
    }

    fn borrowed(&mut self, loan: &Arc<Loan>, address: u64) {
        let size = self.place.as_ref().map_or(0, |place| Source::<T>::local(place).span.len as u64);
        let (protocol, endpoint) = (String::new(), loan.endpoint.clone());
        self.replicas.push(MemoryLocation { size, address, protocol, endpoint });
        // The loan is a copy of the object, so only the end of the loan counts.
        self.lease = loan.until;
        self.loan = Some(loan.clone());
    }

    fn landed(&mut self, result: Result<()>, place: Incoming<T>, now: Moment) {
        let len = Source::<T>::local(&place).span.len;
        let compared = || match self.checksum {
            Some(expected) if place.checksum()? != expected => {
                tracing::warn!(key = %shown(self.key), "a replica holds other bytes than were written");
                Err(Error::from(ErrorCode::ChecksumMismatch))
            }
            _ => Ok(()),
        };
        // After the end of the lease, the bytes may belong to another object and are not compared.
        let result = result.and_then(|()| if now < self.lease { compared() } else { Ok(()) });
        self.place = Some(place);
        self.loan = None;
        self.state = match result {
            // The bytes do not count, because the space may have been overwritten after the end of
            // the lease.
            Ok(()) if now >= self.lease => {
                self.replicas.clear();
                State::Pending(Some(Error::from(ErrorCode::LeaseExpired)))
            }
            Ok(()) => State::Found(len),
            Err(error) => State::Pending(Some(error)),
        };
    }
}

impl<T: Transport> Inner<T> {
    /// Sorts replicas, the best last. Memory of this client is best, then memory of this host. All
    /// others alternate or are sorted by their transport.
    pub(crate) fn rank<R>(&self, replicas: &mut [R], place: impl Fn(&R) -> Option<&MemoryLocation>) {
        if replicas.len() < 2 {
            return;
        }
        let turn = self.turn.fetch_add(1, Ordering::Relaxed) % replicas.len();
        replicas.rotate_left(turn);
        let score = |at: &MemoryLocation| match &*at.protocol {
            _ if !self.config.score_replicas => 0,
            "rdma" => 2,
            "tcp" => 1,
            _ => 0,
        };
        let near =
            |at: &MemoryLocation| if self.holds(at) { 2 } else { u8::from(self.is_near(&at.endpoint)) };
        replicas.sort_by_key(|replica| place(replica).map(|at| (near(at), score(at))));
    }

    fn holds(&self, at: &MemoryLocation) -> bool {
        at.endpoint == self.endpoint && self.segments.lock().iter().any(|m| m.holds(at.address, at.size))
    }

    /// Allocates memory for a value of that length.
    pub(crate) fn place(&self, len: usize) -> Result<Incoming<T>> {
        if let Some(buffer) = self.staging.as_ref().and_then(|staging| staging.room_for_value(len)) {
            return Ok(Incoming::Buffer(buffer));
        }
        if len < OWN_PAGES && !self.needs_registration() {
            return Ok(Incoming::Heap(vec![0; len]));
        }
        let region = self.engine.register_local(Arc::new(HostMemory::new(len)?))?;
        let memory = region.exclusive().map_err(|_| Error::internal("new memory is not ours alone"))?;
        // The region becomes a pool with one buffer, because a pool buffer derefs to bytes and a
        // slice does not.
        let pool: BufferPool<T> = BufferPool::new(memory, &PoolConfig::default())?;
        pool.try_take(len).map(Incoming::Buffer)
    }
}
