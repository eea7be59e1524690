//! Memory that programs name by its address: the registrations, and the end of their use.

use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::fault_injection::is_planted;
use mooncake_core::memory::{Mapped, MemorySource, MemorySpan, device_driver, mapped};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::engine::EngineCode;
use mooncake_transport::{Region, RegionPool, Slice, SliceMut};
use parking_lot::{Condvar, Mutex, RwLock};

use crate::TransportSet;

/// Timeout of the wait for transfers that use memory to be unregistered. A transport ends its
/// transfers long before.
pub const UNUSED_WITHIN: Duration = Duration::from_secs(60);
/// Upper bound of the addresses that a process can map on the supported machines.
const MAX_ADDRESS: u64 = 1 << 57;

/// Signal that some memory has no users any more.
#[derive(Debug, Default)]
pub struct Gone {
    gone: Mutex<bool>,
    changed: Condvar,
    notify: tokio::sync::Notify,
}

impl Gone {
    /// Parks the thread until the signal is set, for at most `limit`. Returns whether it is set.
    pub fn wait(&self, limit: Duration) -> bool {
        let mut gone = self.gone.lock();
        if !*gone {
            self.changed.wait_while_for(&mut gone, |gone| !*gone, limit);
        }
        *gone
    }

    /// Waits like [`wait`](Self::wait), without parking the thread. Needs a tokio runtime.
    pub async fn within(&self, limit: Duration) -> bool {
        let told = async {
            loop {
                let told = self.notify.notified();
                if self.is_set() {
                    return;
                }
                told.await;
            }
        };
        tokio::time::timeout(limit, told).await.is_ok()
    }

    /// Returns whether the memory is unused.
    pub fn is_set(&self) -> bool {
        *self.gone.lock()
    }

    /// Marks the memory as unused, and wakes the waiters.
    pub fn set(&self) {
        *self.gone.lock() = true;
        self.changed.notify_all();
        self.notify.notify_waiters();
    }
}

/// Memory that transfers of one call may write to. The signal is set when the last of them has
/// ended.
#[derive(Debug, Default)]
pub struct Landing {
    gone: Arc<Gone>,
}

impl Landing {
    /// Creates the memory of a call, and the signal that no transfer writes to it any more.
    pub fn new() -> (Arc<Self>, Arc<Gone>) {
        let landing = Self::default();
        let gone = landing.gone.clone();
        (Arc::new(landing), gone)
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        self.gone.set();
    }
}

/// Memory of the caller at an address.
struct Foreign {
    span: MemorySpan,
    gone: Arc<Gone>,
}

// SAFETY: the creator vouches for the memory until `gone` is set.
unsafe impl MemorySource for Foreign {
    fn span(&self) -> MemorySpan {
        self.span
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        self.gone.set();
    }
}

/// Returns host or device memory at an address for which the caller vouches, and the sign that it
/// is unused. Memory that the kernel maps read-only is a source only: operations that would write
/// to it are refused, those of peers too.
///
/// # Errors
/// Returns `INVALID_PARAMS` for a range that is not memory of this process, as far as the kernel
/// reports it.
///
/// # Safety
/// Until the sign is set, the bytes stay allocated, and readable and writable if they were. The
/// caller expects that any request for their address reads and writes them at any time.
pub unsafe fn foreign(address: u64, len: usize) -> Result<(Arc<dyn MemorySource>, Arc<Gone>)> {
    let ptr = usize::try_from(address)
        .ok()
        .and_then(|a| NonNull::new(std::ptr::with_exposed_provenance_mut(a)))
        .ok_or_else(|| Error::invalid("cannot register memory: the address is null"))?;
    if len == 0 || address.checked_add(len as u64).is_none_or(|end| end > MAX_ADDRESS) {
        return Err(Error::invalid(format!("invalid memory range: address={address:#x} len={len}")));
    }
    let span = MemorySpan::new(ptr, len).located();
    let all = |device: MemorySpan| device.contains(address, len as u64);
    let rights = match device_driver().filter(|_| span.location.is_device()) {
        Some(driver) if driver.allocation(address).is_some_and(all) => Mapped::Writable,
        Some(_) => Mapped::Not,
        None => mapped(address, len),
    };
    if rights == Mapped::Not {
        return Err(Error::invalid(format!(
            "cannot register memory: the range is not mapped and readable. address={address:#x} len={len}"
        )));
    }
    let span = MemorySpan { read_only: rights == Mapped::ReadOnly, lent: true, ..span };
    let gone = Arc::new(Gone::default());
    Ok((Arc::new(Foreign { span, gone: gone.clone() }), gone))
}

