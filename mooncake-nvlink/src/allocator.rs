//! Memory for frameworks that let others allocate (PyTorch's pluggable allocator): such that peers can open it by the best way there is.

use std::collections::HashMap;
use std::sync::OnceLock;

use mooncake_core::Result;
use mooncake_core::memory::MemorySource;
use parking_lot::Mutex;

use crate::cuda::{DeviceMemory, StreamRef};
use crate::driver::CudaDriver;

/// What [`allocate`] makes of a device's memory, by the numbers of the existing system's `mc_allocator_probe`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// `cuMemAlloc`: peers of this host.
    Plain = 0,
    /// `cuMemCreate`: peers in the fabric.
    Fabric = 1,
    /// There is no such device.
    Unknown = -1,
    /// There is no driver.
    Unsupported = -2,
}

fn live() -> &'static Mutex<HashMap<usize, DeviceMemory>> {
    static LIVE: OnceLock<Mutex<HashMap<usize, DeviceMemory>>> = OnceLock::new();
    LIVE.get_or_init(Mutex::default)
}

/// What a device's memory is made of.
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

/// Allocates memory of a device; its address. It is this module's until [`free`].
///
/// # Errors
/// `NOT_SUPPORTED` without a driver, `INVALID_PARAMS` for no bytes or no such device, `BUFFER_OVERFLOW` when there is no room.
pub fn allocate(len: usize, device: u32) -> Result<u64> {
    let device = CudaDriver::serve(None)?.device(device)?;
    let fabric = if device.has_fabric() {
        DeviceMemory::with_fabric(&device, len)
    } else {
        DeviceMemory::new(&device, len)
    };
    // A machine may have the hardware and not the permission to export.
    let memory = fabric.or_else(|_| DeviceMemory::new(&device, len))?;
    let at = memory.span().ptr.as_ptr().expose_provenance();
    live().lock().insert(at, memory);
    Ok(at as u64)
}

/// Frees what [`allocate`] gave, when the work is over that the stream and the default one have now; whether it was that.
///
/// # Safety
/// `stream` is a `cudaStream_t`, 0 for the default one. No other stream uses the memory any more.
pub unsafe fn free(addr: u64, stream: u64) -> bool {
    let memory = usize::try_from(addr).ok().and_then(|addr| live().lock().remove(&addr));
    let Some(memory) = memory else { return false };
    let device = memory.device();
    if stream != 0 {
        // SAFETY: promised by the caller.
        let stream = unsafe { StreamRef::new(device.cuda(), stream, Some(device.number())) };
        let _ = stream.and_then(|stream| stream.mark()?.wait());
    }
    let _ = device.settle();
    true
}

/// Allocations that are not freed yet.
pub fn allocated() -> usize {
    live().lock().len()
}
