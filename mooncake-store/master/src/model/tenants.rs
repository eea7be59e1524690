//! Tenants: each has keys of its own, and a share of the memory that it cannot exceed.
//!
//! With tenants on, the key of an object in the directory is the name of the tenant, a NUL and the
//! key. With tenants off, nothing is added, looked up or counted.

use std::collections::BTreeMap;

use mooncake_core::ids::ObjectKey;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::api::DEFAULT_TENANT;

use super::misses::{MissCause, MissCounts};
use crate::sync::RwLock;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

/// Largest quota, in bytes.
const MAX_QUOTA: u64 = i64::MAX as u64;

/// Quota of a tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantQuota {
    /// Name of the tenant: not empty, without control characters, not beginning with `_`.
    pub name: String,
    /// Quota in bytes, from 1 to 2^63 - 1.
    pub bytes: u64,
}

impl TenantQuota {
    /// Checks name and quota.
    ///
    /// # Errors
    /// `INVALID_PARAMS`, naming the tenant.
    pub fn check(&self) -> Result<()> {
        if !is_tenant(&self.name) {
            return Err(Error::invalid(format!("invalid tenant name {:?}", self.name)));
        }
        if !(1..=MAX_QUOTA).contains(&self.bytes) {
            return Err(Error::invalid(format!(
                "the quota of tenant {} must be between 1 and 2^63 - 1 bytes, not {}",
                self.name, self.bytes
            )));
        }
        Ok(())
    }
}

/// Returns whether `name` can be the name of a tenant.
pub fn is_tenant(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('_') && !name.chars().any(char::is_control)
}

/// State of a tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantInfo {
    /// Name of the tenant.
    pub name: String,
    /// Requested quota in bytes.
    pub requested: u64,
    /// Effective quota in bytes. It is less than the requested one if all tenants together request
    /// more memory than there is.
    pub effective: u64,
    /// Bytes of all replicas of the tenant, including those that are being written.
    pub charged: u64,
    /// Bytes evicted to free space in the quota.
    pub evicted: u64,
    /// Number of puts that were refused for the quota.
    pub rejected: u64,
    /// Misses of keys of the tenant.
    pub misses: MissCounts,
}

/// Tenants with the bytes that they are charged.
pub(crate) struct Tenants {
    on: bool,
    table: RwLock<TenantTable>,
}

#[derive(Default)]
struct TenantTable {
    capacity: u64,
    /// Numbers of the tenants: positions in `accounts`, counted from 1. A number is never given to
    /// another name.
    pub(crate) by_name: BTreeMap<String, u32>,
    pub(crate) accounts: Vec<TenantAccount>,
}

struct TenantAccount {
    /// Requested quota; `None` for a tenant that is not registered any more.
    pub(crate) requested: Option<u64>,
    pub(crate) effective: u64,
    pub(crate) charged: AtomicU64,
    pub(crate) evicted: AtomicU64,
    pub(crate) rejected: AtomicU64,
    misses: [AtomicU64; MissCause::ALL.len()],
}

impl TenantAccount {
    fn misses(&self) -> MissCounts {
        let mut counts = MissCounts::default();
        for (cause, count) in MissCause::ALL.into_iter().zip(&self.misses) {
            counts.add(cause, count.load(Relaxed));
        }
        counts
    }
}

/// Reason why a tenant cannot be charged.
pub(crate) enum QuotaRefusal {
    /// The tenant is not registered.
    Unknown,
    /// The bytes exceed the quota even if everything else is evicted.
    TooLarge,
    /// The bytes exceed the quota until something is evicted.
    Full,
}

/// Bytes that are charged in advance. Dropping the reservation refunds them.
pub(crate) struct Reservation<'a> {
    tenants: &'a Tenants,
    number: u32,
    bytes: u64,
}

