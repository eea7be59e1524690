#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod addressed;
#[cfg(feature = "cli")]
pub mod cli;
#[allow(unsafe_code)]
mod engine;
pub mod environment;
pub mod flags;
mod ids;
#[allow(unsafe_code)]
mod managed;
#[cfg(feature = "transport-nvlink")]
#[allow(unsafe_code)]
pub mod on_stream;
mod summary;
pub mod transport_set;

pub use engine::{TransferEngine, TransferEngineBuilder};
pub use ids::{AddressRequest, INVALID_BATCH};
pub use transport_set::{TransportOptions, TransportSet, Wires};
