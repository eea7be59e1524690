//! Objects of a master that was started with another `--enable_multi_tenants` than this one.
//!
//! An object of the tenant `default` has a key with and without tenants; one of another tenant has
//! none without them. The owner converts the keys, because it knows the master that reported them.
//! An owner of an earlier version does not, and this master converts the keys that have no tenant
//! for certain.

use std::borrow::Cow;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::ClientId;
use mooncake_protocol::api::DEFAULT_TENANT;
use mooncake_protocol::key_form::KeyForm;
use mooncake_protocol::wire::{HeldObjects, MasterKeys, StoredReplica};

use super::master::Master;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Returns the form of the keys of this master, and logs how many objects of earlier masters a
    /// client converts to it or drops.
    pub fn exchange_key_form(&self, client: ClientId, held: Option<HeldObjects>) -> MasterKeys {
        let keys = MasterKeys { epoch: self.space().epoch, has_tenants: self.space().tenants.are_on() };
        if let Some(held) = held.filter(|held| held.has_tenants != keys.has_tenants) {
            let is_registered = self.space().tenants.prefix(DEFAULT_TENANT).is_some();
            let HeldObjects { of_default, of_others, .. } = held;
            let (converted, dropped) =
                if is_registered { (of_default, of_others) } else { (0, of_default + of_others) };
            let flag =
                if keys.has_tenants { "--enable_multi_tenants=true" } else { "--enable_multi_tenants=false" };
            tracing::warn!(%client, flag, converted, dropped, "objects of a master with another setting");
        }
        keys
    }

    /// Returns the form of the keys of this master.
    pub(super) fn key_form(&self) -> KeyForm {
        KeyForm::of_master(self.space().tenants.are_on())
    }

    /// Returns an announced replica with a key of the form of this master.
    pub(super) fn in_own_form<'a>(&self, replica: &'a StoredReplica) -> Cow<'a, StoredReplica> {
        if self.key_form() == KeyForm::Plain || replica.key.contains(&0) {
            return Cow::Borrowed(replica);
        }
        let mut converted = replica.clone();
        KeyForm::Plain.convert(KeyForm::WithTenant, &mut converted.key, &mut converted.group);
        Cow::Owned(converted)
    }
}
