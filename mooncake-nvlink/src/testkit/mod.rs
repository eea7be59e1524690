//! For tests of what uses memory of GPUs (feature `testkit`): a double of libcuda for machines without one, and suites that run on it and on hardware alike.

#[allow(unsafe_code)]
mod double;
mod fixture;
#[allow(unsafe_code)]
pub mod processes;

pub use double::{Double, Fault, MadeCurrent, build, load, path};
pub use fixture::OnGpu;

use std::sync::Arc;

use mooncake_core::memory::MemorySource;

use crate::cuda::{Cuda, Device, DeviceMemory};

/// A device of this process.
///
/// # Panics
/// There is none of that number.
pub fn device(number: u32) -> Arc<Device> {
    Cuda::open(None).expect("a CUDA driver").device(number).expect("a device of that number")
}

/// New memory of a device, full of one byte; of the kind that the fabric can open, where the device is in one.
///
/// # Panics
/// There is no room.
pub fn filled(device: &Arc<Device>, len: usize, byte: u8) -> Arc<DeviceMemory> {
    let memory = match device.has_fabric() {
        true => DeviceMemory::with_fabric(device, len),
        false => DeviceMemory::new(device, len),
    };
    let memory = memory.expect("memory of a device");
    // SAFETY: new, and nobody else's.
    #[allow(unsafe_code)]
    unsafe { device.fill(memory.span(), byte) }.expect("memory can be filled");
    Arc::new(memory)
}
