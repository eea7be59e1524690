//! Memory that an engine opens to peers: overlaps, the list in its descriptor, and the ranges for
//! copies inside the process.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, LazyLock, Weak};

use mooncake_core::clock::Rng;
use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, Result};
use parking_lot::Mutex;

use crate::exposed::{ExposedMemory, Exposure};
use crate::segment::BufferDesc;
use mooncake_core::EngineCode;

/// Engines of this process, by the instance in their descriptors.
static PROCESS: LazyLock<Mutex<HashMap<String, ProcessEngine>>> = LazyLock::new(Mutex::default);

/// Open memory of an engine, and the process that opened it. A forked child inherits the engines of
/// its parent, but has other memory at their addresses.
struct ProcessEngine {
    process_id: u32,
    memory: Weak<ExposedMemory>,
}

/// Ranges of one engine that are open to peers.
pub(super) struct Regions {
    instance: String,
    claimed: Mutex<BTreeMap<u64, ClaimedRange>>,
    exposed: Arc<ExposedMemory>,
}

struct ClaimedRange {
    len: u64,
    /// Exported key, present once the range is open to peers.
    open: Option<Vec<u8>>,
}

/// Claim of a range that no other open range of the engine may overlap, because a request of a peer
/// names an address only. The drop releases it.
pub(super) struct Claim {
    regions: Arc<Regions>,
    addr: u64,
}

/// Range that peers may use. The drop removes it from the descriptor, and no copy touches it
/// afterwards.
pub(super) struct OpenRange {
    regions: Arc<Regions>,
    addr: u64,
    _exposure: Exposure,
}

impl Regions {
    pub(super) fn new(rng: &mut Rng) -> Arc<Self> {
        let instance = format!("{:016x}{:016x}", rng.next_u64(), rng.next_u64());
        let exposed = ExposedMemory::new();
        let mut process = PROCESS.lock();
        let engine = ProcessEngine { process_id: std::process::id(), memory: Arc::downgrade(&exposed) };
        process.insert(instance.clone(), engine);
        Arc::new(Self { instance, claimed: Mutex::default(), exposed })
    }

    /// Returns the identity of this run of this engine.
    pub(super) fn instance(&self) -> &str {
        &self.instance
    }

    /// Claims a range. The error names the range that it overlaps.
    pub(super) fn claim(self: &Arc<Self>, span: MemorySpan) -> Result<Claim> {
        let (addr, len) = (span.addr(), span.len as u64);
        if len == 0 {
            return Err(Error::invalid("cannot register memory: it has no bytes"));
        }
        let mut claimed = self.claimed.lock();
        let last = addr.saturating_add(len - 1);
        if let Some((other, entry)) = claimed.range(..=last).next_back()
            && other + entry.len > addr
        {
            let text =
                format!("{len} bytes at {addr:#x} overlap the {} bytes registered at {other:#x}", entry.len);
            return Err(Error::invalid(text).with_engine_code(EngineCode::AddressOverlapped));
        }
        claimed.insert(addr, ClaimedRange { len, open: None });
        Ok(Claim { regions: self.clone(), addr })
    }

    /// Adds a claimed range to the descriptor, and permits copies inside this process.
    pub(super) fn open(&self, claim: &Claim, span: MemorySpan, key: Vec<u8>) -> Result<OpenRange> {
        // SAFETY: the entry lives in the region, which drops it before the memory.
        let exposure = unsafe { self.exposed.expose(span) }?;
        if let Some(claimed) = self.claimed.lock().get_mut(&claim.addr) {
            claimed.open = Some(key);
        }
        Ok(OpenRange { regions: claim.regions.clone(), addr: claim.addr, _exposure: exposure })
    }

    /// Writes to an open range.
    pub(super) fn overwrite(&self, address: u64, bytes: &[u8]) -> Result<()> {
        self.exposed.write(address, bytes)
    }

    /// Returns the open ranges for the descriptor.
    pub(super) fn buffers(&self, name: &str) -> Vec<BufferDesc> {
        self.claimed
            .lock()
            .iter()
            .filter_map(|(addr, claimed)| {
                let key = claimed.open.clone()?;
                Some(BufferDesc {
                    name: name.into(),
                    addr: *addr,
                    length: claimed.len,
                    key,
                    ..BufferDesc::default()
                })
            })
            .collect()
    }

    /// Returns the memory of the engine with this instance, if it lives in this process.
    pub(super) fn in_process(instance: &str) -> Option<Arc<ExposedMemory>> {
        let process = PROCESS.lock();
        let engine = process.get(instance)?;
        engine.memory.upgrade().filter(|_| engine.process_id == std::process::id())
    }
}

impl Drop for Regions {
    fn drop(&mut self) {
        PROCESS.lock().remove(&self.instance);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.regions.claimed.lock().remove(&self.addr);
    }
}

impl Drop for OpenRange {
    fn drop(&mut self) {
        if let Some(claimed) = self.regions.claimed.lock().get_mut(&self.addr) {
            claimed.open = None;
        }
    }
}
