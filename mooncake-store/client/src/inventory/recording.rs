//! Recording of changes of the inventory in its journal.

use mooncake_core::ids::{ReplicaId, SegmentId};

use super::index::{self, Came, Found, Header};
use super::journal::{Journal, write_anew};
use super::{Entry, Inventory};

/// Maximum number of earlier addresses that stay reserved, so that no other memory is mapped there.
const PLACES: usize = 8;

/// Number of changes, beyond twice the number of objects, after which the index is rewritten.
const SPARE: usize = 10_000;

impl Inventory {
    /// Writes the changes to the journal, if there is one.
    pub(crate) fn note(&mut self) {
        let Some(epoch) = self.epoch else { return };
        let Some(mut journal) = self.journal.take() else { return };
        let came = std::mem::take(&mut journal.came);
        let went = std::mem::take(&mut journal.went);
        let offered = std::mem::take(&mut journal.offered);
        let now = (epoch, self.heard);
        let noted = if journal.anew || journal.items > 2 * (self.entries.len() + self.kept.len()) + SPARE {
            journal.rewrite(now, &self.known(journal.header.segment))
        } else {
            // Objects that came and went meanwhile are no longer in the table.
            let came = came.iter().filter_map(|id| self.came(*id, journal.header.segment));
            journal.append(now, &went, &offered, &came.collect::<Vec<_>>())
        };
        match noted {
            Ok(()) => self.journal = Some(journal),
            Err(error) => {
                tracing::warn!(index = %journal.path.display(), "objects will not outlive this process: {error}");
                give_up(&journal);
            }
        }
    }

    /// Returns the objects in a segment that are known for certain.
    pub(crate) fn known(&self, segment: SegmentId) -> Vec<Came> {
        let told = self.entries.keys().filter_map(|id| self.came(*id, segment));
        // Expired objects are left out. A later process could not know to which list of which
        // master they belong.
        let kept = self.kept_in(segment).filter(|entry| !entry.expired);
        let kept = kept.filter_map(|entry| came(ReplicaId(0), entry));
        told.chain(kept).collect()
    }

    pub(crate) fn came(&self, id: ReplicaId, segment: SegmentId) -> Option<Came> {
        let entry = self.entries.get(&id)?;
        if entry.sealed && entry.stored.segment == segment { came(id, entry) } else { None }
    }

    /// Ends the journal. Called when the memory no longer belongs to the file, or the master keeps
    /// no inventory.
    pub(crate) fn end_journal(&mut self) {
        if let Some(journal) = self.journal.take() {
            give_up(&journal);
        }
    }

    /// Records a new address of the segment.
    pub(crate) fn moved(&mut self, addr: u64) {
        if let Some(journal) = &mut self.journal {
            journal.header.places.push(addr);
            let beyond = journal.header.places.len().saturating_sub(PLACES);
            journal.header.places.drain(..beyond);
            journal.write_anew();
            self.note();
        }
    }

    /// Takes over the objects that an earlier process recorded.
    pub(crate) fn inherit(&mut self, found: &Found, now: mooncake_core::clock::Moment) {
        (self.epoch, self.heard) = (Some(found.epoch), found.heard);
        for Came { replica, stored, lifetime, sum, offered } in found.objects.values().cloned() {
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
                self.kept.insert(position, entry);
            } else {
                self.entries.insert(replica, entry);
            }
        }
    }

    /// Makes all objects that are known for certain ready to be announced as objects of `segment`.
    /// Objects that were offered to the master and not reported by it are left out.
    pub(crate) fn keep_all(&mut self, segment: SegmentId) {
        let told = std::mem::take(&mut self.entries).into_values().filter(|entry| entry.sealed);
        let kept = std::mem::take(&mut self.kept).into_values().filter(|entry| !entry.offered);
        self.kept = kept
            .chain(told)
            .map(|mut entry| {
                entry.stored.segment = segment;
                ((segment, entry.stored.offset), entry)
            })
            .collect();
        self.unseen.clear();
        self.summed.clear();
    }
}

fn came(replica: ReplicaId, entry: &Entry) -> Option<Came> {
    let (stored, lifetime) = (entry.stored.clone(), entry.lifetime);
    Some(Came { replica, stored, lifetime, sum: entry.sum?, offered: entry.offered })
}

/// Empties the index, so that the next process finds no objects in it.
fn give_up(journal: &Journal) {
    let header = Header { segment: SegmentId::default(), ..journal.header.clone() };
    let emptied = write_anew(&journal.path, &index::begin(&header)).map(drop);
    if let Err(error) = emptied.or_else(|_| std::fs::remove_file(&journal.path)) {
        tracing::error!(index = %journal.path.display(), "cannot be emptied; remove it: {error}");
    }
}
