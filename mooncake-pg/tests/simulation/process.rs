//! Processes with their agents, and the program that runs in each of them.

use std::collections::BTreeMap;

use mooncake_core::clock::Moment;
use mooncake_pg::agent::{AgentMachine, CallId, GroupKey};
use mooncake_pg::protocol::{AttachMode, Change, ConnectionId, GroupId};
use mooncake_pg::view::Slot;

use crate::world::Event;

/// Progress of the program with one group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stage {
    Absent,
    Registering,
    WaitsForReady,
    Works,
    Joining,
    Unregistering,
}

/// Group of the program.
#[derive(Debug)]
pub(crate) struct AppGroup {
    pub(crate) key: Option<GroupKey>,
    pub(crate) stage: Stage,
    pub(crate) refusals: u32,
    pub(crate) mode: AttachMode,
    /// True if an operation waits for a slow process.
    pub(crate) is_blocked: bool,
}

/// Process of a rank.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) id: u64,
    pub(crate) agent: AgentMachine,
    pub(crate) is_paused: bool,
    /// Events that arrived while the process was stopped.
    pub(crate) backlog: Vec<Event>,
    pub(crate) tick_at: Option<Moment>,
    pub(crate) connections: BTreeMap<ConnectionId, u64>,
    pub(crate) epochs: BTreeMap<GroupKey, u64>,
    pub(crate) groups: Vec<AppGroup>,
    pub(crate) last_call: u64,
}

/// Call of a program that has not ended.
#[derive(Clone, Debug)]
pub(crate) struct PendingCall {
    pub(crate) kind: CallKind,
    pub(crate) group: usize,
    pub(crate) deadline: Moment,
}

/// Kind of a call, with the facts that its outcome is checked against.
#[derive(Clone, Debug)]
pub(crate) enum CallKind {
    Session,
    Register { may_succeed: bool },
    Ready,
    Join,
    Unregister,
    Propose { change: Change },
    Sync { mask: u64, failed: Vec<(Slot, u64)> },
}

/// Proposal that has reached the coordinator.
#[derive(Clone, Debug)]
pub(crate) struct Proposed {
    pub(crate) group: GroupId,
    pub(crate) change: Change,
    pub(crate) slots: Vec<Slot>,
}

impl Process {
    pub(crate) fn next_call(&mut self) -> CallId {
        self.last_call += 1;
        CallId(self.last_call)
    }
}
