//! Free space for a put that finds none: the victims, and no eviction in vain.

use std::time::Duration;

use crate::common::rig::{KIB, Rig};
use mooncake_core::ErrorCode::NoAvailableHandle;
use mooncake_core::replica::ReplicateConfig;
use mooncake_store::master::{MasterOptions, Placement};

/// Number of objects beyond those that one put examines itself.
const MANY: u64 = 140_000;

fn pinned() -> ReplicateConfig {
    ReplicateConfig { hard_pin: true, ..ReplicateConfig::default() }
}

fn soft() -> ReplicateConfig {
    use mooncake_core::replica::SoftPin;
    ReplicateConfig { soft_pin: SoftPin::Enable, ..ReplicateConfig::default() }
}

fn bound_to(number: u64) -> ReplicateConfig {
    ReplicateConfig { preferred_segments: vec![format!("node{number}:1")], ..ReplicateConfig::default() }
}

fn evicted(rig: &Rig) -> u64 {
    rig.master.stats().evicted_keys
}

/// Fills a segment with blocks. One block in `every` has the configuration `special`.
fn fill(rig: &Rig, blocks: u64, len: u64, every: u64, special: &ReplicateConfig) {
    rig.mount(1, blocks * len);
    for n in 0..blocks {
        let plain = ReplicateConfig::default();
        let config = if n % every == every / 2 { special } else { &plain };
        rig.put_with(1, &n.to_string(), len, config).unwrap();
    }
}

/// Repeats a put, as a client does.
fn retry_put(rig: &Rig, key: &str, len: u64, times: usize) -> bool {
    (0..times).any(|_| {
        let put = rig.put(1, key, len);
        assert!(matches!(put, Ok(_) | Err(NoAvailableHandle)), "{put:?}");
        rig.alive_for(0.11);
        put.is_ok()
    })
}

#[test]
fn a_put_evicts_what_it_needs_and_no_more() {
    let rig = Rig::without_watermark();
    rig.mount(1, 16 * 64 * KIB);
    rig.mount(2, 16 * 64 * KIB);
    for n in 0..32 {
        rig.put(1, &n.to_string(), 64 * KIB).unwrap();
    }
    rig.put(1, "one more", 64 * KIB).unwrap();
    assert_eq!(rig.master.stats().evicted_keys, 1);
    rig.put(1, "large", 8 * 64 * KIB).unwrap();
    let evicted = rig.master.stats().evicted_keys;
    assert!(evicted <= 1 + 16, "at most twice its size: {evicted}");
    assert_eq!(rig.put(1, "too large", 17 * 64 * KIB), Err(NoAvailableHandle));
    assert_eq!(rig.master.stats().evicted_keys, evicted, "nothing goes for what can never fit");
}

#[test]
fn a_put_that_can_never_fit_between_pins_is_refused() {
    let rig = Rig::without_watermark();
    rig.mount(1, 4 * 64 * KIB);
    rig.put(1, "a", 64 * KIB).unwrap();
    rig.put_with(1, "pin", 64 * KIB, &pinned()).unwrap();
    rig.put(1, "b", 128 * KIB).unwrap();
    assert_eq!(rig.start(1, "c", 192 * KIB), Err(NoAvailableHandle));
    assert_eq!(evicted(&rig), 0, "nothing goes for it");
    rig.put(1, "d", 128 * KIB).unwrap();
    assert_eq!((evicted(&rig), rig.has("a")), (1, true), "only what was in the way");
}

#[test]
fn nothing_goes_in_vain_however_often_it_is_asked() {
    let rig = Rig::without_watermark();
    fill(&rig, 256, 64 * KIB, 8, &pinned());
    assert!(!retry_put(&rig, "wide", 8 * 64 * KIB, 50));
    assert_eq!(evicted(&rig), 0);
    rig.put(1, "one more", 64 * KIB).unwrap();
    assert_eq!(evicted(&rig), 1, "others are not kept waiting");
    assert!(retry_put(&rig, "as wide as may be", 7 * 64 * KIB, 1));
    assert!(evicted(&rig) <= 1 + 7);
}

