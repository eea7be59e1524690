//! `BufferPool`: leases of registered scratch memory, for calls that name memory by address.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use mooncake_core::clock::{Clock, Moment, SystemClock};
use parking_lot::{Condvar, Mutex};
use pyo3::exceptions::{PyBufferError, PyRuntimeError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

use crate::args::{Uint, truth};
use crate::handle::fill;
use crate::interpreter::detached;
use crate::lease::Lease;
use crate::runtime::not_forked;
use crate::signals;
use crate::store::{Session, Store};

fn pool_error<T>(text: &str) -> PyResult<T> {
    Err(PyRuntimeError::new_err(text.to_owned()))
}

/// State that all leases of a pool share.
struct Shared {
    session: Arc<Session>,
    max_bytes: u64,
    max_regions: Option<u64>,
    state: Mutex<Usage>,
    returned: Condvar,
    clock: SystemClock,
}

#[derive(Default)]
struct Usage {
    bytes: u64,
    regions: u64,
    closed: bool,
    /// Tickets of the callers that wait, in order. Space goes to the first one, so that many small
    /// leases do not keep a large one waiting.
    waiting: VecDeque<u64>,
    next_ticket: u64,
    /// Time at which the first one became the first.
    first_since: Moment,
}

/// Time for which the first caller goes before the others. After that, those that fit overtake it:
/// one of them may have the leases that the first one waits for.
const PRIORITY: Duration = Duration::from_secs(2);

impl Usage {
    /// Returns whether a caller that waits, or one that would begin to wait, may take space.
    fn may_take(&self, ticket: Option<u64>, now: Moment) -> bool {
        self.waiting.front().is_none_or(|first| Some(*first) == ticket)
            || now.since(self.first_since) >= PRIORITY
    }
}

/// Place of a caller that waits for space.
struct Turn<'a> {
    pool: &'a Shared,
    ticket: u64,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.pool.state.lock();
        if state.waiting.front() == Some(&self.ticket) {
            state.first_since = self.pool.clock.now();
        }
        state.waiting.retain(|ticket| *ticket != self.ticket);
        drop(state);
        self.pool.returned.notify_all();
    }
}

impl Shared {
    fn has_space(&self, state: &Usage, len: u64) -> bool {
        state.bytes.saturating_add(len) <= self.max_bytes
            && self.max_regions.is_none_or(|max| state.regions < max)
    }

    /// Reserves `len` bytes. Waits for space for as long as `limit` allows, or until a signal
    /// handler raises. Space goes to those that have waited longest; a caller that does not wait
    /// takes what is there.
    fn reserve_or_wait(&self, py: Python<'_>, len: u64, limit: Option<Option<Duration>>) -> PyResult<()> {
        let Some(mut left) = limit else {
            let fits = self.reserve(len, Duration::ZERO, |_, _| true)?;
            return if fits { Ok(()) } else { pool_error("buffer pool is exhausted") };
        };
        if self.reserve(len, Duration::ZERO, |state, now| state.may_take(None, now))? {
            return Ok(());
        }
        let turn = self.wait_in_turn();
        loop {
            let part = left.unwrap_or(signals::CHECK_INTERVAL).min(signals::CHECK_INTERVAL);
            let may_take = |state: &Usage, now| state.may_take(Some(turn.ticket), now);
            if detached(py, || self.reserve(len, part, may_take))? {
                return Ok(());
            }
            left = left.map(|left| left.saturating_sub(part));
            if left.is_some_and(|left| left.is_zero()) {
                return pool_error("timed out waiting for buffer");
            }
            py.check_signals()?;
        }
    }

    fn wait_in_turn(&self) -> Turn<'_> {
        let mut state = self.state.lock();
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        if state.waiting.is_empty() {
            state.first_since = self.clock.now();
        }
        state.waiting.push_back(ticket);
        Turn { pool: self, ticket }
    }

    /// Reserves `len` bytes if `may_take` allows it. Returns whether there was enough space within
    /// the time limit.
    fn reserve(
        &self,
        len: u64,
        limit: Duration,
        may_take: impl Fn(&Usage, Moment) -> bool,
    ) -> PyResult<bool> {
        let mut state = self.state.lock();
        let fits = |state: &Usage| may_take(state, self.clock.now()) && self.has_space(state, len);
        if !limit.is_zero() {
            self.returned.wait_while_for(&mut state, |state| !state.closed && !fits(state), limit);
        }
        if state.closed {
            return pool_error("buffer pool is closed");
        }
        let fits = fits(&state);
        if fits {
            state.bytes += len;
            state.regions += 1;
        }
        Ok(fits)
    }

    fn release_bytes(&self, len: u64) {
        let mut state = self.state.lock();
        state.bytes -= len;
        state.regions -= 1;
        drop(state);
        self.returned.notify_all();
    }
}

