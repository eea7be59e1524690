//! Transfer engine under `mooncake.engine.TransferEngine`, whose calls name memory by address and
//! batches by number.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::memory::{Location, MemorySpan, copy_memory};
use mooncake_core::{Error, ErrorKind, Result};
use mooncake_engine::addressed::Regions;
use mooncake_engine::{
    AddressRequest, TransferEngine, TransferEngineBuilder, TransportOptions, TransportSet,
};
use mooncake_transport::engine::{EngineCode, HandshakePort, Target};
use mooncake_transport::handshake::Notification;
use mooncake_transport::net::{DEFAULT_PORT, HostPort};
use mooncake_transport::{Opcode, Slice, SliceMut};
use parking_lot::{Mutex, RwLock};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::args::{Keep, Uint, bytes_of, copying, new_bytes, text};
use crate::error::{Errors, LastError, exception};
use crate::exit;
use crate::interpreter::detached;
use crate::runtime::{not_forked, wait};

/// Time that a target has to answer a probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);
/// Result of `send_probe` if the target does not answer.
const UNREACHABLE: i64 = -102;
/// Maximum number of finished batches whose outcome can still be queried.
const MAX_FINISHED: usize = 4096;
/// Time that a stream waits for a transfer beyond the deadline of the transfer.
const GRACE: Duration = Duration::from_secs(1);

/// Engine that a store can share.
#[pyclass(frozen, weakref, module = "mooncake.engine", name = "InnerTransferEngine")]
pub(crate) struct InnerTransferEngine {
    engine: TransferEngine,
    /// Metadata address that `initialize` was given.
    metadata: String,
    /// Outcomes of finished batches that were queried, oldest first.
    finished: Mutex<VecDeque<(u64, Outcome)>>,
}

#[pymethods]
impl InnerTransferEngine {
    fn __repr__(&self) -> String {
        format!("<InnerTransferEngine {}>", self.engine.name())
    }
}

/// Outcome of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Done,
    Failed,
    TimedOut,
}

impl Outcome {
    fn from_result(result: Result<()>) -> Self {
        match result {
            Ok(()) => Outcome::Done,
            Err(error) if error.kind() == ErrorKind::Timeout => Outcome::TimedOut,
            Err(_) => Outcome::Failed,
        }
    }

    fn code(self) -> i64 {
        match self {
            Outcome::Done => 1,
            Outcome::Failed => -1,
            Outcome::TimedOut => -2,
        }
    }
}

/// Transfers to or from one target, with the names and addresses that Python gave.
struct TransferCall {
    target: String,
    opcode: Opcode,
    notify: Option<Notification>,
    /// Local address, remote address and length in bytes.
    pieces: Vec<(u64, u64, usize)>,
}

impl TransferCall {
    fn new(
        target: String,
        buffers: &[Uint],
        peers: &[Uint],
        lengths: &[Uint],
        write: bool,
        notify: Option<(String, String)>,
    ) -> Result<Self> {
        if buffers.len() != peers.len() || peers.len() != lengths.len() {
            return Err(Error::invalid(
                "cannot transfer: buffers, peer addresses and lengths differ in number",
            ));
        }
        let pieces = buffers.iter().zip(peers).zip(lengths);
        Ok(Self {
            target,
            opcode: if write { Opcode::Write } else { Opcode::Read },
            notify: notify.map(|(name, message)| Notification { name, message }),
            pieces: pieces.map(|((buffer, peer), len)| (buffer.0, peer.0, len.len())).collect(),
        })
    }

    fn requests(&self, target: &Target<TransportSet>) -> Vec<AddressRequest> {
        let request = |&(local, remote, len): &(u64, u64, usize)| AddressRequest {
            opcode: self.opcode,
            local,
            target: target.clone(),
            remote,
            len,
        };
        self.pieces.iter().map(request).collect()
    }

    fn bytes(&self) -> u64 {
        self.pieces.iter().fold(0, |sum, (.., len)| sum.saturating_add(*len as u64))
    }
}

/// Returns the builder of an engine with these arguments and the settings of the environment.
pub(crate) fn builder(
    host: &str,
    metadata: &str,
    protocol: &str,
    devices: &str,
) -> Result<TransferEngineBuilder> {
    if protocol == "xgmi" {
        // Mooncake C++ refuses this protocol as well.
        TransportOptions::for_protocol(protocol)?;
    }
    // An IP address in `host` is the address that others connect to. A host name may not resolve to
    // an address of this host.
    let host_part = HostPort::parse(host, DEFAULT_PORT).host;
    let is_address = host_part == "localhost" || host_part.parse::<IpAddr>().is_ok();
    let port = HandshakePort { host: is_address.then_some(host_part), ..HandshakePort::default() };
    Ok(TransferEngine::builder()
        .name(host)
        .metadata(metadata)
        .protocol(protocol)
        .devices(devices)
        // As in Mooncake C++, a host without RDMA devices falls back to TCP.
        .allow_tcp_fallback()
        .handshake(port)
        .environment())
}

