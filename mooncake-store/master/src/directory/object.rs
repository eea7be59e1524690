//! Object: its value, its write in progress, its copies in progress, and its disk replicas.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::Place;
use mooncake_core::hints::PutHints;
use mooncake_core::ids::ObjectKey;
use mooncake_core::replica::{Replica, ReplicaStatus, SoftPin};
use mooncake_core::{Error, ErrorCode};

use super::copying::Copying;
use super::replicas::Replicas;
use crate::model::disk_replicas::{DiskReplicas, DiskTier, FileGrant};
use crate::model::group::Group;
use crate::model::ledger::StoredChange;
use crate::model::lifetime::Lifetime;
use crate::model::look_ups::begin_of_look_ups;
use crate::model::readers::ObjectReads;
use crate::model::segment::Allocation;
use crate::model::value::{Stamp, Writer};

/// Position of an object in the order of eviction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum OrderPosition {
    /// No position: the object has no value or is hard-pinned.
    #[default]
    None,
    /// Among those that the policy orders.
    Policy,
    /// Among those that the policy orders, after all others of its group. Eviction has passed the
    /// object over because another one of its group may be of more value.
    Waiting,
    /// Among the soft-pinned.
    Pinned,
    /// Among those whose soft pin has ended, and that were not used since.
    Unpinned,
    /// Beside those, because the object was recovered and was not used since.
    Recovered,
}

impl OrderPosition {
    /// Returns whether the policy orders the object.
    pub(super) fn is_in_policy(self) -> bool {
        matches!(self, Self::Policy | Self::Waiting)
    }
}

/// State of one key.
pub(crate) struct Object<A> {
    pub(crate) key: ObjectKey,
    pub(crate) hash: u64,
    /// End of the latest lease on the current value.
    pub(crate) lease: Moment,
    /// First of the look-ups without a pause that have extended the lease since the last read; zero
    /// for none.
    pub(crate) looked_up_since: Moment,
    /// Reads of the current value. A lease without a read gives no address away.
    pub(crate) reads: ObjectReads,
    /// End of the soft pin; zero for none.
    pub(super) soft_pin: Moment,
    pub(crate) hard_pin: bool,
    pub(super) position: OrderPosition,
    /// True if the object ends by itself; its shard has its lifetime.
    pub(crate) is_limited: bool,
    /// Number of the tenant; 0 for none.
    pub(super) tenant: u32,
    pub(super) group: Option<Arc<Group>>,
    /// Number of the last use, counted in uses of all objects.
    pub(crate) used: u64,
    pub(super) value: Option<Value<A>>,
    pub(super) write: Option<Box<Write<A>>>,
    pub(super) copying: Option<Box<Copying<A>>>,
    /// Replicas on disks and in files.
    pub(crate) tier: Option<Box<DiskTier>>,
}

/// Value that can be read.
pub(crate) struct Value<A> {
    pub(crate) len: u64,
    pub(crate) checksum: Option<u64>,
    pub(crate) writer: Writer,
    /// True if a write may have begun after this value was complete. The end of a write without a
    /// number may then mean that other write, whatever its outcome.
    pub(crate) superseded: bool,
    pub(crate) stamp: Stamp,
    pub(crate) replicas: Replicas<A>,
}

impl<A> Value<A> {
    /// Returns whether an end by `caller` can only repeat the one that completed this value.
    pub(crate) fn ended_by(&self, caller: Writer) -> bool {
        self.writer.repeats(caller) || self.writer.is(caller) && !self.superseded
    }

    /// Returns a number that identifies this value in a copy: no two values have a replica in
    /// common.
    pub(crate) fn copy_epoch(&self) -> u64 {
        self.replicas.first().map_or(0, |held| held.id.0)
    }
}

/// Returns the error for a miss. Misses are frequent, so the error has no text of its own.
#[cold]
pub(crate) fn not_found() -> Error {
    ErrorCode::ObjectNotFound.into()
}

