//! The memory a process has opened to peers, by address, with the target's side of every check: used by wires that serve
//! requests in software, by the engine for copies inside the process, and by [`Loopback`](crate::loopback::Loopback).

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;

use mooncake_core::memory::{Location, MemorySpan};
use mooncake_core::{Error, Result};
use parking_lot::RwLock;

/// Registered spans that do not overlap. Reads and writes are safe: they are checked and copied under a lock that
/// [`Exposure`]'s drop waits for.
#[derive(Debug, Default)]
pub struct ExposedMemory {
    spans: RwLock<BTreeMap<u64, MemorySpan>>,
}

/// Keeps one span in the table; takes it out on drop, once no copy touches it any more.
#[derive(Debug)]
pub struct Exposure {
    table: Arc<ExposedMemory>,
    addr: u64,
}

impl ExposedMemory {
    /// An empty table.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Opens a span of host memory to peers. `Invalid` when it is empty, a device's, or overlaps one that is there.
    ///
    /// # Safety
    /// The bytes stay allocated, readable and writable until the result has been dropped.
    pub unsafe fn expose(self: &Arc<Self>, span: MemorySpan) -> Result<Exposure> {
        if let Location::Cuda(_) = span.location {
            return Err(Error::invalid(format!("{} is not host memory", span.location)));
        }
        let (addr, len) = (span.addr(), span.len as u64);
        let mut spans = self.spans.write();
        check_free(&spans, addr, len)?;
        spans.insert(addr, span);
        Ok(Exposure { table: self.clone(), addr })
    }

    /// Whether `[addr, addr + len)` is not empty, does not overflow, and lies in one span; the error says which of these it is.
    pub fn check(&self, addr: u64, len: u64) -> Result<()> {
        find(&self.spans.read(), addr, len).map(|_| ())
    }

    /// Copies bytes out.
    pub fn read(&self, addr: u64, into: &mut [u8]) -> Result<()> {
        self.with(addr, into.len() as u64, |ptr| {
            // SAFETY: `with` gives that many bytes; `into` is a reference, so it is other memory.
            unsafe { ptr.copy_to_nonoverlapping(NonNull::from(&mut *into).cast(), into.len()) }
        })
    }

    /// Copies bytes in.
    pub fn write(&self, addr: u64, from: &[u8]) -> Result<()> {
        self.with(addr, from.len() as u64, |ptr| {
            // SAFETY: as above.
            unsafe { ptr.copy_from_nonoverlapping(NonNull::from(from).cast(), from.len()) }
        })
    }

    /// Checks a range, then runs `f` on its first byte while no registration can go away. Keep it short, and do not come
    /// back to this table from inside.
    pub fn with<R>(&self, addr: u64, len: u64, f: impl FnOnce(NonNull<u8>) -> R) -> Result<R> {
        let spans = self.spans.read();
        let span = find(&spans, addr, len)?;
        let offset = usize::try_from(addr - span.addr()).map_err(|_| not_registered(addr, len))?;
        // SAFETY: `find` saw the range inside the span.
        Ok(f(unsafe { span.ptr.add(offset) }))
    }

    /// Every span, by address.
    pub fn spans(&self) -> Vec<MemorySpan> {
        self.spans.read().values().copied().collect()
    }
}

impl Drop for Exposure {
    fn drop(&mut self) {
        self.table.spans.write().remove(&self.addr);
    }
}

fn check_free(spans: &BTreeMap<u64, MemorySpan>, addr: u64, len: u64) -> Result<()> {
    if len == 0 {
        return Err(Error::invalid("memory of zero bytes cannot be registered"));
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

#[cold]
fn not_registered(addr: u64, len: u64) -> Error {
    if len == 0 {
        return Error::invalid(format!("a transfer of zero bytes at {addr:#x}"));
    }
    match addr.checked_add(len) {
        None => Error::invalid(format!("{len} bytes from {addr:#x} overflow")),
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
        // SAFETY: just checked.
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
            (base + 100, 0, "zero"),
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
        let _kept = expose(100, 100).unwrap();
        for (from, len) in [(100, 100), (50, 51), (199, 1), (0, 4096), (150, 10)] {
            assert!(expose(from, len).unwrap_err().message().contains("overlap"), "{from}+{len}");
        }
        assert!(expose(10, 0).is_err());
        let _before = expose(0, 100).unwrap();
        let _after = expose(200, 100).unwrap();
    }
}
