//! Coordinator of a world: sessions, links, groups and proposals, as a state machine without I/O.
//!
//! Every call takes the current time and appends effects. The owner of the state machine carries
//! them out in order, and calls [`CoordinatorMachine::tick`] no later than
//! [`CoordinatorMachine::next_deadline`] and at least every [`CoordinatorLimits::step`].

mod group;
mod links;
mod outbox;
mod proposals;
mod ranks;
mod reconciliation;
mod registration;
mod running_clock;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mooncake_core::clock::Moment;

pub use self::outbox::Effect;

use self::group::{Group, GroupStage};
use self::links::{LinkMatrix, connected_set};
use self::outbox::Outbox;
use self::proposals::ProposalContext;
use self::ranks::{Arrival, Caller, RankTable, Session};
use self::reconciliation::{Window, present};
use self::registration::GroupTable;
use self::running_clock::RunningClock;
use crate::limits::CoordinatorLimits;
use crate::planted::{Bug, Planted};
use crate::protocol::{
    ConnectionId, GroupId, LinkEvidence, MAX_ENDPOINT, MAX_NAME, Request, Response, SessionId, ToAgent,
    ToCoordinator, WorldId,
};
use crate::rank_set::RankSet;
use crate::view::{GlobalRank, MAX_RANKS, MemberState, Slot, View};

/// Coordinator of a world.
#[derive(Debug)]
pub struct CoordinatorMachine {
    world: WorldId,
    limits: CoordinatorLimits,
    clock: RunningClock,
    now: Moment,
    ranks: RankTable,
    links: LinkMatrix,
    /// True if a link has changed since the set of healthy ranks was computed.
    links_changed: bool,
    groups: GroupTable,
    window: Option<Window>,
    outbox: Outbox,
    planted: Planted,
}

impl CoordinatorMachine {
    /// Creates the coordinator of a world without processes.
    pub fn new(world: WorldId, limits: CoordinatorLimits, now: Moment) -> Self {
        Self::with_bug(world, limits, now, Planted::default())
    }

    /// Creates a coordinator with a planted bug.
    #[cfg(any(test, feature = "testkit"))]
    pub fn planted(world: WorldId, limits: CoordinatorLimits, now: Moment, planted: Planted) -> Self {
        Self::with_bug(world, limits, now, planted)
    }

    fn with_bug(world: WorldId, limits: CoordinatorLimits, now: Moment, planted: Planted) -> Self {
        Self {
            world,
            clock: RunningClock::new(now, limits.step),
            limits,
            now,
            ranks: RankTable::new(planted),
            links: LinkMatrix::new(),
            links_changed: false,
            groups: GroupTable::new(planted),
            window: None,
            outbox: Outbox::default(),
            planted,
        }
    }

    /// Sets the length of the windows that open from now on.
    pub fn set_window(&mut self, window: Duration) {
        self.limits.window = window;
    }

    /// Processes a message.
    pub fn receive(
        &mut self,
        connection: ConnectionId,
        message: ToCoordinator,
        now: Moment,
        effects: &mut Vec<Effect>,
    ) {
        self.advance_clock(now);
        if let ToCoordinator::Register { rank, session, world, address } = message {
            self.register(connection, rank, session, world, address);
        } else if let Some(rank) = self.ranks.rank_of(connection) {
            if let Some(session) = self.ranks.session_mut(rank) {
                session.last_message = self.now;
            }
            self.receive_from(rank, message);
        } else {
            // The connection was replaced, or its session has ended.
            self.outbox.close(connection);
        }
        self.settle();
        self.outbox.drain_into(effects);
    }

    /// Records the loss of a connection.
    pub fn connection_lost(&mut self, connection: ConnectionId, now: Moment, effects: &mut Vec<Effect>) {
        self.advance_clock(now);
        self.ranks.lose(connection, self.now);
        self.settle();
        self.outbox.drain_into(effects);
    }

