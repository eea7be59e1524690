//! The conformance suite on the transports of this crate.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Weak};

use mooncake_core::clock::{SharedClock, SystemClock};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::loopback::{Loopback, LoopbackNet};
use mooncake_transport::staged::{CopyTransport, Executor, Staged};
use mooncake_transport::testkit::Fixture;
#[cfg(not(miri))]
use mooncake_transport::testkit::{Faults, Faulty, OnDevice, Sides};
use mooncake_transport::{ExposedMemory, Protocol, SegmentDesc};
use parking_lot::Mutex;

struct OnLoopback {
    net: LoopbackNet,
    clock: SharedClock,
}

impl OnLoopback {
    fn new() -> Self {
        let clock = SystemClock::shared();
        Self { net: LoopbackNet::with_clock(clock.clone()), clock }
    }
}

impl Fixture for OnLoopback {
    type T = Loopback;

    fn node(&mut self) -> Arc<Loopback> {
        Arc::new(self.net.node())
    }

    fn kill(&mut self, node: &Arc<Loopback>) {
        node.kill();
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        futures::executor::block_on(future)
    }

    fn clock(&self) -> SharedClock {
        self.clock.clone()
    }
}

mod loopback {
    mooncake_transport::transport_conformance!(super::OnLoopback::new());
}

/// The injector that injects nothing must be invisible.
#[cfg(not(miri))]
struct OnFaultless(OnLoopback);

#[cfg(not(miri))]
impl Fixture for OnFaultless {
    type T = Faulty<Loopback>;

    fn node(&mut self) -> Arc<Self::T> {
        Arc::new(Faulty::new(self.0.node(), 1, Faults::none()))
    }

    fn kill(&mut self, node: &Arc<Self::T>) {
        node.inner().kill();
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.0.block_on(future)
    }

    fn clock(&self) -> SharedClock {
        self.0.clock()
    }
}

#[cfg(not(miri))]
mod faultless {
    mooncake_transport::transport_conformance!(super::OnFaultless(super::OnLoopback::new()));
}

/// Transport in safe Rust. Nodes find each other's memory in a table, and yield now and then like a
/// real transport.
#[derive(Debug)]
struct Table {
    id: u64,
    nodes: Arc<Mutex<HashMap<u64, Weak<ExposedMemory>>>>,
    yields: bool,
}

impl Table {
    async fn turn(&self) {
        if self.yields {
            tokio::task::yield_now().await;
        }
    }
}

fn node_of(nodes: &Mutex<HashMap<u64, Weak<ExposedMemory>>>, id: u64) -> Result<Arc<ExposedMemory>> {
    let node = nodes.lock().get(&id).and_then(Weak::upgrade);
    node.ok_or_else(|| Error::new(ErrorCode::TransferFail, format!("node {id} is gone")))
}

impl CopyTransport for Table {
    type Peer = u64;

    fn protocol(&self) -> Protocol {
        Protocol::new("table")
    }

    fn serve(&self, memory: Arc<ExposedMemory>) {
        self.nodes.lock().insert(self.id, Arc::downgrade(&memory));
    }

    fn describe(&self, desc: &mut SegmentDesc) {
        desc.protocols.push(self.protocol());
        desc.extra.insert("table_node".into(), self.id.into());
    }

    async fn connect(&self, desc: &SegmentDesc) -> Result<u64> {
        desc.extra
            .get("table_node")
            .and_then(|id| id.as_u64())
            .ok_or_else(|| Error::invalid("the descriptor has no table_node"))
    }

    async fn read_into(&self, peer: &u64, addr: u64, into: &mut [u8]) -> Result<()> {
        self.turn().await;
        node_of(&self.nodes, *peer)?.read(addr, into)
    }

    async fn write_from(&self, peer: &u64, addr: u64, from: &[u8]) -> Result<()> {
        self.turn().await;
        node_of(&self.nodes, *peer)?.write(addr, from)
    }
}

struct OnTable {
    nodes: Arc<Mutex<HashMap<u64, Weak<ExposedMemory>>>>,
    last: u64,
    clock: SharedClock,
    runtime: Option<tokio::runtime::Runtime>,
}

impl OnTable {
    fn inline() -> Self {
        Self { nodes: Arc::default(), last: 0, clock: SystemClock::shared(), runtime: None }
    }

    #[cfg(not(miri))]
    fn tokio() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build();
        Self { runtime: Some(runtime.unwrap()), ..Self::inline() }
    }
}

impl Fixture for OnTable {
    type T = Staged<Table>;

    fn node(&mut self) -> Arc<Self::T> {
        self.last += 1;
        let wire = Table { id: self.last, nodes: self.nodes.clone(), yields: self.runtime.is_some() };
        let executor = match &self.runtime {
            Some(runtime) => Executor::Tokio(runtime.handle().clone()),
            None => Executor::Inline,
        };
        Arc::new(Staged::new(wire, executor, self.clock.clone()))
    }

    fn kill(&mut self, node: &Arc<Self::T>) {
        self.nodes.lock().remove(&node.wire().id);
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        match &self.runtime {
            Some(runtime) => runtime.block_on(future),
            None => futures::executor::block_on(future),
        }
    }

    fn clock(&self) -> SharedClock {
        self.clock.clone()
    }
}

mod staged_inline {
    mooncake_transport::transport_conformance!(super::OnTable::inline());
}

#[cfg(not(miri))]
mod staged_on_tokio {
    mooncake_transport::transport_conformance!(super::OnTable::tokio());
}

#[cfg(not(miri))]
mod from_a_device {
    mooncake_transport::transport_conformance!(super::OnDevice::new(
        super::OnTable::tokio(),
        super::Sides::Local
    ));
}

#[cfg(not(miri))]
mod to_a_device {
    mooncake_transport::transport_conformance!(super::OnDevice::new(
        super::OnLoopback::new(),
        super::Sides::Remote
    ));
}

#[cfg(not(miri))]
mod between_devices {
    mooncake_transport::transport_conformance!(super::OnDevice::new(
        super::OnLoopback::new(),
        super::Sides::Both
    ));
}