impl Reservation<'_> {
    /// Ends the reservation. The caller accounts for the returned bytes from now on.
    pub(crate) fn spend(mut self) -> u64 {
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
    /// Creates the table. `None` turns tenants off.
    pub(crate) fn new(policy: Option<&[TenantQuota]>) -> Self {
        let mut table = TenantTable::default();
        for tenant in policy.unwrap_or_default() {
            table.set(tenant);
        }
        Self { on: policy.is_some(), table: RwLock::new(table) }
    }

    pub(crate) fn are_on(&self) -> bool {
        self.on
    }

    /// Returns the number of the tenant of a directory key; 0 for none.
    pub(crate) fn number(&self, key: &[u8]) -> u32 {
        if !self.on {
            return 0;
        }
        let (tenant, _) = self.split(key);
        self.table.read().by_name.get(tenant).copied().unwrap_or(0)
    }

    /// Splits a directory key into tenant and key.
    pub(crate) fn split<'a>(&self, key: &'a [u8]) -> (&'a str, &'a [u8]) {
        let at = if self.on { key.iter().position(|byte| *byte == 0) } else { None };
        match at.map(|at| (std::str::from_utf8(&key[..at]), &key[at + 1..])) {
            Some((Ok(tenant), rest)) => (tenant, rest),
            _ => (DEFAULT_TENANT, key),
        }
    }

    /// Splits a directory key like [`Tenants::split`]. Returns `None` for a key of no tenant.
    pub(crate) fn unscoped<'a>(&self, key: &'a ObjectKey) -> Option<(&'a str, ObjectKey)> {
        if !self.on {
            return Some((DEFAULT_TENANT, key.clone()));
        }
        let (tenant, key) = self.split(key.as_bytes());
        Some((tenant, ObjectKey::new(key).ok()?))
    }

    /// Returns the prefix of the directory keys of a tenant; `None` if it is not registered.
    pub(crate) fn prefix(&self, tenant: &str) -> Option<Vec<u8>> {
        if !self.on {
            return Some(Vec::new());
        }
        let tenant = if tenant.is_empty() { DEFAULT_TENANT } else { tenant };
        let table = self.table.read();
        table.account(tenant)?;
        Some([tenant.as_bytes(), &[0]].concat())
    }

    /// Returns the prefix of the directory keys of a tenant, whether or not it is registered;
    /// `None` if no tenant can have this name.
    pub(crate) fn future_prefix(&self, tenant: &str) -> Option<Vec<u8>> {
        if !self.on {
            return Some(Vec::new());
        }
        let tenant = if tenant.is_empty() { DEFAULT_TENANT } else { tenant };
        is_tenant(tenant).then(|| [tenant.as_bytes(), &[0]].concat())
    }

    /// Charges `bytes` if they are within the quota once the `freed` bytes that they replace are
    /// gone.
    pub(crate) fn reserve(
        &self,
        number: u32,
        bytes: u64,
        freed: u64,
    ) -> Result<Reservation<'_>, QuotaRefusal> {
        let none = Reservation { tenants: self, number, bytes: 0 };
        if !self.on {
            return Ok(none);
        }
        let table = self.table.read();
        let account = table.numbered(number).filter(|account| account.requested.is_some());
        let Some(account) = account else { return Err(QuotaRefusal::Unknown) };
        // Without any memory, the refusal must name the lack of memory.
        let limit = if table.capacity == 0 { u64::MAX } else { account.effective };
        if bytes > limit {
            return Err(QuotaRefusal::TooLarge);
        }
        let charge = |charged: u64| {
            let then = charged.saturating_sub(freed).saturating_add(bytes);
            (then <= limit).then_some(charged.saturating_add(bytes))
        };
        match account.charged.fetch_update(SeqCst, SeqCst, charge) {
            Ok(_) => Ok(Reservation { bytes, ..none }),
            Err(_) => Err(QuotaRefusal::Full),
        }
    }

    /// Charges `bytes` regardless of the quota, so that the charge never falls below the bytes in
    /// use while an object changes.
    pub(crate) fn hold(&self, number: u32, bytes: u64) -> Reservation<'_> {
        let bytes = if number == 0 { 0 } else { bytes };
        self.charge(number, 0, bytes);
        Reservation { tenants: self, number, bytes }
    }

    /// Changes the charge for an object from `before` to `after` bytes.
    pub(crate) fn charge(&self, number: u32, before: u64, after: u64) {
        if number == 0 || before == after {
            return;
        }
        if let Some(account) = self.table.read().numbered(number) {
            // Two's complement: adds the difference in either direction.
            account.charged.fetch_add(after.wrapping_sub(before), SeqCst);
        }
    }

    /// Sets the capacity that the tenants share.
    pub(crate) fn set_capacity(&self, capacity: u64) {
        if self.on {
            let mut table = self.table.write();
            table.capacity = capacity;
            table.divide_capacity();
        }
    }

    pub(crate) fn info(&self, name: &str) -> Option<TenantInfo> {
        self.table.read().info(name)
    }

    /// Registers a tenant, or changes its quota.
    pub(crate) fn set(&self, tenant: &TenantQuota) {
        self.table.write().set(tenant);
    }

    /// Removes a tenant that has no objects.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND` if it is not registered; `TENANT_NOT_EMPTY`.
    pub(crate) fn remove(&self, name: &str) -> Result<()> {
        let mut table = self.table.write();
        let account = table.account(name).ok_or(ErrorCode::ObjectNotFound)?;
        // The table is locked for writing, so no put is admitted meanwhile.
        if account.charged.load(SeqCst) > 0 {
            return Err(ErrorCode::TenantNotEmpty.into());
        }
        if let Some(number) = table.by_name.get(name).copied() {
            let account = &mut table.accounts[number as usize - 1];
            (account.requested, account.effective) = (None, 0);
        }
        table.divide_capacity();
        Ok(())
    }

    /// Counts bytes that were evicted to make free space in the quota of a tenant.
    pub(crate) fn count_evicted(&self, number: u32, bytes: u64) {
        if let Some(account) = self.table.read().numbered(number) {
            account.evicted.fetch_add(bytes, SeqCst);
        }
    }

    /// Counts a put that was refused for the quota of a tenant.
    pub(crate) fn count_rejected(&self, number: u32) {
        if let Some(account) = self.table.read().numbered(number) {
            account.rejected.fetch_add(1, SeqCst);
        }
    }

    /// Counts a miss of a directory key.
    pub(crate) fn count_miss(&self, key: &[u8], why: MissCause) {
        if !self.on {
            return;
        }
        let mut counts = MissCounts::default();
        counts.add(why, 1);
        self.count_misses(self.split(key).0, &counts);
    }

    /// Counts misses of keys of a tenant.
    pub(crate) fn count_misses(&self, tenant: &str, counts: &MissCounts) {
        if !self.on || counts.total() == 0 {
            return;
        }
        let tenant = if tenant.is_empty() { DEFAULT_TENANT } else { tenant };
        let table = self.table.read();
        let number = table.by_name.get(tenant).copied().unwrap_or(0);
        if let Some(account) = table.numbered(number) {
            for (count, (_, more)) in
                account.misses.iter().zip(counts.iter()).filter(|(_, (_, more))| *more > 0)
            {
                count.fetch_add(more, Relaxed);
            }
        }
    }

    /// Returns the state of every registered tenant, by name.
    pub(crate) fn infos(&self) -> Vec<TenantInfo> {
        let table = self.table.read();
        table.by_name.keys().filter_map(|name| table.info(name)).collect()
    }
}

