//! Bugs that a test plants in a master.

use crate::sync::atomic::{AtomicU8, Ordering::SeqCst};

/// Bug that a test plants in a master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Bug {
    /// Leases are promised and not kept.
    SkipLease = 1,
    /// Space of removed, replaced and abandoned values is reused at once.
    ReuseEarly = 2,
}

#[derive(Default)]
pub(crate) struct InjectedBug(AtomicU8);

impl InjectedBug {
    /// Selects the bug that the master has from now on.
    pub(crate) fn set(&self, bug: Bug) {
        self.0.store(bug as u8, SeqCst);
    }

    pub(crate) fn is(&self, bug: Bug) -> bool {
        self.0.load(SeqCst) == bug as u8
    }
}
