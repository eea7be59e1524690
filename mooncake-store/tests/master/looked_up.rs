//! Leases of look-ups in a full pool: they yield to puts, and leases of reads do not.

use std::time::Duration;

use mooncake_core::error::ErrorCode::NoAvailableHandle;
use mooncake_core::replica::{ReplicateConfig, SoftPin};
use mooncake_store::master::MasterOptions;

use crate::common::rig::{KIB, Rig};

const OBJECTS: usize = 32;
const LEN: u64 = 64 * KIB;

/// Creates a pool that is full of objects `0` to `31`. The lease is 5 s, so a look-up protects for
/// half a second.
fn full(options: MasterOptions) -> Rig {
    let options = MasterOptions { lease_ttl: Duration::from_secs(5), high_watermark: 1.0, ..options };
    let rig = Rig::with(options);
    rig.mount(1, OBJECTS as u64 * LEN);
    (0..OBJECTS).for_each(|at| drop(rig.put(1, &at.to_string(), LEN).unwrap()));
    rig
}

fn look_up_all(rig: &Rig) -> usize {
    (0..OBJECTS).filter(|at| rig.exists(&at.to_string())).count()
}

#[test]
fn look_ups_without_reads_stop_no_writer() {
    let rig = full(MasterOptions::default());
    look_up_all(&rig);
    assert_eq!(rig.put(2, "early", LEN).map(drop), Err(NoAvailableHandle), "a get may follow");
    // A scheduler looks ten times a second.
    let mut stored = 0;
    for round in 0..50 {
        rig.alive_for(0.1);
        look_up_all(&rig);
        stored += usize::from(rig.put(2, &format!("new {round}"), LEN).is_ok());
    }
    assert!(stored >= 40, "{stored} of 50 puts");
    assert!(rig.master.stats().look_ups_yielded > 0);
}

#[test]
fn a_get_in_time_finds_its_object() {
    let rig = full(MasterOptions::default());
    assert_eq!(look_up_all(&rig), OBJECTS);
    for number in 0..OBJECTS {
        rig.alive_for(0.4 / OBJECTS as f64);
        assert_eq!(rig.put(2, &format!("new {number}"), LEN).map(drop), Err(NoAvailableHandle));
        rig.locate(&number.to_string()).unwrap();
    }
    // Readers still have their leases, whatever is looked up.
    for number in 0..9 {
        rig.alive_for(0.4);
        look_up_all(&rig);
        assert_eq!(rig.put(2, &format!("later {number}"), LEN).map(drop), Err(NoAvailableHandle));
    }
    assert_eq!(look_up_all(&rig), OBJECTS);
}

/// A pause in the look-ups is the end of a poll. The next look-up protects again.
#[test]
fn a_look_up_after_a_pause_protects_again() {
    let rig = full(MasterOptions::default());
    look_up_all(&rig);
    rig.alive_for(1.1);
    look_up_all(&rig);
    assert_eq!(rig.put(2, "new", LEN).map(drop), Err(NoAvailableHandle));
    rig.alive_for(0.5);
    rig.put(2, "new", LEN).unwrap();
}

/// Polls of every period leave time to puts: those that are rarer than a protection lasts, too.
#[test]
fn polls_of_every_period_stop_no_writer() {
    for period in [0.3, 0.49, 0.51, 0.75, 0.99, 1.01, 1.5, 4.0, 6.0] {
        let rig = full(MasterOptions::default());
        let (mut keys, mut tries, mut stored) = (OBJECTS, 0, 0);
        for round in 0..30 {
            // The first keys are gone once others have been stored.
            for at in keys.saturating_sub(2 * OBJECTS)..keys {
                rig.exists(&at.to_string());
            }
            for _ in 0..10 {
                rig.alive_for(period / 10.0);
                // The first look-ups protect for half a second.
                tries += usize::from(round > 3);
                if rig.put(2, &keys.to_string(), LEN).is_ok() {
                    keys += 1;
                    stored += usize::from(round > 3);
                }
            }
        }
        assert!(3 * stored >= tries, "{stored} of {tries} puts, a poll each {period} s");
    }
}

