//! Command line programs, run in the interpreter's process.

use std::ffi::OsString;

use pyo3::prelude::*;

use crate::interpreter::detached;

/// Runs `mooncake_client` with these command line arguments, of which the first is the program's
/// name. Returns its exit status once it stops.
#[pyfunction]
pub(crate) fn run_client(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    detached(py, || mooncake_store::local::process::run(arguments))
}

/// Runs `transfer_engine_bench` with these command line arguments, of which the first is the
/// program's name. Returns its exit status.
#[pyfunction]
pub(crate) fn run_bench(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    detached(py, || mooncake_engine::cli::bench::run(arguments))
}

/// Runs `mooncake` with these command line arguments, of which the first is the program's name.
/// Returns its exit status.
#[pyfunction]
pub(crate) fn run_tool(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    detached(py, || mooncake_store::tool::run(arguments))
}

/// Runs a master with these command line arguments, of which the first is the program's name.
/// Returns its exit status once it stops.
#[pyfunction]
pub(crate) fn run_master(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    detached(py, || mooncake_store::server::process::run(arguments))
}
