//! Connections of a peer: rails between devices, the queue pairs of a rail, the progress of their
//! set-up, and their messages.

use std::collections::HashMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use crate::flow::{Ended, Flow, Message};
use crate::message::Connection;
use crate::nic;
use crate::peer::PeerDescriptor;
use crate::registration::Registration;
use crate::sieve::Evictable;
use crate::sync::Mutex;
use crate::verbs::{Completed, Posting, QueuePair, Request};
use mooncake_core::clock::Moment;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::config::RdmaConfig;
use mooncake_transport::instance::Instance;
use mooncake_transport::net::HostPort;
use mooncake_transport::{Completion, Opcode};

/// Opened device with its connections.
pub(crate) type Nic = nic::Nic<Endpoint>;

/// Connections to one peer. Clones share them.
#[derive(Clone)]
pub struct RdmaPeer {
    pub(crate) shared: Arc<Peer>,
}

impl fmt::Debug for RdmaPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "RdmaPeer({:?}, {} regions)",
            self.shared.descriptor.server,
            self.shared.descriptor.regions.len()
        )
    }
}

/// State of a peer.
pub(crate) struct Peer {
    pub(crate) descriptor: PeerDescriptor,
    /// Rails by local device, then by the peer's device.
    pub(crate) rails: Vec<Vec<Arc<Rail>>>,
    pub(crate) round_robin: AtomicUsize,
    /// Node that created the peer.
    pub(crate) owner: u64,
}

/// Rail: a local device and a device of a peer.
pub(crate) struct Rail {
    pub(crate) nic: usize,
    /// Path of the peer's device.
    pub(crate) path: String,
    /// Instance of the process that has the device, if it publishes one.
    pub(crate) instance: Option<Instance>,
    pub(crate) at: Mutex<HostPort>,
    pub(crate) paused_until: AtomicU64,
    /// End of the pause after a failed connection attempt.
    pub(crate) closed_until: AtomicU64,
    pub(crate) current: Mutex<Option<Arc<Endpoint>>>,
}

impl Rail {
    /// Returns the connection of the rail, unless it is retired.
    pub(crate) fn active_endpoint(&self) -> Option<Arc<Endpoint>> {
        self.current.lock().clone().filter(|endpoint| !endpoint.is_retired())
    }

    /// Returns the end of the pause.
    pub(crate) fn paused_until(&self) -> Moment {
        Moment(self.paused_until.load(Ordering::Relaxed))
    }
}

/// Rails by local device, the path of the peer's device and the peer's instance, shared by all
/// descriptors of that process.
pub(crate) type Rails = HashMap<(usize, String, Option<Instance>), Arc<Rail>>;

/// Part of an operation, sent as one message.
pub(crate) struct Piece {
    pub(crate) opcode: Opcode,
    pub(crate) local: u64,
    pub(crate) len: u32,
    pub(crate) local_key: u32,
    pub(crate) remote: u64,
    pub(crate) remote_key: u32,
    pub(crate) region: u32,
    pub(crate) attempts: u16,
    pub(crate) flushes: u16,
    /// True if the message was posted before, so that some of it may have been transferred.
    pub(crate) begun: bool,
    pub(crate) registration: Registered,
    pub(crate) peer: Arc<Peer>,
    pub(crate) done: Completion,
}

/// Registration of the local bytes of a piece, for its keys on other devices. It lives at least
/// until the share of the piece is completed.
#[derive(Clone, Copy)]
pub(crate) struct Registered(pub(crate) NonNull<Registration>);

// SAFETY: a registration is `Sync`; the pointer is only dereferenced while the share of the piece
// is pending.
unsafe impl Send for Registered {}

impl Message for Piece {
    fn deadline(&self) -> Option<Moment> {
        self.done.deadline()
    }

    fn bytes(&self) -> u64 {
        self.len.into()
    }
}

