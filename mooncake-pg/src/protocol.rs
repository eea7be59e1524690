//! Messages between the coordinator of a world and the agent of each process.
//!
//! An agent has one ordered connection to the coordinator. After a connection is lost, the agent
//! opens another one, registers its session again, and sends again all that has no response yet.

use std::sync::Arc;

use bytes::Bytes;

use crate::view::{GlobalRank, MAX_RANKS, Slot, View};

/// Largest length of an endpoint in bytes.
pub const MAX_ENDPOINT: usize = 4096;
/// Largest length of a group's name, and of an address, in bytes.
pub const MAX_NAME: usize = 255;
/// Largest length of a reason in bytes.
pub const MAX_REASON: usize = 255;

/// Number of a process, drawn at random. It stays the same over all connections of the process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SessionId(pub u64);

/// Number of a coordinator, drawn at random. An agent belongs to one coordinator.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct WorldId(pub u64);

/// Number of an instance of a group, unique in its world. It is the generation of its views.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GroupId(pub u64);

/// Connection between an agent and the coordinator, as one side numbers it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ConnectionId(pub u64);

/// Number of a request in its session. Numbers grow.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RequestId(pub u64);

/// Message of an agent.
#[derive(Clone, PartialEq, Debug)]
pub enum ToCoordinator {
    /// First message of a connection.
    Register {
        /// Rank of the process.
        rank: GlobalRank,
        /// Session of the process.
        session: SessionId,
        /// World to which the agent belongs. `None` before its first registration.
        world: Option<WorldId>,
        /// Address where the process accepts probes and links.
        address: String,
    },
    /// Sign of life.
    Heartbeat {
        /// Lowest request without a response.
        unanswered: RequestId,
    },
    /// Observations of links.
    Evidence {
        /// Number of the report in its session. Numbers grow.
        report: u64,
        /// Latest observation of each link.
        links: Vec<LinkEvidence>,
    },
    /// Acknowledgement of a view.
    Applied {
        /// Group of the view.
        group: GroupId,
        /// Epoch of the view.
        epoch: u64,
    },
    /// Request with a [`ToAgent::Response`].
    Request {
        /// Number of the request.
        id: RequestId,
        /// Content of the request.
        request: Request,
    },
    /// End of the session. No message follows.
    Leave,
}

/// Observation of the link to a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinkEvidence {
    /// Rank at the other end.
    pub rank: GlobalRank,
    /// Incarnation of the rank that was observed.
    pub incarnation: u64,
    /// True after a success, false after a failure.
    pub is_up: bool,
}

/// Choice of the group that a registration attaches to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AttachMode {
    /// Attaches to a group of the same name, order and capacity, or creates one.
    CreateOrAttach,
    /// Attaches to such a group, or appends the missing ranks to a group that has a part of them.
    AttachOrExtend,
}

/// Group that a process registers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupSpec {
    /// Name that all ranks of the group use.
    pub name: String,
    /// Rank of each slot.
    pub order: Vec<GlobalRank>,
    /// Largest number of slots.
    pub capacity: usize,
    /// Choice of the group among those with the name.
    pub mode: AttachMode,
    /// True if a failed rank leaves the active set without a proposal. The first registration of
    /// the group decides.
    pub auto_deactivate: bool,
}

impl GroupSpec {
    /// Checks the group against the limits of the protocol, and that `rank` belongs to it.
    ///
    /// # Errors
    /// Returns the reason.
    pub fn check(&self, rank: GlobalRank) -> Result<(), String> {
        let mut seen = crate::rank_set::RankSet::EMPTY;
        let fits = |rank: &GlobalRank| usize::from(rank.0) < MAX_RANKS;
        if self.name.len() > MAX_NAME {
            return Err(format!("the name is too long. length={} maximum={MAX_NAME}", self.name.len()));
        }
        if !self.order.iter().all(fits) {
            return Err(format!("a rank is not below {MAX_RANKS}"));
        }
        if !self.order.iter().all(|rank| seen.insert(*rank)) {
            return Err("a rank has two slots".to_owned());
        }
        if self.capacity > MAX_RANKS || self.capacity < self.order.len() {
            return Err(format!(
                "the capacity is out of range. capacity={} size={}",
                self.capacity,
                seen.len()
            ));
        }
        if !seen.contains(rank) {
            return Err(format!("the group has no slot for this process. rank={rank}"));
        }
        Ok(())
    }
}

