//! Simulated time, network and faults.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use mooncake_core::backoff::Pace;
use mooncake_core::clock::{Moment, Rng};
use mooncake_pg::agent::{AgentEffect, AgentMachine, CallId, LinkAttempt};
use mooncake_pg::coordinator::{CoordinatorMachine, Effect};
use mooncake_pg::limits::{AgentLimits, CoordinatorLimits};
use mooncake_pg::planted::Planted;
use mooncake_pg::protocol::{
    ConnectionId, ProposalOutcome, RankInfo, Request, Response, ToAgent, ToCoordinator, WorldId,
};
use mooncake_pg::rank_set::RankSet;
use mooncake_pg::view::{GlobalRank, Slot};

use crate::checks::{Checks, FailedProcess};
use crate::network::{Connection, OpenLink, Partitions};
use crate::process::{PendingCall, Process, Proposed};

/// True if events are printed.
pub(crate) static TRACE: AtomicBool = AtomicBool::new(false);

macro_rules! trace {
    ($simulation:expr, $($format:tt)*) => {
        if $crate::world::TRACE.load(std::sync::atomic::Ordering::Relaxed) {
            println!("{:>10.4} {}", $simulation.now.0 as f64 / 1e9 - 1.0, format!($($format)*));
        }
    };
}
pub(crate) use trace;

/// Event of the simulation.
#[derive(Debug)]
pub(crate) enum Event {
    ToCoordinator(u64, ToCoordinator),
    CoordinatorLost(u64),
    CoordinatorTick(Moment),
    ToAgent(u64, ToAgent),
    AgentConnected(u64),
    AgentLost(u64),
    AgentTick(u8, u64, Moment),
    LinkDecided(u8, u64, LinkAttempt, RankInfo, bool),
    LinkBroken(u8, u64, LinkAttempt),
    Probed(u8, u64, RankInfo, bool),
    /// An operation of the data plane begins.
    Operation(u8, u64, usize),
    /// An operation has waited long enough for slow processes.
    Timeout(u8, u64, usize, u64, Vec<(Slot, u64)>),
    /// The program tries again to register or to join.
    Retry(u8, u64, usize),
    Fault,
    Resume(u8, u64),
    Restart(u8),
    Watch,
}

#[derive(Debug)]
struct Scheduled {
    at: Moment,
    number: u64,
    event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

/// Faults of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Scenario {
    /// All faults.
    General,
    /// A killed process and nothing else.
    SingleKill,
    /// A stop of the coordinator's process and nothing else.
    CoordinatorPause,
    /// The coordinator's process dies, and another one listens at its address.
    CoordinatorCrash,
    /// All processes create their groups again, over connections that break.
    Recreation,
    /// A process extends one of two groups with one name.
    Twins,
}

/// Names of the two groups of every run.
pub(crate) const NAMES: [&str; 2] = ["cpu:0", "cpu:1"];

/// Run of a seed.
pub(crate) struct Simulation {
    pub(crate) rng: Rng,
    pub(crate) now: Moment,
    queue: BinaryHeap<Scheduled>,
    pub(crate) scheduled: u64,
    pub(crate) scenario: Scenario,
    pub(crate) planted: Planted,
    pub(crate) ranks: u8,
    /// Number of founding ranks of the first group.
    pub(crate) founders: u8,
    pub(crate) auto_deactivate: [bool; 2],
    pub(crate) coordinator: Option<CoordinatorMachine>,
    pub(crate) coordinator_limits: CoordinatorLimits,
    pub(crate) agent_limits: AgentLimits,
    pub(crate) coordinator_tick: Option<Moment>,
    /// End of the last stop of the coordinator.
    pub(crate) coordinator_resumes: Moment,
    pub(crate) processes: Vec<Option<Process>>,
    pub(crate) last_process: u64,
    /// Ranks that have had a process.
    pub(crate) started: RankSet,
    pub(crate) connections: BTreeMap<u64, Connection>,
    pub(crate) last_connection: u64,
    pub(crate) links: Vec<OpenLink>,
    pub(crate) partitions: Partitions,
    pub(crate) checks: Checks,
    pub(crate) calls: BTreeMap<(u64, CallId), PendingCall>,
    pub(crate) failed: Vec<FailedProcess>,
    /// Proposals by process and request, until their first response.
    pub(crate) proposals: BTreeMap<(u64, u64), Option<Proposed>>,
    pub(crate) faults_end: Moment,
    pub(crate) is_over: bool,
    pub(crate) failure: Option<String>,
    pub(crate) effects: Vec<Effect>,
}

