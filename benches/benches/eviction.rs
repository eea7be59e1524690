//! Time and memory of the eviction policies: insert, touch and evict, with no slot refused and with
//! one in a hundred always refused.
//!
//! Work: the given number of slots is held; skewed touches follow, then a batch is evicted and
//! inserted again, many times. The first rounds are not counted, because tables still grow in them.
//! Only the calls are timed. The policies take turns, and the median of the turns counts.
//!
//! Last come the same calls on a cache of 64 shards with a million objects, whose uses come from
//! batches of random sizes, so that objects of all classes are held. An eviction chooses among the
//! shards as the master does.
//!
//! The memory is that of a policy that holds the slots and has evicted as many, tables and ghosts
//! included; what several policies of one cache share is included, too.

#![allow(clippy::print_stdout)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};
use std::time::Duration;

use mooncake_core::clock::{Clock, Rng, SystemClock};
use mooncake_core::evict::{
    BuiltinPolicy, BuiltinPolicyConfig, EvictionPolicy, MergeableOrder, Place, PolicyKind, VictimNotes,
};
use mooncake_core::ids::SlotId;

/// Allocator of the system that counts the bytes in use.
struct Counting;

/// Number of bytes in use.
static HELD: AtomicIsize = AtomicIsize::new(0);

// SAFETY: every call goes to the allocator of the system unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size() as isize, Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size() as isize, Relaxed);
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size() as isize, Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Measurements of one run: ns of an insert, a touch and an evict, and bytes for each slot.
type Measurements = [f64; 4];

fn main() {
    let quick = std::env::args().any(|arg| arg == "--quick");
    let (batches, turns) = if quick { (40, 1) } else { (400, 7) };
    println!("ns per call, bytes per slot");
    println!(
        "{:<10} {:<8} {:<10} {:>8} {:>8} {:>8} {:>8} {:>14}",
        "slots", "policy", "refused", "insert", "touch", "evict", "memory", "touch / lru"
    );
    for slots in [10_000, 1_000_000] {
        for (refused, pinned) in [("none", 0), ("1 in 100", 100)] {
            let mut runs: Vec<Vec<Measurements>> = vec![Vec::new(); PolicyKind::ALL.len()];
            for turn in 0..turns {
                for (kind, runs) in PolicyKind::ALL.iter().zip(&mut runs) {
                    runs.push(run(*kind, slots, batches, pinned, turn));
                }
            }
            let medians =
                |runs: &Vec<Measurements>| [0, 1, 2, 3].map(|at| median(runs.iter().map(|run| run[at])));
            let lru = PolicyKind::ALL.iter().position(|kind| *kind == PolicyKind::Lru);
            let of_lru = lru.map_or(f64::NAN, |lru| medians(&runs[lru])[1]);
            for (kind, runs) in PolicyKind::ALL.iter().zip(&runs) {
                let [insert, touch, evict, memory] = medians(runs);
                println!(
                    "{slots:<10} {kind:<8} {refused:<10} {insert:>8.1} {touch:>8.1} {evict:>8.1} {memory:>8.1} {:>14.2}",
                    touch / of_lru
                );
            }
        }
    }
    println!("\n64 shards with 1000000 objects, ns per call");
    println!("{:<10} {:>8} {:>8} {:>8}", "policy", "insert", "touch", "evict");
    for kind in PolicyKind::ALL {
        let runs: Vec<_> = (0..turns).map(|turn| Cache::new(*kind, turn).run(batches)).collect();
        let [insert, touch, evict] = [0, 1, 2].map(|at| median(runs.iter().map(|run| run[at])));
        println!("{kind:<10} {insert:>8.1} {touch:>8.1} {evict:>8.1}");
    }
}

const SHARDS: u64 = 64;
const OBJECTS: u64 = 1_000_000;

/// Cache of many shards.
struct Cache {
    shards: Vec<Shard>,
    notes: VictimNotes,
    rng: Rng,
    /// Number of uses.
    now: u64,
}

struct Shard {
    policy: BuiltinPolicy,
    /// Next victim with its rank, outside of the policy.
    next: Option<(SlotId, u64)>,
    /// Hash and last use of each object.
    objects: Vec<(u64, u64)>,
}

impl Cache {
    fn new(kind: PolicyKind, seed: u64) -> Self {
        let config = BuiltinPolicy::for_one_cache(&BuiltinPolicyConfig::from(kind));
        let shard = |_| Shard { policy: BuiltinPolicy::new(0, &config), next: None, objects: Vec::new() };
        let mut cache = Self {
            shards: (0..SHARDS).map(shard).collect(),
            notes: VictimNotes::new(SHARDS as usize),
            rng: Rng::seeded(seed),
            now: 0,
        };
        for object in 0..OBJECTS {
            let place = cache.place();
            cache.insert((object % SHARDS) as usize, SlotId((object / SHARDS) as u32), &place);
        }
        cache.run((OBJECTS as usize).div_ceil(BATCH));
        cache
    }

