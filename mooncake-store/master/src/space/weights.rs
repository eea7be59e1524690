//! Objects of managed weights.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;

use super::state::Space;
use crate::directory::Object;

impl<A: SegmentAllocator, E: MergeableOrder> Space<A, E> {
    /// Returns whether an object belongs to managed weights, so that it is removed only with them.
    pub(crate) fn is_managed(&self, object: &Object<A>) -> bool {
        self.weights.manage(object.group_name())
    }
}
