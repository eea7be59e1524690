//! Registered memory that is lent out in pieces: the store's local buffer first, memory of its own when that is full.

use std::sync::{Arc, Weak};

use mooncake_core::alloc::{Extent, SegmentAllocator, Tlsf, TlsfConfig};
use mooncake_core::memory::{HostMemory, MemorySource, MemorySpan};
use mooncake_core::{Error, Result};
use mooncake_engine::addressed::{Gone, Regions};
use mooncake_store::local::LocalBuf;
use mooncake_transport::{Region, SliceMut};
use parking_lot::Mutex;

use crate::member::Member;
use crate::memory::Wire;

/// Address alignment of what is lent out.
const ALIGN: u64 = 64;

/// Where leases come from.
pub(crate) struct Arena {
    regions: Arc<Regions>,
    local: Option<Local>,
}

struct Local {
    region: Region<Wire>,
    free: Mutex<Tlsf>,
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
                let region = new_region(client, &regions, len)?;
                Some(Local { region, free: Mutex::new(Tlsf::new(capacity, &TlsfConfig::default())) })
            }
            _ => None,
        };
        Ok(Self { regions, local })
    }

    /// Bytes of the local buffer.
    pub(crate) fn capacity(&self) -> u64 {
        self.local.as_ref().map_or(0, |local| local.free.lock().capacity())
    }

    /// Memory out of the local buffer, if there is room.
    pub(crate) fn try_local(self: &Arc<Self>, len: usize) -> Option<Lease> {
        let local = self.local.as_ref()?;
        let extent = local.free.lock().allocate(len as u64, ALIGN).ok()?;
        let start = usize::try_from(extent.offset).ok()?;
        Some(Lease {
            region: Some(local.region.clone()),
            start,
            len,
            home: Home::Local(Arc::downgrade(self), extent),
        })
    }

    /// New registered memory.
    pub(crate) fn overflow(&self, client: &Member, len: usize) -> Result<Lease> {
        let region = new_region(client, &self.regions, len)?;
        Ok(Lease { region: Some(region), start: 0, len, home: Home::Overflow(self.regions.clone()) })
    }

    /// Memory from wherever there is some.
    pub(crate) fn take(self: &Arc<Self>, client: &Member, len: usize) -> Result<Lease> {
        self.try_local(len).map_or_else(|| self.overflow(client, len), Ok)
    }
}

fn new_region(client: &Member, regions: &Regions, len: usize) -> Result<Region<Wire>> {
    let gone = Arc::new(Gone::default());
    let memory = client.memory(len)?;
    let region = client.register(Arc::new(Watched { memory, gone: gone.clone() }))?;
    regions.add_ours(region.clone(), gone);
    Ok(region)
}

/// Lent memory, given back when it is dropped.
pub(crate) struct Lease {
    region: Option<Region<Wire>>,
    start: usize,
    len: usize,
    home: Home,
}

enum Home {
    Local(Weak<Arena>, Extent),
    Overflow(Arc<Regions>),
    /// Memory of a light client, which a value was read into.
    Shared(LocalBuf),
}

impl Lease {
    /// A value that a light client read, where it lies.
    pub(crate) fn shared(value: LocalBuf) -> Self {
        Self { region: None, start: 0, len: value.len(), home: Home::Shared(value) }
    }

    /// First address.
    pub(crate) fn address(&self) -> u64 {
        if let Home::Shared(value) = &self.home {
            return value.address();
        }
        self.region.as_ref().map_or(0, |region| region.addr() + self.start as u64)
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// All of it, to read into.
    #[allow(unsafe_code)]
    pub(crate) fn slice_mut(&self) -> Result<SliceMut<Wire>> {
        let region = self.region.as_ref().ok_or_else(|| Error::internal("the memory was given back"))?;
        // SAFETY: extents do not overlap, and who reads into a new lease is the only one to know it.
        unsafe { region.slice_mut_unchecked(self.start..self.start + self.len) }
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
        let region = self.region.take();
        match &self.home {
            Home::Local(arena, extent) => {
                if let Some(local) = arena.upgrade().as_ref().and_then(|arena| arena.local.as_ref()) {
                    local.free.lock().release(*extent);
                }
            }
            Home::Overflow(regions) => {
                // The store may be closed by now, and then it is off the list.
                if let Some(region) = region {
                    regions.forget(region.addr());
                }
            }
            // Gives itself back.
            Home::Shared(_) => {}
        }
    }
}
