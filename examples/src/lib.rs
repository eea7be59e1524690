//! The examples are in `examples/`; this library only makes the README's program a test.

/// The project's README.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
