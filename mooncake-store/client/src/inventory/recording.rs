//! Changes of the inventory, as they go into its journal.

use mooncake_core::ids::{ReplicaId, SegmentId};

use super::index::{self, Came, Found, Header};
use super::journal::{Journal, write_anew};
use super::{Entry, Inventory};

/// Addresses of processes before that nothing else may come to lie at.
const PLACES: usize = 8;

/// Changes beyond twice the objects there are, before the index is written anew.
const SPARE: usize = 10_000;

impl Inventory {
    /// Writes down what has changed, if it is to be.
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
            // What came and went meanwhile is not here any more.
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

    /// Objects in a segment that are known for sure.
    pub(crate) fn known(&self, segment: SegmentId) -> Vec<Came> {
        let told = self.entries.keys().filter_map(|id| self.came(*id, segment));
        // A later process could not say to which list of which master the others belong.
        let kept = self.kept_in(segment).filter(|entry| !entry.expired);
        let kept = kept.filter_map(|entry| came(ReplicaId(0), entry));
        told.chain(kept).collect()
    }

    pub(crate) fn came(&self, id: ReplicaId, segment: SegmentId) -> Option<Came> {
        let entry = self.entries.get(&id)?;
        if entry.sealed && entry.stored.segment == segment { came(id, entry) } else { None }
    }

    /// The memory is not the file's any more, or its master tells nothing.
    pub(crate) fn end_journal(&mut self) {
        if let Some(journal) = self.journal.take() {
            give_up(&journal);
        }
    }

    /// The segment lies elsewhere from now on.
    pub(crate) fn moved(&mut self, addr: u64) {
        if let Some(journal) = &mut self.journal {
            journal.header.places.push(addr);
            let beyond = journal.header.places.len().saturating_sub(PLACES);
            journal.header.places.drain(..beyond);
            journal.write_anew();
            self.note();
        }
    }

    /// Takes up what a dead process knew.
    pub(crate) fn inherit(&mut self, found: &Found, now: mooncake_core::clock::Moment) {
        (self.epoch, self.heard) = (Some(found.epoch), found.heard);
        for Came { replica, stored, sum, offered } in found.objects.values().cloned() {
            let pinned = now.after(std::time::Duration::from_millis(stored.soft_pin_ms));
            let place = (stored.segment, stored.offset);
            let entry = Entry {
                stored,
                pinned,
                sum: Some(sum),
                sealed: true,
                announced: false,
                offered,
                expired: false,
            };
            if replica == ReplicaId(0) {
                self.kept.insert(place, entry);
            } else {
                self.entries.insert(replica, entry);
            }
        }
    }

    /// All that is known for sure is to be announced, as lying in another segment. What the master
    /// was offered and has not told of is none of it.
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
    Some(Came { replica, stored: entry.stored.clone(), sum: entry.sum?, offered: entry.offered })
}

/// Nothing of it is to be believed.
fn give_up(journal: &Journal) {
    let header = Header { segment: SegmentId::default(), ..journal.header.clone() };
    let emptied = write_anew(&journal.path, &index::begin(&header)).map(drop);
    if let Err(error) = emptied.or_else(|_| std::fs::remove_file(&journal.path)) {
        tracing::error!(index = %journal.path.display(), "cannot be emptied; remove it: {error}");
    }
}