impl InnerTransferEngine {
    pub(crate) fn engine(&self) -> &TransferEngine {
        &self.engine
    }

    /// Returns the metadata address that `initialize` was given.
    pub(crate) fn metadata(&self) -> &str {
        &self.metadata
    }

    /// Returns the memory that is registered with the engine.
    pub(crate) fn regions(&self) -> Arc<Regions> {
        self.engine.regions().clone()
    }

    #[allow(unsafe_code)]
    async fn register(&self, pieces: &[(u64, usize)], is_open: bool) -> Result<()> {
        if !is_open {
            // SAFETY: as below.
            return unsafe { self.engine.register_raw_local(pieces) };
        }
        // SAFETY: the program guarantees that the memory stays valid until it unregisters it.
        unsafe { self.engine.register_raw_many(pieces) }.await
    }

    /// Unregisters several ranges. Registered ranges are unregistered even if others are unknown.
    async fn unregister(&self, addresses: &[u64]) -> Result<()> {
        match self.engine.unregister_raw(addresses).await {
            Err(error) if addresses.len() > 1 && error.engine_code() == EngineCode::AddressNotRegistered => {
                let mut outcome = Ok(());
                for address in addresses {
                    outcome = outcome.and(self.engine.unregister_raw(&[*address]).await);
                }
                outcome
            }
            outcome => outcome,
        }
    }

    async fn open(&self, call: &TransferCall) -> Result<Target<TransportSet>> {
        let deadline = self.engine.clock().now().after(self.engine.timeout_for(call.bytes()));
        self.engine.open_by(&call.target, deadline).await
    }

    async fn run(&self, call: TransferCall) -> Result<()> {
        let target = self.open(&call).await?;
        self.engine.after_default_streams(&call.requests(&target))?;
        let outcome = match &call.notify {
            Some(notification) if call.pieces.is_empty() => {
                self.engine.notify(&call.target, notification).await
            }
            _ => self.engine.transfer(&call.requests(&target), call.notify, None).await,
        };
        outcome.map_err(|error| {
            // The target may have restarted with other memory or at another port: look it up again
            // next time.
            self.engine.forget(&call.target);
            error.context(format!("target {}", call.target))
        })
    }

    async fn submit(&self, call: TransferCall) -> Result<u64> {
        let target = self.open(&call).await?;
        let requests = call.requests(&target);
        self.engine.after_default_streams(&requests)?;
        let id = self.engine.allocate_batch(requests.len());
        if let Err(error) = self.engine.submit_batch(id, &requests, call.notify, None) {
            self.engine.free_batch(id)?;
            return Err(error);
        }
        Ok(id)
    }

    #[allow(unsafe_code)]
    fn begin_on_stream(&self, call: &TransferCall, target: &Target<TransportSet>, stream: u64) -> Result<()> {
        let (engine, requests) = (self.engine.clone(), call.requests(target));
        let transfer = async move { engine.transfer(&requests, None, None).await };
        // The deadline of the transfer comes first, if it has one.
        let limit = self.engine.timeout_for(call.bytes()).saturating_add(GRACE);
        // SAFETY: the program names a stream of its own and keeps it, as for every library that
        // takes one.
        unsafe { self.engine.after_stream(stream, limit, transfer) }
    }

    /// Returns the outcome of a batch, or `None` while it runs. A finished batch is freed, and only
    /// its outcome is kept.
    async fn poll(&self, id: u64) -> Option<Outcome> {
        let known = |finished: &VecDeque<(u64, Outcome)>| {
            finished.iter().find(|(known, _)| *known == id).map(|(_, how)| *how)
        };
        match self.engine.is_batch_finished(id) {
            Ok(false) => return None,
            Err(_) => return Some(known(&self.finished.lock()).unwrap_or(Outcome::Failed)),
            Ok(true) => {}
        }
        let outcome = Outcome::from_result(self.engine.finish_batch(id).await);
        let mut finished = self.finished.lock();
        // Another thread may have freed the batch first.
        if self.engine.free_batch(id).is_ok() {
            if finished.len() == MAX_FINISHED {
                finished.pop_front();
            }
            finished.push_back((id, outcome));
        }
        Some(known(&finished).unwrap_or(outcome))
    }

