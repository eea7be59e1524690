//! Conformance suites and oracles, for tests of your own implementations (feature `testkit`).

pub mod meta;
