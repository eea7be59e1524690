//! Calls that the owner of an agent begins.

use bytes::Bytes;
use mooncake_core::clock::Moment;

use super::calls::{Awaited, CallError, CallId, CallValue, GroupKey, Waiter};
use super::local_group::LocalGroup;
use super::{AgentEffect, AgentMachine};
use crate::protocol::{Change, GroupSpec, MAX_ENDPOINT, Request, ToCoordinator};
use crate::view::{RankState, Slot};

impl AgentMachine {
    /// Waits for the registration of the session.
    pub fn wait_for_session(&mut self, call: CallId, now: Moment, effects: &mut Vec<AgentEffect>) {
        if self.is_registered() {
            effects.push(AgentEffect::Finished { call, outcome: Ok(CallValue::Done) });
        } else {
            self.wait(call, Awaited::Session, now.after(self.limits.request), now, effects);
        }
    }

    /// Registers a group.
    pub fn register_group(
        &mut self,
        call: CallId,
        spec: GroupSpec,
        now: Moment,
        effects: &mut Vec<AgentEffect>,
    ) {
        if let Err(reason) = spec.check(self.rank) {
            effects.push(AgentEffect::Finished { call, outcome: Err(CallError::Refused(reason)) });
            return;
        }
        let deadline = now.after(self.limits.request);
        if self.is_unavailable(now) || !self.calls.adopt(&spec, call, deadline) {
            self.request(Request::RegisterGroup(spec), Some(call), deadline, now, effects);
        }
    }

    /// Ends the registration of a group. Later calls with it are refused.
    pub fn unregister(&mut self, call: CallId, key: GroupKey, now: Moment, effects: &mut Vec<AgentEffect>) {
        let Some(group) = self.groups.remove(&key) else {
            effects.push(AgentEffect::Finished { call, outcome: Ok(CallValue::Done) });
            return;
        };
        self.keys.remove(&group.id);
        let ended = CallError::Unavailable("the group was unregistered".to_owned());
        for awaited in [Awaited::Ready(key), Awaited::Active(key)] {
            self.finish_waiters(awaited, &Err(ended.clone()), effects);
        }
        let deadline = now.after(self.limits.request);
        self.request(Request::UnregisterGroup(group.id), Some(call), deadline, now, effects);
    }

    /// Announces the addresses of the data plane.
    pub fn publish_endpoint(
        &mut self,
        key: GroupKey,
        endpoint: Bytes,
        now: Moment,
        effects: &mut Vec<AgentEffect>,
    ) {
        if endpoint.len() > MAX_ENDPOINT {
            tracing::error!(length = endpoint.len(), MAX_ENDPOINT, "endpoint is too long");
            return;
        }
        let Some(group) = self.groups.get_mut(&key) else { return };
        group.endpoint = Some(endpoint.clone());
        let group = group.id;
        self.request(Request::PublishEndpoint { group, endpoint }, None, now, now, effects);
    }

    /// Waits until a group is ready.
    pub fn wait_until_ready(
        &mut self,
        call: CallId,
        key: GroupKey,
        now: Moment,
        effects: &mut Vec<AgentEffect>,
    ) {
        match self.group(key) {
            Ok(group) if group.is_ready => {
                effects.push(AgentEffect::Finished { call, outcome: Ok(CallValue::Done) });
            }
            Ok(_) => {
                self.wait(call, Awaited::Ready(key), now.after(self.limits.ready), now, effects);
            }
            Err(error) => effects.push(AgentEffect::Finished { call, outcome: Err(error) }),
        }
    }

