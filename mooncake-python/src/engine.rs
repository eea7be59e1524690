//! The transfer engine under `mooncake.engine.TransferEngine`: registered memory, transfers, batches under way.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mooncake_core::clock::SystemClock;
use mooncake_core::memory::{HostMemory, MemorySource, MemorySpan};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_store::transport_set::TransportOptions;
use mooncake_transport::engine::{Engine, HandshakePort, Request, Target};
use mooncake_transport::handshake::{self, HandshakeConfig, Notification};
use mooncake_transport::net::{DEFAULT_PORT, HostPort};
use mooncake_transport::{Directory, Slice, SliceMut};
use parking_lot::{Mutex, RwLock};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::args::{Keep, Uint, bytes_of, new_bytes};
use crate::error::{Errors, LastError, exception};
use crate::memory::{Gone, Regions, Wire, foreign};
use crate::runtime::{not_forked, runtime, wait};

/// What registering overlapping memory returns.
const OVERLAPS: i64 = -7;
/// What unregistering unknown memory returns.
const NOT_REGISTERED: i64 = -3;
/// How long a peer has for a probe.
const PROBE: Duration = Duration::from_secs(3);
/// What an unanswered probe returns.
const UNREACHABLE: i64 = -102;
/// Finished batches that can still be asked about.
const KEPT: usize = 4096;

/// An engine that a store may share.
#[pyclass(frozen, module = "mooncake.engine", name = "InnerTransferEngine")]
pub(crate) struct InnerTransferEngine {
    engine: Engine<Wire>,
    regions: Arc<Regions>,
    directory: Directory,
    managed: Mutex<HashMap<u64, u64>>,
    batches: Mutex<Batches>,
    next: AtomicU64,
    patience: Duration,
}

impl InnerTransferEngine {
    /// The memory registered with it.
    pub(crate) fn regions(&self) -> Arc<Regions> {
        self.regions.clone()
    }
}

#[pymethods]
impl InnerTransferEngine {
    fn __repr__(&self) -> String {
        format!("<InnerTransferEngine {}>", self.engine.name())
    }
}

#[derive(Default)]
struct Batches {
    open: HashMap<u64, Batch>,
    /// Outcomes of batches that were asked about, the oldest first.
    over: std::collections::VecDeque<(u64, Outcome)>,
}

struct Batch {
    outcome: watch::Receiver<Option<Outcome>>,
    running: AbortHandle,
}

/// How a batch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Done,
    Failed,
    Late,
}

impl Outcome {
    fn code(self) -> i64 {
        match self {
            Outcome::Done => 1,
            Outcome::Failed => -1,
            Outcome::Late => -2,
        }
    }
}

/// Transfers to or from one target.
struct Work {
    target: String,
    write: bool,
    notify: Option<Notification>,
    patience: Duration,
    reads: Vec<(u64, SliceMut<Wire>)>,
    writes: Vec<(u64, Slice<Wire>)>,
}

impl Work {
    async fn run(self, engine: &Engine<Wire>) -> Result<()> {
        let deadline = engine.clock().now().after(self.patience);
        let target: Target<Wire> = engine.open_by(&self.target, deadline).await?;
        let results = if self.write {
            let requests =
                self.writes.into_iter().map(|(at, from)| Request::new(&target, at, from)).collect();
            engine.write_batch(requests, Some(deadline)).await.0
        } else {
            let requests = self.reads.into_iter().map(|(at, into)| Request::new(&target, at, into)).collect();
            engine.read_batch(requests, Some(deadline)).await.0
        };
        if let Some(error) = results.into_iter().find_map(Result::err) {
            // It may be back with other memory or at another port: looked up again next time.
            engine.forget(&self.target);
            return Err(error.context(format!("member {}", self.target)));
        }
        match &self.notify {
            Some(notification) => engine.notify(&self.target, notification).await,
            None => Ok(()),
        }
    }
}

/// Host memory that says when it is gone.
struct Managed {
    memory: HostMemory,
    gone: Arc<Gone>,
}