impl Piece {
    /// Ends a piece that the caller has cancelled.
    pub(crate) fn finish_cancelled(self) {
        match self.begun {
            false => self.done.finish_cancelled(),
            true => self.done.finish(Err(Error::new(
                ErrorCode::TransferFail,
                "cancelled by the caller after its connection had failed",
            ))),
        }
    }

    /// Returns the local key on a device.
    pub(crate) fn key_on(&self, device: usize) -> Option<u32> {
        // SAFETY: the maker of the operation keeps its registration until its share of the
        // completion is done, and this share is pending.
        unsafe { self.registration.0.as_ref() }.local_key(device, self.local)
    }
}

pub(crate) struct Endpoint {
    weak_self: Weak<Endpoint>,
    pub(crate) id: u32,
    pub(crate) nic: Arc<Nic>,
    pub(crate) rail: Arc<Rail>,
    /// Bits of those that have not looked at the endpoint since its last use: [`USED_FOR_SIEVE`]
    /// and [`USED_FOR_CHECK`].
    used: AtomicU8,
    /// Number of consecutive checks that the peer has not answered.
    pub(crate) unanswered_checks: AtomicU8,
    /// Lock held while the pairs are being connected, which may take a while; never held together
    /// with that of another endpoint.
    setup: Mutex<()>,
    state: Mutex<EndpointState>,
}

struct EndpointState {
    phase: Phase,
    /// Queue pairs, `None` once destroyed.
    pairs: Option<Arc<Vec<QueuePair>>>,
    peer_pairs: Vec<u32>,
    flow: Flow<Piece>,
    posting: Posting,
    /// True if the device refuses to destroy the pairs.
    destroy_failed: bool,
}

/// Outcome of an attempt to destroy a connection.
pub(crate) enum Teardown {
    /// Destroyed: nothing of the connection touches memory any more. Holds the pieces that were
    /// still in flight.
    Destroyed(Vec<Piece>),
    /// Busy: try again later.
    Busy,
    /// Refused by the device, which may still touch the memory of requests in flight: try again
    /// later.
    Refused,
}

/// Phase of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The peer does not know this side yet.
    Connecting,
    /// Connected. The peer must report that it is ready before the deadline.
    Waiting(Moment),
    /// Open: both sides may send.
    Open,
    /// Retired since then. It returns the requests in flight and ends.
    Retired(Moment),
}

/// Outcome of an attempt to connect the pairs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Setup {
    /// Connected now.
    Connected,
    /// Already connected to these queue pairs.
    AlreadyConnected,
    /// Connected to other pairs, or retired: this connection is obsolete.
    Different,
}

/// Actions due after a look at the clock.
#[derive(Debug, Default)]
pub(crate) struct Due {
    /// Time of the next look.
    pub(crate) next: Option<Moment>,
    /// Reason to retire the connection.
    pub(crate) retire: Option<Error>,
    /// True if the connection has no requests in flight any more and can be destroyed.
    pub(crate) destroy: bool,
}

/// Lists that the poller keeps from one round to the next.
#[derive(Default)]
pub(crate) struct Scratch {
    pub(crate) ended: Vec<Ended<Piece>>,
    pub(crate) expired: Vec<Piece>,
}

impl Evictable for Endpoint {
    fn id(&self) -> u32 {
        self.id
    }

    fn is_idle(&self) -> bool {
        self.state.lock().flow.is_idle()
    }

    fn take_used(&self) -> bool {
        self.take_use(USED_FOR_SIEVE)
    }
}

/// Bit of a use that [`Sieve`](crate::sieve::Sieve) has not seen.
const USED_FOR_SIEVE: u8 = 1;
/// Bit of a use that the check of idle connections has not seen.
const USED_FOR_CHECK: u8 = 2;

impl Endpoint {
    fn take_use(&self, bit: u8) -> bool {
        self.used.fetch_and(!bit, Ordering::Relaxed) & bit != 0
    }

    /// Returns whether the connection is open and idle, and was not used since the last call.
    pub(crate) fn is_due_for_check(&self) -> bool {
        !self.take_use(USED_FOR_CHECK) && self.phase() == Phase::Open && self.is_idle()
    }

