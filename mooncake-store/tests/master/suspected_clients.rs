//! Clients whose heartbeats are overdue: nothing is read from them or placed there, and everything
//! is readable again after a heartbeat.

use std::time::Duration;

use crate::common::rig::{KIB, MIB, Rig, client, segment};
use mooncake_core::ErrorCode;
use mooncake_core::replica::ReplicateConfig;
use mooncake_store::master::{DiskOptions, MasterOptions};
use mooncake_store::protocol::metrics;
use mooncake_store::protocol::wire::{OffloadItem, StoredAt};

fn options() -> MasterOptions {
    MasterOptions {
        client_ttl: Duration::from_secs(3),
        client_suspicion: Duration::from_secs(4),
        ..MasterOptions::default()
    }
}

/// Returns the numbers of active and suspected clients, suspicions, recoveries, and expired
/// clients.
fn liveness(rig: &Rig) -> [u64; 5] {
    let stats = rig.master.stats();
    let active = stats.clients - stats.suspected_clients;
    [active, stats.suspected_clients, stats.suspicions, stats.recoveries, stats.expired_clients]
}

#[test]
fn a_heartbeat_ends_a_suspicion() {
    let rig = Rig::with(options());
    rig.mount(1, MIB);
    rig.put(1, "a", KIB).unwrap();
    rig.start(1, "unfinished", KIB).unwrap();
    rig.pass(2.9);
    assert!(rig.exists("a") && rig.put(1, "b", KIB).is_ok());
    rig.pass(0.1);
    assert!(!rig.exists("a") && !rig.has("a"));
    assert_eq!(rig.locate("a").unwrap_err(), ErrorCode::ReplicaIsNotReady);
    assert_eq!(rig.start(2, "c", KIB), Err(ErrorCode::NoAvailableHandle));
    assert_eq!(rig.start(2, "a", KIB), Err(ErrorCode::ObjectAlreadyExists));
    assert!(rig.master.find(b"a").is_ok(), "nothing is lost");
    assert_eq!(rig.master.segment_stats().len(), 1);
    assert_eq!(liveness(&rig), [0, 1, 1, 0, 0]);

    rig.pass(3.9);
    assert!(!rig.master.ping(client(1)).need_remount);
    assert!(rig.exists("a") && rig.exists("b"));
    rig.end(1, "unfinished").unwrap();
    assert!(rig.put(2, "c", KIB).is_ok());
    assert_eq!(liveness(&rig), [1, 0, 1, 1, 0]);
    // A client may be suspected again.
    rig.pass(3.0);
    assert!(!rig.exists("a"));
    assert_eq!(liveness(&rig), [0, 1, 2, 1, 0]);
}

#[test]
fn a_silent_client_expires_in_the_end() {
    let rig = Rig::with(options());
    rig.mount(1, MIB);
    rig.put(1, "a", KIB).unwrap();
    rig.pass(3.0);
    rig.pass(3.9);
    assert_eq!(rig.locate("a").unwrap_err(), ErrorCode::ReplicaIsNotReady);
    rig.pass(0.1);
    assert_eq!(rig.locate("a").unwrap_err(), ErrorCode::ObjectNotFound);
    assert!(rig.master.segment_stats().is_empty());
    assert_eq!(liveness(&rig), [0, 0, 1, 0, 1]);
    let metrics = metrics::text(&metrics::collector("expiry", "", |to| rig.master.add_metrics(to))).unwrap();
    let counts = ["duration_ms_count 1", "queue_depth 0", "retries_total 0", "alerts_total 0"];
    for count in counts.map(|count| format!("\nmaster_client_offboarding_{count}\n")) {
        assert!(metrics.contains(&count), "{count} in {metrics}");
    }
    assert!(rig.master.ping(client(1)).need_remount);
    rig.mount(1, MIB);
    assert!(rig.put(1, "b", KIB).is_ok() && rig.exists("b"), "a new mount is not suspected");
}

