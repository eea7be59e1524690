//! Size of a page of memory.

/// Returns the size in bytes of a page that is not a huge page.
pub(super) fn page_size() -> usize {
    // SAFETY: a query without pointer arguments.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}