// SAFETY: the memory inside keeps the promise.
#[allow(unsafe_code)]
unsafe impl MemorySource for Managed {
    fn span(&self) -> MemorySpan {
        self.memory.span()
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        self.gone.set();
    }
}

impl InnerTransferEngine {
    async fn start(host: &str, metadata: &str, protocol: &str, patience: Duration) -> Result<Self> {
        let directory = Directory::connect(metadata, "")?;
        let clock = SystemClock::shared();
        let options = match TransportOptions::named(protocol) {
            Err(error) if error.code() == ErrorCode::NotSupported && protocol != "xgmi" => {
                tracing::warn!("{error}; going on with tcp");
                TransportOptions::named("tcp")?
            }
            options => options?,
        };
        let transport = Arc::new(options.open(&tokio::runtime::Handle::current(), &clock)?);
        let told = HostPort::parse(host, DEFAULT_PORT).host;
        let port = HandshakePort { host: (!told.is_empty()).then_some(told), ..HandshakePort::default() };
        let engine = Engine::builder(transport)
            .name(host)
            .directory(directory.clone())
            .clock(clock)
            .handshake(port)
            .start()
            .await?;
        Ok(Self {
            engine,
            directory,
            regions: Arc::default(),
            managed: Mutex::default(),
            batches: Mutex::default(),
            next: AtomicU64::new(1),
            patience,
        })
    }

    async fn register(&self, address: u64, len: usize) -> Result<()> {
        let (memory, gone) = foreign(address, len)?;
        let region = self.engine.register(memory).await?;
        self.regions.add(region, gone);
        Ok(())
    }

    fn work(
        &self,
        target: String,
        buffers: &[Uint],
        peers: &[Uint],
        lengths: &[Uint],
        write: bool,
        notify: Option<Notification>,
    ) -> Result<Work> {
        if buffers.len() != peers.len() || peers.len() != lengths.len() {
            return Err(Error::invalid("buffers, peer addresses and lengths are not as many"));
        }
        let bytes = lengths.iter().fold(0u64, |sum, len| sum.saturating_add(len.0));
        let patience = self.patience.saturating_add(Duration::from_nanos(bytes));
        let mut work = Work { target, write, notify, patience, reads: Vec::new(), writes: Vec::new() };
        for ((buffer, peer), len) in buffers.iter().zip(peers).zip(lengths).filter(|(_, len)| len.0 > 0) {
            if write {
                work.writes.push((peer.0, self.regions.slice(buffer.0, len.len())?));
            } else {
                work.reads.push((peer.0, self.regions.slice_mut(buffer.0, len.len())?));
            }
        }
        Ok(work)
    }

    fn submit(&self, work: Work) -> Result<u64> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (done, outcome) = watch::channel(None);
        let engine = self.engine.clone();
        let running = runtime()?.spawn(async move {
            let ended = match work.run(&engine).await {
                Ok(()) => Outcome::Done,
                Err(error) => {
                    tracing::debug!("a batch failed: {error}");
                    if error.kind() == mooncake_core::ErrorKind::Timeout {
                        Outcome::Late
                    } else {
                        Outcome::Failed
                    }
                }
            };
            done.send_replace(Some(ended));
        });
        let running = running.abort_handle();
        self.batches.lock().open.insert(id, Batch { outcome, running });
        Ok(id)
    }

    /// How a batch stands; `None` while it runs. One that is over is off the list of open ones from then on.
    fn poll(&self, id: u64) -> Option<Outcome> {
        let mut batches = self.batches.lock();
        let Some(batch) = batches.open.get(&id) else {
            let known = batches.over.iter().find(|(known, _)| *known == id);
            return Some(known.map_or(Outcome::Failed, |(_, outcome)| *outcome));
        };
        let ended = *batch.outcome.borrow();
        let ended = ended.or_else(|| batch.outcome.has_changed().is_err().then_some(Outcome::Failed))?;
        batches.open.remove(&id);
        if batches.over.len() == KEPT {
            batches.over.pop_front();
        }
        batches.over.push_back((id, ended));
        Some(ended)
    }

    async fn finish(&self, id: u64) -> Outcome {
        let waiting = self.batches.lock().open.get(&id).map(|batch| batch.outcome.clone());
        if let Some(mut waiting) = waiting {
            // An error means that the task is gone, and `poll` says so.
            let _ = waiting.wait_for(Option::is_some).await;
        }
        self.poll(id).unwrap_or(Outcome::Failed)
    }
}

