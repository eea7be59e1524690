#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod buffer;
mod config;
#[cfg_attr(not(feature = "testkit"), path = "fault/absent.rs")]
mod fault;
mod file;
mod file_ranges;
#[allow(unsafe_code)]
mod io;
pub mod layout;
mod queue;
mod recover;
#[allow(unsafe_code)]
mod run;
mod segment;
mod stats;
mod store;
#[allow(unsafe_code)]
mod transport;

pub use buffer::Frame;
pub use config::{DiskConfig, EngineKind, StoreConfig};
pub use fault::Faults;
#[cfg(feature = "testkit")]
pub use fault::{IoFault, IoFaults, IoRequest};
pub use io::RunningEngine;
pub use recover::{LockedDir, Recovery};
pub use segment::{DiskSegment, OpenSegment};
pub use stats::DiskStats;
pub use store::{FileStore, Put, StoreStats};
pub use transport::{DiskPeer, DiskTransport, Registration};
