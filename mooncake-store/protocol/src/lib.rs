//! RPC protocol of Mooncake C++: coro_rpc frames around struct_pack bodies.

#![deny(unsafe_code)]

pub mod api;
mod busy_poll;
pub mod call;
pub mod client;
#[doc(hidden)]
pub mod connection;
pub mod data_message;
pub mod frame;
mod heartbeat;
#[cfg(feature = "http")]
#[doc(hidden)]
pub mod http;
pub mod key_form;
pub mod master_client;
pub mod message;
pub mod meter;
#[doc(hidden)]
pub mod metrics;
pub mod pack;
#[doc(hidden)]
pub mod parts;
#[doc(hidden)]
pub mod record;
pub mod report;
mod retry;
pub mod server;
pub mod server_location;
pub mod service;
pub mod type_signature;
pub mod wire;
