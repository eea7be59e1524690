//! Group that this process has registered, as the data plane and its owner see it.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use mooncake_core::{Error, ErrorCode, Result};
use tokio::sync::watch;

use super::agent::{Agent, AgentState};
use super::links::open_link;
use crate::agent::{CallError, CallValue, GroupKey, is_usable};
use crate::protocol::{Change, GroupSpec, ProposalOutcome, RankInfo};
use crate::view::{Evidence, Membership, RankState, Slot, SyncOutcome, View};

/// Registration of a group. The drop ends it.
#[derive(Debug)]
pub struct GroupHandle {
    // The agent lives as long as its groups.
    agent: Agent,
    key: GroupKey,
    slot: Slot,
    views: watch::Receiver<Option<Arc<View>>>,
}

impl Agent {
    /// Registers a group.
    ///
    /// # Errors
    /// Returns `UNAVAILABLE_IN_CURRENT_STATUS` if the coordinator refuses the group, and an RPC
    /// error if it does not respond in time.
    pub async fn register_group(&self, spec: GroupSpec) -> Result<GroupHandle> {
        let (key, slot) = self.register(spec).await?;
        Ok(GroupHandle { agent: self.clone(), key, slot, views: self.state.views(key) })
    }
}

impl GroupHandle {
    fn state(&self) -> &Arc<AgentState> {
        &self.agent.state
    }

    /// Waits until all founding ranks have published an endpoint and have received the first view.
    ///
    /// # Errors
    /// Returns an RPC error if that does not happen in time, or if the coordinator does not
    /// respond.
    pub async fn wait_until_ready(&self) -> Result<()> {
        let key = self.key;
        let wait = |machine: &mut crate::agent::AgentMachine, call, now, effects: &mut Vec<_>| {
            machine.wait_until_ready(call, key, now, effects);
        };
        self.state().call("wait until the group is ready", wait).await.map(drop)
    }

    /// Declares that the own slot may be activated, and waits until it is active.
    ///
    /// # Errors
    /// Returns an error if no process activates the slot in time, or if the coordinator does not
    /// respond.
    pub async fn join(&self) -> Result<()> {
        let key = self.key;
        self.state()
            .call("join group", |machine, call, now, fx| machine.join(call, key, now, fx))
            .await
            .map(drop)
    }

    /// Proposes a change of the active set, and waits until it is in force at all ranks that it
    /// concerns.
    ///
    /// # Errors
    /// Returns an RPC error if the coordinator does not respond. A refusal is an outcome.
    pub async fn propose(&self, change: Change, slots: &[Slot]) -> Result<ProposalOutcome> {
        let (key, slots) = (self.key, slots.to_vec());
        let outcome = self
            .state()
            .outcome(|machine, call, now, fx| machine.propose(call, key, change, slots, now, fx))
            .await;
        match outcome {
            Ok(CallValue::Proposed(outcome)) => Ok(outcome),
            Ok(other) => Err(Error::internal(format!("cannot change group: outcome is {other:?}"))),
            Err(CallError::Refused(reason)) => Ok(ProposalOutcome::Rejected(reason)),
            Err(error) => Err(self.state().error("change group", error)),
        }
    }

    /// Returns for each slot whether operations with it are possible, or will be after its
    /// activation. Local knowledge.
    pub fn peer_state(&self, slots: &[Slot]) -> Vec<bool> {
        let view = self.last_view();
        slots.iter().map(|slot| view.as_ref().is_some_and(|view| is_usable(view, *slot))).collect()
    }

    /// Returns the number of slots that are active or can be activated. Local knowledge.
    pub fn num_synced(&self) -> usize {
        let Some(view) = self.last_view() else { return 0 };
        (0..view.members.len()).filter(|slot| is_usable(&view, Slot(*slot as u8))).count()
    }

    /// Returns the epoch of the last view, 0 without one.
    pub fn epoch(&self) -> u64 {
        self.last_view().map_or(0, |view| view.epoch)
    }

    /// Returns the last view, even if the own slot has not been active yet.
    pub fn last_view(&self) -> Option<Arc<View>> {
        self.state().read(|machine| machine.view(self.key).cloned())
    }

    /// Ends the registration, and waits for the coordinator.
    ///
    /// # Errors
    /// Returns an RPC error if the coordinator does not respond. The registration has ended here in
    /// any case.
    pub async fn unregister(&self) -> Result<()> {
        let key = self.key;
        self.state()
            .call("unregister group", |machine, call, now, fx| machine.unregister(call, key, now, fx))
            .await
            .map(drop)
    }

    /// Returns the process of a slot at the incarnation of the last view.
    fn info(&self, slot: Slot) -> Option<RankInfo> {
        self.state().read(|machine| {
            let member = machine.view(self.key)?.members.get(usize::from(slot.0))?;
            let info = machine.info(member.rank)?;
            (info.incarnation == member.incarnation).then(|| info.clone())
        })
    }
}

impl Drop for GroupHandle {
    fn drop(&mut self) {
        self.agent.state.abandon(self.key);
    }
}

#[async_trait]
impl Membership for GroupHandle {
    fn slot(&self) -> Slot {
        self.slot
    }

    fn rank_state(&self) -> RankState {
        self.state().read(|machine| machine.own_state(self.key))
    }

    fn view(&self) -> watch::Receiver<Option<Arc<View>>> {
        self.views.clone()
    }

    fn publish_endpoint(&self, endpoint: Bytes) {
        let key = self.key;
        self.state().step(|machine, now, effects| machine.publish_endpoint(key, endpoint, now, effects));
    }

    fn report(&self, slot: Slot, incarnation: u64, evidence: Evidence) {
        let (key, is_up) = (self.key, evidence == Evidence::Success);
        self.state().step(|machine, now, effects| {
            machine.report(key, slot, incarnation, is_up, now, effects);
        });
    }

    async fn is_alive(&self, slot: Slot) -> bool {
        if slot == self.slot {
            return true;
        }
        let Some(info) = self.info(slot) else { return false };
        let state = self.state();
        open_link(&info, state.settings.agent.probe, state.identity.as_ref()).await.is_some()
    }

    async fn sync_after_failure(&self) -> SyncOutcome {
        let key = self.key;
        match self.state().outcome(|machine, call, now, fx| machine.sync(call, key, now, fx)).await {
            Ok(CallValue::Synced { is_reconciled: true, view }) => SyncOutcome::Reconciled(view),
            Ok(CallValue::Synced { is_reconciled: false, view }) => SyncOutcome::NoPending(view),
            Ok(other) => SyncOutcome::Rejected(format!("cannot sync: outcome is {other:?}")),
            Err(error) => SyncOutcome::Rejected(self.state().error("sync", error).message().to_owned()),
        }
    }
}

/// Returns whether the error of a registration is a refusal by the coordinator.
pub fn is_refusal(error: &Error) -> bool {
    error.code() == ErrorCode::UnavailableInCurrentStatus
}
