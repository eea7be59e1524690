//! Tenants: each has keys of its own, and a share of the memory that it cannot exceed.
//!
//! Where they are on, an object's key in the directory is the tenant's name, a NUL, and the key. Where they are off, nothing is
//! added, looked up or counted.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::ids::{ClientId, ObjectKey};
use mooncake_core::replica::Replica;
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::RwLock;

use super::Master;
use super::directory::Object;
use super::evict::Victim;
use super::pattern::compile;
use mooncake_protocol::api::DEFAULT_TENANT;

/// Largest quota, in bytes.
const MAX_QUOTA: u64 = i64::MAX as u64;

/// A tenant and the bytes it may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantQuota {
    /// Its name: not empty, no control characters, not beginning with `_`.
    pub name: String,
    /// Bytes, 1 to 2^63 - 1.
    pub bytes: u64,
}

impl TenantQuota {
    /// Refuses what is no tenant or no quota.
    ///
    /// # Errors
    /// `INVALID_PARAMS`, naming the tenant.
    pub fn check(&self) -> Result<()> {
        if !is_tenant(&self.name) {
            return Err(Error::invalid(format!("{:?} is no name of a tenant", self.name)));
        }
        if !(1..=MAX_QUOTA).contains(&self.bytes) {
            return Err(Error::invalid(format!(
                "tenant {}: a quota is 1 to 2^63 - 1 bytes, not {}",
                self.name, self.bytes
            )));
        }
        Ok(())
    }
}

/// Whether this can be the name of a tenant.
pub fn is_tenant(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('_') && !name.chars().any(char::is_control)
}

/// Where a tenant stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantInfo {
    /// Its name.
    pub name: String,
    /// Bytes it is to have.
    pub requested: u64,
    /// Bytes it may have: less, where all together ask for more memory than there is.
    pub effective: u64,
    /// Bytes of its objects, every replica counted, those being written included.
    pub charged: u64,
    /// Bytes evicted to make room in its quota.
    pub evicted: u64,
    /// Puts refused for its quota.
    pub rejected: u64,
}

/// All tenants, and what they are charged.
pub(super) struct Tenants {
    on: bool,
    table: RwLock<Table>,
}

#[derive(Default)]
struct Table {
    capacity: u64,
    /// Numbers are places in `accounts`, counted from 1, and never given to another name.
    by_name: BTreeMap<String, u32>,
    accounts: Vec<Account>,
}

struct Account {
    /// `None`: not registered any more.
    requested: Option<u64>,
    effective: u64,
    charged: AtomicU64,
    evicted: AtomicU64,
    rejected: AtomicU64,
}

/// What a tenant lacks.
pub(super) enum Refused {
    /// It is not registered.
    Unknown,
    /// So many bytes are too much, whatever goes.
    TooLarge,
    /// Something has to go first.
    Full,
}

/// Bytes charged ahead of what they are for. Dropped, they are given back.
pub(super) struct Reservation<'a> {
    tenants: &'a Tenants,
    number: u32,
    bytes: u64,
}

impl Reservation<'_> {
    /// The bytes, which are the caller's to account for from now on.
    pub(super) fn spend(mut self) -> u64 {
        std::mem::take(&mut self.bytes)
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.tenants.charge(self.number, self.bytes, 0);
        }
    }
}

impl Tenants {
    /// No tenants, or these.
    pub(super) fn new(policy: Option<&[TenantQuota]>) -> Self {
        let mut table = Table::default();
        for tenant in policy.unwrap_or_default() {
            table.set(tenant);
        }
        Self { on: policy.is_some(), table: RwLock::new(table) }
    }

    pub(super) fn are_on(&self) -> bool {
        self.on
    }

    /// Number of the tenant that a key of the directory belongs to; 0 for none.
    pub(super) fn number(&self, key: &[u8]) -> u32 {
        if !self.on {
            return 0;
        }
        let (tenant, _) = self.split(key);
        self.table.read().by_name.get(tenant).copied().unwrap_or(0)
    }

