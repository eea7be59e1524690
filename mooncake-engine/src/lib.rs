#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

#[allow(dead_code, unsafe_code, reason = "a build with every feature has nothing absent")]
mod absent;
#[allow(unsafe_code)]
pub mod addressed;
mod batches;
mod built_in;
#[cfg(feature = "cli")]
pub mod cli;
#[allow(unsafe_code)]
mod engine;
pub mod environment;
mod failure_log;
pub mod flags;
mod ids;
#[allow(unsafe_code)]
mod managed;
#[allow(unsafe_code)]
pub mod on_stream;
mod summary;
pub mod transport_set;

pub use engine::{TransferEngine, TransferEngineBuilder};
pub use ids::{AddressRequest, INVALID_BATCH};
pub use transport_set::{TransportOptions, TransportSet, Transports};
