//! Tenants: registration, quotas, and calls on the objects of one tenant.

use std::borrow::Cow;
use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::{ClientId, ObjectKey};
use mooncake_core::{ErrorCode, Result};

use super::master::Master;
use crate::model::announcements::KeyFilter;
use crate::model::pattern::compile;
use crate::model::tenants::{TenantInfo, TenantQuota, unknown};

/// Prefix of the directory keys of a tenant; `None` with tenants off.
pub(super) struct Scope(Option<Vec<u8>>);

impl Scope {
    /// Returns the directory key of a key, written to `scratch` unless it is the key itself.
    ///
    /// # Errors
    /// `INVALID_KEY` with tenants on.
    #[inline]
    pub(super) fn key_in<'a>(&self, key: &'a [u8], scratch: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        let Some(prefix) = &self.0 else { return Ok(key) };
        ObjectKey::check(key)?;
        scratch.clear();
        scratch.extend_from_slice(prefix);
        scratch.extend_from_slice(key);
        Ok(scratch)
    }
}

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Returns the scope of the keys of a tenant.
    ///
    /// # Errors
    /// `TENANT_NOT_REGISTERED`.
    pub(super) fn scope(&self, tenant: &str) -> Result<Scope> {
        let tenants = &self.space().tenants;
        let prefix = || tenants.prefix(tenant).ok_or_else(|| unknown(tenant));
        Ok(Scope(tenants.are_on().then(prefix).transpose()?))
    }

    /// Returns the directory key of a key of a tenant. Without tenants it is the key itself.
    ///
    /// # Errors
    /// `TENANT_NOT_REGISTERED`.
    pub fn scoped<'a>(&self, tenant: &str, key: &'a [u8]) -> Result<Cow<'a, [u8]>> {
        if !self.space().tenants.are_on() {
            return Ok(Cow::Borrowed(key));
        }
        ObjectKey::check(key)?;
        let mut scoped = self.space().tenants.prefix(tenant).ok_or_else(|| unknown(tenant))?;
        scoped.extend_from_slice(key);
        Ok(Cow::Owned(scoped))
    }

    /// Returns the directory key like [`Master::scoped`], to read or drop it: a tenant that is not
    /// registered has no objects.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`.
    pub(crate) fn scoped_if_known<'a>(&self, tenant: &str, key: &'a [u8]) -> Result<Cow<'a, [u8]>> {
        self.scoped(tenant, key).map_err(|_| ErrorCode::ObjectNotFound.into())
    }

    /// Returns the directory key like [`Master::scoped`], to remove it: if the tenant is registered
    /// later, an object that an owner announces then does not count.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND` if no tenant or no key can have this name.
    pub(super) fn scoped_to_remove<'a>(&self, tenant: &str, key: &'a [u8]) -> Result<Cow<'a, [u8]>> {
        if !self.space().tenants.are_on() {
            return Ok(Cow::Borrowed(key));
        }
        ObjectKey::check(key).map_err(|_| ErrorCode::ObjectNotFound)?;
        let prefix = self.space().tenants.future_prefix(tenant);
        let mut scoped = prefix.ok_or(ErrorCode::ObjectNotFound)?;
        scoped.extend_from_slice(key);
        Ok(Cow::Owned(scoped))
    }

    /// Removes an object of a tenant like [`Master::remove`]. A tenant that is not registered has
    /// none.
    ///
    /// # Errors
    /// Those of [`Master::remove`].
    pub fn remove_of(&self, tenant: &str, key: &[u8], force: bool) -> Result<()> {
        self.remove(&self.scoped_to_remove(tenant, key)?, force)
    }

    /// Returns the group of a tenant as a [`Put`](crate::Put) takes it.
    pub(crate) fn scoped_group<'a>(&self, tenant: &str, group: &'a str) -> Cow<'a, str> {
        if !self.space().tenants.are_on() || group.is_empty() {
            return Cow::Borrowed(group);
        }
        Cow::Owned(format!("{tenant}\0{group}"))
    }

    /// Returns the state of every tenant, by name; empty with tenants off.
    pub fn tenants(&self) -> Vec<TenantInfo> {
        self.space().tenants.infos()
    }

    /// Returns the state of a tenant.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` with tenants off; `OBJECT_NOT_FOUND` (as in Mooncake C++) if
    /// it is not registered.
    pub fn tenant(&self, name: &str) -> Result<TenantInfo> {
        self.tenants_on()?;
        self.space().tenants.info(name).ok_or_else(|| ErrorCode::ObjectNotFound.into())
    }

    /// Registers a tenant, or changes its quota. A tenant that uses more keeps its objects until
    /// the memory is needed.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` with tenants off; `INVALID_PARAMS`.
    pub fn set_tenant(&self, tenant: &TenantQuota) -> Result<TenantInfo> {
        self.tenants_on()?;
        tenant.check()?;
        self.space().tenants.set(tenant);
        self.tenant(&tenant.name)
    }

    /// Removes a tenant without objects.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` with tenants off; `OBJECT_NOT_FOUND` (as in Mooncake C++) if
    /// it is not registered; `TENANT_NOT_EMPTY`.
    pub fn remove_tenant(&self, name: &str) -> Result<()> {
        self.tenants_on()?;
        let prefix = self.space().tenants.prefix(name);
        self.space().tenants.remove(name)?;
        if let Some(prefix) = prefix {
            // If it is registered again, objects that an owner announces later do not count.
            let filter = Arc::new(KeyFilter::new(&prefix, None));
            self.space().announcements.begin_removal(&filter);
            self.space().forget_absent(|key| filter.matches(key));
            self.space().announcements.end_removal(&filter);
        }
        Ok(())
    }

    fn tenants_on(&self) -> Result<()> {
        if self.space().tenants.are_on() { Ok(()) } else { Err(ErrorCode::UnavailableInCurrentMode.into()) }
    }

    /// Removes objects of one tenant like [`Master::remove_matching`]. The pattern matches the keys
    /// of the tenant without prefix. A tenant that is not registered has no objects; if it is
    /// registered later, those that an owner announces then do not count.
    ///
    /// # Errors
    /// Those of [`Master::remove_matching`].
    pub fn remove_matching_of(&self, tenant: &str, pattern: &str, force: bool) -> Result<u64> {
        let pattern = compile(pattern)?;
        let Some(prefix) = self.space().tenants.future_prefix(tenant) else { return Ok(0) };
        Ok(self.remove_where(force, KeyFilter::new(&prefix, Some(pattern))))
    }

    /// Removes the objects of one tenant like [`Master::remove_all`]. A tenant that is not
    /// registered has none; if it is registered later, those that an owner announces then do not
    /// count.
    pub fn remove_all_of(&self, tenant: &str, force: bool) -> u64 {
        let Some(prefix) = self.space().tenants.future_prefix(tenant) else { return 0 };
        if !self.space().tenants.are_on() {
            return self.remove_all(force);
        }
        self.remove_where(force, KeyFilter::new(&prefix, None))
    }

    /// Removes replicas of objects of one tenant like [`Master::clear_replicas`].
    pub fn clear_replicas_of(
        &self,
        tenant: &str,
        keys: &[&[u8]],
        client: ClientId,
        segment: &str,
    ) -> Vec<ObjectKey> {
        if !self.space().tenants.are_on() {
            return self.clear_replicas(keys, client, segment);
        }
        let scoped = keys.iter().filter_map(|key| self.scoped_to_remove(tenant, key).ok());
        let scoped: Vec<_> = scoped.collect();
        let scoped: Vec<&[u8]> = scoped.iter().map(AsRef::as_ref).collect();
        let cleared = self.clear_replicas(&scoped, client, segment);
        cleared.iter().filter_map(|key| self.unscoped(key)).collect()
    }

    /// Removes replicas like [`Master::clear_replicas`], of all tenants: the call of Mooncake C++
    /// 0.3.13 does not name the tenant.
    pub fn clear_replicas_anywhere(&self, keys: &[&[u8]], client: ClientId, segment: &str) -> Vec<ObjectKey> {
        if !self.space().tenants.are_on() {
            return self.clear_replicas(keys, client, segment);
        }
        let mut cleared = Vec::new();
        for tenant in self.tenants() {
            cleared.extend(self.clear_replicas_of(&tenant.name, keys, client, segment));
        }
        cleared
    }

    fn unscoped(&self, key: &ObjectKey) -> Option<ObjectKey> {
        self.space().tenants.unscoped(key).map(|(_, key)| key)
    }
}
