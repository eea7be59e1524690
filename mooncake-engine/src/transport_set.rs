//! The wires a node has, as one: which of them leads to a peer is decided by the peer's descriptor.
//!
//! The only place that knows which wires are built in. A feature `transport-*` adds a member and changes nothing else; with
//! none of them the set still works inside one process.

use std::sync::Arc;

use mooncake_core::clock::SharedClock;
use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, ErrorCode, Result};
#[cfg(feature = "transport-nvlink")]
use mooncake_nvlink::{CudaDriver, NvlinkConfig, NvlinkPeer, NvlinkTransport};
#[cfg(feature = "transport-rdma")]
use mooncake_rdma::{RdmaConfig, RdmaPeer, RdmaTransport};
#[cfg(feature = "transport-shm")]
use mooncake_shm::{ShmConfig, ShmPeer, ShmTransport};
#[cfg(feature = "transport-tcp")]
use mooncake_tcp::{TcpConfig, TcpPeer, TcpTransport};
use mooncake_transport::admission::raise_descriptor_limit;
use mooncake_transport::fallback::Behind;
#[cfg(all(any(feature = "transport-rdma", feature = "transport-shm"), feature = "transport-tcp"))]
use mooncake_transport::fallback::{self, with_fallback};
use mooncake_transport::loopback::{LoopbackPeer, LoopbackRegistration};
use mooncake_transport::{
    Access, Capabilities, Completion, Loopback, LoopbackNet, Op, Protocol, SegmentDesc, ThroughHost,
    Transport,
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
    /// RDMA. With TCP beside it, memory that is not registered and what fails goes over that; peers need not speak it.
    #[cfg(feature = "transport-rdma")]
    pub rdma: Option<RdmaConfig>,
    /// Copies between GPUs, over NVLink and CUDA IPC. Beside another wire it is a shorter way to memory of devices where it leads, and nothing else
    /// changes. Opening it uses CUDA, after which children made by `fork` cannot.
    #[cfg(feature = "transport-nvlink")]
    pub nvlink: Option<NvlinkConfig>,
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
    #[cfg(feature = "transport-rdma")]
    "rdma",
    #[cfg(feature = "transport-nvlink")]
    "nvlink",
    #[cfg(feature = "transport-nvlink")]
    "nvlink_intra",
];

/// Names of the RDMA devices that the library for them knows.
///
/// # Errors
/// `NOT_SUPPORTED` without the library, saying how to get it.
#[cfg(feature = "transport-rdma")]
pub fn rdma_devices() -> Result<Vec<String>> {
    mooncake_rdma::verbs::device_names()
}

/// Key of our own in descriptors of nodes on RDMA or NVLink: their TCP data port serves too. The existing system reads one wire's name there.
#[cfg(all(any(feature = "transport-rdma", feature = "transport-nvlink"), feature = "transport-tcp"))]
const TCP_BESIDE: &str = "tcp_beside";

impl TransportOptions {
    /// Nothing but the way inside one process, over that network.
    pub fn in_process(net: LoopbackNet) -> Self {
        Self { loopback: Some(net), ..Self::default() }
    }

