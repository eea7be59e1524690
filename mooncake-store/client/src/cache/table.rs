//! Table of the cached values, with the order of their eviction.

use std::collections::HashMap;
use std::hash::BuildHasher;

use bytes::Bytes;
use foldhash::quality::FixedState;
use mooncake_core::evict::{EvictionPolicy, Lru};
use mooncake_core::ids::SlotId;
use mooncake_core::replica::{Replica, ReplicaList};
use mooncake_core::sketch::Sketch;

use crate::replicas::is_same;

/// Number of keys whose reads are counted, approximately.
const COUNTERS: usize = 1 << 16;

/// Cached value, with the description of the master.
#[derive(Debug)]
pub struct CachedValue {
    /// Bytes in the memory of the cache.
    pub bytes: Bytes,
    /// Replicas in the response of the master.
    pub replicas: Vec<Replica>,
    /// Checksum in the response of the master.
    pub checksum: Option<u64>,
}

impl CachedValue {
    /// Returns whether a response of the master describes this value.
    pub fn matches(&self, list: &ReplicaList) -> bool {
        is_same((&self.replicas, self.checksum), (&list.replicas, list.checksum))
    }
}

/// Cached values by key, the order of their eviction, and the reads that decide on admission.
pub struct CacheTable {
    slots: HashMap<Box<[u8]>, SlotId>,
    entries: Vec<Option<(Box<[u8]>, CachedValue)>>,
    free: Vec<SlotId>,
    order: Lru,
    bytes: u64,
    read_counts: Sketch,
    hasher: FixedState,
    /// Keys that are being fetched, and whether their values are still needed.
    fetching: HashMap<Box<[u8]>, bool>,
}

impl CacheTable {
    /// Creates an empty table. `seed` varies which keys share a counter of reads.
    pub fn new(seed: u64) -> Self {
        Self {
            slots: HashMap::new(),
            entries: Vec::new(),
            free: Vec::new(),
            order: Lru::new(0, &()),
            bytes: 0,
            read_counts: Sketch::new(COUNTERS, 8 * COUNTERS),
            hasher: FixedState::with_seed(seed),
            fetching: HashMap::new(),
        }
    }

    /// Returns the number of values and their bytes.
    pub fn size(&self) -> (usize, u64) {
        (self.order.len(), self.bytes)
    }

    /// Returns the value that a response of the master describes. Removes another value of the key.
    pub fn find(&mut self, key: &[u8], list: &ReplicaList) -> Option<Bytes> {
        let slot = *self.slots.get(key)?;
        let (_, entry) = self.entries[slot.index()].as_ref()?;
        if entry.matches(list) {
            self.order.touch(slot);
            return Some(entry.bytes.clone());
        }
        self.remove(key);
        None
    }

    /// Counts a read of a key. Returns the approximate number of recent reads of the key.
    pub fn count(&mut self, key: &[u8]) -> u8 {
        self.read_counts.add(self.hasher.hash_one(key))
    }

    /// Begins the fetch of a key. Returns false if the key is cached or already being fetched.
    pub fn begin(&mut self, key: &[u8]) -> bool {
        if self.slots.contains_key(key) || self.fetching.contains_key(key) {
            return false;
        }
        self.fetching.insert(key.into(), true);
        true
    }

