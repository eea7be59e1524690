//! Replicas of frequently read objects: they are created, last while they are needed, and are
//! evicted first.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::common::rig::{KIB, Rig, client, endpoint};
use mooncake_core::error::ErrorCode;
use mooncake_core::ids::{ClientId, Uuid};
use mooncake_core::replica::ReplicateConfig;
use mooncake_store::api::CopyToken;
use mooncake_store::master::{HotOptions, MasterOptions};

const BLOCK: u64 = 64 * KIB;

fn rig(hot: HotOptions) -> Rig {
    let options = MasterOptions { hot: Some(hot), high_watermark: 1.0, ..MasterOptions::default() };
    let rig = Rig::with(options);
    rig.mount(1, 8 * BLOCK);
    rig
}

/// Returns the requested copy of a client: key, source, target, and token.
fn asked(rig: &Rig, who: u64) -> Option<(String, String, String, CopyToken)> {
    let task = rig.master.fetch_tasks(client(who), 16).pop()?;
    let payload: serde_json::Value = serde_json::from_str(&task.payload).unwrap();
    let text = |name: &str| payload[name].as_str().unwrap().to_owned();
    let number = |name: &str| payload[name].as_u64().unwrap();
    let lease =
        Uuid::new(number("dynamic_replication_lease_id_high"), number("dynamic_replication_lease_id_low"));
    let token = CopyToken { lease, epoch: number("dynamic_replication_version_epoch") };
    Some((text("key"), text("source"), payload["targets"][0].as_str().unwrap().to_owned(), token))
}

fn hammer(rig: &Rig, key: &str, reads: usize) -> usize {
    let mut replicas = 0;
    for _ in 0..reads {
        replicas = rig.locate(key).unwrap().replicas.len();
    }
    rig.alive_for(0.2);
    replicas
}

fn copy(rig: &Rig, (key, from, to, token): &(String, String, String, CopyToken)) {
    rig.master.hot_copy_start(client(1), key.as_bytes(), from, &[to], *token).unwrap();
    rig.master.hot_copy_end(client(1), key.as_bytes(), *token).unwrap();
}

/// Creates a hot object with its second replica in place.
fn with_replica(rig: &Rig) {
    rig.put(1, "k", BLOCK).unwrap();
    rig.mount(2, 8 * BLOCK);
    hammer(rig, "k", 8);
    copy(rig, &asked(rig, 1).unwrap());
    assert_eq!(rig.locate("k").unwrap().replicas.len(), 2);
}

#[test]
fn what_is_read_often_gets_a_replica_and_reads_spread() {
    let rig = rig(HotOptions::default());
    rig.put(1, "k", BLOCK).unwrap();
    rig.put(1, "cold", BLOCK).unwrap();
    rig.mount(2, 8 * BLOCK);
    hammer(&rig, "k", 7);
    hammer(&rig, "cold", 7);
    assert!(asked(&rig, 1).is_none(), "eight reads in ten seconds are often");
    hammer(&rig, "k", 1);
    let wanted = asked(&rig, 1).unwrap();
    assert_eq!((wanted.0.as_str(), wanted.1.as_str(), wanted.2.as_str()), ("k", "node1:1", "node2:1"));
    assert!(asked(&rig, 1).is_none(), "once");
    copy(&rig, &wanted);
    let first: BTreeSet<String> =
        (0..40).map(|_| endpoint(&rig.locate("k").unwrap().replicas[0]).to_owned()).collect();
    assert_eq!(first.len(), 2, "who takes the first replica takes each of them in turn");
    hammer(&rig, "k", 50);
    assert!(asked(&rig, 1).is_none(), "two are the most");
}

#[test]
fn seldom_reads_are_not_hot() {
    let rig = rig(HotOptions::default());
    rig.put(1, "k", BLOCK).unwrap();
    rig.mount(2, 8 * BLOCK);
    for _ in 0..20 {
        hammer(&rig, "k", 3);
        rig.alive_for(10.0);
    }
    assert!(asked(&rig, 1).is_none());
}

