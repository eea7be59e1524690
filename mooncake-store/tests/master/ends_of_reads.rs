//! Space of removed objects, which is free once its readers have ended or their leases have.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use mooncake_core::error::ErrorCode::{self, NoAvailableHandle, ObjectNotFound};
use mooncake_core::hints::PutHints;
use mooncake_core::replica::ReplicateConfig;
use mooncake_store::api::WriteMode;
use mooncake_store::master::MasterOptions;

use crate::common::rig::{KIB, MIB, Rig, address};

const ONE: u64 = 11;
const TWO: u64 = 12;

/// Returns a master with space for one object of 64 KiB.
fn rig() -> Rig {
    let lease_ttl = Duration::from_secs(5);
    let rig = Rig::with(MasterOptions { high_watermark: 1.0, lease_ttl, ..MasterOptions::default() });
    rig.mount(1, 64 * KIB);
    rig
}

impl Rig {
    fn read(&self, reader: u64, number: u64, key: &str) {
        self.read_after(reader, number, 0, key).unwrap();
    }

    fn read_after(&self, reader: u64, number: u64, ended: u64, key: &str) -> Result<(), ErrorCode> {
        let found = self.master.locate_for_read(reader, number, ended, key.as_bytes());
        found.map(drop).map_err(|error| error.code())
    }

    /// Returns whether there is space for an object, which is removed again.
    fn is_free(&self) -> bool {
        let is_free = self.put(9, "probe", 64 * KIB).is_ok();
        if is_free {
            self.remove("probe", true).unwrap();
        }
        is_free
    }
}

#[test]
fn space_without_a_reader_is_free_at_once() {
    let rig = rig();
    let first = rig.put(9, "k", 64 * KIB).unwrap();
    rig.remove("k", true).unwrap();
    assert!(rig.is_free());
    // A client that asked whether the object exists has no address.
    rig.put(9, "k", 64 * KIB).unwrap();
    assert!(rig.exists("k"));
    rig.remove("k", true).unwrap();
    assert_eq!(address(&rig.put(9, "k", 64 * KIB).unwrap()[0]), address(&first[0]));
}

#[test]
fn space_is_free_once_all_readers_have_ended() {
    for reports_first in [false, true] {
        let rig = rig();
        rig.put(9, "k", 64 * KIB).unwrap();
        rig.read(ONE, 1, "k");
        rig.read(TWO, 1, "k");
        rig.read(ONE, 2, "k");
        let report = |reader, ended| assert!(rig.master.report_reads(reader, ended) > 0);
        if reports_first {
            report(ONE, 1);
            report(TWO, 1);
        }
        rig.remove("k", true).unwrap();
        report(ONE, 1);
        report(TWO, 1);
        report(TWO, 1);
        assert!(!rig.is_free(), "read 2 goes on");
        // The number travels with the next request, also if that misses.
        assert_eq!(rig.read_after(ONE, 3, 2, "k"), Err(ObjectNotFound));
        assert!(rig.is_free());
    }
}

#[test]
fn every_way_to_remove_gives_space_back() {
    type Remove = fn(&Rig);
    let ways: &[Remove] = &[
        |rig| rig.remove("k", true).unwrap(),
        |rig| assert_eq!(rig.master.remove_all(true), 1),
        |rig| assert_eq!(rig.master.remove_matching("k", true).unwrap(), 1),
        |rig| assert_eq!(rig.master.remove_all_of("default", true), 1),
    ];
    for remove in ways {
        for ended in [1, 2] {
            let rig = rig();
            rig.put(9, "k", 64 * KIB).unwrap();
            rig.read(ONE, 2, "k");
            remove(&rig);
            assert!(!rig.is_free());
            rig.master.report_reads(ONE, ended);
            assert_eq!(rig.is_free(), ended == 2);
            // Without a report, the lease counts.
            rig.alive_for(5.1);
            assert!(rig.is_free());
        }
    }
}

