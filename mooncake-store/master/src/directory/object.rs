//! One object: its value, its write in progress, its copies in progress, and its disk replicas.

use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::ids::{ClientId, ObjectKey, ReplicaId};
use mooncake_core::replica::{Replica, ReplicaStatus, SoftPin};
use mooncake_core::{Error, ErrorCode};
use mooncake_protocol::api::CopyToken;
use mooncake_protocol::wire::TaskKind;
use smallvec::SmallVec;

use crate::model::disk_replicas::{DiskReplicas, DiskTier, FileGrant};
use crate::model::group::Group;
use crate::model::ledger::StoredChange;
use crate::model::segment::Allocation;
use crate::model::value::{Stamp, Writer};

/// Most objects have one replica; those need no allocation of their own.
pub(crate) type Replicas<A> = SmallVec<[Allocation<A>; 1]>;

/// Where an object with a value is among those that may go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum OrderPosition {
    /// Nowhere: it has no value, or is pinned for ever.
    #[default]
    None,
    /// Where its pool's policy says.
    Policy,
    /// Among the soft-pinned ones.
    Pinned,
    /// Its pin is over, or it is from before this master's time, and it has not been used since.
    Unpinned,
}

/// Everything known of one key.
pub(crate) struct Object<A> {
    pub(crate) key: ObjectKey,
    pub(super) hash: u64,
    /// Readers of the present value may rely on it until here.
    pub(crate) lease: Moment,
    /// Until when it is soft-pinned; zero for never.
    pub(super) soft_pin: Moment,
    pub(crate) hard_pin: bool,
    pub(super) position: OrderPosition,
    /// Number of its tenant, 0 for none.
    pub(super) tenant: u32,
    pub(super) group: Option<Arc<Group>>,
    /// When it was last used, counted in uses of all objects.
    pub(crate) used: u64,
    pub(super) value: Option<Value<A>>,
    pub(super) write: Option<Box<Write<A>>>,
    pub(super) copying: Option<Box<Copying<A>>>,
    /// What it has to do with disks.
    pub(crate) tier: Option<Box<DiskTier>>,
}

/// What can be read.
pub(crate) struct Value<A> {
    pub(crate) len: u64,
    pub(crate) checksum: Option<u64>,
    pub(crate) writer: Writer,
    /// A write began after it: the end of a write without a number may mean that one, whatever became of it.
    pub(crate) superseded: bool,
    pub(crate) stamp: Stamp,
    pub(crate) replicas: Replicas<A>,
}

impl<A> Value<A> {
    /// Whether an end of this caller's can only be the one that made this value, repeated.
    pub(crate) fn ended_by(&self, caller: Writer) -> bool {
        self.writer.repeats(caller) || self.writer.is(caller) && !self.superseded
    }

    /// Which value of an object a decision is about: values have no replica in common.
    pub(crate) fn copy_epoch(&self) -> u64 {
        self.replicas.first().map_or(0, |held| held.id.0)
    }
}

/// A miss is answered often: its message is not made up anew each time.
#[cold]
pub(crate) fn not_found() -> Error {
    ErrorCode::ObjectNotFound.into()
}

/// A write in progress: a put's, or an upsert's beside the value it will replace.
pub(crate) struct Write<A> {
    pub(crate) writer: Writer,
    pub(crate) started: Moment,
    pub(crate) len: u64,
    pub(crate) replicas: Replicas<A>,
    pub(crate) soft_pin: SoftPin,
    pub(crate) soft_pin_ttl_ms: Option<u64>,
    pub(crate) hard_pin: bool,
    /// It brings back from a disk what is there already.
    pub(crate) promotes: bool,
    /// A file that the value is to be written to, too.
    pub(crate) file: Option<Box<FileGrant>>,
    /// Its place in [`Shard::writing`].
    pub(super) index: usize,
}

/// More replicas of a value, being made. While they are, the value stays as it is: it is neither replaced nor removed.
pub(crate) struct Copying<A> {
    pub(crate) client: ClientId,
    pub(crate) kind: TaskKind,
    /// Of a hot object's copy; nil for others.
    pub(crate) token: CopyToken,
    pub(crate) started: Moment,
    /// What is read; what a move drops in the end.
    pub(crate) source: ReplicaId,
    pub(crate) targets: Replicas<A>,
    /// All its targets are gone: it keeps nobody from anything, and its client is told so.
    pub(crate) lost: bool,
}

