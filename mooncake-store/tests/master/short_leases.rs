//! Leases that are too short to read under.

use std::time::Duration;

use crate::common::rig::{KIB, Rig};
use mooncake_core::ErrorCode::{NoAvailableHandle, ObjectHasLease};
use mooncake_store::master::MasterOptions;
use mooncake_store::server::config::MasterConfig;

fn options(lease: &str) -> MasterOptions {
    let flags = [("default_kv_lease_ttl", lease), ("eviction_high_watermark_ratio", "1")];
    MasterConfig::from_flags(flags).unwrap().options
}

#[test]
fn a_lease_of_zero_protects_readers_and_not_objects() {
    for lease in ["0", "1", "49ms"] {
        let rig = Rig::with(options(lease));
        rig.mount(1, 64 * KIB);
        rig.put(1, "k", 64 * KIB).unwrap();
        let granted = rig.locate("k").unwrap().lease;
        assert_eq!(granted, Duration::from_secs(1), "a reader has time to read");
        rig.pass(0.05);
        assert_eq!(rig.remove("k", false), Ok(()), "lease {lease}");
        assert_eq!(rig.start(1, "new", 64 * KIB), Err(NoAvailableHandle), "the reader may still read");
        rig.alive_for(1.0);
        rig.start(1, "new", 64 * KIB).unwrap();
    }
}

#[test]
fn a_lease_of_zero_does_not_stop_eviction() {
    let rig = Rig::with(options("0"));
    rig.mount(1, 2 * 64 * KIB);
    for key in ["a", "b"] {
        rig.put(1, key, 64 * KIB).unwrap();
        rig.locate(key).unwrap();
    }
    assert_eq!(rig.start(1, "new", 64 * KIB), Err(NoAvailableHandle), "the readers may still read");
    rig.alive_for(1.1);
    rig.start(1, "new", 64 * KIB).unwrap();
}

#[test]
fn longer_leases_protect_until_their_end() {
    let rig = Rig::with(options("50"));
    rig.mount(1, 64 * KIB);
    rig.put(1, "k", 64 * KIB).unwrap();
    assert_eq!(rig.locate("k").unwrap().lease, Duration::from_millis(50));
    assert_eq!(rig.remove("k", false), Err(ObjectHasLease));
    rig.pass(0.05);
    assert_eq!(rig.remove("k", false), Ok(()));
    rig.start(1, "new", 64 * KIB).unwrap();
}
