//! Table of the memory that peers may access, looked up at each request.
//!
//! Registration and deregistration replace the whole sorted list. Every connection keeps the last
//! list it saw, and compares a number to know whether it is still current, so that requests share
//! no lock. Only the list may be stale: each region has a gate of its own, and dropping the
//! [`Registration`] closes it. Memory is accessed only inside the gate, during one system call that
//! does not block, or by a copy of a device. So the drop waits for microseconds, never for a peer,
//! even on the only thread of a runtime. A request in progress finds the gate closed and is cut
//! off.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, Result};
use mooncake_transport::device::{CopyHandle, DeviceCopy};
use parking_lot::{Mutex, RwLock};

use crate::gate::{self, Gate};

/// Memory that one [`TcpTransport`](crate::TcpTransport) may use, and peers if it was registered
/// for them. Dropping it revokes the access at once and returns when no request of a peer touches
/// the memory any more.
pub struct Registration {
    span: MemorySpan,
    served: Option<(Arc<MemoryTable>, Arc<Region>)>,
}

impl Registration {
    /// Registers memory for local use; peers are refused.
    pub(crate) fn local(span: MemorySpan) -> Self {
        Self { span, served: None }
    }

    /// Returns the address range of the memory.
    pub fn span(&self) -> MemorySpan {
        self.span
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some((table, region)) = self.served.take() {
            table.remove(&region);
            region.close();
        }
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration")
            .field("span", &self.span)
            .field("remote", &self.served.is_some())
            .finish()
    }
}

/// Registered range.
#[derive(Debug)]
pub(crate) struct Region {
    span: MemorySpan,
    gate: Gate,
    /// Copies of device memory that may be in progress. They begin inside the gate.
    copies: Mutex<Vec<CopyHandle>>,
}

impl Region {
    fn close(&self) {
        self.gate.close();
        // The tasks that wait for the copies may be on this very thread.
        let copies = std::mem::take(&mut *self.copies.lock());
        copies.iter().for_each(CopyHandle::settle);
    }

    fn begin(&self, copy: Result<DeviceCopy>) -> Result<DeviceCopy> {
        let copy = copy?;
        let mut copies = self.copies.lock();
        copies.retain(|copy| !copy.is_finished());
        copies.push(copy.handle());
        Ok(copy)
    }

    fn end(&self) -> u64 {
        self.span.addr() + self.span.len as u64
    }
}

/// Range inside one region that a peer has requested. It opens the gate, and delays no
/// deregistration.
#[derive(Clone, Debug)]
pub(crate) struct Range {
    region: Arc<Region>,
    offset: usize,
    len: usize,
}

impl Range {
    /// Returns the length in bytes, never zero.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the memory is read-only.
    pub(crate) fn is_read_only(&self) -> bool {
        self.region.span.read_only
    }

    /// Returns whether the memory may be unmapped although it is registered.
    pub(crate) fn may_be_unmapped(&self) -> bool {
        self.region.span.may_be_unmapped
    }

    /// Returns whether the processor cannot touch the memory.
    pub(crate) fn is_device(&self) -> bool {
        self.region.span.location.is_device()
    }

    /// Begins a copy into device memory, from byte `at` of the range on. Returns `None` once
    /// deregistered.
    ///
    /// # Safety
    /// `from` stays allocated, and no code writes it, until the copy is complete.
    pub(crate) unsafe fn copy_in(&self, at: usize, from: MemorySpan) -> Option<Result<DeviceCopy>> {
        let access = self.enter()?;
        // SAFETY: the bytes of the range stay allocated while the gate is open, and closing it
        // waits for the copy; the caller promises `from`.
        let copy = access.span(at, from.len).and_then(|to| unsafe { DeviceCopy::begin(from, to) });
        Some(self.region.begin(copy))
    }

    /// Begins a copy out of device memory, from byte `at` of the range on. Returns `None` once
    /// deregistered.
    ///
    /// # Safety
    /// `to` stays allocated, and no other code touches it, until the copy is complete.
    pub(crate) unsafe fn copy_out(&self, at: usize, to: MemorySpan) -> Option<Result<DeviceCopy>> {
        let access = self.enter()?;
        // SAFETY: as above.
        let copy = access.span(at, to.len).and_then(|from| unsafe { DeviceCopy::begin(from, to) });
        Some(self.region.begin(copy))
    }

