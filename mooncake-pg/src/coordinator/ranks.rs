//! Sessions of processes, and the requests of each session.

use std::collections::{BTreeMap, BTreeSet};

use mooncake_core::clock::Moment;

use super::outbox::Outbox;
use crate::planted::{Bug, Planted};
use crate::protocol::{ConnectionId, RankInfo, RequestId, Response, SessionId, ToAgent};
use crate::rank_set::RankSet;
use crate::view::{GlobalRank, MAX_RANKS, RankState};

/// Largest number of responses that a session keeps until the agent has received them.
const MAX_ANSWERED: usize = 1024;
/// Largest number of requests of a session that wait for a response.
const MAX_OPEN: usize = 1024;

/// Request of a session that waits for its response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Caller {
    pub(super) rank: GlobalRank,
    pub(super) incarnation: u64,
    pub(super) request: RequestId,
}

/// Session of a process.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) id: SessionId,
    pub(super) address: String,
    pub(super) connection: Option<ConnectionId>,
    pub(super) began: Moment,
    /// Time at which the last connection was lost.
    pub(super) lost_at: Moment,
    pub(super) last_message: Moment,
    /// Number of the last report of evidence.
    pub(super) last_report: u64,
    open: BTreeSet<RequestId>,
    answered: BTreeMap<RequestId, Response>,
    /// Requests below this number have a response that the agent has received.
    received: RequestId,
}

/// Sessions and incarnations of one rank.
#[derive(Debug, Default)]
pub(super) struct RankRecord {
    pub(super) incarnation: u64,
    /// Process that registered last.
    pub(super) process: Option<SessionId>,
    pub(super) session: Option<Session>,
}

/// Treatment of a request that has arrived.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// The request is to be executed.
    New(Caller),
    /// The response was sent again, or follows.
    Known(Option<Response>),
    /// The session has too many requests.
    TooMany(Caller),
}

/// All ranks of the world.
#[derive(Debug)]
pub(super) struct RankTable {
    records: Vec<RankRecord>,
    connections: BTreeMap<ConnectionId, GlobalRank>,
    /// Ranks that are connected to each other.
    pub(super) healthy: RankSet,
    /// True if a session has begun or ended since the agents were last notified.
    pub(super) changed: bool,
    planted: Planted,
}

impl RankTable {
    pub(super) fn new(planted: Planted) -> Self {
        Self {
            records: std::iter::repeat_with(RankRecord::default).take(MAX_RANKS).collect(),
            connections: BTreeMap::new(),
            healthy: RankSet::EMPTY,
            changed: false,
            planted,
        }
    }

    pub(super) fn record(&self, rank: GlobalRank) -> &RankRecord {
        &self.records[usize::from(rank.0)]
    }

    pub(super) fn session(&self, rank: GlobalRank) -> Option<&Session> {
        self.record(rank).session.as_ref()
    }

    pub(super) fn session_mut(&mut self, rank: GlobalRank) -> Option<&mut Session> {
        self.records[usize::from(rank.0)].session.as_mut()
    }

    pub(super) fn connection(&self, rank: GlobalRank) -> Option<ConnectionId> {
        self.session(rank)?.connection
    }

    /// Returns the rank whose present connection this is.
    pub(super) fn rank_of(&self, connection: ConnectionId) -> Option<GlobalRank> {
        self.connections.get(&connection).copied()
    }

    /// Returns the ranks with a session.
    pub(super) fn online(&self) -> RankSet {
        self.iter().map(|(rank, _)| rank).collect()
    }

    /// Returns the sessions in the order of their ranks.
    pub(super) fn iter(&self) -> impl Iterator<Item = (GlobalRank, &Session)> {
        let ranks = (0..MAX_RANKS).map(|rank| GlobalRank(rank as u8));
        ranks.zip(&self.records).filter_map(|(rank, record)| Some((rank, record.session.as_ref()?)))
    }

    /// Returns the state of a rank at an incarnation.
    pub(super) fn state(&self, rank: GlobalRank, incarnation: u64) -> RankState {
        let record = self.record(rank);
        if record.session.is_none() || record.incarnation != incarnation {
            RankState::Offline
        } else if self.healthy.contains(rank) {
            RankState::Healthy
        } else {
            RankState::Synced
        }
    }