    /// Applies the limits whose time is over.
    pub fn tick(&mut self, now: Moment, effects: &mut Vec<Effect>) {
        self.advance_clock(now);
        let limit = self.limits.heartbeat;
        let silent: RankSet = self
            .ranks
            .iter()
            .filter(|(_, session)| session.last_message.after(limit) <= self.now)
            .map(|(rank, _)| rank)
            .collect();
        for rank in silent.iter() {
            self.end_session(rank);
        }
        self.settle();
        self.outbox.drain_into(effects);
    }

    /// Returns the next time at which a limit is over.
    pub fn next_deadline(&self) -> Option<Moment> {
        let heartbeats =
            self.ranks.iter().map(|(_, session)| session.last_message.after(self.limits.heartbeat)).min();
        let window = self.window.as_ref().map(|w| w.next_deadline(&self.ranks, self.now, &self.limits));
        let groups = self.groups.groups.values();
        let proposals =
            groups.filter_map(|group| proposals::next_deadline(group, &self.limits, self.now)).min();
        let all = [heartbeats, window, proposals, self.groups.next_deadline()];
        all.into_iter().flatten().min().map(|moment| self.clock.real(moment))
    }

    /// Returns the world.
    pub fn world(&self) -> WorldId {
        self.world
    }

    /// Returns the present view of every group.
    pub fn views(&self) -> impl Iterator<Item = (GroupId, &Arc<View>)> {
        self.groups.groups.values().map(|group| (group.id, &group.view))
    }

    /// Returns whether failed ranks leave the active set of a group without a proposal.
    pub fn is_auto_deactivated(&self, group: GroupId) -> bool {
        let group = self.groups.groups.get(&group);
        group.is_some_and(|group| group.auto_deactivate && group.stage == GroupStage::Ready)
    }

    /// Returns the incarnation of a rank, and whether it has a session.
    pub fn incarnation(&self, rank: GlobalRank) -> (u64, bool) {
        let record = self.ranks.record(rank);
        (record.incarnation, record.session.is_some())
    }

    /// Returns the ranks that are connected to each other.
    pub fn healthy(&self) -> RankSet {
        self.ranks.healthy
    }

    /// Returns the ranks with a session.
    pub fn online(&self) -> RankSet {
        self.ranks.online()
    }

    /// Returns the ranks with a session that have a connection now.
    pub fn connected(&self) -> RankSet {
        self.ranks.iter().filter(|(_, session)| session.connection.is_some()).map(|(rank, _)| rank).collect()
    }

    /// Returns whether a reconciliation window is open.
    pub fn has_window(&self) -> bool {
        self.window.is_some()
    }

    fn advance_clock(&mut self, now: Moment) {
        self.now = if self.planted.has(Bug::PauseCountsAsSilence) { now } else { self.clock.advance(now) };
    }

    fn register(
        &mut self,
        connection: ConnectionId,
        rank: GlobalRank,
        session: SessionId,
        world: Option<WorldId>,
        address: String,
    ) {
        let refusal = if usize::from(rank.0) >= MAX_RANKS || address.len() > MAX_NAME {
            Some((format!("rank or address is out of range. rank={rank}"), false))
        } else if world.is_some_and(|world| world != self.world) && !self.planted.has(Bug::OtherCoordinator) {
            Some(("this coordinator is not the one of the process".to_owned(), false))
        } else if self.ranks.rank_of(connection).is_some() {
            Some(("the connection has a session".to_owned(), false))
        } else {
            let other = self.ranks.session(rank).filter(|current| current.id != session);
            // The first message of a process that has ended may arrive after that of its successor.
            let is_new = |current: &Session| self.now < current.began.after(self.limits.reconnection);
            let is_taken = other.is_some_and(|current| self.ranks.healthy.contains(rank) || is_new(current));
            is_taken.then(|| (format!("another process has the rank. rank={rank}"), true))
        };
        if let Some((reason, may_retry)) = refusal {
            self.outbox.send(Some(connection), ToAgent::Refused { reason, may_retry });
            self.outbox.close(connection);
            return;
        }
        match self.ranks.session(rank) {
            Some(current) if current.id == session => {
                if let Some(before) = self.ranks.resume(rank, connection, self.now) {
                    self.outbox.close(before);
                }
            }
            current => {
                if let Some(before) = current.and_then(|current| current.connection) {
                    self.outbox.send(Some(before), ToAgent::Replaced);
                }
                self.end_session(rank);
                self.begin_session(connection, rank, session, address);
            }
        }
        self.send_state(connection, rank);
    }

