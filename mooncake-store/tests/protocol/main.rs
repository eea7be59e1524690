//! RPC protocol: formats, limits, client and server, a master under too many requests, and a
//! conversation recorded from Mooncake C++.
//!
//! The tests share one process. [`limits`] replaces the allocator of this program by one that
//! counts the memory of each thread, so other tests do not disturb its counts. `cargo xtask
//! interop` starts the ignored tests one by one, each with a new master of Mooncake C++.

mod answers;
mod batches;
mod budgets;
mod conversation;
mod limits;
mod live;
mod members;
mod overload;
mod prefix;
mod rpc;
mod table;
mod tier_answers;
mod weights;
