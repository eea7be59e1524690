#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod bytes;
#[allow(unsafe_code)]
mod copy;
#[allow(unsafe_code)]
mod pages;
#[allow(unsafe_code)]
mod transport;

pub use mooncake_transport::config::ShmConfig;
pub use pages::Registration;
pub use transport::{ShmPeer, ShmTransport};
