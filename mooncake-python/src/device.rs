//! Memory of GPUs, as far as this process reaches it.

use mooncake_core::memory::{Location, device_driver};
use mooncake_nvlink::CudaDriver;
use pyo3::prelude::*;

use crate::args::Uint;

/// Number of the GPU whose memory an address lies in; `None` for memory of nobody, and for a GPU that is not reached from here.
#[pyfunction]
pub(crate) fn device_of(address: Uint) -> Option<u32> {
    let allocation = device_driver()?.allocation(address.0)?;
    match allocation.location {
        Location::Cuda(device) => Some(device),
        _ => None,
    }
}

/// Why CUDA cannot be used here; `None` where it can. Loads the driver's library.
#[pyfunction]
pub(crate) fn cuda_missing(py: Python<'_>) -> Option<String> {
    py.detach(|| CudaDriver::serve(None).and_then(|driver| driver.cuda().map(drop)).err())
        .map(|error| error.to_string())
}
