//! Hit ratios of memory with a disk behind it, by exact simulation: which policy orders the disk,
//! and which blocks return to memory.
//!
//! `MOONCAKE_TRACES` names a folder with `conversation_trace.jsonl`, for the table in
//! `docs/disk.md`.

// Miri would take hours, and there is no unsafe code here to check.
#![cfg(not(miri))]
#![allow(clippy::print_stdout, reason = "the hit ratios are looked at, too")]

mod traces;

use std::collections::HashMap;

use mooncake_core::evict::{
    Batch, BuiltinPolicy, BuiltinPolicyConfig, ChainEnd, EvictionPolicy, MergeableOrder, Place, PolicyKind,
};
use mooncake_core::ids::SlotId;
use mooncake_core::testkit::simulate::hash;
use mooncake_core::testkit::workloads::{self, Requests};

/// Memory or disk of a number of blocks.
struct Tier {
    policy: BuiltinPolicy,
    slots: HashMap<u64, SlotId>,
    hashes: Vec<u64>,
    free: Vec<SlotId>,
    capacity: usize,
}

impl Tier {
    fn new(kind: PolicyKind, capacity: usize) -> Self {
        let config = BuiltinPolicy::for_one_cache(&BuiltinPolicyConfig::from(kind));
        Self {
            policy: BuiltinPolicy::new(capacity, &config),
            slots: HashMap::new(),
            hashes: Vec::new(),
            free: Vec::new(),
            capacity,
        }
    }

    fn has(&self, hash: u64) -> bool {
        self.slots.contains_key(&hash)
    }

    fn add(&mut self, hash: u64) -> SlotId {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.hashes.push(0);
            SlotId(self.hashes.len() as u32 - 1)
        });
        self.hashes[slot.index()] = hash;
        self.slots.insert(hash, slot);
        slot
    }

    fn change_children(&mut self, parent: u64, more: bool) {
        if let Some(slot) = self.slots.get(&parent) {
            self.policy.change_children(*slot, more);
        }
    }

    /// Makes space for a block. Returns what was evicted.
    fn make_space(&mut self) -> Option<u64> {
        if self.slots.len() < self.capacity {
            return None;
        }
        let slot = self.policy.evict(&mut |_| true)?;
        let (hash, parent) = (self.hashes[slot.index()], self.policy.parent(slot));
        self.slots.remove(&hash);
        self.free.push(slot);
        self.change_children(parent, false);
        Some(hash)
    }

    /// Returns whether the next victim is of less value than a block that is used.
    fn has_less_than(&mut self, hash: u64, place: &Place) -> bool {
        let value = self.policy.value_if_used(hash, place);
        let Some(victim) = self.policy.evict(&mut |_| true) else { return true };
        let least = self.policy.victim_value();
        self.policy.take_back(victim, 1, self.hashes[victim.index()]);
        least < value
    }

    /// Adds a block to a disk, which knows nothing of chains.
    fn write(&mut self, hash: u64) {
        if !self.has(hash) {
            self.make_space();
            let slot = self.add(hash);
            self.policy.insert_hashed(slot, 1, hash);
        }
    }
}

/// Blocks that return to memory when the disk is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Promotion {
    Never,
    Always,
    /// If the next victim in memory is of less value.
    ByValue,
}

#[derive(Clone, Copy, Debug)]
struct Rules {
    memory: PolicyKind,
    disk: PolicyKind,
    /// True if blocks are written when they leave memory, not when they are stored.
    on_evict: bool,
    promotion: Promotion,
}

/// Shares of the blocks that requests find.
#[derive(Clone, Copy, Debug)]
struct Found {
    in_all: f64,
    in_memory: f64,
    promotions: usize,
}

