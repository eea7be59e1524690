//! Groups: objects that are of use only together. They are read for themselves and evicted as one.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};

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

    pub(super) fn join(&self, key: ObjectKey) {
        self.members.lock().insert(key);
    }

    pub(super) fn leave(&self, key: &ObjectKey) {
        self.members.lock().remove(key);
    }
}

/// Every group by its name. Locked alone, or inside a shard.
#[derive(Default)]
pub(super) struct Groups {
    by_name: HashMap<String, Weak<Group>>,
    /// So many entries make it worth looking for those whose group is gone.
    crowded: usize,
}

impl Groups {
    /// The group of that name; a new one if there is none.
    pub(super) fn named(&mut self, name: &str) -> Arc<Group> {
        if let Some(known) = self.by_name.get(name).and_then(Weak::upgrade) {
            return known;
        }
        if self.by_name.len() >= self.crowded {
            self.by_name.retain(|_, group| group.strong_count() > 0);
            self.crowded = (2 * self.by_name.len()).max(64);
        }
        let group =
            Arc::new(Group { name: name.to_owned(), lease: AtomicU64::new(0), members: Mutex::default() });
        self.by_name.insert(name.to_owned(), Arc::downgrade(&group));
        group
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