/// Leased memory of a pool. It returns to the pool with the lease and the last view of it.
struct LeasedMemory {
    lease: Option<Lease>,
    len: u64,
    pool: Arc<Shared>,
    views: AtomicUsize,
}

impl Drop for LeasedMemory {
    fn drop(&mut self) {
        // The memory is freed before waiting threads are notified.
        drop(self.lease.take());
        self.pool.release_bytes(self.len);
    }
}

/// Pool of registered memory: the store's local buffer first, then newly allocated memory.
#[pyclass(frozen, weakref, module = "mooncake.store", name = "BufferPool")]
pub(crate) struct BufferPool {
    shared: Arc<Shared>,
    block: bool,
    timeout: Option<f64>,
}

fn session_of(store: &Bound<'_, PyAny>) -> PyResult<Arc<Session>> {
    if store.is_none() {
        return pool_error("MooncakeDistributedStore is not initialized");
    }
    let native = match store.cast::<Store>() {
        Ok(native) => native.clone(),
        Err(_) => {
            const WRONG: &str = "BufferPool store parameter must be a PyClient or store wrapper that implements _get_pyclient_capsule()";
            let Ok(capsule) = store.call_method0("_get_pyclient_capsule") else { return pool_error(WRONG) };
            if capsule.is_none() {
                return pool_error("MooncakeDistributedStore is not initialized");
            }
            match capsule.cast_into::<Store>() {
                Ok(native) => native,
                Err(_) => return pool_error(WRONG),
            }
        }
    };
    let session = native.get().session()?;
    session.ok_or_else(|| PyRuntimeError::new_err("MooncakeDistributedStore is not initialized"))
}

fn timeout_of(timeout: Option<f64>) -> PyResult<Option<Duration>> {
    match timeout {
        None => Ok(None),
        Some(seconds) if seconds < 0.0 || seconds.is_nan() => pool_error("timeout must be non-negative"),
        // A timeout that does not fit counts as unlimited.
        Some(seconds) => Ok(Duration::try_from_secs_f64(seconds).ok().filter(|d| d.as_secs() < 1 << 32)),
    }
}

#[pymethods]
impl BufferPool {
    #[new]
    #[pyo3(signature = (store, max_bytes=Uint(0), min_size_class=Uint(65536), max_size_class=None, alignment=Uint(8388608),
        block_on_exhaustion=true, default_timeout=None, max_regions=None, prewarm_size=None, prewarm_count=Uint(0)))]
    #[allow(clippy::too_many_arguments, reason = "interface of Mooncake C++")]
    fn new(
        py: Python<'_>,
        store: &Bound<'_, PyAny>,
        max_bytes: Uint,
        min_size_class: Uint,
        max_size_class: Option<Uint>,
        alignment: Uint,
        #[pyo3(from_py_with = truth)] block_on_exhaustion: bool,
        default_timeout: Option<f64>,
        max_regions: Option<Uint>,
        prewarm_size: Option<Uint>,
        prewarm_count: Uint,
    ) -> PyResult<Self> {
        // Sizes are accounted exactly, and memory costs nothing before it is used.
        let _ = (max_size_class, prewarm_size, prewarm_count);
        let session = session_of(store)?;
        if min_size_class.0 == 0 || alignment.0 == 0 {
            return pool_error("min_size_class and alignment must be positive");
        }
        if !alignment.0.is_power_of_two() || alignment.len() < size_of::<usize>() {
            return pool_error("alignment must be a power of two and at least sizeof(void*)");
        }
        timeout_of(default_timeout)?;
        let local = detached(py, || session.arena().map(|arena| arena.capacity()));
        let local = local.map_err(|error| crate::error::exception(py, &error))?;
        if local == 0 {
            return pool_error("BufferPool requires a store configured with a local buffer");
        }
        let max_bytes = if max_bytes.0 == 0 { local.saturating_mul(2) } else { max_bytes.0.max(local) };
        let shared = Shared {
            session,
            max_bytes,
            max_regions: max_regions.map(|max| max.0),
            state: Mutex::default(),
            returned: Condvar::new(),
            clock: SystemClock::new(),
        };
        Ok(Self { shared: Arc::new(shared), block: block_on_exhaustion, timeout: default_timeout })
    }

    /// Leases memory. If the pool is exhausted, this waits for at most `timeout` seconds. Without
    /// `block` it raises `RuntimeError` at once. For two seconds, those that wait are served in
    /// order; then those that fit first.
    #[pyo3(signature = (size, block=None, timeout=None))]
    fn acquire(
        &self,
        py: Python<'_>,
        size: Uint,
        block: Option<Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<BufferLease> {
        not_forked()?;
        let limit = timeout_of(timeout.or(self.timeout))?;
        let shared = &self.shared;
        let len = size.0.max(1);
        if len > shared.max_bytes {
            return pool_error("requested buffer size exceeds pool capacity");
        }
        let block = block.as_ref().map_or(Ok(self.block), truth)?;
        let limit = block.then_some(limit);
        shared.reserve_or_wait(py, len, limit)?;
        let taken = detached(py, || {
            let arena = shared.session.arena()?;
            arena.take(&shared.session.client, Uint(len).len())
        });
        match taken {
            Ok(lease) => {
                let memory = LeasedMemory {
                    lease: Some(lease),
                    len,
                    pool: shared.clone(),
                    views: AtomicUsize::new(0),
                };
                Ok(BufferLease { size: Uint(size.0).len(), memory: Mutex::new(Some(Arc::new(memory))) })
            }
            Err(error) => {
                shared.release_bytes(len);
                pool_error(&format!("overflow buffer registration failed: {error}"))
            }
        }
    }

    /// Leases memory like `acquire`, for use in a `with` statement.
    #[pyo3(signature = (size, block=None, timeout=None))]
    fn buffer(
        &self,
        py: Python<'_>,
        size: Uint,
        block: Option<Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<BufferLease> {
        self.acquire(py, size, block, timeout)
    }

    /// Does nothing: this pool needs no warm-up.
    fn prewarm(&self, size: Uint, count: Uint) {
        let _ = (size, count);
    }

    /// Closes the pool. Raises `RuntimeError` while a lease is active. Can be called again.
    fn close(&self) -> PyResult<()> {
        let mut state = self.shared.state.lock();
        if state.regions > 0 {
            return pool_error("cannot close buffer pool with active leases");
        }
        state.closed = true;
        drop(state);
        self.shared.returned.notify_all();
        Ok(())
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (exc_type=None, exc_value=None, traceback=None))]
    fn __exit__(
        &self,
        exc_type: Option<&Bound<'_, PyAny>>,
        exc_value: Option<&Bound<'_, PyAny>>,
        traceback: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let _ = (exc_type, exc_value, traceback);
        self.close()
    }
}