fn found(rules: Rules, memory: usize, disk: usize, requests: &Requests) -> Found {
    let (mut top, mut low) = (Tier::new(rules.memory, memory), Tier::new(rules.disk, disk));
    let (mut now, mut requested, mut in_memory, mut on_disk, mut promotions) = (0, 0, 0, 0, 0);
    for chain in requests {
        let hashes: Vec<u64> = chain.iter().map(|id| hash(*id)).collect();
        now += hashes.len() as u64;
        requested += hashes.len();
        top.policy.set_time(now);
        let batch = Batch::new(hashes.clone(), now, ChainEnd::default(), |hash| {
            top.has(hash) || low.has(hash) || top.policy.remembers(hash)
        });
        let front = hashes.iter().take_while(|hash| top.has(**hash) || low.has(**hash)).count();
        for at in (0..hashes.len()).rev() {
            let (hash, place) = (hashes[at], batch.place(at));
            if let Some(slot) = top.slots.get(&hash) {
                in_memory += usize::from(at < front);
                top.policy.touch_at(*slot, &place);
                continue;
            }
            if let Some(slot) = low.slots.get(&hash) {
                if at >= front {
                    continue;
                }
                on_disk += 1;
                low.policy.touch(*slot);
                let returns = match rules.promotion {
                    Promotion::Never => false,
                    Promotion::Always => true,
                    Promotion::ByValue => top.slots.len() < memory || top.has_less_than(hash, &place),
                };
                if !returns {
                    continue;
                }
                promotions += 1;
            }
            if let Some(evicted) = top.make_space().filter(|_| rules.on_evict) {
                low.write(evicted);
            }
            let slot = top.add(hash);
            top.policy.insert_at(slot, 1, hash, &place);
            top.change_children(place.parent, true);
            if !rules.on_evict {
                low.write(hash);
            }
        }
    }
    let share = |blocks: usize| blocks as f64 / requested as f64;
    Found { in_all: share(in_memory + on_disk), in_memory: share(in_memory), promotions }
}

const RULES: Rules = Rules {
    memory: PolicyKind::Gittins,
    disk: PolicyKind::Gittins,
    on_evict: false,
    promotion: Promotion::Never,
};

#[test]
fn a_disk_that_learns_finds_more() {
    let requests = workloads::documents(0.9, 2000, 100_000, 5);
    for on_evict in [false, true] {
        let of = |disk| found(Rules { disk, on_evict, ..RULES }, 500, 3000, &requests).in_all;
        let [lru, tenure, gittins] = [PolicyKind::Lru, PolicyKind::Tenure, PolicyKind::Gittins].map(of);
        assert!(gittins > lru.max(tenure) + 0.01, "{gittins} with gittins, {lru} {tenure}");
    }
}

#[test]
fn promotions_by_value_find_nearly_as_much_with_a_fraction_of_the_reads() {
    let requests = workloads::documents(0.9, 2000, 100_000, 5);
    let of = |promotion| found(Rules { promotion, ..RULES }, 500, 10_000, &requests);
    let [never, always, by_value] = [Promotion::Never, Promotion::Always, Promotion::ByValue].map(of);
    assert!(by_value.in_memory > never.in_memory + 0.02, "{never:?} {by_value:?}");
    assert!(by_value.in_memory > always.in_memory - 0.03, "{always:?} {by_value:?}");
    assert!(by_value.promotions * 3 < always.promotions, "{always:?} {by_value:?}");
}

const SIZES: [(usize, usize); 6] =
    [(1000, 2000), (1000, 5000), (5000, 5000), (5000, 10_000), (5000, 20_000), (5000, 60_000)];

#[test]
fn the_conversation_trace() {
    let Some(requests) = traces::trace("conversation_trace.jsonl") else { return };
    for (memory, on_evict) in [
        (PolicyKind::Tenure, false),
        (PolicyKind::Tenure, true),
        (PolicyKind::Gittins, false),
        (PolicyKind::Gittins, true),
    ] {
        println!("memory {memory}, on evict {on_evict}: {SIZES:?}");
        for disk in [PolicyKind::Fifo, PolicyKind::Lru, PolicyKind::Tenure, PolicyKind::Gittins] {
            let rules = Rules { memory, disk, on_evict, ..RULES };
            let all =
                SIZES.map(|(memory, disk)| format!("{:.4}", found(rules, memory, disk, &requests).in_all));
            println!("{disk:>8} {}", all.join(" "));
        }
    }
    for promotion in [Promotion::Never, Promotion::Always, Promotion::ByValue] {
        let all = SIZES.map(|(memory, disk)| {
            let Found { in_all, in_memory, promotions } =
                found(Rules { promotion, ..RULES }, memory, disk, &requests);
            format!("{in_all:.4} ({in_memory:.4}, {promotions})")
        });
        println!("{promotion:?} {}", all.join(" "));
    }
}