    pub(crate) fn new(id: u32, nic: &Arc<Nic>, rail: &Arc<Rail>, config: &RdmaConfig) -> Result<Arc<Self>> {
        let sizes = nic.sizes(config);
        let pairs = (0..config.pairs)
            .map(|_| QueuePair::new(&nic.domain, &nic.queue, sizes))
            .collect::<Result<Vec<_>>>()?;
        let max_in_flight = sizes.requests as usize;
        let state = EndpointState {
            phase: Phase::Connecting,
            flow: Flow::new(pairs.len(), max_in_flight, config.max_waiting),
            pairs: Some(Arc::new(pairs)),
            peer_pairs: Vec::new(),
            posting: Posting::with_capacity(max_in_flight),
            destroy_failed: false,
        };
        Ok(Arc::new_cyclic(|weak_self| Self {
            weak_self: weak_self.clone(),
            id,
            nic: nic.clone(),
            rail: rail.clone(),
            used: AtomicU8::new(0),
            unanswered_checks: AtomicU8::new(0),
            setup: Mutex::new(()),
            state: Mutex::new(state),
        }))
    }

    pub(crate) fn phase(&self) -> Phase {
        self.state.lock().phase
    }

    pub(crate) fn is_retired(&self) -> bool {
        matches!(self.phase(), Phase::Retired(_))
    }

    /// Returns the numbers of the local pairs.
    pub(crate) fn numbers(&self) -> Vec<u32> {
        let pairs = self.state.lock().pairs.clone();
        pairs.iter().flat_map(|pairs| pairs.iter()).map(QueuePair::number).collect()
    }

    /// Returns whether the connection is to these pairs of the peer.
    pub(crate) fn is_connected_to(&self, peer_pairs: &[u32]) -> bool {
        self.state.lock().peer_pairs == peer_pairs
    }

    /// Connects the local pairs to those of a message, unless they are already connected. Blocks as
    /// long as the route lookup takes.
    pub(crate) fn set_up(&self, config: &RdmaConfig, with: &Connection, then: Phase) -> Result<Setup> {
        let _guard = self.setup.lock();
        let pairs = {
            let state = self.state.lock();
            match (state.phase, &state.pairs) {
                (Phase::Connecting, Some(pairs)) => pairs.clone(),
                (Phase::Waiting(_) | Phase::Open, _) if state.peer_pairs == with.pairs => {
                    return Ok(Setup::AlreadyConnected);
                }
                _ => return Ok(Setup::Different),
            }
        };
        if with.pairs.len() != pairs.len() {
            return Err(Error::new(
                ErrorCode::InvalidVersion,
                format!(
                    "cannot connect: both sides need the same number of queue pairs. peer={} local={}; set MC_NUM_QP_PER_EP",
                    with.pairs.len(),
                    pairs.len()
                ),
            ));
        }
        let gid = with
            .gid
            .ok_or_else(|| Error::invalid("cannot connect: the peer sent no address of its device"))?;
        let (path, timing) = (self.nic.path(config, gid, with.lid), self.nic.timing(config));
        for (pair, number) in pairs.iter().zip(&with.pairs) {
            pair.connect(&path, *number, timing)?;
        }
        let mut state = self.state.lock();
        if state.phase != Phase::Connecting {
            return Ok(Setup::Different);
        }
        state.peer_pairs.clone_from(&with.pairs);
        state.phase = then;
        if let Phase::Waiting(until) = then {
            self.nic.wake_by(until);
        }
        Ok(Setup::Connected)
    }