    /// Declares that the own slot may be activated, and waits until it is active.
    pub fn join(&mut self, call: CallId, key: GroupKey, now: Moment, effects: &mut Vec<AgentEffect>) {
        let incarnation = self.incarnation.unwrap_or(0);
        let id = match self.group(key) {
            Ok(group) if group.is_active(incarnation) => {
                effects.push(AgentEffect::Finished { call, outcome: Ok(CallValue::Done) });
                return;
            }
            Ok(group) => group.id,
            Err(error) => {
                effects.push(AgentEffect::Finished { call, outcome: Err(error) });
                return;
            }
        };
        if self.wait(call, Awaited::Active(key), now.after(self.limits.join), now, effects) {
            // The coordinator withdraws the endpoint of a slot that fails.
            if let Some(group) = self.groups.get_mut(&key) {
                group.is_joining = true;
                if let Some(endpoint) = group.endpoint.clone() {
                    let request = Request::PublishEndpoint { group: id, endpoint };
                    self.request(request, None, now, now, effects);
                }
            }
            self.request(Request::ConfirmReady(id), None, now, now, effects);
        }
    }

    /// Proposes a change of the active set.
    pub fn propose(
        &mut self,
        call: CallId,
        key: GroupKey,
        change: Change,
        slots: Vec<Slot>,
        now: Moment,
        effects: &mut Vec<AgentEffect>,
    ) {
        match self.group(key).map(|group| group.id) {
            Ok(group) => {
                let deadline = now.after(self.limits.proposal);
                self.request(Request::Propose { group, change, slots }, Some(call), deadline, now, effects);
            }
            Err(error) => effects.push(AgentEffect::Finished { call, outcome: Err(error) }),
        }
    }

    /// Waits for the end of the open reconciliation window.
    pub fn sync(&mut self, call: CallId, key: GroupKey, now: Moment, effects: &mut Vec<AgentEffect>) {
        match self.group(key).map(|group| group.id) {
            Ok(group) => {
                let deadline = now.after(self.limits.sync);
                self.request(Request::Sync(group), Some(call), deadline, now, effects);
            }
            Err(error) => effects.push(AgentEffect::Finished { call, outcome: Err(error) }),
        }
    }

    /// Forgets a call whose caller does not wait any more.
    pub fn cancel(&mut self, call: CallId) {
        self.calls.cancel(call);
    }

    /// Ends the session. All calls fail from now on.
    pub fn leave(&mut self, effects: &mut Vec<AgentEffect>) {
        self.send(ToCoordinator::Leave, effects);
        self.end("the agent was shut down".to_owned(), effects);
    }

    fn group(&self, key: GroupKey) -> Result<&LocalGroup, CallError> {
        match self.groups.get(&key) {
            None => Err(CallError::Unavailable("the group was unregistered".to_owned())),
            Some(LocalGroup { lost: Some(reason), .. }) => Err(CallError::Refused(reason.clone())),
            Some(group) => Ok(group),
        }
    }

    /// Adds a waiter, or fails its call at once. Returns whether the call waits.
    fn wait(
        &mut self,
        call: CallId,
        awaited: Awaited,
        deadline: Moment,
        now: Moment,
        effects: &mut Vec<AgentEffect>,
    ) -> bool {
        let fails = self.is_unavailable(now) && self.patient() != Some(awaited);
        if fails {
            effects.push(AgentEffect::Finished { call, outcome: Err(self.unavailable()) });
        } else {
            self.calls.waiters.push(Waiter { call, awaited, deadline });
        }
        !fails
    }

    pub(super) fn request(
        &mut self,
        request: Request,
        call: Option<CallId>,
        deadline: Moment,
        now: Moment,
        effects: &mut Vec<AgentEffect>,
    ) {
        if let Some(call) = call
            && self.is_unavailable(now)
        {
            effects.push(AgentEffect::Finished { call, outcome: Err(self.unavailable()) });
            return;
        }
        let id = self.calls.add(request.clone(), call, deadline);
        self.send(ToCoordinator::Request { id, request }, effects);
    }

    /// Returns the state of the own process in a view, or offline without a session.
    pub fn own_state(&self, key: GroupKey) -> RankState {
        if !self.is_registered() {
            return RankState::Offline;
        }
        let slot = self.groups.get(&key).map(|group| group.slot);
        let view = self.view(key);
        let member = view.zip(slot).and_then(|(view, slot)| view.members.get(usize::from(slot.0)));
        member.map_or(RankState::Synced, |member| member.rank_state)
    }
}
