//! Calls: the public methods of [`Master`], one module for each subject, and the RPC handlers.

mod address_checks;
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
mod key_forms;
mod lookup;
pub(crate) mod master;
mod matching;
mod metrics;
mod misses;
mod pins;
mod prefetches;
mod probes;
mod promises;
mod promotions;
pub(crate) mod put;
mod readers;
mod remove;
mod snapshots;
mod starts;
mod statistics;
mod tasks;
mod tenants;
pub(crate) mod tick;
mod weight_moves;
mod weights;
mod zeroes;

pub use self::master::Master;
