//! Nodes with devices, and the handshake ports through which they connect.

use std::future::Future;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::process::Command;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use mooncake_core::Result;
use mooncake_core::clock::{Moment, Rng, SharedClock, SystemClock};
use mooncake_core::memory::{HostMemory, HostMemoryOptions, MemorySource};
use mooncake_rdma::{RdmaConfig, RdmaPeer, RdmaTransport};
use mooncake_transport::handshake::{
    AcceptConnection, ConnectionDescriptor, HandshakeServer, HandshakeService, Notification,
};
use mooncake_transport::net::{self, DEFAULT_PORTS};
use mooncake_transport::testkit::Fixture;
use mooncake_transport::transfer::{self, Transfer};
use mooncake_transport::{Access, BufferDesc, Region, SegmentDesc, SliceMut, Transport};
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::other_process::{OtherProcess, Split};

pub(crate) const LOCALHOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

/// Settings for a machine that may be twenty times slower than another: no packet times out before
/// it can have arrived.
pub(crate) fn patient(device: &str) -> RdmaConfig {
    RdmaConfig { devices: vec![device.into()], timeout: 16, ..RdmaConfig::default() }
}

/// Handshake port that passes connections on to a node.
struct Port(Weak<RdmaTransport>);

#[async_trait]
impl HandshakeService for Port {
    async fn descriptor(&self) -> Vec<u8> {
        b"null".to_vec()
    }

    async fn notified(&self, _: Notification) -> bool {
        false
    }

    async fn connection(&self, request: ConnectionDescriptor) -> ConnectionDescriptor {
        match self.0.upgrade() {
            Some(node) => node.accept(request).await,
            None => ConnectionDescriptor(Value::Null),
        }
    }
}

/// Creates a node with a handshake port on this machine.
pub(crate) fn node(
    runtime: &Runtime,
    clock: SharedClock,
    config: RdmaConfig,
) -> (Arc<RdmaTransport>, HandshakeServer) {
    let listener = net::listen(LOCALHOST, DEFAULT_PORTS, &mut Rng::from_os()).unwrap();
    serve(runtime, clock, config, listener)
}

/// Creates a node with a given handshake port.
pub(crate) fn serve(
    runtime: &Runtime,
    clock: SharedClock,
    config: RdmaConfig,
    listener: TcpListener,
) -> (Arc<RdmaTransport>, HandshakeServer) {
    let config = RdmaConfig { server_name: listener.local_addr().unwrap().to_string(), ..config };
    let limits = config.handshake.clone();
    let node = Arc::new(RdmaTransport::start_with_clock(config, runtime.handle(), clock).unwrap());
    let _guard = runtime.enter();
    let server = HandshakeServer::serve(listener, Arc::new(Port(Arc::downgrade(&node))), limits).unwrap();
    (node, server)
}

pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// Nodes on two devices in turn, or on one.
pub(crate) struct OnDevices {
    devices: [&'static str; 2],
    clock: SharedClock,
    nodes: Vec<(Arc<RdmaTransport>, HandshakeServer)>,
    runtime: Runtime,
}

impl OnDevices {
    pub(crate) fn new(devices: [&'static str; 2]) -> Self {
        Self { devices, clock: SystemClock::shared(), nodes: Vec::new(), runtime: runtime() }
    }
}

impl Fixture for OnDevices {
    type T = RdmaTransport;

    fn node(&mut self) -> Arc<RdmaTransport> {
        let config = patient(self.devices[self.nodes.len() % 2]);
        let (node, server) = node(&self.runtime, self.clock.clone(), config);
        self.nodes.push((node.clone(), server));
        node
    }

    fn kill(&mut self, node: &Arc<RdmaTransport>) {
        node.close();
        self.nodes.retain(|(other, _)| !Arc::ptr_eq(other, node));
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    fn clock(&self) -> SharedClock {
        self.clock.clone()
    }

    fn large(&self) -> usize {
        // Emulated processors produce bytes slowly; longer transfers are in `transfers`.
        (1 << 20) + 13
    }
}

/// Nodes on devices, of which every other one, the first included, is in a process of its own.
pub(crate) struct OnDevicesInTwoProcesses {
    remote_device: &'static str,
    local: OnDevices,
    nodes: usize,
}

impl OnDevicesInTwoProcesses {
    pub(crate) fn new(devices: [&'static str; 2]) -> Self {
        Self { remote_device: devices[0], local: OnDevices::new([devices[1]; 2]), nodes: 0 }
    }
}

impl Fixture for OnDevicesInTwoProcesses {
    type T = Split;

    fn node(&mut self) -> Arc<Split> {
        self.nodes += 1;
        Arc::new(match self.nodes % 2 {
            1 => Split::Remote(OtherProcess::start(self.remote_device)),
            _ => Split::Local(self.local.node()),
        })
    }

