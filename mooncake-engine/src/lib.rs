#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

mod engine;
pub mod transport_set;

pub use engine::{TransferEngine, TransferEngineBuilder};
pub use transport_set::{TransportOptions, TransportSet};
