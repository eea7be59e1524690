//! Reads of whole objects. One RPC locates all objects, one submission per client reads them, and
//! the bytes go directly to their target. Large batches are read in parts (`batch_parts.rs`).
//!
//! If a replica cannot be read, the next replica is tried. If all replicas have failed, the master
//! is asked once more, because its response may have changed. Bytes count only if the lease was
//! valid until the last of them had arrived. Leases are renewed during long transfers
//! (`renewal.rs`).

mod renewal;

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use futures::StreamExt;
use futures::future::{BoxFuture, FutureExt, OptionFuture};
use futures::stream::FuturesUnordered;
use mooncake_core::clock::Moment;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::ReplicaId;
use mooncake_core::memory::HostMemory;
use mooncake_core::replica::{MemoryLocation, Replica, ReplicaList, ReplicaStatus};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_protocol::master_client::ReadNumber;
use mooncake_transport::engine::{LookUps, Request};
use mooncake_transport::{BufferPool, PoolBuf, PoolConfig, SliceMut, Source, Transport};

use crate::batch_parts::{PART_OBJECTS, part_len};
use crate::buffers::{Front, Incoming};
use crate::deadline::{Deadline, deadline_exceeded};
use crate::disk::{BUSY_PAUSE, Loan, MAX_BORROWED_BYTES, MAX_BORROWED_OBJECTS};
use crate::errors::{display_key, is_busy, is_lost, last_replica_lost, transfer_error};
use crate::issuer::{Issuer, RequestStamp};
use crate::metrics::{Counting, Operation};
use crate::offload::is_missing_file;
use crate::read_reports::NumberedRead;
use crate::replicas::{in_file, on_disk};
use crate::state::{Inner, MemoryOwner};

/// Maximum number of requests to the master for the locations of an object.
const MAX_ROUNDS: usize = 2;
/// Maximum number of additional requests if a client was found after the master was asked.
const MAX_EXTRA_ROUNDS: usize = 2;
/// Minimum length in bytes of a value that gets pages of its own if the local buffer is full.
const MIN_OWN_PAGES_LEN: usize = 64 << 10;

/// Target that the caller chooses for a value.
pub(crate) enum Destination<T: Transport> {
    /// Memory that this client allocates.
    Allocated,
    /// The first bytes of this slice.
    Into(SliceMut<T>),
}

/// Outcome of one read.
pub(crate) struct ReadOutcome<T: Transport> {
    /// Length of the value in bytes, or `None` for a miss.
    pub(crate) result: Result<Option<usize>>,
    /// Reason of a miss if the master named replicas and none of them could be read.
    pub(crate) lost: Option<Error>,
    /// Memory with the value, or the slice of the caller. `None` only after a miss or a failure
    /// without memory.
    pub(crate) buffer: Option<Incoming<T>>,
    /// Slice of the caller, if nothing was read into it.
    pub(crate) slice: Option<SliceMut<T>>,
}

/// Reads every key. Each key has an outcome of its own. The outer error means that no outcome is
/// known. The slices are returned in every case.
pub(crate) async fn read<T: Transport>(
    client: &Arc<Inner<T>>,
    operation: Operation,
    keys: &[&[u8]],
    destinations: Vec<Destination<T>>,
) -> (Result<()>, Vec<ReadOutcome<T>>) {
    let mut counting = client.counting(operation);
    let mut reads: Vec<Read<'_, T>> =
        keys.iter().zip(destinations).map(|(key, destination)| Read::new(key, destination)).collect();
    let mut located = client.can_transfer();
    let number = NumberedRead::begin(client);
    if located.is_ok()
        && let Err(error) = read_in_parts(client, &number, &mut reads, &mut counting).await
    {
        located = Err(error);
    }
    for read in reads.iter().filter(|read| read.over_network) {
        if let (ReadState::Found(len), Some(replica)) = (&read.state, read.last_replica) {
            client.record_remote_read(read.key, *len as u64, replica);
        }
    }
    drop(number);
    let is_missing =
        |read: &&Read<'_, T>| read.is_pending() && matches!(read.missing_file, Some((_, MAX_ROUNDS)));
    client.report_files(reads.iter().filter(is_missing).map(|read| read.key.to_vec()).collect());
    let outcomes: Vec<ReadOutcome<T>> = reads.into_iter().map(Read::outcome).collect();
    match &located {
        Ok(()) => outcomes.iter().for_each(|outcome| counting.read(&outcome.result)),
        Err(error) => outcomes.iter().for_each(|_| counting.failed(error.kind())),
    }
    counting.end();
    (located, outcomes)
}

