//! Registered memory that is lent out in pieces: the store's local buffer first, memory of its own when that is full.

use std::sync::Arc;

use mooncake_core::memory::{HostMemory, MemorySource, MemorySpan};
use mooncake_core::{Error, Result};
use mooncake_engine::addressed::{Gone, Regions};
use mooncake_store::local::LocalBuf;
use mooncake_transport::{Region, RegionPool, SliceMut};

use crate::member::Member;
use crate::memory::Wire;

/// Address alignment of what is lent out.
const ALIGN: u64 = 64;

/// Where leases come from.
pub(crate) struct Arena {
    regions: Arc<Regions>,
    local: Option<RegionPool<Wire>>,
}

/// Host memory that says when it is gone.
struct Watched {
    memory: HostMemory,
    gone: Arc<Gone>,
}

// SAFETY: the memory inside keeps the promise.
#[allow(unsafe_code)]
unsafe impl MemorySource for Watched {
    fn span(&self) -> MemorySpan {
        self.memory.span()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.gone.set();
    }
}

impl Arena {
    /// An arena over as much new memory as the local buffer has; pages cost nothing before they are used.
    pub(crate) fn new(client: &Member, regions: Arc<Regions>) -> Result<Self> {
        let capacity = client.local_buffer();
        let local = match usize::try_from(capacity) {
            Ok(len) if len > 0 => {
                let (region, gone) = new_region(client, len)?;
                // SAFETY: new memory, whose slices all come from the pool.
                #[allow(unsafe_code)]
                let pool = unsafe { RegionPool::new(region) };
                regions.add_pool(pool.clone(), gone);
                Some(pool)
            }
            _ => None,
        };
        Ok(Self { regions, local })
    }

    /// Bytes of the local buffer.
    pub(crate) fn capacity(&self) -> u64 {
        self.local.as_ref().map_or(0, RegionPool::capacity)
    }

    /// Memory out of the local buffer, if there is room.
    fn try_local(&self, len: usize) -> Option<Lease> {
        let part = self.local.as_ref()?.lend(len, ALIGN).ok()?;
        Some(Lease { home: Home::Local(part) })
    }

    /// New registered memory.
    fn overflow(&self, client: &Member, len: usize) -> Result<Lease> {
        let (region, gone) = new_region(client, len)?;
        self.regions.add_ours(region.clone(), gone);
        Ok(Lease { home: Home::Overflow(region, self.regions.clone()) })
    }

    /// Memory from wherever there is some.
    pub(crate) fn take(&self, client: &Member, len: usize) -> Result<Lease> {
        self.try_local(len).map_or_else(|| self.overflow(client, len), Ok)
    }
}

fn new_region(client: &Member, len: usize) -> Result<(Region<Wire>, Arc<Gone>)> {
    let gone = Arc::new(Gone::default());
    let memory = client.memory(len)?;
    let region = client.register(Arc::new(Watched { memory, gone: gone.clone() }))?;
    Ok((region, gone))
}

/// Lent memory, given back when it is dropped and no transfer uses it any more.
pub(crate) struct Lease {
    home: Home,
}

enum Home {
    /// Part of the local buffer. A slice of it keeps its space, too.
    Local(Region<Wire>),
    /// Memory of its own, listed there.
    Overflow(Region<Wire>, Arc<Regions>),
    /// Memory of a light client, which a value was read into.
    Shared(LocalBuf),
}

impl Lease {
    /// A value that a light client read, where it lies.
    pub(crate) fn shared(value: LocalBuf) -> Self {
        Self { home: Home::Shared(value) }
    }

    fn region(&self) -> Option<&Region<Wire>> {
        match &self.home {
            Home::Local(region) | Home::Overflow(region, _) => Some(region),
            Home::Shared(_) => None,
        }
    }

    /// First address.
    pub(crate) fn address(&self) -> u64 {
        match &self.home {
            Home::Local(region) | Home::Overflow(region, _) => region.addr(),
            Home::Shared(value) => value.address(),
        }
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        match &self.home {
            Home::Local(region) | Home::Overflow(region, _) => region.len(),
            Home::Shared(value) => value.len(),
        }
    }

    /// All of it, to read into.
    #[allow(unsafe_code)]
    pub(crate) fn slice_mut(&self) -> Result<SliceMut<Wire>> {
        let region = self
            .region()
            .ok_or_else(|| Error::internal("memory of a light client is filled by its owner"))?;
        // SAFETY: parts do not overlap, and who reads into a new lease is the only one to know it.
        unsafe { region.slice_mut_unchecked(0..region.len()) }
    }
}

impl Lease {
    /// Copies the first bytes out.
    pub(crate) fn copy_to(&self, to: &mut [u8]) -> Result<()> {
        match &self.home {
            Home::Shared(value) => {
                let bytes =
                    value.get(..to.len()).ok_or_else(|| Error::invalid("more bytes than there are"))?;
                to.copy_from_slice(bytes);
                Ok(())
            }
            _ => self.slice_mut()?.copy_to(0, to),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Home::Overflow(region, regions) = &self.home {
            // The store may be closed by now, and then it is off the list.
            regions.forget(region.addr());
        }
    }
}