impl TenantTable {
    fn numbered(&self, number: u32) -> Option<&TenantAccount> {
        self.accounts.get((number as usize).checked_sub(1)?)
    }

    /// Returns the account of a registered tenant.
    pub(crate) fn account(&self, name: &str) -> Option<&TenantAccount> {
        self.numbered(*self.by_name.get(name)?).filter(|account| account.requested.is_some())
    }

    pub(crate) fn info(&self, name: &str) -> Option<TenantInfo> {
        let account = self.account(name)?;
        Some(TenantInfo {
            name: name.to_owned(),
            requested: account.requested?,
            effective: account.effective,
            charged: account.charged.load(SeqCst),
            evicted: account.evicted.load(SeqCst),
            rejected: account.rejected.load(SeqCst),
            misses: account.misses(),
        })
    }

    pub(crate) fn set(&mut self, tenant: &TenantQuota) {
        let next = self.accounts.len() as u32 + 1;
        let number = *self.by_name.entry(tenant.name.clone()).or_insert(next);
        if number == next {
            let none = || AtomicU64::new(0);
            self.accounts.push(TenantAccount {
                requested: None,
                effective: 0,
                charged: none(),
                evicted: none(),
                rejected: none(),
                misses: Default::default(),
            });
        }
        self.accounts[number as usize - 1].requested = Some(tenant.bytes);
        self.divide_capacity();
    }

    /// Divides the capacity: every tenant gets its request, or its part of the capacity.
    pub(crate) fn divide_capacity(&mut self) {
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

/// Returns the shares of `capacity`. Each is the whole request if all requests fit. Otherwise the
/// shares are proportional, and the remaining bytes go one by one to the largest remainders,
/// earlier requests first.
fn shares(requests: &[u64], capacity: u64) -> Vec<u64> {
    let sum: u128 = requests.iter().map(|bytes| u128::from(*bytes)).sum();
    if sum <= u128::from(capacity) {
        return requests.to_vec();
    }
    let parts = requests.iter().map(|bytes| {
        let exact = u128::from(*bytes) * u128::from(capacity);
        // The result is at most the request, so it fits.
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

/// Returns the error for a tenant that is not registered.
pub(crate) fn unknown(tenant: &str) -> Error {
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
