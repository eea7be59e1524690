//! Host memory for other parts of a program: an allocator, its C functions, and NUMA binding.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::LazyLock;

use mooncake_core::memory::{HostMemory, HostMemoryOptions, HugePages, MemorySource, check_free_memory};
use mooncake_store::config::ClientEnvironment;
use parking_lot::Mutex;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::args::Uint;
use crate::interpreter::detached;

/// Allocated memory by address.
static HANDED_OUT: Mutex<Option<HashMap<u64, HostMemory>>> = Mutex::new(None);

/// True if the environment admits memory that the host does not have.
static ALLOW_OVERCOMMIT: LazyLock<bool> = LazyLock::new(|| ClientEnvironment::read().config.allow_overcommit);

/// Returns whether the environment admits memory that the host does not have.
pub(crate) fn allow_overcommit() -> bool {
    *ALLOW_OVERCOMMIT
}

/// Huge pages that the environment selects.
static HUGE_PAGES: LazyLock<HugePages> = LazyLock::new(|| ClientEnvironment::read().config.memory.huge_pages);

/// Returns the huge pages that the environment selects.
pub(crate) fn huge_pages() -> HugePages {
    *HUGE_PAGES
}

fn options(shared: bool) -> HostMemoryOptions {
    let shared = shared.then(|| "mooncake_shm".to_owned());
    HostMemoryOptions { huge_pages: huge_pages(), shared, ..Default::default() }
}

fn allocate(len: usize, shared: bool) -> mooncake_core::Result<u64> {
    if !allow_overcommit() && huge_pages() == HugePages::Off {
        check_free_memory(len)?;
    }
    let memory = HostMemory::with(len, &options(shared))?;
    let address = memory.span().ptr.as_ptr().expose_provenance() as u64;
    HANDED_OUT.lock().get_or_insert_default().insert(address, memory);
    Ok(address)
}

/// Checks that the host and the control groups of the process have this much memory.
#[pyfunction]
pub(crate) fn check_memory(py: Python<'_>, size: Uint) -> PyResult<()> {
    if allow_overcommit() {
        return Ok(());
    }
    detached(py, || check_free_memory(size.len())).map_err(|error| PyRuntimeError::new_err(error.to_string()))
}

fn free(address: u64) -> bool {
    let taken = HANDED_OUT.lock().as_mut().and_then(|all| all.remove(&address));
    taken.is_some()
}

/// Allocator of host memory that can be shared with other processes. `MC_STORE_USE_HUGEPAGE=1`
/// selects huge pages.
#[pyclass(frozen, weakref, module = "mooncake.store", name = "MooncakeHostMemAllocator")]
pub(crate) struct HostMemAllocator;

#[pymethods]
impl HostMemAllocator {
    #[new]
    fn new() -> Self {
        Self
    }

    /// Allocates memory and returns its address. Raises `RuntimeError` on failure.
    fn alloc(&self, py: Python<'_>, size: Uint) -> PyResult<u64> {
        if size.0 == 0 {
            return Err(PyRuntimeError::new_err("Failed to map shared memory: Invalid argument"));
        }
        let allocated = detached(py, || allocate(size.len(), true));
        allocated.map_err(|error| PyRuntimeError::new_err(format!("Failed to map shared memory: {error}")))
    }

    /// Frees memory of `alloc`. Returns 0, or -1 if it was not allocated here.
    fn free(&self, py: Python<'_>, ptr: Uint) -> i64 {
        if detached(py, || free(ptr.0)) { 0 } else { -1 }
    }
}

extern "C" fn alloc_hook(len: usize) -> *mut c_void {
    let made = std::panic::catch_unwind(|| allocate(len, false).unwrap_or(0)).unwrap_or(0);
    std::ptr::with_exposed_provenance_mut(made as usize)
}

extern "C" fn free_hook(memory: *mut c_void) {
    let _ = std::panic::catch_unwind(|| free(memory.addr() as u64));
}

/// Returns the address of the C function `void *(size_t)`, which allocates memory.
#[pyfunction]
pub(crate) fn get_alloc_func_addr() -> usize {
    alloc_hook as *const c_void as usize
}

/// Returns the address of the C function `void (void *)`, which frees memory of that allocator.
#[pyfunction]
pub(crate) fn get_free_func_addr() -> usize {
    free_hook as *const c_void as usize
}

/// Binds the calling thread to the processors of a NUMA node and prefers the node's memory.
/// Failures are logged as warnings.
#[pyfunction]
#[allow(unsafe_code)]
pub(crate) fn bind_to_numa_node(node: i64) {
    const MPOL_PREFERRED: libc::c_int = 1;
    let listed = std::fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist"));
    let Ok(listed) = listed else {
        tracing::warn!("cannot bind thread: NUMA node does not exist. node={node}");
        return;
    };
    // SAFETY: an all-zero set is an empty one.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for range in listed.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) else { continue };
        for cpu in (first..=last).filter(|cpu| *cpu < libc::CPU_SETSIZE as usize) {
            // SAFETY: the number is inside the set.
            unsafe { libc::CPU_SET(cpu, &mut set) };
        }
    }
    // SAFETY: the set is a local variable, and its length is passed.
    if unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) } != 0 {
        tracing::warn!("cannot run on NUMA node {node}: {}", std::io::Error::last_os_error());
    }
    let mut mask = [0u64; 16];
    if let Some(word) = usize::try_from(node).ok().and_then(|n| mask.get_mut(n / 64)) {
        *word = 1 << (node % 64);
        // SAFETY: the mask outlives the call, and its length is passed.
        let rc =
            unsafe { libc::syscall(libc::SYS_set_mempolicy, MPOL_PREFERRED, mask.as_ptr(), mask.len() * 64) };
        if rc != 0 {
            tracing::warn!("cannot prefer memory of NUMA node {node}: {}", std::io::Error::last_os_error());
        }
    }
}
