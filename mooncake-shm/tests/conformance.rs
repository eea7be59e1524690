//! The public conformance suite, with two nodes of one process.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::{SharedClock, SystemClock};
use mooncake_core::memory::{HostMemory, HostMemoryOptions, MemorySource};
use mooncake_shm::{ShmConfig, ShmTransport};
use mooncake_transport::testkit::Fixture;
use tokio::runtime::Runtime;

/// Nodes with a runtime each, so that a node dies with its runtime.
struct OnShm {
    config: ShmConfig,
    clock: SharedClock,
    nodes: Vec<(Arc<ShmTransport>, Runtime)>,
    main: Runtime,
}

impl OnShm {
    fn new(config: ShmConfig) -> Self {
        Self { config, clock: SystemClock::shared(), nodes: Vec::new(), main: runtime() }
    }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

impl Fixture for OnShm {
    type T = ShmTransport;

    fn node(&mut self) -> Arc<ShmTransport> {
        let runtime = runtime();
        let clock = self.clock.clone();
        let node = ShmTransport::start_with_clock(self.config.clone(), runtime.handle(), clock).unwrap();
        let node = Arc::new(node);
        self.nodes.push((node.clone(), runtime));
        node
    }

    fn kill(&mut self, node: &Arc<ShmTransport>) {
        let at = self.nodes.iter().position(|(n, _)| Arc::ptr_eq(n, node)).unwrap();
        // The tasks are gone when this returns, and with them the node's end of every connection.
        self.nodes.swap_remove(at).1.shutdown_timeout(Duration::from_secs(20));
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.main.block_on(future)
    }

    fn clock(&self) -> SharedClock {
        self.clock.clone()
    }

    fn memory(&self, len: usize) -> Arc<dyn MemorySource> {
        let options = HostMemoryOptions { shared: Some("conformance".into()), ..Default::default() };
        Arc::new(HostMemory::with(len, &options).unwrap())
    }
}

mod usual {
    use super::*;
    mooncake_transport::transport_conformance!(OnShm::new(ShmConfig::default()));
}

mod by_threads {
    use super::*;
    mooncake_transport::transport_conformance!(OnShm::new(ShmConfig {
        inline_bytes: 0,
        piece_bytes: 1000,
        copy_threads: 3,
        ..ShmConfig::default()
    }));
}
