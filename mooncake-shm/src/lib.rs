#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

mod config;
#[allow(unsafe_code)]
mod copy;
mod link;
mod owner;
pub mod record;
mod server;
pub mod socket;
#[allow(unsafe_code)]
mod transport;
#[allow(unsafe_code)]
mod words;

pub use config::ShmConfig;
pub use owner::Registration;
pub use transport::{ShmPeer, ShmTransport};