    async fn finish(&self, id: u64) -> Outcome {
        // `poll` returns the outcome.
        let _ = self.engine.finish_batch(id).await;
        self.poll(id).await.unwrap_or(Outcome::Failed)
    }
}

/// Engine with the calls that `mooncake.engine` is built on.
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
        self.errors.record(error);
        -1
    }

    fn code(&self, outcome: Result<()>) -> i64 {
        outcome.map_or_else(
            |error| {
                self.errors.record(&error);
                error.engine_code().number().into()
            },
            |()| 0,
        )
    }
}

#[pymethods]
impl EngineCalls {
    /// Accepts and ignores the arguments that the `__init__` of a subclass takes.
    #[new]
    #[pyo3(signature = (*_args, **_kwargs))]
    fn new(_args: &Bound<'_, PyTuple>, _kwargs: Option<&Bound<'_, PyDict>>) -> Self {
        Self::default()
    }

    /// Starts the engine and returns 0, or -1 on failure. If it returns 0 and records an error, the
    /// engine uses TCP instead of the protocol, for the reason in that error.
    fn _initialize(
        &self,
        py: Python<'_>,
        local_hostname: String,
        metadata_server: String,
        protocol: String,
        devices: String,
    ) -> PyResult<i64> {
        not_forked()?;
        if self.inner.read().is_some() {
            return Ok(self.failed(&Error::invalid("cannot initialize engine: it is already initialized")));
        }
        // The environment is read while no other thread can change it.
        let started = match builder(&local_hostname, &metadata_server, &protocol, &devices) {
            Ok(builder) => wait(py, builder.start()),
            Err(error) => Err(error),
        };
        match started {
            Ok(engine) => {
                if let Some(error) = engine.fallback_reason() {
                    self.errors.record(error);
                }
                exit::watch(engine.regions(), Some(engine.transport()));
                let inner =
                    InnerTransferEngine { engine, metadata: metadata_server, finished: Mutex::default() };
                *self.inner.write() = Some(Py::new(py, inner)?);
                Ok(0)
            }
            Err(error) => Ok(self.failed(&error)),
        }
    }

    /// Returns the engine, for a store to share, or `None` before it is initialized.
    fn get_engine(&self, py: Python<'_>) -> PyResult<Option<Py<InnerTransferEngine>>> {
        self.inner(py)
    }

    /// Returns the port where this engine answers handshakes, or 0 before it is initialized.
    fn get_rpc_port(&self, py: Python<'_>) -> PyResult<u16> {
        let inner = self.inner(py)?;
        Ok(inner.and_then(|inner| inner.get().engine.handshake_addr().map(|at| at.port)).unwrap_or(0))
    }

    /// Returns the last error of this engine, or `None` if there was none.
    fn last_error(&self) -> Option<LastError> {
        self.errors.last()
    }

    /// Registers ranges for transfers, all or none, open to peers or not. Returns 0 or an engine
    /// error code.
    #[pyo3(signature = (addresses, lengths, is_open=true))]
    fn _register(
        &self,
        py: Python<'_>,
        addresses: Vec<Uint>,
        lengths: Vec<Uint>,
        is_open: bool,
    ) -> PyResult<i64> {
        let Some(inner) = self.inner(py)? else { return Ok(-1) };
        if addresses.len() != lengths.len() {
            return Ok(self
                .failed(&Error::invalid("cannot register memory: addresses and lengths differ in number")));
        }
        let pieces: Vec<_> = addresses.iter().zip(&lengths).map(|(at, len)| (at.0, len.len())).collect();
        Ok(self.code(wait(py, inner.get().register(&pieces, is_open))))
    }

    /// Unregisters ranges after waiting for transfers that use them. Returns 0 or an engine error
    /// code.
    fn _unregister(&self, py: Python<'_>, addresses: Vec<Uint>) -> PyResult<i64> {
        let Some(inner) = self.inner(py)? else { return Ok(-1) };
        let addresses: Vec<_> = addresses.iter().map(|address| address.0).collect();
        Ok(self.code(wait(py, inner.get().unregister(&addresses))))
    }

    /// Allocates registered memory and returns its address, or 0 on failure.
    fn allocate_managed_buffer(&self, py: Python<'_>, length: Uint) -> PyResult<u64> {
        let Some(inner) = self.inner(py)? else { return Ok(0) };
        let allocated = wait(py, inner.get().engine.allocate_managed(length.0));
        Ok(allocated.unwrap_or_else(|error| {
            self.errors.record(&error);
            0
        }))
    }