    fn kill(&mut self, node: &Arc<Split>) {
        match &**node {
            Split::Local(node) => self.local.kill(node),
            Split::Remote(process) => process.kill(),
        }
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.local.block_on(future)
    }

    fn clock(&self) -> SharedClock {
        self.local.clock()
    }

    fn memory(&self, len: usize) -> Arc<dyn MemorySource> {
        let options =
            HostMemoryOptions { shared: Some("conformance".into()), ..HostMemoryOptions::default() };
        Arc::new(HostMemory::with(len, &options).unwrap())
    }

    fn large(&self) -> usize {
        self.local.large()
    }
}

/// Two nodes with their runtime, clock and ports.
pub(crate) struct NodePair {
    pub(crate) runtime: Runtime,
    pub(crate) clock: SharedClock,
    pub(crate) a: Arc<RdmaTransport>,
    pub(crate) b: Arc<RdmaTransport>,
    pub(crate) ports: Vec<HandshakeServer>,
}

impl NodePair {
    pub(crate) fn new(a: RdmaConfig, b: RdmaConfig) -> Self {
        let (runtime, clock) = (runtime(), SystemClock::shared());
        let (a, port_a) = node(&runtime, clock.clone(), a);
        let (b, port_b) = node(&runtime, clock.clone(), b);
        Self { runtime, clock, a, b, ports: vec![port_a, port_b] }
    }

    /// Creates `a` on one end of the cable and `b` on the other.
    pub(crate) fn patient() -> Self {
        Self::new(patient("rxe0"), patient("rxe1"))
    }

    /// Opens a handshake port for `b` at an earlier address.
    pub(crate) fn serve_at(&self, at: SocketAddr) -> HandshakeServer {
        let listener = TcpListener::bind(at).unwrap();
        listener.set_nonblocking(true).unwrap();
        let _guard = self.runtime.enter();
        let port = Arc::new(Port(Arc::downgrade(&self.b)));
        HandshakeServer::serve(listener, port, RdmaConfig::default().handshake).unwrap()
    }

    /// Connects one node to another that has these regions.
    pub(crate) fn connect(&self, from: &RdmaTransport, to: &RdmaTransport, regions: &[&Remote]) -> RdmaPeer {
        self.runtime.block_on(from.connect(&describe(to, regions))).unwrap()
    }

    pub(crate) fn deadline_in(&self, seconds: u64) -> Option<Moment> {
        Some(self.clock.now().after(Duration::from_secs(seconds)))
    }

    pub(crate) fn write(&self, from: &RdmaTransport, peer: &RdmaPeer, at: u64, bytes: &[u8]) -> Result<()> {
        let slice = local(from, bytes).into_shared();
        transfer::write(from, peer, [Transfer::new(at, slice)], self.deadline_in(60)).wait().0
    }

    pub(crate) fn read(&self, from: &RdmaTransport, peer: &RdmaPeer, at: u64, len: usize) -> Result<Vec<u8>> {
        let slice = local(from, &vec![0; len]);
        let (result, [done]) =
            transfer::read(from, peer, [Transfer::new(at, slice)], self.deadline_in(60)).wait();
        let mut bytes = vec![0; len];
        done.buffer.copy_to(0, &mut bytes).unwrap();
        result.map(|()| bytes)
    }
}

pub(crate) type Remote = Region<RdmaTransport>;

/// Registers memory for peers, filled with one byte.
pub(crate) fn open(node: &RdmaTransport, len: usize, byte: u8) -> Remote {
    filled(node, &vec![byte; len], Access::Remote).into_region().unwrap()
}

pub(crate) fn local(node: &RdmaTransport, bytes: &[u8]) -> SliceMut<RdmaTransport> {
    filled(node, bytes, Access::Local)
}

fn filled(node: &RdmaTransport, bytes: &[u8], access: Access) -> SliceMut<RdmaTransport> {
    let memory = Arc::new(HostMemory::new(bytes.len()).unwrap());
    let mut all = Region::register(node, memory, access).unwrap().exclusive().unwrap();
    all.copy_from(0, bytes).unwrap();
    all
}

pub(crate) fn bytes(region: &Remote) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.slice(0..region.len()).unwrap().copy_to(0, &mut bytes).unwrap();
    bytes
}

/// Returns the descriptor of a node with these regions.
pub(crate) fn describe(node: &RdmaTransport, regions: &[&Remote]) -> SegmentDesc {
    let mut desc = SegmentDesc::new("test");
    desc.buffers = regions
        .iter()
        .map(|region| BufferDesc {
            name: "test".into(),
            addr: region.addr(),
            length: region.len() as u64,
            key: region.registration().map(|r| node.export(r)).unwrap_or_default(),
            ..BufferDesc::default()
        })
        .collect();
    node.describe(&mut desc);
    SegmentDesc::decode(&desc.encode()).unwrap()
}

/// Runs a program that must succeed. Returns its output.
pub(crate) fn command(line: &str) -> String {
    let mut words = line.split_whitespace();
    let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}
