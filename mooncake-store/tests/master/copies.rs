//! Copies, moves and tasks, under a manual clock.

use std::time::Duration;

use crate::common::rig::{KIB, MIB, Rig, client, segment};
use mooncake_core::error::ErrorCode::{self, *};
use mooncake_core::ids::{ReplicaId, Uuid};
use mooncake_core::replica::{ReplicateConfig, SegmentStatus};
use mooncake_store::api::WriteMode;
use mooncake_store::master::{MasterOptions, TaskOptions};
use mooncake_store::protocol::wire::TaskKind::{Copy, Move};
use mooncake_store::protocol::wire::{CopyPlan, MovePlan, Task, TaskReport, TaskStatus};

fn name(number: u64) -> String {
    segment(number, MIB).name
}

trait Copies {
    fn put_in(&self, number: u64, key: &str, len: u64);
    fn copy(&self, who: u64, key: &str, from: u64, to: &[u64]) -> Result<CopyPlan, ErrorCode>;
    fn mv(&self, who: u64, key: &str, from: u64, to: u64) -> Result<MovePlan, ErrorCode>;
    fn lies_in(&self, key: &str) -> Vec<String>;
    fn copied(&self, who: u64, key: &str) -> Result<(), ErrorCode>;
    fn moved(&self, who: u64, key: &str) -> Result<(), ErrorCode>;
}

impl Copies for Rig {
    fn put_in(&self, number: u64, key: &str, len: u64) {
        let config = ReplicateConfig { preferred_segment: name(number), ..ReplicateConfig::default() };
        self.put_with(9, key, len, &config).unwrap();
    }

    fn copy(&self, who: u64, key: &str, from: u64, to: &[u64]) -> Result<CopyPlan, ErrorCode> {
        let to: Vec<String> = to.iter().map(|number| name(*number)).collect();
        let to: Vec<&str> = to.iter().map(String::as_str).collect();
        self.master.copy_start(client(who), key.as_bytes(), &name(from), &to).map_err(|e| e.code())
    }

    fn mv(&self, who: u64, key: &str, from: u64, to: u64) -> Result<MovePlan, ErrorCode> {
        self.master.move_start(client(who), key.as_bytes(), &name(from), &name(to)).map_err(|e| e.code())
    }

    fn lies_in(&self, key: &str) -> Vec<String> {
        let replicas = self.master.peek(key.as_bytes()).unwrap();
        let mut names: Vec<_> =
            replicas.iter().map(|replica| replica.location.memory().unwrap().endpoint.clone()).collect();
        names.sort();
        names
    }

    fn copied(&self, who: u64, key: &str) -> Result<(), ErrorCode> {
        self.master.replication_end(client(who), Copy, key.as_bytes()).map_err(|e| e.code())
    }

    fn moved(&self, who: u64, key: &str) -> Result<(), ErrorCode> {
        self.master.replication_end(client(who), Move, key.as_bytes()).map_err(|e| e.code())
    }
}

fn at(numbers: &[u64]) -> Vec<String> {
    numbers.iter().map(|number| segment(*number, MIB).endpoint).collect()
}

fn three() -> Rig {
    let rig = Rig::new();
    (1..=3).for_each(|number| drop(rig.mount(number, MIB)));
    rig
}

#[test]
fn a_copy_is_read_only_after_its_end() {
    let rig = three();
    rig.put_in(1, "k", 100);
    let plan = rig.copy(1, "k", 1, &[2, 1, 3, 2]).unwrap();
    assert_eq!(plan.targets.len(), 2, "one there already, one named twice");
    assert_eq!(rig.lies_in("k"), at(&[1]));
    rig.copied(1, "k").unwrap();
    assert_eq!(rig.lies_in("k"), at(&[1, 2, 3]));
    assert_eq!(rig.copied(1, "k"), Err(ObjectNoReplicationTask));
    rig.remove("k", true).unwrap();
    rig.alive_for(11.0);
    assert_eq!(rig.used(), 0);
}

