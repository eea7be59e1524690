//! Encoding of a snapshot: a head, then numbered records with a checksum each, of which the last is
//! marked. A snapshot is valid as a whole or not at all.

use mooncake_core::ids::{ClientId, ObjectKey, SegmentId, Uuid};
use mooncake_core::{Error, ErrorCode, Result};

use super::disk_replicas::{DiskHolding, DiskVersion};
use super::drain::DrainStatus;
use super::value::Stamp;
use super::weights::StoredRevision;
use mooncake_protocol::key_form::KeyForm;
use mooncake_protocol::pack::{PackError, wire_fields, written_as};
use mooncake_protocol::record::{append, next};
use mooncake_protocol::wire::{
    EpochPair, ItemLifetime, StoredLifetime, TaskKind, TaskStatus, WeightLease, WeightRevision,
};

/// First bytes of a snapshot, with the version of the rest.
const MAGIC: &[u8; 8] = b"mksnap06";
/// First bytes of the previous version, which has no order of masters in its head.
const FIFTH: &[u8; 8] = b"mksnap05";
/// First bytes of the version before, which has no lifetimes of objects either.
const FOURTH: &[u8; 8] = b"mksnap04";
/// First bytes of the version before, which has no learned values in its head either.
const THIRD: &[u8; 8] = b"mksnap03";
/// First bytes of the second version, which has no promise in its head either.
const SECOND: &[u8; 8] = b"mksnap02";
/// First bytes of the oldest version, which has no drain jobs either.
const FIRST: &[u8; 8] = b"mksnap01";

/// State of a master when it wrote a snapshot. [`Master::recall`](crate::Master::recall) gives it
/// to the next master.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub(crate) head: SnapshotHead,
    pub(crate) objects: Vec<SnapshotObject>,
    pub(crate) tasks: Vec<SnapshotTask>,
    pub(crate) drains: SnapshotDrains,
    pub(crate) weights: SnapshotWeights,
}

impl Snapshot {
    /// Decodes the output of [`Master::snapshot`](crate::Master::snapshot). Any bytes may be
    /// passed.
    ///
    /// # Errors
    /// `PERSISTENT_FAIL` if the bytes are not one whole snapshot of this version or the five
    /// before; the text names the defect.
    pub fn read(bytes: &[u8]) -> Result<Self> {
        let refuse =
            |why: &str| Err(Error::new(ErrorCode::PersistentFail, format!("cannot read snapshot: {why}")));
        let unknown = "unknown version or not a snapshot";
        let Some((version, mut rest)) = bytes.split_first_chunk::<8>() else { return refuse(unknown) };
        let head = match version {
            MAGIC => next::<SnapshotHead>(&mut rest),
            FIFTH | FOURTH => next::<FifthHead>(&mut rest).map(SnapshotHead::from),
            THIRD => next::<ThirdHead>(&mut rest).map(SnapshotHead::from),
            SECOND | FIRST => next::<SecondHead>(&mut rest).map(SnapshotHead::from),
            _ => return refuse(unknown),
        };
        let Some(head) = head else { return refuse("the head is damaged") };
        let mut snapshot = Self {
            head,
            objects: Vec::new(),
            tasks: Vec::new(),
            drains: SnapshotDrains::default(),
            weights: SnapshotWeights::default(),
        };
        for number in 0u64.. {
            let part = match version {
                MAGIC | FIFTH => next(&mut rest),
                FIRST => next::<FirstPart>(&mut rest).map(SnapshotPart::from),
                _ => next::<FourthPart>(&mut rest).map(SnapshotPart::from),
            };
            let Some(part) = part else { return refuse("a record is damaged or cut off") };
            if part.number != number {
                return refuse("a record is missing");
            }
            let mut objects = part.objects;
            for ItemLifetime { index, lifetime } in part.lifetimes {
                let Some(object) = usize::try_from(index).ok().and_then(|index| objects.get_mut(index))
                else {
                    return refuse("a lifetime belongs to no object");
                };
                object.lifetime = Some(lifetime);
            }
            snapshot.objects.extend(objects);
            snapshot.tasks.extend(part.tasks);
            snapshot.drains.jobs.extend(part.drains.jobs);
            snapshot.drains.drained.extend(part.drains.drained);
            let weights = part.weights.unwrap_or_default();
            snapshot.weights.revisions.extend(weights.revisions);
            snapshot.weights.leases.extend(weights.leases);
            if part.last {
                break;
            }
        }
        if !rest.is_empty() {
            return refuse("bytes follow the last record");
        }
        let moves = snapshot.drains.jobs.iter().flat_map(|job| &job.moves);
        let mut keys = snapshot.objects.iter().map(|object| &object.key).chain(moves.map(|one| &one.key));
        if keys.any(|key| ObjectKey::check(key).is_err()) {
            return refuse("the key of an object is invalid");
        }
        Ok(snapshot)
    }

