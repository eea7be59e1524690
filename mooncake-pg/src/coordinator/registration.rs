//! Registration of groups: which instance a process attaches to.

use std::collections::BTreeMap;

use mooncake_core::clock::Moment;

use super::group::Group;
use super::ranks::{Caller, RankTable};
use crate::planted::{Bug, Planted};
use crate::protocol::{AttachMode, GroupId, GroupSpec, Response, SessionId};
use crate::view::{GlobalRank, Slot};

/// Largest number of instances in a world.
const MAX_GROUPS: usize = 4096;
/// Largest number of registrations that wait for the group that they extend.
const MAX_WAITING: usize = 1024;

/// Registration that waits for the group that it extends.
#[derive(Debug)]
pub(super) struct WaitingExtension {
    pub(super) caller: Caller,
    spec: GroupSpec,
    pub(super) deadline: Moment,
}

/// All instances of groups.
#[derive(Debug)]
pub(super) struct GroupTable {
    pub(super) groups: BTreeMap<GroupId, Group>,
    pub(super) waiting: Vec<WaitingExtension>,
    last: u64,
    planted: Planted,
}

/// Outcome of a search for the instance to attach to.
enum Match {
    Attach(GroupId),
    Extend(GroupId),
    Create,
    /// No instance fits yet.
    Absent,
    Refused(String),
}

impl GroupTable {
    pub(super) fn new(planted: Planted) -> Self {
        Self { groups: BTreeMap::new(), waiting: Vec::new(), last: 0, planted }
    }

    /// Registers the session of a caller. `None` if the registration waits until `deadline` for the
    /// group that it extends.
    pub(super) fn register(
        &mut self,
        caller: Caller,
        spec: GroupSpec,
        deadline: Moment,
        ranks: &RankTable,
    ) -> Option<Response> {
        if let Err(reason) = spec.check(caller.rank) {
            return Some(refused(&spec, &reason));
        }
        let response = self.attach(caller, &spec, ranks);
        if response.is_some() {
            return response;
        }
        if self.waiting.len() >= MAX_WAITING {
            return Some(refused(&spec, "too many registrations wait"));
        }
        self.waiting.push(WaitingExtension { caller, spec, deadline });
        None
    }

    /// Attaches the registrations that wait and now have a group, and refuses those that have
    /// waited too long. Returns the responses.
    pub(super) fn serve_waiting(&mut self, now: Moment, ranks: &RankTable) -> Vec<(Caller, Response)> {
        let mut responses = Vec::new();
        for waiting in std::mem::take(&mut self.waiting) {
            if !ranks.is_current(waiting.caller) {
                continue;
            }
            if let Some(response) = self.attach(waiting.caller, &waiting.spec, ranks) {
                responses.push((waiting.caller, response));
            } else if waiting.deadline <= now {
                let reason = "no group has a part of the ranks; start its founding ranks first";
                responses.push((waiting.caller, refused(&waiting.spec, reason)));
            } else {
                self.waiting.push(waiting);
            }
        }
        responses
    }

    fn attach(&mut self, caller: Caller, spec: &GroupSpec, ranks: &RankTable) -> Option<Response> {
        let session = ranks.record(caller.rank).process?;
        let id = match self.find(caller.rank, session, spec, ranks) {
            Match::Attach(id) => id,
            Match::Extend(id) => {
                self.groups.get_mut(&id)?.extend(&spec.order);
                id
            }
            Match::Create if self.groups.len() >= MAX_GROUPS => {
                return Some(refused(spec, "the world has too many groups"));
            }
            Match::Create => {
                self.last += 1;
                let id = GroupId(self.last);
                self.groups.insert(id, Group::new(id, spec));
                id
            }
            Match::Absent => return None,
            Match::Refused(reason) => return Some(refused(spec, &reason)),
        };
        let group = self.groups.get_mut(&id)?;
        let slot = group.slot_of(caller.rank)?;
        group.attach(slot, session, caller.incarnation);
        Some(Response::Attached { group: id, slot })
    }