    /// Returns the right to access the memory, for one call that does not block, or `None` once
    /// deregistered.
    pub(crate) fn enter(&self) -> Option<RangeAccess<'_>> {
        Some(RangeAccess { range: self, _gate: self.region.gate.enter()? })
    }
}

/// Right of access inside the gate of a region.
pub(crate) struct RangeAccess<'a> {
    range: &'a Range,
    _gate: gate::GateHold<'a>,
}

impl RangeAccess<'_> {
    /// Returns the address of byte `skip` of the range, which `len() - skip` bytes follow.
    pub(crate) fn at(&self, skip: usize) -> *mut u8 {
        debug_assert!(skip <= self.range.len);
        self.range.region.span.ptr.as_ptr().wrapping_add(self.range.offset + skip)
    }

    /// Returns `len` bytes from byte `skip` of the range.
    fn span(&self, skip: usize, len: usize) -> Result<MemorySpan> {
        let ptr = NonNull::new(self.at(skip)).filter(|_| skip + len <= self.range.len);
        let ptr = ptr.ok_or_else(|| Error::internal("internal error: bytes outside of the range"))?;
        Ok(MemorySpan { ptr, len, ..self.range.region.span })
    }
}

/// Memory that peers may access, sorted by address and without overlaps.
#[derive(Debug, Default)]
pub(crate) struct MemoryTable {
    epoch: AtomicU64,
    regions: RwLock<Arc<Vec<Arc<Region>>>>,
}

impl MemoryTable {
    /// Registers `span` for peers. It must not overlap a registered range, which Mooncake C++
    /// refuses too.
    pub(crate) fn insert(self: &Arc<Self>, span: MemorySpan) -> Result<Registration> {
        let region = Arc::new(Region { span, gate: Gate::new(), copies: Mutex::default() });
        let mut regions = self.regions.write();
        let at = regions.partition_point(|r| r.span.addr() < span.addr());
        let overlaps = |other: &Arc<Region>| other.span.addr() < region.end() && span.addr() < other.end();
        if let Some(other) = regions[at.saturating_sub(1)..].iter().take(2).find(|r| overlaps(r)) {
            return Err(Error::invalid(format!(
                "cannot register memory: {:#x}+{} overlaps {:#x}+{}, which is registered already",
                span.addr(),
                span.len,
                other.span.addr(),
                other.span.len
            )));
        }
        let mut next = Vec::with_capacity(regions.len() + 1);
        next.extend_from_slice(&regions[..at]);
        next.push(region.clone());
        next.extend_from_slice(&regions[at..]);
        *regions = Arc::new(next);
        self.epoch.fetch_add(1, Ordering::Release);
        Ok(Registration { span, served: Some((self.clone(), region)) })
    }

    fn remove(&self, region: &Arc<Region>) {
        let mut regions = self.regions.write();
        let rest = regions.iter().filter(|r| !Arc::ptr_eq(r, region)).cloned().collect();
        *regions = Arc::new(rest);
        self.epoch.fetch_add(1, Ordering::Release);
    }

    /// Returns the number of registered ranges.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.regions.read().len()
    }
}

/// View of one connection on the table.
#[derive(Debug)]
pub(crate) struct View {
    table: Arc<MemoryTable>,
    epoch: u64,
    regions: Arc<Vec<Arc<Region>>>,
}

impl View {
    pub(crate) fn new(table: Arc<MemoryTable>) -> Self {
        Self { table, epoch: u64::MAX, regions: Arc::default() }
    }

