//! What the measurements share: the bin scheme to compare allocators with, and the reference peer's processes.

pub mod bin_scheme;
pub mod peer;
