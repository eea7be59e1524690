//! Fixture of the conformance suite.

use std::future::Future;
use std::sync::Arc;

use mooncake_core::clock::SharedClock;
use mooncake_core::memory::{HostMemory, MemorySource};

use crate::transport::Transport;

/// Fixture of the conformance suite, which creates nodes of a transport.
pub trait Fixture {
    /// Transport under test.
    type T: Transport;

    /// Creates a node that the other nodes of this fixture can reach once they have its descriptor.
    fn node(&mut self) -> Arc<Self::T>;

    /// Kills a node as `kill -9` does: it never responds again.
    fn kill(&mut self, node: &Arc<Self::T>);

    /// Runs a future while the transport's own tasks make progress.
    fn block_on<F: Future>(&self, future: F) -> F::Output;

    /// Returns the clock of the deadlines.
    fn clock(&self) -> SharedClock;

    /// Allocates zero-filled memory that nodes of this transport can open to each other.
    fn memory(&self, len: usize) -> Arc<dyn MemorySource> {
        Arc::new(HostMemory::new(len).expect("host memory"))
    }

    /// Allocates memory for the local side of operations, or returns `None` if ordinary memory is
    /// enough.
    fn local_memory(&self, len: usize) -> Option<Arc<dyn MemorySource>> {
        let _ = len;
        None
    }

    /// Returns the size of the large transfers in bytes.
    fn large(&self) -> usize {
        if cfg!(miri) { 5000 } else { (8 << 20) + 13 }
    }
}
