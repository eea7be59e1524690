//! Functions that PyTorch's pluggable allocator finds in this very library, by the names and shapes of the existing system's `nvlink_allocator.so`.

use std::ffi::{c_int, c_void};
use std::ptr::{null_mut, with_exposed_provenance_mut};

use mooncake_nvlink::allocator;

fn allocate(size: isize, device: c_int) -> *mut c_void {
    let (Ok(len), Ok(device)) = (usize::try_from(size), u32::try_from(device)) else { return null_mut() };
    match allocator::allocate(len, device) {
        Ok(at) => with_exposed_provenance_mut(at as usize),
        Err(error) => {
            tracing::error!(%error, len, device, "no memory of a GPU");
            null_mut()
        }
    }
}

fn free(ptr: *mut c_void, stream: *mut c_void) {
    // SAFETY: PyTorch gives the stream the memory was used on.
    let known =
        ptr.is_null() || unsafe { allocator::free(ptr.expose_provenance() as u64, stream.addr() as u64) };
    if !known {
        tracing::error!(?ptr, "memory of a GPU that was not allocated here is not freed");
    }
}

/// Memory that peers can open, of `size` bytes; null when there is none.
#[unsafe(no_mangle)]
pub extern "C" fn mc_nvlink_malloc(size: isize, device: c_int, _stream: *mut c_void) -> *mut c_void {
    allocate(size, device)
}

/// Frees it when the stream's work so far is over.
#[unsafe(no_mangle)]
pub extern "C" fn mc_nvlink_free(ptr: *mut c_void, _size: isize, _device: c_int, stream: *mut c_void) {
    free(ptr, stream);
}

/// The same under the existing system's other name.
#[unsafe(no_mangle)]
pub extern "C" fn mc_allocator_malloc(size: isize, device: c_int, _stream: *mut c_void) -> *mut c_void {
    allocate(size, device)
}

/// The same under the existing system's other name.
#[unsafe(no_mangle)]
pub extern "C" fn mc_allocator_free(ptr: *mut c_void, _size: isize, _device: c_int, stream: *mut c_void) {
    free(ptr, stream);
}

/// What that memory is made of: 0 `cuMemAlloc`, 1 `cuMemCreate` for the fabric, -1 there is no such device, -2 there is no driver.
#[unsafe(no_mangle)]
pub extern "C" fn mc_allocator_probe(device: c_int) -> c_int {
    u32::try_from(device).map_or(allocator::Backend::Unknown, allocator::probe) as c_int
}
