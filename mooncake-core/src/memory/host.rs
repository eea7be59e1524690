//! Host memory from the kernel: private or shared (memfd), with ordinary or huge pages,
//! zero-filled.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;

use super::page::page_size;
use super::promised::Promise;
use super::reserve::{cannot_map, fill, is_commit_strict, populate};
use super::shared::{SharedMapping, page_of};
use super::{Location, MemorySource, MemorySpan};
use crate::error::{Error, ErrorCode, Result};
use crate::fault_injection::is_planted;
use crate::fork::ParentOnly;

/// Size of the pages to request from the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum HugePages {
    /// Pages of the kernel's choice: ordinary ones, merged to huge ones where possible.
    #[default]
    Off,
    /// 2 MiB pages from the kernel's reserved pool. An error if the pool has too few.
    Size2M,
    /// 1 GiB pages from the kernel's reserved pool. An error if the pool has too few.
    Size1G,
}

impl HugePages {
    fn page(self) -> usize {
        match self {
            HugePages::Off => page_size(),
            HugePages::Size2M => 2 << 20,
            HugePages::Size1G => 1 << 30,
        }
    }

    fn log2(self) -> i32 {
        self.page().trailing_zeros().cast_signed()
    }
}

/// Options of [`HostMemory`].
#[derive(Clone, Debug, Default)]
pub struct HostMemoryOptions {
    /// Page size.
    pub huge_pages: HugePages,
    /// NUMA node to bind the pages to.
    pub numa_node: Option<u32>,
    /// Name of a memfd that backs the memory, so that its file descriptor can be passed to another
    /// process. The size of the memfd is sealed, so that no holder can remove pages that others
    /// have mapped.
    pub shared: Option<String>,
}

/// Zero-filled memory mapping, unmapped on drop.
#[derive(Debug)]
pub struct HostMemory {
    ptr: NonNull<u8>,
    len: usize,
    mapped: usize,
    location: Location,
    shared: Option<SharedMapping>,
    /// File that only this process uses.
    alone: Option<ParentOnly<File>>,
    /// Entry of memory whose pages are allocated at their first use.
    promise: Option<Promise>,
}

// SAFETY: the mapping belongs to this value alone and has no thread affinity.
unsafe impl Send for HostMemory {}
// SAFETY: shared use returns only the address; code that dereferences it must make sure of the
// access.
unsafe impl Sync for HostMemory {}

// SAFETY: the mapping stays in place until `drop` unmaps it, and no reference to its bytes is ever
// created here.
unsafe impl MemorySource for HostMemory {
    fn span(&self) -> MemorySpan {
        MemorySpan { location: self.location, ..MemorySpan::new(self.ptr, self.len) }
    }
}

impl HostMemory {
    /// Allocates `len` bytes of private memory with ordinary pages.
    pub fn new(len: usize) -> Result<Self> {
        Self::with(len, &HostMemoryOptions::default())
    }

