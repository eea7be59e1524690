//! Table of managed weights.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::replica::DataType;
use mooncake_protocol::wire::{
    WeightAvailability, WeightError, WeightId, WeightLease, WeightManifest, WeightMove, WeightPage,
    WeightResidency, WeightRevision, WeightView,
};

use super::checks::{check_id, keys_digest, manifest_key_of, parse_token, token_of};
use super::leases::LeaseTable;
use super::moves::MoveTable;
use super::values::{Due, Found, Instants, Result, StoredRevision, WeightStats};

/// Maximum number of records. Records of removed revisions make way for new ones.
pub(super) const MAX_REVISIONS: usize = 1 << 14;
/// Maximum number of bytes of names in all records.
const MAX_TEXT: usize = 64 << 20;
/// Maximum number of keys of one import whose objects have a type that is refused at the commit.
const MAX_MISTYPED: usize = 256;
/// Maximum number of revisions in a response.
const MAX_PAGE: u32 = 1000;
/// Type of the payloads of a revision.
const WEIGHT: DataType = DataType(3);
/// Type of the manifest of a revision.
const METADATA: DataType = DataType(8);

/// Records of revisions by identity, with leases and moves.
pub(crate) struct Weights {
    pub(super) records: BTreeMap<WeightId, Record>,
    /// Identities by the names of their groups in the directory.
    pub(super) groups: HashMap<Arc<str>, WeightId>,
    pub(super) leases: LeaseTable,
    pub(super) moves: MoveTable,
    /// Number of bytes of names in all records.
    pub(super) text: usize,
    pub(super) failures: u64,
}

/// Record of a revision, with what only the master knows of it.
pub(super) struct Record {
    pub(super) revision: WeightRevision,
    /// Name of the group in the directory.
    group: Arc<str>,
    /// Time of the last step of the import.
    active: Moment,
    /// True while the objects of the group are inspected for a commit.
    is_committing: bool,
    /// Keys whose last write named a type that no object of a revision has.
    mistyped: BTreeSet<Vec<u8>>,
    /// True if there were more such keys than the record holds.
    has_more_mistyped: bool,
    /// True if a snapshot restored the record.
    is_restored: bool,
}

impl Record {
    /// Records a change of the revision.
    pub(super) fn change(&mut self, wall_ms: u64) -> Result<()> {
        let next = self.revision.metadata_generation.checked_add(1);
        self.revision.metadata_generation = next.ok_or(WeightError::GenerationExhausted)?;
        self.revision.updated_ms = wall_ms;
        Ok(())
    }

    /// Checks that the caller knows the last change.
    pub(super) fn expect(&self, generation: u64) -> Result<()> {
        if self.revision.metadata_generation == generation {
            Ok(())
        } else {
            Err(WeightError::StaleGeneration)
        }
    }

    pub(super) fn is(&self, availability: WeightAvailability) -> bool {
        self.revision.availability == availability
    }

    pub(super) fn set(&mut self, availability: WeightAvailability, residency: WeightResidency) {
        (self.revision.availability, self.revision.residency) = (availability, residency);
    }

    /// Number of objects of the revision, the manifest included.
    pub(super) fn objects(&self) -> u64 {
        self.revision.manifest.payloads.saturating_add(1)
    }
}

fn text_of(id: &WeightId) -> usize {
    // The identity is in the record, in the key of the table and in the index of groups.
    let id = id.tenant.len() + id.namespace.len() + id.resource.len() + id.revision.len();
    // A manifest key repeats it, with up to three bytes for one.
    id * 6 + 512
}

impl Weights {
    /// Creates an empty table. Numbers of leases and moves begin above `first`, so that those of
    /// another master are unknown.
    pub(crate) fn new(first: u64) -> Self {
        Self {
            records: BTreeMap::new(),
            groups: HashMap::new(),
            leases: LeaseTable::new(first),
            moves: MoveTable::new(first),
            text: 0,
            failures: 0,
        }
    }

    /// Returns the number of records.
    pub(crate) fn len(&self) -> usize {
        self.records.len()
    }

    pub(super) fn record(&mut self, id: &WeightId) -> Result<&mut Record> {
        self.records.get_mut(id).ok_or(WeightError::NotFound)
    }