    /// The wire of that name, as descriptors spell it, with shared memory beside TCP, TCP beside RDMA, and both beside NVLink, where those are built in; TCP for
    /// an empty name, if that is built in.
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
            #[cfg(feature = "transport-rdma")]
            "rdma" => Ok(Self {
                rdma: Some(RdmaConfig::default()),
                #[cfg(feature = "transport-tcp")]
                tcp: Some(TcpConfig::default()),
                ..Self::default()
            }),
            #[cfg(feature = "transport-nvlink")]
            "nvlink" | "nvlink_intra" => Ok(Self {
                nvlink: Some(NvlinkConfig { intra_node: protocol != "nvlink", ..NvlinkConfig::default() }),
                #[cfg(feature = "transport-shm")]
                shm: Some(ShmConfig::default()),
                #[cfg(feature = "transport-tcp")]
                tcp: Some(TcpConfig::default()),
                ..Self::default()
            }),
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
        raise_descriptor_limit();
        // Whatever wires there are: from now on memory of devices is known as such. Nothing is loaded for that.
        #[cfg(feature = "transport-nvlink")]
        if let Err(error) = CudaDriver::serve(self.nvlink.as_ref().and_then(|config| config.libcuda.clone()))
        {
            tracing::debug!(%error, "memory of GPUs is another driver's");
        }
        let wires = Wires {
            loopback: self.loopback.as_ref().map(LoopbackNet::node),
            #[cfg(feature = "transport-shm")]
            shm: self.open_shm(runtime, clock)?,
            #[cfg(feature = "transport-rdma")]
            rdma: self
                .rdma
                .clone()
                .map(|config| RdmaTransport::start_with_clock(config, runtime, clock.clone()))
                .transpose()?,
            #[cfg(feature = "transport-nvlink")]
            nvlink: self
                .nvlink
                .clone()
                .map(|config| NvlinkTransport::start_with_clock(config, runtime, clock.clone()))
                .transpose()?,
            #[cfg(feature = "transport-tcp")]
            tcp: self
                .tcp
                .clone()
                .map(|config| TcpTransport::start_with_clock(config, runtime, clock.clone()).map(Arc::new))
                .transpose()?,
        };
        if wires.is_empty() {
            return Err(Error::invalid("a node needs one wire at least"));
        }
        Ok(ThroughHost::unless(Arc::new(wires), clock.clone(), Wires::takes_device))
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

/// The wires of one node. Device memory goes through the host where the wire to a peer does not take it.
pub type TransportSet = ThroughHost<Wires>;

/// The wires by themselves.
#[derive(Debug)]
pub struct Wires {
    loopback: Option<Loopback>,
    #[cfg(feature = "transport-shm")]
    shm: Option<ShmTransport>,
    #[cfg(feature = "transport-rdma")]
    rdma: Option<RdmaTransport>,
    #[cfg(feature = "transport-nvlink")]
    nvlink: Option<NvlinkTransport>,
    #[cfg(feature = "transport-tcp")]
    tcp: Option<Arc<TcpTransport>>,
}

/// Memory as each wire knows it.
#[derive(Debug)]
pub struct SetRegistration {
    loopback: Option<LoopbackRegistration>,
    #[cfg(feature = "transport-shm")]
    shm: Option<mooncake_shm::Registration>,
    #[cfg(feature = "transport-rdma")]
    rdma: Option<mooncake_rdma::Registration>,
    #[cfg(feature = "transport-nvlink")]
    nvlink: Option<mooncake_nvlink::Registration>,
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
    /// Over RDMA, and what that cannot over TCP.
    #[cfg(feature = "transport-rdma")]
    Rdma(RdmaPeer, Beside),
    /// By copies of a device's own, and what those do not reach by the way behind, if there is one.
    #[cfg(feature = "transport-nvlink")]
    Nvlink(NvlinkPeer, Option<Box<SetPeer>>),
    /// Over TCP.
    #[cfg(feature = "transport-tcp")]
    Tcp(TcpPeer),
}

/// The wire to a peer for what the better one does not carry.
#[cfg(any(feature = "transport-rdma", feature = "transport-shm"))]
#[derive(Clone, Debug)]
pub struct Beside {
    #[cfg(feature = "transport-tcp")]
    tcp: Option<TcpPeer>,
    #[cfg(feature = "transport-tcp")]
    behind: Arc<Behind>,
}

#[cfg(any(feature = "transport-rdma", feature = "transport-shm"))]
impl Beside {
    /// What figures call a way that is the better wire's as far as that leads.
    fn with(&self, better: Protocol) -> Protocol {
        #[cfg(feature = "transport-tcp")]
        if self.tcp.is_some() {
            return Protocol::new(format!("{better}+{}", Protocol::TCP));
        }
        better
    }

    fn count(&mut self, behind: &Arc<Behind>) {
        let _ = behind;
        #[cfg(feature = "transport-tcp")]
        self.behind.clone_from(behind);
    }