impl<A: SegmentAllocator> Copying<A> {
    pub(crate) fn quarantine(self, until: Moment, now: Moment) {
        self.targets.into_iter().for_each(|held| held.quarantine(until, now));
    }
}

impl<A: SegmentAllocator> Object<A> {
    pub(crate) fn value(&self) -> Option<&Value<A>> {
        self.value.as_ref()
    }

    pub(crate) fn write(&self) -> Option<&Write<A>> {
        self.write.as_deref()
    }

    /// The file of a writer's write in progress.
    pub(crate) fn file_of_write(&mut self, writer: Writer) -> Option<&mut FileGrant> {
        self.write.as_mut().filter(|write| write.writer.is(writer))?.file.as_deref_mut()
    }

    /// It has none any more; whether it had.
    pub(crate) fn take_file_of_write(&mut self, writer: Writer) -> bool {
        let write = self.write.as_mut().filter(|write| write.writer.is(writer));
        write.is_some_and(|write| write.file.take().is_some())
    }

    pub(crate) fn copying(&self) -> Option<&Copying<A>> {
        self.copying.as_deref().filter(|copying| !copying.lost)
    }

    /// A copy whose end nobody has heard of.
    pub(crate) fn lost_copy(&self) -> Option<&Copying<A>> {
        self.copying.as_deref().filter(|copying| copying.lost)
    }

    pub(crate) fn tenant(&self) -> u32 {
        self.tenant
    }

    /// What its tenant is charged for it: bytes of every replica there is or will be.
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

    pub(crate) fn group_name(&self) -> &str {
        self.group.as_deref().map_or("", Group::name)
    }

    /// Every readable replica: those in memory, then those on disks.
    pub(crate) fn describe(&self) -> Vec<Replica> {
        let mut replicas = self.value.as_ref().map(Value::describe).unwrap_or_default();
        replicas.extend(self.disk().into_iter().flat_map(DiskReplicas::describe));
        replicas
    }

    /// The writer's checksum of what can be read.
    pub(crate) fn checksum(&self) -> Option<u64> {
        let in_memory = self.value.as_ref().map(|value| value.checksum);
        in_memory.or_else(|| self.disk().map(|disk| disk.checksum)).flatten()
    }

    /// A reader may rely on the present value until then.
    pub(crate) fn grant_lease(&mut self, until: Moment) {
        self.lease = self.lease.max(until);
        if let Some(group) = &self.group {
            group.extend(until);
        }
    }

    /// Describes a replica of `value` for the ledger of its segment.
    pub(super) fn stored_at(&self, held: &Allocation<A>, value: &Value<A>) -> StoredChange {
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
            stamp: value.stamp,
        }
    }

    pub(crate) fn soft_pin(&self) -> Moment {
        self.soft_pin
    }

    pub(crate) fn disk(&self) -> Option<&DiskReplicas> {
        self.tier.as_ref()?.on_disk.as_ref()
    }
}

impl<A: SegmentAllocator> Value<A> {
    /// Gives its space back once `lease` has run out.
    pub(crate) fn quarantine(self, lease: Moment, now: Moment) {
        self.replicas.into_iter().for_each(|held| held.quarantine(lease, now));
    }

    /// Replicas in segments that are still there.
    pub(crate) fn live(&self) -> impl Iterator<Item = &Allocation<A>> {
        self.replicas.iter().filter(|held| held.segment.is_alive())
    }

    pub(crate) fn describe(&self) -> Vec<Replica> {
        self.live().map(|held| held.describe(self.len, ReplicaStatus::Complete)).collect()
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
            file: None,
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

pub(super) fn drop_retired<A: SegmentAllocator>(replicas: &mut Replicas<A>, until: Moment, now: Moment) {
    let mut at = 0;
    while at < replicas.len() {
        if replicas[at].segment.is_alive() {
            at += 1;
        } else {
            replicas.remove(at).quarantine(until, now);
        }
    }
}