#[test]
fn a_move_drops_its_source_when_readers_are_done_with_it() {
    let rig = three();
    rig.put_in(1, "k", 64 * KIB);
    rig.locate("k").unwrap();
    rig.mv(1, "k", 1, 2).unwrap();
    rig.moved(1, "k").unwrap();
    assert_eq!(rig.lies_in("k"), at(&[2]));
    let used = |number: u64| {
        let stats = rig.master.stats();
        stats.segments.iter().find(|s| s.segment.name == name(number)).unwrap().used
    };
    assert_eq!((used(1), used(2)), (64 * KIB, 64 * KIB), "somebody may be reading the old one");
    rig.alive_for(10.1);
    assert_eq!((used(1), used(2)), (0, 64 * KIB));

    // The target has the object already: nothing is to be written.
    rig.copy(1, "k", 2, &[3]).unwrap();
    rig.copied(1, "k").unwrap();
    assert_eq!(rig.mv(1, "k", 2, 3).unwrap().target, None);
    assert_eq!(rig.remove("k", true), Err(ObjectHasReplicationTask));
    rig.moved(1, "k").unwrap();
    assert_eq!(rig.lies_in("k"), at(&[3]));
}

#[test]
fn what_cannot_be_copied_is_refused_by_name() {
    let rig = three();
    assert_eq!(rig.copy(1, "absent", 1, &[2]).unwrap_err(), ObjectNotFound);
    assert_eq!(rig.copied(1, "absent"), Err(ObjectNotFound));
    rig.start(9, "unfinished", 10).unwrap();
    assert_eq!(rig.copy(1, "unfinished", 1, &[2]).unwrap_err(), ReplicaNotFound);
    rig.put_in(1, "k", 100);
    assert_eq!(rig.copy(1, "k", 2, &[3]).unwrap_err(), ReplicaNotFound);
    assert_eq!(rig.copy(1, "k", 1, &[2, 7]).unwrap_err(), SegmentNotFound);
    assert_eq!(rig.mv(1, "k", 1, 1).unwrap_err(), InvalidParams);
    let before = rig.used();
    rig.put_in(1, "large", 600 * KIB);
    rig.put_in(3, "other", 600 * KIB);
    assert_eq!(rig.copy(1, "large", 1, &[2, 3]).unwrap_err(), NoAvailableHandle);
    assert_eq!(rig.used(), before + 1200 * KIB, "what was found before is given back");
    rig.master.unmount_after(client(2), segment(2, MIB).id, Duration::from_secs(60)).unwrap();
    assert_eq!(rig.master.segment_status(segment(2, MIB).id).unwrap(), SegmentStatus::GracefullyUnmounting);
    assert_eq!(rig.copy(1, "k", 1, &[2]).unwrap_err(), UnavailableInCurrentStatus);
    // An upsert in progress makes the present value obsolete.
    rig.upsert(9, "k", 100).unwrap();
    assert_eq!(rig.copy(1, "k", 1, &[3]).unwrap_err(), ReplicaNotFound);
}

#[test]
fn what_is_being_copied_stays() {
    let rig = Rig::without_watermark();
    rig.mount(1, 64 * KIB);
    rig.mount(2, 64 * KIB);
    rig.put_in(1, "k", 64 * KIB);
    let plan = rig.copy(1, "k", 1, &[2]).unwrap();
    assert_eq!(rig.copy(1, "k", 1, &[2]).unwrap(), plan, "the response may have been lost");
    assert_eq!(rig.copy(1, "k", 1, &[2, 2]).unwrap_err(), ObjectHasReplicationTask);
    assert_eq!(rig.copy(2, "k", 1, &[2]).unwrap_err(), ObjectHasReplicationTask);
    assert_eq!(rig.mv(1, "k", 1, 2).unwrap_err(), ObjectHasReplicationTask);
    assert_eq!(rig.upsert(9, "k", 10), Err(ObjectHasReplicationTask));
    assert_eq!(rig.start(9, "k", 10), Err(ObjectAlreadyExists));
    assert_eq!(rig.remove("k", true), Err(ReplicaIsNotReady));
    assert_eq!(rig.master.remove_all(true), 0);
    rig.alive_for(11.0);
    assert_eq!(rig.start(9, "other", 64 * KIB), Err(NoAvailableHandle), "neither evicted nor overwritten");
    assert_eq!(rig.copied(2, "k"), Err(IllegalClient));
    assert_eq!(rig.moved(1, "k"), Err(InvalidParams));
    rig.master.replication_revoke(client(1), Copy, b"k").unwrap();
    assert_eq!(rig.lies_in("k"), at(&[1]));
    assert_eq!(rig.copy(1, "k", 1, &[2]).unwrap_err(), NoAvailableHandle, "late bytes may still come");
    rig.alive_for(590.0);
    rig.copy(1, "k", 1, &[2]).unwrap();
    rig.master.replication_revoke(client(1), Copy, b"k").unwrap();
    assert_eq!(rig.copy(1, "k", 1, &[2]).unwrap_err(), NoAvailableHandle);
    rig.alive_for(10.1);
    rig.copy(1, "k", 1, &[2]).unwrap();
}

