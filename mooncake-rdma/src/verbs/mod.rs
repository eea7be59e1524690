//! RDMA verbs with owners: each thing keeps what it was made from, so nothing can be closed under another, and everything is given back
//! by being dropped.
//!
//! The library is loaded when it is first asked for; where there is none, that is an error and nothing else. Only three calls are
//! `unsafe`, and each says what its caller vouches for: registering bytes, and posting requests that name bytes.
//!
//! A queue pair keeps its domain, and cannot be torn out of it:
//!
//! ```compile_fail,E0451
//! # use mooncake_rdma::verbs::{Device, QueuePair};
//! fn forge(device: std::sync::Arc<Device>) -> QueuePair {
//!     QueuePair { raw: std::ptr::null_mut() } // only a domain makes one, and it is kept
//! }
//! ```
//!
//! Registered memory is one thing with one owner; its keys are worth nothing after it:
//!
//! ```compile_fail,E0599
//! # use mooncake_rdma::verbs::MemoryRegion;
//! fn twice(region: &MemoryRegion) -> MemoryRegion {
//!     region.clone() // would be deregistered twice
//! }
//! ```
//!
//! Nobody posts, or registers somebody else's bytes, without saying so:
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
//!     MemoryRegion::register(domain, start, bytes.len(), Rights { remote: true, write: true, relaxed: false }).unwrap()
//! }
//! ```
//!
//! Above this, where buffers are handed over by value, the compiler keeps bytes alive and alone while they are in flight:
//!
//! ```compile_fail,E0382
//! # use mooncake_rdma::{RdmaPeer, RdmaTransport};
//! # use mooncake_transport::{SliceMut, transfer::{self, Transfer}};
//! fn f(node: &RdmaTransport, peer: &RdmaPeer, slice: SliceMut<RdmaTransport>) {
//!     let ticket = transfer::read(node, peer, [Transfer::new(0x1000, slice)], None);
//!     drop(slice); // it is the transfer's until the ticket gives it back
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
pub use queue::{Batch, Completed, CompletionQueue, Status};

use std::sync::atomic::{AtomicUsize, Ordering};

/// How many of each the process holds, so that a test can see that all are given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Opened devices.
    pub devices: usize,
    /// Protection domains.
    pub domains: usize,
    /// Memory regions.
    pub regions: usize,
    /// Completion queues.
    pub queues: usize,
    /// Queue pairs.
    pub pairs: usize,
}

/// What the process holds now.
pub fn held() -> Held {
    let n = |counter: &AtomicUsize| counter.load(Ordering::SeqCst);
    Held {
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

/// Counts one thing for as long as it lives.
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

/// The error of a call that reports by `errno`, with what was being done.
fn last_error(what: impl std::fmt::Display) -> mooncake_core::Error {
    failed(what, std::io::Error::last_os_error())
}

fn failed(what: impl std::fmt::Display, error: std::io::Error) -> mooncake_core::Error {
    mooncake_core::Error::new(mooncake_core::ErrorCode::TransferFail, format!("{what}: {error}"))
        .with_source(error)
}

/// The result of a call that returns an error number.
fn check(number: std::ffi::c_int, what: impl std::fmt::Display) -> mooncake_core::Result<()> {
    match number {
        0 => Ok(()),
        // A few calls return -1 and leave the number in `errno`.
        number if number < 0 => Err(last_error(what)),
        number => Err(failed(what, std::io::Error::from_raw_os_error(number))),
    }
}
