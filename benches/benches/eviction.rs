//! Time of the eviction policies: insert, touch and evict, with no slot refused and with one in a
//! hundred always refused.
//!
//! Work: the given number of slots is held; skewed touches follow, then a batch is evicted and
//! inserted again, many times. Only the calls are timed. The policies take turns, and the median of
//! the turns counts.

#![allow(clippy::print_stdout)]

use std::time::Duration;

use mooncake_core::clock::{Clock, Rng, SystemClock};
use mooncake_core::evict::{BuiltinPolicy, EvictionPolicy, MergeableOrder, PolicyKind};
use mooncake_core::ids::SlotId;

fn main() {
    let quick = std::env::args().any(|arg| arg == "--quick");
    let (batches, turns) = if quick { (40, 1) } else { (400, 7) };
    println!("ns per call");
    println!(
        "{:<10} {:<8} {:<16} {:>8} {:>8} {:>8}",
        "slots", "policy", "refused", "insert", "touch", "evict"
    );
    for slots in [10_000, 1_000_000] {
        for (refused, pinned) in [("none", 0), ("1 in 100", 100)] {
            let mut runs: Vec<Vec<[f64; 3]>> = vec![Vec::new(); PolicyKind::ALL.len()];
            for turn in 0..turns {
                for (kind, runs) in PolicyKind::ALL.iter().zip(&mut runs) {
                    runs.push(run(*kind, slots, batches, pinned, turn));
                }
            }
            for (kind, runs) in PolicyKind::ALL.iter().zip(&runs) {
                let [insert, touch, evict] = [0, 1, 2].map(|call| median(runs.iter().map(|run| run[call])));
                println!("{slots:<10} {kind:<8} {refused:<16} {insert:>8.1} {touch:>8.1} {evict:>8.1}");
            }
        }
    }
}

/// Measures the ns of an insert, a touch and an evict. Every `pinned`th slot is always refused,
/// none if 0.
fn run(kind: PolicyKind, slots: u32, batches: usize, pinned: u32, seed: u64) -> [f64; 3] {
    const BATCH: usize = 500;
    let (clock, mut rng) = (SystemClock::new(), Rng::seeded(seed));
    let mut policy = BuiltinPolicy::new(slots as usize, &kind.into());
    for slot in 0..slots {
        policy.insert_hashed(SlotId(slot), 64 << 10, rng.next_u64());
    }
    let mut spent = [Duration::ZERO; 3];
    let mut victims = Vec::with_capacity(BATCH);
    for _ in 0..batches {
        // Half of the touches go to an eighth of the slots.
        let touched: Vec<_> = (0..BATCH)
            .map(|turn| SlotId(rng.below(u64::from(if turn % 2 == 0 { slots } else { slots / 8 })) as u32))
            .collect();
        let hashes: Vec<_> = (0..BATCH).map(|_| rng.next_u64()).collect();

        let start = clock.now();
        touched.into_iter().for_each(|slot| policy.touch(slot));
        spent[1] += clock.now().since(start);

        let start = clock.now();
        let mut allowed = |slot: SlotId| pinned == 0 || !slot.0.is_multiple_of(pinned);
        victims.extend((0..BATCH).map_while(|_| policy.evict(&mut allowed)));
        spent[2] += clock.now().since(start);
        assert_eq!(victims.len(), BATCH, "nearly all slots are allowed");

        let start = clock.now();
        for (slot, hash) in victims.drain(..).zip(hashes) {
            policy.insert_hashed(slot, 64 << 10, hash);
        }
        spent[0] += clock.now().since(start);
    }
    spent.map(|span| span.as_nanos() as f64 / (batches * BATCH) as f64)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
