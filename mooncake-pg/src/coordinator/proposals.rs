//! Proposals: changes of the active set that the coordinator puts into force.

use mooncake_core::clock::Moment;

use super::group::{Group, GroupStage, Proposal, ProposalStage};
use super::links::LinkMatrix;
use super::outbox::Outbox;
use super::ranks::{Caller, RankTable};
use crate::limits::CoordinatorLimits;
use crate::planted::{Bug, Planted};
use crate::protocol::{Change, ProposalOutcome, Response};
use crate::rank_set::RankSet;
use crate::view::{MemberState, Slot};

/// Largest number of different proposals that wait in one group.
const MAX_QUEUED: usize = 64;

/// Parts of the coordinator that a proposal needs.
pub(super) struct ProposalContext<'a> {
    pub(super) ranks: &'a mut RankTable,
    pub(super) links: &'a LinkMatrix,
    pub(super) limits: &'a CoordinatorLimits,
    pub(super) planted: Planted,
    pub(super) now: Moment,
    pub(super) outbox: &'a mut Outbox,
}

/// Adds a proposal to the queue of its group. Equal proposals share one outcome.
pub(super) fn propose(
    group: &mut Group,
    caller: Caller,
    change: Change,
    mut slots: Vec<Slot>,
    context: &mut ProposalContext<'_>,
) {
    slots.sort_unstable();
    slots.dedup();
    let reason = if group.stage != GroupStage::Ready {
        Some("the group is not ready".to_owned())
    } else if slots.is_empty() {
        Some("no slot is named".to_owned())
    } else {
        let unknown = slots.iter().find(|slot| group.record(**slot).is_none());
        unknown.map(|slot| format!("no process has this slot. slot={slot}"))
    };
    if let Some(reason) = reason {
        reject(&[caller], change, &reason, context);
        return;
    }
    // Only the last one: a proposal between would undo an earlier equal one.
    let same = |last: &&mut Proposal| {
        matches!(last.stage, ProposalStage::Queued) && last.change == change && last.slots == slots
    };
    if let Some(last) = group.proposals.back_mut().filter(same) {
        last.callers.push(caller);
        return;
    }
    if group.proposals.len() >= MAX_QUEUED {
        reject(&[caller], change, "too many proposals wait", context);
        return;
    }
    let (arrived, stage) = (context.now, ProposalStage::Queued);
    group.proposals.push_back(Proposal { change, slots, callers: vec![caller], arrived, stage });
}

/// Continues the proposals of a group. Returns the ranks that did not acknowledge in time.
pub(super) fn advance(group: &mut Group, context: &mut ProposalContext<'_>) -> RankSet {
    let mut silent = RankSet::EMPTY;
    while let Some(mut proposal) = group.proposals.pop_front() {
        if !matches!(proposal.stage, ProposalStage::Committed { .. }) {
            begin(group, &mut proposal, context);
        }
        let is_over = match &mut proposal.stage {
            ProposalStage::Committed { .. } => {
                silent = silent.union(await_acknowledgements(group, &mut proposal, context));
                finish(group, &proposal, context)
            }
            // An empty list of callers: they have their response.
            _ => proposal.callers.is_empty(),
        };
        if !is_over {
            group.proposals.push_front(proposal);
            break;
        }
    }
    silent
}

/// Puts the first proposal of the queue into force if that is possible.
fn begin(group: &mut Group, proposal: &mut Proposal, context: &mut ProposalContext<'_>) {
    let (change, now) = (proposal.change, context.now);
    let target = |slot: &Slot| group.record(*slot).map(|record| record.state == MemberState::Active);
    let wanted = Some(change == Change::Activate);
    if proposal.slots.iter().all(|slot| target(slot) == wanted) {
        let outcome = ProposalOutcome::Applied { epoch: group.view.epoch, dropped: Vec::new() };
        respond(&std::mem::take(&mut proposal.callers), &outcome, context);
        return;
    }
    if change == Change::Activate
        && let Err(reason) = can_activate(group, &proposal.slots, context)
    {
        let since = match proposal.stage {
            ProposalStage::Waiting(since) => since,
            _ => now,
        };
        proposal.stage = ProposalStage::Waiting(since);
        if deadline(proposal, since, context.limits) <= now {
            reject(&std::mem::take(&mut proposal.callers), change, &reason, context);
        }
        return;
    }
    commit(group, proposal, context);
}

fn deadline(proposal: &Proposal, since: Moment, limits: &CoordinatorLimits) -> Moment {
    since.after(limits.activation).min(proposal.arrived.after(limits.queue))
}

