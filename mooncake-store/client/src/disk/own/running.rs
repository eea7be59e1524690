//! A disk with the task that serves it.

use std::sync::Arc;

use mooncake_transport::Transport;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::owner::{Disk, DiskReport};

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
