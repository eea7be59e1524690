//! Journal of changes.

use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;

use super::master::Master;
use crate::model::journal::Journal;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Reports every change from now on to `journal`.
    pub fn set_journal(&self, journal: &Arc<dyn Journal>) {
        for mut shard in self.space().directory.shards() {
            shard.set_journal(journal.clone());
        }
    }
}