    fn begin_session(
        &mut self,
        connection: ConnectionId,
        rank: GlobalRank,
        session: SessionId,
        address: String,
    ) {
        self.links.forget(rank);
        self.ranks.begin(rank, session, address, connection, self.now);
        if !self.planted.has(Bug::ReplacedSessionKeepsSlots) {
            for group in self.groups.groups.values_mut() {
                group.incarnation_began(rank, session);
            }
        }
        self.groups.remove_abandoned();
    }

    /// Sends all that a new connection needs.
    fn send_state(&mut self, connection: ConnectionId, rank: GlobalRank) {
        let incarnation = self.ranks.record(rank).incarnation;
        let to = Some(connection);
        self.outbox.send(to, ToAgent::Registered { world: self.world, incarnation });
        if !self.ranks.changed {
            self.outbox.send(to, ToAgent::Ranks(self.ranks.infos()));
        }
        for group in self.groups.groups.values() {
            let slot = group.slot_of(rank).and_then(|slot| group.record(slot));
            if slot.is_some_and(|slot| slot.is_registered(&self.ranks)) {
                group.send_to(rank, &self.ranks, &mut self.outbox);
            }
        }
        if let Some(window) = &self.window {
            let suspects = self.suspects(window.targets().without(rank));
            self.outbox.send(to, ToAgent::Suspects(suspects));
        }
    }

    fn receive_from(&mut self, rank: GlobalRank, message: ToCoordinator) {
        let connection = self.ranks.connection(rank);
        match message {
            ToCoordinator::Register { .. } => {}
            ToCoordinator::Heartbeat { unanswered } => {
                self.ranks.received(rank, unanswered);
                self.outbox.send(connection, ToAgent::HeartbeatTaken);
            }
            ToCoordinator::Evidence { report, links } => {
                let Some(session) = self.ranks.session_mut(rank) else { return };
                if report > session.last_report {
                    session.last_report = report;
                    for evidence in links.into_iter().take(MAX_RANKS) {
                        self.take_evidence(rank, evidence);
                    }
                }
                self.outbox.send(connection, ToAgent::EvidenceTaken { report });
            }
            ToCoordinator::Applied { group, epoch } => {
                if let Some((group, slot)) = self.groups.registered(group, rank, &self.ranks)
                    && epoch <= group.view.epoch
                    && let Some(record) = group.slots.get_mut(usize::from(slot.0))
                {
                    record.acknowledged = record.acknowledged.max(epoch);
                }
            }
            ToCoordinator::Request { id, request } => match self.ranks.arrived(rank, id) {
                Arrival::New(caller) => self.execute(caller, request),
                Arrival::Known(Some(response)) => self.respond_again(rank, id, response),
                Arrival::Known(None) => {}
                Arrival::TooMany(caller) => {
                    let reason = "too many requests wait for a response".to_owned();
                    self.ranks.respond(caller, Response::Refused(reason), &mut self.outbox);
                }
            },
            ToCoordinator::Leave => {
                for group in self.groups.groups.values_mut() {
                    if group.registered(&self.ranks).contains(rank) {
                        group.leave(rank);
                    }
                }
                self.end_session(rank);
                self.groups.remove_abandoned();
            }
        }
    }

