//! Objects in the segments of this client, as masters have reported them.

pub(crate) mod index;
pub(crate) mod journal;
mod key_form;
mod recording;

use mooncake_core::clock::Moment;
use mooncake_core::ids::{ReplicaId, SegmentId};
use mooncake_protocol::key_form::KeyForm;
use mooncake_protocol::wire::{EpochPair, StoredLifetime, StoredReplica, TimedInventoryPage};
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use self::journal::Journal;

/// Objects in this client's segments, as far as the client knows them.
#[derive(Debug, Default)]
pub(crate) struct Inventory {
    /// Epoch of the master that reported the objects. `None` before the first report, and if the
    /// master keeps no inventory.
    pub(crate) epoch: Option<u64>,
    /// Epoch of another master that has responded since.
    pub(crate) other_epoch: Option<u64>,
    /// Number of the last change that was received.
    pub(crate) last_change: u64,
    pub(crate) entries: HashMap<ReplicaId, Entry>,
    /// Objects whose checksum is still to be computed.
    pub(crate) unsummed: VecDeque<ReplicaId>,
    /// Objects whose checksum was computed since the last request to the master.
    pub(crate) summed: Vec<ReplicaId>,
    /// Objects that earlier masters reported. They are announced to the present master, or will be.
    pub(crate) retained: HashMap<ReplicaPosition, Entry>,
    /// Checksums of objects that the present master may list as expired. Each has the epoch and the
    /// number of its value, and the CRC-64.
    pub(crate) sums: HashMap<ReplicaPosition, ((u64, u64), u64)>,
    /// Number of objects that the present master has accepted since the last ping.
    pub(crate) newly_accepted: usize,
    /// Number of objects that the master had accepted before the last ping, since the last request
    /// for changes.
    pub(crate) unreported: usize,
    /// Order of the masters that this client has met or knows from others, the latest first.
    pub(crate) epochs: Vec<EpochPair>,
    /// Form of the keys of all objects, as far as it is known.
    pub(crate) key_form: Option<KeyForm>,
    /// Segments that were withdrawn, each with the number of complete reports since. The master may
    /// still report objects in them until it has received the acknowledgement of such a report. It
    /// does not report their end.
    withdrawn: Vec<(SegmentId, u8)>,
    /// Index file for the next process.
    pub(crate) journal: Option<Journal>,
}

/// Maximum number of pairs of masters that a client remembers.
const MAX_EPOCHS: usize = 64;

/// Segment and offset of a replica.
pub(crate) type ReplicaPosition = (SegmentId, u64);

#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) stored: StoredReplica,
    /// Time until which the object is soft-pinned.
    pub(crate) pinned: Moment,
    /// Lifetime, if the object ends by itself.
    pub(crate) lifetime: Option<StoredLifetime>,
    /// CRC-64 of the bytes of the object.
    pub(crate) sum: Option<u64>,
    /// True if the checksum certainly belongs to the bytes of this object.
    pub(crate) sealed: bool,
    /// True if the present master has accepted the object. A report of the master will list it,
    /// too.
    pub(crate) announced: bool,
    /// True if the object was sent to the present master, which may have accepted it.
    pub(crate) offered: bool,
    /// True if the present master lists the object: among the replicas that this client held when
    /// it expired, or among those of earlier masters that still count.
    pub(crate) expired: bool,
}

impl Inventory {
    pub(crate) fn apply(&mut self, page: TimedInventoryPage, now: Moment) {
        let TimedInventoryPage { page, lifetimes } = page;
        let lifetimes: HashMap<_, _> = lifetimes.iter().map(|item| (item.index, item.lifetime)).collect();
        if page.lost {
            let lost: Vec<_> = self.entries.drain().map(|(_, entry)| entry).collect();
            self.remember_sums(lost.into_iter());
            self.unsummed.clear();
            self.summed.clear();
            self.retained.retain(|_, entry| !entry.announced);
            self.journal.iter_mut().for_each(Journal::request_rewrite);
        }
        self.last_change = page.next;
        for (index, change) in (0u64..).zip(page.changes) {
            let Some(stored) = change.stored else {
                let removed = self.entries.remove(&change.replica).filter(|entry| entry.sealed);
                if let (Some(entry), Some(journal)) = (removed, &mut self.journal) {
                    journal.record_removed(entry.stored.segment, entry.stored.offset);
                }
                continue;
            };
            if self.withdrawn.iter().any(|(segment, _)| *segment == stored.segment) {
                continue;
            }
            let position = (stored.segment, stored.offset);
            let is_same_value = |retained: &Entry| {
                (retained.stored.epoch, retained.stored.number) == (stored.epoch, stored.number)
            };
            let earlier = self
                .retained
                .get(&position)
                .is_some_and(is_same_value)
                .then(|| self.retained.remove(&position))
                .flatten();
            let sum = earlier.and_then(|retained| retained.sum).or(stored.checksum);
            if sum.is_none() {
                self.unsummed.push_back(change.replica);
            }
            let pinned = now.after(Duration::from_millis(stored.soft_pin_ms));
            let sealed = sum.is_some();
            if let (true, Some(journal)) = (sealed, &mut self.journal) {
                journal.record_added(change.replica);
            }
            let lifetime = lifetimes.get(&index).copied();
            let (announced, offered, expired) = (false, false, false);
            let entry = Entry { stored, pinned, lifetime, sum, sealed, announced, offered, expired };
            self.entries.insert(change.replica, entry);
        }
    }

