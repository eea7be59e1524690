//! The examples are in `examples/`; this library only makes the README's program a test.

#[doc = include_str!("../../README.md")]
pub struct Readme;
