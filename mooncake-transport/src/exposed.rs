//! Memory that a process has opened to peers, by address, with the target's side of every check.
//! Used by transports that serve requests in software, by the engine for copies inside the process,
//! and by [`Loopback`](crate::loopback::Loopback).

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;

use mooncake_core::memory::{MemorySpan, copy_memory};
use mooncake_core::{Error, Result};
use parking_lot::RwLock;

use crate::device::device_error;

/// Table of registered spans, which do not overlap. Reads and writes are safe: they are checked and
/// copied under a lock that the drop of an [`Exposure`] waits for.
#[derive(Debug, Default)]
pub struct ExposedMemory {
    spans: RwLock<BTreeMap<u64, MemorySpan>>,
}

/// Entry of one span. The drop removes it, once no copy touches the span any more.
#[derive(Debug)]
pub struct Exposure {
    table: Arc<ExposedMemory>,
    addr: u64,
}

impl ExposedMemory {
    /// Creates an empty table.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Opens a span to peers. Returns `Invalid` if the span is empty or overlaps another one.
    ///
    /// # Safety
    /// The bytes stay allocated, readable and (unless the span is read-only) writable until the
    /// result is dropped.
    pub unsafe fn expose(self: &Arc<Self>, span: MemorySpan) -> Result<Exposure> {
        let (addr, len) = (span.addr(), span.len as u64);
        let mut spans = self.spans.write();
        check_free(&spans, addr, len)?;
        spans.insert(addr, span);
        Ok(Exposure { table: self.clone(), addr })
    }

    /// Checks that `[addr, addr + len)` is not empty, does not overflow, and lies in one span. The
    /// error contains the reason.
    pub fn check(&self, addr: u64, len: u64) -> Result<()> {
        find(&self.spans.read(), addr, len).map(|_| ())
    }

    /// Checks a range for writing, like [`check`](Self::check). Read-only memory is refused.
    pub fn check_write(&self, addr: u64, len: u64) -> Result<()> {
        writable(find(&self.spans.read(), addr, len)?)
    }

    /// Copies bytes out. Returns `Invalid` for a range that is not open, and the errors of the
    /// device.
    pub fn read(&self, addr: u64, into: &mut [u8]) -> Result<()> {
        let to = MemorySpan::new(NonNull::from(&mut *into).cast(), into.len());
        // SAFETY: `into` is a reference, so it is other memory.
        unsafe { self.copy_out(addr, to) }
    }

    /// Copies bytes in. Returns the errors of [`read`](Self::read), and `Invalid` for read-only
    /// memory.
    pub fn write(&self, addr: u64, from: &[u8]) -> Result<()> {
        let from = MemorySpan::new(NonNull::from(from).cast(), from.len());
        // SAFETY: `from` is only read.
        unsafe { self.copy_in(addr, from) }
    }

    /// Copies `to.len` bytes to memory of any kind, which may overlap.
    ///
    /// # Safety
    /// During the call `to` stays allocated, and only peers touch it.
    pub unsafe fn copy_out(&self, addr: u64, to: MemorySpan) -> Result<()> {
        // SAFETY: `with` passes as many bytes, valid during the call. The caller vouches for the
        // others.
        self.with(addr, to.len as u64, |from| unsafe { copy(from, to) })?
    }

    /// Copies `from.len` bytes from memory of any kind, which may overlap.
    ///
    /// # Safety
    /// During the call `from` stays allocated, and only peers write it.
    pub unsafe fn copy_in(&self, addr: u64, from: MemorySpan) -> Result<()> {
        self.with(addr, from.len as u64, |to| {
            writable(&to)?;
            // SAFETY: as above.
            unsafe { copy(from, to) }
        })?
    }

    /// Checks a range, then runs `f` on it while no registration can be dropped. `f` must be short
    /// and must not use this table.
    fn with<R>(&self, addr: u64, len: u64, f: impl FnOnce(MemorySpan) -> R) -> Result<R> {
        let spans = self.spans.read();
        let span = find(&spans, addr, len)?;
        let part = usize::try_from(addr - span.addr()).ok().zip(usize::try_from(len).ok());
        let (offset, len) = part.ok_or_else(|| not_registered(addr, len))?;
        // SAFETY: `find` has checked that the range is inside the span.
        Ok(f(MemorySpan { ptr: unsafe { span.ptr.add(offset) }, len, ..*span }))
    }

    /// Returns every span, by address.
    pub fn spans(&self) -> Vec<MemorySpan> {
        self.spans.read().values().copied().collect()
    }
}

