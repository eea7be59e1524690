//! Conformance suites, oracles and fakes for tests of your own implementations (feature `testkit`).

pub mod alloc;
#[allow(unsafe_code)]
pub mod device;
mod effort;
pub mod evict;
#[allow(unsafe_code)]
mod forked;
pub mod lease;
pub mod meta;
pub mod policies;
mod ports;
mod seed;
pub mod simulate;
pub mod workloads;

pub use effort::effort;
pub use forked::{ForkedChild, fork_child};
pub use ports::free_port;
pub use seed::test_seed;