/// Leased memory of a `BufferPool`.
#[pyclass(frozen, weakref, module = "mooncake.store", name = "BufferLease")]
pub(crate) struct BufferLease {
    size: usize,
    memory: Mutex<Option<Arc<LeasedMemory>>>,
}

impl BufferLease {
    fn memory(&self) -> Option<Arc<LeasedMemory>> {
        self.memory.lock().clone()
    }
}

#[pymethods]
impl BufferLease {
    /// Address, for calls that name memory by address. Raises `RuntimeError` after release.
    #[getter]
    fn ptr(&self) -> PyResult<u64> {
        let memory = self.memory().ok_or_else(|| PyRuntimeError::new_err("buffer lease is closed"))?;
        Ok(memory.lease.as_ref().map_or(0, Lease::address))
    }

    /// Requested length in bytes.
    #[getter]
    fn size(&self) -> usize {
        self.size
    }

    /// New writable view of the memory. Raises `BufferError` after release.
    #[getter]
    fn buffer<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        let memory = self.memory().ok_or_else(|| PyBufferError::new_err("buffer lease is closed"))?;
        let view = Py::new(py, BufferLeaseView { memory, size: self.size })?;
        PyMemoryView::from(view.bind(py).as_any())
    }

    /// Returns the memory to the pool. Raises `RuntimeError` while a view of it exists. Can be
    /// called again.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let mut memory = self.memory.lock();
        if memory.as_ref().is_some_and(|memory| memory.views.load(Ordering::Acquire) > 0) {
            return pool_error("cannot release buffer while exported views exist");
        }
        let taken = memory.take();
        drop(memory);
        detached(py, || drop(taken));
        Ok(())
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (exc_type=None, exc_value=None, traceback=None))]
    fn __exit__(
        &self,
        py: Python<'_>,
        exc_type: Option<&Bound<'_, PyAny>>,
        exc_value: Option<&Bound<'_, PyAny>>,
        traceback: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let _ = (exc_type, exc_value, traceback);
        self.release(py)
    }

    fn __len__(&self) -> usize {
        self.size
    }
}

/// Owner of a lease's memory on behalf of a view.
#[pyclass(frozen, weakref, module = "mooncake.store", name = "BufferLeaseView")]
pub(crate) struct BufferLeaseView {
    memory: Arc<LeasedMemory>,
    size: usize,
}

#[pymethods]
impl BufferLeaseView {
    #[new]
    fn new() -> PyResult<Self> {
        Err(PyTypeError::new_err("views come from a lease's `buffer`"))
    }

    #[allow(unsafe_code)]
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let address = this.memory.lease.as_ref().map_or(0, Lease::address);
        // SAFETY: the interpreter owns the view. The memory lives as long as this object, which the
        // view keeps alive.
        unsafe { fill(view, flags, slf.clone().into_any(), address, this.size, None)? };
        this.memory.views.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    #[allow(unsafe_code)]
    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        let _ = view;
        self.memory.views.fetch_sub(1, Ordering::AcqRel);
    }
}
