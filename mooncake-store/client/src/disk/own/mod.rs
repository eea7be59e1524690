//! The disk of this client: its store, its server for readers, and its counters.

#[allow(unsafe_code)]
mod loan_buffer;
mod open;
mod owner;
mod prefetch_queue;
mod running;
mod scrape;
mod serve;
mod verify;

pub(crate) use self::open::open;
pub(crate) use self::owner::Disk;
pub use self::owner::DiskReport;
pub(crate) use self::prefetch_queue::QueuedPrefetch;
pub(crate) use self::running::{Running, Slot, report};
pub(crate) use self::verify::{VerifiedKeys, VerifyOwn};

/// Splits a key of a disk into tenant and key. A key without a tenant belongs to the default
/// tenant.
pub(crate) fn split(scoped: &[u8]) -> (&str, &[u8]) {
    let at = scoped.iter().position(|byte| *byte == 0);
    let parts = at.and_then(|at| Some((std::str::from_utf8(&scoped[..at]).ok()?, &scoped[at + 1..])));
    parts.filter(|(tenant, _)| !tenant.is_empty()).unwrap_or((mooncake_protocol::api::DEFAULT_TENANT, scoped))
}
