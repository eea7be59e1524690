//! Allocation of the pages of a mapping before its first use. The kernel ends a process that
//! touches a page for which it has no memory, with SIGBUS, so a mapping whose memory may be missing
//! is filled at once.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;

use super::page::page_size;
use crate::error::{Error, ErrorCode, Result};
use crate::fault_injection::is_planted;

/// Maximum number of holes that are looked at. The part behind them counts as missing.
const MAX_PARTS: usize = 1 << 16;
/// Bytes that one call to the kernel allocates. A signal costs only the work of one call.
const STEP: u64 = 256 << 20;

/// Allocates the pages of a part of a file, and extends the file to the end of the part. If that
/// fails, the file has its former length.
///
/// # Errors
///
/// Returns `FILE_WRITE_FAIL` for a full or unsuitable file system, and `BUFFER_OVERFLOW` for too
/// little memory or too few huge pages.
pub(super) fn fill(file: &File, offset: u64, len: usize, page: usize) -> Result<()> {
    if is_planted("unfilled-files") {
        return Ok(());
    }
    let before = file.metadata().map_err(|error| cannot_fill(len, page, error))?.len();
    let filled = check_space(file, offset, len as u64).and_then(|()| fill_in_steps(file, offset, len as u64));
    filled.map_err(|error| {
        // Other processes may have extended a file that had the whole part before.
        if before < offset.saturating_add(len as u64) {
            let _ = file.set_len(before);
        }
        cannot_fill(len, page, error)
    })
}

/// Returns `ENOSPC` if a file system lacks the space for a part of a file. Without this check, the
/// attempt takes all space of the file system for a while, and other processes fail.
fn check_space(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let mut space = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: the pointer is valid for the call, and 0 means that the call filled the structure.
    let space = unsafe {
        if libc::fstatvfs(file.as_raw_fd(), space.as_mut_ptr()) != 0 {
            return Ok(());
        }
        space.assume_init()
    };
    // A file system in memory without a limit, such as that of a memfd.
    if space.f_blocks == 0 {
        return Ok(());
    }
    // SAFETY: the call has no arguments and cannot fail.
    let blocks = if unsafe { libc::geteuid() } == 0 { space.f_bfree } else { space.f_bavail };
    match missing_bytes(file, offset, len) > blocks.saturating_mul(space.f_frsize) {
        true => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        false => Ok(()),
    }
}

/// Type of tmpfs in `statfs`.
const TMPFS: libc::__fsword_t = 0x0102_1994;

/// Returns whether a file lies in memory with ordinary pages (tmpfs, a memfd).
pub(super) fn is_in_memory(file: &File) -> bool {
    let mut about = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the pointer is valid for the call, and 0 means that the call filled the structure.
    unsafe { libc::fstatfs(file.as_raw_fd(), about.as_mut_ptr()) == 0 && about.assume_init().f_type == TMPFS }
}

/// Returns the bytes of a part of a file for which no space is allocated, at most. Allocated space
/// that was never written looks like a hole; the size of the file and its blocks bound the result.
pub(super) fn missing_bytes(file: &File, offset: u64, len: u64) -> u64 {
    let end = offset.saturating_add(len);
    // Blocks of a file have 512 bytes on every file system.
    let size_and_space = file.metadata().map(|about| (about.len(), about.blocks().saturating_mul(512)));
    let (size, space) = size_and_space.unwrap_or((0, 0));
    let missing_of_file = size.max(end).saturating_sub(space);
    let seek = |at: u64, what| {
        let at = libc::off_t::try_from(at).ok()?;
        // SAFETY: the arguments are plain numbers.
        u64::try_from(unsafe { libc::lseek(file.as_raw_fd(), at, what) }).ok()
    };
    let (mut at, mut missing) = (offset, 0);
    for _ in 0..MAX_PARTS {
        // Without further data there is only a hole.
        let data = seek(at, libc::SEEK_DATA).unwrap_or(end).clamp(at, end);
        missing += data - at;
        // Files without holes, such as devices, have no position behind their data.
        at = seek(data, libc::SEEK_HOLE).filter(|hole| data < end && *hole > data).unwrap_or(end);
        if at >= end {
            break;
        }
    }
    missing.saturating_add(end.saturating_sub(at)).min(missing_of_file)
}

fn fill_in_steps(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let number = |n: u64| libc::off_t::try_from(n).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG));
    let end = offset.checked_add(len).ok_or_else(|| io::Error::from_raw_os_error(libc::EFBIG))?;
    let mut at = offset;
    while at < end {
        let step = STEP.min(end - at);
        // SAFETY: the arguments are plain numbers.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, number(at)?, number(step)?) } == 0 {
            at += step;
            continue;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    Ok(())
}

