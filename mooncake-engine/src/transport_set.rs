//! The transports of a node as one. The descriptor of a peer selects the transport that leads to
//! it.
//!
//! Every path below is compiled in every build: `built_in` replaces a transport that the build
//! leaves out. Without any feature `transport-*`, the set works inside one process.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;

use mooncake_core::clock::SharedClock;
use mooncake_core::memory::MemorySpan;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::admission::raise_descriptor_limit;
use mooncake_transport::config::{NvlinkConfig, RdmaConfig, ShmConfig, TcpConfig};
use mooncake_transport::fallback::{FallbackCounter, FallbackPeer, PartialTransport};
use mooncake_transport::handshake::AcceptConnection;
use mooncake_transport::loopback::{LoopbackPeer, LoopbackRegistration};
use mooncake_transport::statistics::NicLoad;
use mooncake_transport::{
    Access, Capabilities, Completion, Loopback, LoopbackNet, Op, PathStatistics, Protocol, SegmentDesc,
    ThroughHost, Transport,
};
use tokio::runtime::Handle;

use crate::built_in::{self, CudaDriver, Nvlink, Rdma, Shm, Tcp};

/// Transports to open.
#[derive(Clone, Debug, Default)]
pub struct TransportOptions {
    /// Network of nodes in this process. The engine copies memory inside the process without it.
    pub loopback: Option<LoopbackNet>,
    /// Shared memory, to nodes of the same host. Beside another transport it is a faster path where
    /// it leads. Other memory (another user's process or network namespace, memory that is not
    /// shared) goes over the other transport.
    pub shm: Option<ShmConfig>,
    /// RDMA. With TCP beside it, operations with unregistered memory and failed operations go over
    /// TCP, and peers need not support RDMA.
    pub rdma: Option<RdmaConfig>,
    /// Copies between GPUs, over NVLink and CUDA IPC. Beside another transport it is a faster path
    /// to device memory where it leads. Opening it uses CUDA; children made by `fork` cannot use
    /// CUDA then.
    pub nvlink: Option<NvlinkConfig>,
    /// TCP.
    pub tcp: Option<TcpConfig>,
}

/// Names of the RDMA devices that the verbs library knows.
///
/// # Errors
/// `NOT_SUPPORTED` without the library, with the way to install it, or without feature
/// `transport-rdma`.
pub fn rdma_devices() -> Result<Vec<String>> {
    built_in::device_names()
}

/// Describes the GPUs of this host: name, driver, and which peers can open their memory. Opens all
/// of them. The description of a GPU whose memory no peer can open is an error with its name.
///
/// # Errors
/// `NOT_SUPPORTED` without a driver or a GPU, with what to install, or without feature
/// `transport-nvlink`.
pub fn gpus() -> Result<Vec<Result<String>>> {
    built_in::device_summaries()
}

/// Key in the descriptors of nodes with RDMA or NVLink whose TCP data port serves too. Mooncake C++
/// reads the name of one transport only.
const SERVES_TCP_KEY: &str = "tcp_beside";

impl TransportOptions {
    /// Selects the network inside one process alone.
    pub fn in_process(net: LoopbackNet) -> Self {
        Self { loopback: Some(net), ..Self::default() }
    }

    /// Selects the transport of that name, as descriptors spell it, with the transports beside it
    /// that this build has: shared memory beside TCP, TCP beside RDMA, and both beside NVLink. An
    /// empty name selects TCP, or the first transport that this build has.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` with the names of the transports that this build has.
    pub fn for_protocol(protocol: &str) -> Result<Self> {
        let protocol = if protocol.is_empty() { built_in::names().next().unwrap_or("") } else { protocol };
        let shm = || built_in::has("shm").then(ShmConfig::default);
        let tcp = || built_in::has("tcp").then(TcpConfig::default);
        match protocol {
            _ if !built_in::has(protocol) => Err(unknown_transport(protocol)),
            "shm" => Ok(Self { shm: shm(), ..Self::default() }),
            "rdma" => Ok(Self { rdma: Some(RdmaConfig::default()), tcp: tcp(), ..Self::default() }),
            "nvlink" | "nvlink_intra" => {
                let intra_node = protocol != "nvlink";
                let nvlink = Some(NvlinkConfig { intra_node, ..NvlinkConfig::default() });
                Ok(Self { nvlink, shm: shm(), tcp: tcp(), ..Self::default() })
            }
            _ => Ok(Self { shm: shm(), tcp: tcp(), ..Self::default() }),
        }
    }

