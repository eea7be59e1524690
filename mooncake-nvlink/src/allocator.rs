//! Memory for frameworks with a pluggable allocator (PyTorch), in a form that peers can open with
//! the fastest transport available.

use std::collections::HashMap;
use std::sync::OnceLock;

use mooncake_core::Result;
use mooncake_core::memory::MemorySource;
use parking_lot::Mutex;

use crate::cuda::{DeviceMemory, StreamRef};
use crate::driver::CudaDriver;

/// Kind of device memory that [`allocate`] creates, with the numbers of `mc_allocator_probe` in
/// Mooncake C++.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Memory of `cuMemAlloc`, for peers on this host.
    Plain = 0,
    /// Memory of `cuMemCreate`, for peers in the fabric.
    Fabric = 1,
    /// Unknown device.
    Unknown = -1,
    /// Missing driver.
    Unsupported = -2,
}

fn allocations() -> &'static Mutex<HashMap<usize, DeviceMemory>> {
    static ALLOCATIONS: OnceLock<Mutex<HashMap<usize, DeviceMemory>>> = OnceLock::new();
    ALLOCATIONS.get_or_init(Mutex::default)
}

/// Returns the kind of memory that a device gets.
pub fn probe(device: u32) -> Backend {
    let Ok(driver) = CudaDriver::serve(None) else { return Backend::Unsupported };
    if driver.cuda().is_err() {
        return Backend::Unsupported;
    }
    match driver.device(device) {
        Ok(device) if device.has_fabric() => Backend::Fabric,
        Ok(_) => Backend::Plain,
        Err(_) => Backend::Unknown,
    }
}

/// Allocates memory of a device and returns its address. The module owns the memory until [`free`].
///
/// # Errors
/// Returns `NOT_SUPPORTED` without a driver, `INVALID_PARAMS` for no bytes or an unknown device,
/// `BUFFER_OVERFLOW` without enough memory.
pub fn allocate(len: usize, device: u32) -> Result<u64> {
    let device = CudaDriver::serve(None)?.device(device)?;
    let memory = if device.has_fabric() {
        DeviceMemory::with_fabric(&device, len)?
    } else {
        DeviceMemory::new(&device, len)?
    };
    let at = memory.span().ptr.as_ptr().expose_provenance();
    allocations().lock().insert(at, memory);
    Ok(at as u64)
}

/// Frees memory of [`allocate`] after the current work of the stream and of the default stream.
/// Returns whether the address was such memory.
///
/// # Safety
/// `stream` is a `cudaStream_t`, or 0 for the default one. No other stream uses the memory any
/// more.
pub unsafe fn free(addr: u64, stream: u64) -> bool {
    let memory = usize::try_from(addr).ok().and_then(|addr| allocations().lock().remove(&addr));
    let Some(memory) = memory else { return false };
    let device = memory.device();
    if stream != 0 {
        // SAFETY: promised by the caller.
        let stream = unsafe { StreamRef::new(device.cuda(), stream, Some(device.number())) };
        let _ = stream.and_then(|stream| stream.mark()?.wait());
    }
    let _ = device.wait_for_default_stream();
    true
}

/// Returns the number of allocations that are not freed yet.
pub fn allocated() -> usize {
    allocations().lock().len()
}