/// Allocates the huge pages of a private mapping. Kernels before 5.14 cannot; there the reservation
/// of the mapping counts.
///
/// # Safety
///
/// The range is a writable mapping without other users.
pub(super) unsafe fn populate(ptr: NonNull<u8>, len: usize, page: usize) -> Result<()> {
    loop {
        // SAFETY: promised by the caller; the advice changes no contents.
        if unsafe { libc::madvise(ptr.as_ptr().cast(), len, libc::MADV_POPULATE_WRITE) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINVAL) => return Ok(()),
            Some(libc::EINTR | libc::EAGAIN) => {}
            // The kernel reports a page that would end the process in this way.
            Some(libc::EFAULT) => {
                return Err(cannot_map(len, page, io::Error::from_raw_os_error(libc::ENOMEM)));
            }
            _ => return Err(cannot_map(len, page, error)),
        }
    }
}

/// Returns whether the kernel refuses memory beyond its commit limit (`vm.overcommit_memory=2`).
/// Pages of a memfd count only when they are touched, so a memfd must be filled there.
pub(super) fn is_commit_strict() -> bool {
    is_strict(&std::fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap_or_default())
}

fn is_strict(text: &str) -> bool {
    text.trim() == "2"
}

/// Returns the error of a mapping.
pub(super) fn cannot_map(len: usize, page: usize, error: io::Error) -> Error {
    let hint = if page > page_size() { about_huge_pages(len, page) } else { String::new() };
    Error::new(ErrorCode::BufferOverflow, format!("cannot map {len} bytes of memory: {error}{hint}"))
        .with_source(error)
}

/// Returns the error of the allocation of pages of a file.
fn cannot_fill(len: usize, page: usize, error: io::Error) -> Error {
    if page > page_size() || error.raw_os_error() == Some(libc::ENOMEM) {
        return cannot_map(len, page, error);
    }
    let hint = match error.raw_os_error() {
        Some(libc::EOPNOTSUPP) => {
            "; its file system cannot allocate space in advance, use tmpfs or hugetlbfs"
        }
        Some(libc::ENOSPC | libc::EDQUOT) => "; free space on its file system, enlarge it, or use less",
        _ => "",
    };
    Error::new(ErrorCode::FileWriteFail, format!("cannot allocate {len} bytes of a file: {error}{hint}"))
        .with_source(error)
}

/// Describes how many huge pages exist and are free, for an error message.
fn about_huge_pages(len: usize, page: usize) -> String {
    let (wanted, size) = (len.div_ceil(page), page >> 10);
    let place = format!("/sys/kernel/mm/hugepages/hugepages-{size}kB");
    match std::fs::read_to_string(format!("{place}/free_hugepages")) {
        Ok(free) => {
            let free = free.trim();
            format!(
                " (needs {wanted} huge pages of {size} KiB, {free} are free; reserve more in {place}/nr_hugepages, or use ordinary pages: unset MC_STORE_USE_HUGEPAGE)"
            )
        }
        Err(_) => {
            format!(" (needs {wanted} huge pages of {size} KiB; the kernel has no huge pages of that size)")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn only_mode_2_is_strict() {
        for (text, strict) in [("0\n", false), ("1\n", false), ("2\n", true), ("", false)] {
            assert_eq!(is_strict(text), strict, "{text:?}");
        }
    }

    #[test]
    fn errors_of_files_have_codes_of_files() {
        let code = |errno| cannot_fill(4096, page_size(), io::Error::from_raw_os_error(errno)).code();
        for errno in [libc::ENOSPC, libc::EDQUOT, libc::EOPNOTSUPP, libc::EFBIG, libc::EIO] {
            assert_eq!(code(errno), ErrorCode::FileWriteFail, "{errno}");
        }
        assert_eq!(code(libc::ENOMEM), ErrorCode::BufferOverflow);
    }

    #[test]
    #[cfg_attr(miri, ignore = "no files there")]
    fn holes_of_a_part_are_missing() {
        let path = std::env::temp_dir().join(format!("mooncake-holes-{}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let page = 64 << 10;
        assert_eq!(missing_bytes(&file, 0, 4 * page), 4 * page, "the file is empty");
        file.set_len(4 * page).unwrap();
        for part in [1, 3] {
            file.write_all_at(&[7; 64 << 10], part * page).unwrap();
        }
        for (offset, len, missing) in [(0, 4, 2), (1, 1, 0), (2, 1, 1), (2, 9, 1 + 7)] {
            assert_eq!(missing_bytes(&file, offset * page, len * page), missing * page, "{offset} {len}");
        }
        let device = File::open("/dev/zero").unwrap();
        assert_eq!(missing_bytes(&device, 0, 1 << 62), 0, "a device has no holes");
        fill_in_steps(&file, 0, 4 * page).unwrap();
        assert_eq!(missing_bytes(&file, 0, 4 * page), 0, "allocated without bytes");
    }

    #[test]
    #[cfg_attr(miri, ignore = "no files there")]
    fn a_file_that_cannot_be_filled_keeps_its_length() {
        let path = std::env::temp_dir().join(format!("mooncake-fill-{}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(4096).unwrap();
        // Found before anything is allocated: other tests need the space.
        assert_eq!(check_space(&file, 0, 1 << 62).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        check_space(&file, 0, 10_000).unwrap();
        let error = fill(&file, 0, 1 << 62, page_size()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::FileWriteFail);
        assert_eq!(file.metadata().unwrap().len(), 4096);
        fill(&file, 100, 10_000, page_size()).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 10_100);
    }
}