    /// Seals the objects whose checksums were computed before the last request. The response has
    /// shown that these objects were there throughout.
    pub(crate) fn seal(&mut self) {
        for id in self.summed.drain(..) {
            if let Some(entry) = self.entries.get_mut(&id) {
                entry.sealed = true;
                self.journal.iter_mut().for_each(|journal| journal.record_added(id));
            }
        }
    }

    /// Removes objects that the master has accepted and not reported, because they are gone again.
    /// Called when all reports of the master have been received.
    pub(crate) fn remove_unreported(&mut self) {
        self.withdrawn.iter_mut().for_each(|(_, reports)| *reports += 1);
        // The request for the second report has acknowledged the first one.
        self.withdrawn.retain(|(_, reports)| *reports < 2);
        let missing = self.retained.extract_if(|_, entry| entry.announced);
        let missing = missing.map(|(position, _)| position).collect::<Vec<_>>();
        missing.into_iter().for_each(|position| self.remove_retained(position));
    }

    /// Removes an object from those that are retained.
    pub(crate) fn remove_retained(&mut self, position: ReplicaPosition) {
        self.retained.remove(&position);
        self.journal.iter_mut().for_each(|journal| journal.record_removed(position.0, position.1));
    }

    /// Returns the number of objects that are announced to the next master.
    pub(crate) fn count_lasting(&self) -> usize {
        let sealed = self.entries.values().filter(|entry| entry.sealed).count();
        sealed + self.retained.values().filter(|entry| !entry.announced).count()
    }

    /// Discards everything, because no master reports changes.
    pub(crate) fn reset(&mut self) {
        self.end_journal();
        *self = Self::default();
    }

    /// Starts the inventory of the master with this epoch, which asks for the segments. Returns
    /// whether it is the same master as before.
    ///
    /// Objects that are known for certain are announced to a new master. If the master is the same,
    /// this client had expired there. Then only the checksums are kept, and the master lists the
    /// objects to announce: see [`fetch_expired`](crate::state::Inner::fetch_expired).
    pub(crate) fn turn_over(&mut self, epoch: u64) -> bool {
        let is_same_master = self.epoch == Some(epoch);
        let entries = std::mem::take(&mut self.entries);
        if is_same_master {
            self.remember_sums(entries.into_values());
            let listed =
                self.retained.extract_if(|_, entry| entry.announced || entry.offered || entry.expired);
            let listed: Vec<_> = listed.map(|(_, entry)| entry).collect();
            self.remember_sums(listed.into_iter());
        } else {
            self.sums.clear();
            let sealed = entries.into_values().filter(|entry| entry.sealed);
            self.retained.extend(sealed.map(|entry| ((entry.stored.segment, entry.stored.offset), entry)));
            for entry in self.retained.values_mut() {
                (entry.announced, entry.offered, entry.expired) = (false, false, false);
            }
        }
        self.journal.iter_mut().for_each(Journal::request_rewrite);
        self.unsummed.clear();
        self.summed.clear();
        (self.newly_accepted, self.unreported) = (0, 0);
        if let Some(older) = self.epoch.filter(|_| !is_same_master) {
            self.epochs.insert(0, EpochPair { newer: epoch, older });
        }
        (self.epoch, self.other_epoch) = (Some(epoch), None);
        is_same_master
    }

    /// Adds what a master knows of the order of masters.
    pub(crate) fn learn_epochs(&mut self, pairs: &[EpochPair]) {
        for pair in pairs {
            if !self.epochs.contains(pair) {
                self.epochs.push(*pair);
            }
        }
        self.epochs.truncate(MAX_EPOCHS);
    }

    /// Announces an object of an earlier master as one that the present master still lists.
    pub(crate) fn list_unclaimed(&mut self, stored: &StoredReplica) {
        let value = (stored.epoch, stored.number);
        if let Some(entry) = self.retained.get_mut(&(stored.segment, stored.offset))
            && (entry.stored.epoch, entry.stored.number) == value
        {
            entry.expired = true;
        }
    }

    /// Keeps the checksums of objects that the master may list again.
    pub(crate) fn remember_sums(&mut self, entries: impl Iterator<Item = Entry>) {
        for entry in entries.filter(|entry| entry.sealed) {
            let value = (entry.stored.epoch, entry.stored.number);
            if let Some(sum) = entry.sum {
                self.sums.insert((entry.stored.segment, entry.stored.offset), (value, sum));
            }
        }
    }

