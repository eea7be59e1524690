//! Machine with devices, or with a fake libcuda.

use std::process::Command;

use mooncake_nvlink::Cuda;
use mooncake_nvlink::testkit::{self, FakeCuda};

/// Machine that the parts run on.
#[derive(Clone, Copy)]
pub(crate) struct Machine {
    pub(crate) fake: Option<FakeCuda>,
    pub(crate) devices: u32,
}

impl Machine {
    /// Opens the CUDA driver of this process.
    ///
    /// # Errors
    /// Returns the reason without a driver or a device.
    pub(crate) fn open(fake: Option<FakeCuda>) -> Result<Self, String> {
        let cuda = Cuda::open(None).map_err(|error| error.to_string())?;
        let devices = cuda.device_count().map_err(|error| error.to_string())?;
        Ok(Self { fake, devices })
    }

    /// Returns a count that must not grow: live driver objects on the fake, megabytes of device
    /// memory otherwise.
    pub(crate) fn count(self) -> i64 {
        let in_use = || testkit::device(0).memory_in_use().map_or(0, |bytes| (bytes >> 20) as i64);
        self.fake.map_or_else(in_use, FakeCuda::live_objects)
    }

    /// Limits the bytes of a measurement: the fake only checks that it runs.
    pub(crate) fn bytes(self, most: usize) -> usize {
        if self.fake.is_some() { most.min(4 << 20) } else { most }
    }

    /// Returns the command of this program as the owner of memory.
    pub(crate) fn spawn(self) -> impl Fn() -> Command {
        move || {
            let mut command = Command::new(std::env::current_exe().expect("this program"));
            command.arg("--owner").env("FAKE_CUDA_DELAY_US", "0");
            if self.fake.is_some() {
                command.arg("--fake");
            }
            command
        }
    }
}