    fn respond_again(&mut self, rank: GlobalRank, id: crate::protocol::RequestId, response: Response) {
        let attached = match &response {
            Response::Attached { group, .. } => Some(*group),
            _ => None,
        };
        self.outbox.send(self.ranks.connection(rank), ToAgent::Response { id, response });
        // The agent did not know the group when its view was sent.
        if let Some((group, _)) = attached.and_then(|id| self.groups.registered(id, rank, &self.ranks)) {
            group.send_to(rank, &self.ranks, &mut self.outbox);
        }
    }

    fn take_evidence(&mut self, from: GlobalRank, evidence: LinkEvidence) {
        let LinkEvidence { rank: to, incarnation, is_up } = evidence;
        if usize::from(to.0) >= MAX_RANKS || (from == to && !is_up) {
            return;
        }
        let record = self.ranks.record(to);
        let is_current = record.session.is_some() && record.incarnation == incarnation;
        if !is_current && !self.planted.has(Bug::StaleEvidence) {
            return;
        }
        if let Some(window) = &mut self.window {
            window.report(from, to);
        }
        if is_up {
            let counts = self.window.as_mut().is_none_or(|window| window.recover(from, to));
            if counts && self.links.set(from, to, true) {
                self.links_changed = true;
            }
            return;
        }
        self.links.set(from, to, false);
        if self.ranks.healthy.contains(from) && self.ranks.healthy.contains(to) {
            let deadline = self.now.after(self.limits.window);
            let window = self.window.get_or_insert_with(|| Window::new(deadline));
            window.report(from, to);
            if window.accuse(from, to) {
                self.send_suspects(to);
            }
        }
    }

    /// Asks all others to probe an accused rank, so that the window can be closed early.
    fn send_suspects(&mut self, accused: GlobalRank) {
        let suspects = self.suspects([accused].into_iter().collect());
        for rank in self.ranks.healthy.without(accused).iter() {
            self.outbox.send(self.ranks.connection(rank), ToAgent::Suspects(suspects.clone()));
        }
    }

    fn suspects(&self, ranks: RankSet) -> Vec<(GlobalRank, u64)> {
        ranks.iter().map(|rank| (rank, self.ranks.record(rank).incarnation)).collect()
    }

    fn execute(&mut self, caller: Caller, request: Request) {
        match request {
            Request::RegisterGroup(spec) => {
                let deadline = self.now.after(self.limits.extension);
                let response = self.groups.register(caller, spec, deadline, &self.ranks);
                if let Some(response) = response {
                    self.attached(caller, response);
                    let others = self.groups.serve_waiting(self.now, &self.ranks);
                    for (other, response) in others {
                        self.attached(other, response);
                    }
                }
            }
            Request::Reattach(group) => {
                let response = self.groups.reattach(caller, group, &self.ranks);
                self.attached(caller, response);
            }
            Request::UnregisterGroup(id) => {
                if let Some((group, _)) = self.groups.registered(id, caller.rank, &self.ranks) {
                    group.leave(caller.rank);
                    self.groups.remove_abandoned();
                }
                self.ranks.respond(caller, Response::Done, &mut self.outbox);
            }
            Request::PublishEndpoint { group, endpoint } => {
                let response = self.publish_endpoint(caller, group, endpoint);
                self.ranks.respond(caller, response, &mut self.outbox);
            }
            Request::ConfirmReady(id) => {
                let response = match self.groups.registered(id, caller.rank, &self.ranks) {
                    None => unregistered("join", id),
                    Some((group, slot)) => {
                        let record = group.slots.get_mut(usize::from(slot.0));
                        if let Some(record) = record.filter(|r| r.state == MemberState::Inactive) {
                            record.state = MemberState::AwaitingActivation;
                            group.is_dirty = true;
                        }
                        Response::Done
                    }
                };
                self.ranks.respond(caller, response, &mut self.outbox);
            }
            Request::Propose { group, change, slots } => self.propose(caller, group, change, slots),
            Request::Sync(id) => match self.groups.registered(id, caller.rank, &self.ranks) {
                None => self.ranks.respond(caller, unregistered("sync", id), &mut self.outbox),
                Some((group, _)) => match &mut self.window {
                    Some(window) => window.syncs.push((caller, id)),
                    None => {
                        let epoch = group.publish(&self.ranks, self.planted, &mut self.outbox);
                        let response = Response::Synced { is_reconciled: false, epoch };
                        self.ranks.respond(caller, response, &mut self.outbox);
                    }
                },
            },
        }
    }

