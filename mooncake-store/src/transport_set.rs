//! The wires a client has, as one: which of them leads to a peer is decided by the peer's descriptor.
//!
//! The only place that knows which wires are built in. A feature `transport-*` adds a member and changes nothing else; with
//! none of them the set still works inside one process.

use mooncake_core::clock::SharedClock;
use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, ErrorCode, Result};
#[cfg(feature = "transport-tcp")]
use mooncake_tcp::{TcpConfig, TcpPeer, TcpTransport};
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
    /// TCP.
    #[cfg(feature = "transport-tcp")]
    pub tcp: Option<TcpConfig>,
}

impl TransportOptions {
    /// Nothing but the way inside one process, over that network.
    pub fn in_process(net: LoopbackNet) -> Self {
        Self { loopback: Some(net), ..Self::default() }
    }

    /// The wire of that name, as descriptors spell it; the best one built in for an empty name.
    ///
    /// # Errors
    /// `NOT_SUPPORTED`, naming those built in.
    pub fn named(protocol: &str) -> Result<Self> {
        match protocol {
            #[cfg(feature = "transport-tcp")]
            "" | "tcp" => Ok(Self { tcp: Some(TcpConfig::default()), ..Self::default() }),
            other => Err(Error::new(
                ErrorCode::NotSupported,
                format!(
                    "no wire {other:?} is built in between processes; there is: {}",
                    if cfg!(feature = "transport-tcp") {
                        "tcp"
                    } else {
                        "none (see the features `transport-*`)"
                    }
                ),
            )),
        }
    }

    /// Opens the wires; their tasks run on `runtime`, and deadlines are moments of `clock`.
    ///
    /// # Errors
    /// A port that is in use, no wire at all, or whatever else keeps one from opening, by name.
    pub fn open(&self, runtime: &Handle, clock: &SharedClock) -> Result<TransportSet> {
        #[cfg(not(feature = "transport-tcp"))]
        let _ = (runtime, clock);
        let set = TransportSet {
            loopback: self.loopback.as_ref().map(LoopbackNet::node),
            #[cfg(feature = "transport-tcp")]
            tcp: self
                .tcp
                .clone()
                .map(|config| TcpTransport::start_with_clock(config, runtime, clock.clone()))
                .transpose()?,
        };
        if set.is_empty() {
            return Err(Error::invalid("a node needs one wire at least"));
        }
        Ok(set)
    }
}

/// The wires of one node.
#[derive(Debug)]
pub struct TransportSet {
    loopback: Option<Loopback>,
    #[cfg(feature = "transport-tcp")]
    tcp: Option<TcpTransport>,
}

/// Memory as each wire knows it.
#[derive(Debug)]
pub struct SetRegistration {
    loopback: Option<LoopbackRegistration>,
    #[cfg(feature = "transport-tcp")]
    tcp: Option<mooncake_tcp::Registration>,
}

/// A peer, by the wire that leads to it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum SetPeer {
    /// In this process.
    Loopback(LoopbackPeer),
    /// Over TCP.
    #[cfg(feature = "transport-tcp")]
    Tcp(TcpPeer),
}

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
        None
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
            return tcp.capabilities();
        }
        self.loopback.as_ref().map_or_else(Capabilities::default, Transport::capabilities)
    }

    unsafe fn register(&self, span: MemorySpan, access: Access) -> Result<SetRegistration> {
        let loopback = match &self.loopback {
            // SAFETY: the caller keeps the memory for as long as the whole registration.
            Some(node) => Some(unsafe { node.register(span, access) }?),
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
            #[cfg(feature = "transport-tcp")]
            tcp,
        })
    }

    fn describe(&self, desc: &mut SegmentDesc) {
        #[cfg(feature = "transport-tcp")]
        if let Some(tcp) = &self.tcp {
            tcp.describe(desc);
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
        self.loopback.as_ref().is_some_and(|node| node.reaches(desc))
    }

    async fn connect(&self, desc: &SegmentDesc) -> Result<SetPeer> {
        // The shortest way first.
        if let Some(node) = self.loopback.as_ref().filter(|node| node.reaches(desc)) {
            return node.connect(desc).await.map(SetPeer::Loopback);
        }
        #[cfg(feature = "transport-tcp")]
        if let Some(tcp) = self.tcp.as_ref().filter(|tcp| tcp.reaches(desc)) {
            return tcp.connect(desc).await.map(SetPeer::Tcp);
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

fn not_ours() -> Error {
    Error::invalid("the peer was connected by another set of wires")
}
