//! Fixture of the conformance suite.

use std::future::Future;
use std::sync::Arc;

use mooncake_core::clock::SharedClock;
use mooncake_core::memory::{HostMemory, MemorySource};

use crate::transport::Transport;

/// How the conformance suite makes nodes of a wire.
pub trait Fixture {
    /// The wire.
    type T: Transport;

    /// A new node that the other nodes of this fixture can reach once they have its descriptor.
    fn node(&mut self) -> Arc<Self::T>;

    /// Makes a node die as by `kill -9`: it answers nobody any more, now or later.
    fn kill(&mut self, node: &Arc<Self::T>);

    /// Runs a future where the wire's own tasks get on.
    fn block_on<F: Future>(&self, future: F) -> F::Output;

    /// The clock that deadlines are moments of.
    fn clock(&self) -> SharedClock;

    /// Zero-filled memory that nodes of this wire can open to each other.
    fn memory(&self, len: usize) -> Arc<dyn MemorySource> {
        Arc::new(HostMemory::new(len).expect("host memory"))
    }

    /// The same for the local side of operations; `None` where ordinary memory does.
    fn local_memory(&self, len: usize) -> Option<Arc<dyn MemorySource>> {
        let _ = len;
        None
    }

    /// Size of the large transfers, in bytes.
    fn large(&self) -> usize {
        if cfg!(miri) { 5000 } else { (8 << 20) + 13 }
    }
}
