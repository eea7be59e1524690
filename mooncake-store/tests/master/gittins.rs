//! The policy `gittins` through the master: chains of keys in 64 shards, with leases, and eviction
//! by puts only.

use std::borrow::Cow;
use std::collections::HashMap;
use std::time::Duration;

use mooncake_core::evict::PolicyKind;
use mooncake_core::replica::{ReplicaType, ReplicateConfig};
use mooncake_core::testkit::effort;
use mooncake_core::testkit::workloads::{self, Requests};
use mooncake_store::master::MasterOptions;
use mooncake_store::protocol::call::Handle;
use mooncake_store::protocol::message::{BatchExistKey, BatchGetReplicaList, BatchPutEnd, BatchPutStart};
use mooncake_store::protocol::wire::EndItem;

use crate::common::rig::{KIB, Rig, client};

pub(crate) const LEN: u64 = 64 * KIB;

/// Returns a master with space for so many blocks.
pub(crate) fn rig(policy: PolicyKind, blocks: u64) -> Rig {
    let options = MasterOptions { high_watermark: 1.0, ..MasterOptions::default() };
    let rig = Rig::with_policy(options, policy);
    rig.mount(1, blocks * LEN);
    rig
}

/// Handles one request like a client: looks all blocks up, reads those that are there from the
/// front, and puts the others. Returns how many it found.
pub(crate) fn request(rig: &Rig, keys: &[String]) -> usize {
    request_in(rig, keys, |_| None)
}

/// Handles one request like [`request`]. `group` names the group of the key at an index.
pub(crate) fn request_in(rig: &Rig, keys: &[String], group: impl Fn(usize) -> Option<String>) -> usize {
    let groups: Vec<_> = (0..keys.len()).map(|at| group(at).unwrap_or_default()).collect();
    let has_groups = groups.iter().any(|group| !group.is_empty());
    let keys: Vec<&[u8]> = keys.iter().map(String::as_bytes).collect();
    let there = rig.master.handle(BatchExistKey { keys: Cow::Borrowed(&keys), tenant: "" });
    let found = there.iter().take_while(|there| matches!(there, Ok(true))).count();
    let read = rig.master.handle(BatchGetReplicaList { keys: Cow::Borrowed(&keys[..found]), tenant: "" });
    assert!(read.iter().all(Result::is_ok), "what was found is leased");
    let missing = &keys[found..];
    let sizes = vec![LEN; missing.len()];
    let started = rig.master.handle(BatchPutStart {
        client: client(1),
        keys: Cow::Borrowed(missing),
        sizes: Cow::Borrowed(&sizes),
        config: Cow::Owned(ReplicateConfig {
            group_ids: has_groups.then(|| groups[found..].to_vec()),
            ..ReplicateConfig::default()
        }),
        tenant: "",
    });
    let items: Vec<_> = missing
        .iter()
        .zip(&started)
        .filter(|(_, started)| started.is_ok())
        .map(|(key, _)| EndItem { key, checksum: None })
        .collect();
    let ended = rig.master.handle(BatchPutEnd {
        client: client(1),
        items: Cow::Borrowed(&items),
        replicas: ReplicaType::All,
        tenant: "",
    });
    assert!(ended.iter().all(Result::is_ok));
    found
}

pub(crate) fn key(id: u64) -> String {
    format!("block/{id}")
}

/// Returns the share of the blocks that the requests find, one request every `pause`, and the share
/// of the blocks at the end whose predecessor in the last request for them is not there.
fn replay(policy: PolicyKind, blocks: u64, requests: &Requests, pause: Duration) -> (f64, f64) {
    let rig = rig(policy, blocks);
    let (mut found, mut asked) = (0, 0);
    let mut parents: HashMap<u64, u64> = HashMap::new();
    for (at, chain) in requests.iter().enumerate() {
        rig.clock.advance(pause);
        if at % 20 == 0 {
            rig.master.ping(client(1));
            rig.master.tick();
        }
        found += request(&rig, &chain.iter().map(|id| key(*id)).collect::<Vec<_>>());
        asked += chain.len();
        parents.extend(chain.windows(2).map(|pair| (pair[1], pair[0])));
    }
    let there = |id: &u64| rig.has(&key(*id));
    let held: Vec<_> = parents.iter().filter(|(id, _)| there(id)).collect();
    let orphans = held.iter().filter(|(_, parent)| !there(parent)).count();
    (found as f64 / asked as f64, orphans as f64 / held.len().max(1) as f64)
}

pub(crate) const PAUSE: Duration = Duration::from_millis(294);

#[test]
fn documents_are_found_more_often_than_with_lru() {
    let requests = workloads::documents(0.9, 5000, effort(30_000, 60_000), 6);
    let lru = replay(PolicyKind::Lru, 2000, &requests, PAUSE);
    let (gittins, orphans) = replay(PolicyKind::Gittins, 2000, &requests, PAUSE);
    assert!(gittins > lru.0 + 0.05, "{gittins} with gittins, {} with lru", lru.0);
    assert!(orphans < 0.002, "{orphans} of the blocks have lost the block before them");
}

#[test]
fn loops_are_found() {
    let requests = workloads::chain_loop(250, 16, effort(30_000, 60_000));
    let lru = replay(PolicyKind::Lru, 2000, &requests, PAUSE).0;
    let gittins = replay(PolicyKind::Gittins, 2000, &requests, PAUSE).0;
    assert!(lru < 0.01 && gittins > 0.3, "{gittins} with gittins, {lru} with lru");
}

#[test]
fn conversations_by_chance_lose_little() {
    let requests = workloads::conversations(effort(1500, 4000), 7);
    for blocks in [1000, 4000].into_iter().take(effort(1, 2)) {
        let lru = replay(PolicyKind::Lru, blocks, &requests, PAUSE).0;
        let (gittins, orphans) = replay(PolicyKind::Gittins, blocks, &requests, PAUSE);
        assert!(gittins > lru * 0.99, "{blocks}: {gittins} with gittins, {lru} with lru");
        assert!(orphans < 0.002, "{orphans}");
    }
}

/// The last blocks of a chain go first, whatever the number of shards between.
#[test]
fn children_go_before_their_parents() {
    let rig = rig(PolicyKind::Gittins, 100);
    let chain: Vec<String> = (0..100).map(key).collect();
    assert_eq!(request(&rig, &chain), 0);
    // The chain is stored by one call, and part of it by another that goes on from there.
    for taken in 1..=60 {
        let new: Vec<String> = vec![format!("other/{taken}")];
        request(&rig, &new);
        // A new object may go instead of an old one.
        let held: Vec<bool> = chain.iter().map(|key| rig.has(key)).collect();
        let front = held.iter().take_while(|held| **held).count();
        assert_eq!(held.iter().filter(|held| **held).count(), front, "a hole after {taken}");
    }
    assert!(!rig.has(&chain[99]));
}

/// Leased and pinned objects stay, as with every policy.
#[test]
fn leased_objects_stay() {
    let rig = rig(PolicyKind::Gittins, 50);
    let chain: Vec<String> = (0..50).map(key).collect();
    request(&rig, &chain);
    assert_eq!(request(&rig, &chain[..30]), 30);
    for n in 0..40 {
        let new: Vec<String> = vec![format!("new/{n}")];
        request(&rig, &new);
        assert!(chain[..30].iter().all(|key| rig.has(key)), "a leased block is gone after {n}");
    }
}
