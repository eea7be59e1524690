#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod connection_queue;
#[allow(unsafe_code)]
mod device;
#[allow(unsafe_code)]
mod driver;
pub mod frame;
mod gate;
pub mod hello;
pub mod inbox;
#[allow(unsafe_code)]
mod piece;
#[allow(unsafe_code)]
mod pool;
mod server;
#[allow(unsafe_code)]
mod session;
#[allow(unsafe_code)]
mod socket;
mod staging_pool;
mod sync;
#[allow(unsafe_code)]
mod table;
#[allow(unsafe_code)]
mod transport;

pub use frame::Framing;
pub use hello::Instance;
pub use mooncake_transport::config::TcpConfig;
pub use table::Registration;
pub use transport::{TcpPeer, TcpTransport};
