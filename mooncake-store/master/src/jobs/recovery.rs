//! Recovery: state from a snapshot, kept until the objects are back.

use std::cmp::Ordering::Less;
use std::collections::HashMap;
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::wire::StoredReplica;

use crate::model::disk_replicas::DiskHolding;
use crate::model::epochs::EpochOrder;
use crate::model::lifetime::Lifetime;
use crate::model::snapshot::{Horizon, SnapshotObject};
use crate::model::value::Stamp;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Number of parts of the table. A tick forgets one part, and one part is copied under one lock.
const PARTS: usize = 4096;

type RecoveryPart = Mutex<HashMap<Box<[u8]>, RecoveredObject>>;

struct RecoveredObject {
    object: SnapshotObject,
    /// True if a client has announced a replica in memory. Further ones need no entry, because the
    /// object is there.
    is_in_memory: bool,
    /// Values that clients have found on their disks.
    on_disks: Vec<DiskHolding>,
}

impl RecoveredObject {
    /// Returns whether a client has announced a replica.
    fn is_claimed(&self) -> bool {
        self.is_in_memory || !self.on_disks.is_empty()
    }

    /// Returns the object with the replicas that no client has announced; `None` if there are none.
    fn unclaimed(&self, key: &[u8]) -> Option<SnapshotObject> {
        let hides_rest = is_planted("claim-hides-rest") && self.is_claimed();
        let rest = self.object.without(self.is_in_memory, &self.on_disks).filter(|_| !hides_rest);
        rest.map(|rest| SnapshotObject { key: key.to_vec(), ..rest })
    }
}

/// State from a snapshot. The lock is taken inside that of a shard, and no lock inside of it.
pub(crate) struct Recovery {
    horizons: Vec<Horizon>,
    recalled: Moment,
    parts: Box<[RecoveryPart]>,
    /// Number of parts that are forgotten.
    forgotten: AtomicUsize,
    /// Announced objects of masters that the snapshot does not know, since they were counted last.
    of_unknown_masters: AtomicU64,
}

/// Knowledge of the master about an announced replica.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KnownReplica {
    /// Number of the last use of the object.
    pub(crate) used: Option<u64>,
    pub(crate) lifetime: Option<Lifetime>,
}

/// Knowledge about an object on a disk.
pub(crate) struct RecoveredPins {
    pub(crate) group: String,
    pub(crate) hard_pin: bool,
    /// End of the soft pin.
    pub(crate) soft_pin: Moment,
    /// Stamp of its value, if it was in memory, too.
    pub(crate) stamp: Option<Stamp>,
    pub(crate) checksum: Option<u64>,
}

/// Part of the table that is to be forgotten.
pub(crate) struct ForgottenPart {
    pub(crate) number: usize,
    /// Keys of its objects.
    pub(crate) keys: Vec<Box<[u8]>>,
}

impl Recovery {
    pub(crate) fn new(
        horizons: Vec<Horizon>,
        objects: Vec<SnapshotObject>,
        recalled: Moment,
        hash: impl Fn(&[u8]) -> u64,
    ) -> Self {
        let parts: Box<[RecoveryPart]> = (0..PARTS).map(|_| RecoveryPart::default()).collect();
        for mut object in objects {
            let key = std::mem::take(&mut object.key).into_boxed_slice();
            let mut part = parts[part_of(hash(&key))].lock();
            // A snapshot contains an object twice if it returned, or was stored again, meanwhile.
            // The later entry is the newer one, as far as is known.
            let before = part.get(&key).and_then(|before| before.object.written);
            let older = |now: Horizon| {
                before.is_some_and(|before| now.epoch == before.epoch && now.number < before.number)
            };
            if !object.written.is_some_and(older) {
                part.insert(key, RecoveredObject { object, is_in_memory: false, on_disks: Vec::new() });
            }
        }
        let (forgotten, of_unknown_masters) = (AtomicUsize::new(0), AtomicU64::new(0));
        Self { horizons, recalled, parts, forgotten, of_unknown_masters }
    }

    /// Returns the points of history of the earlier masters.
    pub(crate) fn horizons(&self) -> impl Iterator<Item = Horizon> {
        self.horizons.iter().copied()
    }

    pub(crate) fn parts(&self) -> std::ops::Range<usize> {
        0..self.parts.len()
    }

    /// Returns the objects of a part with the replicas that no client has announced: with
    /// `claimed`, the objects of which a client has announced another replica, and otherwise those
    /// of which no client has announced any.
    pub(crate) fn unclaimed(&self, part: usize, claimed: bool) -> Vec<SnapshotObject> {
        let part = self.parts[part].lock();
        let wanted = part.iter().filter(|(_, entry)| entry.is_claimed() == claimed);
        wanted.filter_map(|(key, entry)| entry.unclaimed(key)).collect()
    }

    /// Returns an object of which a client has announced a replica, with the others; `None` if
    /// there are no others.
    pub(crate) fn rest_of_claimed(&self, hash: u64, key: &[u8]) -> Option<SnapshotObject> {
        let part = self.parts[part_of(hash)].lock();
        let entry = part.get(key).filter(|entry| entry.is_claimed())?;
        entry.unclaimed(key)
    }

