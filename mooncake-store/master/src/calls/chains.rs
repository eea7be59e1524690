//! Chains of keys: how the keys of one call depend on each other, for the eviction policy.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::{Batch, ChainEnd, MergeableOrder};
use mooncake_core::ids::ClientId;

use super::master::Master;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Returns the chain of keys that a call reads, if the policy has a use for it.
    pub(super) fn read_batch(&self, tenant: &str, keys: &[&[u8]]) -> Option<Batch> {
        let directory = &self.space().directory;
        directory.links.as_ref()?;
        let (tenant, hashes) = self.hashes(tenant, keys)?;
        Some(directory.batch(tenant, hashes, ChainEnd::default(), false))
    }

    /// Returns the chain of keys that a call of `client` stores, if the policy has a use for it.
    pub(super) fn put_batch(&self, client: ClientId, tenant: &str, keys: &[&[u8]]) -> Option<Batch> {
        let directory = &self.space().directory;
        let links = directory.links.as_ref()?;
        let (tenant, hashes) = self.hashes(tenant, keys)?;
        let now = self.space().clock.now();
        let before = links.before(client, *hashes.first()?, now);
        let batch = directory.batch(tenant, hashes, before, true);
        links.record_stored(client, batch.end(), now);
        Some(batch)
    }

    /// Records that a call found that many of its keys, from the front, if the policy has a use for
    /// it.
    pub(super) fn record_found(&self, tenant: &str, keys: &[&[u8]], found: impl FnOnce() -> usize) {
        let directory = &self.space().directory;
        let Some(links) = &directory.links else { return };
        let found = found();
        if let (Some(missing), Some(last)) = (keys.get(found), found.checked_sub(1).map(|at| keys[at]))
            && let (Ok(missing), Ok(last)) = (self.scoped(tenant, missing), self.scoped(tenant, last))
        {
            let [missing, last] = [missing, last].map(|key| directory.hash(&key));
            links.record_found(found, last, missing, self.space().clock.now());
        }
    }

    /// Returns the number of a tenant, and the hashes of keys in the directory.
    fn hashes(&self, tenant: &str, keys: &[&[u8]]) -> Option<(u32, Vec<u64>)> {
        let (directory, mut number) = (&self.space().directory, 0);
        let mut hashes = Vec::with_capacity(keys.len());
        for key in keys {
            let key = self.scoped(tenant, key).ok()?;
            if hashes.is_empty() {
                number = self.space().tenants.number(&key);
            }
            hashes.push(directory.hash(&key));
        }
        Some((number, hashes))
    }
}
