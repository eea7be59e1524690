//! Client without a disk, for a build without feature `disk`.

use std::marker::PhantomData;

use mooncake_transport::Transport;

/// Contents and counters of a client's disk. They need a build with feature `disk`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskReport {}

/// The disk of a client, which this build does not have.
pub(crate) type Slot<T> = PhantomData<fn() -> T>;

pub(crate) fn report<T: Transport>(_: &Slot<T>) -> Option<DiskReport> {
    None
}