    /// Converts the keys to the form of another master, and drops the objects that have no key of
    /// that form. Returns the numbers of converted and dropped objects; `None` if the keys have
    /// this form already, or their form is unknown.
    pub(crate) fn convert_keys(&mut self, to: KeyForm) -> Option<(usize, usize)> {
        let known = self.head.has_tenants.map(KeyForm::of_master);
        let keys = || self.objects.iter().map(|object| &*object.key);
        let from = known.or_else(|| KeyForm::of_keys(keys())).filter(|from| *from != to)?;
        let before = self.objects.len();
        let convert = |key: &mut Vec<u8>, group: &mut String| {
            from.convert(to, key, group) && ObjectKey::check(key).is_ok()
        };
        self.objects.retain_mut(|object| convert(&mut object.key, &mut object.group));
        for job in &mut self.drains.jobs {
            job.moves.retain_mut(|one| convert(&mut one.key, &mut String::new()));
        }
        Some((self.objects.len(), before - self.objects.len()))
    }

    /// Returns the number of objects.
    pub fn objects(&self) -> usize {
        self.objects.len()
    }

    /// Returns the number of tasks.
    pub fn tasks(&self) -> usize {
        self.tasks.len()
    }

    /// Returns the number of drain jobs.
    pub fn drain_jobs(&self) -> usize {
        self.drains.jobs.len()
    }

    /// Encodes the snapshot, so that two can be compared.
    pub fn write(&self) -> Vec<u8> {
        let mut bytes = encode_head(&self.head);
        let Self { objects, tasks, drains, weights, .. } = self.clone();
        let weights = Some(weights).filter(|weights| *weights != SnapshotWeights::default());
        let part = SnapshotPart { objects, tasks, drains, weights, last: true, ..SnapshotPart::default() };
        encode_part(part, &mut bytes);
        bytes
    }
}

/// Encodes the head of a snapshot.
pub(crate) fn encode_head(head: &SnapshotHead) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    append(head, &mut out);
    out
}

/// Appends a record.
pub(crate) fn encode_part(part: SnapshotPart, out: &mut Vec<u8>) {
    let lifetime = |(index, object): (usize, &SnapshotObject)| {
        Some(ItemLifetime { index: index as u64, lifetime: object.lifetime? })
    };
    let lifetimes = part.objects.iter().enumerate().filter_map(lifetime).collect();
    append(&SnapshotPart { lifetimes, ..part }, out);
}

/// Identity of the writer of a snapshot, and its time as numbers of uses and of values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SnapshotHead {
    /// Number of uses of objects at the beginning of the snapshot.
    pub(crate) uses: u64,
    pub(crate) horizons: Vec<Horizon>,
    /// Longest time, in milliseconds, for which leases and allocations of that master and of
    /// earlier ones may hold.
    pub(crate) promise_ms: u64,
    /// Knowledge of the eviction policy in an encoding of its own; empty for none.
    pub(crate) learned: Vec<u8>,
    /// Order of earlier masters and that master.
    pub(crate) epochs: Vec<EpochPair>,
    /// True if the keys begin with the names of tenants. `None` if they do not, and in snapshots of
    /// earlier versions.
    pub(crate) has_tenants: Option<bool>,
}