pub(crate) fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

impl Simulation {
    pub(crate) fn new(seed: u64, planted: Planted) -> Self {
        let mut rng = Rng::seeded(seed);
        let scenario = match seed % 16 {
            0 => Scenario::SingleKill,
            1 => Scenario::CoordinatorPause,
            2 => Scenario::CoordinatorCrash,
            3 => Scenario::Recreation,
            4 => Scenario::Twins,
            _ => Scenario::General,
        };
        let most = if rng.below(8) == 0 { 8 } else { 5 };
        let ranks = rng.range(3..most + 1) as u8;
        let is_extended = matches!(scenario, Scenario::General) && rng.below(2) == 0;
        let founders = if is_extended { rng.range(1..u64::from(ranks)) as u8 } else { ranks };
        let window = if scenario == Scenario::SingleKill { 10 } else { rng.range(1..7) };
        let coordinator_limits = CoordinatorLimits {
            heartbeat: seconds(6),
            window: seconds(window),
            acknowledgement: seconds(4),
            activation: seconds(4),
            queue: seconds(8),
            extension: seconds(4),
            reconnection: Duration::from_millis(500),
            step: seconds(2),
        };
        let agent_limits = AgentLimits {
            heartbeat: seconds(1),
            silence: seconds(3),
            outage: seconds(5),
            connect: seconds(2),
            request: seconds(10),
            proposal: seconds(16),
            sync: seconds(10),
            ready: seconds(60),
            join: seconds(60),
            probe: seconds(1),
            links: Pace { first: seconds(1), max: seconds(4) },
            reconnects: Pace { first: Duration::from_millis(100), max: seconds(1) },
        };
        let agent_limits = agent_limits.for_window(seconds(window));
        let now = Moment(1_000_000_000);
        let length = rng.range(10..30);
        let auto_deactivate = [scenario != Scenario::General || rng.below(4) > 0, rng.below(2) == 0];
        let mut simulation = Self {
            now,
            queue: BinaryHeap::new(),
            scheduled: 0,
            scenario,
            planted,
            ranks,
            founders,
            auto_deactivate,
            coordinator: None,
            coordinator_limits,
            agent_limits,
            coordinator_tick: None,
            coordinator_resumes: now,
            processes: std::iter::repeat_with(|| None).take(usize::from(ranks)).collect(),
            last_process: 0,
            started: RankSet::EMPTY,
            connections: BTreeMap::new(),
            last_connection: 0,
            links: Vec::new(),
            partitions: Partitions::default(),
            checks: Checks::default(),
            calls: BTreeMap::new(),
            failed: Vec::new(),
            proposals: BTreeMap::new(),
            faults_end: now.after(seconds(length)),
            is_over: false,
            failure: None,
            effects: Vec::new(),
            rng,
        };
        simulation.start_coordinator();
        for rank in 0..ranks {
            let after = match (scenario, rank) {
                (Scenario::Twins, 2..) => simulation.millis(3000..6000),
                _ if rank < founders => simulation.millis(0..300),
                _ => simulation.millis(0..9000),
            };
            simulation.after(after, Event::Restart(rank));
        }
        simulation.after(seconds(1), Event::Watch);
        let first = if scenario == Scenario::General { 300..4000 } else { 3000..6000 };
        let first = simulation.millis(first);
        simulation.after(first, Event::Fault);
        simulation
    }

    pub(crate) fn run(mut self) -> Result<(), String> {
        // A run without an end is a bug of the simulation or a busy loop of a state machine.
        for _ in 0..400_000 {
            let Some(Scheduled { at, event, .. }) = self.queue.pop() else { break };
            self.now = self.now.max(at);
            self.dispatch(event);
            if let Some(failure) = self.failure.take() {
                return Err(format!("{:?} at {:.3} s: {failure}", self.scenario, self.seconds()));
            }
            if self.is_over {
                return Ok(());
            }
        }
        Err(format!("{:?} does not end", self.scenario))
    }

    fn seconds(&self) -> f64 {
        self.now.0 as f64 / 1e9 - 1.0
    }

