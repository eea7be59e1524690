//! Groups: objects that are of use only together. They are read separately and evicted as one.

use std::collections::{HashMap, HashSet};
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use foldhash::quality::FixedState;
use mooncake_core::clock::Moment;
use mooncake_core::ids::ObjectKey;
use parking_lot::Mutex;

/// Group. It exists as long as an object belongs to it.
pub(crate) struct Group {
    name: String,
    /// End of the latest lease on an object of the group.
    lease: AtomicU64,
    keys: Mutex<HashSet<ObjectKey>>,
}

impl Group {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the keys of the objects of the group.
    pub(crate) fn keys(&self) -> Vec<ObjectKey> {
        self.keys.lock().iter().cloned().collect()
    }

    /// Returns the end of the latest lease on an object of the group.
    pub(crate) fn lease(&self) -> Moment {
        Moment(self.lease.load(Relaxed))
    }

    /// Extends the lease of the group.
    pub(crate) fn extend(&self, until: Moment) {
        self.lease.fetch_max(until.0, Relaxed);
    }
}

/// Groups under one lock.
type GroupTablePart = Mutex<HashMap<String, Arc<Group>>>;

/// Number of parts of the table. With as many groups as objects, one hash table would grow for so
/// long that puts are delayed.
const PARTS: usize = 256;

/// Groups by name. A lock of this table is taken alone or inside a shard, and around the list of
/// keys of a group.
pub(crate) struct Groups {
    hasher: FixedState,
    parts: Box<[GroupTablePart]>,
}

impl Groups {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            hasher: FixedState::with_seed(seed),
            parts: (0..PARTS).map(|_| GroupTablePart::default()).collect(),
        }
    }

    fn part(&self, name: &str) -> &GroupTablePart {
        &self.parts[self.hasher.hash_one(name) as usize % PARTS]
    }

    /// Adds an object with its lease to the group of that name. Returns the group.
    pub(crate) fn join(&self, name: &str, key: ObjectKey, lease: Moment) -> Arc<Group> {
        let mut part = self.part(name).lock();
        let group = match part.get(name) {
            Some(known) => known.clone(),
            None => {
                let group = Group { name: name.to_owned(), lease: AtomicU64::new(0), keys: Mutex::default() };
                part.entry(name.to_owned()).or_insert(Arc::new(group)).clone()
            }
        };
        group.extend(lease);
        group.keys.lock().insert(key);
        group
    }

    /// Removes an object. A group without objects is removed.
    pub(crate) fn leave(&self, group: &Group, key: &ObjectKey) {
        let mut part = self.part(&group.name).lock();
        let mut keys = group.keys.lock();
        keys.remove(key);
        if keys.is_empty() {
            part.remove(&group.name);
        }
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.parts.iter().map(|part| part.lock().len()).sum()
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