/// Look-ups of one object of a group protect the others no longer than itself.
#[test]
fn polls_of_one_object_of_a_group_stop_no_writer() {
    let rig = full(MasterOptions::default());
    (0..OBJECTS).for_each(|at| rig.remove(&at.to_string(), true).unwrap());
    for at in 0..OBJECTS {
        let group_ids = Some(vec![format!("g{}", at / 4)]);
        let config = ReplicateConfig { group_ids, hard_pin: at % 4 == 0, ..ReplicateConfig::default() };
        rig.put_with(1, &at.to_string(), LEN, &config).unwrap();
    }
    let mut stored = 0;
    for number in 0..60 {
        (0..OBJECTS).step_by(4).for_each(|at| assert!(rig.exists(&at.to_string())));
        rig.alive_for(0.1);
        stored += usize::from(rig.put(2, &format!("new {number}"), LEN).is_ok());
    }
    assert!(stored >= 40, "{stored} of 60 puts");
}

#[test]
fn without_pressure_look_ups_protect_for_the_whole_lease() {
    let rig = full(MasterOptions::default());
    rig.remove("31", true).unwrap();
    look_up_all(&rig);
    rig.alive_for(4.0);
    rig.put(2, "new", LEN).unwrap();
    assert_eq!(look_up_all(&rig), OBJECTS - 1);
    assert_eq!(rig.master.stats().look_ups_yielded, 0);
}

#[test]
fn pinned_and_read_groups_stay() {
    let rig = full(MasterOptions { look_up_protection: Some(Duration::ZERO), ..MasterOptions::default() });
    (0..OBJECTS).for_each(|at| rig.remove(&at.to_string(), true).unwrap());
    let put = |key: String, config: ReplicateConfig| drop(rig.put_with(1, &key, LEN, &config).unwrap());
    for at in 0..OBJECTS {
        let config = match at % 4 {
            0 => ReplicateConfig { hard_pin: true, ..ReplicateConfig::default() },
            1 => ReplicateConfig { soft_pin: SoftPin::Enable, ..ReplicateConfig::default() },
            2 => ReplicateConfig { group_ids: Some(vec!["g".into()]), ..ReplicateConfig::default() },
            _ => ReplicateConfig::default(),
        };
        put(at.to_string(), config);
    }
    rig.locate("2").unwrap();
    look_up_all(&rig);
    for number in 0..OBJECTS / 4 {
        rig.put(2, &format!("new {number}"), LEN).unwrap();
        look_up_all(&rig);
    }
    let left = |kind| (0..OBJECTS).filter(|at| at % 4 == kind && rig.has(&at.to_string())).count();
    assert_eq!([left(0), left(1), left(2)], [OBJECTS / 4, OBJECTS / 4, OBJECTS / 4]);
    assert!(left(3) < OBJECTS / 4);
}

/// The background finds nothing to evict above the watermark and pauses. Puts may go on.
#[test]
fn pauses_of_the_background_stop_no_put() {
    const SLOTS: usize = 2 * OBJECTS;
    let options =
        MasterOptions { lease_ttl: Duration::from_secs(5), high_watermark: 0.9, ..MasterOptions::default() };
    let rig = Rig::with(options);
    rig.mount(1, SLOTS as u64 * LEN);
    let mut stored = 0usize;
    for _ in 0..2000 {
        rig.alive_for(0.001);
        // A scheduler looks at the latest blocks all the time.
        for at in stored.saturating_sub(OBJECTS)..stored {
            rig.exists(&at.to_string());
        }
        if rig.put(2, &stored.to_string(), LEN).is_ok() {
            rig.exists(&stored.to_string());
            stored += 1;
        }
    }
    // Every half second the whole memory is written once.
    assert!((3 * SLOTS..=5 * SLOTS).contains(&stored), "{stored} puts");
}
