//! Leases, and how long space stays in quarantine for their sake.

use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;

#[cfg(feature = "testkit")]
use super::injected_bug::Bug;
use super::state::Space;
use crate::directory::{Object, Write};
use crate::model::disk::DiskOwner;
use crate::model::disk_replicas::DiskReplicas;

impl<A: SegmentAllocator, E: MergeableOrder> Space<A, E> {
    /// Returns the end of a lease that is granted now.
    pub(crate) fn lease_from(&self, now: Moment) -> Moment {
        #[cfg(feature = "testkit")]
        if self.injected_bug.is(Bug::SkipLease) {
            return Moment(0);
        }
        now.after(self.options.lease_ttl)
    }

    /// Returns whether a lease on the current value holds.
    pub(crate) fn lease_holds(&self, object: &Object<A>, now: Moment) -> bool {
        object.lease > now
    }

    /// Returns whether a lease holds on the current value, or on any object of its group.
    pub(crate) fn is_read(&self, object: &Object<A>, now: Moment) -> bool {
        self.lease_holds(object, now) || object.group().is_some_and(|group| group.lease() > now)
    }

    /// Returns the time at which space is free that must stay in quarantine until `until`.
    pub(crate) fn quarantine_end(&self, until: Moment) -> Moment {
        #[cfg(feature = "testkit")]
        if self.injected_bug.is(Bug::ReuseEarly) {
            return Moment(0);
        }
        until
    }

    /// Returns the time until which the current value may be read from memory: by a reader with a
    /// lease, or by the owner of a disk that was asked to write it there.
    pub(crate) fn in_use_until(&self, object: &Object<A>) -> Moment {
        let owner = object.offload();
        object.lease.max(owner.map_or(Moment(0), |owner| owner.reads_until(object.key.as_bytes())))
    }

    /// Returns the first client that has an object on its disk.
    pub(crate) fn disk_owner(&self, object: &Object<A>) -> Option<Arc<DiskOwner>> {
        object.disk().and_then(DiskReplicas::first_owner).cloned()
    }

    /// Takes back a write whose writer may still be active.
    pub(crate) fn quarantine_write(&self, write: Write<A>, now: Moment) {
        self.counters.discarded();
        let until = write.started.after(self.options.put_release);
        write.quarantine(self.quarantine_end(until), now);
    }
}
