//! Client without a disk, for a build without feature `disk`.

use std::future::{Ready, ready};

use mooncake_core::Result;
use mooncake_transport::Transport;

use crate::deadline::Deadline;
use crate::state::{Client, Inner};

impl<T: Transport> Client<T> {
    /// Does nothing: the configuration has no disk, as `ClientConfig::validate` has checked.
    pub(crate) fn start_disk(&self) -> Ready<Result<()>> {
        ready(Ok(()))
    }
}

impl<T: Transport> Inner<T> {
    pub(crate) fn close_disk(&self, _: &Deadline) -> Ready<()> {
        ready(())
    }

    pub(crate) fn offer_disk_again(&self) {}

    pub(crate) fn queue_own_prefetches(&self, _tenant: &str, _objects: &[(&[u8], i64)]) -> bool {
        false
    }
}
