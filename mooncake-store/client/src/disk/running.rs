//! A disk with the task that serves it.

use mooncake_transport::Transport;
use std::sync::Arc;
use tokio::sync::watch;

use super::owner::{Disk, DiskReport};

/// A disk that is in use.
pub(crate) struct Running<T: Transport> {
    pub(crate) disk: Arc<Disk<T>>,
    pub(crate) stop: watch::Sender<bool>,
    pub(crate) task: tokio::task::JoinHandle<()>,
}

impl<T: Transport> Running<T> {
    pub(crate) fn report(&self) -> DiskReport {
        self.disk.report()
    }
}
