//! Device memory over a transport of host memory: page-locked bounce buffers, of which one is
//! copied to or from the device while another one is transferred.
//!
//! Long operations are split, and short ones share a buffer. No copy or transfer blocks a thread of
//! its own: the thread of module `device` drives all of them. The pool bounds the memory. An
//! operation without a buffer waits in line until its deadline.

use std::fmt;
use std::sync::{Arc, Weak};

use futures::StreamExt;
use mooncake_core::clock::{Moment, SharedClock};
use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;

use crate::device::{self, DeviceCopy};
use crate::fallback::{self, with_fallback};
use crate::handshake::AcceptConnection;
use crate::protocol::Protocol;
use crate::segment::{KnownRegions, SegmentDesc};
use crate::staging_pool::{StagingBuffer, StagingPool};
use crate::statistics::FallbackCounter;
use crate::ticket::{Completion, ticket, was_cancelled};
use crate::transport::{Access, Capabilities, Op, Opcode, PathStatistics, Transport};

/// Length of a buffer in bytes. A transfer of this length takes longer than the notification of a
/// finished copy.
const CHUNK: usize = 2 << 20;
/// Number of buffers of one node.
const CHUNKS: usize = 16;
/// Number of buffers that one submission uses in parallel: one is copied while two are transferred.
const PARALLEL_BUFFERS: usize = 3;

/// Predicate for operations whose local device memory the transport accesses directly.
pub type Takes<T> = fn(&T, &<T as Transport>::Peer, &Op<'_, <T as Transport>::Registration>) -> bool;

/// Transport with support of local device memory. Access of peers to device memory depends on the
/// inner transport.
pub struct ThroughHost<T: Transport> {
    transport: Arc<T>,
    transfers: Arc<StagedTransfers<T>>,
    takes: Takes<T>,
}

/// State that outlives a submission. It holds the transport weakly, so that operations in flight
/// fail when the transport is dropped.
struct StagedTransfers<T: Transport> {
    transport: Weak<T>,
    staging_pool: StagingPool<T::Registration>,
    clock: SharedClock,
}

/// Registration with the inner transport, which may refuse device memory.
#[derive(Debug)]
pub struct ThroughRegistration<R> {
    inner: Option<R>,
}

/// Peer, and its regions, of which parts may be requested.
#[derive(Clone, Debug)]
pub struct ThroughPeer<P> {
    inner: P,
    /// Regions of the peer at the last look-up.
    regions: KnownRegions,
}

impl<P> ThroughPeer<P> {
    /// Returns the peer of the inner transport.
    pub fn inner(&self) -> &P {
        &self.inner
    }
}

impl<T: Transport> ThroughHost<T> {
    /// Copies all device memory through the host. `clock` is that of the transport.
    pub fn new(transport: Arc<T>, clock: SharedClock) -> Self {
        Self::unless(transport, clock, |_, _, _| false)
    }

    /// Copies device memory through the host unless `takes` accepts the operation. An operation
    /// that fails with a path error is retried through the host.
    pub fn unless(transport: Arc<T>, clock: SharedClock, takes: Takes<T>) -> Self {
        let transfers = StagedTransfers {
            transport: Arc::downgrade(&transport),
            staging_pool: StagingPool::new(CHUNK, CHUNKS),
            clock,
        };
        Self { transport, transfers: Arc::new(transfers), takes }
    }

    /// Returns the inner transport.
    pub fn transport(&self) -> &Arc<T> {
        &self.transport
    }

    fn copy_path(&self, peer: &ThroughPeer<T::Peer>, op: &Op<'_, T::Registration>) -> CopyPath {
        if !op.local().location.is_device() || op.is_empty() {
            return CopyPath::Host;
        }
        if (self.takes)(&self.transport, &peer.inner, op) { CopyPath::Device } else { CopyPath::ThroughHost }
    }

    fn submit_mixed(&self, peer: &ThroughPeer<T::Peer>, ops: &[Op<'_, T::Registration>], done: Completion) {
        let mut rest = done;
        for run in ops.chunk_by(|a, b| self.copy_path(peer, a) == self.copy_path(peer, b)) {
            let (share, remaining) = rest.split_at(run.len());
            rest = remaining;
            match run.first().map(|op| self.copy_path(peer, op)) {
                Some(CopyPath::ThroughHost) => {
                    let ops = run.iter().map(Posted::of).zip(share.each());
                    StagedTransfers::begin(&self.transfers, peer, ops.collect());
                }
                Some(CopyPath::Device) => self.submit_direct(peer, run, share),
                Some(CopyPath::Host) | None => self.transport.submit(&peer.inner, run.iter().copied(), share),
            }
        }
        rest.finish(Ok(()));
    }

    fn submit_direct(&self, peer: &ThroughPeer<T::Peer>, ops: &[Op<'_, T::Registration>], done: Completion) {
        let (transfers, fallback_peer) = (self.transfers.clone(), peer.clone());
        let guarded = with_fallback::<_, ()>(
            ops.iter().copied(),
            done,
            &self.transfers.clock,
            fallback::is_path_error,
            move |failed| {
                let ops = failed.into_iter().map(|(op, share)| (Posted::of(&op), share)).collect();
                StagedTransfers::begin(&transfers, &fallback_peer, ops);
            },
        );
        self.transport.submit(&peer.inner, guarded.ops.into_iter(), guarded.done);
    }
}

/// Path of an operation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CopyPath {
    /// Without device memory.
    Host,
    /// The transport accesses the device memory directly.
    Device,
    /// Through the host.
    ThroughHost,
}

impl<T: Transport> fmt::Debug for ThroughHost<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThroughHost")
            .field("transport", &self.transport)
            .field("stages", &self.transfers.staging_pool)
            .finish()
    }
}