#[test]
fn soft_pins_do_not_go_in_vain_either() {
    let rig = Rig::without_watermark();
    fill(&rig, 256, 64 * KIB, 2, &soft());
    rig.put_with(1, "in the middle", 64 * KIB, &pinned()).unwrap();
    let before = evicted(&rig);
    assert!(!retry_put(&rig, "all", 256 * 64 * KIB, 20));
    assert_eq!(evicted(&rig), before);
    rig.put(1, "two", 128 * KIB).unwrap();
    assert_eq!(evicted(&rig), before + 2, "one that is pinned, and one beside it");
}

#[test]
fn what_is_read_is_waited_for_with_the_rest_left_alone() {
    let rig = Rig::without_watermark();
    fill(&rig, 64, 64 * KIB, 64, &ReplicateConfig::default());
    for n in (0..64).step_by(4) {
        assert!(rig.exists(&n.to_string()));
    }
    assert!(!retry_put(&rig, "wide", 8 * 64 * KIB, 10));
    assert_eq!(evicted(&rig), 0, "leases are on the way, for seconds");
    rig.alive_for(11.0);
    assert!(retry_put(&rig, "wide", 8 * 64 * KIB, 1));
    assert_eq!(evicted(&rig), 8);
}

#[test]
fn among_many_objects_a_put_in_vain_costs_its_own_size_once() {
    let rig = Rig::without_watermark();
    fill(&rig, MANY, 64, 8, &pinned());
    assert!(!retry_put(&rig, "wide", 8 * 64, 10));
    let vain = evicted(&rig);
    assert!(vain <= 8, "before anybody could look: {vain}");
    assert!(retry_put(&rig, "as wide as may be", 7 * 64, 4), "the tick looks");
    assert!(evicted(&rig) <= vain + 14);
}

fn cxl() -> Rig {
    Rig::with(MasterOptions { placement: Placement::Cxl, high_watermark: 1.0, ..MasterOptions::default() })
}

#[test]
fn a_full_segment_keeps_no_put_from_another() {
    let rig = cxl();
    for number in 1..=2 {
        rig.mount(number, 4 * 64 * KIB);
    }
    for n in 0..8 {
        let number = 1 + n % 2;
        let config = ReplicateConfig { hard_pin: number == 1, ..bound_to(number) };
        rig.put_with(1, &n.to_string(), 64 * KIB, &config).unwrap();
    }
    let put =
        |key: &str, number: u64, blocks: u64| rig.put_with(1, key, blocks * 64 * KIB, &bound_to(number));
    assert_eq!(put("a", 1, 1), Err(NoAvailableHandle));
    assert!(put("b", 2, 1).is_ok() && put("c", 2, 3).is_ok());
    assert_eq!(put("d", 1, 1), Err(NoAvailableHandle));
    assert_eq!(put("e", 2, 5), Err(NoAvailableHandle), "larger than the segment");
    assert_eq!(evicted(&rig), 4);
    // Background work continues, too.
    rig.clock.advance(Duration::from_secs(1));
    assert!(put("f", 2, 4).is_ok());
}

#[test]
fn among_many_objects_a_bound_put_gets_space_in_its_own_segment() {
    let rig = cxl();
    for number in 1..=2 {
        rig.mount(number, MANY / 2 * 64 + (2 - number) * 4096);
    }
    for n in 0..MANY {
        rig.put_with(1, &n.to_string(), 64, &bound_to(1 + n % 2)).unwrap();
    }
    assert_eq!(rig.put_with(1, "k", 256, &bound_to(2)), Err(NoAvailableHandle), "the tick has to look");
    rig.pass(0.01);
    assert!(rig.put_with(1, "k", 256, &bound_to(2)).is_ok());
    assert_eq!(evicted(&rig), 4);
    assert!((0..MANY).step_by(2).all(|n| rig.has(&n.to_string())), "the other segment's");
}