    /// Begins an import. `directory_group` is the name of its group in the directory.
    pub(crate) fn begin(
        &mut self,
        id: WeightId,
        group: String,
        directory_group: &str,
        (payloads, bytes): (u64, u64),
        at: Instants,
    ) -> Result<WeightRevision> {
        use WeightAvailability::{Deleted, Deleting, Importing};
        if let Some(known) = self.records.get_mut(&id) {
            let manifest = &known.revision.manifest;
            let is_same = (manifest.payloads, manifest.bytes) == (payloads, bytes);
            if !is_same || known.is(Deleting) || known.is(Deleted) {
                return Err(WeightError::Conflict);
            }
            known.active = at.now;
            return Ok(known.revision.clone());
        }
        self.evict_deleted_for(text_of(&id))?;
        let revision = WeightRevision {
            id: id.clone(),
            manifest: WeightManifest { group, payloads, bytes, ..WeightManifest::default() },
            availability: Importing,
            residency: WeightResidency::Unknown,
            operation: WeightMove::None,
            operation_id: 0,
            metadata_generation: 1,
            created_ms: at.wall_ms,
            updated_ms: at.wall_ms,
        };
        self.insert(revision.clone(), directory_group, at.now);
        Ok(revision)
    }

    fn insert(&mut self, revision: WeightRevision, directory_group: &str, active: Moment) -> &mut Record {
        let (id, group) = (revision.id.clone(), Arc::<str>::from(directory_group));
        self.text += text_of(&id);
        self.groups.insert(group.clone(), id.clone());
        let record = Record {
            revision,
            group,
            active,
            is_committing: false,
            mistyped: BTreeSet::new(),
            has_more_mistyped: false,
            is_restored: false,
        };
        self.records.entry(id).or_insert(record)
    }

    /// Forgets the oldest removed revisions until a record with `text` bytes of names fits.
    fn evict_deleted_for(&mut self, text: usize) -> Result<()> {
        let is_full = |table: &Self| table.records.len() >= MAX_REVISIONS || table.text + text > MAX_TEXT;
        if !is_full(self) {
            return Ok(());
        }
        let removed = self.records.iter().filter(|(_, record)| record.is(WeightAvailability::Deleted));
        let mut removed: Vec<_> = removed.map(|(id, at)| (at.revision.updated_ms, id.clone())).collect();
        removed.sort_unstable();
        // Several at once, so that a full table is not searched at each call.
        let few = MAX_REVISIONS / 16;
        for (_, id) in removed.into_iter().take(few) {
            self.forget(&id);
        }
        if is_full(self) { Err(WeightError::Busy) } else { Ok(()) }
    }

    pub(super) fn forget(&mut self, id: &WeightId) {
        if let Some(record) = self.records.remove(id) {
            self.groups.remove(&record.group);
            self.leases.forget_all_of(id);
            self.moves.forget_all_of(id);
            self.text = self.text.saturating_sub(text_of(id));
        }
    }

    /// Returns whether a revision is not removed.
    pub(crate) fn have_objects(&self) -> bool {
        self.records.values().any(|record| !record.is(WeightAvailability::Deleted))
    }

    /// Returns whether the objects of a group belong to a revision.
    pub(crate) fn is_managed(&self, directory_group: &str) -> bool {
        self.groups.contains_key(directory_group)
    }

    /// Checks whether an object may be written in a group, and notes its type.
    ///
    /// # Errors
    /// `NotReady` unless the revision of the group is being imported.
    pub(crate) fn admit(
        &mut self,
        directory_group: &str,
        key: &[u8],
        of: DataType,
        now: Moment,
    ) -> Result<()> {
        let Some(record) = self.groups.get(directory_group).and_then(|id| self.records.get_mut(id)) else {
            return Ok(());
        };
        if !record.is(WeightAvailability::Importing) || record.is_committing {
            return Err(WeightError::NotReady);
        }
        record.active = now;
        let expected = if key == manifest_key_of(&record.revision.id).as_bytes() { METADATA } else { WEIGHT };
        if of == expected {
            record.mistyped.remove(key);
        } else if record.mistyped.len() < MAX_MISTYPED {
            record.mistyped.insert(key.to_vec());
        } else {
            record.has_more_mistyped |= !record.mistyped.contains(key);
        }
        Ok(())
    }