wire_fields!(structure SnapshotHead {
    uses: u64,
    horizons: Vec<Horizon>,
    promise_ms: u64,
    learned: Vec<u8>,
    epochs: Vec<EpochPair>,
    has_tenants: bool [since 1],
});

/// Head of a snapshot of the fourth or fifth version.
struct FifthHead {
    uses: u64,
    horizons: Vec<Horizon>,
    promise_ms: u64,
    learned: Vec<u8>,
}

wire_fields!(structure FifthHead { uses: u64, horizons: Vec<Horizon>, promise_ms: u64, learned: Vec<u8> });

impl From<FifthHead> for SnapshotHead {
    fn from(FifthHead { uses, horizons, promise_ms, learned }: FifthHead) -> Self {
        Self { uses, horizons, promise_ms, learned, epochs: Vec::new(), has_tenants: None }
    }
}

/// Head of a snapshot of the third version.
struct ThirdHead {
    uses: u64,
    horizons: Vec<Horizon>,
    promise_ms: u64,
}

wire_fields!(structure ThirdHead { uses: u64, horizons: Vec<Horizon>, promise_ms: u64 });

impl From<ThirdHead> for SnapshotHead {
    fn from(ThirdHead { uses, horizons, promise_ms }: ThirdHead) -> Self {
        FifthHead { uses, horizons, promise_ms, learned: Vec::new() }.into()
    }
}

/// Head of a snapshot of the two oldest versions.
struct SecondHead {
    uses: u64,
    horizons: Vec<Horizon>,
}

wire_fields!(structure SecondHead { uses: u64, horizons: Vec<Horizon> });

impl From<SecondHead> for SnapshotHead {
    fn from(SecondHead { uses, horizons }: SecondHead) -> Self {
        FifthHead { uses, horizons, promise_ms: 0, learned: Vec::new() }.into()
    }
}

/// Point in the history of a master. Of all values of that master with a smaller number, the
/// snapshot contains those that still existed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Horizon {
    pub(crate) epoch: u64,
    pub(crate) number: u64,
}

wire_fields!(structure Horizon { epoch: u64, number: u64 });

impl From<Horizon> for Stamp {
    fn from(Horizon { epoch, number }: Horizon) -> Self {
        Self { epoch, number }
    }
}

/// Record of a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SnapshotPart {
    /// Number of the record, counted from 0.
    pub(crate) number: u64,
    pub(crate) objects: Vec<SnapshotObject>,
    /// Lifetimes of the objects, which [`encode_part`] sets.
    pub(crate) lifetimes: Vec<ItemLifetime>,
    pub(crate) tasks: Vec<SnapshotTask>,
    pub(crate) drains: SnapshotDrains,
    pub(crate) last: bool,
    /// Managed weights. Records of earlier versions have none, and neither has one without any.
    pub(crate) weights: Option<SnapshotWeights>,
}

wire_fields!(structure SnapshotPart {
    number: u64,
    objects: Vec<SnapshotObject>,
    lifetimes: Vec<ItemLifetime>,
    tasks: Vec<SnapshotTask>,
    drains: SnapshotDrains,
    last: bool,
    weights: SnapshotWeights [since 1],
});

/// Record of a snapshot of the second to the fourth version.
struct FourthPart {
    number: u64,
    objects: Vec<SnapshotObject>,
    tasks: Vec<SnapshotTask>,
    drains: SnapshotDrains,
    last: bool,
}

wire_fields!(structure FourthPart {
    number: u64,
    objects: Vec<SnapshotObject>,
    tasks: Vec<SnapshotTask>,
    drains: SnapshotDrains,
    last: bool,
});