/// Unregistered memory of the program that transfers may still use.
#[derive(Debug, Default)]
pub struct Leaving(Mutex<BTreeMap<u64, Arc<Gone>>>);

impl Leaving {
    /// Waits for the transfers that use this memory, up to [`UNUSED_WITHIN`] for each region.
    pub async fn wait(&self) {
        let all: Vec<_> = self.0.lock().values().cloned().collect();
        for gone in all {
            gone.within(UNUSED_WITHIN).await;
        }
        self.0.lock().retain(|_, gone| !gone.is_set());
    }

    /// Returns whether no transfer uses this memory any more.
    pub fn is_empty(&self) -> bool {
        let mut leaving = self.0.lock();
        leaving.retain(|_, gone| !gone.is_set());
        leaving.is_empty()
    }
}

/// Registered memory that calls may name by address.
#[derive(Debug, Default)]
pub struct Regions {
    by_start: RwLock<BTreeMap<u64, Registered>>,
    /// Unregistered memory that transfers may still use, by its first address.
    leaving: Arc<Leaving>,
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
    gone: Arc<Gone>,
    kind: Kind,
}

/// Origin of registered memory.
#[derive(Debug)]
enum Kind {
    /// Registered by the program.
    Program,
    /// Lent by the library as a whole.
    Lent,
    /// Lent by the library in parts. Only memory of a part that is lent may be named.
    Pool(RegionPool<TransportSet>),
}

impl Regions {
    /// Adds a region whose memory reports when it is unused.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` ([`EngineCode::AddressOverlapped`]) for an overlap with a
    /// registered region, because an address would be ambiguous.
    pub fn add(&self, region: Region<TransportSet>, gone: Arc<Gone>) -> Result<()> {
        let (start, end) = (region.addr(), region.addr() + region.len() as u64);
        let mut regions = self.by_start.write();
        let before = regions.range(..end).next_back().map(|(at, before)| (*at, before.region.len() as u64));
        if let Some((at, len)) = before.filter(|(at, len)| at + len > start) {
            drop(regions);
            let text = format!(
                "cannot register memory: the range overlaps memory that is registered already. address={at:#x} len={len}"
            );
            return Err(Error::invalid(text).with_engine_code(EngineCode::AddressOverlapped));
        }
        regions.insert(start, Registered { region, gone, kind: Kind::Program });
        Ok(())
    }

    /// Adds a region of memory that the library itself lends. It cannot be unregistered by its
    /// address.
    pub fn add_ours(&self, region: Region<TransportSet>, gone: Arc<Gone>) {
        self.by_start.write().insert(region.addr(), Registered { region, gone, kind: Kind::Lent });
    }

    /// Adds a region that the library lends in parts. A slice of such memory keeps its part, so
    /// that the space of a part is not lent again while a transfer uses it.
    pub fn add_pool(&self, pool: RegionPool<TransportSet>, gone: Arc<Gone>) {
        let region = pool.region().clone();
        self.by_start.write().insert(region.addr(), Registered { region, gone, kind: Kind::Pool(pool) });
    }

    /// Removes the region that begins at an address. Its last user frees its memory.
    pub fn forget(&self, start: u64) {
        let taken = self.by_start.write().remove(&start);
        drop(taken);
    }