    /// Responds to a registration, and sends the state of the group.
    fn attached(&mut self, caller: Caller, response: Response) {
        let id = match &response {
            Response::Attached { group, .. } => Some(*group),
            _ => None,
        };
        // Others learn of the new slot by the view that follows; this process gets the same one.
        if let Some(group) = id.and_then(|id| self.groups.groups.get_mut(&id)) {
            self.ranks.respond(caller, response, &mut self.outbox);
            group.publish(&self.ranks, self.planted, &mut self.outbox);
            group.send_to(caller.rank, &self.ranks, &mut self.outbox);
        } else {
            self.ranks.respond(caller, response, &mut self.outbox);
        }
    }

    fn publish_endpoint(&mut self, caller: Caller, id: GroupId, endpoint: Bytes) -> Response {
        if endpoint.len() > MAX_ENDPOINT {
            let length = endpoint.len();
            return Response::Refused(format!(
                "cannot publish endpoint: it is too long. length={length} maximum={MAX_ENDPOINT}"
            ));
        }
        let Some((group, slot)) = self.groups.registered(id, caller.rank, &self.ranks) else {
            return unregistered("publish endpoint", id);
        };
        if let Some(record) = group.slots.get_mut(usize::from(slot.0)) {
            record.endpoint = Some(endpoint);
            group.is_dirty = true;
        }
        Response::Done
    }

    fn propose(&mut self, caller: Caller, id: GroupId, change: crate::protocol::Change, slots: Vec<Slot>) {
        let (groups, mut context) = self.proposing();
        match groups.registered(id, caller.rank, context.ranks) {
            Some((group, _)) => proposals::propose(group, caller, change, slots, &mut context),
            None => context.ranks.respond(caller, unregistered("propose", id), context.outbox),
        }
    }

    /// Returns the groups, and the other parts of the coordinator that their proposals need.
    fn proposing(&mut self) -> (&mut GroupTable, ProposalContext<'_>) {
        let context = ProposalContext {
            ranks: &mut self.ranks,
            links: &self.links,
            limits: &self.limits,
            planted: self.planted,
            now: self.now,
            outbox: &mut self.outbox,
        };
        (&mut self.groups, context)
    }

    /// Ends the session of a rank, if it has one.
    fn end_session(&mut self, rank: GlobalRank) {
        let Some(session) = self.ranks.end(rank) else { return };
        if let Some(connection) = session.connection {
            self.outbox.close(connection);
        }
        self.links.forget(rank);
        self.links_changed = true;
        if let Some(window) = &mut self.window {
            window.forget(rank);
        }
        for group in self.groups.groups.values_mut() {
            group.session_ended(rank);
        }
    }

    /// Carries out everything that the last message or the time has made possible.
    fn settle(&mut self) {
        loop {
            if let Some(window) = &self.window
                && window.is_over(&self.ranks, self.now, &self.limits, self.planted)
            {
                self.close_window();
            }
            if self.window.is_none() && std::mem::take(&mut self.links_changed) {
                self.update_healthy(self.ranks.online());
            }
            let silent = self.advance_groups();
            for rank in silent.iter() {
                self.end_session(rank);
            }
            if silent.is_empty() {
                break;
            }
        }
        if !self.groups.waiting.is_empty() {
            for (caller, response) in self.groups.serve_waiting(self.now, &self.ranks) {
                self.attached(caller, response);
            }
        }
        if std::mem::take(&mut self.ranks.changed) {
            let infos = self.ranks.infos();
            for (_, session) in self.ranks.iter() {
                self.outbox.send(session.connection, ToAgent::Ranks(infos.clone()));
            }
        }
    }

