//! Peers known only by their descriptor: nodes of Mooncake C++, and nodes on other hosts of the
//! fabric. Handles have the format of Mooncake C++, 64 bytes in hexadecimal under `shm_name`, each
//! of a whole allocation that begins with the buffer.

use std::collections::HashMap;
use std::sync::Arc;

use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::segment::{hex, unhex};
use mooncake_transport::{BufferDesc, SegmentDesc};

use crate::codec::Remote;
use crate::cuda::{Allocation, HANDLE_BYTES, HandleKind};

const HANDLE: &str = "shm_name";

/// Buffers of a descriptor that have a handle.
#[derive(Debug)]
pub(crate) struct DescriptorMemory {
    buffers: Vec<Arc<DescriptorBuffer>>,
}

#[derive(Debug)]
pub(crate) struct DescriptorBuffer {
    pub(crate) addr: u64,
    len: u64,
    pub(crate) remote: Remote,
}

impl DescriptorMemory {
    /// Parses the buffers of a descriptor. A buffer that was listed before with the same handle at
    /// the same address stays open.
    pub(crate) fn new(
        desc: &SegmentDesc,
        kind: HandleKind,
        existing: Option<&DescriptorMemory>,
    ) -> Result<Self> {
        let mut buffers = Vec::new();
        for buffer in &desc.buffers {
            let Some(handle) = handle_of(buffer)? else { continue };
            let same = |other: &&Arc<DescriptorBuffer>| {
                other.addr == buffer.addr
                    && other.len == buffer.length
                    && other.remote.allocation().handle == handle
                    && other.remote.allocation().kind == kind
            };
            buffers.push(match existing.and_then(|existing| existing.buffers.iter().find(same)) {
                Some(existing) => existing.clone(),
                None => {
                    let (base, len) = (buffer.addr, buffer.length);
                    let allocation = Allocation { base, len, kind, handle, uuid: [0; 16], id: 0 };
                    Arc::new(DescriptorBuffer { addr: base, len, remote: Remote::new(allocation, None) })
                }
            });
        }
        if buffers.is_empty() {
            let text = format!(
                "cannot connect to segment {:?}: it has no device memory that can be opened",
                desc.name
            );
            return Err(Error::new(ErrorCode::NotSupported, text));
        }
        Ok(Self { buffers })
    }

    /// Returns the buffer that contains a whole range, which must not be empty.
    pub(crate) fn find(&self, addr: u64, len: u64) -> Option<Arc<DescriptorBuffer>> {
        let end = addr.checked_add(len).filter(|_| len != 0)?;
        self.buffers.iter().find(|buffer| addr >= buffer.addr && end - buffer.addr <= buffer.len).cloned()
    }
}

/// Returns whether the descriptor has a handle of a buffer.
pub(crate) fn has_handle(buffer: &BufferDesc) -> bool {
    handle_of(buffer).is_ok_and(|handle| handle.is_some())
}

fn handle_of(buffer: &BufferDesc) -> Result<Option<[u8; HANDLE_BYTES]>> {
    let Some(text) = buffer.extra.get(HANDLE).and_then(|text| text.as_str()).filter(|text| !text.is_empty())
    else {
        return Ok(None);
    };
    let bytes = unhex(text).and_then(|bytes| bytes.try_into().ok());
    let bytes = bytes.ok_or_else(|| {
        Error::invalid(format!("invalid {HANDLE:?}: expected {HANDLE_BYTES} bytes in hexadecimal"))
    });
    bytes.map(Some)
}

