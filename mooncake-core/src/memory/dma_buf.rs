//! dma-bufs: device memory that others access through a file descriptor, mostly memory of a GPU.
//! Exporters list their buffers here. Transports look up here whether memory to register lies in
//! one.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::RwLock;

use super::MemorySpan;
use crate::{Error, Result};

/// Listed buffers, which may overlap. There are few, because exporters list a buffer while they
/// register it.
static LISTED: RwLock<Vec<Arc<Entry>>> = RwLock::new(Vec::new());

#[derive(Debug)]
struct Entry {
    span: MemorySpan,
    buffer: OwnedFd,
    /// Offset of the span in the buffer.
    offset: u64,
}

/// Registration of memory as a part of a dma-buf, until dropped. Memory that was registered with a
/// transport meanwhile stays registered.
#[derive(Debug)]
pub struct ListedDmaBuf {
    entry: Arc<Entry>,
}

impl ListedDmaBuf {
    /// Lists a span, which begins `offset` bytes into a dma-buf. It may overlap listed ones.
    ///
    /// # Errors
    /// Returns `Invalid` for an empty span, and for one that overflows.
    pub fn new(span: MemorySpan, buffer: OwnedFd, offset: u64) -> Result<Self> {
        let (addr, len) = (span.addr(), span.len as u64);
        if len == 0 || addr.checked_add(len).is_none() || offset.checked_add(len).is_none() {
            return Err(Error::invalid(format!(
                "cannot list dma-buf: invalid range. address={addr:#x} len={len} offset={offset}"
            )));
        }
        let entry = Arc::new(Entry { span, buffer, offset });
        LISTED.write().push(entry.clone());
        Ok(Self { entry })
    }
}

impl Drop for ListedDmaBuf {
    fn drop(&mut self) {
        LISTED.write().retain(|entry| !Arc::ptr_eq(entry, &self.entry));
    }
}

/// Memory in a dma-buf. Keeps the descriptor open, not the memory.
#[derive(Clone)]
pub struct DmaBuf {
    entry: Arc<Entry>,
    offset: u64,
}

impl DmaBuf {
    /// Returns the offset of the memory in the buffer.
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

impl AsFd for DmaBuf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.entry.buffer.as_fd()
    }
}

impl fmt::Debug for DmaBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DmaBuf({:?}, {})", self.entry.buffer, self.offset)
    }
}

/// Returns the dma-buf that contains a whole span, if it is listed. Of several it is the last one.
pub fn dma_buf(span: MemorySpan) -> Option<DmaBuf> {
    let listed = LISTED.read();
    let entry = listed.iter().rfind(|entry| entry.span.contains(span.addr(), span.len as u64))?;
    Some(DmaBuf { entry: entry.clone(), offset: entry.offset + (span.addr() - entry.span.addr()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::{self, NonNull};

    fn span(addr: usize, len: usize) -> MemorySpan {
        MemorySpan::new(NonNull::new(ptr::without_provenance_mut(addr)).unwrap(), len)
    }

    fn descriptor() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn memory_is_found_only_while_it_is_listed() {
        let at = 0x5_0000_0000;
        let listed = ListedDmaBuf::new(span(at, 0x3000), descriptor(), 0x10000).unwrap();
        let offset = |addr, len| dma_buf(span(addr, len)).map(|buffer| buffer.offset());
        assert_eq!(offset(at, 0x3000), Some(0x10000));
        assert_eq!(offset(at + 0x1001, 7), Some(0x11001));
        for (addr, len) in [(at - 1, 2), (at + 1, 0x3000), (at + 0x3000, 1), (at, 0), (0x1000, 1)] {
            assert_eq!(offset(addr, len), None, "{len} at {addr:#x}");
        }
        ListedDmaBuf::new(span(0x1000, 0), descriptor(), 0).unwrap_err();
        ListedDmaBuf::new(span(at + 0x3000, 2), descriptor(), u64::MAX).unwrap_err();
        let beside = ListedDmaBuf::new(span(at + 0x3000, 1), descriptor(), 0).unwrap();
        let over = ListedDmaBuf::new(span(at + 0x2000, 0x2000), descriptor(), 0x50000).unwrap();
        assert_eq!(offset(at + 0x2fff, 2), Some(0x50fff), "the one that contains both");
        assert_eq!((offset(at + 0x1fff, 2), offset(at + 0x2fff, 1)), (Some(0x11fff), Some(0x50fff)));
        drop(over);
        assert_eq!(offset(at + 0x2fff, 1), Some(0x12fff), "listed as before");
        let retained = dma_buf(span(at, 1)).unwrap();
        drop(listed);
        assert_eq!((offset(at, 1), offset(at + 0x3000, 1)), (None, Some(0)));
        assert!(
            retained.as_fd().try_clone_to_owned().is_ok(),
            "the descriptor stays open while somebody may use it"
        );
        drop(beside);
    }
}
