//! Leases on revisions of weights. A revision has one lease for each holder.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_protocol::wire::{WeightError, WeightId, WeightLease};

use super::values::{Instants, Result};

/// Maximum number of leases of one revision.
const MAX_OF_REVISION: usize = 1 << 10;
/// Maximum number of leases.
const MAX_LEASES: usize = 1 << 16;
/// Time for which an expired lease is remembered, so that its holder learns why it is over.
const MEMORY: Duration = Duration::from_secs(60);

/// Leases by number.
pub(super) struct LeaseTable {
    leases: BTreeMap<u64, HeldLease>,
    of: HashMap<WeightId, Vec<u64>>,
    next: u64,
}

struct HeldLease {
    lease: WeightLease,
    until: Moment,
}

impl LeaseTable {
    pub(super) fn new(first: u64) -> Self {
        Self { leases: BTreeMap::new(), of: HashMap::new(), next: first }
    }

    /// Returns the leases on a revision that have not expired.
    fn live_of(&self, id: &WeightId, now: Moment) -> impl Iterator<Item = &HeldLease> {
        let numbers = self.of.get(id).into_iter().flatten();
        numbers.filter_map(|number| self.leases.get(number)).filter(move |held| now < held.until)
    }

    /// Returns the number of leases on a revision.
    pub(super) fn count(&self, id: &WeightId, now: Moment) -> u64 {
        self.live_of(id, now).count() as u64
    }

    /// Returns the number of leases on a revision, and the earliest end.
    pub(super) fn summary(&self, id: &WeightId, now: Moment) -> (u64, Option<u64>) {
        (self.count(id, now), self.live_of(id, now).map(|held| held.lease.expires_ms).min())
    }

    /// Returns the number of all leases that have not expired.
    pub(super) fn live(&self, now: Moment) -> u64 {
        self.leases.values().filter(|held| now < held.until).count() as u64
    }

    pub(super) fn acquire(
        &mut self,
        id: &WeightId,
        generation: u64,
        holder: &str,
        ttl: Duration,
        at: Instants,
    ) -> Result<WeightLease> {
        if let Some(held) = self.live_of(id, at.now).find(|held| held.lease.holder == holder) {
            return Ok(held.lease.clone());
        }
        let of_revision = self.of.get(id).map_or(0, Vec::len);
        if of_revision >= MAX_OF_REVISION || self.leases.len() >= MAX_LEASES {
            self.prune_all(at.now);
        }
        let of_revision = self.of.get(id).map_or(0, Vec::len);
        if of_revision >= MAX_OF_REVISION || self.leases.len() >= MAX_LEASES {
            return Err(WeightError::Busy);
        }
        let number = self.next + 1;
        self.next = number;
        let lease = WeightLease {
            id: number,
            revision: id.clone(),
            holder: holder.to_owned(),
            expires_ms: at.wall_ms.saturating_add(millis(ttl)),
            metadata_generation: generation,
        };
        self.insert(lease.clone(), at.now.after(ttl));
        Ok(lease)
    }

    fn insert(&mut self, lease: WeightLease, until: Moment) {
        self.of.entry(lease.revision.clone()).or_default().push(lease.id);
        self.leases.insert(lease.id, HeldLease { lease, until });
    }

    pub(super) fn renew(
        &mut self,
        tenant: &str,
        number: u64,
        ttl: Duration,
        at: Instants,
    ) -> Result<WeightLease> {
        let held = self.leases.get_mut(&number).filter(|held| held.lease.revision.tenant == tenant);
        let held = held.ok_or(WeightError::NotFound)?;
        if held.until <= at.now {
            return Err(WeightError::LeaseExpired);
        }
        let until = at.now.after(ttl);
        if until > held.until {
            held.until = until;
            held.lease.expires_ms = at.wall_ms.saturating_add(millis(ttl));
        }
        Ok(held.lease.clone())
    }

    pub(super) fn release(&mut self, tenant: &str, number: u64) {
        if self.leases.get(&number).is_some_and(|held| held.lease.revision.tenant == tenant) {
            self.remove(number);
        }
    }

    fn remove(&mut self, number: u64) {
        let Some(held) = self.leases.remove(&number) else { return };
        let id = held.lease.revision;
        if let Some(numbers) = self.of.get_mut(&id) {
            numbers.retain(|other| *other != number);
            if numbers.is_empty() {
                self.of.remove(&id);
            }
        }
    }

    /// Forgets leases that expired some time ago.
    pub(super) fn prune(&mut self, now: Moment) {
        self.prune_where(|held| held.until.after(MEMORY) <= now);
    }

    /// Forgets all expired leases.
    fn prune_all(&mut self, now: Moment) {
        self.prune_where(|held| held.until <= now);
    }

    fn prune_where(&mut self, is_over: impl Fn(&HeldLease) -> bool) {
        let over = self.leases.iter().filter(|(_, held)| is_over(held)).map(|(number, _)| *number);
        over.collect::<Vec<_>>().into_iter().for_each(|number| self.remove(number));
    }

    pub(super) fn forget_all_of(&mut self, id: &WeightId) {
        for number in self.of.remove(id).into_iter().flatten() {
            self.leases.remove(&number);
        }
    }

    /// Returns the leases that have not expired.
    pub(super) fn save(&self, now: Moment) -> Vec<WeightLease> {
        self.leases.values().filter(|held| now < held.until).map(|held| held.lease.clone()).collect()
    }

    /// Restores a lease of an earlier master, if it has not expired.
    pub(super) fn restore(&mut self, lease: WeightLease, at: Instants) {
        let left = lease.expires_ms.saturating_sub(at.wall_ms);
        let is_new = !self.leases.contains_key(&lease.id);
        if left > 0 && is_new && self.leases.len() < MAX_LEASES {
            self.insert(lease, at.now.after(Duration::from_millis(left)));
        }
    }
}

fn millis(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX)
}