    /// Checks whether an announced replica can be what it claims. Returns what is known of it if
    /// the snapshot lists exactly this value. `wall_ms` is the date of `now`.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the snapshot lists the value with another length or checksum;
    /// `OBJECT_ALREADY_EXISTS` if the value was removed or replaced before the snapshot, or may
    /// have been because the order of its master and that of the snapshot is unknown.
    pub(crate) fn check_announced(
        &self,
        hash: u64,
        replica: &StoredReplica,
        order: &EpochOrder,
        now: Moment,
        wall_ms: u64,
    ) -> Result<Option<KnownReplica>> {
        let stamp = Stamp { epoch: replica.epoch, number: replica.number };
        let mut part = self.parts[part_of(hash)].lock();
        let entry = part.get_mut(&*replica.key);
        let written = entry.as_ref().and_then(|entry| entry.object.written).map(Stamp::from);
        if let (Some(entry), Some(written)) = (entry, written)
            && written == stamp
        {
            let object = &entry.object;
            let differs = matches!((object.checksum, replica.checksum), (Some(a), Some(b)) if a != b);
            if object.len != replica.len || differs {
                return Err(Error::invalid(
                    "cannot announce replica: length or checksum differ from the snapshot",
                ));
            }
            entry.is_in_memory = true;
            let object = &entry.object;
            let lifetime = object.lifetime.map(|stored| Lifetime::from_stored(stored, now, wall_ms));
            return Ok(Some(KnownReplica { used: Some(object.used), lifetime }));
        }
        drop(part);
        if self.has_passed(stamp, written, order) {
            let horizon = self.horizons.first().map(|horizon| horizon.epoch);
            let is_of_unknown = |epoch| epoch != stamp.epoch && !order.is_older(stamp.epoch, epoch);
            let text = if horizon.is_some_and(is_of_unknown) {
                self.of_unknown_masters.fetch_add(1, Relaxed);
                "cannot announce replica: the snapshot does not know the master that stored the object"
            } else {
                "cannot announce replica: the object was removed or replaced before the snapshot"
            };
            return Err(Error::new(ErrorCode::ObjectAlreadyExists, text));
        }
        Ok(None)
    }

    /// Returns whether the snapshot shows that a value was removed or replaced, or may have been.
    /// `written` is the stamp of the value of the key in the snapshot, which is another one.
    fn has_passed(&self, stamp: Stamp, written: Option<Stamp>, order: &EpochOrder) -> bool {
        let reverted = is_planted("epochs-unordered") || is_planted("horizon-ends") && self.has_ended();
        if reverted {
            let earlier = |point: Stamp| point.epoch == stamp.epoch && stamp.number < point.number;
            let ended = is_planted("horizon-ends") && self.has_ended();
            return written.is_some_and(earlier)
                || !ended && self.horizons.iter().any(|horizon| earlier((*horizon).into()));
        }
        // Values from before the snapshot that still counted are in it.
        let is_later = |point: Stamp| order.compare(point, stamp) == Some(Less);
        let after_snapshot = match self.horizons.first() {
            Some(horizon) if horizon.epoch == stamp.epoch => stamp.number >= horizon.number,
            Some(horizon) => order.is_older(horizon.epoch, stamp.epoch),
            None => true,
        };
        !after_snapshot || written.is_some_and(|written| !is_later(written))
    }

    /// Returns what is known of an object of length `len` that was found on a disk; `None` if the
    /// snapshot does not have it there.
    pub(crate) fn claim_on_disk(
        &self,
        hash: u64,
        key: &[u8],
        len: u64,
        found: DiskHolding,
    ) -> Option<RecoveredPins> {
        let mut part = self.parts[part_of(hash)].lock();
        let entry = part.get_mut(key)?;
        if entry.object.len != len || !is_on_disk(&entry.object, found) {
            return None;
        }
        if !entry.on_disks.contains(&found) {
            entry.on_disks.push(found);
        }
        let object = &entry.object;
        let soft_pin = self.end_of_soft_pin(object.soft_pin_ms);
        let stamp = object.written.map(Stamp::from);
        Some(RecoveredPins {
            group: object.group.clone(),
            hard_pin: object.hard_pin,
            soft_pin,
            stamp,
            checksum: object.checksum,
        })
    }

    /// Returns how many objects were refused since the last call because the snapshot does not know
    /// their master.
    pub(crate) fn take_of_unknown_masters(&self) -> u64 {
        self.of_unknown_masters.swap(0, Relaxed)
    }

    fn has_ended(&self) -> bool {
        self.forgotten.load(Relaxed) > 0
    }

    /// Returns the next part that is to be forgotten. `None` after the last part.
    pub(crate) fn next_part(&self) -> Option<ForgottenPart> {
        let number = self.forgotten.fetch_add(1, Relaxed);
        let Some(part) = self.parts.get(number) else {
            self.forgotten.store(self.parts.len(), Relaxed);
            return None;
        };
        Some(ForgottenPart { number, keys: part.lock().keys().cloned().collect() })
    }

    /// Forgets an object. Returns it with the replicas that no client has announced.
    pub(crate) fn forget(&self, part: &ForgottenPart, key: &[u8]) -> Option<SnapshotObject> {
        self.parts[part.number].lock().remove(key)?.unclaimed(key)
    }

    /// Returns the end of a soft pin that was to last for `left_ms` at the time of the snapshot.
    pub(crate) fn end_of_soft_pin(&self, left_ms: u64) -> Moment {
        if left_ms == 0 { Moment(0) } else { self.recalled.after(Duration::from_millis(left_ms)) }
    }
}

/// Returns whether an object of the snapshot was on a disk as it was found there. If both name
/// versions of one store, these must be the same.
fn is_on_disk(object: &SnapshotObject, found: DiskHolding) -> bool {
    let mut same_store = object
        .holdings()
        .filter_map(|listed| listed.version)
        .filter(|listed| found.version.is_some_and(|version| version.store == listed.store));
    match same_store.next() {
        Some(first) => found.version == Some(first) || same_store.any(|next| found.version == Some(next)),
        None => object.disks.contains(&found.client),
    }
}

fn part_of(hash: u64) -> usize {
    // Bits that do not choose the shard.
    (hash >> 8) as usize % PARTS
}
