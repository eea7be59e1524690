//! Agent of a process: session, links, groups and calls, as a state machine without I/O.
//!
//! Every call takes the current time and appends effects. The owner carries them out in order, and
//! calls [`AgentMachine::tick`] no later than [`AgentMachine::next_deadline`].

mod calling;
mod calls;
mod local_group;
mod peers;

use std::collections::BTreeMap;
use std::sync::Arc;

use mooncake_core::backoff::Backoff;
use mooncake_core::clock::{Moment, Rng};

pub use self::calls::{CallError, CallId, CallValue, GroupKey};
pub use self::local_group::is_usable;
pub use self::peers::LinkAttempt;

use self::calls::{Awaited, Calls};
use self::local_group::{Application, LocalGroup};
use self::peers::{LinkAction, Peers};
use crate::limits::AgentLimits;
use crate::planted::{Bug, Planted};
use crate::protocol::{
    ConnectionId, GroupId, RankInfo, Request, RequestId, Response, SessionId, ToAgent, ToCoordinator, WorldId,
};
use crate::view::{GlobalRank, Slot, View};

/// Action that the owner of an agent carries out, in order.
#[derive(Clone, PartialEq, Debug)]
pub enum AgentEffect {
    /// Opens a connection to the coordinator. The owner reports the outcome.
    Connect(ConnectionId),
    /// Sends a message.
    Send {
        /// Connection of the message.
        connection: ConnectionId,
        /// Content of the message.
        message: ToCoordinator,
    },
    /// Closes a connection, or ends the attempt to open it.
    Close(ConnectionId),
    /// Opens a link to a process. The owner reports the outcome, and the end of the link.
    OpenLink(LinkAttempt, RankInfo),
    /// Closes a link, or ends the attempt to open it. No report follows.
    CloseLink(LinkAttempt),
    /// Asks a process for a sign of life. The owner reports the outcome.
    Probe(RankInfo),
    /// A group has a view for the data plane.
    ViewChanged {
        /// Registration of the group.
        group: GroupKey,
        /// View with an own slot that is or was active.
        view: Arc<View>,
    },
    /// A call has ended.
    Finished {
        /// The call.
        call: CallId,
        /// Value or reason.
        outcome: Result<CallValue, CallError>,
    },
}

/// State of the connection to the coordinator.
#[derive(Debug)]
enum Control {
    Waiting {
        until: Moment,
    },
    Connecting {
        connection: ConnectionId,
        since: Moment,
    },
    Registering {
        connection: ConnectionId,
        since: Moment,
    },
    Registered {
        connection: ConnectionId,
    },
    /// No session will follow.
    Ended(String),
}

/// Agent of a process.
#[derive(Debug)]
pub struct AgentMachine {
    rank: GlobalRank,
    session: SessionId,
    address: String,
    limits: AgentLimits,
    world: Option<WorldId>,
    /// Incarnation of the last session.
    incarnation: Option<u64>,
    control: Control,
    backoff: Backoff,
    last_connection: u64,
    last_received: Moment,
    last_tick: Moment,
    next_heartbeat: Moment,
    /// Time of the last contact with the coordinator, while there is no session.
    no_session_since: Option<Moment>,
    /// Reason why there is no session.
    obstacle: Option<String>,
    calls: Calls,
    peers: Peers,
    groups: BTreeMap<GroupKey, LocalGroup>,
    keys: BTreeMap<GroupId, GroupKey>,
    last_key: u64,
    planted: Planted,
}

impl AgentMachine {
    /// Creates the agent of a process. The first tick connects it.
    pub fn new(
        rank: GlobalRank,
        session: SessionId,
        address: String,
        limits: AgentLimits,
        mut rng: Rng,
        now: Moment,
    ) -> Self {
        Self {
            rank,
            session,
            address,
            world: None,
            incarnation: None,
            control: Control::Waiting { until: now },
            backoff: Backoff::new(rng.split()),
            last_connection: 0,
            last_received: now,
            last_tick: now,
            next_heartbeat: now,
            no_session_since: Some(now),
            obstacle: None,
            calls: Calls::default(),
            peers: Peers::new(limits.links, rng),
            limits,
            groups: BTreeMap::new(),
            keys: BTreeMap::new(),
            last_key: 0,
            planted: Planted::default(),
        }
    }

