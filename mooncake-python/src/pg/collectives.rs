//! Operations of a communicator. Each call names memory by address; `keep` holds the Python objects
//! that own it until the operation is over.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::{Error, Result};
use mooncake_pg::ExchangeTag;
use mooncake_pg::call::{Buffer, Collective};
use mooncake_pg::operation::Operation;
use parking_lot::Mutex;
use pyo3::prelude::*;

use super::arguments::{Reducing, Span, Spans, slot_of};
use super::communicator::{GroupCommunicator, GroupParts};
use super::operation::{GroupOperation, SharedKeep};
use crate::args::Keep;
use crate::error::exception;
use crate::interpreter::detached;
use crate::signals::CHECK_INTERVAL;

impl GroupCommunicator {
    /// Starts an operation whose memory `keep` holds. With `waits`, the caller waits for it next:
    /// this thread carries the operation out, as far as that is over soon.
    fn begin(
        &self,
        py: Python<'_>,
        keep: Py<PyAny>,
        waits: bool,
        start: impl FnOnce(&GroupParts, Box<SharedKeep>) -> Result<Operation> + Send,
    ) -> PyResult<GroupOperation> {
        let parts = self.parts(py)?;
        let mut owners = Keep::default();
        owners.object(keep);
        let owners: SharedKeep = Arc::new(Mutex::new(owners));
        let started = detached(py, || {
            let driving = if waits { parts.communicator.drive() } else { None };
            let operation = start(&parts, Box::new(owners.clone()))?;
            if let Some(driving) = driving {
                operation.drive_by(&driving, CHECK_INTERVAL);
            }
            Ok(operation)
        });
        let operation = started.map_err(|error: Error| exception(py, &error))?;
        Ok(GroupOperation::new(operation, parts.mirror.clone(), owners))
    }

    /// Starts a collective operation.
    fn collective(
        &self,
        py: Python<'_>,
        keep: Py<PyAny>,
        waits: bool,
        collective: impl FnOnce() -> Result<Collective> + Send,
    ) -> PyResult<GroupOperation> {
        self.begin(py, keep, waits, |parts, owners| {
            let collective = collective()?;
            // SAFETY: `owners` holds the owners of the memory until the operation is over. The
            // program does not touch memory of an operation in progress, as with every backend.
            #[allow(unsafe_code)]
            unsafe {
                parts.communicator.start(collective, owners)
            }
        })
    }
}

#[pymethods]
impl GroupCommunicator {
    /// Waits until every active rank has called it.
    #[pyo3(signature = (waits=false))]
    fn barrier(&self, py: Python<'_>, waits: bool) -> PyResult<GroupOperation> {
        self.collective(py, py.None(), waits, || Ok(Collective::Barrier))
    }

    /// Reduces the tensors of all ranks, in place.
    #[pyo3(signature = (tensor, reducing, keep, waits=false))]
    fn all_reduce(
        &self,
        py: Python<'_>,
        tensor: Span,
        reducing: Reducing,
        keep: Py<PyAny>,
        waits: bool,
    ) -> PyResult<GroupOperation> {
        self.collective(py, keep, waits, || {
            Ok(Collective::AllReduce { tensor: tensor.buffer(), reduction: reducing.reduction()? })
        })
    }

    /// Reduces the tensors of all ranks, in place on the root.
    #[pyo3(signature = (tensor, reducing, root, keep, waits=false))]
    fn reduce(
        &self,
        py: Python<'_>,
        tensor: Span,
        reducing: Reducing,
        root: i64,
        keep: Py<PyAny>,
        waits: bool,
    ) -> PyResult<GroupOperation> {
        self.collective(py, keep, waits, || {
            let (tensor, reduction, root) = (tensor.buffer(), reducing.reduction()?, slot_of(root)?);
            Ok(Collective::Reduce { tensor, reduction, root })
        })
    }

