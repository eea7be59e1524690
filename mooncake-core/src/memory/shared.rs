//! Table of the memory of this process that is backed by a file, by address. Such a file can be
//! passed to another process.
//!
//! A transport gets an address and a length, and looks up the file here.
//! [`HostMemory`](super::HostMemory) with [`shared`](super::HostMemoryOptions::shared) enters
//! itself; memory of another origin is entered with [`SharedMapping::new`].

use std::collections::BTreeMap;
use std::fs::File;
use std::hint::black_box;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use parking_lot::RwLock;

use super::MemorySpan;
use super::page::page_size;
use crate::error::{Error, ErrorCode, Result};

static MAPPINGS: RwLock<BTreeMap<u64, Arc<Entry>>> = RwLock::new(BTreeMap::new());

#[derive(Debug)]
struct Entry {
    span: MemorySpan,
    file: File,
    /// Offset of the first byte in the file.
    offset: u64,
    /// Size of the pages of the file.
    page: u64,
    /// True if parts of the mapping have been detached from the file.
    detached: AtomicBool,
}

/// Entry of a shared mapping of a file, until dropped.
#[derive(Debug)]
pub struct SharedMapping {
    entry: Arc<Entry>,
}

impl SharedMapping {
    /// Lists the mapping at `span`, which maps `file` from `offset` on.
    ///
    /// # Errors
    ///
    /// Returns `Invalid` when the mapping is empty, does not lie in the file, begins or ends within
    /// a page of the file, or overlaps a listed one.
    ///
    /// # Safety
    /// The span is a readable and writable mapping of that part of the file with `MAP_SHARED`, and
    /// stays so until the value has been dropped.
    pub unsafe fn new(span: MemorySpan, file: OwnedFd, offset: u64) -> Result<Self> {
        let file = File::from(file);
        let about = file.metadata().map_err(Error::from)?;
        let (addr, len, page) = (span.addr(), span.len as u64, page_of(&file)?);
        let end = addr.checked_add(len).filter(|_| len != 0);
        let end = end.ok_or_else(|| {
            Error::invalid(format!("cannot list mapping: invalid range. address={addr:#x} len={len}"))
        })?;
        if offset.checked_add(len).is_none_or(|end| end > about.len()) {
            return Err(Error::invalid(format!(
                "cannot list mapping: range exceeds the file. offset={offset} len={len} size={}",
                about.len()
            )));
        }
        if [addr, len, offset].iter().any(|n| !n.is_multiple_of(page)) {
            return Err(Error::invalid(format!(
                "cannot list mapping: range is not aligned to pages. address={addr:#x} len={len} offset={offset} page={page}"
            )));
        }
        let mut mappings = MAPPINGS.write();
        if let Some((other, entry)) = mappings.range(..end).next_back()
            && other + entry.span.len as u64 > addr
        {
            return Err(Error::invalid(format!(
                "cannot list mapping: range overlaps a listed one. address={addr:#x} len={len} other={other:#x}"
            )));
        }
        let entry = Arc::new(Entry { span, file, offset, page, detached: AtomicBool::new(false) });
        mappings.insert(addr, entry.clone());
        Ok(Self { entry })
    }

    /// Returns the file.
    pub fn file(&self) -> &File {
        &self.entry.file
    }

    /// Returns whether parts of the mapping were [made private](SharedPages::make_private).
    pub fn is_detached(&self) -> bool {
        self.entry.detached.load(Ordering::Acquire)
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        MAPPINGS.write().remove(&self.entry.span.addr());
    }
}

/// Part of a listed mapping, by whole pages. Keeps the file open, not the memory.
#[derive(Clone, Debug)]
pub struct SharedPages {
    entry: Arc<Entry>,
    first: u64,
    end: u64,
}

/// Returns the file pages that `span` lies in, if one listed mapping contains all of it.
pub fn shared_pages(span: MemorySpan) -> Option<SharedPages> {
    let (addr, len) = (span.addr(), span.len as u64);
    let mappings = MAPPINGS.read();
    let entry = mappings.range(..=addr).next_back().map(|(_, entry)| entry)?;
    if !entry.span.contains(addr, len) || entry.detached.load(Ordering::Acquire) {
        return None;
    }
    // The mapping begins and ends with a page, so the range stays inside and does not overflow.
    let first = addr - addr % entry.page;
    let end = (addr + len).next_multiple_of(entry.page);
    Some(SharedPages { entry: entry.clone(), first, end })
}

impl SharedPages {
    /// Returns the file.
    pub fn file(&self) -> &File {
        &self.entry.file
    }

    /// Returns the offset in the file of an address of the mapping.
    pub fn offset_of(&self, addr: u64) -> u64 {
        self.entry.offset + (addr - self.entry.span.addr())
    }

    /// Returns the address range of the pages.
    pub fn range(&self) -> std::ops::Range<u64> {
        self.first..self.end
    }

