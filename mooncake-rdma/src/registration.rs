//! Memory registered with every device of a node.

use std::sync::Arc;

use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, Result};
use mooncake_transport::Access;
use serde_json::{Value, json};

use crate::topology;
use crate::verbs::{Domain, MemoryRegion};

/// Memory a node's devices may use, until this is dropped.
#[derive(Debug)]
pub struct Registration {
    /// One per device.
    regions: Vec<MemoryRegion>,
    pub(crate) span: MemorySpan,
    /// NUMA node, where it is known.
    pub(crate) node: Option<u32>,
    access: Access,
    /// Whose it is.
    pub(crate) owner: u64,
}

/// Keys of a registration on their way into a descriptor: the NUMA node and, per device, the peer's key and ours.
const NOWHERE: u32 = u32::MAX;

impl Registration {
    /// Registers with each domain.
    ///
    /// # Safety
    /// The span's bytes stay allocated until the result has been dropped.
    pub(crate) unsafe fn new(
        domains: &[Arc<Domain>],
        span: MemorySpan,
        access: Access,
        relaxed: bool,
        owner: u64,
    ) -> Result<Self> {
        if span.len == 0 || span.addr().checked_add(span.len as u64).is_none() {
            return Err(Error::invalid(format!("cannot register {} bytes at {:#x}", span.len, span.addr())));
        }
        let remote = access == Access::Remote;
        // SAFETY: as the caller promises; the regions are dropped with the result.
        let one = move |domain: &Arc<Domain>| unsafe {
            // The whole span, as a pointer alone may not go to another thread.
            let MemorySpan { ptr, len, .. } = { span };
            MemoryRegion::register(domain, ptr, len, remote, relaxed)
        };
        let regions = match domains {
            [domain] => vec![one(domain)?],
            // Pinning takes its time, and devices do not wait for one another.
            domains => std::thread::scope(|scope| {
                let started: Vec<_> = domains.iter().map(|domain| scope.spawn(move || one(domain))).collect();
                let ended = started.into_iter().map(|thread| {
                    thread.join().unwrap_or_else(|_| Err(Error::internal("registering memory panicked")))
                });
                ended.collect::<Result<Vec<_>>>()
            })?,
        };
        Ok(Self { regions, span, node: topology::node_of_memory(span), access, owner })
    }

    /// Our key on that device.
    pub(crate) fn local_key(&self, device: usize) -> Option<u32> {
        self.regions.get(device).map(MemoryRegion::local_key)
    }

    /// What peers need, for [`describe`]; nothing when they are kept out.
    pub(crate) fn export(&self) -> Vec<u8> {
        if self.access == Access::Local {
            return Vec::new();
        }
        let node = self.node.unwrap_or(NOWHERE);
        let keys = self.regions.iter().flat_map(|region| [region.remote_key(), region.local_key()]);
        std::iter::once(node).chain(keys).flat_map(u32::to_le_bytes).collect()
    }
}

/// What an exported key says in a descriptor: the name of the memory's place, the peers' keys, our keys.
pub(crate) fn describe(key: &[u8]) -> (String, Value, Value) {
    let words: Vec<u32> = key
        .chunks_exact(4)
        .map(|word| word.iter().rev().fold(0, |n, byte| n << 8 | u32::from(*byte)))
        .collect();
    let (node, keys) = words.split_first().unwrap_or((&NOWHERE, &[]));
    let place = if *node == NOWHERE { "*".into() } else { format!("cpu:{node}") };
    let every =
        |from: usize| -> Value { keys.iter().skip(from).step_by(2).copied().collect::<Vec<_>>().into() };
    (place, json!(every(0)), json!(every(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_become_what_descriptors_hold() {
        let key: Vec<u8> = [1u32, 10, 11, 20, 21].into_iter().flat_map(u32::to_le_bytes).collect();
        assert_eq!(describe(&key), ("cpu:1".into(), json!([10, 20]), json!([11, 21])));
        assert_eq!(describe(&[]), ("*".into(), json!([]), json!([])));
    }
}
