//! Conformance suites and oracles, for tests of your own implementations (feature `testkit`).

pub mod alloc;
pub mod evict;
pub mod lease;
pub mod meta;
