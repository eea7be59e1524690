//! Transports in safe Rust: implement [`CopyTransport`] on plain byte slices, and [`Staged`]
//! converts it into a [`Transport`].
//!
//! The price is one copy through a bounce buffer per operation.

use std::fmt;
use std::future::Future;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::{Moment, SharedClock};
use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;

use crate::exposed::{ExposedMemory, Exposure};
use crate::protocol::Protocol;
use crate::segment::SegmentDesc;
use crate::ticket::{Completion, block_on_for};
use crate::transport::{Access, Capabilities, Op, Opcode, Transport};

/// Transport that copies slices. It serves requests of peers from the [`ExposedMemory`] that it
/// receives.
pub trait CopyTransport: fmt::Debug + Send + Sync + 'static {
    /// Path to one peer.
    type Peer: Clone + fmt::Debug + Send + Sync + 'static;

    /// Returns the name of the transport.
    fn protocol(&self) -> Protocol;

    /// Sets the memory that peers may read and write from now on. It is called once, before any
    /// other method. The methods of the memory check every address.
    fn serve(&self, memory: Arc<ExposedMemory>);

    /// Writes into the local descriptor how peers reach this node, and sets the protocol.
    fn describe(&self, desc: &mut SegmentDesc);

    /// Opens a path to the owner of a segment.
    fn connect(&self, desc: &SegmentDesc) -> impl Future<Output = Result<Self::Peer>> + Send;

    /// Fills `into` from the peer's address. The peer must check the whole range before it
    /// responds. The future may be dropped at any time.
    fn read_into(
        &self,
        peer: &Self::Peer,
        addr: u64,
        into: &mut [u8],
    ) -> impl Future<Output = Result<()>> + Send;

    /// Sends `from` to the peer's address, and returns when the write is applied there. The peer
    /// must check the whole range before it writes any byte of it. The future may be dropped at any
    /// time.
    fn write_from(
        &self,
        peer: &Self::Peer,
        addr: u64,
        from: &[u8],
    ) -> impl Future<Output = Result<()>> + Send;
}

/// Executor of the futures of a [`Staged`] transport.
#[derive(Clone, Debug)]
pub enum Executor {
    /// A task per submission.
    Tokio(tokio::runtime::Handle),
    /// The submitting thread, before `submit` returns. For transports whose futures wait for
    /// nothing that needs a runtime.
    Inline,
}

/// Maximum number of bytes of bounce buffers kept for reuse.
const MAX_POOLED_BYTES: usize = 16 << 20;

/// Adapter from a [`CopyTransport`] to a [`Transport`].
pub struct Staged<C> {
    inner: Arc<Inner<C>>,
    executor: Executor,
    memory: Arc<ExposedMemory>,
}

struct Inner<C> {
    wire: C,
    clock: SharedClock,
    bounce: Mutex<Bounce>,
}

#[derive(Default)]
struct Bounce {
    free: Vec<Vec<u8>>,
    bytes: usize,
}

impl<C: CopyTransport> Staged<C> {
    /// Starts a transport. Deadlines are moments of `clock`.
    pub fn new(wire: C, executor: Executor, clock: SharedClock) -> Self {
        let memory = ExposedMemory::new();
        wire.serve(memory.clone());
        Self { inner: Arc::new(Inner { wire, clock, bounce: Mutex::default() }), executor, memory }
    }

    /// Returns the inner transport.
    pub fn wire(&self) -> &C {
        &self.inner.wire
    }
}

impl<C: fmt::Debug> fmt::Debug for Staged<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Staged").field("wire", &self.inner.wire).field("executor", &self.executor).finish()
    }
}

/// Memory that a [`Staged`] transport may use.
#[derive(Debug)]
pub struct StagedRegistration {
    _exposure: Option<Exposure>,
}

// SAFETY: local bytes are copied between the end of the inner future and the end of the share, on
// the same task. A cancelled share drops the future first. Remote bytes are accessed through
// `ExposedMemory` only.
unsafe impl<C: CopyTransport> Transport for Staged<C> {
    type Registration = StagedRegistration;
    type Peer = C::Peer;

    fn protocol(&self) -> Protocol {
        self.inner.wire.protocol()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { max_op_bytes: isize::MAX as u64, ..Capabilities::default() }
    }

