//! Groups: objects that are of use only together. They are read separately and evicted as one.

use std::collections::{HashMap, HashSet};
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::Duration;

use foldhash::quality::FixedState;
use mooncake_core::clock::Moment;

use super::look_ups::begin_of_look_ups;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Maximum number of objects of a group. The time to list a group is thus bounded.
pub(crate) const MAX_OBJECTS: usize = 1 << 16;

/// Group. It exists as long as an object belongs to it.
pub(crate) struct Group {
    name: String,
    /// End of the latest lease on an object of the group.
    lease: AtomicU64,
    /// End of the latest lease of a read on one of the objects.
    reads: AtomicU64,
    /// Begin of the look-ups that have extended the lease since the last read; 0 for none.
    looked_up_since: AtomicU64,
    objects: Mutex<GroupObjects>,
}

/// Objects of a group.
#[derive(Debug, Default)]
struct GroupObjects {
    /// Hashes of the keys. If two keys of a group had one hash, one of them would not go with the
    /// others.
    hashes: HashSet<u64, FixedState>,
    /// Number of objects that eviction may choose: the policy orders them, and they do not wait.
    running: usize,
    /// Number of objects that eviction has passed over since their last use.
    waiting: usize,
}

impl Group {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the hashes of the keys of the group.
    pub(crate) fn hashes(&self) -> Vec<u64> {
        self.objects.lock().hashes.iter().copied().collect()
    }

    /// Returns the number of keys of the group.
    pub(crate) fn len(&self) -> usize {
        self.objects.lock().hashes.len()
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

    /// Returns the end of the latest lease of a read on an object of the group.
    pub(crate) fn read_lease(&self) -> Moment {
        Moment(self.reads.load(Relaxed))
    }

    /// Returns the begin of the look-ups that have extended the lease since the last read; 0 for
    /// none.
    pub(crate) fn looked_up_since(&self) -> Moment {
        Moment(self.looked_up_since.load(Relaxed))
    }

    /// Extends the lease of the group for a read.
    pub(crate) fn extend_reads(&self, until: Moment) {
        self.looked_up_since.store(0, Relaxed);
        self.reads.fetch_max(until.0, Relaxed);
        self.extend(until);
    }

    /// Extends the lease of the group for a look-up at `now`. Look-ups at most `pause` apart are
    /// one.
    pub(crate) fn extend_look_ups(&self, now: Moment, until: Moment, pause: Duration) {
        let since = begin_of_look_ups(self.looked_up_since(), self.lease(), now, until, pause);
        self.looked_up_since.store(since.0, Relaxed);
        self.extend(until);
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

    /// Adds an object with its lease to the group of that name. Returns the group. After
    /// [`MAX_OBJECTS`] objects another group of the same name begins, which goes by itself.
    pub(crate) fn join(&self, name: &str, hash: u64, lease: Moment) -> Arc<Group> {
        let mut part = self.part(name).lock();
        let is_open = |group: &&Arc<Group>| {
            let objects = group.objects.lock();
            objects.hashes.len() < MAX_OBJECTS || objects.hashes.contains(&hash)
        };
        let group = match part.get(name).filter(is_open) {
            Some(known) => known.clone(),
            None => {
                let [lease, reads, looked_up_since] = [0; 3].map(AtomicU64::new);
                let objects = Mutex::default();
                let group = Group { name: name.to_owned(), lease, reads, looked_up_since, objects };
                let group = Arc::new(group);
                if part.insert(name.to_owned(), group.clone()).is_some() {
                    tracing::debug!(name, objects = MAX_OBJECTS, "group is full; another one begins");
                }
                group
            }
        };
        group.extend(lease);
        group.objects.lock().hashes.insert(hash);
        group
    }

    /// Returns the group of a name.
    pub(crate) fn find(&self, name: &str) -> Option<Arc<Group>> {
        self.part(name).lock().get(name).cloned()
    }

    /// Removes an object. A group without objects is removed.
    pub(crate) fn leave(&self, group: &Arc<Group>, hash: u64) {
        let mut part = self.part(&group.name).lock();
        let hashes = &mut group.objects.lock().hashes;
        hashes.remove(&hash);
        if hashes.is_empty() && part.get(&group.name).is_some_and(|known| Arc::ptr_eq(known, group)) {
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
        let one = groups.join("g", 1, Moment(5));
        let same = groups.join("g", 2, Moment(3));
        assert!(Arc::ptr_eq(&one, &same) && one.lease() == Moment(5));
        for number in 0..1000 {
            let name = number.to_string();
            let group = groups.join(&name, number, Moment(0));
            groups.leave(&group, number);
        }
        assert_eq!(groups.len(), 1);
        groups.leave(&one, 1);
        groups.leave(&one, 9);
        assert_eq!(groups.len(), 1);
        groups.leave(&one, 2);
        assert_eq!(groups.len(), 0);
        assert_eq!(groups.join("g", 1, Moment(0)).lease(), Moment(0), "another one");
    }

    #[test]
    fn a_full_group_is_followed_by_another_one() {
        let groups = Groups::new(1);
        let first = groups.join("g", 0, Moment(7));
        for hash in 1..MAX_OBJECTS as u64 {
            assert!(Arc::ptr_eq(&groups.join("g", hash, Moment(0)), &first));
        }
        let second = groups.join("g", MAX_OBJECTS as u64, Moment(0));
        assert!(!Arc::ptr_eq(&first, &second) && second.name() == "g" && second.lease() == Moment(0));
        assert_eq!((first.hashes().len(), second.hashes().len()), (MAX_OBJECTS, 1));
        // The first one is not found again, and ends without a trace.
        (0..MAX_OBJECTS as u64).for_each(|hash| groups.leave(&first, hash));
        assert!(Arc::ptr_eq(&groups.join("g", 1, Moment(0)), &second));
        groups.leave(&second, 1);
        groups.leave(&second, MAX_OBJECTS as u64);
        assert_eq!(groups.len(), 0);
    }

    #[test]
    fn the_last_object_does_not_wait() {
        let group = Groups::new(1).join("g", 1, Moment(0));
        (0..3).for_each(|_| group.add_running());
        assert_eq!([(); 3].map(|()| group.begin_wait()), [true, true, false]);
        assert!(group.is_running() && !group.is_idle());
        assert!(!group.remove_ordered(true) && group.remove_ordered(false), "one is left, and waits");
        group.end_wait();
        assert!(!group.is_idle() && !group.begin_wait());
        assert!(!group.remove_ordered(false) && !group.is_running(), "none is left");
    }
}