fn commit(group: &mut Group, proposal: &mut Proposal, context: &mut ProposalContext<'_>) {
    let before: Vec<Slot> = group.active().collect();
    for slot in &proposal.slots {
        let Some(record) = group.slots.get_mut(usize::from(slot.0)) else { continue };
        match proposal.change {
            Change::Activate => record.state = MemberState::Active,
            Change::Deactivate if record.state == MemberState::Active => record.deactivate(),
            Change::Deactivate => {}
        }
    }
    group.is_dirty = true;
    let epoch = group.publish(context.ranks, context.planted, context.outbox);
    let mut awaited: Vec<Slot> = before.into_iter().chain(group.active()).collect();
    awaited.sort_unstable();
    awaited.dedup();
    awaited.retain(|slot| group.record(*slot).is_some_and(|record| record.is_registered(context.ranks)));
    let since = context.now;
    proposal.stage = ProposalStage::Committed { epoch, awaited, dropped: Vec::new(), since };
}

/// Checks that the slots and all active ones can work together.
fn can_activate(group: &Group, slots: &[Slot], context: &ProposalContext<'_>) -> Result<(), String> {
    let future: Vec<Slot> = group.active().chain(slots.iter().copied()).collect();
    let rank_of = |slot: &Slot| group.record(*slot).map(|record| record.rank);
    let set: RankSet = future.iter().filter_map(rank_of).collect();
    for slot in &future {
        let Some(record) = group.record(*slot) else { continue };
        let lacks = if !record.is_registered(context.ranks) {
            "its process is not registered"
        } else if !context.ranks.healthy.contains(record.rank) {
            "its process is not connected to all others"
        } else if !context.links.mutual(record.rank).contains_all(set) {
            "a link of its process is broken"
        } else if record.endpoint.is_none() {
            "its process has not published an endpoint"
        } else if !matches!(record.state, MemberState::Active | MemberState::AwaitingActivation) {
            "its process has not called join_group"
        } else {
            continue;
        };
        return Err(format!("{lacks}. slot={slot}"));
    }
    Ok(())
}

/// Removes the slots that need not be awaited any more. Returns the ranks whose time is over.
///
/// A deactivation gives little time to a rank to which others have no link: most often its process
/// has ended. After an activation all active ranks have the view, or have no session any more.
fn await_acknowledgements(group: &Group, proposal: &mut Proposal, context: &ProposalContext<'_>) -> RankSet {
    let ProposalStage::Committed { epoch, awaited, dropped, since } = &mut proposal.stage else {
        return RankSet::EMPTY;
    };
    let mut silent = RankSet::EMPTY;
    let is_late = since.after(context.limits.acknowledgement) <= context.now;
    let is_short_over = proposal.change == Change::Deactivate
        && since.after(context.limits.reconnection) <= context.now
        && !context.planted.has(Bug::FailedRankIsAwaited);
    awaited.retain(|slot| {
        let Some(record) = group.record(*slot) else { return false };
        let is_stale_enough = context.planted.has(Bug::OldAcknowledgement) && record.acknowledged > 0;
        if record.acknowledged >= *epoch || record.has_left || is_stale_enough {
            return false;
        }
        if is_late {
            silent.insert(record.rank);
        }
        let is_cut_off = is_short_over && !context.ranks.healthy.contains(record.rank);
        if is_late || is_cut_off || !record.is_registered(context.ranks) {
            dropped.push(*slot);
            return false;
        }
        true
    });
    silent
}

/// Responds to the callers if no acknowledgement is missing. Returns whether the proposal is over.
fn finish(group: &Group, proposal: &Proposal, context: &mut ProposalContext<'_>) -> bool {
    let ProposalStage::Committed { awaited, dropped, .. } = &proposal.stage else { return false };
    if !awaited.is_empty() {
        return false;
    }
    let mut dropped = dropped.clone();
    dropped.sort_unstable();
    let outcome = ProposalOutcome::Applied { epoch: group.view.epoch, dropped };
    respond(&proposal.callers, &outcome, context);
    true
}

fn respond(callers: &[Caller], outcome: &ProposalOutcome, context: &mut ProposalContext<'_>) {
    for caller in callers {
        context.ranks.respond(*caller, Response::Proposed(outcome.clone()), context.outbox);
    }
}

fn reject(callers: &[Caller], change: Change, reason: &str, context: &mut ProposalContext<'_>) {
    let verb = match change {
        Change::Activate => "activate",
        Change::Deactivate => "deactivate",
    };
    let text = format!("cannot {verb} slots: {reason}");
    respond(callers, &ProposalOutcome::Rejected(text), context);
}

/// Returns the next time at which a proposal of the group has waited too long.
pub(super) fn next_deadline(group: &Group, limits: &CoordinatorLimits, now: Moment) -> Option<Moment> {
    let first = group.proposals.front()?;
    Some(match first.stage {
        ProposalStage::Queued => first.arrived,
        ProposalStage::Waiting(since) => deadline(first, since, limits),
        ProposalStage::Committed { since, .. } => {
            let short = since.after(limits.reconnection);
            if now < short { short } else { since.after(limits.acknowledgement) }
        }
    })
}
