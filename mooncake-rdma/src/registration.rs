//! Memory registered with every device of a node.

use std::os::fd::AsFd;
use std::sync::Arc;

use mooncake_core::memory::{DmaBuf, Location, MemorySpan, dma_buf};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::segment::CONTINUES;
use mooncake_transport::{Access, BufferDesc};
use serde_json::Value;

use crate::topology;
use crate::verbs::{Domain, MemoryRegion, Rights};

/// Alignment of parts: they begin on pages.
const PAGE: u64 = 4096;

/// Memory that the devices of a node may use, until dropped.
#[derive(Debug)]
pub struct Registration {
    /// Regions by device, then in the order of their addresses.
    regions: Vec<Vec<MemoryRegion>>,
    parts: Parts,
    pub(crate) span: MemorySpan,
    /// NUMA node, if known.
    pub(crate) node: Option<u32>,
    access: Access,
    /// Node that owns the registration.
    pub(crate) owner: u64,
}

/// Parts of registered memory, because devices limit the length of a registration. All but the last
/// have the same length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parts {
    start: u64,
    len: u64,
    part_bytes: u64,
}

impl Parts {
    /// Creates parts of at most `max_part_bytes` bytes; 0 means unlimited.
    pub(crate) fn new(start: u64, len: u64, max_part_bytes: u64) -> Self {
        let max_part_bytes = if max_part_bytes == 0 { u64::MAX } else { max_part_bytes };
        let part_bytes = if len <= max_part_bytes { len } else { (max_part_bytes / PAGE * PAGE).max(PAGE) };
        Self { start, len, part_bytes: part_bytes.max(1) }
    }

    /// Returns the offset and the length of each part.
    pub(crate) fn iter(self) -> impl Iterator<Item = (u64, u64)> {
        (0..self.len.div_ceil(self.part_bytes))
            .map(move |i| (i * self.part_bytes, self.part_bytes.min(self.len - i * self.part_bytes)))
    }

    /// Returns the number of the part that contains an address.
    pub(crate) fn index(self, addr: u64) -> usize {
        usize::try_from(addr.saturating_sub(self.start) / self.part_bytes).unwrap_or(usize::MAX)
    }

    /// Returns the number of bytes from an address to the end of its part.
    pub(crate) fn bytes_to_part_end(self, addr: u64) -> usize {
        let remaining = self.part_bytes - addr.saturating_sub(self.start) % self.part_bytes;
        usize::try_from(remaining).unwrap_or(usize::MAX)
    }
}

/// NUMA node of memory whose node is unknown.
const UNKNOWN_NODE: u32 = u32::MAX;
/// Flag in the node number of device memory.
const DEVICE: u32 = 1 << 31;

/// Returns the published name of a location.
fn location_name(node: u32) -> String {
    match node {
        UNKNOWN_NODE => "*".into(),
        device if device & DEVICE != 0 => format!("cuda:{}", device & !DEVICE),
        node => format!("cpu:{node}"),
    }
}

