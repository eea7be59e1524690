//! The disk of this client: its store, its server for readers, and its counters.

mod open;
mod owner;
mod serve;
#[allow(unsafe_code)]
mod shelf;

use std::sync::Arc;

use mooncake_transport::Transport;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;

pub(crate) use self::open::open;
pub(crate) use self::owner::Disk;
pub use self::owner::DiskReport;

/// The disk of a client, if it has one.
pub(crate) type Slot<T> = Mutex<Option<Running<T>>>;

/// A disk that is in use, with the task that serves it.
pub(crate) struct Running<T: Transport> {
    pub(crate) disk: Arc<Disk<T>>,
    pub(crate) stop: watch::Sender<bool>,
    pub(crate) task: JoinHandle<()>,
}

/// Returns the contents and counters of the disk, if there is one.
pub(crate) fn report<T: Transport>(slot: &Slot<T>) -> Option<DiskReport> {
    slot.lock().as_ref().map(|running| running.disk.report())
}

/// Splits a key of a disk into tenant and key. A key without a tenant belongs to the default
/// tenant.
pub(crate) fn split(scoped: &[u8]) -> (&str, &[u8]) {
    let at = scoped.iter().position(|byte| *byte == 0);
    let parts = at.and_then(|at| Some((std::str::from_utf8(&scoped[..at]).ok()?, &scoped[at + 1..])));
    parts.filter(|(tenant, _)| !tenant.is_empty()).unwrap_or((mooncake_protocol::api::DEFAULT_TENANT, scoped))
}
