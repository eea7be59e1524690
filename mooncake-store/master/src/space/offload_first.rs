//! Objects that leave memory only once they are on disk (`--offload_on_evict`): which are
//! requested, and how many.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::ObjectKey;

use super::client_disks::OffloadRequests;
use super::state::Space;
use crate::directory::Object;
use crate::model::disk_replicas::DiskReplicas;
use crate::model::options::DiskOptions;

/// Maximum number of objects of one shard that are requested at a time.
const MAX_SKIPPED: usize = 16;

/// Object that eviction skipped because it must be written to disk first.
pub(crate) struct SkippedObject {
    /// Number of the last use.
    used: u64,
    key: ObjectKey,
    len: u64,
}

/// Time at which an object may leave memory, as far as disks are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MemoryExit {
    Now,
    /// After the write to disk that is in progress.
    Later,
    /// After a write to disk that was not requested yet.
    NotWritten,
}

impl<A: SegmentAllocator, E: MergeableOrder> Space<A, E> {
    /// Returns whether an object may leave memory now, as far as disks are concerned.
    pub(crate) fn may_leave_memory(&self, object: &Object<A>, now: Moment) -> bool {
        match self.memory_exit(object, now) {
            MemoryExit::Now => true,
            MemoryExit::Later => false,
            MemoryExit::NotWritten => {
                let requests = self.disks.offload_requests.lock();
                !requests.known.contains(&object.key) && self.may_skip_offload(&requests)
            }
        }
    }

    /// Answers like [`may_leave_memory`](Self::may_leave_memory) in a search for the next victim,
    /// and lists in `skipped` the first skipped objects that could go if they were written. Each
    /// shard has a list of its own.
    pub(crate) fn may_leave_memory_noting(
        &self,
        object: &Object<A>,
        now: Moment,
        skipped: &mut Vec<SkippedObject>,
    ) -> bool {
        match self.memory_exit(object, now) {
            MemoryExit::Now => true,
            MemoryExit::Later => false,
            MemoryExit::NotWritten => {
                let requests = self.disks.offload_requests.lock();
                if !requests.known.contains(&object.key) {
                    if self.may_skip_offload(&requests) {
                        return true;
                    }
                    if skipped.len() < MAX_SKIPPED {
                        let len = object.value().map_or(0, |value| value.len);
                        skipped.push(SkippedObject { used: object.used, key: object.key.clone(), len });
                    }
                }
                false
            }
        }
    }

    /// Requests the least recently used of the skipped objects for the next tick, within the budget
    /// of [`set_offload_budget`](Self::set_offload_budget).
    pub(crate) fn request_offloads(&self, mut skipped: Vec<SkippedObject>) {
        if skipped.is_empty() {
            return;
        }
        skipped.sort_unstable_by_key(|object| object.used);
        let mut requests = self.disks.offload_requests.lock();
        for SkippedObject { key, len, .. } in skipped {
            if requests.budget == 0 || self.is_full(&requests) {
                return;
            }
            if requests.known.insert(key.clone()) {
                requests.budget = requests.budget.saturating_sub(len);
                requests.bytes = requests.bytes.saturating_add(len);
                requests.keys.push(key);
            }
        }
    }

    /// Limits the requests for an eviction of `bytes`: at most that much, or one step of the
    /// background eviction, is on its way to disks.
    pub(crate) fn set_offload_budget(&self, bytes: u64) {
        if !self.options.disks.as_ref().is_some_and(|options| options.on_evict) {
            return;
        }
        let at_a_time = (self.options.eviction_ratio * self.occupancy().1 as f64) as u64;
        let under_way: u64 = {
            let owners = self.disks.owners.lock();
            owners.values().map(|owner| owner.state.lock().under_way).sum()
        };
        let mut requests = self.disks.offload_requests.lock();
        requests.budget = bytes.max(at_a_time).saturating_sub(under_way.saturating_add(requests.bytes));
    }

    fn memory_exit(&self, object: &Object<A>, now: Moment) -> MemoryExit {
        if object.awaits_file(now) {
            return MemoryExit::Later;
        }
        // An object that ends by itself is not written to disks.
        if object.is_limited {
            return MemoryExit::Now;
        }
        let Some(options) = &self.options.disks else { return MemoryExit::Now };
        if object.disk().is_some_and(DiskReplicas::is_live) {
            return MemoryExit::Now;
        }
        if let Some(owner) = object.offload() {
            let held = owner.is_offloading(object.key.as_bytes(), now);
            return if held { MemoryExit::Later } else { MemoryExit::Now };
        }
        let takes = |client| self.disks.get(client).is_some_and(|owner| owner.state.lock().enabled);
        let has_owner =
            || object.value().is_some_and(|value| value.live().any(|held| takes(held.segment.client)));
        if !options.on_evict || object.has_failed_offload() || !has_owner() {
            MemoryExit::Now
        } else {
            MemoryExit::NotWritten
        }
    }

    /// Returns whether no more objects can be requested before the next tick.
    fn is_full(&self, requests: &OffloadRequests) -> bool {
        let limit = |options: &DiskOptions| (options.queue_limit as f64 * options.queue_part) as usize;
        self.options.disks.as_ref().is_some_and(|options| requests.keys.len() >= limit(options))
    }

    /// Returns whether objects are evicted unwritten because no more can be requested.
    fn may_skip_offload(&self, requests: &OffloadRequests) -> bool {
        self.options.disks.as_ref().is_some_and(|options| options.force_evict) && self.is_full(requests)
    }
}
