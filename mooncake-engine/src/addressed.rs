//! Memory that programs name by its address: what is registered, and for how long it is in use.

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

/// How long giving up memory waits for transfers that use it. A wire ends its transfers long before.
pub const UNUSED_WITHIN: Duration = Duration::from_secs(60);
/// Past the end of what a process can map on the machines we know.
const MAX_ADDRESS: u64 = 1 << 57;

/// Says when the last user of some memory is gone.
#[derive(Debug, Default)]
pub struct Gone {
    gone: Mutex<bool>,
    changed: Condvar,
    notify: tokio::sync::Notify,
}

impl Gone {
    /// Parks the thread until it is gone; whether that was within `limit`.
    pub fn wait(&self, limit: Duration) -> bool {
        let mut gone = self.gone.lock();
        if !*gone {
            self.changed.wait_while_for(&mut gone, |gone| !*gone, limit);
        }
        *gone
    }

    /// The same without parking; on a tokio runtime.
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

    /// Whether it is.
    pub fn is_set(&self) -> bool {
        *self.gone.lock()
    }

    /// It is gone.
    pub fn set(&self) {
        *self.gone.lock() = true;
        self.changed.notify_all();
        self.notify.notify_waiters();
    }
}

/// Memory that transfers of one call may write to. The sign is set when the last of them is over.
#[derive(Debug, Default)]
pub struct Landing {
    gone: Arc<Gone>,
}

impl Landing {
    /// Memory of a call, and the sign that nothing is written to that memory any more.
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

/// Memory of somebody else's at an address.
struct Foreign {
    span: MemorySpan,
    gone: Arc<Gone>,
}

// SAFETY: whoever made it vouches for the memory until `gone` is set.
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

/// Memory at an address that the caller vouches for, a device's too, and the sign that nobody uses it any more. Memory that the kernel lets
/// this process only read (a file mapped so) is for writing from; what would fill it is refused, peers too.
///
/// # Errors
/// `INVALID_PARAMS` for what is no memory of this process, as far as the kernel can be asked.
///
/// # Safety
/// Until the sign is set the bytes stay allocated, and readable and writable if they were, and the caller expects them to be read and written at any time by
/// whatever names them by their address.
pub unsafe fn foreign(address: u64, len: usize) -> Result<(Arc<dyn MemorySource>, Arc<Gone>)> {
    let ptr = usize::try_from(address)
        .ok()
        .and_then(|a| NonNull::new(std::ptr::with_exposed_provenance_mut(a)))
        .ok_or_else(|| Error::invalid("the null pointer cannot be registered"))?;
    if len == 0 || address.checked_add(len as u64).is_none_or(|end| end > MAX_ADDRESS) {
        return Err(Error::invalid(format!("{len} bytes at {address:#x} are no memory of a process")));
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
            "{len} bytes at {address:#x} are not all mapped in this process, or may not be read"
        )));
    }
    let span = MemorySpan { read_only: rights == Mapped::ReadOnly, lent: true, ..span };
    let gone = Arc::new(Gone::default());
    Ok((Arc::new(Foreign { span, gone: gone.clone() }), gone))
}