/// A client of Mooncake C++ reports nothing, so its lease counts.
#[test]
fn a_lease_without_reports_counts() {
    for unreported_first in [false, true] {
        let rig = rig();
        rig.put(9, "k", 64 * KIB).unwrap();
        if unreported_first {
            rig.locate("k").unwrap();
            rig.alive_for(2.0);
            rig.read(ONE, 1, "k");
        } else {
            rig.read(ONE, 1, "k");
            rig.alive_for(2.0);
            rig.locate("k").unwrap();
        }
        rig.remove("k", true).unwrap();
        rig.master.report_reads(ONE, 1);
        assert!(!rig.is_free());
        // The lease of the first reader is shorter than that of the second one.
        rig.alive_for(3.1);
        assert_eq!(rig.is_free(), unreported_first);
        rig.alive_for(2.0);
        assert!(rig.is_free());
    }
}

#[test]
fn more_readers_than_are_known_count_by_their_leases() {
    let rig = rig();
    rig.put(9, "k", 64 * KIB).unwrap();
    (0..20).for_each(|reader| rig.read(reader, 1, "k"));
    rig.remove("k", true).unwrap();
    (0..20).for_each(|reader| assert!(rig.master.report_reads(reader, 1) > 0));
    assert!(!rig.is_free());
    rig.alive_for(5.1);
    assert!(rig.is_free());
}

/// The value that replaced another one does not inherit its reads, and the end of a read of the
/// earlier value frees the earlier space only.
#[test]
fn the_space_of_a_replaced_value_is_free_once_its_readers_have_ended() {
    let rig = Rig::without_watermark();
    rig.mount(1, 128 * KIB);
    let first = rig.put(9, "k", 64 * KIB).unwrap();
    rig.read(ONE, 1, "k");
    let second = rig.upsert(9, "k", 64 * KIB).unwrap();
    rig.end(9, "k").unwrap();
    rig.read(TWO, 1, "k");
    assert!(!rig.is_free());
    rig.master.report_reads(ONE, 1);
    let third = rig.start(9, "new", 64 * KIB).unwrap();
    assert_eq!(address(&third[0]), address(&first[0]));
    rig.remove("k", true).unwrap();
    assert!(!rig.is_free());
    rig.master.report_reads(TWO, 1);
    assert_eq!(address(&rig.start(9, "newer", 64 * KIB).unwrap()[0]), address(&second[0]));
}

#[test]
fn an_object_that_is_read_once_is_free_after_the_read() {
    let once = ReplicateConfig {
        hints: Some(Box::new(PutHints { delete_after_read: true, ..PutHints::default() })),
        ..ReplicateConfig::default()
    };
    for case in 0..3 {
        let rig = rig();
        rig.put_with(9, "k", 64 * KIB, &once).unwrap();
        rig.read(ONE, 1, "k");
        assert_eq!(rig.read_after(TWO, 1, 0, "k"), Err(ObjectNotFound), "it was read");
        match case {
            0 => {}
            1 => {
                assert_eq!(rig.remove("k", true), Err(ObjectNotFound));
                assert!(!rig.is_free());
            }
            // The end of the read is a late one: the object was replaced meanwhile.
            _ => {
                rig.alive_for(5.1);
                rig.put(9, "k", 64 * KIB).unwrap();
                rig.master.report_reads(ONE, 1);
                assert!(rig.has("k"), "another value");
                continue;
            }
        }
        assert!(!rig.is_free());
        rig.master.report_reads(ONE, 1);
        assert_eq!(rig.master.stats().objects, 0);
        assert!(rig.is_free());
    }
}

/// The segment is mounted again while readers hold its extents. An end of a read concerns the
/// earlier mount only.
#[test]
fn a_mount_that_is_gone_frees_nothing_in_the_next_one() {
    let rig = rig();
    rig.put(9, "k", 64 * KIB).unwrap();
    rig.read(ONE, 1, "k");
    rig.remove("k", true).unwrap();
    let segment = crate::common::rig::segment(1, 64 * KIB);
    rig.master.unmount(crate::common::rig::client(1), segment.id).unwrap();
    rig.mount(1, 64 * KIB);
    rig.master.report_reads(ONE, 1);
    assert!(!rig.is_free(), "the new mount has the lease only");
    rig.alive_for(5.1);
    assert!(rig.is_free());
    assert_eq!(rig.used(), 0);
}

