//! Instance of a group: slots, view, and the proposals that wait.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use mooncake_core::clock::Moment;

use super::outbox::Outbox;
use super::ranks::{Caller, RankTable};
use crate::planted::{Bug, Planted};
use crate::protocol::{Change, GroupId, GroupSpec, SessionId, ToAgent};
use crate::rank_set::RankSet;
use crate::view::{GlobalRank, Member, MemberState, Slot, View};

/// Slot of a group with its registration.
#[derive(Debug)]
pub(super) struct SlotRecord {
    pub(super) rank: GlobalRank,
    /// Process that registered last. `None` after another process has taken over the rank.
    pub(super) session: Option<SessionId>,
    pub(super) incarnation: u64,
    pub(super) state: MemberState,
    /// True after the process has unregistered. An active slot stays active until it fails.
    pub(super) has_left: bool,
    pub(super) endpoint: Option<Bytes>,
    /// Latest epoch that the process has acknowledged.
    pub(super) acknowledged: u64,
}

impl SlotRecord {
    fn new(rank: GlobalRank) -> Self {
        Self {
            rank,
            session: None,
            incarnation: 0,
            state: MemberState::None,
            has_left: false,
            endpoint: None,
            acknowledged: 0,
        }
    }

    /// Returns whether the present session of the rank is registered here.
    pub(super) fn is_registered(&self, ranks: &RankTable) -> bool {
        let record = ranks.record(self.rank);
        record.session.is_some()
            && self.incarnation == record.incarnation
            && self.session == record.process
            && !self.has_left
    }

    /// Ends an active membership.
    pub(super) fn deactivate(&mut self) {
        self.state = if self.has_left { MemberState::Left } else { MemberState::Inactive };
    }
}

/// Progress of a group from its creation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum GroupStage {
    /// Not every founding rank is registered, connected and published.
    Forming,
    /// The founding ranks have received the view of this epoch, and are to acknowledge it.
    Announced(u64),
    /// Proposals are possible.
    Ready,
}

/// Progress of a proposal.
#[derive(Debug)]
pub(super) enum ProposalStage {
    /// Behind others.
    Queued,
    /// First in the queue since this time, until all ranks can be activated.
    Waiting(Moment),
    /// In force since this time. The processes of the slots have not acknowledged the epoch yet.
    Committed { epoch: u64, awaited: Vec<Slot>, dropped: Vec<Slot>, since: Moment },
}

/// Proposal with all processes that wait for its outcome.
#[derive(Debug)]
pub(super) struct Proposal {
    pub(super) change: Change,
    pub(super) slots: Vec<Slot>,
    pub(super) callers: Vec<Caller>,
    pub(super) arrived: Moment,
    pub(super) stage: ProposalStage,
}

/// Instance of a group.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) id: GroupId,
    pub(super) name: String,
    pub(super) capacity: usize,
    pub(super) auto_deactivate: bool,
    /// Number of slots at the creation.
    pub(super) founders: usize,
    pub(super) slots: Vec<SlotRecord>,
    pub(super) stage: GroupStage,
    pub(super) proposals: VecDeque<Proposal>,
    pub(super) view: Arc<View>,
    /// True if views are sent to the processes.
    is_published: bool,
    /// True if the view may differ from the slots.
    pub(super) is_dirty: bool,
}

impl Group {
    pub(super) fn new(id: GroupId, spec: &GroupSpec) -> Self {
        let view = View { epoch: 0, mask: 0, generation: id.0, capacity: spec.capacity, members: Vec::new() };
        Self {
            id,
            name: spec.name.clone(),
            capacity: spec.capacity,
            auto_deactivate: spec.auto_deactivate,
            founders: spec.order.len(),
            slots: spec.order.iter().copied().map(SlotRecord::new).collect(),
            stage: GroupStage::Forming,
            proposals: VecDeque::new(),
            view: Arc::new(view),
            is_published: false,
            is_dirty: true,
        }
    }

    pub(super) fn slot_of(&self, rank: GlobalRank) -> Option<Slot> {
        self.slots.iter().position(|slot| slot.rank == rank).map(|slot| Slot(slot as u8))
    }

    pub(super) fn record(&self, slot: Slot) -> Option<&SlotRecord> {
        self.slots.get(usize::from(slot.0))
    }

