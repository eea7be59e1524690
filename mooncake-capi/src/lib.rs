#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod arguments;
mod engine;
mod handles;
mod runtime;
#[cfg(feature = "store")]
pub mod store;

pub use engine::{calls, links, shutdown, types};
