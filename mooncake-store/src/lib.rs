#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

pub mod api;
pub mod client;
pub mod config;
#[cfg(feature = "local")]
pub mod local;
pub mod master;
mod metrics;
pub mod protocol;
pub mod server;
#[cfg(feature = "cli")]
pub mod tool;

pub use mooncake_engine::transport_set;