    unsafe fn register(&self, span: MemorySpan, access: Access) -> Result<StagedRegistration> {
        if span.location.is_device() {
            return Err(Error::invalid(format!("{} is not host memory", span.location)));
        }
        let exposure = match access {
            Access::Local => None,
            // SAFETY: the caller keeps the bytes until the registration is dropped, and with it the
            // exposure.
            Access::Remote => Some(unsafe { self.memory.expose(span) }?),
        };
        Ok(StagedRegistration { _exposure: exposure })
    }

    fn describe(&self, desc: &mut SegmentDesc) {
        self.inner.wire.describe(desc);
    }

    fn connect(&self, desc: &SegmentDesc) -> impl Future<Output = Result<C::Peer>> + Send {
        self.inner.wire.connect(desc)
    }

    fn submit<'a, I>(&self, peer: &C::Peer, ops: I, done: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, StagedRegistration>>,
    {
        let ops = ops.zip(done.each()).map(|(op, done)| Posted {
            opcode: op.opcode(),
            local: op.local(),
            remote: op.remote(),
            done,
        });
        match &self.executor {
            Executor::Inline => ops.for_each(|op| self.inner.run_inline(peer, op)),
            Executor::Tokio(handle) => {
                let (inner, peer, ops) = (self.inner.clone(), peer.clone(), ops.collect::<Vec<_>>());
                handle.spawn(async move {
                    for op in ops {
                        inner.run(&peer, op).await;
                    }
                });
            }
        }
    }
}

struct Posted {
    opcode: Opcode,
    local: MemorySpan,
    remote: u64,
    done: Completion,
}

impl<C: CopyTransport> Inner<C> {
    async fn run(&self, peer: &C::Peer, op: Posted) {
        let result = match self.left(op.done.deadline()) {
            Some(Duration::ZERO) => Err(deadline_error()),
            None => self.copy(peer, &op).await,
            Some(left) => tokio::time::timeout(left, self.copy(peer, &op))
                .await
                .unwrap_or_else(|_| Err(deadline_error())),
        };
        op.done.finish(result);
    }

    fn run_inline(&self, peer: &C::Peer, op: Posted) {
        let result = match self.left(op.done.deadline()) {
            Some(Duration::ZERO) => Err(deadline_error()),
            left => {
                let mut copy = std::pin::pin!(self.copy(peer, &op));
                block_on_for(left, |cx| copy.as_mut().poll(cx)).unwrap_or_else(|| Err(deadline_error()))
            }
        };
        op.done.finish(result);
    }

    fn left(&self, deadline: Option<Moment>) -> Option<Duration> {
        deadline.map(|deadline| deadline.since(self.clock.now()))
    }

    async fn copy(&self, peer: &C::Peer, op: &Posted) -> Result<()> {
        let len = op.local.len;
        if len == 0 {
            return Err(Error::invalid(format!("a transfer of zero bytes at {:#x}", op.remote)));
        }
        let mut bounce = self.take(len)?;
        let result = match op.opcode {
            Opcode::Read => {
                let result = self.wire.read_into(peer, op.remote, &mut bounce).await;
                if result.is_ok() {
                    // SAFETY: this code has the only access to the bytes of the operation until its
                    // share is finished, which happens later.
                    unsafe { op.local.ptr.copy_from_nonoverlapping(NonNull::from(&bounce[..]).cast(), len) };
                }
                result
            }
            Opcode::Write => {
                // SAFETY: no code writes the bytes of the operation until its share is finished.
                unsafe { op.local.ptr.copy_to_nonoverlapping(NonNull::from(&mut bounce[..]).cast(), len) };
                self.wire.write_from(peer, op.remote, &bounce).await
            }
        };
        self.put_back(bounce);
        result
    }

    fn take(&self, len: usize) -> Result<Vec<u8>> {
        let mut buffer = {
            let mut bounce = self.bounce.lock();
            let buffer = bounce.free.pop().unwrap_or_default();
            bounce.bytes -= buffer.capacity();
            buffer
        };
        buffer.clear();
        buffer.try_reserve_exact(len).map_err(|e| {
            Error::new(ErrorCode::BufferOverflow, format!("no bounce buffer of {len} bytes: {e}"))
        })?;
        buffer.resize(len, 0);
        Ok(buffer)
    }

    fn put_back(&self, buffer: Vec<u8>) {
        let mut bounce = self.bounce.lock();
        if bounce.bytes + buffer.capacity() <= MAX_POOLED_BYTES {
            bounce.bytes += buffer.capacity();
            bounce.free.push(buffer);
        }
    }
}

fn deadline_error() -> Error {
    Error::new(ErrorCode::RpcTimeout, "cannot finish transfer: its deadline has passed")
}