impl From<FourthPart> for SnapshotPart {
    fn from(part: FourthPart) -> Self {
        let FourthPart { number, objects, tasks, drains, last } = part;
        Self { number, objects, lifetimes: Vec::new(), tasks, drains, last, weights: None }
    }
}

/// Record of a snapshot of the oldest version.
struct FirstPart {
    number: u64,
    objects: Vec<SnapshotObject>,
    tasks: Vec<SnapshotTask>,
    last: bool,
}

wire_fields!(structure FirstPart { number: u64, objects: Vec<SnapshotObject>, tasks: Vec<SnapshotTask>, last: bool });

impl From<FirstPart> for SnapshotPart {
    fn from(part: FirstPart) -> Self {
        let FirstPart { number, objects, tasks, last } = part;
        let drains = SnapshotDrains::default();
        FourthPart { number, objects, tasks, drains, last }.into()
    }
}

/// Object that could be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SnapshotObject {
    /// Directory key of the object.
    pub(crate) key: Vec<u8>,
    pub(crate) len: u64,
    pub(crate) checksum: Option<u64>,
    /// Stamp of the value, if it was in memory.
    pub(crate) written: Option<Horizon>,
    /// Number of the last use.
    pub(crate) used: u64,
    pub(crate) group: String,
    pub(crate) hard_pin: bool,
    pub(crate) soft_pin_ms: u64,
    /// Lifetime, if the object ends by itself. The record has it in a list of its own.
    pub(crate) lifetime: Option<StoredLifetime>,
    /// Positions of the replicas in memory, and versions of those on disks.
    pub(crate) positions: Vec<ReplicaPosition>,
    /// Clients that held the object on their disks.
    pub(crate) disks: Vec<ClientId>,
}

wire_fields!(structure SnapshotObject {
    key: Vec<u8>,
    len: u64,
    checksum: Option<u64>,
    written: Option<Horizon>,
    used: u64,
    group: String,
    hard_pin: bool,
    soft_pin_ms: u64,
    positions: Vec<ReplicaPosition>,
    disks: Vec<ClientId>,
} without { lifetime: None });

impl SnapshotObject {
    /// Describes an object that is only on disks.
    pub(crate) fn on_disks(key: &[u8], len: u64, checksum: Option<u64>, holdings: &[DiskHolding]) -> Self {
        Self {
            key: key.to_vec(),
            len,
            checksum,
            written: None,
            used: 0,
            group: String::new(),
            hard_pin: false,
            soft_pin_ms: 0,
            lifetime: None,
            positions: holdings.iter().filter_map(|holding| holding.version.map(disk_position)).collect(),
            disks: holdings.iter().map(|holding| holding.client).collect(),
        }
    }

    /// Returns the object without its replicas in memory, if `memory` is true, and without these
    /// values on disks. `None` if no replica is left.
    pub(crate) fn without(&self, memory: bool, on_disks: &[DiskHolding]) -> Option<Self> {
        if !memory && on_disks.is_empty() {
            return Some(self.clone());
        }
        let is_version = |position: &ReplicaPosition| position.offset == ON_DISK;
        let is_listed = |position: &ReplicaPosition| {
            on_disks.iter().filter_map(|holding| holding.version).any(|it| disk_position(it) == *position)
        };
        let mut rest = self.clone();
        rest.positions.retain(|at| if is_version(at) { !is_listed(at) } else { !memory });
        rest.disks.retain(|client| !on_disks.iter().any(|holding| holding.client == *client));
        // The next process of an owner has another identifier, but reports the same version. Then
        // the earlier owner has no replica that is still to come.
        let versions = self.positions.iter().filter(|position| is_version(position)).count();
        if versions >= self.disks.len() && !rest.positions.iter().any(is_version) {
            rest.disks.clear();
        }
        (!rest.positions.is_empty() || !rest.disks.is_empty()).then_some(rest)
    }

