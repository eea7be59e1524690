//! [`CustomPolicy`]: a policy of the application behind [`BuiltinPolicy`](super::BuiltinPolicy).

use std::fmt;
use std::sync::Arc;

use super::{EvictionPolicy, MergeableOrder};
use crate::ids::SlotId;

/// Object-safe form of a policy. The built-in policies are called without it.
trait DynPolicy: Send {
    fn insert(&mut self, slot: SlotId, bytes: u64);
    fn insert_hashed(&mut self, slot: SlotId, bytes: u64, key_hash: u64);
    fn touch(&mut self, slot: SlotId);
    fn remove(&mut self, slot: SlotId);
    fn evict(&mut self, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId>;
    fn set_time(&mut self, now: u64);
    fn victim_since(&self) -> Option<u64>;
    fn heeds_use(&self) -> bool;
    fn len(&self) -> usize;
}

impl<P: MergeableOrder> DynPolicy for P {
    fn insert(&mut self, slot: SlotId, bytes: u64) {
        EvictionPolicy::insert(self, slot, bytes);
    }

    fn insert_hashed(&mut self, slot: SlotId, bytes: u64, key_hash: u64) {
        MergeableOrder::insert_hashed(self, slot, bytes, key_hash);
    }

    fn touch(&mut self, slot: SlotId) {
        EvictionPolicy::touch(self, slot);
    }

    fn remove(&mut self, slot: SlotId) {
        EvictionPolicy::remove(self, slot);
    }

    fn evict(&mut self, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        EvictionPolicy::evict(self, allowed)
    }

    fn set_time(&mut self, now: u64) {
        MergeableOrder::set_time(self, now);
    }

    fn victim_since(&self) -> Option<u64> {
        MergeableOrder::victim_since(self)
    }

    fn heeds_use(&self) -> bool {
        MergeableOrder::heeds_use(self)
    }

    fn len(&self) -> usize {
        EvictionPolicy::len(self)
    }
}

type Open = dyn Fn(usize) -> Box<dyn DynPolicy> + Send + Sync;

/// Policy of the application with its options, for
/// [`BuiltinPolicyConfig`](super::BuiltinPolicyConfig).
#[derive(Clone)]
pub struct CustomPolicy {
    name: &'static str,
    open: Arc<Open>,
}

impl CustomPolicy {
    /// Selects the policy `P` with these options.
    pub fn new<P: MergeableOrder>(config: P::Config) -> Self {
        let open = move |slots| Box::new(P::new(slots, &config)) as Box<dyn DynPolicy>;
        Self { name: std::any::type_name::<P>(), open: Arc::new(open) }
    }

    pub(super) fn open(&self, slots: usize) -> CustomOrder {
        CustomOrder((self.open)(slots))
    }
}

impl fmt::Debug for CustomPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CustomPolicy").field(&self.name).finish()
    }
}

impl PartialEq for CustomPolicy {
    /// Returns whether both are clones of one value.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.open, &other.open)
    }
}

impl Eq for CustomPolicy {}

/// Policy of the application, as a [`CustomPolicy`] opened it.
pub struct CustomOrder(Box<dyn DynPolicy>);

impl CustomOrder {
    pub(super) fn insert(&mut self, slot: SlotId, bytes: u64) {
        self.0.insert(slot, bytes)
    }

    pub(super) fn insert_hashed(&mut self, slot: SlotId, bytes: u64, key_hash: u64) {
        self.0.insert_hashed(slot, bytes, key_hash)
    }

    pub(super) fn touch(&mut self, slot: SlotId) {
        self.0.touch(slot)
    }

    pub(super) fn remove(&mut self, slot: SlotId) {
        self.0.remove(slot)
    }

    pub(super) fn evict(&mut self, allowed: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        self.0.evict(allowed)
    }

    pub(super) fn set_time(&mut self, now: u64) {
        self.0.set_time(now)
    }

    pub(super) fn victim_since(&self) -> Option<u64> {
        self.0.victim_since()
    }

    pub(super) fn heeds_use(&self) -> bool {
        self.0.heeds_use()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

impl fmt::Debug for CustomOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CustomOrder").field("len", &self.len()).finish_non_exhaustive()
    }
}