    /// Adds a replica that the master lists as held by this client when it expired.
    pub(crate) fn list_expired(&mut self, stored: StoredReplica, now: Moment) {
        let position = (stored.segment, stored.offset);
        let value = (stored.epoch, stored.number);
        let known_sum = self.sums.get(&position).filter(|(of, _)| *of == value).map(|(_, sum)| *sum);
        // An object whose checksum was not computed in time is unchanged, too: the master has
        // granted no space in an expired segment.
        let sum = known_sum.or(stored.checksum);
        let pinned = now.after(Duration::from_millis(stored.soft_pin_ms));
        let (announced, offered, expired) = (false, false, true);
        // The master lists no objects that end by themselves.
        let (lifetime, sealed) = (None, sum.is_some());
        let entry = Entry { stored, pinned, lifetime, sum, sealed, announced, offered, expired };
        self.retained.insert(position, entry);
    }

    /// Marks objects as offered, before they are sent to the master. Later reports of the master
    /// show which of them it accepted.
    pub(crate) fn offer(&mut self, batch: &[StoredReplica]) {
        for stored in batch {
            if let Some(entry) = self.retained.get_mut(&(stored.segment, stored.offset)) {
                entry.offered = true;
            }
            self.journal.iter_mut().for_each(|journal| journal.record_offered(stored.segment, stored.offset));
        }
        self.write_journal();
    }

    /// Discards all objects of a segment.
    pub(crate) fn forget(&mut self, segment: SegmentId) {
        self.entries.retain(|_, entry| entry.stored.segment != segment);
        self.retained.retain(|(id, _), _| *id != segment);
        self.journal.iter_mut().for_each(Journal::request_rewrite);
        self.write_journal();
    }

    /// Discards all objects of a segment that the master has unmounted or is to unmount.
    pub(crate) fn withdraw(&mut self, segment: SegmentId) {
        self.forget(segment);
        self.withdrawn.push((segment, 0));
    }

    /// Returns whether a segment has objects to announce.
    pub(crate) fn has_retained(&self, segment: SegmentId) -> bool {
        self.retained.keys().any(|(id, _)| *id == segment)
    }

    pub(crate) fn retained_in(&self, segment: SegmentId) -> impl Iterator<Item = &Entry> {
        self.retained.values().filter(move |entry| entry.stored.segment == segment)
    }
}

#[cfg(test)]
mod tests {
    use mooncake_core::ids::{ClientId, Uuid};

    use super::*;
    use mooncake_protocol::wire::{InventoryChange, InventoryPage};

    fn stored(number: u64) -> StoredReplica {
        StoredReplica {
            segment: SegmentId(Uuid::new(1, 1)),
            offset: number * 64,
            len: 64,
            key: vec![b'k'],
            checksum: Some(number),
            writer: ClientId(Uuid::new(2, 2)),
            group: String::new(),
            hard_pin: false,
            soft_pin_ms: 0,
            epoch: 1,
            number,
        }
    }

    /// Returns the report of a master that these objects are new.
    pub(super) fn report(epoch: u64, numbers: &[u64]) -> TimedInventoryPage {
        let change =
            |n: &u64| InventoryChange { replica: ReplicaId(epoch * 10 + n), stored: Some(stored(*n)) };
        let changes = numbers.iter().map(change).collect();
        let page = InventoryPage { epoch, next: numbers.len() as u64, lost: false, whole: true, changes };
        TimedInventoryPage { page, lifetimes: Vec::new() }
    }

    #[test]
    fn late_reports_of_a_withdrawn_segment_do_not_count() {
        let mut inventory = Inventory { epoch: Some(1), ..Inventory::default() };
        inventory.apply(report(1, &[1]), Moment(0));
        inventory.withdraw(stored(1).segment);
        inventory.apply(report(1, &[2, 3]), Moment(0));
        assert_eq!(inventory.count_lasting(), 0);
        inventory.remove_unreported();
        // A report that was not acknowledged is repeated.
        inventory.apply(report(1, &[2, 3]), Moment(0));
        assert_eq!(inventory.count_lasting(), 0);
        inventory.remove_unreported();
        assert_eq!(inventory.withdrawn, []);
    }

    #[test]
    fn accepted_but_unreported_object_is_dropped() {
        let mut inventory = Inventory { epoch: Some(1), ..Inventory::default() };
        inventory.apply(report(1, &[1, 2, 3]), Moment(0));
        inventory.turn_over(2);
        assert_eq!(inventory.retained.len(), 3);
        let batch: Vec<_> = inventory.retained.values().filter(|e| e.stored.number < 3).cloned().collect();
        inventory.offer(&batch.into_iter().map(|entry| entry.stored).collect::<Vec<_>>());
        for entry in inventory.retained.values_mut().filter(|entry| entry.offered) {
            entry.announced = true;
        }
        // The second object was removed before it was reported. The third is not announced yet.
        inventory.apply(report(2, &[1]), Moment(0));
        inventory.remove_unreported();
        inventory.turn_over(3);
        let mut remaining: Vec<_> = inventory.retained.values().map(|entry| entry.stored.number).collect();
        remaining.sort_unstable();
        assert_eq!(remaining, [1, 3]);
    }
}