/// Writes handles into the descriptor of this node. Buffers that begin with their allocation get
/// its handle, because readers take the first byte of the allocation as that of the buffer. For the
/// other buffers, the descriptor gets additional buffers of whole allocations, once each.
pub(crate) fn describe(exports: &HashMap<u64, Allocation>, desc: &mut SegmentDesc) {
    let mut allocations: Vec<(String, Allocation)> = Vec::new();
    for buffer in &mut desc.buffers {
        let Some(allocation) = exports.get(&buffer.addr) else { continue };
        if allocation.base == buffer.addr {
            buffer.extra.insert(HANDLE.into(), hex(&allocation.handle).to_uppercase().into());
        } else if allocations.iter().all(|(_, other)| other.base != allocation.base) {
            allocations.push((buffer.name.clone(), *allocation));
        }
    }
    for (name, allocation) in allocations {
        if desc.buffers.iter().any(|buffer| buffer.addr == allocation.base && has_handle(buffer)) {
            continue;
        }
        let mut buffer =
            BufferDesc { name, addr: allocation.base, length: allocation.len, ..BufferDesc::default() };
        buffer.extra.insert(HANDLE.into(), hex(&allocation.handle).to_uppercase().into());
        desc.buffers.push(buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocation(base: u64, byte: u8) -> Allocation {
        Allocation {
            base,
            len: 0x1000,
            kind: HandleKind::Ipc,
            handle: [byte; HANDLE_BYTES],
            uuid: [0; 16],
            id: 0,
        }
    }

    fn buffer(addr: u64, length: u64) -> BufferDesc {
        BufferDesc { name: "n".into(), addr, length, ..BufferDesc::default() }
    }

    #[test]
    fn handles_have_the_format_of_mooncake_cpp() {
        let mut desc = SegmentDesc::new("n");
        desc.buffers = vec![buffer(0x1000, 64), buffer(0x5010, 16), buffer(0x5020, 16), buffer(0x9000, 8)];
        let exports = HashMap::from([
            (0x1000, allocation(0x1000, 0xab)),
            (0x5010, allocation(0x5000, 0x01)),
            (0x5020, allocation(0x5000, 0x01)),
        ]);
        describe(&exports, &mut desc);
        assert_eq!(desc.buffers[0].extra[HANDLE], "AB".repeat(64));
        assert!(desc.buffers[1..4].iter().all(|buffer| !has_handle(buffer)));
        let allocations = &desc.buffers[4..];
        assert_eq!((allocations.len(), allocations[0].addr, allocations[0].length), (1, 0x5000, 0x1000));
        assert_eq!(allocations[0].extra[HANDLE], "01".repeat(64));
        let memory = DescriptorMemory::new(&desc, HandleKind::Ipc, None).unwrap();
        assert_eq!(memory.find(0x5010, 16).unwrap().addr, 0x5000);
        assert_eq!(memory.find(0x1010, 16).unwrap().remote.allocation().handle, [0xab; HANDLE_BYTES]);
        for (addr, len) in [(0x1000, 65), (0x1000, 0), (0x9000, 8), (u64::MAX, 2), (0xfff, 2)] {
            assert!(memory.find(addr, len).is_none(), "{len} at {addr:#x}");
        }
    }

    #[test]
    fn a_changed_handle_is_another_allocation() {
        let with = |byte| {
            let mut desc = SegmentDesc::new("n");
            desc.buffers = vec![buffer(0x1000, 64)];
            describe(&HashMap::from([(0x1000, allocation(0x1000, byte))]), &mut desc);
            desc
        };
        let first = DescriptorMemory::new(&with(1), HandleKind::Ipc, None).unwrap();
        let same = DescriptorMemory::new(&with(1), HandleKind::Ipc, Some(&first)).unwrap();
        let other = DescriptorMemory::new(&with(2), HandleKind::Ipc, Some(&first)).unwrap();
        assert!(Arc::ptr_eq(&first.buffers[0], &same.buffers[0]));
        assert!(!Arc::ptr_eq(&first.buffers[0], &other.buffers[0]));
    }

    #[test]
    fn invalid_handles_are_named() {
        for text in ["zz", "ab", &"AB".repeat(65)] {
            let mut desc = SegmentDesc::new("n");
            desc.buffers = vec![buffer(0x1000, 64)];
            desc.buffers[0].extra.insert(HANDLE.into(), text.into());
            let error = DescriptorMemory::new(&desc, HandleKind::Ipc, None).unwrap_err();
            assert!(error.message().contains(HANDLE), "{error}");
        }
        assert!(DescriptorMemory::new(&SegmentDesc::new("n"), HandleKind::Ipc, None).is_err());
    }
}
