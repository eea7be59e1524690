//! Summary of the devices of this host, for tools.

use mooncake_core::memory::MemorySource;
use mooncake_core::{Error, Result};

use crate::cuda::{Allocation, DeviceMemory, HandleKind};
use crate::driver::CudaDriver;

/// Describes each device of this host: its name, the CUDA version of the driver, and which peers
/// can open its memory, found by an export of some memory. Opens all devices. The description of a
/// device that cannot be used, or whose memory no peer can open, is an error with its name.
///
/// # Errors
/// Returns `NOT_SUPPORTED` without a driver or a device, with what to install.
pub fn device_summaries() -> Result<Vec<Result<String>>> {
    let driver = CudaDriver::serve(None)?;
    let count = driver.cuda()?.device_count()?;
    Ok((0..count).map(|number| summary(&driver, number)).collect())
}

fn summary(driver: &CudaDriver, number: u32) -> Result<String> {
    const LEN: usize = 4096;
    let with_device = |name: &str, error: Error| {
        Error::new(error.code(), format!("cuda:{number}{name} cannot be opened to peers: {error}"))
    };
    let device = driver.device(number).map_err(|error| with_device("", error))?;
    let name = device.name();
    let peers = if device.has_fabric() {
        "its NVLink fabric"
    } else {
        DeviceMemory::new(&device, LEN)
            .and_then(|memory| Allocation::export(&device, memory.span(), &[HandleKind::Ipc]))
            .map_err(|error| with_device(&format!(", {name},"), error))?;
        "this host (CUDA IPC)"
    };
    let version = device.cuda().driver_version();
    let (major, minor) = (version / 1000, version % 1000 / 10);
    Ok(format!("cuda:{number}, {name}, driver for CUDA {major}.{minor}: open to peers of {peers}"))
}
