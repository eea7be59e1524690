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
use super::{Gone, Landing, UNUSED_WITHIN};
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
    /// Memory that the library lends, by its first address. It has no overlaps.
    lent: BTreeMap<u64, Lent>,
}

impl Tables {
    fn lent_at(&self, address: u64) -> Option<&Lent> {
        let (_, lent) = self.lent.range(..=address).next_back()?;
        Some(lent).filter(|lent| lent.region().span().contains(address, 1))
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
    gone: Arc<Gone>,
}

/// Memory that the library lends.
#[derive(Debug)]
enum Lent {
    /// Lent as a whole.
    Whole(Region<TransportSet>),
    /// Lent in parts. Only memory of a part that is lent may be named.
    Pool(RegionPool<TransportSet>),
}

impl Lent {
    fn region(&self) -> &Region<TransportSet> {
        match self {
            Self::Whole(region) => region,
            Self::Pool(pool) => pool.region(),
        }
    }
}

impl Regions {
    /// Adds a region of the program, whose memory reports when it is unused.
    pub fn add(&self, region: Region<TransportSet>, gone: Arc<Gone>) {
        let (start, len) = (region.addr(), region.len() as u64);
        self.tables.write().program.add(start, len, Registered { region, gone });
    }

    /// Adds a region of memory that the library itself lends. It cannot be unregistered by its
    /// address.
    pub fn add_ours(&self, region: Region<TransportSet>) {
        self.tables.write().lent.insert(region.addr(), Lent::Whole(region));
    }

    /// Adds a region that the library lends in parts. A slice of such memory keeps its part, so
    /// that the space of a part is not lent again while a transfer uses it.
    pub fn add_pool(&self, pool: RegionPool<TransportSet>) {
        self.tables.write().lent.insert(pool.region().addr(), Lent::Pool(pool));
    }

    /// Removes memory that the library lends, by its first address. Its last user frees it.
    pub fn forget(&self, start: u64) {
        let taken = self.tables.write().lent.remove(&start);
        drop(taken);
    }

    /// Removes a region of the program for each of these first addresses, all or none. Returns the
    /// signs that their memory is unused. A caller whose wait was cancelled may call again.
    ///
    /// If several regions begin at an address, the shortest is removed, and of equal ones the
    /// newest.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` ([`EngineCode::AddressNotRegistered`]) if no region begins at an
    /// address, or fewer than the address is listed.
    pub fn take(&self, starts: &[u64]) -> Result<Vec<Arc<Gone>>> {
        let mut tables = self.tables.write();
        for (index, start) in starts.iter().enumerate() {
            let earlier = starts[..index].iter().filter(|other| *other == start).count();
            let is_leaving = || !self.leaving.signs_at(*start).is_empty();
            if tables.program.count_at(*start) <= earlier && (earlier > 0 || !is_leaving()) {
                let text = format!("cannot unregister memory: no registered buffer begins at {start:#x}");
                return Err(Error::invalid(text).with_engine_code(EngineCode::AddressNotRegistered));
            }
        }
        let (mut signs, mut taken) = (Vec::new(), Vec::new());
        for start in starts {
            match tables.program.remove_at(*start) {
                Some(Registered { region, gone }) => {
                    self.leaving.add(Some(*start), gone.clone());
                    signs.push(gone);
                    taken.push(region);
                }
                None => signs.extend(self.leaving.signs_at(*start)),
            }
        }
        drop(tables);
        // The lock is released first, because the notification of unused memory may call this
        // table.
        drop(taken);
        Ok(signs)
    }

    /// Removes a region that begins at an address, and waits until no transfer uses its memory.
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
        let taken = {
            let mut tables = self.tables.write();
            if !is_planted("closing-again-does-not-wait-for-transfers") {
                for (start, region) in tables.program.iter() {
                    self.leaving.add(Some(start), region.gone.clone());
                }
            }
            (tables.program.take_all(), std::mem::take(&mut tables.lent))
        };
        // The drop may set the signal of some memory.
        drop(taken);
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
            let part = unsafe { region.lend(range, Box::new(landing.clone())) }?;
            // SAFETY: as above.
            unsafe { part.slice_mut_unchecked(0..len) }
        })
    }

    /// Returns the number of registered bytes from an address on, in the region that reaches
    /// farthest.
    ///
    /// # Errors
    /// Returns the errors of [`slice`](Self::slice).
    pub fn room(&self, address: u64) -> Result<usize> {
        let end = {
            let tables = self.tables.read();
            if tables.lent_at(address).is_none() { tables.program.end_from(address) } else { None }
        };
        match end {
            Some(end) => usize::try_from(end - address).map_err(|_| unknown(address, 1)),
            None => self.with(address, 1, |region, range| Ok(region.len() - range.start)),
        }
    }

    fn with<R>(
        &self,
        address: u64,
        len: usize,
        then: impl FnOnce(&Region<TransportSet>, Range<usize>) -> Result<R>,
    ) -> Result<R> {
        let unknown = || unknown(address, len);
        let tables = self.tables.read();
        let part;
        let region = match tables.lent_at(address) {
            Some(Lent::Pool(pool)) if !is_planted("an-address-finds-the-arena-and-not-the-extent") => {
                part = pool.find(address, len).ok_or_else(unknown)?;
                &part
            }
            Some(lent) => lent.region(),
            None => &tables.program.find(address, len as u64).ok_or_else(unknown)?.1.region,
        };
        if len == 0 || !region.span().contains(address, len as u64) {
            return Err(unknown());
        }
        let from = usize::try_from(address - region.addr()).map_err(|_| unknown())?;
        then(region, from..from + len)
    }
}

#[cold]
fn unknown(address: u64, len: usize) -> Error {
    let text = format!(
        "{len} bytes at {address:#x} do not lie in registered memory; register it first (Python: register_memory, register_buffer)"
    );
    Error::invalid(text).with_engine_code(EngineCode::AddressNotRegistered)
}

pub(crate) fn still_in_use() -> Error {
    Error::new(
        ErrorCode::ObjectReplicaBusy,
        "cannot unregister memory: a transfer still uses it; keep it allocated",
    )
}
