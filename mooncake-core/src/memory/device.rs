//! Memory that the processor cannot touch, a GPU's: who knows whose an address is, and who copies there and back. One driver serves the
//! process, as one library of the vendor's does; wires and stores ask here and need not know which it is.

use std::fmt;
use std::sync::{Arc, OnceLock};

use super::{Location, MemorySource, MemorySpan};
use crate::{Error, ErrorCode, Result};

static DRIVER: OnceLock<Arc<dyn DeviceDriver>> = OnceLock::new();
static OFFERED: OnceLock<Arc<dyn DeviceDriver>> = OnceLock::new();

/// Copies between host and device memory. Implemented over a vendor's library, crate `mooncake-nvlink`.
pub trait DeviceDriver: fmt::Debug + Send + Sync + 'static {
    /// The whole allocation of a device's memory that an address lies in; `None` for host memory and for addresses of nobody. Cheap, and
    /// never the first use of the vendor's library in this process.
    fn allocation(&self, addr: u64) -> Option<MemorySpan>;

    /// Begins a copy of `from.len` bytes. Either side may be host memory; a copy from or to what is not [`staging`](Self::staging) may be over,
    /// or no faster than a plain one, when this returns. Copies begun by one thread run in any order.
    ///
    /// # Errors
    /// `Invalid` for lengths that differ, and whatever the device says.
    ///
    /// # Safety
    /// Until the result says that it is over or has been dropped, both sides stay allocated, `to` is touched by nobody else and `from` is written by nobody.
    #[allow(unsafe_code)]
    unsafe fn copy(&self, from: MemorySpan, to: MemorySpan) -> Result<Box<dyn PendingCopy>>;

    /// Page-locked host memory, which devices copy from and to on their own.
    ///
    /// # Errors
    /// No memory left for it.
    fn staging(&self, len: usize) -> Result<Box<dyn MemorySource>>;

    /// PCI addresses of its devices (`0000:3b:00.0`), by number; `None` where they are not known. Never the first use of the vendor's library in this process.
    fn pci_addresses(&self) -> Option<Vec<String>> {
        None
    }
}

/// A copy that a device may still be busy with. Dropping it waits until neither side is touched any more.
pub trait PendingCopy: Send {
    /// Whether it is over, and how it went; `None` while it runs. Does not block. Once it was over, it says so again.
    fn poll(&mut self) -> Option<Result<()>>;

    /// Waits until it is over.
    ///
    /// # Errors
    /// What the device says of it.
    fn wait(self: Box<Self>) -> Result<()>;
}

/// Has a driver serve this process, from now to its end.
///
/// # Errors
/// `Invalid` when another one does already.
pub fn serve_device_memory(driver: Arc<dyn DeviceDriver>) -> Result<()> {
    DRIVER.set(driver).map_err(|_| Error::invalid("a driver of device memory serves this process already"))
}

/// The same for a driver that gives way to one that is [asked](serve_device_memory) to serve, now or later: what is built in offers itself.
///
/// # Errors
/// `Invalid` when another one has offered itself already.
pub fn offer_device_memory(driver: Arc<dyn DeviceDriver>) -> Result<()> {
    OFFERED.set(driver).map_err(|_| Error::invalid("a driver of device memory has offered itself already"))
}

/// The driver of device memory, if this process has one.
pub fn device_driver() -> Option<&'static dyn DeviceDriver> {
    DRIVER.get().or_else(|| OFFERED.get()).map(|driver| &**driver)
}

impl Location {
    /// Whether the processor cannot touch such memory.
    pub fn is_device(self) -> bool {
        matches!(self, Location::Cuda(_))
    }
}

impl MemorySpan {
    /// The same span with the device it lies on, where the driver knows it. A span that names one already keeps it.
    #[must_use]
    pub fn located(self) -> Self {
        if self.location.is_device() {
            return self;
        }
        let device = device_driver().and_then(|driver| driver.allocation(self.addr()));
        device.map_or(self, |device| Self { location: device.location, ..self })
    }
}

/// Copies `from.len` bytes between spans, either of which may be a device's, and returns when it is done.
///
/// # Errors
/// `Invalid` for lengths that differ, `NOT_SUPPORTED` for device memory in a process without a driver, and whatever the device says.
///
/// # Safety
/// During the call both sides stay allocated, `to` is touched by nobody else and `from` is written by nobody. They do not overlap.
#[allow(unsafe_code)]
pub unsafe fn copy_memory(from: MemorySpan, to: MemorySpan) -> Result<()> {
    if from.len != to.len {
        return Err(Error::invalid(format!("{} bytes cannot be copied to {}", from.len, to.len)));
    }
    if !from.location.is_device() && !to.location.is_device() {
        // SAFETY: the caller's promise; both are host memory.
        unsafe { to.ptr.copy_from_nonoverlapping(from.ptr, from.len) };
        return Ok(());
    }
    // SAFETY: the caller's promise covers the time until `wait` returns.
    unsafe { driver_for(from, to)?.copy(from, to)? }.wait()
}

/// The driver that a copy with a device on one side needs.
///
/// # Errors
/// `NOT_SUPPORTED` in a process without one.
pub fn driver_for(from: MemorySpan, to: MemorySpan) -> Result<&'static dyn DeviceDriver> {
    device_driver().ok_or_else(|| {
        let device = if from.location.is_device() { from.location } else { to.location };
        Error::new(
            ErrorCode::NotSupported,
            format!("memory of {device} needs a driver, and this process has opened none (feature `transport-nvlink`)"),
        )
    })
}