    /// Begins a commit: from now on no object joins the group. Returns the name of the group in the
    /// directory, or the record if the same commit has succeeded before.
    pub(crate) fn begin_commit(
        &mut self,
        id: &WeightId,
        generation: u64,
        manifest: &WeightManifest,
    ) -> Result<Result<Arc<str>, Box<WeightRevision>>> {
        use WeightAvailability::{Deleted, Deleting, Importing};
        let record = self.record(id)?;
        if !record.is(Importing) {
            if record.is(Deleting) || record.is(Deleted) {
                record.expect(generation)?;
                return Err(WeightError::Conflict);
            }
            if record.revision.manifest != *manifest {
                return Err(WeightError::Conflict);
            }
            // The caller may not have received the response of the same commit.
            record.expect(generation).or_else(|error| expect_before(record, generation, error))?;
            return Ok(Err(Box::new(record.revision.clone())));
        }
        record.expect(generation)?;
        let expected = &record.revision.manifest;
        if (expected.payloads, expected.bytes) != (manifest.payloads, manifest.bytes) {
            return Err(WeightError::Conflict);
        }
        if record.is_committing {
            return Err(WeightError::Busy);
        }
        record.is_committing = true;
        Ok(Ok(record.group.clone()))
    }

    /// Ends a commit, which succeeds if the objects found are those of the manifest.
    pub(crate) fn end_commit(
        &mut self,
        id: &WeightId,
        manifest: WeightManifest,
        mut found: Found,
        at: Instants,
    ) -> Result<WeightRevision> {
        let record = self.record(id)?;
        record.is_committing = false;
        if !record.is(WeightAvailability::Importing) {
            return Err(WeightError::Conflict);
        }
        record.active = at.now;
        if found.objects.is_empty() && found.writes == 0 {
            return Err(WeightError::NotFound);
        }
        let is_mistyped = |(key, _): &(Vec<u8>, u64)| record.mistyped.contains(key);
        if record.has_more_mistyped || found.objects.iter().any(is_mistyped) {
            return Err(WeightError::Conflict);
        }
        let residency = residency_of(&found, record.objects());
        if !is_whole(&manifest, &mut found) && !is_planted("weights-committed-unchecked") {
            return Err(WeightError::Conflict);
        }
        record.change(at.wall_ms)?;
        record.revision.manifest = manifest;
        record.set(WeightAvailability::Ready, residency);
        record.mistyped.clear();
        Ok(record.revision.clone())
    }

    /// Cancels an import. The caller removes the objects of the group.
    pub(crate) fn abort(&mut self, id: &WeightId, generation: u64, at: Instants) -> Result<WeightRevision> {
        let record = self.record(id)?;
        if record.is(WeightAvailability::Deleting) {
            record.expect(generation).or_else(|error| expect_before(record, generation, error))?;
            return Ok(record.revision.clone());
        }
        record.expect(generation)?;
        if !record.is(WeightAvailability::Importing) {
            return Err(WeightError::Conflict);
        }
        record.change(at.wall_ms)?;
        record.set(WeightAvailability::Deleting, WeightResidency::Unknown);
        Ok(record.revision.clone())
    }

    /// Begins to remove a revision. The caller removes the objects of the group.
    pub(crate) fn delete(&mut self, id: &WeightId, generation: u64, at: Instants) -> Result<WeightRevision> {
        use WeightAvailability::{Deleted, Deleting, Importing};
        let leased = self.leases.count(id, at.now) > 0 && !is_planted("weights-deleted-under-lease");
        let record = self.record(id)?;
        if record.is(Deleting) || record.is(Deleted) {
            record.expect(generation).or_else(|error| expect_before(record, generation, error))?;
            return Ok(record.revision.clone());
        }
        record.expect(generation)?;
        if record.is(Importing) {
            return Err(WeightError::NotReady);
        }
        if leased {
            return Err(WeightError::Busy);
        }
        record.change(at.wall_ms)?;
        let residency = record.revision.residency;
        record.set(Deleting, residency);
        (record.revision.operation, record.revision.operation_id) = (WeightMove::None, 0);
        let revision = record.revision.clone();
        self.moves.forget_all_of(id);
        Ok(revision)
    }

    /// Records that the objects of a revision are removed. Returns the record, unless the revision
    /// is not being removed.
    pub(crate) fn end_removal(&mut self, id: &WeightId, at: Instants) -> Option<WeightRevision> {
        let record = self.records.get_mut(id).filter(|it| it.is(WeightAvailability::Deleting))?;
        record.change(at.wall_ms).ok()?;
        record.set(WeightAvailability::Deleted, WeightResidency::Absent);
        Some(record.revision.clone())
    }

    /// Returns the name of the group of a revision in the directory.
    pub(crate) fn group(&self, id: &WeightId) -> Option<Arc<str>> {
        self.records.get(id).map(|record| record.group.clone())
    }

    /// Returns the record of a revision with its leases.
    pub(crate) fn view(&self, id: &WeightId, now: Moment) -> Result<WeightView> {
        let record = self.records.get(id).ok_or(WeightError::NotFound)?;
        Ok(self.view_of(record, now))
    }