    /// Allocates `len` bytes with options. Huge pages are allocated at once, ordinary pages at
    /// their first use.
    ///
    /// # Errors
    ///
    /// The message names the cause: too little memory, no reserved huge pages, no such NUMA node.
    pub fn with(len: usize, options: &HostMemoryOptions) -> Result<Self> {
        let page = options.huge_pages.page();
        let mapped = round_up(len, page)?;
        let huge = options.huge_pages != HugePages::Off;
        let file =
            options.shared.as_deref().map(|name| memfd(name, mapped, options.huge_pages)).transpose()?;
        let mut flags = match &file {
            Some(_) => libc::MAP_SHARED,
            // Miri knows only mappings without further flags.
            None if cfg!(miri) => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            // The kernel reserves huge pages for the mapping, and refuses it if it has too few.
            None if huge && !is_planted("unreserved-huge-pages") => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            None => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
        };
        if huge && file.is_none() {
            flags |= libc::MAP_HUGETLB | (options.huge_pages.log2() << libc::MAP_HUGE_SHIFT);
        }
        let ptr = map(mapped, flags, file.as_ref().map(|f| f.as_fd()), 0)
            .map_err(|e| cannot_map(mapped, page, e))?;
        let mut memory =
            Self { ptr, len, mapped, location: Location::Any, shared: None, alone: None, promise: None };
        if !huge && !cfg!(miri) {
            // SAFETY: the range is the new mapping; advice changes no contents. A failure costs
            // only speed.
            unsafe { libc::madvise(ptr.as_ptr().cast(), mapped, libc::MADV_HUGEPAGE) };
        }
        if let Some(node) = options.numa_node {
            memory.bind(node)?;
        }
        // A reservation is not enough: the pages may all lie on another NUMA node, or the control
        // group may not have them.
        match &file {
            Some(file) if huge || is_commit_strict() => {
                fill(&file.try_clone().map_err(Error::from)?.into(), 0, mapped, page)?;
            }
            // SAFETY: the range is the new mapping, which has no other user yet.
            None if huge && !is_planted("unreserved-huge-pages") => unsafe { populate(ptr, mapped, page) }?,
            _ if huge => {}
            _ => memory.promise = Some(Promise::new(ptr, mapped)),
        }
        if let Some(file) = file {
            let whole = MemorySpan { location: memory.location, ..MemorySpan::new(ptr, mapped) };
            // SAFETY: mapped just now from the start of that file; `drop` removes the entry before
            // the mapping goes.
            memory.shared = Some(unsafe { SharedMapping::new(whole, file, 0) }?);
        }
        Ok(memory)
    }

    /// Maps `len` bytes of an open file (tmpfs, DAX, a memfd received from another process) from
    /// `offset`, shared.
    pub fn map_file(file: &File, offset: u64, len: usize) -> Result<Self> {
        let size = file.metadata().map_err(Error::from)?.len();
        if !offset.is_multiple_of(page_size() as u64) {
            return Err(Error::invalid(format!(
                "offset {offset} is not a multiple of the page size {}",
                page_size()
            )));
        }
        if len == 0 || offset.checked_add(len as u64).is_none_or(|end| end > size) {
            return Err(Error::invalid(format!(
                "cannot map file: range exceeds the file. offset={offset} len={len} size={size}"
            )));
        }
        let start = libc::off_t::try_from(offset)
            .map_err(|_| Error::invalid(format!("cannot map file: offset is too large. offset={offset}")))?;
        let page = usize::try_from(page_of(file)?).unwrap_or(usize::MAX);
        let mapped = round_up(len, page)?;
        let ptr =
            map(mapped, libc::MAP_SHARED, Some(file.as_fd()), start).map_err(|e| cannot_map(len, page, e))?;
        Ok(Self { ptr, len, mapped, location: Location::Any, shared: None, alone: None, promise: None })
    }

    /// Maps a part of a file as [`map_file`](Self::map_file) does, and allocates the pages of the
    /// part, so that no later access ends the process.
    ///
    /// # Errors
    ///
    /// Returns `FILE_WRITE_FAIL` if the file system is full or cannot allocate space in advance,
    /// `BUFFER_OVERFLOW` for too little memory, and the errors of [`map_file`](Self::map_file).
    pub fn map_filled(file: &File, offset: u64, len: usize) -> Result<Self> {
        let memory = Self::map_file(file, offset, len)?;
        fill(file, offset, len, usize::try_from(page_of(file)?).unwrap_or(usize::MAX))?;
        Ok(memory)
    }

    /// Maps a file as [`map_file`](Self::map_file) does, and lists it for
    /// [`shared_pages`](super::shared_pages), for transports that access the file themselves.
    /// `offset` and `len` are multiples of the page size of the file.
    pub fn map_listed(file: File, offset: u64, len: usize) -> Result<Self> {
        let mut memory = Self::map_file(&file, offset, len)?;
        let whole = MemorySpan { location: memory.location, ..MemorySpan::new(memory.ptr, memory.mapped) };
        // SAFETY: mapped just now from that part of the file; `drop` removes the entry before the
        // mapping goes.
        memory.shared = Some(unsafe { SharedMapping::new(whole, file.into(), offset) }?);
        Ok(memory)
    }

