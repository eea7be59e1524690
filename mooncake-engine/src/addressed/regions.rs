//! Registered memory that calls name by address.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::engine::EngineCode;
use mooncake_transport::{Region, RegionPool, Slice, SliceMut};
use parking_lot::RwLock;

use super::leaving::Leaving;
use super::overlapping::Overlapping;
use super::unregistered::Unregistered;
use super::{Landing, UNUSED_WITHIN, UnusedSignal};
use crate::TransportSet;

/// Registered memory that calls may name by address.
///
/// The program may register ranges that overlap, and a range several times: each registration is
/// ended by an unregistration of its own. Memory stays registered while any registration covers it.
#[derive(Debug, Default)]
pub struct Regions {
    tables: RwLock<Tables>,
    /// Unregistered memory that transfers may still use.
    leaving: Arc<Leaving>,
}

#[derive(Debug, Default)]
struct Tables {
    /// Memory that the program has registered.
    program: Overlapping<Registered>,
    /// Memory that the library allocates, by its first address. It has no overlaps.
    allocated: BTreeMap<u64, LibraryMemory>,
}

impl Tables {
    fn allocated_at(&self, address: u64) -> Option<&LibraryMemory> {
        let (_, memory) = self.allocated.range(..=address).next_back()?;
        Some(memory).filter(|memory| memory.region().span().contains(address, 1))
    }
}

impl Drop for Regions {
    fn drop(&mut self) {
        if !is_planted("dropped-regions-are-not-waited-for") {
            self.take_all();
        }
    }
}

#[derive(Debug)]
struct Registered {
    region: Region<TransportSet>,
    signal: Arc<UnusedSignal>,
}

/// Memory that the library allocates.
#[derive(Debug)]
enum LibraryMemory {
    /// Region without a pool.
    Region(Region<TransportSet>),
    /// Region with a pool. Only memory that is allocated from the pool may be named.
    Pool(RegionPool<TransportSet>),
}

impl LibraryMemory {
    fn region(&self) -> &Region<TransportSet> {
        match self {
            Self::Region(region) => region,
            Self::Pool(pool) => pool.region(),
        }
    }
}

impl Regions {
    /// Adds a region of the program, whose memory reports when it is unused.
    pub fn add(&self, region: Region<TransportSet>, signal: Arc<UnusedSignal>) {
        let (start, len) = (region.addr(), region.len() as u64);
        self.tables.write().program.add(start, len, Registered { region, signal });
    }

    /// Adds a region of memory that the library itself allocates. It cannot be unregistered by its
    /// address.
    pub fn add_library_region(&self, region: Region<TransportSet>) {
        self.tables.write().allocated.insert(region.addr(), LibraryMemory::Region(region));
    }

    /// Adds a region whose parts the library allocates. A slice of such memory keeps its part, so
    /// that the space of a part is not reused while a transfer uses it.
    pub fn add_pool(&self, pool: RegionPool<TransportSet>) {
        self.tables.write().allocated.insert(pool.region().addr(), LibraryMemory::Pool(pool));
    }

    /// Removes memory that the library allocates, by its first address. Its last user frees it.
    pub fn forget(&self, start: u64) {
        let removed = self.tables.write().allocated.remove(&start);
        drop(removed);
    }

    /// Removes a region of the program for each of these first addresses, all or none. Returns the
    /// signals that their memory is unused. A caller whose wait was cancelled may call again.
    ///
    /// If several regions begin at an address, the shortest is removed, and of equal ones the
    /// newest.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` ([`EngineCode::AddressNotRegistered`]) if no region begins at an
    /// address, or fewer than the address is listed.
    pub fn take(&self, starts: &[u64]) -> Result<Vec<Arc<UnusedSignal>>> {
        let mut tables = self.tables.write();
        for (index, start) in starts.iter().enumerate() {
            let earlier = starts[..index].iter().filter(|other| *other == start).count();
            let is_leaving = || !self.leaving.signals_at(*start).is_empty();
            if tables.program.count_at(*start) <= earlier && (earlier > 0 || !is_leaving()) {
                let text = format!("cannot unregister memory: no registered buffer begins at {start:#x}");
                return Err(Error::invalid(text).with_engine_code(EngineCode::AddressNotRegistered));
            }
        }
        let (mut signals, mut removed) = (Vec::new(), Vec::new());
        for start in starts {
            match tables.program.remove_at(*start) {
                Some(Registered { region, signal }) => {
                    self.leaving.add(Some(*start), signal.clone());
                    signals.push(signal);
                    removed.push(region);
                }
                None => signals.extend(self.leaving.signals_at(*start)),
            }
        }
        drop(tables);
        // The lock is released first, because the notification of unused memory may call this
        // table.
        drop(removed);
        Ok(signals)
    }

