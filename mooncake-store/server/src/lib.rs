//! Server of a master: RPC, admin HTTP, and the metadata service of the transfer engine over HTTP.

#![deny(unsafe_code)]

#[cfg(feature = "http")]
mod admin;
#[cfg(feature = "events-zmq")]
#[cfg_attr(not(feature = "cli"), allow(dead_code, reason = "events need a part of what `doctor` compares"))]
mod block_key;
#[cfg(feature = "cli")]
pub mod cli;
#[cfg(feature = "cli")]
mod client_port;
#[cfg(feature = "cli")]
pub mod client_process;
pub mod config;
mod counting;
mod dial_back;
#[cfg_attr(not(feature = "http"), path = "endpoint_state/absent.rs")]
mod endpoint_state;
mod event_stats;
#[cfg_attr(not(feature = "events-zmq"), path = "events/absent.rs")]
mod events;
#[cfg_attr(not(feature = "http"), path = "http/absent.rs")]
mod http;
mod idle_metrics;
mod latency;
#[cfg_attr(not(feature = "cli"), allow(dead_code, reason = "a single master uses only a part of it"))]
mod leader;
mod master_server;
#[cfg(feature = "cli")]
pub mod process;
mod rates;
mod rpc;
mod scrape;
mod snapshot_stats;
mod snapshots;
mod state;
mod summary;
mod ticker;
#[cfg(feature = "cli")]
pub mod tool;
#[cfg(feature = "events-zmq")]
mod zmtp;

pub use self::event_stats::EventStats;
pub use self::master_server::{Addresses, MasterServer};