    fn update_healthy(&mut self, preferred: RankSet) {
        let current = self.ranks.healthy;
        let healthy = connected_set(&self.links, self.ranks.online(), current, preferred);
        if healthy != current {
            self.ranks.healthy = healthy;
            for group in self.groups.groups.values_mut() {
                group.is_dirty = true;
                group.deactivate_failed(&self.ranks);
            }
        }
    }

    fn close_window(&mut self) {
        let Some(window) = self.window.take() else { return };
        let present = present(&self.ranks, self.now, &self.limits);
        let before = self.ranks.healthy;
        self.update_healthy(present);
        self.links_changed = false;
        for rank in before.difference(self.ranks.healthy).difference(present).iter() {
            self.end_session(rank);
        }
        for group in self.groups.groups.values_mut() {
            group.publish(&self.ranks, self.planted, &mut self.outbox);
        }
        for (caller, id) in &window.syncs {
            let epoch = self.groups.groups.get(id).map(|group| group.view.epoch);
            let response = epoch.map_or_else(
                || unregistered("sync", *id),
                |epoch| Response::Synced { is_reconciled: true, epoch },
            );
            self.ranks.respond(*caller, response, &mut self.outbox);
        }
        for (from, to) in window.recovered() {
            self.links_changed |= self.links.set(from, to, true);
        }
    }

    /// Continues bootstraps and proposals, and sends changed views. Returns the ranks that did not
    /// acknowledge a view in time.
    fn advance_groups(&mut self) -> RankSet {
        let mut silent = RankSet::EMPTY;
        let (groups, mut context) = self.proposing();
        for group in groups.groups.values_mut() {
            if !needs_attention(group) {
                continue;
            }
            group.advance_bootstrap(context.ranks, context.planted, context.outbox);
            silent = silent.union(proposals::advance(group, &mut context));
            group.publish(context.ranks, context.planted, context.outbox);
        }
        silent
    }
}

fn needs_attention(group: &Group) -> bool {
    group.is_dirty || group.stage != GroupStage::Ready || !group.proposals.is_empty()
}

fn unregistered(action: &str, id: GroupId) -> Response {
    Response::Refused(format!("cannot {action}: this process is not registered. generation={}", id.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_registration_does_not_replace_a_new_session() {
        let at = |millis: u64| Moment((10_000 + millis) * 1_000_000);
        let mut machine = CoordinatorMachine::new(WorldId(1), CoordinatorLimits::default(), at(0));
        let mut register = |connection: u64, session: u64, now: Moment| {
            let message = ToCoordinator::Register {
                rank: GlobalRank(1),
                session: SessionId(session),
                world: None,
                address: String::new(),
            };
            let mut effects = Vec::new();
            machine.receive(ConnectionId(connection), message, now, &mut effects);
            let is_sent = |wanted: fn(&ToAgent) -> bool| {
                effects.iter().any(|effect| matches!(effect, Effect::Send { message, .. } if wanted(message)))
            };
            [
                is_sent(|message| matches!(message, ToAgent::Registered { .. })),
                is_sent(|message| matches!(message, ToAgent::Refused { may_retry: true, .. })),
                is_sent(|message| matches!(message, ToAgent::Replaced)),
            ]
        };
        assert_eq!(register(1, 11, at(0)), [true, false, false]);
        // The message of a process that has ended since.
        assert_eq!(register(2, 10, at(300)), [false, true, false]);
        assert_eq!(register(3, 12, at(600)), [true, false, true]);
    }
}
