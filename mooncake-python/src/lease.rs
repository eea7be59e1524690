//! Registered memory that is lent out in parts: from the store's local buffer first, then newly
//! allocated.

use std::sync::Arc;

use mooncake_core::{Error, Result};
use mooncake_engine::TransportSet;
use mooncake_engine::addressed::Regions;
use mooncake_store::local::LocalBuf;
use mooncake_transport::{Region, RegionPool, SliceMut};

use crate::client::{PythonClient, StoreClient};

/// Alignment of leased addresses.
const ALIGN: u64 = 64;

/// Allocator of leases.
pub(crate) struct Arena {
    regions: Arc<Regions>,
    local: Option<RegionPool<TransportSet>>,
}

impl Arena {
    /// Creates an arena over as much new memory as the local buffer has. Pages are not populated
    /// before they are used.
    pub(crate) fn new(client: &StoreClient, regions: Arc<Regions>) -> Result<Self> {
        let capacity = client.local_buffer();
        let local = match usize::try_from(capacity) {
            Ok(len) if len > 0 => {
                let region = new_region(client, len)?;
                // SAFETY: new memory, whose slices all come from the pool.
                #[allow(unsafe_code)]
                let pool = unsafe { RegionPool::new(region) };
                regions.add_pool(pool.clone());
                Some(pool)
            }
            _ => None,
        };
        Ok(Self { regions, local })
    }

    /// Returns the size of the local buffer in bytes.
    pub(crate) fn capacity(&self) -> u64 {
        self.local.as_ref().map_or(0, RegionPool::capacity)
    }

    /// Allocates from the local buffer, if it has enough free space.
    fn allocate_local(&self, len: usize) -> Option<Lease> {
        let part = self.local.as_ref()?.allocate(len, ALIGN).ok()?;
        Some(Lease { backing: Backing::Local(part) })
    }

    /// Allocates and registers new memory.
    fn allocate_region(&self, client: &StoreClient, len: usize) -> Result<Lease> {
        let region = new_region(client, len)?;
        self.regions.add_library_region(region.clone());
        Ok(Lease { backing: Backing::Overflow(region, self.regions.clone()) })
    }

    /// Allocates from the local buffer, else new memory.
    pub(crate) fn take(&self, client: &StoreClient, len: usize) -> Result<Lease> {
        self.allocate_local(len).map_or_else(|| self.allocate_region(client, len), Ok)
    }
}

fn new_region(client: &StoreClient, len: usize) -> Result<Region<TransportSet>> {
    client.register_now(Arc::new(client.allocate(len)?))
}

/// Leased memory. It is freed once it is dropped and no transfer uses it any more.
pub(crate) struct Lease {
    backing: Backing,
}

enum Backing {
    /// Part of the local buffer. A slice of it keeps its space allocated, too.
    Local(Region<TransportSet>),
    /// Separate memory, listed in these regions.
    Overflow(Region<TransportSet>, Arc<Regions>),
    /// Memory of an IPC client, which a value was read into.
    Shared(LocalBuf),
}

impl Lease {
    /// Wraps a value that an IPC client read, without a copy.
    pub(crate) fn shared(value: LocalBuf) -> Self {
        Self { backing: Backing::Shared(value) }
    }

    fn region(&self) -> Option<&Region<TransportSet>> {
        match &self.backing {
            Backing::Local(region) | Backing::Overflow(region, _) => Some(region),
            Backing::Shared(_) => None,
        }
    }

    /// Returns the first address.
    pub(crate) fn address(&self) -> u64 {
        match &self.backing {
            Backing::Local(region) | Backing::Overflow(region, _) => region.addr(),
            Backing::Shared(value) => value.address(),
        }
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> usize {
        match &self.backing {
            Backing::Local(region) | Backing::Overflow(region, _) => region.len(),
            Backing::Shared(value) => value.len(),
        }
    }

    /// Returns all of the memory, to read into.
    #[allow(unsafe_code)]
    pub(crate) fn slice_mut(&self) -> Result<SliceMut<TransportSet>> {
        let region = self.region().ok_or_else(|| {
            Error::internal("internal error: memory of an IPC client is filled by mooncake_client")
        })?;
        // SAFETY: parts do not overlap, and only the reader that took the new lease knows its
        // memory.
        unsafe { region.slice_mut_unchecked(0..region.len()) }
    }
}

impl Lease {
    /// Copies the first bytes out.
    pub(crate) fn copy_to(&self, to: &mut [u8]) -> Result<()> {
        match &self.backing {
            Backing::Shared(value) => {
                let bytes = value
                    .get(..to.len())
                    .ok_or_else(|| Error::invalid("internal error: lease is shorter than the read"))?;
                to.copy_from_slice(bytes);
                Ok(())
            }
            _ => self.slice_mut()?.copy_to(0, to),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Backing::Overflow(region, regions) = &self.backing {
            // A closed store has already removed the region from the list.
            regions.forget(region.addr());
        }
    }
}
