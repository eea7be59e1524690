//! Time limits of the control plane.

use std::time::Duration;

use mooncake_core::backoff::Pace;

/// Time limits of a coordinator.
#[derive(Clone, Debug)]
pub struct CoordinatorLimits {
    /// Longest time without a message of a process before its session ends.
    pub heartbeat: Duration,
    /// Length of a reconciliation window.
    pub window: Duration,
    /// Longest wait for the acknowledgements of a proposal.
    pub acknowledgement: Duration,
    /// Longest wait of a proposal until all ranks can be activated.
    pub activation: Duration,
    /// Longest wait of a proposal in its queue, activation included.
    pub queue: Duration,
    /// Longest wait of a registration for the group that it extends.
    pub extension: Duration,
    /// Time that a process has for a new connection before its lost connection counts as evidence,
    /// and for the acknowledgement of a deactivation while it is not connected to all others. A new
    /// session is not replaced by another process for this time.
    pub reconnection: Duration,
    /// Largest step of the coordinator's clock. A longer time without a call means that the process
    /// was stopped. That time does not count against others.
    pub step: Duration,
}

impl Default for CoordinatorLimits {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_secs(30),
            window: Duration::from_secs(30),
            acknowledgement: Duration::from_secs(20),
            activation: Duration::from_secs(20),
            queue: Duration::from_secs(40),
            extension: Duration::from_secs(20),
            reconnection: Duration::from_millis(500),
            step: Duration::from_secs(2),
        }
    }
}

/// Time limits of an agent.
#[derive(Clone, Debug)]
pub struct AgentLimits {
    /// Interval of heartbeats.
    pub heartbeat: Duration,
    /// Longest time without a message of the coordinator before the connection is replaced.
    pub silence: Duration,
    /// Longest time without a connection before calls fail.
    pub outage: Duration,
    /// Longest wait for a connection, and for the response to a registration.
    pub connect: Duration,
    /// Longest wait for the response to a request.
    pub request: Duration,
    /// Longest wait for the outcome of a proposal.
    pub proposal: Duration,
    /// Longest wait for the end of a reconciliation window.
    pub sync: Duration,
    /// Longest wait until a group is ready.
    pub ready: Duration,
    /// Longest wait for the activation of the own slot.
    pub join: Duration,
    /// Longest wait for the response to a probe.
    pub probe: Duration,
    /// Pauses between attempts to open a link.
    pub links: Pace,
    /// Pauses between attempts to connect to the coordinator.
    pub reconnects: Pace,
}

impl AgentLimits {
    /// Returns the limits for a window of this length.
    #[must_use]
    pub fn for_window(mut self, window: Duration) -> Self {
        self.sync = self.request.max(window.saturating_mul(2));
        self
    }
}

impl Default for AgentLimits {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_secs(1),
            silence: Duration::from_secs(5),
            outage: Duration::from_secs(10),
            connect: Duration::from_secs(3),
            request: Duration::from_secs(30),
            proposal: Duration::from_secs(80),
            sync: Duration::from_secs(60),
            ready: Duration::from_secs(300),
            join: Duration::from_secs(300),
            probe: Duration::from_secs(3),
            links: Pace { first: Duration::from_secs(1), max: Duration::from_secs(10) },
            reconnects: Pace { first: Duration::from_millis(100), max: Duration::from_secs(1) },
        }
    }
}
