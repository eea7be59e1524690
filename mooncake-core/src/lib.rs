#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

pub mod alloc;
pub mod evict;
pub mod ids;
