//! Misses: the reason of each, counted over the cluster and by tenant.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::SlotId;

use super::chains::ReadCall;
use super::lookup::is_readable;
use super::master::Master;
use crate::directory::Shard;
use crate::model::misses::MissCause;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Returns why an object cannot be read; `None` if it can be. Nothing is counted, and no lease
    /// is granted.
    pub fn why_missing(&self, key: &[u8]) -> Option<MissCause> {
        let hash = self.space().directory.hash(key);
        let shard = self.space().directory.lock(hash);
        let slot = shard.find(hash, key);
        if slot.is_some_and(|slot| is_readable(&shard[slot])) { None } else { Some(why(&shard, slot, hash)) }
    }

    /// Counts a miss of a key. `slot` is that of its object, if it has one.
    pub(super) fn count_miss(&self, shard: &mut Shard<A, E>, key: &[u8], hash: u64, slot: Option<SlotId>) {
        let why = why(shard, slot, hash);
        self.count_miss_as(shard, key, why);
    }

    /// Counts a miss of a key with a cause.
    pub(super) fn count_miss_as(&self, shard: &mut Shard<A, E>, key: &[u8], why: MissCause) {
        shard.misses.add(why, 1);
        self.space().tenants.count_miss(key, why);
    }

    /// Counts the keys that a call did not look up, because it ended at the first miss.
    pub(super) fn count_rest(&self, call: &ReadCall, tenant: &str, keys: &[&[u8]]) {
        for (at, key) in keys.iter().enumerate().skip(call.found() + 1) {
            let Ok(key) = self.scoped(tenant, key) else {
                self.space().counters.missed_without_tenant();
                continue;
            };
            let hash = self.hash_of(&key, call.key(at));
            let mut shard = self.space().directory.lock(hash);
            let slot = shard.find(hash, &key);
            if slot.is_some_and(|slot| is_readable(&shard[slot])) {
                self.count_miss_as(&mut shard, &key, MissCause::BehindGap);
            } else {
                self.count_miss(&mut shard, &key, hash, slot);
            }
        }
    }
}

/// Returns why an object in a shard cannot be read.
fn why<A: SegmentAllocator, E: MergeableOrder>(
    shard: &Shard<A, E>,
    slot: Option<SlotId>,
    hash: u64,
) -> MissCause {
    if slot.is_some() { MissCause::Unreadable } else { shard.why_absent(hash) }
}