    /// Begins a session with a new incarnation. The rank has none.
    pub(super) fn begin(
        &mut self,
        rank: GlobalRank,
        id: SessionId,
        address: String,
        connection: ConnectionId,
        now: Moment,
    ) {
        self.connections.insert(connection, rank);
        let record = &mut self.records[usize::from(rank.0)];
        record.incarnation += 1;
        record.process = Some(id);
        record.session = Some(Session {
            id,
            address,
            connection: Some(connection),
            began: now,
            lost_at: now,
            last_message: now,
            last_report: 0,
            open: BTreeSet::new(),
            answered: BTreeMap::new(),
            received: RequestId(0),
        });
        self.changed = true;
    }

    /// Continues a session over another connection. Returns the connection before.
    pub(super) fn resume(
        &mut self,
        rank: GlobalRank,
        connection: ConnectionId,
        now: Moment,
    ) -> Option<ConnectionId> {
        self.connections.insert(connection, rank);
        let session = self.session_mut(rank)?;
        session.last_message = now;
        let before = session.connection.replace(connection).filter(|before| *before != connection);
        if let Some(before) = before {
            self.connections.remove(&before);
        }
        before
    }

    /// Records the loss of a connection. Returns its rank, unless another one has replaced it.
    pub(super) fn lose(&mut self, connection: ConnectionId, now: Moment) -> Option<GlobalRank> {
        let rank = self.connections.remove(&connection)?;
        let session = self.session_mut(rank)?;
        session.connection = None;
        session.lost_at = now;
        Some(rank)
    }

    /// Ends the session of a rank. Returns it.
    pub(super) fn end(&mut self, rank: GlobalRank) -> Option<Session> {
        let session = self.records[usize::from(rank.0)].session.take()?;
        if let Some(connection) = session.connection {
            self.connections.remove(&connection);
        }
        self.healthy.remove(rank);
        self.changed = true;
        Some(session)
    }

    /// Registers the arrival of a request.
    pub(super) fn arrived(&mut self, rank: GlobalRank, request: RequestId) -> Arrival {
        let (incarnation, planted) = (self.record(rank).incarnation, self.planted);
        let caller = Caller { rank, incarnation, request };
        let Some(session) = self.session_mut(rank) else { return Arrival::Known(None) };
        if let Some(response) = session.answered.get(&request)
            && !planted.has(Bug::RequestsRunTwice)
        {
            return Arrival::Known(Some(response.clone()));
        }
        if request < session.received || session.open.contains(&request) {
            return Arrival::Known(None);
        }
        if session.open.len() >= MAX_OPEN {
            return Arrival::TooMany(caller);
        }
        session.open.insert(request);
        Arrival::New(caller)
    }

    /// Releases the responses that an agent has received.
    pub(super) fn received(&mut self, rank: GlobalRank, unanswered: RequestId) {
        if let Some(session) = self.session_mut(rank)
            && unanswered > session.received
        {
            session.received = unanswered;
            session.answered = session.answered.split_off(&unanswered);
        }
    }

    /// Returns whether the session of a caller still exists.
    pub(super) fn is_current(&self, caller: Caller) -> bool {
        let record = self.record(caller.rank);
        record.session.is_some() && record.incarnation == caller.incarnation
    }

    /// Sends the response to a request, and keeps it until the agent has received it.
    pub(super) fn respond(&mut self, caller: Caller, response: Response, outbox: &mut Outbox) {
        if !self.is_current(caller) {
            return;
        }
        let Some(session) = self.session_mut(caller.rank) else { return };
        session.open.remove(&caller.request);
        if session.answered.len() >= MAX_ANSWERED {
            session.answered.pop_first();
        }
        session.answered.insert(caller.request, response.clone());
        outbox.send(session.connection, ToAgent::Response { id: caller.request, response });
    }

    /// Returns all processes with a session.
    pub(super) fn infos(&self) -> Vec<RankInfo> {
        let info = |(rank, session): (GlobalRank, &Session)| RankInfo {
            rank,
            incarnation: self.record(rank).incarnation,
            session: session.id,
            address: session.address.clone(),
        };
        self.iter().map(info).collect()
    }
}