/// Change of the active set that a proposal asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// The slots become active.
    Activate,
    /// The slots become inactive.
    Deactivate,
}

/// Request of an agent.
#[derive(Clone, PartialEq, Debug)]
pub enum Request {
    /// Registers a group.
    RegisterGroup(GroupSpec),
    /// Registers an instance again, after the process has received another incarnation.
    Reattach(GroupId),
    /// Ends the registration of an instance.
    UnregisterGroup(GroupId),
    /// Announces the addresses of the data plane.
    PublishEndpoint {
        /// Group of the endpoint.
        group: GroupId,
        /// Addresses, opaque to the coordinator.
        endpoint: Bytes,
    },
    /// Declares that the own slot may be activated.
    ConfirmReady(GroupId),
    /// Proposes a change of the active set.
    Propose {
        /// Group to change.
        group: GroupId,
        /// Kind of the change.
        change: Change,
        /// Slots to change, in ascending order.
        slots: Vec<Slot>,
    },
    /// Waits for the end of the open reconciliation window.
    Sync(GroupId),
}

/// Message of the coordinator.
#[derive(Clone, PartialEq, Debug)]
pub enum ToAgent {
    /// Response to a registration.
    Registered {
        /// World of the coordinator.
        world: WorldId,
        /// Incarnation of the process.
        incarnation: u64,
    },
    /// Refusal of a registration.
    Refused {
        /// Reason in words.
        reason: String,
        /// True if a later attempt may succeed.
        may_retry: bool,
    },
    /// Another process has taken over the rank.
    Replaced,
    /// Response to a heartbeat.
    HeartbeatTaken,
    /// Acknowledgement of every report up to a number.
    EvidenceTaken {
        /// Number of the last report.
        report: u64,
    },
    /// All processes with a session.
    Ranks(Vec<RankInfo>),
    /// Ranks to probe at once, with their incarnations. A window waits for the results.
    Suspects(Vec<(GlobalRank, u64)>),
    /// View of a group. The agent acknowledges it.
    View {
        /// Group of the view.
        group: GroupId,
        /// The view.
        view: Arc<View>,
    },
    /// All founding ranks have acknowledged the first view of a group.
    Ready(GroupId),
    /// Response to a request.
    Response {
        /// Number of the request.
        id: RequestId,
        /// Content of the response.
        response: Response,
    },
}

/// Process with a session.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankInfo {
    /// Rank of the process.
    pub rank: GlobalRank,
    /// Incarnation of the rank.
    pub incarnation: u64,
    /// Session of the process.
    pub session: SessionId,
    /// Address where the process accepts probes and links.
    pub address: String,
}

/// Response to a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Response {
    /// The process is registered in a group.
    Attached {
        /// Instance of the group.
        group: GroupId,
        /// Own slot.
        slot: Slot,
    },
    /// The request is done.
    Done,
    /// Outcome of a proposal.
    Proposed(ProposalOutcome),
    /// Outcome of [`Request::Sync`]. The view of this epoch has been sent before.
    Synced {
        /// True if a window was open.
        is_reconciled: bool,
        /// Epoch of the group.
        epoch: u64,
    },
    /// Refusal, with its reason.
    Refused(String),
}

/// Outcome of a proposal.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ProposalOutcome {
    /// Refusal, with its reason.
    Rejected(String),
    /// The change is in force, and all ranks that it concerns have acknowledged it.
    Applied {
        /// Epoch of the group.
        epoch: u64,
        /// Slots whose processes did not acknowledge in time, in ascending order.
        dropped: Vec<Slot>,
    },
}
