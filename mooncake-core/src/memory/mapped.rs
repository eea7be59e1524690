//! Access rights of this process to its own addresses, as reported by the kernel.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::ops::Range;
use std::os::fd::AsRawFd;

/// Access that this process has to a range of its address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapped {
    /// Partly unmapped or unreadable.
    Not,
    /// Wholly readable, but partly not writable: a write would end the process.
    ReadOnly,
    /// Wholly readable and writable.
    Writable,
}

/// Returns the access that this process has to `len` bytes at an address, from the kernel's list of
/// its mappings. Without that list, mapped memory counts as writable. The result is valid only for
/// the time of the call.
pub fn mapped(address: u64, len: usize) -> Mapped {
    let Some(end) = address.checked_add(len as u64).filter(|_| len != 0) else { return Mapped::Not };
    // The file is opened at each use: one that a forked child inherits shows its parent.
    match File::open("/proc/self/maps") {
        Ok(file) => by_queries(&file, address..end)
            .unwrap_or_else(|| by_list(BufReader::with_capacity(1 << 16, file), address..end)),
        Err(_) if by_pages(address, len) => Mapped::Writable,
        Err(_) => Mapped::Not,
    }
}

/// Mapping of the process.
struct Mapping {
    /// Addresses of the mapping.
    range: Range<u64>,
    readable: bool,
    writable: bool,
}

/// Returns the access to a range. `next` returns the mapping with an address, or the first one
/// behind the address.
fn by_mappings(range: Range<u64>, mut next: impl FnMut(u64) -> Option<Mapping>) -> Mapped {
    let (mut covered, mut writable) = (range.start, true);
    while covered < range.end {
        match next(covered) {
            Some(mapping) if mapping.range.contains(&covered) && mapping.readable => {
                writable &= mapping.writable;
                covered = mapping.range.end;
            }
            _ => return Mapped::Not,
        }
    }
    if writable { Mapped::Writable } else { Mapped::ReadOnly }
}

/// Request to the kernel for the mapping with an address, and the response (`struct procmap_query`,
/// Linux 6.11 and newer).
#[repr(C)]
#[derive(Default)]
struct MappingQuery {
    size: u64,
    flags: u64,
    address: u64,
    start: u64,
    end: u64,
    rights: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_size: u32,
    build_id_size: u32,
    name: u64,
    build_id: u64,
}

impl MappingQuery {
    const SIZE: usize = size_of::<Self>();
    /// Number of the request: `_IOWR('f', 17, struct procmap_query)`.
    const NUMBER: u64 = 3 << 30 | (Self::SIZE as u64) << 16 | (b'f' as u64) << 8 | 17;
    const READABLE: u64 = 1;
    const WRITABLE: u64 = 2;
}

/// Queries each mapping of the range, which takes microseconds however many mappings the process
/// has. Returns `None` if the kernel does not support the query.
fn by_queries(list: &File, range: Range<u64>) -> Option<Mapped> {
    let mut is_unsupported = false;
    let mapped = by_mappings(range, |address| {
        let mut query = MappingQuery { size: MappingQuery::SIZE as u64, address, ..Default::default() };
        #[allow(unsafe_code)]
        // SAFETY: the kernel writes to the structure only, and its length is a field of it.
        let rc = unsafe { libc::ioctl(list.as_raw_fd(), MappingQuery::NUMBER as _, &raw mut query) };
        if rc != 0 {
            // Other errors say that the kernel does not know the request.
            is_unsupported = io::Error::last_os_error().raw_os_error() != Some(libc::ENOENT);
            return None;
        }
        let has = |right| query.rights & right != 0;
        Some(Mapping {
            range: query.start..query.end,
            readable: has(MappingQuery::READABLE),
            writable: has(MappingQuery::WRITABLE),
        })
    });
    Some(mapped).filter(|_| !is_unsupported)
}

/// Walks the list, which is sorted, up to the end of the range.
fn by_list(mut list: impl BufRead, range: Range<u64>) -> Mapped {
    let mut line = Vec::new();
    by_mappings(range, |address| {
        loop {
            line.clear();
            // Paths in the list may contain any bytes.
            if !matches!(list.read_until(b'\n', &mut line), Ok(1..)) {
                return None;
            }
            let (start, end, rights) = mapping(&line)?;
            if end > address {
                let has = |at, right| rights.get(at) == Some(&right);
                return Some(Mapping { range: start..end, readable: has(0, b'r'), writable: has(1, b'w') });
            }
        }
    })
}

