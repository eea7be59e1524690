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
    objects: Mutex<GroupObjects>,
}

/// Objects of a group.
#[derive(Debug, Default)]
struct GroupObjects {
    keys: HashSet<ObjectKey>,
    /// Number of objects that eviction may choose: the policy orders them, and they do not wait.
    running: usize,
    /// Number of objects that eviction has passed over since their last use.
    waiting: usize,
}

impl Group {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the keys of the objects of the group.
    pub(crate) fn keys(&self) -> Vec<ObjectKey> {
        self.objects.lock().keys.iter().cloned().collect()
    }

    /// Counts an object that the policy orders from now on.
    pub(crate) fn add_running(&self) {
        self.objects.lock().running += 1;
    }

    /// Removes an object that the policy no longer orders. Returns whether all others wait.
    pub(crate) fn remove_ordered(&self, waits: bool) -> bool {
        let mut objects = self.objects.lock();
        let of = if waits { &mut objects.waiting } else { &mut objects.running };
        *of = of.saturating_sub(1);
        objects.is_idle()
    }

    /// Lets an object wait for the others. Returns false if it is the last one that does not wait.
    pub(crate) fn begin_wait(&self) -> bool {
        let mut objects = self.objects.lock();
        let others = objects.running > 1;
        if others {
            objects.running -= 1;
            objects.waiting += 1;
        }
        others
    }

    /// Ends the wait of an object.
    pub(crate) fn end_wait(&self) {
        let mut objects = self.objects.lock();
        objects.running += 1;
        objects.waiting = objects.waiting.saturating_sub(1);
    }

    /// Returns whether eviction may choose an object.
    pub(crate) fn is_running(&self) -> bool {
        self.objects.lock().running > 0
    }

    /// Returns whether some objects wait, and eviction may choose none of the others.
    pub(crate) fn is_idle(&self) -> bool {
        self.objects.lock().is_idle()
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

impl GroupObjects {
    fn is_idle(&self) -> bool {
        self.running == 0 && self.waiting > 0
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
                let (lease, objects) = (AtomicU64::new(0), Mutex::default());
                let group = Group { name: name.to_owned(), lease, objects };
                part.entry(name.to_owned()).or_insert(Arc::new(group)).clone()
            }
        };
        group.extend(lease);
        group.objects.lock().keys.insert(key);
        group
    }

    /// Removes an object. A group without objects is removed.
    pub(crate) fn leave(&self, group: &Group, key: &ObjectKey) {
        let mut part = self.part(&group.name).lock();
        let keys = &mut group.objects.lock().keys;
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

    #[test]
    fn the_last_object_does_not_wait() {
        let group = Groups::new(1).join("g", ObjectKey::new([1]).unwrap(), Moment(0));
        (0..3).for_each(|_| group.add_running());
        assert_eq!([(); 3].map(|()| group.begin_wait()), [true, true, false]);
        assert!(group.is_running() && !group.is_idle());
        assert!(!group.remove_ordered(true) && group.remove_ordered(false), "one is left, and waits");
        group.end_wait();
        assert!(!group.is_idle() && !group.begin_wait());
        assert!(!group.remove_ordered(false) && !group.is_running(), "none is left");
    }
}