#[test]
fn segments_that_go_meanwhile() {
    let rig = three();
    // One of two targets is removed.
    rig.put_in(1, "k", 100);
    rig.copy(1, "k", 1, &[2, 3]).unwrap();
    rig.master.unmount(client(2), segment(2, MIB).id).unwrap();
    rig.copied(1, "k").unwrap();
    assert_eq!(rig.lies_in("k"), at(&[1, 3]));
    // The only target is removed: a move keeps its source.
    rig.put_in(1, "l", 100);
    rig.mv(1, "l", 1, 3).unwrap();
    rig.master.unmount(client(3), segment(3, MIB).id).unwrap();
    assert_eq!(rig.moved(1, "l"), Err(ReplicaIsGone));
    assert_eq!(rig.lies_in("l"), at(&[1]));
    // The failed copy delays no caller, and another copy may begin.
    rig.mount(3, MIB);
    rig.mv(1, "l", 1, 3).unwrap();
    assert_eq!(rig.upsert(9, "l", 100).unwrap_err(), ObjectHasReplicationTask);
    rig.master.unmount(client(3), segment(3, MIB).id).unwrap();
    rig.copy(1, "l", 1, &[2]).unwrap_err();
    rig.upsert(9, "l", 100).unwrap();
    rig.end(9, "l").unwrap();
    assert_eq!(rig.moved(1, "l"), Err(ReplicaIsGone), "it hears of it still");
    assert_eq!(rig.moved(1, "l"), Err(ObjectNoReplicationTask));
    // The source is removed: no value is left to copy.
    rig.mount(4, MIB);
    rig.copy(1, "l", 1, &[4]).unwrap();
    rig.master.unmount(client(1), segment(1, MIB).id).unwrap();
    assert_eq!(rig.copied(1, "l"), Err(ObjectNotFound));
    rig.alive_for(601.0);
    assert_eq!((rig.used(), rig.master.stats().keys), (0, 0));
}

#[test]
fn an_abandoned_copy_is_taken_back() {
    let rig = three();
    rig.put_in(1, "k", 100);
    rig.put_in(1, "l", 100);
    let used = rig.used();
    rig.copy(1, "k", 1, &[2]).unwrap();
    rig.alive_for(300.0);
    rig.copy(1, "l", 1, &[2]).unwrap();
    assert!(rig.used() > used);
    rig.alive_for(301.0);
    assert_eq!(rig.copied(1, "k"), Err(ObjectNoReplicationTask));
    rig.copied(1, "l").unwrap();
    rig.remove("k", false).unwrap();
}

fn fetched(rig: &Rig, who: u64) -> Vec<Task> {
    rig.master.fetch_tasks(client(who), 16)
}

fn status(rig: &Rig, task: Uuid) -> (TaskStatus, String) {
    let info = rig.master.task(task).unwrap();
    (info.status, info.message)
}

#[test]
fn a_task_goes_to_the_owner_of_the_source() {
    let rig = three();
    rig.put_in(1, "k\"é", 100);
    let copy = rig.master.create_copy("k\"é".as_bytes(), &[&name(2), &name(3)]).unwrap();
    let mv = rig.master.create_move("k\"é".as_bytes(), &name(1), &name(2)).unwrap();
    assert_eq!(status(&rig, copy).0, TaskStatus::Pending);
    assert!(fetched(&rig, 2).is_empty());
    let tasks = fetched(&rig, 1);
    assert_eq!(tasks.iter().map(|t| (t.id, t.kind)).collect::<Vec<_>>(), [(copy, Copy), (mv, Move)]);
    let payload: serde_json::Value = serde_json::from_str(&tasks[0].payload).unwrap();
    assert_eq!(
        payload,
        serde_json::json!({
            "tenant_id": "default", "key": "k\"é", "source": name(1), "targets": [name(2), name(3)],
            "dynamic_replication_lease_id_high": 0, "dynamic_replication_lease_id_low": 0,
            "dynamic_replication_version_epoch": 0,
        })
    );
    let payload: serde_json::Value = serde_json::from_str(&tasks[1].payload).unwrap();
    let expected = serde_json::json!({
        "tenant_id": "default", "key": "k\"é", "source": name(1), "target": name(2),
    });
    assert_eq!(payload, expected);
    assert!(fetched(&rig, 1).is_empty(), "once");
    assert_eq!(status(&rig, copy).0, TaskStatus::Processing);

    let report = |who, status| {
        let report = TaskReport { id: copy, status, message: "said so".into() };
        rig.master.complete_task(client(who), &report).map_err(|e| e.code())
    };
    assert_eq!(report(2, TaskStatus::Success), Err(IllegalClient));
    assert_eq!(report(1, TaskStatus::Processing), Err(InvalidParams));
    assert_eq!(report(1, TaskStatus::Success), Ok(()));
    assert_eq!(report(1, TaskStatus::Failed), Ok(()), "repeated; what was said first counts");
    assert_eq!(status(&rig, copy), (TaskStatus::Success, "said so".into()));
    assert_eq!(rig.master.task(Uuid::new(1, 1)).unwrap_err().code(), TaskNotFound);
}

