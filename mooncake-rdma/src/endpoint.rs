//! One connection: queue pairs between one of our devices and one of a peer's, how far their set-up is, and what they carry.

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use crate::flow::{Ended, Flow, Message};
use crate::message::Connection;
use crate::nic::Nic;
use crate::node::Rail;
use crate::peer::Peer;
use crate::registration::Registration;
use crate::sync::Mutex;
use crate::verbs::{Completed, Posting, QueuePair, Request};
use mooncake_core::clock::Moment;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::config::RdmaConfig;
use mooncake_transport::{Completion, Opcode};

/// A part of an operation, as one message.
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
    /// It was posted once, so some of it may have been done.
    pub(crate) begun: bool,
    pub(crate) registration: Registered,
    pub(crate) peer: Arc<Peer>,
    pub(crate) done: Completion,
}

/// The registration of a piece's local bytes, for its keys on other devices. Lives at least until the piece's share is finished.
#[derive(Clone, Copy)]
pub(crate) struct Registered(pub(crate) NonNull<Registration>);

// SAFETY: a registration is `Sync`; the pointer is read through only while the piece's share is unfinished.
unsafe impl Send for Registered {}

impl Message for Piece {
    fn deadline(&self) -> Option<Moment> {
        self.done.deadline()
    }
}

impl Piece {
    /// Ends it, since nobody waits for it any more.
    pub(crate) fn give_back(self) {
        match self.begun {
            false => self.done.give_back(),
            true => self.done.finish(Err(Error::new(
                ErrorCode::TransferFail,
                "given up by the caller when its connection had failed",
            ))),
        }
    }

    /// Our key on a device.
    pub(crate) fn key_on(&self, device: usize) -> Option<u32> {
        // SAFETY: whoever made the operation keeps its registration until its share of the completion is finished, and ours is not.
        unsafe { self.registration.0.as_ref() }.local_key(device, self.local)
    }
}

pub(crate) struct Endpoint {
    me: Weak<Endpoint>,
    pub(crate) id: u32,
    pub(crate) nic: Arc<Nic>,
    pub(crate) rail: Arc<Rail>,
    /// Used since [`Sieve`](crate::nic::Sieve) last looked.
    pub(crate) used: AtomicBool,
    /// Held while its pairs are connected, which may take a while; never together with another's.
    setup: Mutex<()>,
    state: Mutex<State>,
}

struct State {
    phase: Phase,
    /// `None` once destroyed.
    pairs: Option<Arc<Vec<QueuePair>>>,
    theirs: Vec<u32>,
    flow: Flow<Piece>,
    posting: Posting,
    /// The device does not let the pairs go.
    stuck: bool,
}

/// What became of an attempt to take a connection apart.
pub(crate) enum Apart {
    /// It is gone, and nothing of it touches memory any more. This had not come back by then.
    Gone(Vec<Piece>),
    /// Not now: try again later.
    Later,
    /// The device refuses, and may touch the memory of what is on its way still: try again later.
    Stuck,
}

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The other side does not know us yet.
    Connecting,
    /// Connected; the other side has until then to say that it is ready.
    Waiting(Moment),
    /// Both sides may send.
    Open,
    /// Given up, since then. It hands back what was on its way and goes.
    Retired(Moment),
}

/// What became of an attempt to connect the pairs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Setup {
    /// Now they are connected.
    Connected,
    /// They were, to the same pairs.
    Known,
    /// They are connected to others, or given up: this connection is over.
    Different,
}

/// What has to be done after a look at the clock.
#[derive(Debug, Default)]
pub(crate) struct Due {
    /// Look again then.
    pub(crate) next: Option<Moment>,
    /// Give it up, for this reason.
    pub(crate) retire: Option<Error>,
    /// It has nothing on its way any more, and can go.
    pub(crate) bury: bool,
}

/// Lists that the poller keeps from one round to the next.
#[derive(Default)]
pub(crate) struct Scratch {
    pub(crate) ended: Vec<Ended<Piece>>,
    pub(crate) late: Vec<Piece>,
}