    /// Has TCP do what the better wire does not.
    #[cfg(feature = "transport-tcp")]
    fn submit(&self, tcp: &TcpTransport, left: Vec<(Op<'_, mooncake_tcp::Registration>, Completion)>) {
        if let Some(peer) = self.tcp.as_ref().filter(|_| !left.is_empty()) {
            self.behind.add(&left);
            tcp.submit_shares(peer, left);
        }
    }
}

#[allow(unsafe_code)]
impl Wires {
    /// Whether the wire to that peer takes an operation's device memory from where it is.
    fn takes_device(&self, peer: &SetPeer, op: &Op<'_, SetRegistration>) -> bool {
        let _ = op;
        match peer {
            SetPeer::Loopback(_) => true,
            #[cfg(feature = "transport-rdma")]
            SetPeer::Rdma(..) => op.registration().is_some_and(|registration| registration.rdma.is_some()),
            #[cfg(feature = "transport-nvlink")]
            SetPeer::Nvlink(peer, behind) => {
                peer.leads_to(op.remote(), op.len() as u64)
                    || behind.as_ref().is_some_and(|behind| self.takes_device(behind, op))
            }
            #[allow(unreachable_patterns, reason = "with no other wire there is no other peer")]
            _ => false,
        }
    }

    fn is_empty(&self) -> bool {
        self.loopback.is_none() && self.between_processes().is_none()
    }

    /// Whether TCP carries what RDMA does not.
    #[cfg(feature = "transport-rdma")]
    fn tcp_is_beside(&self) -> bool {
        #[cfg(feature = "transport-tcp")]
        return self.tcp.is_some();
        #[cfg(not(feature = "transport-tcp"))]
        false
    }

