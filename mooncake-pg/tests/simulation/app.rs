//! Programs that run in the processes, and the faults that happen to them.

use std::time::Duration;

use bytes::Bytes;
use mooncake_pg::agent::{CallError, CallId, CallValue, GroupKey, is_usable};
use mooncake_pg::protocol::{AttachMode, Change, GroupSpec};
use mooncake_pg::view::{GlobalRank, MemberState, RankState, Slot};

use crate::process::{AppGroup, CallKind, PendingCall, Stage};
use crate::world::{Event, NAMES, Scenario, Simulation, trace};

/// Place of the session among the groups of a program, for another attempt.
const SESSION: usize = NAMES.len();

type Outcome = Result<CallValue, CallError>;

impl Simulation {
    /// Returns the groups that a program registers.
    pub(crate) fn groups_of(&self, rank: u8, is_replacement: bool) -> Vec<AppGroup> {
        let is_founder = rank < self.founders;
        let mode = if is_founder && !is_replacement {
            AttachMode::CreateOrAttach
        } else {
            AttachMode::AttachOrExtend
        };
        let group = |stage| AppGroup { key: None, stage, refusals: 0, mode, is_blocked: false };
        let in_second = is_founder && rank.is_multiple_of(2) && self.scenario != Scenario::Twins;
        let absent = if in_second { Stage::Registering } else { Stage::Absent };
        vec![group(Stage::Registering), group(absent)]
    }

    fn spec(&self, rank: u8, index: usize) -> GroupSpec {
        let process = self.processes[usize::from(rank)].as_ref();
        let (mode, refusals) = process.map_or((AttachMode::CreateOrAttach, 0), |process| {
            (process.groups[index].mode, process.groups[index].refusals)
        });
        let all = if index == 0 { self.ranks } else { self.founders };
        // A replacement of a founding rank does not know whether the group was extended.
        let is_short =
            mode == AttachMode::CreateOrAttach || (rank < self.founders && refusals.is_multiple_of(2));
        let size = if is_short { self.founders } else { all };
        let step = if index == 0 { 1 } else { 2 };
        let name = NAMES[index].to_owned();
        GroupSpec {
            name,
            order: (0..size).step_by(step).map(GlobalRank).collect(),
            capacity: usize::from(self.ranks),
            mode,
            auto_deactivate: self.auto_deactivate[index],
        }
    }

    fn call(&mut self, rank: u8, id: u64, group: usize, kind: CallKind) -> Option<CallId> {
        let (now, is_single) = (self.now, self.scenario == Scenario::SingleKill);
        let process = self.process(rank, id)?;
        let limits = process.agent.limits();
        let limit = match kind {
            // One process has failed, and all others have reported it or soon will.
            CallKind::Propose { change: Change::Deactivate } if is_single => Duration::from_millis(2500),
            CallKind::Session | CallKind::Register { .. } | CallKind::Unregister => limits.request,
            CallKind::Ready => limits.ready,
            CallKind::Join => limits.join,
            CallKind::Propose { .. } => limits.proposal,
            CallKind::Sync { .. } => limits.sync,
        };
        let call = process.next_call();
        self.calls.insert((id, call), PendingCall { kind, group, deadline: now.after(limit) });
        Some(call)
    }

    /// Starts the operations of a process.
    pub(crate) fn begin_operations(&mut self, rank: u8, id: u64) {
        for index in 0..NAMES.len() {
            if self.process(rank, id).is_some_and(|it| it.groups[index].stage != Stage::Absent) {
                let delay = self.millis(200..900);
                self.after(delay, Event::Operation(rank, id, index));
            }
        }
    }

    /// Starts the program of a process.
    pub(crate) fn begin(&mut self, rank: u8, id: u64) {
        if let Some(call) = self.call(rank, id, 0, CallKind::Session) {
            self.with_agent(rank, id, |agent, now, effects| agent.wait_for_session(call, now, effects));
        }
    }

    fn register(&mut self, rank: u8, id: u64, index: usize) {
        let mut spec = self.spec(rank, index);
        let mut may_succeed = true;
        if self.scenario == Scenario::Twins {
            // Rank 0 has [0], and rank 1 has [0, 1]: a third rank cannot tell which one to extend.
            let size = (rank + 1).min(3);
            spec.order = (0..size).map(GlobalRank).collect();
            may_succeed = rank < 2;
            spec.mode = if may_succeed { AttachMode::CreateOrAttach } else { AttachMode::AttachOrExtend };
        }
        if let Some(call) = self.call(rank, id, index, CallKind::Register { may_succeed }) {
            if let Some(process) = self.process(rank, id) {
                process.groups[index].stage = Stage::Registering;
            }
            self.with_agent(rank, id, |agent, now, effects| agent.register_group(call, spec, now, effects));
        }
    }