    /// Adds the replicas of another description of the same value.
    pub(crate) fn add_replicas(&mut self, other: &Self) {
        self.written = self.written.or(other.written);
        for position in &other.positions {
            if !self.positions.contains(position) {
                self.positions.push(*position);
            }
        }
        for client in &other.disks {
            if !self.disks.contains(client) {
                self.disks.push(*client);
            }
        }
    }

    /// Returns the positions of the replicas in memory.
    pub(crate) fn in_memory(&self) -> impl Iterator<Item = ReplicaPosition> {
        self.positions.iter().copied().filter(|position| position.offset != ON_DISK)
    }

    /// Returns the values on disks: one with each version, and one with each client.
    pub(crate) fn holdings(&self) -> impl Iterator<Item = DiskHolding> {
        let versions = self.positions.iter().filter(|position| position.offset == ON_DISK).map(|position| {
            let SegmentId(Uuid { first, second }) = position.segment;
            Some(DiskVersion { store: first, number: second })
        });
        let clients = self.disks.iter().copied();
        let with_version = versions.map(|version| DiskHolding { client: ClientId::default(), version });
        with_version.chain(clients.map(|client| DiskHolding { client, version: None }))
    }
}

/// Offset in the position of a replica on a disk. No replica in memory has it.
const ON_DISK: u64 = u64::MAX;

/// Returns the version of a replica on a disk in the form of a position.
pub(crate) fn disk_position(version: DiskVersion) -> ReplicaPosition {
    let segment = SegmentId(Uuid::new(version.store, version.number));
    ReplicaPosition { segment, offset: ON_DISK }
}

/// Position of a replica in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReplicaPosition {
    pub(crate) segment: SegmentId,
    pub(crate) offset: u64,
}

wire_fields!(structure ReplicaPosition { segment: SegmentId, offset: u64 });

/// Task in any state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SnapshotTask {
    pub(crate) id: Uuid,
    pub(crate) kind: TaskKind,
    pub(crate) status: TaskStatus,
    pub(crate) client: ClientId,
    pub(crate) payload: String,
    pub(crate) created_ms: i64,
    pub(crate) updated_ms: i64,
    pub(crate) message: String,
    /// Time left for the task, in milliseconds.
    pub(crate) left_ms: u64,
}

wire_fields!(structure SnapshotTask {
    id: Uuid,
    kind: TaskKind,
    status: TaskStatus,
    client: ClientId,
    payload: String,
    created_ms: i64,
    updated_ms: i64,
    message: String,
    left_ms: u64,
});

/// Records of managed weights.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SnapshotWeights {
    pub(crate) revisions: Vec<StoredRevision>,
    /// Leases that have not expired.
    pub(crate) leases: Vec<WeightLease>,
}

wire_fields!(structure SnapshotWeights { revisions: Vec<StoredRevision>, leases: Vec<WeightLease> });

wire_fields!(structure StoredRevision {
    revision: WeightRevision,
    idle_ms: u64,
    mistyped: Vec<Vec<u8>>,
    has_more_mistyped: bool,
});

/// Drain jobs and drained segments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SnapshotDrains {
    /// Jobs, the oldest first.
    pub(crate) jobs: Vec<SnapshotDrain>,
    /// Segments that are empty and accept nothing.
    pub(crate) drained: Vec<SegmentId>,
}

wire_fields!(structure SnapshotDrains { jobs: Vec<SnapshotDrain>, drained: Vec<SegmentId> });

/// Drain job in any state. The replicas that it still had to move are searched again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SnapshotDrain {
    pub(crate) id: Uuid,
    pub(crate) status: DrainStatus,
    pub(crate) created_ms: u64,
    pub(crate) updated_ms: u64,
    pub(crate) names: Vec<String>,
    pub(crate) targets: Vec<String>,
    pub(crate) at_once: u64,
    /// Segments that the job empties; none once it has ended.
    pub(crate) sources: Vec<SegmentId>,
    pub(crate) moves: Vec<SnapshotMove>,
    pub(crate) succeeded: u64,
    pub(crate) failed: u64,
    pub(crate) migrated_bytes: u64,
    pub(crate) message: String,
    /// Number of replicas that were blocked when the job ended.
    pub(crate) left: u64,
}