    /// Removes shared memory.
    pub fn without_shared_memory(self) -> Self {
        Self { shm: None, ..self }
    }

    /// Sets the address at which the data port of TCP listens, unless it has one.
    pub fn bound_to(mut self, address: Option<IpAddr>) -> Self {
        if let Some(tcp) = &mut self.tcp {
            tcp.bind = tcp.bind.or(address);
        }
        self
    }

    /// Opens the transports. Their tasks run on `runtime`, and deadlines are moments of `clock`.
    ///
    /// # Errors
    /// `INVALID_PARAMS` without any transport, `NOT_SUPPORTED` for a transport that this build
    /// leaves out, or the error of a transport that cannot be opened, such as a port in use.
    pub fn open(&self, runtime: &Handle, clock: &SharedClock) -> Result<TransportSet> {
        raise_descriptor_limit();
        // Device memory is recognised from now on, whatever the transports are. This loads nothing.
        let libcuda = self.nvlink.as_ref().and_then(|config| config.libcuda.clone());
        if let Err(error) = CudaDriver::serve(libcuda) {
            tracing::debug!(%error, "CUDA does not serve device memory");
        }
        let rdma = |config| Rdma::start_with_clock(config, runtime, clock.clone());
        let nvlink = |config| Nvlink::start_with_clock(config, runtime, clock.clone());
        let tcp = |config| Tcp::start_with_clock(config, runtime, clock.clone()).map(Arc::new);
        let transports = Transports {
            loopback: self.loopback.as_ref().map(LoopbackNet::node),
            shm: self.open_shm(runtime, clock)?,
            rdma: self.rdma.clone().map(rdma).transpose()?,
            nvlink: self.nvlink.clone().map(nvlink).transpose()?,
            tcp: self.tcp.clone().map(tcp).transpose()?,
        };
        if transports.is_empty() {
            return Err(Error::invalid("cannot open transports: none is selected. select at least one"));
        }
        Ok(ThroughHost::unless(Arc::new(transports), clock.clone(), Transports::takes_device))
    }

    fn open_shm(&self, runtime: &Handle, clock: &SharedClock) -> Result<Option<Shm>> {
        let Some(config) = self.shm.clone() else { return Ok(None) };
        match Shm::start_with_clock(config, runtime, clock.clone()) {
            Err(error) if self.tcp.is_some() => {
                tracing::warn!(%error, "shared memory unavailable; using tcp");
                Ok(None)
            }
            opened => opened.map(Some),
        }
    }
}

fn unknown_transport(name: &str) -> Error {
    let built: Vec<_> = built_in::names().collect();
    let built = if built.is_empty() { "none".to_owned() } else { built.join(", ") };
    Error::new(
        ErrorCode::NotSupported,
        format!(
            "cannot open transport {name:?}: this build does not have it. built={built}; choose \
             one of these, or enable a feature transport-*"
        ),
    )
}

/// The transports of one node. Device memory goes through the host where the transport to a peer
/// does not access it.
pub type TransportSet = ThroughHost<Transports>;

/// The transports alone.
#[derive(Debug)]
pub struct Transports {
    loopback: Option<Loopback>,
    shm: Option<Shm>,
    rdma: Option<Rdma>,
    nvlink: Option<Nvlink>,
    tcp: Option<Arc<Tcp>>,
}

/// Memory with the registration of each transport.
#[derive(Debug)]
pub struct SetRegistration {
    loopback: Option<LoopbackRegistration>,
    shm: Option<RegistrationOf<Shm>>,
    rdma: Option<RegistrationOf<Rdma>>,
    nvlink: Option<RegistrationOf<Nvlink>>,
    tcp: Option<RegistrationOf<Tcp>>,
}

type RegistrationOf<T> = <T as Transport>::Registration;
type PeerOf<T> = <T as Transport>::Peer;

