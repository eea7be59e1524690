//! Native half of the Python package `mooncake`. Users import the Python half, `python/mooncake`.
#![deny(unsafe_code)]
#![allow(
    clippy::needless_pass_by_value,
    clippy::unused_self,
    reason = "arguments and receivers are what Python calls need"
)]

#[allow(unsafe_code)]
pub mod allocator;
mod args;
mod awaitable;
mod client;
mod config;
mod delivery;
mod device;
mod engine;
mod error;
mod exit;
mod handle;
#[allow(unsafe_code)]
mod host;
mod interpreter;
mod lease;
mod log;
mod memory;
mod messages;
mod p2p;
#[cfg_attr(not(feature = "pg"), path = "pg/absent.rs")]
mod pg;
mod pool;
mod programs;
mod runtime;
mod signals;
mod store;
mod topology;
mod web;

use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;

#[pymodule]
fn _mooncake(module: &Bound<'_, PyModule>) -> PyResult<()> {
    in_main_interpreter()?;
    error::add_to(module)?;
    pg::add_to(module)?;
    module.add_class::<store::Store>()?;
    module.add_class::<store::ReplicaDescriptor>()?;
    module.add_class::<store::MemoryDescriptor>()?;
    module.add_class::<store::DiskDescriptor>()?;
    module.add_class::<store::Descriptor>()?;
    module.add_class::<store::LocatedObject>()?;
    module.add_class::<store::RangedReadSnapshot>()?;
    module.add_class::<store::ExistOptions>()?;
    module.add_class::<store::QueryTaskResponse>()?;
    module.add_class::<config::ReplicateConfig>()?;
    module.add_class::<error::LastError>()?;
    module.add_class::<awaitable::Canceller>()?;
    module.add_class::<handle::BufferHandle>()?;
    module.add_class::<pool::BufferPool>()?;
    module.add_class::<pool::BufferLease>()?;
    module.add_class::<pool::BufferLeaseView>()?;
    module.add_class::<host::HostMemAllocator>()?;
    module.add_class::<engine::EngineCalls>()?;
    module.add_class::<engine::InnerTransferEngine>()?;
    module.add_class::<messages::Sender>()?;
    module.add_class::<messages::Receiver>()?;
    module.add_class::<messages::Handled>()?;
    module.add_class::<p2p::P2pObject>()?;
    module.add_class::<p2p::P2pStore>()?;
    module.add_function(wrap_pyfunction!(device::cuda_missing, module)?)?;
    module.add_function(wrap_pyfunction!(device::device_of, module)?)?;
    module.add_function(wrap_pyfunction!(host::bind_to_numa_node, module)?)?;
    module.add_function(wrap_pyfunction!(host::check_memory, module)?)?;
    module.add_function(wrap_pyfunction!(host::get_alloc_func_addr, module)?)?;
    module.add_function(wrap_pyfunction!(host::get_free_func_addr, module)?)?;
    module.add_function(wrap_pyfunction!(log::_start_log, module)?)?;
    module.add_function(wrap_pyfunction!(log::_next_record, module)?)?;
    module.add_function(wrap_pyfunction!(log::_stop_log, module)?)?;
    module.add_function(wrap_pyfunction!(programs::run_bench, module)?)?;
    module.add_function(wrap_pyfunction!(programs::run_client, module)?)?;
    module.add_function(wrap_pyfunction!(programs::run_master, module)?)?;
    module.add_function(wrap_pyfunction!(programs::run_tool, module)?)?;
    module.add_class::<web::WebGuard>()?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(runtime::_after_fork, module)?)?;
    module.add_function(wrap_pyfunction!(store::_close_all, module)?)?;
    module.add_function(wrap_pyfunction!(topology::local_topology, module)?)?;
    Ok(())
}

/// Refuses subinterpreters. Stores, log and signal handlers are shared by the whole process, so the
/// end of a second interpreter would close those of the first. Python 3.12 and later refuse by
/// themselves.
fn in_main_interpreter() -> PyResult<()> {
    // SAFETY: the caller is attached to an interpreter, whose identifier is read.
    #[allow(unsafe_code)]
    let number = unsafe { pyo3::ffi::PyInterpreterState_GetID(pyo3::ffi::PyInterpreterState_Get()) };
    match number {
        0 => Ok(()),
        _ => Err(PyImportError::new_err(
            "cannot import mooncake in a subinterpreter: only the main interpreter is supported",
        )),
    }
}