    fn place(&mut self) -> Place {
        self.now += 1;
        let fresh = 1 << self.rng.below(8);
        Place { number: self.now, parent: 0, fresh, goes_on: self.rng.below(2) == 0 }
    }

    /// Measures the ns of an insert, a touch and an evict.
    fn run(&mut self, batches: usize) -> [f64; 3] {
        let clock = SystemClock::new();
        let mut spent = [Duration::ZERO; 3];
        for _ in 0..batches {
            let touches: Vec<_> = (0..BATCH as u64)
                .map(|turn| {
                    let object = self.rng.below(OBJECTS / (1 + turn % 2 * 7));
                    ((object % SHARDS) as usize, SlotId((object / SHARDS) as u32), self.place())
                })
                .collect();
            let start = clock.now();
            touches.iter().for_each(|(shard, slot, place)| self.touch(*shard, *slot, place));
            spent[1] += clock.now().since(start);

            let start = clock.now();
            let victims: Vec<_> = (0..BATCH).map(|_| self.evict()).collect();
            spent[2] += clock.now().since(start);

            let inserts: Vec<_> =
                victims.into_iter().map(|(shard, slot)| (shard, slot, self.place())).collect();
            let start = clock.now();
            inserts.iter().for_each(|(shard, slot, place)| self.insert(*shard, *slot, place));
            spent[0] += clock.now().since(start);
        }
        spent.map(|span| span.as_nanos() as f64 / (batches * BATCH) as f64)
    }

    fn insert(&mut self, shard: usize, slot: SlotId, place: &Place) {
        let Shard { policy, objects, .. } = &mut self.shards[shard];
        // An odd factor makes a different hash of each number.
        let hash = place.number.wrapping_mul(0xd6e8_feb8_6659_fd93);
        if slot.index() == objects.len() {
            objects.push((0, 0));
        }
        objects[slot.index()] = (hash, place.number);
        policy.insert_at(slot, 64 << 10, hash, place);
        self.notes.lower_after_use(shard, policy, slot, place);
    }

    fn touch(&mut self, shard: usize, slot: SlotId, place: &Place) {
        let Shard { policy, next, objects } = &mut self.shards[shard];
        objects[slot.index()].1 = place.number;
        if next.take_if(|(victim, _)| *victim == slot).is_some() {
            policy.take_back(slot, 64 << 10, objects[slot.index()].0);
        }
        policy.touch_at(slot, place);
        self.notes.lower_after_use(shard, policy, slot, place);
    }

    fn evict(&mut self) -> (usize, SlotId) {
        if self.shards[0].policy.ranks_by_value() {
            for _ in 0..2 {
                self.look(self.notes.next_shard());
            }
        }
        loop {
            let (index, _, second) = self.notes.least();
            if self.look(index).is_some_and(|rank| rank <= second)
                && let Some((victim, _)) = self.shards[index].next.take()
            {
                self.look(index);
                return (index, victim);
            }
        }
    }

    /// Finds the next victim of a shard, and notes and returns its rank.
    fn look(&mut self, index: usize) -> Option<u64> {
        let Shard { policy, next, objects } = &mut self.shards[index];
        if policy.ranks_by_value()
            && let Some((slot, _)) = next.take()
        {
            policy.take_back(slot, 64 << 10, objects[slot.index()].0);
        }
        if next.is_none() {
            policy.set_time(self.now);
            *next = policy.evict(&mut |_| true).map(|slot| {
                let rank = policy.victim_value().or_else(|| policy.victim_since());
                (slot, rank.unwrap_or(objects[slot.index()].1))
            });
        }
        let rank = next.map(|(_, rank)| rank);
        self.notes.note(index, rank.unwrap_or(u64::MAX));
        rank
    }
}

/// Number of slots that are touched, evicted and inserted in a round.
const BATCH: usize = 500;

/// Runs a policy. Every `pinned`th slot is always refused, none if 0.
fn run(kind: PolicyKind, slots: u32, batches: usize, pinned: u32, seed: u64) -> Measurements {
    let mut rng = Rng::seeded(seed);
    let before = HELD.load(Relaxed);
    let mut policy = BuiltinPolicy::new(slots as usize, &kind.into());
    for slot in 0..slots {
        policy.insert_hashed(SlotId(slot), 64 << 10, rng.next_u64());
    }
    rounds(&mut policy, slots, (slots as usize).div_ceil(BATCH), pinned, &mut rng);
    let [insert, touch, evict] = rounds(&mut policy, slots, batches, pinned, &mut rng);
    let memory = (HELD.load(Relaxed) - before) as f64 / f64::from(slots);
    [insert, touch, evict, memory]
}

/// Measures the ns of an insert, a touch and an evict.
fn rounds(policy: &mut BuiltinPolicy, slots: u32, batches: usize, pinned: u32, rng: &mut Rng) -> [f64; 3] {
    let clock = SystemClock::new();
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
