//! Driver of device memory for this process, through which transports and stores without CUDA code
//! copy from and to a GPU.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock, Weak};

use mooncake_core::memory::{
    DeviceDriver, ListedDmaBuf, Location, MemorySource, MemorySpan, PendingCopy, offer_device_memory,
};
use mooncake_core::{Error, Result};
use parking_lot::Mutex;

use crate::cuda::{self, Cuda, Device, Event, Pinned};

/// Maximum bytes of page-locked memory kept for reuse.
const MAX_POOLED_BYTES: usize = 64 << 20;

static DRIVER: OnceLock<Arc<CudaDriver>> = OnceLock::new();
static INIT_LOCK: Mutex<()> = Mutex::new(());

/// Copies between host and devices through CUDA. One driver serves the process.
pub struct CudaDriver {
    libcuda: Option<PathBuf>,
    devices: Mutex<Vec<Arc<Device>>>,
    staging: Arc<Mutex<StagingPool>>,
}

#[derive(Default)]
struct StagingPool {
    free: Vec<Pinned>,
    bytes: usize,
}

impl CudaDriver {
    /// Installs CUDA as the driver of device memory for this process, unless another driver is
    /// installed. Loads nothing: before the process uses CUDA, or requests a copy or staging
    /// memory, there is no device memory. The library is then loaded from `path`, or as
    /// `libcuda.so.1`. Later calls return the same driver.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` when the driver of another vendor is installed as the built-in one.
    pub fn serve(path: Option<PathBuf>) -> Result<Arc<Self>> {
        let _guard = INIT_LOCK.lock();
        if let Some(driver) = DRIVER.get() {
            return Ok(driver.clone());
        }
        let driver = Arc::new(Self { libcuda: path, devices: Mutex::default(), staging: Arc::default() });
        offer_device_memory(driver.clone())?;
        Ok(DRIVER.get_or_init(|| driver).clone())
    }

    /// Returns the library, loaded and initialised.
    ///
    /// # Errors
    /// Returns `NOT_SUPPORTED` without a library or a device, with what to install.
    pub fn cuda(&self) -> Result<&'static Cuda> {
        Cuda::open(self.libcuda.as_deref())
    }

    /// Returns a device, which stays open from now on.
    ///
    /// # Errors
    /// Returns the errors of [`Cuda::device`].
    pub fn device(&self, number: u32) -> Result<Arc<Device>> {
        let mut devices = self.devices.lock();
        let existing = devices.iter().find(|device| device.number() == number && !device.is_lost());
        if let Some(device) = existing {
            return Ok(device.clone());
        }
        let device = self.cuda()?.device(number)?;
        devices.retain(|device| device.number() != number);
        devices.push(device.clone());
        Ok(device)
    }

    /// Lists a span of device memory as part of a dma-buf, until the result is dropped. NICs
    /// register it by the dma-buf.
    ///
    /// # Errors
    /// Returns `NOT_SUPPORTED` if the driver or the device does not support it, or if the span
    /// exceeds one allocation, and `INVALID_PARAMS` for other memory.
    pub fn list_dma_buf(&self, span: MemorySpan) -> Result<ListedDmaBuf> {
        let Location::Cuda(number) = span.location else {
            return Err(Error::invalid(format!(
                "cannot export dma-buf: not device memory. address={:#x}",
                span.addr()
            )));
        };
        let (buffer, offset) = cuda::dma_buf(&self.device(number)?, span)?;
        ListedDmaBuf::new(span, buffer, offset)
    }

    /// Waits until the current work of the default stream of a device is complete, and with it the
    /// work of all streams that do not opt out of its order. For callers that filled or use memory
    /// there, and transfer it by a call without a stream. Blocks; a caller that holds such a stream
    /// back must not call it.
    ///
    /// # Errors
    /// Returns the errors of that work.
    pub fn wait_for_default_stream(&self, number: u32) -> Result<()> {
        self.device(number)?.wait_for_default_stream()
    }

    /// Returns any device: one in use by this driver, one in use by this process, or the first.
    pub(crate) fn any_device(&self) -> Result<Arc<Device>> {
        let existing = self.devices.lock().iter().find(|device| !device.is_lost()).cloned();
        match existing {
            Some(existing) => Ok(existing),
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
            return Err(Error::invalid(format!(
                "cannot copy memory: lengths differ. from={} to={}",
                from.len, to.len
            )));
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
            return Ok(Box::new(PendingCudaCopy { event: None, result: Ok(()) }));
        }
        // SAFETY: promised by the caller until the result is dropped, which waits for the event.
        let event = unsafe { device.copy(&[(to.addr(), from.addr(), from.len)])? };
        Ok(Box::new(PendingCudaCopy { event: Some(event), result: Ok(()) }))
    }

    fn pci_addresses(&self) -> Option<Vec<String>> {
        Cuda::present()?.pci_addresses()
    }

    fn staging(&self, len: usize) -> Result<Box<dyn MemorySource>> {
        let existing = {
            let mut pool = self.staging.lock();
            let at = pool.free.iter().position(|memory| memory.span().len == len && memory.is_usable());
            let memory = at.map(|at| pool.free.swap_remove(at));
            pool.bytes -= memory.as_ref().map_or(0, |memory| memory.span().len);
            memory
        };
        let memory = match existing {
            Some(memory) => memory,
            None => Pinned::new(&self.any_device()?, len)?,
        };
        Ok(Box::new(PooledStaging {
            span: memory.span(),
            memory: Some(memory),
            pool: Arc::downgrade(&self.staging),
        }))
    }
}

impl std::fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaDriver").field("devices", &self.devices.lock()).finish_non_exhaustive()
    }
}

/// Page-locked memory that returns to the pool on drop.
struct PooledStaging {
    span: MemorySpan,
    memory: Option<Pinned>,
    pool: Weak<Mutex<StagingPool>>,
}

// SAFETY: the driver keeps the bytes at that address until they are freed, which happens after the
// drop.
unsafe impl MemorySource for PooledStaging {
    fn span(&self) -> MemorySpan {
        self.span
    }
}

impl Drop for PooledStaging {
    fn drop(&mut self) {
        let (Some(memory), Some(pool)) = (self.memory.take(), self.pool.upgrade()) else { return };
        let mut pool = pool.lock();
        if pool.bytes + self.span.len <= MAX_POOLED_BYTES && memory.is_usable() {
            pool.bytes += self.span.len;
            pool.free.push(memory);
        }
    }
}

struct PendingCudaCopy {
    event: Option<Event>,
    result: Result<()>,
}

impl PendingCopy for PendingCudaCopy {
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

impl Drop for PendingCudaCopy {
    fn drop(&mut self) {
        if let Some(event) = self.event.take() {
            let _ = event.wait();
        }
    }
}
