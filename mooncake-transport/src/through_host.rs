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
use crate::stages::{Stage, StagePool};
use crate::statistics::FallbackCounter;
use crate::ticket::{Completion, is_given_back, ticket};
use crate::transport::{Access, Capabilities, Op, Opcode, PathStatistics, Transport};

/// Length of a buffer in bytes. A transfer of this length takes longer than the notification of a
/// finished copy.
const CHUNK: usize = 2 << 20;
/// Number of buffers of one node.
const CHUNKS: usize = 16;
/// Number of buffers that one submission uses in parallel: one is copied while two are transferred.
const AT_ONCE: usize = 3;

/// Predicate for operations whose local device memory the transport accesses directly.
pub type Takes<T> = fn(&T, &<T as Transport>::Peer, &Op<'_, <T as Transport>::Registration>) -> bool;

/// Transport with support of local device memory. Access of peers to device memory depends on the
/// inner transport.
pub struct ThroughHost<T: Transport> {
    transport: Arc<T>,
    carrier: Arc<Carrier<T>>,
    takes: Takes<T>,
}

/// State that outlives a submission. It holds the transport weakly, so that operations in flight
/// fail when the transport is dropped.
struct Carrier<T: Transport> {
    transport: Weak<T>,
    stages: StagePool<T::Registration>,
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
        let carrier =
            Carrier { transport: Arc::downgrade(&transport), stages: StagePool::new(CHUNK, CHUNKS), clock };
        Self { transport, carrier: Arc::new(carrier), takes }
    }

    /// Returns the inner transport.
    pub fn transport(&self) -> &Arc<T> {
        &self.transport
    }

    fn way(&self, peer: &ThroughPeer<T::Peer>, op: &Op<'_, T::Registration>) -> Way {
        if !op.local().location.is_device() || op.is_empty() {
            return Way::Host;
        }
        if (self.takes)(&self.transport, &peer.inner, op) { Way::Device } else { Way::Through }
    }

    fn submit_mixed(&self, peer: &ThroughPeer<T::Peer>, ops: &[Op<'_, T::Registration>], done: Completion) {
        let mut rest = done;
        for run in ops.chunk_by(|a, b| self.way(peer, a) == self.way(peer, b)) {
            let (share, others) = rest.split_at(run.len());
            rest = others;
            match run.first().map(|op| self.way(peer, op)) {
                Some(Way::Through) => {
                    let ops = run.iter().map(Posted::of).zip(share.each());
                    Carrier::begin(&self.carrier, peer, ops.collect());
                }
                Some(Way::Device) => self.submit_direct(peer, run, share),
                Some(Way::Host) | None => self.transport.submit(&peer.inner, run.iter().copied(), share),
            }
        }
        rest.finish(Ok(()));
    }

    fn submit_direct(&self, peer: &ThroughPeer<T::Peer>, ops: &[Op<'_, T::Registration>], done: Completion) {
        let (carrier, way) = (self.carrier.clone(), peer.clone());
        let guarded = with_fallback::<_, ()>(
            ops.iter().copied(),
            done,
            &self.carrier.clock,
            fallback::is_path_error,
            move |failed| {
                let ops = failed.into_iter().map(|(op, share)| (Posted::of(&op), share)).collect();
                Carrier::begin(&carrier, &way, ops);
            },
        );
        self.transport.submit(&peer.inner, guarded.ops.into_iter(), guarded.done);
    }
}

/// Path of an operation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Without device memory.
    Host,
    /// The transport accesses the device memory directly.
    Device,
    /// Through the host.
    Through,
}

impl<T: Transport> fmt::Debug for ThroughHost<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThroughHost")
            .field("transport", &self.transport)
            .field("stages", &self.carrier.stages)
            .finish()
    }
}