// SAFETY: device memory is touched only by copies, which end before the share of their operation is
// finished or dropped (`run_batch`). All other operations go to the inner transport, with its own
// registration.
unsafe impl<T: Transport> Transport for ThroughHost<T> {
    type Registration = ThroughRegistration<T::Registration>;
    type Peer = ThroughPeer<T::Peer>;

    fn protocol(&self) -> Protocol {
        self.transport.protocol()
    }

    fn capabilities(&self) -> Capabilities {
        self.transport.capabilities().device_memory(true)
    }

    unsafe fn register(&self, span: MemorySpan, access: Access) -> Result<Self::Registration> {
        // SAFETY: passed on to the caller.
        match unsafe { self.transport.register(span, access) } {
            Ok(inner) => Ok(ThroughRegistration { inner: Some(inner) }),
            Err(error) if span.location.is_device() && access == Access::Local => {
                tracing::debug!(%error, location = %span.location, "device memory is copied through the host");
                Ok(ThroughRegistration { inner: None })
            }
            Err(error) => Err(error),
        }
    }

    fn export(&self, registration: &Self::Registration) -> Vec<u8> {
        registration.inner.as_ref().map(|inner| self.transport.export(inner)).unwrap_or_default()
    }

    fn describe(&self, desc: &mut SegmentDesc) {
        self.transport.describe(desc);
    }

    fn reaches(&self, desc: &SegmentDesc) -> bool {
        self.transport.reaches(desc)
    }

    async fn connect(&self, desc: &SegmentDesc) -> Result<Self::Peer> {
        let inner = self.transport.connect(desc).await?;
        Ok(ThroughPeer { inner, regions: KnownRegions::of(desc) })
    }

    fn is_connected(&self, peer: &ThroughPeer<T::Peer>) -> bool {
        self.transport.is_connected(&peer.inner)
    }

    fn release_departed(&self) {
        self.transport.release_departed();
    }

    fn stop_transfers(&self) {
        self.transport.stop_transfers();
    }

    fn is_stopped(&self) -> bool {
        self.transport.is_stopped()
    }

    fn connection_handler(&self) -> Option<&dyn AcceptConnection> {
        self.transport.connection_handler()
    }

    fn path_statistics(&self) -> Option<&dyn PathStatistics<Self::Peer>> {
        Some(self)
    }

