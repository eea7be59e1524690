//! The wires a node has, as one: which of them leads to a peer is decided by the peer's descriptor.
//!
//! The only place that knows which wires are built in. A feature `transport-*` adds a member and changes nothing else; with
//! none of them the set still works inside one process.

#[cfg(feature = "transport-tcp")]
use std::sync::Arc;

use mooncake_core::clock::SharedClock;
use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, ErrorCode, Result};
#[cfg(feature = "transport-shm")]
use mooncake_shm::{ShmConfig, ShmPeer, ShmTransport};
#[cfg(feature = "transport-tcp")]
use mooncake_tcp::{TcpConfig, TcpPeer, TcpTransport};
#[cfg(all(feature = "transport-shm", feature = "transport-tcp"))]
use mooncake_transport::fallback::with_fallback;
use mooncake_transport::loopback::{LoopbackPeer, LoopbackRegistration};
use mooncake_transport::{
    Access, Capabilities, Completion, Loopback, LoopbackNet, Op, Protocol, SegmentDesc, Transport,
};
use tokio::runtime::Handle;

/// Which wires to open.
#[derive(Clone, Debug, Default)]
pub struct TransportOptions {
    /// The way to nodes of the same process on that network. (Plain copies inside the process are the engine's affair and
    /// need no wire.)
    pub loopback: Option<LoopbackNet>,
    /// Shared memory, to nodes of the same host. Beside another wire it is a shorter way where it leads, and nothing else changes: what
    /// it does not reach (another user's process or network namespace, memory that is not shared) goes over the other one.
    #[cfg(feature = "transport-shm")]
    pub shm: Option<ShmConfig>,
    /// TCP.
    #[cfg(feature = "transport-tcp")]
    pub tcp: Option<TcpConfig>,
}

/// The wires between processes that are built in.
const BUILT_IN: &[&str] = &[
    #[cfg(feature = "transport-tcp")]
    "tcp",
    #[cfg(feature = "transport-shm")]
    "shm",
];

impl TransportOptions {
    /// Nothing but the way inside one process, over that network.
    pub fn in_process(net: LoopbackNet) -> Self {
        Self { loopback: Some(net), ..Self::default() }
    }

    /// The wire of that name, as descriptors spell it, with shared memory beside it if that is built in; the best one built in for
    /// an empty name.
    ///
    /// # Errors
    /// `NOT_SUPPORTED`, naming those built in.
    pub fn named(protocol: &str) -> Result<Self> {
        let protocol = if protocol.is_empty() { BUILT_IN.first().copied().unwrap_or("") } else { protocol };
        match protocol {
            #[cfg(feature = "transport-tcp")]
            "tcp" => Ok(Self {
                #[cfg(feature = "transport-shm")]
                shm: Some(ShmConfig::default()),
                tcp: Some(TcpConfig::default()),
                ..Self::default()
            }),
            #[cfg(feature = "transport-shm")]
            "shm" => Ok(Self { shm: Some(ShmConfig::default()), ..Self::default() }),
            other => Err(Error::new(
                ErrorCode::NotSupported,
                format!(
                    "no wire {other:?} is built in between processes; there is: {}",
                    if BUILT_IN.is_empty() {
                        "none (see the features `transport-*`)".into()
                    } else {
                        BUILT_IN.join(", ")
                    }
                ),
            )),
        }
    }

    /// The same without shared memory.
    pub fn without_shared_memory(self) -> Self {
        Self {
            #[cfg(feature = "transport-shm")]
            shm: None,
            ..self
        }
    }

    /// Opens the wires; their tasks run on `runtime`, and deadlines are moments of `clock`.
    ///
    /// # Errors
    /// A port that is in use, no wire at all, or whatever else keeps one from opening, by name.
    pub fn open(&self, runtime: &Handle, clock: &SharedClock) -> Result<TransportSet> {
        let _ = (runtime, clock);
        let set = TransportSet {
            loopback: self.loopback.as_ref().map(LoopbackNet::node),
            #[cfg(feature = "transport-shm")]
            shm: self.open_shm(runtime, clock)?,
            #[cfg(feature = "transport-tcp")]
            tcp: self
                .tcp
                .clone()
                .map(|config| TcpTransport::start_with_clock(config, runtime, clock.clone()).map(Arc::new))
                .transpose()?,
        };
        if set.is_empty() {
            return Err(Error::invalid("a node needs one wire at least"));
        }
        Ok(set)
    }

    #[cfg(feature = "transport-shm")]
    fn open_shm(&self, runtime: &Handle, clock: &SharedClock) -> Result<Option<ShmTransport>> {
        let Some(config) = self.shm.clone() else { return Ok(None) };
        match ShmTransport::start_with_clock(config, runtime, clock.clone()) {
            #[cfg(feature = "transport-tcp")]
            Err(error) if self.tcp.is_some() => {
                tracing::warn!(%error, "no shared memory with nodes of this host; all goes over the wire");
                Ok(None)
            }
            opened => opened.map(Some),
        }
    }
}

