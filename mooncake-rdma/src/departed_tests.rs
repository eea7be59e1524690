//! Tests of the check of idle connections, on a fake library and with a fake peer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_trait::async_trait;
use mooncake_core::clock::Rng;
use mooncake_core::memory::HostMemory;
use mooncake_transport::handshake::{
    ConnectionDescriptor, HandshakeConfig, HandshakeServer, HandshakeService, Notification,
};
use mooncake_transport::instance::Instance;
use mooncake_transport::net::{self, HostPort};
use mooncake_transport::transfer::{self, Transfer};
use mooncake_transport::{Access, Protocol, Region, SegmentDesc, Transport};
use serde_json::json;
use tokio::runtime::Runtime;

use crate::device_fault_tests::eventually;
use crate::message::{Connection, INSTANCE_KEY};
use crate::verbs::fake::Fake;
use crate::{RdmaConfig, RdmaPeer, RdmaTransport};

/// Peer that accepts connections, and forgets them on request.
#[derive(Debug)]
struct FakePeer {
    instance: Instance,
    forgets: AtomicBool,
    /// Number of messages about connections that exist already.
    ready_messages: AtomicUsize,
}

#[async_trait]
impl HandshakeService for FakePeer {
    async fn descriptor(&self) -> Vec<u8> {
        b"null".to_vec()
    }

    async fn connection(&self, request: ConnectionDescriptor) -> ConnectionDescriptor {
        let request = Connection::decode(&request.0).unwrap();
        let response = if request.ready == Some(true) {
            self.ready_messages.fetch_add(1, Ordering::SeqCst);
            match self.forgets.load(Ordering::SeqCst) {
                true => Connection::refused("no such connection"),
                false => Connection::default(),
            }
        } else {
            Connection {
                local_nic_path: request.peer_nic_path,
                peer_nic_path: request.local_nic_path,
                pairs: request.pairs.iter().map(|number| number + 1000).collect(),
                instance: Some(self.instance),
                peer_instance: request.instance,
                refusal: String::new(),
                ..request
            }
        };
        ConnectionDescriptor(response.encode())
    }

    async fn notified(&self, _: Notification) -> bool {
        false
    }
}

struct ConnectedToFakePeer {
    node: RdmaTransport,
    peer: RdmaPeer,
    service: Arc<FakePeer>,
    server: Option<HandshakeServer>,
    runtime: Runtime,
}

impl ConnectedToFakePeer {
    /// Connects a node to a fake peer by a read.
    fn new(fake: &Fake) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let config = RdmaConfig { server_name: "127.0.0.1:1".into(), ..RdmaConfig::default() };
        let node = RdmaTransport::start(config, runtime.handle()).unwrap();
        let _guard = runtime.enter();
        let (forgets, ready_messages) = (AtomicBool::new(false), AtomicUsize::new(0));
        let service = Arc::new(FakePeer { instance: Instance::draw(), forgets, ready_messages });
        let listener = net::listen([127, 0, 0, 1].into(), 0..=0, &mut Rng::from_os()).unwrap();
        let at = HostPort::new("127.0.0.1", listener.local_addr().unwrap().port());
        let server = HandshakeServer::serve(listener, service.clone(), HandshakeConfig::default()).unwrap();
        let mut desc = SegmentDesc::decode(
            json!({
                "name": at.to_string(), "protocol": "rdma", "devices": [{"name": "fake0"}],
                "buffers": [{"name": "cpu:0", "addr": 4096, "length": 4096, "rkey": [1], "lkey": [1]}],
                INSTANCE_KEY: service.instance.to_string(),
            })
            .to_string()
            .as_bytes(),
        )
        .unwrap();
        assert!(desc.supports(&Protocol::RDMA));
        desc.handshake = Some(at);
        let peer = runtime.block_on(node.connect(&desc)).unwrap();
        let memory = Arc::new(HostMemory::new(64).unwrap());
        let into = Region::register(&node, memory, Access::Local).unwrap().exclusive().unwrap();
        fake.complete();
        transfer::read(&node, &peer, [Transfer::new(4096, into)], None).wait().0.unwrap();
        eventually("the connection is ready", || service.ready_messages.load(Ordering::SeqCst) == 1);
        Self { node, peer, service, server: Some(server), runtime }
    }

    /// Checks the idle connections once.
    fn check(&self) {
        self.node.release_departed();
        eventually("the check ends", || !self.node.node.is_checking.load(Ordering::SeqCst));
    }

    fn is_connected(&self) -> bool {
        self.node.is_connected(&self.peer)
    }
}

fn is_everything_destroyed(fake: &Fake) -> bool {
    let state = fake.state();
    state.pairs_created > 0 && state.pairs_destroyed == state.pairs_created
}

#[test]
fn a_connection_that_the_peer_has_stays() {
    let fake = Fake::new();
    let world = ConnectedToFakePeer::new(&fake);
    for _ in 0..5 {
        world.check();
        assert!(world.is_connected());
    }
    assert_eq!(
        world.service.ready_messages.load(Ordering::SeqCst),
        1 + 4,
        "a connection in use is not checked"
    );
    assert_eq!(fake.state().pairs_destroyed, 0);
}

#[test]
fn a_connection_that_the_peer_does_not_have_is_retired() {
    let fake = Fake::new();
    let world = ConnectedToFakePeer::new(&fake);
    world.service.forgets.store(true, Ordering::SeqCst);
    world.check();
    world.check();
    assert!(!world.is_connected());
    eventually("its queue pairs are destroyed", || is_everything_destroyed(&fake));
}

#[test]
fn connections_to_a_departed_process_are_retired_and_released() {
    let fake = Fake::new();
    let mut world = ConnectedToFakePeer::new(&fake);
    let server = world.server.take().unwrap();
    world.runtime.block_on(server.stop());
    world.check();
    world.check();
    assert!(world.is_connected(), "one check may fail for another reason");
    world.check();
    assert!(!world.is_connected());
    eventually("its queue pairs are destroyed", || is_everything_destroyed(&fake));
    let ConnectedToFakePeer { node, peer, .. } = &world;
    assert_eq!(node.node.rails.lock().len(), 1, "the peer refers to its rail");
    drop(peer.clone());
    let ConnectedToFakePeer { node, peer, runtime: _runtime, .. } = world;
    drop(peer);
    eventually("its rail is released", || {
        node.release_departed();
        node.node.rails.lock().is_empty()
    });
}