/// Write in progress: that of a put, or of an upsert beside the value that it will replace.
pub(crate) struct Write<A> {
    pub(crate) writer: Writer,
    pub(crate) started: Moment,
    pub(crate) len: u64,
    pub(crate) replicas: Replicas<A>,
    pub(crate) soft_pin: SoftPin,
    pub(crate) soft_pin_ttl_ms: Option<u64>,
    pub(crate) hard_pin: bool,
    /// True if the write promotes a value from disk.
    pub(crate) promotes: bool,
    /// Logical time of the start of a promotion.
    pub(crate) begun: u64,
    /// File that the value is to be written to as well.
    pub(crate) file: Option<Box<FileGrant>>,
    /// Hints of the writer.
    pub(crate) hints: Option<Box<PutHints>>,
    /// Name of the session that writes the object.
    pub(crate) session: Option<Box<[u8]>>,
    /// Place of the object in its chain.
    pub(crate) place: Place,
    /// Index of the object in the list of writes of its shard.
    pub(super) index: usize,
}

impl<A: SegmentAllocator> Object<A> {
    /// Returns the value that can be read.
    pub(crate) fn value(&self) -> Option<&Value<A>> {
        self.value.as_ref()
    }

    /// Returns the write in progress.
    pub(crate) fn write(&self) -> Option<&Write<A>> {
        self.write.as_deref()
    }

    /// Returns the file of the write of `writer`.
    pub(crate) fn file_of_write(&mut self, writer: Writer) -> Option<&mut FileGrant> {
        self.write.as_mut().filter(|write| write.writer.is(writer))?.file.as_deref_mut()
    }

    /// Drops the file of the write of `writer`. Returns whether there was one.
    pub(crate) fn take_file_of_write(&mut self, writer: Writer) -> bool {
        let write = self.write.as_mut().filter(|write| write.writer.is(writer));
        write.is_some_and(|write| write.file.take().is_some())
    }

    /// Returns the copy or move in progress.
    pub(crate) fn copying(&self) -> Option<&Copying<A>> {
        self.copying.as_deref().filter(|copying| !copying.lost)
    }

    /// Records that the start of the copy in progress was answered twice.
    pub(crate) fn share_copy(&mut self) {
        self.copying.iter_mut().for_each(|copying| copying.is_shared = true);
    }

    /// Returns a copy that was lost and that its client has not ended.
    pub(crate) fn lost_copy(&self) -> Option<&Copying<A>> {
        self.copying.as_deref().filter(|copying| copying.lost)
    }

    pub(crate) fn tenant(&self) -> u32 {
        self.tenant
    }

