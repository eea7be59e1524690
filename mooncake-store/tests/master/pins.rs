//! Soft pins of stored objects.

use std::time::Duration;

use crate::common::rig::{KIB, Rig, client};
use mooncake_core::ErrorCode;
use mooncake_core::evict::PolicyKind;
use mooncake_store::master::MasterOptions;

const MINUTE: Duration = Duration::from_secs(60);

fn pin(rig: &Rig, key: &str, ttl: Option<Duration>) -> Result<(), ErrorCode> {
    rig.master.soft_pin(key.as_bytes(), ttl).map_err(|error| error.code())
}

/// Returns a rig whose memory is full: objects `a`, `b`, `c` and `d`.
fn full() -> Rig {
    let options = MasterOptions { high_watermark: 1.0, ..MasterOptions::default() };
    let rig = Rig::with_policy(options, PolicyKind::Lru);
    rig.mount(1, 64 * KIB);
    for key in ["a", "b", "c", "d"] {
        rig.put(1, key, 16 * KIB).unwrap();
    }
    rig
}

/// Puts as many objects as fit, each in place of another one.
fn fill(rig: &Rig, prefix: &str) {
    for number in 0..8 {
        rig.put(1, &format!("{prefix}{number}"), 16 * KIB).unwrap();
    }
}

#[test]
fn pinned_objects_are_evicted_last() {
    let rig = full();
    pin(&rig, "a", Some(MINUTE)).unwrap();
    pin(&rig, "b", Some(2 * MINUTE)).unwrap();
    assert_eq!(rig.master.stats().soft_pinned, 2);
    fill(&rig, "e");
    assert!(rig.has("a") && rig.has("b") && !rig.has("c") && !rig.has("d"));
    rig.alive_for(60.0);
    assert_eq!(rig.master.stats().soft_pinned, 1);
    fill(&rig, "f");
    assert!(!rig.has("a") && rig.has("b"), "the pin has ended by itself");
    pin(&rig, "b", None).unwrap();
    fill(&rig, "g");
    assert!(!rig.has("b"), "the pin was ended");
}

#[test]
fn a_pin_replaces_the_one_before() {
    let rig = full();
    pin(&rig, "a", Some(2 * MINUTE)).unwrap();
    pin(&rig, "a", Some(MINUTE)).unwrap();
    rig.alive_for(60.0);
    assert_eq!(rig.master.stats().soft_pinned, 0);
    pin(&rig, "a", Some(Duration::ZERO)).unwrap();
    assert_eq!(rig.master.stats().soft_pinned, 0);
}

#[test]
fn wrong_pins_are_refused() {
    let rig = Rig::new();
    rig.mount(1, 64 * KIB);
    rig.start(1, "unfinished", KIB).unwrap();
    assert_eq!(pin(&rig, "unfinished", Some(MINUTE)), Err(ErrorCode::ReplicaIsNotReady));
    assert_eq!(pin(&rig, "none", Some(MINUTE)), Err(ErrorCode::ObjectNotFound));
    assert_eq!(pin(&rig, "none", None), Err(ErrorCode::ObjectNotFound));
    rig.put(1, "a", KIB).unwrap();
    let longest = rig.master.options().max_soft_pin_ttl;
    assert_eq!(longest, Duration::from_secs(7 * 24 * 3600));
    assert_eq!(pin(&rig, "a", Some(longest)), Ok(()));
    let longer = longest + Duration::from_millis(1);
    assert_eq!(pin(&rig, "a", Some(longer)), Err(ErrorCode::InvalidParams));
    assert_eq!(rig.master.leased_for(b"a"), None, "a pin is no lease");
}

/// The owner of the segment learns of the pin, and announces it to the next master.
#[test]
fn owners_learn_of_pins() {
    let rig = Rig::new();
    let page = rig.master.inventory(client(1), 0);
    rig.mount(1, 64 * KIB);
    rig.put(1, "a", KIB).unwrap();
    let page = rig.master.inventory(client(1), page.next);
    let pins = |page: &mooncake_store::protocol::wire::InventoryPage| {
        let stored = page.changes.iter().filter_map(|change| change.stored.as_ref());
        stored.map(|stored| stored.soft_pin_ms).collect::<Vec<_>>()
    };
    assert_eq!(pins(&page), [0]);
    pin(&rig, "a", Some(MINUTE)).unwrap();
    assert_eq!(pins(&rig.master.inventory(client(1), page.next)), [60_000]);
}
