//! Objects on disks whose owners are gone. An owner that returns announces what it finds, and only
//! what is listed here is certain to be neither removed nor replaced.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::ids::ObjectKey;
use smallvec::SmallVec;

use super::expired::STEP;
use super::object::Object;
use crate::model::disk_replicas::{DiskHolding, DiskLocation};
use crate::model::snapshot::{SnapshotObject, disk_position};
use crate::sync::atomic::Ordering::Relaxed;

/// Maximum number of objects in each half of the list of a shard.
const HALF: usize = 1 << 13;

/// Object on disks whose owners are gone.
struct AbsentObject {
    len: u64,
    checksum: Option<u64>,
    holdings: SmallVec<[DiskHolding; 1]>,
}

/// List of the objects of one shard. Removing or replacing an object takes it from the list. The
/// list has no time limit; once the recent half is full, the older half is dropped.
#[derive(Default)]
pub(crate) struct AbsentDisks {
    recent: BTreeMap<ObjectKey, AbsentObject>,
    older: BTreeMap<ObjectKey, AbsentObject>,
    /// Number of times that the recent half has become the older one.
    turns: u64,
}

/// Position in a list, which is visited in steps.
#[derive(Default)]
pub(crate) struct AbsentPosition {
    turn: u64,
    /// True in the recent half, which comes last: objects move there.
    is_recent: bool,
    after: Option<ObjectKey>,
}

impl AbsentDisks {
    /// Lists the replicas of an object on disks whose owners are gone and may return.
    pub(crate) fn record<A: SegmentAllocator>(&mut self, object: &Object<A>) {
        let Some(disk) = object.disk() else { return };
        for copy in &disk.copies {
            let DiskLocation::Owned(owner, _) = &copy.location else { continue };
            if !owner.is_alive() && owner.may_return.load(Relaxed) {
                let holding = DiskHolding { client: owner.client, version: copy.version };
                self.add(&object.key, disk.len, disk.checksum, holding);
            }
        }
    }

    /// Lists an object of the snapshot of an earlier master, as far as it is on disks.
    pub(crate) fn record_late(&mut self, object: &SnapshotObject) {
        let Ok(key) = ObjectKey::new(object.key.as_slice()) else { return };
        for holding in object.holdings() {
            self.add(&key, object.len, object.checksum, holding);
        }
    }

    fn add(&mut self, key: &ObjectKey, len: u64, checksum: Option<u64>, holding: DiskHolding) {
        let before = self.recent.remove(key).or_else(|| self.older.remove(key));
        let before = before.filter(|before| before.len == len);
        let mut object = before.unwrap_or(AbsentObject { len, checksum, holdings: SmallVec::new() });
        object.holdings.retain(|other| other.client != holding.client || other.version != holding.version);
        object.holdings.push(holding);
        if self.recent.len() >= HALF {
            self.older = std::mem::take(&mut self.recent);
            self.turns += 1;
        }
        self.recent.insert(key.clone(), object);
    }

    /// Takes a replica from the list if it is there. Returns the checksum of its value.
    pub(crate) fn take(&mut self, key: &ObjectKey, len: u64, found: DiskHolding) -> Option<Option<u64>> {
        let part = if self.recent.contains_key(key) { &mut self.recent } else { &mut self.older };
        let object = part.get_mut(key).filter(|object| object.len == len)?;
        let at = object.holdings.iter().position(|listed| listed.is_same(&found))?;
        object.holdings.swap_remove(at);
        let (checksum, is_last) = (object.checksum, object.holdings.is_empty());
        if is_last {
            part.remove(key);
        }
        Some(checksum)
    }

    /// Forgets an object that was removed or replaced.
    pub(crate) fn forget(&mut self, key: &[u8]) {
        if !self.recent.is_empty() || !self.older.is_empty() {
            self.recent.remove(key);
            self.older.remove(key);
        }
    }

    /// Forgets the next objects with such keys. Returns whether it was the last step.
    pub(crate) fn forget_where(
        &mut self,
        position: &mut AbsentPosition,
        wanted: impl Fn(&[u8]) -> bool,
    ) -> bool {
        let mut forgotten = Vec::new();
        let is_last = self.visit_step(position, |key, _| {
            if wanted(key.as_bytes()) {
                forgotten.push(key.clone());
            }
        });
        forgotten.iter().for_each(|key| self.forget(key.as_bytes()));
        is_last
    }

    /// Visits the next objects. Returns whether it was the last step. An object may be visited
    /// twice, but none that stays is left out.
    fn visit_step(
        &self,
        position: &mut AbsentPosition,
        mut visit: impl FnMut(&ObjectKey, &AbsentObject),
    ) -> bool {
        if position.turn != self.turns {
            // The recent half has become the older one.
            *position = AbsentPosition { turn: self.turns, ..AbsentPosition::default() };
        }
        let part = if position.is_recent { &self.recent } else { &self.older };
        let begin = position.after.take().map_or(Unbounded, Excluded);
        let mut count = 0;
        for (key, object) in part.range((begin, Unbounded)).take(STEP) {
            count += 1;
            visit(key, object);
            if count == STEP {
                position.after = Some(key.clone());
            }
        }
        let was_recent = position.is_recent;
        position.is_recent |= count < STEP;
        count < STEP && was_recent
    }

