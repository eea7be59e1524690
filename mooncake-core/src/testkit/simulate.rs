//! Exact simulation of a cache of blocks, to measure eviction policies.
//!
//! A request is a chain of block ids. It finds the longest prefix of blocks that are there, and
//! stores the others. All blocks have one size.

use std::collections::{BTreeSet, HashMap};

use crate::evict::{Batch, ChainEnd, MergeableOrder, VictimNotes};
use crate::ids::SlotId;

/// Cache that is measured.
pub trait Cache {
    /// Handles a request. Returns the number of blocks found, from the front.
    fn request(&mut self, chain: &[u64]) -> usize;
}

/// Returns the share of the blocks that requests find.
pub fn hit_rate<'r>(cache: &mut impl Cache, requests: impl IntoIterator<Item = &'r [u64]>) -> f64 {
    let (mut found, mut requested) = (0, 0);
    for chain in requests {
        found += cache.request(chain);
        requested += chain.len();
    }
    found as f64 / (requested as f64).max(1.0)
}

/// Form in which a client passes a request on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Calls {
    /// Maximum number of keys in a call.
    pub keys: usize,
    /// True if consecutive calls of a request are linked.
    pub linked: bool,
    /// True if the last key of a call is the oldest.
    pub deepest_oldest: bool,
}

impl Default for Calls {
    fn default() -> Self {
        Self { keys: usize::MAX, linked: false, deepest_oldest: true }
    }
}

/// Cache of a number of blocks under a policy. With several shards, the victim with the least value
/// goes; the policy must rank by value then.
#[derive(Debug)]
pub struct PolicyCache<P> {
    shards: Vec<ShardState<P>>,
    notes: VictimNotes,
    capacity: usize,
    len: usize,
    now: u64,
    calls: Calls,
}

#[derive(Debug)]
struct ShardState<P> {
    policy: P,
    slots: HashMap<u64, SlotId>,
    keys: Vec<u64>,
    free: Vec<SlotId>,
}

impl<P: MergeableOrder> PolicyCache<P> {
    /// Creates a cache of `capacity` blocks.
    pub fn new(config: &P::Config, capacity: usize, shards: usize, calls: Calls) -> Self {
        let config = P::for_one_cache(config);
        let shard = |_| ShardState {
            policy: P::new(capacity.div_ceil(shards), &config),
            slots: HashMap::new(),
            keys: Vec::new(),
            free: Vec::new(),
        };
        Self {
            shards: (0..shards).map(shard).collect(),
            notes: VictimNotes::new(shards),
            capacity,
            len: 0,
            now: 0,
            calls,
        }
    }

    fn shard(&self, hash: u64) -> usize {
        (hash >> 40) as usize % self.shards.len()
    }

    fn find(&self, hash: u64) -> Option<(usize, SlotId)> {
        let shard = self.shard(hash);
        self.shards[shard].slots.get(&hash).map(|slot| (shard, *slot))
    }

    /// Uses the keys of a batch. Returns the number of keys found from the front, and the end of
    /// the chain.
    fn call(&mut self, hashes: &[u64], before: ChainEnd) -> (usize, ChainEnd) {
        let found = hashes.iter().take_while(|hash| self.find(**hash).is_some()).count();
        self.now += hashes.len() as u64;
        let batch = Batch::new(hashes.to_vec(), self.now, before, |hash| {
            let shard = &self.shards[self.shard(hash)];
            shard.slots.contains_key(&hash) || shard.policy.remembers(hash)
        });
        let mut order: Vec<usize> = (0..hashes.len()).collect();
        if self.calls.deepest_oldest {
            order.reverse();
        }
        for at in order {
            self.use_key(hashes, at, &batch);
        }
        (found, batch.end())
    }

    fn use_key(&mut self, hashes: &[u64], at: usize, batch: &Batch) {
        let (hash, place) = (hashes[at], batch.place(at));
        if let Some((index, slot)) = self.find(hash) {
            let policy = &mut self.shards[index].policy;
            policy.touch_at(slot, &place);
            self.notes.lower_after_use(index, policy, slot, &place);
            return;
        }
        if self.len == self.capacity {
            self.evict();
        }
        self.len += 1;
        let index = self.shard(hash);
        let shard = &mut self.shards[index];
        let slot = shard.free.pop().unwrap_or_else(|| {
            shard.keys.push(0);
            SlotId(shard.keys.len() as u32 - 1)
        });
        shard.keys[slot.index()] = hash;
        shard.slots.insert(hash, slot);
        shard.policy.insert_at(slot, 1, hash, &place);
        // A child that is there was inserted without its parent.
        if let Some(child) = hashes.get(at + 1)
            && self.find(*child).is_some_and(|(index, slot)| self.shards[index].policy.parent(slot) == hash)
        {
            self.shards[index].policy.change_children(slot, true);
        }
        self.lower(index, slot);
        self.change_children(place.parent, true);
    }

    fn lower(&self, index: usize, slot: SlotId) {
        if let Some(value) = self.shards[index].policy.value(slot) {
            self.notes.lower(index, value);
        }
    }

    fn change_children(&mut self, parent: u64, more: bool) {
        if parent != 0
            && let Some((index, slot)) = self.find(parent)
        {
            self.shards[index].policy.change_children(slot, more);
            self.lower(index, slot);
        }
    }

    fn evict(&mut self) {
        if self.shards.len() == 1 {
            let victim = self.shards[0].policy.evict(&mut |_| true);
            return self.forget(0, victim.expect("the cache is full"));
        }
        for _ in 0..2 {
            let index = self.notes.next_shard();
            let victim = self.look(index);
            self.give_back(index, victim);
        }
        loop {
            let (index, _, second) = self.notes.least();
            let Some((slot, value)) = self.look(index) else { continue };
            if value <= second {
                self.forget(index, slot);
                let next = self.look(index);
                return self.give_back(index, next);
            }
            self.give_back(index, Some((slot, value)));
        }
    }

