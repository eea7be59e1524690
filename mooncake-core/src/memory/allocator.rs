//! Settings of the allocator of the C library.

/// Lets buffers of more than 256 KiB return to the system as soon as they are freed, for programs
/// whose peers determine the length of buffers. By default the allocator keeps their pages after
/// some of them were freed, for later buffers of that length.
///
/// Has no effect with another C library or allocator.
pub fn return_large_buffers() {
    #[cfg(all(target_os = "linux", target_env = "gnu", not(miri)))]
    // SAFETY: the call changes settings of the allocator and may be made at any time.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 256 << 10);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 4 << 20);
    }
}