#[test]
fn a_cycle_of_put_read_and_removal_needs_no_lease_to_end() {
    let rig = Rig::with(MasterOptions { lease_ttl: Duration::from_secs(3600), ..MasterOptions::default() });
    rig.mount(1, MIB);
    for number in 1..10_000 {
        let key = format!("k{number}");
        rig.start_with(9, &key, 400 * KIB, WriteMode::Put, &ReplicateConfig::default()).unwrap();
        rig.end(9, &key).unwrap();
        rig.read_after(ONE, number, number - 1, &key).unwrap();
        rig.remove(&key, true).unwrap();
    }
    rig.master.report_reads(ONE, u64::MAX);
    assert_eq!(rig.used(), 0);
}

#[test]
fn a_refusal_for_ever_is_known() {
    let rig = Rig::without_watermark();
    let why = |len| rig.master.check_space(len, "").reason;
    assert_eq!(why(64), 1);
    rig.mount(1, 64 * KIB);
    assert_eq!((why(64 * KIB + 1), why(64 * KIB)), (2, 0));
    let pinned = ReplicateConfig { hard_pin: true, ..ReplicateConfig::default() };
    rig.put_with(9, "k", 32 * KIB, &pinned).unwrap();
    rig.put_with(9, "l", 16 * KIB, &pinned).unwrap();
    assert_eq!((why(16 * KIB), why(17 * KIB)), (0, 3));
    rig.start(9, "m", 16 * KIB).unwrap();
    assert_eq!(why(16 * KIB), 0, "a write may be revoked");
    rig.end(9, "m").unwrap();
    assert_eq!(why(16 * KIB), 0, "an object may be evicted");
    rig.read(ONE, 1, "m");
    rig.remove("m", true).unwrap();
    assert_eq!(why(16 * KIB), 0, "a lease ends");
    rig.master.report_reads(ONE, 1);
    rig.put_with(9, "m", 16 * KIB, &pinned).unwrap();
    assert_eq!((why(64), rig.put(9, "n", 64)), (3, Err(NoAvailableHandle)));
    rig.mount(2, 64 * KIB);
    assert_eq!(why(64), 0);
}

/// Objects that are removed during the look do not count as pinned.
#[test]
#[allow(clippy::disallowed_methods, reason = "the threads meet at random")]
fn no_refusal_is_for_ever_without_pinned_objects() {
    let rig = rig();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..20_000 {
                let key = format!("k{number}");
                rig.put(9, &key, 64 * KIB).unwrap();
                rig.remove(&key, true).unwrap();
            }
            is_over.store(true, Relaxed);
        });
        while !is_over.load(Relaxed) {
            assert_eq!(rig.master.check_space(64 * KIB, "").reason, 0);
        }
    });
}

/// A read may end while its object is removed.
#[test]
#[allow(clippy::disallowed_methods, reason = "the threads meet at random")]
fn space_is_free_after_a_removal_beside_the_end_of_a_read() {
    let rig = rig();
    const ROUNDS: u64 = 20_000;
    let mut used = 0;
    let (begun, reported) = (AtomicU64::new(0), AtomicU64::new(0));
    let reached = |step: &AtomicU64, number| {
        while step.load(SeqCst) < number {
            std::thread::yield_now();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 1..=ROUNDS {
                reached(&begun, number);
                rig.master.report_reads(ONE, number);
                reported.store(number, SeqCst);
            }
        });
        for number in 1..=ROUNDS {
            rig.put(9, "k", 64 * KIB).unwrap();
            rig.read(ONE, number, "k");
            begun.store(number, SeqCst);
            rig.remove("k", true).unwrap();
            reached(&reported, number);
            used = rig.used();
            if used > 0 {
                begun.store(ROUNDS, SeqCst);
                break;
            }
        }
    });
    assert_eq!(used, 0, "the space waits for a read that has ended");
}
