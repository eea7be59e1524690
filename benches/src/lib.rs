//! Shared parts of the measurements: the bin scheme to compare allocators with, and the processes
//! of Mooncake C++.

pub mod bin_scheme;
pub mod peer;
