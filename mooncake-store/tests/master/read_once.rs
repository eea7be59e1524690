//! Values whose first read is their last one, with replicas that owners announce after the read.

use std::time::Duration;

use crate::common::rig::{KIB, MIB, Rig, client, segment};
use crate::removals::{Owner, another, end_announcements, next_with, on, snapshot, with_options};
use mooncake_core::error::ErrorCode::ObjectAlreadyExists;
use mooncake_core::hints::PutHints;
use mooncake_core::replica::ReplicateConfig;
use mooncake_store::master::MasterOptions;

/// Returns a master with such a value in the segments of both owners, who have learnt of it.
fn once() -> (Rig, Owner, Owner) {
    with_hints(PutHints { delete_after_read: true, ..PutHints::default() })
}

fn with_hints(hints: PutHints) -> (Rig, Owner, Owner) {
    let rig = another(3);
    let (mut a, mut b) = (Owner::join(&rig, 1), Owner::join(&rig, 2));
    let config = ReplicateConfig { replicas: 2, hints: Some(Box::new(hints)), ..ReplicateConfig::default() };
    rig.put_with(9, "k", 4 * KIB, &config).unwrap();
    a.hear(&rig);
    b.hear(&rig);
    assert_eq!((a.stored.len(), b.stored.len()), (1, 1));
    (rig, a, b)
}

fn is_refused(owner: &mut Owner, rig: &Rig) {
    assert_eq!(owner.returns(rig), [Err(ObjectAlreadyExists)]);
    assert!(rig.locate("k").is_err(), "read a second time");
}

/// The value is gone with its owner, before a lease ends and the value is removed.
#[test]
fn a_value_that_was_read_does_not_return_once_its_owner_has_left() {
    for (leaves, ticks) in [(true, false), (true, true), (false, true)] {
        let (_, mut a, mut b) = once();
        let next = another(4);
        assert_eq!(a.returns(&next), [Ok(())]);
        next.pass(9.0);
        next.locate("k").unwrap();
        if leaves {
            next.master.unmount(client(1), a.segment.id).unwrap();
        }
        if ticks {
            next.pass(if leaves { 0.1 } else { 2.0 });
        }
        is_refused(&mut b, &next);
    }
}

#[test]
fn a_value_that_was_read_does_not_return_after_its_eviction() {
    let lease = Duration::from_secs(10);
    for unprotected in [false, true] {
        let (_, mut a, mut b) = once();
        let options = MasterOptions { high_watermark: 1.0, ..MasterOptions::default() };
        let next = match unprotected {
            true => with_options(4, MasterOptions { unprotected_lease: lease, lease_ttl: lease, ..options }),
            false => with_options(4, options),
        };
        assert_eq!(a.returns(&next), [Ok(())]);
        next.locate("k").unwrap();
        if !unprotected {
            // The lease is over, and the puts come before the next tick.
            next.clock.advance(lease);
        }
        // These puts need the whole segment.
        let _ = (next.put(9, "large", MIB - 4 * KIB), next.put(9, "other", 4 * KIB));
        is_refused(&mut b, &next);
    }
}

#[test]
fn a_value_that_was_read_does_not_return_after_a_replacement_that_failed() {
    let (_, mut a, mut b) = once();
    let next = another(4);
    assert_eq!(a.returns(&next), [Ok(())]);
    next.locate("k").unwrap();
    next.pass(0.1);
    next.upsert(9, "k", 4 * KIB).unwrap();
    next.revoke(9, "k").unwrap();
    next.master.unmount(client(1), a.segment.id).unwrap();
    is_refused(&mut b, &next);
}

#[test]
fn a_value_that_was_read_does_not_return_from_the_list_of_late_owners() {
    for ticks in [false, true] {
        let (rig, mut a, mut b) = once();
        let next = next_with(snapshot(&rig), 4);
        next.mount(7, MIB);
        end_announcements(&next);
        assert_eq!(a.returns(&next), [Ok(())]);
        next.locate("k").unwrap();
        next.master.unmount(client(1), a.segment.id).unwrap();
        if ticks {
            next.pass(0.1);
        }
        is_refused(&mut b, &next);
    }
}

/// No master is restarted: the next process of an owner announces what the master has listed before
/// the read.
#[test]
fn a_value_that_was_read_does_not_return_with_memory_that_is_handed_over() {
    for restarts in [false, true] {
        let (rig, mut a, b) = once();
        rig.master.hand_over(client(1), a.segment.id).unwrap();
        rig.pass(0.1);
        rig.locate("k").unwrap();
        assert!(rig.locate("k").is_err());
        let next = if restarts { next_with(snapshot(&rig), 4) } else { rig };
        if !restarts {
            next.master.unmount(client(2), b.segment.id).unwrap();
            next.pass(0.1);
        }
        a.take_over(&next, 11);
        assert_eq!(a.announce(&next), [Err(ObjectAlreadyExists)], "restarts: {restarts}");
        assert!(next.locate("k").is_err(), "read a second time");
    }
}

/// The date of the next announcement is before that of the end.
#[test]
fn a_value_whose_time_is_over_does_not_return() {
    for evicts in [false, true] {
        let (_, mut a, mut b) = with_hints(PutHints { ttl_ms: Some(60_000), ..PutHints::default() });
        let next = another(4);
        assert_eq!(a.returns(&next), [Ok(())]);
        next.clock.advance(Duration::from_secs(60));
        if evicts {
            let _ = (next.put(9, "large", MIB - 4 * KIB), next.put(9, "other", 4 * KIB));
        } else {
            next.master.unmount(client(1), a.segment.id).unwrap();
        }
        // An owner that does not know of the end.
        b.remount(&next);
        let announced = next.master.announce(client(2), &b.stored[0]).map_err(|error| error.code());
        assert_eq!(announced, Err(ObjectAlreadyExists));
        assert!(!next.has("k"));
    }
}

/// Two replicas of a value that no client has read yet.
#[test]
fn a_value_that_was_not_read_returns_with_the_other_owner() {
    let (_, mut a, mut b) = once();
    let next = another(4);
    assert_eq!(a.returns(&next), [Ok(())]);
    next.master.unmount(client(1), a.segment.id).unwrap();
    next.pass(0.1);
    assert_eq!(b.returns(&next), [Ok(())]);
    next.locate("k").unwrap();
    // A later value of the key counts.
    next.mount(7, MIB);
    next.alive_for(6.0);
    next.put_with(9, "k", 64, &on(7)).unwrap();
    assert!(next.has("k"));
    assert_eq!(segment(7, MIB).name, on(7).preferred_segments[0]);
}
