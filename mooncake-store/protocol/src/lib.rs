//! The existing system's RPC wire: coro_rpc frames around struct_pack bodies.

mod calls;
pub mod client;
mod eager;
pub mod frame;
mod heartbeat;
pub mod inventory;
pub mod literal;
pub mod message;
pub mod meter;
pub mod pack;
pub mod place;
pub(crate) mod record;
pub mod remote;
mod retry;
pub mod server;
pub mod service;
pub mod tiers;
pub mod wire;