wire_fields!(structure SnapshotDrain {
    id: Uuid,
    status: DrainStatus,
    created_ms: u64,
    updated_ms: u64,
    names: Vec<String>,
    targets: Vec<String>,
    at_once: u64,
    sources: Vec<SegmentId>,
    moves: Vec<SnapshotMove>,
    succeeded: u64,
    failed: u64,
    migrated_bytes: u64,
    message: String,
    left: u64,
});

/// Move in progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SnapshotMove {
    /// Directory key of the object.
    pub(crate) key: Vec<u8>,
    /// Index of the source of the move among the sources of the job.
    pub(crate) source: u64,
    pub(crate) tries: u32,
    pub(crate) task: Uuid,
    pub(crate) bytes: u64,
}

wire_fields!(structure SnapshotMove { key: Vec<u8>, source: u64, tries: u32, task: Uuid, bytes: u64 });

written_as! {
    DrainStatus as i32: status => *status as i32, |number| DrainStatus::from_number(number)
        .ok_or_else(|| PackError::Enum { name: "drain status", value: number.into() });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshot_version_4_reads_without_lifetimes() {
        let object = |key: &[u8], lifetime| SnapshotObject {
            key: key.into(),
            len: 7,
            checksum: None,
            written: None,
            used: 1,
            group: String::new(),
            hard_pin: false,
            soft_pin_ms: 0,
            lifetime,
            positions: Vec::new(),
            disks: Vec::new(),
        };
        let ends = |ends_ms| Some(StoredLifetime { ends_ms, ends_at_read: ends_ms == 0 });
        let objects = vec![object(b"a", None), object(b"b", ends(5)), object(b"c", ends(0))];
        let head = || FifthHead { uses: 3, horizons: Vec::new(), promise_ms: 4, learned: Vec::new() };
        let mut bytes = FOURTH.to_vec();
        append(&head(), &mut bytes);
        let drains = SnapshotDrains::default;
        let part = FourthPart {
            number: 0,
            objects: objects.clone(),
            tasks: Vec::new(),
            drains: drains(),
            last: true,
        };
        append(&part, &mut bytes);
        let read = Snapshot::read(&bytes).unwrap();
        assert!(read.objects.len() == 3 && read.objects.iter().all(|object| object.lifetime.is_none()));
        let weights = SnapshotWeights::default();
        let whole = Snapshot { head: head().into(), objects, tasks: Vec::new(), drains: drains(), weights };
        assert_eq!(Snapshot::read(&whole.write()).unwrap(), whole);
        let mut bytes = encode_head(&whole.head);
        let lifetimes = vec![ItemLifetime { index: 3, lifetime: ends(1).unwrap() }];
        append(
            &SnapshotPart { objects: whole.objects, lifetimes, last: true, ..SnapshotPart::default() },
            &mut bytes,
        );
        assert!(Snapshot::read(&bytes).is_err());
    }

    /// Snapshots of the third version have a head without learned values.
    #[test]
    fn a_snapshot_of_the_third_version_is_read() {
        let horizons = vec![Horizon { epoch: 1, number: 2 }];
        let mut bytes = THIRD.to_vec();
        append(&ThirdHead { uses: 3, horizons: horizons.clone(), promise_ms: 4 }, &mut bytes);
        let (objects, tasks, drains) = (Vec::new(), Vec::new(), SnapshotDrains::default());
        append(&FourthPart { number: 0, objects, tasks, drains, last: true }, &mut bytes);
        let read = Snapshot::read(&bytes).unwrap();
        let head = FifthHead { uses: 3, horizons, promise_ms: 4, learned: Vec::new() };
        assert_eq!(read.head, head.into());
        assert_eq!(Snapshot::read(&read.write()).unwrap(), read);
    }
}
