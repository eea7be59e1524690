//! Groups: objects that are of use only together. They are read for themselves and evicted as one.

use std::collections::{HashMap, HashSet};
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use foldhash::quality::FixedState;
use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::ids::ObjectKey;
use parking_lot::Mutex;

use super::Master;
use super::evict::{Pass, Victim};

/// One group. Lives as long as an object that belongs to it.
pub(super) struct Group {
    name: String,
    /// Until when some member may be relied on.
    lease: AtomicU64,
    members: Mutex<HashSet<ObjectKey>>,
}

impl Group {
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn lease(&self) -> Moment {
        Moment(self.lease.load(Relaxed))
    }

    pub(super) fn extend(&self, until: Moment) {
        self.lease.fetch_max(until.0, Relaxed);
    }
}

/// Groups that are locked together.
type Part = Mutex<HashMap<String, Arc<Group>>>;

/// Parts of the table: with as many groups as objects, one would be hashed anew for so long that puts feel it.
const PARTS: usize = 256;

/// Every group that has a member, by its name. Locked alone, or inside a shard; around the members of a group.
pub(super) struct Groups {
    hasher: FixedState,
    parts: Box<[Part]>,
}

impl Groups {
    pub(super) fn new(seed: u64) -> Self {
        Self { hasher: FixedState::with_seed(seed), parts: (0..PARTS).map(|_| Part::default()).collect() }
    }

    fn part(&self, name: &str) -> &Part {
        &self.parts[self.hasher.hash_one(name) as usize % PARTS]
    }

    /// The group of that name, with one more member that may be relied on until then.
    pub(super) fn join(&self, name: &str, key: ObjectKey, lease: Moment) -> Arc<Group> {
        let mut part = self.part(name).lock();
        let group = match part.get(name) {
            Some(known) => known.clone(),
            None => {
                let group =
                    Group { name: name.to_owned(), lease: AtomicU64::new(0), members: Mutex::default() };
                part.entry(name.to_owned()).or_insert(Arc::new(group)).clone()
            }
        };
        group.extend(lease);
        group.members.lock().insert(key);
        group
    }

    /// It has one member less; without any it is forgotten.
    pub(super) fn leave(&self, group: &Group, key: &ObjectKey) {
        let mut part = self.part(&group.name).lock();
        let mut members = group.members.lock();
        members.remove(key);
        if members.is_empty() {
            part.remove(&group.name);
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.parts.iter().map(|part| part.lock().len()).sum()
    }
}

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// Evicts what is left of a group one of whose members has just gone. What is pinned, or leased since, stays.
    pub(super) fn evict_rest(&self, group: &Group, pass: Pass, now: Moment, victim: &mut Victim<A>) {
        let members: Vec<ObjectKey> = group.members.lock().iter().cloned().collect();
        for key in members {
            let hash = self.directory.hash(key.as_bytes());
            let mut shard = self.directory.lock(hash);
            let Some(slot) = shard.find(hash, key.as_bytes()) else { continue };
            if self.evictable(&shard[slot], pass, now) {
                self.evict_slot(&mut shard, slot, now, victim);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_live_as_long_as_they_have_members() {
        let groups = Groups::new(1);
        let key = |number: u32| ObjectKey::new(number.to_le_bytes()).unwrap();
        let one = groups.join("g", key(1), Moment(5));
        let same = groups.join("g", key(2), Moment(3));
        assert!(Arc::ptr_eq(&one, &same) && one.lease() == Moment(5));
        for number in 0..1000 {
            let name = number.to_string();
            let group = groups.join(&name, key(number), Moment(0));
            groups.leave(&group, &key(number));
        }
        assert_eq!(groups.len(), 1);
        groups.leave(&one, &key(1));
        groups.leave(&one, &key(9));
        assert_eq!(groups.len(), 1);
        groups.leave(&one, &key(2));
        assert_eq!(groups.len(), 0);
        assert_eq!(groups.join("g", key(1), Moment(0)).lease(), Moment(0), "another one");
    }
}
