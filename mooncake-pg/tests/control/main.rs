//! Control plane over real sockets: agents of one process, and processes that are killed, stopped
//! and started again.
//!
//! Processes are this test program, started again for the ignored test `worker::worker`, which
//! takes its arguments from the environment.
#![allow(clippy::print_stdout, reason = "workers report to their parent")]

mod in_process;
mod processes;
mod secrets;
mod worker;

use std::time::Duration;

use mooncake_core::backoff::Pace;
use mooncake_pg::control::{ControlSettings, SharedLimit};
use mooncake_pg::limits::{AgentLimits, CoordinatorLimits};
use mooncake_pg::protocol::{AttachMode, GroupSpec};
use mooncake_pg::view::{GlobalRank, View};

/// Longest wait for an event on a busy machine.
const PATIENCE: Duration = Duration::from_secs(90);

/// Returns short limits with a long window, so that only an early close is fast.
fn settings(window: Duration) -> ControlSettings {
    let seconds = Duration::from_secs;
    let coordinator = CoordinatorLimits {
        heartbeat: seconds(40),
        acknowledgement: seconds(15),
        activation: seconds(15),
        queue: seconds(30),
        extension: seconds(15),
        reconnection: Duration::from_millis(300),
        ..CoordinatorLimits::default()
    };
    let agent = AgentLimits {
        heartbeat: Duration::from_millis(300),
        silence: seconds(10),
        outage: seconds(3),
        connect: seconds(5),
        request: seconds(20),
        proposal: seconds(40),
        ready: PATIENCE,
        join: PATIENCE,
        probe: seconds(3),
        links: Pace { first: Duration::from_millis(200), max: seconds(1) },
        ..AgentLimits::default()
    };
    let window = SharedLimit::new(window);
    ControlSettings { coordinator, agent, window, ..ControlSettings::default() }
}

fn spec(name: &str, size: u8, capacity: usize, mode: AttachMode) -> GroupSpec {
    GroupSpec {
        name: name.to_owned(),
        order: (0..size).map(GlobalRank).collect(),
        capacity,
        mode,
        auto_deactivate: true,
    }
}

fn active(view: &View) -> Vec<u8> {
    view.active().map(|slot| slot.0).collect()
}
