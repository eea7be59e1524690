//! Misses: the reason of each, counted over the cluster and by tenant.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::SlotId;

use super::chains::{KeyInCall, ReadCall};
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
        why(&shard, shard.find(hash, key), hash, self.space().clock.now())
    }

    /// Counts a miss of a key. `slot` is that of its object, if it has one.
    pub(super) fn count_miss(
        &self,
        shard: &mut Shard<A, E>,
        key: &[u8],
        hash: u64,
        slot: Option<SlotId>,
        now: Moment,
        call: KeyInCall<'_>,
    ) {
        let why = why(shard, slot, hash, now).unwrap_or(MissCause::BehindGap);
        shard.misses.add(why, 1);
        match call.misses {
            Some(misses) => misses.add(why),
            None => self.space().tenants.count_miss(key, why),
        }
    }

    /// Ends a call that looked up each of its keys.
    pub(super) fn end_read(&self, call: &ReadCall, tenant: &str, keys: &[&[u8]]) {
        self.link_missing(call, tenant, keys);
        self.space().tenants.count_misses(tenant, &call.misses.take());
    }

    /// Ends a call that looked up its keys up to the first miss.
    pub(super) fn end_prefix(&self, call: &ReadCall, tenant: &str, keys: &[&[u8]]) {
        self.count_rest(call, tenant, keys);
        self.end_read(call, tenant, keys);
    }

    /// Counts the keys that a call did not look up, because it ended at the first miss.
    ///
    /// There may be hundreds, so each shard is locked once. Look-ups under one lock also wait for
    /// memory at the same time, which those under different locks do not.
    fn count_rest(&self, call: &ReadCall, tenant: &str, keys: &[&[u8]]) {
        let first = call.found() + 1;
        let Some(rest) = keys.get(first..).filter(|rest| !rest.is_empty()) else { return };
        let Ok(scope) = self.scope(tenant) else {
            return self.space().counters.missed_without_tenant(rest.len());
        };
        let directory = &self.space().directory;
        let (mut scratch, mut hashes) = (Vec::new(), Vec::with_capacity(rest.len()));
        let now = call.begun();
        let mut known = Vec::with_capacity(rest.len());
        for (at, key) in rest.iter().enumerate() {
            let Ok(scoped) = scope.key_in(key, &mut scratch) else {
                self.space().counters.missed_without_tenant(1);
                continue;
            };
            hashes.push(self.hash_of(scoped, call.key(first + at)));
            known.push(*key);
        }
        directory.visit_hashes(&hashes, |shard, at| {
            if let Ok(key) = scope.key_in(known[at], &mut scratch) {
                let slot = shard.find(hashes[at], key);
                self.count_miss(shard, key, hashes[at], slot, now, call.key(first));
            }
        });
    }
}

/// Returns why an object in a shard cannot be read; `None` if it can be.
fn why<A: SegmentAllocator, E: MergeableOrder>(
    shard: &Shard<A, E>,
    slot: Option<SlotId>,
    hash: u64,
    now: Moment,
) -> Option<MissCause> {
    match slot {
        None => Some(shard.why_absent(hash)),
        Some(slot) if is_readable(shard, slot, now) => None,
        Some(slot) => Some(shard.end_of_lifetime(slot, now).unwrap_or(MissCause::Unreadable)),
    }
}
