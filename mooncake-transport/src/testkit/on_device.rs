//! Nodes of another fixture with memory on an emulated device.

use std::future::Future;
use std::sync::Arc;

use mooncake_core::clock::SharedClock;
use mooncake_core::memory::MemorySource;
use mooncake_core::testkit::device::TestDevice;

use super::Fixture;
use crate::through_host::ThroughHost;

/// Choice of the memory that is on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sides {
    /// Local memory of transfers.
    Local,
    /// Memory that is open to peers.
    Remote,
    /// Both, each on its own device.
    Both,
}

/// Nodes of a fixture, with device memory through the host.
#[derive(Debug)]
pub struct OnDevice<F> {
    inner: F,
    local: Option<TestDevice>,
    remote: Option<TestDevice>,
}

impl<F: Fixture> OnDevice<F> {
    /// Creates a fixture on new devices.
    pub fn new(inner: F, sides: Sides) -> Self {
        let local = (sides != Sides::Remote).then(TestDevice::new);
        let remote = (sides != Sides::Local).then(TestDevice::new);
        Self { inner, local, remote }
    }
}

impl<F: Fixture> Fixture for OnDevice<F> {
    type T = ThroughHost<F::T>;

    fn node(&mut self) -> Arc<Self::T> {
        Arc::new(ThroughHost::new(self.inner.node(), self.inner.clock()))
    }

    fn kill(&mut self, node: &Arc<Self::T>) {
        self.inner.kill(node.transport());
    }

    fn block_on<G: Future>(&self, future: G) -> G::Output {
        self.inner.block_on(future)
    }

    fn clock(&self) -> SharedClock {
        self.inner.clock()
    }

    fn memory(&self, len: usize) -> Arc<dyn MemorySource> {
        match &self.remote {
            Some(device) => Arc::new(device.memory(len).expect("memory of a test device")),
            None => self.inner.memory(len),
        }
    }

    fn local_memory(&self, len: usize) -> Option<Arc<dyn MemorySource>> {
        match &self.local {
            Some(device) => Some(Arc::new(device.memory(len).expect("memory of a test device"))),
            None => self.inner.local_memory(len),
        }
    }

    fn large(&self) -> usize {
        self.inner.large()
    }
}
