//! Leases, and how long space stays in quarantine for their sake.

use std::sync::Arc;

use mooncake_core::alloc::{Extent, SegmentAllocator};
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::fault_injection::is_planted;

#[cfg(feature = "testkit")]
use super::injected_bug::Bug;
use super::state::Space;
use crate::directory::{Object, Value, Write};
use crate::model::disk::DiskOwner;
use crate::model::disk_replicas::DiskReplicas;
use crate::model::readers::{AwaitedSpace, ObjectReads, Reader, counts_any_end};
use crate::model::segment::{Allocation, MountedSegment};
use crate::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// Use of a value that leaves.
pub(crate) struct ValueUse {
    /// Time until which the value may be read.
    until: Moment,
    /// Time until which the value may be read by those that do not report the end.
    rest: Moment,
    reads: ObjectReads,
}

/// Extent of a value that has left, and that readers may still read.
struct ExtentInUse<A> {
    /// Number of reads that have not ended.
    open: AtomicUsize,
    segment: Arc<MountedSegment<A>>,
    extent: Extent,
    /// Time until which the extent is in quarantine.
    until: Moment,
    /// Time until which it stays there without the readers.
    rest: Moment,
}

impl<A: SegmentAllocator> AwaitedSpace for ExtentInUse<A> {
    fn end_read(&self, now: Moment) {
        if self.open.fetch_sub(1, SeqCst) == 1 || counts_any_end() {
            self.segment.end_quarantine(self.extent, self.until, self.rest, now);
        }
    }
}

impl<A: SegmentAllocator, E: MergeableOrder> Space<A, E> {
    /// Returns the end of a lease that is granted now.
    pub(crate) fn lease_from(&self, now: Moment) -> Moment {
        #[cfg(feature = "testkit")]
        if self.injected_bug.is(Bug::SkipLease) {
            return Moment(0);
        }
        now.after(self.options.lease_ttl)
    }

    /// Returns whether a lease protects the current value.
    pub(crate) fn lease_holds(&self, object: &Object<A>, now: Moment) -> bool {
        self.protects(object.lease, now)
    }

    /// Returns whether a lease with that end still protects an object from removal.
    pub(crate) fn protects(&self, lease: Moment, now: Moment) -> bool {
        lease > now.after(self.options.unprotected_lease)
    }

    /// Returns whether a lease protects the current value, or any object of its group.
    pub(crate) fn is_read(&self, object: &Object<A>, now: Moment) -> bool {
        self.lease_holds(object, now) || object.group().is_some_and(|group| self.protects(group.lease(), now))
    }

    /// Returns whether the lease of an object yields to a put that finds no other space. Look-ups
    /// have extended it for a while, nothing reads the object or its group, and a get had its time.
    pub(crate) fn lease_yields(&self, object: &Object<A>, now: Moment) -> bool {
        let had_time = |since: Moment| since != Moment(0) && since.after(self.options.look_up_floor()) <= now;
        let of_group = object.group().is_none_or(|group| {
            !self.protects(group.lease(), now)
                || had_time(group.looked_up_since()) && !self.protects(group.read_lease(), now)
        });
        (!self.lease_holds(object, now) || had_time(object.looked_up_since))
            && !self.protects(object.reads.until(object.lease), now)
            && of_group
            && !is_planted("look-ups-stop-writers")
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
        object.reads.until(object.lease).max(object.offloaded_until())
    }

    /// Takes the reads of the current value, which leaves, and its lease.
    pub(crate) fn take_use(&self, object: &mut Object<A>) -> ValueUse {
        let until = self.in_use_until(object);
        let reads = std::mem::take(&mut object.reads);
        let rest = reads.unreported().max(object.offloaded_until());
        object.lease = Moment(0);
        ValueUse { until, rest, reads }
    }

    /// Gives the space of a value back, for reuse once its readers have ended or their leases have.
    pub(crate) fn give_back(&self, value: Value<A>, used: ValueUse, now: Moment) {
        let ValueUse { until, rest, reads } = used;
        if reads.has_claims() {
            self.readers.want_reports(now);
        }
        let (until, rest) = (self.quarantine_end(until), self.quarantine_end(rest));
        // A read may end meanwhile.
        if !reads.has_claims() || until <= now {
            return value.quarantine(until, now);
        }
        for held in value.replicas {
            let Allocation { segment, extent, .. } = held;
            let Some((until, rest)) = segment.quarantine_for_readers(extent, until, rest, now) else {
                continue;
            };
            reads.copied().await_ends(until, now, |count| {
                Arc::new(ExtentInUse { open: AtomicUsize::new(count), segment, extent, until, rest })
            });
        }
    }

    /// Records that all reads of a reader up to a number have ended. Space that waited for them is
    /// free, and so are objects that have ended with such a read.
    pub(crate) fn end_reads(&self, reader: &Reader, number: u64, now: Moment) {
        let (has_freed, objects) = self.readers.end_reads(reader, number, now);
        for object in &objects {
            self.remove_read_object(object, now);
        }
        if has_freed || !objects.is_empty() {
            self.eviction.end_backoff();
        }
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