impl Drop for InnerTransferEngine {
    fn drop(&mut self) {
        for batch in self.batches.get_mut().open.values() {
            batch.running.abort();
        }
    }
}

/// The engine, with the names that `mooncake.engine` gives its calls.
#[pyclass(subclass, frozen, module = "mooncake._mooncake", name = "Engine")]
#[derive(Default)]
pub(crate) struct EngineCalls {
    inner: RwLock<Option<Py<InnerTransferEngine>>>,
    errors: Errors,
}

impl EngineCalls {
    fn inner(&self, py: Python<'_>) -> PyResult<Option<Py<InnerTransferEngine>>> {
        not_forked()?;
        Ok(self.inner.read().as_ref().map(|inner| inner.clone_ref(py)))
    }

    fn failed(&self, error: &Error) -> i64 {
        self.errors.note(error);
        -1
    }
}

#[pymethods]
impl EngineCalls {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Starts the engine: 0 or -1.
    fn _initialize(
        &self,
        py: Python<'_>,
        local_hostname: String,
        metadata_server: String,
        protocol: String,
        patience_s: f64,
    ) -> PyResult<i64> {
        not_forked()?;
        if self.inner.read().is_some() {
            return Ok(self.failed(&Error::invalid("the engine is initialized already")));
        }
        let patience = Duration::try_from_secs_f64(patience_s).unwrap_or(Duration::from_secs(30));
        match wait(py, InnerTransferEngine::start(&local_hostname, &metadata_server, &protocol, patience)) {
            Ok(inner) => {
                *self.inner.write() = Some(Py::new(py, inner)?);
                Ok(0)
            }
            Err(error) => Ok(self.failed(&error)),
        }
    }

    /// The engine, for a store to share; `None` before it is initialized.
    fn get_engine(&self, py: Python<'_>) -> PyResult<Option<Py<InnerTransferEngine>>> {
        self.inner(py)
    }

    /// The port that peers ask for this engine's memory; 0 before it is initialized.
    fn get_rpc_port(&self, py: Python<'_>) -> PyResult<u16> {
        let inner = self.inner(py)?;
        Ok(inner.and_then(|inner| inner.get().engine.handshake_addr().map(|at| at.port)).unwrap_or(0))
    }

    /// What went wrong last on this engine; `None` when nothing has.
    fn last_error(&self) -> Option<LastError> {
        self.errors.last()
    }

    fn _register(&self, py: Python<'_>, address: Uint, length: Uint) -> PyResult<i64> {
        let Some(inner) = self.inner(py)? else { return Ok(-1) };
        Ok(match wait(py, inner.get().register(address.0, length.len())) {
            Ok(()) => 0,
            Err(error) => {
                let overlaps = error.message().contains("overlap");
                self.errors.note(&error);
                if overlaps { OVERLAPS } else { -1 }
            }
        })
    }

    fn _unregister(&self, py: Python<'_>, address: Uint) -> PyResult<i64> {
        let Some(inner) = self.inner(py)? else { return Ok(-1) };
        Ok(match py.detach(|| inner.get().regions.remove(address.0)) {
            Ok(()) => 0,
            Err(error) => {
                self.errors.note(&error);
                if error.code() == ErrorCode::InvalidParams { NOT_REGISTERED } else { -1 }
            }
        })
    }

    /// New registered memory; 0 when there is none.
    fn allocate_managed_buffer(&self, py: Python<'_>, length: Uint) -> PyResult<u64> {
        let Some(inner) = self.inner(py)? else { return Ok(0) };
        let inner = inner.get();
        let allocated = wait(py, async {
            let gone = Arc::new(Gone::default());
            let memory = Managed { memory: HostMemory::new(length.len())?, gone: gone.clone() };
            let region = inner.engine.register(Arc::new(memory)).await?;
            let address = region.addr();
            inner.regions.add_ours(region, gone);
            inner.managed.lock().insert(address, length.0);
            Ok(address)
        });
        Ok(allocated.unwrap_or_else(|error| {
            self.errors.note(&error);
            0
        }))
    }

