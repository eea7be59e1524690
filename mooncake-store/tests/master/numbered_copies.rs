//! Numbers of copies, promotions and reports of disks: a late or repeated call about an earlier one
//! has no effect on a later one.

use std::time::Duration;

use mooncake_core::error::ErrorCode::{self, *};
use mooncake_core::replica::{Replica, ReplicateConfig};
use mooncake_store::master::{DiskOptions, Master, MasterOptions, PromotionOptions, Writer};
use mooncake_store::protocol::call::{Request, Response};
use mooncake_store::protocol::message::{
    CopyEnd, CopyRevoke, Handle, MoveEnd, MoveRevoke, NotifyPromotionFailure, NotifyPromotionSuccess,
};
use mooncake_store::protocol::pack::{self, Answer};
use mooncake_store::protocol::wire::TaskKind::{self, Copy, Move};
use mooncake_store::protocol::wire::{OffloadItem, StoredAt};

use crate::common::rig::{MIB, Rig, client, segment};

const LEN: u64 = 4096;

fn name(number: u64) -> String {
    segment(number, MIB).name
}

/// Returns a master with three segments, and the object `k` in segment 1.
fn rig() -> Rig {
    let rig = Rig::new();
    (1..=3).for_each(|number| drop(rig.mount(number, MIB)));
    let config = ReplicateConfig { preferred_segment: name(1), ..ReplicateConfig::default() };
    rig.put_with(9, "k", LEN, &config).unwrap();
    rig
}

fn numbered(attempt: u64) -> Writer {
    Writer { client: client(1), attempt }
}

fn start(rig: &Rig, kind: TaskKind, attempt: u64) -> Result<Vec<Replica>, ErrorCode> {
    let (from, to) = (name(1), name(2));
    let plan = match kind {
        Copy => rig.master.copy_start(numbered(attempt), b"k", &from, &[&to]).map(|plan| plan.targets),
        Move => rig
            .master
            .move_start(numbered(attempt), b"k", &from, &to)
            .map(|plan| plan.target.into_iter().collect()),
    };
    plan.map_err(|error| error.code())
}

fn end(rig: &Rig, kind: TaskKind, attempt: u64) -> Result<(), ErrorCode> {
    rig.master.replication_end(numbered(attempt), kind, b"k").map_err(|error| error.code())
}

fn revoke(rig: &Rig, kind: TaskKind, attempt: u64) -> Result<(), ErrorCode> {
    rig.master.replication_revoke(numbered(attempt), kind, b"k").map_err(|error| error.code())
}

/// Returns the number of readable replicas in segments 1 and 2.
fn readable(rig: &Rig) -> [usize; 2] {
    let replicas = rig.master.peek(b"k").unwrap();
    let endpoint = |number| segment(number, MIB).endpoint;
    let count = |number| {
        let there = |replica: &&Replica| replica.location.memory().unwrap().endpoint == endpoint(number);
        replicas.iter().filter(there).count()
    };
    [count(1), count(2)]
}

#[test]
fn a_late_end_of_one_copy_ends_no_other() {
    for kind in [Copy, Move] {
        let rig = rig();
        let plan = start(&rig, kind, 1).unwrap();
        assert_eq!(start(&rig, kind, 1), Ok(plan.clone()), "the response was lost");
        assert_eq!(start(&rig, kind, 2), Err(ObjectHasReplicationTask));
        assert_eq!((end(&rig, kind, 2), revoke(&rig, kind, 2)), (Err(InvalidVersion), Err(InvalidVersion)));
        // The end is lost, the copy is revoked, and another one begins.
        assert_eq!([revoke(&rig, kind, 1), revoke(&rig, kind, 1)], [Ok(()); 2]);
        assert_ne!(start(&rig, kind, 3).unwrap(), plan);
        assert_eq!(end(&rig, kind, 1), Err(InvalidVersion));
        assert_eq!(revoke(&rig, kind, 1), Ok(()), "it was revoked before");
        assert_eq!(readable(&rig), [1, 0], "the bytes of the second copy have not landed");
        assert_eq!([end(&rig, kind, 3), end(&rig, kind, 3)], [Ok(()); 2], "the response was lost");
        let expected = if kind == Copy { [1, 1] } else { [0, 1] };
        assert_eq!(readable(&rig), expected);
        assert_eq!(revoke(&rig, kind, 3), Err(ObjectNoReplicationTask), "it has ended");
        assert_eq!(readable(&rig), expected);
        rig.remove("k", true).unwrap();
        assert_eq!(end(&rig, kind, 3), Ok(()), "the copy was made, whatever became of the object");
        rig.alive_for(11.0);
        assert_eq!(rig.used(), 0);
    }
}