    pub(crate) fn finished(&mut self, rank: u8, id: u64, call: CallId, outcome: Outcome) {
        let Some(pending) = self.calls.remove(&(id, call)) else { return };
        trace!(self, "process {id} of rank {rank}: {:?} -> {outcome:?}", pending.kind);
        if pending.deadline.after(Duration::from_secs(1)) < self.now {
            self.fail(format!("a call ends too late: {pending:?}"));
        }
        let index = pending.group;
        match (pending.kind, outcome) {
            (CallKind::Session, Ok(_)) => {
                for index in 0..NAMES.len() {
                    let process = self.process(rank, id);
                    if process.is_some_and(|it| it.groups[index].stage == Stage::Registering) {
                        self.register(rank, id, index);
                    }
                }
            }
            (CallKind::Session, Err(_)) => self.again(rank, id, SESSION),
            (CallKind::Register { may_succeed }, Ok(CallValue::Registered { group, .. })) => {
                if !may_succeed {
                    self.fail("a registration attached to one of several groups");
                }
                self.is_registered(rank, id, index, group);
            }
            (CallKind::Register { .. }, Err(CallError::Refused(_))) => {
                if let Some(process) = self.process(rank, id) {
                    process.groups[index].refusals += 1;
                }
                self.again(rank, id, index);
            }
            (CallKind::Ready, Ok(_)) => self.work(rank, id, index),
            (CallKind::Join, Ok(_)) => {
                if let Some(process) = self.process(rank, id) {
                    process.groups[index].stage = Stage::Works;
                }
            }
            (CallKind::Sync { mask, failed }, outcome) => {
                if let Some(process) = self.process(rank, id) {
                    process.groups[index].is_blocked = false;
                }
                if let Ok(CallValue::Synced { view, .. }) = outcome
                    && self.auto_deactivate[index]
                {
                    self.check_sync(rank, id, &view, mask, &failed);
                }
            }
            (CallKind::Unregister, _) => self.register(rank, id, index),
            (CallKind::Propose { .. }, _) => {}
            (_, Err(_)) => self.again(rank, id, index),
            (kind, Ok(value)) => self.fail(format!("{kind:?} has the outcome {value:?}")),
        }
    }

    fn again(&mut self, rank: u8, id: u64, index: usize) {
        let delay = self.millis(200..1500);
        self.after(delay, Event::Retry(rank, id, index));
    }

    fn is_registered(&mut self, rank: u8, id: u64, index: usize, key: GroupKey) {
        let Some(process) = self.process(rank, id) else { return };
        process.groups[index].key = Some(key);
        process.groups[index].stage = Stage::WaitsForReady;
        let endpoint = Bytes::copy_from_slice(&id.to_le_bytes());
        let Some(call) = self.call(rank, id, index, CallKind::Ready) else { return };
        self.with_agent(rank, id, |agent, now, effects| {
            agent.publish_endpoint(key, endpoint, now, effects);
            agent.wait_until_ready(call, key, now, effects);
        });
    }

    fn work(&mut self, rank: u8, id: u64, index: usize) {
        let Some(process) = self.process(rank, id) else { return };
        process.groups[index].stage = Stage::Works;
    }

    fn is_active(&self, rank: u8, index: usize) -> bool {
        let own = || {
            let process = self.processes[usize::from(rank)].as_ref()?;
            let key = process.groups[index].key?;
            let (_, slot) = process.agent.registration(key)?;
            let member = process.agent.view(key)?.members.get(usize::from(slot.0))?.clone();
            let is_own = Some(member.incarnation) == process.agent.incarnation();
            Some(member.state == MemberState::Active && is_own)
        };
        own().unwrap_or(false)
    }

    /// Continues a program whose last call has failed.
    pub(crate) fn retry(&mut self, rank: u8, id: u64, index: usize) {
        if index == SESSION {
            self.begin(rank, id);
            return;
        }
        let Some(process) = self.process(rank, id) else { return };
        let (stage, key) = (process.groups[index].stage, process.groups[index].key);
        match (stage, key) {
            (Stage::Registering, _) => self.register(rank, id, index),
            (Stage::WaitsForReady, Some(key)) => {
                if let Some(call) = self.call(rank, id, index, CallKind::Ready) {
                    self.with_agent(rank, id, |agent, now, effects| {
                        agent.wait_until_ready(call, key, now, effects);
                    });
                }
            }
            (Stage::Joining, Some(key)) => self.join(rank, id, index, key),
            _ => {}
        }
    }