    /// Reduces a piece for each rank.
    #[pyo3(signature = (inputs, output, reducing, keep, waits=false))]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        inputs: Spans,
        output: Span,
        reducing: Reducing,
        keep: Py<PyAny>,
        waits: bool,
    ) -> PyResult<GroupOperation> {
        self.collective(py, keep, waits, || {
            let (inputs, output, reduction) = (inputs.buffers(), output.buffer(), reducing.reduction()?);
            Ok(Collective::ReduceScatter { inputs, output, reduction })
        })
    }

    /// Copies the tensor of the root to every rank.
    #[pyo3(signature = (tensor, root, keep, waits=false))]
    fn broadcast(
        &self,
        py: Python<'_>,
        tensor: Span,
        root: i64,
        keep: Py<PyAny>,
        waits: bool,
    ) -> PyResult<GroupOperation> {
        self.collective(py, keep, waits, || {
            Ok(Collective::Broadcast { tensor: tensor.buffer(), root: slot_of(root)? })
        })
    }

    /// Copies the tensor of each rank to every rank.
    #[pyo3(signature = (input, outputs, keep, waits=false))]
    fn all_gather(
        &self,
        py: Python<'_>,
        input: Span,
        outputs: Spans,
        keep: Py<PyAny>,
        waits: bool,
    ) -> PyResult<GroupOperation> {
        self.collective(py, keep, waits, || {
            Ok(Collective::AllGather { input: input.buffer(), outputs: outputs.buffers() })
        })
    }

    /// Copies the tensor of each rank to the root, which has outputs.
    #[pyo3(signature = (input, outputs, root, keep, waits=false))]
    fn gather(
        &self,
        py: Python<'_>,
        input: Span,
        outputs: Option<Spans>,
        root: i64,
        keep: Py<PyAny>,
        waits: bool,
    ) -> PyResult<GroupOperation> {
        self.collective(py, keep, waits, || {
            let (input, outputs) = (input.buffer(), outputs.map(Spans::buffers));
            Ok(Collective::Gather { input, outputs, root: slot_of(root)? })
        })
    }

    /// Copies a piece of the root, which has inputs, to each rank.
    #[pyo3(signature = (inputs, output, root, keep, waits=false))]
    fn scatter(
        &self,
        py: Python<'_>,
        inputs: Option<Spans>,
        output: Span,
        root: i64,
        keep: Py<PyAny>,
        waits: bool,
    ) -> PyResult<GroupOperation> {
        self.collective(py, keep, waits, || {
            let (inputs, output) = (inputs.map(Spans::buffers), output.buffer());
            Ok(Collective::Scatter { inputs, output, root: slot_of(root)? })
        })
    }

    /// Copies a piece from each rank to each rank.
    #[pyo3(signature = (inputs, outputs, keep, waits=false))]
    fn all_to_all(
        &self,
        py: Python<'_>,
        inputs: Spans,
        outputs: Spans,
        keep: Py<PyAny>,
        waits: bool,
    ) -> PyResult<GroupOperation> {
        self.collective(py, keep, waits, || {
            Ok(Collective::AllToAll { inputs: inputs.buffers(), outputs: outputs.buffers() })
        })
    }

    /// Sends a tensor to a rank.
    fn send(&self, py: Python<'_>, tensor: Span, to: i64, keep: Py<PyAny>) -> PyResult<GroupOperation> {
        self.begin(py, keep, false, |parts, owners| {
            let to = slot_of(to)?;
            // SAFETY: as in `collective`.
            #[allow(unsafe_code)]
            unsafe {
                parts.communicator.send(tensor.buffer(), to, owners)
            }
        })
    }

    /// Receives a tensor from a rank, or with `None` from any rank.
    #[pyo3(signature = (tensor, source, keep))]
    fn receive(
        &self,
        py: Python<'_>,
        tensor: Span,
        source: Option<i64>,
        keep: Py<PyAny>,
    ) -> PyResult<GroupOperation> {
        self.begin(py, keep, false, |parts, owners| {
            let (tensor, source) = (tensor.buffer(), source.map(slot_of).transpose()?);
            // SAFETY: as in `collective`.
            #[allow(unsafe_code)]
            unsafe {
                match source {
                    Some(source) => parts.communicator.receive(tensor, source, owners),
                    None => parts.communicator.receive_any(tensor, owners),
                }
            }
        })
    }

    /// Exchanges messages with other ranks, until all have arrived or `seconds` have passed. `tag`
    /// has the numbers of the buffer, the round and the phase. The spans of `outputs[slot]` are the
    /// message to the slot, whose own message fills the start of `inputs[slot]`.
    #[allow(clippy::too_many_arguments, reason = "one call is one exchange")]
    fn exchange(
        &self,
        py: Python<'_>,
        tag: (u64, u64, u8),
        outputs: Vec<Option<Vec<Span>>>,
        inputs: Vec<Option<Span>>,
        seconds: Option<f64>,
        keep: Py<PyAny>,
    ) -> PyResult<GroupOperation> {
        self.begin(py, keep, false, |parts, owners| {
            let (buffer, round, phase) = tag;
            let tag = ExchangeTag { buffer, round, phase };
            let buffers = |spans: Vec<Span>| spans.into_iter().map(Span::buffer).collect::<Vec<Buffer>>();
            let outputs = outputs.into_iter().map(|spans| spans.map(buffers)).collect();
            let inputs = inputs.into_iter().map(|span| span.map(Span::buffer)).collect();
            let timeout = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).ok());
            // SAFETY: as in `collective`.
            #[allow(unsafe_code)]
            unsafe {
                parts.communicator.exchange(tag, outputs, inputs, timeout, owners)
            }
        })
    }

    /// Ends the rounds of a buffer of exchanges. Messages for it are refused from now on.
    fn end_exchanges(&self, py: Python<'_>, buffer: u64) -> PyResult<()> {
        self.parts(py)?.communicator.end_exchanges(buffer);
        Ok(())
    }
}