    /// Gives managed memory back: 0, -1 for what is none.
    fn free_managed_buffer(&self, py: Python<'_>, buffer_addr: Uint, length: Uint) -> PyResult<i64> {
        let Some(inner) = self.inner(py)? else { return Ok(-1) };
        let inner = inner.get();
        let known = {
            let mut managed = inner.managed.lock();
            let known = managed.get(&buffer_addr.0) == Some(&length.0);
            if known {
                managed.remove(&buffer_addr.0);
            }
            known
        };
        if !known {
            let text = format!("no managed buffer of {} bytes at {:#x}", length.0, buffer_addr.0);
            return Ok(self.failed(&Error::invalid(text)));
        }
        py.detach(|| inner.regions.forget(buffer_addr.0));
        Ok(0)
    }

    /// Address of a segment's first buffer; 0 when it is unknown or has none.
    fn get_first_buffer_address(&self, py: Python<'_>, segment_name: String) -> PyResult<u64> {
        let Some(inner) = self.inner(py)? else { return Ok(0) };
        let inner = inner.get();
        let found = wait(py, async {
            // What it has by now, not what it had when it was opened.
            inner.engine.forget(&segment_name);
            inner.engine.open(&segment_name).await
        });
        Ok(match found {
            Ok(target) => target.descriptor().buffers.first().map_or(0, |buffer| buffer.addr),
            Err(error) => {
                self.errors.note(&error);
                0
            }
        })
    }

    #[allow(clippy::too_many_arguments, reason = "one call for all transfers")]
    #[pyo3(signature = (target, buffers, peers, lengths, write, notify=None))]
    fn _transfer(
        &self,
        py: Python<'_>,
        target: String,
        buffers: Vec<Uint>,
        peers: Vec<Uint>,
        lengths: Vec<Uint>,
        write: bool,
        notify: Option<(String, String)>,
    ) -> PyResult<i64> {
        let Some(inner) = self.inner(py)? else { return Ok(-1) };
        let inner = inner.get();
        let notify = notify.map(|(name, message)| Notification { name, message });
        let outcome = inner
            .work(target, &buffers, &peers, &lengths, write, notify)
            .and_then(|work| wait(py, work.run(&inner.engine)));
        Ok(outcome.map_or_else(|error| self.failed(&error), |()| 0))
    }

    fn _submit(
        &self,
        py: Python<'_>,
        target: String,
        buffers: Vec<Uint>,
        peers: Vec<Uint>,
        lengths: Vec<Uint>,
        write: bool,
    ) -> PyResult<u64> {
        let Some(inner) = self.inner(py)? else { return Ok(0) };
        let inner = inner.get();
        let submitted =
            inner.work(target, &buffers, &peers, &lengths, write, None).and_then(|work| inner.submit(work));
        Ok(submitted.unwrap_or_else(|error| {
            self.errors.note(&error);
            0
        }))
    }

    /// How a batch stands: 1 done, 0 under way, -1 failed or unknown, -2 out of time.
    fn transfer_check_status(&self, py: Python<'_>, batch_id: Uint) -> PyResult<i64> {
        let Some(inner) = self.inner(py)? else { return Ok(-1) };
        Ok(inner.get().poll(batch_id.0).map_or(0, Outcome::code))
    }

    /// Waits for batches: 0 when all were done, else -1. A batch that is over may be asked about again.
    fn get_batch_transfer_status(&self, py: Python<'_>, batch_ids: Vec<Uint>) -> PyResult<i64> {
        let Some(inner) = self.inner(py)? else { return Ok(-1) };
        let inner = inner.get();
        let all = wait(py, async {
            let mut all = 0;
            for id in batch_ids {
                if inner.finish(id.0).await != Outcome::Done {
                    all = -1;
                }
            }
            Ok(all)
        });
        Ok(all.unwrap_or_else(|error| self.failed(&error)))
    }

