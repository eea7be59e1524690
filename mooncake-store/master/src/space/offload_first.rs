//! Objects that memory lets go of only when a disk has them (`--offload_on_evict`): which are asked for, and how many.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::ids::ObjectKey;

use super::client_disks::OffloadRequests;
use super::state::Space;
use crate::directory::Object;
use crate::model::disk_replicas::DiskReplicas;
use crate::model::options::DiskOptions;

/// Most objects of one shard that are asked for at a time.
const PASSED: usize = 16;

/// An object that memory may let go of once it is written to a disk.
pub(crate) struct SkippedObject {
    /// Number of its last use.
    used: u64,
    key: ObjectKey,
    len: u64,
}

/// Whether memory may let go of an object, as far as disks are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MemoryExit {
    Now,
    /// It is on its way to a disk.
    Later,
    /// Once somebody has asked for it to be written.
    NotWritten,
}

impl<A: SegmentAllocator, E: EvictionPolicy> Space<A, E> {
    /// Whether memory may let go of an object now, as far as disks are concerned.
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

    /// As [`may_leave_memory`](Self::may_leave_memory), for whoever looks for the next object to go: notes the first of those passed over that could go if
    /// they were written. One list for each shard.
    pub(crate) fn may_leave_memory_noting(
        &self,
        object: &Object<A>,
        now: Moment,
        passed: &mut Vec<SkippedObject>,
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
                    if passed.len() < PASSED {
                        let len = object.value().map_or(0, |value| value.len);
                        passed.push(SkippedObject { used: object.used, key: object.key.clone(), len });
                    }
                }
                false
            }
        }
    }

    /// Of the objects passed over, those used least are asked for with the next tick: no more than [`set_offload_budget`](Self::set_offload_budget) said.
    pub(crate) fn request_offloads(&self, mut passed: Vec<SkippedObject>) {
        if passed.is_empty() {
            return;
        }
        passed.sort_unstable_by_key(|object| object.used);
        let mut requests = self.disks.offload_requests.lock();
        for SkippedObject { key, len, .. } in passed {
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

    /// Somebody looks for so many bytes: at most that much, or what eviction takes at a time, is to be on its way to disks for it.
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
        let Some(options) = &self.options.disks else { return MemoryExit::Now };
        if object.disk().is_some_and(DiskReplicas::is_live) {
            return MemoryExit::Now;
        }
        if let Some(owner) = object.offload() {
            let held = owner.is_offloading(object.key.as_bytes(), now, self.options.put_release);
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

    /// Whether no more can wait for disks before the next tick.
    fn is_full(&self, requests: &OffloadRequests) -> bool {
        let limit = |options: &DiskOptions| (options.queue_limit as f64 * options.queue_part) as usize;
        self.options.disks.as_ref().is_some_and(|options| requests.keys.len() >= limit(options))
    }

    /// Whether objects go although they were to be written first.
    fn may_skip_offload(&self, requests: &OffloadRequests) -> bool {
        self.options.disks.as_ref().is_some_and(|options| options.force_evict) && self.is_full(requests)
    }
}
