//! Views of a group's membership, and the interface between membership and the data plane.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::watch;

/// Number of a process in the world, below [`MAX_RANKS`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GlobalRank(pub u8);

/// Number of a process in its group. Slots are never renumbered; a group only appends slots.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Slot(pub u8);

/// Largest number of ranks in a world and of slots in a group.
pub const MAX_RANKS: usize = 64;

impl fmt::Display for GlobalRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// State of a process in the world.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RankState {
    /// No session with the coordinator.
    Offline = 0,
    /// A session, but not connected to every healthy rank.
    Synced = 1,
    /// Connected to every other healthy rank in both directions.
    Healthy = 2,
}

/// State of a slot in its group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemberState {
    /// No process has this slot yet.
    None = 0,
    /// Registered, but not part of operations.
    Inactive = 1,
    /// Ready to be activated by a proposal.
    AwaitingActivation = 2,
    /// Part of operations.
    Active = 3,
    /// Unregistered.
    Left = 4,
}

/// A slot of a group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member {
    /// Process that owns the slot.
    pub rank: GlobalRank,
    /// Incarnation of the process: it grows with each session of the rank. Messages and evidence of
    /// another incarnation are stale.
    pub incarnation: u64,
    /// State of the slot.
    pub state: MemberState,
    /// State of the process.
    pub rank_state: RankState,
    /// Addresses of the data plane, as its owner has published them.
    pub endpoint: Option<Bytes>,
}

/// Membership of a group at one epoch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct View {
    /// Grows with every change of the view.
    pub epoch: u64,
    /// Epoch at which the set of active slots or one of their incarnations last changed. Every
    /// operation carries it: operations of an earlier mask are dropped.
    pub mask: u64,
    /// Instance of the group. Groups that are created again under one name differ in it.
    pub generation: u64,
    /// Largest number of slots.
    pub capacity: usize,
    /// Slots in use, in order.
    pub members: Vec<Member>,
}

impl View {
    /// Slots that take part in operations, in ascending order.
    pub fn active(&self) -> impl Iterator<Item = Slot> + '_ {
        self.members
            .iter()
            .enumerate()
            .filter(|(_, member)| member.state == MemberState::Active)
            .map(|(slot, _)| Slot(slot as u8))
    }

    /// Highest active slot plus one, holes included; 0 without an active slot.
    pub fn extent(&self) -> usize {
        self.active().last().map_or(0, |slot| slot.0 as usize + 1)
    }
}

/// Observation of a link by the data plane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Evidence {
    /// A transfer succeeded.
    Success,
    /// A transfer failed, or the other process does not respond.
    Failure,
}

/// Outcome of [`Membership::sync_after_failure`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SyncOutcome {
    /// The coordinator has closed a reconciliation window. The view is applied.
    Reconciled(Arc<View>),
    /// No window was open. The view is the current one.
    NoPending(Arc<View>),
    /// The coordinator refused, with its reason.
    Rejected(String),
}

/// Membership of one group, as the data plane sees it.
#[async_trait]
pub trait Membership: Send + Sync {
    /// Own slot.
    fn slot(&self) -> Slot;

    /// State of the own process. Operations are refused while it is offline.
    fn rank_state(&self) -> RankState {
        RankState::Healthy
    }

    /// Returns the current view and its changes: `None` until the first view with an active own
    /// slot. Operations are local until then.
    fn view(&self) -> watch::Receiver<Option<Arc<View>>>;

    /// Announces the addresses of the own data plane to all slots.
    fn publish_endpoint(&self, endpoint: Bytes);

    /// Reports an observation of the link to `slot` at `incarnation`.
    fn report(&self, slot: Slot, incarnation: u64, evidence: Evidence);

    /// Returns whether the process of `slot` answers now. Used after a timeout, to tell a slow
    /// process from a failed one.
    async fn is_alive(&self, slot: Slot) -> bool;

    /// Waits for the end of the open reconciliation window, and applies the resulting view before
    /// the return.
    async fn sync_after_failure(&self) -> SyncOutcome;
}