    /// A key of the directory as tenant and key.
    pub(super) fn split<'a>(&self, key: &'a [u8]) -> (&'a str, &'a [u8]) {
        let at = if self.on { key.iter().position(|byte| *byte == 0) } else { None };
        match at.map(|at| (std::str::from_utf8(&key[..at]), &key[at + 1..])) {
            Some((Ok(tenant), rest)) => (tenant, rest),
            _ => (DEFAULT_TENANT, key),
        }
    }

    /// As [`Tenants::split`]; none for what is no key of a tenant.
    pub(super) fn unscoped<'a>(&self, key: &'a ObjectKey) -> Option<(&'a str, ObjectKey)> {
        if !self.on {
            return Some((DEFAULT_TENANT, key.clone()));
        }
        let (tenant, key) = self.split(key.as_bytes());
        Some((tenant, ObjectKey::new(key).ok()?))
    }

    /// What keys of a tenant begin with in the directory; `None` if it is not registered.
    fn prefix(&self, tenant: &str) -> Option<Vec<u8>> {
        if !self.on {
            return Some(Vec::new());
        }
        let tenant = if tenant.is_empty() { DEFAULT_TENANT } else { tenant };
        let table = self.table.read();
        table.account(tenant)?;
        Some([tenant.as_bytes(), &[0]].concat())
    }

    /// Charges `bytes`, if they are within the quota once `freed` bytes are gone that they replace.
    pub(super) fn reserve(&self, number: u32, bytes: u64, freed: u64) -> Result<Reservation<'_>, Refused> {
        let none = Reservation { tenants: self, number, bytes: 0 };
        if !self.on {
            return Ok(none);
        }
        let table = self.table.read();
        let account = table.numbered(number).filter(|account| account.requested.is_some());
        let Some(account) = account else { return Err(Refused::Unknown) };
        // Without any memory, that is what is missing.
        let limit = if table.capacity == 0 { u64::MAX } else { account.effective };
        if bytes > limit {
            return Err(Refused::TooLarge);
        }
        let charge = |charged: u64| {
            let then = charged.saturating_sub(freed).saturating_add(bytes);
            (then <= limit).then_some(charged.saturating_add(bytes))
        };
        match account.charged.fetch_update(SeqCst, SeqCst, charge) {
            Ok(_) => Ok(Reservation { bytes, ..none }),
            Err(_) => Err(Refused::Full),
        }
    }

    /// Charges `bytes`, whatever the quota, so that the charge never falls below what is there while things are moved about.
    pub(super) fn hold(&self, number: u32, bytes: u64) -> Reservation<'_> {
        let bytes = if number == 0 { 0 } else { bytes };
        self.charge(number, 0, bytes);
        Reservation { tenants: self, number, bytes }
    }

    /// What is charged for something changes.
    pub(super) fn charge(&self, number: u32, before: u64, after: u64) {
        if number == 0 || before == after {
            return;
        }
        if let Some(account) = self.table.read().numbered(number) {
            // Two's complement: adds the difference, whichever way it goes.
            account.charged.fetch_add(after.wrapping_sub(before), SeqCst);
        }
    }

    fn note(&self, number: u32, see: impl FnOnce(&Account)) {
        if let Some(account) = self.table.read().numbered(number) {
            see(account);
        }
    }

    /// There is this much memory now.
    pub(super) fn set_capacity(&self, capacity: u64) {
        if self.on {
            let mut table = self.table.write();
            table.capacity = capacity;
            table.share_out();
        }
    }

    fn infos(&self) -> Vec<TenantInfo> {
        let table = self.table.read();
        table.by_name.keys().filter_map(|name| table.info(name)).collect()
    }
}

impl Table {
    fn numbered(&self, number: u32) -> Option<&Account> {
        self.accounts.get((number as usize).checked_sub(1)?)
    }

    /// The account of a registered tenant.
    fn account(&self, name: &str) -> Option<&Account> {
        self.numbered(*self.by_name.get(name)?).filter(|account| account.requested.is_some())
    }

    fn info(&self, name: &str) -> Option<TenantInfo> {
        let account = self.account(name)?;
        Some(TenantInfo {
            name: name.to_owned(),
            requested: account.requested?,
            effective: account.effective,
            charged: account.charged.load(SeqCst),
            evicted: account.evicted.load(SeqCst),
            rejected: account.rejected.load(SeqCst),
        })
    }

