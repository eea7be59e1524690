//! The existing system's RPC wire: coro_rpc frames around struct_pack bodies.

pub mod literal;
pub mod message;
pub mod pack;
pub mod wire;