    /// Adds the listed replicas of an object to its description for a snapshot.
    pub(crate) fn complete(&self, object: &mut SnapshotObject) {
        let listed = self.recent.get(&*object.key).or_else(|| self.older.get(&*object.key));
        for holding in listed.filter(|listed| listed.len == object.len).iter().flat_map(|it| &it.holdings) {
            object.positions.extend(holding.version.map(disk_position));
            object.disks.push(holding.client);
        }
    }

    /// Returns the next objects for a snapshot, and whether it was the last step.
    pub(crate) fn to_snapshot(&self, position: &mut AbsentPosition) -> (Vec<SnapshotObject>, bool) {
        let mut objects = Vec::new();
        let is_last = self.visit_step(position, |key, object| {
            objects.push(SnapshotObject::on_disks(
                key.as_bytes(),
                object.len,
                object.checksum,
                &object.holdings,
            ));
        });
        (objects, is_last)
    }
}

#[cfg(test)]
mod tests {
    use mooncake_core::ids::{ClientId, Uuid};

    use super::*;
    use crate::model::disk_replicas::DiskVersion;

    fn key(number: usize) -> ObjectKey {
        ObjectKey::new(format!("k{number}")).unwrap()
    }

    fn holding(client: u64, number: u64) -> DiskHolding {
        let version = (number > 0).then_some(DiskVersion { store: 7, number });
        DiskHolding { client: ClientId(Uuid::new(client, 1)), version }
    }

    #[test]
    fn a_replica_is_the_listed_one_or_unknown() {
        let mut list = AbsentDisks::default();
        list.add(&key(1), 10, Some(5), holding(1, 3));
        list.add(&key(1), 10, Some(5), holding(2, 0));
        assert_eq!(list.take(&key(1), 9, holding(1, 3)), None, "another length");
        assert_eq!(list.take(&key(1), 10, holding(1, 4)), None, "another value");
        assert_eq!(list.take(&key(1), 10, holding(3, 0)), None, "another client, which gives no version");
        assert_eq!(list.take(&key(1), 10, holding(8, 3)), Some(Some(5)), "the next process of the owner");
        assert_eq!(list.take(&key(1), 10, holding(2, 9)), Some(Some(5)), "the owner itself");
        assert_eq!(list.take(&key(1), 10, holding(2, 9)), None);
        list.add(&key(2), 10, None, holding(1, 3));
        list.forget(b"k2");
        list.add(&key(3), 10, None, holding(1, 3));
        list.forget_where(&mut AbsentPosition { is_recent: true, ..AbsentPosition::default() }, |key| {
            key == b"k3"
        });
        assert!(list.recent.is_empty() && list.older.is_empty());
    }

    #[test]
    fn the_list_is_visited_in_steps_while_it_changes() {
        let mut list = AbsentDisks::default();
        let add = |list: &mut AbsentDisks, number| list.add(&key(number), 10, None, holding(1, 1));
        (0..HALF + 2 * STEP).for_each(|number| add(&mut list, number));
        let (mut position, mut seen, mut steps) = (AbsentPosition::default(), BTreeMap::new(), 0);
        loop {
            let (objects, is_last) = list.to_snapshot(&mut position);
            assert!(objects.len() <= STEP);
            objects.into_iter().for_each(|object| *seen.entry(object.key).or_insert(0) += 1);
            steps += 1;
            if steps == 3 {
                // The recent half becomes the older one.
                (HALF + 2 * STEP..2 * HALF + 1).for_each(|number| add(&mut list, number));
            }
            // An object that is listed again moves to the recent half.
            add(&mut list, HALF + steps);
            if is_last {
                break;
            }
        }
        let listed = list.recent.keys().chain(list.older.keys());
        assert!(listed.clone().all(|key| seen.contains_key(key.as_bytes())), "none that stays is left out");
        assert_eq!(listed.count(), HALF + 1);
        assert!(steps < 4 * HALF / STEP);
        let (mut position, mut left) = (AbsentPosition::default(), steps);
        while !list.forget_where(&mut position, |_| true) {
            left -= 1;
        }
        assert!(left > 0 && list.recent.is_empty() && list.older.is_empty());
    }

    #[test]
    fn the_list_is_bounded_and_the_oldest_go_first() {
        let mut list = AbsentDisks::default();
        (0..=2 * HALF).for_each(|number| list.add(&key(number), 10, None, holding(1, 1)));
        assert_eq!(list.recent.len() + list.older.len(), HALF + 1);
        assert!(list.take(&key(0), 10, holding(1, 1)).is_none());
        assert!(list.take(&key(HALF), 10, holding(1, 1)).is_some());
        assert!(list.take(&key(2 * HALF), 10, holding(1, 1)).is_some());
    }
}