    pub(crate) fn millis(&mut self, range: std::ops::Range<u64>) -> Duration {
        Duration::from_micros(self.rng.range(range.start * 1000..range.end * 1000))
    }

    pub(crate) fn delay(&mut self) -> Duration {
        let most = if self.rng.below(16) == 0 { 300_000 } else { 5000 };
        Duration::from_micros(self.rng.range(100..most))
    }

    pub(crate) fn after(&mut self, time: Duration, event: Event) {
        self.at(self.now.after(time), event);
    }

    pub(crate) fn at(&mut self, at: Moment, event: Event) {
        self.scheduled += 1;
        self.queue.push(Scheduled { at, number: self.scheduled, event });
    }

    pub(crate) fn fail(&mut self, reason: impl Into<String>) {
        self.failure.get_or_insert(reason.into());
    }

    pub(crate) fn verify(&mut self, result: Result<(), String>) {
        if let Err(reason) = result {
            self.fail(reason);
        }
    }

    /// Returns the process of a rank, unless it is another one than the event is for.
    pub(crate) fn process(&mut self, rank: u8, id: u64) -> Option<&mut Process> {
        self.processes[usize::from(rank)].as_mut().filter(|process| process.id == id)
    }

    /// Returns the rank and the process that an event is for.
    fn recipient(&self, event: &Event) -> Option<(u8, u64)> {
        match event {
            Event::ToCoordinator(..) | Event::CoordinatorLost(_) | Event::CoordinatorTick(_) => {
                Some((0, self.processes[0].as_ref()?.id))
            }
            Event::ToAgent(connection, _)
            | Event::AgentConnected(connection)
            | Event::AgentLost(connection) => {
                let connection = self.connections.get(connection)?;
                Some((connection.rank, connection.process))
            }
            Event::AgentTick(rank, id, _)
            | Event::LinkDecided(rank, id, ..)
            | Event::LinkBroken(rank, id, _)
            | Event::Probed(rank, id, ..)
            | Event::Operation(rank, id, _)
            | Event::Timeout(rank, id, ..)
            | Event::Retry(rank, id, _) => Some((*rank, *id)),
            Event::Fault | Event::Resume(..) | Event::Restart(_) | Event::Watch => None,
        }
    }

    pub(crate) fn dispatch(&mut self, event: Event) {
        if let Some((rank, id)) = self.recipient(&event)
            && let Some(process) = self.process(rank, id)
            && process.is_paused
        {
            process.backlog.push(event);
            return;
        }
        match event {
            Event::ToCoordinator(connection, message) => self.arrive_at_coordinator(connection, message),
            Event::CoordinatorLost(connection) => {
                let Some(it) = self.connections.get_mut(&connection) else { return };
                it.is_cut = true;
                if !std::mem::replace(&mut it.is_closed_by_coordinator, true) {
                    let now = self.now;
                    self.coordinate(|machine, effects| {
                        machine.connection_lost(ConnectionId(connection), now, effects);
                    });
                }
            }
            Event::CoordinatorTick(at) => {
                if self.coordinator_tick == Some(at) {
                    self.coordinator_tick = None;
                    let now = self.now;
                    self.coordinate(|machine, effects| machine.tick(now, effects));
                }
            }
            Event::ToAgent(connection, message) => self.arrive_at_agent(connection, message),
            Event::AgentConnected(connection) => {
                self.with_connection(connection, |agent, at_agent, now, effects| {
                    agent.connected(at_agent, now, effects);
                });
            }
            Event::AgentLost(connection) => {
                self.with_connection(connection, |agent, at_agent, now, _| {
                    agent.connection_lost(at_agent, now);
                });
            }
            Event::AgentTick(rank, id, at) => {
                let Some(process) = self.process(rank, id) else { return };
                if process.tick_at == Some(at) {
                    process.tick_at = None;
                    self.with_agent(rank, id, |agent, now, effects| agent.tick(now, effects));
                }
            }
            Event::LinkDecided(rank, id, attempt, info, is_late) => {
                self.decide_link(rank, id, attempt, info, is_late);
            }
            Event::LinkBroken(rank, id, attempt) => {
                self.links.retain(|link| !(link.process == id && link.attempt == attempt));
                self.with_agent(rank, id, |agent, now, effects| agent.link_broken(attempt, now, effects));
            }
            Event::Probed(rank, id, info, is_late) => self.decide_probe(rank, id, info, is_late),
            Event::Operation(rank, id, group) => self.operate(rank, id, group),
            Event::Timeout(rank, id, group, mask, slow) => self.time_out(rank, id, group, mask, slow),
            Event::Retry(rank, id, group) => self.retry(rank, id, group),
            Event::Fault => self.fault(),
            Event::Resume(rank, id) => self.resume(rank, id),
            Event::Restart(rank) => self.start_process(rank),
            Event::Watch => self.watch(),
        }
    }