    /// Adds a planted bug.
    #[cfg(any(test, feature = "testkit"))]
    #[must_use]
    pub fn planted(mut self, planted: Planted) -> Self {
        self.planted = planted;
        self
    }

    /// Sets the limits of calls that begin from now on.
    pub fn set_limits(&mut self, limits: AgentLimits) {
        self.limits = limits;
    }

    /// Returns the time limits.
    pub fn limits(&self) -> &AgentLimits {
        &self.limits
    }

    /// Returns the state of the own process: offline without a session.
    pub fn is_registered(&self) -> bool {
        matches!(self.control, Control::Registered { .. })
    }

    /// Returns the incarnation of the last session.
    pub fn incarnation(&self) -> Option<u64> {
        self.incarnation
    }

    /// Returns the last view of a group.
    pub fn view(&self, group: GroupKey) -> Option<&Arc<View>> {
        self.groups.get(&group)?.view.as_ref()
    }

    /// Returns the instance and the own slot of a registration.
    pub fn registration(&self, group: GroupKey) -> Option<(GroupId, Slot)> {
        self.groups.get(&group).map(|group| (group.id, group.slot))
    }

    /// Returns the registrations of this process.
    pub fn groups(&self) -> impl Iterator<Item = GroupKey> + '_ {
        self.groups.keys().copied()
    }

    /// Returns the process of a rank, if it has a session.
    pub fn info(&self, rank: GlobalRank) -> Option<&RankInfo> {
        self.peers.info(rank)
    }

    /// Records that a connection to the coordinator is open.
    pub fn connected(&mut self, connection: ConnectionId, now: Moment, effects: &mut Vec<AgentEffect>) {
        if !matches!(self.control, Control::Connecting { connection: c, .. } if c == connection) {
            effects.push(AgentEffect::Close(connection));
            return;
        }
        self.control = Control::Registering { connection, since: now };
        let message = ToCoordinator::Register {
            rank: self.rank,
            session: self.session,
            world: self.world.filter(|_| !self.planted.has(Bug::OtherCoordinator)),
            address: self.address.clone(),
        };
        effects.push(AgentEffect::Send { connection, message });
    }

    /// Records that a connection has been lost, or that an attempt has failed.
    pub fn connection_lost(&mut self, connection: ConnectionId, now: Moment) {
        if self.connection() == Some(connection) {
            self.lose(now);
        }
    }

    /// Records why a connection could not be opened, for the errors of calls.
    pub fn connection_failed(&mut self, connection: ConnectionId, reason: String, now: Moment) {
        if self.connection() == Some(connection) {
            self.obstacle = Some(reason);
            self.lose(now);
        }
    }

    /// Records that the coordinator refuses this process for a reason that further attempts do not
    /// mend. Calls of a process without a session fail at once.
    pub fn connection_refused(
        &mut self,
        connection: ConnectionId,
        reason: String,
        now: Moment,
        effects: &mut Vec<AgentEffect>,
    ) {
        match self.connection() == Some(connection) && self.world.is_none() {
            true => self.end(reason, effects),
            false => self.connection_failed(connection, reason, now),
        }
    }

    fn connection(&self) -> Option<ConnectionId> {
        match self.control {
            Control::Connecting { connection, .. }
            | Control::Registering { connection, .. }
            | Control::Registered { connection } => Some(connection),
            Control::Waiting { .. } | Control::Ended(_) => None,
        }
    }

    fn lose(&mut self, now: Moment) {
        if self.is_registered() {
            self.no_session_since = Some(now);
        }
        let until = self.backoff.failed(now, now, &self.limits.reconnects);
        self.control = Control::Waiting { until };
    }

    /// Closes the connection and waits before the next attempt.
    fn reconnect(&mut self, now: Moment, effects: &mut Vec<AgentEffect>) {
        if let Some(connection) = self.connection() {
            effects.push(AgentEffect::Close(connection));
        }
        self.lose(now);
    }

    fn end(&mut self, reason: String, effects: &mut Vec<AgentEffect>) {
        if let Some(connection) = self.connection() {
            effects.push(AgentEffect::Close(connection));
        }
        self.control = Control::Ended(reason);
        self.peers.clear();
        self.fail_all(effects);
        self.flush(effects);
    }

    fn fail_all(&mut self, effects: &mut Vec<AgentEffect>) {
        let error = self.unavailable();
        for call in self.calls.take_all(self.patient()) {
            effects.push(AgentEffect::Finished { call, outcome: Err(error.clone()) });
        }
        for group in self.groups.values_mut() {
            group.is_joining = false;
        }
    }

    /// Returns the event that calls await for their whole limit: a new agent waits for its session,
    /// because its coordinator may start later.
    fn patient(&self) -> Option<Awaited> {
        let is_new = self.world.is_none() && !matches!(self.control, Control::Ended(_));
        is_new.then_some(Awaited::Session)
    }

    fn unavailable(&self) -> CallError {
        CallError::Unavailable(match &self.control {
            Control::Ended(reason) => reason.clone(),
            _ => {
                let text = "the coordinator does not respond; the process of rank 0 may have ended";
                self.with_obstacle(text)
            }
        })
    }

    fn with_obstacle(&self, text: &str) -> String {
        self.obstacle.as_ref().map_or_else(|| text.to_owned(), |obstacle| format!("{text}: {obstacle}"))
    }

    /// Returns whether calls fail at once.
    fn is_unavailable(&self, now: Moment) -> bool {
        matches!(self.control, Control::Ended(_))
            || self.no_session_since.is_some_and(|since| since.after(self.limits.outage) <= now)
    }

    /// Processes a message of the coordinator.
    pub fn receive(
        &mut self,
        connection: ConnectionId,
        message: ToAgent,
        now: Moment,
        effects: &mut Vec<AgentEffect>,
    ) {
        if self.connection() != Some(connection) {
            return;
        }
        self.last_received = now;
        match message {
            ToAgent::Registered { world, incarnation } => {
                self.registered(connection, world, incarnation, now, effects);
            }
            ToAgent::Refused { reason, may_retry: true } => {
                tracing::debug!(rank = %self.rank, reason, "registration refused");
                self.no_session_since = Some(now);
                self.obstacle = Some(reason);
                self.reconnect(now, effects);
            }
            ToAgent::Refused { reason, may_retry: false } => {
                self.end(format!("the coordinator refuses this process: {reason}"), effects);
            }
            ToAgent::Replaced => {
                let text = format!("another process has taken over the rank. rank={}", self.rank);
                self.end(text, effects);
            }
            ToAgent::HeartbeatTaken => {}
            ToAgent::EvidenceTaken { report } => self.peers.acknowledged(report),
            ToAgent::Ranks(ranks) => self.peers.update(ranks, now),
            ToAgent::Suspects(suspects) => {
                for (rank, incarnation) in suspects {
                    let info = self.peers.info(rank).filter(|info| info.incarnation == incarnation);
                    effects.extend(info.cloned().map(AgentEffect::Probe));
                }
            }
            ToAgent::View { group, view } => self.view_received(group, view, effects),
            ToAgent::Ready(id) => {
                if let Some(key) = self.keys.get(&id).copied()
                    && let Some(group) = self.groups.get_mut(&key)
                {
                    group.is_ready = true;
                    self.finish_waiters(Awaited::Ready(key), &Ok(CallValue::Done), effects);
                }
            }
            ToAgent::Response { id, response } => self.responded(id, response, now, effects),
        }
        self.flush(effects);
    }

    fn registered(
        &mut self,
        connection: ConnectionId,
        world: WorldId,
        incarnation: u64,
        now: Moment,
        effects: &mut Vec<AgentEffect>,
    ) {
        if !matches!(self.control, Control::Registering { .. }) {
            return;
        }
        if self.world.is_some_and(|own| own != world) && !self.planted.has(Bug::OtherCoordinator) {
            self.end("the coordinator was replaced by another one".to_owned(), effects);
            return;
        }
        self.world = Some(world);
        self.control = Control::Registered { connection };
        self.backoff.worked();
        self.no_session_since = None;
        self.obstacle = None;
        self.next_heartbeat = now.after(self.limits.heartbeat);
        if self.planted.has(Bug::EvidenceLost) {
            self.peers.acknowledged(u64::MAX);
        }
        self.peers.send_again();
        if self.incarnation.replace(incarnation).is_some_and(|before| before != incarnation) {
            self.peers.reset(now);
            self.begin_again(now);
        }
        // Reports go first: a request to reconcile is about them.
        self.flush(effects);
        for (id, open) in &self.calls.requests {
            let message = ToCoordinator::Request { id: *id, request: open.request.clone() };
            effects.push(AgentEffect::Send { connection, message });
        }
        self.finish_waiters(Awaited::Session, &Ok(CallValue::Done), effects);
    }

    /// Registers all groups again, before the requests that wait, because the coordinator has ended
    /// the session before.
    fn begin_again(&mut self, now: Moment) {
        let before = std::mem::take(&mut self.calls.requests);
        for group in self.groups.values().filter(|group| group.lost.is_none()) {
            self.calls.add(Request::Reattach(group.id), None, now);
            if let Some(endpoint) = group.endpoint.clone() {
                self.calls.add(Request::PublishEndpoint { group: group.id, endpoint }, None, now);
            }
            if group.is_joining {
                self.calls.add(Request::ConfirmReady(group.id), None, now);
            }
        }
        for (_, open) in before {
            let is_repeated = matches!(
                open.request,
                Request::Reattach(_) | Request::PublishEndpoint { .. } | Request::ConfirmReady(_)
            );
            if !is_repeated {
                self.calls.add(open.request, open.call, open.deadline);
            }
        }
    }

    fn view_received(&mut self, id: GroupId, view: Arc<View>, effects: &mut Vec<AgentEffect>) {
        let Some(key) = self.keys.get(&id).copied() else { return };
        let Some(group) = self.groups.get_mut(&key) else { return };
        let epoch = view.epoch;
        match group.apply(view, self.planted) {
            Application::Applied => {
                let is_active = self.incarnation.is_some_and(|own| group.is_active(own));
                group.was_active |= is_active;
                group.is_joining &= !is_active;
                if group.was_active
                    && let Some(view) = group.view.clone()
                {
                    effects.push(AgentEffect::ViewChanged { group: key, view });
                }
                if is_active {
                    self.finish_waiters(Awaited::Active(key), &Ok(CallValue::Done), effects);
                }
            }
            Application::Known => {}
            Application::Contradicts => {
                tracing::error!(generation = id.0, epoch, "two views have the same epoch");
                return;
            }
        }
        let epoch = self.groups.get(&key).map_or(0, LocalGroup::epoch);
        self.send(ToCoordinator::Applied { group: id, epoch }, effects);
    }

    fn responded(&mut self, id: RequestId, response: Response, now: Moment, effects: &mut Vec<AgentEffect>) {
        let Some(open) = self.calls.requests.remove(&id) else { return };
        let outcome = match (&open.request, response) {
            (Request::RegisterGroup(_), Response::Attached { group, slot }) => {
                if open.call.is_none() {
                    self.request(Request::UnregisterGroup(group), None, now, now, effects);
                    return;
                }
                self.last_key += 1;
                let key = GroupKey(self.last_key);
                self.groups.insert(key, LocalGroup::new(group, slot));
                self.keys.insert(group, key);
                Ok(CallValue::Registered { group: key, slot })
            }
            (Request::Reattach(group) | Request::ConfirmReady(group), Response::Refused(reason)) => {
                self.lose_group(*group, reason, effects);
                return;
            }
            (Request::Sync(group), Response::Synced { is_reconciled, epoch }) => {
                let key = self.keys.get(group);
                let view = key.and_then(|key| self.groups.get(key)?.view.clone());
                match view.filter(|view| view.epoch >= epoch) {
                    Some(view) => Ok(CallValue::Synced { is_reconciled, view }),
                    None => Err(CallError::Refused("the group has no view yet".to_owned())),
                }
            }
            (_, Response::Proposed(outcome)) => Ok(CallValue::Proposed(outcome)),
            (_, Response::Refused(reason)) => {
                tracing::debug!(rank = %self.rank, reason, "request refused");
                Err(CallError::Refused(reason))
            }
            _ => Ok(CallValue::Done),
        };
        if let Some(call) = open.call {
            effects.push(AgentEffect::Finished { call, outcome });
        }
    }

    /// Records that the coordinator does not know a registration any more.
    fn lose_group(&mut self, id: GroupId, reason: String, effects: &mut Vec<AgentEffect>) {
        let Some(key) = self.keys.get(&id).copied() else { return };
        if let Some(group) = self.groups.get_mut(&key) {
            group.lost = Some(reason.clone());
            group.is_joining = false;
        }
        for awaited in [Awaited::Ready(key), Awaited::Active(key)] {
            self.finish_waiters(awaited, &Err(CallError::Refused(reason.clone())), effects);
        }
    }

    fn finish_waiters(
        &mut self,
        awaited: Awaited,
        outcome: &Result<CallValue, CallError>,
        effects: &mut Vec<AgentEffect>,
    ) {
        for call in self.calls.take_waiters(awaited) {
            effects.push(AgentEffect::Finished { call, outcome: outcome.clone() });
        }
    }

    fn send(&self, message: ToCoordinator, effects: &mut Vec<AgentEffect>) {
        if let Control::Registered { connection } = self.control {
            effects.push(AgentEffect::Send { connection, message });
        }
    }

    /// Sends new reports, and passes on the actions of the links.
    fn flush(&mut self, effects: &mut Vec<AgentEffect>) {
        for action in self.peers.actions.drain(..) {
            effects.push(match action {
                LinkAction::Open(attempt, info) => AgentEffect::OpenLink(attempt, info),
                LinkAction::Close(attempt) => AgentEffect::CloseLink(attempt),
            });
        }
        if let Control::Registered { connection } = self.control
            && let Some((report, links)) = self.peers.take_unsent()
        {
            let message = ToCoordinator::Evidence { report, links };
            effects.push(AgentEffect::Send { connection, message });
        }
    }

    /// Records that a link is open.
    pub fn link_opened(&mut self, attempt: LinkAttempt, effects: &mut Vec<AgentEffect>) {
        self.peers.link_opened(attempt);
        self.flush(effects);
    }

    /// Records that a link could not be opened.
    pub fn link_failed(&mut self, attempt: LinkAttempt, now: Moment, effects: &mut Vec<AgentEffect>) {
        self.peers.link_failed(attempt, now);
        self.flush(effects);
    }

    /// Records that an open link has ended.
    pub fn link_broken(&mut self, attempt: LinkAttempt, now: Moment, effects: &mut Vec<AgentEffect>) {
        self.peers.link_broken(attempt, now);
        self.flush(effects);
    }

    /// Records the outcome of a probe.
    pub fn probed(
        &mut self,
        rank: GlobalRank,
        incarnation: u64,
        is_alive: bool,
        now: Moment,
        effects: &mut Vec<AgentEffect>,
    ) {
        self.peers.observe(rank, incarnation, is_alive, true, now);
        self.flush(effects);
    }

    /// Records an observation of the data plane.
    pub fn report(
        &mut self,
        group: GroupKey,
        slot: Slot,
        incarnation: u64,
        is_up: bool,
        now: Moment,
        effects: &mut Vec<AgentEffect>,
    ) {
        let view = self.view(group);
        let rank = view.and_then(|view| view.members.get(usize::from(slot.0))).map(|member| member.rank);
        if let Some(rank) = rank {
            self.peers.observe(rank, incarnation, is_up, false, now);
            self.flush(effects);
        }
    }

    /// Applies the limits whose time is over.
    pub fn tick(&mut self, now: Moment, effects: &mut Vec<AgentEffect>) {
        // Without a tick for so long, this process was stopped. The messages of that time may wait.
        if self.last_tick.after(self.limits.silence) <= now {
            self.last_received = now;
        }
        self.last_tick = now;
        match self.control {
            Control::Waiting { until } if until <= now => {
                self.last_connection += 1;
                let connection = ConnectionId(self.last_connection);
                self.control = Control::Connecting { connection, since: now };
                effects.push(AgentEffect::Connect(connection));
            }
            Control::Connecting { since, .. } | Control::Registering { since, .. }
                if since.after(self.limits.connect) <= now =>
            {
                self.reconnect(now, effects);
            }
            Control::Registered { .. } if self.last_received.after(self.limits.silence) <= now => {
                self.reconnect(now, effects);
            }
            Control::Registered { .. } if self.next_heartbeat <= now => {
                self.next_heartbeat = now.after(self.limits.heartbeat);
                let unanswered = self.calls.unanswered();
                self.send(ToCoordinator::Heartbeat { unanswered }, effects);
            }
            _ => {}
        }
        for call in self.calls.take_overdue(now) {
            let outcome = Err(CallError::TimedOut(self.with_obstacle("no response in time")));
            effects.push(AgentEffect::Finished { call, outcome });
        }
        if self.is_unavailable(now) && self.calls.has_others(self.patient()) {
            self.fail_all(effects);
        }
        self.peers.tick(now);
        self.flush(effects);
    }

    /// Returns the next time at which a limit is over.
    pub fn next_deadline(&self) -> Option<Moment> {
        let control = match self.control {
            Control::Waiting { until } => Some(until),
            Control::Connecting { since, .. } | Control::Registering { since, .. } => {
                Some(since.after(self.limits.connect))
            }
            Control::Registered { .. } => {
                Some(self.next_heartbeat.min(self.last_received.after(self.limits.silence)))
            }
            Control::Ended(_) => None,
        };
        let calls = self.calls.next_deadline();
        let outage = self.no_session_since.filter(|_| self.calls.has_others(self.patient()));
        let outage = outage.map(|since| since.after(self.limits.outage));
        [control, calls, outage, self.peers.next_deadline()].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_stop_of_the_own_process_is_no_silence_of_the_coordinator() {
        let at = |seconds: u64| Moment(seconds * 1_000_000_000);
        let limits = AgentLimits {
            heartbeat: Duration::from_secs(1),
            silence: Duration::from_secs(5),
            ..AgentLimits::default()
        };
        let rng = Rng::seeded(1);
        let mut agent = AgentMachine::new(GlobalRank(0), SessionId(1), String::new(), limits, rng, at(1));
        let mut effects = Vec::new();
        agent.tick(at(1), &mut effects);
        let connection = ConnectionId(1);
        assert_eq!(effects, [AgentEffect::Connect(connection)]);
        agent.connected(connection, at(1), &mut effects);
        let registered = ToAgent::Registered { world: WorldId(1), incarnation: 1 };
        agent.receive(connection, registered, at(1), &mut effects);
        agent.tick(at(2), &mut effects);
        // The process is stopped for ten seconds.
        for second in 12..17 {
            agent.tick(at(second), &mut effects);
            assert!(agent.is_registered(), "at {second} s");
        }
        agent.tick(at(17), &mut effects);
        assert!(!agent.is_registered(), "the coordinator is silent for five seconds");
    }
}
