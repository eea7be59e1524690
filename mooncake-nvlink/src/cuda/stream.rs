//! A stream of its own, for programs that have work to put in order with transfers, and for tests and measurements.

use std::fmt;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::Arc;

use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, Result};

use super::device::Device;
use super::ffi;

/// A stream in order with the default one. Destroyed when it is dropped; its work goes on.
pub struct Stream {
    device: Arc<Device>,
    stream: usize,
}

impl Stream {
    /// A new stream.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        let mut stream = null_mut();
        let _here = device.enter()?;
        // SAFETY: the driver fills the stream in; it is destroyed when the value is dropped.
        let status = unsafe { (device.functions().stream_create)(&raw mut stream, 0, 0) };
        device.check(status, "a stream")?;
        Ok(Self { device: device.clone(), stream: stream.expose_provenance() })
    }

    /// What the driver calls it, as [`StreamRef`](super::StreamRef) takes it.
    pub fn handle(&self) -> u64 {
        self.stream as u64
    }

    /// Puts the filling of memory with a byte on it.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// Until the stream's work is over, the span is memory of the device's that nobody else uses out of order.
    pub unsafe fn fill(&self, span: MemorySpan, byte: u8) -> Result<()> {
        let _here = self.device.enter()?;
        // SAFETY: promised.
        let status = unsafe { (self.device.functions().set_async)(span.addr(), byte, span.len, self.raw()) };
        self.device.check(status, "memory cannot be filled")
    }

    /// Puts a copy on it.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for lengths that differ, what the driver says otherwise.
    ///
    /// # Safety
    /// Until the stream's work is over, both spans are memory that nobody else uses out of order.
    pub unsafe fn copy(&self, from: MemorySpan, to: MemorySpan) -> Result<()> {
        if from.len != to.len {
            return Err(Error::invalid(format!("{} bytes cannot be copied to {}", from.len, to.len)));
        }
        let _here = self.device.enter()?;
        // SAFETY: promised.
        let status =
            unsafe { (self.device.functions().copy_async)(to.addr(), from.addr(), from.len, self.raw()) };
        self.device.check(status, "a copy")
    }

    /// Whether it has nothing left to do.
    ///
    /// # Errors
    /// What its work came to.
    pub fn is_idle(&self) -> Result<bool> {
        let _here = self.device.enter()?;
        // SAFETY: a stream of ours.
        match unsafe { (self.device.functions().stream_query)(self.raw()) } {
            ffi::NOT_READY => Ok(false),
            status => self.device.check(status, "a stream's work").map(|()| true),
        }
    }

    /// Waits until its work is over.
    ///
    /// # Errors
    /// What that came to.
    pub fn wait(&self) -> Result<()> {
        let _here = self.device.enter()?;
        // SAFETY: a stream of ours.
        let status = unsafe { (self.device.functions().stream_synchronize)(self.raw()) };
        self.device.check(status, "a stream's work")
    }

    fn raw(&self) -> ffi::Stream {
        with_exposed_provenance_mut(self.stream)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_here) = self.device.enter() {
            // SAFETY: a stream of ours.
            unsafe { (self.device.functions().stream_destroy)(self.raw()) };
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:#x}, {:?})", self.stream, self.device)
    }
}