    /// Removes the regions that begin at these addresses, all or none. Returns the signs that their
    /// memory is unused. A caller whose wait was cancelled may call again.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` ([`EngineCode::AddressNotRegistered`]) if no region begins at an
    /// address.
    pub fn take(&self, starts: &[u64]) -> Result<Vec<Arc<Gone>>> {
        let mut regions = self.by_start.write();
        let mut leaving = self.leaving.0.lock();
        leaving.retain(|_, gone| !gone.is_set());
        for (index, start) in starts.iter().enumerate() {
            let is_there = match regions.get(start) {
                Some(registered) => matches!(registered.kind, Kind::Program),
                None => leaving.contains_key(start),
            };
            if !is_there || starts[..index].contains(start) {
                let text = format!("cannot unregister memory: no registered buffer begins at {start:#x}");
                return Err(Error::invalid(text).with_engine_code(EngineCode::AddressNotRegistered));
            }
        }
        let mut taken = Vec::new();
        for start in starts {
            if let Some(registered) = regions.remove(start) {
                leaving.insert(*start, registered.gone.clone());
                taken.push(registered.region);
            }
        }
        let gone = starts.iter().filter_map(|start| leaving.get(start).cloned()).collect();
        drop((regions, leaving));
        // The lock is released first, because the notification of unused memory may call this
        // table.
        drop(taken);
        Ok(gone)
    }

    /// Removes the region that begins at an address, and waits until no transfer uses its memory.
    ///
    /// # Errors
    /// Returns the errors of [`take`](Self::take), and `OBJECT_REPLICA_BUSY` if a transfer does not
    /// end. The memory must then stay allocated.
    pub async fn remove(&self, start: u64) -> Result<()> {
        for gone in self.take(&[start])? {
            if !gone.within(UNUSED_WITHIN).await {
                return Err(still_in_use());
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
        let taken: Vec<_> = {
            let mut regions = self.by_start.write();
            let mut leaving = self.leaving.0.lock();
            for (start, registered) in &*regions {
                let is_waited_for = !is_planted("closing-again-does-not-wait-for-transfers");
                if matches!(registered.kind, Kind::Program) && is_waited_for {
                    leaving.insert(*start, registered.gone.clone());
                }
            }
            std::mem::take(&mut *regions).into_values().collect()
        };
        // The drop may set the signal of some memory.
        drop(taken);
    }

    /// Returns the registered memory of the program that transfers may still use. The value
    /// outlives these regions: their drop adds the memory that is registered then.
    pub fn leaving(&self) -> Arc<Leaving> {
        self.leaving.clone()
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
            let part = unsafe { region.lend(range, Box::new(landing.clone())) }?;
            // SAFETY: as above.
            unsafe { part.slice_mut_unchecked(0..len) }
        })
    }

    /// Returns the number of registered bytes from an address on.
    ///
    /// # Errors
    /// Returns the errors of [`slice`](Self::slice).
    pub fn room(&self, address: u64) -> Result<usize> {
        self.with(address, 1, |region, range| Ok(region.len() - range.start))
    }

    fn with<R>(
        &self,
        address: u64,
        len: usize,
        then: impl FnOnce(&Region<TransportSet>, Range<usize>) -> Result<R>,
    ) -> Result<R> {
        let unknown = || {
            let text = format!(
                "{len} bytes at {address:#x} do not lie in registered memory; register it first (Python: register_memory, register_buffer)"
            );
            Error::invalid(text).with_engine_code(EngineCode::AddressNotRegistered)
        };
        let regions = self.by_start.read();
        let (start, registered) = regions.range(..=address).next_back().ok_or_else(unknown)?;
        let region = &registered.region;
        if len == 0 || !region.span().contains(address, len as u64) {
            return Err(unknown());
        }
        let part = match &registered.kind {
            Kind::Pool(pool) if !is_planted("an-address-finds-the-arena-and-not-the-extent") => {
                Some(pool.find(address, len).ok_or_else(unknown)?)
            }
            _ => None,
        };
        let (region, start) = part.as_ref().map_or((region, *start), |part| (part, part.addr()));
        let from = usize::try_from(address - start).map_err(|_| unknown())?;
        then(region, from..from + len)
    }
}

pub(crate) fn still_in_use() -> Error {
    Error::new(
        ErrorCode::ObjectReplicaBusy,
        "cannot unregister memory: a transfer still uses it; keep it allocated",
    )
}
