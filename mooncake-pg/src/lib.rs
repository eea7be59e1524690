#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

pub mod agent;
pub mod control;
pub mod coordinator;
pub mod limits;
#[cfg(any(test, feature = "testkit"))]
pub mod planted;
#[cfg(not(any(test, feature = "testkit")))]
#[path = "planted/absent.rs"]
mod planted;
pub mod protocol;
pub mod rank_set;
pub mod view;
mod wire;