/// The wires of one node.
#[derive(Debug)]
pub struct TransportSet {
    loopback: Option<Loopback>,
    #[cfg(feature = "transport-shm")]
    shm: Option<ShmTransport>,
    #[cfg(feature = "transport-tcp")]
    tcp: Option<Arc<TcpTransport>>,
}

/// Memory as each wire knows it.
#[derive(Debug)]
pub struct SetRegistration {
    loopback: Option<LoopbackRegistration>,
    #[cfg(feature = "transport-shm")]
    shm: Option<mooncake_shm::Registration>,
    #[cfg(feature = "transport-tcp")]
    tcp: Option<mooncake_tcp::Registration>,
}

/// A peer, by the wire that leads to it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum SetPeer {
    /// In this process.
    Loopback(LoopbackPeer),
    /// In shared memory where that reaches, over the wire where it does not.
    #[cfg(feature = "transport-shm")]
    Shm(ShmPeer, Beside),
    /// Over TCP.
    #[cfg(feature = "transport-tcp")]
    Tcp(TcpPeer),
}

/// The wire to a peer on this host for what is not in shared memory.
#[cfg(feature = "transport-shm")]
#[derive(Clone, Debug)]
pub struct Beside {
    #[cfg(feature = "transport-tcp")]
    tcp: Option<TcpPeer>,
}

#[allow(unsafe_code)]
impl TransportSet {
    fn is_empty(&self) -> bool {
        self.loopback.is_none() && self.between_processes().is_none()
    }

    /// The wire that leads out of this process.
    fn between_processes(&self) -> Option<Protocol> {
        #[cfg(feature = "transport-tcp")]
        if let Some(tcp) = &self.tcp {
            return Some(tcp.protocol());
        }
        #[cfg(feature = "transport-shm")]
        if let Some(shm) = &self.shm {
            return Some(shm.protocol());
        }
        None
    }

    #[cfg(feature = "transport-tcp")]
    async fn connect_tcp(&self, desc: &SegmentDesc) -> Result<Option<TcpPeer>> {
        match self.tcp.as_ref().filter(|tcp| tcp.reaches(desc)) {
            Some(tcp) => tcp.connect(desc).await.map(Some),
            None => Ok(None),
        }
    }

    #[cfg(feature = "transport-shm")]
    fn submit_shm<'a, I>(&self, peer: &ShmPeer, beside: &Beside, ops: I, done: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, SetRegistration>>,
    {
        let Some(shm) = &self.shm else { return done.finish(Err(not_ours())) };
        // SAFETY: the member's registration covers the same bytes, and lives as long as the composite.
        let ops =
            ops.map(|op| unsafe { op.with_registration(op.registration().and_then(|r| r.shm.as_ref())) });
        #[cfg(feature = "transport-tcp")]
        if let (Some(tcp), Some(peer_by_tcp)) = (&self.tcp, &beside.tcp) {
            let ops: Vec<_> = ops.collect();
            // What is copied here and now finishes before this returns, and what is not there is seen at once.
            if ops.iter().map(Op::len).sum::<usize>() <= shm.inline_bytes() {
                let mut missed = Vec::new();
                shm.submit_or(peer, ops.into_iter(), done, |op, share| missed.push((bare(&op), share)));
                return tcp.submit_shares(peer_by_tcp, missed);
            }
            // Longer copies may fail when half of them is done, and then there is still the wire.
            let (wire, way) = (Arc::downgrade(tcp), peer_by_tcp.clone());
            let guarded = with_fallback(ops.into_iter(), done, shm.clock(), move |failed| {
                if let Some(wire) = wire.upgrade() {
                    wire.submit_shares(&way, failed);
                }
            });
            let mut missed = Vec::new();
            shm.submit_or(peer, guarded.ops.into_iter(), guarded.done, |op, share| {
                guarded.elsewhere.add(&share);
                missed.push((bare(&op), share));
            });
            return tcp.submit_shares(peer_by_tcp, missed);
        }
        let _ = beside;
        shm.submit(peer, ops, done);
    }
}

// SAFETY: every call goes to one member, and with it what the member promises; a registration holds one of each, and a
// composite is dropped with its parts.
#[allow(unsafe_code)]
unsafe impl Transport for TransportSet {
    type Registration = SetRegistration;
    type Peer = SetPeer;

    fn protocol(&self) -> Protocol {
        self.between_processes().unwrap_or(Protocol::LOOPBACK)
    }

    fn capabilities(&self) -> Capabilities {
        #[cfg(feature = "transport-tcp")]
        if let Some(tcp) = &self.tcp {
            let can = tcp.capabilities();
            #[cfg(feature = "transport-shm")]
            let can = can.shared_memory(self.shm.is_some());
            return can;
        }
        #[cfg(feature = "transport-shm")]
        if let Some(shm) = &self.shm {
            return shm.capabilities();
        }
        self.loopback.as_ref().map_or_else(Capabilities::default, Transport::capabilities)
    }

