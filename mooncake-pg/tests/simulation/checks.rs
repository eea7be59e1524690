//! Properties that hold in every run.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use mooncake_core::clock::Moment;
use mooncake_pg::coordinator::CoordinatorMachine;
use mooncake_pg::protocol::{Change, GroupId, WorldId};
use mooncake_pg::view::{GlobalRank, MemberState, Slot, View};

/// Views, registrations and links that have been observed.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    /// Every view that was sent.
    views: BTreeMap<(u64, u64), Arc<View>>,
    last_epoch: BTreeMap<u64, u64>,
    /// Registrations: generation, rank and incarnation.
    attached: BTreeSet<(u64, u8, u64)>,
    /// Process of each incarnation.
    processes: BTreeMap<(u8, u64), u64>,
    /// World of each process.
    worlds: BTreeMap<u64, WorldId>,
    /// Links that a process has opened to an incarnation.
    linked: BTreeSet<(u64, u8, u64)>,
    /// Generations that a process has left.
    left: BTreeSet<(u64, u64)>,
}

impl Checks {
    /// Forgets all but the worlds: another coordinator numbers all things again.
    pub(crate) fn begin_world(&mut self) {
        *self = Self { worlds: std::mem::take(&mut self.worlds), ..Self::default() };
    }

    pub(crate) fn registered(
        &mut self,
        rank: u8,
        incarnation: u64,
        process: u64,
        world: WorldId,
    ) -> Result<(), String> {
        if *self.worlds.entry(process).or_insert(world) != world {
            return Err(format!("rank {rank} belongs to two coordinators"));
        }
        match self.processes.insert((rank, incarnation), process) {
            Some(other) if other != process => {
                Err(format!("two processes have rank {rank} incarnation {incarnation}"))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn attached(
        &mut self,
        group: GroupId,
        rank: u8,
        incarnation: u64,
        process: u64,
    ) -> Result<(), String> {
        self.attached.insert((group.0, rank, incarnation));
        if self.left.contains(&(process, group.0)) {
            return Err(format!("rank {rank} is attached to generation {} again", group.0));
        }
        Ok(())
    }

    pub(crate) fn left(&mut self, process: u64, group: GroupId) {
        self.left.insert((process, group.0));
    }

    pub(crate) fn linked(&mut self, process: u64, rank: GlobalRank, incarnation: u64) {
        self.linked.insert((process, rank.0, incarnation));
    }

    /// Checks a view at the moment at which the coordinator sends it.
    pub(crate) fn sent(&mut self, view: &Arc<View>, coordinator: &CoordinatorMachine) -> Result<(), String> {
        let (generation, epoch) = (view.generation, view.epoch);
        if let Some(known) = self.views.get(&(generation, epoch)) {
            if !Arc::ptr_eq(known, view) && known != view {
                return Err(format!("two views of generation {generation} have epoch {epoch}"));
            }
            return Ok(());
        }
        let last = self.last_epoch.insert(generation, epoch);
        if last.is_some_and(|last| last > epoch) {
            return Err(format!("generation {generation} went back to epoch {epoch}"));
        }
        if let Some(before) = last.and_then(|last| self.views.get(&(generation, last))) {
            let active = |view: &View| -> Vec<(Slot, u64)> {
                view.active().map(|slot| (slot, view.members[usize::from(slot.0)].incarnation)).collect()
            };
            let is_same = active(before) == active(view);
            // Views between the two may not have been sent.
            if (is_same && epoch == before.epoch + 1 && view.mask != before.mask)
                || (!is_same && view.mask <= before.epoch)
            {
                return Err(format!("mask {} of epoch {epoch} is wrong", view.mask));
            }
        }
        for (slot, member) in view.members.iter().enumerate() {
            let id = (member.rank.0, member.incarnation);
            let process = self.processes.get(&id);
            if let Some(endpoint) = &member.endpoint
                && process.is_none_or(|process| endpoint[..] != process.to_le_bytes())
            {
                return Err(format!("slot {slot} of epoch {epoch} has the endpoint of another process"));
            }
            if member.state == MemberState::Active {
                let current = coordinator.incarnation(member.rank).0;
                if !self.attached.contains(&(generation, id.0, id.1)) || current != id.1 {
                    return Err(format!(
                        "slot {slot} of epoch {epoch} is active without a registration at incarnation {}, now {current}",
                        id.1
                    ));
                }
            }
        }
        self.views.insert((generation, epoch), view.clone());
        Ok(())
    }

    /// Checks a view at the moment at which an agent applies it.
    pub(crate) fn applied(&self, view: &Arc<View>, before: Option<u64>) -> Result<(), String> {
        let (generation, epoch) = (view.generation, view.epoch);
        if before.is_some_and(|before| before >= epoch) {
            return Err(format!("an agent went from epoch {before:?} to {epoch}"));
        }
        let sent = self.views.get(&(generation, epoch));
        if sent.is_none_or(|sent| !Arc::ptr_eq(sent, view) && sent != view) {
            return Err(format!("an agent has another view of epoch {epoch} than the coordinator"));
        }
        Ok(())
    }

    /// Checks that healthy ranks are connected to each other's incarnation.
    pub(crate) fn healthy(&self, coordinator: &CoordinatorMachine) -> Result<(), String> {
        let healthy = coordinator.healthy();
        for from in healthy.iter() {
            let process = self.processes.get(&(from.0, coordinator.incarnation(from).0));
            let Some(process) = process else { return Err(format!("rank {from} has no process")) };
            for to in healthy.iter() {
                let incarnation = coordinator.incarnation(to).0;
                if !self.linked.contains(&(*process, to.0, incarnation)) {
                    return Err(format!("ranks {from} and {to} are healthy without a link"));
                }
            }
        }
        Ok(())
    }

    /// Returns the view that put the last activation of slots into force, up to an epoch.
    pub(crate) fn activation(
        &self,
        group: GroupId,
        change: Change,
        slots: &[Slot],
        until: u64,
    ) -> Option<&Arc<View>> {
        if change != Change::Activate {
            return None;
        }
        let active = |view: &View| {
            slots.iter().all(|slot| {
                let member = view.members.get(usize::from(slot.0));
                member.is_some_and(|member| member.state == MemberState::Active)
            })
        };
        let views = self.views.range((group.0, 0)..=(group.0, until)).rev().map(|(_, view)| view);
        let mut since = None;
        for view in views {
            if active(view) {
                since = Some(view);
            } else if since.is_some() {
                break;
            }
        }
        since
    }
}

/// Process that has died, and the time until which it may be active.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FailedProcess {
    pub(crate) rank: u8,
    pub(crate) incarnation: u64,
    pub(crate) deadline: Moment,
}