    /// Copies bytes into registered memory: 0 or -1.
    fn write_bytes_to_buffer(
        &self,
        py: Python<'_>,
        dest_address: Uint,
        data: &Bound<'_, PyAny>,
        length: Uint,
    ) -> PyResult<i64> {
        let Some(inner) = self.inner(py)? else { return Ok(-1) };
        let mut keep = Keep::default();
        let text;
        let span = if let Ok(data) = data.extract::<String>() {
            text = PyBytes::new(py, data.as_bytes());
            bytes_of(&text, &mut keep)?
        } else {
            bytes_of(data, &mut keep)?
        };
        let Some(span) = span.filter(|_| length.0 > 0) else { return Ok(if length.0 == 0 { 0 } else { -1 }) };
        if span.len < length.len() {
            let text = format!("{} bytes were given, {} are to be copied", span.len, length.0);
            return Ok(self.failed(&Error::invalid(text)));
        }
        let copied = inner.get().regions.slice_mut(dest_address.0, length.len()).map(|to| copy(span, &to));
        Ok(copied.map_or_else(|error| self.failed(&error), |()| 0))
    }

    /// Copies bytes out of registered memory.
    fn read_bytes_from_buffer<'py>(
        &self,
        py: Python<'py>,
        source_address: Uint,
        length: Uint,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let Some(inner) = self.inner(py)? else {
            return Err(exception(py, &Error::invalid("the engine is not initialized")));
        };
        if length.0 == 0 {
            return Ok(PyBytes::new(py, b""));
        }
        let from = inner.get().regions.slice(source_address.0, length.len());
        let from = from.map_err(|error| exception(py, &error))?;
        let (bytes, span) = new_bytes(py, length.len())?;
        let span = span.ok_or_else(|| PyTypeError::new_err("no bytes"))?;
        copy_out(&from, span);
        Ok(bytes)
    }

    /// Notifications that arrived since the last call, as name and message.
    fn _notifications(&self, py: Python<'_>) -> PyResult<Vec<(String, String)>> {
        let Some(inner) = self.inner(py)? else { return Ok(Vec::new()) };
        let all = inner.get().engine.take_notifications();
        Ok(all.into_iter().map(|notification| (notification.name, notification.message)).collect())
    }

    /// Whether a peer's engine answers: 0, or -102.
    fn send_probe(&self, py: Python<'_>, peer_server_name: String) -> PyResult<i64> {
        let Some(inner) = self.inner(py)? else { return Ok(-1) };
        let inner = inner.get();
        let answered = wait(py, async {
            let Some(at) = inner.directory.locate(&peer_server_name).await? else { return Ok(false) };
            Ok(handshake::probe(&at, PROBE, &HandshakeConfig::default()).await)
        });
        Ok(match answered {
            Ok(true) => 0,
            Ok(false) => UNREACHABLE,
            Err(error) => {
                self.errors.note(&error);
                UNREACHABLE
            }
        })
    }

    /// Withdraws the engine's memory and stops answering.
    fn _close(&self, py: Python<'_>) -> PyResult<()> {
        not_forked()?;
        let Some(inner) = self.inner.write().take() else { return Ok(()) };
        let inner = inner.get();
        let _ = wait(py, inner.engine.close());
        py.detach(|| inner.regions.clear());
        Ok(())
    }
}

#[allow(unsafe_code)]
fn copy(from: MemorySpan, to: &SliceMut<Wire>) {
    let start = std::ptr::with_exposed_provenance_mut::<u8>(to.addr() as usize);
    // SAFETY: the destination is registered and that long, the source at least as long (checked by the caller); a program may
    // copy inside its own memory.
    unsafe { std::ptr::copy(from.ptr.as_ptr(), start, to.len().min(from.len)) };
}

#[allow(unsafe_code)]
fn copy_out(from: &Slice<Wire>, to: MemorySpan) {
    let start = std::ptr::with_exposed_provenance::<u8>(from.addr() as usize);
    // SAFETY: the source is registered and as long as the new object, which overlaps nothing.
    unsafe { std::ptr::copy_nonoverlapping(start, to.ptr.as_ptr(), to.len.min(from.len())) };
}