    /// Opens the connection, because the peer is ready.
    ///
    /// # Errors
    ///
    /// Returns an error if posting the waiting messages failed.
    pub(crate) fn open(&self) -> Result<()> {
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Waiting(_) | Phase::Connecting) && !state.peer_pairs.is_empty() {
            state.phase = Phase::Open;
        }
        self.fill(&mut state)
    }

    /// Takes messages and posts as many as possible. Returns false, with the messages unchanged, if
    /// the connection is retired.
    ///
    /// # Errors
    ///
    /// Returns an error if the connection has to be retired.
    pub(crate) fn send(&self, pieces: &mut Vec<Piece>, refused: &mut Vec<Piece>) -> Result<bool> {
        self.used.store(USED_FOR_SIEVE | USED_FOR_CHECK, Ordering::Relaxed);
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Retired(_)) {
            return Ok(false);
        }
        for piece in pieces.drain(..) {
            if let Err(piece) = state.flow.push(piece) {
                refused.push(piece);
            }
        }
        self.fill(&mut state).map(|()| true)
    }

    /// Returns the bytes of the messages in flight and waiting.
    pub(crate) fn bytes(&self) -> u64 {
        self.state.lock().flow.bytes()
    }

    /// Posts waiting messages after send credit became free.
    pub(crate) fn post_waiting(&self) -> Result<()> {
        self.fill(&mut self.state.lock())
    }

    fn fill(&self, state: &mut EndpointState) -> Result<()> {
        let EndpointState { phase: Phase::Open, pairs: Some(pairs), flow, posting, .. } = state else {
            return Ok(());
        };
        let starved = flow.fill(&self.nic.credits, |pair_index, requests| {
            posting.clear();
            for request in requests {
                let piece = request.message;
                posting.push(Request {
                    id: request_id(self.id, pair_index, request.sequence),
                    opcode: piece.opcode,
                    local: piece.local,
                    len: piece.len,
                    local_key: piece.local_key,
                    remote: piece.remote,
                    remote_key: piece.remote_key,
                    signalled: request.signalled,
                });
            }
            // SAFETY: pieces stay in the flow with their shares pending until their request has
            // completed or the pair is destroyed. Until then, the maker of the operation keeps its
            // bytes and registration, and grants no other code access to them.
            unsafe { pairs[pair_index].post(posting) }
        })?;
        if starved
            && let Some(this) = self.weak_self.upgrade()
            && self.nic.starved.add(this, &self.nic.credits)
        {
            self.nic.wake();
        }
        Ok(())
    }

    /// Removes the pieces that completions stand for. Returns true when the connection has failed.
    pub(crate) fn completed<'a>(
        &self,
        list: impl Iterator<Item = &'a Completed>,
        ended: &mut Vec<Ended<Piece>>,
    ) -> Result<bool> {
        let mut state = self.state.lock();
        let mut failed = false;
        for completion in list {
            let (_, pair_index, sequence) = request_parts(completion.id);
            failed |= completion.status != crate::verbs::Status::Done;
            state.flow.completed(pair_index, sequence, completion.status, &self.nic.credits, ended);
        }
        if !failed {
            self.fill(&mut state)?;
        }
        Ok(failed)
    }

    /// Checks deadlines. Removes waiting messages that are late.
    pub(crate) fn tick(&self, now: Moment, config: &RdmaConfig, expired: &mut Vec<Piece>) -> Due {
        let mut state = self.state.lock();
        let (next, sent_expired) = state.flow.expire(now, expired);
        let mut due = Due { next, ..Due::default() };
        match state.phase {
            Phase::Retired(since) => {
                let end = since.after(config.drain_timeout);
                // A lost device returns nothing.
                due.destroy = state.flow.in_flight() == 0 || now >= end || self.nic.is_lost();
                due.next = Some(end);
            }
            _ if sent_expired => due.retire = Some(deadline_error()),
            Phase::Waiting(until) if now >= until => {
                due.retire = Some(Error::new(
                    ErrorCode::RpcTimeout,
                    "the peer connected but did not report that it is ready",
                ));
            }
            Phase::Waiting(until) => due.next = Some(next.map_or(until, |next| next.min(until))),
            _ => {}
        }
        due
    }

    /// Retires the connection: nothing is posted any more, and the completion queue returns the
    /// requests in flight. Returns the messages that were not posted, or `None` if the connection
    /// was retired before.
    pub(crate) fn retire(&self, now: Moment) -> Option<Vec<Piece>> {
        let (pairs, waiting) = {
            let mut state = self.state.lock();
            if matches!(state.phase, Phase::Retired(_)) {
                return None;
            }
            state.phase = Phase::Retired(now);
            (state.pairs.clone(), state.flow.take_waiting())
        };
        fail_pairs(pairs.as_deref());
        Some(waiting.into())
    }

    /// Retires an idle connection. Returns false if the connection is in use, or was retired
    /// before.
    pub(crate) fn retire_idle(&self, now: Moment) -> bool {
        let pairs = {
            let mut state = self.state.lock();
            if matches!(state.phase, Phase::Retired(_)) || !state.flow.is_idle() {
                return false;
            }
            state.phase = Phase::Retired(now);
            state.pairs.clone()
        };
        fail_pairs(pairs.as_deref());
        true
    }

    /// Destroys the pairs of a retired connection.
    pub(crate) fn destroy(&self) -> Teardown {
        let mut state = self.state.lock();
        let pairs = match state.pairs.take().map(Arc::try_unwrap) {
            None => Vec::new(),
            Some(Ok(pairs)) => pairs,
            // Another thread is using the pairs.
            Some(Err(pairs)) => {
                state.pairs = Some(pairs);
                return Teardown::Busy;
            }
        };
        let mut remaining_pairs = Vec::new();
        for pair in pairs {
            let Err((pair, error)) = pair.destroy() else { continue };
            remaining_pairs.push(pair);
            if !std::mem::replace(&mut state.destroy_failed, true) {
                tracing::error!(%error, "cannot destroy queue pairs; their requests stay pending");
            }
        }
        if !remaining_pairs.is_empty() && state.flow.in_flight() != 0 {
            state.pairs = Some(Arc::new(remaining_pairs));
            return Teardown::Refused;
        }
        Teardown::Destroyed(state.flow.take_sent(&self.nic.credits))
    }

    /// Leaks pairs that the device refuses to destroy, and their requests in flight: these stay
    /// pending, and their memory is never freed. Returns the number of such pieces.
    pub(crate) fn leak(&self) -> usize {
        let mut state = self.state.lock();
        std::mem::forget(state.pairs.take());
        let pieces = state.flow.take_sent(&self.nic.credits);
        pieces.into_iter().map(std::mem::forget).count()
    }

    /// Removes cancelled messages that were not posted.
    pub(crate) fn take_cancelled(&self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        self.state.lock().flow.take_if(|piece| piece.done.is_cancelled(), &mut pieces);
        pieces
    }

    pub(crate) fn has_waiting(&self) -> bool {
        self.state.lock().flow.has_waiting()
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint({} to {}, {:?})", self.nic.name, self.rail.path, self.phase())
    }
}

fn fail_pairs(pairs: Option<&Vec<QueuePair>>) {
    for pair in pairs.into_iter().flatten() {
        if let Err(error) = pair.fail() {
            // The device may be lost. Then the pair is destroyed when its timeout has passed.
            tracing::debug!(%error, "cannot end queue pair");
        }
    }
}

/// Returns the id of a request: the connection, its pair, and the sequence number in the pair.
fn request_id(endpoint: u32, pair_index: usize, sequence: u32) -> u64 {
    u64::from(endpoint) << 32 | (pair_index as u64 & 0xff) << 24 | u64::from(sequence)
}

/// Returns the parts of a [`request_id`].
pub(crate) fn request_parts(id: u64) -> (u32, usize, u32) {
    ((id >> 32) as u32, (id >> 24 & 0xff) as usize, id as u32 & 0xff_ffff)
}

pub(crate) fn deadline_error() -> Error {
    Error::new(ErrorCode::RpcTimeout, "the deadline passed before the transfer was complete")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_numbered_and_found() {
        for parts in [(0, 0, 0), (7, 254, 0xff_ffff), (u32::MAX, 1, 5)] {
            assert_eq!(request_parts(request_id(parts.0, parts.1, parts.2)), parts);
        }
    }
}