    pub(crate) fn start_coordinator(&mut self) {
        let world = WorldId(self.rng.next_u64());
        self.checks.begin_world();
        let limits = self.coordinator_limits.clone();
        self.coordinator = Some(CoordinatorMachine::planted(world, limits, self.now, self.planted));
        self.schedule_coordinator();
    }

    fn schedule_coordinator(&mut self) {
        let Some(machine) = &self.coordinator else { return };
        let latest = self.now.after(seconds(1));
        let next = machine.next_deadline().map_or(latest, |next| next.min(latest)).max(self.now);
        if self.coordinator_tick.is_none_or(|tick| next < tick) {
            self.coordinator_tick = Some(next);
            self.at(next, Event::CoordinatorTick(next));
        }
    }

    fn coordinate(&mut self, call: impl FnOnce(&mut CoordinatorMachine, &mut Vec<Effect>)) {
        let mut effects = std::mem::take(&mut self.effects);
        let Some(machine) = &mut self.coordinator else { return };
        let healthy = machine.healthy();
        call(machine, &mut effects);
        if machine.healthy() != healthy {
            trace!(self, "healthy {:?} -> {:?}", healthy, machine.healthy());
            let result = self.checks.healthy(machine);
            self.verify(result);
        }
        for effect in effects.drain(..) {
            match effect {
                Effect::Send { connection, message } => self.send_to_agent(connection.0, message),
                Effect::Close(connection) => {
                    let at = self.now.after(self.delay());
                    let Some(it) = self.connections.get_mut(&connection.0) else { continue };
                    it.is_closed_by_coordinator = true;
                    let at = at.max(it.to_agent).max(self.partitions.control_until(it.rank));
                    self.at(at, Event::AgentLost(connection.0));
                }
            }
        }
        self.effects = effects;
        self.schedule_coordinator();
    }

    fn arrive_at_coordinator(&mut self, connection: u64, message: ToCoordinator) {
        let Some(it) = self.connections.get(&connection) else { return };
        if it.is_cut || it.is_closed_by_coordinator {
            return;
        }
        let (rank, process, now) = (it.rank, it.process, self.now);
        if let ToCoordinator::Request { id, request: Request::Propose { group, change, slots } } = &message {
            let proposed = Proposed { group: *group, change: *change, slots: slots.clone() };
            self.proposals.entry((process, id.0)).or_insert(Some(proposed));
        }
        if !matches!(message, ToCoordinator::Heartbeat { .. }) {
            trace!(self, "{rank} -> c ({connection}) {message:?}");
        }
        self.coordinate(|machine, effects| {
            machine.receive(ConnectionId(connection), message, now, effects);
        });
    }

    fn send_to_agent(&mut self, connection: u64, message: ToAgent) {
        let Some(it) = self.connections.get(&connection) else { return };
        let (rank, process) = (it.rank, it.process);
        if !matches!(message, ToAgent::HeartbeatTaken | ToAgent::Ranks(_)) {
            trace!(self, "c -> {rank} ({connection}) {message:?}");
        }
        self.check_message(rank, process, &message);
        let at = self.now.after(self.delay());
        let blocked = self.partitions.control_until(rank);
        let Some(it) = self.connections.get_mut(&connection) else { return };
        it.to_agent = at.max(it.to_agent).max(blocked);
        let at = it.to_agent;
        self.at(at, Event::ToAgent(connection, message));
    }

