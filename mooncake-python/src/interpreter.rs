//! Release of the interpreter while a call blocks, and the end of the interpreter meanwhile.
//!
//! A daemon thread may still be in a call when the interpreter ends. Up to version 3.13, CPython
//! ends such a thread with `pthread_exit` as soon as the thread attaches again. That unwinds the
//! stack, and frames of Rust cannot be unwound that way: the process would crash, and the exit code
//! of the program would be lost. From version 3.14 on, CPython suspends the thread instead. This
//! module does the same for the older versions, with a cleanup handler that never returns.
//! `pthread_exit` calls that handler before it unwinds the first frame, so there is no time between
//! a check and the attachment.

use std::cell::{Cell, RefCell, UnsafeCell};
use std::ffi::{CStr, c_int, c_void};
use std::mem::transmute;
use std::sync::OnceLock;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::ffi;
use pyo3::prelude::*;

/// Runs `work` without holding the interpreter. Every call that blocks goes through this function.
///
/// Python objects that `work` drops are freed after it. If the interpreter ends meanwhile, the
/// thread never returns.
pub(crate) fn detached<R: Send>(py: Python<'_>, work: impl FnOnce() -> R + Send) -> R {
    suspend_at_exit();
    #[expect(clippy::disallowed_methods, reason = "the only release of the interpreter")]
    let output = py.detach(|| {
        let outer = IS_DETACHED.replace(true);
        let output = work();
        IS_DETACHED.set(outer);
        output
    });
    let dropped = DROPPED.try_with(|dropped| std::mem::take(&mut *dropped.borrow_mut()));
    drop(dropped);
    output
}

/// Python objects and their exported buffers, which only an attached thread frees.
#[derive(Default)]
pub(crate) struct PythonObjects {
    pub(crate) buffers: Vec<PyUntypedBuffer>,
    pub(crate) objects: Vec<Py<PyAny>>,
}

thread_local! {
    static IS_DETACHED: Cell<bool> = const { Cell::new(false) };
    /// Objects that [`detached`] frees when it is attached again.
    static DROPPED: RefCell<Vec<PythonObjects>> = const { RefCell::new(Vec::new()) };
    static SUSPENDED_AT_EXIT: Option<Box<CleanupHandler>> = register();
}

/// Leaves objects to the [`detached`] of this thread. Returns the objects if the thread is not in
/// one.
pub(crate) fn free_when_attached(objects: PythonObjects) -> Option<PythonObjects> {
    if !IS_DETACHED.get() {
        return Some(objects);
    }
    let mut objects = Some(objects);
    let _ = DROPPED.try_with(|dropped| dropped.borrow_mut().extend(objects.take()));
    objects
}

/// Lets the interpreter suspend this thread, instead of ending it, when the interpreter ends.
pub(crate) fn suspend_at_exit() {
    // A thread whose local variables are already destroyed runs no more Python code.
    let _ = SUSPENDED_AT_EXIT.try_with(|_| ());
}

/// Element of the C library's list of cleanup handlers. The larger ones have four fields.
#[repr(C)]
struct CleanupHandler(UnsafeCell<[usize; 8]>);

type Push = unsafe extern "C" fn(*mut CleanupHandler, extern "C" fn(*mut c_void), *mut c_void);

/// Registers [`suspend`] with this thread. The handler must not lie on the stack, where it would be
/// called only when the frames below are unwound.
#[allow(unsafe_code)]
fn register() -> Option<Box<CleanupHandler>> {
    static PUSH: OnceLock<Option<Push>> = OnceLock::new();
    let push = (*PUSH.get_or_init(|| {
        // SAFETY: glibc and musl define this function for macros of their headers, with these
        // arguments.
        symbol(c"_pthread_cleanup_push").map(|found| unsafe { transmute::<*mut c_void, Push>(found) })
    }))?;
    let handler = Box::new(CleanupHandler(UnsafeCell::default()));
    // SAFETY: the handler is freed with the local variables of the thread. Neither the return of
    // the thread's first function nor the C library uses handlers after that.
    unsafe { push(std::ptr::from_ref(&*handler).cast_mut(), suspend, std::ptr::null_mut()) };
    Some(handler)
}

/// Never returns if the interpreter ends. Otherwise, a library ends a thread of its own.
#[allow(unsafe_code)]
extern "C" fn suspend(_: *mut c_void) {
    while is_finalizing() {
        // SAFETY: a signal handler may return from the call, nothing else happens.
        unsafe { libc::pause() };
    }
}

/// Returns whether the interpreter ends or has ended.
#[allow(unsafe_code)]
fn is_finalizing() -> bool {
    type IsFinalizing = unsafe extern "C" fn() -> c_int;
    static IS_FINALIZING: OnceLock<Option<IsFinalizing>> = OnceLock::new();
    let known = IS_FINALIZING.get_or_init(|| {
        // Version 3.13 made the function public.
        let found = symbol(c"Py_IsFinalizing").or_else(|| symbol(c"_Py_IsFinalizing"))?;
        // SAFETY: both functions take nothing and return a number.
        Some(unsafe { transmute::<*mut c_void, IsFinalizing>(found) })
    });
    // SAFETY: the functions read a number, at any time.
    unsafe { ffi::Py_IsInitialized() == 0 || known.is_some_and(|is_finalizing| is_finalizing() != 0) }
}

/// Returns the address of a function of the C library or the interpreter.
#[allow(unsafe_code)]
fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name is a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}
