//! Settings of the control plane of a process.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::limits::{AgentLimits, CoordinatorLimits};
use crate::secret::Secret;

/// Time limit that may change while the parts of a process use it.
#[derive(Clone, Debug)]
pub struct SharedLimit(Arc<AtomicU64>);

impl SharedLimit {
    /// Creates a limit.
    pub fn new(limit: Duration) -> Self {
        Self(Arc::new(AtomicU64::new(micros(limit))))
    }

    /// Sets the limit, with a resolution of one microsecond.
    pub fn set(&self, limit: Duration) {
        self.0.store(micros(limit), Ordering::Relaxed);
    }

    /// Returns the limit.
    pub fn duration(&self) -> Duration {
        Duration::from_micros(self.0.load(Ordering::Relaxed))
    }
}

fn micros(limit: Duration) -> u64 {
    u64::try_from(limit.as_micros()).unwrap_or(u64::MAX)
}

static WINDOW: LazyLock<SharedLimit> =
    LazyLock::new(|| SharedLimit::new(CoordinatorLimits::default().window));

/// Sets the length of the reconciliation windows of this process, in microseconds in the interface
/// of Mooncake C++. The setting of rank 0 applies to the world, that of other ranks to the time
/// limits of their calls.
pub fn set_fault_reconciliation_window(window: Duration) {
    WINDOW.set(window);
}

/// Returns the length of the reconciliation windows of this process.
pub fn fault_reconciliation_window() -> Duration {
    WINDOW.duration()
}

/// Settings of the control plane of a process.
#[derive(Clone, Debug)]
pub struct ControlSettings {
    /// Limits of the coordinator, except the window.
    pub coordinator: CoordinatorLimits,
    /// Limits of the agent, except that of [`sync_after_failure`], which follows the window.
    ///
    /// [`sync_after_failure`]: crate::view::Membership::sync_after_failure
    pub agent: AgentLimits,
    /// Length of the reconciliation windows.
    pub window: SharedLimit,
    /// Longest wait for the first bytes of a connection.
    pub hello: Duration,
    /// Longest wait for a process to read what was sent to it.
    pub write: Duration,
    /// Largest number of connections of each listener.
    pub connections: usize,
    /// Secret that the processes prove to each other, if there is one.
    pub secret: Option<Secret>,
    /// Address to listen at. `None` stands for the address of the host.
    pub bind: Option<IpAddr>,
}

impl Default for ControlSettings {
    /// Returns the defaults of Mooncake C++, with the window of this process.
    fn default() -> Self {
        Self {
            coordinator: CoordinatorLimits::default(),
            agent: AgentLimits::default(),
            window: WINDOW.clone(),
            hello: Duration::from_secs(3),
            write: Duration::from_secs(10),
            connections: 512,
            secret: None,
            bind: None,
        }
    }
}
