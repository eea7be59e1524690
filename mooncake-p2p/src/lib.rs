#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

pub mod catalogue;
mod checksum;
mod expiry;
mod object;
mod options;
mod records;
pub mod schedule;
mod store;

pub use catalogue::{Catalogue, Location, Payload, Role, Shard};
pub use options::{GetOptions, GetProgress, P2pOptions, RegisterOptions};
pub use store::{ObjectInfo, P2pStore, engine_builder};
