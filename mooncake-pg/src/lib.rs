#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

pub mod agent;
#[allow(unsafe_code)]
pub mod call;
#[allow(unsafe_code)]
pub mod comm;
pub mod control;
pub mod coordinator;
mod driver;
pub mod dtype;
pub mod experts;
mod intra_host;
pub mod limits;
pub mod link;
mod message;
pub mod operation;
#[cfg(any(test, feature = "testkit"))]
pub mod parsers;
mod pause;
#[cfg(any(test, feature = "testkit"))]
pub mod planted;
#[cfg(not(any(test, feature = "testkit")))]
#[allow(dead_code, unreachable_pub, reason = "this build selects no bug")]
mod planted;
pub mod protocol;
pub mod rank_set;
pub mod reduce;
pub mod secret;
#[allow(unsafe_code)]
mod staging;
#[cfg(any(test, feature = "testkit"))]
#[allow(unsafe_code)]
pub mod testkit;
pub mod view;
mod wire;

pub use driver::DriverGuard;
pub use message::ExchangeTag;
