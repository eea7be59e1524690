#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

pub mod alloc;
pub mod backoff;
pub mod clock;
mod code;
mod engine_code;
pub mod error;
pub mod evict;
pub mod fault_injection;
#[allow(unsafe_code)]
pub mod fork;
pub mod hints;
pub mod host_port;
pub mod ids;
mod kind;
pub mod memory;
pub mod meta;
pub mod replica;
pub mod settings;
pub mod sketch;
pub mod tables;
#[cfg(feature = "testkit")]
pub mod testkit;
pub mod web_origin;

pub use clock::{Clock, SharedClock};
pub use engine_code::EngineCode;
pub use error::{Error, ErrorCode, ErrorKind, Reason, Result};
