//! Conversion of Python arguments.

use mooncake_core::memory::MemorySpan;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyMemoryView};
use std::ptr::NonNull;

use crate::delivery::{deliver, is_worker};
use crate::interpreter::{PythonObjects, detached, free_when_attached, suspend_at_exit};

/// Address, length or count. An integer that does not fit is a `TypeError`, like any other wrong
/// argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Uint(pub(crate) u64);

impl<'a, 'py> FromPyObject<'a, 'py> for Uint {
    type Error = PyErr;

    fn extract(obj: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        suspend_at_exit();
        obj.extract::<u64>().map(Self).map_err(|error| {
            if error.is_instance_of::<PyOverflowError>(obj.py()) {
                let text = "incompatible function arguments: an integer from 0 to 2**64-1 is needed";
                return PyTypeError::new_err(text);
            }
            error
        })
    }
}

impl Uint {
    /// Returns the number as a length in this process, or the largest one if it does not fit.
    pub(crate) fn len(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

/// A `str` or its UTF-8 bytes. Mooncake C++ accepts either wherever it takes a string.
struct Text(String);

impl<'a, 'py> FromPyObject<'a, 'py> for Text {
    type Error = PyErr;

    fn extract(obj: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        suspend_at_exit();
        let bytes = match (obj.cast::<PyBytes>(), obj.cast::<PyByteArray>()) {
            (Ok(bytes), _) => bytes.as_bytes().to_vec(),
            (_, Ok(bytes)) => bytes.to_vec(),
            _ => return obj.extract().map(Self),
        };
        match String::from_utf8(bytes) {
            Ok(text) => Ok(Self(text)),
            Err(error) => Err(PyValueError::new_err(format!("invalid UTF-8 in bytes: {error}"))),
        }
    }
}

/// Converts an argument that is a string.
pub(crate) fn text(obj: &Bound<'_, PyAny>) -> PyResult<String> {
    obj.extract().map(|Text(text)| text)
}

/// Converts an argument that is a list of strings.
pub(crate) fn texts(obj: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    let texts: Vec<Text> = obj.extract()?;
    Ok(texts.into_iter().map(|Text(text)| text).collect())
}

/// Converts an argument that is a list of lists of strings.
pub(crate) fn texts_of_each(obj: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<String>>> {
    let each: Vec<Bound<'_, PyAny>> = obj.extract()?;
    each.iter().map(texts).collect()
}

/// Converts an argument that is a truth value. As in Mooncake C++, `None` and objects with
/// `__bool__` (such as numbers) are accepted, strings and lists are not.
pub(crate) fn truth(obj: &Bound<'_, PyAny>) -> PyResult<bool> {
    suspend_at_exit();
    match obj.extract() {
        Err(_) if obj.is_none() || obj.hasattr("__bool__")? => obj.is_truthy(),
        plain => plain,
    }
}

/// Python objects that stay alive and unchanged while their bytes are in use.
#[derive(Default)]
pub(crate) struct Keep(PythonObjects);

impl Keep {
    pub(crate) fn object(&mut self, object: Py<PyAny>) {
        self.0.objects.push(object);
    }
}

impl Drop for Keep {
    fn drop(&mut self) {
        let objects = std::mem::take(&mut self.0);
        if objects.buffers.is_empty() && objects.objects.is_empty() {
            return;
        }
        let Some(objects) = free_when_attached(objects) else { return };
        if is_worker() {
            // Without an interpreter the objects cannot be freed.
            let _ = deliver(Box::new(move |_| drop(objects)));
            return;
        }
        // This is the caller's thread, which is attached or can attach.
        let mut held = Some(objects);
        Python::try_attach(|_| drop(held.take()));
        std::mem::forget(held);
    }
}

/// Returns the bytes of an object with the buffer protocol, in C order. Bytes that are not
/// contiguous are copied.
pub(crate) fn bytes_of(object: &Bound<'_, PyAny>, keep: &mut Keep) -> PyResult<Option<MemorySpan>> {
    let buffer = buffer_of(object)?;
    let buffer = if buffer.is_c_contiguous() {
        buffer
    } else {
        let copy = PyMemoryView::from(object)?.call_method0("tobytes")?;
        PyUntypedBuffer::get(&copy)?
    };
    Ok(keep_span(buffer, keep))
}

/// Returns the bytes of an object with the buffer protocol, to write to them.
///
/// # Errors
/// Raises `TypeError` for memory that is read-only or not contiguous in C order.
pub(crate) fn writable_bytes_of(object: &Bound<'_, PyAny>, keep: &mut Keep) -> PyResult<Option<MemorySpan>> {
    let buffer = buffer_of(object)?;
    if buffer.readonly() || !buffer.is_c_contiguous() {
        let reason = if buffer.readonly() { "read-only" } else { "not contiguous in C order" };
        return Err(PyTypeError::new_err(format!("cannot write to buffer: its memory is {reason}")));
    }
    Ok(keep_span(buffer, keep))
}

fn keep_span(buffer: PyUntypedBuffer, keep: &mut Keep) -> Option<MemorySpan> {
    let span = NonNull::new(buffer.buf_ptr().cast::<u8>())
        .filter(|_| buffer.len_bytes() > 0)
        .map(|ptr| MemorySpan::new(ptr, buffer.len_bytes()));
    keep.0.buffers.push(buffer);
    span
}

/// Returns an object's buffer. ctypes arrays report no strides and ctypes numbers no shape. A
/// `memoryview` of them does, and a number is copied.
fn buffer_of(object: &Bound<'_, PyAny>) -> PyResult<PyUntypedBuffer> {
    suspend_at_exit();
    let of_objects =
        || PyTypeError::new_err("cannot store an array of Python objects: it holds only their addresses");
    let buffer = match PyUntypedBuffer::get(object) {
        Err(error) if error.is_instance_of::<PyBufferError>(object.py()) => {
            let view = PyMemoryView::from(object)?;
            if holds_objects(view.getattr("format")?.extract::<String>()?.as_bytes()) {
                return Err(of_objects());
            }
            PyUntypedBuffer::get(&view).or_else(|_| PyUntypedBuffer::get(&view.call_method0("tobytes")?))?
        }
        buffer => buffer?,
    };
    if holds_objects(buffer.format().to_bytes()) {
        return Err(of_objects());
    }
    Ok(buffer)
}

/// Returns whether items of that format contain Python objects. Names of fields lie between colons.
fn holds_objects(format: &[u8]) -> bool {
    format.split(|&c| c == b':').step_by(2).any(|types| types.contains(&b'O'))
}

/// Returns [`bytes_of`] one part of a value, which must be a one-dimensional buffer of single
/// bytes.
pub(crate) fn part_of(object: &Bound<'_, PyAny>, keep: &mut Keep) -> PyResult<Option<MemorySpan>> {
    let buffer = buffer_of(object)?;
    if buffer.dimensions() != 1 || buffer.item_size() != 1 {
        return Err(pyo3::exceptions::PyRuntimeError::new_err("parts must be 1-D bytes-like"));
    }
    drop(buffer);
    bytes_of(object, keep)
}

/// Smallest copy in bytes that releases the interpreter.
const LONG: usize = 8 << 10;

/// Runs `copy`, which copies `len` bytes. A long copy runs without the interpreter.
pub(crate) fn copying<R: Send>(py: Python<'_>, len: usize, copy: impl FnOnce() -> R + Send) -> R {
    if len < LONG { copy() } else { detached(py, copy) }
}

/// Returns a new `bytes` object of that length, whose bytes `fill` writes.
#[allow(unsafe_code)]
pub(crate) fn bytes_with<'py>(
    py: Python<'py>,
    len: usize,
    fill: impl FnOnce(&mut [u8]) -> mooncake_core::Result<()> + Send,
) -> PyResult<Bound<'py, PyBytes>> {
    let (object, span) = new_bytes(py, len)?;
    let filled = copying(py, len, || {
        let Some(span) = span else { return fill(&mut []) };
        // SAFETY: the object is new, that long, and has no other user. Zeroes make its bytes
        // readable before `fill` gets them.
        let bytes = unsafe {
            span.ptr.write_bytes(0, span.len);
            std::slice::from_raw_parts_mut(span.ptr.as_ptr(), span.len)
        };
        fill(bytes)
    });
    filled.map_err(|error| crate::error::exception(py, &error))?;
    Ok(object)
}

/// Returns a new `bytes` object of that length and the location of its bytes. They must be written
/// before the object has another user.
#[allow(unsafe_code)]
pub(crate) fn new_bytes<'py>(
    py: Python<'py>,
    len: usize,
) -> PyResult<(Bound<'py, PyBytes>, Option<MemorySpan>)> {
    let len = isize::try_from(len)
        .map_err(|_| PyOverflowError::new_err("value is longer than the address space"))?;
    // SAFETY: without bytes to copy, the interpreter creates an object of that length or raises.
    let object = unsafe {
        let raw = pyo3::ffi::PyBytes_FromStringAndSize(std::ptr::null(), len);
        Bound::from_owned_ptr_or_err(py, raw)?.cast_into_unchecked::<PyBytes>()
    };
    // SAFETY: the object is a `bytes`.
    let start = unsafe { pyo3::ffi::PyBytes_AsString(object.as_ptr()) };
    let span =
        NonNull::new(start.cast::<u8>()).filter(|_| len > 0).map(|p| MemorySpan::new(p, len.unsigned_abs()));
    Ok((object, span))
}