    fn join(&mut self, rank: u8, id: u64, index: usize, key: GroupKey) {
        let Some(call) = self.call(rank, id, index, CallKind::Join) else { return };
        if let Some(process) = self.process(rank, id) {
            process.groups[index].stage = Stage::Joining;
        }
        let endpoint = Bytes::copy_from_slice(&id.to_le_bytes());
        self.with_agent(rank, id, |agent, now, effects| {
            agent.publish_endpoint(key, endpoint, now, effects);
            agent.join(call, key, now, effects);
        });
    }

    /// Performs an operation with all active slots, as the data plane does.
    pub(crate) fn operate(&mut self, rank: u8, id: u64, index: usize) {
        let interval = self.millis(500..1500);
        let Some(process) = self.process(rank, id) else { return };
        let group = &process.groups[index];
        let (key, stage, is_blocked) = (group.key, group.stage, group.is_blocked);
        self.after(interval, Event::Operation(rank, id, index));
        let Some(key) = key else { return };
        if stage != Stage::Works || is_blocked {
            return;
        }
        if !self.is_active(rank, index) {
            if self.is_session(rank) {
                self.join(rank, id, index, key);
            }
            return;
        }
        let view = self.process(rank, id).and_then(|it| it.agent.view(key).cloned());
        let Some(view) = view else { return };
        let mut slow = Vec::new();
        for slot in view.active() {
            let member = &view.members[usize::from(slot.0)];
            let session = member.endpoint.as_ref().and_then(|bytes| bytes[..].try_into().ok());
            let session = session.map_or(0, u64::from_le_bytes);
            if member.rank.0 == rank {
                continue;
            }
            if self.answers(rank, member.rank.0, session) == Some(true) {
                self.observe(rank, id, key, slot, member.incarnation, true);
            } else {
                slow.push((slot, member.incarnation));
            }
        }
        if !slow.is_empty() {
            if let Some(process) = self.process(rank, id) {
                process.groups[index].is_blocked = true;
            }
            self.after(Duration::from_millis(800), Event::Timeout(rank, id, index, view.mask, slow));
        }
    }

    fn observe(&mut self, rank: u8, id: u64, key: GroupKey, slot: Slot, incarnation: u64, is_up: bool) {
        let view = self.process(rank, id).and_then(|it| it.agent.view(key).cloned());
        let member = view.as_ref().and_then(|view| view.members.get(usize::from(slot.0)));
        if let Some(member) = member.filter(|member| is_up && member.incarnation == incarnation) {
            self.checks.linked(id, member.rank, incarnation);
        }
        self.with_agent(rank, id, |agent, now, effects| {
            agent.report(key, slot, incarnation, is_up, now, effects);
        });
    }

    /// Ends an operation whose partners did not respond in time.
    pub(crate) fn time_out(&mut self, rank: u8, id: u64, index: usize, mask: u64, slow: Vec<(Slot, u64)>) {
        let Some(process) = self.process(rank, id) else { return };
        let Some(key) = process.groups[index].key else { return };
        let view = process.agent.view(key).cloned();
        let Some(view) = view else { return };
        let mut failed = Vec::new();
        for (slot, incarnation) in slow {
            let Some(member) = view.members.get(usize::from(slot.0)) else { continue };
            let session = member.endpoint.as_ref().and_then(|bytes| bytes[..].try_into().ok());
            let session = session.map_or(0, u64::from_le_bytes);
            let is_current = member.incarnation == incarnation;
            if !is_current || self.answers(rank, member.rank.0, session) != Some(true) {
                failed.push((slot, incarnation));
            }
        }
        if failed.is_empty() {
            if let Some(process) = self.process(rank, id) {
                process.groups[index].is_blocked = false;
            }
            return;
        }
        for (slot, incarnation) in &failed {
            self.observe(rank, id, key, *slot, *incarnation, false);
        }
        trace!(self, "process {id} of rank {rank}: operation at mask {mask} failed with {failed:?}");
        if let Some(call) = self.call(rank, id, index, CallKind::Sync { mask, failed }) {
            self.with_agent(rank, id, |agent, now, effects| agent.sync(call, key, now, effects));
        }
    }

