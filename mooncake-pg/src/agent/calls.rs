//! Calls of the owner of an agent, their requests and their time limits.

use std::collections::BTreeMap;
use std::sync::Arc;

use mooncake_core::clock::Moment;

use crate::protocol::{GroupSpec, ProposalOutcome, Request, RequestId};
use crate::view::{Slot, View};

/// Call, as the owner of the agent numbers it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CallId(pub u64);

/// Registration of a group in this process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GroupKey(pub u64);

/// Value of a call that has succeeded.
#[derive(Clone, PartialEq, Debug)]
pub enum CallValue {
    /// The call is done.
    Done,
    /// The group is registered.
    Registered {
        /// Registration.
        group: GroupKey,
        /// Own slot.
        slot: Slot,
    },
    /// Outcome of a proposal.
    Proposed(ProposalOutcome),
    /// End of a reconciliation window.
    Synced {
        /// True if a window was open.
        is_reconciled: bool,
        /// View that was applied.
        view: Arc<View>,
    },
}

/// Reason why a call has failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CallError {
    /// The coordinator has refused.
    Refused(String),
    /// No response in time.
    TimedOut(String),
    /// The coordinator does not respond, or the session has ended.
    Unavailable(String),
}

/// Request that waits for its response.
#[derive(Debug)]
pub(super) struct OpenRequest {
    pub(super) request: Request,
    /// Call that waits. `None` for requests of the agent itself, and after a timeout.
    pub(super) call: Option<CallId>,
    pub(super) deadline: Moment,
}

/// Event that a call waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Awaited {
    /// Registration of the session.
    Session,
    /// The group is ready.
    Ready(GroupKey),
    /// The own slot is active.
    Active(GroupKey),
}

/// Call that waits for an event.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) call: CallId,
    pub(super) awaited: Awaited,
    pub(super) deadline: Moment,
}

/// Calls in progress.
#[derive(Debug, Default)]
pub(super) struct Calls {
    pub(super) requests: BTreeMap<RequestId, OpenRequest>,
    pub(super) waiters: Vec<Waiter>,
    last: u64,
}

impl Calls {
    /// Adds a request and returns its number.
    pub(super) fn add(&mut self, request: Request, call: Option<CallId>, deadline: Moment) -> RequestId {
        self.last += 1;
        let id = RequestId(self.last);
        self.requests.insert(id, OpenRequest { request, call, deadline });
        id
    }

    /// Gives a registration whose caller is gone to another call for the same group. Returns true
    /// if there is such a registration.
    pub(super) fn adopt(&mut self, spec: &GroupSpec, call: CallId, deadline: Moment) -> bool {
        let orphan = self.requests.values_mut().find(|open| {
            open.call.is_none() && matches!(&open.request, Request::RegisterGroup(other) if other == spec)
        });
        match orphan {
            Some(open) => (open.call, open.deadline) = (Some(call), deadline),
            None => return false,
        }
        true
    }

    /// Returns the lowest request without a response.
    pub(super) fn unanswered(&self) -> RequestId {
        self.requests.keys().next().copied().unwrap_or(RequestId(self.last + 1))
    }

    /// Removes the calls whose time is over and returns them.
    pub(super) fn take_overdue(&mut self, now: Moment) -> Vec<CallId> {
        let mut overdue = Vec::new();
        self.requests.retain(|_, open| {
            if open.call.is_none() || open.deadline > now {
                return true;
            }
            overdue.extend(open.call.take());
            is_kept(&open.request)
        });
        self.waiters.retain(|waiter| {
            if waiter.deadline <= now {
                overdue.push(waiter.call);
            }
            waiter.deadline > now
        });
        overdue
    }

    /// Removes all calls and returns them, except those that wait for the event `kept`.
    pub(super) fn take_all(&mut self, kept: Option<Awaited>) -> Vec<CallId> {
        let mut all = Vec::new();
        self.waiters.retain(|waiter| {
            let is_kept = Some(waiter.awaited) == kept;
            if !is_kept {
                all.push(waiter.call);
            }
            is_kept
        });
        self.requests.retain(|_, open| {
            if open.call.is_none() {
                return true;
            }
            all.extend(open.call.take());
            is_kept(&open.request)
        });
        all
    }

    /// Returns whether a call waits for anything but the event that is to be kept.
    pub(super) fn has_others(&self, kept: Option<Awaited>) -> bool {
        self.requests.values().any(|open| open.call.is_some())
            || self.waiters.iter().any(|waiter| Some(waiter.awaited) != kept)
    }

    /// Removes one call, whose owner does not wait any more.
    pub(super) fn cancel(&mut self, call: CallId) {
        self.waiters.retain(|waiter| waiter.call != call);
        self.requests.retain(|_, open| {
            if open.call != Some(call) {
                return true;
            }
            open.call = None;
            is_kept(&open.request)
        });
    }

    /// Removes the calls that wait for an event and returns them.
    pub(super) fn take_waiters(&mut self, awaited: Awaited) -> Vec<CallId> {
        let mut found = Vec::new();
        self.waiters.retain(|waiter| {
            if waiter.awaited == awaited {
                found.push(waiter.call);
            }
            waiter.awaited != awaited
        });
        found
    }

    pub(super) fn next_deadline(&self) -> Option<Moment> {
        let calls = self.requests.values().filter(|open| open.call.is_some()).map(|open| open.deadline);
        calls.chain(self.waiters.iter().map(|waiter| waiter.deadline)).min()
    }
}

/// Returns whether the agent continues a request without its call. The end of a registration is
/// carried out in any case, and a group that is registered too late is unregistered.
fn is_kept(request: &Request) -> bool {
    matches!(request, Request::RegisterGroup(_) | Request::UnregisterGroup(_))
}