impl Registration {
    /// Registers with each domain, in parts of at most `max_part_bytes` bytes.
    ///
    /// # Safety
    /// The bytes of the span stay allocated until the result has been dropped.
    pub(crate) unsafe fn new(
        domains: &[Arc<Domain>],
        span: MemorySpan,
        access: Access,
        (max_part_bytes, relaxed): (u64, bool),
        owner: u64,
    ) -> Result<Self> {
        span.check()?;
        let rights = Rights { remote: access == Access::Remote, write: !span.read_only, relaxed };
        let parts = Parts::new(span.addr(), span.len as u64, max_part_bytes);
        let buffer = dma_buf(span);
        let register_with = |domain: &Arc<Domain>| -> Result<Vec<MemoryRegion>> {
            // The closure captures the whole span, because a pointer alone is not `Send`.
            let MemorySpan { ptr, .. } = { span };
            let part = |(offset, len): (u64, u64)| {
                // SAFETY: parts lie in the span, whose length is a `usize`; the caller keeps the
                // bytes, and the regions are dropped with the result.
                unsafe {
                    let part = MemorySpan { ptr: ptr.add(offset as usize), len: len as usize, ..span };
                    match &buffer {
                        Some(buffer) => register_buffer(domain, part, (buffer, offset), rights),
                        None => MemoryRegion::register(domain, part.ptr, part.len, rights),
                    }
                }
            };
            parts.iter().map(part).collect()
        };
        let register_with = &register_with;
        let regions = match domains {
            [domain] => vec![register_with(domain)?],
            // Pinning takes time, so devices register in parallel.
            domains => std::thread::scope(|scope| {
                let started: Vec<_> =
                    domains.iter().map(|domain| scope.spawn(move || register_with(domain))).collect();
                let ended = started.into_iter().map(|thread| {
                    thread.join().unwrap_or_else(|_| Err(Error::internal("registration of memory panicked")))
                });
                ended.collect::<Result<Vec<_>>>()
            })?,
        };
        Ok(Self { regions, parts, span, node: topology::node_of_memory(span), access, owner })
    }

    /// Returns the local key on that device for the bytes from an address.
    pub(crate) fn local_key(&self, device: usize, addr: u64) -> Option<u32> {
        self.regions.get(device)?.get(self.parts.index(addr)).map(MemoryRegion::local_key)
    }

    /// Returns the number of bytes from an address to the end of its registered part.
    pub(crate) fn bytes_to_part_end(&self, addr: u64) -> usize {
        self.parts.bytes_to_part_end(addr)
    }

    /// Returns the keys that peers need, for [`describe`]. Empty for memory closed to peers.
    pub(crate) fn export(&self) -> Vec<u8> {
        if self.access == Access::Local {
            return Vec::new();
        }
        let location = match self.span.location {
            Location::Cuda(device) => device | DEVICE,
            _ => self.node.unwrap_or(UNKNOWN_NODE),
        };
        let head = [location, self.parts.part_bytes as u32, (self.parts.part_bytes >> 32) as u32];
        let parts = 0..self.regions.first().map_or(0, Vec::len);
        let of_part = |part: usize| self.regions.iter().map(move |regions| &regions[part]);
        let keys = parts.flat_map(of_part).flat_map(|region| [region.remote_key(), region.local_key()]);
        head.into_iter().chain(keys).flat_map(u32::to_le_bytes).collect()
    }
}

/// Registers memory of a dma-buf by its descriptor. If library or driver do not support that,
/// registers it by its address, which some drivers resolve in the other device.
///
/// # Safety
/// As for [`MemoryRegion::register`].
unsafe fn register_buffer(
    domain: &Arc<Domain>,
    part: MemorySpan,
    (buffer, offset): (&DmaBuf, u64),
    rights: Rights,
) -> Result<MemoryRegion> {
    let (fd, offset) = (buffer.as_fd(), buffer.offset() + offset);
    // SAFETY: promised by the caller; the descriptor belongs to the buffer with these bytes.
    let by_buffer =
        unsafe { MemoryRegion::register_dmabuf(domain, fd, offset, part.len, part.addr(), rights) };
    match by_buffer {
        Err(error) if error.code() == ErrorCode::NotSupported => {
            // SAFETY: promised by the caller.
            unsafe { MemoryRegion::register(domain, part.ptr, part.len, rights) }
                .map_err(|plain| error.context(format!("{plain}; and")))
        }
        registered => registered,
    }
}