    /// Frees managed memory. Returns 0, or -1 if the address is not that of a managed buffer.
    fn free_managed_buffer(&self, py: Python<'_>, buffer_addr: Uint, length: Uint) -> PyResult<i64> {
        let Some(inner) = self.inner(py)? else { return Ok(-1) };
        let freed = detached(py, || inner.get().engine.free_managed(buffer_addr.0, length.0));
        Ok(freed.map_or_else(|error| self.failed(&error), |()| 0))
    }

    /// Returns the address of a segment's first buffer, or 0 if the segment is unknown or has none.
    fn get_first_buffer_address(&self, py: Python<'_>, segment_name: String) -> PyResult<u64> {
        let Some(inner) = self.inner(py)? else { return Ok(0) };
        let inner = inner.get();
        let found = wait(py, async {
            // Reads the current descriptor rather than the one from when the segment was opened.
            inner.engine.forget(&segment_name);
            inner.engine.open(&segment_name).await
        });
        Ok(match found {
            Ok(target) => target.descriptor().buffers.first().map_or(0, |buffer| buffer.addr),
            Err(error) => {
                self.errors.record(&error);
                0
            }
        })
    }

    #[allow(clippy::too_many_arguments, reason = "one call for all transfers")]
    #[pyo3(signature = (target, buffers, peers, lengths, write, notify=None))]
    fn _transfer(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] target: String,
        buffers: Vec<Uint>,
        peers: Vec<Uint>,
        lengths: Vec<Uint>,
        write: bool,
        notify: Option<(String, String)>,
    ) -> PyResult<i64> {
        let Some(inner) = self.inner(py)? else { return Ok(-1) };
        let outcome = TransferCall::new(target, &buffers, &peers, &lengths, write, notify)
            .and_then(|call| wait(py, inner.get().run(call)));
        Ok(outcome.map_or_else(|error| self.failed(&error), |()| 0))
    }

    fn _submit(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] target: String,
        buffers: Vec<Uint>,
        peers: Vec<Uint>,
        lengths: Vec<Uint>,
        write: bool,
    ) -> PyResult<u64> {
        let Some(inner) = self.inner(py)? else { return Ok(0) };
        let submitted = TransferCall::new(target, &buffers, &peers, &lengths, write, None)
            .and_then(|call| wait(py, inner.get().submit(call)));
        Ok(submitted.unwrap_or_else(|error| {
            self.errors.record(&error);
            0
        }))
    }

    /// Starts transfers when the current work of a CUDA stream is done, and makes the stream's
    /// later work wait for them. An error of these transfers is kept and raised by the next such
    /// call, or by `check_on_cuda`.
    #[allow(clippy::too_many_arguments, reason = "as Python gives them")]
    fn _on_stream(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] target: String,
        buffers: Vec<Uint>,
        peers: Vec<Uint>,
        lengths: Vec<Uint>,
        write: bool,
        stream: Uint,
    ) -> PyResult<()> {
        let begun = match self.inner(py)? {
            None => Err(Error::invalid("cannot start transfer: the engine is not initialized")),
            Some(inner) => {
                TransferCall::new(target, &buffers, &peers, &lengths, write, None).and_then(|call| {
                    let inner = inner.get();
                    let target = wait(py, inner.open(&call))?;
                    detached(py, || inner.begin_on_stream(&call, &target, stream.0))
                })
            }
        };
        begun.map_err(|error| {
            self.errors.record(&error);
            exception(py, &error)
        })
    }

    /// Raises the first error of a transfer in stream order that was not raised yet. With `wait`,
    /// waits until no such transfer is running.
    fn _check_streams(&self, py: Python<'_>, wait: bool) -> PyResult<()> {
        let Some(inner) = self.inner(py)? else { return Ok(()) };
        let engine = &inner.get().engine;
        let checked = detached(py, || if wait { engine.settle_streams() } else { engine.check_streams() });
        checked.map_err(|error| exception(py, &error))
    }

    /// Returns the status of a batch: 1 done, 0 running, -1 failed or unknown, -2 timed out.
    fn transfer_check_status(&self, py: Python<'_>, batch_id: Uint) -> PyResult<i64> {
        let Some(inner) = self.inner(py)? else { return Ok(-1) };
        let stands = wait(py, async { Ok(inner.get().poll(batch_id.0).await) });
        Ok(stands.unwrap_or(Some(Outcome::Failed)).map_or(0, Outcome::code))
    }

    /// Waits for a batch for a limited time, and returns its status as `transfer_check_status`
    /// does.
    fn _drain(&self, py: Python<'_>, batch_id: Uint, timeout_ms: u64) -> PyResult<i64> {
        let Some(inner) = self.inner(py)? else { return Ok(-1) };
        let inner = inner.get();
        let limit = Duration::from_millis(timeout_ms);
        let outcome = wait(py, async {
            let ended = tokio::time::timeout(limit, inner.finish(batch_id.0)).await;
            Ok(match ended {
                Ok(outcome) => Some(outcome),
                Err(_) => inner.poll(batch_id.0).await,
            })
        });
        Ok(outcome.unwrap_or(Some(Outcome::Failed)).map_or(0, Outcome::code))
    }

    /// Records the reason why a call was refused, for `last_error`.
    fn _refused(&self, reason: String) {
        self.errors.record(&Error::invalid(reason));
    }

    /// Waits for batches and returns 0 if all succeeded, else -1. A finished batch can be queried
    /// again.
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

    /// Copies bytes into registered memory. Returns 0 or -1.
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
            let text = format!(
                "cannot copy into buffer: data is shorter than length. data={} length={}",
                span.len, length.0
            );
            return Ok(self.failed(&Error::invalid(text)));
        }
        let to = inner.get().engine.regions().slice_mut(dest_address.0, length.len());
        let copied = to.and_then(|to| copying(py, length.len(), || copy(span, &to)));
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
            return Err(exception(py, &Error::invalid("cannot read buffer: the engine is not initialized")));
        };
        if length.0 == 0 {
            return Ok(PyBytes::new(py, b""));
        }
        let from = inner.get().engine.regions().slice(source_address.0, length.len());
        let from = from.map_err(|error| exception(py, &error))?;
        let (bytes, span) = new_bytes(py, length.len())?;
        let span = span.ok_or_else(|| PyTypeError::new_err("cannot allocate a bytes object"))?;
        let copied = copying(py, span.len, || copy_out(&from, span));
        copied.map_err(|error| exception(py, &error))?;
        Ok(bytes)
    }

    /// Returns the notifications that arrived since the last call, each as name and message.
    fn _notifications(&self, py: Python<'_>) -> PyResult<Vec<(String, String)>> {
        let Some(inner) = self.inner(py)? else { return Ok(Vec::new()) };
        let all = inner.get().engine.take_notifications();
        Ok(all.into_iter().map(|notification| (notification.name, notification.message)).collect())
    }

    /// Probes the engine of a target. Returns 0 if it answers, else -102.
    fn send_probe(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text)] peer_server_name: String,
    ) -> PyResult<i64> {
        let Some(inner) = self.inner(py)? else { return Ok(-1) };
        let probed = wait(py, inner.get().engine.probe(&peer_server_name, PROBE_TIMEOUT));
        Ok(match probed {
            Ok(true) => 0,
            Ok(false) => UNREACHABLE,
            Err(error) => {
                self.errors.record(&error);
                UNREACHABLE
            }
        })
    }

    /// Withdraws the engine's memory from the metadata service and closes the engine.
    fn _close(&self, py: Python<'_>) -> PyResult<()> {
        not_forked()?;
        let Some(inner) = self.inner.write().take() else { return Ok(()) };
        let inner = inner.get();
        let _ = wait(py, async {
            let closed = inner.engine.close().await;
            inner.engine.regions().clear().await;
            closed
        });
        Ok(())
    }
}

