//! Which memory of this process is backed by a file that another process can be given, by address.
//!
//! A wire is told an address and a length; this table leads from there to the file. [`HostMemory`](super::HostMemory) with
//! [`shared`](super::HostMemoryOptions::shared) is in it by itself; memory of another origin is entered with [`SharedMapping::new`].

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use parking_lot::RwLock;

use super::MemorySpan;
use crate::error::{Error, ErrorCode, Result};

static MAPPINGS: RwLock<BTreeMap<u64, Arc<Entry>>> = RwLock::new(BTreeMap::new());

#[derive(Debug)]
struct Entry {
    span: MemorySpan,
    file: File,
    /// Where in the file the first byte lies.
    offset: u64,
    /// Size of the file's pages.
    page: u64,
    /// Parts of the mapping are no longer the file's.
    detached: AtomicBool,
}

/// Lists a shared mapping of a file until it is dropped.
#[derive(Debug)]
pub struct SharedMapping {
    entry: Arc<Entry>,
}

impl SharedMapping {
    /// Lists the mapping at `span`, which shows `file` from `offset` on. `Invalid` when it is empty, does not lie in the file, starts or
    /// is cut within a page of the file, or overlaps one that is listed.
    ///
    /// # Safety
    /// The span is a mapping of that part of the file with `MAP_SHARED`, readable and writable, and stays so until the value has been dropped.
    pub unsafe fn new(span: MemorySpan, file: OwnedFd, offset: u64) -> Result<Self> {
        let file = File::from(file);
        let about = file.metadata().map_err(Error::from)?;
        let (addr, len, page) = (span.addr(), span.len as u64, page_of(&file)?);
        let end = addr.checked_add(len).filter(|_| len != 0);
        let end = end.ok_or_else(|| Error::invalid(format!("{len} bytes at {addr:#x} are not memory")))?;
        if offset.checked_add(len).is_none_or(|end| end > about.len()) {
            return Err(Error::invalid(format!(
                "{len} bytes from {offset} do not lie in a file of {} bytes",
                about.len()
            )));
        }
        if [addr, len, offset].iter().any(|n| !n.is_multiple_of(page)) {
            return Err(Error::invalid(format!(
                "{len} bytes at {addr:#x}, {offset} in the file: each must be a multiple of the page size {page}"
            )));
        }
        let mut mappings = MAPPINGS.write();
        if let Some((other, entry)) = mappings.range(..end).next_back()
            && other + entry.span.len as u64 > addr
        {
            return Err(Error::invalid(format!(
                "{len} bytes at {addr:#x} overlap the mapping at {other:#x}"
            )));
        }
        let entry = Arc::new(Entry { span, file, offset, page, detached: AtomicBool::new(false) });
        mappings.insert(addr, entry.clone());
        Ok(Self { entry })
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.entry.file
    }

    /// Whether parts of the mapping were [made private](SharedPages::make_private).
    pub fn is_detached(&self) -> bool {
        self.entry.detached.load(Ordering::Acquire)
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        MAPPINGS.write().remove(&self.entry.span.addr());
    }
}

/// A part of a listed mapping, by whole pages. Keeps the file, not the memory.
#[derive(Clone, Debug)]
pub struct SharedPages {
    entry: Arc<Entry>,
    first: u64,
    end: u64,
}

/// The file pages that `span` lies in, if all of it is in one listed mapping.
pub fn shared_pages(span: MemorySpan) -> Option<SharedPages> {
    let (addr, len) = (span.addr(), span.len as u64);
    let mappings = MAPPINGS.read();
    let entry = mappings.range(..=addr).next_back().map(|(_, entry)| entry)?;
    if !entry.span.contains(addr, len) || entry.detached.load(Ordering::Acquire) {
        return None;
    }
    // The mapping starts and ends with a page, so this stays inside and does not overflow.
    let first = addr - addr % entry.page;
    let end = (addr + len).next_multiple_of(entry.page);
    Some(SharedPages { entry: entry.clone(), first, end })
}

impl SharedPages {
    /// The file.
    pub fn file(&self) -> &File {
        &self.entry.file
    }

    /// Where in the file an address of the mapping lies.
    pub fn offset_of(&self, addr: u64) -> u64 {
        self.entry.offset + (addr - self.entry.span.addr())
    }

    /// First address, and the one behind the last.
    pub fn range(&self) -> std::ops::Range<u64> {
        self.first..self.end
    }

    /// Cuts these pages off from the file: contents and addresses stay, but what others do to the file is not seen here any
    /// more, nor the other way round. The mapping is not found by [`shared_pages`] afterwards.
    ///
    /// # Safety
    /// The mapping is still there.
    pub unsafe fn make_private(&self) -> Result<()> {
        let cannot = |e: io::Error| {
            Error::new(ErrorCode::BufferOverflow, format!("cannot cut memory off from its file: {e}"))
        };
        let offset = libc::off_t::try_from(self.offset_of(self.first))
            .map_err(|_| Error::invalid("an offset that does not fit"))?;
        let (start, len) = self.place()?;
        self.entry.detached.store(true, Ordering::Release);
        // SAFETY: the pages are part of the listed mapping, which is still there, and show the same bytes afterwards.
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
            // SAFETY: inside the pages. A page becomes ours when it is first written; adding nothing to a byte, atomically, loses no
            // write of anybody else here.
            unsafe { AtomicU8::from_ptr(start.add(at).as_ptr()) }.fetch_add(0, Ordering::Relaxed);
        }
        Ok(())
    }

    fn place(&self) -> Result<(NonNull<u8>, usize)> {
        let number = |n: u64| usize::try_from(n).map_err(|_| Error::invalid("not an address"));
        let skip = number(self.first - self.entry.span.addr())?;
        // SAFETY: `first` lies in the mapping.
        Ok((unsafe { self.entry.span.ptr.add(skip) }, number(self.end - self.first)?))
    }
}

/// Size of a file's pages. (Not the block size of `stat`, which is what tmpfs would like for huge pages.)
pub(super) fn page_of(file: &File) -> Result<u64> {
    let mut about = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: there is room for what the call fills in.
    if unsafe { libc::fstatfs(file.as_raw_fd(), about.as_mut_ptr()) } != 0 {
        return Err(Error::from(io::Error::last_os_error()));
    }
    // SAFETY: the call has filled it in.
    let size = unsafe { about.assume_init() }.f_bsize;
    u64::try_from(size)
        .ok()
        .filter(|n| n.is_power_of_two())
        .ok_or_else(|| Error::invalid("a file without pages"))
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
        // SAFETY: just checked.
        MemorySpan::new(unsafe { memory.span().ptr.add(from) }, len)
    }

    fn byte(memory: &HostMemory, at: usize) -> &AtomicU8 {
        // SAFETY: in range, and only touched this way.
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
    fn pages_made_private_keep_their_bytes_and_hear_nothing_more() {
        let memory = shared(4 * 4096);
        for at in 0..4 {
            byte(&memory, at * 4096).store(at as u8 + 1, Ordering::Relaxed);
        }
        let pages = shared_pages(part(&memory, 4096, 8192)).unwrap();
        let other = HostMemory::map_file(pages.file(), 0, 4 * 4096).unwrap();
        // SAFETY: the memory lives.
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
            // SAFETY: refused before anything is done with it.
            assert!(unsafe { SharedMapping::new(span, file(), offset) }.is_err());
        }
    }
}