    /// Detaches these pages from the file. Contents and addresses stay, but writes to the file are
    /// no longer visible here, nor the other way round. [`shared_pages`] does not find the mapping
    /// afterwards.
    ///
    /// # Safety
    /// The mapping still exists.
    pub unsafe fn make_private(&self) -> Result<()> {
        let cannot = |e: io::Error| {
            Error::new(ErrorCode::BufferOverflow, format!("cannot detach memory from its file: {e}"))
        };
        let offset = libc::off_t::try_from(self.offset_of(self.first))
            .map_err(|_| Error::invalid("cannot detach memory from its file: offset is too large"))?;
        let (start, len) = self.address_range()?;
        self.entry.detached.store(true, Ordering::Release);
        // SAFETY: the pages are part of the listed mapping, which still exists, and show the same
        // bytes afterwards.
        let mapped = unsafe {
            libc::mmap(
                start.as_ptr().cast(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_FIXED,
                self.entry.file.as_raw_fd(),
                offset,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(cannot(io::Error::last_os_error()));
        }
        for at in (0..len).step_by(usize::try_from(self.entry.page).unwrap_or(4096)) {
            // SAFETY: the address lies inside the pages. The first write makes a page private;
            // adding zero to a byte, atomically, loses no concurrent write. The compiler must not
            // know the zero: it replaces the addition of a known one by a load.
            unsafe { AtomicU8::from_ptr(start.add(at).as_ptr()) }.fetch_add(black_box(0), Ordering::Relaxed);
        }
        Ok(())
    }

    fn address_range(&self) -> Result<(NonNull<u8>, usize)> {
        let number = |n: u64| {
            usize::try_from(n).map_err(|_| {
                Error::invalid("cannot detach memory from its file: value exceeds the address space")
            })
        };
        let skip = number(self.first - self.entry.span.addr())?;
        // SAFETY: `first` lies in the mapping.
        Ok((unsafe { self.entry.span.ptr.add(skip) }, number(self.end - self.first)?))
    }
}

/// Type of hugetlbfs in `statfs`.
const HUGETLBFS: i64 = 0x9584_58f6;

/// Returns the page size of a mapping of a file: that of hugetlbfs, or the ordinary one. (Block
/// sizes of other file systems are only hints.)
pub(super) fn page_of(file: &File) -> Result<u64> {
    if cfg!(miri) {
        return Ok(page_size() as u64);
    }
    let mut about = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the buffer has the size of the struct.
    if unsafe { libc::fstatfs(file.as_raw_fd(), about.as_mut_ptr()) } != 0 {
        return Err(Error::from(io::Error::last_os_error()));
    }
    // SAFETY: the call has filled in the struct.
    let about = unsafe { about.assume_init() };
    if about.f_type != HUGETLBFS {
        return Ok(page_size() as u64);
    }
    let size = about.f_bsize;
    u64::try_from(size)
        .ok()
        .filter(|n| n.is_power_of_two())
        .ok_or_else(|| Error::invalid(format!("file system reports an invalid block size. size={size}")))
}

#[cfg(test)]
mod tests {
    use super::super::{HostMemory, HostMemoryOptions, MemorySource};
    use super::*;

    fn shared(len: usize) -> HostMemory {
        HostMemory::with(len, &HostMemoryOptions { shared: Some("t".into()), ..Default::default() }).unwrap()
    }

    fn part(memory: &HostMemory, from: usize, len: usize) -> MemorySpan {
        assert!(from + len <= memory.len());
        // SAFETY: checked above.
        MemorySpan::new(unsafe { memory.span().ptr.add(from) }, len)
    }

    fn byte(memory: &HostMemory, at: usize) -> &AtomicU8 {
        // SAFETY: in range, and accessed only through atomics.
        unsafe { AtomicU8::from_ptr(part(memory, at, 1).ptr.as_ptr()) }
    }

    #[test]
    #[cfg_attr(miri, ignore = "no memfd there")]
    fn shared_memory_is_found_while_it_lives() {
        let memory = shared(3 * 4096 - 5);
        let pages = shared_pages(part(&memory, 4097, 10)).unwrap();
        let base = memory.span().addr();
        assert_eq!((pages.range(), pages.offset_of(base + 4097)), (base + 4096..base + 8192, 4097));
        assert!(shared_pages(HostMemory::new(4096).unwrap().span()).is_none());
        let beyond = MemorySpan { len: 3 * 4096 + 1, ..memory.span() };
        assert!(shared_pages(beyond).is_none());
        assert!(shared_pages(MemorySpan { len: 0, ..memory.span() }).is_none());
        let span = memory.span();
        drop(memory);
        assert!(shared_pages(span).is_none());
    }

    #[test]
    #[cfg_attr(miri, ignore = "no memfd there")]
    fn pages_made_private_keep_their_bytes_and_see_no_later_writes() {
        let memory = shared(4 * 4096);
        for at in 0..4 {
            byte(&memory, at * 4096).store(at as u8 + 1, Ordering::Relaxed);
        }
        let pages = shared_pages(part(&memory, 4096, 8192)).unwrap();
        let other = HostMemory::map_file(pages.file(), 0, 4 * 4096).unwrap();
        // SAFETY: the memory is still allocated.
        unsafe { pages.make_private() }.unwrap();
        for at in 0..4 {
            assert_eq!(byte(&memory, at * 4096).load(Ordering::Relaxed), at as u8 + 1);
            byte(&other, at * 4096).store(100, Ordering::Relaxed);
        }
        let seen: Vec<u8> = (0..4).map(|at| byte(&memory, at * 4096).load(Ordering::Relaxed)).collect();
        assert_eq!(seen, [100, 2, 3, 100]);
        assert!(shared_pages(memory.span()).is_none());
    }

    #[test]
    #[cfg_attr(miri, ignore = "no memfd there")]
    fn nonsense_is_refused() {
        let memory = shared(8192);
        let file = || memory.fd().unwrap().try_clone_to_owned().unwrap();
        for (span, offset) in [
            (memory.span(), 0),
            (MemorySpan { len: 0, ..memory.span() }, 0),
            (memory.span(), 4096),
            (part(&memory, 1, 4096), 0),
        ] {
            // SAFETY: the call refuses the span before any access.
            assert!(unsafe { SharedMapping::new(span, file(), offset) }.is_err());
        }
    }
}