    fn set(&mut self, tenant: &TenantQuota) {
        let next = self.accounts.len() as u32 + 1;
        let number = *self.by_name.entry(tenant.name.clone()).or_insert(next);
        if number == next {
            let none = || AtomicU64::new(0);
            self.accounts.push(Account {
                requested: None,
                effective: 0,
                charged: none(),
                evicted: none(),
                rejected: none(),
            });
        }
        self.accounts[number as usize - 1].requested = Some(tenant.bytes);
        self.share_out();
    }

    /// Gives each what it asked for, or its part of what there is.
    fn share_out(&mut self) {
        let registered: Vec<_> = self
            .by_name
            .values()
            .filter_map(|number| {
                let at = *number as usize - 1;
                self.accounts[at].requested.map(|bytes| (at, bytes))
            })
            .collect();
        let requests: Vec<_> = registered.iter().map(|(_, bytes)| *bytes).collect();
        for ((at, _), share) in registered.iter().zip(shares(&requests, self.capacity)) {
            self.accounts[*at].effective = share;
        }
    }
}

/// What each gets of `capacity`: all it asked for if that is enough for all, else in proportion, the bytes left over one by one to
/// the largest remainders, the first ones first.
fn shares(requests: &[u64], capacity: u64) -> Vec<u64> {
    let sum: u128 = requests.iter().map(|bytes| u128::from(*bytes)).sum();
    if sum <= u128::from(capacity) {
        return requests.to_vec();
    }
    let parts = requests.iter().map(|bytes| {
        let exact = u128::from(*bytes) * u128::from(capacity);
        // Not more than what was asked for, so it fits.
        ((exact / sum) as u64, exact % sum)
    });
    let (mut shares, remainders): (Vec<u64>, Vec<u128>) = parts.unzip();
    let left = capacity - shares.iter().sum::<u64>();
    let mut order: Vec<_> = (0..shares.len()).collect();
    order.sort_by_key(|at| std::cmp::Reverse(remainders[*at]));
    for at in order.into_iter().take(usize::try_from(left).unwrap_or(usize::MAX)) {
        shares[at] += 1;
    }
    shares
}

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// A tenant's key as the other calls take it. Without tenants that is the key.
    ///
    /// # Errors
    /// `TENANT_NOT_REGISTERED`.
    pub fn scoped<'a>(&self, tenant: &str, key: &'a [u8]) -> Result<Cow<'a, [u8]>> {
        if !self.tenants.are_on() {
            return Ok(Cow::Borrowed(key));
        }
        ObjectKey::check(key)?;
        let mut scoped = self.tenants.prefix(tenant).ok_or_else(|| unknown(tenant))?;
        scoped.extend_from_slice(key);
        Ok(Cow::Owned(scoped))
    }

    /// As [`Master::scoped`], to be read or dropped: a tenant that is not registered has no objects.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`.
    pub(crate) fn scoped_if_known<'a>(&self, tenant: &str, key: &'a [u8]) -> Result<Cow<'a, [u8]>> {
        self.scoped(tenant, key).map_err(|_| ErrorCode::ObjectNotFound.into())
    }

    /// A tenant's group as a [`Put`](super::Put) takes it.
    pub(crate) fn scoped_group<'a>(&self, tenant: &str, group: &'a str) -> Cow<'a, str> {
        if !self.tenants.are_on() || group.is_empty() {
            return Cow::Borrowed(group);
        }
        Cow::Owned(format!("{tenant}\0{group}"))
    }

    /// Every tenant, by name; none where they are off.
    pub fn tenants(&self) -> Vec<TenantInfo> {
        self.tenants.infos()
    }

    /// Where a tenant stands.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` where tenants are off; `OBJECT_NOT_FOUND` (as the existing system has it) when it is not registered.
    pub fn tenant(&self, name: &str) -> Result<TenantInfo> {
        self.tenants_on()?;
        self.tenants.table.read().info(name).ok_or_else(|| ErrorCode::ObjectNotFound.into())
    }

    /// Registers a tenant, or changes its quota. One that has more already keeps it until room is needed.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` where tenants are off; `INVALID_PARAMS`.
    pub fn set_tenant(&self, tenant: &TenantQuota) -> Result<TenantInfo> {
        self.tenants_on()?;
        tenant.check()?;
        self.tenants.table.write().set(tenant);
        self.tenant(&tenant.name)
    }

    /// Forgets a tenant that has no objects.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` where tenants are off; `OBJECT_NOT_FOUND` (as the existing system has it) when it is not registered;
    /// `TENANT_NOT_EMPTY`.
    pub fn remove_tenant(&self, name: &str) -> Result<()> {
        self.tenants_on()?;
        let mut table = self.tenants.table.write();
        let account = table.account(name).ok_or(ErrorCode::ObjectNotFound)?;
        // No put is admitted meanwhile: that takes a look at the table, too.
        if account.charged.load(SeqCst) > 0 {
            return Err(ErrorCode::TenantNotEmpty.into());
        }
        if let Some(number) = table.by_name.get(name).copied() {
            let account = &mut table.accounts[number as usize - 1];
            (account.requested, account.effective) = (None, 0);
        }
        table.share_out();
        Ok(())
    }

    fn tenants_on(&self) -> Result<()> {
        if self.tenants.are_on() { Ok(()) } else { Err(ErrorCode::UnavailableInCurrentMode.into()) }
    }

    /// As [`Master::remove_matching`], of one tenant; the pattern sees its keys as it wrote them. One that is not registered has none.
    ///
    /// # Errors
    /// As for [`Master::remove_matching`].
    pub fn remove_matching_of(&self, tenant: &str, pattern: &str, force: bool) -> Result<u64> {
        let pattern = compile(pattern)?;
        let Some(prefix) = self.tenants.prefix(tenant) else { return Ok(0) };
        Ok(self
            .remove_where(force, |key| key.strip_prefix(&*prefix).is_some_and(|key| pattern.is_match(key))))
    }

    /// As [`Master::remove_all`], of one tenant. One that is not registered has nothing.
    pub fn remove_all_of(&self, tenant: &str, force: bool) -> u64 {
        let Some(prefix) = self.tenants.prefix(tenant) else { return 0 };
        if !self.tenants.are_on() {
            return self.remove_all(force);
        }
        self.remove_where(force, |key| key.starts_with(&prefix))
    }

    /// As [`Master::locate_matching`], of one tenant; pattern and answer have its keys as it wrote them. One that is not registered
    /// has none.
    ///
    /// # Errors
    /// As for [`Master::locate_matching`].
    pub fn locate_matching_of(&self, tenant: &str, pattern: &str) -> Result<Vec<(ObjectKey, Vec<Replica>)>> {
        let pattern = compile(pattern)?;
        let Some(prefix) = self.tenants.prefix(tenant) else { return Ok(Vec::new()) };
        let found =
            self.locate_where(|key| key.strip_prefix(&*prefix).is_some_and(|key| pattern.is_match(key)));
        Ok(found.into_iter().filter_map(|(key, replicas)| Some((self.unscoped(&key)?, replicas))).collect())
    }

    /// As [`Master::keys`], of one tenant.
    pub fn keys_of(&self, tenant: &str) -> Vec<ObjectKey> {
        let Some(prefix) = self.tenants.prefix(tenant) else { return Vec::new() };
        let own = |key: &ObjectKey| key.as_bytes().starts_with(&prefix).then(|| self.unscoped(key)).flatten();
        self.keys().iter().filter_map(own).collect()
    }

    /// As [`Master::clear_replicas`], of whatever tenant the client wrote them for: the call does not say.
    pub fn clear_replicas_anywhere(&self, keys: &[&[u8]], client: ClientId, segment: &str) -> Vec<ObjectKey> {
        if !self.tenants.are_on() {
            return self.clear_replicas(keys, client, segment);
        }
        let mut cleared = Vec::new();
        for tenant in self.tenants() {
            let scoped: Vec<_> = keys.iter().filter_map(|key| self.scoped(&tenant.name, key).ok()).collect();
            let scoped: Vec<&[u8]> = scoped.iter().map(AsRef::as_ref).collect();
            let these = self.clear_replicas(&scoped, client, segment);
            cleared.extend(these.iter().filter_map(|key| self.unscoped(key)));
        }
        cleared
    }

    fn unscoped(&self, key: &ObjectKey) -> Option<ObjectKey> {
        self.tenants.unscoped(key).map(|(_, key)| key)
    }

    /// Evicts what a tenant used least until `bytes` more are within its quota, once `freed` bytes are gone; whether it is worth
    /// asking again.
    pub(super) fn make_quota(&self, number: u32, bytes: u64, freed: u64, now: Moment) -> bool {
        let fits = || self.tenants.reserve(number, bytes, freed).is_ok();
        self.want_room(bytes);
        for pass in self.passes() {
            while !fits() {
                let Some(victim) = self.evict_of(number, pass, now) else { break };
                self.tenants.note(number, |account| {
                    account.evicted.fetch_add(victim.bytes, SeqCst);
                });
            }
        }
        fits()
    }

    /// Evicts the object that a tenant used least.
    fn evict_of(&self, number: u32, pass: super::evict::Pass, now: Moment) -> Option<Victim<A>> {
        let (mut oldest, mut unwritten): (Option<(u64, usize)>, _) = (None, Vec::new());
        for index in 0..self.directory.len() {
            let mut shard = self.directory.lock_at(index);
            let mut passed = Vec::new();
            let goes = |object: &Object<A>| self.goes(object, pass, now, &mut passed);
            let found = shard.choose_of(number, pass, now, goes);
            unwritten.extend(passed);
            if let Some((_, age)) = found
                && oldest.is_none_or(|(least, _)| age < least)
            {
                oldest = Some((age, index));
            }
        }
        self.ask_for(unwritten);
        let (_, index) = oldest?;
        let mut shard = self.directory.lock_at(index);
        let (slot, _) = shard.choose_of(number, pass, now, |object| self.evictable(object, pass, now))?;
        let group = shard[slot].group().cloned();
        let mut victim = Victim::none();
        self.evict_slot(&mut shard, slot, now, &mut victim);
        drop(shard);
        if let Some(group) = group {
            self.evict_rest(&group, pass, now, &mut victim);
        }
        Some(victim)
    }

    /// A put is refused for its tenant's sake.
    pub(super) fn over_quota(&self, number: u32, key: &[u8], len: u64) -> Error {
        self.tenants.note(number, |account| {
            account.rejected.fetch_add(1, SeqCst);
        });
        let (tenant, _) = self.tenants.split(key);
        let text = format!(
            "{len} bytes more are beyond the quota of tenant {tenant}, and nothing of it may be evicted"
        );
        Error::new(ErrorCode::TenantQuotaExceeded, text)
    }
}

