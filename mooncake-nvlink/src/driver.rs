//! The process's driver of device memory: what lets wires and stores that know nothing of CUDA copy from and to a GPU.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock, Weak};

use mooncake_core::memory::{
    DeviceDriver, ListedDmaBuf, Location, MemorySource, MemorySpan, PendingCopy, offer_device_memory,
};
use mooncake_core::{Error, Result};
use parking_lot::Mutex;

use crate::cuda::{self, Cuda, Device, Event, Pinned};

/// Bytes of page-locked memory kept for reuse.
const KEPT: usize = 64 << 20;

static SERVING: OnceLock<Arc<CudaDriver>> = OnceLock::new();
static BEGINNING: Mutex<()> = Mutex::new(());

/// Copies between host and devices through CUDA. One serves the process.
pub struct CudaDriver {
    libcuda: Option<PathBuf>,
    devices: Mutex<Vec<Arc<Device>>>,
    staging: Arc<Mutex<Kept>>,
}

#[derive(Default)]
struct Kept {
    free: Vec<Pinned>,
    bytes: usize,
}

impl CudaDriver {
    /// Has CUDA serve device memory to all of this process, unless another driver is asked to. Loads nothing: until somebody else uses CUDA, or a copy or staging memory is asked for, there is no
    /// device memory. A library at `path` is loaded then, `libcuda.so.1` otherwise. Again, it gives the one that serves.
    ///
    /// # Errors
    /// `INVALID_PARAMS` when another vendor's driver has offered itself.
    pub fn serve(path: Option<PathBuf>) -> Result<Arc<Self>> {
        let _turn = BEGINNING.lock();
        if let Some(driver) = SERVING.get() {
            return Ok(driver.clone());
        }
        let driver = Arc::new(Self { libcuda: path, devices: Mutex::default(), staging: Arc::default() });
        offer_device_memory(driver.clone())?;
        Ok(SERVING.get_or_init(|| driver).clone())
    }

    /// The library, loaded and initialised.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` without one, or without a device, and what to install.
    pub fn cuda(&self) -> Result<&'static Cuda> {
        Cuda::open(self.libcuda.as_deref())
    }

    /// A device, kept open from now on.
    ///
    /// # Errors
    /// As [`Cuda::device`].
    pub fn device(&self, number: u32) -> Result<Arc<Device>> {
        let mut devices = self.devices.lock();
        let known = devices.iter().find(|device| device.number() == number && !device.is_lost());
        if let Some(device) = known {
            return Ok(device.clone());
        }
        let device = self.cuda()?.device(number)?;
        devices.retain(|device| device.number() != number);
        devices.push(device.clone());
        Ok(device)
    }

    /// Lists a span of a device's memory as a dma-buf's, until the result is dropped: NICs register it by that.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` where the driver or the device exports none, or the span is not in one allocation; `INVALID_PARAMS` for what is no device's memory.
    pub fn list_dma_buf(&self, span: MemorySpan) -> Result<ListedDmaBuf> {
        let Location::Cuda(number) = span.location else {
            return Err(Error::invalid(format!("{:#x} is no memory of a device's", span.addr())));
        };
        let (buffer, offset) = cuda::dma_buf(&self.device(number)?, span)?;
        ListedDmaBuf::new(span, buffer, offset)
    }

    /// Waits until the work is over that the default stream of a device has now, and with it that of all streams which do not opt out of being in order with
    /// it. For callers that filled memory there, or use it, and are to transfer it by a call that knows no stream. Blocks, and must not be called by who holds
    /// such a stream back.
    ///
    /// # Errors
    /// What that work came to.
    pub fn settle(&self, number: u32) -> Result<()> {
        self.device(number)?.settle()
    }

    /// Any device: one that we use, or that somebody else in this process does, or the first.
    pub(crate) fn any_device(&self) -> Result<Arc<Device>> {
        let known = self.devices.lock().iter().find(|device| !device.is_lost()).cloned();
        match known {
            Some(known) => Ok(known),
            None => self.device(self.cuda()?.in_use().unwrap_or(0)),
        }
    }
}

impl DeviceDriver for CudaDriver {
    fn allocation(&self, addr: u64) -> Option<MemorySpan> {
        Cuda::present()?.allocation(addr)
    }

    unsafe fn copy(&self, from: MemorySpan, to: MemorySpan) -> Result<Box<dyn PendingCopy>> {
        if from.len != to.len {
            return Err(Error::invalid(format!("{} bytes cannot be copied to {}", from.len, to.len)));
        }
        let device = match (from.location, to.location) {
            (Location::Cuda(number), _) | (_, Location::Cuda(number)) => self.device(number)?,
            _ => self.any_device()?,
        };
        if let (Location::Cuda(from), Location::Cuda(to)) = (from.location, to.location)
            && from != to
        {
            device.enable_peer(&*self.device(to)?);
        }
        if from.len == 0 {
            return Ok(Box::new(Copying { event: None, result: Ok(()) }));
        }
        // SAFETY: promised until the result is dropped, and that waits for the event.
        let event = unsafe { device.copy(&[(to.addr(), from.addr(), from.len)])? };
        Ok(Box::new(Copying { event: Some(event), result: Ok(()) }))
    }

    fn pci_addresses(&self) -> Option<Vec<String>> {
        Cuda::present()?.pci_addresses()
    }

    fn staging(&self, len: usize) -> Result<Box<dyn MemorySource>> {
        let known = {
            let mut kept = self.staging.lock();
            let at = kept.free.iter().position(|memory| memory.span().len == len && memory.is_there());
            let memory = at.map(|at| kept.free.swap_remove(at));
            kept.bytes -= memory.as_ref().map_or(0, |memory| memory.span().len);
            memory
        };
        let memory = match known {
            Some(memory) => memory,
            None => Pinned::new(&self.any_device()?, len)?,
        };
        Ok(Box::new(Staging {
            span: memory.span(),
            memory: Some(memory),
            kept: Arc::downgrade(&self.staging),
        }))
    }
}

impl std::fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaDriver").field("devices", &self.devices.lock()).finish_non_exhaustive()
    }
}

/// Page-locked memory that goes back to be used again.
struct Staging {
    span: MemorySpan,
    memory: Option<Pinned>,
    kept: Weak<Mutex<Kept>>,
}

// SAFETY: the driver keeps the bytes at that address until they are freed, which is after this.
unsafe impl MemorySource for Staging {
    fn span(&self) -> MemorySpan {
        self.span
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let (Some(memory), Some(kept)) = (self.memory.take(), self.kept.upgrade()) else { return };
        let mut kept = kept.lock();
        if kept.bytes + self.span.len <= KEPT && memory.is_there() {
            kept.bytes += self.span.len;
            kept.free.push(memory);
        }
    }
}

struct Copying {
    event: Option<Event>,
    result: Result<()>,
}

impl PendingCopy for Copying {
    fn poll(&mut self) -> Option<Result<()>> {
        if let Some(event) = &self.event {
            self.result = event.poll()?;
            self.event = None;
        }
        Some(self.result.clone())
    }

    fn wait(mut self: Box<Self>) -> Result<()> {
        if let Some(event) = self.event.take() {
            self.result = event.wait();
        }
        std::mem::replace(&mut self.result, Ok(()))
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        if let Some(event) = self.event.take() {
            let _ = event.wait();
        }
    }
}