    /// Maps the first `len` bytes of a file of tmpfs or hugetlbfs that outlives this process, and
    /// locks the file against other processes. A shorter file is extended, by whole pages of its
    /// file system, and all pages are allocated at once. [`shared_pages`](super::shared_pages) does
    /// not list the mapping: no user may hold pages that another process takes over.
    ///
    /// # Errors
    ///
    /// The message names the cause: another process holds the file (`FILE_LOCK_FAIL`), too little
    /// memory, too few huge pages (`BUFFER_OVERFLOW`), a full file system (`FILE_WRITE_FAIL`), no
    /// such NUMA node.
    pub fn map_alone(file: File, len: usize, numa_node: Option<u32>) -> Result<Self> {
        lock_alone(&file)?;
        let page = usize::try_from(page_of(&file)?).unwrap_or(usize::MAX);
        let mapped = round_up(len, page.max(page_size()))?;
        // Mapping reserves huge pages, all or none. The NUMA node must be set before pages are
        // allocated.
        let mut memory = Self::map_whole(file, len, mapped, Location::Any, page)?;
        if let Some(node) = numa_node {
            memory.bind(node)?;
        }
        if let Some(file) = &memory.alone {
            fill(file, 0, mapped, page)?;
        }
        Ok(memory)
    }

    fn map_whole(file: File, len: usize, mapped: usize, location: Location, page: usize) -> Result<Self> {
        let ptr =
            map(mapped, libc::MAP_SHARED, Some(file.as_fd()), 0).map_err(|e| cannot_map(mapped, page, e))?;
        // A mapping keeps the lock as a descriptor does, so a child of a fork gets neither.
        if !is_planted("fork-inherits") {
            // SAFETY: the range is the new mapping; advice changes no contents.
            unsafe { libc::madvise(ptr.as_ptr().cast(), mapped, libc::MADV_DONTFORK) };
        }
        Ok(Self {
            ptr,
            len,
            mapped,
            location,
            shared: None,
            alone: Some(ParentOnly::new(file)),
            promise: None,
        })
    }

    /// Returns whether the memory is [of a file](Self::map_alone) that outlives the process.
    pub fn is_lasting(&self) -> bool {
        self.alone.is_some()
    }

