//! Eviction within the quota of a tenant.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::SlotId;
use mooncake_core::{Error, ErrorCode};

use super::state::Space;
use super::victim::{MAX_PASSED_OVER, Victim};
use crate::directory::{Object, Pass, Shard};
use crate::sync::MutexGuard;

/// Maximum number of objects of groups whose lease is extended between the choice and the eviction.
const MAX_EXTENDED: usize = 32;

impl<A: SegmentAllocator, E: MergeableOrder> Space<A, E> {
    /// Evicts the least recently used objects of a tenant until `bytes` more are within its quota
    /// once `freed` bytes are gone. Returns whether they are.
    pub(crate) fn evict_for_quota(&self, number: u32, bytes: u64, freed: u64, now: Moment) -> bool {
        let fits = || self.tenants.reserve(number, bytes, freed).is_ok();
        self.set_offload_budget(bytes);
        for pass in self.passes_for_put() {
            self.repeat_eviction(|| {
                if fits() {
                    return None;
                }
                let victim = self.evict_of(number, pass, now)?;
                self.tenants.count_evicted(number, victim.bytes);
                Some(victim.objects)
            });
        }
        fits()
    }

    /// Evicts the least recently used object of a tenant.
    fn evict_of(&self, number: u32, pass: Pass, now: Moment) -> Option<Victim<A>> {
        if let Some(victim) = self.evict_rest(Some(number), now) {
            return Some(victim);
        }
        let (mut passed_over, mut extended) = (0, 0);
        while extended < MAX_EXTENDED {
            let (mut shard, slot) = self.oldest_of(number, pass, now)?;
            if passed_over < MAX_PASSED_OVER && shard.begin_wait(slot) {
                passed_over += 1;
                continue;
            }
            if let Some(mut victim) = self.evict_chosen(shard, slot, pass, now) {
                self.release_parents(&mut victim);
                return Some(victim);
            }
            extended += 1;
        }
        None
    }

    /// Returns the object of a tenant that goes first, and its shard, locked.
    fn oldest_of(
        &self,
        number: u32,
        pass: Pass,
        now: Moment,
    ) -> Option<(MutexGuard<'_, Shard<A, E>>, SlotId)> {
        let (mut oldest, mut unwritten): (Option<(u64, usize)>, _) = (None, Vec::new());
        for index in 0..self.directory.len() {
            let mut shard = self.directory.lock_to_evict(index);
            let mut skipped = Vec::new();
            let goes = |object: &Object<A>| self.is_evictable_noting(object, pass, now, &mut skipped);
            let found = shard.choose_of(number, pass, now, goes);
            unwritten.extend(skipped);
            if let Some((_, age)) = found
                && oldest.is_none_or(|(least, _)| age < least)
            {
                oldest = Some((age, index));
            }
        }
        self.request_offloads(unwritten);
        let (_, index) = oldest?;
        let mut shard = self.directory.lock_to_evict(index);
        let (slot, _) = shard.choose_of(number, pass, now, |object| self.is_evictable(object, pass, now))?;
        Some((shard, slot))
    }

    /// Counts a refused put of a tenant, and returns the error for it.
    pub(crate) fn quota_exceeded(&self, number: u32, key: &[u8], len: u64) -> Error {
        self.tenants.count_rejected(number);
        let (tenant, _) = self.tenants.split(key);
        let text = format!(
            "cannot put object: quota exceeded, and no object of the tenant can be evicted. \
             tenant={tenant} len={len}"
        );
        Error::new(ErrorCode::TenantQuotaExceeded, text)
    }
}