/// A peer, by the transport that leads to it.
#[derive(Clone, Debug)]
pub struct SetPeer(Path);

#[derive(Clone, Debug)]
enum Path {
    /// Inside this process.
    Loopback(LoopbackPeer),
    /// Shared memory, and TCP for memory that is not shared.
    Shm(FallbackPeer<PeerOf<Shm>, PeerOf<Tcp>>),
    /// RDMA, and TCP for what RDMA does not carry.
    Rdma(FallbackPeer<PeerOf<Rdma>, PeerOf<Tcp>>),
    /// Copies between devices, and the path for what they do not reach.
    Nvlink(PeerOf<Nvlink>, Option<Box<Path>>),
    /// TCP.
    Tcp(PeerOf<Tcp>),
}

/// Returns the operations with the registrations of one of the transports.
#[allow(unsafe_code)]
fn ops_of<'a, R: 'a, I>(
    ops: I,
    registration: impl Fn(&'a SetRegistration) -> Option<&'a R>,
) -> impl ExactSizeIterator<Item = Op<'a, R>>
where
    I: ExactSizeIterator<Item = Op<'a, SetRegistration>>,
{
    // SAFETY: the registration of each transport covers the same bytes, and lives as long as the
    // set's.
    ops.map(move |op| unsafe { op.with_registration(op.registration().and_then(&registration)) })
}

impl Transports {
    /// Returns the load of each network device. Transports other than RDMA have none.
    pub fn nic_loads(&self) -> Vec<NicLoad> {
        self.rdma.as_ref().map(Rdma::loads).unwrap_or_default()
    }

    /// Returns whether the transport to that peer accesses the device memory of an operation
    /// directly.
    fn takes_device(&self, peer: &SetPeer, op: &Op<'_, SetRegistration>) -> bool {
        self.path_takes_device(&peer.0, op)
    }

    fn path_takes_device(&self, path: &Path, op: &Op<'_, SetRegistration>) -> bool {
        match path {
            Path::Loopback(_) => true,
            Path::Rdma(_) => op.registration().is_some_and(|registration| registration.rdma.is_some()),
            Path::Nvlink(peer, next) => {
                peer.contains(op.remote(), op.len() as u64)
                    || next.as_ref().is_some_and(|next| self.path_takes_device(next, op))
            }
            Path::Shm(_) | Path::Tcp(_) => false,
        }
    }

    fn is_empty(&self) -> bool {
        self.loopback.is_none() && self.between_processes().is_none()
    }

    /// Returns the name of the transport that leads out of this process.
    fn between_processes(&self) -> Option<Protocol> {
        let rdma = self.rdma.as_ref().map(Transport::protocol);
        let nvlink = || self.nvlink.as_ref().map(Transport::protocol);
        let tcp = || self.tcp.as_ref().map(|tcp| tcp.protocol());
        let shm = || self.shm.as_ref().map(Transport::protocol);
        rdma.or_else(nvlink).or_else(tcp).or_else(shm)
    }

    /// Opens the path to a segment's owner in another process, without copies between devices.
    async fn connect_host(&self, desc: &SegmentDesc) -> Result<Path> {
        let tcp = self.connect_tcp(desc).await?;
        if let Some(shm) = self.shm.as_ref().filter(|shm| shm.reaches(desc)) {
            match shm.connect(desc).await {
                Ok(peer) => return Ok(Path::Shm(FallbackPeer::new(peer, tcp))),
                Err(error) if tcp.is_some() => {
                    tracing::debug!(segment = desc.name, %error, "shared memory does not reach the segment");
                }
                Err(error) => return Err(error),
            }
        }
        if let Some(rdma) = self.rdma.as_ref().filter(|rdma| rdma.reaches(desc)) {
            return Ok(Path::Rdma(FallbackPeer::new(rdma.connect(desc).await?, tcp)));
        }
        if let Some(peer) = tcp {
            return Ok(Path::Tcp(peer));
        }
        let protocols: Vec<&str> = desc.protocols.iter().map(Protocol::as_str).collect();
        Err(Error::new(
            ErrorCode::NotSupported,
            format!(
                "cannot open segment {:?}: no common transport. segment={} node={}",
                desc.name,
                protocols.join(","),
                self.protocol()
            ),
        ))
    }

    /// Opens the path to a segment's owner in another process, with copies between devices first.
    async fn connect_out(&self, desc: &SegmentDesc) -> Result<Path> {
        let Some(nvlink) = self.nvlink.as_ref().filter(|nvlink| nvlink.reaches(desc)) else {
            return self.connect_host(desc).await;
        };
        match (nvlink.connect(desc).await, self.connect_host(desc).await) {
            (Ok(peer), next) => Ok(Path::Nvlink(peer, next.ok().map(Box::new))),
            (Err(error), Ok(next)) => {
                tracing::debug!(segment = desc.name, %error, "nvlink does not reach the segment");
                Ok(next)
            }
            (Err(error), Err(_)) => Err(error),
        }
    }

    async fn connect_tcp(&self, desc: &SegmentDesc) -> Result<Option<PeerOf<Tcp>>> {
        let desc = &*with_tcp(desc);
        match self.tcp.as_ref().filter(|tcp| tcp.reaches(desc)) {
            Some(tcp) => tcp.connect(desc).await.map(Some),
            None => Ok(None),
        }
    }

    fn submit_to<'a, I>(&self, path: &Path, ops: I, done: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, SetRegistration>>,
    {
        match path {
            Path::Loopback(peer) => match &self.loopback {
                Some(node) => node.submit(peer, ops_of(ops, |r| r.loopback.as_ref()), done),
                None => done.finish(Err(foreign_peer_error())),
            },
            Path::Shm(peer) => match &self.shm {
                Some(shm) => peer.submit(shm, self.tcp.as_ref(), ops_of(ops, |r| r.shm.as_ref()), done),
                None => done.finish(Err(foreign_peer_error())),
            },
            Path::Rdma(peer) => match &self.rdma {
                Some(rdma) => peer.submit(rdma, self.tcp.as_ref(), ops_of(ops, |r| r.rdma.as_ref()), done),
                None => done.finish(Err(foreign_peer_error())),
            },
            Path::Nvlink(peer, next) => self.submit_nvlink(peer, next.as_deref(), ops, done),
            Path::Tcp(peer) => match &self.tcp {
                Some(tcp) => tcp.submit(peer, ops_of(ops, |r| r.tcp.as_ref()), done),
                None => done.finish(Err(foreign_peer_error())),
            },
        }
    }

    fn submit_nvlink<'a, I>(&self, peer: &PeerOf<Nvlink>, next: Option<&Path>, ops: I, done: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, SetRegistration>>,
    {
        let Some(nvlink) = &self.nvlink else { return done.finish(Err(foreign_peer_error())) };
        let ops: Vec<_> = ops.collect();
        let Some(next) = next else {
            return nvlink.submit(peer, ops_of(ops.into_iter(), |r| r.nvlink.as_ref()), done);
        };
        // Most submissions have host memory only, and stay one submission.
        if !ops.iter().any(|op| peer.contains(op.remote(), op.len() as u64)) {
            return self.submit_to(next, ops.into_iter(), done);
        }
        let (first, mut missed) = (done.numbers().start, Vec::new());
        let own = ops_of(ops.iter().copied(), |r| r.nvlink.as_ref());
        nvlink.submit_or(peer, own, done, |_, share| missed.push(share));
        for share in missed {
            let op = ops[share.numbers().start - first];
            let location = op.local().location;
            if location.is_device() && !self.path_takes_device(next, &op) {
                // A path error, so that the operation is retried through the host.
                let text =
                    format!("cannot copy between devices: no path to the peer's memory. local={location}");
                share.finish(Err(Error::new(ErrorCode::TransferFail, text)));
                continue;
            }
            self.submit_to(next, std::iter::once(op), share);
        }
    }

    fn path_is_connected(&self, path: &Path) -> bool {
        match path {
            Path::Loopback(_) => false,
            Path::Shm(peer) => peer.is_connected(self.shm.as_ref(), self.tcp.as_deref()),
            Path::Rdma(peer) => peer.is_connected(self.rdma.as_ref(), self.tcp.as_deref()),
            Path::Nvlink(peer, next) => {
                self.nvlink.as_ref().is_some_and(|nvlink| nvlink.is_connected(peer))
                    || next.as_ref().is_some_and(|next| self.path_is_connected(next))
            }
            Path::Tcp(peer) => self.tcp.as_ref().is_some_and(|tcp| tcp.is_connected(peer)),
        }
    }

    fn path_name(&self, path: &Path) -> Protocol {
        match path {
            Path::Loopback(_) => Protocol::LOOPBACK,
            Path::Rdma(peer) => peer.path_name(&Protocol::RDMA, &Protocol::TCP),
            Path::Shm(peer) => peer.path_name(&Protocol::SHM, &Protocol::TCP),
            Path::Nvlink(_, None) => Protocol::NVLINK,
            Path::Nvlink(_, Some(next)) => {
                Protocol::new(format!("{}+{}", Protocol::NVLINK, self.path_name(next)))
            }
            Path::Tcp(_) => Protocol::TCP,
        }
    }
}

impl PathStatistics<SetPeer> for Transports {
    fn path_name(&self, peer: &SetPeer) -> Protocol {
        self.path_name(&peer.0)
    }

    fn count_fallback(&self, peer: &mut SetPeer, counter: &Arc<FallbackCounter>) {
        let mut path = &mut peer.0;
        while let Path::Nvlink(_, Some(next)) = path {
            path = next;
        }
        match path {
            Path::Rdma(peer) => peer.count_fallback(counter),
            Path::Shm(peer) => peer.count_fallback(counter),
            Path::Loopback(_) | Path::Nvlink(..) | Path::Tcp(_) => {}
        }
    }
}

// SAFETY: every call goes to one transport, and with it the contract that it upholds. A
// registration holds one of each, and is dropped with its parts.
#[allow(unsafe_code)]
unsafe impl Transport for Transports {
    type Registration = SetRegistration;
    type Peer = SetPeer;

    fn protocol(&self) -> Protocol {
        self.between_processes().unwrap_or(Protocol::LOOPBACK)
    }

    fn capabilities(&self) -> Capabilities {
        if let Some(rdma) = self.rdma.as_ref().filter(|_| self.tcp.is_none()) {
            return rdma.capabilities();
        }
        if let Some(tcp) = &self.tcp {
            return tcp.capabilities().shared_memory(self.shm.is_some());
        }
        let shm = self.shm.as_ref().map(Transport::capabilities);
        let nvlink = || self.nvlink.as_ref().map(Transport::capabilities);
        let loopback = || self.loopback.as_ref().map(Transport::capabilities);
        shm.or_else(nvlink).or_else(loopback).unwrap_or_default()
    }

    unsafe fn register(&self, span: MemorySpan, access: Access) -> Result<SetRegistration> {
        // Devices register the memory by the descriptor while it is listed.
        let _buffer = match (&self.rdma, span.location.is_device()) {
            (Some(_), true) => CudaDriver::serve(None).and_then(|driver| driver.list_dma_buf(span)).ok(),
            _ => None,
        };
        // SAFETY: the caller keeps the memory for as long as the whole registration.
        unsafe {
            Ok(SetRegistration {
                loopback: self.loopback.as_ref().map(|node| node.register(span, access)).transpose()?,
                shm: self.shm.as_ref().map(|shm| shm.register(span, access)).transpose()?,
                rdma: match self.rdma.as_ref().map(|rdma| rdma.register(span, access)) {
                    Some(Err(error)) if span.location.is_device() && self.tcp.is_some() => {
                        tracing::debug!(%error, location = %span.location, "device memory goes over tcp");
                        None
                    }
                    registered => registered.transpose()?,
                },
                nvlink: self.nvlink.as_ref().map(|nvlink| nvlink.register(span, access)).transpose()?,
                tcp: self.tcp.as_ref().map(|tcp| tcp.register(span, access)).transpose()?,
            })
        }
    }

    fn export(&self, registration: &SetRegistration) -> Vec<u8> {
        // RDMA is the only transport with keys.
        match (&self.rdma, &registration.rdma) {
            (Some(rdma), Some(registration)) => rdma.export(registration),
            _ => Vec::new(),
        }
    }

    fn describe(&self, desc: &mut SegmentDesc) {
        if let Some(tcp) = &self.tcp {
            tcp.describe(desc);
        }
        if let Some(rdma) = &self.rdma {
            if self.tcp.is_some() {
                desc.protocols.retain(|protocol| *protocol != Protocol::TCP);
                desc.extra.insert(SERVES_TCP_KEY.into(), true.into());
            }
            rdma.describe(desc);
        }
        if let Some(nvlink) = &self.nvlink {
            if desc.protocols == [Protocol::TCP] {
                desc.protocols.clear();
                desc.extra.insert(SERVES_TCP_KEY.into(), true.into());
            }
            nvlink.describe(desc);
        }
        // Shared memory is named only where no other transport is.
        if let Some(shm) = &self.shm {
            shm.describe(desc);
        }
        if let Some(node) = &self.loopback {
            node.describe(desc);
        }
    }

    fn reaches(&self, desc: &SegmentDesc) -> bool {
        self.nvlink.as_ref().is_some_and(|nvlink| nvlink.reaches(desc))
            || self.rdma.as_ref().is_some_and(|rdma| rdma.reaches(desc))
            || self.tcp.as_ref().is_some_and(|tcp| tcp.reaches(&with_tcp(desc)))
            || self.shm.as_ref().is_some_and(|shm| shm.reaches(desc))
            || self.loopback.as_ref().is_some_and(|node| node.reaches(desc))
    }

    async fn connect(&self, desc: &SegmentDesc) -> Result<SetPeer> {
        // The shortest path first.
        if let Some(node) = self.loopback.as_ref().filter(|node| node.reaches(desc)) {
            return node.connect(desc).await.map(|peer| SetPeer(Path::Loopback(peer)));
        }
        self.connect_out(desc).await.map(SetPeer)
    }

    fn is_connected(&self, peer: &SetPeer) -> bool {
        self.path_is_connected(&peer.0)
    }

    fn release_departed(&self) {
        if let Some(shm) = &self.shm {
            shm.release_departed();
        }
        if let Some(rdma) = &self.rdma {
            rdma.release_departed();
        }
        if let Some(nvlink) = &self.nvlink {
            nvlink.release_departed();
        }
        if let Some(tcp) = &self.tcp {
            tcp.release_departed();
        }
    }

    fn stop_transfers(&self) {
        if let Some(rdma) = &self.rdma {
            rdma.stop_transfers();
        }
        if let Some(tcp) = &self.tcp {
            tcp.stop_transfers();
        }
    }

    fn is_stopped(&self) -> bool {
        self.rdma.as_ref().is_some_and(Transport::is_stopped)
            || self.tcp.as_ref().is_some_and(|tcp| tcp.is_stopped())
    }

    fn connection_handler(&self) -> Option<&dyn AcceptConnection> {
        self.rdma.as_ref()?.connection_handler()
    }

    fn path_statistics(&self) -> Option<&dyn PathStatistics<SetPeer>> {
        Some(self)
    }

    fn submit<'a, I>(&self, peer: &SetPeer, ops: I, done: Completion)
    where
        I: ExactSizeIterator<Item = Op<'a, SetRegistration>>,
    {
        self.submit_to(&peer.0, ops, done);
    }
}

/// Returns a descriptor for TCP: that of a node with RDMA or NVLink lists TCP if its data port
/// serves.
fn with_tcp(desc: &SegmentDesc) -> Cow<'_, SegmentDesc> {
    let serves_tcp = desc.extra.get(SERVES_TCP_KEY).is_some_and(|serves_tcp| *serves_tcp == true);
    if !serves_tcp || desc.supports(&Protocol::TCP) {
        return Cow::Borrowed(desc);
    }
    let mut desc = desc.clone();
    desc.protocols.push(Protocol::TCP);
    Cow::Owned(desc)
}

/// Returns the names of the transports that a node serves, TCP beside RDMA or NVLink included.
pub fn served(desc: &SegmentDesc) -> Vec<String> {
    with_tcp(desc).protocols.iter().map(|protocol| protocol.as_str().to_owned()).collect()
}

fn foreign_peer_error() -> Error {
    Error::invalid("cannot submit: the peer belongs to another set of transports")
}
