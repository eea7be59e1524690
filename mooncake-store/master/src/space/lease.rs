//! Leases, and how long space stays in quarantine for their sake.

use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::EvictionPolicy;

#[cfg(feature = "testkit")]
use super::injected_bug::Bug;
use super::state::Space;
use crate::directory::{Object, Write};
use crate::model::disk::DiskOwner;
use crate::model::disk_replicas::DiskReplicas;

impl<A: SegmentAllocator, E: EvictionPolicy> Space<A, E> {
    /// Until when a lease granted now holds.
    pub(crate) fn lease_from(&self, now: Moment) -> Moment {
        #[cfg(feature = "testkit")]
        if self.injected_bug.is(Bug::SkipLease) {
            return Moment(0);
        }
        now.after(self.options.lease_ttl)
    }

    /// Whether a reader may still rely on the present value.
    pub(crate) fn lease_holds(&self, object: &Object<A>, now: Moment) -> bool {
        object.lease > now
    }

    /// Whether a reader may still rely on the present value, or on that of another member of its group.
    pub(crate) fn is_read(&self, object: &Object<A>, now: Moment) -> bool {
        self.lease_holds(object, now) || object.group().is_some_and(|group| group.lease() > now)
    }

    /// When space that must rest until `until` is free.
    pub(crate) fn quarantine_end(&self, until: Moment) -> Moment {
        #[cfg(feature = "testkit")]
        if self.injected_bug.is(Bug::ReuseEarly) {
            return Moment(0);
        }
        until
    }

    /// Until when somebody may be reading the present value from memory: a reader with a lease, or the owner of a disk who was told to
    /// write it there.
    pub(crate) fn in_use_until(&self, object: &Object<A>) -> Moment {
        let owner = object.offload();
        let write_out = self.options.put_release;
        object.lease.max(owner.map_or(Moment(0), |owner| owner.reads_until(object.key.as_bytes(), write_out)))
    }

    /// Who has an object on disk, the first of them.
    pub(crate) fn disk_owner(&self, object: &Object<A>) -> Option<Arc<DiskOwner>> {
        object.disk().and_then(DiskReplicas::first_owner).cloned()
    }

    /// Takes back a write whose writer may still be at it.
    pub(crate) fn quarantine_write(&self, write: Write<A>, now: Moment) {
        self.counters.discarded();
        let until = write.started.after(self.options.put_release);
        write.quarantine(self.quarantine_end(until), now);
    }
}