    /// Checks that a failure has changed the active set once it is reconciled.
    fn check_sync(
        &mut self,
        rank: u8,
        id: u64,
        view: &mooncake_pg::view::View,
        mask: u64,
        failed: &[(Slot, u64)],
    ) {
        let own = self.process(rank, id).and_then(|process| process.agent.incarnation());
        let has = |incarnation, slot: Slot| {
            view.members.get(usize::from(slot.0)).is_some_and(|member| {
                member.state == MemberState::Active && Some(member.incarnation) == incarnation
            })
        };
        let own_slot = view.members.iter().position(|member| member.rank.0 == rank);
        let is_own = own_slot.is_some_and(|slot| has(own, Slot(slot as u8)));
        let still = failed.iter().find(|(slot, incarnation)| has(Some(*incarnation), *slot));
        if let Some((slot, _)) = still
            && is_own
            && view.mask <= mask
        {
            self.fail(format!(
                "rank {rank} and slot {slot} are both active at mask {} after their link failed at {mask}",
                view.mask
            ));
        }
    }

    fn is_session(&self, rank: u8) -> bool {
        let process = self.processes[usize::from(rank)].as_ref();
        process.is_some_and(|process| process.agent.is_registered() && !process.is_paused)
    }

    /// Chooses the next fault.
    pub(crate) fn fault(&mut self) {
        if self.now >= self.faults_end {
            return;
        }
        match self.scenario {
            Scenario::General => {
                self.general_fault();
                let pause = self.millis(100..4000);
                self.after(pause, Event::Fault);
            }
            Scenario::SingleKill => {
                let rank = self.rng.range(1..u64::from(self.ranks)) as u8;
                self.kill(rank, false);
                let pause = self.millis(5000..8000);
                self.after(pause, Event::Restart(rank));
            }
            Scenario::CoordinatorPause => {
                let time = self.millis(500..20_000);
                self.pause(0, time);
            }
            Scenario::CoordinatorCrash => {
                self.kill(0, false);
                let pause = self.millis(10..8000);
                self.after(pause, Event::Restart(0));
            }
            Scenario::Recreation => {
                for rank in 0..self.ranks {
                    if self.rng.below(2) == 0 {
                        self.break_connection(rank);
                    }
                }
                self.recreate();
                let pause = self.millis(3000..6000);
                self.after(pause, Event::Fault);
            }
            Scenario::Twins => {}
        }
    }

    /// Lets every process leave its first group and register it again.
    fn recreate(&mut self) {
        let works = |process: &crate::process::Process| process.groups[0].stage == Stage::Works;
        if !self.processes.iter().flatten().all(works) {
            return;
        }
        for rank in 0..self.ranks {
            let Some(process) = &mut self.processes[usize::from(rank)] else { continue };
            let (id, Some(key)) = (process.id, process.groups[0].key) else { continue };
            process.groups[0].stage = Stage::Unregistering;
            if let Some((group, _)) = process.agent.registration(key) {
                self.checks.left(id, group);
            }
            if let Some(call) = self.call(rank, id, 0, CallKind::Unregister) {
                self.with_agent(rank, id, |agent, now, effects| agent.unregister(call, key, now, effects));
            }
        }
    }

    fn general_fault(&mut self) {
        let rank = self.rng.below(u64::from(self.ranks)) as u8;
        let other = self.rng.below(u64::from(self.ranks)) as u8;
        let long = self.millis(300..9000);
        match self.rng.below(100) {
            0..=24 if rank != 0 => {
                let with_host = self.rng.below(3) == 0;
                self.kill(rank, with_host);
                let pause = self.millis(5..8000);
                self.after(pause, Event::Restart(rank));
            }
            25..=29 if rank != 0 => self.leave(rank),
            30..=44 => self.pause(rank, long),
            45..=62 => self.break_connection(rank),
            63..=77 => {
                trace!(self, "rank {rank} is cut off from the coordinator for {long:?}");
                let until = self.now.after(long);
                self.partitions.block_control(rank, until);
            }
            78..=92 if rank != other => {
                trace!(self, "ranks {rank} and {other} are cut off from each other for {long:?}");
                let until = self.now.after(long);
                self.partitions.block_data(rank, other, until);
            }
            93..=96 => self.propose(rank, 0, Change::Deactivate, vec![Slot(other)]),
            _ => self.forge_view(rank),
        }
    }

    /// Ends a process in order.
    fn leave(&mut self, rank: u8) {
        let Some(process) = &self.processes[usize::from(rank)] else { return };
        let id = process.id;
        if process.is_paused {
            return;
        }
        self.with_agent(rank, id, |agent, _, effects| agent.leave(effects));
        self.kill(rank, false);
        let pause = self.millis(5..8000);
        self.after(pause, Event::Restart(rank));
    }

