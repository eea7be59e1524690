//! Table of managed weights with its lock.

use super::table::Weights;
use crate::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use crate::sync::{Mutex, MutexGuard};

/// Part of the names of all groups of managed weights.
const PREFIX: &str = "weight:";

/// Managed weights. The lock is taken inside that of a shard.
pub(crate) struct ManagedWeights {
    table: Mutex<Weights>,
    /// Number of records. While it is 0, no call looks at the table.
    records: AtomicUsize,
}

impl ManagedWeights {
    /// Creates an empty table, whose numbers differ from those of the masters before and after.
    pub(crate) fn new(epoch: u64) -> Self {
        // Positive numbers of 63 bits.
        let first = (epoch & 0x7fff_ffff) << 32;
        Self { table: Mutex::new(Weights::new(first)), records: AtomicUsize::new(0) }
    }

    /// Returns whether there are records.
    pub(crate) fn are_used(&self) -> bool {
        self.records.load(SeqCst) > 0
    }

    /// Returns whether a revision may have objects.
    pub(crate) fn have_objects(&self) -> bool {
        self.are_used() && self.table.lock().have_objects()
    }

    /// Locks the table. The caller adds no record.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Weights> {
        self.table.lock()
    }

    /// Runs a change that may add records.
    pub(crate) fn add<R>(&self, change: impl FnOnce(&mut Weights) -> R) -> R {
        let mut table = self.table.lock();
        let outcome = change(&mut table);
        self.records.store(table.len(), SeqCst);
        outcome
    }

    /// Returns whether the objects of a group belong to managed weights.
    pub(crate) fn manage(&self, group: &str) -> bool {
        self.may_manage(group) && self.table.lock().is_managed(group)
    }

    /// Returns false if no record has this group, without a look at the table.
    pub(crate) fn may_manage(&self, group: &str) -> bool {
        !group.is_empty() && self.are_used() && group.contains(PREFIX)
    }
}