    fn view_of(&self, record: &Record, now: Moment) -> WeightView {
        let (leases, nearest_expiry_ms) = self.leases.summary(&record.revision.id, now);
        WeightView { revision: record.revision.clone(), leases, nearest_expiry_ms }
    }

    /// Returns the revisions of a resource after a token.
    pub(crate) fn page(&self, of: &WeightId, token: &str, limit: u32, now: Moment) -> Result<WeightPage> {
        if !(1..=MAX_PAGE).contains(&limit) {
            return Err(WeightError::InvalidArgument);
        }
        let from = match token {
            "" => of.clone(),
            token => {
                let (revision, generation) = parse_token(token).ok_or(WeightError::InvalidArgument)?;
                let generation = generation.saturating_add(1);
                WeightId { revision, generation, ..of.clone() }
            }
        };
        let is_of = |id: &WeightId| {
            (&id.tenant, &id.namespace, &id.resource) == (&of.tenant, &of.namespace, &of.resource)
        };
        let mut rest = self.records.range(from..).take_while(|(id, _)| is_of(id));
        let views: Vec<_> =
            rest.by_ref().take(limit as usize).map(|(_, record)| self.view_of(record, now)).collect();
        let last = views.last().filter(|_| rest.next().is_some());
        let next = last.map(|last| token_of(&last.revision.id)).unwrap_or_default();
        Ok(WeightPage { views, next })
    }

    /// Grants a lease.
    pub(crate) fn acquire(
        &mut self,
        id: &WeightId,
        generation: u64,
        holder: &str,
        ttl: Duration,
        at: Instants,
    ) -> Result<WeightLease> {
        let record = self.record(id)?;
        record.expect(generation)?;
        if !record.is(WeightAvailability::Ready) {
            return Err(WeightError::NotReady);
        }
        if record.revision.operation_id != 0 {
            return Err(WeightError::Busy);
        }
        self.leases.acquire(id, generation, holder, ttl, at)
    }

    /// Extends a lease.
    pub(crate) fn renew(
        &mut self,
        tenant: &str,
        lease: u64,
        ttl: Duration,
        at: Instants,
    ) -> Result<WeightLease> {
        self.leases.renew(tenant, lease, ttl, at)
    }

    /// Ends a lease.
    pub(crate) fn release(&mut self, tenant: &str, lease: u64) {
        self.leases.release(tenant, lease);
    }

    /// Does the periodic work that needs no objects: aborts idle imports and forgets old leases and
    /// moves. Returns the aborted revisions.
    pub(crate) fn expire(&mut self, idle: Duration, at: Instants) -> Vec<WeightId> {
        self.leases.prune(at.now);
        self.moves.prune();
        let is_idle = |record: &Record| {
            record.is(WeightAvailability::Importing)
                && !record.is_committing
                && record.active.after(idle) <= at.now
        };
        let idle = self.records.iter().filter(|(_, record)| is_idle(record));
        let idle: Vec<_> = idle.map(|(id, it)| (id.clone(), it.revision.metadata_generation)).collect();
        idle.into_iter()
            .filter_map(|(id, generation)| self.abort(&id, generation, at).ok().map(|_| id))
            .collect()
    }

    /// Returns the records after `after` whose objects are to be inspected, with at most about
    /// `budget` objects, and whether these are the last ones.
    pub(crate) fn due(&self, after: Option<&WeightId>, budget: u64) -> (Vec<Due>, bool) {
        use std::ops::Bound::{Excluded, Unbounded};
        let from = after.map_or(Unbounded, Excluded);
        let (mut due, mut left) = (Vec::new(), budget);
        for (id, record) in self.records.range::<WeightId, _>((from, Unbounded)) {
            if left == 0 {
                return (due, false);
            }
            // A record alone costs as much as a few objects.
            left = left.saturating_sub(if record.is(WeightAvailability::Deleted) {
                1
            } else {
                record.objects()
            });
            let moving = self.moves.target_of(record.revision.operation_id);
            due.push(Due {
                id: id.clone(),
                group: record.group.clone(),
                generation: record.revision.metadata_generation,
                availability: record.revision.availability,
                target: moving,
                objects: record.objects(),
            });
        }
        (due, true)
    }

