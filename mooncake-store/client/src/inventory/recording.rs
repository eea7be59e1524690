//! Recording of changes of the inventory in its journal.

use mooncake_core::ids::{ReplicaId, SegmentId};
use mooncake_protocol::key_form::KeyForm;

use super::index::{self, Header, Index, IndexedObject};
use super::journal::{Journal, ReportedUpTo, remove, replace_file};
use super::{Entry, Inventory};

/// Maximum number of earlier addresses that stay reserved, so that no other memory is mapped there.
const MAX_ADDRESSES: usize = 8;

/// Number of changes, beyond twice the number of objects, after which the index is rewritten.
const MAX_EXTRA_ITEMS: usize = 10_000;

impl Inventory {
    /// Writes the changes to the journal, if there is one.
    pub(crate) fn write_journal(&mut self) {
        let Some(epoch) = self.epoch else { return };
        let Some(mut journal) = self.journal.take() else { return };
        let added = std::mem::take(&mut journal.added);
        let removed = std::mem::take(&mut journal.removed);
        let offered = std::mem::take(&mut journal.offered);
        let has_tenants = Some(true).filter(|_| self.key_form == Some(KeyForm::WithTenant));
        let now = ReportedUpTo { epoch, last_change: self.last_change, has_tenants };
        let written = if journal.needs_rewrite
            || journal.items > 2 * (self.entries.len() + self.retained.len()) + MAX_EXTRA_ITEMS
        {
            journal.rewrite(now, &self.indexed_objects(journal.header.segment))
        } else {
            // Objects that came and went meanwhile are no longer in the table.
            let added = added.iter().filter_map(|id| self.indexed_object(*id, journal.header.segment));
            journal.append(now, &removed, &offered, &added.collect::<Vec<_>>())
        };
        match written {
            Ok(()) => self.journal = Some(journal),
            Err(error) => {
                tracing::warn!(index = %journal.path.display(), "objects will not outlive this process: {error}");
                empty_index(&journal);
            }
        }
    }

    /// Returns the objects in a segment that are known for certain.
    pub(crate) fn indexed_objects(&self, segment: SegmentId) -> Vec<IndexedObject> {
        let reported = self.entries.keys().filter_map(|id| self.indexed_object(*id, segment));
        // Expired objects are left out. A later process could not know to which list of which
        // master they belong.
        let retained = self.retained_in(segment).filter(|entry| !entry.expired);
        let retained = retained.filter_map(|entry| to_indexed(ReplicaId(0), entry));
        reported.chain(retained).collect()
    }

    pub(crate) fn indexed_object(&self, id: ReplicaId, segment: SegmentId) -> Option<IndexedObject> {
        let entry = self.entries.get(&id)?;
        if entry.sealed && entry.stored.segment == segment { to_indexed(id, entry) } else { None }
    }

    /// Ends the journal. Called when the memory no longer belongs to the file, or the master keeps
    /// no inventory.
    pub(crate) fn end_journal(&mut self) {
        if let Some(journal) = self.journal.take() {
            empty_index(&journal);
        }
    }

    /// Records a new address of the segment.
    pub(crate) fn record_move(&mut self, addr: u64) {
        if let Some(journal) = &mut self.journal {
            journal.header.addresses.push(addr);
            let excess = journal.header.addresses.len().saturating_sub(MAX_ADDRESSES);
            journal.header.addresses.drain(..excess);
            journal.request_rewrite();
            self.write_journal();
        }
    }

    /// Takes over the objects that an earlier process recorded.
    pub(crate) fn inherit(&mut self, index: &Index, now: mooncake_core::clock::Moment) {
        (self.epoch, self.last_change) = (Some(index.epoch), index.last_change);
        self.key_form = index.has_tenants.map(KeyForm::of_master);
        for IndexedObject { replica, stored, lifetime, sum, offered } in index.objects.values().cloned() {
            let pinned = now.after(std::time::Duration::from_millis(stored.soft_pin_ms));
            let position = (stored.segment, stored.offset);
            let entry = Entry {
                stored,
                pinned,
                lifetime,
                sum: Some(sum),
                sealed: true,
                announced: false,
                offered,
                expired: false,
            };
            if replica == ReplicaId(0) {
                self.retained.insert(position, entry);
            } else {
                self.entries.insert(replica, entry);
            }
        }
    }

    /// Makes all objects that are known for certain ready to be announced as objects of `segment`.
    /// Objects that were offered to the master and not reported by it are left out.
    pub(crate) fn retain_all(&mut self, segment: SegmentId) {
        let reported = std::mem::take(&mut self.entries).into_values().filter(|entry| entry.sealed);
        let retained = std::mem::take(&mut self.retained).into_values().filter(|entry| !entry.offered);
        self.retained = retained
            .chain(reported)
            .map(|mut entry| {
                entry.stored.segment = segment;
                ((segment, entry.stored.offset), entry)
            })
            .collect();
        self.unsummed.clear();
        self.summed.clear();
    }
}

fn to_indexed(replica: ReplicaId, entry: &Entry) -> Option<IndexedObject> {
    let (stored, lifetime) = (entry.stored.clone(), entry.lifetime);
    Some(IndexedObject { replica, stored, lifetime, sum: entry.sum?, offered: entry.offered })
}

/// Empties the index, so that the next process finds no objects in it.
fn empty_index(journal: &Journal) {
    let header = Header { segment: SegmentId::default(), ..journal.header.clone() };
    let emptied = replace_file(&journal.path, &index::begin(&header)).map(drop);
    if let Err(error) = emptied.or_else(|_| remove(&journal.path)) {
        tracing::error!(index = %journal.path.display(), "cannot be emptied; remove it: {error}");
    }
}
