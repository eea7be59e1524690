//! Functions for PyTorch's pluggable allocator, which finds them in this library. Names and
//! signatures are those of `nvlink_allocator.so` of Mooncake C++.

use std::ffi::{c_int, c_void};
use std::ptr::{null_mut, with_exposed_provenance_mut};

use mooncake_nvlink::allocator;

fn allocate(size: isize, device: c_int) -> *mut c_void {
    let (Ok(len), Ok(device)) = (usize::try_from(size), u32::try_from(device)) else { return null_mut() };
    match allocator::allocate(len, device) {
        Ok(at) => with_exposed_provenance_mut(at as usize),
        Err(error) => {
            tracing::error!(%error, len, device, "cannot allocate GPU memory");
            null_mut()
        }
    }
}

fn free(ptr: *mut c_void, stream: *mut c_void) {
    // SAFETY: PyTorch passes the stream on which the memory was used.
    let known =
        ptr.is_null() || unsafe { allocator::free(ptr.expose_provenance() as u64, stream.addr() as u64) };
    if !known {
        tracing::error!(?ptr, "cannot free GPU memory: it was not allocated by this allocator");
    }
}

/// Allocates `size` bytes of GPU memory that other processes can open. Returns null on failure.
#[unsafe(no_mangle)]
pub extern "C" fn mc_nvlink_malloc(size: isize, device: c_int, _stream: *mut c_void) -> *mut c_void {
    allocate(size, device)
}

/// Frees GPU memory when the current work of the stream is done.
#[unsafe(no_mangle)]
pub extern "C" fn mc_nvlink_free(ptr: *mut c_void, _size: isize, _device: c_int, stream: *mut c_void) {
    free(ptr, stream);
}

/// Alias of [`mc_nvlink_malloc`]. Mooncake C++ has this name as well.
#[unsafe(no_mangle)]
pub extern "C" fn mc_allocator_malloc(size: isize, device: c_int, _stream: *mut c_void) -> *mut c_void {
    allocate(size, device)
}

/// Alias of [`mc_nvlink_free`]. Mooncake C++ has this name as well.
#[unsafe(no_mangle)]
pub extern "C" fn mc_allocator_free(ptr: *mut c_void, _size: isize, _device: c_int, stream: *mut c_void) {
    free(ptr, stream);
}

/// Returns how memory is allocated: 0 with `cuMemAlloc`, 1 with `cuMemCreate` for the fabric.
/// Returns -1 if there is no such device, -2 if there is no driver.
#[unsafe(no_mangle)]
pub extern "C" fn mc_allocator_probe(device: c_int) -> c_int {
    u32::try_from(device).map_or(allocator::Backend::Unknown, allocator::probe) as c_int
}
