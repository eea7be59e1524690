//! What an engine has registered: who overlaps whom, what its descriptor lists, and what may be copied inside the process.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, LazyLock, Weak};

use mooncake_core::clock::Rng;
use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, Result};
use parking_lot::Mutex;

use crate::exposed::{ExposedMemory, Exposure};
use crate::segment::BufferDesc;
use mooncake_core::EngineCode;

/// Engines of this process by the instance their descriptors carry.
static PROCESS: LazyLock<Mutex<HashMap<String, Member>>> = LazyLock::new(Mutex::default);

/// What an engine has opened, and the process that made it: the child of a fork has the engines of its parent here, and memory of its own at
/// their addresses.
struct Member {
    made_by: u32,
    memory: Weak<ExposedMemory>,
}

/// The registered ranges of one engine.
pub(super) struct Regions {
    instance: String,
    taken: Mutex<BTreeMap<u64, Taken>>,
    exposed: Arc<ExposedMemory>,
}

struct Taken {
    len: u64,
    /// The exported key, once peers may come.
    open: Option<Vec<u8>>,
}

/// A range no other region of the engine may overlap; given up on drop.
pub(super) struct Place {
    regions: Arc<Regions>,
    addr: u64,
}

/// A range peers may use; taken off the list on drop, and no copy touches it afterwards.
pub(super) struct Entry {
    regions: Arc<Regions>,
    addr: u64,
    _exposure: Exposure,
}

impl Regions {
    pub(super) fn new(rng: &mut Rng) -> Arc<Self> {
        let instance = format!("{:016x}{:016x}", rng.next_u64(), rng.next_u64());
        let exposed = ExposedMemory::new();
        let mut process = PROCESS.lock();
        process.retain(|_, member| member.memory.strong_count() != 0);
        let member = Member { made_by: std::process::id(), memory: Arc::downgrade(&exposed) };
        process.insert(instance.clone(), member);
        Arc::new(Self { instance, taken: Mutex::default(), exposed })
    }

    /// Tells this run of this engine from every other.
    pub(super) fn instance(&self) -> &str {
        &self.instance
    }

    /// Takes a range, or says whom it overlaps.
    pub(super) fn claim(self: &Arc<Self>, span: MemorySpan) -> Result<Place> {
        let (addr, len) = (span.addr(), span.len as u64);
        if len == 0 {
            return Err(Error::invalid("memory of zero bytes cannot be registered"));
        }
        let mut taken = self.taken.lock();
        let last = addr.saturating_add(len - 1);
        if let Some((other, entry)) = taken.range(..=last).next_back()
            && other + entry.len > addr
        {
            let text =
                format!("{len} bytes at {addr:#x} overlap the {} bytes registered at {other:#x}", entry.len);
            return Err(Error::invalid(text).with_engine_code(EngineCode::AddressOverlapped));
        }
        taken.insert(addr, Taken { len, open: None });
        Ok(Place { regions: self.clone(), addr })
    }

    /// Lists a claimed range in the descriptor, and lets this process copy to and from it.
    pub(super) fn open(&self, place: &Place, span: MemorySpan, key: Vec<u8>) -> Result<Entry> {
        // SAFETY: the entry lives in the region, which drops it before the memory.
        let exposure = unsafe { self.exposed.expose(span) }?;
        if let Some(taken) = self.taken.lock().get_mut(&place.addr) {
            taken.open = Some(key);
        }
        Ok(Entry { regions: place.regions.clone(), addr: place.addr, _exposure: exposure })
    }

    /// The open ranges, as the descriptor lists them.
    pub(super) fn buffers(&self, name: &str) -> Vec<BufferDesc> {
        self.taken
            .lock()
            .iter()
            .filter_map(|(addr, taken)| {
                let key = taken.open.clone()?;
                Some(BufferDesc {
                    name: name.into(),
                    addr: *addr,
                    length: taken.len,
                    key,
                    ..BufferDesc::default()
                })
            })
            .collect()
    }

    /// Memory of the engine whose descriptor carries this instance, if it lives in this process.
    pub(super) fn in_process(instance: &str) -> Option<Arc<ExposedMemory>> {
        let process = PROCESS.lock();
        let member = process.get(instance)?;
        member.memory.upgrade().filter(|_| member.made_by == std::process::id())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.regions.taken.lock().remove(&self.addr);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(taken) = self.regions.taken.lock().get_mut(&self.addr) {
            taken.open = None;
        }
    }
}