    /// Returns the memfd of shared memory, to pass to another process.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.shared.as_ref().map(|shared| shared.file().as_fd())
    }

    /// Frees the pages and reserves the addresses: nothing else is mapped there before the hole is
    /// dropped.
    pub fn into_hole(self) -> Result<AddressHole> {
        let hole = AddressHole { addr: self.ptr.as_ptr().expose_provenance(), len: self.mapped };
        let mut memory = ManuallyDrop::new(self);
        memory.shared = None;
        memory.alone = None;
        memory.promise = None;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: the range is a mapping of this value, which was its only user and is gone.
        let at = unsafe { libc::mmap(memory.ptr.as_ptr().cast(), hole.len, libc::PROT_NONE, flags, -1, 0) };
        // On failure the old mapping is still there; the hole unmaps it.
        if at == libc::MAP_FAILED { Err(io::Error::last_os_error().into()) } else { Ok(hole) }
    }

    /// Moves the pages to other addresses and reserves the old ones, as
    /// [`into_hole`](Self::into_hole) does: later accesses to the old addresses fail. Returns the
    /// memory unchanged if the kernel cannot move it (private memory needs Linux 5.7), or if parts
    /// of the memory have been detached from their file.
    pub fn relocate(self) -> std::result::Result<(Self, AddressHole), Self> {
        let moved = match (&self.shared, &self.alone) {
            (Some(shared), _) => self.map_elsewhere(shared),
            (None, Some(file)) => file.try_clone().map_err(Error::from).and_then(|file| {
                // The lock stays held.
                Self::map_whole(file, self.len, self.mapped, self.location, page_size())
            }),
            (None, None) => self.move_pages(),
        };
        match moved {
            Ok(moved) => match self.into_hole() {
                Ok(hole) => Ok((moved, hole)),
                Err(_) => Err(moved),
            },
            Err(_) => Err(self),
        }
    }

    /// Maps the same file at other addresses.
    fn map_elsewhere(&self, shared: &SharedMapping) -> Result<Self> {
        if shared.is_detached() {
            return Err(Error::invalid(
                "cannot move memory: parts of the mapping are detached from its file",
            ));
        }
        let file = shared.file().as_fd().try_clone_to_owned()?;
        let ptr = map(self.mapped, libc::MAP_SHARED, Some(file.as_fd()), 0)?;
        let mut memory = self.moved_to(ptr);
        // SAFETY: the range is the new mapping; advice changes no contents. A failure costs only
        // speed.
        unsafe { libc::madvise(ptr.as_ptr().cast(), memory.mapped, libc::MADV_HUGEPAGE) };
        let whole = MemorySpan { location: memory.location, ..MemorySpan::new(ptr, memory.mapped) };
        // SAFETY: as in `with`.
        memory.shared = Some(unsafe { SharedMapping::new(whole, file, 0) }?);
        Ok(memory)
    }

    /// Moves the pages to other addresses and leaves the old ones empty.
    fn move_pages(&self) -> Result<Self> {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
        let anywhere = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: the range is a mapping of this value, and stays mapped, without pages. The kernel
        // chooses the new place.
        let at = unsafe { libc::mremap(self.ptr.as_ptr().cast(), self.mapped, self.mapped, flags, anywhere) };
        let ptr = NonNull::new(at.cast()).filter(|_| at != libc::MAP_FAILED);
        let ptr = ptr.ok_or_else(|| Error::from(io::Error::last_os_error()))?;
        Ok(self.moved_to(ptr))
    }

    /// Describes as much memory at another address, without a file yet.
    fn moved_to(&self, ptr: NonNull<u8>) -> Self {
        let Self { len, mapped, location, .. } = *self;
        let promise = self.promise.as_ref().map(|_| Promise::new(ptr, mapped));
        Self { ptr, len, mapped, location, shared: None, alone: None, promise }
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the memory has no bytes, which is always false.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn bind(&mut self, node: u32) -> Result<()> {
        const MPOL_BIND: libc::c_int = 2;
        let mut mask = [0u64; 16];
        let Some(word) = mask.get_mut(node as usize / 64) else {
            return Err(Error::invalid(format!(
                "cannot bind memory to NUMA node {node}: number is out of range"
            )));
        };
        *word = 1 << (node % 64);
        // SAFETY: the range is a mapping of this value; the mask outlives the call and has the
        // given length.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.ptr.as_ptr(),
                self.mapped,
                MPOL_BIND,
                mask.as_ptr(),
                mask.len() * 64,
                0,
            )
        };
        if rc != 0 {
            let error = io::Error::last_os_error();
            return Err(Error::new(
                ErrorCode::InvalidParams,
                format!("cannot bind memory to NUMA node {node}: {error}"),
            )
            .with_source(error));
        }
        self.location = Location::Cpu(node);
        Ok(())
    }
}

/// Locks a file against [mapping](HostMemory::map_alone) by other processes, for as long as it is
/// open or mapped. Children of a fork inherit the lock, unless the file is a [`ParentOnly`].
///
/// # Errors
///
/// Returns `FILE_LOCK_FAIL` if another process holds the lock.
pub fn lock_alone(file: &File) -> Result<()> {
    // SAFETY: the arguments are plain numbers.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    let holder = lock_holder(file).map_or_else(
        || "another process holds it".into(),
        |process| format!("process {process} holds it; stop that process, or give this one another file"),
    );
    let text = format!("cannot lock file: {holder} ({error})");
    Err(Error::new(ErrorCode::FileLockFail, text).with_source(error))
}

/// Returns the process that holds a lock of the whole file, as far as the kernel tells: the one
/// that took it, in the namespace of this process.
fn lock_holder(file: &File) -> Option<u32> {
    if is_planted("lock-holder-unnamed") {
        return None;
    }
    let about = file.metadata().ok()?;
    let (major, minor) = (libc::major(about.dev()), libc::minor(about.dev()));
    let name = format!("{major:02x}:{minor:02x}:{}", about.ino());
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| holder_in(line, &name))
}

/// Returns the process of a line of `/proc/locks` if it says who holds a lock of the file: `1:
/// FLOCK  ADVISORY  WRITE 7 00:1a:99 0 EOF`.
fn holder_in(line: &str, file: &str) -> Option<u32> {
    let words: Vec<&str> = line.split_whitespace().collect();
    // A waiting process has an arrow before the kind of its lock.
    match words.get(1..6)? {
        ["FLOCK", _, _, process, at] if *at == file => process.parse().ok().filter(|process| *process != 0),
        _ => None,
    }
}