    /// Returns the range, if one region contains all of it. Returns `None` for an empty or
    /// overflowing range.
    pub(crate) fn find(&mut self, addr: u64, len: u64) -> Option<Range> {
        let epoch = self.table.epoch.load(Ordering::Acquire);
        if epoch != self.epoch {
            // The list may be newer than the number. Then the next request reads it once more.
            self.regions = self.table.regions.read().clone();
            self.epoch = epoch;
        }
        let after = self.regions.partition_point(|r| r.span.addr() <= addr);
        let region = self.regions.get(after.checked_sub(1)?).filter(|r| r.span.contains(addr, len))?;
        // Both fit, because the region is in this address space.
        let offset = usize::try_from(addr - region.span.addr()).ok()?;
        Some(Range { region: region.clone(), offset, len: usize::try_from(len).ok()? })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn span(addr: u64, len: usize) -> MemorySpan {
        let ptr = std::ptr::without_provenance_mut(usize::try_from(addr).unwrap());
        MemorySpan::new(NonNull::new(ptr).unwrap(), len)
    }

    #[test]
    fn a_range_lies_in_one_region_or_nowhere() {
        let table = Arc::new(MemoryTable::default());
        let mut view = View::new(table.clone());
        assert!(view.find(4096, 1).is_none());
        let low = table.insert(span(4096, 100)).unwrap();
        let high = table.insert(span(4196, 100)).unwrap();
        for (addr, len, is_found) in [
            (4096, 100, true),
            (4195, 1, true),
            (4196, 100, true),
            (4195, 2, false),
            (4096, 0, false),
            (4095, 2, false),
            (4296, 1, false),
            (4096, u64::MAX, false),
            (u64::MAX, 1, false),
            (0, 1, false),
        ] {
            assert_eq!(view.find(addr, len).is_some(), is_found, "{addr}+{len}");
        }
        let stale = view.find(4096, 100).unwrap();
        drop(low);
        assert!(stale.enter().is_none());
        assert!(view.find(4096, 1).is_none() && view.find(4196, 1).is_some());
        drop(high);
        assert_eq!(table.len(), 0);
    }

    #[test]
    fn overlaps_are_refused() {
        let table = Arc::new(MemoryTable::default());
        let _registered = table.insert(span(1000, 100)).unwrap();
        for (addr, len) in [(1000, 100), (950, 51), (1099, 1), (1010, 10), (900, 1000)] {
            assert!(table.insert(span(addr, len)).is_err(), "{addr}+{len}");
        }
        let _before = table.insert(span(950, 50)).unwrap();
        let _after = table.insert(span(1100, 10)).unwrap();
        assert_eq!(table.len(), 3);
    }

    #[test]
    fn dropping_waits_for_accesses_inside_the_gate() {
        let table = Arc::new(MemoryTable::default());
        let registration = table.insert(span(4096, 4096)).unwrap();
        let region = View::new(table).find(4096, 1).unwrap();
        let access = region.enter().unwrap();
        let second_access = region.enter().unwrap();
        let dropping = std::thread::spawn(move || drop(registration));
        while region.enter().is_some() {
            std::thread::yield_now();
        }
        drop(access);
        assert!(!dropping.is_finished());
        drop(second_access);
        dropping.join().unwrap();
    }

    proptest! {
        #[test]
        fn agrees_with_a_list(
            steps in proptest::collection::vec((any::<bool>(), 1..200u64, 1..40usize), 1..60),
            queries in proptest::collection::vec((1..240u64, 0..50u64), 40),
        ) {
            let table = Arc::new(MemoryTable::default());
            let mut view = View::new(table.clone());
            let mut held: Vec<Registration> = Vec::new();
            for (add, addr, len) in steps {
                if add || held.is_empty() {
                    let free = held.iter().all(|r| {
                        r.span.addr() + r.span.len as u64 <= addr || addr + len as u64 <= r.span.addr()
                    });
                    let result = table.insert(span(addr, len));
                    prop_assert_eq!(result.is_ok(), free);
                    held.extend(result.ok());
                } else {
                    held.swap_remove(addr as usize % held.len());
                }
                prop_assert_eq!(table.len(), held.len());
                for &(addr, len) in &queries {
                    let expected = held.iter().any(|r| r.span.contains(addr, len));
                    prop_assert_eq!(view.find(addr, len).is_some(), expected);
                }
            }
        }
    }
}
