//! Conformance suites and oracles, for tests of your own implementations (feature `testkit`).

pub mod alloc;
#[allow(unsafe_code)]
pub mod device;
pub mod evict;
pub mod lease;
pub mod meta;
mod ports;

pub use ports::free_port;
