//! Bugs that a test plants in a master, to show that another test finds them.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::EvictionPolicy;

use super::master::Master;
use crate::space::injected_bug::Bug;

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// From now on this master makes the mistake.
    pub fn plant(&self, bug: Bug) {
        self.space().injected_bug.set(bug);
    }

    /// Compares what each tenant is charged with what its objects take, and says where they differ. Nobody else may be calling.
    pub fn audit_charges(&self) -> Vec<String> {
        let mut taken = std::collections::BTreeMap::new();
        self.space().directory.visit(|shard, slot| {
            let (tenant, _) = self.space().tenants.split(shard[slot].key.as_bytes());
            *taken.entry(tenant.to_owned()).or_insert(0) += shard[slot].charged_bytes();
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
