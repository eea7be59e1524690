//! The master by its synchronous calls: each answer of section 1.2 of the existing system's behaviour that can occur here.

#[path = "master_support/mod.rs"]
mod support;

use mooncake_core::error::ErrorCode::*;
use mooncake_core::ids::{MAX_KEY_LEN, SegmentId, Uuid};
use mooncake_core::replica::{ReplicaStatus, ReplicaType, ReplicateConfig, SegmentStatus, SoftPin};
use mooncake_store::api::WriteMode;
use mooncake_store::master::{Master, MasterOptions, Put, Writer};
use std::time::Duration;
use support::*;

#[test]
fn put_end_get_remove() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    assert_eq!(rig.locate("k").unwrap_err(), ObjectNotFound);
    assert!(!rig.exists("k"));
    let granted = rig.start(9, "k", 1000).unwrap();
    assert_eq!(granted.len(), 1);
    assert_eq!(granted[0].status, ReplicaStatus::Processing);
    assert_eq!(granted[0].location.size(), 1000);
    assert_eq!(rig.locate("k").unwrap_err(), ReplicaIsNotReady);
    assert!(!rig.exists("k"));
    assert_eq!(rig.remove("k", true), Err(ReplicaIsNotReady));
    let writer = Writer::from(client(9));
    rig.master.put_end(writer, b"k", Some(77), ReplicaType::Memory).unwrap();
    let list = rig.locate("k").unwrap();
    assert_eq!((list.checksum, list.lease), (Some(77), Duration::from_secs(10)));
    assert_eq!(list.replicas[0].status, ReplicaStatus::Complete);
    assert_eq!(address(&list.replicas[0]), address(&granted[0]));
    assert_eq!(rig.remove("k", false), Err(ObjectHasLease));
    rig.pass(10.0);
    assert_eq!(rig.remove("k", false), Err(ObjectNotFound), "its client was silent for 10 s");
}

#[test]
fn remove_waits_for_the_lease_and_force_does_not() {
    let rig = Rig::new();
    rig.mount(1, MIB);
    rig.put(9, "k", 100).unwrap();
    assert!(rig.exists("k"));
    assert_eq!(rig.remove("k", false), Err(ObjectHasLease));
    rig.clock.advance(Duration::from_secs(10));
    rig.master.ping(client(1));
    assert_eq!(rig.remove("k", false), Ok(()));
    assert_eq!(rig.remove("k", false), Err(ObjectNotFound));
    assert_eq!(rig.used(), 0);

    rig.put(9, "k", 100).unwrap();
    let read = rig.locate("k").unwrap();
    assert_eq!(rig.remove("k", true), Ok(()));
    assert_eq!(rig.locate("k").unwrap_err(), ObjectNotFound);
    assert_ne!(rig.used(), 0, "the reader may still be at it");
    let other = rig.put(9, "other", 100).unwrap();
    assert_ne!(address(&other[0]), address(&read.replicas[0]));
    rig.clock.advance(Duration::from_secs(10));
    rig.master.ping(client(1));
    rig.master.tick();
    rig.remove("other", false).unwrap();
    assert_eq!(rig.used(), 0);
}