    /// Records what was found of the objects of a revision that is ready or degraded. `may_return`
    /// is true if absent objects of an earlier master may still return.
    pub(crate) fn observe(&mut self, due: &Due, found: &Found, may_return: bool, at: Instants) {
        use WeightAvailability::{Degraded, Ready};
        let Some(record) = self.records.get_mut(&due.id) else { return };
        let is_known = record.revision.metadata_generation == due.generation;
        if !is_known || !(record.is(Ready) || record.is(Degraded)) {
            return;
        }
        let is_whole = found.objects.len() as u64 >= record.objects();
        let availability = if is_whole || record.is_restored && may_return { Ready } else { Degraded };
        record.is_restored &= !is_whole;
        let residency = residency_of(found, record.objects());
        if (availability, residency) != (record.revision.availability, record.revision.residency) {
            match record.change(at.wall_ms) {
                Ok(()) => record.set(availability, residency),
                Err(_) => self.failures += 1,
            }
        }
    }

    /// Returns the numbers for the metrics.
    pub(crate) fn stats(&self, now: Moment) -> WeightStats {
        let mut stats = WeightStats { failures: self.failures, ..WeightStats::default() };
        for record in self.records.values() {
            stats.by_availability[record.revision.availability as usize] += 1;
            stats.by_residency[record.revision.residency as usize] += 1;
        }
        stats.leases = self.leases.live(now);
        (stats.moves, stats.oldest_move_ms) = self.moves.pending(now);
        stats
    }

    /// Returns records and leases for a snapshot.
    pub(crate) fn save(&self, now: Moment) -> (Vec<StoredRevision>, Vec<WeightLease>) {
        let stored = |record: &Record| StoredRevision {
            revision: record.revision.clone(),
            idle_ms: u64::try_from(now.since(record.active).as_millis()).unwrap_or(u64::MAX),
            mistyped: record.mistyped.iter().cloned().collect(),
            has_more_mistyped: record.has_more_mistyped,
        };
        (self.records.values().map(stored).collect(), self.leases.save(now))
    }

    /// Restores records and leases of an earlier master. `directory_group` returns the name of the
    /// group of a revision in the directory. A move in progress has ended with that master.
    pub(crate) fn restore(
        &mut self,
        revisions: Vec<StoredRevision>,
        leases: Vec<WeightLease>,
        directory_group: impl Fn(&WeightRevision) -> String,
        at: Instants,
    ) {
        for StoredRevision { mut revision, idle_ms, mistyped, has_more_mistyped } in revisions {
            let is_valid = check_id(&revision.id).is_ok() && !self.records.contains_key(&revision.id);
            if !is_valid || self.evict_deleted_for(text_of(&revision.id)).is_err() {
                continue;
            }
            if revision.operation_id != 0 {
                (revision.operation, revision.operation_id) = (WeightMove::None, 0);
                revision.metadata_generation = revision.metadata_generation.saturating_add(1);
            }
            let group = directory_group(&revision);
            let active = Moment(at.now.0.saturating_sub(idle_ms.saturating_mul(1_000_000)));
            let record = self.insert(revision, &group, active);
            record.mistyped = mistyped.into_iter().take(MAX_MISTYPED).collect();
            (record.has_more_mistyped, record.is_restored) = (has_more_mistyped, true);
        }
        for lease in leases {
            if self.records.contains_key(&lease.revision) {
                self.leases.restore(lease, at);
            }
        }
    }
}

/// Accepts the number of the change before the last one, for a call that may be a repetition.
fn expect_before(record: &Record, generation: u64, error: WeightError) -> Result<()> {
    let is_before = record.revision.metadata_generation.checked_sub(1) == Some(generation);
    if is_before { Ok(()) } else { Err(error) }
}

/// Returns whether the objects are exactly those of a manifest.
fn is_whole(manifest: &WeightManifest, found: &mut Found) -> bool {
    let key = manifest.manifest_key.as_bytes();
    let before = found.objects.len();
    found.objects.retain(|(of, _)| of != key);
    found.objects.sort_unstable();
    let bytes = found.objects.iter().fold(0u64, |sum, (_, len)| sum.saturating_add(*len));
    let keys = found.objects.iter().map(|(key, _)| &key[..]);
    before == found.objects.len() + 1
        && found.writes == 0
        && found.objects.len() as u64 == manifest.payloads
        && bytes == manifest.bytes
        && keys_digest(keys) == manifest.keys_sha256
}

/// Returns the location of the objects found, of `expected` ones.
fn residency_of(found: &Found, expected: u64) -> WeightResidency {
    let there = found.objects.len() as u64;
    match found.in_memory {
        _ if there == 0 => WeightResidency::Absent,
        0 if there >= expected => WeightResidency::Cold,
        in_memory if in_memory >= expected => WeightResidency::Hot,
        _ => WeightResidency::Mixed,
    }
}