    /// Takes the next victim of a shard and notes its value.
    fn look(&mut self, index: usize) -> Option<(SlotId, u64)> {
        let policy = &mut self.shards[index].policy;
        policy.set_time(self.now);
        let victim = policy.evict(&mut |_| true);
        let value = policy.victim_value().unwrap_or(u64::MAX);
        self.notes.note(index, victim.map_or(u64::MAX, |_| value));
        victim.map(|slot| (slot, value))
    }

    fn give_back(&mut self, index: usize, victim: Option<(SlotId, u64)>) {
        if let Some((slot, _)) = victim {
            let shard = &mut self.shards[index];
            shard.policy.take_back(slot, 1, shard.keys[slot.index()]);
        }
    }

    fn forget(&mut self, index: usize, slot: SlotId) {
        let shard = &mut self.shards[index];
        let parent = shard.policy.parent(slot);
        shard.slots.remove(&shard.keys[slot.index()]);
        shard.free.push(slot);
        self.len -= 1;
        self.change_children(parent, false);
    }
}

impl<P: MergeableOrder> Cache for PolicyCache<P> {
    fn request(&mut self, chain: &[u64]) -> usize {
        let hashes: Vec<u64> = chain.iter().map(|id| hash(*id)).collect();
        let (mut found, mut before, mut is_whole) = (0, ChainEnd::default(), true);
        for keys in hashes.chunks(self.calls.keys) {
            let (of_call, end) = self.call(keys, before);
            found += if is_whole { of_call } else { 0 };
            is_whole &= of_call == keys.len();
            before = if self.calls.linked { end } else { ChainEnd::default() };
        }
        found
    }
}

/// Returns a hash of a block id, never 0.
pub fn hash(id: u64) -> u64 {
    let mut z = id.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)).max(1)
}

/// Cache that knows all requests beforehand, and evicts the block that is used again last, the
/// deepest first (Belady, 1966). No policy finds more.
#[derive(Debug)]
pub struct Belady {
    capacity: usize,
    /// Index of the request that uses each block of each request again.
    next: Vec<Vec<u64>>,
    request: usize,
    held: HashMap<u64, (u64, usize)>,
    order: BTreeSet<(u64, usize, u64)>,
}

impl Belady {
    /// Creates a cache of `capacity` blocks for these requests.
    pub fn new<'r>(capacity: usize, requests: impl IntoIterator<Item = &'r [u64]>) -> Self {
        let requests: Vec<&[u64]> = requests.into_iter().collect();
        let mut seen = HashMap::new();
        let mut next: Vec<Vec<u64>> = Vec::with_capacity(requests.len());
        for (index, chain) in requests.iter().enumerate().rev() {
            next.push(chain.iter().map(|id| seen.get(id).copied().unwrap_or(u64::MAX)).collect());
            seen.extend(chain.iter().map(|id| (*id, index as u64)));
        }
        next.reverse();
        Self { capacity, next, request: 0, held: HashMap::new(), order: BTreeSet::new() }
    }
}

impl Cache for Belady {
    fn request(&mut self, chain: &[u64]) -> usize {
        let found = chain.iter().take_while(|id| self.held.contains_key(id)).count();
        for (depth, id) in chain.iter().enumerate() {
            let next = self.next[self.request][depth];
            if let Some((next, depth)) = self.held.insert(*id, (next, depth)) {
                self.order.remove(&(next, depth, *id));
            }
            self.order.insert((next, depth, *id));
        }
        while self.held.len() > self.capacity
            && let Some((_, _, id)) = self.order.pop_last()
        {
            self.held.remove(&id);
        }
        self.request += 1;
        found
    }
}

// Miri would take long, and there is no unsafe code here to check.
#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns the most blocks that any choice of victims finds.
    fn most_found(requests: &[Vec<u64>], capacity: usize) -> usize {
        let mut most = HashMap::from([(Vec::<u64>::new(), 0)]);
        for chain in requests {
            let mut after = HashMap::new();
            for (held, before) in most {
                let found = before + chain.iter().take_while(|id| held.contains(id)).count();
                let all: BTreeSet<u64> = held.iter().chain(chain).copied().collect();
                let len = capacity.min(all.len()) as u32;
                for cached in (0..1u32 << all.len()).filter(|cached| cached.count_ones() == len) {
                    let ids = all.iter().enumerate().filter(|(at, _)| cached >> at & 1 == 1);
                    let best = after.entry(ids.map(|(_, id)| *id).collect::<Vec<_>>()).or_insert(0);
                    *best = found.max(*best);
                }
            }
            most = after;
        }
        most.into_values().max().unwrap_or(0)
    }

    /// Returns the chain of a path in a binary tree. The id of a block stands for its prefix.
    fn chain(path: Vec<bool>) -> Vec<u64> {
        let step = |id: &mut u64, turn: bool| {
            *id = 2 * *id + u64::from(turn);
            Some(*id)
        };
        path.into_iter().scan(1, step).collect()
    }

    proptest! {
        #[test]
        fn no_choice_of_victims_finds_more_than_belady(
            paths in prop::collection::vec(prop::collection::vec(any::<bool>(), 1..4), 1..10),
            capacity in 1usize..5,
        ) {
            let requests: Vec<Vec<u64>> = paths.into_iter().map(chain).collect();
            let chains = || requests.iter().map(Vec::as_slice);
            let mut belady = Belady::new(capacity, chains());
            let found: usize = chains().map(|chain| belady.request(chain)).sum();
            prop_assert_eq!(found, most_found(&requests, capacity));
        }
    }
}