#[allow(unsafe_code)]
fn copy(from: MemorySpan, to: &SliceMut<TransportSet>) -> Result<()> {
    if !to.location().is_device() {
        let start = std::ptr::with_exposed_provenance_mut::<u8>(to.addr() as usize);
        // SAFETY: the destination is registered and that long, and the caller checked that the
        // source is at least as long. A program may copy inside its own memory.
        unsafe { std::ptr::copy(from.ptr.as_ptr(), start, to.len().min(from.len)) };
        return Ok(());
    }
    let to = registered(to.addr(), to.len(), to.location())?;
    // SAFETY: as above. The source is a Python object's memory, the destination a device's.
    unsafe { copy_memory(MemorySpan { len: to.len, ..from }, to) }
}

#[allow(unsafe_code)]
fn copy_out(from: &Slice<TransportSet>, to: MemorySpan) -> Result<()> {
    let from = registered(from.addr(), to.len.min(from.len()), from.location())?;
    // SAFETY: the source is registered and as long as the new object, which overlaps nothing.
    unsafe { copy_memory(from, MemorySpan { len: from.len, ..to }) }
}

fn registered(address: u64, len: usize, location: Location) -> Result<MemorySpan> {
    let start = NonNull::new(std::ptr::with_exposed_provenance_mut(address as usize));
    let ptr = start.ok_or_else(|| Error::internal("the null pointer is registered"))?;
    Ok(MemorySpan { location, ..MemorySpan::new(ptr, len) })
}
