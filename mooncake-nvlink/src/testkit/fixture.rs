//! Nodes for the conformance suite of transports.

use std::future::Future;
use std::sync::Arc;

use mooncake_core::clock::{SharedClock, SystemClock};
use mooncake_core::memory::MemorySource;
use mooncake_transport::config::NvlinkConfig;
use mooncake_transport::testkit::Fixture;
use tokio::runtime::Runtime;

use super::{device, filled};
use crate::transport::NvlinkTransport;

/// Nodes with a runtime each, so that a node dies with its runtime.
#[derive(Debug)]
pub struct OnGpu {
    /// Device of local memory; `None` for host memory.
    local: Option<u32>,
    clock: SharedClock,
    nodes: Vec<(Arc<NvlinkTransport>, Runtime)>,
    main: Runtime,
}

impl OnGpu {
    /// Creates the fixture. Memory that is open to peers belongs to the first device.
    pub fn new(local: Option<u32>) -> Self {
        Self { local, clock: SystemClock::shared(), nodes: Vec::new(), main: runtime() }
    }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("cannot start a runtime")
}

impl Fixture for OnGpu {
    type T = NvlinkTransport;

    fn node(&mut self) -> Arc<NvlinkTransport> {
        let runtime = runtime();
        let (config, clock) = (NvlinkConfig::default(), self.clock.clone());
        let node =
            NvlinkTransport::start_with_clock(config, runtime.handle(), clock).expect("cannot start a node");
        let node = Arc::new(node);
        self.nodes.push((node.clone(), runtime));
        node
    }

    fn kill(&mut self, node: &Arc<NvlinkTransport>) {
        let at = self
            .nodes
            .iter()
            .position(|(n, _)| Arc::ptr_eq(n, node))
            .expect("the node belongs to the fixture");
        // The tasks are gone when this returns, and with them the node's end of every connection.
        self.nodes.swap_remove(at).1.shutdown_timeout(std::time::Duration::from_secs(20));
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.main.block_on(future)
    }

    fn clock(&self) -> SharedClock {
        self.clock.clone()
    }

    fn memory(&self, len: usize) -> Arc<dyn MemorySource> {
        filled(&device(0), len, 0)
    }

    fn local_memory(&self, len: usize) -> Option<Arc<dyn MemorySource>> {
        self.local.map(|number| filled(&device(number), len, 0) as Arc<dyn MemorySource>)
    }
}