    fn submit<'a, I>(&self, peer: &Self::Peer, ops: I, done: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, Self::Registration>>,
    {
        // SAFETY: the inner registration covers the same bytes, and lives as long as the outer one.
        let ops =
            ops.map(|op| unsafe { op.with_registration(op.registration().and_then(|r| r.inner.as_ref())) });
        if !device::in_use() {
            return self.transport.submit(&peer.inner, ops, done);
        }
        let ops: Vec<_> = ops.collect();
        if ops.iter().all(|op| self.copy_path(peer, op) == CopyPath::Host) {
            return self.transport.submit(&peer.inner, ops.into_iter(), done);
        }
        self.submit_mixed(peer, &ops, done);
    }
}

impl<T: Transport> PathStatistics<ThroughPeer<T::Peer>> for ThroughHost<T> {
    fn path_name(&self, peer: &ThroughPeer<T::Peer>) -> Protocol {
        match self.transport.path_statistics() {
            Some(statistics) => statistics.path_name(&peer.inner),
            None => self.transport.protocol(),
        }
    }

    fn count_fallback(&self, peer: &mut ThroughPeer<T::Peer>, counter: &Arc<FallbackCounter>) {
        if let Some(statistics) = self.transport.path_statistics() {
            statistics.count_fallback(&mut peer.inner, counter);
        }
    }
}

/// Operation that goes through the host.
struct Posted {
    opcode: Opcode,
    local: MemorySpan,
    remote: u64,
    key: Arc<[u8]>,
}

impl Posted {
    fn of<R>(op: &Op<'_, R>) -> Self {
        Self { opcode: op.opcode(), local: op.local(), remote: op.remote(), key: op.key().into() }
    }
}

/// Parts of operations that share a buffer. All have the same direction.
struct StagingBatch {
    opcode: Opcode,
    pieces: Vec<Piece>,
    bytes: usize,
}

/// Operation, or a part of one.
struct Piece {
    local: MemorySpan,
    remote: u64,
    key: Arc<[u8]>,
    /// Offset in the buffer.
    at: usize,
    share: Completion,
    failed: Failed,
}

/// Error of a failed part of an operation, so that the other parts are not begun.
#[derive(Clone, Default)]
struct Failed(Arc<Mutex<Option<Error>>>);

impl Piece {
    fn fail(self, error: Error) {
        self.failed.0.lock().get_or_insert_with(|| error.clone());
        self.share.finish(Err(error));
    }
}

/// Splits operations at the end of a buffer, and combines short ones.
struct Splitter {
    chunk: usize,
    batches: Vec<StagingBatch>,
}

impl Splitter {
    fn add(&mut self, op: Posted, share: Completion, may_split: bool) {
        let max_len = if may_split { self.chunk } else { op.local.len };
        let (mut share, mut from, failed) = (Some(share), 0, Failed::default());
        while from < op.local.len {
            let len = max_len.min(op.local.len - from);
            // SAFETY: inside the operation's bytes.
            let local = MemorySpan { ptr: unsafe { op.local.ptr.add(from) }, len, ..op.local };
            let remote = op.remote.wrapping_add(from as u64);
            from += len;
            // The last piece takes the operation's own share.
            let last = from == op.local.len;
            let Some(share) = (if last { share.take() } else { share.as_mut().map(Completion::share) })
            else {
                return;
            };
            let (key, failed) = (op.key.clone(), failed.clone());
            let batch = self.batch(op.opcode, len);
            let at = batch.bytes;
            batch.bytes += len;
            batch.pieces.push(Piece { local, remote, key, at, share, failed });
        }
    }

    /// Returns the last load if it has enough free space, or a new one.
    fn batch(&mut self, opcode: Opcode, len: usize) -> &mut StagingBatch {
        let fits = |batch: &StagingBatch| batch.opcode == opcode && batch.bytes + len <= self.chunk;
        if !self.batches.last().is_some_and(fits) {
            self.batches.push(StagingBatch { opcode, pieces: Vec::new(), bytes: 0 });
        }
        let last = self.batches.len() - 1;
        &mut self.batches[last]
    }
}

