//! Recovery: state from a snapshot, kept until the objects are back.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::ids::ClientId;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::wire::StoredReplica;
use parking_lot::Mutex;

use crate::model::lifetime::Lifetime;
use crate::model::snapshot::{Horizon, SnapshotObject};

/// Time for which recovered state is kept for clients that have not returned.
pub(crate) const PATIENCE: Duration = Duration::from_secs(600);

/// Number of parts of the table. A tick forgets one part, and one part is copied under one lock.
const PARTS: usize = 4096;

type RecoveryPart = Mutex<HashMap<Box<[u8]>, RecoveredObject>>;

struct RecoveredObject {
    object: SnapshotObject,
    /// True if a client has announced the object.
    claimed: bool,
}

/// State from a snapshot. The lock is taken inside that of a shard, and no lock inside of it.
pub(crate) struct Recovery {
    horizons: Vec<Horizon>,
    recalled: Moment,
    parts: Box<[RecoveryPart]>,
    /// Number of parts that are forgotten.
    forgotten: AtomicUsize,
}

/// Knowledge of the master about an announced replica.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KnownReplica {
    /// Number of the last use of the object.
    pub(crate) used: Option<u64>,
    pub(crate) lifetime: Option<Lifetime>,
}

/// Pins and group of an object on a disk.
pub(crate) struct RecoveredPins {
    pub(crate) group: String,
    pub(crate) hard_pin: bool,
    /// End of the soft pin.
    pub(crate) soft_pin: Moment,
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
                part.insert(key, RecoveredObject { object, claimed: false });
            }
        }
        Self { horizons, recalled, parts, forgotten: AtomicUsize::new(0) }
    }

    /// Returns the points of history of the earlier masters.
    pub(crate) fn horizons(&self) -> impl Iterator<Item = Horizon> {
        self.horizons.iter().copied()
    }

    pub(crate) fn parts(&self) -> std::ops::Range<usize> {
        0..self.parts.len()
    }

    /// Returns the objects of a part that no client has announced.
    pub(crate) fn unclaimed(&self, part: usize) -> Vec<SnapshotObject> {
        let part = self.parts[part].lock();
        let unclaimed = part.iter().filter(|(_, entry)| !entry.claimed);
        unclaimed.map(|(key, entry)| SnapshotObject { key: key.to_vec(), ..entry.object.clone() }).collect()
    }

    /// Checks whether an announced replica can be what it claims. Returns what is known of it.
    /// `wall_ms` is the date of `now`.
    pub(crate) fn check_announced(
        &self,
        hash: u64,
        replica: &StoredReplica,
        now: Moment,
        wall_ms: u64,
    ) -> Result<KnownReplica> {
        let mut part = self.parts[part_of(hash)].lock();
        let entry = part.get_mut(&*replica.key);
        let written = entry.as_ref().and_then(|entry| entry.object.written);
        if let (Some(entry), Some(written)) = (entry, written)
            && (written.epoch, written.number) == (replica.epoch, replica.number)
        {
            let object = &entry.object;
            let differs = matches!((object.checksum, replica.checksum), (Some(a), Some(b)) if a != b);
            if object.len != replica.len || differs {
                return Err(Error::invalid(
                    "cannot announce replica: length or checksum differ from the snapshot",
                ));
            }
            entry.claimed = true;
            let lifetime = object.lifetime.map(|stored| Lifetime::from_stored(stored, now, wall_ms));
            return Ok(KnownReplica { used: Some(object.used), lifetime });
        }
        let gone = |horizon: &Horizon| horizon.epoch == replica.epoch && replica.number < horizon.number;
        let replaced = written.is_some_and(|now| now.epoch == replica.epoch && replica.number < now.number);
        if replaced || self.horizons.iter().any(gone) && !self.has_ended() {
            let text = "cannot announce replica: the object was removed or replaced before the snapshot";
            return Err(Error::new(ErrorCode::ObjectAlreadyExists, text));
        }
        Ok(KnownReplica::default())
    }

    /// Returns the pins of an object of length `len` that was found on the disk of `owner`.
    pub(crate) fn pins_of_disk_replica(
        &self,
        hash: u64,
        key: &[u8],
        len: u64,
        owner: ClientId,
    ) -> Option<RecoveredPins> {
        let mut part = self.parts[part_of(hash)].lock();
        let entry = part.get_mut(key)?;
        if entry.object.len != len || !entry.object.disks.contains(&owner) {
            return None;
        }
        entry.claimed = true;
        let object = &entry.object;
        let soft_pin = match object.soft_pin_ms {
            0 => Moment(0),
            left => self.recalled.after(Duration::from_millis(left)),
        };
        Some(RecoveredPins { group: object.group.clone(), hard_pin: object.hard_pin, soft_pin })
    }

    fn has_ended(&self) -> bool {
        self.forgotten.load(Relaxed) > 0
    }

    /// Forgets the next part once the time is over. Returns whether it was the first part.
    pub(crate) fn forget_next_part(&self, now: Moment) -> bool {
        if self.recalled.after(PATIENCE) > now {
            return false;
        }
        let next = self.forgotten.fetch_add(1, Relaxed);
        if let Some(part) = self.parts.get(next) {
            drop(std::mem::take(&mut *part.lock()));
        } else {
            self.forgotten.store(self.parts.len(), Relaxed);
        }
        next == 0
    }
}

fn part_of(hash: u64) -> usize {
    // Bits that do not choose the shard.
    (hash >> 8) as usize % PARTS
}