    /// Registers a process again that has another incarnation than before.
    pub(super) fn reattach(&mut self, caller: Caller, id: GroupId, ranks: &RankTable) -> Response {
        let session = ranks.record(caller.rank).process;
        let group = self.groups.get_mut(&id);
        let found = group.and_then(|group| {
            let slot = group.slot_of(caller.rank)?;
            let record = group.record(slot)?;
            (record.session == session && !record.has_left).then_some((group, slot, session?))
        });
        let Some((group, slot, session)) = found else {
            return Response::Refused(format!(
                "cannot attach to a group again: it has ended. generation={}; create it again",
                id.0
            ));
        };
        group.attach(slot, session, caller.incarnation);
        Response::Attached { group: id, slot }
    }

    fn find(&self, rank: GlobalRank, process: SessionId, spec: &GroupSpec, ranks: &RankTable) -> Match {
        let alike = || {
            let named = self.groups.values().filter(|group| group.name == spec.name);
            named.filter(|group| group.capacity == spec.capacity)
        };
        let exact = || alike().filter(|group| group.has_order(&spec.order));
        match spec.mode {
            // The first instance that the process has not registered yet: others may have left an
            // earlier one, or be ahead by one. A registration of an earlier incarnation whose
            // response was lost is repeated.
            AttachMode::CreateOrAttach => {
                let incarnation = ranks.record(rank).incarnation;
                let is_new = |group: &&Group| {
                    let record = group.slot_of(rank).and_then(|slot| group.record(slot));
                    record.is_some_and(|record| {
                        let is_lost = !record.has_left && record.incarnation != incarnation;
                        record.session != Some(process) || is_lost
                    }) || self.planted.has(Bug::GenerationsMixed)
                };
                exact().find(is_new).map_or(Match::Create, |group| Match::Attach(group.id))
            }
            AttachMode::AttachOrExtend => {
                if let Some(group) = exact().next_back() {
                    let slot = group.slot_of(rank).and_then(|slot| group.record(slot));
                    return if slot.is_some_and(|slot| slot.is_registered(ranks)) {
                        Match::Refused("this process is already registered".to_owned())
                    } else {
                        Match::Attach(group.id)
                    };
                }
                self.find_extension(rank, spec, &alike)
            }
        }
    }

    fn find_extension<'a, I: Iterator<Item = &'a Group>>(
        &self,
        rank: GlobalRank,
        spec: &GroupSpec,
        alike: &dyn Fn() -> I,
    ) -> Match {
        let is_part = |group: &&Group| group.slots.len() < spec.order.len() && group.begins(&spec.order);
        let mut parts = alike().filter(is_part);
        let Some(group) = parts.next() else { return Match::Absent };
        if parts.next().is_some() && !self.planted.has(Bug::AmbiguousExtension) {
            return Match::Refused("several groups have a part of the ranks".to_owned());
        }
        if group.slot_of(rank).is_some() {
            return Match::Refused("the group already has a slot for this process".to_owned());
        }
        Match::Extend(group.id)
    }

    /// Returns an instance in which the session of a rank is registered, and its slot.
    pub(super) fn registered(
        &mut self,
        id: GroupId,
        rank: GlobalRank,
        ranks: &RankTable,
    ) -> Option<(&mut Group, Slot)> {
        let group = self.groups.get_mut(&id)?;
        let slot = group.slot_of(rank)?;
        group.record(slot)?.is_registered(ranks).then_some((group, slot))
    }

    /// Removes the instances without a registered process.
    pub(super) fn remove_abandoned(&mut self) {
        self.groups.retain(|_, group| !group.is_abandoned());
    }

    /// Returns the next time at which a registration has waited too long.
    pub(super) fn next_deadline(&self) -> Option<Moment> {
        self.waiting.iter().map(|waiting| waiting.deadline).min()
    }
}

fn refused(spec: &GroupSpec, reason: &str) -> Response {
    Response::Refused(format!("cannot register group: {reason}. name={:?}", spec.name))
}
