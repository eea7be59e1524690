//! State of the jobs.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Rng;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::sketch::Sketch;

use super::drain_table::DrainTable;
use super::recovery::Recovery;
use super::task_table::TaskTable;
use crate::space::Space;
use crate::sync::{Mutex, OnceLock};

/// Number of counters of the sketch of disk reads.
const COUNTERS: usize = 4096;

/// Approximate numbers of reads of objects that are only on disk.
pub(crate) struct DiskReads(pub(crate) Mutex<Sketch>);

impl Default for DiskReads {
    fn default() -> Self {
        Self(Mutex::new(Sketch::new(COUNTERS, 4 * COUNTERS)))
    }
}

/// Jobs of a master, on top of its space.
pub(crate) struct Jobs<A: SegmentAllocator, E: MergeableOrder> {
    pub(crate) space: Space<A, E>,
    pub(crate) tasks: Mutex<TaskTable>,
    pub(crate) drains: DrainTable<A>,
    pub(crate) disk_reads: DiskReads,
    /// State from the snapshot of an earlier master.
    pub(crate) recovery: OnceLock<Recovery>,
}

impl<A: SegmentAllocator, E: MergeableOrder> Jobs<A, E> {
    pub(crate) fn new(space: Space<A, E>, rng: &mut Rng) -> Self {
        let tasks = TaskTable::new(rng.next_u64(), space.options.tasks);
        Self {
            space,
            tasks: Mutex::new(tasks),
            drains: DrainTable::new(rng.next_u64()),
            disk_reads: DiskReads::default(),
            recovery: OnceLock::new(),
        }
    }
}