    /// Returns the bytes that the readable value takes in memory, or would take.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let on_disk = self.disk().map_or(0, |disk| disk.len);
        // A registered segment may be larger than any memory, so the sum may be, too.
        let of_value = |value: &Value<A>| {
            value.replicas.iter().fold(0u64, |sum, held| sum.saturating_add(held.extent.len))
        };
        self.value.as_ref().map_or(on_disk, of_value)
    }

    /// Returns the bytes that the tenant is charged: those of every replica that exists or is being
    /// made.
    pub(crate) fn charged_bytes(&self) -> u64 {
        let len = self.value.as_ref().map_or(0, |value| value.len);
        let value = self.value.as_ref().map_or(0, |value| value.replicas.len());
        let copies = self.copying.as_ref().map_or(0, |copying| copying.targets.len());
        let write =
            self.write.as_ref().map_or(0, |write| write.len.saturating_mul(write.replicas.len() as u64));
        len.saturating_mul((value + copies) as u64).saturating_add(write)
    }

    pub(crate) fn group(&self) -> Option<&Arc<Group>> {
        self.group.as_ref()
    }

    /// Returns the name of the group; empty for none.
    pub(crate) fn group_name(&self) -> &str {
        self.group.as_deref().map_or("", Group::name)
    }

    /// Returns every readable replica: those in memory, then those on disks.
    pub(crate) fn describe(&self) -> Vec<Replica> {
        let mut replicas = self.value.as_ref().map(Value::describe).unwrap_or_default();
        replicas.extend(self.disk().into_iter().flat_map(DiskReplicas::describe));
        replicas
    }

    /// Returns the checksum that the writer gave for the readable value.
    pub(crate) fn checksum(&self) -> Option<u64> {
        let in_memory = self.value.as_ref().map(|value| value.checksum);
        in_memory.or_else(|| self.disk().map(|disk| disk.checksum)).flatten()
    }

    /// Grants the lease of a read on the current value and on its group.
    pub(crate) fn grant_lease(&mut self, until: Moment) {
        self.looked_up_since = Moment(0);
        self.lease = self.lease.max(until);
        if let Some(group) = &self.group {
            group.extend_reads(until);
        }
    }

    /// Grants the lease of a look-up, from `now` on. Look-ups at most `pause` apart are one.
    pub(crate) fn grant_look_up(&mut self, now: Moment, until: Moment, pause: Duration) {
        self.looked_up_since = begin_of_look_ups(self.looked_up_since, self.lease, now, until, pause);
        self.lease = self.lease.max(until);
        if let Some(group) = &self.group {
            group.extend_look_ups(now, until, pause);
        }
    }

    /// Describes a replica of `value` for the ledger of its segment.
    pub(super) fn stored_at(
        &self,
        held: &Allocation<A>,
        value: &Value<A>,
        lifetime: Option<Lifetime>,
    ) -> StoredChange {
        StoredChange {
            segment: held.segment.info.id,
            offset: held.extent.offset,
            len: value.len,
            key: self.key.clone(),
            checksum: value.checksum,
            writer: value.writer.client,
            group: self.group.clone(),
            hard_pin: self.hard_pin,
            soft_pin: self.soft_pin,
            lifetime: lifetime.map(Box::new),
            stamp: value.stamp,
        }
    }

    /// Returns the end of the soft pin; zero for none.
    pub(crate) fn soft_pin(&self) -> Moment {
        self.soft_pin
    }

    /// Returns the replicas on disks and in files.
    pub(crate) fn disk(&self) -> Option<&DiskReplicas> {
        self.tier.as_ref()?.on_disk.as_ref()
    }
}

impl<A: SegmentAllocator> Value<A> {
    /// Gives the space back, for reuse once `lease` has ended.
    pub(crate) fn quarantine(self, lease: Moment, now: Moment) {
        self.replicas.into_iter().for_each(|held| held.quarantine(lease, now));
    }

    /// Returns the replicas in segments that are mounted.
    pub(crate) fn live(&self) -> impl Iterator<Item = &Allocation<A>> {
        self.replicas.iter().filter(|held| held.segment.is_alive())
    }

    /// Returns the replicas that can be read now.
    pub(crate) fn readable(&self) -> impl Iterator<Item = &Allocation<A>> {
        self.replicas.iter().filter(|held| held.segment.is_readable())
    }

    pub(crate) fn describe(&self) -> Vec<Replica> {
        self.readable().map(|held| held.describe(self.len, ReplicaStatus::Complete)).collect()
    }
}

impl<A: SegmentAllocator> Write<A> {
    pub(crate) fn new(writer: Writer, started: Moment, len: u64, replicas: Replicas<A>) -> Self {
        Self {
            writer,
            started,
            len,
            replicas,
            soft_pin: SoftPin::Preserve,
            soft_pin_ttl_ms: None,
            hard_pin: false,
            promotes: false,
            begun: 0,
            file: None,
            hints: None,
            session: None,
            place: Place::numbered(0),
            index: 0,
        }
    }

    pub(crate) fn quarantine(self, until: Moment, now: Moment) {
        self.replicas.into_iter().for_each(|held| held.quarantine(until, now));
    }

    pub(crate) fn describe(&self) -> Vec<Replica> {
        let in_memory = self.replicas.iter().map(|held| held.describe(self.len, ReplicaStatus::Processing));
        in_memory.chain(self.file.iter().map(|file| file.describe(self.len))).collect()
    }
}
