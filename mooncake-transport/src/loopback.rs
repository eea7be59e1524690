//! In-process transport: nodes of one process copy bytes (through the driver for device memory)
//! before `submit` returns.
//!
//! The transport is deterministic and has no sockets or threads, so it serves embedded clusters and
//! tests under Miri.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use mooncake_core::clock::{SharedClock, SystemClock};
use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;

use crate::exposed::{ExposedMemory, Exposure};
use crate::protocol::Protocol;
use crate::segment::SegmentDesc;
use crate::ticket::Completion;
use crate::transport::{Access, Capabilities, Op, Opcode, Transport};

const NODE: &str = "loopback_node";

/// Network of [`Loopback`] nodes. Clones are handles of the same network.
#[derive(Clone)]
pub struct LoopbackNet {
    nodes: Arc<Mutex<Nodes>>,
    clock: SharedClock,
}

#[derive(Default)]
struct Nodes {
    last: u64,
    by_id: HashMap<u64, Weak<Node>>,
}

struct Node {
    id: u64,
    is_alive: AtomicBool,
    memory: Arc<ExposedMemory>,
}

impl LoopbackNet {
    /// Creates a network on the system clock.
    pub fn new() -> Self {
        Self::with_clock(SystemClock::shared())
    }

    /// Creates a network whose deadlines are moments of this clock.
    pub fn with_clock(clock: SharedClock) -> Self {
        Self { nodes: Arc::default(), clock }
    }

    /// Creates a node, which lives until it is dropped or killed.
    pub fn node(&self) -> Loopback {
        let mut nodes = self.nodes.lock();
        nodes.last += 1;
        let node =
            Arc::new(Node { id: nodes.last, is_alive: AtomicBool::new(true), memory: ExposedMemory::new() });
        nodes.by_id.retain(|_, node| node.strong_count() != 0);
        nodes.by_id.insert(node.id, Arc::downgrade(&node));
        Loopback { net: self.clone(), node }
    }
}

impl Default for LoopbackNet {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for LoopbackNet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LoopbackNet({} nodes)", self.nodes.lock().by_id.len())
    }
}

/// Node of a [`LoopbackNet`].
pub struct Loopback {
    net: LoopbackNet,
    node: Arc<Node>,
}

impl Loopback {
    /// Makes the node unreachable for good, as a crash would. Transfers to it fail from now on.
    pub fn kill(&self) {
        self.node.is_alive.store(false, Ordering::SeqCst);
        self.net.nodes.lock().by_id.remove(&self.node.id);
    }

    fn transfer(&self, peer: &Node, op: &Op<'_, LoopbackRegistration>, done: &Completion) -> Result<()> {
        if done.deadline().is_some_and(|deadline| self.net.clock.now() >= deadline) {
            return Err(Error::new(ErrorCode::RpcTimeout, "cannot begin transfer: its deadline has passed"));
        }
        if !peer.is_alive.load(Ordering::SeqCst) {
            return Err(node_ended_error(peer.id));
        }
        match op.opcode() {
            // SAFETY: the creator of the operation vouches for the local bytes. The ranges may
            // overlap, because a node may read its own memory.
            Opcode::Read => unsafe { peer.memory.copy_out(op.remote(), op.local()) },
            // SAFETY: as above.
            Opcode::Write => unsafe { peer.memory.copy_in(op.remote(), op.local()) },
        }
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.kill();
    }
}

impl fmt::Debug for Loopback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loopback({})", self.node.id)
    }
}

/// Node as another one reaches it.
#[derive(Clone)]
pub struct LoopbackPeer(Arc<Node>);

impl fmt::Debug for LoopbackPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LoopbackPeer({})", self.0.id)
    }
}

/// Registered memory of a [`Loopback`] node.
#[derive(Debug)]
pub struct LoopbackRegistration {
    _exposure: Option<Exposure>,
}

// SAFETY: local bytes are touched inside `submit` only. `ExposedMemory` checks and copies remote
// bytes, and its exposures end when the registration is dropped.
unsafe impl Transport for Loopback {
    type Registration = LoopbackRegistration;
    type Peer = LoopbackPeer;

    fn protocol(&self) -> Protocol {
        Protocol::LOOPBACK
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::default().device_memory(true)
    }

    unsafe fn register(&self, span: MemorySpan, access: Access) -> Result<LoopbackRegistration> {
        let exposure = match access {
            Access::Local => None,
            // SAFETY: the caller keeps the bytes until the registration is dropped, and with it the
            // exposure.
            Access::Remote => Some(unsafe { self.node.memory.expose(span) }?),
        };
        Ok(LoopbackRegistration { _exposure: exposure })
    }

    fn describe(&self, desc: &mut SegmentDesc) {
        desc.protocols.push(Protocol::LOOPBACK);
        desc.extra.insert(NODE.into(), self.node.id.into());
    }

    async fn connect(&self, desc: &SegmentDesc) -> Result<LoopbackPeer> {
        let id = desc.extra.get(NODE).and_then(|id| id.as_u64());
        let id = id.ok_or_else(|| {
            Error::invalid(format!(
                "segment {:?} has no {NODE:?}: it is not on a loopback network",
                desc.name
            ))
        })?;
        let node = self.net.nodes.lock().by_id.get(&id).and_then(Weak::upgrade);
        node.map(LoopbackPeer).ok_or_else(|| node_ended_error(id))
    }

    fn submit<'a, I>(&self, peer: &LoopbackPeer, ops: I, done: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, LoopbackRegistration>>,
    {
        for (op, share) in ops.zip(done.each()) {
            let result = self.transfer(&peer.0, &op, &share);
            share.finish(result);
        }
    }
}

fn node_ended_error(id: u64) -> Error {
    Error::new(ErrorCode::TransferFail, format!("loopback node {id} is gone"))
}
