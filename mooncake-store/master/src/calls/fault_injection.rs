//! Bugs that a test plants in a master, to show that another test finds them.

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;

use super::master::Master;
use crate::space::injected_bug::Bug;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Plants a bug in this master.
    pub fn plant(&self, bug: Bug) {
        self.space().injected_bug.set(bug);
    }

    /// Compares the charge of each tenant with the bytes of its objects. Returns the differences as
    /// text. No other call may be in progress.
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
