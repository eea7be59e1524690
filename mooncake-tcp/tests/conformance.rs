//! The public conformance suite, on both framings.

use std::future::Future;
use std::sync::Arc;

use mooncake_core::clock::{SharedClock, SystemClock};
use mooncake_tcp::{Framing, TcpConfig, TcpTransport};
use mooncake_transport::testkit::{Fixture, OnDevice, Sides};
use tokio::runtime::Runtime;

/// Nodes with a runtime each, so that a node dies with its runtime.
struct OnTcp {
    config: TcpConfig,
    clock: SharedClock,
    nodes: Vec<(Arc<TcpTransport>, Runtime)>,
    main: Runtime,
}

impl OnTcp {
    fn new(config: TcpConfig) -> Self {
        let config = TcpConfig { bind: Some([127, 0, 0, 1].into()), data_host: "127.0.0.1".into(), ..config };
        Self { config, clock: SystemClock::shared(), nodes: Vec::new(), main: runtime() }
    }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

impl Fixture for OnTcp {
    type T = TcpTransport;

    fn node(&mut self) -> Arc<TcpTransport> {
        let runtime = runtime();
        let clock = self.clock.clone();
        let node =
            Arc::new(TcpTransport::start_with_clock(self.config.clone(), runtime.handle(), clock).unwrap());
        self.nodes.push((node.clone(), runtime));
        node
    }

    fn kill(&mut self, node: &Arc<TcpTransport>) {
        let at = self.nodes.iter().position(|(n, _)| Arc::ptr_eq(n, node)).unwrap();
        self.nodes.swap_remove(at).1.shutdown_background();
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.main.block_on(future)
    }

    fn clock(&self) -> SharedClock {
        self.clock.clone()
    }
}

mod acknowledged {
    use super::*;
    mooncake_transport::transport_conformance!(OnTcp::new(TcpConfig::default()));
}

mod striped {
    use super::*;
    mooncake_transport::transport_conformance!(OnTcp::new(TcpConfig {
        stripes: 3,
        stripe_threshold: 1 << 20,
        ..TcpConfig::default()
    }));
}

/// Cases that must pass with the plain framing, too. The plain framing has no frame for a refusal,
/// so the cases that expect a named refusal are missing.
mod plain {
    use super::*;
    mooncake_transport::transport_conformance! {
        @cases OnTcp::new(TcpConfig { framing: Framing::Plain, ..TcpConfig::default() });
            read_brings_exactly_the_remote_bytes
            completed_write_is_applied
            one_completion_for_many_operations
            no_operations_finish_at_once
            large_transfers_arrive_whole
            finished_means_untouched
            dropped_ticket_goes_on_and_frees_later
            concurrent_submissions
            dead_peer_is_an_error_by_the_deadline
            passed_deadline_sends_nothing
            unregistered_local_memory_as_capabilities_say
            own_node_is_a_peer_too
    }
}

mod from_a_device {
    use super::*;
    mooncake_transport::transport_conformance!(OnDevice::new(OnTcp::new(TcpConfig::default()), Sides::Local));
}

mod to_a_device {
    use super::*;
    mooncake_transport::transport_conformance!(OnDevice::new(
        OnTcp::new(TcpConfig::default()),
        Sides::Remote
    ));
}

mod between_devices {
    use super::*;
    mooncake_transport::transport_conformance!(OnDevice::new(
        OnTcp::new(TcpConfig { stripe_threshold: 1 << 20, ..TcpConfig::default() }),
        Sides::Both
    ));
}

mod to_a_device_plain {
    use super::*;
    mooncake_transport::transport_conformance! {
        @cases OnDevice::new(OnTcp::new(TcpConfig { framing: Framing::Plain, ..TcpConfig::default() }), Sides::Remote);
            read_brings_exactly_the_remote_bytes
            completed_write_is_applied
            one_completion_for_many_operations
            large_transfers_arrive_whole
            finished_means_untouched
            concurrent_submissions
            dead_peer_is_an_error_by_the_deadline
            passed_deadline_sends_nothing
    }
}