impl<T: Transport> StagedTransfers<T> {
    fn begin(transfers: &Arc<Self>, peer: &ThroughPeer<T::Peer>, ops: Vec<(Posted, Completion)>) {
        let mut splitter = Splitter { chunk: transfers.staging_pool.len(), batches: Vec::new() };
        for (op, share) in ops {
            // A refusal of a part is then a refusal of the whole.
            let may_split = peer.regions.contains(op.remote, op.local.len);
            splitter.add(op, share, may_split);
        }
        let (transfers, peer) = (transfers.clone(), peer.inner.clone());
        let each = move |batch| {
            let (transfers, peer) = (transfers.clone(), peer.clone());
            async move { transfers.run_batch(&peer, batch).await }
        };
        let batches = futures::stream::iter(splitter.batches).map(each);
        device::spawn(batches.buffer_unordered(PARALLEL_BUFFERS).for_each(|()| std::future::ready(())));
    }

    /// Runs a load to its end. Every piece of it is then finished.
    async fn run_batch(&self, peer: &T::Peer, batch: StagingBatch) {
        let StagingBatch { opcode, pieces, bytes } = batch;
        let pieces = self.finish_ended(pieces);
        let Some(first) = pieces.first() else { return };
        let deadline = first.share.deadline();
        let are_all_cancelled = || pieces.iter().all(|piece| piece.share.is_cancelled());
        let stop_waiting = || (self.is_expired(deadline) || are_all_cancelled()).then(deadline_error);
        let staging = device::unless(self.take_buffer(bytes), stop_waiting).await.and_then(|result| result);
        let staging = match staging {
            Ok(staging) => staging,
            Err(error) => return self.fail(pieces, &error),
        };
        let pieces = self.finish_ended(pieces);
        match opcode {
            Opcode::Write => {
                let pieces = self.copy(&staging, pieces, opcode).await;
                let pieces = self.finish_ended(pieces);
                // The buffer is dropped last: the release of page-locked memory may wait for all
                // work of the device, and that work may wait for these shares.
                let (pieces, _staging) = self.transfer(peer, staging, pieces, opcode, deadline).await;
                pieces.into_iter().for_each(|piece| piece.share.finish(Ok(())));
            }
            Opcode::Read => {
                let (pieces, staging) = self.transfer(peer, staging, pieces, opcode, deadline).await;
                let Some(staging) = staging else { return };
                let pieces = self.copy(&staging, pieces, opcode).await;
                pieces.into_iter().for_each(|piece| piece.share.finish(Ok(())));
            }
        }
    }

    async fn take_buffer(&self, bytes: usize) -> Result<StagingBuffer<T::Registration>> {
        let register = |span| {
            let transport = self.transport.upgrade().ok_or_else(closed_error)?;
            // SAFETY: the buffer drops the registration before its memory.
            unsafe { transport.register(span, Access::Local) }
        };
        if bytes > self.staging_pool.len() {
            return self.staging_pool.of_length(bytes, register);
        }
        self.staging_pool.take(register).await
    }