    /// Removes a region that begins at an address, and waits until no transfer uses its memory.
    ///
    /// # Errors
    /// Returns the errors of [`take`](Self::take), and `OBJECT_REPLICA_BUSY` if a transfer does not
    /// end. The memory must then stay allocated.
    pub async fn remove(&self, start: u64) -> Result<()> {
        for signal in self.take(&[start])? {
            if !signal.within(UNUSED_WITHIN).await {
                return Err(still_in_use_error());
            }
        }
        Ok(())
    }

    /// Removes all regions, and waits for transfers that use memory of the program. A caller whose
    /// wait was cancelled may call again.
    pub async fn clear(&self) {
        self.take_all();
        self.leaving.wait().await;
    }

    /// Removes all regions.
    fn take_all(&self) {
        let removed = {
            let mut tables = self.tables.write();
            if !is_planted("closing-again-does-not-wait-for-transfers") {
                for (start, region) in tables.program.iter() {
                    self.leaving.add(Some(start), region.signal.clone());
                }
            }
            (tables.program.take_all(), std::mem::take(&mut tables.allocated))
        };
        // The drop may set the signal of some memory.
        drop(removed);
    }

    /// Returns the registered memory of the program that transfers may still use. The value
    /// outlives these regions: their drop adds the memory that is registered then.
    pub fn leaving(&self) -> Arc<Leaving> {
        self.leaving.clone()
    }

    /// Returns the unregistered memory of a call, which is empty at first.
    pub fn unregistered(&self) -> Unregistered {
        Unregistered::new(self.leaving())
    }

    /// Returns a range to write from.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` ([`EngineCode::AddressNotRegistered`]) if the range does not lie in
    /// one region.
    pub fn slice(&self, address: u64, len: usize) -> Result<Slice<TransportSet>> {
        self.with(address, len, |region, range| region.slice(range))
    }

    /// Returns a range to read into.
    ///
    /// # Errors
    /// Returns the errors of [`slice`](Self::slice), and `INVALID_PARAMS` for read-only memory.
    pub fn slice_mut(&self, address: u64, len: usize) -> Result<SliceMut<TransportSet>> {
        self.with(address, len, |region, range| {
            // SAFETY: the memory belongs to the program. If it permits two writes at a time, it
            // gets a mixture of both.
            unsafe { region.slice_mut_unchecked(range) }
        })
    }

    /// Returns a range like [`slice_mut`](Self::slice_mut), and drops a clone of `landing` when no
    /// transfer can write to the range any more.
    ///
    /// # Errors
    /// Returns the errors of [`slice_mut`](Self::slice_mut).
    pub fn slice_mut_until(
        &self,
        address: u64,
        len: usize,
        landing: &Arc<Landing>,
    ) -> Result<SliceMut<TransportSet>> {
        if is_planted("a-call-ends-before-its-bytes-land") {
            return self.slice_mut(address, len);
        }
        self.with(address, len, |region, range| {
            // SAFETY: as in `slice_mut`.
            let part = unsafe { region.sub_region(range, Box::new(landing.clone())) }?;
            // SAFETY: as above.
            unsafe { part.slice_mut_unchecked(0..len) }
        })
    }

    /// Returns the number of registered bytes from an address on, in the region that reaches
    /// farthest.
    ///
    /// # Errors
    /// Returns the errors of [`slice`](Self::slice).
    pub fn bytes_to_end(&self, address: u64) -> Result<usize> {
        let end = {
            let tables = self.tables.read();
            if tables.allocated_at(address).is_none() { tables.program.end_from(address) } else { None }
        };
        match end {
            Some(end) => usize::try_from(end - address).map_err(|_| not_registered(address, 1)),
            None => self.with(address, 1, |region, range| Ok(region.len() - range.start)),
        }
    }

    fn with<R>(
        &self,
        address: u64,
        len: usize,
        then: impl FnOnce(&Region<TransportSet>, Range<usize>) -> Result<R>,
    ) -> Result<R> {
        let not_registered = || not_registered(address, len);
        let tables = self.tables.read();
        let part;
        let region = match tables.allocated_at(address) {
            Some(LibraryMemory::Pool(pool))
                if !is_planted("an-address-finds-the-arena-and-not-the-extent") =>
            {
                part = pool.find(address, len).ok_or_else(not_registered)?;
                &part
            }
            Some(memory) => memory.region(),
            None => &tables.program.find(address, len as u64).ok_or_else(not_registered)?.1.region,
        };
        if len == 0 || !region.span().contains(address, len as u64) {
            return Err(not_registered());
        }
        let from = usize::try_from(address - region.addr()).map_err(|_| not_registered())?;
        then(region, from..from + len)
    }
}

#[cold]
fn not_registered(address: u64, len: usize) -> Error {
    let text = format!(
        "{len} bytes at {address:#x} do not lie in registered memory; register it first (Python: register_memory, register_buffer)"
    );
    Error::invalid(text).with_engine_code(EngineCode::AddressNotRegistered)
}

pub(crate) fn still_in_use_error() -> Error {
    Error::new(
        ErrorCode::ObjectReplicaBusy,
        "cannot unregister memory: a transfer still uses it; keep it allocated",
    )
}