/// Copies like [`copy_memory`], but host memory may overlap, because a node may transfer from its
/// own memory to itself.
///
/// # Safety
/// As for [`copy_memory`], except for overlaps.
unsafe fn copy(from: MemorySpan, to: MemorySpan) -> Result<()> {
    if from.location.is_device() || to.location.is_device() {
        // SAFETY: passed on to the caller. For an overlap on one device, the device defines the
        // result.
        return unsafe { copy_memory(from, to) }.map_err(device_error);
    }
    // SAFETY: both are host memory of the same length.
    unsafe { from.ptr.copy_to(to.ptr, from.len.min(to.len)) };
    Ok(())
}

impl Drop for Exposure {
    fn drop(&mut self) {
        self.table.spans.write().remove(&self.addr);
    }
}

fn check_free(spans: &BTreeMap<u64, MemorySpan>, addr: u64, len: u64) -> Result<()> {
    if len == 0 {
        return Err(Error::invalid("cannot register memory: it has no bytes"));
    }
    let last = addr.saturating_add(len - 1);
    if let Some((_, other)) = spans.range(..=last).next_back()
        && other.addr() + other.len as u64 > addr
    {
        return Err(Error::invalid(format!(
            "{len} bytes at {addr:#x} overlap the {} bytes registered at {:#x}",
            other.len,
            other.addr()
        )));
    }
    Ok(())
}

fn find(spans: &BTreeMap<u64, MemorySpan>, addr: u64, len: u64) -> Result<&MemorySpan> {
    let span = spans.range(..=addr).next_back().map(|(_, span)| span);
    span.filter(|span| span.contains(addr, len)).ok_or_else(|| not_registered(addr, len))
}

fn writable(span: &MemorySpan) -> Result<()> {
    if span.read_only {
        return Err(Error::invalid(format!(
            "cannot write to memory: it is read-only. address={:#x}",
            span.addr()
        )));
    }
    Ok(())
}

#[cold]
fn not_registered(addr: u64, len: u64) -> Error {
    if len == 0 {
        return Error::invalid(format!("invalid transfer: it has no bytes. address={addr:#x}"));
    }
    match addr.checked_add(len) {
        None => Error::invalid(format!("invalid transfer: the range overflows. len={len} address={addr:#x}")),
        Some(_) => Error::invalid(format!("{len} bytes at {addr:#x} do not lie in one registered buffer")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_core::memory::{HostMemory, MemorySource};

    fn part(memory: &HostMemory, from: usize, len: usize) -> MemorySpan {
        let span = memory.span();
        assert!(from + len <= span.len);
        // SAFETY: checked above.
        MemorySpan::new(unsafe { span.ptr.add(from) }, len)
    }

    #[test]
    fn ranges_must_lie_in_one_span() {
        let memory = HostMemory::new(4096).unwrap();
        let base = memory.span().addr();
        let table = ExposedMemory::new();
        // SAFETY: dropped before `memory`, as declared.
        let (left, right) = unsafe {
            (table.expose(part(&memory, 100, 100)).unwrap(), table.expose(part(&memory, 200, 100)).unwrap())
        };
        table.write(base + 100, &[7; 100]).unwrap();
        let mut byte = [0];
        table.read(base + 199, &mut byte).unwrap();
        assert_eq!(byte, [7]);
        for (addr, len, word) in [
            (base + 100, 0, "no bytes"),
            (base + 99, 1, "one registered"),
            (base + 199, 2, "one registered"),
            (base + 300, 1, "one registered"),
            (base + 100, u64::MAX, "overflow"),
            (u64::MAX, 1, "overflow"),
            (0, 1, "one registered"),
        ] {
            let error = table.check(addr, len).unwrap_err();
            assert!(error.message().contains(word), "{addr:#x}+{len}: {error}");
        }
        drop(left);
        assert!(table.check(base + 100, 1).is_err() && table.check(base + 200, 100).is_ok());
        drop(right);
        assert!(table.spans().is_empty());
    }

    #[test]
    fn overlap_is_refused() {
        let memory = HostMemory::new(4096).unwrap();
        let table = ExposedMemory::new();
        // SAFETY: each is dropped before `memory`.
        let expose = |from, len| unsafe { table.expose(part(&memory, from, len)) };
        let _exposed = expose(100, 100).unwrap();
        for (from, len) in [(100, 100), (50, 51), (199, 1), (0, 4096), (150, 10)] {
            assert!(expose(from, len).unwrap_err().message().contains("overlap"), "{from}+{len}");
        }
        assert!(expose(10, 0).is_err());
        let _before = expose(0, 100).unwrap();
        let _after = expose(200, 100).unwrap();
    }
}
