//! Control plane over TCP: the coordinator as a server, and the agent of a process.
//!
//! ```no_run
//! use mooncake_pg::control::{Agent, ControlSettings, CoordinatorServer};
//! use mooncake_pg::protocol::{AttachMode, GroupSpec};
//! use mooncake_pg::view::{GlobalRank, Membership};
//!
//! # async fn run() -> mooncake_core::Result<()> {
//! let server = CoordinatorServer::start("127.0.0.1", ControlSettings::default()).await?;
//! let agent = Agent::connect(server.address(), GlobalRank(0), "127.0.0.1", ControlSettings::default()).await?;
//! let group = agent
//!     .register_group(GroupSpec {
//!         name: "cpu:0".to_owned(),
//!         order: vec![GlobalRank(0)],
//!         capacity: 1,
//!         mode: AttachMode::CreateOrAttach,
//!         auto_deactivate: true,
//!     })
//!     .await?;
//! group.publish_endpoint("addresses of the data plane".into());
//! group.wait_until_ready().await?;
//! # Ok(()) }
//! ```

mod agent;
mod connection;
mod group;
mod links;
mod server;
mod settings;
#[cfg(test)]
mod tests;

pub use self::agent::Agent;
pub use self::group::{GroupHandle, is_refusal};
pub use self::server::CoordinatorServer;
pub use self::settings::{
    ControlSettings, SharedLimit, fault_reconciliation_window, set_fault_reconciliation_window,
};