    /// Ends the fetch of a key. Returns whether the value was stored. A value that was discarded
    /// during the fetch is not stored.
    pub fn end(&mut self, key: &[u8], entry: Option<CachedValue>) -> bool {
        let is_needed = self.fetching.remove(key).unwrap_or(false);
        let Some(entry) = entry.filter(|_| is_needed) else { return false };
        self.remove(key);
        let slot = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            SlotId(self.entries.len() as u32 - 1)
        });
        self.bytes += entry.bytes.len() as u64;
        self.order.insert(slot, entry.bytes.len() as u64);
        self.slots.insert(key.into(), slot);
        self.entries[slot.index()] = Some((key.into(), entry));
        true
    }

    /// Removes the least recently used value.
    pub fn evict(&mut self) -> Option<Bytes> {
        let slot = self.order.evict(&mut |_| true)?;
        let (key, entry) = self.entries[slot.index()].take()?;
        self.slots.remove(&key);
        self.free.push(slot);
        self.bytes -= entry.bytes.len() as u64;
        Some(entry.bytes)
    }

    /// Removes a key, and discards its value if it is being fetched.
    pub fn forget(&mut self, key: &[u8]) {
        if let Some(is_needed) = self.fetching.get_mut(key) {
            *is_needed = false;
        }
        self.remove(key);
    }

    /// Removes all keys, and discards the values that are being fetched.
    pub fn clear(&mut self) {
        self.fetching.values_mut().for_each(|is_needed| *is_needed = false);
        while self.evict().is_some() {}
    }

    fn remove(&mut self, key: &[u8]) {
        let Some(slot) = self.slots.remove(key) else { return };
        self.order.remove(slot);
        if let Some((_, entry)) = self.entries[slot.index()].take() {
            self.bytes -= entry.bytes.len() as u64;
        }
        self.free.push(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_core::ids::ReplicaId;
    use mooncake_core::replica::{MemoryLocation, ReplicaLocation, ReplicaStatus};
    use std::time::Duration;

    fn list(ids: &[(u64, u64)], checksum: Option<u64>) -> ReplicaList {
        let replica = |&(id, address): &(u64, u64)| Replica {
            id: ReplicaId(id),
            location: ReplicaLocation::Memory(MemoryLocation {
                size: 3,
                address,
                protocol: "tcp".into(),
                endpoint: "there".into(),
                locality: None,
            }),
            status: ReplicaStatus::Complete,
        };
        ReplicaList {
            replicas: ids.iter().map(replica).collect(),
            lease: Duration::ZERO,
            checksum,
            resolved_tenant: None,
        }
    }

    fn entry(list: ReplicaList) -> CachedValue {
        CachedValue { bytes: Bytes::from_static(b"abc"), replicas: list.replicas, checksum: list.checksum }
    }

    #[test]
    fn value_matches_by_replica_identifier() {
        let own_id = |number| ReplicaId::first(4).0 + number;
        for (then, now, same) in [
            (list(&[(own_id(1), 0)], None), list(&[(own_id(1), 0)], None), true),
            (
                list(&[(own_id(1), 0), (own_id(2), 9)], None),
                list(&[(own_id(3), 5), (own_id(2), 9)], None),
                true,
            ),
            (list(&[(own_id(1), 0)], None), list(&[(own_id(2), 0)], None), false),
            (list(&[(own_id(1), 0)], None), list(&[(ReplicaId::first(400).0 + 1, 0)], None), false),
            // A master of Mooncake C++ may assign the same identifier again after a restart.
            (list(&[(1, 0)], None), list(&[(1, 0)], None), true),
            (list(&[(1, 0)], None), list(&[(1, 64)], None), false),
            (list(&[(1, 0)], Some(1)), list(&[(1, 0)], Some(2)), false),
            (list(&[(1, 0)], Some(1)), list(&[(1, 0)], None), false),
        ] {
            let mut table = CacheTable::new(1);
            assert!(table.begin(b"k") && !table.begin(b"k"));
            let text = format!("{then:?} {now:?}");
            assert!(table.end(b"k", Some(entry(then))));
            assert_eq!(table.find(b"k", &now).is_some(), same, "{text}");
            assert_eq!(table.size().0, usize::from(same), "another value makes room");
        }
    }

    #[test]
    fn value_forgotten_during_fetch_is_discarded() {
        let mut table = CacheTable::new(1);
        for forget in [|table: &mut CacheTable| table.forget(b"k"), CacheTable::clear] {
            assert!(table.begin(b"k"));
            forget(&mut table);
            assert!(!table.end(b"k", Some(entry(list(&[(1, 0)], None)))));
            assert_eq!(table.size(), (0, 0));
        }
        assert!(table.begin(b"k"));
        assert!(!table.end(b"k", None) && table.begin(b"k"), "after a failure it may be tried again");
    }

    #[test]
    fn least_recently_used_is_evicted_first() {
        let mut table = CacheTable::new(1);
        let list = list(&[(1, 0)], None);
        for key in [b"a", b"b", b"c"] {
            table.begin(key);
            table.end(key, Some(entry(list.clone())));
        }
        assert!(table.find(b"a", &list).is_some());
        table.forget(b"c");
        assert_eq!(table.size(), (2, 6));
        assert!(table.evict().is_some());
        assert!(table.find(b"b", &list).is_none() && table.find(b"a", &list).is_some());
        table.clear();
        assert_eq!((table.size(), table.evict()), ((0, 0), None));
    }
}
