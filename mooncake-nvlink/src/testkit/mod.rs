//! Test support for GPU memory (feature `testkit`): a fake libcuda for machines without one, and
//! suites that run on it and on hardware.

#[allow(unsafe_code)]
mod fake_cuda;
mod fixture;
#[allow(unsafe_code)]
pub mod processes;

pub use fake_cuda::{CurrentContext, FakeCuda, Fault, build, load, path};
pub use fixture::OnGpu;

use std::sync::Arc;

use mooncake_core::memory::MemorySource;

use crate::cuda::{Cuda, Device, DeviceMemory};

/// Returns a device of this process.
///
/// # Panics
/// Panics when there is no device of that number.
pub fn device(number: u32) -> Arc<Device> {
    Cuda::open(None).expect("no CUDA driver").device(number).expect("no device of that number")
}

/// Allocates memory of a device, filled with one byte. If the device is in a fabric, the fabric can
/// open the memory.
///
/// # Panics
/// Panics without enough memory.
pub fn filled(device: &Arc<Device>, len: usize, byte: u8) -> Arc<DeviceMemory> {
    let memory = match device.has_fabric() {
        true => DeviceMemory::with_fabric(device, len),
        false => DeviceMemory::new(device, len),
    };
    let memory = memory.expect("cannot allocate device memory");
    // SAFETY: new, and without another user.
    #[allow(unsafe_code)]
    unsafe { device.fill(memory.span(), byte) }.expect("cannot fill device memory");
    Arc::new(memory)
}