#[test]
fn a_start_that_arrives_after_its_end_begins_nothing() {
    let rig = rig();
    assert_eq!(revoke(&rig, Copy, 1), Err(ObjectNoReplicationTask), "the start is on its way");
    assert_eq!(start(&rig, Copy, 1), Err(InvalidVersion));
    start(&rig, Copy, 2).unwrap();
    end(&rig, Copy, 2).unwrap();
    assert_eq!(start(&rig, Copy, 2), Err(InvalidVersion));
    rig.upsert(9, "k", 100).unwrap();
}

#[test]
fn the_end_of_a_lost_copy_ends_no_other() {
    for kind in [Copy, Move] {
        let rig = rig();
        // Another replica, so that the object outlives its client.
        rig.master.copy_start(client(3), b"k", &name(1), &[&name(3)]).unwrap();
        rig.master.replication_end(client(3), Copy, b"k").unwrap();
        start(&rig, kind, 1).unwrap();
        rig.master.unmount(client(1), segment(1, MIB).id).unwrap();
        let again = || match kind {
            Copy => {
                rig.master.copy_start(numbered(2), b"k", &name(3), &[&name(2)]).map(|plan| plan.targets.len())
            }
            Move => rig.master.move_start(numbered(2), b"k", &name(3), &name(2)).map(|_| 1),
        };
        assert_eq!(again().unwrap(), 1);
        assert_eq!(end(&rig, kind, 1), Err(InvalidVersion));
        assert_eq!(readable(&rig), [0, 0]);
        assert_eq!(end(&rig, kind, 2), Ok(()));
        assert_eq!(readable(&rig), [0, 1]);
    }
}

/// A client without numbers may have repeated the start, or may run two tasks.
#[test]
fn space_that_two_tasks_may_write_rests() {
    let rig = rig();
    let who = client(1);
    for _ in 0..2 {
        rig.master.copy_start(who, b"k", &name(1), &[&name(2)]).unwrap();
    }
    rig.master.replication_end(who, Copy, b"k").unwrap();
    rig.remove("k", true).unwrap();
    rig.alive_for(590.0);
    assert_eq!(rig.used(), LEN, "the second task may still write");
    rig.alive_for(11.0);
    assert_eq!(rig.used(), 0);
    // With numbers the start was certainly repeated.
    rig.put_with(9, "k", LEN, &ReplicateConfig { preferred_segment: name(1), ..Default::default() }).unwrap();
    start(&rig, Copy, 1).unwrap();
    start(&rig, Copy, 1).unwrap();
    end(&rig, Copy, 1).unwrap();
    rig.remove("k", true).unwrap();
    rig.alive_for(11.0);
    assert_eq!(rig.used(), 0);
}

/// Returns a master that promotes at the first read, with the disk of client 1.
fn rig_with_disk() -> Rig {
    let promotion = Some(PromotionOptions { threshold: 1, queue_limit: 9, per_heartbeat: 9 });
    let disks = Some(DiskOptions { promotion, ..DiskOptions::default() });
    let rig = Rig::with(MasterOptions { disks, high_watermark: 1.0, ..MasterOptions::default() });
    rig.mount(1, MIB);
    rig.mount(2, MIB);
    rig.master.mount_disk(client(1), true).unwrap();
    rig
}

fn report(rig: &Rig, work: u64, key: &str, len: i64) {
    let item = OffloadItem { tenant: "default".into(), key: key.into(), size: len };
    let endpoint = "disk1:1".to_owned();
    let place = StoredAt { bucket: 0, offset: 0, key_size: 0, data_size: len, endpoint };
    rig.master.report_offloaded(client(1), work, &[item], &[place]).unwrap();
}

#[test]
fn a_late_end_of_one_promotion_ends_no_other() {
    let rig = rig_with_disk();
    report(&rig, 0, "k", 100);
    let promote = || {
        rig.locate("k").unwrap();
        assert_eq!(rig.master.to_promote(client(1)).unwrap().len(), 1);
    };
    let start = |attempt| {
        let started = rig.master.promotion_start(numbered(attempt), b"k", 100, &[&name(1)]);
        started.map_err(|error| error.code())
    };
    let end = |attempt| rig.master.promoted(numbered(attempt), b"k").map_err(|error| error.code());
    let fail = |attempt| rig.master.promotion_failed(numbered(attempt), b"k").map_err(|error| error.code());
    let in_memory = || {
        let replicas = rig.master.peek(b"k").unwrap();
        replicas.iter().filter(|replica| replica.location.memory().is_some()).count()
    };
    promote();
    let place = start(1).unwrap();
    assert_eq!(start(1), Ok(place), "the response was lost");
    assert_eq!(start(2), Err(ReplicaIsNotReady));
    assert_eq!([fail(1), fail(1)], [Ok(()); 2]);
    promote();
    start(3).unwrap();
    assert_eq!((end(1), start(1)), (Err(ReplicaIsNotReady), Err(InvalidVersion)));
    assert_eq!((fail(2), in_memory()), (Ok(()), 0));
    assert_eq!(([end(3), end(3)], in_memory()), ([Ok(()); 2], 1));
    assert_eq!((fail(3), in_memory()), (Ok(()), 1));
}