/// Address range that holds nothing and that no other mapping can take.
#[derive(Debug)]
pub struct AddressHole {
    addr: usize,
    len: usize,
}

impl AddressHole {
    /// Reserves an unused address range. Returns an error if a mapping lies there.
    pub fn reserve(addr: u64, len: u64) -> Result<Self> {
        let number = |n: u64| {
            usize::try_from(n)
                .map_err(|_| Error::invalid("cannot reserve addresses: value exceeds the address space"))
        };
        let (addr, len) = (number(addr)?, number(len)?);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
        let wanted = std::ptr::with_exposed_provenance_mut(addr);
        // SAFETY: with this flag the kernel replaces no mapping.
        let at = unsafe { libc::mmap(wanted, len, libc::PROT_NONE, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error().into());
        }
        // Kernels before 4.17 take the address as a hint.
        let hole = Self { addr: at.expose_provenance(), len };
        if hole.addr == addr {
            Ok(hole)
        } else {
            Err(Error::invalid("cannot reserve addresses: a mapping lies there"))
        }
    }
}

impl Drop for AddressHole {
    fn drop(&mut self) {
        // SAFETY: the range belongs to this value.
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(self.addr), self.len) };
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // Removed from the lists before the addresses can belong to another mapping.
        self.shared = None;
        self.promise = None;
        // SAFETY: the mapping belongs to this value, and the contract of `MemorySource` ends here.
        unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.mapped) };
    }
}

fn map(
    len: usize,
    flags: libc::c_int,
    fd: Option<BorrowedFd<'_>>,
    offset: libc::off_t,
) -> io::Result<NonNull<u8>> {
    let fd = fd.map_or(-1, |f| f.as_raw_fd());
    // SAFETY: a new mapping at an address of the kernel's choice affects no other memory.
    let ptr = unsafe {
        libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, offset)
    };
    if ptr == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(ptr.cast()).ok_or_else(|| io::Error::other("the kernel mapped at address zero"))
}

fn memfd(name: &str, len: usize, huge: HugePages) -> Result<OwnedFd> {
    let c_name =
        CString::new(name).map_err(|_| Error::invalid("invalid memfd name: it contains a NUL byte"))?;
    let mut flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    if huge != HugePages::Off {
        flags |= libc::MFD_HUGETLB | (huge.log2().cast_unsigned() << libc::MFD_HUGE_SHIFT);
    }
    // SAFETY: the name is a C string that outlives the call.
    let fd = unsafe { libc::memfd_create(c_name.as_ptr(), flags) };
    if fd < 0 {
        return Err(cannot_map(len, huge.page(), io::Error::last_os_error()));
    }
    // SAFETY: the descriptor is new and has no other owner.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // Other users have no path to the file. The permissions say so, too.
    // SAFETY: the arguments are plain numbers.
    if unsafe { libc::fchmod(fd.as_raw_fd(), 0o600) } != 0 {
        return Err(Error::from(io::Error::last_os_error()).context("permissions of a memfd"));
    }
    File::from(fd.try_clone()?).set_len(len as u64)?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: the arguments are plain numbers.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) } != 0 {
        return Err(Error::from(io::Error::last_os_error()).context("sealing the size of a memfd"));
    }
    Ok(fd)
}

