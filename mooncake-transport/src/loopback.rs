//! The reference transport: nodes of one process, bytes copied (by the driver where they are a device's), finished before `submit` returns.
//!
//! Deterministic and without sockets or threads of its own, so it serves embedded clusters and tests under Miri alike.

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

/// A network of [`Loopback`] nodes. Clones are the same network.
#[derive(Clone)]
pub struct LoopbackNet {
    nodes: Arc<Mutex<Nodes>>,
    clock: SharedClock,
}

#[derive(Default)]
struct Nodes {
    last: u64,
    alive: HashMap<u64, Weak<Node>>,
}

struct Node {
    id: u64,
    alive: AtomicBool,
    memory: Arc<ExposedMemory>,
}

impl LoopbackNet {
    /// A network on the machine's clock.
    pub fn new() -> Self {
        Self::with_clock(SystemClock::shared())
    }

    /// A network whose deadlines are moments of this clock.
    pub fn with_clock(clock: SharedClock) -> Self {
        Self { nodes: Arc::default(), clock }
    }

    /// A new node, alive until it is dropped or killed.
    pub fn node(&self) -> Loopback {
        let mut nodes = self.nodes.lock();
        nodes.last += 1;
        let node =
            Arc::new(Node { id: nodes.last, alive: AtomicBool::new(true), memory: ExposedMemory::new() });
        nodes.alive.retain(|_, node| node.strong_count() != 0);
        nodes.alive.insert(node.id, Arc::downgrade(&node));
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
        write!(f, "LoopbackNet({} nodes)", self.nodes.lock().alive.len())
    }
}

/// One node of a [`LoopbackNet`].
pub struct Loopback {
    net: LoopbackNet,
    node: Arc<Node>,
}

impl Loopback {
    /// Makes the node unreachable for good, as a crash would. Transfers to it fail from now on.
    pub fn kill(&self) {
        self.node.alive.store(false, Ordering::SeqCst);
        self.net.nodes.lock().alive.remove(&self.node.id);
    }

    fn transfer(&self, peer: &Node, op: &Op<'_, LoopbackRegistration>, done: &Completion) -> Result<()> {
        if done.deadline().is_some_and(|deadline| self.net.clock.now() >= deadline) {
            return Err(Error::new(ErrorCode::RpcTimeout, "the deadline passed before the transfer began"));
        }
        if !peer.alive.load(Ordering::SeqCst) {
            return Err(gone(peer.id));
        }
        match op.opcode() {
            // SAFETY: whoever made the op vouches for the local bytes. The two may overlap: a node may read its own memory.
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

/// A node as another one reaches it.
#[derive(Clone)]
pub struct LoopbackPeer(Arc<Node>);

impl fmt::Debug for LoopbackPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LoopbackPeer({})", self.0.id)
    }
}

/// Memory a [`Loopback`] node knows of.
#[derive(Debug)]
pub struct LoopbackRegistration {
    _exposure: Option<Exposure>,
}

// SAFETY: local bytes are touched inside `submit` only; remote ones are checked and copied by `ExposedMemory`, whose exposures end
// when the registration is dropped.
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
            // SAFETY: the caller keeps the bytes until the registration, and the exposure in it, is dropped.
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
        let node = self.net.nodes.lock().alive.get(&id).and_then(Weak::upgrade);
        node.map(LoopbackPeer).ok_or_else(|| gone(id))
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

fn gone(id: u64) -> Error {
    Error::new(ErrorCode::TransferFail, format!("loopback node {id} is gone"))
}