    /// The wire that leads out of this process.
    fn between_processes(&self) -> Option<Protocol> {
        #[cfg(feature = "transport-rdma")]
        if let Some(rdma) = &self.rdma {
            return Some(rdma.protocol());
        }
        #[cfg(feature = "transport-nvlink")]
        if let Some(nvlink) = &self.nvlink {
            return Some(nvlink.protocol());
        }
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

    /// The way to a segment's owner in another process, apart from what devices copy themselves.
    async fn connect_others(&self, desc: &SegmentDesc) -> Result<SetPeer> {
        #[cfg(feature = "transport-tcp")]
        let tcp = self.connect_tcp(desc).await?;
        #[cfg(feature = "transport-shm")]
        if let Some(shm) = self.shm.as_ref().filter(|shm| shm.reaches(desc)) {
            match shm.connect(desc).await {
                #[cfg(feature = "transport-tcp")]
                Ok(peer) => return Ok(SetPeer::Shm(peer, Beside { tcp, behind: Arc::default() })),
                #[cfg(not(feature = "transport-tcp"))]
                Ok(peer) => return Ok(SetPeer::Shm(peer, Beside {})),
                #[cfg(feature = "transport-tcp")]
                Err(error) if tcp.is_some() => {
                    tracing::debug!(segment = desc.name, %error, "its memory is not shared with us");
                }
                Err(error) => return Err(error),
            }
        }
        #[cfg(feature = "transport-rdma")]
        if let Some(rdma) = self.rdma.as_ref().filter(|rdma| rdma.reaches(desc)) {
            let beside = Beside {
                #[cfg(feature = "transport-tcp")]
                tcp,
                #[cfg(feature = "transport-tcp")]
                behind: Arc::default(),
            };
            return rdma.connect(desc).await.map(|peer| SetPeer::Rdma(peer, beside));
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

    /// The same with what devices copy themselves in front, where that leads.
    #[cfg(feature = "transport-nvlink")]
    async fn connect_nvlink(&self, desc: &SegmentDesc) -> Result<SetPeer> {
        let Some(nvlink) = self.nvlink.as_ref().filter(|nvlink| nvlink.reaches(desc)) else {
            return self.connect_others(desc).await;
        };
        match (nvlink.connect(desc).await, self.connect_others(desc).await) {
            (Ok(peer), behind) => Ok(SetPeer::Nvlink(peer, behind.ok().map(Box::new))),
            (Err(error), Ok(behind)) => {
                tracing::debug!(segment = desc.name, %error, "its devices are not opened to ours");
                Ok(behind)
            }
            (Err(error), Err(_)) => Err(error),
        }
    }

    #[cfg(feature = "transport-nvlink")]
    fn submit_nvlink<'a, I>(&self, peer: &NvlinkPeer, behind: Option<&SetPeer>, ops: I, done: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, SetRegistration>>,
    {
        let Some(nvlink) = &self.nvlink else { return done.finish(Err(not_ours())) };
        let ops: Vec<_> = ops.collect();
        // SAFETY: the member's registration covers the same bytes, and lives as long as the composite.
        let own = |op: &Op<'a, SetRegistration>| unsafe {
            op.with_registration(op.registration().and_then(|r| r.nvlink.as_ref()))
        };
        let Some(behind) = behind else { return nvlink.submit(peer, ops.iter().map(own), done) };
        // Most often all is memory of the host's, and stays one submission.
        if !ops.iter().any(|op| peer.leads_to(op.remote(), op.len() as u64)) {
            return self.submit(behind, ops.into_iter(), done);
        }
        let (first, mut missed) = (done.numbers().start, Vec::new());
        nvlink.submit_or(peer, ops.iter().map(own), done, |_, share, why| missed.push((share, why)));
        for (share, why) in missed {
            let op = ops[share.numbers().start - first];
            if op.local().location.is_device() && !self.takes_device(behind, &op) {
                // Unavailable, so that it is tried again through the host.
                let text = format!("{} does not reach the peer's memory ({why:?})", op.local().location);
                share.finish(Err(Error::new(ErrorCode::TransferFail, text)));
                continue;
            }
            tracing::debug!(?why, "an operation goes by the way behind");
            self.submit(behind, std::iter::once(op), share);
        }
    }

    #[cfg(feature = "transport-tcp")]
    async fn connect_tcp(&self, desc: &SegmentDesc) -> Result<Option<TcpPeer>> {
        #[cfg(any(feature = "transport-rdma", feature = "transport-nvlink"))]
        let desc = &*with_tcp(desc);
        match self.tcp.as_ref().filter(|tcp| tcp.reaches(desc)) {
            Some(tcp) => tcp.connect(desc).await.map(Some),
            None => Ok(None),
        }
    }

    #[cfg(feature = "transport-rdma")]
    fn submit_rdma<'a, I>(&self, peer: &RdmaPeer, beside: &Beside, ops: I, done: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, SetRegistration>>,
    {
        let Some(rdma) = &self.rdma else { return done.finish(Err(not_ours())) };
        // SAFETY: the member's registration covers the same bytes, and lives as long as the composite.
        let ops =
            ops.map(|op| unsafe { op.with_registration(op.registration().and_then(|r| r.rdma.as_ref())) });
        #[cfg(feature = "transport-tcp")]
        if let (Some(tcp), true) = (&self.tcp, beside.tcp.is_some()) {
            let (wire, way) = (Arc::downgrade(tcp), beside.clone());
            let guarded = with_fallback(ops, done, rdma.clock(), fallback::of_the_way, move |failed| {
                if let Some(wire) = wire.upgrade() {
                    way.submit(&wire, failed);
                }
            });
            let (ops, elsewhere, mut missed) = (guarded.ops, guarded.elsewhere, Vec::new());
            rdma.submit_or(peer, ops.into_iter(), guarded.done, |op, share| {
                elsewhere.add(&share);
                // SAFETY: none is given, and TCP asks for none.
                missed.push((unsafe { op.with_registration(None) }, share));
            });
            return beside.submit(tcp, missed);
        }
        let _ = beside;
        rdma.submit(peer, ops, done);
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
        if let (Some(tcp), true) = (&self.tcp, beside.tcp.is_some()) {
            let ops: Vec<_> = ops.collect();
            let mut missed = Vec::new();
            // What is copied here and now finishes before this returns, and what is not there is seen at once.
            if ops.iter().map(Op::len).sum::<usize>() <= shm.inline_bytes() {
                shm.submit_or(peer, ops.into_iter(), done, |op, share| missed.push((bare(&op), share)));
                return beside.submit(tcp, missed);
            }
            // Longer copies may fail when half of them is done, and then there is still the wire.
            let (wire, way) = (Arc::downgrade(tcp), beside.clone());
            let guarded = with_fallback(ops.into_iter(), done, shm.clock(), fallback::any, move |failed| {
                if let Some(wire) = wire.upgrade() {
                    way.submit(&wire, failed);
                }
            });
            shm.submit_or(peer, guarded.ops.into_iter(), guarded.done, |op, share| {
                guarded.elsewhere.add(&share);
                missed.push((bare(&op), share));
            });
            return beside.submit(tcp, missed);
        }
        let _ = beside;
        shm.submit(peer, ops, done);
    }
}

// SAFETY: every call goes to one member, and with it what the member promises; a registration holds one of each, and a
// composite is dropped with its parts.
#[allow(unsafe_code)]
unsafe impl Transport for Wires {
    type Registration = SetRegistration;
    type Peer = SetPeer;

    fn protocol(&self) -> Protocol {
        self.between_processes().unwrap_or(Protocol::LOOPBACK)
    }

    fn capabilities(&self) -> Capabilities {
        #[cfg(all(feature = "transport-rdma", not(feature = "transport-tcp")))]
        if let Some(rdma) = &self.rdma {
            return rdma.capabilities();
        }
        #[cfg(all(feature = "transport-rdma", feature = "transport-tcp"))]
        if let Some(rdma) = self.rdma.as_ref().filter(|_| self.tcp.is_none()) {
            return rdma.capabilities();
        }
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
        #[cfg(feature = "transport-nvlink")]
        if let Some(nvlink) = &self.nvlink {
            return nvlink.capabilities();
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
        // Listed while it is registered: devices take it by the descriptor then.
        #[cfg(all(feature = "transport-rdma", feature = "transport-nvlink"))]
        let _buffer = match (&self.rdma, span.location.is_device()) {
            (Some(_), true) => CudaDriver::serve(None).and_then(|driver| driver.list_dma_buf(span)).ok(),
            _ => None,
        };
        #[cfg(feature = "transport-rdma")]
        let rdma = match &self.rdma {
            // SAFETY: as above.
            Some(rdma) => match unsafe { rdma.register(span, access) } {
                Err(error) if span.location.is_device() && self.tcp_is_beside() => {
                    tracing::debug!(%error, place = %span.location, "memory that goes over the other wire");
                    None
                }
                registered => Some(registered?),
            },
            None => None,
        };
        #[cfg(feature = "transport-nvlink")]
        let nvlink = match &self.nvlink {
            // SAFETY: as above.
            Some(nvlink) => Some(unsafe { nvlink.register(span, access) }?),
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
            #[cfg(feature = "transport-rdma")]
            rdma,
            #[cfg(feature = "transport-nvlink")]
            nvlink,
            #[cfg(feature = "transport-tcp")]
            tcp,
        })
    }

    #[cfg(feature = "transport-rdma")]
    fn export(&self, registration: &SetRegistration) -> Vec<u8> {
        // The only wire with keys.
        match (&self.rdma, &registration.rdma) {
            (Some(rdma), Some(registration)) => rdma.export(registration),
            _ => Vec::new(),
        }
    }

    fn describe(&self, desc: &mut SegmentDesc) {
        #[cfg(feature = "transport-tcp")]
        if let Some(tcp) = &self.tcp {
            tcp.describe(desc);
        }
        #[cfg(feature = "transport-rdma")]
        if let Some(rdma) = &self.rdma {
            #[cfg(feature = "transport-tcp")]
            if self.tcp.is_some() {
                desc.protocols.retain(|wire| *wire != Protocol::TCP);
                desc.extra.insert(TCP_BESIDE.into(), true.into());
            }
            rdma.describe(desc);
        }
        #[cfg(feature = "transport-nvlink")]
        if let Some(nvlink) = &self.nvlink {
            #[cfg(feature = "transport-tcp")]
            if desc.protocols == [Protocol::TCP] {
                desc.protocols.clear();
                desc.extra.insert(TCP_BESIDE.into(), true.into());
            }
            nvlink.describe(desc);
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
        #[cfg(feature = "transport-nvlink")]
        if self.nvlink.as_ref().is_some_and(|nvlink| nvlink.reaches(desc)) {
            return true;
        }
        #[cfg(feature = "transport-rdma")]
        if self.rdma.as_ref().is_some_and(|rdma| rdma.reaches(desc)) {
            return true;
        }
        #[cfg(all(any(feature = "transport-rdma", feature = "transport-nvlink"), feature = "transport-tcp"))]
        let desc = &*with_tcp(desc);
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
        #[cfg(feature = "transport-nvlink")]
        return self.connect_nvlink(desc).await;
        #[cfg(not(feature = "transport-nvlink"))]
        self.connect_others(desc).await
    }

    #[cfg(feature = "transport-rdma")]
    async fn accept(&self, request: serde_json::Value) -> serde_json::Value {
        match &self.rdma {
            Some(rdma) => rdma.accept(request).await,
            None => mooncake_transport::handshake::no_connection(),
        }
    }

    fn wire_to(&self, peer: &SetPeer) -> Protocol {
        match peer {
            SetPeer::Loopback(_) => Protocol::LOOPBACK,
            #[cfg(feature = "transport-rdma")]
            SetPeer::Rdma(_, beside) => beside.with(Protocol::RDMA),
            #[cfg(feature = "transport-shm")]
            SetPeer::Shm(_, beside) => beside.with(Protocol::SHM),
            #[cfg(feature = "transport-nvlink")]
            SetPeer::Nvlink(_, None) => Protocol::NVLINK,
            #[cfg(feature = "transport-nvlink")]
            SetPeer::Nvlink(_, Some(behind)) => {
                Protocol::new(format!("{}+{}", Protocol::NVLINK, self.wire_to(behind)))
            }
            #[cfg(feature = "transport-tcp")]
            SetPeer::Tcp(_) => Protocol::TCP,
        }
    }

    fn count_behind(&self, peer: &mut SetPeer, behind: &Arc<Behind>) {
        let _ = behind;
        match peer {
            #[cfg(feature = "transport-rdma")]
            SetPeer::Rdma(_, beside) => beside.count(behind),
            #[cfg(feature = "transport-shm")]
            SetPeer::Shm(_, beside) => beside.count(behind),
            #[cfg(feature = "transport-nvlink")]
            SetPeer::Nvlink(_, Some(way)) => self.count_behind(way, behind),
            _ => {}
        }
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
            #[cfg(feature = "transport-rdma")]
            SetPeer::Rdma(peer, beside) => self.submit_rdma(peer, beside, ops, done),
            #[cfg(feature = "transport-nvlink")]
            SetPeer::Nvlink(peer, behind) => self.submit_nvlink(peer, behind.as_deref(), ops, done),
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

/// A descriptor as TCP is to see it: that of a node on RDMA or NVLink, when its TCP data port serves as well.
#[cfg(all(any(feature = "transport-rdma", feature = "transport-nvlink"), feature = "transport-tcp"))]
fn with_tcp(desc: &SegmentDesc) -> std::borrow::Cow<'_, SegmentDesc> {
    let beside = desc.extra.get(TCP_BESIDE).is_some_and(|beside| *beside == true);
    if !beside || desc.speaks(&Protocol::TCP) {
        return std::borrow::Cow::Borrowed(desc);
    }
    let mut desc = desc.clone();
    desc.protocols.push(Protocol::TCP);
    std::borrow::Cow::Owned(desc)
}

/// Whether a node serves a wire of that name: also TCP beside RDMA or NVLink, which its descriptor does not list as a wire of its own.
pub fn serves(desc: &SegmentDesc, wire: &str) -> bool {
    #[cfg(all(any(feature = "transport-rdma", feature = "transport-nvlink"), feature = "transport-tcp"))]
    let desc = &*with_tcp(desc);
    desc.protocols.iter().any(|protocol| protocol.as_str() == wire)
}

fn not_ours() -> Error {
    Error::invalid("the peer was connected by another set of wires")
}
