//! Doctest of the README. The examples themselves are in `examples/`.

/// README of the project.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
