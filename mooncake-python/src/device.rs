//! GPU memory, as far as this process can access it.

use mooncake_core::memory::{Location, device_driver};
use mooncake_nvlink::CudaDriver;
use pyo3::prelude::*;

use crate::args::Uint;
use crate::interpreter::detached;

/// Returns the number of the GPU whose memory contains an address. Returns `None` for unallocated
/// memory and for a GPU that this process cannot use.
#[pyfunction]
pub(crate) fn device_of(address: Uint) -> Option<u32> {
    let allocation = device_driver()?.allocation(address.0)?;
    match allocation.location {
        Location::Cuda(device) => Some(device),
        _ => None,
    }
}

/// Returns the reason why CUDA is unavailable, or `None` if it is available. Loads the driver's
/// library.
#[pyfunction]
pub(crate) fn cuda_missing(py: Python<'_>) -> Option<String> {
    detached(py, || CudaDriver::serve(None).and_then(|driver| driver.cuda().map(drop)).err())
        .map(|error| error.to_string())
}
