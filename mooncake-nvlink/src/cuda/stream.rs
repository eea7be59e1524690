//! Stream for programs that order work with transfers, and for tests and measurements.

use std::fmt;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::Arc;

use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, Result};

use super::device::Device;
use super::ffi::{self, call, sys};

/// Stream in order with the default stream. Destroyed on drop; its work continues.
pub struct Stream {
    device: Arc<Device>,
    stream: usize,
}

impl Stream {
    /// Creates a stream.
    ///
    /// # Errors
    /// Returns the errors of the driver.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        let mut stream = null_mut();
        let _current = device.enter()?;
        // SAFETY: the driver writes the stream, which is destroyed when the value is dropped.
        let status = unsafe { call!(device, cuStreamCreateWithPriority(&raw mut stream, 0, 0)) };
        device.check(status, "cannot create stream")?;
        Ok(Self { device: device.clone(), stream: stream.expose_provenance() })
    }

    /// Returns the handle, for [`StreamRef`](super::StreamRef).
    pub fn handle(&self) -> u64 {
        self.stream as u64
    }

    /// Appends the filling of memory with a byte.
    ///
    /// # Errors
    /// Returns the errors of the driver.
    ///
    /// # Safety
    /// Until the work of the stream is complete, the span is device memory that no other code uses
    /// out of order.
    pub unsafe fn fill(&self, span: MemorySpan, byte: u8) -> Result<()> {
        let _current = self.device.enter()?;
        // SAFETY: promised by the caller.
        let status = unsafe { call!(self.device, cuMemsetD8Async(span.addr(), byte, span.len, self.raw())) };
        self.device.check(status, "cannot fill memory")
    }

    /// Appends a copy.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` for lengths that differ, and the errors of the driver.
    ///
    /// # Safety
    /// Until the work of the stream is complete, both spans are memory that no other code uses out
    /// of order.
    pub unsafe fn copy(&self, from: MemorySpan, to: MemorySpan) -> Result<()> {
        if from.len != to.len {
            return Err(Error::invalid(format!(
                "cannot copy memory: lengths differ. from={} to={}",
                from.len, to.len
            )));
        }
        let _current = self.device.enter()?;
        // SAFETY: promised by the caller.
        let status =
            unsafe { call!(self.device, cuMemcpyAsync(to.addr(), from.addr(), from.len, self.raw())) };
        self.device.check(status, "cannot begin copy")
    }

    /// Returns whether the stream has no work left.
    ///
    /// # Errors
    /// Returns the errors of its work.
    pub fn is_idle(&self) -> Result<bool> {
        let _current = self.device.enter()?;
        // SAFETY: a stream of this value.
        match unsafe { call!(self.device, cuStreamQuery(self.raw())) } {
            ffi::NOT_READY => Ok(false),
            status => self.device.check(status, "work of the stream failed").map(|()| true),
        }
    }

    /// Waits until its work is complete.
    ///
    /// # Errors
    /// Returns the errors of its work.
    pub fn wait(&self) -> Result<()> {
        let _current = self.device.enter()?;
        // SAFETY: a stream of this value.
        let status = unsafe { call!(self.device, cuStreamSynchronize(self.raw())) };
        self.device.check(status, "work of the stream failed")
    }

    fn raw(&self) -> sys::CUstream {
        with_exposed_provenance_mut(self.stream)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: a stream of this value.
            unsafe { call!(self.device, cuStreamDestroy_v2(self.raw())) };
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:#x}, {:?})", self.stream, self.device)
    }
}
