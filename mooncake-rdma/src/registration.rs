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
    each: u64,
}

impl Parts {
    /// Creates parts of at most `longest` bytes; 0 means unlimited.
    pub(crate) fn new(start: u64, len: u64, longest: u64) -> Self {
        let longest = if longest == 0 { u64::MAX } else { longest };
        let each = if len <= longest { len } else { (longest / PAGE * PAGE).max(PAGE) };
        Self { start, len, each: each.max(1) }
    }

    /// Returns the offset and the length of each part.
    pub(crate) fn iter(self) -> impl Iterator<Item = (u64, u64)> {
        (0..self.len.div_ceil(self.each))
            .map(move |i| (i * self.each, self.each.min(self.len - i * self.each)))
    }

    /// Returns the number of the part that contains an address.
    pub(crate) fn index(self, addr: u64) -> usize {
        usize::try_from(addr.saturating_sub(self.start) / self.each).unwrap_or(usize::MAX)
    }

    /// Returns the number of bytes from an address to the end of its part.
    pub(crate) fn room(self, addr: u64) -> usize {
        let rest = self.each - addr.saturating_sub(self.start) % self.each;
        usize::try_from(rest).unwrap_or(usize::MAX)
    }
}

/// NUMA node of memory whose node is unknown.
const NOWHERE: u32 = u32::MAX;
/// Flag in the node number of device memory.
const DEVICE: u32 = 1 << 31;

/// Returns the published name of a location.
fn location_name(node: u32) -> String {
    match node {
        NOWHERE => "*".into(),
        device if device & DEVICE != 0 => format!("cuda:{}", device & !DEVICE),
        node => format!("cpu:{node}"),
    }
}

impl Registration {
    /// Registers with each domain, in parts of at most `longest` bytes.
    ///
    /// # Safety
    /// The bytes of the span stay allocated until the result has been dropped.
    pub(crate) unsafe fn new(
        domains: &[Arc<Domain>],
        span: MemorySpan,
        access: Access,
        (longest, relaxed): (u64, bool),
        owner: u64,
    ) -> Result<Self> {
        span.check()?;
        let rights = Rights { remote: access == Access::Remote, write: !span.read_only, relaxed };
        let parts = Parts::new(span.addr(), span.len as u64, longest);
        let buffer = dma_buf(span);
        let one = |domain: &Arc<Domain>| -> Result<Vec<MemoryRegion>> {
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
        let one = &one;
        let regions = match domains {
            [domain] => vec![one(domain)?],
            // Pinning takes time, so devices register in parallel.
            domains => std::thread::scope(|scope| {
                let started: Vec<_> = domains.iter().map(|domain| scope.spawn(move || one(domain))).collect();
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
    pub(crate) fn room(&self, addr: u64) -> usize {
        self.parts.room(addr)
    }

    /// Returns the keys that peers need, for [`describe`]. Empty for memory closed to peers.
    pub(crate) fn export(&self) -> Vec<u8> {
        if self.access == Access::Local {
            return Vec::new();
        }
        let place = match self.span.location {
            Location::Cuda(device) => device | DEVICE,
            _ => self.node.unwrap_or(NOWHERE),
        };
        let head = [place, self.parts.each as u32, (self.parts.each >> 32) as u32];
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
    let (node, each, keys) = match words.as_slice() {
        [node, low, high, keys @ ..] => (*node, u64::from(*high) << 32 | u64::from(*low), keys.to_vec()),
        // Closed to peers.
        _ => (NOWHERE, buffer.length, Vec::new()),
    };
    let place = location_name(node);
    let parts = Parts { start: buffer.addr, len: buffer.length, each: each.max(1) };
    let per_part = keys.len() / usize::try_from(parts.len.div_ceil(parts.each)).unwrap_or(usize::MAX).max(1);
    let (addr, extra) = (buffer.addr, buffer.extra.clone());
    parts.iter().enumerate().map(move |(i, (offset, length))| {
        let every = |from: usize| -> Value {
            let keys = keys.iter().skip(i * per_part).take(per_part).skip(from).step_by(2);
            keys.copied().collect::<Vec<_>>().into()
        };
        let mut extra = extra.clone();
        extra.insert("rkey".into(), every(0));
        extra.insert("lkey".into(), every(1));
        extra.insert(CONTINUES.into(), (i != 0).into());
        BufferDesc { name: place.clone(), addr: addr + offset, length, key: Vec::new(), extra }
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
        let whole = exported(100, &[1, 100, 0, 10, 11, 20, 21]);
        assert_eq!(whole.len(), 1);
        assert_eq!((whole[0].name.as_str(), whole[0].addr, whole[0].length), ("cpu:1", 0x10000, 100));
        assert_eq!((&whole[0].extra["rkey"], &whole[0].extra["lkey"]), (&json!([10, 20]), &json!([11, 21])));
        assert_eq!(whole[0].extra[CONTINUES], false);
        let parts = exported(10000, &[NOWHERE, 4096, 0, 1, 2, 3, 4, 11, 12, 13, 14, 21, 22, 23, 24]);
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
        fn parts_cover_everything_once(start in 1u64..1 << 40, len in 1u64..1 << 20, longest in 0u64..1 << 19) {
            let parts = Parts::new(start, len, longest);
            let mut at = 0;
            for (i, (offset, piece)) in parts.iter().enumerate() {
                prop_assert_eq!(offset, at);
                prop_assert!(piece > 0 && (longest == 0 || piece <= longest.max(PAGE)));
                for inside in [offset, offset + piece - 1] {
                    prop_assert_eq!(parts.index(start + inside), i);
                    // The last part may be shorter than the others.
                    prop_assert!(parts.room(start + inside) as u64 >= piece - (inside - offset));
                }
                at += piece;
            }
            prop_assert_eq!(at, len);
        }
    }
}