/// Without a suspicion, clients expire as in Mooncake C++ 0.3.13.
#[test]
fn clients_expire_at_once_without_a_suspicion() {
    let rig = Rig::with(MasterOptions { client_suspicion: Duration::ZERO, ..options() });
    rig.mount(1, MIB);
    rig.put(1, "a", KIB).unwrap();
    rig.pass(3.0);
    assert_eq!(rig.locate("a").unwrap_err(), ErrorCode::ObjectNotFound);
    assert_eq!(liveness(&rig), [0, 0, 0, 0, 1]);
}

#[test]
fn replicas_of_others_are_read() {
    let rig = Rig::with(options());
    rig.mount(1, MIB);
    rig.mount(2, MIB);
    let twice = ReplicateConfig { replicas: 2, ..ReplicateConfig::default() };
    rig.put_with(1, "a", KIB, &twice).unwrap();
    rig.pass(2.0);
    rig.master.ping(client(2));
    rig.pass(1.0);
    let endpoints = |rig: &Rig| {
        let replicas = rig.locate("a").unwrap().replicas;
        let mut all: Vec<_> =
            replicas.iter().map(|replica| replica.location.memory().unwrap().endpoint.clone()).collect();
        all.sort();
        all
    };
    let of = |number| segment(number, MIB).endpoint;
    assert_eq!(endpoints(&rig), [of(2)]);
    for number in 0..20 {
        let placed = rig.put(2, &format!("b{number}"), KIB).unwrap();
        assert_eq!(placed[0].location.memory().unwrap().endpoint, of(2));
    }
    // A mount counts as a heartbeat.
    rig.master.mount(client(1), &segment(3, MIB)).unwrap();
    assert_eq!(endpoints(&rig), [of(1), of(2)]);
}

/// A put that finds suspected clients only evicts nothing.
#[test]
fn suspected_clients_keep_their_objects() {
    let rig = Rig::with(MasterOptions { high_watermark: 1.0, ..options() });
    rig.mount(1, 64 * KIB);
    for number in 0..4 {
        rig.put(1, &format!("a{number}"), 16 * KIB).unwrap();
    }
    rig.pass(3.0);
    assert_eq!(rig.start(2, "b", 16 * KIB), Err(ErrorCode::NoAvailableHandle));
    rig.master.ping(client(1));
    assert!((0..4).all(|number| rig.has(&format!("a{number}"))));
    assert!(rig.put(2, "b", 16 * KIB).is_ok());
}

#[test]
fn disks_of_suspected_clients_are_not_read() {
    let rig = Rig::with(MasterOptions { disks: Some(DiskOptions::default()), ..options() });
    rig.mount(1, MIB);
    rig.mount(2, MIB);
    rig.master.mount_disk(client(1), true).unwrap();
    let item = OffloadItem { tenant: "default".into(), key: b"d".into(), size: 100 };
    let place = StoredAt { bucket: 0, offset: 0, key_size: 1, data_size: 100, endpoint: "disk1:1".into() };
    rig.master.offloaded(client(1), &[item], &[place]).unwrap();
    assert!(rig.exists("d"));
    rig.pass(2.0);
    rig.master.ping(client(2));
    rig.pass(1.0);
    assert_eq!(rig.locate("d").unwrap_err(), ErrorCode::ReplicaIsNotReady);
    rig.pass(1.9);
    rig.master.ping(client(1));
    assert_eq!(rig.locate("d").unwrap().replicas.len(), 1);
    rig.pass(7.0);
    assert_eq!(rig.locate("d").unwrap_err(), ErrorCode::ObjectNotFound);
}

/// Time in which the master was stopped counts for no suspicion.
#[test]
fn a_stop_of_the_master_suspects_nobody() {
    let rig = Rig::with(options());
    rig.mount(1, MIB);
    rig.put(1, "a", KIB).unwrap();
    rig.clock.advance(Duration::from_secs(5));
    rig.master.was_stopped(Duration::from_secs(5));
    rig.master.tick();
    assert!(rig.exists("a"));
    assert_eq!(liveness(&rig), [1, 0, 0, 0, 0]);
}
