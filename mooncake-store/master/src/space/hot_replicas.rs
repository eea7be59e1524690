//! Eviction of additional replicas of objects that are read often.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ObjectKey, ReplicaId};

use super::hot_table::{ExtraReplica, HotTable, PAUSE_AFTER_DROP};
use super::state::Space;
use crate::sync::atomic::Ordering::Relaxed;

impl<A: SegmentAllocator, E: MergeableOrder> Space<A, E> {
    /// Drops an additional replica unless it is the last one or a copy uses it.
    pub(crate) fn drop_replica(&self, hot: &HotTable, key: &ObjectKey, replica: ReplicaId, now: Moment) {
        let hash = self.directory.hash(key.as_bytes());
        let mut shard = self.directory.lock(hash);
        let Some(slot) = shard.find(hash, key.as_bytes()) else { return };
        // A copy or move may read this replica. It stays, as an ordinary one.
        if shard[slot].copying().is_some() {
            return;
        }
        let lease = self.quarantine_end(self.in_use_until(&shard[slot]));
        shard.change_replicas(slot, |replicas| {
            let at = replicas.iter().position(|held| held.id == replica);
            if let Some(at) = at.filter(|_| replicas.len() > 1) {
                replicas.remove(at).quarantine(lease, now);
                hot.dropped.fetch_add(1, Relaxed);
            }
        });
    }

    /// Drops additional replicas of hot objects, the oldest first and `bytes` at most, before any
    /// object is evicted. Returns their bytes.
    pub(crate) fn drop_hot_replicas(&self, bytes: u64, now: Moment) -> u64 {
        let Some(hot) = &self.hot else { return 0 };
        let mut going = Vec::new();
        let mut freed = 0;
        {
            let mut table = hot.table.lock();
            let made = table.extras.iter().filter_map(|(id, e)| Some((e.until, *id, e.replica?)));
            let mut made: Vec<_> = made.collect();
            made.sort_by_key(|(until, ..)| *until);
            for (_, id, (replica, len)) in made {
                if freed >= bytes {
                    break;
                }
                freed = len.saturating_add(freed);
                if let Some(ExtraReplica { key, .. }) = table.extras.remove(&id) {
                    table.pauses.insert(key.clone(), now.after(PAUSE_AFTER_DROP));
                    going.push((key, replica));
                }
            }
        }
        for (key, replica) in going {
            self.drop_replica(hot, &key, replica, now);
        }
        freed
    }
}
