//! Nodes with devices, and the handshake ports they are connected through.

use std::future::Future;
use std::net::IpAddr;
use std::sync::{Arc, Weak};

use async_trait::async_trait;
use mooncake_core::clock::{Rng, SharedClock, SystemClock};
use mooncake_rdma::{RdmaConfig, RdmaTransport};
use mooncake_transport::Transport;
use mooncake_transport::handshake::{HandshakeServer, HandshakeService, Notification};
use mooncake_transport::net::{self, DEFAULT_PORTS};
use mooncake_transport::testkit::Fixture;
use serde_json::Value;
use tokio::runtime::Runtime;

pub(crate) const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

/// Settings for a machine that may be twenty times slower than another: no packet is missed before it can have come.
pub(crate) fn patient(device: &str) -> RdmaConfig {
    RdmaConfig { devices: vec![device.into()], timeout: 16, ..RdmaConfig::default() }
}

/// Passes connections on to a node.
struct Port(Weak<RdmaTransport>);

#[async_trait]
impl HandshakeService for Port {
    async fn descriptor(&self) -> Vec<u8> {
        b"null".to_vec()
    }

    async fn notified(&self, _: Notification) -> bool {
        false
    }

    async fn connection(&self, request: Value) -> Value {
        match self.0.upgrade() {
            Some(node) => node.accept(request).await,
            None => Value::Null,
        }
    }
}

/// A node with a handshake port on this machine.
pub(crate) fn node(
    runtime: &Runtime,
    clock: SharedClock,
    config: RdmaConfig,
) -> (Arc<RdmaTransport>, HandshakeServer) {
    let listener = net::listen(HERE, DEFAULT_PORTS, &mut Rng::from_os()).unwrap();
    let config = RdmaConfig { server_name: listener.local_addr().unwrap().to_string(), ..config };
    let limits = config.handshake.clone();
    let node = Arc::new(RdmaTransport::start_with_clock(config, runtime.handle(), clock).unwrap());
    let _inside = runtime.enter();
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
        self.nodes.retain(|(known, _)| !Arc::ptr_eq(known, node));
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    fn clock(&self) -> SharedClock {
        self.clock.clone()
    }
}
