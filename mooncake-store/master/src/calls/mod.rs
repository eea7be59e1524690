//! Calls: the public methods of [`Master`], one module for each subject, and the RPC handlers.

mod announce_pace;
mod chains;
mod client_table;
mod clients;
mod copies;
mod curve;
mod disk_work;
mod disks;
mod drains;
mod expired;
#[cfg(feature = "testkit")]
mod fault_injection;
mod files;
mod handlers;
mod hints;
mod inventory;
mod journal;
mod lookup;
pub(crate) mod master;
mod metrics;
mod misses;
mod promises;
mod promotions;
pub(crate) mod put;
mod remove;
mod snapshots;
mod statistics;
mod tasks;
mod tenants;
pub(crate) mod tick;

pub use self::master::Master;