/// Parses the first address, the one behind the last, and the rights (`rw-p`) of a line like
/// `7f12-7f34 rw-p 0 00:00 0 /path`.
fn mapping(line: &[u8]) -> Option<(u64, u64, &[u8])> {
    let mut words = line.split(|&byte| byte == b' ');
    let (start, end) = std::str::from_utf8(words.next()?).ok()?.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some((number(start)?, number(end)?, words.next()?))
}

/// Returns whether every page of a range is mapped.
#[allow(unsafe_code)]
fn by_pages(address: u64, len: usize) -> bool {
    // SAFETY: a query without pointer arguments.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let Ok(page) = u64::try_from(page) else { return true };
    let start = address & !(page - 1);
    let Ok(len) = usize::try_from((address - start) + len as u64) else { return false };
    let start = std::ptr::with_exposed_provenance_mut(start as usize);
    // SAFETY: the kernel only looks up the range with these flags.
    let rc = unsafe { libc::msync(start, len, libc::MS_ASYNC) };
    rc == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::ENOMEM)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &[u8] = b"1000-3000 r--p 00000000 08:01 42 /a path\xff\n3000-5000 rw-p 00000000 00:00 0 \n\
        5000-6000 rw-s 00000000 00:00 0 [heap]\n7000-8000 rw-p 00000000 00:00 0\n8000-9000 ---p 00000000 00:00 0\n";

    #[test]
    fn ranges_are_found_in_the_list() {
        use Mapped::*;
        for (start, end, expected) in [
            (0x3000, 0x6000, Writable),
            (0x4fff, 0x5001, Writable),
            (0x5fff, 0x6000, Writable),
            (0x1000, 0x1001, ReadOnly),
            (0x2fff, 0x3001, ReadOnly),
            (0x1000, 0x6000, ReadOnly),
            (0x0fff, 0x1001, Not),
            (0x5fff, 0x6001, Not),
            (0x5000, 0x8000, Not),
            (0x7000, 0x8001, Not),
            (0x8000, 0x8001, Not),
            (0x9000, 0x9001, Not),
        ] {
            assert_eq!(by_list(LIST, start..end), expected, "{start:#x}..{end:#x}");
        }
        for broken in [&b"1000\n"[..], b"1000-x rw-p\n", b"\n", b"1000-2000\n"] {
            assert_eq!(by_list(broken, 0x1000..0x1001), Not);
        }
    }

    /// Other files do not support the query. Older kernels refuse in the same way.
    #[test]
    #[cfg_attr(miri, ignore = "no list of mappings there")]
    fn unsupported_query_returns_none() {
        assert_eq!(by_queries(&File::open("/proc/self/status").unwrap(), 0x1000..0x2000), None);
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut numbers = release.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
        if (numbers.next(), numbers.next()) >= (Some(6), Some(11)) {
            let list = File::open("/proc/self/maps").unwrap();
            assert_eq!(by_queries(&list, 16..17), Some(Mapped::Not));
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "no list of mappings there")]
    #[allow(unsafe_code)]
    fn own_memory() {
        use crate::memory::{HostMemory, MemorySource};
        let memory = HostMemory::new(3 * 4096).unwrap();
        let (start, len) = (memory.span().addr(), memory.len());
        assert_eq!((mapped(start, len), by_pages(start, len)), (Mapped::Writable, true));
        let middle = memory.span().ptr.as_ptr().wrapping_add(4096);
        for (rights, expected) in [(libc::PROT_READ, Mapped::ReadOnly), (libc::PROT_NONE, Mapped::Not)] {
            // SAFETY: the page belongs to the memory, and has no other user.
            assert_eq!(unsafe { libc::mprotect(middle.cast(), 4096, rights) }, 0);
            assert_eq!((mapped(start, len), mapped(start + 4096, 1)), (expected, expected));
            let list = || File::open("/proc/self/maps").unwrap();
            let range = start..start + len as u64;
            assert_eq!(by_list(BufReader::new(list()), range.clone()), expected);
            assert!([None, Some(expected)].contains(&by_queries(&list(), range)));
            assert_eq!(
                (mapped(start, 4096), mapped(start + 8192, 4096)),
                (Mapped::Writable, Mapped::Writable)
            );
        }
        // SAFETY: as above.
        assert_eq!(unsafe { libc::mprotect(middle.cast(), 4096, libc::PROT_READ | libc::PROT_WRITE) }, 0);
        assert_eq!(
            (mapped(start, 0), mapped(u64::MAX, 2), mapped(16, 1)),
            (Mapped::Not, Mapped::Not, Mapped::Not)
        );
    }
}
