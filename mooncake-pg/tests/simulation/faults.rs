//! Start, death and stops of processes, and the limits that follow from them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mooncake_pg::agent::AgentMachine;
use mooncake_pg::protocol::{SessionId, ToAgent};
use mooncake_pg::view::GlobalRank;

use crate::checks::FailedProcess;
use crate::network::OpenLink;
use crate::process::{AppGroup, Process};
use crate::world::{Event, Scenario, Simulation, seconds, trace};

impl Simulation {
    pub(crate) fn start_process(&mut self, rank: u8) {
        if self.processes[usize::from(rank)].is_some() {
            return;
        }
        self.last_process += 1;
        let id = self.last_process;
        let is_replacement = !self.started.insert(GlobalRank(rank));
        let rng = self.rng.split();
        let (limits, now) = (self.agent_limits.clone(), self.now);
        let agent = AgentMachine::new(GlobalRank(rank), SessionId(id), String::new(), limits, rng, now)
            .planted(self.planted);
        let groups = self.groups_of(rank, is_replacement);
        trace!(self, "process {id} of rank {rank} starts");
        self.processes[usize::from(rank)] = Some(Process {
            id,
            agent,
            is_paused: false,
            backlog: Vec::new(),
            tick_at: None,
            connections: BTreeMap::new(),
            epochs: BTreeMap::new(),
            groups,
            last_call: 0,
        });
        if rank == 0 && self.coordinator.is_none() {
            self.start_coordinator();
        }
        self.begin_operations(rank, id);
        self.begin(rank, id);
        self.with_agent(rank, id, |agent, now, effects| agent.tick(now, effects));
    }

    /// Ends a process. If its host dies as well, no connection reports it.
    pub(crate) fn kill(&mut self, rank: u8, with_host: bool) {
        let Some(process) = self.processes[usize::from(rank)].take() else { return };
        trace!(self, "process {} of rank {rank} dies, with its host: {with_host}", process.id);
        self.calls.retain(|(id, _), _| *id != process.id);
        if let Some(incarnation) = process.agent.incarnation() {
            // Messages in flight count as signs of life when they arrive.
            let arrival = self.coordinator_resumes.max(self.partitions.control_until(rank));
            let deadline = self.now.max(arrival).after(self.failure_bound());
            self.failed.push(FailedProcess { rank, incarnation, deadline });
        }
        for number in process.connections.values() {
            if with_host {
                let delay = self.millis(1000..60_000);
                self.after(delay, Event::CoordinatorLost(*number));
            } else {
                let loses = self.rng.below(3) == 0;
                self.close_by_agent(*number, loses);
            }
        }
        self.links.retain(|link| link.process != process.id);
        if !with_host {
            let broken: Vec<OpenLink> =
                self.links.iter().filter(|link| link.attempt.rank.0 == rank).copied().collect();
            for link in broken {
                let delay = self.delay();
                self.after(delay, Event::LinkBroken(link.from, link.process, link.attempt));
            }
        }
        if rank == 0 {
            self.coordinator = None;
            for it in self.connections.values_mut() {
                it.is_closed_by_coordinator = true;
            }
            let open: Vec<u64> = self.connections.keys().copied().collect();
            for number in open {
                let delay = self.delay();
                self.after(delay, Event::AgentLost(number));
            }
        }
    }

    /// Returns the longest time from the death of a process to the end of its memberships.
    fn failure_bound(&self) -> Duration {
        let limits = &self.coordinator_limits;
        if self.scenario == Scenario::SingleKill {
            // Connections break at once, and all others report.
            return Duration::from_millis(3500);
        }
        limits.heartbeat + limits.window + seconds(3)
    }

    /// Stops a process for a time.
    pub(crate) fn pause(&mut self, rank: u8, time: Duration) {
        let Some(process) = self.processes[usize::from(rank)].as_mut().filter(|it| !it.is_paused) else {
            return;
        };
        process.is_paused = true;
        let id = process.id;
        trace!(self, "process {id} of rank {rank} stops for {time:?}");
        for ((process, _), call) in &mut self.calls {
            // A stopped coordinator delays the calls of all processes.
            if *process == id || rank == 0 {
                call.deadline = call.deadline.after(time);
            }
        }
        if rank == 0 {
            self.coordinator_resumes = self.now.after(time);
            for failed in &mut self.failed {
                failed.deadline = failed.deadline.after(time);
            }
        }
        self.after(time, Event::Resume(rank, id));
    }

    pub(crate) fn resume(&mut self, rank: u8, id: u64) {
        let Some(process) = self.process(rank, id) else { return };
        process.is_paused = false;
        let backlog = std::mem::take(&mut process.backlog);
        trace!(self, "process {id} of rank {rank} continues");
        for event in backlog {
            self.dispatch(event);
        }
    }

    /// Breaks the connection of a rank to the coordinator. Each side learns of it at another time.
    pub(crate) fn break_connection(&mut self, rank: u8) {
        let Some(process) = &self.processes[usize::from(rank)] else { return };
        let Some(number) = process.connections.values().last().copied() else { return };
        trace!(self, "connection {number} of rank {rank} breaks");
        let (at_agent, at_coordinator) = (self.millis(0..1500), self.millis(0..4000));
        let loses = self.rng.below(2) == 0;
        if let Some(it) = self.connections.get_mut(&number) {
            it.is_cut |= loses;
        }
        self.after(at_agent, Event::AgentLost(number));
        self.after(at_coordinator, Event::CoordinatorLost(number));
    }

    /// Checks that failed processes are out, and that no call takes too long.
    pub(crate) fn check_limits(&mut self) {
        let Some(machine) = &self.coordinator else { return };
        let mut failure = None;
        let is_active = |failed: &FailedProcess| {
            machine.views().filter(|(group, _)| machine.is_auto_deactivated(*group)).any(|(_, view)| {
                view.active().any(|slot| {
                    let member = &view.members[usize::from(slot.0)];
                    member.rank.0 == failed.rank && member.incarnation == failed.incarnation
                })
            })
        };
        let now = self.now;
        self.failed.retain(|failed| {
            if failed.deadline <= now && is_active(failed) {
                failure = Some(format!("failed rank {} is still active", failed.rank));
            }
            failed.deadline > now
        });
        if let Some(failure) = failure {
            self.fail(failure);
        }
    }

    /// Checks that no call takes too long.
    pub(crate) fn check_calls(&mut self) {
        let late = self.calls.iter().find(|(_, call)| call.deadline.after(seconds(1)) < self.now);
        if let Some(((process, _), call)) = late {
            let failure = format!("a call of process {process} takes too long: {call:?}");
            self.fail(failure);
        }
    }

    /// Sends an agent another view of the epoch that it has.
    pub(crate) fn forge_view(&mut self, rank: u8) {
        let Some(process) = &self.processes[usize::from(rank)] else { return };
        let Some(number) = process.connections.values().last().copied() else { return };
        let Some((group, view)) = process.groups.iter().find_map(|group: &AppGroup| {
            let key = group.key?;
            Some((process.agent.registration(key)?.0, process.agent.view(key)?.clone()))
        }) else {
            return;
        };
        let mut forged = (*view).clone();
        forged.capacity += 1;
        let id = process.id;
        if process.agent.is_registered() && !process.is_paused {
            trace!(self, "process {id} of rank {rank} gets a forged view");
            self.arrive_at_agent(number, ToAgent::View { group, view: Arc::new(forged) });
        }
    }
}