#[test]
fn only_what_was_asked_for_is_copied() {
    let rig = rig(HotOptions::default());
    rig.put(1, "k", BLOCK).unwrap();
    rig.mount(2, 8 * BLOCK);
    hammer(&rig, "k", 8);
    let (key, from, to, token) = asked(&rig, 1).unwrap();
    let start = |who: ClientId, token| {
        let started = rig.master.hot_copy_start(who, key.as_bytes(), &from, &[&to], token);
        started.map(drop).map_err(|error| error.code())
    };
    let other = CopyToken { lease: Uuid::new(5, 6), ..token };
    assert_eq!(start(client(1), other), Err(ErrorCode::InvalidVersion));
    assert_eq!(
        start(client(1), CopyToken { epoch: token.epoch + 1, ..token }),
        Err(ErrorCode::InvalidVersion)
    );
    assert_eq!(start(client(2), token), Err(ErrorCode::IllegalClient));
    assert_eq!(start(client(1), token), Ok(()));
    let end = |token| rig.master.hot_copy_end(client(1), b"k", token).map_err(|error| error.code());
    assert_eq!(end(other), Err(ErrorCode::InvalidVersion));
    assert_eq!(end(CopyToken::default()), Err(ErrorCode::InvalidVersion), "an ordinary end is not its end");
    assert_eq!(end(token), Ok(()));
    assert_eq!(start(client(1), token), Err(ErrorCode::UnavailableInCurrentStatus), "it is there");

    // The object has another value now: the request concerns the previous one.
    let here = ReplicateConfig { preferred_segment: "node1:1".into(), ..ReplicateConfig::default() };
    rig.put_with(1, "replaced", BLOCK, &here).unwrap();
    hammer(&rig, "replaced", 8);
    let (key, from, to, token) = asked(&rig, 1).unwrap();
    rig.upsert(1, "replaced", BLOCK).unwrap();
    rig.end(1, "replaced").unwrap();
    let late = rig.master.hot_copy_start(client(1), key.as_bytes(), &from, &[&to], token);
    assert_eq!(late.unwrap_err().code(), ErrorCode::InvalidVersion);
}

#[test]
fn it_goes_when_unread_and_stays_while_read() {
    let rig = rig(HotOptions::default());
    with_replica(&rig);
    for _ in 0..10 {
        hammer(&rig, "k", 8);
        rig.alive_for(9.0);
    }
    assert_eq!(rig.locate("k").unwrap().replicas.len(), 2, "still hot");
    rig.alive_for(61.0);
    assert_eq!(rig.master.peek(b"k").unwrap().len(), 1, "cooled down");
    assert_eq!(rig.used(), BLOCK, "its space is free");
    hammer(&rig, "k", 20);
    assert!(asked(&rig, 1).is_none(), "not again at once");
}

#[test]
fn it_goes_before_any_object_does() {
    let rig = rig(HotOptions::default());
    with_replica(&rig);
    rig.alive_for(11.0);
    for n in 0..14 {
        rig.put(1, &format!("fill {n}"), BLOCK).unwrap();
    }
    assert_eq!(rig.master.peek(b"k").unwrap().len(), 2);
    rig.put(1, "one more", BLOCK).unwrap();
    assert_eq!(rig.master.peek(b"k").unwrap().len(), 1);
    assert_eq!(rig.master.stats().evicted_keys, 0);
}

#[test]
fn a_copy_that_no_client_makes_expires() {
    let rig = rig(HotOptions::default());
    rig.put(1, "k", BLOCK).unwrap();
    rig.mount(2, 8 * BLOCK);
    hammer(&rig, "k", 8);
    rig.alive_for(31.0);
    assert!(asked(&rig, 1).is_none(), "its task is withdrawn");
}

#[test]
fn observing_changes_nothing_and_full_segments_get_none() {
    let observing = rig(HotOptions { enforce: false, ..HotOptions::default() });
    observing.put(1, "k", BLOCK).unwrap();
    observing.mount(2, 8 * BLOCK);
    hammer(&observing, "k", 100);
    assert!(asked(&observing, 1).is_none());
    assert_eq!(observing.master.stats().hot_proposed, 1);

    let full = rig(HotOptions { window: Duration::from_secs(1), ..HotOptions::default() });
    full.put(1, "k", BLOCK).unwrap();
    full.mount(2, 8 * BLOCK);
    for n in 0..14 {
        full.put(1, &format!("{n}"), BLOCK).unwrap();
    }
    hammer(&full, "k", 100);
    assert!(asked(&full, 1).is_none(), "above .85 nothing is added");
}
