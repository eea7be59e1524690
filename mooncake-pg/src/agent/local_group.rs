//! Group that this process has registered.

use std::sync::Arc;

use bytes::Bytes;

use crate::planted::{Bug, Planted};
use crate::protocol::GroupId;
use crate::view::{MemberState, RankState, Slot, View};

/// Registration of a group in this process.
#[derive(Debug)]
pub(super) struct LocalGroup {
    pub(super) id: GroupId,
    pub(super) slot: Slot,
    pub(super) endpoint: Option<Bytes>,
    /// True after the process has declared that its slot may be activated.
    pub(super) is_joining: bool,
    pub(super) view: Option<Arc<View>>,
    pub(super) is_ready: bool,
    /// True if the own slot has been active.
    pub(super) was_active: bool,
    /// Reason why the coordinator does not know the registration any more.
    pub(super) lost: Option<String>,
}

/// Outcome of the application of a view.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Application {
    /// The view is the present one from now on.
    Applied,
    /// The view, or a later one, was applied before.
    Known,
    /// The view has the epoch of the present one and another content.
    Contradicts,
}

impl LocalGroup {
    pub(super) fn new(id: GroupId, slot: Slot) -> Self {
        Self {
            id,
            slot,
            endpoint: None,
            is_joining: false,
            view: None,
            is_ready: false,
            was_active: false,
            lost: None,
        }
    }

    /// Applies a view of a later epoch.
    pub(super) fn apply(&mut self, view: Arc<View>, planted: Planted) -> Application {
        if let Some(current) = &self.view {
            if view.epoch < current.epoch || view == *current {
                return Application::Known;
            }
            if view.epoch == current.epoch && !planted.has(Bug::EqualEpochApplied) {
                return Application::Contradicts;
            }
        }
        self.view = Some(view);
        Application::Applied
    }

    pub(super) fn epoch(&self) -> u64 {
        self.view.as_ref().map_or(0, |view| view.epoch)
    }

    /// Returns whether the own slot is active at this incarnation.
    pub(super) fn is_active(&self, incarnation: u64) -> bool {
        let member = self.view.as_ref().and_then(|view| view.members.get(usize::from(self.slot.0)));
        member.is_some_and(|member| member.state == MemberState::Active && member.incarnation == incarnation)
    }
}

/// Returns whether operations with a slot are possible, or will be after its activation.
pub fn is_usable(view: &View, slot: Slot) -> bool {
    view.members.get(usize::from(slot.0)).is_some_and(|member| {
        member.rank_state == RankState::Healthy
            && matches!(member.state, MemberState::Active | MemberState::AwaitingActivation)
            && member.endpoint.is_some()
    })
}
