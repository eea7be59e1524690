//! Keys of objects that return to the directory while snapshots are written.
//!
//! A snapshot visits one shard after the other. An object that an owner announces meanwhile may lie
//! in a shard that was visited before. Each snapshot therefore writes the objects that have
//! returned once more at its end.

use mooncake_core::ids::ObjectKey;

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// Maximum number of keys that are recorded for a snapshot between two of its visits.
const MAX_KEYS: usize = 1 << 16;

/// Keys that have returned since the last visit of one snapshot.
#[derive(Debug, Default)]
struct SnapshotKeys {
    number: usize,
    keys: Vec<ObjectKey>,
    is_full: bool,
}

/// Keys of objects that return, for each snapshot in progress.
#[derive(Debug, Default)]
pub(crate) struct ReturnedKeys {
    /// Number of snapshots in progress.
    running: AtomicUsize,
    /// Number of snapshots that have begun.
    begun: AtomicUsize,
    lists: Mutex<Vec<SnapshotKeys>>,
}

/// Keys that a snapshot is to visit once more.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Returned {
    These(Vec<ObjectKey>),
    /// More than the record holds: the whole directory is to be visited.
    TooMany,
}

/// Record for one snapshot. It ends when this is dropped.
pub(crate) struct SnapshotRecord<'k> {
    keys: &'k ReturnedKeys,
    number: usize,
}

impl ReturnedKeys {
    /// Begins to record for a snapshot, before it visits the first shard.
    pub(crate) fn begin(&self) -> SnapshotRecord<'_> {
        let number = self.begun.fetch_add(1, SeqCst);
        self.lists.lock().push(SnapshotKeys { number, ..SnapshotKeys::default() });
        self.running.fetch_add(1, SeqCst);
        SnapshotRecord { keys: self, number }
    }

    /// Records that the object of a key has returned. The shard of the key is locked.
    pub(crate) fn record(&self, key: &ObjectKey) {
        if self.running.load(SeqCst) == 0 {
            return;
        }
        for list in self.lists.lock().iter_mut().filter(|list| !list.is_full) {
            if list.keys.len() >= MAX_KEYS {
                (list.keys, list.is_full) = (Vec::new(), true);
            } else {
                list.keys.push(key.clone());
            }
        }
    }
}

impl SnapshotRecord<'_> {
    /// Takes what was recorded since the last call.
    pub(crate) fn take(&self) -> Returned {
        let mut lists = self.keys.lists.lock();
        let list = lists.iter_mut().find(|list| list.number == self.number);
        match list.map(|list| (std::mem::take(&mut list.is_full), std::mem::take(&mut list.keys))) {
            Some((true, _)) => Returned::TooMany,
            Some((false, keys)) => Returned::These(keys),
            None => Returned::These(Vec::new()),
        }
    }
}

impl Drop for SnapshotRecord<'_> {
    fn drop(&mut self) {
        self.keys.running.fetch_sub(1, SeqCst);
        self.keys.lists.lock().retain(|list| list.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: usize) -> ObjectKey {
        ObjectKey::new(format!("k{number}")).unwrap()
    }

    #[test]
    fn each_snapshot_takes_what_has_returned_since_its_last_visit() {
        let returned = ReturnedKeys::default();
        returned.record(&key(0));
        let one = returned.begin();
        returned.record(&key(1));
        let two = returned.begin();
        returned.record(&key(2));
        assert_eq!(one.take(), Returned::These(vec![key(1), key(2)]));
        assert_eq!(two.take(), Returned::These(vec![key(2)]));
        drop(one);
        assert_eq!(two.take(), Returned::These(Vec::new()));
        drop(two);
        returned.record(&key(3));
        assert!(returned.lists.lock().is_empty());
    }

    #[test]
    fn a_record_is_bounded() {
        let returned = ReturnedKeys::default();
        let snapshot = returned.begin();
        (0..MAX_KEYS + 5).for_each(|number| returned.record(&key(number)));
        assert_eq!(snapshot.take(), Returned::TooMany);
        returned.record(&key(7));
        assert_eq!(snapshot.take(), Returned::These(vec![key(7)]));
    }
}