#[test]
fn tasks_that_cannot_be_done_are_not_made() {
    let rig = three();
    rig.put_in(1, "k", 100);
    let copy = |key: &[u8], targets: &[&str]| rig.master.create_copy(key, targets).unwrap_err().code();
    assert_eq!(copy(b"k", &[]), InvalidParams);
    assert_eq!(copy(b"k", &["elsewhere"]), InvalidParams);
    assert_eq!(copy(b"\xff", &[&name(2)]), InvalidParams);
    assert_eq!(copy(b"absent", &[&name(2)]), ObjectNotFound);
    let mv = |key: &[u8], from: &str, to: &str| rig.master.create_move(key, from, to).unwrap_err().code();
    assert_eq!(mv(b"k", &name(1), &name(1)), InvalidParams);
    assert_eq!(mv(b"k", &name(2), &name(1)), InvalidParams);
    assert_eq!(mv(b"k", &name(1), "elsewhere"), InvalidParams);
    assert_eq!(mv(b"absent", &name(1), &name(2)), ObjectNotFound);
    rig.master.unmount_after(client(2), segment(2, MIB).id, Duration::from_secs(60)).unwrap();
    assert_eq!(copy(b"k", &[&name(2)]), UnavailableInCurrentStatus);
}

#[test]
fn tasks_end_by_themselves_and_are_forgotten() {
    let tasks = TaskOptions { max_pending: 2, max_processing: 1, max_finished: 2, ..TaskOptions::default() };
    let rig = Rig::with(MasterOptions { tasks, ..MasterOptions::default() });
    rig.mount(1, MIB);
    rig.mount(2, MIB);
    rig.put_in(1, "k", 100);
    let create = || rig.master.create_copy(b"k", &[&name(2)]).map_err(|e| e.code());
    let (first, second) = (create().unwrap(), create().unwrap());
    assert_eq!(create(), Err(TaskPendingLimitExceeded));
    assert_eq!(fetched(&rig, 1).len(), 1, "one at a time");
    let third = create().unwrap();
    rig.alive_for(301.0);
    assert_eq!(rig.master.task(second).unwrap_err().code(), TaskNotFound, "the first of three to be over");
    assert_eq!(status(&rig, third), (TaskStatus::Failed, "pending timeout".into()));
    assert_eq!(status(&rig, first), (TaskStatus::Failed, "processing timeout".into()));
    let fourth = create().unwrap();
    assert_eq!(fetched(&rig, 1).len(), 1);
    rig.alive_for(301.0);
    assert_eq!(status(&rig, fourth), (TaskStatus::Failed, "processing timeout".into()));
    // A later report of the end does not count.
    let late = TaskReport { id: fourth, status: TaskStatus::Success, message: String::new() };
    rig.master.complete_task(client(1), &late).unwrap();
    assert_eq!(status(&rig, fourth).0, TaskStatus::Failed);
    assert_eq!(create().map(drop), Ok(()));
}

#[test]
fn replicas_have_numbers_of_their_own() {
    let rig = three();
    rig.put_in(1, "k", 100);
    let plan = rig.copy(1, "k", 1, &[2, 3]).unwrap();
    let mut ids: Vec<ReplicaId> = plan.targets.iter().map(|r| r.id).chain([plan.source.id]).collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 3);
    let config = ReplicateConfig::default();
    assert_eq!(rig.start_with(9, "k", 1, WriteMode::Upsert, &config), Err(ObjectHasReplicationTask));
}
