//! Registered memory that the engine allocates: cut from few large regions, so that a buffer needs
//! no registration.

use std::collections::BTreeMap;
use std::sync::Arc;

use mooncake_core::memory::{HostMemory, HostMemoryOptions, check_free_memory};
use mooncake_core::{Error, Result};
use mooncake_transport::engine::EngineCode;
use mooncake_transport::{Engine, Region, RegionPool, Transport};
use parking_lot::Mutex;

use crate::TransportSet;
use crate::addressed::Regions;

/// Length of a region that buffers are cut from, in bytes. Untouched pages cost nothing.
const ARENA: u64 = 64 << 20;
/// Buffers from this size on begin at a page.
const PAGE: u64 = 4096;
/// Alignment of shorter buffers.
const LINE: u64 = 64;

/// All managed memory of an engine.
#[derive(Debug, Default)]
pub(crate) struct Managed {
    arenas: Mutex<Vec<Arc<Arena>>>,
    growth_lock: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct Arena {
    pool: RegionPool<TransportSet>,
    /// Buffers that the program holds, by address. A transfer keeps the space of its buffer for
    /// longer.
    buffers: Mutex<BTreeMap<u64, Region<TransportSet>>>,
}

impl Arena {
    fn try_allocate(&self, len: u64) -> Option<u64> {
        let align = if len >= PAGE { PAGE } else { LINE };
        let buffer = self.pool.allocate(usize::try_from(len).ok()?, align).ok()?;
        let address = buffer.addr();
        self.buffers.lock().insert(address, buffer);
        Some(address)
    }

    fn is_unused(&self) -> bool {
        self.pool.used() == 0
    }
}

impl Managed {
    /// A new buffer; its address.
    pub(crate) async fn allocate(
        &self,
        engine: &Engine<TransportSet>,
        regions: &Regions,
        len: u64,
    ) -> Result<u64> {
        if len == 0 {
            return Err(Error::invalid("cannot allocate buffer: its length is 0"));
        }
        if let Some(address) = self.try_allocate(len) {
            return Ok(address);
        }
        let _guard = self.growth_lock.lock().await;
        if let Some(address) = self.try_allocate(len) {
            return Ok(address);
        }
        let size = len.max(ARENA).checked_next_multiple_of(PAGE).and_then(|size| usize::try_from(size).ok());
        let size =
            size.ok_or_else(|| Error::invalid(format!("cannot allocate buffer: it is too long. len={len}")))?;
        // Shared, where peers of this host have a shorter way to such memory.
        let shared = engine.transport().capabilities().shared_memory.then(|| "mooncake_engine".to_owned());
        check_free_memory(size).map_err(|error| error.context("managed buffers"))?;
        let memory = HostMemory::with(size, &HostMemoryOptions { shared, ..HostMemoryOptions::default() });
        let memory = memory.map_err(|e| e.context("managed buffers"))?;
        let region = engine.register(Arc::new(memory)).await?;
        // SAFETY: new memory, whose slices all come from the pool.
        let pool = unsafe { RegionPool::new(region) };
        regions.add_pool(pool.clone());
        let arena = Arc::new(Arena { pool, buffers: Mutex::default() });
        let address = arena.try_allocate(len).ok_or_else(|| Error::internal("a new arena is full"))?;
        self.arenas.lock().push(arena);
        Ok(address)
    }

    fn try_allocate(&self, len: u64) -> Option<u64> {
        self.arenas.lock().iter().find_map(|arena| arena.try_allocate(len))
    }

    /// Gives a buffer back. Its memory is used again when no transfer uses it any more.
    pub(crate) fn free(&self, regions: &Regions, address: u64, len: u64) -> Result<()> {
        let unknown = || {
            let text = format!("no managed buffer of {len} bytes begins at {address:#x}");
            Error::invalid(text).with_engine_code(EngineCode::AddressNotRegistered)
        };
        let arena = self.arena_of(address).ok_or_else(unknown)?;
        let buffer = {
            let mut buffers = arena.buffers.lock();
            if buffers.get(&address).is_none_or(|buffer| buffer.len() as u64 != len) {
                return Err(unknown());
            }
            buffers.remove(&address)
        };
        drop(buffer);
        // All but the last one goes back to the system.
        let mut arenas = self.arenas.lock();
        if arenas.len() > 1 && arena.is_unused() {
            arenas.retain(|other| !Arc::ptr_eq(other, &arena));
            regions.forget(arena.pool.region().addr());
        }
        Ok(())
    }

    fn arena_of(&self, address: u64) -> Option<Arc<Arena>> {
        let holds = |arena: &&Arc<Arena>| arena.pool.region().span().contains(address, 1);
        self.arenas.lock().iter().find(holds).cloned()
    }
}