impl Endpoint {
    pub(crate) fn new(id: u32, nic: &Arc<Nic>, rail: &Arc<Rail>, config: &RdmaConfig) -> Result<Arc<Self>> {
        let sizes = nic.sizes(config);
        let pairs = (0..config.pairs)
            .map(|_| QueuePair::new(&nic.domain, &nic.queue, sizes))
            .collect::<Result<Vec<_>>>()?;
        let room = sizes.requests as usize;
        let state = State {
            phase: Phase::Connecting,
            flow: Flow::new(pairs.len(), room, config.max_waiting),
            pairs: Some(Arc::new(pairs)),
            theirs: Vec::new(),
            posting: Posting::with_capacity(room),
            stuck: false,
        };
        Ok(Arc::new_cyclic(|me| Self {
            me: me.clone(),
            id,
            nic: nic.clone(),
            rail: rail.clone(),
            used: AtomicBool::new(false),
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

    /// Nothing waits and nothing is on its way.
    pub(crate) fn is_idle(&self) -> bool {
        self.state.lock().flow.is_idle()
    }

    /// Numbers of our pairs.
    pub(crate) fn numbers(&self) -> Vec<u32> {
        let pairs = self.state.lock().pairs.clone();
        pairs.iter().flat_map(|pairs| pairs.iter()).map(QueuePair::number).collect()
    }

    /// Whether it is connected to those pairs of the peer.
    pub(crate) fn knows(&self, theirs: &[u32]) -> bool {
        self.state.lock().theirs == theirs
    }

    /// Connects our pairs to those of a message, unless they are already. Blocks for as long as finding the way takes.
    pub(crate) fn set_up(&self, config: &RdmaConfig, with: &Connection, then: Phase) -> Result<Setup> {
        let _alone = self.setup.lock();
        let pairs = {
            let state = self.state.lock();
            match (state.phase, &state.pairs) {
                (Phase::Connecting, Some(pairs)) => pairs.clone(),
                (Phase::Waiting(_) | Phase::Open, _) if state.theirs == with.pairs => {
                    return Ok(Setup::Known);
                }
                _ => return Ok(Setup::Different),
            }
        };
        if with.pairs.len() != pairs.len() {
            return Err(Error::new(
                ErrorCode::InvalidVersion,
                format!(
                    "{} queue pairs on their side and {} on ours: both need the same number (MC_NUM_QP_PER_EP)",
                    with.pairs.len(),
                    pairs.len()
                ),
            ));
        }
        let gid = with.gid.ok_or_else(|| Error::invalid("the peer names no address of its device"))?;
        let (path, timing) = (self.nic.path(config, gid, with.lid), self.nic.timing(config));
        for (pair, number) in pairs.iter().zip(&with.pairs) {
            pair.connect(&path, *number, timing)?;
        }
        let mut state = self.state.lock();
        if state.phase != Phase::Connecting {
            return Ok(Setup::Different);
        }
        state.theirs.clone_from(&with.pairs);
        state.phase = then;
        if let Phase::Waiting(until) = then {
            self.nic.wake_by(until);
        }
        Ok(Setup::Connected)
    }

    /// The other side is ready. An error if posting what waited failed.
    pub(crate) fn open(&self) -> Result<()> {
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Waiting(_) | Phase::Connecting) && !state.theirs.is_empty() {
            state.phase = Phase::Open;
        }
        self.fill(&mut state)
    }

    /// Takes messages over and posts what can be posted. False, with the messages where they were, when it is given up already;
    /// an error when it has to be.
    pub(crate) fn send(&self, pieces: &mut Vec<Piece>, refused: &mut Vec<Piece>) -> Result<bool> {
        self.used.store(true, Ordering::Relaxed);
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

    /// Posts what waits, after room became free.
    pub(crate) fn go_on(&self) -> Result<()> {
        self.fill(&mut self.state.lock())
    }

    fn fill(&self, state: &mut State) -> Result<()> {
        let State { phase: Phase::Open, pairs: Some(pairs), flow, posting, .. } = state else {
            return Ok(());
        };
        let starved = flow.fill(&self.nic.credits, |lane, requests| {
            posting.clear();
            for request in requests {
                let piece = request.message;
                posting.push(Request {
                    id: request_id(self.id, lane, request.sequence),
                    opcode: piece.opcode,
                    local: piece.local,
                    len: piece.len,
                    local_key: piece.local_key,
                    remote: piece.remote,
                    remote_key: piece.remote_key,
                    signalled: request.signalled,
                });
            }
            // SAFETY: pieces stay in the flow, their shares unfinished, until their request has completed or the pair is gone; until
            // then, whoever made the operation keeps its bytes and registration, and keeps others away from them.
            unsafe { pairs[lane].post(posting) }
        })?;
        if starved
            && let Some(me) = self.me.upgrade()
            && self.nic.starved.add(me, &self.nic.credits)
        {
            self.nic.wake();
        }
        Ok(())
    }

    /// Takes out what completions stand for. True when the connection has failed.
    pub(crate) fn completed<'a>(
        &self,
        list: impl Iterator<Item = &'a Completed>,
        ended: &mut Vec<Ended<Piece>>,
    ) -> Result<bool> {
        let mut state = self.state.lock();
        let mut failed = false;
        for one in list {
            let (_, lane, sequence) = request_parts(one.id);
            failed |= one.status != crate::verbs::Status::Done;
            state.flow.completed(lane, sequence, one.status, &self.nic.credits, ended);
        }
        if !failed {
            self.fill(&mut state)?;
        }
        Ok(failed)
    }

    /// Looks at deadlines; what waits and is late comes out.
    pub(crate) fn tick(&self, now: Moment, config: &RdmaConfig, late: &mut Vec<Piece>) -> Due {
        let mut state = self.state.lock();
        let (next, sent_late) = state.flow.expire(now, late);
        let mut due = Due { next, ..Due::default() };
        match state.phase {
            Phase::Retired(since) => {
                let end = since.after(config.drain_timeout);
                // A lost device hands nothing back.
                due.bury = state.flow.in_flight() == 0 || now >= end || self.nic.is_lost();
                due.next = Some(end);
            }
            _ if sent_late => due.retire = Some(too_late()),
            Phase::Waiting(until) if now >= until => {
                due.retire = Some(Error::new(
                    ErrorCode::RpcTimeout,
                    "the peer connected and did not say that it is ready",
                ));
            }
            Phase::Waiting(until) => due.next = Some(next.map_or(until, |next| next.min(until))),
            _ => {}
        }
        due
    }

    /// Ends it: nothing is posted any more, and what is on its way comes back by the queue. What had not been posted comes out here.
    /// `None` when it was ended before.
    pub(crate) fn retire(&self, now: Moment) -> Option<Vec<Piece>> {
        let (pairs, waiting) = {
            let mut state = self.state.lock();
            if matches!(state.phase, Phase::Retired(_)) {
                return None;
            }
            state.phase = Phase::Retired(now);
            (state.pairs.clone(), state.flow.take_waiting())
        };
        end(pairs.as_deref());
        Some(waiting.into())
    }

    /// The same for one that nobody needs now. False when somebody does, or it was ended before.
    pub(crate) fn retire_idle(&self, now: Moment) -> bool {
        let pairs = {
            let mut state = self.state.lock();
            if matches!(state.phase, Phase::Retired(_)) || !state.flow.is_idle() {
                return false;
            }
            state.phase = Phase::Retired(now);
            state.pairs.clone()
        };
        end(pairs.as_deref());
        true
    }

    /// Destroys the pairs of a retired one.
    pub(crate) fn destroy(&self) -> Apart {
        let mut state = self.state.lock();
        let pairs = match state.pairs.take().map(Arc::try_unwrap) {
            None => Vec::new(),
            Some(Ok(pairs)) => pairs,
            // Somebody is busy with them.
            Some(Err(pairs)) => {
                state.pairs = Some(pairs);
                return Apart::Later;
            }
        };
        let mut left = Vec::new();
        for pair in pairs {
            let Err((pair, error)) = pair.destroy() else { continue };
            left.push(pair);
            if !std::mem::replace(&mut state.stuck, true) {
                tracing::error!(%error, "what is on its way is not over before that works");
            }
        }
        if !left.is_empty() && state.flow.in_flight() != 0 {
            state.pairs = Some(Arc::new(left));
            return Apart::Stuck;
        }
        Apart::Gone(state.flow.take_sent(&self.nic.credits))
    }

    /// Forgets pairs that the device does not let go, and what is on its way on them: it stays unfinished, and its memory is never freed.
    /// Returns how many pieces that are.
    pub(crate) fn forget(&self) -> usize {
        let mut state = self.state.lock();
        std::mem::forget(state.pairs.take());
        let pieces = state.flow.take_sent(&self.nic.credits);
        pieces.into_iter().map(std::mem::forget).count()
    }

    /// Takes out what was not posted and nobody waits for any more.
    pub(crate) fn given_up(&self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        self.state.lock().flow.take_if(|piece| piece.done.is_given_up(), &mut pieces);
        pieces
    }

    pub(crate) fn waits(&self) -> bool {
        self.state.lock().flow.waits()
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint({} to {}, {:?})", self.nic.name, self.rail.path, self.phase())
    }
}

fn end(pairs: Option<&Vec<QueuePair>>) {
    for pair in pairs.into_iter().flatten() {
        if let Err(error) = pair.fail() {
            // The device may be gone; then the pair is destroyed when its time is up.
            tracing::debug!(%error, "a queue pair could not be ended");
        }
    }
}

/// A request's number: the connection, the pair in it, the place in that.
fn request_id(endpoint: u32, lane: usize, sequence: u32) -> u64 {
    u64::from(endpoint) << 32 | (lane as u64 & 0xff) << 24 | u64::from(sequence)
}

/// The parts of [`request_id`].
pub(crate) fn request_parts(id: u64) -> (u32, usize, u32) {
    ((id >> 32) as u32, (id >> 24 & 0xff) as usize, id as u32 & 0xff_ffff)
}

pub(crate) fn too_late() -> Error {
    Error::new(ErrorCode::RpcTimeout, "the deadline passed before the transfer was over")
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
