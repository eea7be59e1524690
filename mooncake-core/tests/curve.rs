//! The curve of hits by memory beside replays at each size.

// Miri would take hours, and there is no unsafe code here to check.
#![cfg(not(miri))]
#![allow(clippy::print_stdout, reason = "the estimates are looked at, too")]

mod traces;

use std::collections::HashMap;

use mooncake_core::evict::{
    Batch, BuiltinPolicy, CURVE_HALVES, CURVE_OBJECTS, CacheEvents, ChainEnd, MemoryCurve, PolicyKind,
    UseFeed,
};
use mooncake_core::testkit::effort;
use mooncake_core::testkit::simulate::{Calls, PolicyCache, hash, hit_rate};
use mooncake_core::testkit::workloads::{self, Requests};

const BLOCK: u64 = 1 << 16;

/// Largest error.
const ERROR: f64 = 0.02;

/// Returns the estimated hit rates of a cache of `blocks` blocks and of caches of the other sizes.
fn estimates(kind: PolicyKind, requests: &Requests, blocks: u64, limit: usize) -> [f64; 4] {
    let (feed, mut events) = (UseFeed::new(), CacheEvents::default());
    let mut curve = MemoryCurve::<BuiltinPolicy>::new(&kind.into(), feed.sample(), limit);
    curve.set_memory(blocks * BLOCK);
    let (mut uses, mut used) = (0, HashMap::new());
    for chain in requests {
        uses += chain.len() as u64;
        let hashes: Vec<u64> = chain.iter().map(|id| hash(*id)).collect();
        // About those that the cache holds or remembers.
        let is_known = |hash| used.get(&hash).is_some_and(|at| uses - at <= 5 * blocks);
        let batch = Batch::new(hashes.clone(), uses, ChainEnd::default(), is_known);
        feed.note_chain(&batch);
        for (at, hash) in hashes.into_iter().enumerate() {
            let place = batch.place(at);
            feed.note_use(hash, &place, BLOCK);
            used.insert(hash, place.number);
        }
        feed.take(&mut events);
        curve.follow(&events);
    }
    curve.misses().map(|misses| 1.0 - misses / uses as f64)
}

/// Returns the hit rate of a replay with so many blocks.
fn replayed(kind: PolicyKind, requests: &Requests, blocks: u64) -> f64 {
    let calls = Calls { deepest_oldest: kind == PolicyKind::Gittins, ..Calls::default() };
    let mut cache = PolicyCache::<BuiltinPolicy>::new(&kind.into(), blocks as usize, 1, calls);
    hit_rate(&mut cache, requests.iter().map(|chain| &chain[..]))
}

fn check(name: &str, kind: PolicyKind, requests: &Requests, blocks: u64, limit: usize) {
    let estimates = estimates(kind, requests, blocks, limit);
    let replayed = CURVE_HALVES.map(|halves| replayed(kind, requests, blocks * halves / 2));
    let error = estimates.iter().zip(&replayed).map(|(one, other)| (one - other).abs()).fold(0.0, f64::max);
    println!("{name}, {kind}, {blocks} blocks, {limit} sampled: {estimates:.4?}, replayed {replayed:.4?}");
    assert!(error <= ERROR, "{name}, {kind}, {blocks}: {error:.4}");
}

/// Checks policies, at full effort all of them, with a sample of one key in four.
fn check_all(name: &str, requests: &Requests, blocks: u64, limit: usize) {
    for kind in effort(&[PolicyKind::Lru, PolicyKind::Gittins][..], PolicyKind::ALL) {
        check(name, *kind, requests, blocks, limit);
    }
}

const USES: usize = 120_000;

#[test]
fn popular_keys() {
    check_all("Zipf 1.0", &workloads::zipf(1.0, 50_000, USES, 3), 4000, 1024);
}

#[test]
fn shared_documents() {
    check_all("documents", &workloads::documents(0.9, 5000, USES, 6), 4000, 1024);
}

/// `fifo` and `s3fifo` evict the front of a prefix before its end. The curve counts the blocks that
/// are there all the same.
#[test]
fn conversations() {
    let requests = workloads::conversations(8000, 7);
    for kind in [PolicyKind::Lru, PolicyKind::Tenure, PolicyKind::Gittins] {
        check("conversations", kind, &requests, 4000, 1024);
    }
}

#[test]
fn a_loop() {
    check_all("loop", &workloads::chain_loop(8000, 1, USES as u64), 4000, 1024);
}

#[test]
fn the_conversation_trace() {
    let Some(requests) = traces::trace("conversation_trace.jsonl") else { return };
    for kind in [PolicyKind::Gittins, PolicyKind::Lru, PolicyKind::Tenure] {
        check("conversation trace", kind, &requests, 30_000, CURVE_OBJECTS);
        check("conversation trace", kind, &requests, 10_000, CURVE_OBJECTS);
        check("conversation trace", kind, &requests, 10_000, 2048);
    }
}
