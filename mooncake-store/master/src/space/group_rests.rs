//! Groups whose eviction has begun, and function that runs long evictions.

use std::collections::VecDeque;
use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::SlotId;

use crate::directory::{Pass, Shard};
use crate::model::group::Group;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Runs a long part of a call such that other calls of the same thread do not wait for it.
pub type RunBlocking = fn(&mut dyn FnMut());

/// Number of objects of a group that one step looks at.
pub(super) const STEP: usize = 128;

/// Rest of a group.
pub(crate) struct GroupRest {
    pub(super) group: Arc<Group>,
    pub(super) tenant: u32,
    pub(super) pass: Pass,
    /// Hashes of the objects that no step has looked at.
    pub(super) hashes: Vec<u64>,
}

impl GroupRest {
    /// Takes the hashes of the next step.
    pub(super) fn next_step(&mut self) -> Vec<u64> {
        let step = match STEP {
            _ if is_planted("group-evicts-at-once") => usize::MAX,
            _ if is_planted("group-evicted-one-by-one") => 1,
            step => step,
        };
        self.hashes.split_off(self.hashes.len().saturating_sub(step))
    }

    /// Returns the slot of an object of the group.
    pub(super) fn find<A: SegmentAllocator, E: MergeableOrder>(
        &self,
        shard: &Shard<A, E>,
        hash: u64,
    ) -> Option<SlotId> {
        let is_member =
            |slot: &SlotId| shard[*slot].group().is_some_and(|group| Arc::ptr_eq(group, &self.group));
        shard.find_hash(hash).filter(is_member)
    }
}

/// Groups of which a part was evicted, or whose objects wait for one that left.
#[derive(Default)]
pub(crate) struct GroupRests {
    evicted: Mutex<VecDeque<GroupRest>>,
    /// Groups in which a waiting object is looked for.
    pub(super) idle: Mutex<VecDeque<(Arc<Group>, Vec<u64>)>>,
    /// Number of rests, of which others need no lock.
    count: AtomicUsize,
    /// Number of calls whose evictions run aside.
    pub(super) aside: AtomicUsize,
}

impl GroupRests {
    /// Adds a rest that goes before all others, unless it is empty.
    pub(super) fn push_front(&self, rest: GroupRest) {
        if rest.hashes.is_empty() {
            return;
        }
        let mut rests = self.evicted.lock();
        rests.push_front(rest);
        self.count.store(rests.len(), Relaxed);
    }

    /// Takes the first rest of a tenant, or of any.
    pub(super) fn take(&self, tenant: Option<u32>) -> Option<GroupRest> {
        if self.count.load(Relaxed) == 0 {
            return None;
        }
        let mut rests = self.evicted.lock();
        let at = rests.iter().position(|rest| tenant.is_none_or(|tenant| rest.tenant == tenant))?;
        let rest = rests.remove(at);
        self.count.store(rests.len(), Relaxed);
        rest
    }
}
