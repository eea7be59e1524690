//! The curve of hits by memory beside replays through masters of each size.

use mooncake_core::evict::PolicyKind;
use mooncake_core::testkit::effort;
use mooncake_core::testkit::workloads::{self, Requests};
use mooncake_store::master::CurveReport;

use crate::common::rig::client;
use crate::gittins::{LEN, PAUSE, key, request, rig};

/// Largest error.
const ERROR: f64 = 0.02;

/// Returns the share of the blocks that the requests find in so many blocks of memory, and the
/// curve of the master.
fn replay(policy: PolicyKind, blocks: u64, requests: &Requests) -> (f64, CurveReport) {
    let rig = rig(policy, blocks);
    let (mut found, mut asked) = (0, 0);
    for (at, chain) in requests.iter().enumerate() {
        rig.clock.advance(PAUSE);
        if at % 20 == 0 {
            rig.master.ping(client(1));
            rig.master.tick();
        }
        found += request(&rig, &chain.iter().map(|id| key(*id)).collect::<Vec<_>>());
        asked += chain.len();
    }
    (found as f64 / asked as f64, rig.master.memory_curve())
}

fn check(name: &str, policy: PolicyKind, requests: &Requests, blocks: u64) {
    let (_, curve) = replay(policy, blocks, requests);
    for point in &curve.points {
        let size = (blocks as f64 * point.factor) as u64;
        let expected = replay(policy, size, requests).0;
        assert_eq!(point.bytes, size * LEN);
        let estimate = 1.0 - point.total_misses as f64 / curve.total_uses as f64;
        let is_close = (estimate - expected).abs() <= ERROR;
        assert!(is_close, "{name}, {policy}, {size} blocks: {estimate}, replayed {expected}");
    }
}

#[test]
fn popular_keys() {
    check("Zipf 1.0", PolicyKind::Gittins, &workloads::zipf(1.0, 20_000, effort(10_000, 30_000), 3), 1000);
}

#[test]
fn shared_documents() {
    let requests = workloads::documents(0.9, 5000, effort(10_000, 30_000), 6);
    check("documents", PolicyKind::Gittins, &requests, 1000);
    check("documents", PolicyKind::Lru, &requests, 1000);
}

#[test]
fn conversations() {
    check("conversations", PolicyKind::Tenure, &workloads::conversations(effort(1000, 3000), 7), 1000);
}

/// The hit rates are those of the last hour.
#[test]
fn an_hour_is_remembered() {
    let rig = rig(PolicyKind::Lru, 100);
    assert!(rig.master.memory_curve().points.iter().all(|point| point.hit_rate.is_none()));
    let chain: Vec<String> = (0..10).map(key).collect();
    let rates = || rig.master.memory_curve().points.iter().map(|point| point.hit_rate).collect::<Vec<_>>();
    request(&rig, &chain);
    assert_eq!(rates(), [Some(0.0); 4]);
    request(&rig, &chain);
    assert_eq!(rates(), [Some(0.5); 4]);
    (0..14).for_each(|_| rig.alive_for(300.0));
    assert_eq!(rates(), [None; 4]);
    request(&rig, &chain);
    assert_eq!(rates(), [Some(1.0); 4]);
    let curve = rig.master.memory_curve();
    assert_eq!((curve.uses, curve.total_uses, curve.points[0].total_misses), (10, 30, 10));
}

/// A removed object is missed at every size.
#[test]
fn removed_objects_are_missed() {
    let rig = rig(PolicyKind::Lru, 100);
    for _ in 0..2 {
        request(&rig, &[key(1)]);
        rig.master.remove(key(1).as_bytes(), true).unwrap();
    }
    let curve = rig.master.memory_curve();
    assert_eq!((curve.total_uses, curve.points[3].total_misses), (2, 2));
}

/// Under load the sample shrinks, and the feed holds a bounded number of uses.
#[test]
fn load_makes_the_sample_smaller() {
    let rig = rig(PolicyKind::Lru, 50_000);
    for part in 0..20 {
        let keys: Vec<String> = (part * 1000..(part + 1) * 1000).map(key).collect();
        request(&rig, &keys);
    }
    // Twenty thousand uses in a second.
    rig.pass(1.0);
    let curve = rig.master.memory_curve();
    assert_eq!(curve.keys_for_each_sampled, 2);
    assert_eq!((curve.total_uses, curve.points[0].total_misses), (20_000, 20_000), "lost uses count");
    rig.alive_for(61.0);
    assert_eq!(rig.master.memory_curve().keys_for_each_sampled, 1, "the load is over");
}
