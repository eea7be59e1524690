//! Primitives of [`gate`](crate::gate). `tests/gate.rs` replaces them by those of loom.

pub(crate) use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) use parking_lot::RwLockReadGuard;

/// Lock without data, whose readers may be recursive.
#[derive(Debug)]
pub(crate) struct RwLock(parking_lot::RwLock<()>);

impl RwLock {
    pub(crate) fn new() -> Self {
        Self(parking_lot::RwLock::new(()))
    }

    /// Takes a read lock. One gathered send may enter a region several times. Such readers overtake
    /// a waiting writer and do not starve it, because the writer has closed the gate first.
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, ()> {
        self.0.read_recursive()
    }

    pub(crate) fn wait_for_readers(&self) {
        drop(self.0.write());
    }
}
