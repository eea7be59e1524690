//! Probes: whether objects can be read, without an effect on them.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::{Error, Result};

use mooncake_protocol::wire::ProbePolicy;

use super::chains::KeyInCall;
use super::lookup::is_readable;
use super::master::Master;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Returns whether an object can be read now. Grants no lease, counts nothing, and does not
    /// change the order of eviction.
    pub fn probe(&self, key: &[u8]) -> bool {
        let now = self.space().clock.now();
        let hash = self.space().directory.hash(key);
        let shard = self.space().directory.lock(hash);
        shard.find(hash, key).is_some_and(|slot| is_readable(&shard, slot, now))
    }

    /// Probes an object of a tenant like [`Master::probe`].
    pub(super) fn probe_of(&self, tenant: &str, key: &[u8]) -> bool {
        self.scoped_if_known(tenant, key).is_ok_and(|key| self.probe(&key))
    }

    /// Probes objects of a tenant, and grants leases as the policy says.
    pub(super) fn probe_each(&self, tenant: &str, keys: &[&[u8]], policy: ProbePolicy) -> Vec<Result<bool>> {
        let refuse = |error: Error| keys.iter().map(|_| Err(error.clone())).collect();
        let group = match policy.mode {
            0 => return keys.iter().map(|key| Ok(self.probe_of(tenant, key))).collect(),
            ProbePolicy::LAST_HIT_ONLY => policy.group_of(keys.len()),
            mode => Err(Error::invalid(format!("cannot probe: the policy is unknown. mode={mode}"))),
        };
        let group = match group {
            Ok(group) => group,
            Err(error) => return refuse(error),
        };
        let mut found: Vec<bool> = keys.iter().map(|key| self.probe_of(tenant, key)).collect();
        for (keys, found) in keys.chunks(group).zip(found.chunks_mut(group)).rev() {
            // An object that was removed since then is not readable, and its group is not the last.
            let lease = |(key, found): (&&[u8], &mut bool)| {
                *found = self.exists_of(tenant, key, KeyInCall::default());
                *found
            };
            if found.iter().all(|found| *found) && keys.iter().zip(found).all(lease) {
                break;
            }
        }
        found.into_iter().map(Ok).collect()
    }
}
