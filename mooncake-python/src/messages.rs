//! Messages of bytes between processes, the native half of `RpcInterface`.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::memory::{Mapped, MemorySpan, copy_memory, mapped};
use mooncake_core::{Error, Result};
use mooncake_store::protocol::data_message::{
    Message, MessageKind, MessageReceiver, MessageSender, Messages, SenderOptions,
};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::args::Uint;
use crate::awaitable::awaitable;
use crate::error::exception;
use crate::interpreter::detached;
use crate::runtime::{not_forked, runtime, wait};

/// Sender of messages to any process.
#[pyclass(frozen, module = "mooncake._mooncake", name = "MessageSender")]
pub(crate) struct Sender {
    sender: Arc<MessageSender>,
}

#[pymethods]
impl Sender {
    /// Creates a sender that has at most `max_connections` to one receiver.
    #[new]
    fn new(max_connections: usize, timeout_seconds: u64) -> Self {
        let timeout = Duration::from_secs(timeout_seconds.max(1));
        Self { sender: Arc::new(MessageSender::new(SenderOptions { max_connections, timeout })) }
    }

    /// Sends bytes to `host:port`. Returns when the receiver has handled them. Raises a
    /// `MooncakeError` on failure.
    fn send_data(&self, py: Python<'_>, to: String, data: &Bound<'_, PyBytes>) -> PyResult<()> {
        not_forked()?;
        let bytes = data.as_bytes();
        let sent = wait(py, self.sender.send(&to, MessageKind::Data, bytes));
        sent.map_err(|error| exception(py, &error))
    }

    /// Sends the bytes of a tensor.
    fn send_tensor(&self, py: Python<'_>, to: String, address: Uint, len: Uint) -> PyResult<()> {
        not_forked()?;
        let sent = wait(py, async {
            let bytes = bytes_at(address.0, len.len())?;
            self.sender.send(&to, MessageKind::Tensor, &bytes).await
        });
        sent.map_err(|error| exception(py, &error))
    }

    /// Sends bytes like `send_data` without waiting, and resolves the future of an event loop.
    fn send_data_async(
        &self,
        future: &Bound<'_, PyAny>,
        to: String,
        data: &Bound<'_, PyBytes>,
    ) -> PyResult<()> {
        self.send_later(future, to, MessageKind::Data, data.as_bytes().to_vec())
    }

    /// Sends the bytes of a tensor like `send_tensor` without waiting. They are copied first.
    fn send_tensor_async(
        &self,
        py: Python<'_>,
        future: &Bound<'_, PyAny>,
        to: String,
        address: Uint,
        len: Uint,
    ) -> PyResult<()> {
        let bytes = detached(py, || bytes_at(address.0, len.len())).map_err(|error| exception(py, &error))?;
        self.send_later(future, to, MessageKind::Tensor, bytes)
    }
}

impl Sender {
    fn send_later(
        &self,
        future: &Bound<'_, PyAny>,
        to: String,
        kind: MessageKind,
        bytes: Vec<u8>,
    ) -> PyResult<()> {
        not_forked()?;
        let sender = self.sender.clone();
        let work = async move { sender.send(&to, kind, &bytes).await };
        awaitable(future, work, |py, sent| match sent {
            Ok(()) => Ok(0_i32.into_pyobject(py)?.into_any()),
            Err(error) => Err(exception(py, &error)),
        })
    }
}

/// Copies bytes of host or device memory.
#[allow(unsafe_code)]
fn bytes_at(address: u64, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    if len == 0 {
        return Ok(bytes);
    }
    let unknown = || {
        let text = "the range is not mapped and readable";
        Error::invalid(format!("cannot send tensor: {text}. address={address:#x} len={len}"))
    };
    let at =
        usize::try_from(address).ok().and_then(|at| NonNull::new(std::ptr::with_exposed_provenance_mut(at)));
    let from = MemorySpan::new(at.ok_or_else(unknown)?, len).located();
    if !from.location.is_device() && mapped(address, len) == Mapped::Not {
        return Err(unknown());
    }
    let to = MemorySpan::new(NonNull::from(&mut bytes[..]).cast(), len);
    // SAFETY: the memory of a tensor was just found, and the caller holds the tensor. The vector is
    // new, and as long.
    unsafe { copy_memory(from, to) }?;
    Ok(bytes)
}

/// Receiver of messages at a port, until it is stopped.
#[pyclass(frozen, module = "mooncake._mooncake", name = "MessageReceiver")]
pub(crate) struct Receiver {
    address: String,
    running: Mutex<Option<MessageReceiver>>,
    messages: tokio::sync::Mutex<Messages>,
}

#[pymethods]
impl Receiver {
    /// Listens at `host:port`. At most `waiting` messages wait for `next`. Raises a `MooncakeError`
    /// on failure.
    #[new]
    fn new(py: Python<'_>, address: String, waiting: usize) -> PyResult<Self> {
        not_forked()?;
        let listening = wait(py, MessageReceiver::listen(&address, waiting));
        let (receiver, messages) = listening.map_err(|error| exception(py, &error))?;
        Ok(Self {
            address: receiver.local_addr().to_string(),
            running: Mutex::new(Some(receiver)),
            messages: tokio::sync::Mutex::new(messages),
        })
    }

    /// Address of the port.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// Waits for the next message: its bytes, and the reply to send when it has been handled.
    /// Returns `None` once the receiver is stopped. For threads other than the first one.
    fn next(&self, py: Python<'_>) -> PyResult<Option<(Py<PyBytes>, Handled)>> {
        let next = detached(py, || {
            let next = async { self.messages.lock().await.next().await };
            runtime().map(|runtime| runtime.block_on(next))
        });
        let next = next.map_err(|error| exception(py, &error))?;
        Ok(next.map(|mut message| {
            let bytes = PyBytes::new(py, &std::mem::take(&mut message.bytes)).unbind();
            (bytes, Handled { message: Mutex::new(Some(message)) })
        }))
    }

    /// Stops the receiver. Messages that are being handled are waited for. Can be called again.
    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        let running = self.running.lock().take();
        let stopped = wait(py, async {
            if let Some(running) = running {
                running.stop().await;
            }
            Ok(())
        });
        stopped.map_err(|error| exception(py, &error))
    }
}

/// Reply to a message.
#[pyclass(frozen, module = "mooncake._mooncake", name = "Handled")]
pub(crate) struct Handled {
    message: Mutex<Option<Message>>,
}

#[pymethods]
impl Handled {
    /// Sends the reply. The drop of this object sends it, too.
    fn done(&self) {
        self.message.lock().take();
    }
}