/// Outcome of the read of a part.
enum PartRead {
    /// The part is over. The read has located that many objects of the part, from its front.
    Ended(usize),
    /// The look-up took longer than the leases that it gave, so that nothing was read. A look-up of
    /// fewer objects is faster.
    LateLookUp,
}

/// Reads objects in consecutive parts. The error means that the first look-up failed. After another
/// look-up that fails, the objects behind it have its error.
async fn read_in_parts<T: Transport>(
    client: &Arc<Inner<T>>,
    number: &NumberedRead<'_, T>,
    reads: &mut [Read<'_, T>],
    counting: &mut Counting<'_>,
) -> Result<()> {
    let (mut done, mut part_limit, mut max_part) = (0, PART_OBJECTS, PART_OBJECTS);
    let mut deadline = client.deadline();
    while done < reads.len() {
        let end = done.saturating_add(part_limit).min(reads.len());
        let part = &mut reads[done..end];
        let len = part.len();
        match read_part(client, number, part, &deadline, counting).await {
            Ok(PartRead::Ended(count)) => {
                let is_late = len == 1 && max_part < PART_OBJECTS && part[0].is_late();
                done += count;
                if is_late {
                    // Not even the look-up of one object is as fast as a lease.
                    fail(&mut reads[done..], &Error::from(ErrorCode::LeaseExpired));
                    return Ok(());
                }
                part_limit = (2 * count).min(max_part);
                if done < reads.len() && !is_planted("batches-have-one-deadline") {
                    deadline = client.deadline();
                }
            }
            Ok(PartRead::LateLookUp) => {
                max_part = (len / 2).max(1);
                part_limit = max_part;
            }
            Err(error) if done == 0 => return Err(error),
            Err(error) => {
                fail(&mut reads[done..], &error);
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Returns whether all objects that the look-up has found had lost their leases by its end.
fn is_late_look_up<T: Transport>(client: &Inner<T>, reads: &[Read<'_, T>]) -> bool {
    let now = client.config.clock.now();
    // The loan of a disk needs no lease.
    let is_over = |read: &Read<'_, T>| !read.is_pending() || (now >= read.lease && !read.replicas.is_empty());
    let is_late = reads.iter().any(Read::is_pending) && reads.iter().all(is_over);
    is_late && !is_planted("late-look-ups-fail-batches")
}

fn fail<T: Transport>(reads: &mut [Read<'_, T>], error: &Error) {
    reads
        .iter_mut()
        .filter(|read| read.is_pending())
        .for_each(|read| read.state = ReadState::Failed(error.clone()));
}

/// Reads the objects from the front that one part takes.
async fn read_part<T: Transport>(
    client: &Arc<Inner<T>>,
    number: &NumberedRead<'_, T>,
    mut reads: &mut [Read<'_, T>],
    deadline: &Deadline,
    counting: &mut Counting<'_>,
) -> Result<PartRead> {
    let (mut round, mut rounds) = (0, MAX_ROUNDS);
    while round < rounds {
        if round > 0 && deadline.is_over() {
            break;
        }
        let pending: Vec<usize> = (0..reads.len()).filter(|&i| reads[i].is_pending()).collect();
        if pending.is_empty() {
            break;
        }
        match locate(client, number.number(), reads, &pending, round == 0, deadline).await {
            Ok(count) if round == 0 => {
                reads = &mut reads[..count];
                if reads.len() > 1 && is_late_look_up(client, reads) && !deadline.is_over() {
                    return Ok(PartRead::LateLookUp);
                }
            }
            Ok(_) => {}
            // The outcomes of the first round stay valid.
            Err(error) if round == 0 => return Err(error),
            Err(_) => break,
        }
        copy_cached(client, reads).await;
        fetch(client, Some(number.number()), reads, deadline, counting).await;
        rounds += usize::from(
            rounds < MAX_ROUNDS + MAX_EXTRA_ROUNDS && reads.iter().any(|read| read.stale_response),
        );
        round += 1;
        // A batch that is larger than what one lease allows continues under the next lease.
        if round == rounds && reads.iter().any(Read::is_late) {
            let ended = pending.iter().filter(|&&i| i < reads.len() && !reads[i].is_pending()).count();
            rounds += usize::from(ended > 0);
        }
    }
    Ok(PartRead::Ended(reads.len()))
}

/// Reads one located value into a buffer of exactly its length, for the client itself. The read is
/// not counted and does not use the cache. Returns `None` if no replica could be read.
pub(crate) async fn read_to<T: Transport>(
    client: &Arc<Inner<T>>,
    key: &[u8],
    list: ReplicaList,
    stamp: RequestStamp,
    buffer: PoolBuf<T>,
    deadline: &Deadline,
) -> Result<Option<Bytes>> {
    let mut read = Read::new(key, Destination::Allocated);
    read.buffer = Some(Incoming::Buffer(buffer));
    read.located(client, Ok(list), stamp);
    fetch(client, None, std::slice::from_mut(&mut read), deadline, &mut Counting::nothing()).await;
    let outcome = read.outcome();
    Ok(outcome.result?.and(outcome.buffer.and_then(Incoming::into_bytes)))
}

/// State of the read of one key.
struct Read<'a, T: Transport> {
    key: &'a [u8],
    destination: Option<Destination<T>>,
    buffer: Option<Incoming<T>>,
    /// True if `buffer` is memory of the caller.
    into_caller_memory: bool,
    /// Replicas in memory that were not tried yet, the best last.
    replicas: Vec<(ReplicaId, MemoryLocation)>,
    /// Files that contain the value and were not tried yet.
    files: Vec<String>,
    /// File that could not be read last, and the number of times that the master has named it.
    missing_file: Option<(String, usize)>,
    /// Endpoints of owners of disks that have the value and were not asked yet.
    disks: Vec<String>,
    /// Maximum number of objects in one request to an owner of a disk. The maximum is lowered when
    /// an owner refuses more.
    max_batch: usize,
    /// Owners of disks without free buffers, and the refusal of the last one.
    busy_disks: Vec<String>,
    busy: Option<Error>,
    /// Loan of an owner of a disk, if the value is read from one.
    loan: Option<Arc<Loan>>,
    lease: Moment,
    /// True unless the master has refused a later lease.
    renews: bool,
    /// Look-ups that the engine had made before the master was asked.
    look_ups: LookUps,
    /// True if a client was found after the master was asked. The master has to be asked again.
    stale_response: bool,
    /// Number of a replica in the last response of the master.
    last_replica: Option<ReplicaId>,
    /// Expected checksum of the value, if this client compares checksums.
    checksum: Option<u64>,
    /// Copy of the value in the cache of this client.
    cached_value: Option<Bytes>,
    /// True if the value came over a network transport.
    over_network: bool,
    /// Reason why the replicas of an earlier response could not be read.
    lost: Option<Error>,
    state: ReadState,
}

enum ReadState {
    /// No outcome yet, or a failure that a later response of the master may resolve.
    Pending(Option<Error>),
    Found(usize),
    Missing,
    Failed(Error),
}

impl<'a, T: Transport> Read<'a, T> {
    fn new(key: &'a [u8], destination: Destination<T>) -> Self {
        Self {
            key,
            into_caller_memory: matches!(destination, Destination::Into(_)),
            destination: Some(destination),
            buffer: None,
            replicas: Vec::new(),
            files: Vec::new(),
            missing_file: None,
            disks: Vec::new(),
            max_batch: MAX_BORROWED_OBJECTS,
            busy_disks: Vec::new(),
            busy: None,
            loan: None,
            lease: Moment::default(),
            renews: true,
            look_ups: LookUps::default(),
            stale_response: false,
            last_replica: None,
            checksum: None,
            cached_value: None,
            over_network: false,
            lost: None,
            state: ReadState::Pending(None),
        }
    }

    fn is_pending(&self) -> bool {
        matches!(self.state, ReadState::Pending(_))
    }

    /// Returns whether the read has no outcome yet and may use the present response.
    fn is_open(&self) -> bool {
        self.is_pending() && !self.stale_response
    }

    /// Returns whether the bytes arrived after the end of the lease.
    fn is_late(&self) -> bool {
        matches!(&self.state, ReadState::Pending(Some(error)) if error.kind() == ErrorKind::Expired)
    }

    fn outcome(self) -> ReadOutcome<T> {
        let mut lost = None;
        let result = match self.state {
            ReadState::Found(len) => Ok(Some(len)),
            ReadState::Missing => {
                lost = self.lost.map(|error| last_replica_lost(error).context(display_key(self.key)));
                Ok(None)
            }
            // The object is there: another read may find a free buffer.
            ReadState::Pending(_) if self.busy.is_some() => self.busy.map_or(Ok(None), Err),
            ReadState::Pending(None) => Ok(None),
            ReadState::Pending(Some(error)) if is_lost(&error) => {
                tracing::debug!(key = %display_key(self.key), "no replica could be read: {error}");
                lost = Some(error.context(display_key(self.key)));
                Ok(None)
            }
            ReadState::Pending(Some(error)) | ReadState::Failed(error) => {
                Err(error.context(display_key(self.key)))
            }
        };
        let slice = match self.destination {
            Some(Destination::Into(slice)) => Some(slice),
            _ => None,
        };
        ReadOutcome { result, lost, buffer: self.buffer, slice }
    }

    /// Stores the response of the master.
    fn located(&mut self, client: &Inner<T>, response: Result<ReplicaList>, stamp: RequestStamp) {
        (self.look_ups, self.stale_response) = (stamp.look_ups, false);
        (self.renews, self.busy) = (true, None);
        self.busy_disks.clear();
        if let ReadState::Pending(Some(error)) = &self.state {
            self.lost = Some(error.clone()).filter(is_lost);
        }
        let list = match response {
            Ok(list) => list,
            Err(error) => {
                self.state = match error.kind() {
                    ErrorKind::NotFound => ReadState::Missing,
                    // An object that is still being written counts as missing.
                    ErrorKind::Busy if error.code() == ErrorCode::ReplicaIsNotReady => ReadState::Missing,
                    _ => ReadState::Failed(error),
                };
                return;
            }
        };
        self.last_replica = list.replicas.first().map(|replica| replica.id);
        self.lease = stamp.at.after(list.lease);
        self.checksum = list.checksum.filter(|_| client.config.checksum);
        self.replicas.clear();
        let readable = || list.replicas.iter().filter(|replica| replica.status == ReplicaStatus::Complete);
        let in_memory = |replica: &Replica| Some((replica.id, replica.location.memory()?.clone()));
        self.replicas.extend(readable().filter_map(in_memory));
        let size = self.replicas.first().map(|(_, at)| at.size);
        let size = size.or_else(|| readable().find_map(on_disk).map(|(size, _)| size));
        let in_files = || readable().filter_map(in_file).filter(|_| client.files.is_some());
        let size = size.or_else(|| in_files().next().map(|(size, _)| size));
        let Some(size) = size else {
            self.state = ReadState::Missing;
            return;
        };
        self.replicas.retain(|(_, at)| at.size == size);
        let disks = readable().filter_map(on_disk).filter(|(len, _)| *len == size);
        self.disks = disks.map(|(_, endpoint)| endpoint.to_owned()).collect();
        let files = in_files().filter(|(len, _)| *len == size);
        self.files = files.map(|(_, path)| path.to_owned()).collect();
        client.rank(&mut self.replicas, |(_, at)| Some(at));
        if let Err(error) = self.allocate_buffer(client, size) {
            self.state = ReadState::Failed(error);
        }
    }

    fn allocate_buffer(&mut self, client: &Inner<T>, size: u64) -> Result<()> {
        let len = usize::try_from(size).ok().filter(|&len| len > 0);
        let len =
            len.ok_or_else(|| Error::internal(format!("the master speaks of a value of {size} bytes")))?;
        let buffer = match (self.destination.take(), self.buffer.take()) {
            (Some(Destination::Into(slice)), _) => self.front(slice, len)?,
            // The memory of the first try is used again if the value still has the same length.
            (_, Some(Incoming::Into(front))) => self.front(front.into_slice(), len)?,
            (_, Some(buffer)) if Source::<T>::local(&buffer).span.len == len => buffer,
            _ => client.allocate_buffer(len)?,
        };
        self.buffer = Some(buffer);
        Ok(())
    }

    fn front(&mut self, slice: SliceMut<T>, len: usize) -> Result<Incoming<T>> {
        Front::new(slice, len).map(Incoming::Into).map_err(|slice| {
            let text = format!("the value has {len} bytes, the memory for it {}", slice.len());
            self.destination = Some(Destination::Into(slice));
            Error::invalid(text)
        })
    }
}

/// Locates the pending objects. With `is_new`, returns the number of objects from the front that
/// one part takes. The others have to be located again.
async fn locate<T: Transport>(
    client: &Inner<T>,
    number: ReadNumber,
    reads: &mut [Read<'_, T>],
    pending: &[usize],
    is_new: bool,
    deadline: &Deadline,
) -> Result<usize> {
    let keys: Vec<&[u8]> = pending.iter().map(|&i| reads[i].key).collect();
    // The lease began when the master responded. A lease counted from before the request ends
    // earlier, which is safe.
    let stamp = client.request_stamp();
    let results = if pending.iter().all(|&i| reads[i].last_replica.is_none()) {
        let call = client.locate_for_read(&keys, &[], number);
        deadline.bound("replica list", call).await?
    } else {
        let last_replicas = pending.iter().map(|&i| reads[i].last_replica.unwrap_or(ReplicaId(0)));
        let last_replicas: Vec<ReplicaId> = last_replicas.collect();
        let call = client.locate_for_read(&keys, &last_replicas, number);
        let mut results = deadline.bound("replica list", call).await?;
        // An object without a name, or one that has taken the place of another, is read first here.
        let not_found = results
            .iter()
            .enumerate()
            .filter(|(_, result)| result.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound));
        let not_found: Vec<usize> = not_found.map(|(at, _)| at).collect();
        if !not_found.is_empty() {
            let keys: Vec<&[u8]> = not_found.iter().filter_map(|&at| keys.get(at).copied()).collect();
            let call = client.locate_for_read(&keys, &[], number);
            for (&at, result) in not_found.iter().zip(deadline.bound("replica list", call).await?) {
                results[at] = result;
            }
        }
        results
    };
    let len = |result: &Result<ReplicaList>| {
        result.as_ref().map_or(0, |list| list.replicas.first().map_or(0, |replica| replica.location.size()))
    };
    let count = if is_new { part_len(results.iter().map(len)) } else { pending.len() };
    for (at, (&i, result)) in pending.iter().zip(results).enumerate() {
        if at >= count {
            // The object is located again for this read, which is not another use.
            reads[i].last_replica = result.ok().and_then(|list| Some(list.replicas.first()?.id));
            continue;
        }
        let cached_value = result.as_ref().ok().and_then(|list| client.cached_value(reads[i].key, list));
        reads[i].cached_value = cached_value;
        reads[i].located(client, result, stamp);
    }
    Ok(if count < pending.len() { pending[count] } else { reads.len() })
}

/// Copies values from the cache of this client. A damaged value is read from its replicas instead.
async fn copy_cached<T: Transport>(client: &Inner<T>, reads: &mut [Read<'_, T>]) {
    for read in reads.iter_mut().filter(|read| read.is_pending()) {
        let Some(bytes) = read.cached_value.take() else { continue };
        let Some(mut buffer) = read.buffer.take() else { continue };
        let copied = buffer.copy_from(&bytes).await;
        read.landed(copied, buffer, client.config.clock.now());
        match (&read.state, &client.cache) {
            (ReadState::Found(_), Some(cache)) => cache.count_hit(),
            _ => client.forget([read.key]),
        }
    }
}

/// Reads located objects. Tries one replica of each after the other until a replica returns the
/// bytes.
async fn fetch<T: Transport>(
    client: &Arc<Inner<T>>,
    number: Option<ReadNumber>,
    reads: &mut [Read<'_, T>],
    deadline: &Deadline,
    counting: &mut Counting<'_>,
) {
    loop {
        let mut owners: Vec<MemoryOwner> = Vec::new();
        let mut attempts: Vec<ReplicaAttempt> = Vec::new();
        let mut has_other_replicas = false;
        for (i, read) in reads.iter_mut().enumerate().filter(|(_, read)| read.is_open()) {
            let Some((replica, at)) = read.replicas.pop() else { continue };
            has_other_replicas |= !read.replicas.is_empty();
            let issuer = read.loan.as_ref().map_or(Issuer::Master(read.look_ups), |loan| loan.issuer);
            let peer = owners.iter().position(|(e, i)| *e == at.endpoint && *i == issuer);
            let peer = peer.unwrap_or_else(|| {
                owners.push((at.endpoint.clone(), issuer));
                owners.len() - 1
            });
            attempts.push(ReplicaAttempt { read: i, peer, replica, at });
        }
        if attempts.is_empty() {
            if borrow(client, reads, deadline).await
                || read_files(client, reads, deadline).await
                || wait_for_disks(reads, deadline).await
            {
                continue;
            }
            return;
        }
        let peers = client.reach_owners(&owners, deadline).await;
        // A slow client must not use up the time of the replica that is tried after it.
        let landing = if has_other_replicas { deadline.portion(1, 2) } else { deadline.portion(15, 16) };
        let start = counting.transfer_start();
        // Each client has a ticket of its own, so that a slow one does not cost the others their
        // leases.
        let transfers = FuturesUnordered::new();
        for (peer, reached) in peers.iter().enumerate() {
            let (mut indices, mut requests) = (Vec::new(), Vec::new());
            for ReplicaAttempt { read: i, at, .. } in attempts.iter().filter(|one| one.peer == peer) {
                match (reached, reads[*i].buffer.take()) {
                    (Ok(reached), Some(buffer)) => {
                        indices.push(*i);
                        requests.push(Request::new(reached, at.address, buffer));
                    }
                    (Ok(_), None) => {}
                    (Err(why), buffer) => {
                        reads[*i].buffer = buffer;
                        reads[*i].loan = None;
                        reads[*i].stale_response = why.is_newer();
                        reads[*i].state = ReadState::Pending(Some(why.error().clone()));
                    }
                }
            }
            if !indices.is_empty() {
                let results = client.engine.post_read(requests, Some(landing)).results();
                transfers.push(async move { (peer, indices, results.await) });
            }
        }
        let bytes = land(client, number, reads, &attempts, transfers, &owners, deadline).await;
        counting.record_transfer(start, bytes);
    }
}

/// Replica that is read in the present attempt.
struct ReplicaAttempt {
    /// Index of the read.
    read: usize,
    /// Index of the owner.
    peer: usize,
    replica: ReplicaId,
    at: MemoryLocation,
}

/// Response to a request for later leases.
struct Renewal {
    /// Indices of the replicas in progress that the request was about.
    indices: Vec<usize>,
    stamp: RequestStamp,
    results: Result<Vec<Result<ReplicaList>>>,
}

/// Index of an owner, the reads from it, and their outcomes.
type ReadResults<T> = (usize, Vec<usize>, (Vec<Result<()>>, Vec<Request<T, Incoming<T>>>));

/// Records the outcomes of transfers. Returns the number of bytes that have arrived.
fn record_landed<T: Transport>(
    client: &Inner<T>,
    reads: &mut [Read<'_, T>],
    owners: &[MemoryOwner],
    (peer, indices, (results, requests)): ReadResults<T>,
) -> u64 {
    let now = client.config.clock.now();
    let mut bytes = 0;
    for ((i, result), request) in indices.into_iter().zip(results).zip(requests) {
        client.record_outcome(&owners[peer].0, &result);
        bytes += if result.is_ok() { request.transfer.buffer.local().span.len as u64 } else { 0 };
        reads[i].over_network = client.needs_transport(&owners[peer].0);
        reads[i].landed(result, request.transfer.buffer, now);
    }
    bytes
}

/// Waits for all transfers in progress, and renews their leases meanwhile. Returns the number of
/// bytes that have arrived.
async fn land<T: Transport>(
    client: &Arc<Inner<T>>,
    number: Option<ReadNumber>,
    reads: &mut [Read<'_, T>],
    attempts: &[ReplicaAttempt],
    mut transfers: FuturesUnordered<impl Future<Output = ReadResults<T>>>,
    owners: &[MemoryOwner],
    deadline: &Deadline,
) -> u64 {
    // Transfers to memory of the caller are always waited for, because the memory has to be
    // returned. A transport ends its transfers in time.
    let all_own_memory = reads.iter().all(|read| !read.into_caller_memory);
    let clock = &client.config.clock;
    let mut bytes = 0;
    // A copy through shared memory has ended when it was posted, and needs no timers.
    while let Some(landed) = transfers.next().now_or_never() {
        let Some(landed) = landed else { return bytes };
        bytes += record_landed(client, reads, owners, landed);
    }
    let mut timeout = pin!(tokio::time::sleep(deadline.left()));
    let pause = ReplicaAttempt::renewal_pause(attempts, reads, clock.now());
    let mut renewing = pause.is_some();
    let mut renewal_timer = pin!(tokio::time::sleep(pause.unwrap_or_default()));
    let mut renewal: OptionFuture<BoxFuture<'_, Renewal>> = OptionFuture::from(None);
    loop {
        tokio::select! {
            biased;
            landed = transfers.next() => {
                let Some(landed) = landed else { return bytes };
                bytes += record_landed(client, reads, owners, landed);
            }
            () = &mut timeout, if all_own_memory => {
                for one in attempts {
                    let read = &mut reads[one.read];
                    if read.is_pending() && read.buffer.is_none() {
                        read.state = ReadState::Pending(Some(deadline_exceeded("a transfer")));
                    }
                }
                return bytes;
            }
            Some(renewed) = &mut renewal => {
                renewal = OptionFuture::from(None);
                renewed.apply(reads, attempts, clock.now());
                let pause = ReplicaAttempt::renewal_pause(attempts, reads, clock.now());
                renewing = pause.is_some();
                renewal_timer.set(tokio::time::sleep(pause.unwrap_or_default()));
            }
            () = &mut renewal_timer, if renewing => {
                renewing = false;
                let request = client.request_leases(number, reads, attempts, deadline);
                renewal = OptionFuture::from(Some(request.boxed()));
            }
        }
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
    let mut requests: Vec<(String, Vec<usize>, u64)> = Vec::new();
    let mut max_batch = MAX_BORROWED_OBJECTS;
    for (i, read) in reads.iter_mut().enumerate().filter(|(_, read)| read.is_open()) {
        let (Some(endpoint), Some(buffer)) = (read.disks.last(), &read.buffer) else { continue };
        let len = Source::<T>::local(buffer).span.len as u64;
        match requests.iter_mut().find(|(other, ..)| other == endpoint) {
            None => requests.push((endpoint.clone(), vec![i], len)),
            Some((_, indices, bytes))
                if indices.len() < max_batch.min(read.max_batch)
                    && bytes.saturating_add(len) <= MAX_BORROWED_BYTES =>
            {
                indices.push(i);
                *bytes += len;
            }
            Some(_) => continue,
        }
        max_batch = max_batch.min(read.max_batch);
        read.disks.pop();
    }
    // An owner that does not respond must not use up the time for the transfers from the others.
    let request_deadline = Deadline::until(&client.config.clock, deadline.portion(1, 2));
    let request_deadline = &request_deadline;
    let loans = futures::future::join_all(requests.iter().map(|(endpoint, indices, _)| {
        let len = |i: usize| {
            reads[i].buffer.as_ref().map_or(0, |buffer| Source::<T>::local(buffer).span.len as u64)
        };
        let objects: Vec<(&[u8], u64)> = indices.iter().map(|&i| (reads[i].key, len(i))).collect();
        async move { client.borrow_objects(endpoint, &objects, request_deadline).await }
    }))
    .await;
    for ((endpoint, indices, _), loan) in requests.iter().zip(loans) {
        match loan {
            Ok(Ok(loan)) => {
                let loan = Arc::new(loan);
                indices
                    .iter()
                    .zip(&loan.addresses)
                    .for_each(|(&i, address)| reads[i].set_loan(&loan, *address));
            }
            // An object is missing or the request is too large, so the next request has fewer
            // objects.
            Ok(Err(_)) if indices.len() > 1 => {
                for &i in indices {
                    reads[i].disks.push(endpoint.clone());
                    reads[i].max_batch = indices.len() / 2;
                }
            }
            // The object is there. The owner is asked again after the other replicas.
            Ok(Err(error)) if is_busy(&error) => {
                for &i in indices {
                    reads[i].busy_disks.push(endpoint.clone());
                    reads[i].busy = Some(error.clone());
                }
            }
            Ok(Err(error)) | Err(error) => {
                // Every reason counts as loss of the copy on this disk.
                let error = Error::new(ErrorCode::TransferFail, error.to_string());
                for &i in indices {
                    client.verify_refused_object(endpoint, reads[i].key);
                    reads[i].state = ReadState::Pending(Some(error.clone()));
                    if reads[i].busy_disks.is_empty() && !deadline.is_over() {
                        reads[i].busy = None;
                    }
                }
            }
        }
    }
    !requests.is_empty() && !deadline.is_over()
}

/// Waits for a moment if owners of disks had no free buffer for values that no other replica
/// returned. Returns whether there are owners to ask again.
async fn wait_for_disks<T: Transport>(reads: &mut [Read<'_, T>], deadline: &Deadline) -> bool {
    let waits = |read: &&mut Read<'_, T>| read.is_open() && !read.busy_disks.is_empty();
    if deadline.is_over() || is_planted("full-disk-buffers-lose-objects") {
        return false;
    }
    let mut waiting = reads.iter_mut().filter(waits).peekable();
    if waiting.peek().is_none() {
        return false;
    }
    waiting.for_each(|read| read.disks.append(&mut read.busy_disks));
    tokio::time::sleep(BUSY_PAUSE.min(deadline.left())).await;
    true
}

/// Reads values from files that no other replica returned. Returns whether there was a file to try
/// and time is left.
async fn read_files<T: Transport>(
    client: &Arc<Inner<T>>,
    reads: &mut [Read<'_, T>],
    deadline: &Deadline,
) -> bool {
    let Some(files) = &client.files else { return false };
    let file_reads = reads.iter_mut().filter(|read| read.is_open()).filter_map(|read| {
        let path = read.files.pop()?;
        let mut buffer = read.buffer.take()?;
        Some(async move {
            let len = Source::<T>::local(&buffer).span.len;
            let read_it = async {
                let file = files.open(&path, len as u64, deadline).await?;
                files.read(&file, (0, len), deadline, |at, bytes| buffer.put(at, bytes)).await
            };
            let result = read_it.await;
            if let Err(error) = &result {
                files.record_unread(&path, error);
                read.record_missing_file(path, error);
            }
            read.landed(result, buffer, client.config.clock.now());
        })
    });
    let count = futures::future::join_all(file_reads).await.len();
    count > 0 && !deadline.is_over()
}

impl<T: Transport> Read<'_, T> {
    fn record_missing_file(&mut self, path: String, error: &Error) {
        let times = match &self.missing_file {
            Some((before, times)) if *before == path => *times,
            _ => 0,
        };
        self.missing_file = is_missing_file(error).then_some((path, times + 1));
    }

    fn set_loan(&mut self, loan: &Arc<Loan>, address: u64) {
        let size = self.buffer.as_ref().map_or(0, |buffer| Source::<T>::local(buffer).span.len as u64);
        let (protocol, endpoint) = (String::new(), loan.endpoint.clone());
        self.busy = None;
        self.replicas
            .push((ReplicaId(0), MemoryLocation { size, address, protocol, endpoint, locality: None }));
        // The loan is a copy of the object, so only the end of the loan counts.
        self.lease = loan.until;
        self.loan = Some(loan.clone());
    }

    fn landed(&mut self, result: Result<()>, buffer: Incoming<T>, now: Moment) {
        let len = Source::<T>::local(&buffer).span.len;
        let compared = || match self.checksum {
            Some(expected) if buffer.checksum()? != expected => {
                tracing::warn!(key = %display_key(self.key), "a replica holds other bytes than were written");
                Err(Error::from(ErrorCode::ChecksumMismatch))
            }
            _ => Ok(()),
        };
        // After the end of the lease, the bytes may belong to another object and are not compared.
        let result = result.and_then(|()| if now < self.lease { compared() } else { Ok(()) });
        self.buffer = Some(buffer);
        self.loan = None;
        self.state = match result {
            // The bytes do not count, because the space may have been overwritten after the end of
            // the lease.
            Ok(()) if now >= self.lease => {
                self.replicas.clear();
                ReadState::Pending(Some(Error::from(ErrorCode::LeaseExpired)))
            }
            Ok(()) => ReadState::Found(len),
            Err(error) => ReadState::Pending(Some(transfer_error(error))),
        };
    }
}

impl<T: Transport> Inner<T> {
    /// Sorts replicas, the best last. Memory of this client is best, then memory of this host. All
    /// others alternate or are sorted by their transport.
    pub(crate) fn rank<R>(&self, replicas: &mut [R], location: impl Fn(&R) -> Option<&MemoryLocation>) {
        if replicas.len() < 2 {
            return;
        }
        let first = self.next_replica.fetch_add(1, Ordering::Relaxed) % replicas.len();
        replicas.rotate_left(first);
        let score = |at: &MemoryLocation| match &*at.protocol {
            _ if !self.config.score_replicas => 0,
            "rdma" => 2,
            "tcp" => 1,
            _ => 0,
        };
        let proximity =
            |at: &MemoryLocation| if self.holds(at) { 2 } else { u8::from(self.is_near(&at.endpoint)) };
        replicas.sort_by_key(|replica| location(replica).map(|at| (proximity(at), score(at))));
    }

    fn holds(&self, at: &MemoryLocation) -> bool {
        at.endpoint == self.endpoint && self.segments.lock().iter().any(|m| m.holds(at.address, at.size))
    }

    /// Allocates memory for a value of that length.
    pub(crate) fn allocate_buffer(&self, len: usize) -> Result<Incoming<T>> {
        if let Some(buffer) = self.staging.as_ref().and_then(|staging| staging.try_allocate_value(len)) {
            return Ok(Incoming::Buffer(buffer));
        }
        if len < MIN_OWN_PAGES_LEN && !self.needs_registration() {
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
