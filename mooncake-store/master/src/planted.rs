//! Bugs to plant, so that the tests that should find them can show that they do.

use std::sync::atomic::{AtomicU8, Ordering::SeqCst};

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::EvictionPolicy;

use super::Master;

/// A mistake the master makes when told to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Bug {
    /// Leases are promised and not kept.
    SkipLease = 1,
    /// Space of what was removed, replaced or abandoned is handed out at once.
    ReuseEarly = 2,
}

#[derive(Default)]
pub(super) struct Planted(AtomicU8);

impl Planted {
    pub(super) fn is(&self, bug: Bug) -> bool {
        self.0.load(SeqCst) == bug as u8
    }
}

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// From now on this master makes the mistake.
    pub fn plant(&self, bug: Bug) {
        self.planted.0.store(bug as u8, SeqCst);
    }
}

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// Compares what each tenant is charged with what its objects take, and says where they differ. Nobody else may be calling.
    pub fn audit_charges(&self) -> Vec<String> {
        let mut taken = std::collections::BTreeMap::new();
        self.directory.visit(|shard, slot| {
            let (tenant, _) = self.tenants.split(shard[slot].key.as_bytes());
            *taken.entry(tenant.to_owned()).or_insert(0) += shard[slot].charged();
        });
        let tenants = self.tenants().into_iter();
        let differs = tenants.filter_map(|tenant| {
            let taken = taken.get(&tenant.name).copied().unwrap_or(0);
            let text = || format!("{}: charged {}, takes {taken}", tenant.name, tenant.charged);
            (taken != tenant.charged).then(text)
        });
        differs.collect()
    }
}
