#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

mod departed;
#[cfg(test)]
mod departed_tests;
#[cfg(test)]
#[allow(unsafe_code)]
mod device_fault_tests;
#[allow(unsafe_code)]
mod endpoint;
mod flow;
pub mod gid;
pub mod message;
mod nic;
mod node;
mod peer;
mod poller;
mod rails;
#[allow(unsafe_code)]
mod registration;
mod send_credits;
mod sieve;
#[cfg(test)]
#[allow(unsafe_code)]
mod slice_cost_tests;
mod slices;
mod sync;
mod throughput;
#[allow(unsafe_code)]
mod topology;
#[allow(unsafe_code)]
mod transport;
#[allow(unsafe_code)]
pub mod verbs;

pub use endpoint::RdmaPeer;
pub use mooncake_transport::config::RdmaConfig;
pub use registration::Registration;
pub use transport::{NicInfo, RdmaTransport};
