//! Somebody who is told what can be read and what cannot any more.

use std::fmt::Debug;
use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::ids::ObjectKey;

use super::Master;

/// Is told when an object becomes readable and when it ceases to be, in that order for each key. Called under a lock of the
/// directory: it must be quick and must not call the master.
pub trait Journal: Debug + Send + Sync + 'static {
    /// The object can be read; `group` is empty for none, `tenant` is `default` where there are no tenants.
    fn stored(&self, tenant: &str, key: &ObjectKey, group: &str);

    /// It cannot be read any more: removed, evicted, replaced, or lost with its segments.
    fn removed(&self, tenant: &str, key: &ObjectKey, group: &str);
}

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// Tells `journal` of every change from now on.
    pub fn set_journal(&self, journal: &Arc<dyn Journal>) {
        for mut shard in self.directory.each() {
            shard.set_journal(journal.clone());
        }
    }
}