/// Returns the descriptor entries of an exported buffer: an entry for each part, with the name of
/// its location, and the keys for peers and for this node, by device.
pub(crate) fn describe(buffer: &BufferDesc) -> impl Iterator<Item = BufferDesc> {
    let words: Vec<u32> = buffer
        .key
        .chunks_exact(4)
        .map(|word| word.iter().rev().fold(0, |n, byte| n << 8 | u32::from(*byte)))
        .collect();
    let (node, part_bytes, keys) = match words.as_slice() {
        [node, low, high, keys @ ..] => (*node, u64::from(*high) << 32 | u64::from(*low), keys.to_vec()),
        // Closed to peers.
        _ => (UNKNOWN_NODE, buffer.length, Vec::new()),
    };
    let location = location_name(node);
    let parts = Parts { start: buffer.addr, len: buffer.length, part_bytes: part_bytes.max(1) };
    let keys_per_part =
        keys.len() / usize::try_from(parts.len.div_ceil(parts.part_bytes)).unwrap_or(usize::MAX).max(1);
    let (addr, extra) = (buffer.addr, buffer.extra.clone());
    parts.iter().enumerate().map(move |(i, (offset, length))| {
        let every = |from: usize| -> Value {
            let keys = keys.iter().skip(i * keys_per_part).take(keys_per_part).skip(from).step_by(2);
            keys.copied().collect::<Vec<_>>().into()
        };
        let mut extra = extra.clone();
        extra.insert("rkey".into(), every(0));
        extra.insert("lkey".into(), every(1));
        extra.insert(CONTINUES.into(), (i != 0).into());
        BufferDesc { name: location.clone(), addr: addr + offset, length, key: Vec::new(), extra }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn exported(length: u64, words: &[u32]) -> Vec<BufferDesc> {
        let key = words.iter().copied().flat_map(u32::to_le_bytes).collect();
        let buffer = BufferDesc { name: "own".into(), addr: 0x10000, length, key, ..BufferDesc::default() };
        describe(&buffer).collect()
    }

    #[test]
    fn keys_become_what_descriptors_hold() {
        let single = exported(100, &[1, 100, 0, 10, 11, 20, 21]);
        assert_eq!(single.len(), 1);
        assert_eq!((single[0].name.as_str(), single[0].addr, single[0].length), ("cpu:1", 0x10000, 100));
        assert_eq!(
            (&single[0].extra["rkey"], &single[0].extra["lkey"]),
            (&json!([10, 20]), &json!([11, 21]))
        );
        assert_eq!(single[0].extra[CONTINUES], false);
        let parts = exported(10000, &[UNKNOWN_NODE, 4096, 0, 1, 2, 3, 4, 11, 12, 13, 14, 21, 22, 23, 24]);
        let ranges: Vec<_> = parts.iter().map(|part| (part.addr, part.length)).collect();
        assert_eq!(ranges, [(0x10000, 4096), (0x11000, 4096), (0x12000, 1808)]);
        assert_eq!((&parts[2].extra["rkey"], &parts[2].extra["lkey"]), (&json!([21, 23]), &json!([22, 24])));
        assert!(
            parts[1].continues(&parts[0]) && parts[2].continues(&parts[1]) && !parts[2].continues(&parts[0])
        );
        assert_eq!(exported(100, &[DEVICE | 3, 100, 0, 1, 2])[0].name, "cuda:3");
        let closed = exported(100, &[]);
        assert_eq!((closed.len(), closed[0].name.as_str(), &closed[0].extra["rkey"]), (1, "*", &json!([])));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..Default::default() })]

        #[test]
        fn parts_cover_everything_once(start in 1u64..1 << 40, len in 1u64..1 << 20, max_part_bytes in 0u64..1 << 19) {
            let parts = Parts::new(start, len, max_part_bytes);
            let mut at = 0;
            for (i, (offset, piece)) in parts.iter().enumerate() {
                prop_assert_eq!(offset, at);
                prop_assert!(piece > 0 && (max_part_bytes == 0 || piece <= max_part_bytes.max(PAGE)));
                for offset_in_part in [offset, offset + piece - 1] {
                    prop_assert_eq!(parts.index(start + offset_in_part), i);
                    // The last part may be shorter than the others.
                    prop_assert!(parts.bytes_to_part_end(start + offset_in_part) as u64 >= piece - (offset_in_part - offset));
                }
                at += piece;
            }
            prop_assert_eq!(at, len);
        }
    }
}