    /// Checks a message of the coordinator at the moment at which it is sent.
    fn check_message(&mut self, rank: u8, process: u64, message: &ToAgent) {
        let Some(machine) = &self.coordinator else { return };
        let (incarnation, _) = machine.incarnation(GlobalRank(rank));
        let result = match message {
            ToAgent::Registered { world, incarnation } => {
                self.checks.registered(rank, *incarnation, process, *world)
            }
            ToAgent::View { view, .. } => self.checks.sent(view, machine),
            ToAgent::Response { response: Response::Attached { group, .. }, .. } => {
                self.checks.attached(*group, rank, incarnation, process)
            }
            ToAgent::Response {
                id,
                response: Response::Proposed(ProposalOutcome::Applied { epoch, dropped }),
            } => match self.proposals.get_mut(&(process, id.0)).and_then(Option::take) {
                Some(proposed) => self.check_acknowledged(&proposed, *epoch, dropped),
                None => Ok(()),
            },
            _ => Ok(()),
        };
        self.verify(result);
    }

    /// Checks that the processes of all active slots have applied an activation. `until` is the
    /// epoch at which the coordinator confirmed it: the response may arrive after a later one.
    fn check_acknowledged(&self, proposed: &Proposed, until: u64, dropped: &[Slot]) -> Result<(), String> {
        let Some(machine) = &self.coordinator else { return Ok(()) };
        let view = self.checks.activation(proposed.group, proposed.change, &proposed.slots, until);
        let Some(view) = view else { return Ok(()) };
        for slot in view.active().filter(|slot| !dropped.contains(slot)) {
            let member = &view.members[usize::from(slot.0)];
            if machine.incarnation(member.rank) != (member.incarnation, true) {
                continue;
            }
            let process = self.processes[usize::from(member.rank.0)].as_ref();
            let Some(process) = process.filter(|p| p.agent.incarnation() == Some(member.incarnation)) else {
                continue;
            };
            let key = process.agent.groups().find(|key| {
                process.agent.registration(*key).is_some_and(|(group, _)| group == proposed.group)
            });
            let epoch = key.and_then(|key| process.agent.view(key)).map(|view| view.epoch);
            if key.is_some() && epoch.is_none_or(|epoch| epoch < view.epoch) {
                return Err(format!(
                    "an activation is confirmed though slot {slot} has epoch {epoch:?} instead of {}",
                    view.epoch
                ));
            }
        }
        Ok(())
    }

    pub(crate) fn arrive_at_agent(&mut self, connection: u64, message: ToAgent) {
        let Some(it) = self.connections.get(&connection) else { return };
        if it.is_cut || it.is_closed_by_agent {
            return;
        }
        self.with_connection(connection, |agent, at_agent, now, effects| {
            agent.receive(at_agent, message, now, effects);
        });
    }

    fn with_connection(
        &mut self,
        connection: u64,
        call: impl FnOnce(&mut AgentMachine, ConnectionId, Moment, &mut Vec<AgentEffect>),
    ) {
        let Some(it) = self.connections.get(&connection) else { return };
        let (rank, process, at_agent) = (it.rank, it.process, it.at_agent);
        self.with_agent(rank, process, |agent, now, effects| call(agent, at_agent, now, effects));
    }

    pub(crate) fn with_agent(
        &mut self,
        rank: u8,
        id: u64,
        call: impl FnOnce(&mut AgentMachine, Moment, &mut Vec<AgentEffect>),
    ) {
        let now = self.now;
        let Some(process) = self.process(rank, id) else { return };
        let mut effects = Vec::new();
        call(&mut process.agent, now, &mut effects);
        for effect in effects {
            self.carry_out(rank, id, effect);
        }
        let Some(process) = self.process(rank, id) else { return };
        if let Some(next) = process.agent.next_deadline() {
            let next = next.max(now);
            if process.tick_at.is_none_or(|tick| next < tick) {
                process.tick_at = Some(next);
                self.at(next, Event::AgentTick(rank, id, next));
            }
        }
    }