// SAFETY: device memory is touched only by copies, which end before the share of their operation is
// finished or dropped (`carry`). All other operations go to the inner transport, with its own
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
                tracing::debug!(%error, place = %span.location, "device memory is copied through the host");
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
        if ops.iter().all(|op| self.way(peer, op) == Way::Host) {
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
struct Load {
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
struct Cutter {
    chunk: usize,
    loads: Vec<Load>,
}

impl Cutter {
    fn add(&mut self, op: Posted, share: Completion, may_cut: bool) {
        let longest = if may_cut { self.chunk } else { op.local.len };
        let (mut share, mut from, failed) = (Some(share), 0, Failed::default());
        while from < op.local.len {
            let len = longest.min(op.local.len - from);
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
            let load = self.load(op.opcode, len);
            let at = load.bytes;
            load.bytes += len;
            load.pieces.push(Piece { local, remote, key, at, share, failed });
        }
    }

    /// Returns the last load if it has enough free space, or a new one.
    fn load(&mut self, opcode: Opcode, len: usize) -> &mut Load {
        let fits = |load: &Load| load.opcode == opcode && load.bytes + len <= self.chunk;
        if !self.loads.last().is_some_and(fits) {
            self.loads.push(Load { opcode, pieces: Vec::new(), bytes: 0 });
        }
        let last = self.loads.len() - 1;
        &mut self.loads[last]
    }
}

impl<T: Transport> Carrier<T> {
    fn begin(carrier: &Arc<Self>, peer: &ThroughPeer<T::Peer>, ops: Vec<(Posted, Completion)>) {
        let mut cutter = Cutter { chunk: carrier.stages.len(), loads: Vec::new() };
        for (op, share) in ops {
            // A refusal of a part is then a refusal of the whole.
            let may_cut = peer.regions.contains(op.remote, op.local.len);
            cutter.add(op, share, may_cut);
        }
        let (carrier, peer) = (carrier.clone(), peer.inner.clone());
        let each = move |load| {
            let (carrier, peer) = (carrier.clone(), peer.clone());
            async move { carrier.carry(&peer, load).await }
        };
        let loads = futures::stream::iter(cutter.loads).map(each);
        device::spawn(loads.buffer_unordered(AT_ONCE).for_each(|()| std::future::ready(())));
    }

    /// Runs a load to its end. Every piece of it is then finished.
    async fn carry(&self, peer: &T::Peer, load: Load) {
        let Load { opcode, pieces, bytes } = load;
        let pieces = self.still_wanted(pieces);
        let Some(first) = pieces.first() else { return };
        let deadline = first.share.deadline();
        let given_up = || pieces.iter().all(|piece| piece.share.is_given_up());
        let waited = || (self.is_late(deadline) || given_up()).then(late);
        let stage = device::unless(self.room(bytes), waited).await.and_then(|room| room);
        let stage = match stage {
            Ok(stage) => stage,
            Err(error) => return self.fail(pieces, &error),
        };
        let pieces = self.still_wanted(pieces);
        match opcode {
            Opcode::Write => {
                let pieces = self.copy(&stage, pieces, opcode).await;
                let pieces = self.still_wanted(pieces);
                // The buffer is dropped last: the release of page-locked memory may wait for all
                // work of the device, and that work may wait for these shares.
                let (pieces, _stage) = self.transfer(peer, stage, pieces, opcode, deadline).await;
                pieces.into_iter().for_each(|piece| piece.share.finish(Ok(())));
            }
            Opcode::Read => {
                let (pieces, stage) = self.transfer(peer, stage, pieces, opcode, deadline).await;
                let Some(stage) = stage else { return };
                let pieces = self.copy(&stage, pieces, opcode).await;
                pieces.into_iter().for_each(|piece| piece.share.finish(Ok(())));
            }
        }
    }

    async fn room(&self, bytes: usize) -> Result<Stage<T::Registration>> {
        let register = |span| {
            let transport = self.transport.upgrade().ok_or_else(closed)?;
            // SAFETY: the buffer drops the registration before its memory.
            unsafe { transport.register(span, Access::Local) }
        };
        if bytes > self.stages.len() {
            return self.stages.of_length(bytes, register);
        }
        self.stages.take(register).await
    }

    /// Finishes pieces that are late, cancelled, or parts of a failed operation. Returns the
    /// others.
    fn still_wanted(&self, pieces: Vec<Piece>) -> Vec<Piece> {
        let mut wanted = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let failed = piece.failed.0.lock().clone();
            match failed {
                Some(error) => piece.share.finish(Err(error)),
                None if piece.share.is_given_up() => piece.share.give_back(),
                None if self.is_late(piece.share.deadline()) => piece.fail(late()),
                None => wanted.push(piece),
            }
        }
        wanted
    }

    fn fail(&self, pieces: Vec<Piece>, error: &Error) {
        for piece in self.still_wanted(pieces) {
            piece.fail(error.clone());
        }
    }

    fn is_late(&self, deadline: Option<Moment>) -> bool {
        deadline.is_some_and(|at| self.clock.now() >= at)
    }

    /// Copies between the buffer and the device, all pieces in parallel. Returns those that
    /// succeeded.
    async fn copy(&self, stage: &Stage<T::Registration>, pieces: Vec<Piece>, opcode: Opcode) -> Vec<Piece> {
        let copies = pieces.iter().map(|piece| {
            let here = stage.part(piece.at, piece.local.len);
            let copy = here.and_then(|here| {
                let (from, to) = match opcode {
                    Opcode::Write => (piece.local, here),
                    Opcode::Read => (here, piece.local),
                };
                // SAFETY: this code has the only access to the bytes of the operation until its
                // share is finished, and to the buffer until it is dropped. Both happen after the
                // copies, which `join_all` keeps until all have ended.
                unsafe { DeviceCopy::begin(from, to) }
            });
            async { copy?.await }
        });
        let copied = futures::future::join_all(copies).await;
        let mut good = Vec::with_capacity(pieces.len());
        for (piece, copied) in pieces.into_iter().zip(copied) {
            match copied {
                Ok(()) => good.push(piece),
                Err(error) => piece.fail(error),
            }
        }
        good
    }

    /// Transfers the pieces. Returns those that succeeded, and the buffer.
    async fn transfer(
        &self,
        peer: &T::Peer,
        stage: Stage<T::Registration>,
        pieces: Vec<Piece>,
        opcode: Opcode,
        deadline: Option<Moment>,
    ) -> (Vec<Piece>, Option<Stage<T::Registration>>) {
        if pieces.is_empty() {
            return (pieces, None);
        }
        let Some(transport) = self.transport.upgrade() else {
            self.fail(pieces, &closed());
            return (Vec::new(), None);
        };
        let results = {
            let (done, ticket) = ticket(stage, pieces.len(), deadline);
            let stage = ticket.buffer();
            let places: Result<Vec<_>> =
                pieces.iter().map(|piece| stage.part(piece.at, piece.local.len)).collect();
            match places {
                Err(error) => done.finish(Err(error)),
                Ok(places) => {
                    let ops = places.into_iter().zip(&pieces).map(|(place, piece)| {
                        // SAFETY: the ticket keeps the buffer and its registration until `done` is
                        // finished, and there is no other user.
                        unsafe { Op::new(opcode, stage.registration(), place, piece.remote, &piece.key) }
                    });
                    let ops: Vec<_> = ops.collect();
                    transport.submit(peer, ops.into_iter(), done);
                }
            }
            drop(stage);
            drop(transport);
            ticket.results()
        };
        let (results, stage) = results.await;
        let mut good = Vec::with_capacity(pieces.len());
        for (piece, result) in pieces.into_iter().zip(results) {
            match result {
                Ok(()) => good.push(piece),
                // The other parts of the operation may have begun.
                Err(error) if is_given_back(&error) => piece.fail(closed()),
                Err(error) => piece.fail(error),
            }
        }
        (good, Some(stage))
    }
}

fn late() -> Error {
    Error::new(ErrorCode::RpcTimeout, "cannot finish transfer: its deadline has passed")
}

fn closed() -> Error {
    Error::new(ErrorCode::TransferFail, "the transport is closed")
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_core::memory::{HostMemory, MemorySource};

    fn loads(lens: &[(usize, bool)]) -> Vec<Vec<(usize, usize)>> {
        let memory = HostMemory::new(1000).unwrap();
        let mut cutter = Cutter { chunk: 10, loads: Vec::new() };
        for &(len, may_cut) in lens {
            let local = MemorySpan { len, ..memory.span() };
            let op = Posted { opcode: Opcode::Read, local, remote: 0, key: Arc::new([]) };
            let (done, ticket) = ticket((), 1, None);
            drop(ticket);
            cutter.add(op, done, may_cut);
        }
        let pieces = |load: Load| {
            assert_eq!(load.bytes, load.pieces.iter().map(|piece| piece.local.len).sum::<usize>());
            load.pieces.into_iter().map(|piece| (piece.at, piece.local.len)).collect()
        };
        cutter.loads.into_iter().map(pieces).collect()
    }

    #[test]
    fn operations_are_cut_and_brought_together() {
        assert_eq!(loads(&[(3, true), (4, true), (4, true)]), [vec![(0, 3), (3, 4)], vec![(0, 4)]]);
        assert_eq!(loads(&[(25, true), (5, true)]), [vec![(0, 10)], vec![(0, 10)], vec![(0, 5), (5, 5)]]);
        // A part outside the known memory of the peer may be refused after other parts were
        // accepted.
        assert_eq!(loads(&[(25, false), (5, false)]), [vec![(0, 25)], vec![(0, 5)]]);
    }
}
