//! Groups of objects that are evicted together, under a manual clock.

use crate::common::rig::{KIB, MIB, Rig, client};
use mooncake_core::error::ErrorCode::{self, *};
use mooncake_core::evict::PolicyKind;
use mooncake_core::replica::{ReplicaType, ReplicateConfig, SoftPin};
use mooncake_store::api::WriteMode;
use mooncake_store::master::{MasterOptions, Put};

trait Groups {
    fn put_of(&self, group: &str, key: &str, config: &ReplicateConfig) -> Result<(), ErrorCode>;
    fn here(&self, keys: &[&str]) -> Vec<bool>;
}

impl Groups for Rig {
    fn put_of(&self, group: &str, key: &str, config: &ReplicateConfig) -> Result<(), ErrorCode> {
        let (writer, mode, key) = (client(9).into(), WriteMode::Put, key.as_bytes());
        let put = Put { writer, mode, key, len: 16 * KIB, config, group };
        self.master.put_start(&put).map_err(|e| e.code())?;
        self.master.put_end(writer, key, None, ReplicaType::All).map_err(|e| e.code())
    }

    fn here(&self, keys: &[&str]) -> Vec<bool> {
        keys.iter().map(|key| self.has(key)).collect()
    }
}

/// Returns a master with space for eight objects, which evicts only for a put, the least recently
/// used first.
fn rig() -> Rig {
    let rig =
        Rig::with_policy(MasterOptions { high_watermark: 1.0, ..MasterOptions::default() }, PolicyKind::Lru);
    rig.mount(1, 128 * KIB);
    rig
}

const ALL: [&str; 8] = ["a0", "x", "a1", "b0", "y", "a2", "b1", "z"];

fn fill(rig: &Rig) {
    for key in ALL {
        let group = if key.len() == 2 { &key[..1] } else { "" };
        rig.put_of(group, key, &ReplicateConfig::default()).unwrap();
    }
}

#[test]
fn a_group_is_evicted_as_one() {
    let rig = rig();
    fill(&rig);
    rig.put_of("", "new", &ReplicateConfig::default()).unwrap();
    // The oldest object took its group along.
    assert_eq!(rig.here(&ALL), [false, true, false, true, true, false, true, true]);
    assert_eq!(rig.used(), 6 * 16 * KIB);
    // Two more objects fit without eviction; then comes the next in order.
    for key in ["n1", "n2"] {
        rig.put_of("", key, &ReplicateConfig::default()).unwrap();
    }
    assert!(rig.has("x"));
    rig.put_of("", "n3", &ReplicateConfig::default()).unwrap();
    assert_eq!(rig.here(&["x", "b0", "y", "b1", "z"]), [false, true, true, true, true]);
}

#[test]
fn one_read_object_keeps_its_group() {
    let rig = rig();
    fill(&rig);
    rig.locate("a2").unwrap();
    rig.put_of("", "new", &ReplicateConfig::default()).unwrap();
    assert_eq!(rig.here(&["a0", "a1", "a2", "x", "b0"]), [true, true, true, false, true]);
    rig.put_of("", "n1", &ReplicateConfig::default()).unwrap();
    assert_eq!(
        rig.here(&["a0", "b0", "b1", "y"]),
        [true, false, false, true],
        "the next in turn is a group, too"
    );
    // Without further reads the group becomes the next in order, and all of it is evicted at once.
    rig.alive_for(10.1);
    let group = ["a0", "a1", "a2"];
    for i in 2.. {
        rig.put_of("", &format!("n{i}"), &ReplicateConfig::default()).unwrap();
        if !rig.has("a0") {
            break;
        }
        assert!(i < 10 && rig.here(&group) == [true; 3]);
    }
    assert_eq!(rig.here(&group), [false; 3]);
}

#[test]
fn pinned_objects_of_a_group_stay() {
    let rig = rig();
    let pinned = ReplicateConfig { hard_pin: true, ..ReplicateConfig::default() };
    let softly = ReplicateConfig { soft_pin: SoftPin::Enable, ..ReplicateConfig::default() };
    rig.put_of("g", "plain", &ReplicateConfig::default()).unwrap();
    rig.put_of("g", "hard", &pinned).unwrap();
    rig.put_of("g", "soft", &softly).unwrap();
    rig.put_of("g", "other", &ReplicateConfig::default()).unwrap();
    for key in ["1", "2", "3", "4", "5"] {
        rig.put_of("", key, &ReplicateConfig::default()).unwrap();
    }
    assert_eq!(rig.here(&["plain", "hard", "soft", "other", "1"]), [false, true, true, false, true]);
}

#[test]
fn a_group_forgets_those_that_left() {
    let rig = rig();
    fill(&rig);
    rig.remove("a1", true).unwrap();
    rig.put_of("", "a1", &ReplicateConfig::default()).unwrap();
    rig.put_of("", "new", &ReplicateConfig::default()).unwrap();
    assert_eq!(rig.here(&["a0", "a1", "a2"]), [false, true, false], "it came back without the group");
    // A group lasts as long as the object; a new object may choose again.
    rig.put_of("b", "a0", &ReplicateConfig::default()).unwrap();
    let upsert = |group| {
        let (writer, mode, config) = (client(9).into(), WriteMode::Upsert, &ReplicateConfig::default());
        let put = Put { writer, mode, key: b"a0", len: 10, config, group };
        rig.master.put_start(&put).map(drop).map_err(|e| e.code())
    };
    assert_eq!(upsert("a"), Err(InvalidParams));
    assert_eq!(upsert("b"), Ok(()));
    rig.revoke(9, "a0").unwrap();
    // Without a group in the call, the object stays in its own.
    assert_eq!(upsert(""), Ok(()));
    rig.revoke(9, "a0").unwrap();
    assert_eq!(upsert("a"), Err(InvalidParams));
    rig.alive_for(20.0);
    let left = rig.master.stats().keys;
    assert_eq!(rig.master.remove_all(true), left);
    assert_eq!(rig.used(), 0);
}

#[test]
fn a_large_group_goes_within_the_watermark_too() {
    let rig = Rig::with(MasterOptions { high_watermark: 0.5, ..MasterOptions::default() });
    rig.mount(1, MIB);
    for i in 0..40 {
        rig.put_of(if i < 20 { "g" } else { "" }, &format!("{i:02}"), &ReplicateConfig::default()).unwrap();
    }
    rig.alive_for(1.0);
    let left: Vec<_> = (0..40).map(|i| rig.has(&format!("{i:02}"))).collect();
    assert!(left[..20].iter().all(|here| !here) && left[20..].iter().all(|here| *here), "{left:?}");
}