    pub(super) fn record_of(&mut self, rank: GlobalRank) -> Option<&mut SlotRecord> {
        self.slots.iter_mut().find(|slot| slot.rank == rank)
    }

    /// Returns whether the slots, or those of the founding ranks, have these ranks in order.
    pub(super) fn has_order(&self, order: &[GlobalRank]) -> bool {
        [self.slots.len(), self.founders].contains(&order.len()) && self.begins(order)
    }

    /// Returns whether the first slots, or all of them, have the first of these ranks in order.
    pub(super) fn begins(&self, order: &[GlobalRank]) -> bool {
        self.slots.iter().map(|slot| slot.rank).zip(order).all(|(own, other)| own == *other)
    }

    pub(super) fn active(&self) -> impl Iterator<Item = Slot> + '_ {
        let is_active = |(_, slot): &(usize, &SlotRecord)| slot.state == MemberState::Active;
        self.slots.iter().enumerate().filter(is_active).map(|(slot, _)| Slot(slot as u8))
    }

    /// Registers the present session of a rank.
    pub(super) fn attach(&mut self, slot: Slot, session: SessionId, incarnation: u64) {
        let is_founder = usize::from(slot.0) < self.founders && self.stage != GroupStage::Ready;
        let Some(record) = self.slots.get_mut(usize::from(slot.0)) else { return };
        record.session = Some(session);
        record.incarnation = incarnation;
        record.has_left = false;
        record.endpoint = None;
        record.acknowledged = 0;
        record.state = if is_founder { MemberState::Active } else { MemberState::Inactive };
        self.is_dirty = true;
    }

    /// Appends slots for the ranks that the group does not have yet.
    pub(super) fn extend(&mut self, order: &[GlobalRank]) {
        let added = order.iter().skip(self.slots.len()).copied().map(SlotRecord::new);
        self.slots.extend(added);
        self.is_dirty = true;
    }

    /// Ends the registration of a rank. An active slot keeps its state, so that the others finish
    /// their operations undisturbed. Before the group is ready, the rank may register again.
    pub(super) fn leave(&mut self, rank: GlobalRank) {
        let is_ready = self.stage == GroupStage::Ready;
        let Some(record) = self.record_of(rank) else { return };
        if !is_ready {
            *record = SlotRecord::new(rank);
            self.is_dirty = true;
            return;
        }
        record.has_left = true;
        if record.state != MemberState::Active {
            record.state = MemberState::Left;
            record.endpoint = None;
            self.is_dirty = true;
        }
    }

    /// Returns whether no process is registered any more.
    pub(super) fn is_abandoned(&self) -> bool {
        self.slots.iter().all(|slot| slot.session.is_none() || slot.has_left)
    }

    /// Records that the session of a rank has ended.
    pub(super) fn session_ended(&mut self, rank: GlobalRank) {
        let lapses = self.auto_deactivate && self.stage == GroupStage::Ready;
        let Some(record) = self.record_of(rank) else { return };
        match record.state {
            MemberState::AwaitingActivation => record.state = MemberState::Inactive,
            MemberState::Active if lapses => {
                record.deactivate();
                record.endpoint = None;
            }
            _ => {}
        }
        self.is_dirty = true;
    }

    /// Records that a rank has a new incarnation. The slot of the incarnation before is inactive.
    pub(super) fn incarnation_began(&mut self, rank: GlobalRank, session: SessionId) {
        let is_ready = self.stage == GroupStage::Ready;
        let Some(record) = self.record_of(rank) else { return };
        if record.session.is_none() && record.state == MemberState::None {
            return;
        }
        if record.session != Some(session) {
            record.session = None;
        }
        record.endpoint = None;
        match record.state {
            MemberState::None | MemberState::Left => {}
            _ if !is_ready && !record.has_left => record.state = MemberState::None,
            _ => record.deactivate(),
        }
        self.is_dirty = true;
    }

    /// Ends the active memberships of ranks that are not healthy.
    pub(super) fn deactivate_failed(&mut self, ranks: &RankTable) {
        if !self.auto_deactivate || self.stage != GroupStage::Ready {
            return;
        }
        for slot in &mut self.slots {
            let is_current = ranks.record(slot.rank).incarnation == slot.incarnation;
            let is_healthy = is_current && ranks.healthy.contains(slot.rank);
            if slot.state == MemberState::Active && !is_healthy {
                slot.deactivate();
                slot.endpoint = None;
                self.is_dirty = true;
            }
        }
    }

    /// Returns the ranks of the slots that are registered.
    pub(super) fn registered(&self, ranks: &RankTable) -> RankSet {
        self.slots.iter().filter(|slot| slot.is_registered(ranks)).map(|slot| slot.rank).collect()
    }

    /// Makes a view of the slots, and sends it if it differs from the last one. Returns the epoch.
    pub(super) fn publish(&mut self, ranks: &RankTable, planted: Planted, outbox: &mut Outbox) -> u64 {
        if !std::mem::take(&mut self.is_dirty) {
            return self.view.epoch;
        }
        let member = |slot: &SlotRecord| Member {
            rank: slot.rank,
            incarnation: slot.incarnation,
            state: slot.state,
            rank_state: ranks.state(slot.rank, slot.incarnation),
            endpoint: slot.endpoint.clone(),
        };
        let members: Vec<Member> = self.slots.iter().map(member).collect();
        if members == self.view.members {
            return self.view.epoch;
        }
        let epoch = self.view.epoch + u64::from(!self.keeps_epoch(&members, planted));
        let mask = if active_incarnations(&members).eq(active_incarnations(&self.view.members)) {
            self.view.mask
        } else {
            epoch
        };
        let (generation, capacity) = (self.id.0, self.capacity);
        self.view = Arc::new(View { epoch, mask, generation, capacity, members });
        if self.is_published {
            self.send_view(ranks, outbox);
        }
        epoch
    }

    /// Returns whether a planted bug hides the change of an endpoint.
    fn keeps_epoch(&self, members: &[Member], planted: Planted) -> bool {
        let others = |member: &Member| Member { endpoint: None, ..member.clone() };
        planted.has(Bug::EndpointKeepsEpoch)
            && members.iter().map(others).eq(self.view.members.iter().map(others))
    }

    /// Sends the view from now on, and the present one at once.
    pub(super) fn announce(&mut self, ranks: &RankTable, outbox: &mut Outbox) {
        if !std::mem::replace(&mut self.is_published, true) {
            self.send_view(ranks, outbox);
        }
    }

    fn send_view(&self, ranks: &RankTable, outbox: &mut Outbox) {
        for rank in self.registered(ranks).iter() {
            outbox.send(ranks.connection(rank), ToAgent::View { group: self.id, view: self.view.clone() });
        }
    }

    /// Sends view and stage to one registered rank.
    pub(super) fn send_to(&self, rank: GlobalRank, ranks: &RankTable, outbox: &mut Outbox) {
        let connection = ranks.connection(rank);
        if self.is_published {
            outbox.send(connection, ToAgent::View { group: self.id, view: self.view.clone() });
        }
        if self.stage == GroupStage::Ready {
            outbox.send(connection, ToAgent::Ready(self.id));
        }
    }

    /// Continues the bootstrap. Returns whether the group has become ready.
    pub(super) fn advance_bootstrap(
        &mut self,
        ranks: &RankTable,
        planted: Planted,
        outbox: &mut Outbox,
    ) -> bool {
        if self.stage == GroupStage::Ready {
            return false;
        }
        let founders = &self.slots[..self.founders];
        let is_complete = founders.iter().all(|slot| {
            slot.is_registered(ranks) && ranks.healthy.contains(slot.rank) && slot.endpoint.is_some()
        });
        if !is_complete {
            self.stage = GroupStage::Forming;
            return false;
        }
        if self.stage == GroupStage::Forming {
            self.stage = GroupStage::Announced(self.publish(ranks, planted, outbox));
            self.announce(ranks, outbox);
        }
        let GroupStage::Announced(epoch) = self.stage else { return false };
        if self.slots[..self.founders].iter().any(|slot| slot.acknowledged < epoch) {
            return false;
        }
        self.stage = GroupStage::Ready;
        for rank in self.registered(ranks).iter() {
            outbox.send(ranks.connection(rank), ToAgent::Ready(self.id));
        }
        true
    }
}

fn active_incarnations(members: &[Member]) -> impl Iterator<Item = (usize, u64)> + '_ {
    let active = members.iter().enumerate().filter(|(_, member)| member.state == MemberState::Active);
    active.map(|(slot, member)| (slot, member.incarnation))
}