/// Memory of the program that is not registered any more, and that transfers may still use.
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
    /// What was taken off the list, by its first address, while somebody may still use it.
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
    /// Lists a region whose memory says when it is gone.
    ///
    /// # Errors
    /// `INVALID_PARAMS` ([`EngineCode::AddressOverlapped`]) when some of it is listed already: which of the two a call meant could not be told.
    pub fn add(&self, region: Region<TransportSet>, gone: Arc<Gone>) -> Result<()> {
        let (start, end) = (region.addr(), region.addr() + region.len() as u64);
        let mut regions = self.by_start.write();
        let before = regions.range(..end).next_back().map(|(at, before)| (*at, before.region.len() as u64));
        if let Some((at, len)) = before.filter(|(at, len)| at + len > start) {
            drop(regions);
            let text = format!("{len} bytes at {at:#x}, some of which these are, are registered already");
            return Err(Error::invalid(text).with_engine_code(EngineCode::AddressOverlapped));
        }
        regions.insert(start, Registered { region, gone, kind: Kind::Program });
        Ok(())
    }

    /// Lists a region of memory that the library itself lends out; it cannot be unregistered by its address.
    pub fn add_ours(&self, region: Region<TransportSet>, gone: Arc<Gone>) {
        self.by_start.write().insert(region.addr(), Registered { region, gone, kind: Kind::Lent });
    }

    /// Lists a region that the library lends in parts. A slice of such memory keeps the part that it lies in, so that the space of a part
    /// is not lent again while a transfer uses it.
    pub fn add_pool(&self, pool: RegionPool<TransportSet>, gone: Arc<Gone>) {
        let region = pool.region().clone();
        self.by_start.write().insert(region.addr(), Registered { region, gone, kind: Kind::Pool(pool) });
    }

    /// Takes the region that begins there off the list; its memory goes with its last user.
    pub fn forget(&self, start: u64) {
        let taken = self.by_start.write().remove(&start);
        drop(taken);
    }

    /// Takes the regions that begin there off the list, all or none; what says when nobody uses their memory any more. Who gave up waiting
    /// for that may ask again.
    ///
    /// # Errors
    /// `INVALID_PARAMS` ([`EngineCode::AddressNotRegistered`]) when no region begins at one of them.
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
                let text = format!("no buffer is registered at {start:#x}");
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
        // Whoever is told that the memory is gone may come back here.
        drop(taken);
        Ok(gone)
    }

    /// Takes the region that begins there off the list and waits until no transfer uses its memory any more.
    ///
    /// # Errors
    /// As [`take`](Self::take), and `OBJECT_REPLICA_BUSY` when a transfer does not end: then the memory must stay allocated.
    pub async fn remove(&self, start: u64) -> Result<()> {
        for gone in self.take(&[start])? {
            if !gone.within(UNUSED_WITHIN).await {
                return Err(still_in_use());
            }
        }
        Ok(())
    }

    /// Everything off the list, and waits for transfers that use memory of the program. A caller that gave up waiting may call again.
    pub async fn clear(&self) {
        self.take_all();
        self.leaving.wait().await;
    }

    /// Takes everything off the list.
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
        // The sign of memory may be given here.
        drop(taken);
    }

    /// Memory of the program that was registered here, and that transfers may still use. The value outlives these regions: dropping
    /// them adds what is registered then.
    pub fn leaving(&self) -> Arc<Leaving> {
        self.leaving.clone()
    }

    /// A range to write from.
    ///
    /// # Errors
    /// `INVALID_PARAMS` ([`EngineCode::AddressNotRegistered`]) when the range does not lie in one region.
    pub fn slice(&self, address: u64, len: usize) -> Result<Slice<TransportSet>> {
        self.with(address, len, |region, range| region.slice(range))
    }

    /// A range to read into.
    ///
    /// # Errors
    /// As [`slice`](Self::slice), and `INVALID_PARAMS` for memory that can only be read.
    pub fn slice_mut(&self, address: u64, len: usize) -> Result<SliceMut<TransportSet>> {
        self.with(address, len, |region, range| {
            // SAFETY: the memory is the program's, which has it written by one call at a time, or gets a mixture of both.
            unsafe { region.slice_mut_unchecked(range) }
        })
    }

    /// [`slice_mut`](Self::slice_mut), and drops a clone of `landing` when no transfer can write to that range any more.
    ///
    /// # Errors
    /// As there.
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

    /// How many bytes are registered from an address on.
    ///
    /// # Errors
    /// As [`slice`](Self::slice).
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
    Error::new(ErrorCode::ObjectReplicaBusy, "a transfer still uses the buffer; it must stay allocated")
}
