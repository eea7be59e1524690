//! Device memory, which the processor cannot touch: lookup of the device of an address, and copies
//! from and to it. One driver serves the process, as one library of the vendor does. Transports and
//! stores use this module and need not know which driver it is.

use std::fmt;
use std::sync::{Arc, OnceLock};

use super::{Location, MemorySource, MemorySpan};
use crate::{Error, ErrorCode, Result};

static DRIVER: OnceLock<Arc<dyn DeviceDriver>> = OnceLock::new();
static OFFERED: OnceLock<Arc<dyn DeviceDriver>> = OnceLock::new();

/// Driver that copies between host and device memory, implemented over a vendor's library in the
/// crate `mooncake-nvlink`.
pub trait DeviceDriver: fmt::Debug + Send + Sync + 'static {
    /// Returns the whole allocation of device memory that an address lies in, or `None` for host
    /// memory and unknown addresses. Cheap, and never the first use of the vendor's library in this
    /// process.
    fn allocation(&self, addr: u64) -> Option<MemorySpan>;

    /// Begins a copy of `from.len` bytes. Either side may be host memory. A copy from or to memory
    /// that is not [`staging`](Self::staging) may be complete, or no faster than a plain one, when
    /// this returns. Copies begun by one thread run in any order.
    ///
    /// # Errors
    /// Returns `Invalid` for lengths that differ, and the errors of the device.
    ///
    /// # Safety
    /// Until the result reports completion or has been dropped, both sides stay allocated, no other
    /// code touches `to`, and no code writes `from`.
    #[allow(unsafe_code)]
    unsafe fn copy(&self, from: MemorySpan, to: MemorySpan) -> Result<Box<dyn PendingCopy>>;

    /// Allocates page-locked host memory, which devices copy from and to asynchronously.
    ///
    /// # Errors
    /// Returns an error if no memory is left.
    fn staging(&self, len: usize) -> Result<Box<dyn MemorySource>>;

    /// Returns the PCI addresses of the devices (`0000:3b:00.0`), by number, or `None` if unknown.
    /// Never the first use of the vendor's library in this process.
    fn pci_addresses(&self) -> Option<Vec<String>> {
        None
    }
}

/// Copy that a device may still be busy with. Dropping the copy waits until neither side is touched
/// any more.
pub trait PendingCopy: Send {
    /// Returns the outcome of the copy, or `None` while it runs. Does not block. Later calls return
    /// the outcome again.
    fn poll(&mut self) -> Option<Result<()>>;

    /// Waits until the copy is complete.
    ///
    /// # Errors
    /// Returns the errors of the device.
    fn wait(self: Box<Self>) -> Result<()>;
}

/// Installs the driver of this process, until the process ends.
///
/// # Errors
/// Returns `Invalid` when another driver is installed already.
pub fn serve_device_memory(driver: Arc<dyn DeviceDriver>) -> Result<()> {
    DRIVER.set(driver).map_err(|_| {
        Error::invalid("cannot install the device memory driver: another one is installed already")
    })
}

/// Installs a built-in driver, which gives way to a driver that is [installed](serve_device_memory)
/// now or later.
///
/// # Errors
/// Returns `Invalid` when another built-in driver is installed already.
pub fn offer_device_memory(driver: Arc<dyn DeviceDriver>) -> Result<()> {
    OFFERED.set(driver).map_err(|_| {
        Error::invalid("cannot install the built-in device memory driver: another one is installed already")
    })
}

/// Returns the driver of device memory, if this process has one.
pub fn device_driver() -> Option<&'static dyn DeviceDriver> {
    DRIVER.get().or_else(|| OFFERED.get()).map(|driver| &**driver)
}

impl Location {
    /// Returns whether the processor cannot touch such memory.
    pub fn is_device(self) -> bool {
        matches!(self, Location::Cuda(_))
    }
}

impl MemorySpan {
    /// Returns the span with its device, if the driver knows it. A span that names a device keeps
    /// it.
    #[must_use]
    pub fn located(self) -> Self {
        if self.location.is_device() {
            return self;
        }
        let device = device_driver().and_then(|driver| driver.allocation(self.addr()));
        device.map_or(self, |device| Self { location: device.location, ..self })
    }
}

/// Copies `from.len` bytes between spans, either of which may be device memory, and returns when
/// the copy is complete.
///
/// # Errors
/// Returns `Invalid` for lengths that differ, `NOT_SUPPORTED` for device memory in a process
/// without a driver, and the errors of the device.
///
/// # Safety
/// During the call both sides stay allocated, no other code touches `to`, and no code writes
/// `from`. The sides do not overlap.
#[allow(unsafe_code)]
pub unsafe fn copy_memory(from: MemorySpan, to: MemorySpan) -> Result<()> {
    if from.len != to.len {
        return Err(Error::invalid(format!(
            "cannot copy memory: lengths differ. from={} to={}",
            from.len, to.len
        )));
    }
    if !from.location.is_device() && !to.location.is_device() {
        // SAFETY: promised by the caller; both are host memory.
        unsafe { to.ptr.copy_from_nonoverlapping(from.ptr, from.len) };
        return Ok(());
    }
    // SAFETY: the promise of the caller covers the time until `wait` returns.
    unsafe { driver_for(from, to)?.copy(from, to)? }.wait()
}

/// Returns the driver for a copy with a device on one side.
///
/// # Errors
/// Returns `NOT_SUPPORTED` in a process without a driver.
pub fn driver_for(from: MemorySpan, to: MemorySpan) -> Result<&'static dyn DeviceDriver> {
    device_driver().ok_or_else(|| {
        let device = if from.location.is_device() { from.location } else { to.location };
        Error::new(
            ErrorCode::NotSupported,
            format!("cannot copy device memory: this process has no driver. device={device}; enable feature `transport-nvlink`"),
        )
    })
}