pub(super) fn unknown(tenant: &str) -> Error {
    Error::new(ErrorCode::TenantNotRegistered, format!("tenant {tenant:?} is not registered"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn shares_as_the_existing_master_gives_them() {
        let mib = 1 << 20;
        assert_eq!(shares(&[4 * mib, 1024 * mib, 12345], 256 * mib), [1_044_484, 267_387_898, 3074]);
        assert_eq!(shares(&[1_000_000, 1024 * mib, 12345], 256 * mib), [249_765, 268_182_608, 3083]);
        assert_eq!(shares(&[5, 5, 5], 16), [5, 5, 5]);
        assert_eq!(shares(&[5, 5, 5], 10), [4, 3, 3]);
        assert_eq!(shares(&[5, 5], 0), [0, 0]);
        assert_eq!(shares(&[], 7), [0; 0]);
    }

    proptest! {
        #[test]
        fn shares_add_up(
            requests in proptest::collection::vec(1..=MAX_QUOTA, 1..20),
            capacity in any::<u64>(),
        ) {
            let shares = shares(&requests, capacity);
            let sum = |all: &[u64]| all.iter().map(|bytes| u128::from(*bytes)).sum::<u128>();
            prop_assert_eq!(sum(&shares), sum(&requests).min(u128::from(capacity)));
            prop_assert!(shares.iter().zip(&requests).all(|(share, request)| share <= request));
        }
    }
}
