//! Read rates of the objects of a shard.

use std::collections::HashMap;

use mooncake_core::clock::Moment;
use mooncake_core::ids::SlotId;

use crate::model::options::HotOptions;

const COUNTED: usize = 1 << 14;

/// Recent reads of one object.
#[derive(Clone, Copy, Debug)]
struct ReadRate {
    since: Moment,
    hits: u64,
    before: u64,
}

/// Recent reads of the objects of one shard.
#[derive(Debug, Default)]
pub(crate) struct ReadRates(HashMap<SlotId, ReadRate>);

impl ReadRates {
    /// Counts a read. Returns whether the read makes the object hot.
    pub(crate) fn count(&mut self, slot: SlotId, options: &HotOptions, now: Moment) -> bool {
        if self.0.len() >= COUNTED && !self.0.contains_key(&slot) {
            return false;
        }
        let rate = self.0.entry(slot).or_insert(ReadRate { since: now, hits: 0, before: 0 });
        let past = now.since(rate.since);
        if past >= options.window {
            let before = if past < 2 * options.window { rate.hits } else { 0 };
            *rate = ReadRate { since: now, hits: 0, before };
        }
        rate.hits += 1;
        rate.hits == options.threshold()
    }

    /// Returns whether an object is hot.
    pub(crate) fn is_hot(&self, slot: SlotId, options: &HotOptions, now: Moment) -> bool {
        self.0.get(&slot).is_some_and(|rate| {
            let past = now.since(rate.since);
            let threshold = options.threshold();
            rate.hits >= threshold && past < 2 * options.window
                || rate.before >= threshold && past < options.window
        })
    }

    /// Forgets a slot, which may hold another object from now on.
    pub(crate) fn forget(&mut self, slot: SlotId) {
        if !self.0.is_empty() {
            self.0.remove(&slot);
        }
    }

    /// Forgets objects without recent reads.
    pub(crate) fn prune(&mut self, options: &HotOptions, now: Moment) {
        self.0.retain(|_, rate| now.since(rate.since) < 2 * options.window);
    }
}