fn round_up(len: usize, page: usize) -> Result<usize> {
    if len == 0 {
        return Err(Error::invalid("cannot allocate memory of zero bytes"));
    }
    len.checked_next_multiple_of(page).filter(|&n| isize::try_from(n).is_ok()).ok_or_else(|| {
        Error::invalid(format!("cannot allocate memory: {len} bytes exceed the address space"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn poke(span: MemorySpan, at: usize, byte: u8) {
        assert!(at < span.len);
        // SAFETY: in bounds, and the test is the only user of the memory.
        unsafe { span.ptr.add(at).write(byte) }
    }

    fn peek(span: MemorySpan, at: usize) -> u8 {
        assert!(at < span.len);
        // SAFETY: as above.
        unsafe { span.ptr.add(at).read() }
    }

    #[test]
    fn private_memory_is_zero_and_writable_to_its_last_byte() {
        let memory = HostMemory::new(5000).unwrap();
        let span = memory.span();
        assert_eq!((span.len, peek(span, 0), peek(span, 4999)), (5000, 0, 0));
        poke(span, 4999, 7);
        let moved = Box::new(memory);
        assert_eq!((moved.span(), peek(moved.span(), 4999)), (span, 7));
    }

    #[test]
    #[cfg_attr(miri, ignore = "no fixed mappings there")]
    fn a_hole_keeps_its_addresses() {
        for shared in [None, Some("mooncake test".to_owned())] {
            let options = HostMemoryOptions { shared, ..Default::default() };
            let memory = HostMemory::with(1 << 20, &options).unwrap();
            poke(memory.span(), 7, 1);
            let addr = memory.span().addr();
            let hole = memory.into_hole().unwrap();
            let others: Vec<_> = (0..8).map(|_| HostMemory::with(1 << 20, &options).unwrap()).collect();
            assert!(others.iter().all(|other| !other.span().contains(addr, 1)));
            drop(hole);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "no fixed mappings there")]
    fn pages_move_and_their_old_addresses_stay_empty() {
        for shared in [None, Some("mooncake test".to_owned())] {
            let options = HostMemoryOptions { shared, ..Default::default() };
            let memory = HostMemory::with((1 << 20) + 5, &options).unwrap();
            let before = memory.span();
            for at in [0, 4096, 1 << 20] {
                poke(before, at, at as u8 ^ 7);
            }
            let (memory, hole) = memory.relocate().unwrap();
            let after = memory.span();
            assert!(!after.contains(before.addr(), 1) && !before.contains(after.addr(), 1));
            assert_eq!(after.len, before.len);
            for at in [0, 4096, 1 << 20] {
                assert_eq!(peek(after, at), at as u8 ^ 7);
            }
            let others: Vec<_> = (0..8).map(|_| HostMemory::with(1 << 20, &options).unwrap()).collect();
            assert!(others.iter().all(|other| !other.span().contains(before.addr(), 1)));
            assert_eq!(memory.fd().is_some(), options.shared.is_some());
            drop(hole);
            assert_eq!(peek(after, 4096), 7);
        }
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for (len, word) in
            [(0, "zero bytes"), (usize::MAX, "address space"), (isize::MAX as usize, "address space")]
        {
            let error = HostMemory::new(len).unwrap_err();
            assert!(error.to_string().contains(word), "{error}");
        }
        let options = HostMemoryOptions { numa_node: Some(4000), ..Default::default() };
        assert!(HostMemory::with(4096, &options).unwrap_err().to_string().contains("NUMA node 4000"));
    }

    #[test]
    #[cfg_attr(miri, ignore = "no memfd there")]
    fn shared_memory_is_seen_through_its_descriptor() {
        let options = HostMemoryOptions { shared: Some("test".into()), ..Default::default() };
        let memory = HostMemory::with(8192, &options).unwrap();
        poke(memory.span(), 4096, 9);
        let file = File::from(memory.fd().unwrap().try_clone_to_owned().unwrap());
        let other = HostMemory::map_file(&file, 4096, 4096).unwrap();
        assert_eq!(peek(other.span(), 0), 9);
        assert!(HostMemory::map_file(&file, 1, 100).is_err());
        assert!(HostMemory::map_file(&file, 4096, 4097).is_err());
        assert!(HostMemory::map_file(&file, u64::MAX - 4095, 8192).is_err());
    }

    fn lasting(path: &std::path::Path, len: usize) -> Result<HostMemory> {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap();
        HostMemory::map_alone(file, len, None)
    }

    #[test]
    #[cfg_attr(miri, ignore = "no files there")]
    fn memory_of_a_file_outlives_the_process_moves_and_is_locked() {
        let path = std::env::temp_dir().join(format!("mooncake-lasting-{}", std::process::id()));
        let memory = lasting(&path, 5000).unwrap();
        let span = memory.span();
        assert!(memory.is_lasting() && span.len == 5000 && super::super::shared_pages(span).is_none());
        poke(span, 4999, 7);
        let refused = lasting(&path, 5000).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::FileLockFail);
        let Ok((memory, hole)) = memory.relocate() else { panic!("the memory can be moved") };
        assert_ne!(memory.span().addr(), span.addr());
        assert_eq!(peek(memory.span(), 4999), 7);
        assert!(lasting(&path, 5000).is_err(), "the file stays locked after a move");
        assert!(AddressHole::reserve(span.addr(), 4096).is_err(), "the hole reserves the old addresses");
        drop((memory, hole));
        // The memory of another test may lie there meanwhile.
        let hole = AddressHole::reserve(span.addr(), 8192);
        // A child that another test forks has the descriptor, and so the lock, until it runs on.
        let again = loop {
            match lasting(&path, 5000) {
                Err(error) if error.code() == ErrorCode::FileLockFail => std::thread::yield_now(),
                other => break other.unwrap(),
            }
        };
        assert!(hole.is_err() || again.span().addr() != span.addr());
        assert_eq!(peek(again.span(), 4999), 7);
        std::fs::remove_file(&path).unwrap();
    }

    /// Opens a file of huge pages. Without huge pages, the test prints that it is skipped.
    #[allow(clippy::print_stderr, reason = "see above")]
    fn file_of_huge_pages() -> Option<File> {
        // SAFETY: the name is a C string that outlives the call.
        let fd =
            unsafe { libc::memfd_create(c"mooncake test".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_HUGETLB) };
        // SAFETY: the descriptor is new and has no other owner.
        let file = (fd >= 0).then(|| File::from(unsafe { OwnedFd::from_raw_fd(fd) }));
        if file.is_none() {
            eprintln!("skipped: this kernel has no huge pages");
        }
        file
    }

    #[test]
    #[cfg_attr(miri, ignore = "no memfd there")]
    fn too_few_huge_pages_for_a_file_are_an_error_that_says_so() {
        let Some(file) = file_of_huge_pages() else { return };
        let about = file.try_clone().unwrap();
        let page = page_of(&file).unwrap();
        assert!(page > page_size() as u64);
        // More than any machine has.
        let error = HostMemory::map_alone(file, 1 << 46, None).unwrap_err();
        assert_eq!(error.code(), ErrorCode::BufferOverflow);
        let said = error.to_string();
        let pages = format!("{} huge pages of {} KiB", (1u64 << 46) / page, page >> 10);
        assert!(said.contains(&pages) && said.contains("are free"), "{said}");
        use std::os::unix::fs::MetadataExt;
        assert_eq!(about.metadata().unwrap().blocks(), 0, "no page is allocated");
    }

    #[test]
    #[cfg_attr(miri, ignore = "no memfd there")]
    fn a_file_of_huge_pages_is_mapped_by_whole_pages() {
        let free = || std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let some = free().lines().any(|line| {
            line.strip_prefix("HugePages_Free:").is_some_and(|n| n.trim().parse::<u64>().is_ok_and(|n| n > 0))
        });
        let Some(file) = file_of_huge_pages().filter(|_| some) else { return };
        let about = file.try_clone().unwrap();
        let page = page_of(&file).unwrap();
        let memory = HostMemory::map_alone(file, 5000, None).unwrap();
        let span = memory.span();
        assert_eq!((span.len, about.metadata().unwrap().len()), (5000, page));
        poke(span, 4999, 7);
        let Ok((memory, hole)) = memory.relocate() else { panic!("the memory can be moved") };
        assert_eq!(peek(memory.span(), 4999), 7);
        drop((memory, hole));
        let again = HostMemory::map_alone(about, 5000, None).unwrap();
        assert_eq!(peek(again.span(), 4999), 7);
    }

    #[test]
    fn span_bounds() {
        let memory = HostMemory::new(100).unwrap();
        let span = memory.span();
        assert!(span.contains(span.addr(), 100) && span.contains(span.addr() + 99, 1));
        assert!(!span.contains(span.addr(), 0) && !span.contains(span.addr(), 101));
        assert!(!span.contains(span.addr() - 1, 2) && !span.contains(u64::MAX, 2));
    }
}
