//! Safe wrappers of RDMA verbs. Each object keeps the objects that it was created from, so nothing
//! can be closed under another, and everything is released on drop.
//!
//! The library is loaded on first use; a missing library is an error. Only three calls are
//! `unsafe`, and each documents the promises of its caller: registering bytes, and posting requests
//! that name bytes.
//!
//! A queue pair keeps its domain, and cannot be separated from it:
//!
//! ```compile_fail,E0451
//! # use mooncake_rdma::verbs::{Device, QueuePair};
//! fn forge(device: std::sync::Arc<Device>) -> QueuePair {
//!     QueuePair { raw: std::ptr::null_mut() } // only a domain creates one, and keeps it
//! }
//! ```
//!
//! Registered memory has one owner; its keys are invalid after it is dropped:
//!
//! ```compile_fail,E0599
//! # use mooncake_rdma::verbs::MemoryRegion;
//! fn twice(region: &MemoryRegion) -> MemoryRegion {
//!     region.clone() // would be deregistered twice
//! }
//! ```
//!
//! Posting, and registering borrowed bytes, is `unsafe`:
//!
//! ```compile_fail,E0133
//! # use mooncake_rdma::verbs::{QueuePair, Posting};
//! fn post(pair: &QueuePair, posting: &mut Posting) {
//!     pair.post(posting).unwrap(); // the bytes it names must live until it is completed
//! }
//! ```
//!
//! ```compile_fail,E0133
//! # use mooncake_rdma::verbs::{Domain, MemoryRegion, Rights};
//! # use std::sync::Arc;
//! fn register(domain: &Arc<Domain>, bytes: &mut [u8]) -> MemoryRegion {
//!     let start = std::ptr::NonNull::from(&mut *bytes).cast();
//!     let rights = Rights { remote: true, write: true, relaxed: false };
//!     MemoryRegion::register(domain, start, bytes.len(), rights).unwrap()
//! }
//! ```
//!
//! Above this layer, buffers are passed by value, so the compiler keeps bytes alive and exclusive
//! while they are in flight:
//!
//! ```compile_fail,E0382
//! # use mooncake_rdma::{RdmaPeer, RdmaTransport};
//! # use mooncake_transport::{SliceMut, transfer::{self, Transfer}};
//! fn f(node: &RdmaTransport, peer: &RdmaPeer, slice: SliceMut<RdmaTransport>) {
//!     let ticket = transfer::read(node, peer, [Transfer::new(0x1000, slice)], None);
//!     drop(slice); // the transfer owns it until the ticket returns it
//! }
//! ```

mod device;
#[cfg(test)]
pub(crate) mod fake;
mod ffi;
mod library;
mod memory;
mod pair;
mod queue;

pub use device::{Device, DeviceLimits, Event, Gid, GidKind, Port, device_names};
pub use memory::{Domain, MemoryRegion, Rights};
pub use pair::{Path, Posting, QueuePair, QueueSizes, Request, Timing};
pub use queue::{Completed, CompletionBatch, CompletionQueue, Status};

use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of live objects of each kind in the process, so that a test can check that all are
/// released.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ObjectCounts {
    /// Number of opened devices.
    pub devices: usize,
    /// Number of protection domains.
    pub domains: usize,
    /// Number of memory regions.
    pub regions: usize,
    /// Number of completion queues.
    pub queues: usize,
    /// Number of queue pairs.
    pub pairs: usize,
}

/// Returns the number of live objects.
pub fn object_counts() -> ObjectCounts {
    let n = |counter: &AtomicUsize| counter.load(Ordering::SeqCst);
    ObjectCounts {
        devices: n(&DEVICES),
        domains: n(&DOMAINS),
        regions: n(&REGIONS),
        queues: n(&QUEUES),
        pairs: n(&PAIRS),
    }
}

static DEVICES: AtomicUsize = AtomicUsize::new(0);
static DOMAINS: AtomicUsize = AtomicUsize::new(0);
static REGIONS: AtomicUsize = AtomicUsize::new(0);
static QUEUES: AtomicUsize = AtomicUsize::new(0);
static PAIRS: AtomicUsize = AtomicUsize::new(0);

/// Counter of one object, for as long as it lives.
struct Counted(&'static AtomicUsize);

impl Counted {
    fn one(of: &'static AtomicUsize) -> Self {
        of.fetch_add(1, Ordering::SeqCst);
        Self(of)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Returns the error of a call that reports by `errno`, with the failed action.
fn last_error(what: impl std::fmt::Display) -> mooncake_core::Error {
    failed(what, std::io::Error::last_os_error())
}

fn failed(what: impl std::fmt::Display, error: std::io::Error) -> mooncake_core::Error {
    mooncake_core::Error::new(mooncake_core::ErrorCode::TransferFail, format!("{what}: {error}"))
        .with_source(error)
}

/// Returns the result of a call that returns an error number.
fn check(number: std::ffi::c_int, what: impl std::fmt::Display) -> mooncake_core::Result<()> {
    match number {
        0 => Ok(()),
        // A few calls return -1 and leave the number in `errno`.
        number if number < 0 => Err(last_error(what)),
        number => Err(failed(what, std::io::Error::from_raw_os_error(number))),
    }
}