    fn propose(&mut self, rank: u8, index: usize, change: Change, slots: Vec<Slot>) {
        let Some(process) = &self.processes[usize::from(rank)] else { return };
        let (id, key) = (process.id, process.groups[index].key);
        let Some(key) = key.filter(|_| !process.is_paused) else { return };
        if let Some(call) = self.call(rank, id, index, CallKind::Propose { change }) {
            self.with_agent(rank, id, |agent, now, effects| {
                agent.propose(call, key, change, slots, now, effects);
            });
        }
    }

    /// Proposes what brings a group back to all its slots.
    fn mend(&mut self, index: usize) {
        let ranks = u64::from(self.ranks);
        let rank = self.rng.below(ranks) as u8;
        let Some(process) = &self.processes[usize::from(rank)] else { return };
        let Some(view) = process.groups[index].key.and_then(|key| process.agent.view(key).cloned()) else {
            return;
        };
        let slots = || (0..view.members.len()).map(|slot| Slot(slot as u8));
        let failed: Vec<Slot> = view
            .active()
            .filter(|s| view.members[usize::from(s.0)].rank_state != RankState::Healthy)
            .collect();
        let waiting: Vec<Slot> = slots()
            .filter(|slot| is_usable(&view, *slot))
            .filter(|slot| view.members[usize::from(slot.0)].state == MemberState::AwaitingActivation)
            .collect();
        if !failed.is_empty() {
            self.propose(rank, index, Change::Deactivate, failed);
        } else if !waiting.is_empty() {
            self.propose(rank, index, Change::Activate, waiting);
        }
    }

    /// Checks limits every second, and the end of the run.
    pub(crate) fn watch(&mut self) {
        self.check_limits();
        self.check_calls();
        for index in 0..NAMES.len() {
            self.mend(index);
        }
        if self.now >= self.faults_end {
            self.partitions.heal();
            for rank in 0..self.ranks {
                if self.processes[usize::from(rank)].is_none() {
                    self.after(Duration::ZERO, Event::Restart(rank));
                }
            }
            self.conclude();
        }
        self.after(Duration::from_secs(1), Event::Watch);
    }

    fn conclude(&mut self) {
        let limit = Duration::from_secs(90);
        match self.scenario {
            // Membership cannot change any more: calls have ended, or will.
            Scenario::CoordinatorCrash | Scenario::Twins => {
                self.is_over = self.now >= self.faults_end.after(Duration::from_secs(20));
            }
            _ => match self.difference() {
                None => {
                    self.is_over = true;
                    if self.scenario == Scenario::CoordinatorPause {
                        self.check_incarnations();
                    }
                }
                Some(difference) if self.now >= self.faults_end.after(limit) => {
                    self.fail(format!("does not converge: {difference}"));
                }
                Some(_) => {}
            },
        }
    }

    fn check_incarnations(&mut self) {
        let Some(machine) = &self.coordinator else { return };
        let begun = (0..self.ranks).find(|rank| machine.incarnation(GlobalRank(*rank)).0 != 1);
        if let Some(rank) = begun {
            self.fail(format!("the session of rank {rank} ended while the coordinator was stopped"));
        }
    }

    /// Returns a difference from the state that all faults leave in the end.
    fn difference(&self) -> Option<String> {
        let machine = self.coordinator.as_ref()?;
        if machine.has_window() {
            return Some("a window is open".to_owned());
        }
        if machine.healthy().len() < usize::from(self.ranks) {
            return Some(format!("healthy are only {:?}, online {:?}", machine.healthy(), machine.online()));
        }
        for rank in 0..self.ranks {
            let Some(process) = &self.processes[usize::from(rank)] else {
                return Some(format!("rank {rank} has no process"));
            };
            for (index, group) in process.groups.iter().enumerate() {
                if group.stage == Stage::Absent {
                    continue;
                }
                let name = NAMES[index];
                if group.stage != Stage::Works || !self.is_active(rank, index) {
                    let view = group.key.and_then(|key| process.agent.view(key));
                    return Some(format!("rank {rank} is {:?} in {name}: {view:?}", group.stage));
                }
                let key = group.key?;
                let (id, _) = process.agent.registration(key)?;
                let current = machine.views().find(|(group, _)| *group == id).map(|(_, view)| view);
                if current != process.agent.view(key) {
                    return Some(format!("rank {rank} has an old view of {name}"));
                }
            }
        }
        None
    }
}