    /// Finishes pieces that are late, cancelled, or parts of a failed operation. Returns the
    /// others.
    fn finish_ended(&self, pieces: Vec<Piece>) -> Vec<Piece> {
        let mut active = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let failed = piece.failed.0.lock().clone();
            match failed {
                Some(error) => piece.share.finish(Err(error)),
                None if piece.share.is_cancelled() => piece.share.finish_cancelled(),
                None if self.is_expired(piece.share.deadline()) => piece.fail(deadline_error()),
                None => active.push(piece),
            }
        }
        active
    }

    fn fail(&self, pieces: Vec<Piece>, error: &Error) {
        for piece in self.finish_ended(pieces) {
            piece.fail(error.clone());
        }
    }

    fn is_expired(&self, deadline: Option<Moment>) -> bool {
        deadline.is_some_and(|at| self.clock.now() >= at)
    }

    /// Copies between the buffer and the device, all pieces in parallel. Returns those that
    /// succeeded.
    async fn copy(
        &self,
        staging: &StagingBuffer<T::Registration>,
        pieces: Vec<Piece>,
        opcode: Opcode,
    ) -> Vec<Piece> {
        let copies = pieces.iter().map(|piece| {
            let staging_span = staging.part(piece.at, piece.local.len);
            let copy = staging_span.and_then(|staging_span| {
                let (from, to) = match opcode {
                    Opcode::Write => (piece.local, staging_span),
                    Opcode::Read => (staging_span, piece.local),
                };
                // SAFETY: this code has the only access to the bytes of the operation until its
                // share is finished, and to the buffer until it is dropped. Both happen after the
                // copies, which `join_all` keeps until all have ended.
                unsafe { DeviceCopy::begin(from, to) }
            });
            async { copy?.await }
        });
        let outcomes = futures::future::join_all(copies).await;
        let mut succeeded = Vec::with_capacity(pieces.len());
        for (piece, outcome) in pieces.into_iter().zip(outcomes) {
            match outcome {
                Ok(()) => succeeded.push(piece),
                Err(error) => piece.fail(error),
            }
        }
        succeeded
    }

    /// Transfers the pieces. Returns those that succeeded, and the buffer.
    async fn transfer(
        &self,
        peer: &T::Peer,
        staging: StagingBuffer<T::Registration>,
        pieces: Vec<Piece>,
        opcode: Opcode,
        deadline: Option<Moment>,
    ) -> (Vec<Piece>, Option<StagingBuffer<T::Registration>>) {
        if pieces.is_empty() {
            return (pieces, None);
        }
        let Some(transport) = self.transport.upgrade() else {
            self.fail(pieces, &closed_error());
            return (Vec::new(), None);
        };
        let results = {
            let (done, ticket) = ticket(staging, pieces.len(), deadline);
            let staging = ticket.buffer();
            let spans: Result<Vec<_>> =
                pieces.iter().map(|piece| staging.part(piece.at, piece.local.len)).collect();
            match spans {
                Err(error) => done.finish(Err(error)),
                Ok(spans) => {
                    let ops = spans.into_iter().zip(&pieces).map(|(span, piece)| {
                        // SAFETY: the ticket keeps the buffer and its registration until `done` is
                        // finished, and there is no other user.
                        unsafe { Op::new(opcode, staging.registration(), span, piece.remote, &piece.key) }
                    });
                    let ops: Vec<_> = ops.collect();
                    transport.submit(peer, ops.into_iter(), done);
                }
            }
            drop(staging);
            drop(transport);
            ticket.results()
        };
        let (results, staging) = results.await;
        let mut succeeded = Vec::with_capacity(pieces.len());
        for (piece, result) in pieces.into_iter().zip(results) {
            match result {
                Ok(()) => succeeded.push(piece),
                // The other parts of the operation may have begun.
                Err(error) if was_cancelled(&error) => piece.fail(closed_error()),
                Err(error) => piece.fail(error),
            }
        }
        (succeeded, Some(staging))
    }
}

fn deadline_error() -> Error {
    Error::new(ErrorCode::RpcTimeout, "cannot finish transfer: its deadline has passed")
}

fn closed_error() -> Error {
    Error::new(ErrorCode::TransferFail, "the transport is closed")
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_core::memory::{HostMemory, MemorySource};

    fn batches(lens: &[(usize, bool)]) -> Vec<Vec<(usize, usize)>> {
        let memory = HostMemory::new(1000).unwrap();
        let mut splitter = Splitter { chunk: 10, batches: Vec::new() };
        for &(len, may_split) in lens {
            let local = MemorySpan { len, ..memory.span() };
            let op = Posted { opcode: Opcode::Read, local, remote: 0, key: Arc::new([]) };
            let (done, ticket) = ticket((), 1, None);
            drop(ticket);
            splitter.add(op, done, may_split);
        }
        let pieces = |batch: StagingBatch| {
            assert_eq!(batch.bytes, batch.pieces.iter().map(|piece| piece.local.len).sum::<usize>());
            batch.pieces.into_iter().map(|piece| (piece.at, piece.local.len)).collect()
        };
        splitter.batches.into_iter().map(pieces).collect()
    }

    #[test]
    fn operations_are_cut_and_brought_together() {
        assert_eq!(batches(&[(3, true), (4, true), (4, true)]), [vec![(0, 3), (3, 4)], vec![(0, 4)]]);
        assert_eq!(batches(&[(25, true), (5, true)]), [vec![(0, 10)], vec![(0, 10)], vec![(0, 5), (5, 5)]]);
        // A part outside the known memory of the peer may be refused after other parts were
        // accepted.
        assert_eq!(batches(&[(25, false), (5, false)]), [vec![(0, 25)], vec![(0, 5)]]);
    }
}
