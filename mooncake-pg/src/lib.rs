#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod call;
#[allow(unsafe_code)]
pub mod comm;
pub mod dtype;
pub mod link;
mod message;
pub mod operation;
pub mod reduce;
#[allow(unsafe_code)]
mod staging;
#[cfg(any(test, feature = "testkit"))]
#[allow(unsafe_code)]
pub mod testkit;
pub mod view;

pub use message::ExchangeTag;