#[test]
fn late_reports_of_a_disk_concern_no_later_value() {
    let rig = rig_with_disk();
    let owner = client(1);
    rig.master.disk_work(owner, true, 0).unwrap();
    let on_disk = || {
        let replicas = rig.master.peek(b"k").unwrap();
        replicas.iter().filter(|replica| replica.location.memory().is_none()).count()
    };
    let put = || {
        let config = ReplicateConfig { preferred_segment: name(1), ..ReplicateConfig::default() };
        rig.put_with(9, "k", 100, &config).unwrap();
    };
    put();
    let first = rig.master.disk_work(owner, false, 0).unwrap();
    assert_eq!(first.write.len(), 1);
    report(&rig, first.number, "k", 100);
    assert_eq!(on_disk(), 1);
    // Another value of the same length is to be written, and the owner has not written it.
    rig.clock.advance(Duration::from_secs(1));
    rig.remove("k", true).unwrap();
    put();
    let second = rig.master.disk_work(owner, false, first.number).unwrap();
    assert_eq!(second.write.len(), 1);
    report(&rig, first.number, "k", 100);
    assert_eq!(on_disk(), 0, "the disk still has the earlier value");
    report(&rig, 0, "k", 100);
    assert_eq!(on_disk(), 0, "a late announcement");
    report(&rig, second.number, "k", 100);
    assert_eq!(on_disk(), 1);
    // The owner reports that the earlier value has left its disk.
    rig.master.report_dropped(owner, first.number, b"k").unwrap();
    assert_eq!(on_disk(), 1);
    rig.master.report_dropped(owner, second.number, b"k").unwrap();
    assert_eq!(on_disk(), 0);
}

/// Makes a call that the server had read at a logical time. Returns its error.
fn call<R>(rig: &Rig, request: R, receipt: u64) -> Result<(), ErrorCode>
where
    R: Request<Reply = Answer<()>>,
    Master: Handle<R>,
{
    let mut body = Vec::new();
    let mut response = Response::new(&mut body).received_at(Some(receipt));
    rig.master.respond(request, &mut response).unwrap();
    pack::decode::<Answer<()>>(&body).unwrap()
}

/// Clients of Mooncake C++ do not number their copies.
#[test]
fn an_end_that_was_read_before_a_copy_began_does_not_end_it() {
    for kind in [Copy, Move] {
        let rig = rig();
        let (client, key, tenant) = (client(1), &b"k"[..], "default");
        let end = |receipt| match kind {
            Copy => call(&rig, CopyEnd { client, key, tenant }, receipt),
            Move => call(&rig, MoveEnd { client, key, tenant }, receipt),
        };
        let revoke = |receipt| match kind {
            Copy => call(&rig, CopyRevoke { client, key, tenant }, receipt),
            Move => call(&rig, MoveRevoke { client, key, tenant }, receipt),
        };
        start(&rig, kind, 0).unwrap();
        let first = rig.master.logical_time();
        assert_eq!(revoke(first), Ok(()));
        start(&rig, kind, 0).unwrap();
        let late = [end(first), revoke(first)];
        assert_eq!(late, [Err(ObjectNoReplicationTask); 2], "they are about the first copy");
        assert_eq!(readable(&rig), [1, 0]);
        assert_eq!(end(rig.master.logical_time()), Ok(()));
        assert_eq!(readable(&rig)[1], 1);
    }
}

#[test]
fn an_end_that_was_read_before_a_promotion_began_does_not_end_it() {
    let rig = rig_with_disk();
    report(&rig, 0, "k", 100);
    let (client, key, tenant) = (client(1), &b"k"[..], "default");
    let promote = || {
        rig.locate("k").unwrap();
        assert_eq!(rig.master.to_promote(client).unwrap().len(), 1);
        rig.master.promotion_start(client, key, 100, &[&name(1)]).unwrap();
        rig.master.logical_time()
    };
    let first = promote();
    assert_eq!(call(&rig, NotifyPromotionFailure { client, key, tenant }, first), Ok(()));
    let second = promote();
    let end = |receipt| call(&rig, NotifyPromotionSuccess { client, key, tenant }, receipt);
    assert_eq!(end(first), Err(ReplicaIsNotReady));
    assert_eq!(end(second), Ok(()));
}
