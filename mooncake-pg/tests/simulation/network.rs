//! Connections between agents and the coordinator, and links between agents.

use std::collections::BTreeMap;

use mooncake_core::clock::Moment;
use mooncake_pg::protocol::ConnectionId;

/// Connection of an agent to the coordinator.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) rank: u8,
    pub(crate) process: u64,
    /// Number of the connection at the agent.
    pub(crate) at_agent: ConnectionId,
    /// Time of the last delivery in each direction: deliveries keep their order.
    pub(crate) to_coordinator: Moment,
    pub(crate) to_agent: Moment,
    /// True if messages in flight are lost.
    pub(crate) is_cut: bool,
    /// True if the coordinator has closed it or has learned of its end.
    pub(crate) is_closed_by_coordinator: bool,
    pub(crate) is_closed_by_agent: bool,
}

/// Link from one process to another that is open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct OpenLink {
    pub(crate) from: u8,
    pub(crate) process: u64,
    pub(crate) attempt: mooncake_pg::agent::LinkAttempt,
}

/// Blocked paths.
#[derive(Debug, Default)]
pub(crate) struct Partitions {
    /// Ranks that cannot reach the coordinator, until a time.
    control: [Moment; 8],
    /// Pairs of ranks that cannot reach each other, until a time.
    data: BTreeMap<(u8, u8), Moment>,
}

impl Partitions {
    pub(crate) fn block_control(&mut self, rank: u8, until: Moment) {
        self.control[usize::from(rank)] = until;
    }

    /// Returns the time from which the rank reaches the coordinator.
    pub(crate) fn control_until(&self, rank: u8) -> Moment {
        self.control[usize::from(rank)]
    }

    pub(crate) fn block_data(&mut self, a: u8, b: u8, until: Moment) {
        self.data.insert((a.min(b), a.max(b)), until);
    }

    pub(crate) fn is_data_blocked(&self, a: u8, b: u8, now: Moment) -> bool {
        self.data.get(&(a.min(b), a.max(b))).is_some_and(|until| now < *until)
    }

    pub(crate) fn heal(&mut self) {
        *self = Self::default();
    }
}
