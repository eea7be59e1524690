//! Master that follows one with longer leases and keeps the promises of the earlier one.

use std::sync::Arc;
use std::time::Duration;

use crate::common::rig::{KIB, MIB, Rig, client};
use mooncake_core::error::ErrorCode;
use mooncake_store::master::{Master, MasterOptions, Snapshot};

fn with_lease(seconds: u64) -> MasterOptions {
    MasterOptions { lease_ttl: Duration::from_secs(seconds), ..MasterOptions::default() }
}

/// Returns a later master under the same clock.
fn after(rig: &Rig, options: MasterOptions) -> Rig {
    let clock = rig.clock.clone();
    let master =
        Master::with_parts(options, &Default::default(), &Default::default(), clock.clone(), 8).unwrap();
    Rig { clock: Arc::clone(&clock), master }
}

fn snapshot(rig: &Rig) -> Snapshot {
    let mut bytes = Vec::new();
    rig.master
        .snapshot(|part| {
            bytes.extend_from_slice(part);
            Ok(())
        })
        .unwrap();
    Snapshot::read(&bytes).unwrap()
}

/// Reads an object that fills the segment under a lease of 300 s. The next master gives leases of 1
/// s, and `tell` transfers the lease to it.
fn extent_rests(tell: impl Fn(&Rig, &Rig, u64)) {
    let before = Rig::with(with_lease(300));
    let segment = before.mount(1, 64 * KIB);
    let promise = before.master.exchange_promise(client(1), 0).promise_ms;
    before.put(1, "read", 64 * KIB).unwrap();
    assert_eq!(before.locate("read").unwrap().lease, Duration::from_secs(300));

    let now = after(&before, with_lease(1));
    tell(&before, &now, promise);
    now.master.remount(client(1), &[segment]).unwrap();
    now.alive_for(31.0);
    assert_eq!(
        now.start(1, "new", 64 * KIB),
        Err(ErrorCode::NoAvailableHandle),
        "a reader of the earlier master still has a lease on these bytes"
    );
    now.alive_for(268.0);
    assert_eq!(now.start(1, "new", 64 * KIB), Err(ErrorCode::NoAvailableHandle));
    now.alive_for(2.0);
    now.start(1, "new", 64 * KIB).expect("no lease of the earlier master holds any more");
}

#[test]
fn a_client_tells_of_longer_leases() {
    extent_rests(|_, now, promise| {
        now.master.exchange_promise(client(1), promise);
    });
}

#[test]
fn a_snapshot_tells_of_longer_leases() {
    extent_rests(|before, now, _| now.master.recall(snapshot(before)));
}

#[test]
fn two_restarts_keep_the_promise() {
    let first = Rig::with(with_lease(300));
    let second = after(&first, with_lease(1));
    second.master.recall(snapshot(&first));
    second.clock.advance(Duration::from_secs(100));
    let third = after(&second, with_lease(1));
    third.master.recall(snapshot(&second));
    let segment = crate::common::rig::segment(1, MIB);
    third.master.remount(client(1), &[segment]).unwrap();
    third.alive_for(199.0);
    assert_eq!(third.start(1, "new", KIB), Err(ErrorCode::NoAvailableHandle));
    second.clock.advance(Duration::from_secs(101));
    // The promise of the first master has expired: the second one does not pass it on.
    let fourth = after(&second, with_lease(1));
    fourth.master.recall(snapshot(&second));
    fourth.master.remount(client(1), &[crate::common::rig::segment(1, MIB)]).unwrap();
    fourth.alive_for(31.0);
    fourth.start(1, "new", KIB).unwrap();
}

#[test]
fn writers_of_the_earlier_master_are_waited_for_whatever_the_options_say() {
    let options = MasterOptions { put_discard: Duration::from_secs(1), ..with_lease(1) };
    let rig = Rig::with(options);
    rig.master.remount(client(1), &[crate::common::rig::segment(1, MIB)]).unwrap();
    rig.alive_for(26.0);
    assert_eq!(rig.start(1, "new", KIB), Err(ErrorCode::NoAvailableHandle), "clients use a grant for 25 s");
    rig.alive_for(5.0);
    rig.start(1, "new", KIB).unwrap();
}

#[test]
fn a_promise_without_end_is_cut() {
    let rig = Rig::with(with_lease(1));
    assert_eq!(rig.master.exchange_promise(client(1), u64::MAX).promise_ms, 30_000);
    rig.master.remount(client(1), &[crate::common::rig::segment(1, MIB)]).unwrap();
    rig.clock.advance(Duration::from_secs(24 * 60 * 60));
    rig.master.ping(client(1));
    rig.start(1, "new", KIB).unwrap();
}