    unsafe fn register(&self, span: MemorySpan, access: Access) -> Result<SetRegistration> {
        let loopback = match &self.loopback {
            // SAFETY: the caller keeps the memory for as long as the whole registration.
            Some(node) => Some(unsafe { node.register(span, access) }?),
            None => None,
        };
        #[cfg(feature = "transport-shm")]
        let shm = match &self.shm {
            // SAFETY: as above.
            Some(shm) => Some(unsafe { shm.register(span, access) }?),
            None => None,
        };
        #[cfg(feature = "transport-tcp")]
        let tcp = match &self.tcp {
            // SAFETY: as above.
            Some(tcp) => Some(unsafe { tcp.register(span, access) }?),
            None => None,
        };
        Ok(SetRegistration {
            loopback,
            #[cfg(feature = "transport-shm")]
            shm,
            #[cfg(feature = "transport-tcp")]
            tcp,
        })
    }

    fn describe(&self, desc: &mut SegmentDesc) {
        #[cfg(feature = "transport-tcp")]
        if let Some(tcp) = &self.tcp {
            tcp.describe(desc);
        }
        // After the wire, beside which it is not named.
        #[cfg(feature = "transport-shm")]
        if let Some(shm) = &self.shm {
            shm.describe(desc);
        }
        if let Some(node) = &self.loopback {
            node.describe(desc);
        }
    }

    fn reaches(&self, desc: &SegmentDesc) -> bool {
        #[cfg(feature = "transport-tcp")]
        if self.tcp.as_ref().is_some_and(|tcp| tcp.reaches(desc)) {
            return true;
        }
        #[cfg(feature = "transport-shm")]
        if self.shm.as_ref().is_some_and(|shm| shm.reaches(desc)) {
            return true;
        }
        self.loopback.as_ref().is_some_and(|node| node.reaches(desc))
    }

    async fn connect(&self, desc: &SegmentDesc) -> Result<SetPeer> {
        // The shortest way first.
        if let Some(node) = self.loopback.as_ref().filter(|node| node.reaches(desc)) {
            return node.connect(desc).await.map(SetPeer::Loopback);
        }
        #[cfg(feature = "transport-tcp")]
        let tcp = self.connect_tcp(desc).await?;
        #[cfg(feature = "transport-shm")]
        if let Some(shm) = self.shm.as_ref().filter(|shm| shm.reaches(desc)) {
            match shm.connect(desc).await {
                #[cfg(feature = "transport-tcp")]
                Ok(peer) => return Ok(SetPeer::Shm(peer, Beside { tcp })),
                #[cfg(not(feature = "transport-tcp"))]
                Ok(peer) => return Ok(SetPeer::Shm(peer, Beside {})),
                #[cfg(feature = "transport-tcp")]
                Err(error) if tcp.is_some() => {
                    tracing::debug!(segment = desc.name, %error, "its memory is not shared with us");
                }
                Err(error) => return Err(error),
            }
        }
        #[cfg(feature = "transport-tcp")]
        if let Some(peer) = tcp {
            return Ok(SetPeer::Tcp(peer));
        }
        let theirs: Vec<&str> = desc.protocols.iter().map(Protocol::as_str).collect();
        Err(Error::new(
            ErrorCode::NotSupported,
            format!(
                "segment {:?} is reached by {}, this node speaks {}",
                desc.name,
                theirs.join(", "),
                self.protocol()
            ),
        ))
    }

    fn submit<'a, I>(&self, peer: &SetPeer, ops: I, done: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, SetRegistration>>,
    {
        match peer {
            SetPeer::Loopback(peer) => match &self.loopback {
                Some(node) => node.submit(
                    peer,
                    // SAFETY: the member's registration covers the same bytes, and lives as long as the composite.
                    ops.map(|op| unsafe {
                        op.with_registration(op.registration().and_then(|r| r.loopback.as_ref()))
                    }),
                    done,
                ),
                None => done.finish(Err(not_ours())),
            },
            #[cfg(feature = "transport-shm")]
            SetPeer::Shm(peer, beside) => self.submit_shm(peer, beside, ops, done),
            #[cfg(feature = "transport-tcp")]
            SetPeer::Tcp(peer) => match &self.tcp {
                Some(tcp) => tcp.submit(
                    peer,
                    // SAFETY: as above.
                    ops.map(|op| unsafe {
                        op.with_registration(op.registration().and_then(|r| r.tcp.as_ref()))
                    }),
                    done,
                ),
                None => done.finish(Err(not_ours())),
            },
        }
    }
}

/// The same for the wire that asks for no registration.
#[cfg(all(feature = "transport-shm", feature = "transport-tcp"))]
#[allow(unsafe_code)]
fn bare<'a, S>(op: &Op<'a, mooncake_shm::Registration>) -> Op<'a, S> {
    // SAFETY: none is given.
    unsafe { op.with_registration(None) }
}

fn not_ours() -> Error {
    Error::invalid("the peer was connected by another set of wires")
}
