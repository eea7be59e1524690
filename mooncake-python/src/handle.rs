//! Store memory that Python programs can view: values that were read without a copy, and leases of
//! a buffer pool.

use std::ffi::{c_int, c_void};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::args::bytes_with;
use crate::lease::Lease;

/// Value in the store's memory. The memory is freed when the last view of it is gone.
#[pyclass(frozen, weakref, module = "mooncake.store", name = "BufferHandle")]
pub(crate) struct BufferHandle {
    lease: Lease,
}

impl BufferHandle {
    pub(crate) fn new(lease: Lease) -> Self {
        Self { lease }
    }

    /// Returns a copy of the value.
    pub(crate) fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        bytes_with(py, self.lease.len(), |to| self.lease.copy_to(to))
    }
}

/// Buffer format of signed characters, as in Mooncake C++.
const SIGNED: &std::ffi::CStr = c"b";

#[pymethods]
impl BufferHandle {
    /// Returns the address of the first byte.
    fn ptr(&self) -> u64 {
        self.lease.address()
    }

    /// Returns the length in bytes.
    fn size(&self) -> usize {
        self.lease.len()
    }

    fn __len__(&self) -> usize {
        self.lease.len()
    }

    fn __repr__(&self) -> String {
        format!("<BufferHandle ptr={:#x} size={}>", self.lease.address(), self.lease.len())
    }

    #[allow(unsafe_code)]
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let (address, len) = (slf.get().lease.address(), slf.get().lease.len());
        // SAFETY: the interpreter owns the view. The memory lives as long as this object, which the
        // view keeps alive.
        unsafe { fill(view, flags, slf.into_any(), address, len, Some(SIGNED)) }
    }
}

/// Fills a view of writable memory.
///
/// # Safety The interpreter must have passed `view` to be filled, and the bytes must stay valid
/// while `owner` lives.
#[allow(unsafe_code)]
pub(crate) unsafe fn fill(
    view: *mut ffi::Py_buffer,
    flags: c_int,
    owner: Bound<'_, PyAny>,
    address: u64,
    len: usize,
    format: Option<&'static std::ffi::CStr>,
) -> PyResult<()> {
    if view.is_null() {
        return Err(PyBufferError::new_err("cannot fill buffer: the view is null"));
    }
    let (Ok(address), Ok(len)) = (usize::try_from(address), isize::try_from(len)) else {
        return Err(PyBufferError::new_err("cannot fill buffer: the memory is outside the address space"));
    };
    let start = std::ptr::with_exposed_provenance_mut::<c_void>(address);
    // SAFETY: as promised by the caller. The call stores a reference to the owner in the view.
    let rc = unsafe { ffi::PyBuffer_FillInfo(view, owner.as_ptr(), start, len, 0, flags) };
    if rc != 0 {
        return Err(PyErr::fetch(owner.py()));
    }
    if let Some(format) = format.filter(|_| flags & ffi::PyBUF_FORMAT == ffi::PyBUF_FORMAT) {
        // SAFETY: the view was just filled, and the format is never written through.
        unsafe { (*view).format = format.as_ptr().cast_mut() };
    }
    Ok(())
}
