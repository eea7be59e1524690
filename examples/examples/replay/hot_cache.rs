//! Hit ratios of orders of eviction for the hot cache of a client, beside `moka`.
//!
//! One client reads every block that was stored before, from a store without bounds. A read counts
//! as found if the block is in the hot cache.

use std::collections::{HashMap, HashSet};

use moka::policy::EvictionPolicy as MokaPolicy;
use moka::sync::Cache;
use mooncake_core::evict::{Gittins, Lru, MergeableOrder};
use mooncake_core::ids::SlotId;
use mooncake_core::sketch::Sketch;
use mooncake_core::testkit::policies::TinyLfu;
use mooncake_core::testkit::simulate::hash;

use crate::table::{Row, Table};
use crate::trace::Trace;

/// Counters of the sketch that counts reads, as in the client.
const COUNTERS: usize = 1 << 16;

/// Cache that reads of blocks go through.
trait Reads {
    /// Reads a block, and may keep it. Returns whether it was found.
    fn read(&mut self, id: u64) -> bool;
}

/// Cache under a policy, which keeps a block after a number of recent reads.
struct Ordered<P> {
    policy: P,
    slots: HashMap<u64, SlotId>,
    hashes: Vec<u64>,
    capacity: usize,
    asked: Sketch,
    admission: u8,
}

impl<P: MergeableOrder> Ordered<P> {
    fn new(capacity: usize, admission: u8) -> Self {
        Self {
            policy: P::new(capacity, &P::Config::default()),
            slots: HashMap::new(),
            hashes: Vec::new(),
            capacity,
            asked: Sketch::new(COUNTERS, 8 * COUNTERS),
            admission,
        }
    }

    /// Returns a free slot. Evicts a block if there is none.
    fn free_slot(&mut self) -> Option<SlotId> {
        if self.hashes.len() < self.capacity {
            self.hashes.push(0);
            return Some(SlotId(self.hashes.len() as u32 - 1));
        }
        let slot = self.policy.evict(&mut |_| true)?;
        self.slots.remove(&self.hashes[slot.index()]);
        Some(slot)
    }
}

impl<P: MergeableOrder> Reads for Ordered<P> {
    fn read(&mut self, id: u64) -> bool {
        let hash = hash(id);
        if let Some(slot) = self.slots.get(&hash) {
            self.policy.touch(*slot);
            return true;
        }
        if self.asked.add(hash) >= self.admission
            && let Some(slot) = self.free_slot()
        {
            self.policy.insert_hashed(slot, 1, hash);
            self.slots.insert(hash, slot);
            self.hashes[slot.index()] = hash;
        }
        false
    }
}

/// `moka`, whose housekeeping runs after each call.
struct Moka(Cache<u64, ()>);

impl Moka {
    fn new(capacity: usize) -> Self {
        let policy = MokaPolicy::tiny_lfu();
        Self(Cache::builder().max_capacity(capacity as u64).eviction_policy(policy).build())
    }
}

impl Reads for Moka {
    fn read(&mut self, id: u64) -> bool {
        let is_found = self.0.get(&id).is_some();
        if !is_found {
            self.0.insert(id, ());
        }
        self.0.run_pending_tasks();
        is_found
    }
}

/// Creates a cache of so many blocks.
type NewCache = fn(usize) -> Box<dyn Reads>;

const CACHES: [(&str, NewCache); 6] = [
    ("`lru` from the second read on", |blocks| Box::new(Ordered::<Lru>::new(blocks, 2))),
    ("`gittins` from the second read on", |blocks| Box::new(Ordered::<Gittins>::new(blocks, 2))),
    ("`lru` from the first read on", |blocks| Box::new(Ordered::<Lru>::new(blocks, 1))),
    ("`gittins` from the first read on", |blocks| Box::new(Ordered::<Gittins>::new(blocks, 1))),
    ("`w-tinylfu`", |blocks| Box::new(Ordered::<TinyLfu>::new(blocks, 1))),
    ("`moka`, TinyLFU", |blocks| Box::new(Moka::new(blocks))),
];

/// Returns the hit ratios of each cache at each size.
pub(crate) fn compare(trace: &Trace, sizes: &[u64]) -> Table {
    let reads = reads(trace);
    let ratio = |new: NewCache, size: u64| {
        let mut cache = new(size as usize);
        let found = reads.iter().filter(|id| cache.read(**id)).count();
        found as f64 / (reads.len() as f64).max(1.0)
    };
    let row = |(name, new): (&str, NewCache)| Row {
        name: name.into(),
        ratios: sizes.iter().map(|size| ratio(new, *size)).collect(),
        is_bound: false,
    };
    Table { sizes: sizes.to_vec(), rows: CACHES.map(row).into() }
}

/// Returns the uses of blocks that were used before.
fn reads(trace: &Trace) -> Vec<u64> {
    let mut seen = HashSet::new();
    trace.chains().flatten().copied().filter(|id| !seen.insert(*id)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Trace;

    fn found(cache: &mut dyn Reads, ids: &[u64]) -> usize {
        ids.iter().filter(|id| cache.read(**id)).count()
    }

    #[test]
    fn a_block_is_kept_from_a_number_of_reads_on() {
        let reads = [1, 2, 1, 2, 1, 2];
        assert_eq!(found(&mut Ordered::<Lru>::new(2, 1), &reads), 4);
        assert_eq!(found(&mut Ordered::<Lru>::new(2, 2), &reads), 2);
        assert_eq!(found(&mut Ordered::<Lru>::new(1, 1), &reads), 0);
        assert_eq!(found(&mut Moka::new(2), &reads), 4);
    }

    #[test]
    fn a_first_use_is_no_read() {
        let trace = Trace::with_pauses(vec![vec![1, 2], vec![1, 3, 1]]);
        assert_eq!(reads(&trace), [1, 1]);
        let table = compare(&trace, &[10]);
        assert_eq!(
            table.rows.iter().map(|row| row.ratios[0]).collect::<Vec<_>>(),
            [0.0, 0.0, 0.5, 0.5, 0.5, 0.5]
        );
    }
}
