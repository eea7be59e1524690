//! Registered memory that the engine hands out: cut from few large regions, so that a buffer costs no registration.

use std::collections::BTreeMap;
use std::sync::Arc;

use mooncake_core::alloc::{BuiltinAllocator, BuiltinAllocatorConfig, Extent, SegmentAllocator};
use mooncake_core::memory::{HostMemory, HostMemoryOptions};
use mooncake_core::{Error, Result};
use mooncake_transport::engine::{EngineCode, Keep};
use mooncake_transport::{Engine, Region, SliceMut, Transport};
use parking_lot::Mutex;

use crate::TransportSet;
use crate::addressed::{Gone, Regions};

/// Bytes of a region that buffers are cut from. Pages nobody has touched cost nothing.
const ARENA: u64 = 64 << 20;
/// Buffers from this size on begin at a page.
const PAGE: u64 = 4096;
/// Where smaller ones begin at a multiple of.
const LINE: u64 = 64;

/// All managed memory of an engine.
#[derive(Debug, Default)]
pub(crate) struct Managed {
    arenas: Mutex<Vec<Arc<Arena>>>,
    growing: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct Arena {
    region: Region<TransportSet>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    allocator: BuiltinAllocator,
    live: BTreeMap<u64, Arc<Held>>,
}

/// A buffer's place. It is free when neither the program nor a transfer holds it.
struct Held {
    arena: std::sync::Weak<Arena>,
    extent: Extent,
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.extent)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(arena) = self.arena.upgrade() {
            arena.state.lock().allocator.release(self.extent);
        }
    }
}

impl Arena {
    fn take(self: &Arc<Self>, len: u64) -> Option<u64> {
        let mut state = self.state.lock();
        let extent = state.allocator.allocate(len, if len >= PAGE { PAGE } else { LINE }).ok()?;
        let held = Held { arena: Arc::downgrade(self), extent };
        state.live.insert(extent.offset, Arc::new(held));
        Some(self.region.addr() + extent.offset)
    }

    fn holds(&self, address: u64) -> bool {
        self.region.span().contains(address, 1)
    }

    fn is_unused(&self) -> bool {
        self.state.lock().allocator.used() == 0
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
            return Err(Error::invalid("a buffer of no bytes"));
        }
        if let Some(address) = self.take(len) {
            return Ok(address);
        }
        let _turn = self.growing.lock().await;
        if let Some(address) = self.take(len) {
            return Ok(address);
        }
        let size = len.max(ARENA).checked_next_multiple_of(PAGE).and_then(|size| usize::try_from(size).ok());
        let size = size.ok_or_else(|| Error::invalid(format!("a buffer of {len} bytes")))?;
        // Shared, where peers of this host have a shorter way to such memory.
        let shared = engine.transport().capabilities().shared_memory.then(|| "mooncake_engine".to_owned());
        let memory = HostMemory::with(size, &HostMemoryOptions { shared, ..HostMemoryOptions::default() });
        let memory = memory.map_err(|e| e.context("managed buffers"))?;
        let region = engine.register(Arc::new(memory)).await?;
        regions.add_ours(region.clone(), Arc::new(Gone::default()));
        let allocator = BuiltinAllocator::new(size as u64, &BuiltinAllocatorConfig::default());
        let state = Mutex::new(State { allocator, live: BTreeMap::new() });
        let arena = Arc::new(Arena { region, state });
        let address = arena.take(len).ok_or_else(|| Error::internal("a new arena has no room"))?;
        self.arenas.lock().push(arena);
        Ok(address)
    }

    fn take(&self, len: u64) -> Option<u64> {
        self.arenas.lock().iter().find_map(|arena| arena.take(len))
    }

    /// Gives a buffer back. Its memory is used again when no transfer uses it any more.
    pub(crate) fn free(&self, regions: &Regions, address: u64, len: u64) -> Result<()> {
        let unknown = || {
            let text = format!("no managed buffer of {len} bytes begins at {address:#x}");
            Error::invalid(text).with_source(EngineCode::AddressNotRegistered)
        };
        let arena = self.arena_of(address).ok_or_else(unknown)?;
        let held = {
            let mut state = arena.state.lock();
            let offset = address - arena.region.addr();
            if state.live.get(&offset).is_none_or(|held| held.extent.len != len) {
                return Err(unknown());
            }
            state.live.remove(&offset)
        };
        drop(held);
        // All but the last one goes back to the system.
        let mut arenas = self.arenas.lock();
        if arenas.len() > 1 && arena.is_unused() {
            arenas.retain(|other| !Arc::ptr_eq(other, &arena));
            regions.forget(arena.region.addr());
        }
        Ok(())
    }

    /// A range of a buffer that is handed out, and what keeps it so; `None` when the address is none of ours.
    pub(crate) fn find(&self, address: u64, len: usize) -> Option<Result<(SliceMut<TransportSet>, Keep)>> {
        let arena = self.arena_of(address)?;
        let offset = address - arena.region.addr();
        let before = arena.state.lock().live.range(..=offset).next_back().map(|(_, held)| held.clone());
        let held = before.filter(|held| offset + len as u64 <= held.extent.offset + held.extent.len);
        let Some(held) = held else {
            let text = format!("{len} bytes at {address:#x} do not lie in a managed buffer");
            return Some(Err(Error::invalid(text).with_source(EngineCode::AddressNotRegistered)));
        };
        let start = offset as usize;
        // SAFETY: the buffer is the program's, which has it written by one call at a time, or gets a mixture of both.
        let slice = unsafe { arena.region.slice_mut_unchecked(start..start + len) };
        Some(slice.map(|slice| (slice, Keep(held))))
    }

    fn arena_of(&self, address: u64) -> Option<Arc<Arena>> {
        self.arenas.lock().iter().find(|arena| arena.holds(address)).cloned()
    }
}