    fn carry_out(&mut self, rank: u8, id: u64, effect: AgentEffect) {
        match effect {
            AgentEffect::Connect(at_agent) => self.connect(rank, id, at_agent),
            AgentEffect::Send { connection, message } => {
                let at = self.now.after(self.delay()).max(self.partitions.control_until(rank));
                let Some(process) = self.process(rank, id) else { return };
                let Some(number) = process.connections.get(&connection).copied() else { return };
                let Some(it) = self.connections.get_mut(&number) else { return };
                it.to_coordinator = at.max(it.to_coordinator);
                let at = it.to_coordinator;
                self.at(at, Event::ToCoordinator(number, message));
            }
            AgentEffect::Close(connection) => {
                let Some(process) = self.process(rank, id) else { return };
                let Some(number) = process.connections.remove(&connection) else { return };
                let loses = self.rng.below(3) == 0;
                self.close_by_agent(number, loses);
            }
            AgentEffect::OpenLink(attempt, info) => {
                let delay = self.delay();
                self.after(delay, Event::LinkDecided(rank, id, attempt, info, false));
            }
            AgentEffect::CloseLink(attempt) => {
                self.links.retain(|link| !(link.process == id && link.attempt == attempt));
            }
            AgentEffect::Probe(info) => {
                let delay = self.delay();
                self.after(delay, Event::Probed(rank, id, info, false));
            }
            AgentEffect::ViewChanged { group, view } => {
                let Some(process) = self.process(rank, id) else { return };
                let before = process.epochs.insert(group, view.epoch);
                let result = self.checks.applied(&view, before);
                self.verify(result);
            }
            AgentEffect::Finished { call, outcome } => self.finished(rank, id, call, outcome),
        }
    }

    fn connect(&mut self, rank: u8, id: u64, at_agent: ConnectionId) {
        self.last_connection += 1;
        let number = self.last_connection;
        let (now, has_coordinator) = (self.now, self.coordinator.is_some());
        let connection = Connection {
            rank,
            process: id,
            at_agent,
            to_coordinator: now,
            to_agent: now,
            is_cut: false,
            is_closed_by_coordinator: false,
            is_closed_by_agent: false,
        };
        self.connections.insert(number, connection);
        if let Some(process) = self.process(rank, id) {
            process.connections.insert(at_agent, number);
        }
        if self.partitions.control_until(rank) > now {
            return;
        }
        let delay = self.delay();
        let event = if has_coordinator { Event::AgentConnected(number) } else { Event::AgentLost(number) };
        self.after(delay, event);
    }

    /// Closes a connection at the agent. The coordinator learns of it later.
    pub(crate) fn close_by_agent(&mut self, number: u64, loses_messages: bool) {
        let delay = self.delay();
        let Some(it) = self.connections.get_mut(&number) else { return };
        it.is_closed_by_agent = true;
        it.is_cut |= loses_messages;
        let at = self.now.after(delay).max(it.to_coordinator).max(self.partitions.control_until(it.rank));
        self.at(at, Event::CoordinatorLost(number));
    }

    /// Returns whether a process answers another one: `None` if it is stopped or out of reach.
    pub(crate) fn answers(&self, from: u8, to: u8, session: u64) -> Option<bool> {
        let process = self.processes[usize::from(to)].as_ref().filter(|process| process.id == session);
        match process {
            _ if self.partitions.is_data_blocked(from, to, self.now) => None,
            None => Some(false),
            Some(process) if process.is_paused => None,
            Some(_) => Some(true),
        }
    }

    fn decide_link(&mut self, rank: u8, id: u64, attempt: LinkAttempt, info: RankInfo, is_late: bool) {
        let limit = self.agent_limits.probe;
        match self.answers(rank, info.rank.0, info.session.0) {
            Some(true) if !is_late => {
                self.links.push(OpenLink { from: rank, process: id, attempt });
                self.checks.linked(id, info.rank, info.incarnation);
                self.with_agent(rank, id, |agent, _, effects| agent.link_opened(attempt, effects));
            }
            None if !is_late => self.after(limit, Event::LinkDecided(rank, id, attempt, info, true)),
            _ => {
                self.with_agent(rank, id, |agent, now, effects| agent.link_failed(attempt, now, effects));
            }
        }
    }

    fn decide_probe(&mut self, rank: u8, id: u64, info: RankInfo, is_late: bool) {
        let answer = self.answers(rank, info.rank.0, info.session.0);
        if answer.is_none() && !is_late {
            let limit = self.agent_limits.probe;
            self.after(limit, Event::Probed(rank, id, info, true));
            return;
        }
        let is_alive = answer == Some(true) && !is_late;
        if is_alive {
            self.checks.linked(id, info.rank, info.incarnation);
        }
        self.with_agent(rank, id, |agent, now, effects| {
            agent.probed(info.rank, info.incarnation, is_alive, now, effects);
        });
    }
}
