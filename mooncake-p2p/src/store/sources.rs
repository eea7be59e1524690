//! Sources of one read: numbers for the schedule, slots in use, and pauses after failures.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use mooncake_core::backoff::{Backoff, Pace};
use mooncake_core::clock::{Moment, Rng};

use super::inner::Inner;
use crate::catalogue::Payload;
use crate::records::SlotOfSource;
use crate::schedule::{Choice, OtherRead, ShardCopy, SourceId, View};

/// Pauses after failed reads from one source.
const PACE: Pace = Pace { first: Duration::from_millis(250), max: Duration::from_secs(5) };

/// Segments that an object is read from.
pub(super) struct Sources {
    ids: HashMap<String, SourceId>,
    names: Vec<String>,
    backoffs: HashMap<SourceId, Backoff>,
    /// Slots that other readers have.
    taken: HashSet<(SourceId, usize)>,
    /// Slots of this reader by shard.
    own: HashMap<usize, (SourceId, usize)>,
    /// Addresses of the shards: by shard and source.
    addresses: HashMap<(usize, SourceId), u64>,
    pub(super) view: View,
}

impl Sources {
    pub(super) fn new() -> Self {
        Self {
            ids: HashMap::new(),
            names: Vec::new(),
            backoffs: HashMap::new(),
            taken: HashSet::new(),
            own: HashMap::new(),
            addresses: HashMap::new(),
            view: View::default(),
        }
    }

    fn id(&mut self, segment: &str) -> SourceId {
        if let Some(id) = self.ids.get(segment) {
            return *id;
        }
        let id = self.names.len();
        self.names.push(segment.to_owned());
        self.ids.insert(segment.to_owned(), id);
        id
    }

    pub(super) fn name(&self, source: SourceId) -> &str {
        &self.names[source]
    }

    /// Replaces the copies by those of the catalogue. The copies of this node are left out.
    pub(super) fn set_copies(&mut self, inner: &Inner, payload: &Payload) {
        self.addresses.clear();
        self.view.copies.clear();
        for (shard, of_shard) in payload.shards.iter().enumerate() {
            let mut copies = Vec::new();
            for (location, role) in of_shard.locations() {
                if location.segment_name == inner.segment {
                    continue;
                }
                let source = self.id(&location.segment_name);
                self.addresses.insert((shard, source), location.offset);
                copies.push(ShardCopy {
                    source,
                    role,
                    is_own_host: inner.is_own_host(&location.segment_name),
                });
            }
            self.view.copies.push(copies);
        }
    }

    /// Replaces the reads in progress. Returns the slots of this reader that it does not use: those
    /// of a process before it, or of a lost response.
    pub(super) fn set_reads(
        &mut self,
        inner: &Inner,
        name: &str,
        reads: Vec<SlotOfSource>,
        held: &HashMap<usize, SlotOfSource>,
    ) -> Vec<SlotOfSource> {
        self.taken.clear();
        self.view.reads.clear();
        let mut unused = Vec::new();
        for read in reads {
            let source = self.id(&read.source);
            let is_of_object = read.read.name == name;
            if is_of_object && read.read.reader == inner.segment {
                if self.own.get(&read.read.shard) != Some(&(source, read.slot)) {
                    unused.push(read);
                } else if held.contains_key(&read.read.shard) {
                    self.view.reads.push(OtherRead { source, shard: None, is_own_host: false });
                }
                continue;
            }
            self.taken.insert((source, read.slot));
            let is_own_host = inner.is_own_host(&read.read.reader);
            let shard = is_of_object.then_some(read.read.shard);
            self.view.reads.push(OtherRead { source, shard, is_own_host });
        }
        unused
    }

    /// Returns the address of a shard in a source.
    pub(super) fn address(&self, choice: Choice) -> Option<u64> {
        self.addresses.get(&(choice.shard, choice.source)).copied()
    }

    /// Chooses a free slot of a source at random, and notes it as this reader's.
    pub(super) fn choose_slot(&mut self, choice: Choice, slots: usize, rng: &mut Rng) -> Option<usize> {
        let is_free = |slot: &usize| {
            let slot = (choice.source, *slot);
            !self.taken.contains(&slot) && !self.own.values().any(|own| *own == slot)
        };
        let free: Vec<usize> = (0..slots).filter(is_free).collect();
        let slot = *free.get(rng.below(free.len() as u64) as usize)?;
        self.own.insert(choice.shard, (choice.source, slot));
        Some(slot)
    }

    /// Notes that the slot for a shard is free again.
    pub(super) fn free_slot(&mut self, shard: usize) {
        self.own.remove(&shard);
    }

    /// Notes that another reader took the slot first.
    pub(super) fn slot_was_taken(&mut self, choice: Choice) {
        if let Some(slot) = self.own.remove(&choice.shard) {
            self.taken.insert(slot);
            self.view.reads.push(OtherRead { source: slot.0, shard: None, is_own_host: false });
        }
    }

    /// Returns the end of the pause of a source that failed.
    pub(super) fn failed(&mut self, source: SourceId, now: Moment, rng: &mut Rng) -> Moment {
        let backoff = self.backoffs.entry(source).or_insert_with(|| Backoff::new(rng.split()));
        backoff.failed(now, now, &PACE)
    }

    pub(super) fn worked(&mut self, source: SourceId) {
        self.backoffs.remove(&source);
    }
}
